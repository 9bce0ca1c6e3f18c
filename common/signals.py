"""How a process ends: errors as one sentence, and signals as a KeyboardInterrupt that leaves time to save."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from common.errors import InputError, TrainingError

# What ends a run in good order, each as a KeyboardInterrupt. Slurm can send the last before a job's time is up.
SIGNALS = {signal.SIGINT: "Ctrl-C"} | {
    number: number.name for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
}


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an InputError or a TrainingError as one line on stderr, and exit with 2 or 1.

    A signal exits with 128 plus its number (Ctrl-C: 130), by way of KeyboardInterrupt. Once one has come, others are
    ignored. Only a script's main guard uses this: code that calls `main(Args(...))` gets the exceptions themselves.
    """
    code = 0
    threading.excepthook = skip_log_writer
    interrupt = Interrupt()
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
        number = error.args[0] if error.args else signal.SIGINT
        code = 128 + number
        print(f"stopped by {SIGNALS[number]}", file=sys.stderr)
    hold_signals()
    for number in SIGNALS:  # the interpreter's end takes Python's handlers away
        signal.signal(number, signal.SIG_IGN)
    if any(thread.name.startswith("actor") for thread in threading.enumerate()):
        # An actor hangs in its environment. The interpreter's own way out would abort the process.
        sys.stdout.flush()
        os._exit(code)
    if code:
        sys.exit(code)


class Interrupt:
    """A signal handler that raises KeyboardInterrupt, but not twice within some seconds.

    A second signal must not cut the way out short. Later ones count, for the first may have been lost: Python drops an
    exception that is raised in an object's finaliser.
    """

    SECONDS = 10

    def __init__(self):
        self.last = -math.inf

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


def skip_log_writer(failure: threading.ExceptHookArgs) -> None:
    """Report an error of a thread, but not of TensorBoard's writer: the main thread raises the same error."""
    if type(failure.thread).__module__.partition(".")[0] != "tensorboard":
        threading.__excepthook__(failure)
