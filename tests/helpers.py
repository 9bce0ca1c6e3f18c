"""What several test files use."""

import csv
from pathlib import Path

import torch

from common.envs import finished_episodes, make_envs
from common.evaluation import HeldOut
from common.load import load_agent


class Silent:
    """Stands in for common.run.Run where one part of a script is under test; keeps the steps it is told of."""

    world_size = 1

    def __init__(self):
        self.steps, self.finished = [], []

    def episodes(self, step, infos, first_env=0):
        self.steps.append(step)
        self.finished += [(step, first_env + env, *rest) for env, *rest in finished_episodes(infos)]

    def show(self, step, phase):
        pass

    def show_phase(self, phase):
        pass


def estimates(rollout, advantages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and value targets, as the scripts hand them to `update`."""
    return advantages, advantages + rollout.values


def parameters(run_dir: Path) -> dict[str, torch.Tensor]:
    """The saved parameters of a run."""
    return torch.load(run_dir / "model.pt", weights_only=True)["agent"]


def deterministic_files(run_dir: Path) -> list[dict[str, str]]:
    """The episodes, progress and evaluations of a run without the wall-clock columns."""
    rows = []
    for name in ("episodes.csv", "progress.csv", "eval.csv"):
        with (run_dir / name).open() as file:
            rows += [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]
    return rows


def evaluate(run_dir: Path, episodes: int = 20) -> float:
    """Mean return of the most probable actions over the first episode of each of `episodes` unseen environments."""
    agent, args = load_agent(run_dir)
    held_out = HeldOut(make_envs(args.env_id, episodes, seed=10_000), 10_000, torch.device("cpu"))
    returns, _ = held_out.play(agent, 1, greedy=True)
    held_out.envs.close()
    return float(returns.mean())


def level_seeds(envs):
    """The seed of the level that each of Procgen's environments plays."""
    return [info["level_seed"] for info in envs.unwrapped.gym3_env.get_info()]
