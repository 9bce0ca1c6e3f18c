"""Play a finished or running run's agent: mean return, standard error, interquartile mean, and a video.

    python benchmarks/evaluate.py runs/starpilot__ppg__1__1795202643 --episodes 500
    python benchmarks/evaluate.py runs/coinrun__ppo__1__1795202643 --levels train --greedy
    python benchmarks/evaluate.py runs/starpilot__ppg__1__1795202643 --video out.mp4      # or out.gif

Every environment plays the same number of episodes, so that short episodes do not count more often than long ones.
"""

import importlib.util
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import tyro
from PIL import Image
from scipy import stats
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from common.checkpoint import load_agent
from common.device import setup_device
from common.envs import make_envs, open_video
from common.errors import one_line_errors, require
from common.evaluation import HeldOut, evaluation_seed, play, share_episodes, summaries

LAST_LEVEL = 2**31 - 1


@dataclass
class Args:
    run_dir: tyro.conf.Positional[Path]
    """folder of the run"""
    episodes: int = 500
    """episodes in all; rounded up to as many for each environment"""
    num_envs: int = 50
    """environments side by side"""
    levels: Literal["all", "unseen", "train"] = "all"
    """Procgen levels: all there are; or of a run with --num-levels, those that it was not trained on, or was"""
    greedy: bool = False
    """take the likeliest action instead of drawing one"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    seed: int = 1
    """seed of level draws and actions"""
    video: Path | None = None
    """write a video of the first environments to this file (.mp4 needs the package av; or .gif)"""
    video_grid: tuple[int, int] = (3, 2)
    """columns and rows of the video: environments that it shows"""
    video_seconds: float = 20.0
    """length of the video, at most"""
    video_size: int = 512
    """pixels of an environment in the video: Procgen draws 512"""


def level_range(args: Any, levels: str) -> dict[str, int]:
    """`num_levels` and `start_level` of the environments for a run with the settings `args`.

    Raises InputError where there are no unseen levels.
    """
    none = f"--levels {levels}: this run has been trained on all levels, so that none is unseen: use --levels all."
    require(levels != "unseen" or args.num_levels > 0, none)
    if levels == "train":
        return {"num_levels": args.num_levels, "start_level": args.start_level}
    if levels == "unseen":
        first = args.start_level + args.num_levels
        return {"num_levels": LAST_LEVEL - first, "start_level": first}
    return {"num_levels": 0, "start_level": 0}


class Video:
    """A grid of environments, a frame a step, until it is long enough."""

    def __init__(self, path: Path, columns: int, seconds: float, size: int, fps: int):
        self.path, self.columns, self.size, self.fps = path, columns, size, fps
        self.frames_left = math.ceil(seconds * fps)
        self.gif, self.writer = [], None

    def add(self, frames: list[np.ndarray]) -> None:
        """Add a frame of each environment, uint8 [height, width, 3]."""
        self.frames_left -= 1
        tiles = [np.asarray(Image.fromarray(frame).resize((self.size,) * 2, Image.Resampling.BOX)) for frame in frames]
        rows = [np.concatenate(tiles[n : n + self.columns], axis=1) for n in range(0, len(tiles), self.columns)]
        picture = np.concatenate(rows)
        if self.path.suffix == ".gif":
            self.gif.append(Image.fromarray(picture).quantize(64))
            return
        if self.writer is None:
            self.writer = open_video(self.path, self.fps)
        self.writer.write_frame(picture)

    def __enter__(self) -> "Video":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.writer is not None:
            self.writer.close()
        if self.gif:
            first, *rest = self.gif
            first.save(self.path, save_all=True, append_images=rest, duration=round(1000 / self.fps), loop=0)


def check(args: Args) -> None:
    """Raise InputError for settings that cannot work."""
    require(args.episodes > 0, f"--episodes {args.episodes} cannot work: use a number above 0.")
    require(args.num_envs > 0, f"--num-envs {args.num_envs} cannot work: use a number above 0.")
    if args.video is None:
        return
    known = args.video.suffix in (".mp4", ".gif")
    require(known, f"--video {args.video} cannot be written: use a name that ends in .mp4 or .gif.")
    even = not any(count * args.video_size % 2 for count in args.video_grid)  # H.264 stores colours at half the size
    fits = even or args.video.suffix == ".gif"
    require(fits, f"--video-size {args.video_size} cannot work for {args.video}: use an even number.")
    av = args.video.suffix == ".gif" or importlib.util.find_spec("av") is not None
    require(av, f"--video {args.video} needs a video encoder: pip install av, or use a name that ends in .gif.")
    require(args.video.parent.is_dir(), f"--video {args.video} cannot be written: there is no {args.video.parent}.")
    for name in ("video_seconds", "video_size"):
        require(getattr(args, name) > 0, f"--{name.replace('_', '-')} cannot work: use a number above 0.")


def main(args: Args) -> dict[str, float]:
    """Evaluate, print and return the figures. Raises InputError before anything is played."""
    check(args)
    device = setup_device(args.device, seed=args.seed)
    agent, settings = load_agent(args.run_dir, device)
    games = settings.env_id.split(",")
    num_envs, quota = share_episodes(args.episodes, args.num_envs, games)
    columns, rows = args.video_grid
    few = f"--video-grid needs {columns * rows} environments, not {num_envs}: raise --num-envs (and --episodes)."
    require(args.video is None or 0 < columns * rows <= num_envs, few)
    seed = evaluation_seed(args.seed)
    envs = make_envs(
        settings.env_id,
        num_envs,
        seed=seed,
        distribution_mode=settings.distribution_mode,
        capture_video=args.video is not None,
        **level_range(settings, args.levels),
    )
    fps = envs.metadata.get("render_fps", 30)
    print(f"{args.run_dir}: {settings.env_id}, {args.levels} levels, {num_envs * quota} episodes", flush=True)
    with (
        tqdm(total=num_envs * quota, unit=" episodes", disable=not sys.stderr.isatty()) as bar,
        Video(args.video, columns, args.video_seconds, args.video_size, fps) if args.video else nullcontext() as video,
    ):

        def on_step(finished: int) -> None:
            bar.update(finished - bar.n)
            if video is not None and video.frames_left:
                video.add(envs.render()[: columns * rows])

        returns, lengths = play(agent, HeldOut(envs, seed), quota, greedy=args.greedy, device=device, on_step=on_step)
    envs.close()
    figures = {}
    for number, (game, summary) in enumerate(summaries(returns, lengths, games, settings.distribution_mode).items()):
        figures |= {
            f"{game} mean": summary.episodic_return,
            f"{game} standard error": summary.standard_error,
            f"{game} IQM": stats.trim_mean(returns[number :: len(games)], 0.25, axis=None),
            f"{game} normalised mean": summary.normalized_return,
            f"{game} mean length": summary.episodic_length,
        }
    for name, value in figures.items():
        print(f"{name}: {value:.3f}")
    return figures


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
