"""The CPU's kernels for convolution, max-pooling and residual blocks against PyTorch's."""

import copy
import functools
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from common.device import cpu_has
from common.fast import kernels
from common.fast.kernels import MaxPoolFunction, ResidualBlockFunction, conv_max_pool, convolves

build = kernels.build
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@functools.cache
def with_8_lanes():
    """The kernels as they are where vectors have 8 numbers, not 16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "OPTIONS", [*kernels.OPTIONS, "-mno-avx512f"])
        return build.__wrapped__()


@pytest.fixture(autouse=True, params=["native", "8 lanes"])
def processor(request, monkeypatch):
    """Convolutions are tested also on processors where PyTorch's take their place."""
    if kernels.build() is None:
        assert not Path("/usr/bin/c++").exists(), "the kernels would be untested"
        pytest.skip("no C++ compiler here")
    if request.param == "8 lanes":
        if not cpu_has("avx512_f"):
            pytest.skip("vectors have 8 lanes here anyway")
        monkeypatch.setattr(kernels, "build", with_8_lanes)
    monkeypatch.setattr(kernels, "cpu_has", lambda instructions: instructions == "avx2")


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """The names of the kernels that have run."""
    names, call = [], kernels.call
    monkeypatch.setattr(kernels, "call", lambda name, *a: names.append(name.replace("torch.", "")) or call(name, *a))
    return names


def autocast(x: torch.Tensor) -> torch.autocast:
    """To the dtype of `x`: kernels run in the place of modules, and these would compute in another."""
    return torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.bfloat16, cache_enabled=False)


# ------------------------------------------------------------------------------------------------------- max-pooling

SIDES = pytest.mark.parametrize(("height", "width"), [(64, 64), (7, 9), (9, 6), (2, 2), (1, 1), (1, 5), (3, 17)])


def frames(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Few different values, so that windows have their largest one more than once."""
    x = torch.randint(-3, 4, shape).to(dtype)
    return x.contiguous(memory_format=torch.channels_last)


def max_pool(x: torch.Tensor) -> torch.Tensor:
    return MaxPoolFunction.apply(True, x)


def reference(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x, 3, stride=2, padding=1)


def pooled(pool, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = pool(x)
    y.backward(dy)
    return y.detach(), x.grad


@both_dtypes
@pytest.mark.parametrize("channels", [16, 32, 48])
@SIDES
def test_max_pooling_equals_pytorchs_bit_for_bit(dtype, channels, height, width):
    """In bfloat16, gradients are summed in float32. In float32 whole numbers have sums that no order changes."""
    torch.manual_seed(0)
    x = frames(3, channels, height, width, dtype=dtype)
    dy = torch.randint(-8, 9, reference(x).shape) if dtype == torch.float32 else torch.randn(reference(x).shape)
    dy = dy.to(dtype)
    for ours, theirs in zip(pooled(max_pool, x, dy), pooled(reference, x.float(), dy.float()), strict=True):
        assert torch.equal(ours, theirs.to(dtype))
        assert ours.is_contiguous(memory_format=torch.channels_last)


@both_dtypes
def test_nan_and_infinities(dtype):
    x = frames(2, 16, 8, 8, dtype=dtype)
    x[0, :, 2, 3], x[0, :, 5, 5], x[1, :, 0, 0], x[1, :, 3:] = float("nan"), -float("nan"), float("inf"), -float("inf")
    dy = torch.ones(reference(x).shape, dtype=dtype)
    for ours, theirs in zip(pooled(max_pool, x, dy), pooled(reference, x, dy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------ convolution of RGB frames


def layers(channels: int = 16, dtype: torch.dtype = torch.float32) -> tuple[nn.Conv2d, nn.Module]:
    """A convolution with a bias that matters, and PyTorch's layers with its weights as autocast would round them."""
    torch.manual_seed(1)
    ours = nn.Conv2d(3, channels, 3, padding=1)
    nn.init.normal_(ours.bias)
    conv = copy.deepcopy(ours)
    conv.load_state_dict({name: value.to(dtype).float() for name, value in ours.state_dict().items()})
    return ours, nn.Sequential(conv, nn.MaxPool2d(3, stride=2, padding=1))


def run(x: torch.Tensor, conv: nn.Conv2d) -> torch.Tensor:
    with autocast(x):
        return conv_max_pool(x, conv.weight, conv.bias)


def rgb(batch: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    frames = torch.randint(0, 256, (batch, height, width, 3), dtype=torch.uint8)
    return frames.permute(0, 3, 1, 2).to(dtype) / 255


@both_dtypes
@pytest.mark.parametrize("channels", [16, 32, 48])
@SIDES
def test_convolution_and_pooling_of_rgb(dtype, channels, height, width, ran, monkeypatch):
    """Summed in float32, and rounded once: errors are at most half a unit in the last of 8 bits in bfloat16."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: {16: 1, 32: 3, 48: 7}[channels])  # for five frames
    ours, theirs = layers(channels, dtype)
    x = rgb(5, height, width, dtype)
    y, expected = run(x, ours), theirs.double()(x.double())
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    bits = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert ((y.double() - expected).abs() <= bits * expected.abs() + 1e-5).all()
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.double())
    for mine, other in ((ours.weight, theirs[0].weight), (ours.bias, theirs[0].bias)):
        assert mine.grad.dtype == torch.float32
        tolerance = 0.01 * other.grad.norm().item() if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-4, atol=tolerance)
    name = str(dtype).removeprefix("torch.")
    assert ran == [f"conv_pool_forward_3_{name}", f"conv_pool_backward_3_{name}"]
    again = torch.autograd.grad(run(x, ours), [ours.weight, ours.bias], dy)
    assert torch.equal(again[0], ours.weight.grad)
    assert torch.equal(again[1], ours.bias.grad)
    with torch.no_grad():
        assert torch.equal(run(x, ours), y)


RGB_KERNEL, POOL_KERNEL = ["conv_pool_forward_3_float32"], ["pool_forward_float32"]
INPUTS = {
    "RGB": (rgb(2, 8, 8), RGB_KERNEL),
    "contiguous": (rgb(2, 8, 8).contiguous(), []),  # PyTorch's convolution keeps that layout
    "float64": (rgb(2, 8, 8, torch.float64), []),
    "no frames": (rgb(0, 8, 8), RGB_KERNEL),
    "grey": (rgb(2, 8, 8)[:, :1].contiguous(memory_format=torch.channels_last), POOL_KERNEL),
    "needs a gradient": (rgb(2, 8, 8).requires_grad_(), POOL_KERNEL),
}


@pytest.mark.parametrize(("x", "expected"), INPUTS.values(), ids=INPUTS)
def test_which_kernels_run(x, expected, ran, monkeypatch):
    layer = nn.Conv2d(x.shape[1], 16, 3, padding=1).to(x.dtype)
    torch.testing.assert_close(run(x, layer), reference(layer(x)))
    assert ran == expected
    call, taps = kernels.call, []
    monkeypatch.setattr(kernels, "call", lambda name, *given: taps.append(given[-5]) or call(name, *given))
    assert run(x, layer).grad_fn is not None
    with torch.no_grad():  # then nothing is kept
        assert run(x, layer).grad_fn is None
    assert [each is None for each in taps] == [False, True][: 2 * len(expected)]


# ------------------------------------------------------------------------------------- convolutions and residual blocks


def random_frames(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()


def convolutions(*channels: int) -> list[nn.Conv2d]:
    """Convolutions whose weights bfloat16 can hold, so that rounding them changes nothing; biases stay float32."""
    torch.manual_seed(2)
    layers = [nn.Conv2d(before, after, 3, padding=1) for before, after in itertools.pairwise(channels)]
    for layer in layers:
        layer.weight.data = layer.weight.data.bfloat16().float()
    return layers


def pooled_convolution(x, conv):
    with autocast(x):
        assert convolves(x, conv.weight)
        return conv_max_pool(x, conv.weight, conv.bias)


def pooled_formula(x, conv):
    """Convolved frames are rounded before the largest of a window is taken."""
    y = conv(x)
    rounded = y.detach().bfloat16().double() if pooled_formula.dtype == torch.bfloat16 else y.detach()
    return reference(y + (rounded - y).detach())


def residual_block(x, conv0, conv1):
    with autocast(x):
        assert convolves(x, conv0.weight)
        assert convolves(x, conv1.weight)
    return ResidualBlockFunction.apply(x, conv0.weight, conv0.bias, conv1.weight, conv1.bias)


def block_formula(x, conv0, conv1):
    return x + conv1(F.relu(conv0(F.relu(x))))


def check_against_float64(ours, formula, x, layers):
    """Values and all gradients; each within what the 8 bits of bfloat16, or the 24 of float32, leave of a few terms."""
    y = ours(x, *layers)
    dy = torch.randn(y.shape).to(x.dtype)
    y.backward(dy)
    wide_x, wide_layers = x.detach().double().requires_grad_(), copy.deepcopy(layers)
    expected = formula(wide_x, *(layer.double() for layer in wide_layers))
    expected.backward(dy.double())
    assert y.dtype == x.grad.dtype == x.dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    bits = 2**-8 if x.dtype == torch.bfloat16 else 2**-18
    pairs = [(y, expected, bits), (x.grad, wide_x.grad, 2 * bits)]
    for layer, wide in zip(layers, wide_layers, strict=True):
        assert layer.weight.grad.dtype == torch.float32
        pairs += [(layer.weight.grad, wide.weight.grad, bits), (layer.bias.grad, wide.bias.grad, bits)]
    for mine, other, tolerance in pairs:
        scale = other.square().mean().sqrt()
        assert (mine.double() - other).square().mean().sqrt() < tolerance * scale
        assert (mine.double() - other).abs().max() < 8 * tolerance * scale + tolerance * other.abs().max()


SIZES = [(16, 32, 32), (32, 16, 16), (32, 8, 8), (16, 4, 4), (16, 4, 200), (32, 20, 12), (32, 36, 20)]


@both_dtypes
@pytest.mark.parametrize(("channels", "height", "width"), SIZES)  # the last three fill no strip of tiles
def test_residual_block(dtype, channels, height, width, ran):
    layers = convolutions(channels, channels, channels)
    check_against_float64(residual_block, block_formula, random_frames(dtype, 5, channels, height, width), layers)
    name = f"{channels}_{dtype}".replace("torch.", "")
    assert ran == [f"residual_forward_{name}", f"residual_backward_{name}"]


@both_dtypes
@pytest.mark.parametrize(
    ("before", "after", "height", "width"), [(16, 32, 16, 16), (32, 32, 8, 8), (32, 16, 4, 12), (16, 16, 20, 8)]
)
def test_convolution_and_pooling(dtype, before, after, height, width, ran, monkeypatch):
    """Few enough windows that in float32 none has its two largest values as near to each other as rounding errors."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # which share five frames unequally
    monkeypatch.setattr(pooled_formula, "dtype", dtype, raising=False)
    x = random_frames(dtype, 5, before, height, width)
    check_against_float64(pooled_convolution, pooled_formula, x, convolutions(before, after))
    name = f"{before}_{dtype}".replace("torch.", "")
    assert ran == [f"conv_pool_forward_{name}", f"conv_pool_backward_{name}"]
    y = pooled_convolution(x.detach(), *(layers := convolutions(before, after)))  # frames that need no gradient
    y.sum().backward()
    assert layers[0].weight.grad.isfinite().all()


@both_dtypes
def test_gradients_stop_where_a_relu_is_zero(dtype):
    """With weights of one tap a block's gradients are sums of few small numbers. A sum of 0 may be rounded to either
    side, so a bias keeps those of the first convolution away from it."""
    conv0, conv1 = convolutions(16, 16, 16)
    for conv in (conv0, conv1):
        nn.init.constant_(conv.bias, 0.5)
        conv.weight.data = torch.zeros(16, 16, 3, 3)
        conv.weight.data[:, :, 0, 1] = torch.eye(16).flip(0)
    x = torch.randint(-2, 3, (3, 16, 8, 16)).to(dtype).contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    other = x.detach().float().requires_grad_()
    y, expected = residual_block(x, conv0, conv1), block_formula(other, conv0, conv1)
    dy = torch.randint(-3, 4, y.shape).to(dtype)
    y.backward(dy)
    mine = [conv.weight.grad.clone() for conv in (conv0, conv1)]
    conv0.zero_grad(), conv1.zero_grad()
    expected.backward(dy.float())
    rounding = {"rtol": 1e-4, "atol": 1e-3}
    exact = {"rtol": 0, "atol": 1e-5} if dtype == torch.bfloat16 else rounding  # it rounds other errors away
    torch.testing.assert_close(y.float(), expected, **exact)
    torch.testing.assert_close(x.grad.float(), other.grad, **exact)
    torch.testing.assert_close(mine[0], conv0.weight.grad, **rounding)
    torch.testing.assert_close(mine[1], conv1.weight.grad, **rounding)


@both_dtypes
def test_nan_goes_through_a_residual_block(dtype):
    """To all pixels of the tiles that it is in, which is further than in PyTorch."""
    x = random_frames(dtype, 2, 16, 4, 16).detach()
    x[0, 3, 1, 1] = float("nan")
    x.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)[1, 0, 0, 0] = -1  # a NaN with a sign
    x.requires_grad_()
    y = residual_block(x, *convolutions(16, 16, 16))
    expected = block_formula(x.detach().float(), *convolutions(16, 16, 16)).isnan()
    assert torch.equal(y.isnan() & expected, expected)
    y.sum().backward()
    assert not x.grad.isnan().any()  # as in PyTorch: the gradients of a sum do not depend on where it is NaN


@both_dtypes
def test_residual_block_repeats_and_acts_as_it_trains(dtype, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    layers, gradients, x = convolutions(32, 32, 32), [], random_frames(dtype, 9, 32, 16, 16)
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
    residual_block(x[:2], *layers).float().square().mean().backward()
    assert layers[0].weight.grad.isfinite().all()


@both_dtypes
def test_parameters_in_strides_and_another_default_dtype(dtype):
    x, layers = random_frames(dtype, 2, 16, 8, 16), convolutions(16, 16, 16)
    layers[0].to(memory_format=torch.channels_last)
    layers[1].bias = nn.Parameter(torch.randn(32)[::2])
    torch.set_default_dtype(torch.float64)
    try:
        check_against_float64(residual_block, block_formula, x, layers)
    finally:
        torch.set_default_dtype(torch.float32)


CONVOLUTIONS = {
    "16": ((2, 16, 8, 16), (16, 16), True),
    "16 to 32": ((2, 16, 8, 16), (16, 32), True),
    "32": ((2, 32, 8, 8), (32, 32), True),
    "32 to 16": ((2, 32, 4, 12), (32, 16), True),
    "7 high": ((2, 32, 7, 8), (32, 32), False),
    "10 wide": ((2, 32, 8, 10), (32, 32), False),
    "48": ((2, 48, 8, 16), (48, 48), False),
    "other weights": ((2, 16, 8, 16), (32, 32), False),
}


@pytest.mark.parametrize(("shape", "channels", "expected"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_which_convolutions_have_kernels(shape, channels, expected, monkeypatch):
    """On processors for which they have been found to be faster than PyTorch's."""
    (conv,) = convolutions(*channels)

    def found(*features: str) -> set[torch.dtype]:
        monkeypatch.setattr(kernels, "cpu_has", lambda instructions: instructions in features)
        dtypes = set()
        for x in (random_frames(dtype, *shape) for dtype in (torch.float32, torch.bfloat16)):
            with autocast(x):
                dtypes |= {x.dtype} if convolves(x, conv.weight) else set()
                assert not convolves(x.contiguous(), conv.weight)
        return dtypes

    both = {torch.float32, torch.bfloat16} if expected else set()
    assert found() == set()
    assert found("avx2") == found("avx2", "avx512_f") == found("avx2", "avx512_f", "avx512_bf16") == both
    assert found("avx2", "avx512_f", "avx512_bf16", "amx_bf16") == both & {torch.float32}


def test_what_the_processor_has(monkeypatch):
    monkeypatch.undo()
    for amx in (True, False):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda amx=amx: {"amx_bf16": amx})
        assert cpu_has("amx_bf16") == amx
