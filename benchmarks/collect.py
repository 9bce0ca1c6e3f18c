"""Copy the curves of finished runs to where the documents' numbers come from.

    python benchmarks/collect.py runs/starpilot__ppo__1__1795158356 ...

A run's progress.csv becomes <results>/<protocol>/<algorithm>/<game>/seed<k>.csv, beside its evaluations (.eval.csv) and
origin (.meta.json, with `stopped_at` if it has not ended). Once the run goes on, the longer curve takes its place.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(1, str(Path(__file__).parent.parent))  # after the folder of curves.py and others
import curves
import impala
from common import InputError
from common.checkpoint import MAY_CHANGE, newest_checkpoint
from common.run import ROOT, write_atomically, write_json
from common.session import one_line_errors
from common.settings import flag, read_json

RESULTS = Path(__file__).parent / "results"
KINDS = {"exp_name": str, "env_id": str, "distribution_mode": str}  # of the settings that name a curve
KINDS |= {"num_levels": int, "seed": int, "total_timesteps": int}


def folder_name(text: str) -> str:
    """`text` without characters that mean something to a path, a Markdown table or a figure's legend."""
    return re.sub(r"[^\w.,:+=@()% -]|^_|^\.*$", "-", text)


def collect(run_dir: Path, results: Path, unfinished: bool = False) -> Path:
    """Copy a curve to `results`; return the CSV. Raises InputError as `read_run`, and if it cannot stand there."""
    args, meta, curve, logs = read_run(run_dir)
    if "stopped_at" in meta and not unfinished:
        raise InputError(f"{run_dir} is at step {meta['stopped_at']} of {args['total_timesteps']}: let it end first")
    names = (f"{args['distribution_mode']}-{args['num_levels'] or 'all'}", args["exp_name"], args["env_id"])
    folder = results.joinpath(*map(folder_name, names))
    curves.check_files(*folder.glob("*"))
    target = folder / f"seed{args['seed']}.csv"
    for neighbour in folder.glob("*.meta.json"):
        there = read_json(neighbour)
        other = there.get("run_dir", neighbour.relative_to(results))  # older curves do not have it
        if not isinstance(there.get("settings"), dict):
            raise InputError(f"{run_dir}: {neighbour} has no settings to compare: collect {other} again, elsewhere")
        mine, theirs = complete(meta, there), complete(there, meta)
        copies = all(os.path.exists(ROOT / str(each.get("script"))) for each in (meta, there))  # else one was moved
        alike = {"script"} if not copies and meta.get("script_sha256") == there.get("script_sha256", "") else set()
        if keys := [key for key in mine if key not in alike and mine[key] != theirs[key]]:
            words = ", ".join(f"{flag(key)} {mine[key]} (there: {theirs[key]})" for key in keys)
            words = f"{words}: leave one out, or use another --exp-name"
            raise InputError(f"{run_dir} has other settings than {other}: {words}")
    there = read_json(target.with_suffix(".meta.json"))
    goes_on = there.get("run_dir") == meta["run_dir"] and there.get("stopped_at", float("inf")) <= curve.steps[-1]
    goes_on &= str(meta.get("resumed")).startswith(str(there.get("resumed"))[:-1])  # not a copy that went elsewhere
    texts = curves.read_text(target) if target.exists() else "", logs["progress.csv"]
    old, new = (re.sub("(?m)^([^,]*),[^,]*", r"\1", text) for text in texts)  # without seconds
    if not (goes_on or new.startswith(old)):  # resumed, it may have other rows
        raise InputError(f"{run_dir} is left out: another run of this seed is there ({there.get('run_dir', target)})")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in logs.items():
        write_atomically(target if name == "progress.csv" else target.with_suffix(".eval.csv"), text.encode())
    write_json(target.with_suffix(".meta.json"), meta)
    return target


def read_run(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any], curves.Curve, dict[str, str]]:
    """A run's settings, origin, curve, and texts of CSVs. Raises InputError for none, for damage, and for lost rows."""
    curves.check_files(*run_dir.glob("*"), *run_dir.glob("checkpoints/*"))
    args, meta = (read_json(run_dir / name) for name in ("args.json", "meta.json"))
    if not (args and isinstance(meta.get("command"), str)):
        raise InputError(f"{run_dir} is no run folder: it has no readable {'meta.json' if args else 'args.json'}")
    for name, kind in KINDS.items():
        if type(args.get(name)) is not kind or (kind is int and args[name] < 0):
            raise InputError(f"{run_dir / 'args.json'} has a {name} that no script has")
    meta["command"] = re.sub(r""" --runs-dir ('[^']*'|"'"|[^\s'"])+""", "", meta["command"])  # a place of one machine
    earlier = impala.Args.earlier if meta.get("script") == "impala.py" else {}  # what its older runs did
    settings = earlier | args | {"init_from": bool(args.get("init_from")), "ranks": meta.get("ranks", 1)}
    settings |= {"script": meta.get("script"), "annealed_to": re.findall(r"'annealed_to': (\d+)", str(meta))}
    ignored = {"seed", "capture_video", *MAY_CHANGE} - ({"total_timesteps"} if args.get("anneal_lr") else set())
    meta["settings"] = {name: value for name, value in settings.items() if name not in ignored}
    try:
        checkpoint = newest_checkpoint(run_dir)  # before the logs, which may grow
        at, had = checkpoint["step"], {name: int(rows) for name, rows in checkpoint["run"]["rows"].items()}
    except (InputError, LookupError, AttributeError, TypeError, ValueError):  # none, or one of an older version
        at, had = 0, {}
    logs = {}
    evaluated = args.get("eval_interval") or had.get("eval.csv") or (run_dir / "eval.csv").exists()
    for name in ("progress.csv", "eval.csv") if evaluated else ("progress.csv",):
        logs[name] = re.sub(r"[^\n]+\Z", "", curves.read_text(run_dir / name))  # without a row that is not whole
        rows = sum(int(step) <= at for step in re.findall(r"^(\d{1,18}),", logs[name], re.MULTILINE))
        if rows < had.get(name, 0):
            raise InputError(f"{run_dir / name} has {rows} rows up to step {at:,} where its checkpoint has {had[name]}")
    curve = curves.read(run_dir / "progress.csv", logs["progress.csv"])
    meta |= {"run_dir": run_dir.resolve().name, "seconds": curve.seconds[-1], "stopped_at": curve.steps[-1]}
    if curve.steps[-1] >= args["total_timesteps"] and meta.get("finished"):  # the last evaluations follow the last row
        del meta["stopped_at"]
    waits = "stopped_at" in meta or not args.get("eval_interval")
    if waits and logs.get("eval.csv", "").count("\n") < 2:  # for its first evaluation, or for none
        logs.pop("eval.csv", None)
    if "eval.csv" in logs and "," not in args["env_id"]:
        curves.read_evaluations(run_dir / "eval.csv", logs["eval.csv"])
    return args, meta, curve, logs


def complete(meta: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A run's settings, with what another alone has: "unset" where the other's command gives it, else the same."""
    words = {*str(other.get("command")).split()}
    given = {name for name in other["settings"] if {flag(name), flag(f"no_{name}")} & words}
    lacking = {name: "unset" if name in given else value for name, value in other["settings"].items()}
    return lacking | meta["settings"]


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
    with one_line_errors(OSError):
        main(tyro.cli(Args, description=__doc__))
