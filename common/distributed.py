"""The ranks that torchrun starts, which train one agent on environments of their own (data parallelism).

NCCL connects GPUs, Gloo all else. Every rank makes the same calls in the same order. A rank that dies takes its
connections with it, so that the others get an error. torchrun sees it, too, stops them, and starts all ranks again
(with `--max-restarts`).
"""

import hashlib
import io
import os
import pickle
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.device import resolve_device
from common.errors import InputError, TrainingError
from common.kernels import build
from common.settings import flag
from common.world import World

TIMEOUT = timedelta(minutes=10)  # for a rank that is late during training: its machine may have vanished
PATIENCE = timedelta(hours=2)  # for rank zero while it evaluates or writes checkpoints
PER_HOST = {"runs_dir", "resume", "init_from", "num_threads", "device"}  # settings that may differ between ranks


def pack(value: Any) -> bytes:
    """Serialise a value for `unpack`. (Not all tensors survive the pickle that torch.distributed would make.)"""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def digest(network: torch.nn.Module) -> str:
    tensors = [tensor.cpu().numpy() for tensor in network.state_dict().values()]
    return hashlib.sha256(pickle.dumps(tensors)).hexdigest()


class ProcessGroup(World):
    """This process's view of all ranks."""

    def __init__(self, device: str):
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        hosts = os.environ["GROUP_WORLD_SIZE"]
        self.launcher = "torchrun" + (f" --nnodes {hosts}" if hosts != "1" else "")
        self.launcher += f" --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
        self.device, self.parameters = resolve_device(device), []
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        self.seconds, self.since = 0.0, time.perf_counter()  # waited for others, since the last `communication`
        with self.sending():
            self.store, *_ = next(dist.rendezvous("env://"))
            self.own_store = dist.PrefixStore(self.meet(), self.store)
            options = {"rank": self.rank, "world_size": self.world_size, "timeout": TIMEOUT}
            dist.init_process_group(backend, store=self.own_store, **options)
            self.patient = dist.new_group(backend="gloo", timeout=PATIENCE)
        begun = self.store.get("run").decode() if self.store.check(["run"]) else None
        restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
        if restarted and os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True":  # that store is a new one
            begun = "auto"
        self.begun = self.broadcast(begun)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Measure the time, and turn PyTorch's error of a broken connection into one line."""
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise TrainingError(f"the connection to another rank is lost, or none could be made ({reason})") from error
        self.seconds += time.perf_counter() - start

    def meet(self) -> str:
        """A name that all ranks of this start share, and no earlier start.

        torchrun keeps its store when it restarts the ranks, and PyTorch then finds addresses of dead ranks in it
        (https://github.com/pytorch/pytorch/issues/135712; the restarts that torchrun counts differ from host to host).
        So rank zero repeats the names that all ranks have drawn until each has found its own among them.
        """
        name = uuid.uuid4().hex
        self.store.set(f"name/{self.rank}", name)
        while True:
            # Never `get` a missing key: the process would hear no signal while it waits.
            if self.rank == 0 and self.store.check([f"name/{rank}" for rank in range(self.world_size)]):
                names = [self.store.get(f"name/{rank}").decode() for rank in range(self.world_size)]
                self.store.set("names", " ".join(names))
                if all(self.store.check([f"{name}/{each}"]) for each in names[1:]):
                    return name
            elif self.rank > 0 and self.store.check(["names"]):
                names = self.store.get("names").decode().split()
                if name in names:
                    self.store.set(f"{names[0]}/{name}", "met")
                    return names[0]
            time.sleep(0.02)

    def check_settings(self, args: Any) -> Any:
        mine = {flag(field): value for field, value in asdict(args).items() if field not in PER_HOST}
        mine |= {"the version of PyTorch": torch.__version__, "having a C++ compiler": build() is not None}
        for name, values in {name: [each[name] for each in self.all_gather(mine)] for name in mine}.items():
            if any(value != values[0] for value in values):
                raise InputError(f"{name} is not the same on all ranks ({', '.join(map(str, values))}): make it so.")
        return args if self.rank == 0 else replace(args, capture_video=False, track=False)

    # ------------------------------------------------------------------------------------------------------- objects

    def broadcast(self, value: Any) -> Any:
        values = [pack(value)]
        with self.sending():
            dist.broadcast_object_list(values, src=0, group=self.patient)
        return unpack(values[0])

    def on_rank_zero(self, function: Callable[[], Any], send: Callable[[Any], Any] = lambda result: result) -> Any:
        result = error = None
        if self.rank == 0:
            try:
                result = function()
            except (InputError, TrainingError) as failure:
                error = failure
        sent, kind, text = self.broadcast((send(result), type(error), str(error)) if self.rank == 0 else None)
        if error is not None:
            raise error
        if kind is not type(None):
            raise kind(text)
        return result if self.rank == 0 else sent

    def gather(self, value: Any) -> list[Any] | None:
        values = [None] * self.world_size if self.rank == 0 else None
        with self.sending():
            dist.gather_object(pack(value), values, dst=0, group=self.patient)
        return values and [unpack(each) for each in values]

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        values = [None] * self.world_size
        with self.sending():
            dist.all_gather_object(values, pack(value), group=self.patient)
        return [unpack(each) for each in values]

    # ------------------------------------------------------------------------------------------------------- numbers

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place."""
        with self.sending():
            dist.all_reduce(tensor)
        return tensor

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

    def all_reduce_mean(self, metrics: dict[str, Any]) -> dict[str, Any]:
        values = torch.stack([torch.as_tensor(value, device=self.device).double() for value in metrics.values()])
        return dict(zip(metrics, self.all_reduce(values) / self.world_size, strict=True))

    def communication(self) -> dict[str, float]:
        now = time.perf_counter()
        waited, self.seconds, self.since = self.seconds / (now - self.since), 0.0, now
        return {"charts/communication": waited}

    # ---------------------------------------------------------------------------------------------------- parameters

    def broadcast_parameters(self, networks: Iterable[torch.nn.Module]) -> None:
        for network in networks:
            with self.sending():
                for tensor in network.state_dict().values():
                    dist.broadcast(tensor, src=0)
            self.check_parameters(network)
            self.parameters += network.parameters()

    def check_parameters(self, network: torch.nn.Module) -> None:
        if len(set(self.all_gather(digest(network)))) > 1:
            raise TrainingError("the ranks no longer have the same parameters: have they different processors or GPUs?")

    def all_reduce_gradients(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        joined = self.all_reduce(torch.cat([gradient.flatten() for gradient in gradients])) / self.world_size
        means = joined.split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))

    def remember_run(self, path: str) -> None:
        self.store.set("run", path)

    def destroy(self) -> None:
        """Wait until all ranks are done (rank zero with its last checkpoint), then until all know it: a closed
        connection is an error to a rank that still uses it."""
        with self.sending():
            for word in ("done", "seen"):
                self.own_store.set(f"{word}/{self.rank}", "")
                everyone = [f"{word}/{rank}" for rank in range(self.world_size)]
                # All must see that all are done. Only rank zero, which may be keeping the store, must see "seen".
                while (word == "done" or self.rank == 0) and not self.own_store.check(everyone):
                    time.sleep(0.02)
        dist.destroy_process_group()
