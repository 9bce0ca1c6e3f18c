"""Between TensorBoard's event files and the CSV of a learning curve.

    python benchmarks/convert.py runs/starpilot__ppo__1__1795202643 curve.csv         # also of CleanRL's runs
    python benchmarks/convert.py benchmarks/results/easy-all/ppo/starpilot/seed1.csv events/

The CSV has columns of a run's progress.csv, a row for each --every steps: step, seconds, number and mean return of the
episodes that ended in them, mean return of the last 100.
"""

import csv
import math
import sys
import time
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import InputError
from common.session import one_line_errors
from common.settings import Positive, check_limits
from curves import read_columns

EPISODE = "charts/episodic_return"  # a scalar for every episode, at the step at which it ended
LAST_100, COUNT = "charts/last_100_return", "charts/episodes"  # with COUNT, EPISODE is the mean of so many episodes
COLUMNS = ("step", "seconds", "episodes", "episodic_return", "last_100_return")


@dataclass
class Args:
    source: tyro.conf.Positional[Path]
    """a folder with TensorBoard's files or one of these, or a CSV"""
    target: tyro.conf.Positional[Path]
    """a CSV, or a folder for a file of TensorBoard's"""
    every: Positive[int] = 16_384
    """environment steps of a row of the CSV"""


def from_events(source: Path, every: int) -> list[dict[str, str]]:
    """The rows of a CSV from the episodes in the event files of folder `source`. Seconds are counted from the first
    event. The last row may be of fewer steps. Raises InputError for no episodes."""
    events = EventAccumulator(str(source), size_guidance={"scalars": 0})  # by default it drops most of them
    events.Reload()
    if EPISODE not in events.Tags()["scalars"]:
        raise InputError(f"{source} has no event files of TensorBoard's with the tag {EPISODE}.")
    if COUNT in events.Tags()["scalars"]:
        raise InputError(f"{source} has the rows of a CSV and no single episodes: use that CSV.")
    episodes, first = sorted(events.Scalars(EPISODE), key=lambda episode: episode.step), events.FirstEventTimestamp()
    ends, recent, rows, start = [episode.step for episode in episodes], deque(maxlen=100), [], 0
    for step in range(every, ends[-1] + every, every):
        stop = bisect_right(ends, step)
        returns = [episode.value for episode in episodes[start:stop]]
        recent.extend(returns)
        seconds = episodes[stop - 1].wall_time - first if stop else 0.0
        last = min(step, ends[-1]) if stop == len(episodes) else step
        texts = [f"{mean(values):.6g}" if values else "nan" for values in (returns, recent)]
        rows.append(dict(zip(COLUMNS, (str(last), f"{seconds:.1f}", str(len(returns)), *texts), strict=True)))
        start = stop
    return rows


def to_events(source: Path, target: Path) -> None:
    """Write the columns of a CSV as scalars: a row at its step, as if the run had started now."""
    columns = read_columns(source, "a learning curve", dict.fromkeys(COLUMNS, float))
    with SummaryWriter(str(target)) as writer:
        start = time.time()
        for step, seconds, episodes, episodic_return, last_100_return in zip(*columns, strict=True):
            for tag, value in ((EPISODE, episodic_return), (LAST_100, last_100_return), (COUNT, episodes)):
                if not math.isnan(value):
                    writer.add_scalar(tag, value, int(step), walltime=start + seconds)


def main(args: Args) -> None:
    check_limits(args)
    if not args.source.exists():
        raise InputError(f"there is no {args.source}.")
    from_csv = args.source.suffix == ".csv"
    reusable = from_csv and args.target.is_dir() and not any(args.target.glob("*tfevents*"))
    if args.target.exists() and not reusable:
        raise InputError(f"{args.target} is there: remove it first, or choose another name.")
    if not args.target.parent.is_dir():
        raise InputError(f"{args.target} cannot be written: there is no {args.target.parent}.")
    if from_csv and args.target.suffix == ".csv":
        raise InputError(f"{args.target} cannot be a CSV, too: name a folder for TensorBoard's event files.")
    if from_csv:
        to_events(args.source, args.target)
        return
    rows = from_events(args.source, args.every)
    with args.target.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
