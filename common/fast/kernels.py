"""Kernels for the convolutions, max-pooling and residual blocks of the IMPALA encoder: for a CPU in C++, for a GPU in
Triton (`common/fast/gpu_kernels.py`). PyTorch's leave much of the processor idle in convolutions of few channels. Each
ReLU, residual sum or max-pooling passes through the memory once more. `benchmarks/NOTES.md` has what ours gain."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

# OpenMP: of GCC's, PyTorch has loaded libgomp.so.1 already, and its threads are taken
OPTIONS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]


@functools.cache
def build() -> ctypes.CDLL | None:
    """The kernels, which `$CXX` or else `c++` compiles for this processor in seconds and the user's cache folder keeps;
    None, and a note on stderr, where that fails. Call this before there are threads: two would both compile."""
    compiler, source = os.environ.get("CXX", "").split() or ["c++"], Path(__file__).with_suffix(".cpp")
    try:
        kept = kept_library(compiler, OPTIONS, source)
        if kept is not None:
            with suppress(OSError):  # it is missing or damaged
                return read_library(kept)
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "kernels.so")
            command = [*compiler, *OPTIONS, "-o", library, source]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=60)
            if kept is not None:
                with suppress(OSError):  # the folder is read-only or full
                    write_library(kept, library.read_bytes())
                    return read_library(kept)  # as later runs do, even where a temporary folder forbids it
            return load_library(library)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        say_slower(error)
        return None


def kept_library(compiler: list[str], options: list[str], source: Path) -> Path | None:
    """Where the user's cache folder keeps what this compiler makes of `source` on this processor. None if the folder
    cannot be made, if other users could write to it, or if the compiler does not describe itself."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        parent = given if given.is_absolute() else Path.home() / ".cache"
        folder = parent / "ppo-ppg-impala"
        parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not is_private(folder.lstat()) or parent.stat().st_mode & 0o002:
            return None
        for place in parent.resolve().parents:
            if place.stat().st_mode & 0o1002 == 0o002:  # all may rename what is there; /tmp has the sticky bit
                return None
    except (OSError, RuntimeError):  # the latter: there is no home
        return None
    parts = [compiler, shutil.which(compiler[0]), options, source.read_bytes()]
    # Processors of several kinds may share a home folder. The macros that GCC and Clang predefine tell which processor
    # and which instructions "native" stands for.
    for question in (["--version"], [*options, "-E", "-dM", "-x", "c++", os.devnull]):
        answer = subprocess.run([*compiler, *question], capture_output=True, timeout=60)
        if answer.returncode != 0:
            return None
        parts.append(answer.stdout)
    return folder / f"kernels-{hashlib.sha256(repr(parts).encode()).hexdigest()}.so"


def is_private(status: os.stat_result) -> bool:
    """Whether this is a file or folder of the user's that nobody else may write to. Links count as writable."""
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def read_library(path: Path) -> ctypes.CDLL:
    """Load what `write_library` has written. Raises OSError if it is missing or damaged, or not private."""
    with path.open("rb") as file:
        private = is_private(os.fstat(file.fileno()))
        content = file.read()
    if not private or hashlib.sha256(content[:-32]).digest() != content[-32:]:
        raise OSError(f"{path} is damaged or not private")
    return load_library(path)


def load_library(path: Path) -> ctypes.CDLL:
    """Raises AttributeError for a library without the kernels: `$CXX` may be any program."""
    library = ctypes.CDLL(str(path))
    library.pool_forward_float32  # noqa: B018 (looks it up)
    return library


def write_library(path: Path, library: bytes) -> None:
    """Move a whole library and its hash into place, as loading a part of a library can kill the process."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        temporary = Path(folder, "kernels.so")
        temporary.touch(mode=0o600)  # private under any umask
        temporary.write_bytes(library + hashlib.sha256(library).digest())
        os.replace(temporary, path)


@functools.cache
def gpu() -> ModuleType | None:
    """The kernels for the current GPU; None, and a note on stderr, where Triton is missing or cannot compile them."""
    try:
        from common.fast import gpu_kernels

        x = torch.zeros(1, 16, 2, 2, device="cuda", dtype=torch.bfloat16)
        gpu_kernels.convolve_backward(x, x, relu=True)
    except Exception as error:  # of Triton's own kinds, or as it finds no C compiler
        say_slower(error)
        return None
    return gpu_kernels


def say_slower(error: Exception) -> None:
    reason = (getattr(error, "stderr", None) or str(error) or type(error).__name__).splitlines()[0]
    print(f"note: convolution and max-pooling run PyTorch's slower kernels ({reason})", file=sys.stderr)


def suits(x: Tensor) -> bool:
    """Whether kernels may run for frames `x` [B, C, H, W]: in channels-last layout, bfloat16, as autocast has it, or on
    a CPU float32. Not while PyTorch compiles, traces or transforms the code, nor with hooks for all modules."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or type(x) is not Tensor or not (x.is_cpu or x.is_cuda):
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return False
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    known = dtype == torch.bfloat16 or (dtype == torch.float32 and x.is_cpu)
    known = known and x.dtype == dtype and not torch.nn.modules.module._has_any_global_hook()
    there = known and x.is_contiguous(memory_format=torch.channels_last)
    return there and (build() if x.is_cpu else gpu()) is not None


def convolves(x: Tensor, weight: Tensor) -> bool:
    """Whether there is a kernel for this convolution. On a CPU: for 16 or 32 channels before and after, and frames with
    sides that are multiples of 4 pixels, on a processor that is faster with it. On a GPU: for bfloat16 frames with 16
    or 32 channels after and before, or up to 3 before if the frames need no gradient."""
    if not suits(x) or x.shape[1] != weight.shape[1]:
        return False
    if x.is_cuda:
        return len(weight) in (16, 32) and (x.shape[1] in (16, 32) or (x.shape[1] <= 3 and not x.requires_grad))
    known = {*weight.shape[:2]} <= {16, 32} and x.shape[2] % 4 == x.shape[3] % 4 == 0
    # Where Winograd's convolution has been measured to be faster than PyTorch's: benchmarks/NOTES.md has the table
    cpu = torch.cpu.get_capabilities()
    return known and bool(cpu.get("avx2")) and not (x.dtype == torch.bfloat16 and cpu.get("amx_bf16"))


def conv_max_pool(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`F.max_pool2d(F.conv2d(x, weight, bias, padding=1), 3, 2, 1)` by such kernels as there are, for float32 weights
    [K, C, 3, 3] with K a multiple of 16: [B, C, H, W] -> [B, K, ceil(H / 2), ceil(W / 2)], summed in float32."""
    rgb = x.is_cpu and suits(x) and x.shape[1] == weight.shape[1] == 3 and not x.requires_grad
    if rgb or (x.is_cpu and convolves(x, weight)):
        return MaxPoolFunction.apply(torch.is_grad_enabled(), x, weight, bias)
    y = ConvFunction.apply(x, weight, bias) if convolves(x, weight) else F.conv2d(x, weight, bias, padding=1)
    return MaxPoolFunction.apply(torch.is_grad_enabled(), y) if suits(y) else F.max_pool2d(y, 3, 2, 1)


class ConvFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return convolve(x, weight, bias)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        refuse_second_derivatives()
        x, weight = ctx.saved_tensors
        x, dy = channels_last(x, dy)
        dx = convolve(dy, weight) if ctx.needs_input_grad[0] else None
        return dx, *gpu().convolve_backward(x, dy, False)


class ResidualBlockFunction(torch.autograd.Function):
    """x + conv1(relu(conv0(relu(x)))) for C channels throughout, where `convolves`; the sum is rounded once."""

    @staticmethod
    def forward(ctx, x: Tensor, weight0: Tensor, bias0: Tensor, weight1: Tensor, bias1: Tensor) -> Tensor:
        if x.is_cuda:
            h = convolve(x, weight0, bias0, relu=True)
            y = convolve(h, weight1, bias1, residual=x, relu=True)
        else:
            (batch, channels, height, width), h, y = x.shape, torch.empty_like(x), torch.empty_like(x)
            filters = [each.contiguous() for each in (weight0, bias0, weight1, bias1)]
            call(f"residual_forward_{channels}_{x.dtype}", x, *filters, h, y, batch, height, width, channels)
        ctx.save_for_backward(x, h, weight0, weight1)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, ...]:
        refuse_second_derivatives()
        x, h, weight0, weight1 = ctx.saved_tensors
        x, h, dy = channels_last(x, h, dy)
        if x.is_cuda:
            dh = convolve(dy, weight1, gate=h)
            dx = convolve(dh, weight0, gate=x, residual=dy)
            return dx, *gpu().convolve_backward(x, dh, True), *gpu().convolve_backward(h, dy, True)
        (batch, channels, height, width), dx = x.shape, torch.empty_like(x)
        sums0, sums1 = new_sums(weight0), new_sums(weight1)
        given = x, h, dy, weight0.contiguous(), weight1.contiguous(), dx, *sums0, *sums1, batch, height, width, channels
        call(f"residual_backward_{channels}_{x.dtype}", *given)
        return dx, *filter_gradient(*sums0), *filter_gradient(*sums1)


class MaxPoolFunction(torch.autograd.Function):
    """Pools frames, or on a CPU their convolution with `filters`: weight and bias, rounded to the frames' dtype as
    autocast does. Where a window has its largest value twice, the first gets all of the gradient, as in PyTorch."""

    @staticmethod
    def forward(ctx, need_grad: bool, x: Tensor, *filters: Tensor) -> Tensor:
        batch, channels, height, width = ctx.shape = x.shape
        y = new_frames(x, len(filters[0]) if filters else channels, (height + 1) // 2, (width + 1) // 2)
        taps = torch.empty_like(y, dtype=torch.uint8) if need_grad else None  # where windows have their largest value
        if x.is_cuda:
            gpu().max_pool(x, y, taps)
        else:
            kernel = f"conv_pool_forward_{channels}" if filters else "pool_forward"
            given = x, *(each.contiguous() for each in filters), y, taps
            call(f"{kernel}_{x.dtype}", *given, batch, height, width, y.shape[1])
        ctx.save_for_backward(taps, *([x, filters[0]] if filters else []))
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        (taps, *convolved), (batch, channels, height, width) = ctx.saved_tensors, ctx.shape
        taps, dy = channels_last(taps, dy)
        dx = new_frames(dy, channels, height, width) if ctx.needs_input_grad[1] else None
        sizes = batch, height, width, dy.shape[1]
        if convolved:
            x, weight = convolved
            sums = new_sums(weight)
            given = *channels_last(x), weight.contiguous(), dy, taps, dx, *sums, *sizes
            call(f"conv_pool_backward_{channels}_{x.dtype}", *given)
            return None, dx, *filter_gradient(*sums)
        if dy.is_cuda:
            gpu().max_pool_backward(dy, taps, dx)
        else:
            call(f"pool_backward_{dy.dtype}", dy, taps, dx, *sizes)
        return None, dx


def refuse_second_derivatives() -> None:
    """Raise RuntimeError under `create_graph=True`, where our gradients would pass for constants."""
    if torch.is_grad_enabled():
        raise RuntimeError("the kernels have no second derivatives: leave out `accelerate`, where the agent is made")


def channels_last(*frames: Tensor) -> list[Tensor]:
    """These frames in the layout of the kernels: hooks, as of `save_on_cpu`, may give saved ones back in another."""
    return [x.contiguous(memory_format=torch.channels_last) for x in frames]


def new_frames(x: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Frames [B, channels, height, width] for a kernel to fill, as many as those of `x` and of their dtype."""
    return x.new_empty(len(x), height, width, channels).permute(0, 3, 1, 2)


def new_sums(weight: Tensor) -> tuple[Tensor, Tensor]:
    """What the gradients of weight [K, C, 3, 3] and bias add up to in each thread, float32, for a kernel to fill."""
    threads, (channels, out_channels) = torch.get_num_threads(), (weight.shape[1], len(weight))
    return weight.new_empty(threads, 3, 3, channels, out_channels), weight.new_empty(threads, out_channels)


def filter_gradient(sums: Tensor, bias_sums: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias from these."""
    return sums.sum(0).permute(3, 2, 0, 1), bias_sums.sum(0)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gate=None, residual=None, relu=False) -> Tensor:
    """Convolve `x`, or relu(x), on a GPU; of the sums and the bias, keep those where `gate` is positive, and add
    `residual`. Without a bias, turn the gradient of a convolution's output into that of its input."""
    y = new_frames(x, weight.shape[1] if bias is None else len(weight), *x.shape[2:])
    gpu().convolve(x, weight, bias, gate, residual, y, relu)
    return y


def call(kernel: str, *arguments: Tensor | int | None) -> None:
    """Run a kernel, by its C++ name, on all of PyTorch's threads."""
    values = [x.data_ptr() if isinstance(x, Tensor) else x for x in (*arguments, torch.get_num_threads())]
    # the kernels take 64-bit numbers only, so that a number is passed as a pointer is
    getattr(build(), kernel.replace("torch.", ""))(*map(ctypes.c_void_p, values))
