"""Evaluation on held-out levels: the same episodes each time, by the agent alone; a run does not notice it."""

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from common.envs import Envs, check_envs, finished_episodes, make_envs, spread_seed
from common.networks import draw
from common.run import Run, mean

EVALUATION = 10_000  # number of the seed of evaluations; actors count from 0, ranks have 20,000 and more


class HeldOut:
    """Environments that play their first episodes again and again, on `device`."""

    def __init__(self, envs: Envs, seed: int, device: torch.device):
        self.envs, self.seed, self.device = envs, seed, device
        envs.reset(seed=seed)
        self.start = envs.state_dict()

    @torch.no_grad()
    def play(self, agent: nn.Module, quota: int, greedy: bool, on_step: Callable = lambda finished: None) -> np.ndarray:
        """Returns and lengths, float64 [2, N, quota], of each environment's first episodes: the first that end anywhere
        would over-sample short ones. After each step, `on_step` gets the number of finished episodes."""
        self.envs.reset(seed=self.seed)
        if self.envs.restorable:  # Procgen's `reset` restarts nothing
            self.envs.load_state_dict(self.start)
        agent = copy.deepcopy(agent).eval()  # statistics of batch normalisation stay as they are
        state, generator = None, torch.Generator(self.device).manual_seed(self.seed)
        episodes = [[] for _ in range(self.envs.num_envs)]
        while min(map(len, episodes)) < quota:
            obs = torch.as_tensor(self.envs.obs, device=self.device)
            dist, state = agent.get_action_dist(obs.float() if obs.dim() == 2 else obs, state)  # vectors may be float64
            actions = dist.mode.nan_to_num() if greedy else draw(dist, generator)  # NaN: a Bernoulli of probability 0.5
            _, _, terminations, truncations, infos = self.envs.step(actions.cpu().numpy())
            if state is not None:
                state[:, torch.as_tensor(terminations | truncations, device=self.device)] = 0
            for env, *return_and_length in finished_episodes(infos):
                episodes[env].append(return_and_length)
            on_step(sum(min(len(each), quota) for each in episodes))
        return np.array([each[:quota] for each in episodes]).transpose(2, 0, 1).copy()


def share_episodes(episodes: int, num_envs: int, games: list[str]) -> tuple[int, int]:
    """The number of environments, at most `num_envs`, that play at least `episodes` episodes, and how many each."""
    num_envs = max(1, min(num_envs, episodes) // len(games)) * len(games)
    return num_envs, math.ceil(episodes / num_envs)


def summaries(returns: np.ndarray, lengths: np.ndarray, games: list[str], mode: str) -> dict[str, dict[str, float]]:
    """The last columns of `eval.csv` for each game. Environment i of [N, quota] has played `games[i % len(games)]`."""
    found = {}
    for number, game in enumerate(games):
        of_game = returns[number :: len(games)]
        found[game] = {
            "episodes": of_game.size,
            "episodic_return": of_game.mean(),
            "standard_error": of_game.std(ddof=1) / of_game.size**0.5 if of_game.size > 1 else math.nan,
            "episodic_length": lengths[number :: len(games)].mean(),
            "normalized_return": normalized(of_game.mean(), game, mode),
        }
    return found


def held_out_settings(args: Any) -> dict[str, Any]:
    """The settings of `make_envs` for a run's held-out levels. Raises InputError for levels that cannot be."""
    settings = {"distribution_mode": args.distribution_mode, "num_threads": args.num_threads}
    settings |= {"num_levels": args.eval_num_levels, "start_level": args.eval_start_level}
    check_envs(args.env_id, args.num_envs, prefix="eval-", **settings)
    return settings


class Evaluator:
    """Evaluates an agent, in environments made once. Raises InputError for levels that cannot be."""

    def __init__(self, args: Any, agent: nn.Module, device: torch.device):
        self.args, self.agent, self.games = args, agent, args.env_id.split(",")
        settings, seed = held_out_settings(args), spread_seed(args.seed, EVALUATION)
        first = max(args.start_level, args.eval_start_level)
        last = min(args.start_level + args.num_levels, args.eval_start_level + args.eval_num_levels)
        if first < last or args.distribution_mode == "exploration":  # which has one level
            print("note: evaluations are on levels that the agent trains on: these are not held out", file=sys.stderr)
        num_envs, self.quota = share_episodes(args.eval_episodes, args.num_envs, self.games)
        self.held_out = HeldOut(make_envs(args.env_id, num_envs, seed=seed, **settings), seed, device)
        self.close = self.held_out.envs.close

    def __call__(self, step: int, run: Run) -> None:
        """Tell `run` how the agent plays after `step` steps, with sampled actions and with the likeliest ones."""
        metrics, rows, total = {}, [], self.held_out.envs.num_envs * self.quota
        for policy, tag, greedy in (("stochastic", "eval", False), ("greedy", "eval/greedy", True)):
            returns, lengths = self.held_out.play(
                self.agent, self.quota, greedy, lambda finished: run.show(step, f"evaluation {finished}/{total}")
            )
            by_game = summaries(returns, lengths, self.games, self.args.distribution_mode)
            rows += [(policy, game, *summary.values()) for game, summary in by_game.items()]
            metrics |= {f"{tag}/episodic_return": returns.mean(), f"{tag}/episodic_length": lengths.mean()}
            metrics[f"{tag}/normalized_return"] = np.mean([each["normalized_return"] for each in by_game.values()])
            if len(self.games) == 1:  # with several, most training episodes are of the game with the shortest ones
                metrics[f"{tag}/train_test_gap"] = mean(run.recent) - returns.mean()
            else:
                metrics |= {f"{tag}/episodic_return/{game}": each["episodic_return"] for game, each in by_game.items()}
        run.write(step, metrics, {"eval.csv": rows})


# Returns of a policy that sees nothing, and of the best there is (Cobbe et al. 2020, https://arxiv.org/abs/1912.01588,
# appendix C). For easy jumper and leaper the paper prints 3 as the least; 1 and 1.5 are those of the authors' code.
RETURN_RANGES = {
    "easy": {
        "coinrun": (5, 10), "starpilot": (2.5, 64), "caveflyer": (3.5, 12), "dodgeball": (1.5, 19),
        "fruitbot": (-1.5, 32.4), "chaser": (0.5, 13), "miner": (1.5, 13), "jumper": (1, 10),
        "leaper": (1.5, 10), "maze": (5, 10), "bigfish": (1, 40), "heist": (3.5, 10),
        "climber": (2, 12.6), "plunder": (4.5, 30), "ninja": (3.5, 10), "bossfight": (0.5, 13),
    },
    "hard": {
        "coinrun": (5, 10), "starpilot": (1.5, 35), "caveflyer": (2, 13.4), "dodgeball": (1.5, 19),
        "fruitbot": (-0.5, 27.2), "chaser": (0.5, 14.2), "miner": (1.5, 20), "jumper": (1, 10),
        "leaper": (1.5, 10), "maze": (4, 10), "bigfish": (0, 40), "heist": (2, 10),
        "climber": (1, 12.6), "plunder": (3, 30), "ninja": (2, 10), "bossfight": (0.5, 13),
    },
}  # fmt: skip


def normalized(episodic_return: float, game: str, distribution_mode: str) -> float:
    """(R - min) / (max - min) of a return in a Procgen game; NaN where no range is published."""
    least, best = RETURN_RANGES.get(distribution_mode, {}).get(game, (math.nan, math.nan))
    return (episodic_return - least) / (best - least)
