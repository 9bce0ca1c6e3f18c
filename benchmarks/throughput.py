"""Steps per second of the three scripts, against a plain implementation and against what the machine can do.

    python benchmarks/throughput.py                       # the table: 50 minutes on two cores

Each measurement is a run of a script's own `main` on starpilot, in a process of its own, with clocks around functions.
Configurations take turns (A B C A B C ...). Rollouts are shorter than by default (`--num-steps`), minibatches are not.

Configurations of the encoder (all else is the same):

    plain                  float32, whole minibatches, contiguous (NCHW) frames, PyTorch's max-pooling, malloc as it is
    plain+malloc           the same with the allocator settings that `accelerate` makes
    plain+malloc+permuted  the same, but frames are only permuted, not copied: what CleanRL's scripts do
    fp32                   the script with --precision fp32
    default                the script with --precision auto --accelerate eager
    compile, cudagraphs    the default with --accelerate compile or cudagraphs (measured only if asked for)

Writes `<cpu or gpu>.csv` (a row a measurement), `.meta.json` and `.md` (the table) in `results/throughput/`.
"""

import concurrent.futures
import contextlib
import csv
import importlib
import io
import itertools
import multiprocessing
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(1, str(Path(__file__).parent.parent))  # after the folder of curves.py and others
import readme
from common import InputError, TrainingError
from common.device import resolve_device, resolve_precision
from common.envs import Envs
from common.run import Run, provenance, write_atomically, write_json
from common.session import one_line_errors
from common.settings import Positive, check_limits, read_json

CONFIGURATIONS = ("plain", "plain+malloc", "plain+malloc+permuted", "fp32", "default")
ACCELERATED = ("compile", "cudagraphs")
PHASES = ("act", "env", "learn", "aux")
COLUMNS = ["algorithm", "configuration", "repeat", "sweep", "precision", "steps_per_second"]
COLUMNS += [*(f"{phase}_us" for phase in (*PHASES, "wait")), "matmul_gflops", "learn_share_of_matmul"]
COLUMNS += ["aux_share_of_matmul", "share_of_matmul", "peak_gb"]


@dataclass
class Args:
    algorithms: tuple[Literal["ppo", "ppg", "impala"], ...] = ("ppo", "ppg", "impala")
    """scripts to measure"""
    configurations: tuple[Literal[*CONFIGURATIONS, *ACCELERATED], ...] = CONFIGURATIONS
    """what to compare; see above"""
    device: str = "auto"
    """auto, cpu or cuda"""
    repeats: Positive[int] = 3
    """measurements of each configuration, in turn"""
    num_steps: Positive[int] = 32
    """steps of each environment in an iteration"""
    memory: bool = True
    """also measure the default configuration's peak memory at its default sizes"""
    from_csv: bool = False
    """measure nothing: make the table from the CSV that is there"""
    update_readme: bool = False
    """also put the table into benchmarks/README.md"""
    out: Path = Path(__file__).parent / "results" / "throughput"
    """where CSV and table go"""


def shorten(algorithm: str, args: Any, num_steps: int, iterations: int) -> None:
    """Set shorter rollouts in minibatches of the same size, and steps for a warm-up and `iterations` more. PPG's
    phases are as short as a batch of their auxiliary phase allows: a step costs what it does in a full phase."""
    shorter = num_steps / args.num_steps
    args.num_minibatches = max(1, round(args.num_minibatches * shorter))
    iteration = num_steps * (args.batch_size if algorithm == "impala" else args.num_envs)
    if algorithm == "ppg":
        args.num_aux_rollouts = round(args.num_aux_rollouts / shorter)
        args.n_pi = max(1, args.num_aux_rollouts // args.num_envs)
        iteration *= args.n_pi
    args.num_steps = num_steps
    args.total_timesteps = (1 + iterations) * iteration


def configure(job: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The script's module, its settings, and the device. Plain configurations change modules of this process."""
    script, configuration = importlib.import_module(job["algorithm"]), job["configuration"]
    mode = configuration if configuration in ACCELERATED else "eager"
    args = script.Args(device=job["device"], accelerate=mode)
    device = resolve_device(args.device)
    args.precision = resolve_precision("auto" if configuration in ("default", *ACCELERATED) else "fp32", device)
    if configuration.startswith("plain"):
        args.micro_batch_size = 2**30
        fast = sys.modules[script.accelerate.__module__]
        script.accelerate = lambda agent, mode: None if configuration == "plain" else fast.keep_freed_memory()
        if not configuration.endswith("permuted"):
            script.ImpalaCNN.forward = lambda cnn, x: cnn.layers((x.permute(0, 3, 1, 2).float() / 255).contiguous())
    return script, args, device


def peak_memory(device: Any) -> float:
    """The most memory that this process has had, in GB: resident on a CPU, allocated by PyTorch on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9


def matmul_rate(device: Any, dtype: Any) -> float:
    """FLOP/s of the best of some matrix products."""
    best, torch.backends.cuda.matmul.allow_tf32 = 0.0, True  # as convolutions do by default
    for size in {"cpu": (2048, 4096), "cuda": (4096, 8192)}[device.type]:
        a, b, product = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
        for _ in range(8):
            synchronize(device)
            start = time.perf_counter()
            torch.mm(a, b, out=product)
            synchronize(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def synchronize(device: Any) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def flops_per_frame(script: Any, args: Any) -> tuple[int, int]:
    """Multiplications and additions for one frame: in a forward pass, and in a forward and a backward pass."""
    agent = script.Agent(gym.spaces.Box(0, 255, (64, 64, 3), np.uint8), gym.spaces.Discrete(15), args)
    with FlopCounterMode(display=False) as counter:  # not accelerated: the counter does not know our kernels
        features = agent.encode(agent.encoder, torch.zeros(1, 64, 64, 3, dtype=torch.uint8))
        outputs = agent.policy_head(features).sum() + agent.value_head(features).sum()
        forward = counter.get_total_flops()
        outputs.backward()
    return forward, counter.get_total_flops()


def clock(function: Any, seconds: dict[str, float], phase: str, device: Any = None) -> Any:
    """`function`, whose time is added to `seconds[phase]`: with `device`, until its work there is done, too."""

    def clocked(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        synchronize(device)
        seconds[phase] += time.perf_counter() - start
        return result

    return clocked


def set_clocks(script: Any, seconds: dict[str, float], marks: list, device: Any) -> None:
    """Put clocks around a script's functions, and a mark at the end of each iteration: the step, the time, and the
    seconds of the clocks so far. Changes modules of this process."""
    log = Run.log

    def marked_log(run, step, *args, **kwargs):
        log(run, step, *args, **kwargs)
        synchronize(device)
        marks.append((step, time.perf_counter(), dict(seconds)))

    Run.log = marked_log
    Envs.step = clock(Envs.step, seconds, "env")
    script.update = clock(script.update, seconds, "learn", device)
    if script.__name__ == "impala":
        act = script.act
        script.act = lambda *arguments: iter(clock(act(*arguments).__next__, seconds, "collect"), object())  # endless
    else:
        script.collect = clock(script.collect, seconds, "collect", device)
    if script.__name__ == "ppg":
        script.auxiliary_phase = clock(script.auxiliary_phase, seconds, "aux", device)


def run_briefly(script: Any, args: Any) -> None:
    """Run a script, in a folder that goes, and drop what it prints about its progress."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args.runs_dir = folder
        script.main(args)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run one script in one configuration; return what it took, per step. For a process of its own."""
    script, args, device = configure(job)
    shorten(job["algorithm"], args, job["num_steps"], 1 if job["configuration"].startswith("plain") else 4)
    if job["algorithm"] == "impala":
        args.log_interval = args.batch_size * args.num_steps
    marks = []
    set_clocks(script, defaultdict(float), marks, device)
    run_briefly(script, args)
    (first, start, before), (last, end, after) = marks[getattr(args, "n_pi", 1) - 1], marks[-1]
    steps = last - first
    seconds = {phase: after.get(phase, 0.0) - before.get(phase, 0.0) for phase in ("collect", "env", "learn", "aux")}
    seconds["act"] = seconds.pop("collect") - seconds["env"]
    learner = seconds["learn"] if getattr(args, "num_actors", 0) else sum(seconds.values())
    seconds["wait"] = end - start - learner  # for actors, if there are any, and for all that has no clock
    forward, training = flops_per_frame(script, args)
    learn, aux = training * getattr(args, "update_epochs", 1), 0
    if job["algorithm"] == "impala":
        learn = forward * (args.num_steps + 1) / args.num_steps + args.sample_fraction * training
    elif job["algorithm"] == "ppg":
        learn, aux = args.e_policy * training, args.e_aux * training + forward
    peak = matmul_rate(device, torch.bfloat16 if args.precision == "bf16" else torch.float32)
    return {
        **job,
        "precision": args.precision,
        "steps_per_second": steps / (end - start),
        **{f"{phase}_us": seconds[phase] / steps * 1e6 for phase in (*PHASES, "wait")},
        "matmul_gflops": peak / 1e9,
        "learn_share_of_matmul": learn * steps / seconds["learn"] / peak,
        "aux_share_of_matmul": aux * steps / seconds["aux"] / peak if aux else "",
        "share_of_matmul": (forward + learn + aux) * steps / (end - start) / peak,
        "peak_gb": peak_memory(device),
    }


def measure_memory(job: dict[str, Any]) -> dict[str, Any]:
    """Peak memory in GB of a script at its default sizes, in an iteration or PPG's phase. For a process of its own."""
    script, args, device = configure(job)
    args.total_timesteps = args.iteration_steps * getattr(args, "n_pi", 1)
    if job["algorithm"] == "ppg":
        args.e_aux = 1  # further passes need no more memory
    run_briefly(script, args)
    return job | {"precision": args.precision, "peak_gb": peak_memory(device)}


def alone(function: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Call `function(job)` in a fresh process, so that allocator settings, patches and peak memory are its own."""
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, job).result()


def run_all(args: Args, file: IO[str]) -> None:
    """All measurements, in turn: a row of CSV and a line on the screen each. Raises TrainingError if any has failed."""
    turns = list(itertools.product([measure], args.algorithms, range(args.repeats), args.configurations))
    if args.memory and "default" in args.configurations:
        turns += [(measure_memory, algorithm, 0, "default") for algorithm in args.algorithms]
    given = {"device": args.device, "num_steps": args.num_steps}
    writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore")
    writer.writeheader()
    failed = []
    for number, (function, algorithm, repeat, configuration) in enumerate(turns, 1):
        sweep = "memory" if function is measure_memory else ""
        what = f"[{number}/{len(turns)}] {algorithm} {configuration} {sweep}".rstrip()
        job = {"algorithm": algorithm, "configuration": configuration, "repeat": repeat, "sweep": sweep}
        try:
            row = alone(function, given | job)
        except Exception as error:  # killed for its memory, say: the others still count
            print(f"{what}: failed ({error!r})", flush=True)
            failed.append(what)
            continue
        writer.writerow(row)
        file.flush()
        speed = f"{row['steps_per_second']:.0f} steps/s, " if "steps_per_second" in row else ""
        print(f"{what}: {speed}{row['peak_gb']:.2f} GB", flush=True)
    if failed:
        raise TrainingError(f"{', '.join(failed)} failed, for the reasons above: --from-csv makes a table of the rest.")


def spread(values: list[float], digits: int = 0) -> str:
    """Median [minimum, maximum]."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row[name] != ""]


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: a row for each algorithm and configuration; medians, and minimum and maximum in brackets."""
    groups, cells = defaultdict(list), []
    for row in rows:
        groups[row["algorithm"], row["configuration"], row["sweep"]].append(row)
    for algorithm, configuration in [key[:2] for key in groups if not key[2]]:
        group, peaks = groups[algorithm, configuration, ""], groups.get((algorithm, configuration, "memory"), [])
        row = [f"{readme.label(algorithm)} {configuration}", spread(column(group, "steps_per_second"))]
        for other in ("plain", "plain+malloc"):  # in the same round
            base = {each["repeat"]: float(each["steps_per_second"]) for each in groups.get((algorithm, other, ""), [])}
            ratios = [float(run["steps_per_second"]) / base[run["repeat"]] for run in group if run["repeat"] in base]
            row.append(spread(ratios, 2) if ratios else "-")
        row += [f"{statistics.median(column(group, f'{phase}_us')):.0f}" for phase in PHASES]
        shares = [column(group, f"{part}share_of_matmul") for part in ("learn_", "aux_", "")]
        row.append(", ".join(f"{statistics.median(share):.0%}" if share else "-" for share in shares))
        cells.append([*row, f"{float(peaks[0]['peak_gb']):.2f}" if peaks else "-"])
    columns = ["", "steps/s", "x plain", "x plain+malloc", *PHASES, "learn, aux, all of matmul", "GB"]
    return "\n".join(readme.markdown(columns, cells)) + "\n"


def main(args: Args) -> None:
    check_limits(args)
    on_gpu = args.device.startswith("cuda") or resolve_device(args.device).type == "cuda"  # which need not be here
    path = args.out / ("gpu.csv" if on_gpu else "cpu.csv")
    if not args.from_csv:
        device = resolve_device(args.device)
        command = shlex.join(["python", "benchmarks/throughput.py", *sys.argv[1:]])
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(path.with_suffix(".meta.json"), provenance(command, "benchmarks/throughput.py", device))
        path.unlink(missing_ok=True)  # it may be a link
        with path.open("x", newline="") as file:
            run_all(args, file)
    meta = read_json(path.with_suffix(".meta.json"))
    rows = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    if not meta or not rows or any(None in row.values() for row in rows):  # None: the row is cut
        raise InputError(f"{path} and its .meta.json are not there, or not whole: leave --from-csv out to measure.")
    origin = f"Measured on {meta['machine']}, commit {str(meta['commit'])[:10]}: `{meta['command'].strip()}`."
    text = f"{table(rows)}\n{origin}\n"
    write_atomically(path.with_suffix(".md"), text.encode())
    print(f"\n{text}\n{path} and .md are written.")
    if args.update_readme:
        readme.fill(readme.DOCUMENTS, f"throughput {path.stem}", text)


if __name__ == "__main__":
    with one_line_errors(OSError):
        main(tyro.cli(Args, description=__doc__))
