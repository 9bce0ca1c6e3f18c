"""The backward pass of a minibatch, in pieces and over all ranks, and means of metrics."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

CPU_MICRO_BATCH = 512  # steps; fewer make more of PyTorch's overhead, more take more memory and are not faster


def micro_batches(minibatch: Sequence[Tensor], size: int | None, dim: int = 0, at_most: int | None = None) -> Iterator:
    """Split the tensors of a minibatch along `dim` into pieces of `size` steps, and `at_most` so many. With `dim` = 1,
    dimension 0 of the first is time, and a piece holds whole sequences. `size` None: 512 on a CPU, all on a GPU."""
    first = minibatch[0]
    if size is None:
        size = CPU_MICRO_BATCH if first.device.type == "cpu" else first.shape[: dim + 1].numel()
    items = max(1, min(size, at_most or size) // first.shape[:dim].numel())
    return zip(*(x.split(items, dim) for x in minibatch), strict=True)


def backward(
    loss_of: Callable, agent: nn.Module, minibatch: Any, args: Any, world: Any, dim: int = 0, at_most: int | None = None
) -> dict[str, Tensor]:
    """Compute the gradient of a minibatch's mean loss in `micro_batches`, averaged over the ranks. Returns this rank's
    metrics. `loss_of(agent, piece, args)` gives loss and metrics, means over a piece; draw no random numbers in it."""
    total = {}
    for tensors in micro_batches(minibatch, args.micro_batch_size, dim, at_most):
        piece = type(minibatch)(*tensors)
        share = piece[0].shape[dim] / minibatch[0].shape[dim]
        loss, metrics = loss_of(agent, piece, args)
        (loss * share).backward()
        for tag, value in metrics.items():
            number = value.item() if value.is_cpu else value.detach()  # small tensors would fragment a CPU's heap
            total[tag] = total.get(tag, 0) + number * share
    world.all_reduce_gradients()
    return total


def mean_metrics(history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each metric over the gradient steps that have it, float64, still on the device."""
    means = {}
    for tag in dict.fromkeys(tag for metrics in history for tag in metrics):
        values = [torch.as_tensor(metrics[tag], dtype=torch.float64) for metrics in history if tag in metrics]
        means[tag] = torch.stack(values).mean()
    return means
