"""Errors that a person sees as one sentence instead of a traceback."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, get_args, get_origin, get_type_hints


class InputError(ValueError):
    """Settings that cannot work. The message says what to change; raised before anything is started."""


class TrainingError(RuntimeError):
    """A run that must not go on, such as one whose loss is no longer finite; `batch` is what it was computed from."""

    def __init__(self, message: str, batch: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.batch = batch


# What ends a run in good order, each as a KeyboardInterrupt. Slurm can send the last some time before a job must end.
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print the two errors above as one line on stderr and exit with 2 (bad input) or 1 (failed run).

    Ctrl-C exits with 130, SIGTERM with 143 and SIGUSR1 with 138, all by way of KeyboardInterrupt; once one has come,
    others are ignored.

    Only a script's main guard uses it: code that calls `main(Args(...))` in process gets the exceptions themselves.
    """
    code = 0
    threading.excepthook = skip_log_writer
    interrupt = Interrupt()
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as in a background job of a shell script
            signal.signal(number, interrupt)
    try:
        yield
    except (InputError, TrainingError) as error:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            print(f"error: {error}", file=sys.stderr)
        else:
            from common.distributed import print_error

            print_error(str(error))
        code = 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt as error:
        number = error.args[0] if error.args else signal.SIGINT
        code = 128 + number
        print(f"stopped by {SIGNALS[number]}", file=sys.stderr)
    hold_signals()
    for number in SIGNALS:  # the interpreter's end takes Python's handlers away
        signal.signal(number, signal.SIG_IGN)
    if any(thread.name.startswith("actor") for thread in threading.enumerate()):
        # One that hangs in its environment. The interpreter's own way out would abort the process.
        sys.stdout.flush()
        os._exit(code)
    if code:
        sys.exit(code)


class Interrupt:
    """A signal handler that raises KeyboardInterrupt.

    It does not again for some seconds: a second signal must not cut the way out short. Later ones count, for the first
    may have been lost (Python drops an exception that is raised in an object's finaliser).
    """

    SECONDS = 10

    def __init__(self):
        self.last = -math.inf

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if time.monotonic() - self.last > self.SECONDS:
            self.last = time.monotonic()
            raise KeyboardInterrupt(signum)


def hold_signals() -> None:
    """From now on the run ends by itself: what `one_line_errors` has made of a signal is no longer raised."""
    for number in SIGNALS:
        if isinstance(signal.getsignal(number), Interrupt):
            # Not SIG_IGN: Python reports an error where a signal that has arrived finds that in its handler's place.
            signal.signal(number, lambda signum, frame: None)


def skip_log_writer(failure: threading.ExceptHookArgs) -> None:
    """Report an error of a thread, but for TensorBoard's writer, whose errors the main thread raises, too."""
    if type(failure.thread).__module__.partition(".")[0] != "tensorboard":
        threading.__excepthook__(failure)


def require(condition: bool, message: str) -> None:
    """Raise InputError with `message` unless the condition holds."""
    if not condition:
        raise InputError(message)


def check_settings(args: Any, positive: str, not_negative: str, fractions: str) -> None:
    """Raise InputError for the first setting out of its range, before anything is started.

    Each setting of a `Literal` type must have one of its values (tyro sees to it on the command line, nobody does in
    process). Of the settings named, separated by spaces, those that are None pass.

    Args:
        args: a dataclass of settings.
        positive, not_negative, fractions: names of settings that must be above 0, not below 0, and in 0 to 1.
    """
    for name, hint in get_type_hints(type(args)).items():
        value = getattr(args, name)
        choices = get_args(hint) if get_origin(hint) is Literal else [value]
        require(value in choices, f"{flag(name)} {value} is not known: use one of {', '.join(map(str, choices))}.")
    for names, condition, allowed in (
        (positive, lambda value: 0 < value < math.inf, "a number above 0"),
        (not_negative, lambda value: 0 <= value < math.inf, "0 or a number above"),
        (fractions, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    ):
        for name in names.split():
            value = getattr(args, name)
            require(value is None or condition(value), f"{flag(name)} {value} cannot work: use {allowed}.")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
