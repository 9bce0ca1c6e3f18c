"""Finding the run that `--resume` asks for."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import IO, Any, NamedTuple

from common.checkpoint import newest_checkpoint
from common.errors import InputError
from common.files import lock_folder, read_json
from common.settings import flag
from common.world import World

# What a resumed run may change. All else is refused, for it would be another run.
MAY_CHANGE = {
    *("total_timesteps", "checkpoint_interval", "keep_checkpoints", "log_interval", "resume", "runs_dir"),
    *("device", "torch_deterministic", "num_threads", "micro_batch_size", "accelerate", "aux_frames"),
    *("track", "wandb_project_name", "wandb_entity"),
    *("eval_interval", "eval_episodes", "eval_num_levels", "eval_start_level"),
}


class Resumed(NamedTuple):
    path: Path
    lock: IO | None  # held while the file is open
    checkpoint: dict[str, Any]


def saved_args(args_class: type) -> Any:
    """Defaults for the command line: the settings of the run that `--resume RUN_DIR` names, or else `args_class()`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    folder = parser.parse_known_args()[0].resume
    if folder in (None, "None", "auto"):
        return args_class()
    settings = read_json(Path(folder, "args.json"))
    if not settings:
        raise InputError(f"--resume {folder}: no run folder with a readable args.json is there.")
    try:
        return dataclasses.replace(args_class(), **settings | {"resume": None})
    except TypeError as error:
        raise InputError(f"--resume {folder}: the run was made by a script with other flags ({error}).") from None


def find_run(args: Any, script: str, world: World) -> Resumed | None:
    """Find, lock and read the run that `--resume` asks for; None for a new run. `auto` takes the newest run in
    `--runs-dir` that is unfinished, not in use, and has the same settings and number of ranks. Ranks that torchrun has
    restarted go on with the run that they were making. Raises InputError if there is no such run, it has no readable
    checkpoint or is in use, or a setting differs that must not change."""
    ranks, complete = world.world_size, world.restarted  # a rank may have died at the very end

    def search() -> Resumed | None:
        if args.resume not in (None, "auto"):
            return read_run(Path(args.resume), args, script, ranks, complete)
        found = runs_of(args, script, ranks) if args.resume or world.restarted else []
        for path, finished in found if args.resume else found[:1]:  # restarted ranks were making the newest run
            try:
                if complete or not finished:
                    return read_run(path, args, script, ranks, complete)
            except InputError as error:
                print(f"note: --resume auto passes {path} over: {error}", file=sys.stderr)
        return None

    return world.on_rank_zero(search, send=lambda run: run and run._replace(lock=None))


def runs_of(args: Any, script: str, ranks: int = 1) -> list[tuple[Path, bool]]:
    """Run folders in --runs-dir with the settings of `args`, the newest first, and whether each run has ended. Of the
    settings that a resumed run may change, the number of steps must be the same, and if `args` ask for evaluations, so
    must the evaluations: a run cannot make up for those that it has gone past."""
    evaluations = {name for name in vars(args) if name.startswith("eval_")} if args.eval_interval else set()
    found, may_differ = [], MAY_CHANGE - {"total_timesteps"} - evaluations
    for path in Path(args.runs_dir).glob("*/"):
        settings, meta = read_json(path / "args.json"), read_json(path / "meta.json")
        same = meta.get("script") == script and meta.get("ranks", 1) == ranks
        if same and not differences(args, settings, may_differ):
            found.append((str(meta.get("started")), path.stat().st_ctime_ns, path, bool(meta.get("finished"))))
    return [(path, finished) for *_, path, finished in sorted(found, reverse=True)]


def differences(args: Any, settings: dict[str, Any], may_differ: set[str]) -> list[str]:
    """Names of the settings of `args` that differ from `settings`, but for those that may."""
    fixed = {name: value for name, value in vars(args).items() if name not in may_differ}
    return [name for name, value in fixed.items() if name not in settings or settings[name] != value]


def read_run(path: Path, args: Any, script: str, ranks: int, complete: bool) -> Resumed:
    """Lock and read a run; a complete one only if `complete` allows it."""
    try:
        lock = lock_folder(path)
    except OSError as error:
        raise InputError(f"--resume {path}: no run folder that can be written is there ({error.strerror}).") from error
    checkpoint, finished = newest_checkpoint(path), read_json(path / "meta.json").get("finished")
    step, settings, total = checkpoint["step"], checkpoint["args"], args.total_timesteps
    if step >= total and (finished or settings.get("total_timesteps") != total) and not complete:
        raise InputError(f"--resume {path}: it has made {step:,} steps: raise --total-timesteps to go on.")
    if checkpoint["script"] != script:
        raise InputError(f"--resume {path}: that is a run of {checkpoint['script']}, not of {script}.")
    if len(checkpoint["ranks"]) != ranks:
        raise InputError(f"--resume {path}: that is a run of {len(checkpoint['ranks'])} ranks, not of {ranks}.")
    if changed := differences(args, settings, MAY_CHANGE):
        there = [f"{flag(name)} {getattr(args, name)} (there: {settings.get(name, 'unknown')})" for name in changed]
        other = f"to start a new run from its weights, use --init-from {path}."
        raise InputError(f"--resume {path}: a resumed run cannot change {', '.join(there)}; {other}")
    return Resumed(path, lock, checkpoint)
