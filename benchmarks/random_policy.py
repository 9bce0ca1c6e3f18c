"""Mean return of random actions: what a learning curve has to rise above.

    python benchmarks/random_policy.py --env-ids starpilot fruitbot

Every environment plays the same number of episodes, so that short episodes do not count more often than long ones.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
from common.envs import Envs, finished_episodes, make_envs
from common.procgen_env import PROCGEN_GAMES
from common.settings import Positive, Seed, check_limits
from common.signals import one_line_errors


@dataclass
class Args:
    env_ids: tuple[str, ...] = tuple(PROCGEN_GAMES)
    """games to play"""
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "easy"
    """Procgen's difficulty"""
    num_envs: Positive[int] = 64
    """environments"""
    episodes: Positive[int] = 16
    """episodes of each environment"""
    seed: Seed = 1
    """seed of levels and actions"""


def random_returns(envs: Envs, episodes: int, seed: int) -> np.ndarray:
    """The returns [num_envs, episodes] of random actions."""
    envs.reset(seed=seed)
    actions = envs.unwrapped.action_space  # a wrapper's has no bounds
    actions.seed(seed)
    returns = [[] for _ in range(envs.num_envs)]
    while min(map(len, returns)) < episodes:
        for env, episodic_return, _ in finished_episodes(envs.step(actions.sample())[-1]):
            returns[env].append(episodic_return)
    envs.close()
    return np.array([each[:episodes] for each in returns])


def main(args: Args) -> None:
    """Play and print. Raises InputError before anything is played."""
    check_limits(args)
    levels = {"seed": args.seed, "distribution_mode": args.distribution_mode}
    made = [make_envs(env_id, args.num_envs, **levels) for env_id in args.env_ids]
    for env_id, envs in zip(args.env_ids, made, strict=True):
        returns = random_returns(envs, args.episodes, args.seed)
        error = returns.std() / returns.size**0.5
        print(f"{env_id} ({args.distribution_mode}): {returns.mean():.2f} +- {error:.2f} ({returns.size} episodes)")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
