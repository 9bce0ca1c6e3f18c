"""What the three scripts share (README.md says what is where), and the errors that a person sees as one sentence."""

import sys


class InputError(Exception):
    """Settings that cannot work. The message says what to change; raised before anything is started."""


class TrainingError(RuntimeError):
    """A run that must not go on, for example because a loss is NaN."""


def show_uncaught(kind, error, traceback):
    """Python's own, except that a Ctrl-C is one line. It may come while PyTorch is imported."""
    if kind is not KeyboardInterrupt:
        return sys.__excepthook__(kind, error, traceback)
    print("stopped by Ctrl-C", file=sys.stderr)


sys.excepthook = show_uncaught
