"""Device, seeds and number format of a run, and where its tensors lie."""

import math
import os
import random
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from common import InputError
from common.settings import HOST_MEMORY

GPU_RESERVE = 8e9  # bytes that networks, activations and the rollout may need beside stored frames


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
    native = cpu_has("avx512_bf16") or cpu_has("amx_bf16")
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    if precision == "auto":
        return "bf16" if native else "fp32"
    if precision == "bf16" and not native:
        print(f"note: PyTorch finds no bf16 instructions on {device}: fp32 may be many times faster", file=sys.stderr)
    return precision


def cpu_has(instructions: str) -> bool:
    """Whether this processor has `instructions`, by PyTorch's name for them."""
    return bool(torch.cpu.get_capabilities().get(instructions))


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


def frame_store(shape: tuple, dtype: torch.dtype, device: torch.device, disk: str | None = None) -> torch.Tensor:
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


def to_device(x: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host array or tensor on `device`. A copy to a GPU goes through pinned memory, and the host does not wait."""
    x = torch.as_tensor(x)
    if device.type == "cuda" and x.device.type == "cpu":
        x = x if x.is_pinned() else x.pin_memory()
    return x.to(device, non_blocking=True)
