"""Procgen games and Gymnasium tasks behind one interface, in same-step autoreset mode: when `step` reports that an
episode has ended, the observation already belongs to the next one, and the reward to the action just taken."""

import difflib
import sys
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import ClipAction, RecordEpisodeStatistics, TransformAction

from common import InputError, TrainingError
from common.procgen_env import PROCGEN_GAMES, PROCGEN_MODES, ProcgenVectorEnv
from common.settings import HOST_MEMORY


def make_envs(
    env_id: str, num_envs: int, *, seed: int, capture_video: bool = False, pinned: bool = False, **settings: Any
) -> "Envs":
    """Make `num_envs` copies of a Procgen game (or of several: "coinrun,maze") or of a Gymnasium task.

    Observations are uint8 images [num_envs, height, width, channels] or vectors [num_envs, size]. Actions are int64
    [num_envs] for `Discrete`, and [num_envs, size] for `MultiBinary` and for `Box`, which is clipped to its bounds
    here and nowhere else. `infos["episode"]` holds the unnormalised return "r" and the length "l" of each episode that
    this step has finished, as `infos["_episode"]` marks it; `infos["final_obs"]` its last observation (not Procgen's).
    `seed` is for Procgen's level draws; `reset(seed=...)` seeds Gymnasium tasks. `capture_video` films environment 0
    once `envs.video.folder` is set. `pinned` keeps frames in one buffer of pinned memory, which each step overwrites.
    `settings` are Procgen's. Raises InputError as `check_envs`, and for a task that cannot be made."""
    check_envs(env_id, num_envs, **settings)
    games = env_id.split(",")
    if set(games) <= set(PROCGEN_GAMES):
        envs = ProcgenVectorEnv(games, num_envs, seed, render=capture_video, **settings)
    else:
        envs = make_gymnasium(env_id, num_envs, capture_video)
    if isinstance(envs.single_action_space, gym.spaces.Box):
        envs = ClipAction(envs)
    elif isinstance(envs.single_action_space, gym.spaces.MultiBinary):
        envs = TransformAction(envs, lambda actions: actions.astype(envs.single_action_space.dtype))
    return Envs(RecordFirstEnv(envs) if capture_video else envs, pinned)


def spread_seed(seed: int, number: int) -> int:
    """Seed number `number` of a run: `seed` itself for 0, others unlike any of a run with a neighbouring seed."""
    return seed if number == 0 else int(np.random.SeedSequence((seed, number)).generate_state(1)[0]) % 2**31


def finished_episodes(infos: dict[str, Any]) -> list[tuple[int, float, int]]:
    """The episodes that a step has finished: environment, return (as the environment gave it), length."""
    envs = np.flatnonzero(infos.get("_episode", ()))
    return [(int(env), float(infos["episode"]["r"][env]), int(infos["episode"]["l"][env])) for env in envs]


class Envs(RecordEpisodeStatistics):
    """A vector environment with episode statistics and a state to save. `obs` [N, ...] are those that await actions."""

    def __init__(self, envs: VectorEnv, pinned: bool = False):
        super().__init__(envs)
        self.video = envs if isinstance(envs, RecordFirstEnv) else None
        self.restorable = isinstance(self.unwrapped, ProcgenVectorEnv)
        self.pinned = pinned and isinstance(self.single_observation_space, gym.spaces.Box)
        self.obs = None

    def keep(self, obs: np.ndarray) -> np.ndarray:
        """Make these observations those that await actions, in pinned memory if the environments keep them there."""
        if not self.pinned:
            self.obs = obs
        elif self.obs is None:
            self.obs = torch.as_tensor(obs).pin_memory().numpy()
        else:
            self.obs[:] = obs
        return self.obs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        obs, infos = super().reset(seed=seed, options=options)
        return self.keep(obs), infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Raises TrainingError for an observation or a reward that is NaN or infinite."""
        obs, rewards, terminations, truncations, infos = super().step(actions)
        last_obs = infos["final_obs"][infos["_final_obs"]] if "final_obs" in infos else ()
        for name, values in {"an observation": [obs], "a reward": [rewards], "a last observation": last_obs}.items():
            if any(value.dtype.kind == "f" and not np.isfinite(value).all() for value in values):
                raise TrainingError(f"{name} of the environments is NaN or infinite")
        return self.keep(obs), rewards, terminations, truncations, infos

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each environment. Only Procgen's can be put back; others have a video's number at most."""
        video = {} if self.video is None else {"episode": self.video.episode}
        if not self.restorable:
            return [video] * self.num_envs
        games = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in self.unwrapped.gym3_env.get_state()]
        columns = games, self.obs, self.episode_returns.tolist(), self.episode_lengths.tolist()
        return [
            {"env": game, "obs": torch.tensor(obs), "return": total, "length": length} | video
            for game, obs, total, length in zip(*columns, strict=True)
        ]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Put environments that have been reset into `states`. Others than Procgen's start new episodes, and say so."""
        if self.video is not None:
            self.video.episode = states[0].get("episode", 0)  # 0: from before Gymnasium's states had it
        if not self.restorable:
            print("note: the environments cannot be put back where they were: new episodes begin", file=sys.stderr)
            self.reset()  # without a seed: other episodes than the run began with
            return
        self.unwrapped.gym3_env.set_state([state["env"].numpy().tobytes() for state in states])  # and their levels
        self.keep(np.stack([state["obs"].numpy() for state in states]))
        self.episode_returns[:] = [state["return"] for state in states]
        self.episode_lengths[:] = [state["length"] for state in states]


def make_gymnasium(env_id: str, num_envs: int, capture_video: bool) -> VectorEnv:
    """`gymnasium.make_vec` in same-step autoreset mode, with errors that say what to change."""
    drawn = {"render_mode": "rgb_array"} if capture_video else {}  # not every task knows the argument
    failures = (gym.error.Error, ImportError) + ((TypeError, AssertionError) if capture_video else ())
    same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
    try:
        if env_id.startswith("ALE/"):
            gym.register_envs(import_module("ale_py"))
        envs = gym.make_vec(env_id, num_envs, vectorization_mode="sync", vector_kwargs=same_step, **drawn)
        if capture_video:  # a package for drawing that is not there shows in the first frame only
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
    env_id: str, num_envs: int, *, distribution_mode: str = "easy",
    num_levels: int = 0, start_level: int = 0, num_threads: int | None = None, prefix: str = "",
) -> None:  # fmt: skip
    """Raise InputError for settings of `make_envs` that cannot work, or that Procgen aborts on or ignores. `prefix`
    precedes the names of the level flags in messages. This does not check whether a Gymnasium task exists."""
    games, mode = env_id.split(","), f"--distribution-mode {distribution_mode}"
    levels, start = f"--{prefix}num-levels", f"--{prefix}start-level"
    known, fixed = PROCGEN_MODES[distribution_mode], distribution_mode == "exploration"
    lacking = ", ".join(game for game in games if game not in known)
    gymnasium = not set(games) <= set(PROCGEN_GAMES)
    if gymnasium and len(games) > 1:
        raise unknown_env(env_id)
    shared = f"--num-envs {num_envs} cannot be shared by the games: use a multiple of {len(games)}."
    wrong = {shared: num_envs % len(games)}
    if gymnasium:
        only = f"--distribution-mode, {levels} and {start} are for Procgen: leave them out for {env_id}."
        wrong[only] = (distribution_mode, num_levels, start_level) != ("easy", 0, 0)
    else:
        wrong |= {
            f"{lacking} has no {distribution_mode} mode: {mode} works with {', '.join(known)}.": lacking,
            f"{mode} plays a single game: choose one of {', '.join(games)}.": fixed and len(games) > 1,
            f"{mode} is one fixed level: leave {levels} and {start} out.": fixed and (num_levels or start_level),
            f"--num-envs {num_envs} takes {num_envs / 1000:.0f} GB: lower it.": num_envs * 1e6 > HOST_MEMORY,
            f"--num-threads {num_threads} is out of range: use 0 to 1024.": not 0 <= (num_threads or 0) <= 1024,
            f"{start} and {levels} are too large: their sum must stay below 2**31.": start_level + num_levels >= 2**31,
            f"{start} has no effect while the levels are unlimited: set {levels}, too.": start_level and not num_levels,
        }
    for message, holds in wrong.items():
        if holds:
            raise InputError(message)


def open_video(file: Path | IO, fps: float) -> Any:
    """An MP4 with a method `write_frame` for uint8 [height, width, 3], and `close`. Needs the package av."""
    import imageio.v3  # comes with procgen; only videos need it

    writer = imageio.v3.imopen(file, "w", plugin="pyav", extension=".mp4")
    writer.init_video_stream("libx264", fps=fps)
    return writer


class RecordFirstEnv(VectorWrapper):
    """Write videos of environment 0 into `folder`, once that is set: episodes 0, 1, 8, 27, ... and every thousandth."""

    folder, episode, file = None, 0, None

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        cubic = round(self.episode ** (1 / 3)) ** 3 == self.episode  # the schedule of Gymnasium's RecordVideo
        if self.folder is not None and (cubic if self.episode < 1000 else self.episode % 1000 == 0):
            if self.file is None:
                self.folder.mkdir(exist_ok=True)
                self.file = open_video(self.folder / f"episode-{self.episode}.mp4", self.metadata.get("render_fps", 30))
            self.file.write_frame(self.env.render()[0])
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        if terminations[0] or truncations[0]:
            self.finish_video()
            self.episode += 1
        return obs, rewards, terminations, truncations, infos

    def finish_video(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def close(self, **kwargs: Any) -> None:
        self.finish_video()
        super().close(**kwargs)
