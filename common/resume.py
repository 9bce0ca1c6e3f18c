"""Finding the run that `--resume` asks for."""

import dataclasses
import sys
from pathlib import Path
from typing import IO, Any, NamedTuple

from common.checkpoint import newest_checkpoint
from common.errors import InputError
from common.files import cannot_write, lock_folder, read_json
from common.settings import flag, resumed_folder, with_saved
from common.world import World

# What a resumed run may change. All else is refused, for it would be another run.
MAY_CHANGE = {
    *("total_timesteps", "checkpoint_interval", "keep_checkpoints", "log_interval", "resume", "runs_dir"),
    *("device", "torch_deterministic", "num_threads", "micro_batch_size", "accelerate", "aux_frames"),
    *("track", "wandb_project_name", "wandb_entity"),
    *("eval_interval", "eval_episodes", "eval_num_levels", "eval_start_level"),
}


class Resumed(NamedTuple):
    """A run to go on with."""

    path: Path
    lock: IO | None  # held while the file is open
    checkpoint: dict[str, Any] | None  # None where the run died before its first


def read_args(path: Path) -> dict[str, Any]:
    """The settings of the run in folder `path`."""
    settings = read_json(path / "args.json")
    if not settings:
        raise InputError(f"--resume {path}: no run folder with a readable args.json is there.")
    return settings


def saved_args(args_class: type) -> Any:
    """Defaults for the command line: the settings of the run that `--resume RUN_DIR` names, or else `args_class()`."""
    folder = resumed_folder()
    if folder is None:
        return args_class()
    try:  # flags that are younger than the run get their defaults, where that cannot make it another run
        return with_saved(args_class, read_args(Path(folder)), may_be_missing=MAY_CHANGE)
    except InputError as error:
        raise InputError(f"--resume {folder}: {str(error).removeprefix(f'--resume {folder}: ')}") from None


def find_run(args: Any, script: str, world: World) -> Resumed | None:
    """Find, lock and read the run that `--resume` asks for; None for a new run.

    `auto` takes the newest run in `--runs-dir` that is unfinished, not in use, and has the same settings and number of
    ranks. Ranks that torchrun has restarted go on with the run that they were making.

    Raises:
        InputError: no such run, a setting that must not change, a run in use, or no readable checkpoint.
    """
    resumed = world.on_rank_zero(lambda: search(args, script, world), send=lambda run: run and run._replace(lock=None))
    if resumed is None or resumed.checkpoint is None:
        return resumed
    saved = resumed.checkpoint["ranks"]
    if len(saved) != world.world_size:
        if world.rank == 0:
            ranks = f"note: another number of ranks ({len(saved)} so far, now {world.world_size}): the run goes on "
            print(ranks + "from its parameters, but with new environments, which draw other levels", file=sys.stderr)
        own = {}
        if scale := saved[0].get("reward_normalizer"):  # the new environments have no return as yet
            own = {"reward_normalizer": scale | {"returns": [0.0] * len(scale["returns"])}}
        resumed.checkpoint["ranks"] = [own] * world.world_size
    return resumed


def search(args: Any, script: str, world: World) -> Resumed | None:
    """`find_run` on rank zero."""
    if world.begun not in (None, "auto"):
        return open_run(Path(world.begun), args, script, complete=True)  # a rank may have died at the very end
    if "auto" not in (args.resume, world.begun):
        return open_run(Path(args.resume), args, script) if args.resume else None
    for path, finished in runs_of(args, script, world.world_size):
        if finished:
            continue
        try:
            return open_run(path, args, script)
        except InputError as error:
            print(f"note: --resume auto passes {path} over: {error}", file=sys.stderr)
    print(f"--resume auto: no run with these settings waits in {args.runs_dir}, so that a new one starts", flush=True)
    return None


def runs_of(args: Any, script: str, ranks: int = 1) -> list[tuple[Path, bool]]:
    """Run folders in --runs-dir with the settings of `args`, the newest first, and whether each run has ended.

    Of the settings that a resumed run may change, the number of steps must be the same, and if `args` ask for
    evaluations, so must the evaluations: a run cannot make up for those that it has gone past.
    """
    found, also = [], {"total_timesteps"}
    if args.eval_interval:
        also = also | {name for name in vars(args) if name.startswith("eval_")}
    for path in Path(args.runs_dir).glob("*/"):
        settings, meta = read_json(path / "args.json"), read_json(path / "meta.json")
        same = meta.get("script") == script and meta.get("ranks", 1) == ranks
        if same and not differences(args, settings, also):
            found.append((str(meta.get("started")), path.stat().st_ctime_ns, path, bool(meta.get("finished"))))
    return [(path, finished) for *_, path, finished in sorted(found, reverse=True)]


def differences(args: Any, settings: dict[str, Any], also: set[str] = frozenset()) -> list[str]:
    """Names of the settings of `args` that differ from `settings`: those that must not change, and those of `also`."""
    fixed = [field.name for field in dataclasses.fields(args) if field.name not in MAY_CHANGE or field.name in also]
    return [name for name in fixed if name not in settings or settings[name] != getattr(args, name)]


def open_run(path: Path, args: Any, script: str, complete: bool = False) -> Resumed:
    """Lock and read a run; a complete one only if `complete` allows it."""
    settings = read_args(path)
    try:
        lock = lock_folder(path)
    except OSError as error:
        raise cannot_write(args, error, path) from error
    checkpoint, meta = newest_checkpoint(path), read_json(path / "meta.json")
    if checkpoint is None:
        print(f"note: {path} has no checkpoint yet, so that it starts from the beginning", file=sys.stderr)
        made_by = meta.get("script")
    else:
        settings, made_by = checkpoint["args"], checkpoint["script"]
        other_end = settings.get("total_timesteps") != args.total_timesteps
        ended = checkpoint["step"] >= args.total_timesteps and (meta.get("finished") or other_end)
        if ended and not complete:
            made = f"it has made {checkpoint['step']:,} steps"
            raise InputError(f"--resume {path}: {made}: raise --total-timesteps to go on.")
    if made_by != script:
        raise InputError(f"--resume {path}: that is a run of {made_by}, not of {script}.")
    changed = differences(args, settings)
    if changed:
        there = [f"{flag(name)} {getattr(args, name)} (there: {settings.get(name, 'unknown')})" for name in changed]
        other = f"to start a new run from its weights, use --init-from {path}."
        raise InputError(f"--resume {path}: a resumed run cannot change {', '.join(there)}; {other}")
    return Resumed(path, lock, checkpoint)
