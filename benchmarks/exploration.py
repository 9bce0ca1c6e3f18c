"""Do intrinsic rewards find what chance does not? PPO on MountainCar-v0, where every step is worth -1 until the top.

    python benchmarks/exploration.py            # table and figure from the curves that are there
    python benchmarks/exploration.py --run      # first make the runs: fifteen minutes

An episode ends after 200 steps, so that a return of -200 says nothing of how near the top was. All have as many steps:
the fine-tuned runs start from the same half of them, pretraining (by RND), and have the other half for the task.

Curves lie in `results/exploration/<variant>-seed<k>.csv`, where table and figure are written, too.
"""

import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import figures
from collect import RESULTS, finished_run, write_curve
from common.errors import InputError
from common.files import ROOT
from common.settings import Positive, check_limits
from common.signals import one_line_errors
from curves import Curve, read, score
from figures import plt
from readme import markdown

FOLDER = RESULTS / "exploration"
STEPS, WINDOW = 300_000, 32_768  # of a run, and at its end those that it counts with
NOTHING = -200.0  # return of an episode without the top
COMMON = "--env-id MountainCar-v0 --num-envs 16 --num-steps 128 --gamma 0.99 --learning-rate 0.001 --init-fn orthogonal"
COMMON += " --feature-dim 64"
WEIGHT, HALF = "--intrinsic-coef 50", f"--total-timesteps {STEPS // 2}"
VARIANTS = {  # flags of ppo.py, and the variant that a run starts from
    "plain": (f"--total-timesteps {STEPS}", None),
    "rnd": (f"--total-timesteps {STEPS} --intrinsic-reward rnd {WEIGHT}", None),
    "icm": (f"--total-timesteps {STEPS} --intrinsic-reward icm {WEIGHT}", None),
    "pretraining": (f"{HALF} --intrinsic-reward rnd --pretraining", None),
    "fine-tuned": (f"{HALF} --init-heads policy", "pretraining"),
    "fine-tuned-new-heads": (f"{HALF} --init-heads reset", "pretraining"),
}


@dataclass
class Args:
    run: bool = False
    """make the runs of seeds that are not complete"""
    seeds: Positive[int] = 3
    """runs of each variant"""


def curve_path(variant: str, seed: int) -> Path:
    return FOLDER / f"{variant}-seed{seed}.csv"


def run(seeds: int) -> None:
    """Make the runs of the seeds that are not complete."""
    for seed in range(1, seeds + 1):
        if all(curve_path(variant, seed).exists() for variant in VARIANTS):
            continue
        with tempfile.TemporaryDirectory() as folder:
            made = {}
            for variant, (flags, start) in VARIANTS.items():
                words = f"{COMMON} {flags} --exp-name {variant} --seed {seed} --runs-dir {folder}".split()
                words += ["--init-from", str(made[start])] if start else []
                subprocess.run([sys.executable, "ppo.py", *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
                (made[variant],) = Path(folder).glob(f"*__{variant}__*")
            for variant, path in made.items():
                _, meta, curve = finished_run(path)
                meta["command"] = meta["command"].replace(f"{folder}/", "runs/")
                curve_path(variant, seed).unlink(missing_ok=True)
                write_curve(curve_path(variant, seed), curve, meta)
        print(f"seed {seed}: done", flush=True)


def found(curve: Curve) -> float:
    """Steps after which an episode first reached the top; NaN for never."""
    return next((step for step, value in zip(curve.steps, curve.returns, strict=True) if value > NOTHING), math.nan)


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
    columns = ["run", "its steps", "first at the top, by seed", "return at the end, by seed"]
    return "\n".join([*markdown(columns, rows), ""])


def plot(curves: dict[str, list[Curve]], path: Path) -> None:
    """A line a run; those that were pretrained start where pretraining ended."""
    figure, axis = plt.subplots(figsize=(6, 3.2))
    for number, (variant, of_seeds) in enumerate(curves.items()):
        start = STEPS // 2 if variant.startswith("fine") else 0
        for seed, curve in enumerate(of_seeds):
            ends = range(8192, curve.steps[-1] + 1, 8192)
            x, y = [(start + end) / 1e3 for end in ends], [score(curve, end, 8192) for end in ends]
            axis.plot(x, y, color=f"C{number}", label=None if seed else variant, linewidth=1)
    axis.set_xlabel("thousand steps")
    axis.set_ylabel("return")
    axis.legend(fontsize=8)
    figures.save(figure, path)


def main(args: Args) -> None:
    check_limits(args)
    if args.run:
        run(args.seeds)
    curves = {}
    for variant in VARIANTS:
        paths = [curve_path(variant, seed) for seed in range(1, args.seeds + 1)]
        if not all(path.exists() for path in paths):
            raise InputError(f"not all seeds of {variant} are there: add --run to make them.")
        curves[variant] = [read(path) for path in paths]
    text = table(curves)
    (FOLDER / "exploration.md").write_text(text)
    plot(curves, FOLDER / "exploration.png")
    print(text)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
