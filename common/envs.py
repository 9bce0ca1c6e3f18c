"""Procgen games and Gymnasium tasks behind one interface, in same-step autoreset mode: when `step` reports that an
episode has ended, the observation already belongs to the next one, and the reward to the action just taken."""

import copy
import difflib
import io
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import ClipAction, RecordEpisodeStatistics

from common import InputError, TrainingError
from common.procgen_env import PROCGEN_GAMES, PROCGEN_MODES, ProcgenVectorEnv
from common.settings import HOST_MEMORY, EnvArgs, ProcgenArgs, flag


def make_vec(args: EnvArgs, num_envs: int, seed: int, render: bool = False) -> VectorEnv:
    """Make `num_envs` copies of what `--env-id` names: a Procgen game, several ("coinrun,maze") or a Gymnasium task.
    `seed` is for Procgen's level draws; `reset(seed=...)` seeds Gymnasium tasks. With `render` these can be drawn, and
    Procgen draws 512x512 pixels. Raises InputError as `check_envs`, and for a task that cannot be made."""
    check_envs(args, num_envs)
    if set(args.env_id.split(",")) <= set(PROCGEN_GAMES):
        envs = ProcgenVectorEnv(args, num_envs, seed, render)
    else:
        envs = make_gymnasium(args.env_id, num_envs, seed, render)
    if args.frame_stack == 1:
        return envs
    shape = envs.single_observation_space.shape or ()
    grey = len(shape) == 2 and args.frame_stack >= min(shape)  # the networks would take columns for channels
    if len(shape) < 2 or grey or (len(shape) == 3 and shape[0] < min(shape[1], shape[2] * args.frame_stack)):
        envs.close()
        raise InputError(f"--frame-stack is for images with the channels last, and few: lower it for {args.env_id}.")
    return FrameStack(envs, args.frame_stack)


def spread_seed(seed: int, number: int) -> int:
    """Seed number `number` of a run: `seed` itself for 0, others unlike any of a run with a neighbouring seed."""
    return seed if number == 0 else int(np.random.SeedSequence((seed, number)).generate_state(1)[0]) % 2**31


class Episode(NamedTuple):
    """A finished episode."""

    env: int  # number of the environment
    episodic_return: float  # as the environment gave it
    length: int  # steps
    level_seed: int | None  # the Procgen level that it was played on
    level_complete: int | None  # 1 if that level was solved, else 0


def finished_episodes(infos: dict[str, Any]) -> list[Episode]:
    """The episodes that a step has finished."""
    episodes = []
    for env in np.flatnonzero(infos.get("_episode", ())):
        level = None, None
        if "prev_level_seed" in infos:
            level = int(infos["prev_level_seed"][env]), int(infos["prev_level_complete"][env])
        episodes.append(Episode(int(env), float(infos["episode"]["r"][env]), int(infos["episode"]["l"][env]), *level))
    return episodes


class FrameStack(VectorWrapper):
    """The newest `size` observations of each environment, [size, ...], the oldest first. At the start of an episode all
    are its first, as with Gymnasium's FrameStackObservation, which is for single environments."""

    def __init__(self, envs: VectorEnv, size: int):
        super().__init__(envs)
        self.size = size
        self.single_observation_space = batch_space(envs.single_observation_space, size)
        self.observation_space = batch_space(self.single_observation_space, envs.num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        obs, infos = self.env.reset(seed=seed, options=options)
        self.frames = np.stack([obs] * self.size, axis=1)
        return self.frames.copy(), infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        ended = np.logical_or(terminations, truncations)
        for env in np.flatnonzero(infos.get("_final_obs", ())):
            infos["final_obs"][env] = np.stack([*self.frames[env, 1:], infos["final_obs"][env]])
        self.frames = np.concatenate([self.frames[:, 1:], obs[:, None]], axis=1)
        self.frames[ended] = obs[ended, None]
        return self.frames.copy(), rewards, terminations, truncations, infos

    def state_dict(self) -> list[dict[str, torch.Tensor]]:
        return [{"frames": torch.tensor(frames)} for frames in self.frames]

    def load_state_dict(self, states: list[dict[str, torch.Tensor]]) -> None:
        self.frames = np.stack([state["frames"].numpy() for state in states])


class Envs(RecordEpisodeStatistics):
    """Environments as the scripts use them: `envs`, which reset in the same step, with episode statistics and a state.
    Observations are uint8 images [num_envs, height, width, channels] or vectors [num_envs, size]; stacks of images
    [size, height, width, channels] become images of more channels. Actions are int64 [num_envs] for `Discrete`, and
    [num_envs, size] for `MultiBinary` and for `Box`, which is clipped to its bounds here and nowhere else.
    `infos["episode"]` holds the return "r" and the length "l" of each episode that a step has finished, as
    `infos["_episode"]` marks it; `infos["final_obs"]` its last observation (not Procgen's). `obs` [num_envs, ...] are
    those that await actions. `video` films environment 0 once `envs.video.folder` is set. Raises InputError for
    environments that reset otherwise; `reset` and `step` raise TrainingError for NaN and infinity."""

    def __init__(self, envs: VectorEnv, video: bool = False):
        if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            raise InputError(f"{envs} does not reset in the same step: give it AutoresetMode.SAME_STEP.")
        self.video = RecordFirstEnv(envs) if video else None
        envs = self.video or envs
        bounded = envs.single_action_space
        if isinstance(bounded, gym.spaces.Box):
            envs = ClipAction(envs)
        super().__init__(envs)
        self.single_action_space = bounded  # ClipAction's has no bounds, which ICM needs
        self.chain = [envs]  # the layers are those that have a state
        while isinstance(self.chain[-1], VectorWrapper):
            self.chain.append(self.chain[-1].env)
        self.layers = [each for each in self.chain if hasattr(each, "state_dict")]
        self.restorable = hasattr(self.unwrapped, "state_dict")
        space = self.single_observation_space
        self.stacks = len(space.shape or ()) == 4 and space.dtype == np.uint8
        if self.stacks:
            size, height, width, channels = space.shape
            self.single_observation_space = gym.spaces.Box(0, 255, (height, width, size * channels), np.uint8)
            self.observation_space = batch_space(self.single_observation_space, envs.num_envs)

    @property
    def replayable(self) -> bool:
        """Whether a state of these environments and the actions after it determine all that follows."""
        return self.restorable and all(getattr(each, "replayable", True) for each in self.chain)

    def merge(self, obs: np.ndarray) -> np.ndarray:
        """Stacks of images [..., size, height, width, channels] as images [..., height, width, size x channels]."""
        if not self.stacks:
            return obs
        return np.moveaxis(obs, -4, -2).reshape(*obs.shape[:-4], *self.single_observation_space.shape)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        obs, infos = super().reset(seed=seed, options=options)
        check_finite("an observation", obs)
        self.obs = self.merge(obs)
        return self.obs, infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        actions = actions.astype(self.single_action_space.dtype)  # bits are drawn as float32
        obs, rewards, terminations, truncations, infos = super().step(actions)
        check_finite("an observation", obs)
        check_finite("a reward", rewards)
        for env in np.flatnonzero(infos.get("_final_obs", ())):
            infos["final_obs"][env] = self.merge(infos["final_obs"][env])
            check_finite("a last observation", infos["final_obs"][env])
        self.obs = self.merge(obs)
        return self.obs, rewards, terminations.astype(bool), truncations.astype(bool), infos  # numbers would be indices

    def close(self, **kwargs: Any) -> None:
        try:
            super().close(**kwargs)
        except (Exception, SystemExit) as error:  # the run's own end says how the process ends
            print(f"warning: the environments cannot be closed ({error!r})", file=sys.stderr)

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each environment: of its layers and, if it can be put back, its observation and statistics."""
        states = [{} for _ in range(self.num_envs)]
        if self.restorable:
            columns = self.obs, self.episode_returns.tolist(), self.episode_lengths.tolist()
            for state, obs, total, length in zip(states, *columns, strict=True):
                state |= {"obs": torch.tensor(obs), "return": total, "length": length}
        for layer in self.layers:
            for state, own in zip(states, layer.state_dict(), strict=True):
                state |= own
        return copy.deepcopy(states)  # layers may give memory that they go on using

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Put environments that have been reset into `states`. Where that is not possible, they start new episodes."""
        for layer in self.layers:
            layer.load_state_dict(states)
        if not self.restorable:
            print("note: the environments cannot be put back where they were: new episodes begin", file=sys.stderr)
            self.reset()  # as layers have memory of before; without a seed, for other episodes
            return
        self.obs = np.stack([state["obs"].numpy() for state in states])
        self.episode_returns[:] = [state["return"] for state in states]
        self.episode_lengths[:] = [state["length"] for state in states]


def check_finite(name: str, values: np.ndarray) -> None:
    """Raise TrainingError for numbers that are NaN or infinite as float32, which the networks compute in."""
    largest = np.finfo(np.float32).max
    if isinstance(values, np.ndarray) and values.dtype.kind == "f" and not (np.abs(values) <= largest).all():
        raise TrainingError(f"{name} of the environments is NaN or infinite")


def make_gymnasium(env_id: str, num_envs: int, seed: int, capture_video: bool) -> VectorEnv:
    """`gymnasium.make_vec` in same-step autoreset mode, with errors that say what to change."""
    name = f"ale_py:{env_id}" if env_id.startswith("ALE/") else env_id  # the module to import for these tasks
    drawn = {"render_mode": "rgb_array"} if capture_video else {}  # not every task knows the argument
    try:
        envs = gym.make_vec(name, num_envs, "sync", {"autoreset_mode": AutoresetMode.SAME_STEP}, **drawn)
        envs.reset(seed=seed)  # here a task may fail that could be made; wrappers may remember it
        if capture_video:  # a package for drawing that is not there shows in the first frame only
            envs.render()
        return envs
    except (Exception, SystemExit) as error:  # of any kind, by the task's own code
        if isinstance(error, gym.error.UnregisteredEnv) or "Malformed" in str(error):
            raise unknown_env(env_id) from None
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"--env-id {env_id} cannot be made{' for a video' if drawn else ''}: {reason}") from error


def unknown_env(env_id: str) -> InputError:
    """The error for an id that is no Procgen game, list of such games or Gymnasium id."""
    near = difflib.get_close_matches(env_id, [*PROCGEN_GAMES, *gym.registry], 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    games = f"Procgen games are {', '.join(PROCGEN_GAMES)} (join several by commas)"
    return InputError(f"--env-id {env_id!r} is not known.{hint} {games}; any Gymnasium id (CartPole-v1) works too.")


def check_envs(args: EnvArgs, num_envs: int, prefix: str = "") -> None:
    """Raise InputError for settings of `make_vec` that cannot work, or that Procgen aborts on or ignores. `prefix`
    precedes the names of the level flags in messages. This does not check whether a Gymnasium task exists."""
    games, mode = args.env_id.split(","), f"--distribution-mode {args.distribution_mode}"
    levels, start = f"--{prefix}num-levels", f"--{prefix}start-level"
    if not set(games) <= set(PROCGEN_GAMES):
        if len(games) > 1:
            raise unknown_env(args.env_id)
        names = ["distribution_mode", "num_levels", "start_level", *vars(ProcgenArgs())]
        other = ", ".join(flag(name) for name in names if getattr(args, name) != getattr(EnvArgs, name))
        if other:
            raise InputError(f"Flags are for Procgen: leave them out for {args.env_id} ({other}).")
        return
    known, fixed = PROCGEN_MODES[args.distribution_mode], args.distribution_mode == "exploration"
    lacking = ", ".join(game for game in games if game not in known)
    last, no_limit = args.start_level + args.num_levels, args.start_level and not args.num_levels
    for wrong, message in [
        (len({*games}) < len(games), f"--env-id {args.env_id} names a game twice: leave one out."),
        (num_envs % len(games), f"--num-envs {num_envs} cannot be shared by games: use a multiple of {len(games)}."),
        (lacking, f"{lacking} has no {args.distribution_mode} mode: {mode} works with {', '.join(known)}."),
        (fixed and len(games) > 1, f"{mode} plays a single game: choose one of {', '.join(games)}."),
        (fixed and last, f"{mode} is one fixed level: leave {levels} and {start} out."),
        (num_envs * 1e6 > HOST_MEMORY, f"--num-envs {num_envs} takes {num_envs / 1000:.0f} GB: lower it."),
        (args.use_generated_assets, "--use-generated-assets draws what Procgen cannot save: leave it out."),
        (last >= 2**31, f"{start} and {levels} are too large: their sum must stay below 2**31."),
        (no_limit, f"{start} has no effect while the levels are unlimited: set {levels}, too."),
    ]:
        if wrong:
            raise InputError(message)


def open_video(file: IO, fps: float) -> Any:
    """An MP4 with a method `write_frame` for uint8 [height, width, 3], and `close`. Needs the package av."""
    import imageio.v3  # comes with procgen; only videos need it

    writer = imageio.v3.imopen(file, "w", plugin="pyav", extension=".mp4")
    writer.init_video_stream("libx264", fps=fps)
    return writer


class RecordFirstEnv(VectorWrapper):
    """Write videos of environment 0 into `folder`, once that is set: episodes 0, 1, 8, 27, ... and every thousandth.
    With `track`, Weights & Biases gets them. A thread encodes, as a Ctrl-C within PyAV would spoil the video."""

    def __init__(self, envs: VectorEnv):
        super().__init__(envs)
        self.folder = self.writer = None  # the latter of the video under way
        self.track, self.episode = False, 0
        self.encoder = ThreadPoolExecutor(1)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        cubic = round(self.episode ** (1 / 3)) ** 3 == self.episode  # the schedule of Gymnasium's RecordVideo
        if self.folder is not None and (cubic if self.episode < 1000 else self.episode % 1000 == 0):
            if self.writer is None:
                self.content = io.BytesIO()
                self.writer = open_video(self.content, self.metadata.get("render_fps", 30))
            frame = self.env.render()[0]
            frame = frame[: len(frame) // 2 * 2, : frame.shape[1] // 2 * 2, :3]  # H.264 takes even sizes of RGB alone
            scale = max(1, 256 // len(frame))  # pixels
            self.encoder.submit(self.writer.write_frame, frame.repeat(scale, 0).repeat(scale, 1)).result()
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        if terminations[0] or truncations[0]:
            self.finish_video(self.track)
            self.episode += 1
        return obs, rewards, terminations, truncations, infos

    def state_dict(self) -> list[dict[str, int]]:
        return [{"episode": self.episode}] * self.num_envs

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        self.episode = states[0].get("episode", 0)  # 0: the run was not filmed before

    def finish_video(self, upload: bool) -> None:
        if self.writer is not None:
            self.encoder.submit(self.writer.close).result()
            self.encoder.submit(setattr, self, "writer", None).result()  # its finaliser could swallow a Ctrl-C here
            path = self.folder / f"episode-{self.episode}.mp4"
            try:
                self.folder.mkdir(exist_ok=True)
                path.unlink(missing_ok=True)  # it may be a hard link
                path.write_bytes(self.content.getbuffer())
            except OSError as error:  # a full disk, say
                print(f"warning: {path} cannot be written ({error.strerror})", file=sys.stderr)
            if upload:
                import wandb

                with suppress(Exception):  # the run's end says so
                    wandb.log({"videos": wandb.Video(str(path))})

    def close(self, **kwargs: Any) -> None:
        self.finish_video(upload=False)
        super().close(**kwargs)
