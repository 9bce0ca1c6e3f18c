"""Figures and tables of runs.

    python benchmarks/report.py runs/*__* --baseline ppo     # one's own: report/report.md, report/easy-all/curves.pdf
    python benchmarks/report.py --results my_results         # of curves that collect.py has copied
    python benchmarks/report.py                              # those of README.md and benchmarks/README.md

Runs may be finished, running or stopped. They are drawn by protocol, algorithm (`--exp-name`) and game, beside
published curves. benchmarks/README.md says how they are scored.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np
import tyro
from matplotlib.ticker import EngFormatter

sys.path.insert(1, str(Path(__file__).parent.parent))  # after the folder of curves.py and others
import curves
import readme
import throughput
from collect import RESULTS, collect, complete, folder_name, read_run
from common import InputError
from common.evaluation import RETURN_RANGES, normalized
from common.run import write_atomically
from common.session import one_line_errors
from common.settings import NotNegative, check_limits, flag, read_json

plt.switch_backend("Agg")  # draws without a screen
plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
plt.rcParams |= {"figure.constrained_layout.use": True, "pdf.fonttype": 42}  # fonts that journals accept

MARKS = {f"{million:g}M": round(1e6 * million) for million in (0.5, 1, 2, 5, 10, 25, 50, 100, 200)}
# The published curves that each protocol's runs are held against, and those of single algorithms.
PUBLISHED = {"easy-all": "ppo_easy_all", "easy-200": "ppo_easy_200_train", "hard-all": "ppo_hard_all"}
PUBLISHED_PPG = {"ppg": "ppg_single_network", "ppg-long": "ppg_single_network", "ppg-paper": "ppg"}
TEST = {"easy-200": "ppo_easy_200_test"}
FEWEST = 3  # seeds or games; the verdict on fewer is "inconclusive"
SCRIPT_HASH = r"'script_sha256': '(\w+)'"  # in meta.json as text: resumed parts have their own
CLOSE = 0.25  # "matches": the interval of the difference holds 0 and lies within this share of the published mean


@dataclass
class Args:
    run_dirs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """folders of runs; none: the curves in --results"""
    baseline: str = ""
    """--exp-name of the runs that the others are compared with"""
    mark: NotNegative[int] = 0
    """step at which runs are compared; 0: the last that the runs of a game have reached"""
    results: Path = RESULTS
    """where collected curves are, for a report without run folders"""
    out: Path = Path("report")
    """where report.md and the figures of one's own runs go"""


@dataclass
class Protocol:
    """All runs of a protocol: `runs[algorithm][game]` holds the curves, by seed."""

    folder: Path
    runs: dict[str, dict[str, dict[int, curves.Curve]]]
    out: Path | None = None  # where the figures of one's own runs go; None: they are the documents'
    mark: int = 0  # step at which one's own runs are compared
    baseline: str = ""  # algorithm that takes the place of published curves

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def versus(self) -> str:
        return readme.label(self.baseline) if self.baseline else "published"

    @property
    def games(self) -> list[str]:
        return sorted({game for games in self.runs.values() for game in games})

    @property
    def tasks(self) -> list[tuple[str, str, str]]:
        """Each algorithm but the baseline with each of its games, and what tables call the two."""
        pairs = [(name, game) for name in self.runs if name != self.baseline for game in sorted(self.runs[name])]
        return [(name, game, f"{readme.label(name)} {game}") for name, game in pairs]

    def block(self, mark: int) -> int:
        """Steps of the published curves' block that ends at a mark."""
        block = 524_288 if self.name.startswith("hard") else 131_072
        return block if mark <= 50 * block else 4 * block

    def window(self, mark: int) -> int:
        """Steps before a mark whose episodes count. One's own runs may be short."""
        return min(self.block(mark), max(mark // 8, 1)) if self.out else self.block(mark)

    def block_end(self, mark: int) -> float:
        """Of the published block with the same middle as the window before a mark."""
        return mark + (self.block(mark) - self.window(mark)) / 2

    def scores(self, algorithm: str, game: str, mark: int) -> list[float]:
        runs = self.runs.get(algorithm, {}).get(game, {})
        reached = [curve for _, curve in sorted(runs.items()) if curve.steps[-1] >= mark]
        scores = [curves.score(curve, mark, self.window(mark)) for curve in reached]
        return [score for score in scores if not math.isnan(score)]

    def others(self, algorithm: str, game: str, mark: int) -> list[float]:
        """The scores that an algorithm's are held against."""
        if self.baseline:
            return self.scores(self.baseline, game, mark)
        published, _ = self.published(algorithm)
        return published[game].scores(self.block_end(mark)) if game in published else []

    def marks(self, algorithm: str, game: str) -> dict[str, int]:
        """The marks, and where a game's runs were collected unfinished. One's own runs have one: the last step that an
        algorithm's and the baseline's have reached, but for those with less than half the steps of the longest."""
        if self.out:
            ends = []
            for name in (algorithm, self.baseline):
                steps = [curve.steps[-1] for curve in self.runs.get(name, {}).get(game, {}).values()]
                ends += [end for end in steps if 2 * end >= max(steps)]
            step = self.mark or min(ends)
            return {f"{step:,}": step}
        stops = [read_json(path).get("stopped_at") for path in self.folder.glob(f"*/{game}/seed*.meta.json")]
        marks = MARKS | {f"{step / 1e6:.1f}M": step for step in stops if step}
        return dict(sorted(marks.items(), key=lambda mark: mark[1]))

    def published(self, algorithm: str) -> tuple[dict[str, curves.Reference], str]:
        """The published curves by game that an algorithm's are held against, and their name; none is an empty dict."""
        file, label = PUBLISHED.get(self.name, ""), "PPO, train-procgen"
        if self.name == "hard-all" and algorithm in PUBLISHED_PPG:
            file, label = f"ppg_paper_{PUBLISHED_PPG[algorithm]}_hard_all", "PPG, PPG paper"
        return (curves.read_reference(file) if file else {}), label

    def normalised(self, algorithm: str, mark: str) -> tuple[list[list[float]], list[list[float]]]:
        """Normalised scores of the runs that have got so far, game by game, and of the others on these games: none if
        one of the games lacks them."""
        ours, theirs, mode = [], [], self.name.split("-")[0]
        for game in sorted(RETURN_RANGES.get(mode, {}).keys() & self.runs[algorithm].keys()):
            steps = MARKS.get(mark) or max(self.marks(algorithm, game).values())
            scores, others = self.scores(algorithm, game, steps), self.others(algorithm, game, steps)
            if scores and (others or not self.baseline):
                ours.append([normalized(score, game, mode) for score in scores])
                theirs.append([normalized(score, game, mode) for score in others])
        return ours, theirs if all(theirs) else []


def read_protocols(results: Path) -> list[Protocol]:
    """The protocols that have runs; other folders in `results` are passed over. Raises InputError as `curves.read`."""
    protocols = []
    for folder in sorted(results.glob("*-*/"), key=lambda folder: (not folder.name.endswith("-all"), folder.name)):
        runs = {}
        curves.check_files(*folder.glob("*/*/*"))
        for path in sorted(folder.glob("*/*/seed*[0-9].csv")):
            algorithm, game = path.parts[-3:-1]
            if any(folder_name(name) != name for name in path.parts[-4:-1]) or not path.stem[4:].isdecimal():
                raise InputError(f"{path} has a name that collect.py does not give")
            runs.setdefault(algorithm, {}).setdefault(game, {})[int(path.stem[4:])] = curves.read(path)
        if runs:
            protocols.append(Protocol(folder, runs))
    return protocols


def gather(run_dirs: Iterable[Path], folder: Path) -> list[str]:
    """Collect runs in `folder`. Returns why others are left out. Of runs that do not go together, those stay whose
    settings most runs have, of these the longest, and of these the newest."""
    found, left_out = [], []
    for run_dir in run_dirs:
        try:
            _, meta, curve, _ = read_run(run_dir)
            if not any(curve.episodes):
                raise InputError(f"{run_dir}: no episode has finished yet")
            found.append((str(meta["settings"]), curve.steps[-1], str(meta.get("started")), run_dir))
        except (InputError, OSError) as error:
            left_out.append(str(error))
    seeds = Counter(settings for settings, *_ in found)
    for *_, run_dir in sorted(found, key=lambda run: (seeds[run[0]], *run[1:3]), reverse=True):
        try:
            collect(run_dir, folder, unfinished=True)
        except InputError as error:
            left_out.append(str(error))
    return left_out


def words(low: float, high: float, other: float, n: int) -> str:
    """What the interval of a difference from a mean of `other` says, with `n` values on the smaller side."""
    if n < FEWEST:
        return "inconclusive"
    if low > 0 or high < 0:
        return "above" if low > 0 else "below"
    return "matches" if max(-low, high) <= CLOSE * abs(other) else "inconclusive"


def verdict(ours: list[float], others: list[float]) -> tuple[str, str, str]:
    """The difference of the means, its 95 % interval, and what they say."""
    if not others:
        return "-", "-", "nothing to compare with"
    middle, low, high = curves.difference(ours, others)
    between = "-" if math.isnan(low) else f"{low:+.2f} to {high:+.2f}"
    return f"{middle:+.2f}", between, words(low, high, mean(others), min(len(ours), len(others)))


def verdict_table(protocol: Protocol) -> list[str]:
    """At each mark that a run has reached: ours, the others, difference, interval, verdict."""
    columns = ["run", "mark", "ours, by seed", protocol.versus, "difference", "95 % interval", "verdict"]
    rows, alone = [], False
    for algorithm, game, run in protocol.tasks:
        for mark, steps in protocol.marks(algorithm, game).items():
            ours, others = protocol.scores(algorithm, game, steps), protocol.others(algorithm, game, steps)
            if ours:
                alone = alone or (protocol.out and {1} < {len(ours), len(others)} - {0})
                texts = []
                for scores in (ours, others):
                    text = ", ".join(f"{score:.2f}" for score in scores) or "-"
                    texts.append(f"{mean(scores):.2f} (n = {len(scores)}: {text})" if protocol.out and scores else text)
                rows.append([run, mark, *texts, *verdict(ours, others)])
    caption = ["", "The interval takes a single run to vary as the runs that it is compared with."] if alone else []
    return readme.markdown(columns, rows) + caption


def states(protocol: Protocol) -> list[str]:
    """A line for each of one's own runs that has not finished, has no score at its mark, or a few rows alone."""
    lines = []
    for algorithm, game, run in protocol.tasks:
        ((mark, steps),) = protocol.marks(algorithm, game).items()
        runs = sorted(protocol.runs[algorithm][game].items())
        metas = [read_json(protocol.folder / algorithm / game / f"seed{seed}.meta.json") for seed, _ in runs]
        if len(set(re.findall(SCRIPT_HASH, str(metas)))) > 1:
            lines.append(f"- {run} was made by several versions of its script")
        for (seed, curve), meta in zip(runs, metas, strict=True):
            remarks = [f"{'running or stopped' if 'stopped_at' in meta else 'finished'} at step {curve.steps[-1]:,}"]
            if curve.steps[-1] < steps or math.isnan(curves.score(curve, steps, protocol.window(steps))):
                remarks.append(f"without a score at {mark}")
            if len(curve.steps) < FEWEST:
                remarks.append(f"with too few rows for a curve ({len(curve.steps)})")
            if "stopped_at" in meta or remarks[1:]:
                lines.append(f"- {run}, seed {seed}: {', '.join(remarks)}")
    scored = "Scores are of at most 1/8 of the steps (figure: the shortest algorithm's, at least 1/400 of the longest)."
    return [*(lines or ["All runs have finished."]), "", f"{scored} Verdicts need {FEWEST} seeds."]


def notes(protocol: Protocol) -> list[str]:
    """Where an algorithm has other flags than the baseline, and where it has the same script with the same flags."""
    found = {}  # games of each line
    for algorithm, game, _ in protocol.tasks:
        folders = [protocol.folder / name / game for name in (algorithm, protocol.baseline)]
        runs = [[read_json(path) for path in sorted(folder.glob("*.meta.json"))] for folder in folders]
        if not (all(runs) and all("settings" in metas[0] for metas in runs)):
            continue
        hashes = [set(re.findall(SCRIPT_HASH, str(metas))) for metas in runs]
        ours, theirs = complete(runs[0][0], runs[1][0]), complete(runs[1][0], runs[0][0])
        names = [name for name in sorted(ours.keys() - {"exp_name", "script"}) if ours[name] != theirs[name]]
        only = [" ".join(f"{flag(name)} {each[name]}" for name in names) for each in (ours, theirs)]
        line = f"- {readme.label(algorithm)} was started with {only[0]}, {protocol.versus} with {only[1]}"
        if not names:
            line = f"- {readme.label(algorithm)} has the same script and flags as {protocol.versus}"
        if names or hashes[0] & hashes[1]:
            found.setdefault(readme.one_line(line), []).append(game)
    return [f"{line}: {', '.join(games)}" for line, games in found.items()]


def summary_table(protocol: Protocol) -> list[str]:
    """README's table, a row for each game that all scripts have run with their defaults: means over seeds after one and
    two million steps, with the range over seeds, beside published PPO."""

    def cell(scores: list[float]) -> str:
        spread = f" ({min(scores):.1f} to {max(scores):.1f})" if len(scores) > 1 else ""
        return f"{mean(scores):.1f}{spread}" if scores else "-"

    algorithms, columns, rows = ("ppo", "impala-appo", "ppg"), ["game"], []
    for mark in ("1M", "2M"):
        columns += [f"published PPO, {mark}", *(f"{readme.label(algorithm)}, {mark}" for algorithm in algorithms)]
    for game in set.intersection(*(set(protocol.runs[algorithm]) for algorithm in algorithms)):
        row = [game]
        for steps in (MARKS["1M"], MARKS["2M"]):
            row.append(cell(protocol.others("", game, steps)))
            row += [cell(protocol.scores(algorithm, game, steps)) for algorithm in algorithms]
        rows.append(row)
    return readme.markdown(columns, sorted(rows))


def interval(statistic: Callable, games: list[list[float]]) -> str:
    middle, low, high = curves.with_interval(statistic, games)
    between = "" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]"
    return "-" if math.isnan(middle) else f"{middle:.3f}{between}"


def aggregate_table(protocol: Protocol) -> list[str]:
    """Means over the games that an algorithm has been run on, two at least, beside the others' on the same."""
    columns = ["runs", "mark", "games x seeds", "mean", "IQM", f"{protocol.versus} mean", f"{protocol.versus} IQM"]
    columns += [f"P(ours above {protocol.versus})", "difference", "95 % interval over games", "verdict"]
    rows = []
    for algorithm in [name for name in protocol.runs if name != protocol.baseline]:
        for mark in ["each game's"] if protocol.out else MARKS:
            ours, others = protocol.normalised(algorithm, mark)
            if len(ours) < 2:
                continue
            fewest, most = min(map(len, ours)), max(map(len, ours))
            size = f"{len(ours)} x {fewest}" + (f" to {most}" if most > fewest else "")
            row = [readme.label(algorithm), mark, size, interval(curves.mean_over_games, ours)]
            even = [runs[:fewest] for runs in ours]  # the IQM counts runs, not games
            row.append(interval(curves.interquartile_mean, even))
            if others:
                even = [runs[: min(map(len, others))] for runs in others]
                row += [interval(curves.mean_over_games, others), interval(curves.interquartile_mean, even)]
                row.append(interval(curves.probability_of_improvement, ours + others))
                gaps = [mean(mine) - mean(other) for mine, other in zip(ours, others, strict=True)]
                low, high = curves.mean_interval(gaps)
                row += [f"{mean(gaps):+.3f}", f"{low:+.3f} to {high:+.3f}"]
                row.append(words(low, high, mean(map(mean, others)), len(gaps)))
            rows.append(row + ["-"] * (len(columns) - len(row)))
    return readme.markdown(columns, rows)


def evaluations_of(protocol: Protocol, algorithm: str, game: str) -> dict[int, list[list[float]]]:
    """By seed, steps, returns and standard errors of the stochastic policy's evaluations. None of a run on several
    games: training has most episodes of the game with the shortest, evaluations as many of each."""
    folder, found = protocol.folder / algorithm / game, {}
    for seed in sorted(protocol.runs[algorithm][game]):
        if "," not in game and (path := folder / f"seed{seed}.eval.csv").exists():
            found[seed] = curves.read_evaluations(path)
    return found


def at_step(evaluations: list[list[float]], step: float) -> tuple[float, float] | None:
    """Return and standard error, from the evaluations before and after `step`; None where one is missing."""
    steps, returns, errors = evaluations
    if not steps[0] <= step <= steps[-1]:
        return None
    weights = np.array([np.interp(step, steps, unit) for unit in np.eye(len(steps))])  # of each
    return float(weights @ returns), math.hypot(*(weights * errors))


def gap_table(protocol: Protocol) -> list[str]:
    """Training levels against those of evaluations, where there were any."""
    columns = ["run", "mark", "training levels", "evaluation levels", "gap", "95 % interval"]
    columns += ["published: training, held-out", "gap"]
    rows = []
    test = curves.read_reference(TEST[protocol.name]) if protocol.name in TEST else {}
    for algorithm, game, run in protocol.tasks:
        evaluations, runs = evaluations_of(protocol, algorithm, game), protocol.runs[algorithm][game]
        for mark, steps in protocol.marks(algorithm, game).items():
            window = protocol.window(steps)
            middles = {seed: at_step(each, steps - window / 2) for seed, each in evaluations.items()}
            reached = [seed for seed, held_out in middles.items() if held_out and runs[seed].steps[-1] >= steps]
            scores = [(curves.score(runs[seed], steps, window), *middles[seed]) for seed in reached]
            scores = [each for each in scores if not math.isnan(each[0])]
            if not scores:
                continue
            gaps = [trained - held_out for trained, held_out, _ in scores]
            low_high = "{:.2f} to {:.2f}".format(*curves.mean_interval(gaps)) if len(gaps) > 1 else "-"
            mine = ", ".join(f"{trained:.2f}" for trained, _, _ in scores)
            others = ", ".join(f"{held_out:.2f} ± {error:.2f}" for _, held_out, error in scores)
            published = ["-", "-"]
            if game in test and (train := protocol.others(algorithm, game, steps)):
                both = mean(train), mean(test[game].scores(protocol.block_end(steps)))
                published = ["{:.2f}, {:.2f}".format(*both), f"{both[0] - both[1]:.2f}"]
            rows.append([run, mark, mine, others, f"{mean(gaps):.2f}", low_high, *published])
    return readme.markdown(columns, rows)


def commands(protocol: Protocol) -> list[str]:
    """The commands that made the curves, each below a line with its games, seeds and commits."""
    runs, commits = {}, {}  # of each command
    for path in sorted(protocol.folder.glob("*/*/seed*.meta.json")):
        meta = read_json(path)
        if not (meta.keys() >= {"commit", "dirty"} and isinstance(meta.get("command"), str)):
            raise InputError(f"{path} does not say how its curve was made: collect it again.")
        command = re.sub(r" --(env-id|seed) \S+", "", meta["command"]) + " --env-id $game --seed $seed"
        runs.setdefault(command, {}).setdefault(path.parent.name, []).append(path.name[4:].split(".")[0])
        commit = str(meta["commit"])[:7] + " with changes" * bool(meta["dirty"])
        commits.setdefault(command, {})[commit] = None
    lines = []
    for command, games in runs.items():
        texts = ", ".join(f"{game} {' '.join(seeds)}" for game, seeds in games.items())
        lines += [f"# {texts} (made at {', '.join(commits[command])})", command]
    return [readme.one_line(line) for line in lines]


def draw(axis: plt.Axes, x: np.ndarray, runs: np.ndarray, **style) -> None:
    """The mean of runs [N, points], shaded from their minimum to their maximum; NaN where a run has no point."""
    runs = np.ma.masked_invalid(runs)
    axis.plot(x, runs.mean(axis=0), **style)
    if len(runs) > 1:
        axis.fill_between(x, runs.min(axis=0), runs.max(axis=0), color=style["color"], alpha=0.2, linewidth=0)


def curve_figure(protocol: Protocol, paths: list[Path]) -> None:
    """Return against steps, with one window a game. Held-out levels are dashed, published ones grey or dotted."""
    columns = math.ceil(math.sqrt(len(protocol.games)))
    rows = math.ceil(len(protocol.games) / columns)
    figure, axes = plt.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(protocol.games) :]:
        axis.set_axis_off()
    for axis, game in zip(axes.flat, protocol.games, strict=False):
        published, name = protocol.published("")
        references = {name: (published, {"color": "0.5"})}
        if protocol.name in TEST:
            references[f"{name}, held-out"] = (curves.read_reference(TEST[protocol.name]), {"color": "0.5", "ls": "--"})
        panel = {name: list(games[game].values()) for name, games in protocol.runs.items() if game in games}
        lengths = [max(curve.steps[-1] for curve in runs) for runs in panel.values()]
        longest = max(lengths)
        window = protocol.window(max(min(lengths), longest // 50) if protocol.out else longest)
        ends = np.arange(max(window // 4, 1), longest + 1, max(window // 4, 1))
        for algorithm, runs in panel.items():
            colour = readme.colour(algorithm, protocol.runs)
            values = np.array([[curves.score(curve, end, window) for end in ends] for curve in runs])
            values[ends > np.array([curve.steps[-1:] for curve in runs])] = math.nan
            draw(axis, ends, values, color=colour, label=readme.label(algorithm))
            label = f"{readme.label(algorithm)}, evaluation"
            for steps, returns, _ in evaluations_of(protocol, algorithm, game).values():
                axis.plot(steps, returns, ".--", color=colour, lw=1, ms=3, label=label)
            published, name = protocol.published(algorithm)
            references.setdefault(name, (published, {"color": colour, "linestyle": ":"}))
        for name, (published, style) in references.items():
            if game in published:
                middles = published[game].steps - (np.diff(published[game].steps, prepend=0) - window) / 2
                shown = middles <= longest + 2 * window
                if shown.sum() > 1:
                    draw(axis, middles[shown], published[game].returns[:, shown], label=name, **style)
        axis.set_title(game)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.supxlabel("environment steps")
    figure.supylabel("return")
    legend = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    beside = max(1, 70 // (max(map(len, legend)) + 4))
    figure.legend(legend.values(), legend.keys(), ncols=beside, handlelength=1.2, loc="outside upper center")
    figure.set_size_inches(6.6, rows * (1.2 + 1.6 / columns) + 0.25 * math.ceil(len(legend) / beside) + 0.5)
    save(figure, *paths)


def save(figure: plt.Figure, *paths: Path) -> None:
    """As PNG or PDF, at most twice as wide as high, with text of 6 points where it is printed 3.3 inches wide."""
    width, height = figure.get_size_inches()
    figure.set_figheight(max(height, width / 2))
    for axes in figure.axes:
        axes.tick_params(labelsize=6 * width / 3.3)
    for text in figure.findobj(plt.Text):
        text.set_fontsize(6 * width / 3.3)
    for path in paths:
        metadata = {"Software": None} if path.suffix == ".png" else None  # a PNG has the same bytes each time
        path.unlink(missing_ok=True)  # it may be a link
        figure.savefig(path, dpi=200, metadata=metadata)
    plt.close(figure)


def report(protocol: Protocol, baseline: str = "") -> str:
    """Draw a protocol's figure and return its text, with links that start from benchmarks/, or where report.md is."""
    folder, root = (protocol.out, protocol.out.parent) if protocol.out else (protocol.folder, RESULTS.parent)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "curves.png"
    curve_figure(protocol, [picture, picture.with_suffix(".pdf")] if protocol.out else [picture])
    parts, shown = [states(protocol)] if protocol.out else [], set()
    if baseline:
        compared = replace(protocol, baseline=baseline)
        parts += [notes(compared), verdict_table(compared), aggregate_table(compared)]
        shown = {game for _, game, _ in compared.tasks}
    if set(protocol.games) - shown or any(game in protocol.published(name)[0] for name, game, _ in protocol.tasks):
        parts += [verdict_table(protocol), aggregate_table(protocol)]
    parts += [gap_table(protocol), [f"![Return against environment steps]({picture.relative_to(root).as_posix()})"]]
    parts.append(["```bash", *commands(protocol), "```"])
    text = "\n\n".join("\n".join(part) for part in parts if part)
    return f"### {protocol.name}\n\n{text}\n"


def make_documents() -> None:
    protocols = read_protocols(RESULTS)
    texts = {"report": "\n".join(map(report, protocols))}
    texts["long"] = "\n".join(report(protocol).partition("\n\n")[2] for protocol in read_protocols(RESULTS / "long"))
    texts["results"] = "\n".join([*summary_table(protocols[0]), ""])  # of easy-all, which comes first
    throughput.main(throughput.Args(from_csv=True, device="cpu", update_readme=True))
    for name, text in texts.items():
        readme.fill(readme.DOCUMENTS, name, text)


def main(args: Args) -> None:
    """Report one's own runs, or without any flag make the documents. Raises InputError for no runs, and as `read`."""
    check_limits(args)
    if args == Args():
        make_documents()
        return
    with TemporaryDirectory() as folder:
        left_out = gather(args.run_dirs, Path(folder))
        protocols = read_protocols(Path(folder) if args.run_dirs else args.results)
        if not protocols:
            reasons = left_out or [f"no <protocol>/<algorithm>/<game>/seed<k>.csv is in {args.results}"]
            raise InputError(f"there are no runs to report: {'; '.join(reasons)}")
        names = sorted({name for protocol in protocols for name in protocol.runs})
        if args.baseline and (args.baseline not in names or len(names) == 1):
            raise InputError(f"--baseline {args.baseline} needs its runs and others. There are {', '.join(names)}.")
        parts = ["Left out:\n\n" + "".join(f"- {readme.one_line(reason)}\n" for reason in left_out)] if left_out else []
        for protocol in protocols:
            parts.append(report(replace(protocol, out=args.out / protocol.name, mark=args.mark), args.baseline))
    write_atomically(args.out / "report.md", "\n".join(parts).encode(errors="backslashreplace"))
    print("\n".join(parts))


if __name__ == "__main__":
    with one_line_errors(OSError):
        main(tyro.cli(Args, description=__doc__))
