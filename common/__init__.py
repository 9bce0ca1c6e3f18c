"""What the three scripts share, and the two errors that a person sees as one sentence. A file imports from those above
it; `checkpoint` also imports fast/, to load agents.

settings      flags: their limits, those that all scripts share, and the command line
procgen_env   Procgen's adapter to Gymnasium
envs          Procgen games and Gymnasium tasks as vector environments, with states and videos
reward_scale  the running scale of rewards
device        device, precision, seeds, and where tensors lie
world         one process, or the ranks that torchrun starts
learning      the backward pass of a minibatch, and means of metrics
networks      initial weights, and a policy's head and distribution for each kind of action space
run           the run folder: settings, provenance, logs, progress
checkpoint    saving, finding, resuming and loading a run
evaluation    episodes on held-out levels, and normalised returns
intrinsic     RND and ICM, for PPO and PPG
session       a script's run from its settings to its end, and signals
fast/         kernels and CUDA graphs; all works the same without
"""


class InputError(ValueError):
    """Settings that cannot work. The message says what to change; raised before anything is started."""


class TrainingError(RuntimeError):
    """A run that must not go on, for example because a loss is NaN."""
