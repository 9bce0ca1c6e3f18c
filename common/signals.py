"""How a process ends: errors as one sentence, and signals as a KeyboardInterrupt that leaves time to save."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

from common.errors import InputError, TrainingError

# What ends a run in good order, each as a KeyboardInterrupt. Slurm can send the last before a job's time is up.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an InputError or a TrainingError as one line on stderr, and exit with 2 or 1. A signal exits with 128 plus
    its number (Ctrl-C: 130), by way of KeyboardInterrupt. Only a script's main guard uses this: code that calls
    `main(Args(...))` gets the exceptions themselves."""
    code, interrupt = 0, Interrupt()
    threading.excepthook = lambda failure: (  # an error of TensorBoard's thread comes in the main thread, too
        type(failure.thread).__module__.startswith("tensorboard.") or threading.__excepthook__(failure)
    )
    sys.stdout, sys.stderr = Outlet(sys.stdout), Outlet(sys.stderr)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as in a background job of a shell script, or under nohup
            signal.signal(number, interrupt)
    try:
        yield
    except (InputError, TrainingError) as error:
        label = f"rank {os.environ['RANK']}: " if "TORCHELASTIC_RUN_ID" in os.environ else ""
        print(f"{label}error: {error}", file=sys.stderr, flush=True)
        code = 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt as error:
        number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
        code = 128 + number
        print(f"stopped by {'Ctrl-C' if number == signal.SIGINT else number.name}", file=sys.stderr)
    hold_signals()
    for number in SIGNALS:  # the interpreter's end takes Python's handlers away
        signal.signal(number, signal.SIG_IGN)
    if any(thread.name.startswith("actor") for thread in threading.enumerate()):
        sys.stdout.flush()
        os._exit(code)  # the interpreter's own way out would abort beside an actor that hangs in its environment
    if code:
        sys.exit(code)


class Outlet:
    """A stream of text that may be closed, full or gone, which neither ends a run nor changes its exit code."""

    def __init__(self, stream: TextIO | None):  # None: closed from the start
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)

    def write(self, text: str) -> None:
        with suppress(OSError):
            self.stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Interrupt:
    """A signal handler that raises KeyboardInterrupt, but not twice within some seconds: that would cut the way out
    short. Later signals count, since Python loses an exception that is raised in an object's finaliser."""

    SECONDS, last = 10, -math.inf

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if time.monotonic() - self.last > self.SECONDS:
            self.last = time.monotonic()
            raise KeyboardInterrupt(signum)


def hold_signals() -> None:
    """From now on the process ends by itself: signals no longer raise KeyboardInterrupt."""
    for number in SIGNALS:
        if isinstance(signal.getsignal(number), Interrupt):
            # Not SIG_IGN: Python reports an error if a signal that has already arrived finds SIG_IGN.
            signal.signal(number, lambda signum, frame: None)
