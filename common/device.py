"""Device, seeds and memory allocator of a run."""

import ctypes
import math
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from common.errors import InputError


def setup_device(device: str, *, seed: int, torch_deterministic: bool = True) -> torch.device:
    """Seed Python, NumPy and PyTorch, set the allocator up, and return the device to train on.

    Args:
        device: "auto" (the first CUDA GPU, or else the CPU), "cpu", "cuda" or "cuda:N".
        seed: of all three generators; the environments take theirs from `make_envs`.
        torch_deterministic: let cuDNN use deterministic kernels only. The CPU's are deterministic anyway.

    Raises:
        InputError: the name is none of the above, or no such device is there.
    """
    if not 0 <= seed < 2**32:
        raise InputError(f"--seed {seed} is out of range: use 0 to {2**32 - 1}.")
    resolved = resolve_device(device)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = torch_deterministic
    if resolved.type == "cpu":
        keep_freed_memory()
    return resolved


def resolve_device(device: str) -> torch.device:
    """Turn the `--device` flag into a `torch.device`. Raises InputError where that device is not there."""
    count = torch.cuda.device_count()
    if device == "auto":
        return torch.device("cuda" if count else "cpu")
    kind, _, index = device.partition(":")
    if device != "cpu" and not re.fullmatch(r"cuda(:[0-9]+)?", device):
        raise InputError(f"--device {device!r} is not known: use auto, cpu, cuda or cuda:N.")
    if kind == "cuda" and int(index or 0) >= count:
        found = f"there are {count} GPUs, cuda:0 to cuda:{count - 1}" if count else "PyTorch sees no CUDA GPU here"
        raise InputError(f"--device {device} is not there ({found}): use --device auto or another device.")
    return torch.device(device)


def resolve_precision(precision: str, device: str) -> str:
    """Turn the `--precision` flag into "fp32" or "bf16": `auto` is bf16 where `--device` computes in it natively.

    That is a CPU with AVX-512 BF16 or AMX (elsewhere PyTorch emulates bfloat16, which is slower than float32) and a GPU
    of NVIDIA's compute capability 8.0 or later. Raises InputError as `resolve_device` does.
    """
    if precision != "auto":
        return precision
    resolved = resolve_device(device)
    if resolved.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(resolved) >= (8, 0) else "fp32"
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}  # torch < 2.11
    return "bf16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "fp32"


CPU_MICRO_BATCH = 512  # steps; fewer make more of PyTorch's overhead, more take more memory and are not faster


def micro_batches(
    minibatch: Sequence[torch.Tensor], size: int | None, dim: int = 0
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Split the tensors of a minibatch along `dim` into pieces of `size` steps (the last may be smaller).

    With `dim` = 1, dimension 0 is time, and a piece holds as many whole sequences as `size` has room for, at least one.
    `size` None: 512 on a CPU; on a GPU, where small pieces leave it idle, the whole minibatch at once.
    """
    first = minibatch[0]
    if size is None:
        size = CPU_MICRO_BATCH if first.device.type == "cpu" else first.shape[: dim + 1].numel()
    items = max(1, size // first.shape[:dim].numel())
    return zip(*(x.split(items, dim) for x in minibatch), strict=True)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, flags: str) -> torch.Tensor:
    """`torch.empty`, with an InputError that names the `flags` to lower where the device refuses so much memory."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError on GPUs
        gigabytes = math.prod(shape) * dtype.itemsize / 1e9
        raise InputError(f"{gigabytes:.1f} GB do not fit into the memory of {device}: lower {flags}.") from error


GPU_RESERVE = 8e9  # bytes that networks, activations and the rollout may need beside stored frames


def frame_store(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, place: str, folder: Path, flags: str
) -> torch.Tensor:
    """An uninitialised tensor for very many frames. It may lie elsewhere than on `device`: see `to_device`.

    Args:
        place: "memory" (of a GPU if they fit with 8 GB to spare, or else pinned memory of the host) or "disk".
        folder: where "disk" keeps the file, memory-mapped; it has no name and goes when the process does.

    Raises:
        InputError: there is no room. Names the `flags` to lower.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if place == "disk":
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk would be a bus error later on
                array = np.memmap(file, np.uint8, mode="r+", shape=(num_bytes,))
        except OSError as error:
            raise InputError(
                f"{num_bytes / 1e9:.1f} GB cannot be kept in {folder} ({error.strerror}): lower {flags}, or choose "
                "another --runs-dir."
            ) from error
        return torch.from_numpy(array).view(dtype).view(shape)
    if device.type == "cuda" and num_bytes > torch.cuda.mem_get_info(device)[0] - GPU_RESERVE:
        print(f"note: {num_bytes / 1e9:.1f} GB of frames do not fit on {device}: they stay in host memory.")
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            raise InputError(f"{num_bytes / 1e9:.1f} GB cannot be pinned in host memory: lower {flags}.") from error
    return empty(shape, dtype, device, flags)


def to_device(x: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host array or tensor on `device`; the copy to a GPU goes through pinned memory and is not waited for."""
    x = torch.as_tensor(x)
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


# mallopt's parameter numbers, from glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep freed memory instead of returning it to the kernel.

    A CPU training step allocates and frees activations of tens of megabytes. By default each goes back to the kernel at
    once and is faulted in again, page by page, in the next step, which can take as long as the computation.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS and Windows have no mallopt
        print("note: this C library has no mallopt; large minibatches will be slower on the CPU.", file=sys.stderr)
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_TOP_PAD, 256 * 2**20)
