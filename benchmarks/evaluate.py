"""Play the agent of a run, finished or not, or a random policy: mean return, standard error, interquartile mean.

    python benchmarks/evaluate.py runs/starpilot__ppg__1__1795202643 --episodes 500
    python benchmarks/evaluate.py runs/coinrun__ppo__1__1795202643 --levels train --greedy
    python benchmarks/evaluate.py runs/starpilot__ppg__1__1795202643/model.pt --video out.mp4      # or out.gif
    python benchmarks/evaluate.py runs/starpilot__ppg__1__1795202643 --export policy.pt --episodes 0
    python benchmarks/evaluate.py --random-policy starpilot fruitbot    # what a learning curve has to rise above

Every environment plays the same number of episodes, so that short episodes do not count more often than long ones.

--export writes TorchScript, a file that runs without this code, in Python or C++. The exported policy takes a batch of
observations, uint8 frames [B, height, width, channels] or float32 vectors [B, size], and returns the parameters of the
action distributions, float32 [B, P] (of discrete actions the logits), as `get_action_dist` makes them, in float32
throughout. With an LSTM it takes and returns the state [2, B, H], too, which is zero where an episode starts.
"""

import importlib.util
import io
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from scipy import stats
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import InputError, TrainingError
from common.checkpoint import load_agent
from common.device import resolve_device, setup_device
from common.envs import Envs, Episode, finished_episodes, make_vec, open_video, spread_seed
from common.evaluation import EVALUATION, HeldOut, share_episodes, summaries
from common.run import write_atomically
from common.session import one_line_errors
from common.settings import EnvArgs, NotNegative, Positive, Seed, check_limits, flag

LAST_LEVEL = 2**31 - 1
TOLERANCE = 1e-4  # of an exported policy's outputs: PyTorch's kernels and ours add up in another order


@dataclass
class Args:
    source: tyro.conf.Positional[Path | None] = None
    """run folder, model or checkpoint"""
    random_policy: tuple[str, ...] = ()
    """games, or other tasks, to play with random actions in place of an agent"""
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] | None = None
    """Procgen's difficulty for --random-policy (None: easy); an agent plays in that of its run"""
    episodes: NotNegative[int] = 500
    """episodes in all; rounded up to as many for each environment; 0 for none"""
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
    export: Path | None = None
    """first write the policy to this file, which must be new, so that no model is lost"""
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


def film(args: Args, agent: nn.Module, settings: Any, make_envs: Callable, seed: int, device: torch.device) -> None:
    """Write the video, of environments of its own. Raises InputError if that fails."""
    columns, rows = args.video_grid
    if columns * rows % (games := len(settings.env_id.split(","))):
        raise InputError(f"--video-grid {columns} {rows} cannot be shared by {games} games: use a multiple of {games}.")
    envs = Envs(make_envs(settings, columns * rows, seed, render=True))
    fps = envs.metadata.get("render_fps", 30)
    frames_left = iter(range(math.ceil(args.video_seconds * fps)))
    try:
        video = Video(args.video, columns, args.video_size, fps)

        def on_step(finished: int) -> None:
            if next(frames_left, None) is not None:
                video.add(envs.render())

        HeldOut(envs, seed, device).play(agent, 1, args.greedy, on_step)
        video.finish()
    except OSError as error:
        raise InputError(f"--video {args.video} cannot be written ({error.strerror}).") from error
    finally:
        envs.close()
    print(f"{args.video}: the first episodes of {columns * rows} environments", flush=True)


class Policy(nn.Module):
    """What is exported of an agent."""

    def __init__(self, agent: nn.Module):
        super().__init__()
        self.agent = agent

    def forward(self, obs: Tensor, state: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if not hasattr(self.agent, "step"):
            return self.agent.get_policy(obs)
        params, _, next_state = self.agent.step(obs, self.agent.initial_state(len(obs)) if state is None else state)
        return params if state is None else (params, next_state)


def export(source: Path, out: Path) -> None:
    """Write the policy of a run folder, model or checkpoint to `out`.

    Raises InputError if `out` exists or cannot be written; TrainingError if what is exported differs from the agent.
    """
    if os.path.exists(out):
        raise InputError(f"--export {out} exists: choose another name, or remove it first.")
    agent, args, make_envs = load_agent(source)
    agent.bf16 = False
    envs = Envs(make_envs(args, 8 * len(args.env_id.split(",")), seed=1))
    obs = torch.as_tensor(envs.reset(seed=1)[0])
    envs.close()
    inputs = [obs if obs.dim() == 4 else obs.float()]
    if getattr(agent, "lstm", None) is not None:
        inputs.append(torch.randn_like(agent.initial_state(len(obs))))
    policy = Policy(agent).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript itself
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of sizes that might be kept: see below
        scripted = torch.jit.freeze(torch.jit.trace(policy, tuple(inputs)))
        for size in (len(obs), 1):  # and another batch than the one that it was traced with
            batch = [inputs[0][:size], *(state[:, :size] for state in inputs[1:])]
            expected, found = policy(*batch), scripted(*batch)
            pairs = zip(expected, found, strict=True) if isinstance(expected, tuple) else [(expected, found)]
            errors = torch.stack([(mine - theirs).abs().max() for mine, theirs in pairs])
            if not (errors <= TOLERANCE).all():  # nor NaN
                raise TrainingError(f"the exported policy differs from the agent, by up to {errors.max():.3g}")
    try:
        write_atomically(out, scripted.save_to_buffer())
    except OSError as error:
        raise InputError(f"--export {out} cannot be written ({error.strerror}).") from error
    print(f"{out} gives the same as the agent of {source} (within {TOLERANCE}, float32).", flush=True)


def check(args: Args) -> None:
    """Raise InputError for settings that cannot work."""
    check_limits(args)
    if args.source is None and not args.random_policy:
        raise InputError(
            "nothing to play is named: name a run folder, a model or a checkpoint, or use --random-policy."
        )
    if args.episodes == 0 and args.export is None and args.video is None:
        raise InputError("--episodes 0 leaves nothing to do: use a number above 0, or add --export or --video.")
    if args.source is not None and args.distribution_mode is not None:
        raise InputError("--distribution-mode is for --random-policy: leave it out, as an agent plays in its run's.")
    if args.random_policy:
        for name in ("source", "levels", "greedy", "export", "video"):
            if getattr(args, name) != getattr(Args, name):
                what = args.source if name == "source" else flag(name)
                raise InputError(f"{what} is for an agent: leave it out, or --random-policy.")
    if args.video is None:
        return
    if args.video.suffix not in (".mp4", ".gif"):
        raise InputError(f"--video {args.video} cannot be written: use a name that ends in .mp4 or .gif.")
    if args.video.suffix == ".mp4":
        if any(count * args.video_size % 2 for count in args.video_grid):  # H.264 stores colours at half the size
            raise InputError(f"--video-size {args.video_size} cannot work for {args.video}: use an even number.")
        if importlib.util.find_spec("av") is None:
            raise InputError(f"--video {args.video} needs an encoder: pip install av, or use a name that ends in .gif.")
    largest = 16_384 // max(args.video_grid)  # H.264 ends at 16,384 pixels
    if args.video_size > largest:
        raise InputError(f"--video-size {args.video_size} is too large for this --video-grid: use at most {largest}.")


def play_randomly(envs: Envs, quota: int, seed: int) -> list[list[Episode]]:
    """The first `quota` episodes of each environment with random actions."""
    envs.reset(seed=seed)
    actions = envs.unwrapped.action_space  # a wrapper's has no bounds
    actions.seed(seed)
    episodes = [[] for _ in range(envs.num_envs)]
    while min(map(len, episodes)) < quota:
        for episode in finished_episodes(envs.step(actions.sample())[-1]):
            episodes[episode.env].append(episode)
    return [each[:quota] for each in episodes]


def summarise(played: list[list[Episode]], games: list[str], mode: str) -> dict[str, float]:
    """Print and return the figures of each game. Environment i has played `games[i % len(games)]`."""
    figures = {}
    for number, (game, summary) in enumerate(summaries(played, games, mode).items()):
        returns = [episode.episodic_return for each in played[number :: len(games)] for episode in each]
        figures |= {
            f"{game} mean": summary["episodic_return"],
            f"{game} standard error": summary["standard_error"],
            f"{game} IQM": stats.trim_mean(returns, 0.25),
            f"{game} normalised mean": summary["normalized_return"],
            f"{game} mean length": summary["episodic_length"],
            f"{game} share of levels solved": summary["level_complete"],
        }
    for name, value in figures.items():
        print(f"{name}: {value:.3f}")
    return figures


def evaluate_random_policy(args: Args) -> dict[str, float]:
    mode = args.distribution_mode or "easy"
    made, figures = [], {}
    for env_id in args.random_policy:  # all tasks are known before the first is played
        num_envs, quota = share_episodes(args.episodes, args.num_envs, env_id.split(","))
        settings = EnvArgs(env_id=env_id, distribution_mode=mode)
        made.append((env_id, Envs(make_vec(settings, num_envs, args.seed)), quota))
    for env_id, envs, quota in made:
        print(f"random policy: {env_id}, {mode}, {envs.num_envs * quota} episodes", flush=True)
        figures |= summarise(play_randomly(envs, quota, args.seed), env_id.split(","), mode)
        envs.close()
    return figures


def evaluate_agent(args: Args) -> dict[str, float]:
    device = resolve_device(args.device)
    setup_device(device, seed=args.seed)
    agent, settings, make_envs = load_agent(args.source, device)
    games, seed = settings.env_id.split(","), spread_seed(args.seed, EVALUATION)
    settings = replace(settings, num_threads=None, **level_range(settings, args.levels))
    if args.export is not None:
        export(args.source, args.export)
    if args.video is not None:
        film(args, agent, settings, make_envs, seed, device)
    if args.episodes == 0:
        return {}
    num_envs, quota = share_episodes(args.episodes, args.num_envs, games)
    envs = Envs(make_envs(settings, num_envs, seed))
    print(f"{args.source}: {settings.env_id}, {args.levels} levels, {num_envs * quota} episodes", flush=True)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("episodes", total=num_envs * quota)
        held_out = HeldOut(envs, seed, device)
        played = held_out.play(agent, quota, args.greedy, lambda finished: bar.update(task, completed=finished))
    envs.close()
    return summarise(played, games, settings.distribution_mode)


def main(args: Args) -> dict[str, float]:
    """Write what is asked for; then play, print and return the figures. Raises InputError."""
    check(args)
    return evaluate_random_policy(args) if args.random_policy else evaluate_agent(args)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
