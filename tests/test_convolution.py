"""The CPU's kernels for convolution and max-pooling against PyTorch's."""

import copy
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ppo
from common import convolution
from common.convolution import ConvMaxPool2d, MaxPool, residual_block
from common.device import cpu_has

ROOT = Path(__file__).parent.parent
needs_compiler = pytest.mark.skipif(convolution.kernels() is None, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def without_amx(monkeypatch):
    """Our kernels are tested on processors with AMX, too, where oneDNN's convolutions take their place."""
    monkeypatch.setattr(convolution, "cpu_has", lambda instructions: False)


def frames(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Few different values, so that windows have their largest one more than once."""
    x = torch.randint(-3, 4, shape).to(dtype)
    return x.contiguous(memory_format=torch.channels_last)


def pooled(pool, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = pool(x)
    y.backward(dy)
    return y.detach(), x.grad


def reference(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x, 3, stride=2, padding=1)


def test_a_compiler_is_there_where_the_tests_of_record_run():
    """Without one, all tests below would be skipped and the kernels untested."""
    assert convolution.kernels() is not None or not Path("/usr/bin/c++").exists()


@needs_compiler
@pytest.mark.parametrize("channels", [16, 32, 48])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (8, 8), (7, 9), (9, 6), (2, 2), (1, 1), (1, 5)])
def test_float32_equals_pytorch_bit_for_bit(channels, height, width):
    torch.manual_seed(0)
    x = frames(3, channels, height, width)
    dy = torch.randint(-8, 9, reference(x).shape).float()  # whole numbers: their sums do not depend on the order
    for ours, theirs in zip(pooled(MaxPool.apply, x, dy), pooled(reference, x, dy), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous(memory_format=torch.channels_last)


@needs_compiler
def test_bfloat16_sums_gradients_in_float32():
    torch.manual_seed(0)
    x = frames(4, 16, 64, 64, dtype=torch.bfloat16)
    dy = torch.randn(reference(x).shape).to(torch.bfloat16)
    y, dx = pooled(MaxPool.apply, x, dy)
    expected_y, expected_dx = pooled(reference, x.float(), dy.float())
    assert torch.equal(y, expected_y.to(torch.bfloat16))
    assert torch.equal(dx, expected_dx.to(torch.bfloat16))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinities(dtype):
    x = frames(2, 16, 8, 8, dtype=dtype)
    x[0, :, 2, 3], x[0, :, 5, 5], x[1, :, 0, 0], x[1, :, 7] = float("nan"), -float("nan"), float("inf"), -float("inf")
    dy = torch.ones(reference(x).shape, dtype=dtype)
    for ours, theirs in zip(pooled(MaxPool.apply, x, dy), pooled(reference, x, dy), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(9.0), theirs.nan_to_num(9.0))


@needs_compiler
def test_the_gradient_may_come_in_any_layout():
    x = frames(2, 16, 8, 8)
    dy = torch.randn(2, 16, 4, 4)
    assert not dy.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pooled(MaxPool.apply, x, dy)[1], pooled(reference, x, dy)[1])


def layers(channels: int = 16, dtype: torch.dtype = torch.float32) -> tuple[ConvMaxPool2d, nn.Module]:
    """A layer with a bias that matters, and PyTorch's two with the same weights as autocast would round them."""
    torch.manual_seed(1)
    ours = ConvMaxPool2d(3, channels)
    nn.init.normal_(ours.bias)
    conv = nn.Conv2d(3, channels, 3, padding=1)
    conv.load_state_dict({name: value.to(dtype).float() for name, value in ours.state_dict().items()})
    return ours, nn.Sequential(conv, nn.MaxPool2d(3, stride=2, padding=1))


def rgb(batch: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    frames = torch.randint(0, 256, (batch, height, width, 3), dtype=torch.uint8)
    return frames.permute(0, 3, 1, 2).to(dtype) / 255


@needs_compiler
@pytest.mark.parametrize("channels", [16, 32, 48])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (8, 8), (7, 9), (9, 6), (2, 2), (1, 1), (1, 5), (3, 17)])
def test_convolution_and_pooling_equal_pytorch(channels, height, width, monkeypatch):
    ours, theirs = layers(channels)
    x, calls, call = rgb(5, height, width), [], convolution.call
    monkeypatch.setattr(convolution, "call", lambda name, *a, **kw: calls.append(name) or call(name, *a, **kw))
    y, expected = ours(x), theirs.double()(x.double())
    assert y.dtype == torch.float32
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.double())
    for mine, other in ((ours.weight, theirs[0].weight), (ours.bias, theirs[0].bias)):
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-4, atol=1e-4)
    assert calls == ["conv_pool_forward", "conv_pool_backward"]
    with torch.no_grad():
        assert torch.equal(ours(x), y)


@needs_compiler
def test_bfloat16_convolutions_are_summed_in_float32_and_rounded_once():
    ours, theirs = layers(dtype=torch.bfloat16)
    x = rgb(6, 64, 64, torch.bfloat16)
    y, expected = ours(x), theirs.double()(x.double())
    assert y.dtype == torch.bfloat16
    error = (y.double() - expected).abs()
    assert (error <= expected.abs() * 2**-8 + 1e-6).all()  # half a unit in the last of 8 bits
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.double())
    for mine, other in ((ours.weight, theirs[0].weight), (ours.bias, theirs[0].bias)):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=0, atol=float(0.01 * other.grad.norm()))


@needs_compiler
def test_convolution_repeats_bit_for_bit():
    ours, _ = layers()
    x = rgb(33, 64, 64, torch.bfloat16)
    gradients = []
    for _ in range(3):
        ours.zero_grad()
        ours(x).square().mean().backward()
        gradients.append(ours.weight.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


@needs_compiler
def test_more_threads_than_frames(monkeypatch):
    ours, theirs = layers()
    x = rgb(2, 8, 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    y, expected = ours(x), theirs(x)
    y.sum().backward(), expected.sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(ours.weight.grad, theirs[0].weight.grad)


@needs_compiler
def test_without_gradients_nothing_is_kept():
    ours, _ = layers()
    for x in (rgb(2, 8, 8), rgb(2, 8, 8)[:, :2]):
        with torch.no_grad():
            y = (ours if x.shape[1] == 3 else ConvMaxPool2d(2, 16))(x)
        assert y.grad_fn is None


@needs_compiler
@pytest.mark.parametrize(
    ("x", "out_channels", "kernels"),
    [
        (rgb(2, 8, 8), 16, ["conv_pool_forward"]),
        (rgb(2, 8, 8).contiguous(), 16, []),  # PyTorch's convolution keeps that layout
        (rgb(2, 8, 8), 12, []),
        (rgb(2, 8, 8, torch.float64), 16, []),
        (rgb(2, 8, 8)[:, :1].contiguous(memory_format=torch.channels_last), 16, ["pool_forward"]),
        (rgb(2, 8, 8).requires_grad_(), 16, ["pool_forward"]),
    ],
    ids=["RGB", "contiguous", "12 channels", "float64", "grey", "needs a gradient"],
)
def test_which_kernels_run(x, out_channels, kernels, monkeypatch):
    layer = ConvMaxPool2d(x.shape[1], out_channels).to(x.dtype)
    called, call = [], convolution.call
    monkeypatch.setattr(convolution, "call", lambda name, *a, **kw: called.append(name) or call(name, *a, **kw))
    torch.testing.assert_close(layer(x), reference(nn.Conv2d.forward(layer, x)))
    assert called == kernels


needs_bf16 = pytest.mark.skipif(
    not hasattr(convolution.kernels(), "conv_forward_16_16"), reason="no compiler or no AVX-512 BF16 here"
)


def bf16_frames(batch: int, channels: int, height: int, width: int) -> torch.Tensor:
    x = torch.randn(batch, channels, height, width).to(torch.bfloat16)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


def convolutions(*channels: int) -> list[nn.Conv2d]:
    """Convolutions whose weights bfloat16 can hold, so that rounding them changes nothing; biases stay float32."""
    torch.manual_seed(2)
    layers = [nn.Conv2d(before, after, 3, padding=1) for before, after in itertools.pairwise(channels)]
    for layer in layers:
        layer.weight.data = layer.weight.data.bfloat16().float()
    return layers


def check_against_float64(ours, formula, x, layers):
    """Values and all gradients; each within what bfloat16's 8 bits leave of a few terms."""
    y = ours(x, *layers)
    dy = torch.randn(y.shape).to(torch.bfloat16)
    y.backward(dy)
    wide_x, wide_layers = x.detach().double().requires_grad_(), copy.deepcopy(layers)
    expected = formula(wide_x, *(layer.double() for layer in wide_layers))
    expected.backward(dy.double())
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert y.is_contiguous(memory_format=torch.channels_last)
    pairs = [(y, expected, 2**-8), (x.grad, wide_x.grad, 2**-7)]
    for layer, wide in zip(layers, wide_layers, strict=True):
        assert layer.weight.grad.dtype == torch.float32
        pairs += [(layer.weight.grad, wide.weight.grad, 2**-8), (layer.bias.grad, wide.bias.grad, 2**-8)]
    for mine, other, tolerance in pairs:
        scale = other.square().mean().sqrt()
        assert (mine.double() - other).square().mean().sqrt() < tolerance * scale
        assert (mine.double() - other).abs().max() < 8 * tolerance * scale + tolerance * other.abs().max()


def block_formula(x, conv0, conv1):
    return x + conv1(F.relu(conv0(F.relu(x))))


SIZES = [(16, 32, 32), (16, 3, 16), (16, 1, 48), (32, 16, 16), (32, 8, 8), (32, 9, 24), (32, 1, 8), (32, 17, 40)]


@needs_bf16
@pytest.mark.parametrize(("channels", "height", "width"), SIZES)
def test_residual_block(channels, height, width, monkeypatch):
    kernels, run = [], convolution.run
    monkeypatch.setattr(convolution, "run", lambda name, *a, **kw: kernels.append(name) or run(name, *a, **kw))
    layers = convolutions(channels, channels, channels)
    check_against_float64(residual_block, block_formula, bf16_frames(5, channels, height, width), layers)
    assert kernels == [f"conv_{way}_{channels}_{channels}" for way in ["forward"] * 4 + ["backward"] * 2]


@needs_bf16
@pytest.mark.parametrize(("before", "after", "height", "width"), [(16, 32, 32, 32), (32, 32, 16, 16), (32, 16, 5, 16)])
def test_convolution(before, after, height, width):
    def ours(x, conv):
        return convolution.Conv.apply(x, conv.weight, conv.bias)

    x = bf16_frames(5, before, height, width)
    check_against_float64(ours, lambda x, conv: conv(x), x, convolutions(before, after))


@needs_bf16
def test_gradients_stop_where_a_relu_is_zero():
    """Exactly: with weights of one tap, a block's gradients are sums of few small whole numbers."""
    conv0, conv1 = convolutions(16, 16, 16)
    for conv in (conv0, conv1):
        nn.init.zeros_(conv.bias)
        conv.weight.data = torch.zeros(16, 16, 3, 3)
        conv.weight.data[:, :, 0, 1] = torch.eye(16).flip(0)
    x = torch.randint(-2, 3, (3, 16, 6, 16)).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    other = x.detach().float().requires_grad_()
    y, expected = residual_block(x, conv0, conv1), block_formula(other, conv0, conv1)
    dy = torch.randint(-3, 4, y.shape).to(torch.bfloat16)
    y.backward(dy)
    mine = [conv.weight.grad.clone() for conv in (conv0, conv1)]
    conv0.zero_grad(), conv1.zero_grad()
    expected.backward(dy.float())
    assert torch.equal(y.float(), expected)
    assert torch.equal(x.grad.float(), other.grad)
    assert torch.equal(mine[0], conv0.weight.grad)
    assert torch.equal(mine[1], conv1.weight.grad)


@needs_bf16
def test_nan_goes_through_a_residual_block():
    x = bf16_frames(2, 16, 4, 16).detach()
    x[0, 3, 1, 1] = float("nan")
    x.view(torch.int16)[1, 0, 0, 0] = -1  # a NaN with a sign
    x.requires_grad_()
    y = residual_block(x, *convolutions(16, 16, 16))
    expected = block_formula(x.detach().float(), *convolutions(16, 16, 16))
    assert torch.equal(y.isnan(), expected.isnan())
    y.sum().backward()
    assert not x.grad.isnan().any()  # as in PyTorch: the gradients of a sum do not depend on where it is NaN


@needs_bf16
def test_residual_block_repeats_and_acts_as_it_trains(monkeypatch):
    layers, gradients, x = convolutions(32, 32, 32), [], bf16_frames(33, 32, 16, 16)
    for _ in range(2):
        x.grad = None
        y = residual_block(x, *layers)
        y.float().square().mean().backward()
        gradients.append([x.grad, *(layer.weight.grad for layer in layers)])
        for layer in layers:
            layer.weight.grad = None
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))
    with torch.no_grad():
        assert torch.equal(residual_block(x, *layers), y)
        assert torch.equal(residual_block(x[:2], *layers), y[:2])  # of any batch
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    residual_block(x[:2], *layers).float().square().mean().backward()
    assert layers[0].weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("x", "channels"),
    [
        (bf16_frames(2, 16, 8, 16).detach().float(), 16),
        (bf16_frames(2, 16, 8, 16).detach().contiguous(), 16),
        (bf16_frames(2, 16, 8, 8).detach(), 16),
        (bf16_frames(2, 32, 8, 12).detach(), 32),
        (bf16_frames(2, 48, 8, 16).detach(), 48),
    ],
    ids=["float32", "contiguous", "8 wide", "12 wide", "48 channels"],
)
def test_residual_blocks_without_kernels_are_pytorchs(x, channels, monkeypatch):
    monkeypatch.setattr(convolution, "run", None)
    layers = [layer.to(x.dtype) for layer in convolutions(channels, channels, channels)]
    assert torch.equal(residual_block(x, *layers), block_formula(x, *layers))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(16, 16, 3, padding=2, dilation=2),
        nn.Conv2d(16, 16, 1),
        nn.Conv2d(16, 16, 3, padding=1, groups=2),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"),
    ],
    ids=["dilated", "1x1", "grouped", "without bias", "circular"],
)
def test_other_convolutions_are_pytorchs(conv, monkeypatch):
    monkeypatch.setattr(convolution, "run", None)
    x = bf16_frames(2, 16, 8, 16).detach()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(residual_block(x, conv, conv), block_formula(x, conv, conv))


@needs_bf16
def test_a_bias_in_strides_and_another_default_dtype():
    x, layers = bf16_frames(2, 16, 8, 16), convolutions(16, 16, 16)
    layers[1].bias = nn.Parameter(torch.randn(32)[::2])
    torch.set_default_dtype(torch.float64)
    try:
        check_against_float64(residual_block, block_formula, x, layers)
    finally:
        torch.set_default_dtype(torch.float32)


@needs_bf16
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_encoder_uses_the_kernels(precision, monkeypatch):
    """A layout or dtype that keeps it from them would cost speed unseen."""
    kernels, run = [], convolution.run
    monkeypatch.setattr(convolution, "run", lambda name, *a, **kw: kernels.append(name) or run(name, *a, **kw))
    encoder = ppo.ImpalaCNN((64, 64, 3), 256, "xavier_uniform")
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        features = encoder(torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8))
    features.sum().backward()
    counts = Counter(name.removesuffix("_bfloat16").removesuffix("_float32") for name in kernels)
    expected = Counter({"conv_pool_forward": 1, "conv_pool_backward": 1, "pool_forward": 2, "pool_backward": 2})
    if precision == "bf16":  # four convolutions of 16 channels, one to 32, nine of 32; two of each in a backward pass
        expected |= Counter({"conv_forward_16_16": 8, "conv_forward_16_32": 1, "conv_forward_32_16": 1})
        expected |= Counter({"conv_forward_32_32": 18, "conv_backward_16_16": 4, "conv_backward_16_32": 1})
        expected |= Counter({"conv_backward_32_32": 9})
    assert counts == expected


@needs_bf16
def test_amx_is_left_to_pytorch(monkeypatch):
    """On a processor with AMX its bfloat16 convolutions are three times as fast as ours: see benchmarks/NOTES.md."""
    x, (conv,) = bf16_frames(2, 16, 8, 16), convolutions(16, 16)
    assert convolution.convolves(x, conv)
    monkeypatch.setattr(convolution, "cpu_has", lambda instructions: instructions == "amx_bf16")
    assert not convolution.convolves(x, conv)
    for amx in (True, False):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda amx=amx: {"amx_bf16": amx})
        assert cpu_has("amx_bf16") == amx


@needs_compiler
def test_a_window_of_negative_infinities_has_its_first_value_as_the_largest():
    x, dy = torch.full((1, 16, 5, 5), -torch.inf).contiguous(memory_format=torch.channels_last), torch.ones(1, 16, 3, 3)
    assert torch.equal(pooled(MaxPool.apply, x, dy)[1], pooled(reference, x, dy)[1])


def test_a_compiler_that_hangs_is_given_up(monkeypatch, capsys):
    def hang(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    assert convolution.build.__wrapped__() is None
    assert "note: convolution and max-pooling run PyTorch's slower kernels" in capsys.readouterr().err


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"], ids=["missing", "failing"])
def test_a_missing_compiler_is_said_once_and_changes_no_number(compiler):
    program = (
        "import torch; from common.convolution import ConvMaxPool2d\n"
        "x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)\n"
        "layer = ConvMaxPool2d(3, 16); layer(x)\n"
        "conv = torch.nn.functional.conv2d(x, layer.weight, layer.bias, padding=1)\n"
        "assert torch.equal(layer(x), torch.nn.functional.max_pool2d(conv, 3, 2, 1))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env={"CXX": compiler, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("note: convolution and max-pooling run PyTorch's slower kernels") == 1
