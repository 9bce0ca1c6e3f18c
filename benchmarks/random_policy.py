"""Mean return of uniformly random actions: what a learning curve has to rise above.

    python benchmarks/random_policy.py --env-ids starpilot fruitbot

Every environment plays the same number of episodes, so that short episodes do not count more often than long ones.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
from common.envs import make_envs
from common.procgen_env import PROCGEN_GAMES


@dataclass
class Args:
    env_ids: tuple[str, ...] = tuple(PROCGEN_GAMES)
    """games to play"""
    distribution_mode: str = "easy"
    """Procgen's difficulty"""
    num_envs: int = 64
    """environments"""
    episodes: int = 16
    """episodes of each environment"""
    seed: int = 1
    """seed of levels and actions"""


def random_returns(env_id: str, args: Args) -> np.ndarray:
    """The returns [num_envs, episodes] of random actions in unlimited levels."""
    rng = np.random.default_rng(args.seed)
    envs = make_envs(env_id, args.num_envs, seed=args.seed, distribution_mode=args.distribution_mode)
    envs.reset(seed=args.seed)
    returns = [[] for _ in range(args.num_envs)]
    while min(map(len, returns)) < args.episodes:
        infos = envs.step(rng.integers(envs.single_action_space.n, size=args.num_envs))[-1]
        for env in np.flatnonzero(infos.get("_episode", ())):
            returns[env].append(infos["episode"]["r"][env])
    envs.close()
    return np.array([episodes[: args.episodes] for episodes in returns])


def main(args: Args) -> None:
    for env_id in args.env_ids:
        returns = random_returns(env_id, args)
        error = returns.std() / returns.size**0.5
        print(f"{env_id} ({args.distribution_mode}): {returns.mean():.2f} +- {error:.2f} ({returns.size} episodes)")


if __name__ == "__main__":
    main(tyro.cli(Args))
