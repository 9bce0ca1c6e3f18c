"""Do intrinsic rewards find what chance does not? PPO on MountainCar-v0, where every step is worth -1 until the top.

    python benchmarks/exploration.py            # table and figure from the curves that are there
    python benchmarks/exploration.py --run      # first make the runs that are missing: fifteen minutes on one core

An episode ends after 200 steps, so that a return of -200 says nothing of how near the top was. Each variant has as many
steps in all: `fine-tuned` has half of them for pretraining (`--pretraining`), half for the task (`--init-from`).

Curves lie in `results/exploration/<variant>-seed<k>.csv`, where table and figure are written, too.
"""

import contextlib
import io
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
from collect import RESULTS, finished_run, write_curve
from curves import Curve, read, score
from readme import markdown

from common.errors import one_line_errors

FOLDER = RESULTS / "exploration"
STEPS, WINDOW = 300_000, 32_768  # of a run, and at its end those that it counts with
NOTHING = -200.0  # return of an episode without the top
COMMON = {
    "env_id": "MountainCar-v0", "num_envs": 16, "num_steps": 128, "gamma": 0.99, "learning_rate": 1e-3,
    "init_fn": "orthogonal", "feature_dim": 64, "intrinsic_coef": 50.0,
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "rnd": {"intrinsic_reward": "rnd"},
    "icm": {"intrinsic_reward": "icm"},
    "pretraining": {"intrinsic_reward": "rnd", "pretraining": True, "total_timesteps": STEPS // 2},
    "fine-tuned": {"init_from": "pretraining", "total_timesteps": STEPS // 2},
    "fine-tuned-new-heads": {"init_from": "pretraining", "init_heads": "reset", "total_timesteps": STEPS // 2},
}


@dataclass
class Args:
    run: bool = False
    """make the runs that are missing"""
    seeds: int = 3
    """runs of each variant"""


def curve_path(variant: str, seed: int) -> Path:
    return FOLDER / f"{variant}-seed{seed}.csv"


def run(seeds: int) -> None:
    """Make the runs without a curve, and those that they start from."""
    import ppo  # not for a table alone

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, seeds + 1):
            if all(curve_path(variant, seed).exists() for variant in VARIANTS):
                continue
            made = {}
            for variant, settings in VARIANTS.items():
                settings = {"total_timesteps": STEPS, **COMMON, **settings, "seed": seed, "runs_dir": folder}
                if "init_from" in settings:
                    settings["init_from"] = str(made[settings["init_from"]])
                with contextlib.redirect_stdout(io.StringIO()):
                    made[variant] = ppo.main(ppo.Args(**settings, exp_name=variant))
                _, meta, curve = finished_run(made[variant])
                meta["command"] = meta["command"].replace(f"{folder}/", "runs/")
                write_curve(curve_path(variant, seed), curve, meta)
                print(curve_path(variant, seed), flush=True)


def found(curve: Curve) -> float:
    """Steps after which an episode first reached the top; NaN for never."""
    steps = (
        step for step, n, value in zip(curve.steps, curve.episodes, curve.returns, strict=True) if n and value > NOTHING
    )
    return next(steps, math.nan)


def table(curves: dict[str, list[Curve]]) -> str:
    """A row a variant, a number a seed."""
    rows = []
    for variant, of_seeds in curves.items():
        firsts = [found(curve) for curve in of_seeds]
        ends = [score(curve, curve.steps[-1], WINDOW) for curve in of_seeds]
        rows.append(
            [
                variant,
                f"{of_seeds[0].steps[-1]:,}",
                ", ".join("never" if math.isnan(first) else f"{first:,.0f}" for first in firsts),
                ", ".join(f"{end:.0f}" for end in ends),
            ]
        )
    return "\n".join(markdown(["run", "steps", "first at the top, by seed", "return at the end, by seed"], rows)) + "\n"


def plot(curves: dict[str, list[Curve]], path: Path) -> None:
    """A line a run; those that were pretrained start where pretraining ended."""
    figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for number, (variant, of_seeds) in enumerate(curves.items()):
        start = STEPS // 2 if variant.startswith("fine") else 0
        for seed, curve in enumerate(of_seeds):
            ends = range(8192, curve.steps[-1] + 1, 8192)
            x, y = [(start + end) / 1e3 for end in ends], [score(curve, end, 8192) for end in ends]
            axis.plot(x, y, color=f"C{number}", label=None if seed else variant, linewidth=1)
    axis.set_xlabel("thousand steps")
    axis.set_ylabel("return")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(args: Args) -> None:
    if args.run:
        run(args.seeds)
    curves = {variant: [read(path) for path in sorted(FOLDER.glob(f"{variant}-seed*.csv"))] for variant in VARIANTS}
    text = table(curves)
    (FOLDER / "exploration.md").write_text(text)
    plot(curves, FOLDER / "exploration.png")
    print(text)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
