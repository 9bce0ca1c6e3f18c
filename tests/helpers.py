"""What several test files use."""

import contextlib
import csv
import dataclasses
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import impala
import ppg
import ppo
from common.checkpoint import load_agent
from common.envs import Envs, make_vec
from common.evaluation import play
from common.run import CSV_COLUMNS, command
from common.settings import EnvArgs, read_json

SCRIPTS = [ppo, ppg, impala]
ALL = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
PPO_AND_PPG = pytest.mark.parametrize("script", [ppo, ppg], ids=lambda script: script.__name__)


def small_args(script, runs_dir: Path, sizes: dict[str, Any], /, **settings):
    """A run of CartPole that repeats exactly, with `settings`; `sizes` are for the scripts that have such a flag."""
    small = {"num_envs": 4, "num_minibatches": 2, "e_aux": 1, "batch_size": 4, "num_actors": 0, "log_interval": 1}
    flags = {field.name for field in dataclasses.fields(script.Args)}
    own = {name: value for name, value in (small | sizes).items() if name in flags}
    return script.Args(**{"env_id": "CartPole-v1", "device": "cpu", "runs_dir": str(runs_dir)} | own | settings)


def parameters(run_dir: Path) -> dict[str, torch.Tensor]:
    """The saved parameters of a run."""
    return torch.load(run_dir / "model.pt", weights_only=True)["agent"]


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    return sorted(run_dir.glob("checkpoints/*.pt"), reverse=True)


def newest(run_dir: Path) -> dict[str, Any]:
    """What the newest checkpoint of a run holds."""
    return torch.load(checkpoints(run_dir)[0], weights_only=True)


def resumed_at(run_dir: Path) -> list[int]:
    """The steps at which a run has been resumed."""
    return [each["step"] for each in read_json(run_dir / "meta.json")["resumed"]]


def read_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Each of TensorBoard's tags: [(step, value), ...], all of them."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def flags(args: Any) -> list[str]:
    """The command line of `args`, without the program."""
    return shlex.split(command(args, "x.py"))[2:]


@contextlib.contextmanager
def in_use(run_dir: Path) -> Iterator[None]:
    """As if another process were making the run in this folder."""
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(run_dir / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield
        process.stdin.close()


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def deterministic_files(run_dir: Path) -> list[dict[str, str]]:
    """The rows of a run's CSVs without the wall-clock columns."""
    rows = [row for name in CSV_COLUMNS for row in read_csv(run_dir / name)]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def evaluate(run_dir: Path, episodes: int = 20) -> float:
    """Mean return of the most probable actions over the first episode of each of `episodes` unseen environments."""
    agent, args, make_envs = load_agent(run_dir)
    with contextlib.closing(Envs(make_envs(args, episodes, seed=10_000))) as envs:
        envs.reset(seed=10_000)
        played = play(agent, envs, 10_000, torch.device("cpu"), 1, True, str)
    return statistics.mean(each[0].episodic_return for each in played)


def make_envs(
    env_id: str, num_envs: int, seed: int, render: bool = False, video: bool = False, **settings: Any
) -> Envs:
    """Environments as a script makes them."""
    return Envs(make_vec(EnvArgs(env_id=env_id, **settings), num_envs, seed, render), video=video)


def level_seeds(envs):
    """The seed of the level that each of Procgen's environments plays."""
    return envs.unwrapped.observe()[-1]["level_seed"].tolist()


def wait_until(condition, seconds=120):
    """Ask ten times a second whether `condition` holds: it may start a process each time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
