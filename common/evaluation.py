"""Evaluation on held-out levels: the same episodes each time, by the agent alone; a run does not notice it."""

import copy
import csv
import math
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.envs import Envs, Episode, check_envs, finished_episodes, spread_seed
from common.run import Run, describe, mean

MEANS = ("episodic_return", "episodic_length", "normalized_return", "level_complete")  # over the games
EVALUATION = 10_000  # number of the seed of evaluations; actors count from 0, ranks have 20,000 and more
LONGEST = 27_000  # steps to wait for an episode's end, as in Atari's games; Procgen's longest has 6,000
# By mode and game: returns of a policy that sees nothing, and of the best there is (Cobbe et al. 2020, appendix C,
# https://arxiv.org/abs/1912.01588). Easy jumper and leaper have the least of the authors' code. The paper prints 3.
RETURN_RANGES = {"easy": {}, "hard": {}}
for row in csv.DictReader(Path(__file__).with_name("return_ranges.csv").read_text().splitlines()):
    for mode, ranges in RETURN_RANGES.items():
        ranges[row["game"]] = float(row[f"{mode}_least"]), float(row[f"{mode}_best"])


class DrawingFrom(TorchDispatchMode):
    """Within it, all that this thread draws comes from `generator`: actors may draw from PyTorch's at the same time."""

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, function: Any, types: tuple, args: tuple = (), named: dict | None = None) -> Any:
        named = dict(named or {})
        if torch.Tag.nondeterministic_seeded in function.tags:
            function, named["generator"] = function.overloadpacket, self.generator
        return function(*args, **named)


@torch.no_grad()
def play(
    agent: nn.Module, envs: Envs, seed: int, device: torch.device, quota: int, greedy: bool, show: Callable
) -> list[list[Episode]]:
    """The first `quota` episodes of each of `envs`, as the first that end anywhere over-sample short ones. `envs` have
    just been made and reset, as wrappers may have memory. Actions are drawn from `seed`; `show` gets the progress."""
    agent = copy.deepcopy(agent).eval()  # statistics of batch normalisation stay as they are
    state, drawing = None, DrawingFrom(torch.Generator(device).manual_seed(seed))
    episodes = [[] for _ in range(envs.num_envs)]
    while any(len(each) < quota and n <= LONGEST for each, n in zip(episodes, envs.episode_lengths, strict=True)):
        obs = torch.as_tensor(envs.obs, device=device)
        dist, state = agent.get_action_dist(obs if obs.dim() == 4 and obs.dtype == torch.uint8 else obs.float(), state)
        with drawing:
            actions = dist.mode.nan_to_num() if greedy else dist.sample()  # NaN: a Bernoulli of probability 0.5
        _, _, terminations, truncations, infos = envs.step(actions.cpu().numpy())
        if state is not None:
            state[:, torch.as_tensor(terminations | truncations, device=device)] = 0
        for episode in finished_episodes(infos):
            episodes[episode.env].append(episode)
        show(f"evaluation {sum(min(len(each), quota) for each in episodes)}/{quota * envs.num_envs}")
    played = [each[:quota] for each in episodes]
    if lacking := quota * len(played) - sum(map(len, played)):
        print(f"warning: {lacking} episodes have not ended within {LONGEST:,} steps: left out", file=sys.stderr)
    return played


def share_episodes(episodes: int, num_envs: int, games: list[str]) -> tuple[int, int]:
    """The number of environments, at most `num_envs`, that play at least `episodes` episodes, and how many each."""
    num_envs = max(1, min(num_envs, episodes) // len(games)) * len(games)
    return num_envs, math.ceil(episodes / num_envs)


def summaries(played: list[list[Episode]], games: list[str], mode: str) -> dict[str, dict[str, float]]:
    """The last columns of `eval.csv` for each game. Environment i has played `games[i % len(games)]`."""
    found = {}
    for number, game in enumerate(games):
        episodes = [episode for each in played[number :: len(games)] for episode in each]
        returns = [episode.episodic_return for episode in episodes]
        complete = [episode.level_complete for episode in episodes]
        found[game] = {
            "episodes": len(returns),
            "episodic_return": mean(returns),
            "standard_error": np.std(returns, ddof=1) / len(returns) ** 0.5 if len(returns) > 1 else math.nan,
            "episodic_length": mean([episode.length for episode in episodes]),
            "normalized_return": normalized(mean(returns), game, mode),
            "level_complete": mean([math.nan if each is None else each for each in complete]),
        }
    return found


def held_out_settings(args: Any) -> Any:
    """`args` with a run's held-out levels as levels. Raises InputError for levels that cannot be."""
    held_out = replace(args, num_levels=args.eval_num_levels, start_level=args.eval_start_level)
    check_envs(held_out, args.num_envs, prefix="eval-")
    return held_out


class Evaluator:
    """Evaluates an agent, each time in the same episodes. Raises InputError for levels that cannot be."""

    def __init__(self, args: Any, agent: nn.Module, device: torch.device, make_envs: Callable):
        self.args, self.agent, self.device, self.games = args, agent, device, args.env_id.split(",")
        held_out, self.seed = held_out_settings(args), spread_seed(args.seed, EVALUATION)
        first = max(args.start_level, args.eval_start_level)
        last = min(args.start_level + args.num_levels, args.eval_start_level + args.eval_num_levels)
        if first < last or args.distribution_mode == "exploration":  # which has one level
            print("note: evaluations are on levels that the agent trains on: these are not held out", file=sys.stderr)
        num_envs, self.quota = share_episodes(args.eval_episodes, args.num_envs, self.games)
        self.make_envs = lambda: Envs(make_envs(held_out, num_envs, self.seed))
        self.make_envs().close()  # what cannot be made is refused before the run begins

    def __call__(self, step: int, run: Run) -> bool:
        """Tell `run` how the agent plays. Return whether it is the best so far, by the return of sampled actions."""
        metrics, rows, shown = {}, [], []
        for policy, tag, greedy in (("stochastic", "eval", False), ("greedy", "eval/greedy", True)):
            with closing(self.make_envs()) as envs:
                envs.reset(seed=self.seed)
                played = play(self.agent, envs, self.seed, self.device, self.quota, greedy, run.show)
            by_game = summaries(played, self.games, self.args.distribution_mode)
            rows += [(policy, game, *summary.values()) for game, summary in by_game.items()]
            means = {name: np.mean([each[name] for each in by_game.values()]) for name in MEANS}
            metrics |= {f"{tag}/{name}": value for name, value in means.items()}
            if len(self.games) == 1:  # with several, most training episodes are of the game with the shortest ones
                metrics[f"{tag}/train_test_gap"] = mean(run.recent) - means["episodic_return"]
            else:
                metrics |= {f"{tag}/episodic_return/{game}": each["episodic_return"] for game, each in by_game.items()}
            shown.append(describe(means["episodic_return"], means["level_complete"]))
        best = metrics["eval/episodic_return"] > run.best_return
        run.best_return = max(run.best_return, float(metrics["eval/episodic_return"]))
        run.write(step, metrics, {"eval.csv": [(*row[:8], int(best), *row[8:]) for row in rows]})  # a copy's come last
        line = f"evaluation at step {step:,}: {shown[0]} (greedy: {shown[1]}); training: {run.summary()}"
        print(("\r\x1b[K" if sys.stdout.isatty() else "") + line, flush=True)
        return best


def normalized(episodic_return: float, game: str, distribution_mode: str) -> float:
    """(R - min) / (max - min) of a return in a Procgen game; NaN where no range is published."""
    least, best = RETURN_RANGES.get(distribution_mode, {}).get(game, (math.nan, math.nan))
    return (episodic_return - least) / (best - least)
