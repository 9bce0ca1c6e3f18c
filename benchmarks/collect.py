"""Copy the curves of finished runs to where the documents' numbers come from.

    python benchmarks/collect.py runs/starpilot__ppo__1__1795158356 ...
    python benchmarks/collect.py runs/*__* --unfinished --results my_results     # also others; elsewhere

Each run folder becomes <results>/<protocol>/<algorithm>/<game>/seed<k>.csv, a row per `log` of the run: environment
steps, wall-clock seconds, number and mean return of the episodes that ended in the iteration, and mean return of the
last 100 episodes. A seed<k>.meta.json (command, commit, versions, machine, seconds of the run without its pauses)
stands beside it, and in seed<k>.eval.csv the evaluations of a run with --eval-interval. The curve of a run that has not
ended has its last step there, as `stopped_at`. Once the run goes on, its longer curve takes the place of the shorter.
"""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import curves
from common import InputError
from common.checkpoint import MAY_CHANGE, newest_checkpoint
from common.procgen_env import PROCGEN_MODES
from common.run import write_json
from common.session import one_line_errors
from common.settings import read_json

RESULTS = Path(__file__).parent / "results"


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


SETTINGS = {"exp_name": is_text, "env_id": is_text, "distribution_mode": [*PROCGEN_MODES].__contains__}
SETTINGS |= {"num_levels": is_count, "seed": is_count, "total_timesteps": is_count}


class FoundRun(NamedTuple):
    path: Path
    args: dict[str, Any]  # its settings
    meta: dict[str, Any]  # its origin; of one that has not ended, its last step as `stopped_at`
    curve: curves.Curve
    logs: dict[str, str]  # the text of progress.csv, and of eval.csv once it has rows


def folder_name(text: str) -> str:
    """`text` without characters that mean something to a path, a Markdown table or a figure's legend."""
    return re.sub(r"[^\w.,:+=@()% -]|^_|^\.*$", "-", text)


def collect(run_dir: Path, results: Path, unfinished: bool = False) -> Path:
    """Copy one run's curve to a folder of `results`; return the CSV written. Raises InputError as the two do."""
    return store(read_run(run_dir), results, unfinished)


def store(run: FoundRun, results: Path, unfinished: bool) -> Path:
    """Raises InputError for a run that is not to be collected unfinished, or with other settings than seeds there."""
    run_dir, args, meta, _, logs = run
    if "stopped_at" in meta and not unfinished:
        steps = f"{meta['stopped_at']} of {args['total_timesteps']} steps"
        raise InputError(f"{run_dir} has made {steps}: let it end first")
    protocol = f"{args['distribution_mode']}-{args['num_levels'] or 'all'}"
    folder = results / protocol / folder_name(args["exp_name"]) / folder_name(args["env_id"])
    curves.check_files(*folder.glob("*"))
    for neighbour in folder.glob("*.meta.json"):
        ours, theirs = differing(meta["command"], str(read_json(neighbour).get("command")))
        flags = ours + theirs
        if not args.get("anneal_lr"):  # without, the number of steps changes none of them
            flags = [flag for flag in flags if not flag.startswith("--total-timesteps")]
        if flags:
            words = f"{run_dir} has other settings than {neighbour.relative_to(results)}"
            raise InputError(f"{words} ({', '.join(flags)}): give it an --exp-name of its own")
    target = folder / f"seed{args['seed']}.csv"
    places = {"progress.csv": target, "eval.csv": target.with_suffix(".eval.csv")}
    for name, path in places.items():
        if path.exists() and not logs.get(name, "").startswith(path.read_text()):
            raise InputError(f"{run_dir} is left out: {path.relative_to(results)} holds another run of this seed")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in logs.items():
        places[name].write_text(text)
    write_json(target.with_suffix(".meta.json"), meta)
    return target


def read_run(run_dir: Path) -> FoundRun:
    """Raises InputError for a folder that is no run's, and for a file that is damaged or has lost rows."""
    curves.check_files(*run_dir.glob("*"), *run_dir.glob("checkpoints/*"))
    args, meta = (read_json(run_dir / name) for name in ("args.json", "meta.json"))
    if not (args and is_text(meta.get("command"))):
        raise InputError(f"{run_dir} is no run folder: it has no readable {'meta.json' if args else 'args.json'}")
    for name, holds in SETTINGS.items():
        if not holds(args.get(name)):
            raise InputError(f"{run_dir / 'args.json'} has a value of {name} that no script gives")
    meta["command"] = re.sub(r" --runs-dir ('[^']*'|\S+)", "", meta["command"])  # a place of one machine
    try:
        checkpoint = newest_checkpoint(run_dir)  # before the logs, which may grow
    except InputError:
        checkpoint = {"step": 0, "run": {}}  # a run need not have one
    names = ["progress.csv", "eval.csv"] if args.get("eval_interval") else ["progress.csv"]
    logs = {name: curves.read_text(run_dir / name) for name in names}
    check_rows(run_dir, logs, checkpoint)
    curve = curves.read(run_dir / "progress.csv", logs["progress.csv"])
    meta.pop("stopped_at", None)
    if curve.steps[-1] < args["total_timesteps"] or not meta.get("finished"):  # after the last row come evaluations
        meta["stopped_at"] = curve.steps[-1]
        logs = {name: text for name, text in logs.items() if text.count("\n") > 1}  # one waits for its first evaluation
    if "eval.csv" in logs and "," not in args["env_id"]:
        curves.read_evaluations(run_dir / "eval.csv", logs["eval.csv"])
    return FoundRun(run_dir, args, meta | {"seconds": curve.seconds[-1]}, curve, logs)


def check_rows(run_dir: Path, logs: dict[str, str], checkpoint: dict[str, Any]) -> None:
    """Raises InputError for a log that has fewer rows up to its checkpoint's step than it had then."""
    step, counted = checkpoint["step"], checkpoint["run"].get("rows")
    for name, text in logs.items():
        steps = [line.partition(",")[0] for line in text.splitlines()[1:]]
        rows = sum(each.isdecimal() and len(each) < 20 and int(each) <= step for each in steps)
        had = counted.get(name) if isinstance(counted, dict) else 0
        if is_count(had) and rows < had:
            raise InputError(f"{run_dir / name} has lost rows: {rows} are up to step {step:,}, and there were {had}")


def same_settings(command: str) -> list[list[str]]:
    """The script and the flags of a command that the runs of a folder must share: all flags but the seed and what a
    resumed run may change. (The number of steps may be raised later, but here it is one for all.)"""
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation without an end
        words = command.split()
    flags = [[]]
    for word in words:
        flags += [[]] if word.startswith("--") else []
        flags[-1].append(word)
    ignored = {"seed", *MAY_CHANGE} - {"total_timesteps"}
    # Each seed may have a model of its own.
    flags = [flag[:1] if flag[0] == "--init-from" else flag for flag in flags if flag]
    return sorted(each for each in flags if each[0][2:].replace("-", "_").removeprefix("no_") not in ignored)


def differing(ours: str, theirs: str) -> tuple[list[str], list[str]]:
    """The flags of each of two commands that the other lacks."""
    mine, others = same_settings(ours), same_settings(theirs)
    only_mine = [" ".join(flag) for flag in mine if flag not in others]
    return only_mine, [" ".join(flag) for flag in others if flag not in mine]


@dataclass
class Args:
    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of finished runs"""
    results: Path = RESULTS
    """where the curves go"""
    unfinished: bool = False
    """collect runs that have not ended, too"""


def main(args: Args) -> None:
    """Collect what can be collected. Raises InputError if a run is refused, after all others."""
    if not args.run_dirs:
        raise InputError("no run folder is named: name those of the runs to collect.")
    refused = []
    for run_dir in args.run_dirs:
        try:
            print(collect(run_dir, args.results, args.unfinished))
        except (InputError, OSError) as error:
            refused.append(str(error))
    if refused:
        raise InputError(f"{len(refused)} of {len(args.run_dirs)} runs are not collected: {'; '.join(refused)}")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
