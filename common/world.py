"""The processes that make a run: one, or the ranks that torchrun starts, with environments of their own each.
Ranks train one agent (data parallelism). NCCL connects GPUs, Gloo all else. Every rank makes the same calls in the same
order. When a rank dies, the others get an error; torchrun stops them and, with `--max-restarts`, starts all again."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import reward_scale
from common.device import resolve_device
from common.errors import InputError, TrainingError

TIMEOUT = timedelta(minutes=10)  # for a rank that is late during training: its machine may have vanished
PATIENCE = timedelta(hours=2)  # for rank zero while it evaluates, or writes the last checkpoint
PER_HOST = {"runs_dir", "resume", "init_from", "num_threads", "device"}  # settings that may differ between ranks


class World:
    """A run of one process, with nothing to send. The methods are those of torch.distributed."""

    rank, world_size = 0, 1
    launcher = "python"  # in the command that repeats a run
    restarted = False  # by torchrun: the ranks go on with their run

    def share_settings(self, args: Any) -> Any:
        """This rank's settings: rank zero's, but for those of the machine. Only rank zero films and tracks."""
        return args

    def broadcast(self, value: Any) -> Any:
        """The value of rank zero. The other ranks wait for it, for hours if need be."""
        return value

    def on_rank_zero(self, function: Callable[[], Any], send: Callable[[Any], Any] = lambda result: result) -> Any:
        """Call `function` on rank zero. Return its result there and `send(result)` elsewhere; all raise its errors."""
        return function()

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        return [value]

    def all_reduce_mean(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The mean of each metric over all ranks."""
        return metrics

    def std_mean(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Standard deviation (Bessel's) and mean of `x` [...] over all ranks."""
        return x.std(), x.mean()

    def moments(self, x: np.ndarray) -> tuple[int, float, float]:
        """Size, mean and variance of `x` [...] over all ranks."""
        return reward_scale.moments(x)

    def broadcast_parameters(self, networks: Iterable[nn.Module]) -> None:
        """Give all ranks the parameters and buffers of rank zero."""

    def all_reduce_gradients(self) -> None:
        """Average the gradients of all broadcast networks over the ranks."""

    def destroy(self) -> None:
        """End the connections to the other ranks, once every rank is done."""


class ProcessGroup(World):
    """The same over the ranks that torchrun has started. Raises InputError as `resolve_device`."""

    def __init__(self, device: str):
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        hosts, restarts = os.environ["GROUP_WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        self.restarted = restarts != "0"
        self.launcher = "torchrun" + (f" --nnodes {hosts}" if hosts != "1" else "")
        self.launcher += f" --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
        self.device, self.networks, backend = resolve_device(device), [], "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
        with self.sending():
            store, *_ = next(dist.rendezvous("env://"))
            # torchrun keeps its store when it restarts the ranks, and with it the addresses of dead ranks
            # (https://github.com/pytorch/pytorch/issues/135712): hence other keys after each restart.
            store = dist.PrefixStore(f"start {restarts}", store)
            dist.init_process_group(backend, store=store, timeout=TIMEOUT, rank=self.rank, world_size=self.world_size)
            self.patient = dist.new_group(backend="gloo", timeout=PATIENCE)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Turn PyTorch's error of a broken connection into one line."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise TrainingError(f"the connection to another rank is lost, or none could be made ({reason})") from error

    def share_settings(self, args: Any) -> Any:
        own = {name: getattr(args, name) for name in PER_HOST} | {"capture_video": False, "track": False}
        shared = self.broadcast(args)
        return args if self.rank == 0 else replace(shared, **own)

    def broadcast(self, value: Any) -> Any:
        values = [value]
        with self.sending():
            dist.broadcast_object_list(values, src=0, group=self.patient)
        return values[0]

    def on_rank_zero(self, function: Callable[[], Any], send: Callable[[Any], Any] = lambda result: result) -> Any:
        result = error = None
        if self.rank == 0:
            try:
                result = function()
            except (InputError, TrainingError, OSError) as failure:
                error = failure
        sent, error = self.broadcast((None if error else send(result), error) if self.rank == 0 else None)
        if error is not None:
            raise error
        return result if self.rank == 0 else sent

    def all_gather(self, value: Any) -> list[Any]:
        values = [None] * self.world_size
        with self.sending():
            dist.all_gather_object(values, value, group=self.patient)
        return values

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place."""
        with self.sending():
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_mean(self, metrics: dict[str, Any]) -> dict[str, Any]:
        values = torch.stack([torch.as_tensor(value, device=self.device).double() for value in metrics.values()])
        return dict(zip(metrics, self.all_reduce(values) / self.world_size, strict=True))

    def joined_moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Size, mean and sum of squared deviations of `x` over all ranks, float64 scalars."""
        x = x.double()
        size, total = self.all_reduce(torch.stack([x.new_tensor(x.numel()), x.sum()]))
        mean = total / size
        return size, mean, self.all_reduce((x - mean).square().sum())

    def std_mean(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size, mean, squares = self.joined_moments(x)
        return (squares / (size - 1)).sqrt().to(x.dtype), mean.to(x.dtype)

    def moments(self, x: np.ndarray) -> tuple[int, float, float]:
        size, mean, squares = self.joined_moments(torch.as_tensor(x))
        return int(size), float(mean), float(squares / size)

    def broadcast_parameters(self, networks: Iterable[nn.Module]) -> None:
        for network in networks:
            with self.sending():
                for tensor in network.state_dict().values():
                    dist.broadcast(tensor, src=0)
            self.networks.append(network)

    def all_reduce_gradients(self) -> None:
        gradients = [x.grad for network in self.networks for x in network.parameters() if x.grad is not None]
        joined = self.all_reduce(torch.cat([gradient.flatten() for gradient in gradients])) / self.world_size
        means = joined.split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
        with self.sending():
            for buffer in (x for network in self.networks for x in network.buffers()):
                dist.broadcast(buffer, src=0)  # statistics of batch normalisation are rank zero's, as in PyTorch's DDP

    def destroy(self) -> None:
        with self.sending():
            dist.barrier(self.patient)
        dist.destroy_process_group()


def init_world(device: str) -> World:
    """Connect to the other ranks, where torchrun has started this process. Raises InputError as `resolve_device`."""
    return ProcessGroup(device) if "TORCHELASTIC_RUN_ID" in os.environ else World()
