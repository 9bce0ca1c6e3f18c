"""A run that dies and is resumed is the same run; and what happens to checkpoints when things go wrong."""

import contextlib
import csv
import dataclasses
import hashlib
import io
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro
from conftest import SpoiltEnv
from helpers import deterministic_files, parameters
from test_run import flags, read_scalars

import impala
import ppg
import ppo
from common import checkpoint, errors
from common.device import resolve_precision
from common.env_state import decode, encode, env_states, load_env_states, same
from common.envs import make_envs
from common.errors import InputError, TrainingError
from common.run import Run, command, lock_folder

ROOT = Path(__file__).parent.parent
AUTO = resolve_precision("auto", "cpu")
OTHER = "fp32" if AUTO == "bf16" else "bf16"
SCRIPTS = [ppo, ppg, impala]
ALL = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)


def make_args(script, runs_dir, **settings):
    """12 iterations of 4 environments x 8 steps, that PPG makes in phases of 5; a checkpoint after each."""
    small = {"num_envs": 4, "num_steps": 8, "total_timesteps": 12 * 32, "num_minibatches": 2, "anneal_lr": True}
    if script is ppg:
        small |= {"n_pi": 5, "e_aux": 2}
    if script is impala:  # 2 of 4 environments in a batch: every other update, unrolls wait for their turn
        small |= {"batch_size": 2, "num_actors": 0, "log_interval": 48}
    small |= {
        "env_id": "CartPole-v1",
        "device": "cpu",
        "runs_dir": str(runs_dir),
        "checkpoint_interval": 0.0,
        "seed": 4,
    }
    return script.Args(**small | settings)


def resume(script, path, **changes):
    """Go on with the run in `path`, in process, as `python script.py --resume path` does."""
    settings = json.loads((path / "args.json").read_text())
    return script.main(script.Args(**settings | {"resume": str(path)} | changes))


def interrupt(monkeypatch, script, calls, name="update", error=KeyboardInterrupt):
    """Let the `calls`-th call of a function of `script` raise an error."""
    function, made = getattr(script, name), []

    def stop(*args, **kwargs):
        made.append(None)
        if len(made) == calls:
            raise error
        return function(*args, **kwargs)

    monkeypatch.setattr(script, name, stop)


def what_a_run_leaves(path):
    """Parameters, TensorBoard's scalars and the CSVs, but for what a clock says."""
    clock = {"charts/SPS", "charts/communication"}
    scalars = {tag: points for tag, points in read_scalars(path).items() if tag not in clock}
    return parameters(path), scalars, deterministic_files(path)


def check_same_run(path, undisturbed):
    for mine, theirs in zip(what_a_run_leaves(path), what_a_run_leaves(undisturbed), strict=True):
        assert mine.keys() == theirs.keys() if isinstance(mine, dict) else len(mine) == len(theirs)
        assert same(mine, theirs)
    assert [step for step, _ in read_scalars(path)["charts/SPS"]] == [
        step for step, _ in read_scalars(undisturbed)["charts/SPS"]
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs that nothing has disturbed, each made once."""
    made = {}

    def make(script, **settings):
        key = (script.__name__, *settings.items())
        if key not in made:
            made[key] = script.main(make_args(script, tmp_path_factory.mktemp("undisturbed"), **settings))
        return made[key]

    return make


# -------------------------------------------------------------------------------------------------------- exact resume


def interrupted(script, calls, runs_dir, monkeypatch, **settings):
    """The folder of a run that was stopped in its `calls`-th update."""
    with monkeypatch.context() as patch:
        interrupt(patch, script, calls)
        with pytest.raises(KeyboardInterrupt):
            script.main(make_args(script, runs_dir, **settings))
    (path,) = runs_dir.iterdir()
    return path


@ALL
@pytest.mark.parametrize(
    ("calls", "settings"),
    [
        (1, {}),
        (3, {}),
        (8, {}),
        (8, {"env_id": "starpilot"}),
        (8, {"env_id": "coinrun,maze"}),
        (8, {"env_id": "Pendulum-v1"}),
        (8, {"env_id": "TestBits-v0"}),
        (8, {"eval_interval": 50, "eval_episodes": 5}),
    ],
    ids=str,
)
def test_interrupted_run_is_the_same_run(script, calls, settings, undisturbed, tmp_path, monkeypatch):
    """PPG is interrupted at the start of a phase, in mid-phase, and in mid-phase after an auxiliary phase."""
    path = interrupted(script, calls, tmp_path, monkeypatch, checkpoint_interval=1e9, **settings)
    assert len(list(path.glob("checkpoints/*.pt"))) == (calls > (2 if script is impala else 1))
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert resume(script, path) == path
    check_same_run(path, undisturbed(script, **settings))


@pytest.mark.parametrize("script", [ppo, ppg], ids=lambda script: script.__name__)
@pytest.mark.parametrize("env_id", ["starpilot", "CartPole-v1"])
def test_interrupted_groups_are_the_same_run(script, env_id, undisturbed, tmp_path, monkeypatch):
    settings = {"env_id": env_id, "num_env_groups": 2}
    path = interrupted(script, 8, tmp_path, monkeypatch, **settings)
    resume(script, path)
    check_same_run(path, undisturbed(script, **settings))


def test_interrupted_rmsprop_is_the_same_run(undisturbed, tmp_path, monkeypatch):
    """An optimizer that has no choice of kernels."""
    path = interrupted(impala, 5, tmp_path, monkeypatch, optimizer="rmsprop")
    resume(impala, path)
    check_same_run(path, undisturbed(impala, optimizer="rmsprop"))


def test_interrupted_lstm_is_the_same_run(undisturbed, tmp_path, monkeypatch):
    """It is resumed in mid-episode: they have 4 steps."""
    settings = {"env_id": "TestCue-v0", "use_lstm": True, "num_steps": 5}
    path = interrupted(impala, 5, tmp_path, monkeypatch, **settings)
    resume(impala, path)
    check_same_run(path, undisturbed(impala, **settings))


def test_interrupted_auxiliary_phase_is_made_again(undisturbed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, ppg, 20, "auxiliary_loss")
        with pytest.raises(KeyboardInterrupt):
            ppg.main(make_args(ppg, tmp_path))
    (path,) = tmp_path.iterdir()
    resume(ppg, path)
    check_same_run(path, undisturbed(ppg))


@pytest.mark.parametrize("script", [ppo, impala])
def test_a_run_made_longer_is_the_longer_run(script, undisturbed, tmp_path):
    path = script.main(make_args(script, tmp_path, total_timesteps=6 * 32 - 10, anneal_lr=False))
    with pytest.raises(InputError, match=r"it has made \d+ steps: raise --total-timesteps"):
        resume(script, path)
    resume(script, path, total_timesteps=12 * 32)
    check_same_run(path, undisturbed(script, anneal_lr=False))
    assert json.loads((path / "args.json").read_text())["total_timesteps"] == 12 * 32


@pytest.mark.parametrize("first", [3, 4])
def test_a_run_made_longer_is_resumed_exactly(first, tmp_path, monkeypatch):
    """Also where its end came while unrolls waited for their turn: 2 of 4 environments make a batch."""
    paths = [impala.main(make_args(impala, tmp_path / name, total_timesteps=first * 16)) for name in "ab"]
    resume(impala, paths[0], total_timesteps=11 * 16)
    for calls in (3, 4):
        with monkeypatch.context() as patch:
            interrupt(patch, impala, calls)
            with pytest.raises(KeyboardInterrupt):
                resume(impala, paths[1], total_timesteps=11 * 16)
    resume(impala, paths[1])
    check_same_run(*paths)


def test_ppg_resumes_without_replay(undisturbed, tmp_path, monkeypatch):
    """Where environments cannot be put back, the frames of the phase are in the checkpoint, and new episodes begin."""
    seen = []
    phase = ppg.auxiliary_phase
    monkeypatch.setattr(ppg, "auxiliary_phase", lambda *args: seen.append(args[2].clone()) or phase(*args))
    collected, collect = [], ppg.collect

    def spy(agent, envs, rollout, *rest):
        result = collect(agent, envs, rollout, *rest)
        collected.append(rollout.obs.clone())
        return result

    monkeypatch.setattr(ppg, "collect", spy)
    with monkeypatch.context() as patch:
        interrupt(patch, ppg, 4)
        with pytest.raises(KeyboardInterrupt):
            ppg.main(make_args(ppg, tmp_path, env_id="TestOpaque-v0"))
    (path,) = tmp_path.iterdir()
    collected.pop()  # that of the iteration that was interrupted
    resume(ppg, path)
    assert torch.equal(torch.cat(seen), torch.stack(collected))


def test_environments_that_cannot_be_put_back_are_named(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt(patch, ppo, 4)
        with pytest.raises(KeyboardInterrupt):
            ppo.main(make_args(ppo, tmp_path, env_id="TestOpaque-v0"))
    (path,) = tmp_path.iterdir()
    resume(ppo, path)
    assert "these environments cannot be put back where they were: they start new episodes" in capsys.readouterr().err


def test_a_replay_that_differs_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, ppg, 4)
        with pytest.raises(KeyboardInterrupt):
            ppg.main(make_args(ppg, tmp_path))
    (path,) = tmp_path.iterdir()
    (file, *_) = checkpoint.checkpoint_files(path)
    content = torch.load(file, weights_only=True)
    content["loop"]["phase"]["actions"][0, 0, 0] ^= 1
    checkpoint.write_checkpoint(file, content)
    with pytest.raises(InputError, match="the environments do not repeat what they did"):
        resume(ppg, path)


# ------------------------------------------------------------------------------------------------------------- killing


def start(script, args, *words):
    """The script in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-u", f"{script.__name__}.py", *flags(args), *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell's children ignore it
    )


def test_a_signal_that_was_lost_does_not_make_deaf(monkeypatch):
    clock = iter([100.0, 100.0, 105.0, 111.0, 111.0])
    monkeypatch.setattr(errors, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    handler = errors.Interrupt()
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGINT, None)
    handler(signal.SIGTERM, None)  # five seconds later
    with pytest.raises(KeyboardInterrupt) as error:
        handler(signal.SIGUSR1, None)
    assert error.value.args == (signal.SIGUSR1,)


def test_a_signal_in_the_last_moments_changes_nothing(tmp_path):
    """Neither while the last checkpoint is written nor afterwards: Slurm would start the run once more."""
    code = f"""
import os, signal, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import ppo, test_checkpoint
from common import checkpoint, errors
write = checkpoint.write_checkpoint
def late(path, content):
    if content["step"] == 12 * 32:
        os.kill(os.getpid(), signal.SIGTERM)
    write(path, content)
checkpoint.write_checkpoint = late
with errors.one_line_errors():
    ppo.main(test_checkpoint.make_args(ppo, "runs", checkpoint_interval=1e9))
    os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR1)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].startswith("done: ")


def torture(script, settings, kills, undisturbed, tmp_path):
    """Kill a run again and again, at any moment after its header, resume it each time, and compare in the end."""
    args, rng = make_args(script, tmp_path, **settings), random.Random(0)
    reference, words, killed = undisturbed(script, **settings), [], 0
    while killed < kills:
        process = start(script, args, *words)
        process.stdout.readline()
        time.sleep(rng.uniform(0, 0.5))
        killed += process.poll() is None
        process.kill()
        _, errors = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), errors
        assert "Traceback" not in errors, errors
        (path,) = tmp_path.iterdir()
        words = [f"--resume={path}"]
        if json.loads((path / "meta.json").read_text())["finished"]:  # once more from the start
            check_same_run(path, reference)
            shutil.rmtree(path)
            words = []
    process = start(script, args, *words)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    (path,) = tmp_path.iterdir()
    check_same_run(path, reference)
    assert not list(path.rglob("*.tmp"))
    assert len(list((path / "checkpoints").iterdir())) == 4


LONG = {
    ppo: {"env_id": "starpilot", "num_steps": 4},
    ppg: {"env_id": "starpilot", "num_steps": 4},
    impala: {"use_lstm": True, "total_timesteps": 100 * 32},
}


@ALL
def test_a_run_killed_after_its_last_checkpoint_just_ends(script, undisturbed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, Run, 1, "finish", SystemExit)
        with pytest.raises(SystemExit):
            script.main(make_args(script, tmp_path))
    (path,) = tmp_path.iterdir()
    (path / "model.pt").unlink()
    resume(script, path)
    check_same_run(path, undisturbed(script))


@ALL
def test_killed_run_is_the_same_run(script, undisturbed, tmp_path):
    torture(script, LONG[script], 5, undisturbed, tmp_path)


@pytest.mark.soak
@ALL
@pytest.mark.parametrize("env_id", ["starpilot", "CartPole-v1"])
def test_run_killed_fifty_times_is_the_same_run(script, env_id, undisturbed, tmp_path):
    settings = {"env_id": env_id, "total_timesteps": (30 if env_id == "starpilot" else 300) * 32}
    torture(script, settings, 50, undisturbed, tmp_path)


def test_killed_actors_resume_with_nothing_counted_twice(tmp_path):
    """CartPole's episodes follow each other, across the kill, too: their lengths add up to the steps they ended at."""
    settings = {"num_actors": 1, "batch_size": 4, "queue_size": 4, "total_timesteps": 400 * 32}
    process = start(impala, make_args(impala, tmp_path, **settings))
    while len(list(tmp_path.glob("*/checkpoints/*.pt"))) < 2:
        time.sleep(0.05)
        assert process.poll() is None
    time.sleep(0.1)
    process.kill()
    process.communicate()
    (path,) = tmp_path.iterdir()
    step = checkpoint.newest_checkpoint(path)["step"]
    assert 0 < step < 400 * 32
    resume(impala, path)
    with (path / "episodes.csv").open() as file:
        episodes = [[int(row["step"]), int(row["env"]), int(row["episodic_length"])] for row in csv.DictReader(file)]
    assert [row[0] for row in episodes] == sorted(row[0] for row in episodes)
    for env in range(4):
        ends = np.cumsum([length for _, each, length in episodes if each == env])
        steps = np.array([step for step, each, _ in episodes if each == env])
        # An environment may be some unrolls ahead of its share of the steps.
        assert (np.abs(4 * ends - steps) <= 4 * 8 * 12).all()
    saved = torch.load(checkpoint.checkpoint_files(path)[0], weights_only=True)
    (steps_made,) = {float(state["step"]) for state in saved["optimizer"]["state"].values()}
    assert steps_made == 400 * 2  # minibatches
    assert [each for each, _ in read_scalars(path)["charts/policy_lag"]] == sorted(
        {-(-48 * n // 32) * 32 for n in range(1, 400)} & set(range(0, 400 * 32 + 1, 32)) | {400 * 32}
    )


@pytest.mark.parametrize(
    ("script", "sent", "code"),
    [
        (ppo, signal.SIGINT, 130),
        (ppo, signal.SIGTERM, 143),
        (ppo, signal.SIGUSR1, 138),
        (ppg, signal.SIGTERM, 143),
        (impala, signal.SIGUSR1, 138),
    ],
    ids=str,
)
def test_signals_write_a_checkpoint(script, sent, code, tmp_path):
    """Not that of the next iteration, which is not waited for."""
    process = start(script, make_args(script, tmp_path, total_timesteps=10**7, checkpoint_interval=1e9))
    deadline = time.monotonic() + 60
    while not any(len(path.read_text().splitlines()) > 3 for path in tmp_path.glob("*/progress.csv")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(sent)
    begin = time.monotonic()
    output, errors = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert (process.returncode, len(errors.splitlines())) == (code, 1)
    (path,) = tmp_path.iterdir()
    again = output.splitlines()[-1].removeprefix("resume with: ")
    assert again == f"python {script.__name__}.py --resume {path}"
    stopped_at = checkpoint.newest_checkpoint(path)["step"]
    assert stopped_at == torch.load(path / "model.pt", weights_only=True)["step"] >= 3 * 16
    words = [sys.executable, *shlex.split(again)[1:], f"--total-timesteps={stopped_at + 64}"]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"resumed at step {stopped_at:,}" in result.stdout


def test_slurm_example_of_the_readme(undisturbed, tmp_path):
    """It requeues itself when Slurm's signal has come, and not when the run is done."""
    jobs = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (job,) = (job for job in jobs if "torchrun" not in job)
    settings = {"total_timesteps": 100 * 32}
    args = make_args(ppg, tmp_path / "runs", **settings)
    words = f"{sys.executable} {ROOT / 'ppg.py'} {shlex.join(flags(args))} --resume auto"
    assert job.count("python ppg.py --env-id starpilot --seed 1 --resume auto") == 1
    (tmp_path / "job").write_text(job.replace("python ppg.py --env-id starpilot --seed 1 --resume auto", words))
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho $* >> requeued\n")
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = os.environ | {"SLURM_JOB_ID": "77", "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    jobs = 0
    while not jobs or (tmp_path / "requeued").exists():
        (tmp_path / "requeued").unlink(missing_ok=True)
        process = subprocess.Popen(["bash", "job"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
        jobs += 1
        if jobs < 3:
            process.stdout.readline()
            time.sleep(0.3)
            process.send_signal(signal.SIGUSR1)
        process.communicate()
        assert jobs > 2 or (tmp_path / "requeued").read_text() == "requeue 77\n"
    assert jobs == 3
    (run_dir,) = (tmp_path / "runs").iterdir()
    check_same_run(run_dir, undisturbed(ppg, **settings))


# ------------------------------------------------------------------------------------------------- what may be resumed


@pytest.fixture(scope="module", params=SCRIPTS, ids=lambda script: script.__name__)
def stopped(request, tmp_path_factory):
    """A script and a run of it that was interrupted after some iterations. Tests work on copies."""
    script, runs = request.param, tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, script, 8)
        with pytest.raises(KeyboardInterrupt):
            script.main(make_args(script, runs))
    return script, next(runs.iterdir())


@pytest.fixture
def run_copy(stopped, tmp_path):
    """The script, and a copy of the run that may be changed."""
    script, path = stopped
    return script, Path(shutil.copytree(path, tmp_path / "runs" / path.name))


def test_a_checkpoint_holds_what_it_should(run_copy):
    script, path = run_copy
    newest, older = checkpoint.checkpoint_files(path)  # two are kept
    assert (
        (newest.name, older.name) == ("000000000224.pt", "000000000192.pt")
        if script is not impala
        else (
            "000000000096.pt",
            "000000000064.pt",
        )
    )
    subprocess.run(["sha256sum", "--check", newest.with_suffix(".sha256").name], cwd=newest.parent, check=True)
    saved = torch.load(newest, weights_only=True)
    assert {"agent", "optimizer", "reward_normalizer", "random", "loop", "args", "step", "made_with"} <= saved.keys()
    assert script.Args(**saved["args"]).env_id == "CartPole-v1"
    model = torch.load(path / "model.pt", weights_only=True)
    assert model["step"] == saved["step"] == int(newest.stem)
    assert same(model["agent"], saved["agent"])
    assert not list(path.rglob("*.tmp"))


@pytest.mark.parametrize("number", [1, 3])
def test_checkpoints_kept(number, tmp_path):
    path = ppo.main(make_args(ppo, tmp_path, keep_checkpoints=number))
    steps = [12 * 32, 11 * 32, 10 * 32][:number]
    assert [int(file.stem) for file in checkpoint.checkpoint_files(path)] == steps
    assert len(list((path / "checkpoints").iterdir())) == 2 * number


def test_checkpoint_interval(tmp_path, monkeypatch):
    """One iteration passes in half a minute of the clock shown to it."""
    clock = itertools.count(0, 1)
    written = []
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: 30 * next(clock)))
    write = checkpoint.write_checkpoint
    monkeypatch.setattr(checkpoint, "write_checkpoint", lambda path, *rest: written.append(path) or write(path, *rest))
    ppo.main(make_args(ppo, tmp_path, checkpoint_interval=2.0))
    assert 3 <= len(written) <= 4  # 12 iterations, and the last


def test_settings_that_may_change(run_copy, undisturbed):
    script, path = run_copy
    assert json.loads((path / "meta.json").read_text())["resumed"] == []
    changes = {"num_threads": 2, "keep_checkpoints": 1, "checkpoint_interval": 3.0, "torch_deterministic": False}
    resume(script, path, **changes)
    check_same_run(path, undisturbed(script))
    settings, meta = (json.loads((path / name).read_text()) for name in ("args.json", "meta.json"))
    assert changes.items() <= settings.items()
    assert settings["resume"] is None
    assert meta["finished"]
    (entry,) = meta["resumed"]
    assert entry["step"] == (96 if script is impala else 224)
    assert meta["command"] == command(script.Args(**settings), f"{script.__name__}.py")


@pytest.mark.parametrize("total", [32, 90])
def test_a_run_cannot_be_made_shorter_than_it_is(run_copy, total):
    script, path = run_copy
    with pytest.raises(InputError, match=r"it has made (96|224) steps: raise --total-timesteps"):
        resume(script, path, total_timesteps=total)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"learning_rate": 1e-5}, "--learning-rate 1e-05 (there: "),
        ({"seed": 5}, "--seed 5 (there: 4)"),
        ({"num_envs": 8}, "--num-envs 8 (there: 4)"),
        ({"precision": OTHER}, f"--precision {OTHER} (there: {AUTO})"),
        ({"gamma": 0.9, "env_id": "Pendulum-v1"}, "--env-id Pendulum-v1 (there: CartPole-v1), --gamma 0.9"),
        ({"init_from": "runs/x"}, "--init-from runs/x (there: None)"),
    ],
    ids=str,
)
def test_settings_that_must_not_change(run_copy, changes, word):
    script, path = run_copy
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(InputError) as error:
        resume(script, path, **changes)
    assert word in str(error.value)
    assert "--init-from" in str(error.value)
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_command_line_takes_the_settings_of_the_run(run_copy, monkeypatch):
    script, path = run_copy
    settings = json.loads((path / "args.json").read_text())
    for words in (["--resume", str(path)], [f"--resume={path}", "--seed", "4"]):
        monkeypatch.setattr(sys, "argv", ["x.py", *words])
        args = tyro.cli(script.Args, default=checkpoint.saved_args(script.Args))
        assert args == script.Args(**settings | {"resume": str(path)})
    monkeypatch.setattr(sys, "argv", ["x.py", "--resume", "auto"])
    assert checkpoint.saved_args(script.Args) == script.Args()


@pytest.mark.parametrize(
    ("name", "value"), [("num_envs", "4"), ("num_envs", None), ("device", 3), ("anneal_lr", 1), ("precision", "fp64")]
)
def test_settings_of_a_wrong_type_are_refused(run_copy, name, value, monkeypatch):
    script, path = run_copy
    settings = json.loads((path / "args.json").read_text())
    (path / "args.json").write_text(json.dumps(settings | {name: value}))
    monkeypatch.setattr(sys, "argv", ["x.py", "--resume", str(path)])
    with pytest.raises(InputError, match=rf"other flags \(--{name.replace('_', '-')}\)"):
        checkpoint.saved_args(script.Args)


def test_only_the_run_s_own_logs_are_cut(run_copy, undisturbed):
    script, path = run_copy
    others = [path / "my_eval.csv", path / "events.out.tfevents.1.host.1.0", path / "notes.tmp"]
    for file in others:
        file.write_text("not of this run")
    resume(script, path)
    assert [file.read_text() for file in others] == ["not of this run"] * 3
    others[1].unlink()
    check_same_run(path, undisturbed(script))


def test_what_a_killed_process_leaves_is_removed_and_what_others_put_there_is_not(run_copy, undisturbed):
    script, path = run_copy
    newest, _ = checkpoint.checkpoint_files(path)
    backup = shutil.copy(newest, newest.with_name(f"{newest.stem}-backup.pt"))
    for name in ("000000000999.sha256", "000000000999.pt.tmp", "000000000999.sha256.tmp"):
        (newest.parent / name).write_text("half")
    newest.with_suffix(".sha256").unlink()
    resume(script, path)
    check_same_run(path, undisturbed(script))
    assert Path(backup).exists()
    names = {file.name for file in newest.parent.iterdir()}
    assert newest.with_suffix(".damaged").name in names
    assert not [name for name in names if "999" in name]


def test_a_run_of_another_script_is_refused(run_copy, monkeypatch):
    script, path = run_copy
    (path / "other.py").write_text(Path(script.__file__).read_text())
    result = subprocess.run(
        [sys.executable, path / "other.py", "--resume", path],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr == f"error: --resume {path}: that is a run of {script.__name__}.py, not of other.py.\n"
    other = ppo if script is not ppo else ppg
    monkeypatch.setattr(sys, "argv", ["x.py", "--resume", str(path)])
    with pytest.raises(InputError, match="is of a script with other flags"):
        checkpoint.saved_args(other.Args)


@pytest.mark.parametrize("place", ["nowhere", "empty", "file"])
def test_no_run_there(place, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="no run folder with a readable args"):
        ppo.main(make_args(ppo, tmp_path, resume=str(tmp_path / place)))


def test_two_processes_cannot_share_a_run(run_copy):
    script, path = run_copy
    with lock_folder(path), pytest.raises(InputError, match="is in use by another process"):
        resume(script, path)
    process = start(script, make_args(script, path.parent / "new", total_timesteps=10**7))
    process.stdout.readline()
    (running,) = (path.parent / "new").iterdir()
    with pytest.raises(InputError, match="is in use by another process"):
        resume(script, running)
    process.kill()
    process.communicate()
    lock_folder(running).close()


def test_auto_takes_the_newest_unfinished_run_of_the_same_settings(run_copy, undisturbed, capsys):
    script, path = run_copy
    runs = path.parent
    for name, change in (
        ("other", {"args.json": {"seed": 5}}),
        ("longer", {"args.json": {"total_timesteps": 10**6}}),
        ("ended", {"meta.json": {"finished": "2030-01-01T00:00:00Z"}}),
        ("script", {"meta.json": {"script": "other.py"}}),
        ("older", {"meta.json": {"started": "2000-01-01T00:00:00Z"}}),
        ("in-use", {}),
    ):
        copy = Path(shutil.copytree(path, runs / name))
        for file, values in ({"meta.json": {"started": "2100-01-01T00:00:00Z"}} | change).items():
            content = json.loads((copy / file).read_text())
            (copy / file).write_text(json.dumps({"started": "2100-01-01T00:00:00Z"} | content | values))
    (runs / "broken").mkdir()
    (runs / "broken/args.json").write_text("{")
    args = make_args(script, stopped_in(path), resume="auto")
    args.runs_dir = str(runs)
    with lock_folder(runs / "in-use"):
        assert script.main(args) == path
    check_same_run(path, undisturbed(script))
    shutil.rmtree(runs / "older"), shutil.rmtree(runs / "in-use")
    new = script.main(dataclasses.replace(args, resume="auto"))
    assert new not in (path, runs / "other")
    assert "no run with these settings waits" in capsys.readouterr().out
    check_same_run(new, undisturbed(script))


def stopped_in(path):
    return json.loads((path / "args.json").read_text())["runs_dir"]


# -------------------------------------------------------------------------------------------------- damaged and foreign


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(run_copy, undisturbed, capsys):
    script, path = run_copy
    newest, older = checkpoint.checkpoint_files(path)
    data = newest.read_bytes()
    rng = random.Random(0)
    edges = [0, 1, 4, 100, len(data) // 2, len(data) - 1, len(data) - 22, len(data) - 100]
    places = edges + [rng.randrange(i * len(data) // 100, (i + 1) * len(data) // 100) for i in range(100)]
    for damaged in (
        *(data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :] for place in places),
        *(data[:place] for place in places),
        data + b"x",
        older.read_bytes(),
    ):
        newest.write_bytes(damaged)
        assert checkpoint.newest_checkpoint(path)["step"] == int(older.stem)
        assert capsys.readouterr().err.startswith(f"warning: {newest} is damaged (its checksum does not match): it is")
    resume(script, path)
    check_same_run(path, undisturbed(script))


@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_a_damaged_checksum_is_as_bad(run_copy, damage, capsys):
    _, path = run_copy
    newest, older = checkpoint.checkpoint_files(path)
    checksum = newest.with_suffix(".sha256")
    checksum.write_text({"cut": checksum.read_text()[:50], "empty": "", "gone": ""}[damage])
    if damage == "gone":
        checksum.unlink()
    assert checkpoint.newest_checkpoint(path)["step"] == int(older.stem)
    assert f"warning: {newest} " in capsys.readouterr().err


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("content", ["code", "model", "text", "tensor", "keys", "types"])
def test_foreign_files_are_refused_in_a_sentence(run_copy, content, monkeypatch, capsys):
    """They may have a right checksum. Nothing in them is run."""
    script, path = run_copy
    monkeypatch.chdir(path)
    for file in checkpoint.checkpoint_files(path):
        buffer = io.BytesIO()
        saved = torch.load(file, weights_only=True)
        if content == "text":
            buffer.write(b"not a checkpoint")
        else:
            made = {
                "code": saved | {"step": Bomb()},
                "model": torch.load(path / "model.pt", weights_only=True),
                "tensor": torch.zeros(3),
                "keys": {"format": 1},
                "types": saved | {"step": "many"},
            }
            torch.save(made[content], buffer)
        file.write_bytes(buffer.getvalue())
        file.with_suffix(".sha256").write_text(f"{hashlib.sha256(buffer.getvalue()).hexdigest()}  {file.name}\n")
    with pytest.raises(InputError, match="none of its 2 checkpoints can be read"):
        resume(script, path)
    assert capsys.readouterr().err.count("is no checkpoint") == 2
    assert not (path / "exploded").exists()


def test_parts_of_another_shape_are_refused(run_copy):
    script, path = run_copy
    for file in checkpoint.checkpoint_files(path):
        content = torch.load(file, weights_only=True)
        content["agent"]["value_head.weight"] = torch.zeros(1, 3)
        checkpoint.write_checkpoint(file, content)
    with pytest.raises(InputError, match="its checkpoint does not fit this script"):
        resume(script, path)


# --------------------------------------------------------------------------------------------------------- new weights


@pytest.mark.parametrize("source", ["folder", "model", "checkpoint"])
def test_init_from_starts_a_new_run_with_old_weights(run_copy, source, tmp_path):
    script, path = run_copy
    file = {"folder": path, "model": path / "model.pt", "checkpoint": checkpoint.checkpoint_files(path)[0]}[source]
    args = make_args(script, tmp_path / "new", init_from=str(file), learning_rate=0.0, anneal_lr=False, num_steps=16)
    new = script.main(args)
    assert same(parameters(new), parameters(path))
    assert deterministic_files(new)[0] != deterministic_files(path)[0]
    assert json.loads((new / "args.json").read_text())["init_from"] == str(file)


def test_init_from_counts_for_a_run_killed_before_its_first_checkpoint(run_copy, tmp_path, monkeypatch):
    script, path = run_copy
    settings = {"init_from": str(path), "learning_rate": 0.0, "anneal_lr": False}
    with monkeypatch.context() as patch:
        interrupt(patch, script, 1)
        with pytest.raises(KeyboardInterrupt):
            script.main(make_args(script, tmp_path / "new", **settings))
    (new,) = (tmp_path / "new").iterdir()
    assert not checkpoint.checkpoint_files(new)
    resume(script, new)
    assert same(parameters(new), parameters(path))


def test_init_from_a_damaged_model(run_copy):
    _, path = run_copy
    data, rng = (path / "model.pt").read_bytes(), random.Random(0)
    good = checkpoint.read_weights(path / "model.pt")
    for place in [
        *range(0, 300, 3),
        *(rng.randrange(len(data)) for _ in range(100)),
        *range(len(data) - 300, len(data), 3),
    ]:
        (path / "model.pt").write_bytes(
            data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
        )
        with contextlib.suppress(checkpoint.Damaged):
            assert same(checkpoint.read_weights(path / "model.pt"), good)  # it was in a byte without meaning
        (path / "model.pt").write_bytes(data[:place])
        with pytest.raises(checkpoint.Damaged):
            checkpoint.read_weights(path / "model.pt")


def test_init_from_what_does_not_fit(run_copy, tmp_path):
    script, path = run_copy

    def refused(source, words, **settings):
        with pytest.raises(InputError, match=words):
            script.main(make_args(script, tmp_path / "new", init_from=str(source), **settings))
        assert not (tmp_path / "new").exists()

    refused(path, "its network is another one .*: use the same flags", feature_dim=32)
    refused(path, "its network is another one", env_id="Pendulum-v1")
    refused(tmp_path / "nowhere", r"nowhere cannot be read \(No such file")
    refused(path / "args.json", "is damaged or holds no agent")
    data = bytearray((path / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "model.pt").write_bytes(data)
    refused(path, "is damaged or holds no agent")


# ------------------------------------------------------------------------------------------------------------ failures


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("only the superuser can mount a file system")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill_disk(ballast):
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@ALL
def test_disk_full_for_a_checkpoint(script, undisturbed, small_disk, monkeypatch, capsys):
    """Training goes on without; when there is room again, so are there checkpoints."""
    calls, ballast = [], small_disk / "ballast"
    write = checkpoint.write_checkpoint

    def fill(path, content):
        calls.append(path)
        if len(calls) == 3:
            fill_disk(ballast)
            os.truncate(ballast, ballast.stat().st_size - 16384)  # enough for the logs
        if len(calls) == 5:
            ballast.unlink()
        write(path, content)

    monkeypatch.setattr(checkpoint, "write_checkpoint", fill)
    path = script.main(make_args(script, small_disk / "runs"))
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert all("(No space left on device), the last is of step" in line for line in warnings)
    monkeypatch.undo()
    check_same_run(path, undisturbed(script))


@ALL
def test_disk_full_for_the_logs(script, undisturbed, small_disk):
    """The run stops with one message, and goes on from its last checkpoint when there is room again."""
    args = make_args(script, small_disk / "runs", total_timesteps=10**6)
    process = start(script, args)
    while not list(small_disk.glob("runs/*/checkpoints/*.pt")):
        time.sleep(0.05)
    ballast = small_disk / "ballast"
    fill_disk(ballast)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    *warnings, error = errors.splitlines()
    assert all(line.startswith("warning: no checkpoint at step") for line in warnings)
    (path,) = (small_disk / "runs").iterdir()
    assert re.match(rf"error: nothing can be logged in {path} \(No space left on device\): the run stops; ", error)
    assert f"--resume {path}" in error
    ballast.unlink()
    step = checkpoint.newest_checkpoint(path)["step"]
    resume(script, path, total_timesteps=step + 64)
    steps = [point for point, _ in read_scalars(path)["losses/entropy"]]
    assert steps == sorted(set(steps))
    assert len(steps) >= 2


@ALL
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("what", ["observation", "reward", "last observation"])
def test_environments_that_give_nan(script, value, what, tmp_path, monkeypatch):
    monkeypatch.setattr(SpoiltEnv, "spoilt", (what, value))
    args = make_args(script, tmp_path, env_id="TestSpoilt-v0", total_timesteps=10**6)
    with pytest.raises(TrainingError) as error:
        script.main(args)
    (path,) = tmp_path.iterdir()
    message, what = str(error.value), what.removeprefix("last ")
    assert re.match(
        rf"the {what} of environment \d is NaN or infinite: the run stops; its last good model is ", message
    )
    assert str(path / "bad_batch.pt") in message
    batch = torch.load(path / "bad_batch.pt", weights_only=True)
    assert not batch[what].isfinite().all()
    saved = checkpoint.newest_checkpoint(path)
    assert saved["step"] >= 64
    assert all(parameter.isfinite().all() for parameter in saved["agent"].values())


@ALL
def test_nan_leaves_checkpoint_and_batch(script, tmp_path, monkeypatch):
    update, calls = script.update, []

    def spoil(agent, *rest):
        calls.append(None)
        return update(agent, *rest) | ({"losses/grad_norm": torch.tensor(np.nan)} if len(calls) == 7 else {})

    monkeypatch.setattr(script, "update", spoil)
    with pytest.raises(TrainingError, match=r"^losses/grad_norm is nan at step \d+: .*bad_batch.pt") as error:
        script.main(make_args(script, tmp_path))
    (path,) = tmp_path.iterdir()
    batch = torch.load(path / "bad_batch.pt", weights_only=True)
    assert {"obs", "actions", "rewards"} <= batch.keys()
    saved = checkpoint.newest_checkpoint(path)
    assert saved["step"] == (96 if script is impala else 6 * 32)
    assert "last good model" in str(error.value)


@ALL
def test_memory_stays_flat(script, tmp_path, monkeypatch):
    """Over 330 iterations with a checkpoint each."""
    megabytes, save = [], checkpoint.Checkpoints.save

    def spy(self, *args, **kwargs):
        megabytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", spy)
    script.main(make_args(script, tmp_path, total_timesteps=330 * 8, num_steps=2))
    assert len(megabytes) >= 330
    slope, _ = np.polyfit(range(300), megabytes[-300:], 1)
    assert slope < 0.02  # a checkpoint has .3 MB


# -------------------------------------------------------------------------------------------------------- environments


def test_values_are_encoded_as_they_are():
    generator = np.random.default_rng(3)
    value = {
        "a": [1, 2.5, None, True, "x", (np.float32(1.5), np.float64(2), np.int64(3), np.bool_(True))],
        "b": deque([np.arange(6, dtype=np.uint8).reshape(2, 3), np.zeros(0)], maxlen=5),
        3: {"state": np.random.get_state()},
    }
    buffer = io.BytesIO()
    torch.save(encode(value), buffer)
    buffer.seek(0)
    back = decode(torch.load(buffer, weights_only=True))
    np.testing.assert_equal([back["a"], list(back["b"]), back[3]], [value["a"], list(value["b"]), value[3]])
    assert [type(each) for each in back["a"][5]] == [np.float32, np.float64, np.int64, np.bool_]
    assert (type(back["b"]), back["b"].maxlen, back["b"][0].dtype) == (deque, 5, np.uint8)
    other = np.random.default_rng(0)
    other.bit_generator.state = decode(encode(generator))
    assert other.random() == generator.random()
    for opaque in (object(), {1: object()}, {(1, 2): 3}, np.array(["x"]), {1, 2}, np.longdouble(1), 10**1000):
        with pytest.raises(TypeError):
            encode(opaque)


@pytest.mark.parametrize(
    "env_id", ["starpilot", "coinrun,maze", "CartPole-v1", "Pendulum-v1", "Acrobot-v1", "TestCount-v0"]
)
def test_environments_go_on_where_they_were(env_id):
    """Across the ends of episodes, in environments that were in other states before."""
    envs, other = (make_envs(env_id, 4, seed=seed) for seed in (0, 9))
    rng = np.random.default_rng(0)

    def act(envs_, count):
        made = []
        for _ in range(count):
            envs.action_space.seed(int(rng.integers(1000)))
            actions = envs.action_space.sample()
            made.append([each.step(actions) for each in envs_])
        return made

    envs.reset(seed=0)
    other.reset(seed=9)
    ((obs, *_),) = act([envs], 37)[-1]
    other.step(envs.action_space.sample())
    states = env_states(envs, torch.as_tensor(obs))
    assert torch.equal(load_env_states(other, states), torch.as_tensor(obs))
    assert same(env_states(other, torch.as_tensor(obs)), states)
    ended = 0
    for a, b in act([envs, other], 600):
        for mine, theirs in zip(a[:4], b[:4], strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert ("episode" in a[4]) == ("episode" in b[4])
        if "episode" in a[4]:
            ended += 1
            assert (a[4]["episode"]["r"].tolist(), a[4]["episode"]["l"].tolist()) == (
                b[4]["episode"]["r"].tolist(),
                b[4]["episode"]["l"].tolist(),
            )
    assert ended
    envs.close(), other.close()


def test_a_run_older_than_some_flags(run_copy, monkeypatch):
    """Its args.json lacks them; where they cannot make it another run, they have their defaults."""
    script, path = run_copy
    settings = json.loads((path / "args.json").read_text())
    younger = {"micro_batch_size", "accelerate", "aux_frames"}
    (path / "args.json").write_text(json.dumps({name: settings[name] for name in settings.keys() - younger}))
    monkeypatch.setattr(sys, "argv", ["x.py", "--resume", str(path), "--micro-batch-size", "7"])
    args = tyro.cli(script.Args, default=checkpoint.saved_args(script.Args))
    assert args == script.Args(**settings | {"resume": str(path), "micro_batch_size": 7})
    (path / "args.json").write_text(json.dumps({name: settings[name] for name in settings.keys() - {"gamma"}}))
    with pytest.raises(InputError, match=r"a script with other flags .*--gamma"):
        checkpoint.saved_args(script.Args)


def test_a_resumed_optimizer_keeps_the_kernels_of_its_device(tmp_path):
    """A run of the CPU goes on with fused kernels on a GPU, and the other way round; here both on the CPU."""
    for fused in (True, False):
        agent = torch.nn.Linear(2, 2)
        optimizer, other = (torch.optim.Adam(agent.parameters(), fused=value) for value in (fused, not fused))
        agent(torch.ones(2)).sum().backward()
        other.step()
        load = checkpoint.Checkpoints.load
        stub = SimpleNamespace(run=SimpleNamespace(device=torch.device("cpu"), path=tmp_path, made_with=""))
        stub.parts = {"optimizer": optimizer}
        states = checkpoint.random_states(torch.device("cpu"))
        load(stub, {"optimizer": other.state_dict(), "random": states, "loop": {}, "step": 0, "made_with": ""})
        assert optimizer.param_groups[0]["fused"] is fused
        optimizer.step()
