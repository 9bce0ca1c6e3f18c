"""Settings that cannot work, runs that must not go on, and how a script says so."""

import math
import os
import re
import subprocess
import sys
import time
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

import fast
import impala
import ppg
import ppo
from common import InputError, TrainingError
from common.procgen_env import PROCGEN_GAMES
from common.run import ROOT
from common.session import one_line_errors
from conftest import StillEnv
from helpers import ALL, SCRIPTS, flags, parameters, small_args

ALL_GAMES = ", ".join(PROCGEN_GAMES)
ONE_STEP = {"num_envs": 2, "num_steps": 1, "norm_adv": "minibatch"}
MEMORY = "out of memory: lower --micro-batch-size, --num-envs, "


def make_args(script, tmp_path, **settings):
    """A run of a second on CartPole, but for `settings`."""
    return small_args(script, tmp_path / "runs", {"num_steps": 16, "total_timesteps": 64, "n_pi": 2}, **settings)


def check_rejected(script, tmp_path, settings, *words):
    """The run is refused in one line that holds all of `words`, and nothing is left behind."""
    with pytest.raises(InputError) as error:
        script.main(make_args(script, tmp_path, **settings))
    message = str(error.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("scripts", "settings", "words"),
    [
        # the task
        (SCRIPTS, {"env_id": "starpliot"}, ["starpliot", "Did you mean starpilot?", ALL_GAMES]),
        (SCRIPTS, {"env_id": "coinrun,starpliot"}, ["starpliot", "Did you mean starpilot?", ALL_GAMES]),
        (SCRIPTS, {"env_id": "CartPole-v7"}, ["CartPole-v7", "Did you mean CartPole-v1?"]),
        (SCRIPTS, {"env_id": "FrozenLake-v1"}, ["FrozenLake-v1", "no encoder for Discrete(16)"]),
        # Procgen's modes and levels
        (SCRIPTS, {"env_id": "coinrun,bigfish", "distribution_mode": "memory"},
         ["coinrun, bigfish has no memory mode", "--distribution-mode memory works with", "caveflyer"]),
        (SCRIPTS, {"env_id": "coinrun", "distribution_mode": "exploration", "num_levels": 10},
         ["--distribution-mode exploration", "leave --num-levels and --start-level out"]),
        (SCRIPTS, {"env_id": "coinrun,maze", "distribution_mode": "exploration"}, ["single game", "coinrun, maze"]),
        (SCRIPTS, {"env_id": "coinrun,maze,heist"}, ["--num-envs 4", "multiple of 3"]),
        (SCRIPTS, {"env_id": "maze,maze"}, ["--env-id maze,maze names a game twice"]),
        (SCRIPTS, {"env_id": "coinrun", "num_threads": -1}, ["--num-threads -1"]),
        (SCRIPTS, {"env_id": "coinrun", "start_level": 5}, ["--start-level", "set --num-levels"]),
        (SCRIPTS, {"num_levels": 5, "center_agent": False}, ["out for CartPole-v1 (--num-levels, --center-agent)"]),
        (SCRIPTS, {"env_id": "maze", "use_generated_assets": True}, ["draws what Procgen cannot save"]),
        # evaluations
        (SCRIPTS, {"env_id": "maze", "eval_num_levels": 9}, ["--eval-num-levels", "add --eval-interval"]),
        (SCRIPTS, {"env_id": "maze", "eval_interval": 64, "eval_start_level": 200},
         ["--eval-start-level", "set --eval-num-levels"]),
        # devices, heads, memory (limits of numbers: tests/test_session.py)
        (SCRIPTS, {"device": "cuda:99"}, ["--device cuda:99", "CUDA GPUs here: use --device auto or another"]),
        (SCRIPTS, {"device": "tpu", "max_grad_norm": 1e20}, ["--device 'tpu'", "auto, cpu, cuda or cuda:N"]),
        (SCRIPTS, {"init_from": ""}, ["model.pt cannot be read"]),  # a shell's variable without a value
        (SCRIPTS, {"init_heads": "reset"}, ["--init-heads is for", "add --init-from"]),
        (SCRIPTS, {"feature_dim": 10**9, "hidden_dim": 10**4}, [MEMORY]),
        (SCRIPTS, {"env_id": "starpilot", "num_envs": 10**6}, ["--num-envs 1000000 takes 1000 GB: lower it."]),
        (SCRIPTS, {"learning_rate": 1e300}, ["--learning-rate 1e+300 is too large."]),
        (SCRIPTS, {"num_steps": 10**20}, ["--num-steps 100000000000000000000 is too large."]),
        # the algorithms
        ([ppo, ppg], {"num_minibatches": 24}, ["--num-minibatches 24", "does not divide the 64 steps of a rollout"]),
        ([ppo, ppg], ONE_STEP, ["two steps or more", "--num-minibatches"]),
        ([ppo, ppg], {"pretraining": True}, ["--pretraining is for", "add --intrinsic-reward rnd or icm"]),
        ([ppo, ppg], {"intrinsic_reward": "rnd", "intrinsic_gamma": 1.0}, ["--intrinsic-gamma 1 cannot work"]),
        ([ppo, ppg], {"intrinsic_reward": "rnd", "pretraining": True, "intrinsic_coef": 0.0},
         ["has nothing to learn from"]),
        ([ppg], {"num_minibatches": 8, "whole_rollouts": True}, ["--num-minibatches 8", "4 environments"]),
        ([impala], {"num_actors": 3}, ["--num-actors 3", "--num-envs 4"]),
        ([impala], {"env_id": "coinrun,maze", "num_actors": 4}, ["--num-actors 4", "every game", "multiple of 8"]),
        ([impala], {"num_minibatches": 49}, ["--num-minibatches 49", "the 48 steps of"]),
        ([impala], {"num_minibatches": 4, "use_lstm": True}, ["--num-minibatches 4", "the 3 unrolls of"]),
        ([impala], {"c_bar": 2.0}, ["--c-bar 2.0", "--rho-bar 1.0"]),
        ([impala], {"rho_bar": math.nan}, ["--rho-bar nan"]),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)  # fmt: skip
def test_rejected(scripts, settings, words, tmp_path):
    for script in scripts:
        check_rejected(script, tmp_path, settings, *words)


@ALL
@pytest.mark.parametrize(("name", "reason"), [("file", "exists"), ("file/runs", "Not a directory")])
def test_rejected_runs_dir(script, name, reason, tmp_path):
    # Not a folder without permission: the superuser may write there.
    (tmp_path / "file").write_text("kept")
    check_rejected(script, tmp_path, {"runs_dir": str(tmp_path / name)}, str(tmp_path / name), "--runs-dir", reason)
    assert (tmp_path / "file").read_text() == "kept"


@ALL
@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("action_space", gym.spaces.MultiDiscrete([2, 3]), ["no distribution for MultiDiscrete"]),
        ("action_space", gym.spaces.Discrete(3, start=-1), ["for Discrete(3, start=-1)", "Discrete from 0"]),
        ("action_space", gym.spaces.Box(0, 3, (2,), np.int64), ["no distribution for Box", "real Box"]),
        ("action_space", gym.spaces.Box(-1, 1, (2, 2), np.float32), ["no distribution for Box", "use", "flat"]),
        ("observation_space", gym.spaces.Box(0, 1, (8, 8, 3), np.float32), ["no encoder for Box", "uint8 frames"]),
        ("observation_space", gym.spaces.Dict({"a": gym.spaces.Discrete(2)}), ["no encoder for Dict"]),
        ("reset", mock.Mock(side_effect=KeyError("no asset")), ["cannot be made: KeyError: 'no asset'"]),
    ],
)
def test_rejected_tasks(script, part, value, words, tmp_path, monkeypatch):
    monkeypatch.setitem(gym.registry, "TestStill-v0", EnvSpec("TestStill-v0", StillEnv, kwargs={part: value}))
    check_rejected(script, tmp_path, {"env_id": "TestStill-v0"}, "TestStill-v0", *words)


@pytest.mark.parametrize(("flag", "package"), [("track", "wandb"), ("capture_video", "av")])
def test_rejected_without_a_package(flag, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    check_rejected(ppo, tmp_path, {flag: True}, f"--{flag.replace('_', '-')}", f"pip install {package}")


def test_rejected_video_of_a_task_that_cannot_draw(tmp_path, monkeypatch):
    pytest.importorskip("av")
    monkeypatch.setitem(sys.modules, "pygame", None)
    check_rejected(ppo, tmp_path, {"capture_video": True}, "CartPole-v1 cannot be made for a video", "pygame")


@ALL
def test_command_line_bad_input(script, tmp_path):
    words = [sys.executable, ROOT / f"{script.__name__}.py", "--env-id", "starpliot"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch("error: .*starpilot.*\n", result.stderr)
    assert not list(tmp_path.iterdir())


@ALL
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_command_line_failed_run(script, env_id, tmp_path):
    """A run that diverges ends with one line and the last good agent."""
    words = flags(make_args(script, tmp_path, env_id=env_id, learning_rate=1e18, total_timesteps=640))
    with fast.Fork(tmp_path / "printed", fast.run_script, script.__name__, words) as process:
        assert process.wait() == 1
    (line,) = process.errors.splitlines()
    pattern = r"error: losses/\w+ is (nan|-?inf) at step \d+: "
    if script is impala:  # whose actor may see it first
        pattern += r"|error: an output of the policy after \d updates is NaN or inf"
    assert re.match(pattern, line)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert str(run_dir / "model.pt") in line
    assert all(parameter.isfinite().all() for parameter in parameters(run_dir).values())


def print_much(stream, end, *others):
    reader, pipe = os.pipe()
    os.close(reader)
    sys.stdout.reconfigure(encoding="ascii")
    places = {"pipe": pipe, "full": os.open("/dev/full", os.O_WRONLY)}
    for descriptor in (1, 2):
        os.dup2(places.get(stream, descriptor), descriptor)
    if stream == "closed":
        sys.stdout = sys.stderr = None
    with one_line_errors(*others):
        for each in (sys.stdout, sys.stderr):
            for size in (1, 10_000):  # which fail in the flush, and in the write
                print("ä" * size, file=each, flush=True)
        if end is not None:
            raise end


@pytest.mark.parametrize("stream", ["ascii", "pipe", "full", "closed"])
@pytest.mark.parametrize(("end", "code"), [(None, 0), (TrainingError(), 1), (KeyboardInterrupt(), 130)], ids=str)
def test_streams_that_take_no_more_neither_end_a_run_nor_hide_its_exit_code(stream, end, code, tmp_path):
    """A terminal without the letters of a folder's name, a reader that has gone (`| head -1`), a full disk, a stream
    that was closed before (`2>&-`)."""
    with fast.Fork(tmp_path, print_much, stream, end) as process:
        assert process.wait() == code
    assert process.output.count(r"\xe4") == (10_001 if stream == "ascii" else 0)
    with fast.Fork(tmp_path, print_much, stream, end, OSError) as process:  # a tool, whose result is what it prints
        assert process.wait() == (1 if stream in ("pipe", "full") else code)


PRINTS = """from common.session import one_line_errors
with one_line_errors():
    try:
        while True:
            print("a" * 1000, flush=True)
    finally:
        print("stopped" * 1000, flush=True)
"""


def test_a_signal_ends_a_run_whose_reader_has_stopped():
    with subprocess.Popen([sys.executable, "-c", PRINTS], cwd=ROOT, stdout=subprocess.PIPE) as process:
        os.read(process.stdout.fileno(), 1)  # it has begun
        time.sleep(1)  # by then the pipe is full
        process.terminate()
        try:
            assert process.wait(20) == 143
        finally:
            process.kill()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you")])
def test_out_of_memory_in_training(error, tmp_path, monkeypatch):
    monkeypatch.setattr(ppo, "update", mock.Mock(side_effect=error))
    with pytest.raises(TrainingError, match=f"^{MEMORY}.*: the run stops; its last good"):
        ppo.main(make_args(ppo, tmp_path))
