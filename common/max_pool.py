"""Max-pooling for the CPU: PyTorch's kernels take a fifth of the encoder's training time, these a twelfth.

They are C++ (`max_pool.cpp`), built with the machine's compiler (`$CXX`, or else `c++`) for its own processor when a
process first needs them, which takes half a second and leaves nothing behind.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.function import once_differentiable

LANES = 16  # the kernels work on so many channels at once


class MaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d(3, stride=2, padding=1)`: [B, C, H, W] -> [B, C, ceil(H / 2), ceil(W / 2)], the same numbers.

    Where a window has its largest value twice, all of its gradient goes to the first, as in PyTorch. bfloat16 gradients
    of overlapping windows are summed in float32. PyTorch's own kernels run on GPUs, on what is neither float32 nor
    bfloat16, not in the channels-last layout or not a multiple of 16 channels, and where no compiler is found.
    """

    def __init__(self):
        super().__init__(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().forward(x)
        suits = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and x.shape[1] % LANES == 0
        if suits and x.is_contiguous(memory_format=torch.channels_last) and kernels():
            return MaxPool.apply(x) if x.requires_grad and torch.is_grad_enabled() else max_pool(x)[0]
        return super().forward(x)


class MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y, taps = max_pool(x, need_taps=True)
        ctx.save_for_backward(taps)
        ctx.shape = x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> Tensor:
        (taps,) = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty(ctx.shape, dtype=dy.dtype, memory_format=torch.channels_last)
        call("backward", dy.dtype, dy, taps, dx, shape=ctx.shape)
        return dx


def max_pool(x: Tensor, need_taps: bool = False) -> tuple[Tensor, Tensor | None]:
    """The pooled frames and, if asked for, where in each window the largest value was first found (uint8)."""
    batch, channels, height, width = x.shape
    shape = batch, channels, (height + 1) // 2, (width + 1) // 2
    y = torch.empty(shape, dtype=x.dtype, memory_format=torch.channels_last)
    taps = torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last) if need_taps else None
    call("forward", x.dtype, x, y, taps, shape=x.shape)
    return y, taps


def call(name: str, dtype: torch.dtype, *tensors: Tensor | None, shape: torch.Size) -> None:
    batch, channels, height, width = shape
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
    sizes = [ctypes.c_int64(size) for size in (batch, height, width, channels)]
    kernel = getattr(kernels(), f"{name}_{str(dtype).removeprefix('torch.')}")
    kernel(*pointers, *sizes, ctypes.c_int(torch.get_num_threads()))


lock = threading.Lock()  # actors and learner may come at the same time


def kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None, and once a note on stderr, where they cannot be had."""
    with lock:
        return build()


@functools.cache
def build() -> ctypes.CDLL | None:
    compiler = (os.environ.get("CXX") or "c++").split()
    source = Path(__file__).with_suffix(".cpp")
    try:
        if not shutil.which(compiler[0]):
            raise FileNotFoundError(f"there is no C++ compiler {compiler[0]!r}")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "max_pool.so")
            # OpenMP: of GCC's, PyTorch has loaded libgomp.so.1 already, and its threads are taken
            options = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-o", str(library), str(source)]
            subprocess.run(compiler + options, check=True, capture_output=True, timeout=60)
            return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        reason = next(iter(output.splitlines()), error)
        print(f"note: max-pooling runs PyTorch's slower kernels ({reason})", file=sys.stderr)
        return None
