"""Procgen games and Gymnasium tasks behind one interface, in same-step autoreset mode: when `step` reports that an
episode has ended, the observation already belongs to the next one, and the reward to the action just taken."""

import difflib
import sys
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import ClipAction, RecordEpisodeStatistics, TransformAction

from common.errors import InputError, TrainingError
from common.procgen_env import PROCGEN_GAMES, PROCGEN_MODES, ProcgenVectorEnv
from common.settings import HOST_MEMORY
from common.video import RecordFirstEnv

State = dict[str, Any]  # of one environment: tensors and plain values


def make_envs(
    env_id: str, num_envs: int, *, seed: int, capture_video: bool = False, num_groups: int = 1, **settings: Any
) -> "Envs | EnvGroups":
    """Make `num_envs` copies of a Procgen game (or of several: "coinrun,maze") or of a Gymnasium task.

    Observations are uint8 images [num_envs, height, width, channels] or vectors [num_envs, size]. Actions are int64
    [num_envs] for `Discrete`, and [num_envs, size] for `MultiBinary` and for `Box`, which is clipped to its bounds
    here and nowhere else. `infos["episode"]` holds the unnormalised return "r" and the length "l" of each episode that
    this step has finished, as `infos["_episode"]` marks it; `infos["final_obs"]` its last observation (not Procgen's).
    `seed` is that of Procgen's level draws; `reset(seed=...)` seeds Gymnasium tasks. `settings` are Procgen's
    `num_threads`, `distribution_mode`, `num_levels` and `start_level`. With `capture_video`, environment 0 is filmed
    once `envs.video.folder` is set. Raises InputError if there is no such game or task, or its settings cannot work."""
    check_envs(env_id, num_envs, num_groups, **settings)
    if num_groups > 1:
        settings |= {"env_id": env_id, "num_envs": num_envs // num_groups}
        own = [{"seed": group_seed(seed, n), "capture_video": capture_video and n == 0} for n in range(num_groups)]
        return EnvGroups([make_envs(**settings, **each) for each in own])
    games = env_id.split(",")
    if set(games) <= set(PROCGEN_GAMES):
        envs = ProcgenVectorEnv(games, num_envs, seed, render=capture_video, **settings)
    else:
        envs = make_gymnasium(env_id, num_envs, render_mode="rgb_array" if capture_video else None)
    if isinstance(envs.single_action_space, gym.spaces.Box):
        envs = ClipAction(envs)
    elif isinstance(envs.single_action_space, gym.spaces.MultiBinary):
        envs = TransformAction(envs, lambda actions: actions.astype(envs.single_action_space.dtype))
    return Envs(RecordFirstEnv(envs) if capture_video else envs)


def group_seed(seed: int, number: int) -> int:
    """Seed of the environments in group `number`: `seed` for the first, for others unlike any of a neighbouring run."""
    return seed if number == 0 else int(np.random.SeedSequence((seed, number)).generate_state(1)[0]) % 2**31


def finished_episodes(infos: dict[str, Any]) -> list[tuple[int, float, int]]:
    """The episodes that a step has finished: environment, return (as the environment gave it), length."""
    return [
        (int(env), float(infos["episode"]["r"][env]), int(infos["episode"]["l"][env]))
        for env in np.flatnonzero(infos.get("_episode", ()))
    ]


class Envs(RecordEpisodeStatistics):
    """A vector environment with episode statistics, steps in two halves, and a state that a checkpoint can hold. `obs`
    [N, ...] are the observations that await actions. `groups` lists groups of environments with their numbers: one."""

    def __init__(self, envs: VectorEnv):
        super().__init__(envs)
        self.video = envs if isinstance(envs, RecordFirstEnv) else None
        self.restorable = isinstance(self.unwrapped, ProcgenVectorEnv)
        self.obs = self.actions = None

    @property
    def groups(self) -> list[tuple["Envs", slice]]:  # not kept, as it would be a reference cycle
        return [(self, slice(0, self.num_envs))]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self.obs, infos = super().reset(seed=seed, options=options)
        return self.obs, infos

    def step(self, actions: np.ndarray) -> tuple:
        """Raises TrainingError for an observation or a reward that is NaN or infinite."""
        self.obs, rewards, terminations, truncations, infos = super().step(actions)
        last = infos["final_obs"][infos["_final_obs"]] if "final_obs" in infos else ()
        for name, values in {"an observation": [self.obs], "a reward": [rewards], "a last observation": last}.items():
            if any(value.dtype.kind == "f" and not np.isfinite(value).all() for value in values):
                raise TrainingError(f"{name} of the environments is NaN or infinite")
        return self.obs, rewards, terminations, truncations, infos

    def step_async(self, actions: np.ndarray) -> None:
        """Begin a step, which `step_wait` finishes. Procgen's threads make it meanwhile (a video draws before it)."""
        if self.restorable and self.video is None:
            self.unwrapped.start(actions)
        self.actions = actions

    def step_wait(self) -> tuple:
        return self.step(self.actions)

    def state_dict(self) -> list[State]:
        """The state of each environment. Only Procgen's can be put back; others have a video's number at most."""
        video = {} if self.video is None else {"episode": self.video.episode}
        if not self.restorable:
            return [video] * self.num_envs
        columns = self.unwrapped.get_states(), self.obs, self.episode_returns.tolist(), self.episode_lengths.tolist()
        return [
            {"env": env, "obs": torch.tensor(obs), "return": total, "length": length} | video
            for env, obs, total, length in zip(*columns, strict=True)
        ]

    def load_state_dict(self, states: list[State]) -> None:
        """Put environments that have been reset into `states`. Others than Procgen's start new episodes, and say so."""
        if self.video is not None:
            self.video.episode = states[0].get("episode", 0)  # 0: from before Gymnasium's states had it
        if not self.restorable:
            print("note: the environments cannot be put back where they were: new episodes begin", file=sys.stderr)
            self.reset()  # without a seed: other episodes than the run began with
            return
        self.unwrapped.set_states([state["env"] for state in states])
        self.obs = np.stack([state["obs"].numpy() for state in states])
        self.episode_returns[:] = [state["return"] for state in states]
        self.episode_lengths[:] = [state["length"] for state in states]

    def replay(self, start: list[State], actions: torch.Tensor, frames: torch.Tensor) -> None:
        """Fill `frames` [K, T, N, ...] with what the environments showed on the way from `start` to where they are, by
        `actions` [K, T, N]: 2 MB instead of 1.6 GB. Raises InputError if they do not repeat what they did."""
        end = self.state_dict()
        for group, part in self.groups:
            group.load_state_dict(start[part])
            for k, t in np.ndindex(actions.shape[:2]):
                frames[k, t, part] = torch.as_tensor(group.obs)
                group.step(actions[k, t, part].numpy())
        for now, then in zip(self.state_dict(), end, strict=True):
            if not all(torch.equal(torch.as_tensor(now[name]), torch.as_tensor(then[name])) for name in then):
                raise InputError("the environments do not repeat what they did: is another version of them installed?")


class EnvGroups(VectorEnv):
    """Groups of environments that take turns: one group steps while the policy acts for the next (double-buffered
    sampling: Petrenko et al. 2020, https://arxiv.org/abs/2006.11751, section 3.2). Only a group has `step`."""

    def __init__(self, groups: list[Envs]):
        first, size = groups[0], groups[0].num_envs
        if first.single_observation_space.shape is None:  # of a Dict or Tuple
            raise NotImplementedError(f"no groups for {first.single_observation_space}: leave --num-env-groups out")
        self.groups = [(group, slice(n * size, (n + 1) * size)) for n, group in enumerate(groups)]
        self.num_envs, self.restorable, self.video = len(groups) * size, first.restorable, first.video
        self.single_observation_space = first.single_observation_space
        self.single_action_space = first.single_action_space

    @property
    def obs(self) -> np.ndarray:
        return np.concatenate([group.obs for group, _ in self.groups])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        for group, part in self.groups:
            group.reset(seed=None if seed is None else seed + part.start, options=options)
        return self.obs, {}

    def state_dict(self) -> list[State]:
        return [state for group, _ in self.groups for state in group.state_dict()]

    def load_state_dict(self, states: list[State]) -> None:
        for group, part in self.groups:
            group.load_state_dict(states[part])

    replay = Envs.replay

    def close_extras(self, **kwargs: Any) -> None:
        for group, _ in self.groups:
            group.close(**kwargs)


def make_gymnasium(env_id: str, num_envs: int, render_mode: str | None) -> VectorEnv:
    """`gymnasium.make_vec` in same-step autoreset mode, with errors that say what to change."""
    drawn = {} if render_mode is None else {"render_mode": render_mode}  # not every task knows the argument
    same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
    failures = (gym.error.Error, ImportError) + ((TypeError, AssertionError) if drawn else ())  # of tasks without video
    try:
        if env_id.startswith("ALE/"):
            gym.register_envs(import_module("ale_py"))
        envs = gym.make_vec(env_id, num_envs, vectorization_mode="sync", vector_kwargs=same_step, **drawn)
        if drawn:  # a package for drawing that is not there shows in the first frame only
            envs.reset()
            envs.render()
        return envs
    except failures as error:
        if isinstance(error, gym.error.UnregisteredEnv) or "Malformed" in str(error):
            raise unknown_env(env_id) from None
        raise InputError(f"--env-id {env_id} cannot be made{' for a video' if drawn else ''}: {error}") from error


def unknown_env(env_id: str) -> InputError:
    """The error for an id that is no Procgen game, list of such games or Gymnasium id."""
    near = difflib.get_close_matches(env_id, [*PROCGEN_GAMES, *gym.registry], 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    games = f"Procgen games are {', '.join(PROCGEN_GAMES)} (join several by commas)"
    return InputError(f"--env-id {env_id!r} is not known.{hint} {games}; any Gymnasium id (CartPole-v1) works too.")


def check_envs(
    env_id: str,
    num_envs: int,
    num_groups: int = 1,
    *,
    distribution_mode: str = "easy",
    num_levels: int = 0,
    start_level: int = 0,
    num_threads: int = 4,
    prefix: str = "",
) -> None:
    """Raise InputError for settings of `make_envs` that cannot work, or that Procgen aborts on or ignores. `prefix`
    precedes the names of the level flags in messages. This does not check whether a Gymnasium task exists."""
    games, mode = env_id.split(","), f"--distribution-mode {distribution_mode}"
    levels, start = f"--{prefix}num-levels", f"--{prefix}start-level"
    procgen = set(games) <= set(PROCGEN_GAMES)
    if not procgen and len(games) > 1:
        raise unknown_env(env_id)
    if num_envs % (share := num_groups * len(games)):
        raise InputError(f"--num-envs {num_envs} cannot be shared evenly: use a multiple of {share} (groups x games).")
    if not procgen:
        only = f"--distribution-mode, {levels} and {start} are for Procgen: leave them out for {env_id}."
        wrong = {only: (distribution_mode, num_levels, start_level) != ("easy", 0, 0)}
    else:
        known, fixed = PROCGEN_MODES[distribution_mode], distribution_mode == "exploration"
        lacking = ", ".join(game for game in games if game not in known)
        wrong = {
            f"{lacking} has no {distribution_mode} mode: {mode} works with {', '.join(known)}.": lacking,
            f"{mode} plays a single game: choose one of {', '.join(games)}.": fixed and len(games) > 1,
            f"{mode} is one fixed level: leave {levels} and {start} out.": fixed and (num_levels or start_level),
            f"--num-envs {num_envs} takes {num_envs / 1000:.0f} GB: lower it.": num_envs * 1e6 > HOST_MEMORY,
            f"--num-threads {num_threads} is out of range: use 0 to 1024.": not 0 <= num_threads <= 1024,
            f"{start} and {levels} are too large: their sum must stay below 2**31.": start_level + num_levels >= 2**31,
            f"{start} has no effect while the levels are unlimited: set {levels}, too.": start_level and not num_levels,
        }
    for message, holds in wrong.items():
        if holds:
            raise InputError(message)
