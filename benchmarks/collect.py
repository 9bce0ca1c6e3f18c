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
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import InputError
from common.checkpoint import MAY_CHANGE
from common.run import write_json
from common.session import one_line_errors
from common.settings import read_json

RESULTS = Path(__file__).parent / "results"


def collect(run_dir: Path, results: Path, unfinished: bool = False) -> Path:
    """Copy one run's curve to a folder of `results`; return the CSV written. Raises InputError for a run that is not to
    be collected unfinished, or that differs in settings from seeds there."""
    args, meta, curve = read_run(run_dir)
    if "stopped_at" in meta and not unfinished:
        steps = f"{meta['stopped_at']} of {args['total_timesteps']} steps"
        raise InputError(f"{run_dir} has made {steps}: let it end first")
    levels = args["num_levels"] or "all"
    algorithm, game = (re.sub(r"/|^\.*$", "-", args[name]) for name in ("exp_name", "env_id"))  # names of folders
    folder = results / f"{args['distribution_mode']}-{levels}" / algorithm / game
    for neighbour in folder.glob("*.meta.json"):
        ours, theirs = (same_settings(command) for command in (meta["command"], read_json(neighbour)["command"]))
        flags = [" ".join(flag) for flag in ours + theirs if flag not in ours or flag not in theirs]
        if not args.get("anneal_lr"):  # without, the number of steps changes none of them
            flags = [flag for flag in flags if not flag.startswith("--total-timesteps")]
        if flags:
            words = f"{run_dir} has other settings than {neighbour.relative_to(results)}"
            raise InputError(f"{words} ({', '.join(flags)}): give it an --exp-name of its own")
    target = folder / f"seed{args['seed']}.csv"
    beside, own = target.with_suffix(".eval.csv"), run_dir / "eval.csv"
    waiting = "stopped_at" in meta and own.exists() and own.read_text().count("\n") < 2  # for its first evaluation
    evaluations = read(own) if args.get("eval_interval") and not waiting else None
    for path, text in ((beside, evaluations or ""), (target, curve)):
        if path.exists() and not text.startswith(path.read_text()):
            raise InputError(f"{run_dir} is left out: {path.relative_to(results)} holds another run of this seed")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(curve)
    write_json(target.with_suffix(".meta.json"), meta)
    if evaluations is not None:
        beside.write_text(evaluations)
    return target


def read(path: Path) -> str:
    """The text of a file of a run's. Raises InputError where it cannot be read, or has no row below its header."""
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error})") from error
    if len(text.splitlines()) < 2:
        raise InputError(f"{path} has no rows")
    return text


def read_run(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Settings, origin and curve of a run. The origin of one that has not ended has its last step as `stopped_at`."""
    args, meta = (read_json(run_dir / name) for name in ("args.json", "meta.json"))
    if not (args and meta):
        raise InputError(f"{run_dir} is no run folder: it has no readable {'meta.json' if args else 'args.json'}")
    meta["command"] = re.sub(r" --runs-dir ('[^']*'|\S+)", "", meta["command"])  # a place of one machine
    curve = read(run_dir / "progress.csv")
    steps, seconds = curve.splitlines()[-1].split(",")[:2]
    if int(steps) < args["total_timesteps"] or not meta.get("finished"):  # after the last row come the last evaluations
        meta["stopped_at"] = int(steps)
    return args, meta | {"seconds": float(seconds)}, curve


def same_settings(command: str) -> list[list[str]]:
    """The script and the flags of a command that the runs of a folder must share: all flags but the seed and what a
    resumed run may change. (The number of steps may be raised later, but here it is one for all.)"""
    flags = [[]]
    for word in shlex.split(command):
        flags += [[]] if word.startswith("--") else []
        flags[-1].append(word)
    ignored = {"seed", *MAY_CHANGE} - {"total_timesteps"}
    flags = [flag[:1] if flag[0] == "--init-from" else flag for flag in flags]  # each seed may have a model of its own
    return sorted(each for each in flags if each[0][2:].replace("-", "_").removeprefix("no_") not in ignored)


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
        except InputError as error:
            refused.append(str(error))
    if refused:
        raise InputError(f"{len(refused)} of {len(args.run_dirs)} runs are not collected: {'; '.join(refused)}")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
