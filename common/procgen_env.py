"""Procgen as a Gymnasium vector environment."""

import ctypes
import importlib.util
import os
import struct
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from common import InputError
from common.settings import EnvArgs, ProcgenArgs

PROCGEN_GAMES = [
    *("bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot"),
    *("heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot"),
]
MAX_THREADS = 8  # 64 environments step in a third of a millisecond: more threads only wait for each other
PROCGEN_MODES = {  # the C++ code aborts the whole process on any other pair of game and mode
    "easy": PROCGEN_GAMES,
    "hard": PROCGEN_GAMES,
    "extreme": ["chaser", "dodgeball", "leaper", "starpilot"],
    "memory": ["caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"],
    "exploration": ["caveflyer", "climber", "coinrun", "heist", "jumper", "leaper", "maze", "ninja"],
}
MODE_NUMBERS = {"easy": 0, "hard": 1, "extreme": 2, "memory": 10}
EXPLORATION_LEVELS = [1259048185, 1561126160, 1949448038, 876640971, 1434825276, 1318677581, 158988835, 1123500215]
LAST_LEVEL = 2**31 - 1  # the first that is no level
STATE_SIZE = 2**20  # bytes: the largest state
C_FUNCTIONS = ["int get_state(libenv_env *, int, char *, int);", "void set_state(libenv_env *, int, char *, int);"]
# Two packages have the same C++ library: procgen-mirror up to Python 3.12, procgen-gym from 3.13 on.
PACKAGE = "procgen" if importlib.util.find_spec("procgen") else "procgen_gym"


class ProcgenVectorEnv(VectorEnv):
    """Procgen's own vectorised environment. A step limit ends an episode like a death: `truncations` is always false.
    The last frame of an episode is not reported. Environment i plays game i modulo their number. `seed` is that of the
    level draws. C++ threads step all copies: `--num-threads`, 0 for the caller's, None for one a core, 8 at most.
    `infos` hold Procgen's `level_seed` and `prev_level_seed`, int32 [num_envs], and `prev_level_complete`, bool
    [num_envs]. Where a step has ended an episode, the latter two are about that episode."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012

    def __init__(self, args: EnvArgs, num_envs: int, seed: int, render: bool = False):
        self.games, self.num_envs = args.env_id.split(","), num_envs
        self.render_mode = "rgb_array" if render else None
        self.package = PACKAGE
        self.replayable = True  # whether its state and the actions determine what follows
        levels, mode = (args.start_level, args.num_levels), args.distribution_mode
        if mode == "exploration":  # one level of the hard mode
            levels = dict(zip(PROCGEN_MODES[mode], EXPLORATION_LEVELS, strict=True))[self.games[0]], 1
            mode = "hard"
        self.levels = (levels[0], sum(levels)) if levels[1] else (0, LAST_LEVEL)  # the first, and the first beyond
        options = {name: getattr(args, name) for name in vars(ProcgenArgs())}
        threads = min(MAX_THREADS, len(os.sched_getaffinity(0))) if args.num_threads is None else args.num_threads
        data = Path(importlib.util.find_spec(self.package).origin).parent / "data"
        options |= {"env_name": args.env_id, "distribution_mode": MODE_NUMBERS[mode], "num_actions": 15}
        options |= {"start_level": levels[0], "num_levels": levels[1], "rand_seed": seed, "num_threads": threads}
        options |= {"render_human": render, "debug_mode": 0, "resource_root": f"{data / 'assets'}{os.sep}"}
        made = {"lib_dir": str(data / "prebuilt"), "num": num_envs, "options": options, "c_func_defs": C_FUNCTIONS}
        if self.package == "procgen":
            from gym3.libenv import CEnv

            self.library = CEnv(**made)
            self.infos = self.library._info
        else:
            from procgen_gym.libenv import CLibenv

            self.library = CLibenv(**made)
            self.infos = self.library.get_info_bufs()
        self.buffer = bytearray(STATE_SIZE)
        self.single_observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(15)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def act(self, actions: np.ndarray) -> None:
        actions = actions.astype(np.int32)
        self.library.act({"action": actions} if self.package == "procgen" else actions)

    def observe(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Frames, rewards, whether a new episode has begun, and infos."""
        if self.package == "procgen":
            rewards, observation, first = self.library.observe()
        else:
            first, observation, rewards, _ = self.library.observe()
        infos = {name: self.infos[name].copy() for name in ("level_seed", "prev_level_seed")}
        infos["prev_level_complete"] = self.infos["prev_level_complete"].astype(bool)
        return observation["rgb"], rewards, first.astype(bool), infos

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Return the current frames, uint8 [num_envs, 64, 64, 3]. Procgen starts episodes by itself: this does not,
        unless `options` have "levels" [num_envs]. They begin at once, and are played until others are chosen."""
        if options is not None and "levels" in options:
            for env, level in zip(range(self.num_envs), options["levels"], strict=True):
                self.set_next_level(env, level)
            self.act(np.full(self.num_envs, -1))  # which ends each episode
        frames, _, _, infos = self.observe()
        return frames, infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Take one action in each environment: int [num_envs]."""
        self.act(actions)
        frames, rewards, first, infos = self.observe()
        return frames, rewards, first, np.zeros_like(first), infos

    def render(self) -> list[np.ndarray]:
        """The current frame of each environment, uint8 [64, 64, 3], or [512, 512, 3] if they were made to `render`."""
        frames, *_ = self.observe()
        return list(self.infos["rgb"].copy() if self.render_mode else frames.copy())

    def get_state(self, env: int) -> bytes:
        """The whole state of environment number `env`."""
        if self.package == "procgen":
            pointer = self.library._ffi.from_buffer(self.buffer)
        else:
            pointer = (ctypes.c_char * STATE_SIZE).from_buffer(self.buffer)
        return bytes(self.buffer[: self.library.call_c_func("get_state", int(env), pointer, STATE_SIZE)])

    def set_state(self, env: int, state: bytes) -> None:
        self.library.call_c_func("set_state", int(env), state, len(state))

    def state_dict(self) -> list[dict[str, torch.Tensor]]:
        """The state of each environment."""
        states = [self.get_state(env) for env in range(self.num_envs)]
        return [{"env": torch.frombuffer(bytearray(state), dtype=torch.uint8)} for state in states]

    def load_state_dict(self, states: list[dict[str, torch.Tensor]]) -> None:
        for env, state in enumerate(states):
            self.set_state(env, state["env"].numpy().tobytes())

    def set_next_level(self, env: int, level: int | None) -> None:
        """Choose the level of the next episode of environment number `env`, and of all that follow, by its seed; None
        for levels as the environment was made with. The episode that is under way goes on.
        This changes two numbers in the environment's state: the first level that may be drawn, and the first beyond.
        Raises InputError for numbers that there are not, and where the state is not laid out as Procgen 0.10 does."""
        first, beyond = self.levels if level is None else (int(level), int(level) + 1)
        if not (0 <= env < self.num_envs and 0 <= first < beyond <= LAST_LEVEL):
            raise InputError(f"level {level}, environment {env}: use at most {LAST_LEVEL - 1} and {self.num_envs - 1}.")
        state = bytearray(self.get_state(env))
        game = self.games[env % len(self.games)].encode()
        name, place = struct.pack("<ii", 0, len(game)) + game, 60 + len(game)  # version 0
        now = struct.unpack_from("<ii", state, place)
        if not state.startswith(name) or not 0 <= now[0] < now[1] <= LAST_LEVEL:
            raise InputError("levels cannot be chosen: the states of this version of Procgen are not known.")
        struct.pack_into("<ii", state, place, first, beyond)
        self.set_state(env, bytes(state))
        self.replayable = False

    def close_extras(self, **kwargs: Any) -> None:
        self.library.close()
        del self.library, self.infos  # here and now: cffi crashes where the garbage collector frees its buffers
