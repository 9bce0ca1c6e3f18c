"""Play the agent of a run, finished or not, or a random policy: mean return, standard error, interquartile mean.

    python benchmarks/evaluate.py runs/starpilot__ppg__1__1795202643 --episodes 500
    python benchmarks/evaluate.py runs/starpilot__ppg__1__1795202643/model.pt --video out.mp4      # or out.gif
    python benchmarks/evaluate.py --random-policy starpilot fruitbot    # what a learning curve has to rise above

--export writes TorchScript, which runs without this code, in Python or C++. The policy takes uint8 frames [B, height,
width, channels] or float32 vectors [B, size], and returns the parameters of `get_action_dist`, float32 [B, P] (of
discrete actions the logits). With an LSTM it also takes and returns the state [2, B, H], zero where an episode starts.
"""

import importlib.util
import io
import itertools
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from PIL import Image
from scipy import stats
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Independent, Normal

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import InputError, TrainingError
from common.checkpoint import load_agent, read_model
from common.device import resolve_device, setup_device
from common.envs import Envs, Episode, make_vec, open_video, spread_seed
from common.evaluation import EVALUATION, play, share_episodes, summaries
from common.procgen_env import LAST_LEVEL, PROCGEN_GAMES, ProcgenVectorEnv
from common.run import LINE_SECONDS, write_atomically
from common.session import one_line_errors
from common.settings import EnvArgs, NotNegative, Positive, Seed, check_limits, flag

MOST_LEVELS = 1_000_000  # of a range
FIGURES = {
    "mean": "episodic_return", "standard error": "standard_error", "normalised mean": "normalized_return",
    "mean length": "episodic_length", "share of levels solved": "level_complete",
}  # fmt: skip
TOLERANCE = 1e-4  # of an exported policy's outputs, and relative: our kernels and PyTorch's add up in other orders


@dataclass
class Args:
    source: tyro.conf.Positional[Path | None] = None
    """run folder, model or checkpoint"""
    script: Path | None = None
    """script to build the agent with, such as the copy in a run folder; None: the one in this tree that made it"""
    env_id: str | None = None
    """the run's task, to be named here if it is of a module (module:Name), whose code is then run"""
    random_policy: tuple[str, ...] | None = None
    """games, or other tasks, to play with random actions in place of an agent"""
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] | None = None
    """Procgen's difficulty for --random-policy (None: easy); an agent plays in that of its run"""
    episodes: NotNegative[int] = 500
    """episodes in all; rounded up to as many for each environment, or each level that --levels numbers; 0 for none"""
    num_envs: Positive[int] = 50
    """environments side by side"""
    levels: str = "all"
    """Procgen levels: all, train, unseen (those that a run with --num-levels was not trained on), or 3,17,100-120"""
    per_level: Path | None = None
    """write a row for each level that was played to this CSV, which must be new"""
    greedy: bool = False
    """take the most likely action instead of drawing one"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    seed: Seed = 1
    """seed of level draws and actions"""
    export: Path | None = None
    """first write the policy to this file, which must be new, so that no model is lost"""
    video: Path | None = None
    """first write a video to this file (.mp4 needs the package av; or .gif)"""
    video_grid: tuple[Positive[int], Positive[int]] = (3, 2)
    """columns and rows of the video: environments that it shows, each with its first episode"""
    video_seconds: Positive[float] = 20.0
    """length of the video, at most"""
    video_size: Positive[int] | None = None
    """pixels of an environment in the video, of which Procgen draws 512; None: 512, or 128 in a GIF"""

    @property
    def tile_size(self) -> int:
        return self.video_size or (128 if self.video.suffix == ".gif" else 512)


def levels_of(run: Any, text: str) -> tuple[int, int, list[int]]:
    """`num_levels` and `start_level` for --levels and a run's settings, and the levels named by number, in order."""
    first = run.start_level + run.num_levels
    words = {"all": (0, 0), "train": (run.num_levels, run.start_level), "unseen": (LAST_LEVEL - first, first)}
    if text == "unseen" and not run.num_levels:
        raise InputError("--levels unseen: of this run's levels none is unseen: use --levels all.")
    if text in words:
        return *words[text], []
    levels = set()
    for part in text.split(","):
        bounds = [int(bound) for bound in part.split("-")] if re.fullmatch(r"\d+(-\d+)?", part) else []
        if not bounds or not bounds[0] <= bounds[-1] < min(bounds[0] + MOST_LEVELS, LAST_LEVEL):
            known = f"all, unseen, train, numbers below {LAST_LEVEL} or ranges of at most {MOST_LEVELS}: 3,17,100-120"
            raise InputError(f"--levels {part} cannot work: use {known}.")
        levels.update(range(bounds[0], bounds[-1] + 1))
    return 0, 0, sorted(levels)


class RandomPolicy(nn.Module):
    """Draws each action at random. `play` takes it as the most likely one."""

    def __init__(self, actions: gym.Space, seed: int):
        super().__init__()
        self.actions = actions
        actions.seed(seed)

    def get_action_dist(self, obs: Tensor, state: None) -> tuple[SimpleNamespace, None]:
        return SimpleNamespace(mode=torch.as_tensor(self.actions.sample())), None


class Task:
    """What an agent is to play, or a random policy where `agent` is None. Raises InputError if that cannot be."""

    def __init__(self, args: Args, agent: nn.Module | None, run: Any, make_envs: Callable):
        self.agent, self.make_envs, self.greedy = agent, make_envs, args.greedy or agent is None
        self.games, self.mode, self.device = run.env_id.split(","), run.distribution_mode, resolve_device(args.device)
        self.seed = args.seed if agent is None else spread_seed(args.seed, EVALUATION)
        num_levels, start_level, self.levels = levels_of(run, args.levels)
        self.settings = replace(run, num_threads=None, num_levels=num_levels, start_level=start_level)
        envs = Envs(make_envs(self.settings, len(self.games), self.seed))
        envs.close()
        self.fps = envs.metadata.get("render_fps", 30)
        one_level = isinstance(envs.unwrapped, ProcgenVectorEnv) and not run.use_sequential_levels
        if (self.levels or args.per_level) and (not one_level or self.mode == "exploration"):
            raise InputError("--per-level and numbers in --levels need Procgen, one level an episode: leave them out.")
        bounds = run.start_level, run.start_level + run.num_levels or LAST_LEVEL
        self.trained = range(*bounds) if agent is not None and one_level else range(0)

    def play(self, levels: list[int], num_envs: int, quota: int, draw: Callable | None = None) -> list:
        """The first `quota` episodes of each environment; or those on `levels`, which the environments of a game share.
        At the start and after each step, `draw` gets the environments."""
        envs = Envs(self.make_envs(self.settings, num_envs, self.seed, draw is not None))
        agent, games = self.agent or RandomPolicy(envs.unwrapped.action_space, self.seed), len(self.games)
        shares = [levels[env // games :: num_envs // games] or levels for env in range(num_envs)]
        queues = [itertools.cycle(share) for share in shares]
        last_shown = time.monotonic()

        def after_step(progress: str = "") -> None:
            nonlocal last_shown
            if time.monotonic() - last_shown > LINE_SECONDS:
                last_shown = time.monotonic()
                print(f"{'film: ' if draw else ''}{progress}", file=sys.stderr)
            for env in np.flatnonzero(envs.episode_lengths == 0).tolist() if levels else []:
                envs.unwrapped.set_next_level(env, next(queues[env]))
            if draw is not None:
                draw(envs)

        with closing(envs):
            envs.reset(seed=self.seed, options={"levels": [next(queue) for queue in queues]} if levels else None)
            after_step()
            played = play(agent, envs, self.seed, self.device, quota, self.greedy, after_step)
        return [each[: len(share)] for each, share in zip(played, shares, strict=True)] if levels else played


def tile(frames: list[np.ndarray], columns: int, size: int) -> np.ndarray:
    """A grid of frames, each uint8 [height, width, 3], row by row; `size` is the width and height of a tile."""
    tiles = [np.asarray(Image.fromarray(frame).resize((size, size), Image.Resampling.BOX)) for frame in frames]
    rows = [np.concatenate(tiles[n : n + columns], axis=1) for n in range(0, len(tiles), columns)]
    return np.concatenate(rows)


def film(args: Args, task: Task) -> None:
    """Write the video, of environments of its own. Raises InputError if that fails."""
    columns, rows = args.video_grid
    if columns * rows % (games := len(task.games)):
        raise InputError(f"--video-grid {columns} {rows} cannot be shared by {games} games: use a multiple of {games}.")
    frames_left = iter(range(math.ceil(args.video_seconds * task.fps)))
    content, gif = io.BytesIO(), []
    mp4 = open_video(content, task.fps) if args.video.suffix == ".mp4" else None

    def on_step(envs: Envs) -> None:
        next(frames_left)  # StopIteration ends the play
        picture = tile(envs.render(), columns, args.tile_size)
        if mp4 is None:
            gif.append(Image.fromarray(picture).quantize(64))
        else:
            mp4.write_frame(picture)

    with suppress(StopIteration):
        task.play(task.levels, columns * rows, 1, on_step)
    if mp4 is None:
        gif[0].save(content, "GIF", save_all=True, append_images=gif[1:], duration=round(1000 / task.fps), loop=0)
    else:
        mp4.close()
    write("video", args.video, content.getbuffer())
    print(f"{args.video}: the first episodes of {columns * rows} environments", flush=True)


class Policy(nn.Module):
    """What is exported of an agent."""

    def __init__(self, agent: nn.Module):
        super().__init__()
        self.agent = agent

    def forward(self, obs: Tensor, state: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        dist, next_state = self.agent.get_action_dist(obs, state)
        dist = dist.base_dist if isinstance(dist, Independent) else dist
        if not isinstance(dist, Categorical | Bernoulli | Normal):
            raise InputError(f"--export takes no {type(dist).__name__}: use categorical, Bernoulli or normal actions.")
        params = torch.cat([dist.loc, dist.scale.log()], dim=-1) if isinstance(dist, Normal) else dist.logits
        return params if state is None else (params, next_state)


def write(name: str, path: Path, content: bytes | None = None) -> None:
    """Write, or see whether it can be written, what setting `name` names. Only a video may replace a file, but no link
    or FIFO. Raises InputError."""
    if os.path.lexists(path) and (name != "video" or path.is_symlink() or not path.is_file()):
        raise InputError(f"{flag(name)} {path} exists: choose another name, or remove it first.")
    try:
        if content is None:
            tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name).close()
        else:
            write_atomically(path, content)
    except OSError as error:
        raise InputError(f"{flag(name)} {path} cannot be written ({error.strerror}).") from error


def export(source: Path, out: Path, script: Path | None = None, env_id: str | None = None) -> None:
    """Write the policy of a run folder, model or checkpoint. Raises InputError, and TrainingError if it differs."""
    agent, args, make_envs = load_agent(source, script=script, env_id=env_id)
    agent.bf16 = False
    policy, envs = Policy(agent).eval(), Envs(make_envs(args, 8 * len(args.env_id.split(",")), seed=1))
    with closing(envs), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and might keep sizes and branches: see below
        obs = torch.as_tensor(envs.reset(seed=1)[0])
        obs = obs if obs.dim() == 4 and obs.dtype == torch.uint8 else obs.float()
        _, state = agent.get_action_dist(obs)
        states = [torch.zeros_like(state)] if state is not None and state.numel() else []
        scripted = torch.jit.freeze(torch.jit.trace(policy, (obs, *states)))
        for _ in range(100):  # steps, as an agent may do otherwise for other observations and states
            for size in (len(obs), 3, 1):
                inputs = [[obs[:size].clone(), *(x[:, :size].clone() for x in states)] for _ in range(2)]
                try:
                    torch.testing.assert_close(scripted(*inputs[0]), policy(*inputs[1]), rtol=TOLERANCE, atol=TOLERANCE)
                except (AssertionError, RuntimeError) as error:  # the latter of TorchScript, for another shape
                    said = " ".join(["(for len(obs) use obs.shape[0]):", *str(error).strip().splitlines()[-3:]])
                    raise TrainingError(f"the exported policy differs from the agent {said}") from error
            dist, state = agent.get_action_dist(obs, *states)
            states = [state] if states else []
            obs = torch.as_tensor(envs.step(dist.sample().numpy())[0]).to(obs.dtype)
    origin = read_model(source).get("script_sha256", "")
    write("export", out, scripted.save_to_buffer(_extra_files={"script_sha256": origin}))
    print(f"{out} gives the same as the agent of {source} (within {TOLERANCE}, float32).", flush=True)


def check(args: Args) -> None:
    """Raise InputError for settings that cannot work."""
    check_limits(args)
    if args.source is None and not args.random_policy:
        raise InputError("nothing to play is named: give a run folder, a model or a checkpoint, or --random-policy.")
    if args.episodes == 0 and (args.per_level is not None or (args.export is None and args.video is None)):
        raise InputError("--episodes 0 leaves nothing to do: use a number above 0, or --export or --video alone.")
    if args.source is not None and args.distribution_mode is not None:
        raise InputError("--distribution-mode is for --random-policy: leave it out, as an agent plays in its run's.")
    if args.random_policy and any((args.source, args.greedy, args.export, args.video, args.script, args.env_id)):
        raise InputError("--random-policy plays without an agent: leave out the run, --greedy and its other flags.")
    for name in ("per_level", "export", "video"):
        if (path := getattr(args, name)) is not None:
            write(name, path)
    if args.video is None:
        return
    if args.video.suffix not in (".mp4", ".gif"):
        raise InputError(f"--video {args.video} cannot be written: use a name that ends in .mp4 or .gif.")
    if args.video.suffix == ".mp4":
        if any(count * args.tile_size % 2 for count in args.video_grid):  # H.264 stores colours at half the size
            raise InputError(f"--video-size {args.video_size} cannot work for {args.video}: use an even number.")
        if importlib.util.find_spec("av") is None:
            raise InputError(f"--video {args.video} needs an encoder: pip install av, or use a name that ends in .gif.")
    largest = 16_384 // max(args.video_grid)  # H.264 ends at 16,384 pixels
    if args.tile_size > largest:
        raise InputError(f"--video-size {args.video_size} is too large for this --video-grid: use at most {largest}.")


def by_level(game: str, episodes: list[Episode], mode: str, trained: range) -> list[dict[str, Any]]:
    """The rows of --per-level for a game, in order. `trained` are the training levels."""
    found, rows = defaultdict(list), []
    for episode in episodes:
        found[episode.level_seed].append(episode)
    for level, each in sorted(found.items()):
        row = {"env_id": game, "level_seed": level, "training_level": int(level in trained)}
        rows.append(row | summaries([each], [game], mode)[game])
    return rows


def gaps(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean over training levels minus mean over held-out levels; the levels are the samples of its standard error. That
    is NaN where there is one level on a side, or where all are equal."""
    figures = {}
    for name, column in (("gap", "episodic_return"), ("gap in share of levels solved", "level_complete")):
        trained = [row[column] for row in rows if row["training_level"]]
        held_out = [row[column] for row in rows if not row["training_level"]]
        if trained and held_out:
            errors = [stats.sem(means) if len(means) > 1 else math.nan for means in (trained, held_out)]
            figures[name] = np.mean(trained) - np.mean(held_out)
            figures[f"{name}, standard error"] = math.hypot(*errors) or math.nan
    return figures


def evaluate(args: Args, task: Task, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Print and return the figures of each game, and add to the rows of --per-level."""
    levels = task.levels * math.ceil(args.episodes / max(1, len(task.levels) * len(task.games)))
    episodes = len(levels) * len(task.games) or args.episodes
    num_envs, quota = share_episodes(episodes, args.num_envs, task.games)
    levels_played = f", {task.mode}, levels {args.levels}" if task.games[0] in PROCGEN_GAMES else ""
    what = f"{args.source or 'random policy'}: {task.settings.env_id}{levels_played}"
    print(f"{what}, {episodes if levels else num_envs * quota} episodes", flush=True)
    played = task.play(levels, num_envs, quota)
    figures = {}
    for number, (game, summary) in enumerate(summaries(played, task.games, task.mode).items()):
        episodes = [episode for each in played[number :: len(task.games)] for episode in each]
        if not episodes:
            raise TrainingError(f"no episode of {game} has ended")
        own_rows = by_level(game, episodes, task.mode, task.trained)
        values = {name: summary[column] for name, column in FIGURES.items()}
        values["IQM"] = stats.trim_mean([episode.episodic_return for episode in episodes], 0.25)
        figures |= {f"{game} {name}": value for name, value in (values | gaps(own_rows)).items()}
        rows += own_rows
    for name, value in figures.items():
        if not math.isnan(value):  # unknown: a standard error from one episode, say
            print(f"{name}: {value:.3f}")
    return figures


def main(args: Args) -> dict[str, float]:
    """Write what is asked for; then play, print and return the figures. Raises InputError."""
    check(args)
    device, mode = resolve_device(args.device), args.distribution_mode or "easy"
    setup_device(device, seed=args.seed)
    games = args.random_policy or ()
    tasks = [Task(args, None, EnvArgs(env_id=name, distribution_mode=mode), make_vec) for name in games]
    if args.source is not None:
        tasks.append(Task(args, *load_agent(args.source, device, args.script, args.env_id)))
    if args.export is not None:
        export(args.source, args.export, args.script, args.env_id)
    if args.video is not None:
        film(args, tasks[0])
    figures, rows = {}, []
    for task in tasks if args.episodes > 0 else []:
        figures |= evaluate(args, task, rows)
    if args.per_level is not None:
        lines = [rows[0].keys(), *(row.values() for row in rows)]
        table = "".join(",".join(map(str, line)) + "\n" for line in lines)
        write("per_level", args.per_level, table.encode())
    return figures


if __name__ == "__main__":
    with one_line_errors(OSError):
        args = tyro.cli(Args, description=__doc__)
        try:
            main(args)
        except SystemExit as error:  # whose code would be this process's
            raise TrainingError(f"something ends the process ({error!r})") from error
