"""The CPU's kernels for convolution, max-pooling and residual blocks against PyTorch's."""

import copy
import functools
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from common.fast import kernels
from common.fast.kernels import MaxPoolFunction, ResidualBlockFunction, conv_max_pool, convolves

max_pool = functools.partial(F.max_pool2d, kernel_size=3, stride=2, padding=1)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True, scope="module", params=["native", "8 lanes"])
def processor(request):
    """Convolutions are tested also on processors where PyTorch's take their place, and where vectors have 8 numbers,
    not 16; three threads share frames; and nothing depends on PyTorch's default dtype."""
    if kernels.build() is None:
        assert not Path("/usr/bin/c++").exists(), "the kernels would be untested"
        pytest.skip("no C++ compiler here")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "8 lanes":
            if not torch.cpu.get_capabilities().get("avx512_f"):
                pytest.skip("vectors have 8 lanes here anyway")
            patch.setattr(kernels, "OPTIONS", [*kernels.OPTIONS, "-mno-avx512f"])
            patch.setattr(kernels, "build", functools.cache(kernels.build.__wrapped__))
        patch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
        patch.setattr(torch, "get_num_threads", lambda: 3)
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def ran(monkeypatch) -> list[tuple]:
    """The names of the kernels that have run, and what they were given."""
    calls, call = [], kernels.call
    monkeypatch.setattr(kernels, "call", lambda *given: calls.append(given) or call(*given))
    return calls


def autocast(x: torch.Tensor) -> torch.autocast:
    """To the dtype of `x`: kernels run in the place of modules, and these would compute in another."""
    return torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.bfloat16, cache_enabled=False)


def frames(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Multiples of 1/8, so that a ReLU meets zeros and a window its largest value twice."""
    x = (8 * torch.randn(shape)).round() / 8
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def layers(*channels: int) -> list[nn.Conv2d]:
    """Convolutions with weights that bfloat16 can hold, so that rounding them changes nothing, and that lie in memory
    with strides."""
    torch.manual_seed(2)
    convs = [nn.Conv2d(*pair, 3, padding=1, dtype=torch.float32) for pair in itertools.pairwise(channels)]
    for conv in convs:
        weight, bias = (each.detach().bfloat16().float() for each in (conv.weight, conv.bias))
        conv.weight = nn.Parameter(weight.contiguous(memory_format=torch.channels_last))
        conv.bias = nn.Parameter(torch.stack([bias, bias], dim=1)[:, 0])
    return convs


def pair(x: torch.Tensor, conv: nn.Conv2d) -> torch.Tensor:
    with autocast(x):
        return conv_max_pool(x, conv.weight, conv.bias)


def pair_formula(x: torch.Tensor, conv: nn.Conv2d, dtype: torch.dtype) -> torch.Tensor:
    """But for RGB, convolved frames are rounded before the largest of a window is taken."""
    y = conv(x)
    rounded = y.to(dtype).double() if dtype == torch.bfloat16 and x.shape[1] > 3 else y
    return max_pool(y + (rounded - y).detach())


def block(x: torch.Tensor, *convs: nn.Conv2d) -> torch.Tensor:
    return ResidualBlockFunction.apply(x, *[each for conv in convs for each in (conv.weight, conv.bias)])


def block_formula(x: torch.Tensor, first: nn.Conv2d, second: nn.Conv2d, dtype: torch.dtype) -> torch.Tensor:
    return x + second(F.relu(first(F.relu(x))))


SIDES = (64, 64), (7, 9), (9, 6), (2, 2), (1, 1), (1, 5), (3, 17)


def test_second_derivatives_are_refused():
    """They would lack what comes through the kernels, as autograd.grad leaves out nodes that lead to no input."""
    convs, x = layers(16, 16, 16), frames(torch.float32, 2, 16, 8, 8)
    for y in (block(x, *convs), pair(x, convs[0]), MaxPoolFunction.apply(True, convs[0](x))):
        torch.autograd.grad(y.sum(), convs[0].weight, retain_graph=True)
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(y.square().sum(), convs[0].weight, create_graph=True)


def test_hooks_may_give_saved_frames_back_in_another_layout():
    convs, x = layers(16, 16, 16), frames(torch.float32, 2, 16, 8, 8)

    def gradients():
        ys = block(x, *convs), pair(x, convs[0]), MaxPoolFunction.apply(True, convs[0](x))
        return [torch.autograd.grad(y.square().sum(), convs[0].weight)[0] for y in ys]

    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        found = gradients()
    torch.testing.assert_close(found, gradients())


@both_dtypes
@pytest.mark.parametrize(("height", "width"), SIDES)
def test_max_pooling_equals_pytorchs_bit_for_bit(dtype, height, width):
    """With ties, NaN and infinities. Gradients are whole numbers, whose sums no order changes."""
    torch.manual_seed(0)
    x = frames(dtype, 3, 48, height, width)
    if height > 5:
        x[0, :, 2, 3], x[0, :, 5, 5], x[1, :, 0, 0] = float("nan"), -float("nan"), float("inf")
        x[1, :, 3:] = -float("inf")
    mine, theirs = (each.detach().requires_grad_() for each in (x, x.double()))
    y, expected = MaxPoolFunction.apply(True, mine), max_pool(theirs)
    dy = torch.randint(-8, 9, y.shape).to(dtype)
    y.backward(dy)
    expected.backward(dy.double())
    for found, other in ((y, expected), (mine.grad, theirs.grad)):
        torch.testing.assert_close(found, other.to(dtype), rtol=0, atol=0, equal_nan=True)
        assert found.is_contiguous(memory_format=torch.channels_last)


PAIRS = [(5, 3, out, *sides) for out, sides in zip((16, 32, 48, 16, 32, 16, 32), SIDES, strict=True)]
PAIRS += [(5, 16, 32, 16, 16), (9, 32, 32, 8, 8), (5, 32, 16, 4, 12), (2, 16, 16, 20, 8)]
BLOCKS = [(5, 16, 32, 32), (9, 32, 16, 16), (5, 32, 8, 8), (5, 16, 4, 4)]
BLOCKS += [(5, 16, 4, 200), (2, 32, 20, 12), (5, 32, 36, 20)]  # which fill no strip of tiles
KERNELS = [(pair, pair_formula, "conv_pool", (c, out), (b, c, h, w)) for b, c, out, h, w in PAIRS]
KERNELS += [(block, block_formula, "residual", (c, c, c), (b, c, h, w)) for b, c, h, w in BLOCKS]


@both_dtypes
@pytest.mark.parametrize(("kernel", "formula", "name", "channels", "shape"), KERNELS)
def test_kernels_are_exact(kernel, formula, name, channels, shape, dtype, ran):
    """Values and all gradients, to a few units in the last bit. They repeat, also for a part of the frames, without
    gradients, and where frames need none."""

    def results(function, x, convs, *more):
        """Values, and gradients: of the parameters, and of the frames if they need them."""
        y = function(x, *convs, *more)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(dtype).to(y.dtype)
        given = [each for conv in convs for each in (conv.weight, conv.bias)] + [x] * x.requires_grad
        found = y, *torch.autograd.grad(y, given, dy)
        assert [each.dtype for each in found] == [each.dtype for each in (x, *given)]
        return found

    convs, x = layers(*channels), frames(dtype, *shape)
    x.requires_grad_(shape[1] > 3)
    found = results(kernel, x, convs)
    assert [given[0] for given in ran] == [f"{name}_{way}_{shape[1]}_{dtype}" for way in ("forward", "backward")]
    wide_x, wide = x.detach().double().requires_grad_(x.requires_grad), [copy.deepcopy(conv).double() for conv in convs]
    for mine, other in zip(found, results(formula, wide_x, wide, dtype), strict=True):
        tolerance = 2**-8 if dtype == torch.bfloat16 else 2**-18
        scale = other.square().mean().sqrt()
        assert (mine.double() - other).square().mean().sqrt() < tolerance * scale
        assert (mine.double() - other).abs().max() < 8 * tolerance * scale + tolerance * other.abs().max()
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert all(map(torch.equal, found, results(kernel, x, convs)))
    assert all(map(torch.equal, found, results(kernel, x.detach(), convs)))  # which has no gradient for the frames
    with torch.no_grad():
        assert torch.equal(kernel(x, *convs), found[0])
        assert torch.equal(kernel(x[:2], *convs), found[0][:2])


@both_dtypes
def test_nan_goes_through_a_residual_block(dtype):
    """To all pixels of the tiles that it is in, which is further than in PyTorch."""
    x = frames(dtype, 2, 16, 4, 16)
    x[0, 3, 1, 1] = float("nan")
    x.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)[1, 0, 0, 0] = -1  # a NaN with a sign
    x.requires_grad_()
    y = block(x, *layers(16, 16, 16))
    assert y[block_formula(x.detach().float(), *layers(16, 16, 16), dtype).isnan()].isnan().all()
    y.sum().backward()
    assert not x.grad.isnan().any()  # as in PyTorch: the gradients of a sum do not depend on where it is NaN


RGB = frames(torch.float32, 2, 3, 8, 8)
INPUTS = {
    "RGB": (RGB, "conv_pool_forward_3_torch.float32"),
    "contiguous": (RGB.contiguous(), None),  # PyTorch's convolution keeps that layout
    "float64": (RGB.double(), None),
    "no frames": (RGB[:0], "conv_pool_forward_3_torch.float32"),
    "grey": (RGB[:, :1].contiguous(memory_format=torch.channels_last), "pool_forward_torch.float32"),
    "needs a gradient": (RGB.clone().requires_grad_(), "pool_forward_torch.float32"),
}


@pytest.mark.parametrize(("x", "expected"), INPUTS.values(), ids=INPUTS)
def test_which_kernels_run(x, expected, ran):
    """Where the largest values were is kept for gradients only."""
    conv = nn.Conv2d(x.shape[1], 16, 3, padding=1, dtype=x.dtype)
    torch.testing.assert_close(pair(x, conv), max_pool(conv(x)))
    with torch.no_grad():
        pair(x, conv)
    taps = [(name, given[-5] is None) for name, *given in ran]
    assert taps == ([(expected, False), (expected, True)] if expected else [])


@pytest.mark.parametrize(("channels", "height", "width", "expected"), [
    ((16, 32), 8, 16, True), ((32, 16), 4, 12, True), ((32, 32), 7, 8, False), ((32, 32), 8, 10, False),
    ((48, 48), 8, 16, False), ((16, 48), 8, 16, False),
])  # fmt: skip
def test_which_convolutions_have_kernels(channels, height, width, expected, monkeypatch):
    """On processors for which they have been found to be faster than PyTorch's."""
    (conv,) = layers(*channels)

    def found(*features: str) -> set[torch.dtype]:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(features, True))
        dtypes = set()
        for x in (frames(dtype, 2, channels[0], height, width) for dtype in (torch.float32, torch.bfloat16)):
            with autocast(x):
                dtypes |= {x.dtype} if convolves(x, conv.weight) else set()
                assert not convolves(x.contiguous(), conv.weight)
        return dtypes

    both = {torch.float32, torch.bfloat16} if expected else set()
    assert found() == set()
    assert found("avx2") == found("avx2", "avx512_f", "avx512_bf16") == both
    assert found("avx2", "avx512_f", "avx512_bf16", "amx_bf16") == both & {torch.float32}
