"""Where a run computes: its device, number format, seeds and ranks. Without torchrun there is one rank. All ranks make
the same calls in the same order. When one dies, the others get an error, and torchrun stops them."""

import math
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common import InputError, TrainingError
from common.settings import HOST_MEMORY

GPU_RESERVE = 8e9  # bytes that networks, activations and the rollout may need beside stored frames
TIMEOUT = timedelta(minutes=10)  # for a rank that is late during training: its machine may have vanished
PATIENCE = timedelta(hours=2)  # for rank zero while it evaluates, or writes the last checkpoint
PER_HOST = {"runs_dir", "resume", "init_from", "num_threads", "device"}  # settings that may differ between ranks


def resolve_device(device: str) -> torch.device:
    """The device that `--device` names; each rank has a GPU of its own. Raises InputError where there is none."""
    count = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if count else "cpu"
    if device == "cuda" and "TORCHELASTIC_RUN_ID" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", device):
        raise InputError(f"--device {device!r} is not known: use auto, cpu, cuda or cuda:N.")
    kind, _, index = device.partition(":")
    if kind == "cuda" and int(index or 0) >= count:
        raise InputError(f"--device {device}: PyTorch sees {count} CUDA GPUs here: use --device auto or another.")
    return torch.device(device)


def resolve_precision(precision: str, device: torch.device) -> str:
    """Turn the `--precision` flag into "fp32" or "bf16". `auto` is bf16 where the device computes in it natively: on
    CPUs with AVX-512 BF16 or AMX (others emulate it, slower than float32) and on GPUs from Ampere on."""
    cpu = torch.cpu.get_capabilities()
    native = cpu.get("avx512_bf16") or cpu.get("amx_bf16")  # other architectures have no such keys
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    if precision == "auto":
        return "bf16" if native else "fp32"
    if precision == "bf16" and not native:
        print(f"note: PyTorch finds no bf16 instructions on {device}: fp32 may be many times faster", file=sys.stderr)
    return precision


def setup_device(device: torch.device, seed: int, torch_deterministic: bool = True) -> None:
    """Seed Python, NumPy and PyTorch; set up cuDNN, the current GPU and the CPU threads."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = torch_deterministic  # a CPU's kernels are anyway
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        if "OMP_NUM_THREADS" not in os.environ:  # idle threads of PyTorch's spin on the cores that environments need
            torch.set_num_threads(1)


def frame_store(shape: tuple, dtype: torch.dtype, device: torch.device, disk: str | None = None) -> Tensor:
    """A tensor for the observations of a phase, in a memory-mapped file without a name in the folder `disk`; without it
    on `device`, or in pinned host memory if 8 GB of a GPU would not stay free. Raises InputError if it has no room."""
    num_bytes = math.prod(shape) * dtype.itemsize
    size, advice = f"{num_bytes / 1e9:,.1f} GB of frames", "lower --n-pi, --num-envs or --num-steps."
    if disk is not None:
        try:
            Path(disk).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=disk) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk would be a bus error later on
                array = np.memmap(file, np.uint8, mode="r+", shape=(num_bytes,))
        except OSError as error:
            raise InputError(f"{size} cannot be kept in {disk} ({error.strerror}): {advice}") from error
        return torch.from_numpy(array).view(dtype).view(shape)
    if device.type == "cuda" and num_bytes <= torch.cuda.mem_get_info(device)[0] - GPU_RESERVE:
        return torch.empty(shape, dtype=dtype, device=device)
    if num_bytes > HOST_MEMORY:  # Linux would grant it, and kill the process when it is filled
        raise InputError(f"{size} do not fit into memory: use --aux-frames disk, or {advice}")
    if device.type == "cuda":
        print(f"note: {size} do not fit on {device}: they stay in host memory.", file=sys.stderr)
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(x: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """A host array or tensor on `device`. A copy to a GPU goes through pinned memory, and the host does not wait."""
    x = torch.as_tensor(x)
    if device.type == "cuda" and x.device.type == "cpu":
        x = x if x.is_pinned() else x.pin_memory()
    return x.to(device, non_blocking=True)


class World:
    """One process, or a rank among several of torch.distributed. `launcher` starts the command that repeats a run."""

    def __init__(self, device: torch.device):
        self.device, self.rank, self.world_size, self.launcher = device, 0, 1, "python"
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
