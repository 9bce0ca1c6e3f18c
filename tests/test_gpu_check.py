"""benchmarks/gpu_check.py, gpu_parts.py and gather_gpu.py, as far as a machine without a GPU can show them."""

import json
import os
import subprocess
import sys

import pytest
import torch
import tyro

import gather_gpu
import gpu_check
import gpu_parts
import impala
import ppo
from common import InputError, TrainingError
from common.settings import parse


def test_the_plan_has_every_step_and_cuda_graphs_on_a_gpu_alone(monkeypatch, capsys):
    names = [part.name for part in gpu_check.plan(gpu_check.Args(device="cpu"))]
    assert list(dict.fromkeys(name.split()[0] for name in names)) == list(gpu_check.Args.steps)
    assert "throughput ppg compile 256x2" in names
    assert not any("cudagraphs" in name for name in names)
    assert "cudagraphs need a CUDA GPU" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "resolve_device", torch.device)
    args = gpu_check.Args(device="cuda", steps=("throughput", "tests"), total_timesteps=7)
    tests, *measured = gpu_check.plan(args)
    assert [path.rpartition("/")[2] for path in tests.command[-2:]] == ["test_gpu.py", "test_gpu_kernels.py"]
    assert len(measured) == 2 * 12 + 6  # IMPALA has no groups
    assert not capsys.readouterr().out
    expected = gpu_parts.Args(device="cuda", total_timesteps=7, part=("throughput", "impala", "cudagraphs", "256x1"))
    assert tyro.cli(gpu_parts.Args, args=measured[-1].command[2:]) == expected


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs parts that consist of a time limit and of Python code; returns the lines of their results."""

    def run(parts, **settings):
        planned = [gpu_check.Part(name, [sys.executable, "-c", code], limit) for name, (limit, code) in parts.items()]
        monkeypatch.setattr(gpu_check, "plan", lambda args: planned)
        gpu_check.main(gpu_check.Args(out=tmp_path, device="cpu", **settings))
        return [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]

    return run


def test_a_part_that_runs_out_of_time_or_fails_lets_the_next_start(check, tmp_path, capsys):
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    parts = {"runs a": (1.5, child), "match b": (60, "import sys; sys.exit('broken')"), "tests": (60, "print('fine')")}
    results = check(parts)
    ends = [(each["name"], each["rc"], each["timed_out"]) for each in results]
    assert ends == [("runs a", -15, True), ("match b", 1, False), ("tests", 0, False)]
    assert results[0]["seconds"] >= 1.5
    assert "match b: FAILED with 1" in (output := capsys.readouterr().out)
    assert "    broken" in output
    assert "failed, until a call with --again: match b\n1 of 3 parts are left for another call: runs a" in output
    check(parts, again=True)
    assert "failed, until a call with --again: match b\n" in capsys.readouterr().out
    pid = (tmp_path / "logs" / "runs-a.log").read_text().strip()
    state = subprocess.run(["ps", "-o", "state=", "-p", pid], capture_output=True, text=True).stdout.strip()
    assert state in ("", "Z")


def test_a_second_call_goes_on(check, tmp_path, capsys):
    """The first has no time for b; the second has, for it is the first part. A run that ran out of time goes on."""
    note = f"open({str(tmp_path / 'done')!r}, 'a').write"
    parts = {"match a": (60, f"{note}('a')"), "match b": (9000, f"{note}('b')"), "runs c": (9000, f"{note}('c')")}
    check(parts)
    assert "2 of 3 parts are left for another call: match b, runs c" in capsys.readouterr().out
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write(json.dumps({"name": "runs c", "rc": -15, "timed_out": True}) + "\n")
    check(parts)
    assert (tmp_path / "done").read_text() == "abc"
    assert "0 of 3 parts are left" in capsys.readouterr().out


def test_what_failed_is_repeated_if_asked_for(tmp_path):
    ends = {"match a": (1, False), "match b": (-15, True), "runs c": (-15, True), "runs d": (0, False)}
    lines = [json.dumps({"name": name, "rc": rc, "timed_out": late}) for name, (rc, late) in ends.items()]
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    assert gpu_check.done(gpu_check.Args(out=tmp_path)) == {"match a": 1, "match b": -15, "runs d": 0}
    assert gpu_check.done(gpu_check.Args(out=tmp_path, again=True)) == {"runs d": 0}


def test_packed_results_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "PIECE", "1k")
    out, folder, again = tmp_path / "out", tmp_path / "packed", tmp_path / "again"
    again.mkdir()
    out.mkdir()
    (out / "results.jsonl").write_text("{}\n")
    for size in (9000, 2500):  # the second time, old files would be too many
        (out / "trace").write_bytes(os.urandom(size))
        gpu_check.pack(out, folder)
    assert max(path.stat().st_size for path in folder.glob("check.tar.gz.*")) == 1024
    subprocess.run(f"cat {folder}/check.tar.gz.* | tar xz -C {again}", shell=True, check=True)
    assert (again / "trace").read_bytes() == (out / "trace").read_bytes()
    assert (folder / "results.jsonl").read_text() == "{}\n"


def test_runs_have_the_fastest_configuration_of_the_csv(tmp_path, monkeypatch):
    args = gpu_parts.Args(out=tmp_path, device="cpu")
    with pytest.raises(InputError, match="no speed of ppg: add throughput"):
        gpu_parts.fastest(gpu_parts.measurements(args), "ppg")
    (tmp_path / "throughput").mkdir()
    rows = ["ppo,default,64x1,900", "ppo,cudagraphs,256x2,30000", "ppo,compile,64x2,7000"]
    rows += ["impala,compile,64x1,8000", "impala,cudagraphs,64x1,12000"]
    lines = ["algorithm,configuration,value,steps_per_second", *rows]
    gpu_parts.measurements(args).write_text("\n".join(lines))
    commands = []
    monkeypatch.setattr(os, "execv", lambda program, words: commands.append(words))
    expected = {ppo: {"num_envs": 256, "num_env_groups": 2, "num_minibatches": 32}, impala: {"num_envs": 64}}
    for script, settings in expected.items():
        gpu_parts.run(args, script.__name__)
        _, file, *words = commands.pop()
        assert file == f"{script.__name__}.py"
        run = parse(script.Args, script.Args(), words)
        run.validate()
        settings |= {"resume": "auto", "total_timesteps": 25_000_000, "accelerate": "cudagraphs"}
        assert {name: getattr(run, name) for name in settings} == settings


def test_match_compares_losses_and_gradients(monkeypatch, capsys):
    args = gpu_parts.Args(device="cpu", rehearse=True)
    gpu_parts.match(args, "ppg")
    names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert {"ppg losses/policy_loss", "ppg gradient", "ppg gradient of the auxiliary phase"} <= set(names)
    for wrong in (1.001, float("nan")):
        values = iter([{"gradient": torch.tensor([3.0, value])} for value in (1, wrong, 1.00001)])
        monkeypatch.setattr(gpu_parts, "learn", lambda *arguments, values=values: next(values))
        with pytest.raises(TrainingError, match="gradient: cpu differs too much"):
            gpu_parts.match(args, "ppo")


def test_gathered_are_packages_that_the_machine_lacks_and_libraries_of_procgen(tmp_path, monkeypatch):
    there = gather_gpu.needed(gather_gpu.Args().there, "3.12", set())
    assert {"torch", "numpy", "grpcio", "sympy"} <= there
    found = gather_gpu.needed(["procgen-mirror", "tyro"], "3.12", there | gather_gpu.UNUSED)
    assert {"procgen-mirror", "gym", "gym3", "cffi", "tyro"} <= found
    assert not found & {"numpy", "glfw", "moderngl", "glcontext", "imageio", "imageio-ffmpeg"}
    with pytest.raises(InputError, match="not-there is not installed here"):
        gather_gpu.needed(["not-there"], "3.12", set())
    monkeypatch.setattr(gather_gpu, "fetch", lambda name, python, folder: (folder / name).write_bytes(bytes(1000)))
    args = gather_gpu.Args(out=tmp_path)
    gather_gpu.main(args)
    names = {path.name for path in (tmp_path / "libs").iterdir()}
    assert "libGL.so.1" in names
    assert not names & {"libc.so.6", "libstdc++.so.6"}
    assert not any("Qt" in name for name in names)  # Procgen's wheel has it
    assert (tmp_path / "wheels" / "pytest").exists()
    monkeypatch.setattr(gather_gpu, "LIMIT", 0.01)
    with pytest.raises(InputError, match="takes more than"):
        gather_gpu.main(args)
