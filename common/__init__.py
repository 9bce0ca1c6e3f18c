"""What the three scripts share (README.md says what is where), and the errors that a person sees as one sentence."""


class InputError(ValueError):
    """Settings that cannot work. The message says what to change; raised before anything is started."""


class TrainingError(RuntimeError):
    """A run that must not go on, for example because a loss is NaN."""
