"""benchmarks/gpu_check.py, as far as a machine without a GPU can show it."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tyro

import fast
import gpu_check
import throughput
from common import TrainingError


def test_the_plan_has_every_step(tmp_path):
    parts = gpu_check.plan(gpu_check.Args(out=tmp_path, device="cuda"))
    names = [f"{step} {name}" for name in ("ppo", "ppg", "impala") for step in ("resume", "speed")]
    assert list(parts) == ["tests", *names]
    assert [path.rpartition("/")[2] for path in parts["tests"][-2:]] == ["test_gpu.py", "test_gpu_kernels.py"]
    speed = tyro.cli(throughput.Args, args=parts["speed impala"][2:])
    assert (speed.algorithms, speed.configurations) == (("impala",), ("default", "compile", "cudagraphs"))
    assert (speed.device, speed.repeats, speed.num_steps) == ("cuda", 1, 256)
    resume = tyro.cli(gpu_check.Args, args=parts["resume ppg"][2:])
    assert (resume.kill_and_resume, resume.device) == ("ppg", "cuda")
    rehearsal = gpu_check.plan(gpu_check.Args(out=tmp_path, device="cpu", rehearse=True, steps=("speed",)))
    assert [tyro.cli(throughput.Args, args=words[2:]).configurations for words in rehearsal.values()] == [
        ("default",)
    ] * 3


def test_what_fails_or_finds_no_time_is_left_for_another_call(tmp_path, monkeypatch, capsys):
    """What a part has started ends with it; what has failed is tried again after the others."""
    done = f"open({str(tmp_path / 'done')!r}, 'a').write"
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    parts = {"resume a": child, "tests": f"{done}('t'); raise SystemExit('broken')", "speed b": f"{done}('s')"}
    parts = {name: [sys.executable, "-c", code] for name, code in parts.items()}
    monkeypatch.setattr(gpu_check, "plan", lambda args: parts)
    monkeypatch.setattr(gpu_check, "SECONDS", {"tests": 60, "resume": 1.5, "speed": 9000})

    def check(budget):
        gpu_check.main(gpu_check.Args(out=tmp_path, device="cpu", budget=budget))
        return capsys.readouterr().out

    output = check(budget=600)
    assert "tests: FAILED" in output
    assert "    broken" in output
    assert "left for another call: resume a, tests, speed b\n" in output
    pid = (tmp_path / "logs" / "resume-a.log").read_text().strip()
    state = subprocess.run(["ps", "-o", "state=", "-p", pid], capture_output=True, text=True).stdout.strip()
    assert state in ("", "Z")
    assert "left for another call: resume a, tests\n" in check(budget=1)  # the first part is always done
    assert (tmp_path / "done").read_text() == "ts"
    assert "speed b" not in check(budget=600)
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    ends = [("resume a", -9), ("tests", 1), ("speed b", 0), ("resume a", -9), ("tests", 1)]
    assert [(each["name"], each["rc"]) for each in results] == ends
    assert results[0]["seconds"] >= 1.5
    assert results[0]["machine"].startswith(f"{os.cpu_count()} x ")


class Killable(fast.ForkedScript):
    def __init__(self, command, **settings):
        with open(os.devnull, "w") as file:
            super().__init__(command, stdout=file)
        self.wait = self.wait_for_code

    def wait_for_code(self) -> int:
        self.join()
        return self.exitcode


@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_a_resumed_run_is_compared_with_a_whole_one(algorithm, monkeypatch, capsys):
    more = []

    def run(command, **settings):
        assert Killable(command + more * ("--resume" not in command)).wait() == 0

    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(Popen=Killable, run=run))
    gpu_check.kill_and_resume(algorithm, "cpu")
    assert f"{algorithm}: resumed at step " in capsys.readouterr().out
    if algorithm == "ppo":
        more += ["--learning-rate", "1e-3"]
        with pytest.raises(TrainingError, match=r"parameters of the resumed run differ: .*policy_head"):
            gpu_check.kill_and_resume(algorithm, "cpu")
        ended = SimpleNamespace(poll=lambda: 0, kill=lambda: None, wait=lambda: 0, returncode=0)
        monkeypatch.setattr(gpu_check.subprocess, "Popen", lambda *args, **settings: ended)
        with pytest.raises(TrainingError, match="the run to be killed ended with 0"):
            gpu_check.kill_and_resume(algorithm, "cpu")


def test_gathered_are_packages_that_the_machine_lacks_and_libraries_of_procgen(tmp_path, monkeypatch):
    there = gpu_check.needed(["torch", "numpy", "tensorboard", "imageio"], "3.12", set())
    assert {"torch", "numpy", "grpcio", "sympy"} <= there
    words = []

    def run(command, **settings):
        words.extend(map(str, command))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(run=run, check_output=subprocess.check_output))
    gpu_check.main(gpu_check.Args(gather=tmp_path))
    found = {word.partition("==")[0] for word in words if "==" in word}
    assert {"procgen-mirror", "gym", "gym3", "cffi", "tyro", "pytest"} <= found
    assert not found & {"torch", "numpy", "glfw", "moderngl", "glcontext", "imageio", "imageio-ffmpeg", "sympy"}
    names = {path.name for path in (tmp_path / "libs").iterdir()}
    assert "libGL.so.1" in names
    assert not names & {"libc.so.6", "libstdc++.so.6"}
    assert not any("Qt" in name for name in names)  # Procgen's wheel has it
