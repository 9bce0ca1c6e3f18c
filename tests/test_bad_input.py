"""Settings that cannot work, runs that must not go on, and how a script says so."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import fast
import gymnasium as gym
import numpy as np
import pytest
import torch

import impala
import ppg
import ppo
from common.errors import InputError, TrainingError
from common.procgen_env import PROCGEN_GAMES
from common.settings import parse

ROOT = Path(__file__).parent.parent
ALL = pytest.mark.parametrize("script", [ppo, ppg, impala], ids=lambda script: script.__name__)
ALL_GAMES = ", ".join(PROCGEN_GAMES)


def make_args(script, tmp_path, **settings):
    """A run of a second on CartPole, but for `settings`."""
    small = {"num_envs": 4, "num_steps": 16, "total_timesteps": 64, "num_minibatches": 2, "device": "cpu"}
    if script is ppg:
        small |= {"n_pi": 2, "e_aux": 1}
    if script is impala:
        small |= {"batch_size": 4, "num_actors": 0, "log_interval": 1}
    return script.Args(**{"env_id": "CartPole-v1", "runs_dir": str(tmp_path / "runs"), **small} | settings)


@pytest.fixture(scope="module", autouse=True)
def _server():
    fast.start_server()


def check_rejected(script, tmp_path, settings, *words):
    """The run is refused in one line that holds all of `words`, and nothing is left behind."""
    with pytest.raises(InputError) as error:
        script.main(make_args(script, tmp_path, **settings))
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert not list(tmp_path.glob("runs/*"))


# ---------------------------------------------------------------------------------------------------------- in process


@ALL
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        # the task
        ({"env_id": "starpliot"}, ["starpliot", "Did you mean starpilot?", ALL_GAMES]),
        ({"env_id": "StarPilot"}, ["StarPilot", "Did you mean starpilot?", ALL_GAMES]),
        ({"env_id": "nonsense"}, ["nonsense", ALL_GAMES]),
        ({"env_id": "coinrun,starpliot"}, ["starpliot", "Did you mean starpilot?", ALL_GAMES]),
        ({"env_id": "CartPol-v1"}, ["CartPol-v1", "Did you mean CartPole-v1?"]),
        ({"env_id": "CartPole-v7"}, ["CartPole-v7", "Did you mean CartPole-v1?"]),
        ({"env_id": "Nowhere/Task-v0"}, ["Nowhere/Task-v0", "not known"]),
        # Procgen's modes and levels
        ({"env_id": "bigfish", "distribution_mode": "memory"}, ["bigfish", "--distribution-mode memory", "caveflyer"]),
        ({"env_id": "coinrun", "distribution_mode": "esay"}, ["--distribution-mode esay", "easy, hard, extreme"]),
        (
            {"env_id": "coinrun,bigfish", "distribution_mode": "memory"},
            ["coinrun, bigfish has no memory mode", "--distribution-mode memory works with"],
        ),
        (
            {"env_id": "coinrun", "distribution_mode": "exploration", "num_levels": 10},
            ["--distribution-mode exploration", "--num-levels"],
        ),
        (
            {"env_id": "coinrun", "distribution_mode": "exploration", "num_levels": 10, "start_level": 1},
            ["--distribution-mode exploration", "--start-level"],
        ),
        ({"env_id": "coinrun,maze", "distribution_mode": "exploration"}, ["single game", "coinrun, maze"]),
        ({"env_id": "coinrun,maze,heist"}, ["--num-envs 4", "3 games", "multiple of 3"]),
        ({"env_id": "coinrun", "num_levels": -1}, ["--num-levels -1 cannot work: use 0 or a number above."]),
        ({"env_id": "coinrun", "num_levels": 5, "start_level": -1}, ["--start-level -1"]),
        ({"env_id": "coinrun", "num_threads": -1}, ["--num-threads -1"]),
        ({"env_id": "coinrun", "start_level": 5}, ["--start-level", "set --num-levels"]),
        ({"num_levels": 5}, ["--num-levels", "leave them out for CartPole-v1"]),
        ({"start_level": 5}, ["--start-level", "leave them out for CartPole-v1"]),
        ({"distribution_mode": "hard"}, ["--distribution-mode", "leave them out for CartPole-v1"]),
        # sizes
        ({"num_envs": 0}, ["--num-envs 0"]),
        ({"num_envs": -4}, ["--num-envs -4"]),
        ({"num_steps": -16}, ["--num-steps -16"]),
        ({"total_timesteps": 0}, ["--total-timesteps 0"]),
        ({"feature_dim": -1}, ["--feature-dim -1"]),
        ({"hidden_dim": 0}, ["--hidden-dim 0"]),
        # other numbers and choices
        ({"learning_rate": -1e-3}, ["--learning-rate -0.001"]),
        ({"learning_rate": math.nan}, ["--learning-rate nan"]),
        ({"gamma": 1.5}, ["--gamma 1.5"]),
        ({"max_grad_norm": -1.0}, ["--max-grad-norm -1.0"]),  # it would climb the loss
        ({"precision": "fp16"}, ["--precision fp16", "fp32, bf16"]),
        # device and seed
        ({"device": "cuda:99"}, ["--device cuda:99", "CUDA GPUs here: use --device auto or another"]),
        ({"device": "tpu"}, ["--device 'tpu'", "auto, cpu, cuda or cuda:N"]),
        ({"seed": -1}, ["--seed -1 cannot work: use a number from 0 to 2147483647, as Procgen's."]),
        ({"seed": 2**31}, [f"--seed {2**31}"]),
        # spaces
        ({"env_id": "FrozenLake-v1"}, ["FrozenLake-v1", "no encoder for Discrete(16)"]),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_rejected(script, settings, words, tmp_path):
    check_rejected(script, tmp_path, settings, *words)


@pytest.mark.parametrize("script", [ppo, ppg])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_minibatches": 0}, ["--num-minibatches 0"]),
        ({"num_minibatches": 3}, ["--num-minibatches 3"]),
        ({"num_minibatches": 128}, ["--num-minibatches 128"]),
        ({"gae_lambda": -0.1}, ["--gae-lambda -0.1"]),
        ({"clip_coef": 0.0}, ["--clip-coef 0.0"]),
        ({"norm_adv": "batches"}, ["--norm-adv batches", "minibatch, batch, none"]),
        ({"num_envs": 2, "num_steps": 1, "norm_adv": "minibatch"}, ["one step", "--num-minibatches"]),
    ],
)
def test_rejected_by_ppo_and_ppg(script, settings, words, tmp_path):
    check_rejected(script, tmp_path, settings, *words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_actors": 3}, ["--num-actors 3", "--num-envs 4"]),
        ({"num_actors": -1}, ["--num-actors -1"]),
        ({"batch_size": 0}, ["--batch-size 0"]),
        ({"queue_size": 0}, ["--queue-size 0"]),
        ({"num_minibatches": 0}, ["--num-minibatches 0"]),
        ({"num_minibatches": 49}, ["--num-minibatches 49", "draws 48 steps"]),
        ({"num_minibatches": 4, "use_lstm": True}, ["--num-minibatches 4", "draws 3 unrolls"]),
        ({"sample_fraction": 0.0}, ["--sample-fraction 0.0 draws 0 steps"]),
        ({"sample_fraction": 1.5}, ["--sample-fraction 1.5"]),
        ({"clip_coef": 0.0}, ["--clip-coef 0.0"]),
        ({"c_bar": 2.0}, ["--c-bar 2.0", "--rho-bar 1.0"]),
        ({"pg_rho_bar": 0.0}, ["--pg-rho-bar 0.0"]),
        ({"rho_bar": math.nan}, ["--rho-bar nan"]),
        ({"batch_size": 1, "num_steps": 1, "num_minibatches": 1}, ["--num-minibatches 1"]),
        ({"vtrace_lambda": 1.1}, ["--vtrace-lambda 1.1"]),
        ({"optimizer": "sgd"}, ["--optimizer sgd", "rmsprop, adam"]),
        ({"norm_reward": "sign"}, ["--norm-reward sign", "return, clip, soft-asymmetric, none"]),
        ({"accelerate": "cudagraphs", "num_actors": 1}, ["--accelerate cudagraphs", "--num-actors 0"]),
        ({"log_interval": 0}, ["--log-interval 0"]),
        ({"env_id": "coinrun,maze", "num_actors": 4}, ["--num-actors 4", "every game", "multiple of 8"]),
    ],
)
def test_rejected_by_impala(settings, words, tmp_path):
    check_rejected(impala, tmp_path, settings, *words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_minibatches": 8}, ["--num-minibatches 8", "--num-envs 4"]),  # divides the batch, but not the envs
        ({"n_pi": 0}, ["--n-pi 0"]),
        ({"e_policy": 0}, ["--e-policy 0"]),
        ({"e_value": 0}, ["--e-value 0"]),
        ({"e_aux": -1}, ["--e-aux -1"]),
        ({"num_aux_rollouts": 0}, ["--num-aux-rollouts 0"]),
        ({"num_aux_grad_accum": 0}, ["--num-aux-grad-accum 0"]),
    ],
)
def test_rejected_by_ppg(settings, words, tmp_path):
    check_rejected(ppg, tmp_path, settings, *words)


def test_rejected_by_ppo(tmp_path):
    check_rejected(ppo, tmp_path, {"update_epochs": 0}, "--update-epochs 0")
    check_rejected(ppo, tmp_path, {"num_minibatches": 24}, "--num-minibatches 24", "4 environments x 16 steps = 64")


@ALL
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_rejected_without_gpu(script, tmp_path):
    check_rejected(script, tmp_path, {"device": "cuda"}, "--device cuda", "--device auto")


@ALL
@pytest.mark.parametrize("below", ["", "runs", "a/b"])
def test_rejected_runs_dir(script, below, tmp_path):
    # Not a folder without permission: the superuser may write there.
    file = tmp_path / "file"
    file.write_text("kept")
    check_rejected(script, tmp_path, {"runs_dir": str(file / below)}, str(file / below), "--runs-dir")
    assert file.read_text() == "kept"


@ALL
def test_rejected_name_of_runs_dir(script, tmp_path):
    check_rejected(script, tmp_path, {"runs_dir": str(tmp_path / ("x" * 300))}, "--runs-dir", "too long")


class StillEnv(gym.Env):
    """Does nothing, in the spaces given."""

    def __init__(self, observation_space=None, action_space=None, render_mode=None):
        self.observation_space = observation_space or gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = action_space or gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


@ALL
@pytest.mark.parametrize(
    ("kind", "space", "words"),
    [
        ("action_space", gym.spaces.MultiDiscrete([2, 3]), ["no distribution for MultiDiscrete"]),
        ("action_space", gym.spaces.Tuple([gym.spaces.Discrete(2)] * 2), ["no distribution for Tuple"]),
        (
            "action_space",
            gym.spaces.Discrete(3, start=-1),
            ["distribution for Discrete(3, start=-1)", "Discrete from 0"],
        ),
        ("action_space", gym.spaces.Box(-1, 1, (2, 2), np.float32), ["no distribution for Box", "use", "flat"]),
        ("observation_space", gym.spaces.Box(-1, 1, (2, 2), np.float32), ["no encoder for Box", "flat vectors"]),
        ("observation_space", gym.spaces.Box(0, 1, (8, 8, 3), np.float32), ["no encoder for Box", "uint8 frames"]),
        ("observation_space", gym.spaces.Dict({"a": gym.spaces.Discrete(2)}), ["no encoder for Dict"]),
    ],
)
def test_rejected_spaces(script, kind, space, words, tmp_path):
    gym.register("TestStill-v0", entry_point=StillEnv, kwargs={kind: space})
    try:
        check_rejected(script, tmp_path, {"env_id": "TestStill-v0"}, "TestStill-v0", *words)
    finally:
        del gym.registry["TestStill-v0"]


@ALL
@pytest.mark.skipif(importlib.util.find_spec("ale_py") is not None, reason="ale-py is installed")
def test_rejected_without_atari(script, tmp_path):
    check_rejected(script, tmp_path, {"env_id": "ALE/Pong-v5"}, "ALE/Pong-v5", "ale_py")


@ALL
def test_rejected_without_wandb(script, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_rejected(script, tmp_path, {"track": True}, "--track", "pip install wandb")


@ALL
def test_rejected_by_wandb(script, tmp_path, monkeypatch):
    """Without a login, say."""
    wandb = pytest.importorskip("wandb")

    def init(**settings):
        raise wandb.errors.UsageError("no API key configured")

    monkeypatch.setattr(wandb, "init", init)
    check_rejected(script, tmp_path, {"track": True}, "--track", "no API key configured")


@ALL
def test_rejected_without_video_encoder(script, tmp_path, monkeypatch):
    monkeypatch.setattr("common.settings.find_spec", lambda name: None if name == "av" else True)
    check_rejected(script, tmp_path, {"capture_video": True}, "--capture-video", "pip install av")


# -------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("script", "words", "word"),
    [
        (ppo, "--env-id starpliot", "starpilot"),
        (ppg, "--num-envs 4 --num-steps 0", "--num-steps 0"),
        (impala, "--num-envs 4 --num-actors 3", "--num-actors 3"),
    ],
    ids=["ppo", "ppg", "impala"],
)
def test_command_line_bad_input(script, words, word, tmp_path):
    result = subprocess.run(
        [sys.executable, ROOT / f"{script.__name__}.py", *words.split()],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert word in line
    assert not list(tmp_path.iterdir())


@ALL
@pytest.mark.parametrize(
    ("words", "word"),
    [("--nmu-envs 4", "--nmu-envs"), ("--precision fp16", "fp16"), ("--num-envs many", "many")],
)
def test_command_line_bad_flag(script, words, word, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x.py", *words.split()])
    with pytest.raises(SystemExit) as error:
        parse(script.Args, default=script.Args())
    assert error.value.code == 2
    assert word in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- failing runs


def check_model(runs_dir):
    """The one run folder of `runs_dir` has a model, whole and finite."""
    (run_dir,) = runs_dir.iterdir()
    assert not (run_dir / "model.pt.tmp").exists()
    model = torch.load(run_dir / "model.pt", weights_only=True)
    assert model["agent"]
    assert all(parameter.isfinite().all() for parameter in model["agent"].values())
    return run_dir / "model.pt"


@ALL
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_nan_stops_the_run(script, env_id, tmp_path):
    args = make_args(script, tmp_path, env_id=env_id, learning_rate=1e30, total_timesteps=640)
    pattern = r"^losses/\w+ is (nan|-?inf) at step (64|128): "
    if script is impala:  # whose batch counts when it has been learnt from, and whose actor may see it first
        pattern = pattern.replace("64|128", "0|64") + r"|^an output of the policy after \d updates is NaN or infinite: "
    with pytest.raises(TrainingError, match=pattern) as error:
        script.main(args)
    assert str(check_model(tmp_path / "runs")) in str(error.value)


@ALL
def test_parameter_that_is_not_finite_stops_the_run(script, tmp_path, monkeypatch):
    """The metrics of an iteration say nothing of the last step that its optimiser made."""
    update = script.update

    def spoil_second(agent, *rest):
        metrics = update(agent, *rest)
        calls.append(None)
        if len(calls) == 2:
            agent.policy_head.linear.bias.data[0] = math.nan
        return metrics

    calls = []
    monkeypatch.setattr(script, "update", spoil_second)
    args = make_args(script, tmp_path, total_timesteps=640, **{"n_pi": 32} if script is ppg else {})
    with pytest.raises(TrainingError, match=r"^agent\.policy_head\.linear\.bias is nan at step 128: "):
        script.main(args)
    check_model(tmp_path / "runs")


@ALL
def test_command_line_failed_run(script, tmp_path):
    runs = tmp_path / "runs"
    words = "--env-id CartPole-v1 --num-envs 4 --num-steps 16 --num-minibatches 2 --learning-rate 1e30 --device cpu"
    if script is impala:
        words += " --batch-size 4"
    words += f" --total-timesteps 640 --runs-dir {runs}"
    with fast.Fork(tmp_path / "printed", fast.run_script, script.__name__, words.split()) as process:
        assert process.wait() == 1
    (line,) = process.errors.splitlines()
    assert re.match("error: (losses/|an output of the policy)", line)
    assert str(check_model(runs)) in line
    assert "done:" not in process.output


@pytest.mark.parametrize("stream", ["pipe", "full", "closed"])
@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("raise TrainingError", 1), ("raise KeyboardInterrupt", 130)])
def test_streams_that_take_no_more_neither_end_a_run_nor_hide_its_exit_code(stream, end, code, tmp_path):
    """A reader that has gone (`| head -1`), a full disk, a stream that was closed before (`2>&-`)."""
    program = f"""
import sys
from pathlib import Path
from common.errors import TrainingError
from common.signals import one_line_errors
with one_line_errors():
    for stream in (sys.stdout, sys.stderr):
        stream.isatty()
        for _ in range(3):
            print("a" * 10_000, file=stream, flush=True)
    Path({str(tmp_path / "done")!r}).touch()
    {end}
"""
    reader, pipe = os.pipe()
    os.close(reader)
    redirect = " >&- 2>&-" if stream == "closed" else ""
    with open(pipe if stream == "pipe" else "/dev/full", "w") as file:
        command = ["sh", "-c", f'exec "$0" -c "$1"{redirect}', sys.executable, program]
        process = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file)
    assert process.returncode == code
    assert (tmp_path / "done").exists()


@ALL
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"feature_dim": 10**9, "hidden_dim": 10**4}, "out of memory: lower --micro-batch-size, --num-envs, "),
        ({"env_id": "starpilot", "num_envs": 10**6}, "--num-envs 1000000 takes 1000 GB: lower it."),
        ({"num_steps": 10**20}, "the observations of a batch take 6,400,000,000,000 GB: lower --num-steps."),
        ({"feature_dim": 10**20}, "out of memory: lower --micro-batch-size, --num-envs, "),
        ({"num_steps": 10**11}, "the observations of a batch take 6,400 GB: lower --num-steps."),
    ],
    ids=["feature_dim", "num_envs", "digits", "digits of feature_dim", "num_steps"],
)
def test_what_no_memory_can_hold(script, settings, words, tmp_path):
    check_rejected(script, tmp_path, settings, words)


@ALL
@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_out_of_memory_in_training(script, error, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "update", mock.Mock(side_effect=error))
    with pytest.raises(
        TrainingError, match=r"^out of memory: lower --micro-batch-size, .*: the run stops; its last good"
    ):
        script.main(make_args(script, tmp_path))


def test_another_overflow_is_no_lack_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo, "update", mock.Mock(side_effect=OverflowError("Overflow in a simulator's clock")))
    with pytest.raises(OverflowError, match=r"^Overflow in a simulator's clock$"):
        ppo.main(make_args(ppo, tmp_path))


def test_signals_that_arrive_together():
    """The first to be seen counts, and Python has nothing to say about the other."""
    code = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background shell's children ignore
from common.signals import one_line_errors
with one_line_errors():
    both = signal.SIGINT, signal.SIGTERM
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for number in both:
        os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
    print("not stopped")
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "stopped by Ctrl-C\n")
