"""Convolution and max-pooling of the IMPALA encoder's stacks, with kernels for the CPU.

PyTorch's max-pooling, and its convolution of RGB frames, whose three channels leave vector units idle, take a quarter
of the encoder's training time together, these kernels less than half of that (`benchmarks/NOTES.md`). They are C++
(`conv_pool.cpp`), built with the machine's compiler (`$CXX`, or else `c++`) for its own processor when a process first
needs them, which takes a second and leaves nothing behind.
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
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LANES = 16  # the kernels work on so many channels at once


class ConvMaxPool2d(nn.Conv2d):
    """`nn.Conv2d(in_channels, out_channels, 3, padding=1)`, then `nn.MaxPool2d(3, stride=2, padding=1)`.

    [B, C, H, W] -> [B, out_channels, ceil(H / 2), ceil(W / 2)], the same numbers. Where a window has its largest value
    twice, all of its gradient goes to the first, as in PyTorch. With bfloat16, sums are float32, and of RGB frames the
    largest is chosen before the convolution is rounded.

    PyTorch's own kernels run on GPUs, on what is neither float32 nor bfloat16, not in the channels-last layout or not a
    multiple of 16 channels, and where no compiler is found. Only RGB frames that need no gradient are convolved here.
    """

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(in_channels, out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 3 and not x.requires_grad and self.out_channels % LANES == 0 and suits(x):
            if torch.is_grad_enabled():
                return ConvMaxPool.apply(x, self.weight, self.bias)
            return conv_max_pool(x, self.weight, self.bias)[0]
        y = super().forward(x)
        if y.shape[1] % LANES == 0 and suits(y):
            return MaxPool.apply(y) if y.requires_grad else max_pool(y)[0]
        return F.max_pool2d(y, 3, stride=2, padding=1)


def suits(x: Tensor) -> bool:
    """Whether there are kernels for such a tensor here."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and kernels() is not None


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
        call("pool_backward", dy.dtype, dy, taps, dx, shape=ctx.shape)
        return dx


class ConvMaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y, taps = conv_max_pool(x, weight, bias, need_taps=True)
        ctx.save_for_backward(x, taps)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[None, Tensor, Tensor]:
        x, taps = ctx.saved_tensors
        dy, channels = dy.contiguous(memory_format=torch.channels_last), dy.shape[1]
        sums = torch.zeros(torch.get_num_threads(), 28, channels)
        call("conv_pool_backward", dy.dtype, x, dy, taps, sums, shape=(len(x), channels, *x.shape[2:]))
        sums = sums.sum(0)
        return None, sums[:27].view(3, 3, 3, channels).permute(3, 2, 0, 1), sums[27]


def max_pool(x: Tensor, need_taps: bool = False) -> tuple[Tensor, Tensor | None]:
    """The pooled frames and, if asked for, where in each window the largest value was first found (uint8)."""
    y, taps = pooled_frames(x, x.shape[1], need_taps)
    call("pool_forward", x.dtype, x, y, taps, shape=x.shape)
    return y, taps


def conv_max_pool(x: Tensor, weight: Tensor, bias: Tensor, need_taps: bool = False) -> tuple[Tensor, Tensor | None]:
    """The same of convolved frames. Weights are rounded to the frames' dtype, as autocast does."""
    channels = len(weight)
    filters = torch.cat([weight.detach().permute(2, 3, 1, 0).reshape(27, channels), bias.detach().unsqueeze(0)])
    filters = filters.to(x.dtype).float()
    y, taps = pooled_frames(x, channels, need_taps)
    call("conv_pool_forward", x.dtype, x, filters, y, taps, shape=(len(x), channels, *x.shape[2:]))
    return y, taps


def pooled_frames(x: Tensor, channels: int, need_taps: bool) -> tuple[Tensor, Tensor | None]:
    batch, _, height, width = x.shape
    shape = batch, channels, (height + 1) // 2, (width + 1) // 2
    y = torch.empty(shape, dtype=x.dtype, memory_format=torch.channels_last)
    return y, torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last) if need_taps else None


def call(name: str, dtype: torch.dtype, *tensors: Tensor | None, shape: tuple[int, ...]) -> None:
    """Run a kernel on frames of [B, C, H, W] = `shape`, for C as it is after a convolution."""
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
            library = Path(folder, "conv_pool.so")
            # OpenMP: of GCC's, PyTorch has loaded libgomp.so.1 already, and its threads are taken
            options = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-o", str(library), str(source)]
            subprocess.run(compiler + options, check=True, capture_output=True, timeout=60)
            return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        reason = next(iter(output.splitlines()), error)
        print(f"note: convolution and max-pooling run PyTorch's slower kernels ({reason})", file=sys.stderr)
        return None
