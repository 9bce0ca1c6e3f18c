"""benchmarks/gpu_check.py, as far as a machine without a GPU can show it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import fast
import gpu_check
from common import TrainingError


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


def test_a_resumed_run_is_compared_with_a_whole_one(monkeypatch, capsys):
    more = []

    def run(command, **settings):
        assert fast.ForkedScript(command + more * ("--resume" not in command)).wait() == 0

    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(Popen=fast.ForkedScript, run=run))
    gpu_check.kill_and_resume("ppo", "cpu")
    assert "ppo: resumed at step " in capsys.readouterr().out
    more += ["--learning-rate", "1e-3"]
    with pytest.raises(TrainingError, match=r"parameters of the resumed run differ: .*policy_head"):
        gpu_check.kill_and_resume("ppo", "cpu")
