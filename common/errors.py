"""The two errors that a person sees as one sentence instead of a traceback."""

from collections.abc import Mapping
from typing import Any


class InputError(ValueError):
    """Settings that cannot work. The message says what to change; raised before anything is started."""


class TrainingError(RuntimeError):
    """A run that must not go on, for example because a loss is NaN; `batch` is the data that led to it."""

    def __init__(self, message: str, batch: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.batch = batch
