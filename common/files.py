"""Files of a run folder: the lock, JSON, and writes that leave no half-written file behind."""

import fcntl
import itertools
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from common.errors import InputError

ROOT = Path(__file__).parent.parent  # of the repository


def make_run_dir(args: Any) -> Path:
    """Make the folder of a run that starts now: <runs_dir>/<env>__<exp_name>__<seed>__<seconds since 1970>."""
    title = f"{args.env_id}__{args.exp_name}__{args.seed}".replace("/", "-").replace(",", "+")
    Path(args.runs_dir).mkdir(parents=True, exist_ok=True)
    for seconds in itertools.count(int(time.time())):  # the next one, if another run has begun in this second
        path = Path(args.runs_dir, f"{title}__{seconds}")
        with suppress(FileExistsError):
            path.mkdir()
            return path


def lock_folder(path: Path, note: bool = True) -> IO:
    """Lock a run's folder until the returned file is closed or this process ends. Raises InputError if it is in use.
    Where the file system has no locks, it is as if locked, and a `note` says so."""
    file = (path / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InputError(f"{path} is in use by another process: wait for its end, or stop it.") from None
    except OSError as error:
        if note:
            print(f"note: {path} cannot be locked ({error.strerror}): see that no other run uses it", file=sys.stderr)
    return file


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file in place of the one before, which stays whole if this fails or the machine loses power."""
    temporary = path.with_name(".tmp")  # one name, so that killed processes leave one file at most
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The dict in a JSON file; an empty one if the file holds no dict or cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # the last two: not JSON, not text, or hostile
        return {}
    return content if isinstance(content, dict) else {}
