"""The scripts in benchmarks/."""

import csv
import importlib
import inspect
import json
import os
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import gymnasium as gym
import numpy as np
import pytest
import torch

import collect
import convert
import evaluate
import exploration
import gpu_check
import gpu_parts
import ppo
import precision
import random_policy
import readme
import run as launcher
import scaling
import throughput
from common import InputError, device, session
from common.run import Run
from common.settings import flag, parse
from fast import Fork, run_script, small_networks
from helpers import read_csv, small_args
from ranks import Ranks


def test_collect_copies_a_curve_and_its_origin(tmp_path):
    results = tmp_path / "results"
    sizes = {"num_steps": 2, "total_timesteps": 16}
    args = small_args(ppo, tmp_path / "runs", sizes, env_id="maze", num_levels=200, seed=3)
    with small_networks():
        run_dir = ppo.main(args)
    target = collect.collect(run_dir, results)
    assert target == results / "easy-200" / "ppo" / "maze" / "seed3.csv"
    rows = read_csv(target)
    assert [row["step"] for row in rows] == ["8", "16"]
    assert float(rows[-1]["seconds"]) == json.loads((target.parent / "seed3.meta.json").read_text())["seconds"]
    assert "--num-levels 200" in json.loads((target.parent / "seed3.meta.json").read_text())["command"]
    assert collect.collect(run_dir, results) == target  # the same run again changes nothing
    curve = (run_dir / "progress.csv").read_text()
    (run_dir / "progress.csv").write_text(curve.replace("\n16,", "\n17,"))
    with pytest.raises(InputError, match=r"seed3\.csv holds another run"):
        collect.collect(run_dir, results)
    (run_dir / "progress.csv").write_text(curve[: curve.index("\n16,")])
    with pytest.raises(InputError, match="8 of 16 steps"):
        collect.collect(run_dir, results)
    (run_dir / "progress.csv").write_text(curve)
    meta = (run_dir / "meta.json").read_text()
    killed = json.loads(meta) | {"finished": None}  # in its last evaluation
    (run_dir / "meta.json").write_text(json.dumps(killed))
    with pytest.raises(InputError, match="let it end first"):
        collect.collect(run_dir, results)
    stopped, part = tmp_path / "stopped", curve[: curve.index("16,")]
    (run_dir / "progress.csv").write_text(part)
    collect.collect(run_dir, stopped, unfinished=True)
    assert json.loads((stopped / "easy-200/ppo/maze/seed3.meta.json").read_text())["stopped_at"] == 8
    (run_dir / "progress.csv").write_text(curve)
    (run_dir / "meta.json").write_text(meta)
    collect.collect(run_dir, stopped, unfinished=True)  # the run has gone on
    assert (stopped / "easy-200/ppo/maze/seed3.csv").read_text() == curve
    assert "stopped_at" not in json.loads((stopped / "easy-200/ppo/maze/seed3.meta.json").read_text())
    (run_dir / "progress.csv").write_text(part)
    with pytest.raises(InputError, match=r"seed3\.csv holds another run"):  # not the shorter for the longer
        collect.collect(run_dir, stopped, unfinished=True)
    for name in ("meta.json", "args.json"):
        (run_dir / name).unlink()
        with pytest.raises(InputError, match=f"is no run folder: it has no readable {name}"):
            collect.collect(run_dir, results)


@pytest.mark.parametrize(("exp_name", "folder"), [("../../..", "..-..-.."), ("..", "-"), ("", "-"), ("a/b.5", "a-b.5")])
def test_collect_stays_among_the_results(exp_name, folder, tmp_path, monkeypatch):
    results = tmp_path / "results"
    args = {"distribution_mode": "easy", "num_levels": 0, "exp_name": exp_name, "env_id": "maze", "seed": 1}
    monkeypatch.setattr(collect, "finished_run", lambda run_dir: (args, {"command": "python ppo.py"}, "curve"))
    assert collect.collect(tmp_path, results) == results / "easy-all" / folder / "maze" / "seed1.csv"


def test_collect_compares_what_makes_a_run():
    """Not where it was run, on what, or what a resumed run may change."""
    plain = "python ppo.py --env-id maze --learning-rate 1e-4 --total-timesteps 100"
    same = "python ppo.py --seed 3 --total-timesteps 100 --device cuda:1 --no-torch-deterministic --env-id maze "
    same += "--learning-rate 1e-4 --checkpoint-interval 0.5 --wandb-project-name 'a b' --track"
    assert collect.same_settings(plain) == collect.same_settings(same)
    others = plain.replace("1e-4", "1e-5"), plain.replace("100", "200"), plain + " --anneal-lr", plain[:-22]
    for other in (*others, plain.replace("ppo.py", "ideas/ppo.py")):
        assert collect.same_settings(other) != collect.same_settings(plain)


LIMITED = [convert, evaluate, exploration, gpu_check, gpu_parts, launcher, random_policy, scaling, throughput]
MAY_BE_0 = {(evaluate, "seed"), (random_policy, "seed"), (launcher, "slurm_gpus"), (throughput, "repeats")}


@pytest.mark.parametrize("module", LIMITED, ids=lambda module: module.__name__)
def test_numbers_and_choices_have_limits(module):
    """Which `main` checks before all else. The limits themselves: tests/test_session.py."""
    required, tried = [Path() for field in fields(module.Args) if field.default is MISSING], 0
    for name, hint in get_type_hints(module.Args).items():
        if kind := re.search(r"\b(int|float|Literal)\b", str(hint)):
            args, least = module.Args(*required), -1 if (module, name) in MAY_BE_0 else 0
            given, value = getattr(args, name), "other" if kind[1] == "Literal" else least
            setattr(args, name, (*given[:-1], value) if isinstance(given, tuple) else value)
            with pytest.raises(InputError, match=f"^{flag(name)} {value} (cannot work|is not known)"):
                module.main(args)
            tried += 1
    assert tried


def test_every_script_says_an_error_in_one_line():
    for path in Path(throughput.__file__).parent.glob("*.py"):
        _, guard, rest = path.read_text().partition('\nif __name__ == "__main__":\n')
        assert not guard or rest.startswith("    with one_line_errors():\n"), path


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "TestBits-v0", "fruitbot"])
def test_random_actions_of_any_kind(env_id, capsys):
    random_policy.main(random_policy.Args(env_ids=(env_id,), num_envs=4, episodes=3))
    found = re.search(r" -?\d+\.\d\d \+- (\d+\.\d\d) \(12 episodes\)\n", capsys.readouterr().out)
    assert float(found[1]) > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"env_ids": ("maze", "nothing")}, "'nothing' is not known"),
        ({"env_ids": ("maze", "coinrun,maze"), "num_envs": 3}, "--num-envs 3 cannot be shared"),
        ({"env_ids": ("CartPole-v1",), "distribution_mode": "hard"}, "are for Procgen"),
    ],
)
def test_random_policy_refuses_what_cannot_work(settings, words, monkeypatch):
    monkeypatch.setattr(random_policy, "random_returns", None)  # nothing is played
    with pytest.raises(InputError, match=words):
        random_policy.main(random_policy.Args(**settings))


@pytest.mark.parametrize("algorithm", ["ppo", "ppg", "impala"])
def test_short_rollouts_keep_the_sizes_of_minibatches(algorithm):
    """So that a step costs what it does at the default settings."""
    script = importlib.import_module(algorithm)
    default, short = script.Args(), script.Args()
    throughput.shorten(algorithm, short, 32, iterations=3)
    if algorithm == "impala":
        batches = [args.sample_fraction * args.batch_size * args.num_steps for args in (default, short)]
        assert [batches[0] / default.num_minibatches, batches[1] / short.num_minibatches] == [384, 384]
        assert short.total_timesteps == 4 * short.batch_size * short.num_steps
    else:
        assert [args.iteration_steps / args.num_minibatches for args in (default, short)] == [2048, 2048]
        assert short.total_timesteps == 4 * short.iteration_steps
    if algorithm == "ppg":
        assert [args.num_aux_rollouts * args.num_steps for args in (default, short)] == [1024, 1024]
    short.validate()


JOB = {"repeat": 0, "sweep": "", "value": "", "device": "cpu", "num_steps": 4, "iterations": 2}


def make_tiny(algorithm, args, num_steps, iterations):
    """In place of `throughput.shorten`: iterations of 4 environments, which end with an auxiliary phase."""
    args.num_envs, args.num_steps, args.num_minibatches = 4, num_steps, 1
    args.total_timesteps = (1 + iterations) * 4 * num_steps
    if algorithm == "ppg":
        args.n_pi = 1
    if algorithm == "impala":
        args.batch_size = 4


@pytest.fixture
def put_back(monkeypatch):
    """What a measurement changes in its process is put back after the test. Returns the script's module."""

    def keep(algorithm):
        script = importlib.import_module(algorithm)
        for place in (script, script.Agent, script.ImpalaCNN, session, Run, device):
            for name, value in list(vars(place).items()):
                if inspect.isfunction(value):
                    monkeypatch.setattr(place, name, value)
        return script

    return keep


@pytest.mark.parametrize("configuration", throughput.CONFIGURATIONS)
def test_what_configurations_turn_off(configuration, put_back):
    """The allocator's settings, our kernels, and the layout of frames in memory."""
    put_back("ppo")
    before, job = device.keep_freed_memory, JOB | {"algorithm": "ppo", "env_id": "starpilot"}
    script, args, _ = throughput.configure(job | {"configuration": configuration})
    plain = configuration.startswith("plain")
    assert (device.keep_freed_memory is before) == (configuration != "plain")
    assert (args.precision, args.micro_batch_size) == (
        "fp32" if configuration != "default" else device.resolve_precision("auto", "cpu"),
        2**30 if plain else None,
    )
    agent = script.Agent(gym.spaces.Box(0, 255, (64, 64, 3), np.uint8), gym.spaces.Discrete(15), args)
    classes = [type(module) for module in agent.modules()]
    script.accelerate(agent, "eager")
    assert ([type(module) for module in agent.modules()] == classes) == plain
    layouts = []
    agent.encoder.layers.register_forward_pre_hook(lambda _, inputs: layouts.append(inputs[0].is_contiguous()))
    agent.get_value(torch.zeros(2, 64, 64, 3, dtype=torch.uint8))
    assert layouts == [configuration in ("plain", "plain+malloc")]


@pytest.mark.parametrize(
    ("algorithm", "env_groups"), [("ppo", "4x1"), ("ppo", "4x2"), ("ppg", "4x1"), ("impala", "4x1")]
)
def test_throughput_measures_real_runs(algorithm, env_groups, put_back, monkeypatch):
    put_back(algorithm)
    monkeypatch.setattr(throughput, "shorten", make_tiny)
    monkeypatch.setattr(throughput, "MATMUL_SIZES", {"cpu": (1024,)})
    job = JOB | {"algorithm": algorithm, "configuration": "default", "env_id": "starpilot"}
    row = throughput.measure(job | {"sweep": "env_groups", "value": env_groups})
    assert row.keys() <= set(throughput.COLUMNS)
    assert row["steps_per_second"] > 0
    assert all(row[f"{phase}_us"] > 0 for phase in ("act", "env", "learn"))
    assert (row["aux_us"] > 0) == (algorithm == "ppg")
    assert 0 < row["learn_share_of_matmul"] < 2
    assert 0 < row["share_of_matmul"] < 2
    assert 0.1 < row["peak_gb"] < 4
    # IMPALA's actor works at the same time
    busy = sum(row[f"{phase}_us"] for phase in (["learn"] if algorithm == "impala" else throughput.PHASES))
    assert busy < 1e6 / row["steps_per_second"]
    assert busy + row["wait_us"] == pytest.approx(1e6 / row["steps_per_second"])


def test_the_memory_of_a_policy_phase_is_that_of_all_its_rollouts(put_back, monkeypatch):
    script, configure, phases = put_back("ppg"), throughput.configure, []

    def configure_small(job):
        script, args, device = configure(job)
        args.num_envs, args.num_steps, args.num_minibatches, args.n_pi, args.feature_dim = 4, 8, 4, 4, 8
        return script, args, device

    auxiliary_phase = script.auxiliary_phase
    script.auxiliary_phase = lambda agent, optimizer, phase, args, *rest: (
        phases.append((len(phase.obs), args.e_aux)) or auxiliary_phase(agent, optimizer, phase, args, *rest)
    )
    monkeypatch.setattr(throughput, "configure", configure_small)
    job = JOB | {"algorithm": "ppg", "configuration": "default", "env_id": "CartPole-v1", "sweep": "memory"}
    row = throughput.measure_memory(job)
    assert phases == [(4, 1)]
    assert 0.1 < row["peak_gb"] < 4


def test_measurements_have_processes_of_their_own():
    assert throughput.alone(eval, "__import__('os').getpid()") != os.getpid()


def test_throughput_from_measurements_to_table(tmp_path, monkeypatch, capsys):
    """One that fails is passed over."""

    def measure(job):
        if job["configuration"] == "plain":
            raise RuntimeError("killed")
        return dict.fromkeys(throughput.COLUMNS, 1.0) | throughput.identity(job)

    monkeypatch.setattr(throughput, "alone", lambda function, job: function(job))
    monkeypatch.setattr(throughput, "measure", measure)
    monkeypatch.setattr(throughput, "measure_memory", measure)
    args = throughput.Args(algorithms=("ppo",), configurations=("plain", "default"), repeats=2, device="cpu")
    args.out = tmp_path
    throughput.main(args)
    rows = read_csv(tmp_path / "cpu.csv")
    assert [(row["sweep"], row["configuration"]) for row in rows] == [("", "default")] * 2 + [("memory", "default")]
    output = capsys.readouterr().out
    assert "[1/5] ppo plain: failed (RuntimeError('killed'))" in output
    assert "| PPO default | 1 [1, 1] | - | - | 1 | 1 | 1 | 1 | 100%, 100%, 100% | 1.00 |" in output
    assert "benchmarks/throughput.py" in json.loads((tmp_path / "cpu.meta.json").read_text())["command"]


def test_the_throughput_table_from_known_numbers(tmp_path, monkeypatch, capsys):
    """Ratios are those of one round, and the document's block is replaced, not its neighbours."""
    rows = [
        {
            "algorithm": "ppo", "configuration": configuration, "repeat": repeat, "sweep": "", "value": "",
            "precision": "fp32", "steps_per_second": speed, "act_us": 100, "env_us": 10, "learn_us": 900, "aux_us": 0,
            "learn_share_of_matmul": 0.5, "aux_share_of_matmul": "", "share_of_matmul": 0.4, "peak_gb": 1.5,
        }
        for configuration, speeds in (("plain", (100, 200, 100)), ("default", (400, 900, 500, 700)))
        for repeat, speed in enumerate(speeds)
    ]  # fmt: skip
    rows.append({"algorithm": "ppo", "configuration": "default", "repeat": 0, "sweep": "memory", "peak_gb": 1.234})
    out = tmp_path / "throughput"
    out.mkdir()
    with (out / "cpu.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], restval="")
        writer.writeheader()
        writer.writerows(rows)
    (out / "cpu.meta.json").write_text(json.dumps({"machine": "2 x Test", "commit": "0123456789abc", "command": "c"}))
    (tmp_path / "README.md").write_text("before\n<!-- throughput cpu -->\nold\n<!-- end of throughput cpu -->\nafter\n")
    monkeypatch.setattr(readme, "DOCUMENTS", (tmp_path / "README.md",))
    throughput.main(throughput.Args(from_csv=True, update_readme=True, out=out, device="cpu"))
    document, table = (tmp_path / "README.md").read_text(), (out / "cpu.md").read_text()
    assert document == f"before\n<!-- throughput cpu -->\n{table}<!-- end of throughput cpu -->\nafter\n"
    line = next(line for line in document.splitlines() if line.startswith("| PPO default"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[1:4] == ["600 [400, 900]", "4.50 [4.00, 5.00]", "-"]
    assert cells[4:] == ["100", "10", "900", "0", "50%, -, 40%", "1.23"]
    assert (out / "cpu.png").stat().st_size > 5000


def test_throughput_configurations_alternate():
    args = throughput.Args(algorithms=("ppo",), configurations=("plain", "fp32"), repeats=2, sweeps=("feature_dim",))
    jobs = [(job["sweep"], job["value"], job["repeat"], job["configuration"]) for job in throughput.plan(args)]
    assert jobs[:4] == [("", "", 0, "plain"), ("", "", 0, "fp32"), ("", "", 1, "plain"), ("", "", 1, "fp32")]
    assert jobs[4:6] == [("feature_dim", 256, 0, "plain"), ("feature_dim", 256, 0, "fp32")]
    assert jobs[6] == ("feature_dim", 512, 0, "plain")
    assert len(jobs) == 4 + 2 * 2 * 3  # memory is measured of the default configuration alone


def test_throughput_without_a_csv(tmp_path):
    with pytest.raises(InputError, match="leave --from-csv out"):
        throughput.main(throughput.Args(from_csv=True, out=tmp_path))


def test_precision_intervals():
    """By hand: both means are 2, the pooled variance is 1.25, and t(.975) with 2 degrees of freedom 4.303."""
    assert precision.pooled_difference([([1.0, 3.0], [1.5, 2.5])]) == pytest.approx((0, -2.4053, 2.4053), abs=1e-3)
    random, hits, trials = np.random.default_rng(0), 0, 1000  # bf16 has 1 % less
    for _ in range(trials):
        pairs = [
            [(mean + spread * random.standard_normal(2)).tolist() for mean in (0.99 * task, task)]
            for task, spread in ((1000, 1), (2000, 8), (3000, 3))
        ]
        _, low, high = precision.pooled_difference(pairs)
        hits += low <= -0.01 <= high
    assert 0.94 < hits / trials < 0.99  # Satterthwaite's interval is a little wide for so few runs


def test_precision_from_run_folders_to_table(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "FOLDER", tmp_path / "precision")
    monkeypatch.setattr(precision, "MARKS", {"ppo": 512})
    small = {"num_envs": 4, "num_steps": 64, "num_minibatches": 2, "total_timesteps": 512, "env_id": "CartPole-v1"}
    runs = [
        ppo.main(ppo.Args(**small, precision=kind, seed=seed, runs_dir=str(tmp_path / "runs"), device="cpu"))
        for kind, seed in (("fp32", 1), ("bf16", 1), ("bf16", 2))
    ]
    precision.main(precision.Args(tuple(runs)))
    table = (tmp_path / "precision" / "precision.md").read_text()
    assert "| PPO CartPole-v1 | 512 |" in table
    assert "too few seeds" in table
    assert "runs-dir" not in (tmp_path / "precision" / "ppo" / "CartPole-v1" / "bf16-seed2.meta.json").read_text()
    last = ppo.main(ppo.Args(**small, precision="fp32", seed=2, runs_dir=str(tmp_path / "runs"), device="cpu"))
    precision.main(precision.Args((last,)))
    table = (tmp_path / "precision" / "precision.md").read_text()
    assert "too few seeds" not in table
    assert "| mean of 1 tasks, in % of fp32 |" in table
    (last / "args.json").write_text((last / "args.json").read_text().replace('"exp_name": "ppo"', '"exp_name": "mine"'))
    with pytest.raises(InputError, match="is a run of mine: only ppo have a mark here"):
        precision.add(last)
    monkeypatch.setattr(precision, "MARKS", {"ppo": 1024})
    with pytest.raises(InputError, match="has made 512 steps: the mark of ppo is 1024"):
        precision.add(runs[0])
    assert (tmp_path / "precision" / "precision.png").stat().st_size > 5000


def test_scaling_runs_one_process_and_two_ranks(tmp_path, monkeypatch):
    def run_here(words, *, env, cwd, **capture):
        """Forks, in place of `python` and `torchrun`."""
        assert (cwd, env["OMP_NUM_THREADS"]) == (scaling.ROOT, str(max(1, os.cpu_count() // number(words))))
        run = "impala", words[words.index("impala.py") + 1 :]
        if number(words) > 1:
            Ranks(tmp_path / "ranks", number(words)).run(run_script, *run)
            return SimpleNamespace(returncode=0)
        with Fork(tmp_path / "single", run_script, *run) as process:
            return SimpleNamespace(returncode=process.wait())

    def number(words):
        launcher = words[1 : words.index("impala.py")]
        assert launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
        return int(launcher[-1]) if launcher else 1

    monkeypatch.setattr(scaling, "subprocess", SimpleNamespace(run=run_here))
    small = {"env_id": "CartPole-v1", "repeats": 1, "num_steps": 4, "iterations": 2, "device": "cpu"}
    scaling.main(scaling.Args(algorithms=("impala",), **small, out=tmp_path))
    rows = read_csv(tmp_path / "cpu.csv")
    assert [(row["ranks"], float(row["steps_per_second"]) > 0) for row in rows] == [("1", True), ("2", True)]
    assert "| IMPALA (APPO) | 2 |" in (tmp_path / "cpu.md").read_text()


def test_exploration_from_runs_to_table(tmp_path, monkeypatch):
    """Fine-tuning starts from the pretrained run, and nothing is run twice."""

    def run_here(command, *, cwd, stdout, check):
        assert (command[:2], cwd, check) == ([sys.executable, "ppo.py"], exploration.ROOT, True)
        ppo.main(parse(ppo.Args, ppo.Args(), words=command[2:]))

    monkeypatch.setattr(exploration, "subprocess", SimpleNamespace(run=run_here, DEVNULL=None))
    monkeypatch.setattr(exploration, "FOLDER", tmp_path / "exploration")
    variants = {
        variant: (exploration.VARIANTS[variant][0].replace("150000", "2048"), exploration.VARIANTS[variant][1])
        for variant in ("pretraining", "fine-tuned-new-heads")
    }
    monkeypatch.setattr(exploration, "VARIANTS", variants)
    with pytest.raises(InputError, match="not all seeds of pretraining are there: add --run"):
        exploration.main(exploration.Args(seeds=2))
    exploration.main(exploration.Args(run=True, seeds=2))
    files = sorted(tmp_path.glob("exploration/*.csv"))
    assert [file.stem for file in files] == [
        f"{variant}-seed{seed}" for variant in ("fine-tuned-new-heads", "pretraining") for seed in (1, 2)
    ]
    command = json.loads(files[0].with_suffix(".meta.json").read_text())["command"]
    assert "--init-from runs/MountainCar-v0__pretraining__1__" in command
    assert str(tmp_path) not in command
    before = [file.stat().st_mtime_ns for file in files]
    files[1].unlink()  # of seed 2
    exploration.main(exploration.Args(run=True, seeds=2))
    after = [file.stat().st_mtime_ns for file in files]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True, False]
    table = (tmp_path / "exploration" / "exploration.md").read_text().splitlines()
    assert table[2:] == [
        "| pretraining | 2,048 | never, never | nan, nan |",
        "| fine-tuned-new-heads | 2,048 | never, never | nan, nan |",
    ]
    assert (tmp_path / "exploration" / "exploration.png").stat().st_size > 3000
