"""The scripts in benchmarks/: collecting, and measuring speed."""

import csv
import importlib
import inspect
import json
import os
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_type_hints

import gymnasium as gym
import numpy as np
import pytest
import torch

import collect
import convert
import evaluate
import gpu_check
import ppo
import readme
import run as launcher
import throughput
from common import InputError, device, session
from common.run import Run, write_json
from common.settings import flag, read_json
from fast import small_networks
from helpers import read_csv, small_args


def test_collect_copies_a_curve_and_its_origin(tmp_path):
    sizes, place = {"num_steps": 2, "total_timesteps": 16}, "easy-200/ppo/maze/seed3.csv"
    with small_networks():
        run_dir = ppo.main(small_args(ppo, tmp_path / "runs", sizes, env_id="maze", num_levels=200, seed=3))
    progress, meta = run_dir / "progress.csv", run_dir / "meta.json"
    curve, origin = progress.read_text(), meta.read_text()
    part, killed = curve[: curve.index("16,")], json.dumps(json.loads(origin) | {"finished": None})

    def collected(name, text=curve, its_origin=origin, **settings):
        """What the origin says after the run has been collected in this state."""
        progress.write_text(text)
        meta.write_text(its_origin)
        target = collect.collect(run_dir, tmp_path / name, **settings)
        assert target == tmp_path / name / place
        assert target.read_text() == text
        return read_json(target.with_suffix(".meta.json"))

    found = collected("results")
    assert found["seconds"] == float(read_csv(progress)[-1]["seconds"])
    assert "--num-levels 200" in found["command"]
    assert "runs-dir" not in found["command"]
    assert collected("results") == found  # the same run again changes nothing
    assert collected("stopped", part, unfinished=True)["stopped_at"] == 8
    assert "stopped_at" not in collected("stopped", unfinished=True)  # the run has gone on
    for text, its_origin, words, settings in (
        (curve.replace("\n16,", "\n17,"), origin, r"seed3\.csv holds another run", {}),
        (part, origin, "8 of 16 steps: let it end first", {}),
        (curve, killed, "let it end first", {}),  # in its last evaluation
        (part, origin, r"seed3\.csv holds another run", {"unfinished": True}),  # not the shorter for the longer
    ):
        with pytest.raises(InputError, match=words):
            collected("results", text, its_origin, **settings)
    for name in ("meta.json", "args.json"):
        (run_dir / name).unlink()
        with pytest.raises(InputError, match=f"is no run folder: it has no readable {name}"):
            collect.collect(run_dir, tmp_path / "results")


@pytest.mark.parametrize(("exp_name", "folder"), [("../../..", "..-..-.."), ("..", "-"), ("", "-"), ("a/b.5", "a-b.5")])
def test_collect_stays_among_the_results(exp_name, folder, tmp_path, monkeypatch):
    results = tmp_path / "results"
    args = {"distribution_mode": "easy", "num_levels": 0, "exp_name": exp_name, "env_id": "maze", "seed": 1}
    monkeypatch.setattr(collect, "read_run", lambda run_dir: (args, {"command": "python ppo.py"}, "curve"))
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


LIMITED = [convert, evaluate, gpu_check, launcher, throughput]
MAY_BE_0 = {(evaluate, "seed"), (evaluate, "episodes"), (launcher, "slurm_gpus"), (throughput, "repeats")}


@pytest.mark.parametrize("module", LIMITED, ids=lambda module: module.__name__)
def test_numbers_and_choices_have_limits(module):
    """Which `main` checks before all else. The limits themselves: tests/test_session.py."""
    required = [Path() for field in fields(module.Args) if field.default is MISSING]
    hints = {
        name: re.search(r"\b(int|float|Literal)\b", str(hint)) for name, hint in get_type_hints(module.Args).items()
    }
    assert any(hints.values())
    for name, kind in hints.items():
        args, least = module.Args(*required), -1 if (module, name) in MAY_BE_0 else 0
        given, value = getattr(args, name), "other" if kind and kind[1] == "Literal" else least
        setattr(args, name, (*given[:-1], value) if isinstance(given, tuple) else value)
        if kind:
            with pytest.raises(InputError, match=f"^{flag(name)} {value} (cannot work|is not known)"):
                module.main(args)


def test_every_script_says_an_error_in_one_line():
    for path in Path(throughput.__file__).parent.glob("*.py"):
        _, guard, rest = path.read_text().partition('\nif __name__ == "__main__":\n')
        assert not guard or rest.startswith("    with one_line_errors():\n"), path


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


JOB = {"repeat": 0, "sweep": "", "device": "cpu", "num_steps": 4, "env_id": "starpilot"}


def make_tiny(algorithm, args, num_steps, iterations):
    """In place of `throughput.shorten`: iterations of 4 environments, which end with an auxiliary phase."""
    tiny = {"num_envs": 4, "num_steps": num_steps, "num_minibatches": 1, "n_pi": 1, "batch_size": 4}
    for name, value in (tiny | {"total_timesteps": (1 + iterations) * 4 * num_steps}).items():
        if hasattr(args, name) and isinstance(getattr(type(args), name, None), int):
            setattr(args, name, value)


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
def test_what_configurations_turn_off(configuration, put_back, monkeypatch):
    """The allocator's settings, our kernels, and the layout of frames in memory."""
    put_back("ppo")
    fast, job, kept = sys.modules[ppo.accelerate.__module__], JOB | {"algorithm": "ppo"}, []
    monkeypatch.setattr(fast, "keep_freed_memory", lambda: kept.append("memory"))
    script, args, _ = throughput.configure(job | {"configuration": configuration})
    plain = configuration.startswith("plain")
    assert (args.precision, args.micro_batch_size) == (
        "fp32" if configuration != "default" else device.resolve_precision("auto", torch.device("cpu")),
        2**30 if plain else None,
    )
    agent = script.Agent(gym.spaces.Box(0, 255, (64, 64, 3), np.uint8), gym.spaces.Discrete(15), args)
    classes = [type(module) for module in agent.modules()]
    script.accelerate(agent, "eager")
    assert kept == ([] if configuration == "plain" else ["memory"])
    assert ([type(module) for module in agent.modules()] == classes) == plain
    layouts = []
    agent.encoder.layers.register_forward_pre_hook(lambda _, inputs: layouts.append(inputs[0].is_contiguous()))
    agent.get_value(torch.zeros(2, 64, 64, 3, dtype=torch.uint8))
    assert layouts == [configuration in ("plain", "plain+malloc")]


@pytest.mark.parametrize("algorithm", ["ppo", "ppg", "impala"])
def test_throughput_measures_real_runs(algorithm, put_back, monkeypatch):
    put_back(algorithm)
    monkeypatch.setattr(throughput, "shorten", make_tiny)
    monkeypatch.setattr(throughput, "MATMUL_SIZES", {"cpu": (1024,)})
    row = throughput.measure(JOB | {"algorithm": algorithm, "configuration": "default"})
    assert row.keys() >= set(throughput.COLUMNS)
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
    auxiliary_phase = script.auxiliary_phase

    def configure_small(job):
        script, args, device = configure(job)
        args.num_envs, args.num_steps, args.num_minibatches, args.n_pi, args.feature_dim = 4, 8, 4, 4, 8
        return script, args, device

    def watched(agent, optimizer, phase, args, *rest):
        phases.append((len(phase.obs), args.e_aux))
        return auxiliary_phase(agent, optimizer, phase, args, *rest)

    script.auxiliary_phase = watched
    monkeypatch.setattr(throughput, "configure", configure_small)
    job = JOB | {"algorithm": "ppg", "configuration": "default", "sweep": "memory"}
    row = throughput.measure_memory(job | {"env_id": "CartPole-v1"})
    assert phases == [(4, 1)]
    assert 0.1 < row["peak_gb"] < 4


def test_measurements_have_processes_of_their_own():
    assert throughput.alone(eval, "__import__('os').getpid()") != os.getpid()


def test_throughput_from_measurements_to_table(tmp_path, monkeypatch, capsys):
    """One that fails is passed over."""

    def measure(job):
        if job["configuration"] == "plain":
            raise RuntimeError("killed")
        return dict.fromkeys(throughput.COLUMNS, 1.0) | job

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
    same = {"act_us": 100, "env_us": 10, "learn_us": 900, "aux_us": 0, "learn_share_of_matmul": 0.5}
    same |= {"algorithm": "ppo", "sweep": "", "share_of_matmul": 0.4, "aux_share_of_matmul": "", "peak_gb": 1.5}
    speeds = {"plain": (100, 200, 100), "default": (400, 900, 500, 700)}
    rows = [
        same | {"configuration": configuration, "repeat": repeat, "steps_per_second": speed}
        for configuration in speeds
        for repeat, speed in enumerate(speeds[configuration])
    ]
    rows.append({"algorithm": "ppo", "configuration": "default", "repeat": 0, "sweep": "memory", "peak_gb": 1.234})
    args = throughput.Args(from_csv=True, update_readme=True, out=tmp_path, device="cpu")
    with pytest.raises(InputError, match="leave --from-csv out"):
        throughput.main(args)
    with (tmp_path / "cpu.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], restval="")
        writer.writeheader()
        writer.writerows(rows)
    write_json(tmp_path / "cpu.meta.json", {"machine": "2 x Test", "commit": "0123456789abc", "command": "c"})
    (tmp_path / "README.md").write_text("before\n<!-- throughput cpu -->\nold\n<!-- end of throughput cpu -->\nafter\n")
    monkeypatch.setattr(readme, "DOCUMENTS", (tmp_path / "README.md",))
    throughput.main(args)
    document, table = (tmp_path / "README.md").read_text(), (tmp_path / "cpu.md").read_text()
    assert document == f"before\n<!-- throughput cpu -->\n{table}<!-- end of throughput cpu -->\nafter\n"
    row = "| PPO default | 600 [400, 900] | 4.50 [4.00, 5.00] | - | 100 | 10 | 900 | 0 | 50%, -, 40% | 1.23 |"
    assert row in document.splitlines()
    assert "Measured on 2 x Test, commit 0123456789: `c`." in document.splitlines()
    assert (tmp_path / "cpu.png").stat().st_size > 5000


def test_throughput_configurations_alternate():
    args = throughput.Args(algorithms=("ppo", "ppg"), configurations=("plain", "default"), repeats=2)
    jobs = [(job["algorithm"], job["sweep"], job["repeat"], job["configuration"]) for job in throughput.plan(args)]
    turns = [("", 0, "plain"), ("", 0, "default"), ("", 1, "plain"), ("", 1, "default")]
    memory = [(algorithm, "memory", 0, "default") for algorithm in ("ppo", "ppg")]
    assert jobs == [(algorithm, *turn) for algorithm in ("ppo", "ppg") for turn in turns] + memory
    assert not any(job["sweep"] for job in throughput.plan(throughput.Args(configurations=("plain",))))
