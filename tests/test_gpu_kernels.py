"""The Triton kernels against PyTorch's: on a CUDA GPU, or slowly on a CPU with Triton and TRITON_INTERPRET=1."""

import os

import pytest
import torch
import torch.nn.functional as F

DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and "TRITON_INTERPRET" not in os.environ, reason="no CUDA GPU here"),
]


@pytest.fixture
def kernels(monkeypatch):
    """In small pieces, so that frames take several."""
    pytest.importorskip("triton")
    from common.fast import gpu_kernels

    for name, value in {"PIXELS": 64, "NUMBERS": 256, "BACKWARD": {16: (64, 3), 32: (32, 2)}}.items():
        monkeypatch.setattr(gpu_kernels, name, value)
    return gpu_kernels


def frames(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE).contiguous(memory_format=torch.channels_last)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("sizes", [(3, 16, 9, 7), (1, 16, 8, 8), (16, 16, 8, 8), (16, 32, 8, 6), (32, 32, 5, 4)])
def test_convolutions(sizes, relu, kernels):
    torch.manual_seed(0)
    channels, out, height, width = sizes
    x, dy, residual, gate = (frames(3, c, height, width) for c in (channels, out, out, channels))
    gate = gate.relu()  # 0 is shut
    weight, bias = torch.randn(out, channels, 3, 3, device=DEVICE).to(DTYPE), torch.randn(out, device=DEVICE)
    inputs = [each.double().requires_grad_() for each in (x.relu() if relu else x, weight, bias)]
    expected = F.conv2d(*inputs, padding=1)
    dx, *gradients = torch.autograd.grad(expected, inputs, dy.double())
    y = frames(3, out, height, width)
    kernels.convolve(x, weight.float(), bias, None, residual, y, relu)
    assert error(y, expected.detach() + residual) < 4e-3
    for found, gradient in zip(kernels.convolve_backward(x, dy, relu), gradients, strict=True):
        assert error(found, gradient) < 1e-5
    if channels >= 16:
        found = frames(3, channels, height, width)
        kernels.convolve(dy, weight.float(), None, gate, x, found, False)
        assert error(found, dx * (gate > 0) + x) < 4e-3


@pytest.mark.parametrize("sizes", [(16, 8, 8), (32, 7, 9), (48, 1, 5), (16, 9, 6), (16, 2, 2)], ids=str)
def test_max_pooling(sizes, kernels):
    """Bit for bit as on a CPU, with ties, NaN and infinities. (PyTorch's kernel for GPUs drops the gradient of a window
    that is -inf throughout.)"""
    torch.manual_seed(0)
    x = frames(3, *sizes).round()
    if sizes[1] > 5:
        x[0, :, 2, 3], x[1, 0, 4:] = float("nan"), -float("inf")
    on_cpu = x.cpu().requires_grad_()
    expected = F.max_pool2d(on_cpu, 3, 2, 1)
    dy = frames(*expected.shape).round()
    y, dx, taps = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(dy, dtype=torch.uint8)
    kernels.max_pool(x, y, taps)
    kernels.max_pool_backward(dy, taps, dx)
    assert torch.equal(y.cpu().nan_to_num(77), expected.detach().nan_to_num(77))
    assert torch.equal(dx.cpu(), torch.autograd.grad(expected, on_cpu, dy.cpu())[0])
