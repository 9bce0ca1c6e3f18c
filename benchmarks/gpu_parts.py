"""The parts of gpu_check.py, each for a process of its own.

python benchmarks/gpu_parts.py resume ppo                        # killed and resumed: the parameters of a whole run?
python benchmarks/gpu_parts.py match ppg --device cuda           # losses and gradients in float32: the CPU's?
python benchmarks/gpu_parts.py throughput ppo cudagraphs 256x2   # speed with 256 environments in two groups
python benchmarks/gpu_parts.py profile ppg                       # PyTorch's profile of an auxiliary phase
python benchmarks/gpu_parts.py runs impala                       # a run in the fastest configuration measured
"""

import csv
import importlib
import math
import multiprocessing
import os
import shlex
import signal
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import readme
import throughput
from common.device import resolve_device
from common.errors import InputError, TrainingError
from common.files import read_json, write_json
from common.provenance import command, provenance
from common.run import Run
from common.settings import Positive, check_limits
from common.signals import one_line_errors
from common.world import World

UPDATES, KILLED_IN = 6, 4  # of the runs in `resume`
TOLERANCE = 1e-4  # of `match`, for values that the CPU's two ways to compute a convolution give alike
TRACE = 8 * 2**20  # bytes of a trace that are worth copying back


@dataclass
class Common:
    out: Path = Path("runs", "gpu_check")
    """folder of results, logs, profiles and runs"""
    device: str = "auto"
    """auto, cpu or cuda"""
    total_timesteps: Positive[int] = 25_000_000
    """environment steps of `runs`"""
    rehearse: bool = False
    """tiny sizes, on a CPU"""


@dataclass
class Args(Common):
    part: tyro.conf.Positional[tuple[str, ...]] = ("",)
    """a step of gpu_check.py, a script, and for throughput a configuration and environments x groups of them"""


def run_args(args: Common, algorithm: str, **settings: Any) -> Any:
    """A script's settings, with tiny sizes in a rehearsal."""
    tiny = {"num_envs": 4, "num_steps": 4, "num_minibatches": 1} | ({"batch_size": 4} if algorithm == "impala" else {})
    return importlib.import_module(algorithm).Args(device=args.device, **(tiny if args.rehearse else {}) | settings)


def resume(args: Common, algorithm: str) -> None:
    script = importlib.import_module(algorithm)
    one_thread = {"num_actors": 0} if algorithm == "impala" else {}
    with tempfile.TemporaryDirectory() as folder:
        whole = run_args(args, algorithm, checkpoint_interval=0, runs_dir=f"{folder}/whole", **one_thread)
        whole.total_timesteps = UPDATES * whole.iteration_steps
        broken = replace(whole, runs_dir=f"{folder}/broken")
        process = multiprocessing.get_context("spawn").Process(target=die_in_update, args=(algorithm, broken))
        process.start()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            raise TrainingError(f"the run to be killed in update {KILLED_IN} ended with {process.exitcode}")
        (path,) = Path(broken.runs_dir).iterdir()
        paths = script.main(whole), script.main(replace(broken, resume=str(path)))
        expected, found = (torch.load(each / "model.pt", weights_only=True)["agent"] for each in paths)
        step = read_json(path / "meta.json")["resumed"][0]["step"]
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    print(f"{algorithm}: resumed at step {step:,} of {whole.total_timesteps:,}; {len(expected)} parameters compared")
    if different:
        raise TrainingError(f"parameters of the resumed run differ: {', '.join(different)}")


def die_in_update(algorithm: str, args: Any) -> None:
    """Make a run that is killed in the middle of an iteration."""
    script, calls = importlib.import_module(algorithm), []
    update = script.update

    def fatal_update(*arguments: Any) -> Any:
        calls.append("update")
        if len(calls) == KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(*arguments)

    script.update = fatal_update
    script.main(args)


def match(args: Common, algorithm: str) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    device, cpu, shape = resolve_device(args.device), torch.device("cpu"), (4, 4) if args.rehearse else (32, 16)
    expected, found = learn(algorithm, cpu, shape), learn(algorithm, device, shape)
    with torch.backends.mkldnn.flags(enabled=False):  # another way to round: it turns some ReLUs on or off
        other = learn(algorithm, cpu, shape)
    wrong = []
    for name, value in expected.items():
        ours, cpus = (((each[name].cpu() - value).norm() / value.norm()).item() for each in (found, other))
        print(f"{algorithm} {name}: {device} differs from cpu by {ours:.1e}, cpu's other convolutions by {cpus:.1e}")
        wrong += [name] * (not ours <= max(TOLERANCE, 10 * cpus))
    if wrong:
        raise TrainingError(f"{', '.join(wrong)}: {device} differs too much from the CPU")


def learn(algorithm: str, device: torch.device, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Losses and whole gradient of an update in one minibatch, and of PPG's auxiliary phase, from random experience."""
    script, space, actions = importlib.import_module(algorithm), gym.spaces.Box(0, 255, (64, 64, 3), np.uint8), 15
    one_pass = {"ppo": {"update_epochs": 1}, "ppg": {"e_aux": 1, "num_aux_rollouts": shape[1]}, "impala": {}}[algorithm]
    one_pass |= {"sample_fraction": 1.0} if algorithm == "impala" else {}
    sizes = {"num_steps": shape[0], "num_envs": shape[1], "num_minibatches": 1}
    args = script.Args(precision="fp32", max_grad_norm=None, **sizes, **one_pass)
    torch.manual_seed(0)
    agent = script.Agent(space, gym.spaces.Discrete(actions), args)
    batch_type = script.Unroll if algorithm == "impala" else script.Rollout
    experience = {
        "obs": torch.randint(0, 256, (shape[0] + (algorithm == "impala"), shape[1], *space.shape), dtype=torch.uint8),
        "actions": torch.randint(0, actions, shape),
        "logprobs": 0.1 * torch.randn(shape) - math.log(actions),  # near those of a new policy
        "values": torch.randn(shape),
        "rewards": torch.randn(shape),
        "dones": (torch.rand(shape) < 0.1).float(),
        "truncation_values": torch.zeros(shape),
        "state": agent.initial_state(shape[1]) if algorithm == "impala" else None,
    }
    batch = batch_type(**{name: experience[name].to(device) for name in batch_type._fields})
    advantages, returns = torch.randn(2, *shape).to(device)
    optimizer, found = torch.optim.SGD(agent.to(device).parameters(), lr=0.0), {}

    def keep(metrics: dict[str, torch.Tensor], phase: str = "") -> None:
        """Neither shares, which rounding can decide, nor a policy's divergence from itself."""
        losses = {tag: x for tag, x in metrics.items() if tag.endswith(("loss", "entropy")) and "kl" not in tag}
        gradients = [each.grad.flatten() for each in agent.parameters() if each.grad is not None]
        found.update(losses | {f"gradient{phase}": torch.cat(gradients)})

    if algorithm == "impala":
        keep(script.update(agent, optimizer, batch, args, World()))
    else:
        optimizers = optimizer if algorithm == "ppo" else (optimizer, optimizer)
        keep(script.update(agent, optimizers, batch, advantages, returns, args, World()))
    if algorithm == "ppg":
        phase = SimpleNamespace(obs=batch.obs[None], returns=returns[None])
        keep(script.auxiliary_phase(agent, optimizer, phase, args, str, World()), " of the auxiliary phase")
    return found


def measure(args: Common, algorithm: str, configuration: str, env_groups: str) -> None:
    """Add a row to the CSV of throughput."""
    job = {"algorithm": algorithm, "configuration": configuration, "sweep": "env_groups", "value": env_groups}
    job |= {"repeat": 0, "env_id": "starpilot", "device": args.device}
    job |= {"num_steps": 16, "iterations": 1} if args.rehearse else {"num_steps": 256, "iterations": 4}
    if args.rehearse:
        throughput.MATMUL_SIZES = {"cpu": (256,)}
    row, path = throughput.measure(job), measurements(args)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        meta = provenance("python benchmarks/gpu_check.py", "benchmarks/gpu_check.py", resolve_device(args.device))
        write_json(path.with_suffix(".meta.json"), meta)
        path.write_text(",".join(throughput.COLUMNS) + "\n")
    with path.open("a", newline="") as file:
        csv.DictWriter(file, throughput.COLUMNS, restval="").writerow(row)


def profile(args: Common, algorithm: str) -> None:
    """Profile the second iteration of PPO, or auxiliary phase of PPG, with short rollouts: the trace is large."""
    script, settings = importlib.import_module(algorithm), run_args(args, algorithm)
    throughput.shorten(algorithm, settings, num_steps=4 if args.rehearse else 32, iterations=1)
    name = "collect" if algorithm == "ppo" else "auxiliary_phase"
    begin, log, profiler, calls = getattr(script, name), Run.log, torch.profiler.profile(), []

    def watched(*arguments: Any) -> Any:
        calls.append(name)
        if len(calls) == 2:
            profiler.start()
        return begin(*arguments)

    def watched_log(*arguments: Any) -> None:
        log(*arguments)
        if len(calls) == 2:
            throughput.synchronize(resolve_device(args.device))
            profiler.stop()

    Run.log = watched_log
    setattr(script, name, watched)
    with tempfile.TemporaryDirectory() as folder:
        script.main(replace(settings, runs_dir=folder))
    trace = args.out / "profile" / f"{algorithm}.json.gz"
    trace.parent.mkdir(parents=True, exist_ok=True)
    order = f"self_{resolve_device(args.device).type}_time_total"
    table = profiler.key_averages().table(order, row_limit=40, max_name_column_width=80)
    trace.with_name(f"{algorithm}.txt").write_text(table)
    profiler.export_chrome_trace(str(trace))
    if trace.stat().st_size > TRACE:
        print(f"note: the trace takes {trace.stat().st_size / 2**20:.0f} MiB and is dropped")
        trace.unlink()


def fastest(path: Path, algorithm: str) -> dict[str, Any]:
    """The settings of the fastest configuration in the CSV of throughput."""
    rows = [row for row in read_rows(path) if row["algorithm"] == algorithm]
    if not rows:
        raise InputError(f"{path} has no speed of {algorithm}: add throughput to --steps.")
    best = max(rows, key=lambda row: float(row["steps_per_second"]))
    settings = throughput.fast_settings(algorithm, best["configuration"], best["value"])
    if algorithm != "impala":  # minibatches of the size that they have by default
        settings["num_minibatches"] = max(1, 8 * settings["num_envs"] // 64)
    return settings


def run(args: Common, algorithm: str) -> None:
    """Become a run of a script, or go on with it."""
    settings = fastest(measurements(args), algorithm) | {"total_timesteps": args.total_timesteps, "resume": "auto"}
    settings |= {"runs_dir": str(args.out / "runs"), "checkpoint_interval": 1.0, "keep_checkpoints": 1}
    words = shlex.split(command(run_args(args, algorithm, **settings), f"{algorithm}.py"))
    print(shlex.join(words), flush=True)
    os.execv(sys.executable, [sys.executable, *words[1:]])


PARTS = {"resume": resume, "match": match, "throughput": measure, "profile": profile, "runs": run}


def measurements(args: Common) -> Path:
    return readme.measurement_path(args.out / "throughput", args.device)


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main(args: Args) -> None:
    check_limits(args)
    step, *words = args.part
    if step not in PARTS:
        raise InputError(f"the part {step!r} is not known: use one of {', '.join(PARTS)}.")
    args = replace(args, out=args.out.expanduser().resolve(), device="cpu" if args.rehearse else args.device)
    PARTS[step](args, *words)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
