"""Make README's tables and figures from the curves that lie in results/ and reference/. Nothing is run.

    python benchmarks/report.py
    python benchmarks/report.py --results my_results --readme None     # elsewhere, without touching README.md

For each protocol (`results/<protocol>/<algorithm>/<game>/seed<k>.csv`): curves beside the published ones, the same over
wall-clock time, train-test gaps, means over games, and verdicts. Figures and `report.md` go to `results/<protocol>/`.

A score at a mark is the mean return of all episodes that ended in the last 131,072 steps before it (524,288 after 6.5M;
in hard mode four times all of this: the blocks of the published curves), a run one number. Differences come with 95 %
t-intervals, means over games with stratified bootstrap ones.
"""

import csv
import json
import math
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

import matplotlib
import numpy as np
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import curves
import exploration
import precision
import readme
import scaling
import throughput

from common.scores import RETURN_RANGES, normalized

ROOT = Path(__file__).parent.parent
MARKS = {"0.5M": 500_000, "1M": 1_000_000, "2M": 2_000_000, "5M": 5_000_000, "25M": 25_000_000}
MARKS |= {"50M": 50_000_000, "100M": 100_000_000, "200M": 200_000_000}
# What each protocol's runs are held against: the name of the published curves, and what the table calls them.
PUBLISHED = {
    "easy-all": {"": ("ppo_easy_all", "PPO, train-procgen")},
    "easy-200": {"": ("ppo_easy_200_train", "PPO, train-procgen")},
    "hard-all": {
        "": ("ppo_hard_all", "PPO, train-procgen"),
        "ppg": ("ppg_paper_ppg_single_network_hard_all", "PPG, single network, PPG paper"),
    },
}
TEST = {"easy-200": "ppo_easy_200_test"}
CLOSE = 0.25  # "matches": the interval of the difference holds 0 and no more than this share of the published mean
COLOURS = {"ppo": "C0", "ppg": "C1", "impala": "C2"}


@dataclass
class Args:
    results: Path = ROOT / "benchmarks" / "results"
    """where curves are and reports go"""
    readme: Path | None = ROOT / "README.md"
    """file to put the tables into; None for none"""


@dataclass
class Protocol:
    """All runs of a protocol: `runs[algorithm][game]` holds the curves, by seed."""

    folder: Path
    runs: dict[str, dict[str, dict[int, curves.Curve]]]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def mode(self) -> str:
        return self.name.split("-")[0]

    @property
    def games(self) -> list[str]:
        return sorted({game for games in self.runs.values() for game in games})

    def window(self, mark: int = 0) -> int:
        """Steps before a mark whose episodes count: as many as in the published curves' block there."""
        block = 524_288 if self.mode == "hard" else 131_072
        return block if mark <= 50 * block else 4 * block

    def scores(self, algorithm: str, game: str, mark: int) -> list[float]:
        """A number for each run that has got so far."""
        runs = [curve for _, curve in sorted(self.runs[algorithm].get(game, {}).items()) if curve.steps[-1] >= mark]
        return [score for run in runs if not math.isnan(score := curves.score(run, mark, self.window(mark)))]

    def published(self, algorithm: str) -> tuple[dict[str, curves.Reference], str]:
        """The published curves by game that an algorithm's are held against, and their name; none is an empty dict."""
        names = PUBLISHED.get(self.name, {})
        file, label = names.get(algorithm, names.get("", ("", "-")))
        return (reference(file) if file else {}), label


reference = cache(curves.read_reference)


def read_protocols(results: Path) -> list[Protocol]:
    """The protocols that have runs; other folders in `results` are passed over."""
    protocols = []
    for folder in sorted(results.glob("*-*/")):
        if folder.name.split("-")[0] not in RETURN_RANGES:
            continue
        runs = {}
        for path in sorted(folder.glob("*/*/seed*.csv")):
            if re.fullmatch(r"seed\d+", path.stem):
                algorithm, game = path.parts[-3:-1]
                runs.setdefault(algorithm, {}).setdefault(game, {})[seed_of(path)] = curves.read(path)
        if runs:
            protocols.append(Protocol(folder, runs))
    return protocols


# ------------------------------------------------------------------------------------------------------------- tables


def verdict(ours: list[float], published: list[float]) -> tuple[str, str, str]:
    """The difference of the means, its 95 % interval, and what they say."""
    if min(len(ours), len(published)) < 2:
        gap = f"{mean(ours) - mean(published):+.2f}" if ours and published else "-"
        return gap, "-", "too few seeds to say"
    middle, low, high = curves.difference(ours, published)
    if low > 0 or high < 0:
        words = "above" if low > 0 else "below"
    else:
        words = "matches" if max(-low, high) <= CLOSE * abs(mean(published)) else "too few seeds to say"
    return f"{middle:+.2f}", f"{low:+.2f} to {high:+.2f}", words


def verdict_table(protocol: Protocol) -> list[str]:
    """At each mark that a run has reached: ours, published, difference, interval, verdict."""
    columns = ["run", "mark", "ours, by seed", "published", "of", "difference", "95 % interval", "verdict"]
    rows = []
    for algorithm, games in protocol.runs.items():
        published, label = protocol.published(algorithm)
        for game in sorted(games):
            for mark, steps in MARKS.items():
                ours = protocol.scores(algorithm, game, steps)
                if ours:
                    theirs = published[game].scores(steps) if game in published else []
                    texts = [", ".join(f"{score:.2f}" for score in scores) or "-" for scores in (ours, theirs)]
                    rows.append([f"{algorithm} {game}", mark, *texts, label, *verdict(ours, theirs)])
    return readme.markdown(columns, rows)


def by_game(protocol: Protocol, scores: dict[str, list[float]]) -> list[list[float]]:
    """Normalised scores, game by game."""
    return [[normalized(score, game, protocol.mode) for score in runs] for game, runs in sorted(scores.items())]


def interval(values: tuple[float, float, float]) -> str:
    middle, low, high = values
    return f"{middle:.3f}" + ("" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]")


def aggregate_table(protocol: Protocol) -> list[str]:
    """Means over the games that an algorithm has been run on, two at least, beside the published runs on the same."""
    columns = ["runs", "mark", "games x seeds", "mean", "IQM", "published mean", "published IQM"]
    columns += ["P(ours above published)"]
    rows = []
    for algorithm, games in protocol.runs.items():
        published, _ = protocol.published(algorithm)
        for mark, steps in MARKS.items():
            ours = {game: protocol.scores(algorithm, game, steps) for game in games if game in published}
            ours = {game: scores for game, scores in ours.items() if scores}
            theirs = {game: scores for game in ours if (scores := published[game].scores(steps))}
            if len(ours) < 2 or ours.keys() != theirs.keys():
                continue
            seeds = min(map(len, ours.values()))  # of a game with more, the first
            samples, others = [runs[:seeds] for runs in by_game(protocol, ours)], by_game(protocol, theirs)
            row = [
                *(algorithm, mark, f"{len(samples)} x {seeds}"),
                *(
                    interval(curves.with_interval(statistic, runs))
                    for runs in (samples, others)
                    for statistic in (curves.mean_over_games, curves.interquartile_mean)
                ),
                interval(curves.with_interval(curves.probability_of_improvement, samples + others)),
            ]
            rows.append(row)
    return readme.markdown(columns, rows)


def read_evaluations(path: Path) -> list[tuple[int, float]]:
    """Steps and mean returns of the evaluations with the stochastic policy; of several games the mean."""
    evaluations = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["policy"] == "stochastic":
                evaluations.setdefault(int(row["step"]), []).append(float(row["episodic_return"]))
    return [(step, mean(returns)) for step, returns in evaluations.items()]


def gap_table(protocol: Protocol) -> list[str]:
    """Training levels against held-out ones, where runs were evaluated."""
    columns = ["run", "mark", "training levels", "held-out levels", "gap", "published: training, held-out"]
    rows = []
    test = reference(TEST[protocol.name]) if protocol.name in TEST else {}
    for algorithm, games in protocol.runs.items():
        train = protocol.published(algorithm)[0]
        for game, runs in sorted(games.items()):
            paths = {seed: protocol.folder / algorithm / game / f"seed{seed}.eval.csv" for seed in sorted(runs)}
            evaluations = {seed: read_evaluations(path) for seed, path in paths.items() if path.exists()}
            for mark, steps in MARKS.items():
                pairs = []
                for seed, evaluated in evaluations.items():
                    curve = runs[seed]
                    if curve.steps[-1] < steps:
                        continue
                    # evaluations come at the end of an iteration, so that the nearest may be a little after the mark
                    step, held_out = min(evaluated, key=lambda each: abs(each[0] - steps))
                    if abs(step - steps) <= protocol.window(steps):
                        pairs.append((curves.score(curve, step, protocol.window(step)), held_out))
                if pairs:
                    mine, others = ([pair[n] for pair in pairs] for n in (0, 1))
                    both = "-"
                    if game in test and train[game].scores(steps):
                        both = f"{mean(train[game].scores(steps)):.2f}, {mean(test[game].scores(steps)):.2f}"
                    texts = [", ".join(f"{value:.2f}" for value in values) for values in (mine, others)]
                    rows.append([f"{algorithm} {game}", mark, *texts, f"{mean(mine) - mean(others):.2f}", both])
    return readme.markdown(columns, rows)


def seed_of(path: Path) -> int:
    return int(path.name.removeprefix("seed").split(".")[0])


def commands(protocol: Protocol) -> list[str]:
    """The command that repeats a run, for each task: that of its first seed."""
    found = {}
    for path in sorted(protocol.folder.glob("*/*/seed*.meta.json"), key=lambda path: (path.parent, seed_of(path))):
        meta = json.loads(path.read_text())
        text = f"{seed_of(path)} (commit {str(meta['commit'])[:7]})"
        found.setdefault(path.parent, []).append((meta["command"], text))
    return [
        f"{seeds[0][0]}".ljust(80)
        + f" # {folder.parent.name} {folder.name}, seeds {', '.join(text for _, text in seeds)}"
        for folder, seeds in found.items()
    ]


# ------------------------------------------------------------------------------------------------------------ figures


def panels(count: int) -> tuple[plt.Figure, list[plt.Axes]]:
    columns = min(count, 4)
    rows = math.ceil(count / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.4 * columns, 2.7 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat[:count])


def draw(axis: plt.Axes, x: np.ndarray, runs: np.ndarray, **style) -> None:
    """The mean of runs [N, points] and a band from the least to the most of them."""
    axis.plot(x, runs.mean(axis=0), **style)
    if len(runs) > 1:
        axis.fill_between(x, runs.min(axis=0), runs.max(axis=0), color=style["color"], alpha=0.2, linewidth=0)


def smoothed(protocol: Protocol, curve: curves.Curve, ends: range) -> list[float]:
    return [curves.score(curve, end, protocol.window()) for end in ends]


def curve_figure(protocol: Protocol, path: Path) -> None:
    """A panel a game: return against million steps, the published runs in grey."""
    figure, axes = panels(len(protocol.games))
    step = protocol.window() // 4
    for axis, game in zip(axes, protocol.games, strict=True):
        longest = 0
        for algorithm in [name for name in protocol.runs if game in protocol.runs[name]]:
            seeds = protocol.runs[algorithm][game]
            ends = range(step, min(curve.steps[-1] for curve in seeds.values()) + 1, step)
            if not ends:  # a run that short has no point
                continue
            longest = max(longest, ends[-1])
            values = np.array([smoothed(protocol, curve, ends) for curve in seeds.values()])
            label = f"{algorithm} (n = {len(seeds)})"
            draw(axis, np.array(ends) / 1e6, values, color=COLOURS.get(algorithm, "C3"), label=label)
        published, label = protocol.published("")
        if game in published:
            shown = published[game].steps <= longest + 2 * protocol.window()
            returns = published[game].returns[:, shown]
            draw(axis, published[game].steps[shown] / 1e6, returns, color="0.5", label=f"{label} (n = {len(returns)})")
        axis.set_title(game, fontsize=10)
        axis.set_xlabel("million steps")
        axis.legend(frameon=False, fontsize=7)
    axes[0].set_ylabel("return")
    save(figure, path)


def wall_clock_figure(protocol: Protocol, path: Path) -> None:
    """A panel a game: return against hours, a line a run."""
    figure, axes = panels(len(protocol.games))
    step = protocol.window() // 4
    for axis, game in zip(axes, protocol.games, strict=True):
        for algorithm in [name for name in protocol.runs if game in protocol.runs[name]]:
            for number, curve in enumerate(protocol.runs[algorithm][game].values()):
                ends = range(step, max(curve.steps[-1], step) + 1, step)
                hours = np.interp(ends, curve.steps, curve.seconds) / 3600
                label = algorithm if number == 0 else None
                axis.plot(hours, smoothed(protocol, curve, ends), color=COLOURS.get(algorithm, "C3"), lw=1, label=label)
        axis.set_title(game, fontsize=10)
        axis.set_xlabel("hours")
        axis.legend(frameon=False, fontsize=7)
    axes[0].set_ylabel("return")
    save(figure, path)


def profile_figure(protocol: Protocol, path: Path) -> bool:
    """Performance profiles at the last mark at which an algorithm has two games; whether there is one."""
    thresholds = np.linspace(-0.1, 1, 111)
    figure, axis = plt.subplots(figsize=(7, 2.7), layout="constrained")
    axis.spines[["top", "right"]].set_visible(False)
    for algorithm, games in protocol.runs.items():
        for mark, steps in reversed(MARKS.items()):
            scores = {game: runs for game in games if (runs := protocol.scores(algorithm, game, steps))}
            if len(scores) < 2:
                continue
            label = f"{algorithm}, {mark}, {len(scores)} games"
            profile = curves.performance_profile(by_game(protocol, scores), thresholds)
            axis.step(thresholds, profile, where="post", color=COLOURS.get(algorithm, "C3"), label=label)
            published, name = protocol.published(algorithm)
            theirs = {game: runs for game in scores if game in published and (runs := published[game].scores(steps))}
            if theirs.keys() == scores.keys():
                profile = curves.performance_profile(by_game(protocol, theirs), thresholds)
                style = {"linestyle": ":", "color": COLOURS.get(algorithm, "C3")}
                axis.step(thresholds, profile, where="post", label=f"{name}, {mark}, same games", **style)
            break
    drawn = bool(axis.lines)
    if drawn:
        axis.set_xlabel("normalised return")
        axis.set_ylabel("share of runs above")
        axis.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        save(figure, path)
    plt.close(figure)
    return drawn


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=110, metadata={"Software": None})  # the same bytes each time
    plt.close(figure)


# --------------------------------------------------------------------------------------------------------------- main


def report(protocol: Protocol, relative_to: Path) -> str:
    """Draw a protocol's figures and return its text."""
    figures = {"curves.png": "Return against environment steps"}
    curve_figure(protocol, protocol.folder / "curves.png")
    wall_clock_figure(protocol, protocol.folder / "wall_clock.png")
    figures["wall_clock.png"] = "Return against hours"
    if profile_figure(protocol, protocol.folder / "profile.png"):
        figures["profile.png"] = "Performance profiles"
    folder = protocol.folder.resolve()
    place = folder.relative_to(relative_to) if folder.is_relative_to(relative_to) else folder
    parts = [
        [f"**{protocol.name}**"],
        verdict_table(protocol),
        aggregate_table(protocol),
        gap_table(protocol),
        [f"![{text}]({place.as_posix()}/{name})" for name, text in figures.items()],
        ["```bash", *commands(protocol), "```"],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def main(args: Args) -> None:
    protocols = read_protocols(args.results)
    if not protocols:
        raise SystemExit(f"error: no <protocol>/<algorithm>/<game>/seed<k>.csv is in {args.results}.")
    texts = []
    for protocol in protocols:
        texts.append(report(protocol, ROOT))
        (protocol.folder / "report.md").write_text(texts[-1])
    text = "\n".join(texts)
    print(text)
    if args.readme is None:
        return
    readme.fill(args.readme, "report", text)
    precision.main([])
    readme.fill(args.readme, "precision", (precision.FOLDER / "precision.md").read_text())
    exploration.main(exploration.Args())
    readme.fill(args.readme, "exploration", (exploration.FOLDER / "exploration.md").read_text())
    for script in (throughput, scaling):
        script.main(script.Args(from_csv=True, device="cpu"))
        readme.fill(args.readme, f"{script.__name__} cpu", (script.Args.out / "cpu.md").read_text())


if __name__ == "__main__":
    main(tyro.cli(Args))
