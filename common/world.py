"""The processes that make a run: one, or the ranks that torchrun starts, with environments of their own each. Every
rank makes the same calls in the same order. When one dies, the others get an error, and torchrun stops them."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common import InputError, TrainingError

TIMEOUT = timedelta(minutes=10)  # for a rank that is late during training: its machine may have vanished
PATIENCE = timedelta(hours=2)  # for rank zero while it evaluates, or writes the last checkpoint
PER_HOST = {"runs_dir", "resume", "init_from", "num_threads", "device"}  # settings that may differ between ranks


class World:
    """One process, or a rank among several of torch.distributed. `launcher` starts the command that repeats a run."""

    def __init__(self, device: torch.device):
        self.rank, self.world_size, self.launcher = 0, 1, "python"
        self.device, self.networks = device, []
        self.several = "TORCHELASTIC_RUN_ID" in os.environ
        if self.several:
            connected(self.connect)

    def connect(self) -> None:
        """Meet the other ranks. torchrun keeps its store when it restarts them, and with it the addresses of dead ranks
        (https://github.com/pytorch/pytorch/issues/135712). Hence each start has keys of its own."""
        hosts = os.environ["GROUP_WORLD_SIZE"]
        self.launcher = "torchrun" + (f" --nnodes {hosts}" if hosts != "1" else "")
        self.launcher += f" --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
        store, self.rank, self.world_size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, timeout=TIMEOUT, rank=self.rank, world_size=self.world_size)
        self.patient = dist.new_group(backend="gloo", timeout=PATIENCE)

    def share_settings(self, args: Any) -> Any:
        """Rank zero's settings, except this rank's own PER_HOST. Only rank zero films and tracks."""
        own = {name: getattr(args, name) for name in PER_HOST} | {"capture_video": False, "track": False}
        shared = self.broadcast(args)
        return args if self.rank == 0 else replace(shared, **own)

    def broadcast(self, value: Any) -> Any:
        """The value of rank zero. The other ranks wait for it, for hours if need be."""
        values = [value]
        if self.several:
            connected(dist.broadcast_object_list, values, src=0, group=self.patient)
        return values[0]

    def on_rank_zero(self, function: Callable[[], Any]) -> Any:
        """Call `function` on rank zero. All ranks get its result, or raise its error."""
        try:
            result = function() if self.rank == 0 else None
        except (InputError, TrainingError, OSError) as error:
            result = error
        result = self.broadcast(result)
        if isinstance(result, Exception):
            raise result
        return result

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        values = [value] * self.world_size
        if self.several:
            connected(dist.all_gather_object, values, value, group=self.patient)
        return values

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place."""
        connected(dist.all_reduce, tensor)
        return tensor

    def all_reduce_mean(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The mean of each metric over the ranks that have it."""
        if not self.several:
            return metrics
        ranks = self.all_gather({tag: float(value) for tag, value in metrics.items()})
        tags = dict.fromkeys(tag for rank in ranks for tag in rank)
        return {tag: float(np.mean([rank[tag] for rank in ranks if tag in rank])) for tag in tags}

    def std_mean(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Standard deviation (Bessel's) and mean of `x` [...] over all ranks."""
        if not self.several:
            return x.std(), x.mean()
        size, mean, squares = self.joined_moments(x)
        return (squares / (size - 1)).sqrt().to(x.dtype), mean.to(x.dtype)

    def moments(self, x: np.ndarray) -> tuple[int, float, float]:
        """Size, mean and variance of `x` [...] over all ranks."""
        if not self.several:
            return x.size, x.mean(), x.var()
        size, mean, squares = self.joined_moments(torch.as_tensor(x))
        return int(size), float(mean), float(squares / size)

    def joined_moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Size, mean and sum of squared deviations, float64 scalars."""
        x = x.double()
        size, total = self.all_reduce(torch.stack([x.new_tensor(x.numel()), x.sum()]))
        mean = total / size
        return size, mean, self.all_reduce((x - mean).square().sum())

    def broadcast_parameters(self, networks: Iterable[nn.Module]) -> None:
        """Give all ranks the parameters and buffers of rank zero."""
        self.networks = list(networks) if self.several else []
        for network in self.networks:
            for tensor in network.state_dict().values():
                connected(dist.broadcast, tensor, src=0)

    def all_reduce_gradients(self) -> None:
        """Average the gradients of all broadcast networks over the ranks."""
        if not self.several:
            return
        gradients = [x.grad for network in self.networks for x in network.parameters() if x.grad is not None]
        total = self.all_reduce(parameters_to_vector(gradients))
        vector_to_parameters(total / self.world_size, gradients)
        for network in self.networks:
            for buffer in network.buffers():  # as in PyTorch's DDP: statistics of batch normalisation are rank zero's
                connected(dist.broadcast, buffer, src=0)

    def destroy(self) -> None:
        """End the connections to the other ranks, once every rank is done."""
        if self.several:
            connected(dist.barrier, self.patient)
            dist.destroy_process_group()


def connected(function: Callable, *args: Any, **named: Any) -> None:
    """Call a function of torch.distributed; turn its error of a broken connection into one line."""
    try:
        function(*args, **named)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise TrainingError(f"the connection to another rank is lost, or none could be made ({reason})") from error
