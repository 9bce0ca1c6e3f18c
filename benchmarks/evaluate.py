"""Play the agent of a run, finished or not: mean return, standard error, interquartile mean, and a video.

    python benchmarks/evaluate.py runs/starpilot__ppg__1__1795202643 --episodes 500
    python benchmarks/evaluate.py runs/coinrun__ppo__1__1795202643 --levels train --greedy
    python benchmarks/evaluate.py runs/starpilot__ppg__1__1795202643/model.pt --video out.mp4      # or out.gif

Every environment plays the same number of episodes, so that short episodes do not count more often than long ones.
"""

import importlib.util
import io
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent.parent))
from common.device import setup_device
from common.envs import group_seed, make_envs
from common.errors import InputError
from common.evaluation import EVALUATION, HeldOut, share_episodes, summaries
from common.load import load_agent
from common.settings import Positive, Seed, check_limits
from common.signals import one_line_errors
from common.video import open_video

LAST_LEVEL = 2**31 - 1


@dataclass
class Args:
    run_dir: tyro.conf.Positional[Path]
    """run folder, model or checkpoint"""
    episodes: Positive[int] = 500
    """episodes in all; rounded up to as many for each environment"""
    num_envs: Positive[int] = 50
    """environments side by side"""
    levels: Literal["all", "unseen", "train"] = "all"
    """Procgen levels: all there are; or of a run with --num-levels, those that it was not trained on, or was"""
    greedy: bool = False
    """take the likeliest action instead of drawing one"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    seed: Seed = 1
    """seed of level draws and actions"""
    video: Path | None = None
    """first write a video to this file (.mp4 needs the package av; or .gif)"""
    video_grid: tuple[Positive[int], Positive[int]] = (3, 2)
    """columns and rows of the video: environments that it shows, each with its first episode"""
    video_seconds: Positive[float] = 20.0
    """length of the video, at most"""
    video_size: Positive[int] = 512
    """pixels of an environment in the video: Procgen draws 512"""


def level_range(args: Any, levels: str) -> dict[str, int]:
    """`num_levels` and `start_level` of the environments for a run with the settings `args`.

    Raises InputError where there are no unseen levels.
    """
    if levels == "unseen" and not args.num_levels:
        raise InputError("--levels unseen: this run was trained on all levels: none is unseen: use --levels all.")
    if levels == "train":
        return {"num_levels": args.num_levels, "start_level": args.start_level}
    if levels == "unseen":
        first = args.start_level + args.num_levels
        return {"num_levels": LAST_LEVEL - first, "start_level": first}
    return {"num_levels": 0, "start_level": 0}


class Video:
    """A file with a grid of environments, a frame a step. Raises OSError if it cannot be written."""

    def __init__(self, path: Path, columns: int, size: int, fps: int):
        self.path, self.columns, self.size, self.fps = path, columns, size, fps
        self.gif, self.writer, self.content = [], None, io.BytesIO()
        path.open("ab").close()  # before anything is played

    def add(self, frames: list[np.ndarray]) -> None:
        """Add a frame of each environment, uint8 [height, width, 3]."""
        tiles = [np.asarray(Image.fromarray(frame).resize((self.size,) * 2, Image.Resampling.BOX)) for frame in frames]
        rows = [np.concatenate(tiles[n : n + self.columns], axis=1) for n in range(0, len(tiles), self.columns)]
        picture = np.concatenate(rows)
        if self.path.suffix == ".gif":
            self.gif.append(Image.fromarray(picture).quantize(64))
            return
        if self.writer is None:
            self.writer = open_video(self.content, self.fps)
        self.writer.write_frame(picture)

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()
        if self.gif:
            first, *rest = self.gif
            first.save(self.content, "GIF", save_all=True, append_images=rest, duration=round(1000 / self.fps), loop=0)
        self.path.write_bytes(self.content.getbuffer())


def film(args: Args, agent: torch.nn.Module, env_id: str, device: torch.device, **settings: Any) -> None:
    """Write the video, of environments of its own. Raises InputError if that fails."""
    columns, rows = args.video_grid
    if columns * rows % (games := len(env_id.split(","))):
        raise InputError(f"--video-grid {columns} {rows} cannot be shared by {games} games: use a multiple of {games}.")
    envs = make_envs(env_id, columns * rows, capture_video=True, **settings)
    fps = envs.metadata.get("render_fps", 30)
    frames_left = iter(range(math.ceil(args.video_seconds * fps)))
    try:
        video = Video(args.video, columns, args.video_size, fps)

        def on_step(finished: int) -> None:
            if next(frames_left, None) is not None:
                video.add(envs.render())

        HeldOut(envs, settings["seed"], device).play(agent, 1, args.greedy, on_step)
        video.finish()
    except OSError as error:
        raise InputError(f"--video {args.video} cannot be written ({error.strerror}).") from error
    finally:
        envs.close()
    print(f"{args.video}: the first episodes of {columns * rows} environments", flush=True)


def check(args: Args) -> None:
    """Raise InputError for settings that cannot work."""
    check_limits(args)
    if args.video is None:
        return
    if args.video.suffix not in (".mp4", ".gif"):
        raise InputError(f"--video {args.video} cannot be written: use a name that ends in .mp4 or .gif.")
    if args.video.suffix == ".mp4":
        if any(count * args.video_size % 2 for count in args.video_grid):  # H.264 stores colours at half the size
            raise InputError(f"--video-size {args.video_size} cannot work for {args.video}: use an even number.")
        if importlib.util.find_spec("av") is None:
            raise InputError(f"--video {args.video} needs an encoder: pip install av, or use a name that ends in .gif.")
    if args.video_size > (largest := 16_384 // max(args.video_grid)):  # H.264 ends at 16,384 pixels
        raise InputError(f"--video-size {args.video_size} is too large for this --video-grid: use at most {largest}.")


def main(args: Args) -> dict[str, float]:
    """Write the video, if any; then evaluate, print and return the figures. Raises InputError."""
    check(args)
    device = setup_device(args.device, seed=args.seed)
    agent, settings = load_agent(args.run_dir, device)
    games = settings.env_id.split(",")
    num_envs, quota = share_episodes(args.episodes, args.num_envs, games)
    made = {"seed": group_seed(args.seed, EVALUATION), "distribution_mode": settings.distribution_mode}
    made |= level_range(settings, args.levels)
    if args.video is not None:
        film(args, agent, settings.env_id, device, **made)
    envs = make_envs(settings.env_id, num_envs, **made)
    print(f"{args.run_dir}: {settings.env_id}, {args.levels} levels, {num_envs * quota} episodes", flush=True)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task, play = bar.add_task("episodes", total=num_envs * quota), HeldOut(envs, made["seed"], device).play
        returns, lengths = play(agent, quota, args.greedy, lambda finished: bar.update(task, completed=finished))
    envs.close()
    figures = {}
    for number, (game, summary) in enumerate(summaries(returns, lengths, games, settings.distribution_mode).items()):
        figures |= {
            f"{game} mean": summary["episodic_return"],
            f"{game} standard error": summary["standard_error"],
            f"{game} IQM": stats.trim_mean(returns[number :: len(games)], 0.25, axis=None),
            f"{game} normalised mean": summary["normalized_return"],
            f"{game} mean length": summary["episodic_length"],
        }
    for name, value in figures.items():
        print(f"{name}: {value:.3f}")
    return figures


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
