"""The processes that make a run: one, or the ranks that torchrun starts."""

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from common.envs import group_seed, moments
from common.run import Run

RANK_SEEDS = 20_000  # in the place of a group's number: seeds unlike those of groups and evaluations


class World:
    """A run of one process, for which there is nothing to send: what `distributed.Ranks` does over several of them."""

    rank, size = 0, 1
    label = ""  # goes before what a rank prints
    launcher = "python"  # in the command that repeats a run
    begun = None  # if torchrun has restarted the ranks: the folder of the run they were making ("auto": not known)

    def own(self, args: Any) -> Any:
        """The settings for this rank: only the first films and tracks. Raises InputError if ranks differ otherwise."""
        return args

    def total_steps(self, total_timesteps: int, iteration_steps: int, resumed: Any) -> int:
        """Steps at which the run will end: whole iterations from where `resumed` stands, or from 0."""
        done = resumed.checkpoint["step"] if resumed and resumed.checkpoint else 0
        return done + max(0, math.ceil((total_timesteps - done) / iteration_steps)) * iteration_steps

    def seed(self, seed: int, resumed: Any) -> int:
        """Seed of this rank's actions and environments: `seed` itself for the first, but not where what `find_run` has
        returned (`resumed`) cannot go on with the environments that it had."""
        checkpoint = resumed and resumed.checkpoint
        redrawn_at = checkpoint["step"] if checkpoint and checkpoint["loop"] is None else 0
        if self.rank == 0 and not redrawn_at:
            return seed
        return group_seed(seed, RANK_SEEDS + self.rank + 1_000_000 * redrawn_at)

    def first(self, function: Callable[[], Any], send: Callable[[Any], Any] = lambda result: result) -> Any:
        """Call `function` on rank 0; return its result there, and `send(result)` on the others. All raise its
        errors."""
        return function()

    def open_run(self, args: Any, **rest: Any) -> Any:
        """`Run(args, **rest)`, which rank 0 writes for all."""
        return Run(args, **rest)

    def share(self, agent: torch.nn.Module) -> None:
        """Give all ranks the parameters of rank 0, and have `average_gradient` work on those of `agent`."""

    def average_gradient(self, pieces: Iterable[Any]) -> Iterable[Any]:
        """Go through the pieces of a minibatch, with a backward pass for each; once the loop over them has ended, every
        parameter's `grad` is the mean over all ranks."""
        return pieces

    def compare(self, agent: torch.nn.Module) -> None:
        """Raise TrainingError unless all ranks have the same parameters, bit for bit."""

    def std_mean(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Standard deviation (Bessel's) and mean of `x` [...] of all ranks, joined."""
        return x.std(), x.mean()

    def moments(self, x: np.ndarray) -> tuple[int, float, float]:
        """Size, mean and variance of `x` [...] of all ranks, joined."""
        return moments(x)

    def mean(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The mean of each metric over all ranks."""
        return metrics

    def per_rank(self, metrics: dict[str, float]) -> dict[str, float]:
        """Each metric of every rank, with the rank in its tag."""
        return metrics

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks on rank 0, None on the others."""
        return [value]

    def agree(self, value: Any) -> Any:
        """The value that rank 0 has. However long it takes."""
        return value

    def leave(self) -> None:
        """End the connections to the other ranks."""


ALONE = World()


def join(device: str) -> World:
    """Connect to the other ranks, where torchrun has started this process; else there are none.

    Args:
        device: `--device`.

    Raises:
        InputError: the ranks on this machine have no such device each.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ALONE
    from common.distributed import Ranks

    return Ranks(device)
