"""Evaluation on held-out levels: what an agent makes of levels that it was not trained on, while it is trained.

An evaluation plays the same first episodes of the same environments each time, with random numbers of its own. So it
is a function of the agent alone, changes nothing in the run, and is the same in a run that was resumed.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal

from common.env_state import env_states, load_env_states
from common.envs import ProcgenVectorEnv, check_envs, finished_episodes, group_seed, make_envs
from common.errors import InputError
from common.run import Run, mean
from common.scores import normalized
from common.world import ALONE, World

EVALUATION = 10_000  # in the place of a group's number: seeds unlike those of environments that train
POLICIES = {"stochastic": "eval", "greedy": "eval/greedy"}  # and their tags


@dataclass
class HeldOut:
    """Environments that start over whenever they are asked to: `obs` [N, ...] are their first observations."""

    envs: VectorEnv
    seed: int
    start: list[dict[str, Any]] = field(init=False)

    def __post_init__(self):
        obs = torch.as_tensor(self.envs.reset(seed=self.seed)[0])
        self.start = env_states(self.envs, obs)

    def reset(self) -> Tensor:
        """Put all environments back to the start of their first episodes; return the observations [N, ...]."""
        if isinstance(self.envs.unwrapped, ProcgenVectorEnv):  # whose `reset` restarts nothing
            return load_env_states(self.envs, self.start)
        return torch.as_tensor(self.envs.reset(seed=self.seed)[0])


def draw(dist: Distribution, generator: torch.Generator) -> Tensor:
    """`dist.sample()` with a generator of its own: from PyTorch's, actor threads may draw at the same time."""
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

    Every environment has the same quota: were it "the first so many that end", short episodes would count more often.

    Args:
        agent: `agent.get_action_dist(obs, state)` gives a distribution over actions and the state to go on with.
        greedy: take the likeliest action, or a Gaussian's mean, instead of drawing one.
        on_step: called after each step with the number of episodes that have been finished.
    """
    num_envs, obs, state = held_out.envs.num_envs, held_out.reset(), None
    returns, lengths = np.zeros((num_envs, episodes_per_env)), np.zeros((num_envs, episodes_per_env), np.int64)
    counts = np.zeros(num_envs, np.int64)
    generator = torch.Generator(device).manual_seed(held_out.seed)
    while counts.min() < episodes_per_env:
        obs = obs.float() if obs.dim() == 2 else obs  # vectors may come as float64
        dist, state = agent.get_action_dist(obs.to(device), state)
        actions = dist.mode.nan_to_num() if greedy else draw(dist, generator)  # NaN: of a Bernoulli with probability .5
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
    """Seed of the held-out environments of a run with that seed: they draw other levels than those that train."""
    return group_seed(seed, EVALUATION)


def standard_error(values: np.ndarray) -> float:
    """Of the mean; NaN of a single value."""
    return float(values.std(ddof=1) / values.size**0.5) if values.size > 1 else math.nan


def share_episodes(episodes: int, num_envs: int, games: list[str]) -> tuple[int, int]:
    """How many environments, of `num_envs` at most, play at least `episodes` episodes, and how many each of them."""
    num_envs = max(1, min(num_envs, episodes) // len(games)) * len(games)
    return num_envs, math.ceil(episodes / num_envs)


def held_out_settings(args: Any, num_envs: int) -> dict[str, Any]:
    """What `make_envs` takes for the held-out environments of a run. Raises InputError for levels that cannot be."""
    settings = {
        "seed": evaluation_seed(args.seed),
        "distribution_mode": args.distribution_mode,
        "num_levels": args.eval_num_levels,
        "start_level": args.eval_start_level,
        "num_threads": args.num_threads,
    }
    try:
        check_envs(args.env_id, num_envs, **settings)
    except InputError as error:  # which names the flags of the levels to train on
        message = str(error).replace("--num-levels", "--eval-num-levels")
        raise InputError(message.replace("--start-level", "--eval-start-level")) from None
    return settings


def trained_on(args: Any) -> bool:
    """Whether the levels of training and those of evaluations, both limited, have some in common."""
    if not (args.num_levels and args.eval_num_levels):
        return False
    training_end, chosen_end = args.start_level + args.num_levels, args.eval_start_level + args.eval_num_levels
    return max(args.start_level, args.eval_start_level) < min(training_end, chosen_end)


class Summary(NamedTuple):
    """What an evaluation has found of a game."""

    episodes: int
    episodic_return: float  # mean
    standard_error: float
    episodic_length: float  # mean
    normalized_return: float


def summaries(returns: np.ndarray, lengths: np.ndarray, games: list[str], distribution_mode: str) -> dict[str, Summary]:
    """A summary of each game from what `play` returns. Environment i plays `games[i % len(games)]`."""
    found = {}
    for number, game in enumerate(games):
        of_game, steps = returns[number :: len(games)], lengths[number :: len(games)]
        score = normalized(of_game.mean(), game, distribution_mode)
        found[game] = Summary(of_game.size, of_game.mean(), standard_error(of_game), steps.mean(), score)
    return found


class Evaluator:
    """Evaluates an agent every `--eval-interval` steps and at the end of the run; with 0, never.

    The environments are made here, once. An evaluation plays `--eval-episodes` episodes with the stochastic policy and
    as many with the greedy one, an equal number in each environment.

    Args:
        args: the script's `Args`.
        agent: see `play`.
        device: of the agent.
        iteration_steps: environment steps between calls.
        total_steps: environment steps at which the run will end.
        world: of several ranks, the first evaluates and the others wait.

    Raises:
        InputError: the levels asked for cannot be.
    """

    def __init__(
        self,
        args: Any,
        agent: torch.nn.Module,
        device: torch.device,
        iteration_steps: int,
        total_steps: int,
        world: World = ALONE,
    ):
        self.args, self.agent, self.device, self.world = args, agent, device, world
        self.iteration_steps, self.total_steps, self.held_out = iteration_steps, total_steps, None
        if not args.eval_interval or world.rank > 0:
            return
        self.games = args.env_id.split(",")
        num_envs, self.episodes_per_env = share_episodes(args.eval_episodes, args.num_envs, self.games)
        settings = held_out_settings(args, num_envs)
        if trained_on(args):
            print("note: evaluations are on levels that the agent trains on: these are not held out", file=sys.stderr)
        self.held_out = HeldOut(make_envs(args.env_id, num_envs, **settings), settings["seed"])

    def __call__(self, step: int, run: Run) -> None:
        """Evaluate, if an evaluation fell due since the call before or the run ends at `step`, and tell `run`."""
        interval = self.args.eval_interval
        if not interval or (step % interval >= self.iteration_steps and step < self.total_steps):
            return
        run.flush()
        if self.world.rank == 0:
            self.evaluate(step, run)
        self.world.agree(None)

    def evaluate(self, step: int, run: Run) -> None:
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
            if len(self.games) == 1:  # of several, training has most episodes of the game with the shortest
                metrics[f"{tag}/train_test_gap"] = mean(run.recent) - returns.mean()
        run.evaluation(step, metrics, rows)

    def close(self) -> None:
        if self.held_out is not None:
            self.held_out.envs.close()
