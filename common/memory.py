"""Where tensors lie: storage for frames, pieces of minibatches, copies to a GPU, and the CPU's memory allocator."""

import ctypes
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from common.errors import InputError


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
        print(
            f"note: {num_bytes / 1e9:.1f} GB of frames do not fit on {device}: they stay in host memory.",
            file=sys.stderr,
        )
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
