"""Procgen games and Gymnasium tasks behind one interface.

`make_envs` returns a `gymnasium.vector.VectorEnv` in same-step autoreset mode: when `step` reports that an episode has
ended, the observation it returns already belongs to the next one, and the reward to the action just taken.
"""

import difflib
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import ClipAction, RecordEpisodeStatistics, TransformAction

from common.errors import InputError, TrainingError
from common.procgen_env import PROCGEN_GAMES, PROCGEN_MODES, ProcgenVectorEnv
from common.video import RecordFirstEnv

State = dict[str, Any]  # of one environment: tensors and plain values, or empty if it cannot be put back


def make_envs(
    env_id: str,
    num_envs: int,
    *,
    seed: int,
    distribution_mode: str = "easy",
    num_levels: int = 0,
    start_level: int = 0,
    num_threads: int = 4,
    capture_video: bool = False,
    num_groups: int = 1,
) -> "Envs | EnvGroups":
    """Make `num_envs` copies of a Procgen game (or of several: "coinrun,maze") or of a Gymnasium task.

    Observations are uint8 images [num_envs, height, width, channels] or vectors [num_envs, size]. Actions are int64
    [num_envs] for `Discrete`, and [num_envs, size] for `MultiBinary` and for `Box`, which is clipped to its bounds
    here and nowhere else. `infos["episode"]` holds the unnormalised return "r" and the length "l" of each episode that
    this step has finished, as `infos["_episode"]` marks it; `infos["final_obs"]` holds its last observation (not
    Procgen's).

    Args:
        seed: of Procgen's level draws. Gymnasium tasks are seeded by `reset(seed=...)`, which Procgen ignores.
        distribution_mode, num_levels, start_level, num_threads: of Procgen; see `ProcgenVectorEnv`.
        capture_video: make environments that can `render`, and that `film` can be called on.
        num_groups: with more than one, an `EnvGroups`; see there.

    Raises:
        InputError: there is no such game or task, or its settings or spaces cannot work.
    """
    check_envs(env_id, num_envs, seed, distribution_mode, num_levels, start_level, num_threads, num_groups)
    levels = {"distribution_mode": distribution_mode, "num_levels": num_levels, "start_level": start_level}
    if num_groups > 1:
        if capture_video:
            raise InputError("--capture-video needs all environments in one group: leave --num-env-groups out.")
        settings = levels | {"num_threads": num_threads}
        seeds = [group_seed(seed, number) for number in range(num_groups)]
        return EnvGroups([make_envs(env_id, num_envs // num_groups, seed=each, **settings) for each in seeds])
    games = env_id.split(",")
    if set(games) <= set(PROCGEN_GAMES):
        envs = ProcgenVectorEnv(games, num_envs, seed, num_threads=num_threads, render=capture_video, **levels)
    else:
        envs = make_gymnasium(env_id, num_envs, render_mode="rgb_array" if capture_video else None)
        try:
            check_spaces(env_id, envs.single_observation_space, envs.single_action_space)
        except InputError:
            envs.close()
            raise
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
    """A vector environment with episode statistics, steps in two halves, and a state that a checkpoint can hold.

    `obs` [N, ...] are the observations that await actions. `groups` lists pairs of environments that are stepped
    together and their numbers, as a slice: here a single group.
    """

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

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Raises TrainingError for an observation or a reward that is NaN or infinite."""
        self.obs, rewards, terminations, truncations, infos = super().step(actions)
        values = {"observation": self.obs, "reward": rewards}
        if "final_obs" in infos:
            values["last observation"] = self.obs.copy()
            for env in np.flatnonzero(infos["_final_obs"]):
                values["last observation"][env] = infos["final_obs"][env]
        for name, value in values.items():
            bad = value.dtype.kind == "f" and ~np.isfinite(value).reshape(self.num_envs, -1).all(axis=1)
            if np.any(bad):
                batch = {each: torch.as_tensor(x) for each, x in (values | {"action": actions}).items()}
                raise TrainingError(f"the {name} of environment {np.argmax(bad)} is NaN or infinite", batch)
        return self.obs, rewards, terminations, truncations, infos

    def step_async(self, actions: np.ndarray) -> None:
        """Begin a step, which `step_wait` finishes. Procgen's threads make it meanwhile (a video draws before it)."""
        if self.restorable and self.video is None:
            self.unwrapped.start(actions)
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Finish the step that `step_async` began; returns what `step` returns."""
        return self.step(self.actions)

    def film(self, folder: Path) -> None:
        """Write videos of environment 0 into `folder` (needs `capture_video`)."""
        self.video.folder = folder

    def states(self) -> list[State]:
        """The state of each environment. Only Procgen's can be put back; others are empty."""
        if not self.restorable:
            return [{} for _ in range(self.num_envs)]
        return [
            {
                "env": state,
                "obs": torch.as_tensor(self.obs[n]).clone(),
                "return": float(self.episode_returns[n]),
                "length": int(self.episode_lengths[n]),
                "episode": 0 if self.video is None else self.video.episode,
            }
            for n, state in enumerate(self.unwrapped.get_states())
        ]

    def load_states(self, states: list[State]) -> None:
        """Put environments that have been reset into `states`. Others than Procgen's start new episodes, and say so."""
        if not self.restorable:
            print(
                "note: these environments cannot be put back where they were: they start new episodes", file=sys.stderr
            )
            self.reset()  # without a seed: other episodes than the run began with
            return
        self.unwrapped.set_states([state["env"] for state in states])
        self.obs = np.stack([state["obs"].numpy() for state in states])
        for n, state in enumerate(states):
            self.episode_returns[n], self.episode_lengths[n] = state["return"], state["length"]
        if self.video is not None:
            self.video.episode = states[0]["episode"]

    def replay(self, start: list[State], actions: torch.Tensor, frames: torch.Tensor) -> None:
        """Fill `frames` [K, T, N, ...] with what the environments showed on the way from `start` to where they are.

        The frames of a policy phase of Procgen are 6.4 GB. `start` and the `actions` [K, T, N] are 7 MB, and a replay
        takes some 35 us a step. Raises InputError if the environments do not repeat what they did.
        """
        end = self.states()
        for group, part in self.groups:
            group.load_states(start[part])
            for k, t in np.ndindex(actions.shape[:2]):
                frames[k, t, part] = torch.as_tensor(group.obs)
                group.step(actions[k, t, part].numpy())
        for now, then in zip(self.states(), end, strict=True):
            if not all(torch.equal(torch.as_tensor(now[name]), torch.as_tensor(then[name])) for name in then):
                raise InputError("the environments do not repeat what they did: is another version of them installed?")

    def state_dict(self) -> dict[str, list[State]]:
        return {"states": self.states()}

    def load_state_dict(self, state: dict[str, list[State]]) -> None:
        self.load_states(state["states"])


class EnvGroups(VectorEnv):
    """Groups of environments that take turns: one group steps while the policy acts for the next.

    (Double-buffered sampling: Petrenko et al. 2020, https://arxiv.org/abs/2006.11751, section 3.2.) `groups` lists
    them with the numbers of their environments; `reset` and the functions for states are for all, `step` is a group's.
    """

    def __init__(self, groups: list[Envs]):
        size = groups[0].num_envs
        self.groups = [(group, slice(n * size, (n + 1) * size)) for n, group in enumerate(groups)]
        self.num_envs, self.restorable = len(groups) * size, groups[0].restorable
        self.single_observation_space = groups[0].single_observation_space
        self.single_action_space = groups[0].single_action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, self.num_envs)

    @property
    def obs(self) -> np.ndarray:
        return np.concatenate([group.obs for group, _ in self.groups])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Reset all groups; returns all observations [N, ...] and no infos."""
        for group, part in self.groups:
            group.reset(seed=None if seed is None else seed + part.start, options=options)
        return self.obs, {}

    def states(self) -> list[State]:
        return [state for group, _ in self.groups for state in group.states()]

    def load_states(self, states: list[State]) -> None:
        for group, part in self.groups:
            group.load_states(states[part])

    replay, state_dict, load_state_dict = Envs.replay, Envs.state_dict, Envs.load_state_dict

    def close_extras(self, **kwargs: Any) -> None:
        for group, _ in self.groups:
            group.close(**kwargs)


def make_gymnasium(env_id: str, num_envs: int, render_mode: str | None) -> VectorEnv:
    """`gymnasium.make_vec` in same-step autoreset mode, with errors that say what to change."""
    try:
        if env_id.startswith("ALE/"):
            gym.register_envs(import_module("ale_py"))
        envs = gym.make_vec(
            env_id,
            num_envs,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
            **({} if render_mode is None else {"render_mode": render_mode}),  # not every task knows the argument
        )
        if render_mode is not None:  # a package for drawing that is not there shows in the first frame only
            envs.reset()
            envs.render()
        return envs
    except (gym.error.Error, ImportError) as error:
        if isinstance(error, gym.error.UnregisteredEnv) or "Malformed" in str(error):
            raise unknown_env(env_id) from None
        raise InputError(f"--env-id {env_id} cannot be made: {error}") from error


def unknown_env(env_id: str) -> InputError:
    """The error for an id that is no Procgen game, list of such games or Gymnasium id."""
    names = env_id.split(",")
    known = PROCGEN_GAMES if len(names) > 1 else [*PROCGEN_GAMES, *gym.registry]
    near = [next(iter(difflib.get_close_matches(name, known, 1)), "") for name in names]
    hint = f" Did you mean {','.join(near)}?" if all(near) else ""
    return InputError(
        f"--env-id {env_id!r} is not known.{hint} The Procgen games are {', '.join(PROCGEN_GAMES)} (join several by "
        "commas); any Gymnasium id such as CartPole-v1 works too."
    )


def check_envs(
    env_id: str,
    num_envs: int,
    seed: int,
    distribution_mode: str,
    num_levels: int,
    start_level: int,
    num_threads: int,
    num_groups: int = 1,
    prefix: str = "",
) -> None:
    """Raise InputError for settings of `make_envs` that cannot work, and for those that Procgen aborts on or ignores.

    `prefix` precedes the names of the level flags in messages. Whether a Gymnasium task exists is not checked here.
    """
    games, mode = env_id.split(","), f"--distribution-mode {distribution_mode}"
    levels, start = f"--{prefix}num-levels", f"--{prefix}start-level"
    procgen, known = set(games) <= set(PROCGEN_GAMES), PROCGEN_MODES.get(distribution_mode, [])
    if not procgen and len(games) > 1:
        raise unknown_env(env_id)
    shares = num_groups * (len(games) if procgen else 1)
    wrong = {
        f"--num-envs {num_envs} is too small: use at least 1.": num_envs < 1,
        f"--num-envs {num_envs} cannot be shared by {num_groups} groups of {len(games)} games: use a multiple of "
        f"{shares}.": num_envs % shares,
    }
    if not procgen:
        is_set = (distribution_mode, num_levels, start_level) != ("easy", 0, 0)
        wrong[f"--distribution-mode, {levels} and {start} are for Procgen games: leave them out for {env_id}."] = is_set
    else:
        lacking = ", ".join(game for game in games if game not in known)
        fixed = distribution_mode == "exploration"
        wrong |= {
            f"{mode} is not known: use one of {', '.join(PROCGEN_MODES)}.": not known,
            f"{lacking} has no {distribution_mode} mode: {mode} works with {', '.join(known)}.": lacking,
            f"{mode} plays a single game: choose one of {', '.join(games)}.": fixed and len(games) > 1,
            f"{mode} is one fixed level: leave {levels} and {start} out.": fixed and (num_levels or start_level),
            f"{levels} {num_levels} is negative: use 0 or more.": num_levels < 0,
            f"{start} {start_level} is negative: use 0 or more.": start_level < 0,
            f"--num-threads {num_threads} is out of range: use 0 to 1024.": not 0 <= num_threads <= 1024,
            f"{start} and {levels} are too large: their sum must stay below {2**31}.": start_level + num_levels
            >= 2**31,
            f"{start} has no effect while the levels are unlimited: set {levels}, too.": start_level and not num_levels,
            f"--seed {seed} is out of Procgen's range: use 0 to {2**31 - 1}.": not 0 <= seed < 2**31,
        }
    for message, holds in wrong.items():
        if holds:
            raise InputError(message)


def check_spaces(env_id: str, observation_space: gym.Space, action_space: gym.Space) -> None:
    """Raise InputError for a space that the networks have no input or no distribution for."""
    box = isinstance(observation_space, gym.spaces.Box)
    shape = observation_space.shape or ()
    image = box and len(shape) == 3 and observation_space.dtype == np.uint8 and shape[2] <= 4
    if not image and not (box and len(shape) == 1):
        raise InputError(
            f"{env_id} has the observation space {observation_space}, which is not supported: wrap it so that it gives "
            "uint8 images [height, width, channels] of 1 to 4 channels, or flat vectors."
        )
    discrete = isinstance(action_space, gym.spaces.Discrete) and action_space.start == 0
    flat = isinstance(action_space, gym.spaces.Box | gym.spaces.MultiBinary) and len(action_space.shape) == 1
    if not discrete and not flat:
        raise InputError(
            f"{env_id} has the action space {action_space}, which is not supported: wrap it so that it takes Discrete "
            "(counted from 0), or one-dimensional Box or MultiBinary actions."
        )
