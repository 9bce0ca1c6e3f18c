"""Procgen games and Gymnasium tasks behind one interface, and the reward normaliser.

`make_envs` returns a `gymnasium.vector.VectorEnv` in same-step autoreset mode: when `step` reports that an episode has
ended, the observation it returns already belongs to the next one, and the reward to the action just taken.
"""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import ClipAction, RecordEpisodeStatistics, TransformAction

from common.errors import InputError, TrainingError

# fmt: off
PROCGEN_GAMES = [
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
    "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
]
# fmt: on
# The C++ code aborts the whole process on any other pair of game and mode.
PROCGEN_MODES = {
    "easy": PROCGEN_GAMES,
    "hard": PROCGEN_GAMES,
    "extreme": ["chaser", "dodgeball", "leaper", "starpilot"],
    "memory": ["caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"],
    "exploration": ["caveflyer", "climber", "coinrun", "heist", "jumper", "leaper", "maze", "ninja"],
}


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
) -> VectorEnv:
    """Make `num_envs` copies of a Procgen game (or of several: "coinrun,maze") or of a Gymnasium task.

    Observations are uint8 images [num_envs, height, width, channels] or vectors [num_envs, size]. Actions go in as
    int64 [num_envs] for `Discrete`, and as [num_envs, size] for `MultiBinary` and for `Box`, which is clipped to its
    bounds here and nowhere else. `infos["episode"]` holds the unnormalised return "r" and the length "l" of each
    episode that `infos["_episode"]` marks as finished by this step; `infos["final_obs"]` the last observation of a
    Gymnasium episode.

    Args:
        seed: of Procgen's level draws. Gymnasium tasks are seeded by `reset(seed=...)`, which Procgen's ignore.
        distribution_mode, num_levels, start_level, num_threads: of Procgen; see `ProcgenVectorEnv`.
        capture_video: make environments that `render` can be called of.
        num_groups: with more than one, an `EnvGroups`; see there.

    Raises:
        InputError: no such game or task, or settings or spaces that cannot work.
    """
    check_envs(env_id, num_envs, seed, distribution_mode, num_levels, start_level, num_threads, num_groups)
    games = env_id.split(",")
    if num_groups > 1:
        if capture_video:
            raise InputError("--capture-video needs all environments in one group: leave --num-env-groups out.")
        return EnvGroups(
            [
                make_envs(
                    env_id,
                    num_envs // num_groups,
                    seed=group_seed(seed, number),
                    distribution_mode=distribution_mode,
                    num_levels=num_levels,
                    start_level=start_level,
                    num_threads=num_threads,
                )
                for number in range(num_groups)
            ]
        )
    if set(games) <= set(PROCGEN_GAMES):
        envs = ProcgenVectorEnv(
            games, num_envs, seed, distribution_mode, num_levels, start_level, num_threads, render=capture_video
        )
    else:
        envs = make_gymnasium(env_id, num_envs, render_mode="rgb_array" if capture_video else None)
    try:
        check_spaces(env_id, envs.single_observation_space, envs.single_action_space)
    except InputError:
        envs.close()
        raise
    if not isinstance(envs, ProcgenVectorEnv):
        envs = RefuseNaN(envs)
    if isinstance(envs.single_action_space, gym.spaces.Box):
        envs = ClipAction(envs)
    elif isinstance(envs.single_action_space, gym.spaces.MultiBinary):
        envs = TransformAction(envs, lambda actions: actions.astype(envs.single_action_space.dtype))
    return RecordEpisodeStatistics(envs)


class ProcgenVectorEnv(VectorEnv):
    """Procgen's own vectorised environment, whose C++ threads step all copies at once, as a Gymnasium one.

    Procgen reports neither time limits (`truncations` is always false: a step limit ends an episode like a death) nor
    the last frame of an episode. Environment i plays `games[i % len(games)]`.

    Args:
        games: names out of PROCGEN_GAMES.
        seed: of the level draws (procgen's `rand_seed`; without it they come from the operating system's entropy).
        distribution_mode: easy, hard, extreme, memory or exploration.
        num_levels: how many different levels there are; 0 for no limit.
        start_level: the first of them.
        num_threads: C++ threads that step the environments; 0 steps them in the caller's thread.
        render: also draw 512x512 frames, for `render`.
    """

    metadata = {  # noqa: RUF012  (gymnasium declares it so)
        "autoreset_mode": AutoresetMode.SAME_STEP,
        "render_modes": ["rgb_array"],
        "render_fps": 15,
    }

    def __init__(
        self,
        games: list[str],
        num_envs: int,
        seed: int,
        distribution_mode: str = "easy",
        num_levels: int = 0,
        start_level: int = 0,
        num_threads: int = 4,
        render: bool = False,
    ):
        import gym_notices.notices

        gym_notices.notices.notices.clear()  # procgen imports the old gym, which would print that it is deprecated
        from procgen import ProcgenGym3Env

        # Exploration mode is one fixed level of the hard distribution and refuses these two.
        levels = {} if distribution_mode == "exploration" else {"num_levels": num_levels, "start_level": start_level}
        self.gym3_env = ProcgenGym3Env(
            num=num_envs,
            env_name=",".join(games),
            distribution_mode=distribution_mode,
            num_threads=num_threads,
            rand_seed=seed,
            render_mode="rgb_array" if render else None,
            **levels,
        )
        self.games = games
        self.started = False  # whether `start` has begun the step that `step` is to finish
        self.num_envs = num_envs
        self.render_mode = "rgb_array" if render else None
        self.single_observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(self.gym3_env.ac_space.eltype.n)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Return the current frames, uint8 [num_envs, 64, 64, 3]. Procgen starts its episodes by itself, at the seed
        given to `__init__`: nothing is restarted here and `seed` has no effect."""
        _, observation, _ = self.gym3_env.observe()
        return observation["rgb"], {}

    def start(self, actions: np.ndarray) -> None:
        """Begin a step, which the C++ threads then make. Only `step`, with the same actions, may follow."""
        self.gym3_env.act(actions)
        self.started = True

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Take one action in each environment: int [num_envs]."""
        if not self.started:
            self.start(actions)
        self.started = False
        rewards, observation, first = self.gym3_env.observe()
        return observation["rgb"], rewards, first, np.zeros_like(first), {}

    def render(self) -> list[np.ndarray]:
        """The current frame of each environment, uint8 [512, 512, 3]."""
        return [info["rgb"] for info in self.gym3_env.get_info()]

    def level_seeds(self) -> list[int]:
        """The seed of the level that each environment plays at present."""
        return [info["level_seed"] for info in self.gym3_env.get_info()]

    def close_extras(self, **kwargs: Any) -> None:
        self.gym3_env.close()


class EnvGroups(VectorEnv):
    """Groups of environments that are stepped on their own, so that one is stepped while a policy acts for another.

    (Double-buffered sampling: Petrenko et al. 2020, https://arxiv.org/abs/2006.11751, section 3.2.) There is no `step`
    for all of them: `env_groups` gives the groups.
    """

    def __init__(self, groups: list[VectorEnv]):
        self.groups = groups
        self.num_envs = sum(group.num_envs for group in groups)
        self.single_observation_space = groups[0].single_observation_space
        self.single_action_space = groups[0].single_action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Reset all groups; returns all observations [num_envs, ...] and no infos."""
        seeds = [None if seed is None else seed + part.start for _, part in env_groups(self)]
        pairs = zip(self.groups, seeds, strict=True)
        return np.concatenate([group.reset(seed=seed, options=options)[0] for group, seed in pairs]), {}

    def close_extras(self, **kwargs: Any) -> None:
        for group in self.groups:
            group.close(**kwargs)


def env_groups(envs: VectorEnv) -> list[tuple[VectorEnv, slice]]:
    """The groups of `envs`, each with the numbers of its environments; a plain vector environment is a single group."""
    groups, first = envs.groups if isinstance(envs, EnvGroups) else [envs], 0
    numbered = []
    for group in groups:
        numbered.append((group, slice(first, first + group.num_envs)))
        first += group.num_envs
    return numbered


def group_seed(seed: int, number: int) -> int:
    """Seed of group `number`'s environments: `seed` for the first, for others unlike any of a neighbouring seed's."""
    return seed if number == 0 else int(np.random.SeedSequence((seed, number)).generate_state(1)[0]) % 2**31


def start_step(envs: VectorEnv, actions: np.ndarray) -> None:
    """Let Procgen's threads begin the step that `envs.step(actions)` finishes. Gymnasium tasks have no such threads."""
    if isinstance(envs.unwrapped, ProcgenVectorEnv) and envs.unwrapped.render_mode is None:  # a video draws before it
        envs.unwrapped.start(actions)


def make_gymnasium(env_id: str, num_envs: int, render_mode: str | None) -> VectorEnv:
    """`gymnasium.make_vec` in same-step autoreset mode, with errors that say what to change."""
    if env_id.startswith("ALE/"):
        try:
            import ale_py
        except ImportError:
            raise InputError(f"{env_id} needs the Atari package: pip install ale-py.") from None
        gym.register_envs(ale_py)
    try:
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
    """What to raise for an id that is no Procgen game, list of such games or Gymnasium id."""
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
) -> None:
    """Raise InputError for settings of `make_envs` that cannot work, and what Procgen would abort on or ignore.

    Whether there is such a Gymnasium task is not asked here.
    """
    if num_envs < 1:
        raise InputError(f"--num-envs {num_envs} is too small: use at least 1.")
    games = env_id.split(",")
    if num_groups > 1 and num_envs % (num_groups * len(games)):
        shares = f"{num_groups} groups" + (f" of {len(games)} games" if len(games) > 1 else "")
        multiple = num_groups * len(games)
        raise InputError(f"--num-envs {num_envs} cannot be shared by {shares}: use a multiple of {multiple}.")
    if not set(games) <= set(PROCGEN_GAMES):
        if len(games) > 1:
            raise unknown_env(env_id)
        if (distribution_mode, num_levels, start_level) != ("easy", 0, 0):
            flags = "--distribution-mode, --num-levels and --start-level"
            raise InputError(f"{flags} are for Procgen games: leave them out for {env_id}.")
        return
    mode = f"--distribution-mode {distribution_mode}"
    if distribution_mode not in PROCGEN_MODES:
        raise InputError(f"{mode} is not known: use one of {', '.join(PROCGEN_MODES)}.")
    for game in games:
        if game not in PROCGEN_MODES[distribution_mode]:
            supported = ", ".join(PROCGEN_MODES[distribution_mode])
            raise InputError(f"{game} has no {distribution_mode} mode: {mode} works with {supported}.")
    if distribution_mode == "exploration" and len(games) > 1:
        raise InputError(f"{mode} plays a single game: choose one of {', '.join(games)}.")
    if distribution_mode == "exploration" and (num_levels or start_level):
        raise InputError(f"{mode} is one fixed level: leave --num-levels and --start-level out.")
    if num_envs % len(games):
        raise InputError(
            f"--num-envs {num_envs} cannot be shared by {len(games)} games: use a multiple of {len(games)}."
        )
    for flag, value in (("num-levels", num_levels), ("start-level", start_level), ("num-threads", num_threads)):
        if value < 0:
            raise InputError(f"--{flag} {value} is negative: use 0 or more.")
    if start_level + num_levels >= 2**31:
        raise InputError("--start-level and --num-levels are too large: their sum must stay below 2147483648.")
    if num_threads > 1024:
        raise InputError(f"--num-threads {num_threads} is too large: use 0 to 1024.")
    if start_level and not num_levels:
        raise InputError("--start-level has no effect while the levels are unlimited: set --num-levels, too.")
    if not 0 <= seed < 2**31:
        raise InputError(f"--seed {seed} is out of Procgen's range: use 0 to {2**31 - 1}.")


def check_spaces(env_id: str, observation_space: gym.Space, action_space: gym.Space) -> None:
    """Raise InputError for a space that the networks have no input or no distribution for."""
    box = isinstance(observation_space, gym.spaces.Box)
    image = box and len(observation_space.shape) == 3 and observation_space.dtype == np.uint8
    if image and observation_space.shape[2] > 4:
        shape = list(observation_space.shape)
        raise InputError(
            f"{env_id} has images of shape {shape}: give them as [height, width, channels], 1 to 4 channels."
        )
    if not image and not (box and len(observation_space.shape) == 1):
        raise InputError(
            f"{env_id} has the observation space {observation_space}, which is not supported: wrap it so "
            "that it gives uint8 images [height, width, channels] or flat vectors (see gymnasium's FlattenObservation)."
        )
    discrete = isinstance(action_space, gym.spaces.Discrete) and action_space.start == 0
    flat = isinstance(action_space, gym.spaces.Box | gym.spaces.MultiBinary) and len(action_space.shape) == 1
    if not discrete and not flat:
        raise InputError(
            f"{env_id} has the action space {action_space}, which is not supported: wrap it "
            "so that it takes Discrete (counted from 0), or one-dimensional Box or MultiBinary actions."
        )


def finished_episodes(infos: dict[str, Any]) -> list[tuple[int, float, int]]:
    """What `infos` of a step reports as finished: environment, return (as the environment gave it), length."""
    return [
        (int(env), float(infos["episode"]["r"][env]), int(infos["episode"]["l"][env]))
        for env in np.flatnonzero(infos.get("_episode", ()))
    ]


class RefuseNaN(VectorWrapper):
    """Raise TrainingError for an observation or a reward that is NaN or infinite, before anything learns from it."""

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        obs, infos = self.env.reset(**kwargs)
        self.check({"observation": obs})
        return obs, infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        result = self.env.step(actions)
        obs, rewards, _, _, infos = result
        self.check({"observation": obs, "reward": rewards, "action": actions})
        if "final_obs" in infos:
            last = obs.copy()
            for env in np.flatnonzero(infos["_final_obs"]):
                last[env] = infos["final_obs"][env]
            self.check({"observation": last})
        return result

    def check(self, values: dict[str, np.ndarray]) -> None:
        for name, value in values.items():
            bad = value.dtype.kind == "f" and ~np.isfinite(value).reshape(self.num_envs, -1).all(axis=1)
            if np.any(bad):
                batch = {name: torch.as_tensor(value) for name, value in values.items()}
                raise TrainingError(f"the {name} of environment {np.argmax(bad)} is NaN or infinite", batch)


def open_video(path: Path, fps: float) -> Any:
    """An MP4 to `write_frame` to, uint8 [height, width, 3], and then to `close`. Needs the package av."""
    import imageio.v3  # comes with procgen; only videos need it

    writer = imageio.v3.imopen(str(path), "w", plugin="pyav")
    writer.init_video_stream("libx264", fps=fps)
    return writer


class RecordFirstEnv(VectorWrapper):
    """Write videos of environment 0 as MP4: its episodes 0, 1, 8, 27, ... and every thousandth (the schedule
    of Gymnasium's RecordVideo)."""

    def __init__(self, envs: VectorEnv, video_dir: Path):
        super().__init__(envs)
        self.video_dir = video_dir
        self.episode = 0
        self.writer = None

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        cubic = round(self.episode ** (1 / 3)) ** 3 == self.episode
        if cubic if self.episode < 1000 else self.episode % 1000 == 0:
            self.add(self.env.render()[0])
        result = self.env.step(actions)
        _, _, terminations, truncations, _ = result
        if terminations[0] or truncations[0]:
            self.finish_video()
            self.episode += 1
        return result

    def add(self, frame: np.ndarray) -> None:
        if self.writer is None:
            self.video_dir.mkdir(exist_ok=True)
            path = self.video_dir / f"episode-{self.episode}.mp4"
            self.writer = open_video(path, self.metadata.get("render_fps", 30))
        self.writer.write_frame(frame)

    def finish_video(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def close(self, **kwargs: Any) -> None:
        self.finish_video()
        super().close(**kwargs)


def moments(x: np.ndarray) -> tuple[int, float, float]:
    """Size, mean and variance of `x` [...]."""
    return x.size, x.mean(), x.var()


def merge_moments(running: tuple[Any, Any, Any], batch: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Size, mean and variance of two sets together, from those of each (Chan et al. 1979): numbers or tensors."""
    (count, mean, var), (size, batch_mean, batch_var) = running, batch
    total, delta = count + size, batch_mean - mean
    squares = var * count + batch_var * size + delta**2 * count * size / total
    return total, mean + delta * size / total, squares / total


class RewardNormalizer:
    """Divide rewards by the running standard deviation of the discounted return, then clip them.

    The return R_t = r_t + gamma R_(t-1) is carried from call to call and starts anew where an episode does. A whole
    segment enters the statistics before it is scaled (as in OpenAI's phasic-policy-gradient; VecNormalize of baselines
    goes step by step). The mean is not subtracted: that would change which policy is best.

    Args:
        moments: of the returns; where several ranks train, `World.moments`, which joins those of all ranks.
    """

    def __init__(
        self,
        num_envs: int,
        gamma: float,
        clip: float = 10.0,
        epsilon: float = 1e-8,
        moments: Callable[[np.ndarray], tuple[int, float, float]] = moments,
    ):
        self.gamma, self.clip, self.epsilon, self.moments = gamma, clip, epsilon, moments
        self.returns = np.zeros(num_envs)  # R_(t-1), zero where an episode has just ended
        self.count, self.mean, self.var = 1e-4, 0.0, 1.0  # of all returns so far; starts as in baselines

    def __call__(self, rewards: np.ndarray, dones: np.ndarray) -> np.ndarray:
        """Scale a segment of rewards [T, N]; `dones[t]` is true where the action of step t ended its episode."""
        self.update(self.discounted_returns(rewards, dones))
        return self.scale(rewards)

    def discounted_returns(
        self, rewards: np.ndarray, dones: np.ndarray, envs: slice | list[int] = slice(None)
    ) -> np.ndarray:
        """R_t [T, n] of a segment, which goes on from the one before; `envs` are the n environments, if not all."""
        returns = np.empty(rewards.shape)
        for t in range(len(rewards)):
            returns[t] = rewards[t] + self.gamma * self.returns[envs]
            self.returns[envs] = returns[t] * (1 - dones[t])
        return returns

    def scale(self, rewards: np.ndarray) -> np.ndarray:
        """Divide rewards [...] by the present scale, and clip them; float32."""
        return np.clip(rewards / np.sqrt(self.var + self.epsilon), -self.clip, self.clip).astype(np.float32)

    def update(self, returns: np.ndarray) -> None:
        """Merge the moments of a batch into the running ones."""
        self.count, self.mean, self.var = merge_moments((self.count, self.mean, self.var), self.moments(returns))

    def state_dict(self) -> dict[str, Any]:
        return {"returns": self.returns.tolist(), "count": self.count, "mean": float(self.mean), "var": float(self.var)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.returns = np.array(state["returns"])
        self.count, self.mean, self.var = state["count"], state["mean"], state["var"]
