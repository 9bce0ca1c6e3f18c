"""PPG against PPO, phase by phase: at the same steps, at the same hours, and beside published runs of both.

    python benchmarks/phases.py          # from the curves in results/easy-all; writes phases.md and phases.png there

A phase has 131,072 steps with PPG's defaults and 524,288 with the paper's settings (`--preset paper`). In the paper
(Cobbe et al. 2020, hard mode) it has 2,097,152, with as many gradient steps as one of `--preset paper`. Hours are those
of two idle cores without bfloat16. Scores are mean returns of all episodes that ended in the last 131,072 steps.
"""

import sys
from pathlib import Path
from statistics import mean, median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import curves
import figures
import readme
from collect import RESULTS
from common.errors import InputError
from common.signals import one_line_errors
from curves import read_reference
from figures import plt

SHORT_PHASE, PHASE, WINDOW = 131_072, 524_288, 131_072  # steps
PAPER_PHASE = 2_097_152
PAPER = {  # the paper's runs, and which of ours they belong to
    "PPO, paper": ("ppg_paper_ppo_hard_all", "ppo"),
    "PPG, single network, paper": ("ppg_paper_ppg_single_network_hard_all", "ppg"),
    "PPG, dual, paper": ("ppg_paper_ppg_hard_all", "ppg-paper"),
}
PUBLISHED = "PPO, published"  # the runs of train-procgen (easy mode, all levels)
ALGORITHMS = ("ppo", "ppg", "ppg-dual", "ppg-long", "ppg-paper")  # folders of runs


def speeds() -> dict[str, float]:
    """Steps per second by folder of the runs, on two cores without bfloat16: medians of the scripts' defaults."""
    columns, only = {"algorithm": str, "steps_per_second": float}, [("sweep", ""), ("configuration", "default")]
    rows = zip(*curves.read_columns(RESULTS / "throughput-avx2" / "cpu.csv", "speeds", columns, only), strict=True)
    found = {}
    for algorithm, speed in rows:
        found.setdefault(algorithm, []).append(speed)
    return {algorithm: median(values) for algorithm, values in found.items()}


def read_runs(folder: Path) -> dict[str, dict[str, list[curves.Curve]]]:
    """The runs of each game that PPG has played, and the published ones of PPO: `[game][algorithm]`."""
    games = {}
    for algorithm in ALGORITHMS:
        for path in sorted(folder.glob(f"{algorithm}/*/seed*[0-9].csv")):
            games.setdefault(path.parent.name, {}).setdefault(algorithm, []).append(curves.read(path))
    games = {game: runs for game, runs in sorted(games.items()) if runs.keys() - {"ppo"}}
    for game, runs in games.items():
        if published := read_reference("ppo_easy_all").get(game):
            steps, ones = published.steps.tolist(), [1] * len(published.steps)  # a block counts as one episode
            runs[PUBLISHED] = [curves.Curve(steps, ones, ones, returns.tolist()) for returns in published.returns]
    return games


def table(games: dict[str, dict[str, list[curves.Curve]]]) -> list[str]:
    """A row for each game and long phase that a run of PPG has got through: means over seeds."""

    def cell(values: list[float]) -> str:
        return f"{mean(values):.2f} (n = {len(values)})" if values else "-"

    speed, paper = speeds(), {name: read_reference(file) for name, (file, _) in PAPER.items()}
    algorithms = [each for each in ALGORITHMS[1:] if any(each in runs for runs in games.values())]
    columns = ["game", "steps", *map(readme.label, algorithms), "PPO, same steps", "PPO, same hours", PUBLISHED, *paper]
    rows = []
    for game, runs in games.items():
        for phase in range(1, 100):
            step = phase * PHASE
            mine = [curves.scores(runs.get(algorithm, []), step, WINDOW) for algorithm in algorithms]
            if not any(mine):
                break
            ends = ("ppo", step), ("ppo", step * speed["ppo"] / speed["ppg"]), (PUBLISHED, step)
            others = [curves.scores(runs.get(algorithm, []), end, WINDOW) for algorithm, end in ends]
            published = [curve[game].scores(phase * PAPER_PHASE) if game in curve else [] for curve in paper.values()]
            rows.append([game, f"{step:,}", *map(cell, (*mine, *others, *published))])
    return readme.markdown(columns, rows)


def figure(games: dict[str, dict[str, list[curves.Curve]]], path: Path) -> None:
    """A row of three panels a game: against steps with PPG's phases marked, against hours, and the paper's."""
    speed = speeds()
    drawn, axes = plt.subplots(len(games), 3, figsize=(10, 2.9 * len(games)), squeeze=False)
    for (by_step, by_hour, published), (game, runs) in zip(axes, games.items(), strict=True):
        longest = max(run.steps[-1] for algorithm, its in runs.items() if algorithm != PUBLISHED for run in its)
        for algorithm, its in runs.items():
            apart = WINDOW if algorithm == PUBLISHED else WINDOW // 2
            ends = np.arange(apart, min(longest, max(run.steps[-1] for run in its)) + 1, apart)
            values = np.array([mean(curves.scores(its, end, WINDOW) or [np.nan]) for end in ends])
            colour = "0.5" if algorithm == PUBLISHED else readme.colour(algorithm)
            style = {"color": colour, "label": f"{readme.label(algorithm)} (n = {len(its)})"}
            by_step.plot(ends / 1e6, values, **style)
            if algorithm in speed:
                by_hour.plot(ends / speed[algorithm] / 3600, values, **style)
        last_of_ppg = max(run.steps[-1] for algorithm, its in runs.items() if "ppg" in algorithm for run in its)
        for length, width in ((SHORT_PHASE, 0.3), (PHASE, 1.0)):
            for step in range(length, last_of_ppg + 1, length):
                by_step.axvline(step / 1e6, color="0.8", linewidth=width, zorder=0)
        for name, (file, algorithm) in PAPER.items():
            curve, colour = read_reference(file).get(game), readme.colour(algorithm)
            if curve:
                shown = curve.steps <= 8 * PAPER_PHASE
                published.plot(curve.steps[shown] / PAPER_PHASE, curve.returns[:, shown].mean(0), colour, label=name)
        labels = "million steps", "hours", "phases of 32 iterations (paper)"
        for axis, label in zip((by_step, by_hour, published), labels, strict=True):
            axis.set_xlabel(label)
            axis.set_title(game, fontsize=10)
            axis.legend(fontsize=7)
    figures.save(drawn, path)


def main(folder: Path = RESULTS / "easy-all") -> str:
    """Write table and figure; return the table. Raises InputError without runs."""
    games = read_runs(folder)
    if not games:
        raise InputError(f"{folder} has no runs of PPG.")
    text = "\n".join([*table(games), ""])
    (folder / "phases.md").write_text(text)
    figure(games, folder / "phases.png")
    return text


if __name__ == "__main__":
    with one_line_errors():
        print(main())
