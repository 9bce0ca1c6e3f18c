"""Convolutions and max-pooling of the IMPALA encoder, with kernels of our own for the CPU.

PyTorch's kernels (oneDNN's) leave much of the processor idle in convolutions of 3, 16 and 32 channels, and each ReLU,
residual sum or max-pooling passes through all of the memory once more. Ours (`convolution.cpp`) do a residual block in
two passes. Where the processor has AMX, oneDNN's bfloat16 convolutions use it and ours, which do not, leave the blocks
to them. `benchmarks/NOTES.md` has what all this gains. They are C++, built with the machine's compiler (`$CXX`, or else
`c++`) for its own processor when a process first needs them, which takes two seconds and leaves nothing behind.
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

from common.device import cpu_has

LANES = 16  # the kernels work on so many channels at once


class ConvMaxPool2d(nn.Conv2d):
    """`nn.Conv2d(in_channels, out_channels, 3, padding=1)`, then `nn.MaxPool2d(3, stride=2, padding=1)`.

    [B, C, H, W] -> [B, out_channels, ceil(H / 2), ceil(W / 2)], the same numbers. Where a window has its largest value
    twice, all of its gradient goes to the first, as in PyTorch. With bfloat16, sums are float32, and of RGB frames the
    largest is chosen before the convolution is rounded.

    PyTorch's own kernels run on GPUs, on what is neither float32 nor bfloat16, not in the channels-last layout or not a
    multiple of 16 channels, and where no compiler is found. Convolutions by ours are those of RGB frames that need no
    gradient, and what `convolves` says.
    """

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(in_channels, out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if (
            self.in_channels == 3
            and self.out_channels % LANES == 0
            and not x.requires_grad
            and is_plain(self)
            and suits(x)
        ):
            if torch.is_grad_enabled():
                return ConvMaxPool.apply(x, self.weight, self.bias)
            return conv_max_pool(x, self.weight, self.bias)[0]
        y = Conv.apply(x, self.weight, self.bias) if convolves(x, self) else super().forward(x)
        if self.out_channels % LANES == 0 and suits(y):
            return MaxPool.apply(y) if y.requires_grad else max_pool(y)[0]
        return F.max_pool2d(y, 3, stride=2, padding=1)


def residual_block(x: Tensor, conv0: nn.Conv2d, conv1: nn.Conv2d) -> Tensor:
    """x + conv1(relu(conv0(relu(x)))), [B, C, H, W], of convolutions 3x3 with padding 1.

    Done by our kernels where `convolves` says so; the sum is then rounded to bfloat16 once.
    """
    if convolves(x, conv0) and convolves(x, conv1):
        return ResidualBlock.apply(x, conv0.weight, conv0.bias, conv1.weight, conv1.bias)
    return x + conv1(F.relu(conv0(F.relu(x))))


def suits(x: Tensor) -> bool:
    """Whether there are kernels for such a tensor here."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not x.numel():  # those keep PyTorch's
        return False
    if type(x) is not Tensor or x.device.type != "cpu":
        return False
    if x.dim() != 4 or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and kernels() is not None


def is_plain(conv: nn.Conv2d) -> bool:
    """Whether a convolution is 3x3, with a padding of 1 and a bias, and of float32 weights."""
    shape, dtypes = (conv.out_channels, conv.in_channels, 3, 3), {parameter.dtype for parameter in conv.parameters()}
    ones = conv.stride == conv.padding == conv.dilation == (1, 1) and conv.padding_mode == "zeros"
    return conv.weight.shape == shape and ones and conv.bias is not None and dtypes == {torch.float32}


def convolves(x: Tensor, conv: nn.Conv2d) -> bool:
    """Whether there is a kernel for this convolution: of bfloat16 frames that are a multiple of 16 pixels wide (8 for
    32 channels), with 16 or 32 channels before and after, on a processor with AVX-512 BF16 but without AMX."""
    if cpu_has("amx_bf16"):  # with it, oneDNN's convolutions are three times as fast as ours
        return False
    channels = {conv.in_channels, conv.out_channels}
    if x.dtype != torch.bfloat16 or not channels <= {16, 32} or not is_plain(conv) or not suits(x):
        return False
    return x.shape[3] % (8 if channels == {32} else 16) == 0 and hasattr(kernels(), "conv_forward_16_16")


class Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return conv(x, weight, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        return conv(dy, weight, transposed=True), *conv_backward(x, dy)


class ResidualBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight0: Tensor, bias0: Tensor, weight1: Tensor, bias1: Tensor) -> Tensor:
        h = conv(x, weight0, bias=bias0, relu=True)
        ctx.save_for_backward(x, h, weight0, weight1)
        return conv(h, weight1, bias=bias1, relu=True, residual=x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, ...]:
        x, h, weight0, weight1 = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dh = conv(dy, weight1, transposed=True, gate=h)
        dx = conv(dh, weight0, transposed=True, gate=x, residual=dy)
        return dx, *conv_backward(x, dh, relu=True), *conv_backward(h, dy, relu=True)


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
        dx = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
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
        sums = torch.zeros(torch.get_num_threads(), 28, channels, dtype=torch.float32, device=x.device)
        call("conv_pool_backward", dy.dtype, x, dy, taps, sums, shape=(len(x), channels, *x.shape[2:]))
        sums = sums.sum(0)
        return None, sums[:27].view(3, 3, 3, channels).permute(3, 2, 0, 1), sums[27]


def max_pool(x: Tensor, need_taps: bool = False) -> tuple[Tensor, Tensor | None]:
    """The pooled frames and, if asked for, where in each window the largest value was found (uint8)."""
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
    layout = {"device": x.device, "memory_format": torch.channels_last}
    y = torch.empty(shape, dtype=x.dtype, **layout)
    return y, torch.empty(shape, dtype=torch.uint8, **layout) if need_taps else None


def conv(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
    transposed: bool = False,
) -> Tensor:
    """Convolve `x`, or relu(x); of the sums and the bias, keep those where `gate` is positive, and add `residual`.

    With `transposed`, what a gradient with respect to the output becomes with respect to the input.
    """
    batch, channels, height, width = x.shape
    out_channels = weight.shape[1] if transposed else weight.shape[0]
    shape = batch, out_channels, height, width
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    bias = None if bias is None else bias.contiguous()
    arguments = x, weight.contiguous(), bias, gate, residual, y, int(relu), int(transposed)
    run(f"conv_forward_{channels}_{out_channels}", *arguments, sizes=(batch, height, width))
    return y


def conv_backward(x: Tensor, dy: Tensor, *, relu: bool = False) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias, float32, of a convolution of `x`, or relu(x)."""
    batch, channels, height, width = x.shape
    threads, out_channels = torch.get_num_threads(), dy.shape[1]
    sums = torch.empty(threads, 3, 3, channels, out_channels, dtype=torch.float32, device=x.device)
    bias = torch.empty(threads, out_channels, dtype=torch.float32, device=x.device)
    run(f"conv_backward_{channels}_{out_channels}", x, dy, sums, bias, int(relu), sizes=(batch, height, width))
    return sums.sum(0).permute(3, 2, 0, 1), bias.sum(0)


def call(name: str, dtype: torch.dtype, *tensors: Tensor | None, shape: tuple[int, ...]) -> None:
    """Run a kernel on frames of [B, C, H, W] = `shape`, for C as it is after a convolution."""
    batch, channels, height, width = shape
    run(f"{name}_{str(dtype).removeprefix('torch.')}", *tensors, sizes=(batch, height, width, channels))


def run(kernel: str, *arguments: Tensor | int | None, sizes: tuple[int, ...]) -> None:
    """Run a kernel on all of PyTorch's threads."""
    converted = [
        ctypes.c_int(argument)
        if isinstance(argument, int)
        else ctypes.c_void_p(None if argument is None else argument.data_ptr())
        for argument in arguments
    ]
    sizes = [ctypes.c_int64(size) for size in sizes]
    getattr(kernels(), kernel)(*converted, *sizes, ctypes.c_int(torch.get_num_threads()))


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
            library = Path(folder, "convolution.so")
            # OpenMP: of GCC's, PyTorch has loaded libgomp.so.1 already, and its threads are taken
            options = [
                "-std=c++17",
                "-O3",
                "-march=native",
                "-fopenmp",
                "-shared",
                "-fPIC",
                "-o",
                str(library),
                str(source),
            ]
            subprocess.run(compiler + options, check=True, capture_output=True, timeout=600)
            return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        reason = next(iter(output.splitlines()), error)
        print(f"note: convolution and max-pooling run PyTorch's slower kernels ({reason})", file=sys.stderr)
        return None
