"""Evaluation on held-out levels: how an agent plays levels that it was not trained on, while it is trained.

An evaluation plays the same first episodes of the same environments each time, with random numbers of its own. So it
depends on the agent alone, changes nothing in the run, and is the same in a run that was resumed.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal

from common.envs import Envs, check_envs, finished_episodes, group_seed, make_envs
from common.run import Run, Summary, mean
from common.scores import normalized

EVALUATION = 10_000  # in place of a group's number: seeds unlike those of the training environments
POLICIES = {"stochastic": "eval", "greedy": "eval/greedy"}  # and their tags


class HeldOut:
    """Environments that `reset` puts back to the start of their first episodes; it returns observations [N, ...]."""

    def __init__(self, envs: Envs, seed: int):
        self.envs, self.seed = envs, seed
        envs.reset(seed=seed)
        self.start = envs.states()

    def reset(self) -> Tensor:
        if self.envs.restorable:  # Procgen's `reset` restarts nothing
            self.envs.load_states(self.start)
        else:
            self.envs.reset(seed=self.seed)
        return torch.as_tensor(self.envs.obs)


def draw(dist: Distribution, generator: torch.Generator) -> Tensor:
    """`dist.sample()` with a generator of its own: actor threads may draw from PyTorch's at the same time."""
    if isinstance(dist, Independent):
        return draw(dist.base_dist, generator)
    if isinstance(dist, Categorical):
        return torch.multinomial(dist.probs, 1, generator=generator).squeeze(-1)
    if isinstance(dist, Bernoulli):
        return torch.bernoulli(dist.probs, generator=generator)
    if isinstance(dist, Normal):
        return torch.normal(dist.mean, dist.stddev, generator=generator)
    raise TypeError(f"no way to draw from a {type(dist).__name__} here: add one to common/evaluation.py")


@torch.no_grad()
def play(
    agent: torch.nn.Module,
    held_out: HeldOut,
    episodes_per_env: int,
    *,
    greedy: bool,
    device: torch.device,
    on_step: Callable[[int], None] = lambda finished: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns float64 and lengths int64 of the first episodes of each environment, both [N, episodes_per_env].

    Every environment plays the same number: the first so many that end anywhere would over-sample short episodes.

    Args:
        agent: `agent.get_action_dist(obs, state)` returns a distribution over actions and the next recurrent state.
        greedy: take the most likely action, or a Gaussian's mean, instead of sampling.
        on_step: called after each step with the number of finished episodes.
    """
    num_envs, obs, state = held_out.envs.num_envs, held_out.reset(), None
    returns, lengths = np.zeros((num_envs, episodes_per_env)), np.zeros((num_envs, episodes_per_env), np.int64)
    counts = np.zeros(num_envs, np.int64)
    generator = torch.Generator(device).manual_seed(held_out.seed)
    while counts.min() < episodes_per_env:
        obs = obs.float() if obs.dim() == 2 else obs  # vectors may come as float64
        dist, state = agent.get_action_dist(obs.to(device), state)
        actions = dist.mode.nan_to_num() if greedy else draw(dist, generator)  # NaN: a Bernoulli with probability .5
        obs, _, terminations, truncations, infos = held_out.envs.step(actions.cpu().numpy())
        obs = torch.as_tensor(obs)
        if state is not None:
            state[:, torch.as_tensor(terminations | truncations, device=state.device)] = 0
        for env, episodic_return, length in finished_episodes(infos):
            if counts[env] < episodes_per_env:
                returns[env, counts[env]], lengths[env, counts[env]] = episodic_return, length
                counts[env] += 1
        on_step(int(counts.sum()))
    return returns, lengths


def evaluation_seed(seed: int) -> int:
    """Seed of the held-out environments of a run with `seed`: they draw other levels than the training environments."""
    return group_seed(seed, EVALUATION)


def share_episodes(episodes: int, num_envs: int, games: list[str]) -> tuple[int, int]:
    """The number of environments, at most `num_envs`, that play at least `episodes` episodes, and how many each."""
    num_envs = max(1, min(num_envs, episodes) // len(games)) * len(games)
    return num_envs, math.ceil(episodes / num_envs)


def held_out_settings(args: Any, num_envs: int) -> dict[str, Any]:
    """The settings of `make_envs` for a run's held-out environments. Raises InputError for levels that cannot be."""
    levels = {"num_levels": args.eval_num_levels, "start_level": args.eval_start_level}
    mode = {"distribution_mode": args.distribution_mode, "num_threads": args.num_threads}
    settings = {"seed": evaluation_seed(args.seed), **mode, **levels}
    check_envs(args.env_id, num_envs, **settings, prefix="eval-")
    return settings


def summaries(returns: np.ndarray, lengths: np.ndarray, games: list[str], distribution_mode: str) -> dict[str, Summary]:
    """A summary of each game from what `play` returns. Environment i plays `games[i % len(games)]`."""
    found = {}
    for number, game in enumerate(games):
        of_game, steps = returns[number :: len(games)], lengths[number :: len(games)]
        error = float(of_game.std(ddof=1) / of_game.size**0.5) if of_game.size > 1 else math.nan
        score = normalized(of_game.mean(), game, distribution_mode)
        found[game] = Summary(of_game.size, of_game.mean(), error, steps.mean(), score)
    return found


class Evaluator:
    """Evaluates an agent every `--eval-interval` steps and at the end of the run, on environments made once.

    An evaluation plays `--eval-episodes` episodes with sampled actions and as many with the most likely ones, an equal
    number in each environment. Used on rank zero only.

    Raises:
        InputError: the levels asked for cannot be.
    """

    def __init__(self, args: Any, agent: torch.nn.Module, device: torch.device):
        self.args, self.agent, self.device = args, agent, device
        self.games = args.env_id.split(",")
        num_envs, self.episodes_per_env = share_episodes(args.eval_episodes, args.num_envs, self.games)
        settings = held_out_settings(args, num_envs)
        training = range(args.start_level, args.start_level + args.num_levels)
        chosen = range(args.eval_start_level, args.eval_start_level + args.eval_num_levels)
        if max(training.start, chosen.start) < min(training.stop, chosen.stop):
            print("note: evaluations are on levels that the agent trains on: these are not held out", file=sys.stderr)
        self.held_out = HeldOut(make_envs(args.env_id, num_envs, **settings), settings["seed"])
        self.close = self.held_out.envs.close

    def __call__(self, step: int, run: Run) -> None:
        """Evaluate the agent as it is after `step` steps, and tell `run`."""
        metrics, rows, total = {}, [], self.held_out.envs.num_envs * self.episodes_per_env
        for policy, tag in POLICIES.items():
            returns, lengths = play(
                self.agent,
                self.held_out,
                self.episodes_per_env,
                greedy=policy == "greedy",
                device=self.device,
                on_step=lambda finished: run.show(step, f"evaluation: {finished}/{total} episodes"),
            )
            by_game = summaries(returns, lengths, self.games, self.args.distribution_mode)
            rows += [(policy, game, *summary) for game, summary in by_game.items()]
            if len(self.games) > 1:
                metrics |= {f"{tag}/episodic_return/{game}": each.episodic_return for game, each in by_game.items()}
            metrics |= {
                f"{tag}/episodic_return": returns.mean(),
                f"{tag}/episodic_length": lengths.mean(),
                f"{tag}/normalized_return": np.mean([each.normalized_return for each in by_game.values()]),
            }
            if len(self.games) == 1:  # with several, most training episodes are of the game with the shortest ones
                metrics[f"{tag}/train_test_gap"] = mean(run.recent) - returns.mean()
        run.evaluation(step, metrics, rows)
