"""The processes that make a run: one, or the ranks that torchrun starts.

The methods are those of torch.distributed. With a single process there is nothing to send.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.reward_scale import moments


class World:
    """A run of one process; `common.distributed.ProcessGroup` does the same over several."""

    rank, world_size = 0, 1
    launcher = "python"  # in the command that repeats a run
    begun = None  # after a restart by torchrun: the folder of the run that the ranks were making ("auto": not known)

    def check_settings(self, args: Any) -> Any:
        """Raise InputError if the ranks' settings differ. Return this rank's: only rank zero films and tracks."""
        return args

    def on_rank_zero(self, function: Callable[[], Any], send: Callable[[Any], Any] = lambda result: result) -> Any:
        """Call `function` on rank zero. Return its result there and `send(result)` elsewhere; all raise its errors."""
        return function()

    def broadcast(self, value: Any) -> Any:
        """The value of rank zero. The other ranks wait for it, for hours if need be."""
        return value

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.broadcast(None)

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks on rank zero, None elsewhere."""
        return [value]

    def broadcast_parameters(self, networks: Iterable[torch.nn.Module]) -> None:
        """Give all ranks the parameters and buffers of rank zero."""

    def check_parameters(self, network: torch.nn.Module) -> None:
        """Raise TrainingError unless all ranks have the same parameters, bit for bit."""

    def all_reduce_gradients(self) -> None:
        """Average the gradients of all broadcast networks over the ranks."""

    def all_reduce_mean(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The mean of each metric over all ranks."""
        return metrics

    def communication(self) -> dict[str, float]:
        """`charts/communication`: the share of the time since the last call that this rank has waited for others."""
        return {}

    def std_mean(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Standard deviation (Bessel's) and mean of `x` [...] over all ranks."""
        return x.std(), x.mean()

    def moments(self, x: np.ndarray) -> tuple[int, float, float]:
        """Size, mean and variance of `x` [...] over all ranks."""
        return moments(x)

    def remember_run(self, path: str) -> None:
        """Remember the run's folder, for ranks that torchrun starts again."""

    def destroy(self) -> None:
        """End the connections to the other ranks, once every rank is done."""


def init_world(device: str) -> World:
    """Connect to the other ranks, where torchrun has started this process. Raises InputError as `resolve_device`."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return World()
    from common.distributed import ProcessGroup  # upwards, so that a single process need not import torch.distributed

    return ProcessGroup(device)
