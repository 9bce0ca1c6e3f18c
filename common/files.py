"""Files of a run folder: the lock, JSON, and writes that leave no half-written file behind."""

import fcntl
import itertools
import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from common.errors import InputError


def cannot_write(args: Any, error: OSError, resumed: Path | None = None) -> InputError:
    """The error for a run folder that cannot be written."""
    if resumed is not None:
        return InputError(f"--resume {resumed}: nothing can be written there ({error.strerror}).")
    return InputError(f"no run folder can be written in {args.runs_dir} ({error.strerror}): choose another --runs-dir.")


def make_run_dir(args: Any) -> Path:
    """Make the folder of a run that starts now: <runs_dir>/<env>__<script>__<seed>__<time>, with a suffix if taken."""
    title = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    path = name = Path(args.runs_dir) / title.replace("/", "-").replace(",", "+")
    for number in itertools.count(2):
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not path.is_dir():
                raise
            path = name.with_name(f"{name.name}-{number}")


def check_writable(args: Any) -> None:
    """Raise InputError if no run folder can be made in --runs-dir."""
    runs_dir = Path(args.runs_dir).absolute()
    try:
        existing = next(path for path in (runs_dir, *runs_dir.parents) if path.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise cannot_write(args, error) from error


def lock_folder(path: Path) -> IO:
    """Lock a run's folder against other processes, until the returned file is closed or this process ends.

    Raises:
        InputError: another process holds the lock.
        OSError: nothing can be written there.
    """
    file = (path / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InputError(f"{path} is in use by another process: wait for its end, or stop it.") from None
    except OSError as error:
        print(f"note: {path} cannot be locked ({error.strerror}): see that no other run uses it", file=sys.stderr)
    return file


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, even if the machine loses power."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # the new name; some file systems have no fsync for a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The dict in a JSON file; an empty one if the file holds no dict or cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # the last two: not JSON, not text, or hostile
        return {}
    return content if isinstance(content, dict) else {}
