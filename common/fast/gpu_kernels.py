"""The kernels of `common/fast/kernels.py` for a GPU, in Triton: with 3 to 32 channels, cuDNN's leave most of it idle.
Frames are [B, C, H, W] in channels-last layout, of n = B H W pixels (n numbers where they are pooled). Products of
matrices are added up in float32, and always in the same order: results repeat bit for bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS, NUMBERS = 128, 1024  # of a program that convolves, and of one that pools
# Of a weight's gradient, by channels after the convolution: pixels of a program at a time, and programs that share all
BACKWARD = {16: (128, 528), 32: (64, 264)}


@triton.jit
def neighbours(
    x, pixel, channel, down, right, n, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, RELU: tl.constexpr
):
    """x, or relu(x), some rows `down` and columns `right` of each pixel, [pixels, channels]; 0 outside of the frame."""
    row, column = pixel[:, None] // W % H + down, pixel[:, None] % W + right
    inside = (pixel < n)[:, None] & (row >= 0) & (row < H) & (column >= 0) & (column < W) & (channel < C)
    values = tl.load(x + (pixel[:, None] + down * W + right) * C + channel, mask=inside, other=0.0)
    return tl.where(values < 0, tl.zeros_like(values), values) if RELU else values  # NaN stays


@triton.jit
def patches(x, pixel, n, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, RELU: tl.constexpr):
    """All nine neighbours of each pixel with their C <= 3 channels, [pixels, 32]: 0 from 9 C on."""
    k = tl.arange(0, 32)[None, :]
    return neighbours(x, pixel, tl.where(k < 9 * C, k % C, C), k // C // 3 - 1, k // C % 3 - 1, n, H, W, C, RELU)


@triton.jit
def convolve_kernel(
    x, weight, bias, gate, residual, y, n,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, RELU: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    pixel, out = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS), tl.arange(0, OUT)[None, :]
    total = tl.zeros((PIXELS, OUT), tl.float32)
    if C < 16:
        k = tl.arange(0, 32)[:, None]
        w = tl.load(weight + k * OUT + out, mask=k < 9 * C, other=0.0)
        total = tl.dot(patches(x, pixel, n, H, W, C, RELU), w, total)
    else:
        channel = tl.arange(0, C)
        for k in tl.static_range(9):
            w = tl.load(weight + (k * C + channel[:, None]) * OUT + out)
            total = tl.dot(neighbours(x, pixel, channel[None, :], k // 3 - 1, k % 3 - 1, n, H, W, C, RELU), w, total)
    at, inside = pixel[:, None] * OUT + out, (pixel < n)[:, None]
    if bias is not None:
        total += tl.load(bias + out)
    if gate is not None:
        total = tl.where(tl.load(gate + at, mask=inside, other=0.0) > 0, total, 0.0)
    if residual is not None:
        total += tl.load(residual + at, mask=inside, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def convolve_backward_kernel(
    x, dy, parts, n, steps,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, RELU: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """From the pixels of one program [9 C + 1, OUT]: the gradient of the weight, and in the last row of the bias. With
    16 or 32 channels there are three programs for the same pixels, each for three neighbours in a row."""
    out, down = tl.arange(0, OUT)[None, :], tl.program_id(1) - 1
    channel = tl.arange(0, 32 if C < 16 else C)
    left = tl.zeros((32 if C < 16 else C, OUT), tl.float32)
    middle, right, sums = left, left, tl.zeros((PIXELS, OUT), tl.float32)
    for step in range(steps):
        pixel = (tl.program_id(0).to(tl.int64) * steps + step) * PIXELS + tl.arange(0, PIXELS)
        g = tl.load(dy + pixel[:, None] * OUT + out, mask=(pixel < n)[:, None], other=0.0)
        sums += g
        if C < 16:
            left = tl.dot(tl.trans(patches(x, pixel, n, H, W, C, RELU)), g, left)
        else:
            left = tl.dot(tl.trans(neighbours(x, pixel, channel[None, :], down, -1, n, H, W, C, RELU)), g, left)
            middle = tl.dot(tl.trans(neighbours(x, pixel, channel[None, :], down, 0, n, H, W, C, RELU)), g, middle)
            right = tl.dot(tl.trans(neighbours(x, pixel, channel[None, :], down, 1, n, H, W, C, RELU)), g, right)
    parts += tl.program_id(0) * (9 * C + 1) * OUT
    at = parts + (tl.program_id(1) * 3 * C + channel[:, None]) * OUT + out
    tl.store(at, left, mask=channel[:, None] < 9 * C)
    if C >= 16:
        tl.store(at + C * OUT, middle)
        tl.store(at + 2 * C * OUT, right)
    if tl.program_id(1) == 0:
        tl.store(parts + 9 * C * OUT + tl.arange(0, OUT), tl.sum(sums, 0))


@triton.jit
def max_pool_kernel(
    x, y, taps, n, H: tl.constexpr, W: tl.constexpr, H_OUT: tl.constexpr, W_OUT: tl.constexpr, C: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    frame, row, column = at // (C * W_OUT * H_OUT), at // (C * W_OUT) % H_OUT, at // C % W_OUT
    largest, tap = tl.full((NUMBERS,), float("-inf"), tl.float32), tl.full((NUMBERS,), 9, tl.int32)
    for k in tl.static_range(9):
        i, j = 2 * row + k // 3 - 1, 2 * column + k % 3 - 1
        inside = (at < n) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        value = tl.load(x + ((frame * H + i) * W + j) * C + at % C, mask=inside, other=0.0).to(tl.float32)
        new = inside & ((tap == 9) | (value > largest) | (value != value))  # NaN is the largest
        largest, tap = tl.where(new, value, largest), tl.where(new, k, tap)
    tl.store(y + at, largest.to(y.dtype.element_ty), mask=at < n)
    if taps is not None:
        tl.store(taps + at, tap.to(tl.uint8), mask=at < n)


@triton.jit
def max_pool_backward_kernel(
    dy, taps, dx, n, H: tl.constexpr, W: tl.constexpr, H_OUT: tl.constexpr, W_OUT: tl.constexpr, C: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    frame, row, column = at // (C * W * H), at // (C * W) % H, at // C % W
    total = tl.zeros((NUMBERS,), tl.float32)
    for k in tl.static_range(4):  # windows that may contain the pixel
        i, j = (row + 1) // 2 - k // 2, (column + 1) // 2 - k % 2
        down, right = row + 1 - 2 * i, column + 1 - 2 * j
        inside = (at < n) & (down < 3) & (right < 3) & (i >= 0) & (i < H_OUT) & (j >= 0) & (j < W_OUT)
        window = ((frame * H_OUT + i) * W_OUT + j) * C + at % C
        tap = tl.load(taps + window, mask=inside, other=9)
        total += tl.where(tap == 3 * down + right, tl.load(dy + window, mask=inside, other=0.0), 0.0)
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=at < n)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, residual: Tensor | None, y: Tensor, relu: bool
) -> None:
    """Fill y, as `common.fast.kernels.convolve` does."""
    weight = weight.permute(2, 3, 1, 0) if bias is not None else weight.flip(2, 3).permute(2, 3, 0, 1)
    weight = x.new_empty(weight.shape).copy_(weight)  # [3, 3, C, OUT]
    n = x.numel() // x.shape[1]
    sizes = n, *x.shape[2:], x.shape[1], y.shape[1], relu, PIXELS
    convolve_kernel[(triton.cdiv(n, PIXELS),)](x, weight, bias, gate, residual, y, *sizes)


def convolve_backward(x: Tensor, dy: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias, float32, of a convolution of `x`, or relu(x), for frames with gradient `dy`."""
    channels, out, n = x.shape[1], dy.shape[1], x.numel() // x.shape[1]
    pixels, programs = BACKWARD[out]
    steps = triton.cdiv(n, pixels * programs)
    programs = triton.cdiv(n, pixels * steps)  # that have any
    parts = torch.empty(programs, 9 * channels + 1, out, device=x.device)
    grid = programs, 1 if channels < 16 else 3
    convolve_backward_kernel[grid](x, dy, parts, n, steps, *x.shape[2:], channels, out, relu, pixels)
    parts = parts.sum(0)
    return parts[:-1].view(3, 3, channels, out).permute(3, 2, 0, 1), parts[-1]


def max_pool(x: Tensor, y: Tensor, taps: Tensor | None) -> None:
    """Fill y with the largest of windows of x, and taps with where (0 to 8, row by row)."""
    sizes = y.numel(), *x.shape[2:], *y.shape[2:], x.shape[1], NUMBERS
    max_pool_kernel[(triton.cdiv(y.numel(), NUMBERS),)](x, y, taps, *sizes)


def max_pool_backward(dy: Tensor, taps: Tensor, dx: Tensor) -> None:
    sizes = dx.numel(), *dx.shape[2:], *dy.shape[2:], dy.shape[1], NUMBERS
    max_pool_backward_kernel[(triton.cdiv(dx.numel(), NUMBERS),)](dy, taps, dx, *sizes)
