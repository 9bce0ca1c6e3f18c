"""Triton kernels of 3x3 convolutions with few channels, in bfloat16 on a GPU: cuDNN's take up to seven times as long.
Images lie as [B, H, W, C], n = B H W pixels; weights as [9 C_in, C_out], by neighbour: for each of the nine, a product
of matrices is added up in float32. No kernel adds in an order that varies: results repeat bit for bit."""

import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

BLOCK, PROGRAMS = 128, 528  # pixels at a time; programs that share the pixels of a weight gradient


@triton.jit
def neighbours(x, pixel, channel, down, right, n, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    """x at each pixel's neighbour some rows `down` and columns `right`, [pixels, channels]; 0 outside of the image."""
    row, column = pixel[:, None] // W % H + down, pixel[:, None] % W + right
    inside = (pixel < n)[:, None] & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    return tl.load(x + (pixel[:, None] + down * W + right) * C + channel, mask=inside & (channel < C), other=0.0)


@triton.jit
def patches(x, pixel, n, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    """All nine neighbours of each pixel with their few channels, [pixels, 32]: 0 from 9 C on."""
    k = tl.arange(0, 32)[None, :]
    return neighbours(x, pixel, tl.where(k < 9 * C, k % C, C), k // C // 3 - 1, k // C % 3 - 1, n, H, W, C)


@triton.jit
def convolve_kernel(
    x, weight, bias, y, n, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    pixel, out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, OUT)[None, :]
    total = tl.zeros((BLOCK, OUT), tl.float32) + tl.load(bias + out)
    if C < 16:
        k = tl.arange(0, 32)[:, None]
        w = tl.load(weight + k * OUT + out, mask=k < 9 * C, other=0.0).to(x.dtype.element_ty)
        total = tl.dot(patches(x, pixel, n, H, W, C), w, total)
    else:
        channel = tl.arange(0, C)
        for k in tl.static_range(9):
            w = tl.load(weight + (k * C + channel[:, None]) * OUT + out).to(x.dtype.element_ty)
            total = tl.dot(neighbours(x, pixel, channel[None, :], k // 3 - 1, k % 3 - 1, n, H, W, C), w, total)
    tl.store(y + pixel[:, None] * OUT + out, total.to(y.dtype.element_ty), mask=(pixel < n)[:, None])


@triton.jit
def weight_gradient_kernel(
    x, dy, parts, n, steps, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The gradient from the pixels of one program; with 16 or 32 channels, of three neighbours in a row."""
    out, down = tl.arange(0, OUT)[None, :], tl.program_id(1) - 1
    channel = tl.arange(0, 32 if C < 16 else C)
    left = tl.zeros((32 if C < 16 else C, OUT), tl.float32)
    middle, right = left, left
    for step in range(steps):
        pixel = (tl.program_id(0).to(tl.int64) * steps + step) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(dy + pixel[:, None] * OUT + out, mask=(pixel < n)[:, None], other=0.0)
        if C < 16:
            left = tl.dot(tl.trans(patches(x, pixel, n, H, W, C)), g, left)
        else:
            left = tl.dot(tl.trans(neighbours(x, pixel, channel[None, :], down, -1, n, H, W, C)), g, left)
            middle = tl.dot(tl.trans(neighbours(x, pixel, channel[None, :], down, 0, n, H, W, C)), g, middle)
            right = tl.dot(tl.trans(neighbours(x, pixel, channel[None, :], down, 1, n, H, W, C)), g, right)
    at = parts + ((tl.program_id(0) * 9 + tl.program_id(1) * 3) * C + channel[:, None]) * OUT + out
    tl.store(at, left, mask=channel[:, None] < 9 * C)
    if C >= 16:
        tl.store(at + C * OUT, middle)
        tl.store(at + 2 * C * OUT, right)


@triton_op("procgen::convolve", mutates_args={})
def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [B, H, W, C_in], weight [9 C_in, C_out] and bias [C_out], float32 -> [B, H, W, C_out], of the dtype of x."""
    y = x.new_empty((*x.shape[:3], weight.shape[1]))
    n = x.shape[0] * x.shape[1] * x.shape[2]
    sizes = n, x.shape[1], x.shape[2], x.shape[3], weight.shape[1], BLOCK
    wrap_triton(convolve_kernel)[(triton.cdiv(n, BLOCK),)](x.contiguous(), weight.contiguous(), bias, y, *sizes)
    return y


@triton_op("procgen::weight_gradient", mutates_args={})
def weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient [9 C_in, C_out], float32, of the weight with which x became something with gradient dy."""
    n, channels = x.shape[0] * x.shape[1] * x.shape[2], x.shape[3]
    steps = triton.cdiv(n, BLOCK * PROGRAMS)
    programs = triton.cdiv(n, BLOCK * steps)
    parts = torch.empty((programs, 9 * channels, dy.shape[3]), dtype=torch.float32, device=x.device)
    sizes = n, steps, x.shape[1], x.shape[2], channels, dy.shape[3], BLOCK
    grid = programs, 1 if channels < 16 else 3
    wrap_triton(weight_gradient_kernel)[grid](x.contiguous(), dy.contiguous(), parts, *sizes)
    return parts.sum(0)


def save(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    dx = None
    if ctx.needs_input_grad[0]:  # the neighbour above of a pixel has it below
        weight = weight.unflatten(0, (9, -1)).flip(0).transpose(1, 2).flatten(0, 1)
        dx = convolve(dy, weight, weight.new_zeros(x.shape[3]))
    return dx, weight_gradient(x, dy), dy.sum((0, 1, 2), dtype=torch.float32)


convolve.register_autograd(backward, setup_context=save)


class Conv3x3(nn.Conv2d):
    """A convolution that runs by the kernels under autocast to bfloat16, and by cuDNN else."""

    @staticmethod
    def suits(conv: nn.Module) -> bool:
        plain = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "padding_mode": "zeros"}
        if type(conv) is not nn.Conv2d or conv.kernel_size != (3, 3) or conv.bias is None:
            return False
        known = (conv.in_channels <= 3 or conv.in_channels in (16, 32)) and conv.out_channels in (16, 32)
        return known and all(getattr(conv, name) == value for name, value in plain.items())

    def forward(self, x: Tensor) -> Tensor:
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
        if not autocast or (x.requires_grad and x.shape[1] < 16):
            return super().forward(x)
        weight = self.weight.permute(2, 3, 1, 0).flatten(0, 2)
        return convolve(x.bfloat16().permute(0, 2, 3, 1), weight, self.bias).permute(0, 3, 1, 2)
