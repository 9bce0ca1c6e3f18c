"""Procgen as a Gymnasium vector environment."""

import os
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

PROCGEN_GAMES = [
    *("bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot"),
    *("heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot"),
]
MAX_THREADS = 8  # 64 environments step in a third of a millisecond: more threads only wait for each other
# The C++ code aborts the whole process on any other pair of game and mode.
PROCGEN_MODES = {
    "easy": PROCGEN_GAMES,
    "hard": PROCGEN_GAMES,
    "extreme": ["chaser", "dodgeball", "leaper", "starpilot"],
    "memory": ["caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"],
    "exploration": ["caveflyer", "climber", "coinrun", "heist", "jumper", "leaper", "maze", "ninja"],
}


class ProcgenVectorEnv(VectorEnv):
    """Procgen's own vectorised environment. A step limit ends an episode like a death: `truncations` is always false.
    The last frame of an episode is not reported. Environment i plays `games[i % len(games)]`. `seed` is that of the
    level draws. C++ threads step all copies: `num_threads`, 0 for the caller's, None for one a core, 8 at most."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012

    def __init__(
        self, games: list[str], num_envs: int, seed: int, distribution_mode: str = "easy",
        num_levels: int = 0, start_level: int = 0, num_threads: int | None = None, render: bool = False,
    ):  # fmt: skip
        import gym_notices.notices

        gym_notices.notices.notices.clear()  # procgen imports the old gym, which would print that it is deprecated
        from procgen import ProcgenGym3Env

        self.num_envs = num_envs
        self.render_mode = "rgb_array" if render else None
        if num_threads is None:
            num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        options = {"distribution_mode": distribution_mode, "rand_seed": seed, "num_threads": num_threads}
        if distribution_mode != "exploration":  # which is one fixed level, and refuses these two
            options |= {"num_levels": num_levels, "start_level": start_level}
        self.gym3_env = ProcgenGym3Env(num_envs, ",".join(games), render_mode=self.render_mode, **options)
        self.single_observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(self.gym3_env.ac_space.eltype.n)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Return the current frames, uint8 [num_envs, 64, 64, 3]. Procgen starts episodes by itself: this does not."""
        _, observation, _ = self.gym3_env.observe()
        return observation["rgb"], {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Take one action in each environment: int [num_envs]."""
        self.gym3_env.act(actions)
        rewards, observation, first = self.gym3_env.observe()
        return observation["rgb"], rewards, first, np.zeros_like(first), {}

    def render(self) -> list[np.ndarray]:
        """The current frame of each environment, uint8 [512, 512, 3]."""
        return [info["rgb"] for info in self.gym3_env.get_info()]

    def close_extras(self, **kwargs: Any) -> None:
        self.gym3_env.close()
        del self.gym3_env  # here and now: cffi crashes where the garbage collector frees its buffers
