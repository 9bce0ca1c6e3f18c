"""Modules of kernels take the place of just what they compute: networks as written against themselves, accelerated."""

import copy
import ctypes
import gc
import io
import random
import types
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize, spectral_norm

import ppo
from common import TrainingError, fast
from common.fast import accelerate, graphs, kernels, modules
from common.fast.graphs import Playback, Recorded, RecordedEncode, record_calls, with_aliases
from common.fast.memory import keep_freed_memory
from test_learning import CASES, SMALL, learn


class ResidualBlock(ppo.ResidualBlock):
    def __init__(self, channels=16):
        super().__init__(channels, "identity")


def impala_cnn():
    return ppo.ImpalaCNN((64, 64, 3), 8, "identity")


class Agent(nn.Module):
    """Any encoder, and a layer of another kind."""

    def __init__(self, *encoder):
        super().__init__()
        self.encoder = nn.Sequential(*encoder) if len(encoder) > 1 else encoder[0]
        self.head = nn.Linear(1, 1)

    def encode(self, encoder, obs):
        return encoder(obs)


def made(make, *arguments):
    """What `make` makes as it is and accelerated, with the same weights. Random numbers go on as if nothing had been
    accelerated."""
    torch.manual_seed(0)
    plain = make(*arguments)
    agent = Agent(copy.deepcopy(plain))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    accelerate(agent, "auto")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[2]) == before[1:]
    assert agent.encoder.state_dict().keys() == plain.state_dict().keys()
    assert all(map(torch.equal, agent.encoder.state_dict().values(), plain.state_dict().values()))
    return plain, agent.encoder


def images(channels=16, size=8):
    x = torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=torch.channels_last)


def results(network, x):
    """Outputs and all gradients, and what became of the input, which an operation in place changes."""
    random.seed(0), torch.manual_seed(0), np.random.seed(0)
    x = x.clone().requires_grad_()
    held = x.clone()
    y = network(held)
    network.zero_grad()
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return [y, held, x.grad, *(p.grad for p in network.parameters() if p.grad is not None)]


def check_equal(ours, theirs, x):
    for mine, other in zip(results(ours, x), results(theirs, x), strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


def block_formula(x, *filters):
    h = F.conv2d(F.relu(x), *filters[:2], padding=1)
    return x + F.conv2d(F.relu(h), *filters[2:], padding=1)


def pair_formula(x, weight, bias):
    return F.max_pool2d(F.conv2d(x, weight, bias, padding=1), 3, 2, 1)


@pytest.fixture
def ran(monkeypatch):
    """The kernels that have run but for trials, as if there were one for all: in their place PyTorch computes."""
    names, replace = [], fast.replace_modules

    def block(x, *filters):
        names.append(("block", *map(id, filters)))
        return block_formula(x, *filters)

    def conv_max_pool(x, *filters):
        names.append(("pair", *map(id, filters)))
        return pair_formula(x, *filters)

    monkeypatch.setattr(fast, "replace_modules", lambda agent: [replace(agent), names.clear()])
    monkeypatch.setattr(modules, "ResidualBlockFunction", type("Stand", (), {"apply": staticmethod(block)}))
    monkeypatch.setattr(modules, "conv_max_pool", conv_max_pool)
    monkeypatch.setattr(modules, "convolves", lambda x, weight: x.dtype == torch.float32)
    monkeypatch.setattr(kernels, "build", lambda: True)
    monkeypatch.setattr(modules, "build", lambda: True)
    return names


def kinds(ran):
    return [name for name, *_ in ran]


# ----------------------------------------------------------------------------------------------- the network as it is


@pytest.mark.skipif(kernels.build() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_network_runs_by_the_kernels_and_computes_the_same(precision, monkeypatch, capsys):
    """A layout or dtype that keeps it from them would cost speed unseen."""
    names, call = [], kernels.call
    monkeypatch.setattr(kernels, "cpu_has", lambda instructions: instructions == "avx2")  # no AMX, for one
    theirs, ours = made(impala_cnn)
    monkeypatch.setattr(kernels, "call", lambda name, *a: names.append(name.split("_torch")[0]) or call(name, *a))
    frames, found = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8), []
    for network, bf16 in ((copy.deepcopy(theirs), False), (theirs, precision == "bf16"), (ours, precision == "bf16")):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
            features = network(frames)
        features.sum().backward()
        assert features.dtype == (torch.bfloat16 if bf16 else torch.float32)
        found.append((features.float(), torch.cat([p.grad.flatten() for p in network.parameters()])))
    for exact, other, mine in zip(*found, strict=True):  # bfloat16 is that coarse in PyTorch's own kernels, too
        assert (mine - exact).norm() < 1.5 * (other - exact).norm() + 1e-5 * exact.norm()
        assert (other - exact).norm() < 0.1 * exact.norm()
    expected = Counter(f"conv_pool_{way}_{channels}" for way in ("forward", "backward") for channels in (3, 16, 32))
    expected |= Counter({"residual_forward_16": 2, "residual_forward_32": 4})
    expected |= Counter({"residual_backward_16": 2, "residual_backward_32": 4})
    assert Counter(names) == expected
    assert not capsys.readouterr().err


@CASES
def test_layout_and_kernels_change_nothing(script, settings, monkeypatch):
    """Channels-last frames with our kernels against contiguous ones with PyTorch's, in float32."""
    prepared = {"prepare": lambda agent: accelerate(agent, "eager")}
    ours, our_metrics = learn(script, SMALL, torch.float32, 1e-4, **prepared, **settings)
    monkeypatch.setattr(
        script.ImpalaCNN,
        "forward",
        lambda self, frames: self.layers((frames.permute(0, 3, 1, 2).float() / 255).contiguous()),
    )
    plain, plain_metrics = learn(script, SMALL, torch.float32, 1e-4, **settings)
    assert not torch.equal(ours, plain)
    assert (ours - plain).norm() < 1e-3 * plain.norm()
    assert our_metrics == pytest.approx(plain_metrics, rel=1e-3, abs=1e-5)


def test_formats_that_are_pytorchs(ran):
    """Inputs of another dtype than autocast's, and weights that became bfloat16."""
    theirs, ours = made(nn.Sequential, *impala_cnn().layers[:3])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(images(3)), theirs(images(3)))
        assert ours(images(3)).dtype == torch.bfloat16
    assert not ran
    check_equal(ours, theirs, images(3))
    assert kinds(ran) == ["pair", "block"]
    ran.clear()
    with torch.autocast("cpu", torch.bfloat16):
        x = images(3).bfloat16()
        assert torch.equal(ours.bfloat16()(x), theirs.bfloat16()(x))
    assert not ran


# ------------------------------------------------------------------------------------------------ blocks of all sorts


def same(block, x, f, g):
    return x + g(F.relu(f(F.relu(x))))


def edited(formula, **parts):
    """A class of blocks with a formula of the block, its input and its convolutions, and with more or other parts."""

    class Edited(ResidualBlock):
        def __init__(self):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part())

        def forward(self, x):
            return formula(self, x, self.conv0, self.conv1)

    return Edited


def conv(*arguments, **options):
    return lambda: nn.Conv2d(*arguments, **{"padding": 1} | options)


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, frames):
        hidden = self.first(frames.clone().relu_()).relu()
        return self.last(hidden).add_(frames)

    def width(self):
        return len(self.first.weight)


class Shared(ResidualBlock):
    def __init__(self):
        super().__init__()
        self.conv1 = self.conv0


class Scaled(ResidualBlock):
    scale = 1.0

    def forward(self, x):
        return x + self.scale * self.conv1(F.relu(self.conv0(F.relu(x))))


class Derived(ResidualBlock):
    def forward(self, x):
        return super().forward(x)


def with_zeros(block):
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    return block


@pytest.mark.parametrize("prepare", [lambda block: block, with_zeros], ids=["random", "zeros"])
@pytest.mark.parametrize("block", [ResidualBlock, Renamed, Shared, Derived, Scaled])
def test_blocks_that_compute_the_same_have_kernels(block, prepare, ran, capsys):
    theirs, ours = made(lambda: prepare(block()))
    check_equal(ours, theirs, images())
    assert kinds(ran) == ["block"]
    assert not capsys.readouterr().err
    if block is Renamed:
        assert torch.equal(ours(frames=images()), ours(images()))
        assert ours.width() == 16


class Standardised(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


class Method(ResidualBlock):
    def conv1(self, x):
        return self.conv0(x)


def add_in_place(block, x, f, g):
    x += g(F.relu(f(F.relu(x))))
    return x


def sometimes(draw):
    """Stochastic depth that hardly ever shows."""
    return edited(lambda s, x, f, g: x if draw() < 1e-9 else same(s, x, f, g))


def activated(act):
    return edited(lambda s, x, f, g: x + g(act(f(act(x)))))


def hooked(register):
    def make():
        block = ResidualBlock()
        getattr(block, register)(lambda *arguments: None)
        return block

    return make


def one():
    return nn.Parameter(torch.ones(()))


EDITS = {
    "BatchNorm": edited(lambda s, x, f, g: x + g(F.relu(s.norm(f(F.relu(x))))), norm=lambda: nn.BatchNorm2d(16)),
    "norm without parameters": edited(lambda s, x, f, g: x + g(F.relu(F.layer_norm(f(F.relu(x)), (8,))))),
    "GELU": activated(F.gelu),
    "nearly ReLU": activated(lambda x: F.leaky_relu(x, 1e-6)),
    "scaled ReLU": activated(lambda x: F.relu(x) * (1 + 1e-6)),
    "ReLU with another gradient at 0": activated(lambda x: torch.where(x < 0, 0, x)),
    "ReLU without NaN": activated(lambda x: F.relu(x).nan_to_num(posinf=torch.inf)),
    "bounded ReLU": activated(lambda x: torch.where(x > 100, 100, F.relu(x))),
    "no pre-activation": edited(lambda s, x, f, g: x + g(F.relu(f(x)))),
    "activation at the end": edited(lambda s, *given: F.relu(same(s, *given))),
    "gradients stop": edited(lambda s, x, f, g: x + g(F.relu(f(F.relu(x)).detach())) + 0 * f(x)),
    "no residual": edited(lambda s, x, f, g: g(F.relu(f(F.relu(x))))),
    "the first twice": edited(lambda s, x, f, g: same(s, x, f, f) + 0 * g(x)),
    "method for a module": type("Derived", (Method,), {"forward": ResidualBlock.forward}),
    "dropout": edited(lambda s, *given: F.dropout(same(s, *given), 0.5, s.training)),
    "another formula in evaluation": edited(lambda s, x, f, g: same(s, x, f, g) if s.training else x),
    "stochastic depth": sometimes(lambda: torch.rand(())),
    "random": sometimes(random.random),
    "NumPy's random": sometimes(np.random.rand),
    "in place": edited(add_in_place),
    "autocast": edited(torch.autocast("cpu", torch.bfloat16)(same)),
    "no autocast": edited(torch.autocast("cpu", enabled=False)(lambda s, x, f, g: same(s, x.float(), f, g))),
    "pooling": edited(same, conv0=lambda: nn.MaxPool2d(3, 1, 1)),
    "third convolution": edited(same, conv2=conv(16, 16, 3)),
    "parameter": edited(lambda s, x, f, g: x + s.gain * g(F.relu(f(F.relu(x)))), gain=one),
    "buffer": edited(lambda s, *given: same(s, *given) * s.count.add_(1), count=lambda: nn.Buffer(torch.zeros(()))),
    "attribute": edited(lambda s, x, f, g: x + s.scale * g(F.relu(f(F.relu(x)))), scale=lambda: 1),
    "standardised": edited(same, conv1=lambda: Standardised(16, 16, 3, padding=1)),
    "grouped": edited(same, conv0=conv(16, 16, 3, groups=2)),
    "without bias": edited(same, conv1=conv(16, 16, 3, bias=False)),
    "circular": edited(same, conv1=conv(16, 16, 3, padding_mode="circular")),
    "32 wide inside": edited(same, conv0=conv(16, 32, 3), conv1=conv(32, 16, 3)),
    "spectral_norm": edited(same, conv0=lambda: spectral_norm(nn.Conv2d(16, 16, 3, padding=1))),
    "spectral norm": edited(same, conv0=lambda: parametrizations.spectral_norm(nn.Conv2d(16, 16, 3, padding=1))),
    "hook": hooked("register_forward_hook"),
    "hook before": hooked("register_forward_pre_hook"),
    "hook in backward passes": hooked("register_full_backward_hook"),
}


@pytest.mark.parametrize("block", EDITS.values(), ids=EDITS.keys())
def test_edited_blocks_run_as_written(block, ran, capsys):
    theirs, ours = made(lambda: with_zeros(block()))  # which hide what it computes
    for parameter, other in zip(theirs.parameters(), ours.parameters(), strict=True):
        nn.init.normal_(parameter, std=0.1)
        other.data.copy_(parameter)
    check_equal(ours, theirs, images())
    check_equal(ours.eval(), theirs.eval(), images())
    assert not ran
    assert type(ours) is type(theirs)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: PyTorch's own kernels run encoder.")


@pytest.mark.parametrize("wrong", ["values", "gradients", "NaN", "dtype"])
def test_kernels_that_compute_something_else_are_not_used(wrong, ran, monkeypatch, capsys):
    """Compiled wrongly for this processor, say."""

    def spoilt(formula):
        def call(x, *filters):
            y = formula(x, *filters)
            spoil = {"values": lambda: 1.01 * y, "gradients": lambda: 1.01 * y - 0.01 * y.detach()}
            return (spoil | {"NaN": y.nan_to_num, "dtype": y.double})[wrong]()

        return call

    monkeypatch.setattr(modules.ResidualBlockFunction, "apply", staticmethod(spoilt(block_formula)))
    theirs, ours = made(ResidualBlock)
    check_equal(ours, theirs, images())
    monkeypatch.setattr(modules, "conv_max_pool", spoilt(pair_formula))
    theirs, ours = made(row(FIRST, POOL))
    check_equal(ours, theirs, images(3))
    assert capsys.readouterr().err.count("note: PyTorch's own kernels run encoder") == 2


# ------------------------------------------------------------------------------------------------ poolings of all sorts


class Other(nn.MaxPool2d):
    def forward(self, x):
        return super().forward(x) + 1


class Values(nn.Module):
    def forward(self, pooled):
        values, _ = pooled
        return values


class Row(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + 1


def row(*layers, kind=nn.Sequential):
    return lambda: kind(
        *(layer() if callable(layer) and not isinstance(layer, nn.Module) else layer for layer in layers)
    )


FIRST, POOL = conv(3, 16, 3), nn.MaxPool2d(3, 2, 1)
ROWS = {
    "pool 2, padded": row(FIRST, nn.MaxPool2d(2, 2, 1)),
    "pool without padding": row(FIRST, nn.MaxPool2d(3, 2)),
    "pool with stride 3": row(FIRST, nn.MaxPool2d(3, 3, 1)),
    "ceil_mode": row(FIRST, nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
    "return_indices": row(FIRST, nn.MaxPool2d(3, 2, 1, return_indices=True), Values()),
    "dilated pool": row(FIRST, nn.MaxPool2d(3, 2, 1, dilation=2)),
    "AvgPool": row(FIRST, nn.AvgPool2d(3, 2, 1)),
    "a class of pools": row(FIRST, Other(3, 2, 1)),
    "a layer between": row(FIRST, nn.ReLU(), POOL),
    "no pool": row(FIRST),
    "a class of rows": row(FIRST, POOL, kind=Row),
    "standardised": row(Standardised(3, 16, 3, padding=1), POOL),
    "stride 2": row(conv(3, 16, 3, stride=2), POOL),
    "dilated": row(conv(3, 16, 3, dilation=2), POOL),
    "without padding": row(conv(3, 16, 3, padding=0), POOL),
    "24 channels": row(conv(3, 24, 3), POOL),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_edited_poolings_run_as_written(row, ran, capsys):
    theirs, ours = made(row)
    check_equal(ours, theirs, images(3, 9))
    assert not ran
    assert capsys.readouterr().err.count("encoder.0") == 1


def test_a_row_that_ends_in_a_convolution(ran, capsys):
    theirs, ours = made(row(FIRST, POOL, conv(16, 16, 3)))
    check_equal(ours, theirs, images(3, 9))
    assert kinds(ran) == ["pair"]
    assert "run encoder.2:" in capsys.readouterr().err
    for part in (0, slice(1), slice(1, 3)):  # as a script may use it
        x = images(16 if part == slice(1, 3) else 3, 9)
        assert torch.equal(ours[part](x), theirs[part](x))


def test_a_module_in_two_places(ran):
    block = ResidualBlock()
    theirs, ours = made(nn.Sequential, block, nn.Sequential(nn.Tanh(), block))
    check_equal(ours, theirs, images())
    assert kinds(ran) == ["block", "block"]
    assert ours[0] is ours[1][1]


# ----------------------------------------------------------------------------------------- what comes after accelerate


network = row(FIRST, POOL, ResidualBlock, ResidualBlock)


@pytest.mark.parametrize(
    "register", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
@pytest.mark.parametrize(("place", "left"), [
    ("0", "block block"), ("1", "block block"), ("2.conv0", "pair block"), ("3.conv1", "pair block"),
])  # fmt: skip
def test_hooks_fire(place, left, register, ran):
    """Those from before, which keep the kernels away for good, and those from after, until they are removed."""
    calls = []
    plain = network()
    handle = getattr(plain.get_submodule(place), f"register_{register}")(lambda *_: calls.append("before"))
    agent = Agent(plain)
    accelerate(agent, "eager")
    results(agent.encoder, images(3, 16))
    assert calls == ["before"]
    assert kinds(ran) == left.split()
    handle.remove()
    theirs, ours = made(network)
    calls.clear()
    handle = getattr(ours.get_submodule(place), f"register_{register}")(lambda *_: calls.append("after"))
    check_equal(ours, theirs, images(3, 16))
    assert calls == ["after"]
    assert kinds(ran) == left.split()
    handle.remove()
    ran.clear()
    check_equal(ours, theirs, images(3, 16))
    assert kinds(ran) == ["pair", "block", "block"]


def test_hooks_for_all_modules_and_beside_the_kernels_fire(ran):
    _, ours = made(network)
    calls = []
    with torch.nn.modules.module.register_module_forward_hook(lambda layer, *_: calls.append(type(layer))):
        ours(images(3, 16))
    assert calls.count(nn.Conv2d) == 5
    assert not ran
    calls.clear()
    ours.register_forward_hook(lambda *_: calls.append("row"))
    ours[2].register_forward_hook(lambda *_: calls.append("block"))
    ours(images(3, 16))
    ours(images(3, 18).contiguous())  # which runs as it is written
    assert calls == ["block", "row"] * 2
    assert kinds(ran) == ["pair", "block", "block"]


CHANGES = {
    "spectral_norm": lambda block: spectral_norm(block.conv0),
    "spectral norm": lambda block: parametrizations.spectral_norm(block.conv1),
    "weight norm": lambda block: parametrizations.weight_norm(block.conv1),
    "weight norm and back": lambda block: [  # the weight comes after the bias then
        parametrizations.weight_norm(block.conv0),
        parametrize.remove_parametrizations(block.conv0, "weight"),
    ],
    "another forward": lambda block: setattr(block.conv1, "forward", lambda x: 2 * nn.Conv2d.forward(block.conv1, x)),
    "a block's forward": lambda block: setattr(block, "forward", lambda x: 2 * x + 0 * block.conv0(block.conv1(x))),
    "an attribute": lambda block: setattr(block, "scale", 0.5),
    "another convolution": lambda block: setattr(block, "conv1", conv(16, 16, 1, padding=0)()),
    "more in its place": lambda block: setattr(block, "conv1", nn.Sequential(conv(16, 16, 1, padding=0)(), nn.ReLU())),
    "float64": lambda block: block.to(torch.float64),
    "no bias": lambda block: setattr(block.conv0, "bias", None),
    "1x1 and 5x5": lambda block: [
        setattr(layer, "weight", nn.Parameter(torch.randn(16, 16, size, size)))
        for layer, size in ((block.conv0, 1), (block.conv1, 5))
    ],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changes_after_accelerate_count(change, ran):
    theirs, ours = made(Scaled)
    for block in (theirs, ours):
        torch.manual_seed(3)
        change(block)
    check_equal(ours, theirs, images().to(ours.conv0.weight.dtype))
    assert not ran


def test_what_pytorch_refuses_is_refused(ran):
    _, ours = made(ResidualBlock)
    with pytest.raises(TypeError, match="unexpected keyword"):
        ours(images(), scale=2)
    ours.conv1 = conv(16, 32, 3)()
    with pytest.raises(RuntimeError, match="must match"):
        ours(images())
    with pytest.raises(AttributeError, match="no attribute 'width'"):
        ours.width()
    assert not ran


def pickled(agent):
    buffer = io.BytesIO()
    torch.save(agent, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_have_their_own_weights_and_kernels(copied, ran, capsys):
    """Also of those that are accelerated again, which changes nothing."""
    theirs, ours = made(network)
    agent = copied(Agent(ours))
    accelerate(agent, "eager")
    other = agent.encoder
    assert [type(layer) for layer in other.modules()] == [type(layer) for layer in ours.modules()]
    assert not capsys.readouterr().err
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1e-2
    state = {name: value + 1e-2 for name, value in theirs.state_dict().items()}
    check_equal(ours, theirs, images(3, 16))
    owners = {id(parameter) for parameter in ours.parameters()}
    assert {name for _, *filters in ran for name in filters} == owners
    ran.clear()
    theirs.load_state_dict(state)
    check_equal(other, theirs, images(3, 16))
    assert kinds(ran) == ["pair", "block", "block"]
    assert {name for _, *filters in ran for name in filters}.isdisjoint(owners)
    ours.load_state_dict(state)  # and into accelerated ones
    check_equal(ours, theirs, images(3, 16))
    ran.clear()
    check_equal(other, theirs, images(3, 16).contiguous())  # which runs as it is written
    check_equal(other.eval().double(), theirs.double(), images(3, 16).double())
    assert not ran
    assert not any(layer.training or layer.written.training for layer in other[2:])


def test_what_pytorch_traces_compiles_or_transforms_holds_pytorchs_operations(ran):
    theirs, ours = made(network)
    x = images(3, 16)
    expected = theirs(x)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(ours, x, check_trace=False), buffer)
    buffer.seek(0)
    assert torch.equal(torch.jit.load(buffer)(x), expected)
    assert torch.equal(torch.fx.symbolic_trace(nn.Sequential(ours))(x), expected)
    assert torch.equal(torch.compile(ours, backend="aot_eager", fullgraph=True)(x), expected)
    assert torch.equal(make_fx(ours)(x)(x), expected)
    for strict in (False, True):
        program = torch.export.export(ours, (x,), strict=strict)
        assert torch.equal(program.module()(x), expected)
        assert program.state_dict.keys() == theirs.state_dict().keys()
    gradients = torch.func.grad(lambda each: torch.func.functional_call(ours, each, x).sum())
    expected.sum().backward()
    for name, found in gradients(dict(ours.named_parameters())).items():
        assert torch.equal(found, theirs.get_parameter(name).grad)
    assert not ran


# ------------------------------------------------------------------------------------------ the note, modes and devices


def test_the_note_names_what_has_no_kernel(ran, capsys):
    accelerate(Agent(conv(3, 24, 3)(), nn.MaxPool2d(3, 2, 1), ResidualBlock(48), ResidualBlock()), "eager")
    names = "encoder.0, encoder.2.conv0, encoder.2.conv1"
    assert capsys.readouterr().err == f"note: PyTorch's own kernels run {names}: ours cannot\n"


@pytest.mark.parametrize("kind", ["as it is", "no convolutions", "compiled", "no compiler", "not on a CPU"])
def test_no_note(kind, ran, monkeypatch, capsys):
    agent = Agent(impala_cnn() if kind == "as it is" else EDITS["GELU"]())
    if kind == "no convolutions":
        agent = Agent(nn.Linear(3, 3), nn.Tanh())
    if kind == "no compiler":
        monkeypatch.setattr(modules, "build", lambda: None)
    if kind == "not on a CPU":
        agent.to("meta")
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: None)
    accelerate(agent, "compile" if kind == "compiled" else "eager")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("mode", ["auto", "eager", "compile", "cudagraphs"])
def test_modes(mode, monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append((self, options)))
    agent = Agent(impala_cnn()).to("meta")
    agent.value_encoder, agent.mlp_encoder = impala_cnn().to("meta"), nn.Linear(1, 1)
    agent.other = impala_cnn().to("meta")
    classes = [type(layer) for layer in agent.modules()]
    accelerate(agent, mode)
    assert [type(layer) for layer in agent.modules()] == classes  # no kernels there
    encoders = [agent.encoder, agent.value_encoder] if mode == "compile" else []
    assert compiled == [(encoder, {"dynamic": False}) for encoder in encoders]


def test_calls_are_recorded_once():
    agent = Agent(nn.Linear(3, 3))
    agent.get_action = agent.forward
    for mode, kinds in (("compile", (Recorded, types.MethodType)), ("cudagraphs", (Recorded, RecordedEncode))):
        record_calls(agent, mode)
        before = agent.get_action, agent.encode
        assert tuple(map(type, before)) == kinds
        record_calls(agent, mode)
        assert agent.get_action is before[0]
        assert mode == "compile" or agent.encode is before[1]


def test_a_recorded_method_belongs_to_its_agent():
    """Calls with gradients and in evaluation run as they are, copies have their own, and nothing keeps an agent."""
    agent, x = nn.Linear(3, 3), torch.ones(2, 3)
    agent.step = Recorded(agent.forward, "cudagraphs")
    assert agent.step(x).requires_grad
    with torch.no_grad():
        assert torch.equal(agent.step(input=x), agent(x))
        assert torch.equal(agent.eval().step(x), agent(x))
    twin = copy.deepcopy(agent)
    assert twin.step.method().__self__ is twin
    gone = weakref.ref(twin)
    gc.disable()
    del twin
    gc.enable()
    assert gone() is None


def test_which_passes_of_an_encoder_are_recorded(monkeypatch):
    """Those with gradients and without hooks, of four shapes; those that are frozen, too, later on."""
    recorded = []
    busy = types.SimpleNamespace(pending=lambda: "a backward pass")  # not to be played back
    monkeypatch.setattr(graphs, "Recording", lambda method, *inputs: recorded.append(inputs) or busy)
    agent, x = Agent(nn.Linear(3, 3), nn.Linear(3, 2)), torch.ones(5, 3)
    encode = RecordedEncode(agent.encode)

    def records(obs=x):
        before = len(recorded)
        assert torch.equal(encode(agent.encoder, obs), agent.encoder(obs))
        return len(recorded) > before

    with torch.no_grad():
        assert not records()
    agent.encoder.eval()
    assert not records()
    agent.encoder.train()
    assert not records(x.clone().requires_grad_())
    hook = agent.encoder[0].register_forward_hook(lambda *arguments: None)
    assert not records()
    hook.remove()
    agent.encoder.requires_grad_(False)
    assert not records()
    agent.encoder[1].requires_grad_()
    assert [records(), records()] == [True, False]
    agent.encoder.requires_grad_()
    assert [records(x[:size]) for size in (5, 5, 4, 3, 2, 1)] == [True, False, True, True, False, False]
    assert recorded[0][0] is agent.encoder
    assert recorded[0][1] is x


def test_aliases_have_the_gradients_of_parameters_and_none_of_their_hooks():
    class OddAgent(Agent):
        def encode(self, encoder, obs):
            return self.head(encoder(obs).sum(-1, keepdim=True))

    agent, x = OddAgent(nn.Linear(3, 3), nn.Linear(3, 2)), torch.ones(5, 3)
    agent.unused = nn.Linear(2, 2)
    agent.encoder[0].requires_grad_(False)
    plain = copy.deepcopy(agent)
    agent.head.weight.register_hook(lambda gradient: pytest.fail("a hook ran"))
    encode, parameters, aliases = with_aliases(agent.encode, agent.encoder)
    assert list(map(id, parameters)) == [id(x) for x in agent.parameters() if x.requires_grad]
    for _ in range(2):
        found = torch.autograd.grad(encode(x).square().sum(), aliases, allow_unused=True)
        expected = [x for x in plain.parameters() if x.requires_grad][:4]
        expected = torch.autograd.grad(plain.encode(plain.encoder, x).square().sum(), expected)
        assert all(map(torch.equal, found, expected))
        assert found[4:] == (None, None)
        for each in (agent, plain):
            each.encoder[1].weight.data += 1  # in place


def test_a_playback_has_one_backward_pass():
    parameters, x = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))], torch.ones(2, 3)
    recording = types.SimpleNamespace(parameters=parameters, pending=lambda: None)
    recording.obs, recording.features, recording.gradient = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3)
    forward = types.SimpleNamespace(replay=lambda: recording.features.copy_(2 * recording.obs))

    def replay():
        recording.gradients = torch.cat([recording.gradient.flatten(), recording.gradient.sum(0)])

    recording.there, recording.back = forward, types.SimpleNamespace(replay=replay)
    features = Playback.apply(recording, x, *parameters)
    assert torch.equal(features, 2 * x)
    assert recording.pending() is not None
    (3 * features).sum().backward(retain_graph=True)
    assert recording.pending() is None
    assert [p.grad.tolist() for p in parameters] == [[[3.0] * 3] * 2, [6.0] * 3]
    with pytest.raises(TrainingError, match="one backward pass"):
        features.sum().backward()
    features = Playback.apply(recording, x, *parameters)
    assert recording.pending() is not None
    del features  # no backward pass comes
    assert recording.pending() is None


def test_an_encoder_that_does_not_compile_runs_as_it_is(monkeypatch):
    def fail(graph, inputs):
        raise RuntimeError("no such backend")

    theirs, _ = made(impala_cnn)
    agent = Agent(copy.deepcopy(theirs))
    compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compile(self, **options | {"backend": fail}))
    accelerate(agent, "compile")
    frames = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    torch.testing.assert_close(agent.encoder(frames), theirs(frames))


def test_a_c_library_without_mallopt_is_said(monkeypatch, capsys):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    keep_freed_memory()
    assert "mallopt" in capsys.readouterr().err
