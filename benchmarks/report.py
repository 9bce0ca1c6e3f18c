"""Make the tables and figures of README.md and benchmarks/README.md from the curves in results/ and reference/.

    python benchmarks/report.py
    python benchmarks/report.py --results my_results --documents     # elsewhere: prints the tables, fills no document

For each protocol (`results/<protocol>/<algorithm>/<game>/seed<k>.csv`): curves beside the published ones, verdicts,
means over games, and train-test gaps. Figures go to `results/<protocol>/`. Nothing is run. `results/long/` holds runs
of 25M steps in the same folders; in the panel of a short run they would take all the room. benchmarks/README.md says
how runs are scored.
"""

import itertools
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import curves
import figures
import readme
import throughput
from collect import RESULTS, same_settings
from common import InputError
from common.evaluation import RETURN_RANGES, normalized
from common.procgen_env import PROCGEN_MODES
from common.session import one_line_errors
from common.settings import read_json
from curves import read_reference
from figures import plt

HERE = Path(__file__).parent
MARKS = {"0.5M": 500_000, "1M": 1_000_000, "2M": 2_000_000, "5M": 5_000_000, "10M": 10_000_000, "25M": 25_000_000}
MARKS |= {"50M": 50_000_000, "100M": 100_000_000, "200M": 200_000_000}
# What each protocol's runs are held against: the name of the published curves, and what the table calls them.
PUBLISHED = {
    "easy-all": {"": ("ppo_easy_all", "PPO, train-procgen")},
    "easy-200": {"": ("ppo_easy_200_train", "PPO, train-procgen")},
    "hard-all": {
        "": ("ppo_hard_all", "PPO, train-procgen"),
        "ppg": ("ppg_paper_ppg_single_network_hard_all", "PPG, single network, PPG paper"),
        "ppg-paper": ("ppg_paper_ppg_hard_all", "PPG, PPG paper"),
    },
}
DEFAULTS = ("ppo", "impala-appo", "ppg")  # folders of the scripts' defaults: the columns of README's table
TEST = {"easy-200": "ppo_easy_200_test"}
# Tables of throughput.py, and of scripts that made their runs and figures once and were last in commit 47efbf0
TABLES = {
    "throughput cpu": "throughput/cpu.md",
    "scaling cpu": "scaling/cpu.md",
    "phases": "easy-all/phases.md",
    "precision": "precision/precision.md",
    "exploration": "exploration/exploration.md",
}
CLOSE = 0.25  # "matches": the interval of the difference holds 0 and lies within this share of the published mean


@dataclass
class Args:
    results: Path = RESULTS
    """where curves are and reports go"""
    documents: tuple[Path, ...] = readme.DOCUMENTS
    """files whose marks say where the tables go; none: only print them"""


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
        runs = self.runs.get(algorithm, {}).get(game, {})
        return curves.scores((curve for _, curve in sorted(runs.items())), mark, self.window(mark))

    def marks(self, game: str) -> list[tuple[str, int]]:
        """The marks, and the last steps of a game's runs that were collected before their end."""
        stops = [read_json(path).get("stopped_at") for path in self.folder.glob(f"*/{game}/seed*.meta.json")]
        marks = MARKS | {f"{step / 1e6:.1f}M": step for step in stops if step}
        return sorted(marks.items(), key=lambda mark: mark[1])

    def published(self, algorithm: str) -> tuple[dict[str, curves.Reference], str]:
        """The published curves by game that an algorithm's are held against, and their name; none is an empty dict."""
        names = PUBLISHED.get(self.name, {})
        file, label = names.get(algorithm, names.get("", ("", "-")))
        return (read_reference(file) if file else {}), label

    def normalised(self, algorithm: str, steps: int) -> tuple[list[list[float]], list[list[float]]]:
        """Normalised scores of the runs that have got so far, game by game, and of the published ones on these games:
        none if one of the games lacks them."""
        published, _ = self.published(algorithm)
        ranged = sorted(RETURN_RANGES.get(self.mode, {}).keys() & self.runs[algorithm].keys())
        ours, theirs = [], []
        for game in ranged:
            if scores := self.scores(algorithm, game, steps):
                others = published[game].scores(steps) if game in published else []
                ours.append([normalized(score, game, self.mode) for score in scores])
                theirs.append([normalized(score, game, self.mode) for score in others])
        return ours, theirs if all(theirs) else []


def read_protocols(results: Path) -> list[Protocol]:
    """The protocols that have runs; other folders in `results` are passed over. Raises InputError as `curves.read`."""
    protocols = []
    for folder in sorted(results.glob("*-*/"), key=lambda folder: (not folder.name.endswith("-all"), folder.name)):
        if folder.name.split("-")[0] not in PROCGEN_MODES:
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


def words(low: float, high: float, published: float) -> str:
    """What the interval of a difference from a published mean says."""
    if low > 0 or high < 0:
        return "above" if low > 0 else "below"
    return "matches" if max(-low, high) <= CLOSE * abs(published) else "inconclusive"


def verdict(ours: list[float], published: list[float]) -> tuple[str, str, str]:
    """The difference of the means, its 95 % interval, and what they say."""
    if not published:
        return "-", "-", "nothing published"
    middle, low, high = curves.difference(ours, published)
    return f"{middle:+.2f}", f"{low:+.2f} to {high:+.2f}", words(low, high, mean(published))


def verdict_table(protocol: Protocol) -> list[str]:
    """At each mark that a run has reached: ours, published, difference, interval, verdict."""
    columns = ["run", "mark", "ours, by seed", "published", "difference", "95 % interval", "verdict"]
    rows = []
    for algorithm, games in protocol.runs.items():
        published, _ = protocol.published(algorithm)
        for game in sorted(games):
            for mark, steps in protocol.marks(game):
                ours = protocol.scores(algorithm, game, steps)
                if ours:
                    theirs = published[game].scores(steps) if game in published else []
                    texts = [", ".join(f"{score:.2f}" for score in scores) or "-" for scores in (ours, theirs)]
                    rows.append([f"{readme.label(algorithm)} {game}", mark, *texts, *verdict(ours, theirs)])
    return readme.markdown(columns, rows)


def origins(protocol: Protocol) -> list[str]:
    """A line that says which published curves each algorithm's runs are held against; none without such curves."""
    labels = {}
    for algorithm in protocol.runs:
        published, label = protocol.published(algorithm)
        if published:
            labels.setdefault(label, []).append(readme.label(algorithm))
    return [f"Published, for {', '.join(names)}: {label}." for label, names in labels.items()]


def summary_table(protocol: Protocol) -> list[str]:
    """README's table, a row for each game that all scripts have run with their defaults: means over seeds after one and
    two million steps, with the range over seeds, beside published PPO, and since when PPG has been ahead of that."""

    def cell(scores: list[float]) -> str:
        spread = f" ({min(scores):.1f} to {max(scores):.1f})" if len(scores) > 1 else ""
        return f"{mean(scores):.1f}{spread}" if scores else "-"

    algorithms, (published, _) = [each for each in DEFAULTS if each in protocol.runs], protocol.published("")
    marks, columns, rows = ("1M", "2M"), ["game"], []
    for mark in marks:
        columns += [f"published PPO, {mark}", *(f"{readme.label(algorithm)}, {mark}" for algorithm in algorithms)]
    for game in protocol.games:
        if any(game not in protocol.runs[algorithm] for algorithm in algorithms):
            continue  # the figure has it
        cells = []
        for steps in map(MARKS.get, marks):
            cells.append(cell(published[game].scores(steps) if game in published else []))
            cells += [cell(protocol.scores(algorithm, game, steps)) for algorithm in algorithms]
        rows.append([game, *cells, ahead_since(protocol, game)])
    return readme.markdown([*columns, "PPG ahead of published PPO"], rows)


def ahead_since(protocol: Protocol, game: str) -> str:
    """From which step on, of every eighth of a window, the mean of PPG's runs is above published PPO's."""
    published, since, last, window = protocol.published("")[0].get(game), None, 0, protocol.window()
    for end in itertools.count(window, window // 8):
        if not (published and (ours := protocol.scores("ppg", game, end))):
            break
        ahead = mean(ours) > mean(published.scores(end) or [math.inf])
        since, last = (since or end) if ahead else None, end
    if not last:
        return "-"
    return f"not by {last / 1e6:.1f}M" if since is None else f"from {since / 1e6:.1f}M to {last / 1e6:.1f}M"


def interval(statistic: Callable, games: list[list[float]]) -> str:
    middle, low, high = curves.with_interval(statistic, games)
    if math.isnan(middle):
        return "-"
    return f"{middle:.3f}" + ("" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]")


def aggregate_table(protocol: Protocol) -> list[str]:
    """Means over the games that an algorithm has been run on, two at least, beside published runs on the same."""
    columns = ["runs", "mark", "games x seeds", "mean", "IQM", "published mean", "published IQM"]
    columns += ["P(ours above published)", "difference", "95 % interval over games", "verdict"]
    rows = []
    for algorithm in protocol.runs:
        for mark, steps in MARKS.items():
            ours, others = protocol.normalised(algorithm, steps)
            if len(ours) < 2:
                continue
            fewest, most = min(map(len, ours)), max(map(len, ours))
            size = f"{len(ours)} x {fewest}" + (f" to {most}" if most > fewest else "")
            even = [runs[:fewest] for runs in ours]  # the IQM counts runs, not games
            row = [readme.label(algorithm), mark, size, interval(curves.mean_over_games, ours)]
            row.append(interval(curves.interquartile_mean, even))
            if others:
                row += [interval(curves.mean_over_games, others), interval(curves.interquartile_mean, others)]
                row.append(interval(curves.probability_of_improvement, ours + others))
                gaps = [mean(mine) - mean(other) for mine, other in zip(ours, others, strict=True)]
                low, high = curves.mean_interval(gaps)
                row += [f"{mean(gaps):+.3f}", f"{low:+.3f} to {high:+.3f}", words(low, high, mean(map(mean, others)))]
            rows.append(row + ["-"] * (len(columns) - len(row)))
    return readme.markdown(columns, rows)


class Evaluations(NamedTuple):
    """A run's eval.csv, of the stochastic policy: a row an evaluation."""

    steps: list[int]
    returns: list[float]
    errors: list[float]  # standard errors

    def at(self, step: float) -> tuple[float, float] | None:
        """Return and standard error, from the evaluations before and after `step`; None where one is missing."""
        if not self.steps[0] <= step <= self.steps[-1]:
            return None
        weights = np.array([np.interp(step, self.steps, unit) for unit in np.eye(len(self.steps))])  # of each
        return float(weights @ self.returns), math.hypot(*(weights * self.errors))


def evaluations_of(protocol: Protocol, algorithm: str, game: str) -> dict[int, Evaluations]:
    """By seed, of the runs that were evaluated. None of those on several games at once: training has most episodes of
    the game with the shortest, evaluations as many of each. Raises InputError as `curves.read` does."""
    columns, found = {"step": int, "episodic_return": float, "standard_error": float}, {}
    for seed in sorted(protocol.runs[algorithm][game]):
        path = protocol.folder / algorithm / game / f"seed{seed}.eval.csv"
        if path.exists() and "," not in game:
            rows = curves.read_columns(path, "evaluations", columns, only=[("policy", "stochastic")])
            found[seed] = Evaluations(*rows)
    return found


def gap_table(protocol: Protocol) -> list[str]:
    """Training levels against held-out ones, where runs were evaluated."""
    columns = ["run", "mark", "training levels", "held-out levels", "gap", "95 % interval"]
    columns += ["published: training, held-out", "gap"]
    rows = []
    test = read_reference(TEST[protocol.name]) if protocol.name in TEST else {}
    for algorithm, games in protocol.runs.items():
        train = protocol.published(algorithm)[0]
        for game, runs in sorted(games.items()):
            evaluations = evaluations_of(protocol, algorithm, game)
            for mark, steps in MARKS.items():
                window = protocol.window(steps)
                middles = {seed: evaluated.at(steps - window / 2) for seed, evaluated in evaluations.items()}
                reached = [seed for seed, held_out in middles.items() if held_out and runs[seed].steps[-1] >= steps]
                scores = [(curves.score(runs[seed], steps, window), *middles[seed]) for seed in reached]
                if not scores:
                    continue
                gaps = [trained - held_out for trained, held_out, _ in scores]
                low_high = "{:.2f} to {:.2f}".format(*curves.mean_interval(gaps)) if len(gaps) > 1 else "-"
                mine = ", ".join(f"{trained:.2f}" for trained, _, _ in scores)
                others = ", ".join(f"{held_out:.2f} ± {error:.2f}" for _, held_out, error in scores)
                published = ["-", "-"]
                if game in test and train[game].scores(steps):
                    both = [mean(curve[game].scores(steps)) for curve in (train, test)]
                    published = ["{:.2f}, {:.2f}".format(*both), f"{both[0] - both[1]:.2f}"]
                run = f"{readme.label(algorithm)} {game}"
                rows.append([run, mark, mine, others, f"{mean(gaps):.2f}", low_high, *published])
    return readme.markdown(columns, rows)


def seed_of(path: Path) -> int:
    return int(path.name.removeprefix("seed").split(".")[0])


def commands(protocol: Protocol) -> list[str]:
    """The commands that made the curves: one for all runs of an algorithm that differ in games and seeds alone (and in
    what a resumed run may change: the first run's flags stand for all)."""
    runs = {}  # by algorithm, settings and game, then by seed
    for path in sorted(protocol.folder.glob("*/*/seed*.meta.json"), key=lambda path: (path.parent, seed_of(path))):
        meta = read_json(path)
        if not meta.keys() >= {"command", "commit", "dirty"}:
            raise InputError(f"{path} does not say how its curve was made: collect it again.")
        flags = same_settings(meta["command"])
        game = next((flag[1] for flag in flags if flag[0] == "--env-id"), path.parent.name)
        settings = str([flag for flag in flags if flag[0] != "--env-id"])
        runs.setdefault((path.parts[-3], settings, game), {})[seed_of(path)] = meta
    groups = {}  # by algorithm, settings and seeds, then by game
    for (algorithm, settings, game), metas in runs.items():
        groups.setdefault((algorithm, settings, tuple(metas)), {})[game] = list(metas.values())
    lines = []
    for (algorithm, _, seeds), games in groups.items():
        metas = [meta for each in games.values() for meta in each]
        line = re.sub(r" --seed [0-9]+", "", metas[0]["command"]) + f" --seed {'$seed' if len(seeds) > 1 else seeds[0]}"
        if len(seeds) > 1:
            line = f"for seed in {' '.join(map(str, seeds))}; do {line}; done"
        if len(games) > 1:
            line = re.sub(r" --env-id \S+", "", line).replace(" --seed", " --env-id $game --seed")
            line = f"for game in {' '.join(games)}; do {line}; done"
        commits = [str(meta["commit"])[:7] + " with changes" * bool(meta["dirty"]) for meta in metas]
        lines += [f"# {readme.label(algorithm)} {', '.join(games)} (made at {', '.join(dict.fromkeys(commits))})", line]
    return lines


# ------------------------------------------------------------------------------------------------------------ figures


def draw(axis: plt.Axes, x: np.ndarray, runs: np.ndarray, **style) -> None:
    """The mean of runs [N, points], shaded from their minimum to their maximum; NaN where a run has no point."""
    runs = np.ma.masked_invalid(runs)
    axis.plot(x, runs.mean(axis=0), **style)
    if len(runs) > 1:
        axis.fill_between(x, runs.min(axis=0), runs.max(axis=0), color=style["color"], alpha=0.2, linewidth=0)


def curve_figure(protocol: Protocol, path: Path) -> None:
    """A panel a game: return against million steps, on held-out levels dashed. Published runs are grey, or dotted."""
    columns, step = min(len(protocol.games), 4), protocol.window() // 4
    rows = math.ceil(len(protocol.games) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2.4 * columns + 2, 2.2 * rows + 0.3), squeeze=False)
    for axis in axes.flat[len(protocol.games) :]:
        axis.set_axis_off()
    for axis, game in zip(axes.flat, protocol.games, strict=False):
        longest, (published, name) = 0, protocol.published("")
        references = {name: (published, {"color": "0.5"})}
        if protocol.name in TEST:
            references[f"{name}, held-out"] = read_reference(TEST[protocol.name]), {"color": "0.5", "linestyle": "--"}
        for algorithm in [name for name in protocol.runs if game in protocol.runs[name]]:
            runs, colour = list(protocol.runs[algorithm][game].values()), readme.colour(algorithm, protocol.runs)
            ends = range(step, max(curve.steps[-1] for curve in runs) + 1, step)
            if not ends:  # a run that short has no point
                continue
            longest = max(longest, ends[-1])
            window = protocol.window(ends[-1])
            values = np.array([[curves.score(curve, end, window) for end in ends] for curve in runs])
            values[[[end > curve.steps[-1] for end in ends] for curve in runs]] = math.nan
            draw(axis, np.array(ends) / 1e6, values, color=colour, label=readme.label(algorithm))
            label = f"{readme.label(algorithm)}, held-out"
            for evaluated in evaluations_of(protocol, algorithm, game).values():
                axis.plot(np.array(evaluated.steps) / 1e6, evaluated.returns, "--", color=colour, lw=1, label=label)
                label = None
            published, name = protocol.published(algorithm)
            references.setdefault(name, (published, {"color": colour, "linestyle": ":"}))
        for name, (published, style) in references.items():
            if game in published:
                shown = published[game].steps <= longest + 2 * protocol.window()
                draw(axis, published[game].steps[shown] / 1e6, published[game].returns[:, shown], label=name, **style)
        axis.set_title(game, fontsize=10)
    legend = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(legend.values(), legend.keys(), fontsize=8, loc="outside right upper")
    figure.supxlabel("million steps", fontsize=9)
    figure.supylabel("return", fontsize=9)
    figures.save(figure, path)


def profile_figure(protocol: Protocol, path: Path) -> bool:
    """Performance profiles at the last mark at which an algorithm has two games; whether there is one. There is none
    for a protocol with fewer than three games."""
    thresholds = np.linspace(-0.1, 1, 111)
    figure, axis = plt.subplots(figsize=(7, 2.7))
    for algorithm in protocol.runs if len(protocol.games) >= 3 else ():
        for mark, steps in reversed(MARKS.items()):
            ours, theirs = protocol.normalised(algorithm, steps)
            if len(ours) < 2:
                continue
            style = {"where": "post", "color": readme.colour(algorithm, protocol.runs)}
            label = f"{readme.label(algorithm)}, {mark}, {len(ours)} games"
            axis.step(thresholds, curves.performance_profile(ours, thresholds), label=label, **style)
            if theirs:
                label = f"{protocol.published(algorithm)[1]}, {mark}, same games"
                axis.step(thresholds, curves.performance_profile(theirs, thresholds), ":", label=label, **style)
            break
    drawn = bool(axis.lines)
    if drawn:
        axis.set_xlabel("normalised return")
        axis.set_ylabel("share of runs above")
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        figures.save(figure, path)
    plt.close(figure)
    return drawn


# --------------------------------------------------------------------------------------------------------------- main


def report(protocol: Protocol) -> str:
    """Draw a protocol's figures and return its text, with links that start from the folder of benchmarks/README.md."""
    drawn = {"curves.png": "Return against environment steps"}
    curve_figure(protocol, protocol.folder / "curves.png")
    if profile_figure(protocol, protocol.folder / "profile.png"):
        drawn["profile.png"] = "Performance profiles"
    folder = protocol.folder.resolve()
    place = folder.relative_to(HERE) if folder.is_relative_to(HERE) else folder
    parts = [
        origins(protocol),
        verdict_table(protocol),
        aggregate_table(protocol),
        gap_table(protocol),
        [f"![{text}]({place.as_posix()}/{name})" for name, text in drawn.items()],
        ["```bash", *commands(protocol), "```"],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def main(args: Args) -> None:
    """Make all tables and figures. Raises InputError for lacking runs or documents before any is made."""
    protocols = read_protocols(args.results)
    if not protocols:
        raise InputError(f"no <protocol>/<algorithm>/<game>/seed<k>.csv is in {args.results}.")
    if missing := [str(path) for path in args.documents if not path.is_file()]:
        raise InputError(f"--documents {missing[0]} is not there: name files with the marks of the tables, or none.")
    text = "\n".join(f"### {protocol.name}\n\n{report(protocol)}" for protocol in protocols)
    print(text)
    if not args.documents:
        return
    texts = {"report": text, "long": "\n".join(map(report, read_protocols(args.results / "long")))}
    for protocol in protocols:
        if protocol.name == "easy-all":
            texts["results"] = "\n".join([*summary_table(protocol), ""])
    throughput.main(throughput.Args(from_csv=True, device="cpu"))
    for name, path in TABLES.items():
        texts[name] = (RESULTS / path).read_text()
    for name, text in texts.items():
        readme.fill(args.documents, name, text)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
