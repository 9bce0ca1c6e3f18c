"""Learning curves: reading them, scores of runs, and how sure one can be of differences and means."""

import csv
import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
from scipy import stats

from common import InputError

warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)  # SciPy's, of runs with the same return
REFERENCE = Path(__file__).parent / "reference"


class Curve(NamedTuple):
    """A run's progress.csv: a row per iteration (`impala.py`: per `--log-interval`)."""

    steps: list[int]  # at the end of the iteration
    seconds: list[float]  # since the start of the run
    episodes: list[float]  # number of those that ended in the iteration
    returns: list[float]  # their mean return, NaN for none


def check_files(*paths: Path) -> None:
    """Raises InputError for a pipe or a device among the paths that are there: reading it could last for ever."""
    for path in paths:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InputError(f"{path} is not a regular file")


def read_text(path: Path) -> str:
    """Raises InputError for a file that cannot be read, or holds no text."""
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error})") from error


def read(path: Path, text: str = "") -> Curve:
    """Read a curve, or the `text` of its file. Raises InputError as `read_columns`, or for a return of NaN."""
    curve = Curve(*read_columns(path, text, "a learning curve", ["seconds", "episodes", "episodic_return"]))
    for step, _, number, value in zip(*curve, strict=True):
        if not 0 <= number < math.inf or (number > 0 and not math.isfinite(value)):
            raise InputError(f"{path} has {number:g} episodes of return {value} at step {step:,}")
    return curve


def read_evaluations(path: Path, text: str = "") -> list[list[float]]:
    """Steps, returns and standard errors of the stochastic policy's evaluations on one game. Raises as `read`."""
    return read_columns(path, text, "evaluations", ["episodic_return", "standard_error"], policy="stochastic")


def read_columns(path: Path, text: str, what: str, columns: Sequence[str], **only: str) -> list[list[float]]:
    """The steps and some columns of a CSV of `what`, of the rows with the values of `only`. Raises InputError for a
    file that cannot be read, lacks one of these columns, has no such row, or steps that do not rise."""
    lines = (text or read_text(path)).splitlines()
    if len(lines) < 2:
        raise InputError(f"{path} has no rows")
    try:
        rows = [row for row in csv.DictReader(lines) if all(row[name] == value for name, value in only.items())]
        steps = [int(row["step"]) for row in rows]
        values = [[float(row[name]) for row in rows] for name in columns]
    except (KeyError, TypeError, ValueError, csv.Error):
        rows = steps = []
    if not rows or not all(before < after for before, after in pairwise([0, *steps, 10**10])):
        raise InputError(f"{path} is no CSV of {what}: steps that rise, and a number each of {', '.join(columns)}")
    return [steps, *values]


def score(curve: Curve, end: int, window: int) -> float:
    """The mean return of all episodes that ended in the last `window` steps before `end`; NaN for none. Of a row that
    is partly in there its episodes count in part: left out, they would move the window by half a row."""
    ends, episodes, returns = np.array(curve.steps), np.array(curve.episodes), np.nan_to_num(curve.returns)
    starts = np.append(0, ends[:-1])
    weights = episodes * (np.minimum(ends, end) - np.maximum(starts, end - window)).clip(0) / (ends - starts)
    return float(weights @ returns / weights.sum()) if weights.any() and end >= ends[0] else math.nan


class Reference(NamedTuple):
    """The published runs of a game: each row is the mean over a block of steps that ends at `steps[i]`."""

    steps: np.ndarray  # int [rows]
    returns: np.ndarray  # float [runs, rows]

    def scores(self, end: float) -> list[float]:
        """Each run's mean return over a block that ends at `end`, from the two nearest ones; empty after the last."""
        if not self.steps[0] <= end <= self.steps[-1]:
            return []
        return [float(np.interp(end, self.steps, run)) for run in self.returns]


@cache
def read_reference(name: str) -> dict[str, Reference]:
    """The published runs in `reference/<name>.csv`, by game."""
    runs, games = {}, {}
    for row in csv.DictReader((REFERENCE / f"{name}.csv").read_text().splitlines()):
        curve = runs.setdefault(row["game"], {}).setdefault(row["run"], {})
        curve[int(row["step"])] = float(row["episodic_return"])
    for game, curves in runs.items():
        steps = sorted(set.intersection(*(set(curve) for curve in curves.values())))
        games[game] = Reference(np.array(steps), np.array([[curve[s] for s in steps] for curve in curves.values()]))
    return games


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Of the means, with its 95 % t-interval: difference, low, high; the latter NaN for fewer than three runs in all.
    Both sides are taken to vary alike, so a single run has an interval, too."""
    low = high = math.nan
    if len(ours) + len(theirs) >= 3:
        low, high = stats.ttest_ind(ours, theirs).confidence_interval(0.95)
    return mean(ours) - mean(theirs), float(low), float(high)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % t-interval of a mean. Two values at least."""
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return float(low), float(high)


def mean_over_games(games: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of each game's mean over its runs, which are along the last axis."""
    return np.mean([runs.mean(axis=-1) for runs in games], axis=0)


def interquartile_mean(games: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of the middle half of all runs (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264): of n runs the
    int(n / 4) lowest and as many highest are left out. NaN for fewer than four, where that is none."""
    runs = np.concatenate(games, axis=-1)
    return stats.trim_mean(runs, 0.25, axis=-1) if runs.shape[-1] >= 4 else np.full(runs.shape[:-1], np.nan)


def probability_of_improvement(games: Sequence[np.ndarray]) -> np.ndarray:
    """P(a run of X > one of Y), ties half, averaged over games (same paper). `games`: those of X, then those of Y."""
    half = len(games) // 2
    signs = [np.sign(x[..., :, None] - y[..., None, :]) for x, y in zip(games[:half], games[half:], strict=True)]
    return np.mean([(1 + sign.mean(axis=(-2, -1))) / 2 for sign in signs], axis=0)


def with_interval(statistic: Callable, games: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """A statistic of the runs of several games, with its stratified bootstrap interval: value, low, high. The
    interval is NaN where a game has fewer than five runs: from two or three it would hold the mean in 70 to 80 %."""
    games = [np.asarray(runs, dtype=float) for runs in games]
    value = float(statistic(games))
    if min(map(len, games)) < 5 or math.isnan(value):
        return value, math.nan, math.nan
    settings = {"n_resamples": 5000, "method": "percentile", "vectorized": True, "rng": np.random.default_rng(0)}
    result = stats.bootstrap(tuple(games), lambda *samples, axis: statistic(samples), **settings)
    return value, float(result.confidence_interval.low), float(result.confidence_interval.high)
