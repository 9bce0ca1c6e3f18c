"""The CSV of a learning curve from TensorBoard's event files, also those of CleanRL's runs.

    python benchmarks/convert.py runs/starpilot__ppo__1__1795202643 curve.csv

The CSV has the columns of a run's progress.csv, but for levels, and a row for each --every steps.
"""

import sys
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

sys.path.insert(1, str(Path(__file__).parent.parent))  # after the folder of curves.py and others
import curves
from common import InputError
from common.run import write_atomically
from common.session import one_line_errors
from common.settings import Positive, check_limits

EPISODE = "charts/episodic_return"  # a scalar for every episode, at the step at which it ended


@dataclass
class Args:
    source: tyro.conf.Positional[Path]
    """a folder with TensorBoard's files or one of these"""
    target: tyro.conf.Positional[Path]
    """a CSV, which must be new"""
    every: Positive[int] = 16_384
    """environment steps of a row of the CSV"""


def from_events(source: Path, every: int) -> list[str]:
    """The lines of a CSV from the episodes in the event files of folder `source`. Seconds are counted from the first
    event. The last row may be of fewer steps. Raises InputError for no episodes, and for damaged files."""
    curves.check_files(source, *source.glob("*"))
    events = EventAccumulator(str(source), size_guidance={"scalars": 0})  # by default it drops most of them
    try:
        for file in [source] if source.is_file() else sorted(source.glob("*tfevents*")):
            reader = PyRecordReader_New(str(file))
            try:
                while True:
                    reader.GetNext()
            except DataLossError as error:  # at which TensorBoard would stop without a word
                print(f"warning: {error.message}: the file counts up to there", file=sys.stderr)
            except OutOfRangeError:
                pass
        events.Reload()
    except Exception as error:  # whatever foreign bytes drive it to
        raise InputError(f"{source}: TensorBoard cannot read its event files ({error}).") from error
    if EPISODE not in events.Tags()["scalars"]:
        raise InputError(f"{source} has no event files of TensorBoard's with the tag {EPISODE}.")
    episodes, first = sorted(events.Scalars(EPISODE), key=lambda episode: episode.step), events.FirstEventTimestamp()
    lines, start = ["step,seconds,episodes,episodic_return,last_100_return"], 0
    ends, recent = [episode.step for episode in episodes], deque(maxlen=100)
    if ends[-1] > 1_000_000 * every:
        raise InputError(f"{source} has an episode at step {ends[-1]:,}, too far for rows of --every {every:,} steps.")
    for step in range(every, ends[-1] + every, every):
        stop = bisect_right(ends, step)
        returns = [episode.value for episode in episodes[start:stop]]
        recent.extend(returns)
        seconds = episodes[stop - 1].wall_time - first if stop else 0.0
        texts = [f"{mean(values):.6g}" if values else "nan" for values in (returns, recent)]
        lines.append(",".join([str(min(step, ends[-1])), f"{seconds:.1f}", str(len(returns)), *texts]))
        start = stop
    return lines


def main(args: Args) -> None:
    check_limits(args)
    if not args.source.exists():
        raise InputError(f"there is no {args.source}.")
    if args.target.exists() or args.target.is_symlink() or not args.target.parent.is_dir():
        raise InputError(f"{args.target} is there, or its folder is not: remove it first, or choose another name.")
    lines = from_events(args.source, args.every)
    curves.read(args.source, "\n".join(lines))  # raises for returns that are NaN
    write_atomically(args.target, "\n".join([*lines, ""]).encode())


if __name__ == "__main__":
    with one_line_errors(OSError):
        main(tyro.cli(Args, description=__doc__))
