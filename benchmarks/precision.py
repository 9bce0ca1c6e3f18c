"""Does bfloat16 cost learning? Runs with --precision fp32 and bf16, seed by seed, and an interval of the difference.

    python benchmarks/precision.py                                   # from the curves that are there
    python benchmarks/precision.py runs/starpilot__ppo__2__1795158356 ...    # with those of these finished runs, too

Curves lie in `results/precision/<algorithm>/<game>/<precision>-seed<k>.csv`, where table and figure are written, too. A
run counts with the mean return of all episodes that ended in the last 131,072 steps before the mark (1M; PPG .5M).
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, variance

import tyro
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent.parent))
import figures
import readme
from collect import RESULTS, finished_run, write_curve
from common.errors import InputError
from common.signals import one_line_errors
from curves import Curve, difference, read, score
from figures import plt

FOLDER = RESULTS / "precision"
MARKS = {"ppo": 1_015_808, "impala-appo": 1_015_808, "ppg": 524_288, "ppg-long": 524_288}  # steps, whole iterations
WINDOW = 131_072
COLOURS = {"fp32": "C0", "bf16": "C1"}


def pooled_difference(pairs: list[tuple[list[float], list[float]]]) -> tuple[float, float, float]:
    """The mean over tasks of the difference as a share of the task's fp32 mean, with its 95 % interval.

    Each task has a variance of its own: Satterthwaite's degrees of freedom for the sum of their variances.
    """
    shares, variances, freedoms = [], [], []
    for bf16, fp32 in pairs:
        scale, freedom = mean(fp32), len(bf16) + len(fp32) - 2
        pooled = ((len(bf16) - 1) * variance(bf16) + (len(fp32) - 1) * variance(fp32)) / freedom
        shares.append((mean(bf16) - scale) / scale)
        variances.append(pooled * (1 / len(bf16) + 1 / len(fp32)) / (scale * len(pairs)) ** 2)
        freedoms.append(freedom)
    total = sum(variances)
    freedom = total**2 / sum(v**2 / f for v, f in zip(variances, freedoms, strict=True))
    half = stats.t.ppf(0.975, freedom) * total**0.5
    return mean(shares), mean(shares) - half, mean(shares) + half


def add(run_dir: Path) -> Path:
    """Copy a finished run's curve into the folder; return where to. Raises InputError for one that does not belong."""
    args, meta, curve = finished_run(run_dir)
    if args["exp_name"] not in MARKS:
        raise InputError(f"{run_dir} is a run of {args['exp_name']}: only {', '.join(MARKS)} have a mark here.")
    steps, mark = int(curve.splitlines()[-1].split(",")[0]), MARKS[args["exp_name"]]
    if steps < mark:
        raise InputError(f"{run_dir} has made {steps} steps: the mark of {args['exp_name']} is {mark}.")
    target = FOLDER / args["exp_name"] / args["env_id"] / f"{args['precision']}-seed{args['seed']}.csv"
    write_curve(target, curve, meta)
    return target


@dataclass
class Args:
    run_dirs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """folders of finished runs, to add"""


def main(args: Args) -> None:
    for run_dir in args.run_dirs:
        print(add(run_dir))
    tasks = {}  # (algorithm, game): {precision: {seed: curve}}
    for path in sorted(FOLDER.glob("*/*/*.csv")):
        algorithm, game = path.parts[-3:-1]
        precision, seed = path.stem.split("-seed")
        task = tasks.setdefault((algorithm, game), {"fp32": {}, "bf16": {}})
        task[precision][int(seed)] = read(path)

    columns = ["task", "steps", "fp32, by seed", "bf16, by seed", "difference", "95 % interval"]
    rows, pairs = [], []
    for (algorithm, game), task in tasks.items():
        mark = MARKS[algorithm]
        scores = {
            precision: [score(curve, mark, WINDOW) for _, curve in sorted(of_seeds.items())]
            for precision, of_seeds in task.items()
        }
        texts = [", ".join(f"{value:.2f}" for value in scores[precision]) or "-" for precision in ("fp32", "bf16")]
        result = ["-", "too few seeds"]
        if min(map(len, scores.values())) > 1:
            middle, low, high = difference(scores["bf16"], scores["fp32"])
            result = [f"{middle:+.2f}", f"{low:+.2f} to {high:+.2f}"]
            pairs.append((scores["bf16"], scores["fp32"]))
        rows.append([f"{readme.label(algorithm)} {game}", f"{mark:,}", *texts, *result])
    if pairs:
        middle, low, high = pooled_difference(pairs)
        summary = [f"mean of {len(pairs)} tasks, in % of fp32", "", "", ""]
        rows.append([*summary, f"{middle:+.1%}", f"{low:+.1%} to {high:+.1%}"])
    text = "\n".join([*readme.markdown(columns, rows), ""])
    (FOLDER / "precision.md").write_text(text)
    print(text)
    plot(tasks, FOLDER / "precision.png")


def plot(tasks: dict[tuple[str, str], dict[str, dict[int, Curve]]], path: Path) -> None:
    """A panel a task, a line a run."""
    figure, axes = plt.subplots(1, len(tasks), figsize=(3.2 * len(tasks), 2.8), squeeze=False)
    for axis, ((algorithm, game), task) in zip(axes[0], tasks.items(), strict=True):
        for precision, curves in task.items():
            for number, curve in enumerate(curves.values()):
                blocks = range(WINDOW // 2, min(curve.steps[-1], MARKS[algorithm]) + 1, WINDOW // 2)
                values = [score(curve, end, WINDOW // 2) for end in blocks]
                label = precision if number == 0 else None
                axis.plot([end / 1e6 for end in blocks], values, color=COLOURS[precision], label=label)
        axis.set_title(f"{readme.label(algorithm)} {game}", fontsize=10)
        axis.set_xlabel("million steps")
    axes[0][0].set_ylabel("return")
    axes[0][0].legend()
    figures.save(figure, path)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
