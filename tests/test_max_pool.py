"""The CPU's max-pooling kernels against PyTorch's."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ppo
from common import max_pool
from common.max_pool import MaxPool2d

ROOT = Path(__file__).parent.parent
needs_compiler = pytest.mark.skipif(max_pool.kernels() is None, reason="no C++ compiler here")


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
    assert max_pool.kernels() is not None or not Path("/usr/bin/c++").exists()


@needs_compiler
@pytest.mark.parametrize("channels", [16, 32, 48])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (8, 8), (7, 9), (9, 6), (2, 2), (1, 1), (1, 5)])
def test_float32_equals_pytorch_bit_for_bit(channels, height, width):
    torch.manual_seed(0)
    x = frames(3, channels, height, width)
    dy = torch.randint(-8, 9, reference(x).shape).float()  # whole numbers: their sums do not depend on the order
    for ours, theirs in zip(pooled(MaxPool2d(), x, dy), pooled(reference, x, dy), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous(memory_format=torch.channels_last)


@needs_compiler
def test_bfloat16_sums_gradients_in_float32():
    torch.manual_seed(0)
    x = frames(4, 16, 64, 64, dtype=torch.bfloat16)
    dy = torch.randn(reference(x).shape).to(torch.bfloat16)
    y, dx = pooled(MaxPool2d(), x, dy)
    expected_y, expected_dx = pooled(reference, x.float(), dy.float())
    assert torch.equal(y, expected_y.to(torch.bfloat16))
    assert torch.equal(dx, expected_dx.to(torch.bfloat16))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinities(dtype):
    x = frames(2, 16, 8, 8, dtype=dtype)
    x[0, :, 2, 3], x[0, :, 5, 5], x[1, :, 0, 0], x[1, :, 7] = float("nan"), -float("nan"), float("inf"), -float("inf")
    dy = torch.ones(reference(x).shape, dtype=dtype)
    for ours, theirs in zip(pooled(MaxPool2d(), x, dy), pooled(reference, x, dy), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(9.0), theirs.nan_to_num(9.0))


@needs_compiler
def test_the_gradient_may_come_in_any_layout():
    x = frames(2, 16, 8, 8)
    dy = torch.randn(2, 16, 4, 4)
    assert not dy.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pooled(MaxPool2d(), x, dy)[1], pooled(reference, x, dy)[1])


@needs_compiler
def test_without_gradients_nothing_is_kept():
    x = frames(2, 16, 8, 8).requires_grad_()
    with torch.no_grad():
        y = MaxPool2d()(x)
    assert torch.equal(y, reference(x))
    assert y.grad_fn is None


@pytest.mark.parametrize(
    "x",
    [torch.randn(2, 16, 8, 8), frames(2, 12, 8, 8), frames(2, 16, 8, 8, dtype=torch.float64)],
    ids=["contiguous", "12 channels", "float64"],
)
def test_what_the_kernels_do_not_know_goes_to_pytorch(x, monkeypatch):
    monkeypatch.setattr(max_pool, "call", None)
    assert torch.equal(MaxPool2d()(x), reference(x))


@needs_compiler
def test_the_encoder_uses_the_kernels(monkeypatch):
    """Three times a pass, forward and backward: a layout or dtype that keeps it from them would cost speed unseen."""
    calls, call = [], max_pool.call
    monkeypatch.setattr(
        max_pool, "call", lambda name, *args, **kwargs: calls.append(name) or call(name, *args, **kwargs)
    )
    for precision in ("fp32", "bf16"):
        encoder = ppo.ImpalaCNN((64, 64, 3), 256, "xavier_uniform")
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            features = encoder(torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8))
        features.sum().backward()
    assert calls == (["forward"] * 3 + ["backward"] * 3) * 2


@needs_compiler
def test_a_window_of_negative_infinities_has_its_first_value_as_the_largest():
    x, dy = torch.full((1, 16, 5, 5), -torch.inf).contiguous(memory_format=torch.channels_last), torch.ones(1, 16, 3, 3)
    assert torch.equal(pooled(MaxPool2d(), x, dy)[1], pooled(reference, x, dy)[1])


def test_a_compiler_that_hangs_is_given_up(monkeypatch, capsys):
    def hang(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    assert max_pool.build.__wrapped__() is None
    assert "note: max-pooling runs PyTorch's slower kernels" in capsys.readouterr().err


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"], ids=["missing", "failing"])
def test_a_missing_compiler_is_said_once_and_changes_no_number(compiler):
    program = (
        "import torch; from common.max_pool import MaxPool2d\n"
        "x = torch.randn(2, 16, 8, 8).contiguous(memory_format=torch.channels_last)\n"
        "pool = MaxPool2d(); pool(x)\n"
        "assert torch.equal(pool(x), torch.nn.functional.max_pool2d(x, 3, 2, 1))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env={"CXX": compiler, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("note: max-pooling runs PyTorch's slower kernels") == 1
