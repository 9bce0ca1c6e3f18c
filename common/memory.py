"""Where tensors lie: storage for frames, copies to a GPU, and the CPU's memory allocator."""

import ctypes
import math
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from common.errors import InputError

GPU_RESERVE = 8e9  # bytes that networks, activations and the rollout may need beside stored frames


def frame_store(
    shape: tuple, dtype: torch.dtype, device: torch.device, flags: str, disk: str | None = None, spill: bool = False
) -> torch.Tensor:
    """An uninitialised tensor for many observations.

    Args:
        flags: the flags to lower where there is no room, for the message.
        disk: keep the tensor in a memory-mapped file in this folder. The file has no name and goes with the process.
        spill: where the tensor does not leave 8 GB of a GPU free, keep it in pinned host memory (see `to_device`).

    Raises:
        InputError: there is no room.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    size = f"{num_bytes / 1e9:.1f} GB"
    try:
        if disk is not None:
            Path(disk).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=disk) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk would be a bus error later on
                array = np.memmap(file, np.uint8, mode="r+", shape=(num_bytes,))
            return torch.from_numpy(array).view(dtype).view(shape)
        if spill and device.type == "cuda" and num_bytes > torch.cuda.mem_get_info(device)[0] - GPU_RESERVE:
            print(f"note: {size} of frames do not fit on {device}: they stay in host memory.", file=sys.stderr)
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        return torch.empty(shape, dtype=dtype, device=device)
    except OSError as error:
        reason = f"{size} cannot be kept in {disk} ({error.strerror})"
        raise InputError(f"{reason}: lower {flags}, or choose another --runs-dir.") from error
    except RuntimeError as error:  # torch.OutOfMemoryError on GPUs
        raise InputError(f"{size} do not fit into the memory of {device} or of the host: lower {flags}.") from error


def to_device(x: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host array or tensor on `device`; a copy to a GPU goes through pinned memory, and the host does not wait."""
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
