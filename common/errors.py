"""Errors that a person sees as one sentence instead of a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Settings that cannot work. The message says what to change; raised before anything is started."""


class TrainingError(RuntimeError):
    """A run that must not go on, such as one whose loss is no longer finite."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print the two errors above as one line on stderr; exit with 2 (bad input) or 1 (failed run).

    Only a script's main guard uses it: code that calls `main(Args(...))` in process gets the exceptions themselves.
    """
    try:
        yield
    except (InputError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)


def require(condition: bool, message: str) -> None:
    """Raise InputError with `message` unless the condition holds."""
    if not condition:
        raise InputError(message)


def require_positive(args: object, names: str) -> None:
    """Raise InputError for the first of the named settings (separated by spaces) that is not above 0."""
    for name in names.split():
        flag, value = name.replace("_", "-"), getattr(args, name)
        require(value > 0, f"--{flag} {value} cannot work: use a number above 0.")
