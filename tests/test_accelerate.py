"""Modules of kernels take the place of just what they compute: networks as written against themselves, accelerated."""

import copy
import functools
import pickle
import random
import types
import weakref

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations

import ppo
from common import InputError, TrainingError, fast
from common.fast import accelerate, graphs, kernels, modules
from common.fast.graphs import Playback, Recorded, RecordedEncode, record_calls, with_aliases


class Agent(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(1, 1)

    def encode(self, encoder, obs):
        return self.head(encoder(obs).sum(-1, keepdim=True))


ResidualBlock = functools.partial(ppo.ResidualBlock, 16, "identity")
impala_cnn = functools.partial(ppo.ImpalaCNN, (64, 64, 3), 8, "identity")


def made(make):
    """What `make` makes, as it is and accelerated. Names, weights and the state of random generators are the same."""
    torch.manual_seed(0)
    plain = make()
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)  # which hides what a module computes
    agent = Agent(copy.deepcopy(plain))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    accelerate(agent, "auto")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[2]) == before[1:]
    torch.testing.assert_close(agent.encoder.state_dict(), plain.state_dict(), rtol=0, atol=0)
    for parameter, twin in zip(plain.parameters(), agent.encoder.parameters(), strict=True):
        nn.init.normal_(parameter, std=0.1)
        twin.data.copy_(parameter)
    return plain, agent.encoder


def images(channels=3):
    x = torch.randn(2, channels, 16, 16, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=torch.channels_last)


def results(network, x):
    """Outputs and all gradients, and what became of the input, which an operation in place changes."""
    x = x.clone().requires_grad_()
    held = x.clone()
    y = network(held)
    network.zero_grad()
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return [y, held, x.grad, *(p.grad for p in network.parameters() if p.grad is not None)]


def check_equal(ours, theirs, x):
    torch.testing.assert_close(results(ours, x), results(theirs, x), rtol=0, atol=0, equal_nan=True)


def use_kernels(monkeypatch, change):
    """PyTorch computes in the place of kernels, as if there were one for all. `change` gets their results."""

    def block(x, weight0, bias0, weight1, bias1):
        h = F.relu(F.conv2d(F.relu(x), weight0, bias0, padding=1))
        return change("block", x + F.conv2d(h, weight1, bias1, padding=1))

    def pair(x, weight, bias):
        return change("pair", F.max_pool2d(F.conv2d(x, weight, bias, padding=1), 3, 2, 1))

    monkeypatch.setattr(modules, "ResidualBlockFunction", types.SimpleNamespace(apply=block))
    monkeypatch.setattr(modules, "conv_max_pool", pair)
    monkeypatch.setattr(modules, "convolves", lambda x, weight: x.dtype == torch.float32)
    for module in (kernels, modules):
        monkeypatch.setattr(module, "build", lambda: True)


@pytest.fixture
def ran(monkeypatch):
    """The kernels that have run but for trials."""
    names, prepare = [], fast.use_kernels
    monkeypatch.setattr(fast, "use_kernels", lambda agent: [prepare(agent), names.clear()])
    use_kernels(monkeypatch, lambda name, y: names.append(name) or y)
    return names


def taken(network):
    """How many modules the kernels run."""
    return sum(isinstance(layer, modules.FastSequential | modules.FastBlock) for layer in network.modules())


def check_ran(ran, expected):
    assert " ".join(ran) == expected
    ran.clear()


@pytest.mark.skipif(kernels.build() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_network_runs_by_the_kernels_and_computes_the_same(precision, monkeypatch):
    """A layout or dtype that keeps it from them would cost speed unseen."""
    names, call, bf16 = [], kernels.call, precision == "bf16"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})  # no AMX, for one
    theirs, ours = made(impala_cnn)
    monkeypatch.setattr(kernels, "call", lambda name, *a: names.append(name.split("_torch")[0]) or call(name, *a))
    frames, found = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8), []
    for network, enabled in ((theirs, False), (ours, bf16)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False):
            features = network(frames)
        features.sum().backward()
        found.append((features.float(), torch.cat([p.grad.flatten() for p in network.parameters()])))
    assert features.dtype == (torch.bfloat16 if bf16 else torch.float32)
    for exact, mine in zip(*found, strict=True):
        assert (mine - exact).norm() < (0.1 if bf16 else 1e-5) * exact.norm()
    assert len(names) == 18  # three pairs and six blocks, forward and backward
    assert len(set(names)) == 10  # for 3, 16 and 32 channels, and for 16 and 32


FORMULA = "x + self.conv1(relu(self.conv0(relu(x))))"


def coded(returned=FORMULA, first="", given="", names=(), **parts):
    """A class of blocks by the code of its `forward`, with more or other globals and parts."""

    class Coded(ppo.ResidualBlock):
        def __init__(self):
            super().__init__(16, "identity")
            for name, part in parts.items():
                setattr(self, name, part())

    space = {"F": F, "torch": torch, "random": random, "np": np, "relu": F.relu, "seen": []} | dict(names)
    exec(f"def forward(self, x{given}):\n  {first}\n  return {returned}", space)
    Coded.forward = space["forward"]
    return Coded


def closed(relu):
    class Closed(ppo.ResidualBlock):
        def forward(self, x):
            return x + self.conv1(relu(self.conv0(relu(x))))

    return Closed(16, "identity")


class Method(coded(FORMULA.replace("relu", "self.relu"))):
    def relu(self, x):
        return F.relu(x)


class Built(ppo.ResidualBlock):
    forward = staticmethod(torch.relu)


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, frames):
        hidden = self.first(frames.clone().relu_()).relu()
        return self.last(hidden).add_(frames)

    def width(self):
        return len(self.first.weight)


def tied(block):
    block.last.weight, block.last.bias = block.first.weight, block.first.bias
    return block


def other(kind):
    """A class that computes something else."""

    class Other(kind):
        def forward(self, x):
            return super().forward(x) + 1

    return Other


def conv(channels=16, out=16, kind=nn.Conv2d, **options):
    return lambda: kind(channels, out, **{"kernel_size": 3, "padding": 1} | options)


def pool(kind=nn.MaxPool2d, **options):
    return lambda: kind(**{"kernel_size": 3, "stride": 2, "padding": 1} | options)


def row(*layers, kind=nn.Sequential):
    return lambda: kind(*(layer() for layer in layers))


HOOKS = {  # each doubles something
    "forward_pre_hook": lambda layer, given: (2 * given[0],),
    "forward_hook": lambda layer, given, result: 2 * result,
    "full_backward_pre_hook": lambda layer, gradients: (2 * gradients[0],),
    "full_backward_hook": lambda layer, gradients, given: (2 * gradients[0],),
}


def hooked(module, register):
    getattr(module, f"register_{register}")(HOOKS[register])
    return module


def looked_at(module):
    module.register_forward_hook(lambda *given: None)
    return module


LOOK_ALIKES = {  # what to make, and which kernels run it
    "in two places": (lambda: nn.Sequential(*2 * [ResidualBlock()]), "block block"),
    "a look-alike, and names in another order": (
        row(ResidualBlock, coded(FORMULA.replace("relu", "F.gelu")), Renamed),
        "block block",
    ),
    "the same code": (coded(), "block"),
    "tied weights, then others": (row(lambda: tied(Renamed()), Renamed), "block block"),
    "no Python code": (lambda: Built(16, "identity"), ""),
    "ReLU by other names": (coded("x.clone().add(self.conv1(torch.relu(self.conv0(x.relu()))))"), "block"),
    "nearly ReLU": (coded("x + self.conv1(relu(self.conv0(relu(x))) * (1 + 1e-6))"), ""),
    "ReLU without NaN": (coded("x + self.conv1(relu(self.conv0(relu(x))).nan_to_num(posinf=torch.inf))"), ""),
    "ReLU of the input": (coded("x.relu_() + self.conv1(relu(self.conv0(x)))"), ""),
    "one ReLU": (coded("x + self.conv1(relu(self.conv0(x)))"), ""),
    "gradients stop": (coded("x + self.conv1(relu(self.conv0(relu(x))).detach()) + 0 * self.conv0(x)"), ""),
    "only in training": (coded(f"{FORMULA} if self.training else x"), ""),
    "PyTorch's random numbers": (coded(f"{FORMULA} + 0 * torch.rand(())"), ""),
    "Python's random numbers": (coded(f"{FORMULA} + 0 * random.random()"), ""),
    "NumPy's random numbers": (coded(f"{FORMULA} + 0 * np.random.rand()"), ""),
    "in place": (coded("x.add_(self.conv1(relu(self.conv0(relu(x)))))"), ""),
    "no autocast": (coded(first=f"with torch.autocast('cpu', enabled=False): return {FORMULA}"), ""),
    "normalised": (coded(f"self.norm({FORMULA})", norm=lambda: nn.BatchNorm2d(16)), ""),
    "a parameter": (coded(gain=lambda: nn.Parameter(torch.ones(()))), ""),
    "an attribute": (coded(f"({FORMULA}) * self.gain", gain=lambda: 1), ""),
    "an attribute that the code does not name": (coded(gain=lambda: 1), ""),
    "records an attribute": (coded(first="self.dormant = x"), ""),
    "records an attribute called relu": (coded(first="self.relu = x"), ""),
    "records in a list": (coded(first="seen.append(x)"), ""),
    "a helper called relu": (coded(names={"relu": lambda x: F.relu(x)}), ""),
    "a method called relu": (Method, ""),
    "a function within": (coded(first="def relu(y): return F.relu(y)"), ""),
    "a default": (coded(given=", relu=F.relu"), ""),
    "a closure": (lambda: closed(F.relu), ""),
    "another class of convolutions": (coded(conv1=conv(kind=other(nn.Conv2d))), ""),
    "32 wide inside": (coded(conv0=conv(16, 32), conv1=conv(32, 16)), ""),
    "a hook that only looks": (lambda: looked_at(ResidualBlock()), ""),
    "a hook": (lambda: hooked(ResidualBlock(), "forward_hook"), ""),
    "pair of grey frames": (row(conv(1), pool()), "pair"),
    "pair with 24 channels": (row(conv(3, 24), pool()), ""),
    "another class of pools": (row(conv(3), pool(other(nn.MaxPool2d))), ""),
    "another class of rows": (row(conv(3), pool(), kind=other(nn.Sequential)), ""),
}
for name, value in {"stride": 2, "padding": 0, "dilation": 2, "padding_mode": "circular", "bias": False}.items():
    LOOK_ALIKES[f"convolution, {name} {value}"] = row(conv(3, **{name: value}), pool()), ""
for name, value in {"stride": 3, "padding": 0, "dilation": 2, "ceil_mode": True}.items():
    LOOK_ALIKES[f"pool, {name} {value}"] = row(conv(3), pool(**{name: value})), ""


@pytest.mark.parametrize(("make", "expected"), LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_what_is_replaced_and_that_it_computes_the_same(make, expected, ran, capsys):
    theirs, ours = made(make)
    widths = [layer.in_channels for layer in theirs.modules() if isinstance(layer, nn.Conv2d)]
    for training in (True, False):
        check_equal(ours.train(training), theirs.train(training), images(widths[0]))
        check_ran(ran, expected)
    for mine, other in zip(ours.modules(), theirs.modules(), strict=True):
        assert isinstance(mine, type(other))
    assert expected or str(ours) == str(theirs)
    assert expected or not taken(ours)
    assert expected or "kernels run encoder" in capsys.readouterr().err


@pytest.mark.parametrize("spoil", [lambda y: 1.01 * y, lambda y: 1.01 * y - 0.01 * y.detach(), torch.nan_to_num])
@pytest.mark.parametrize("make", [ResidualBlock, row(conv(16), pool())], ids=["block", "pair"])
def test_kernels_that_compute_something_else_are_not_used(make, spoil, monkeypatch):
    """Compiled wrongly for this processor, say."""
    use_kernels(monkeypatch, lambda name, y: spoil(y))
    theirs, ours = made(make)
    assert str(ours) == str(theirs)
    assert not taken(ours)


network = row(conv(3), pool(), ResidualBlock)


def load(row):
    row.load_state_dict({name: value + 0.01 for name, value in row.state_dict().items()})
    return row


CHANGES = {  # what is done, and which kernels run then
    "copied": (lambda row: load(copy.deepcopy(row)), "pair block"),
    "pickled": (lambda row: load(pickle.loads(pickle.dumps(row))), "pair block"),
    "cut": (lambda row: row[:2], "pair"),
    "float64": (lambda row: row.double(), ""),
    "spectral norm": (lambda row: parametrizations.spectral_norm(row[2].conv1), "pair"),
    "a forward": (lambda row: setattr(row[2], "forward", row[2].conv0.forward), "pair"),
    "a convolution's own way": (lambda row: setattr(row[2].conv1, "_conv_forward", lambda x, *given: x), "pair"),
    "a convolution's forward": (lambda row: setattr(row[2].conv1, "forward", row[2].conv0.forward), "pair"),
    "an attribute": (lambda row: setattr(row[2], "scale", 0.5), "pair"),
    "no bias": (lambda row: setattr(row[2].conv0, "bias", None), "pair"),
    "a pool's stride": (lambda row: setattr(row[1], "stride", 3), "block"),
    "a layer between": (lambda row: row.insert(1, nn.Tanh()), "block"),
}
for place, expected in {"0": "block", "1": "block", "2": "pair block", "2.conv0": "pair"}.items():
    for name in HOOKS:
        CHANGES[f"{name} of {place}"] = lambda row, at=place, name=name: hooked(row.get_submodule(at), name), expected


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_changes_after_accelerate_count(change, expected, ran):
    """A copy can be accelerated again. What is copied stays as it was."""
    theirs, ours = made(network)
    changed = []
    for module in (theirs, ours):
        torch.manual_seed(3)
        result = change(module)
        changed.append(result if isinstance(result, nn.Sequential) else module)
    assert changed[1].state_dict().keys() == changed[0].state_dict().keys()
    before = str(changed[1])
    accelerate(Agent(changed[1]), "auto")
    assert str(changed[1]) == before
    x = images().to(ours[0].bias.dtype)
    check_equal(changed[1], changed[0], x)
    check_ran(ran, expected)
    check_equal(changed[1], changed[0], x.contiguous())  # which runs as it is written
    check_ran(ran, "")
    check_equal(ours, theirs, x)


def test_hooks_for_all_modules_and_calls_that_only_the_written_block_knows(ran):
    theirs, ours = made(Renamed)
    with torch.nn.modules.module.register_module_forward_hook(lambda *given: None):
        assert torch.equal(ours(images(16)), theirs(images(16)))
    assert ours.width() == 16
    assert torch.equal(ours(frames=images(16)), theirs(images(16)))
    check_ran(ran, "")


def test_what_pytorch_traces_compiles_or_transforms_holds_pytorchs_operations(ran):
    theirs, ours = made(network)
    x = images()
    expected = theirs(x)
    exported = torch.export.export(ours, (x,), strict=True)
    assert exported.state_dict.keys() == theirs.state_dict().keys()
    for compiled in (
        torch.fx.symbolic_trace(nn.Sequential(ours)),
        make_fx(ours)(x),
        torch.jit.trace(ours, x, check_trace=False),
        torch.compile(ours, backend="aot_eager", fullgraph=True),
        lambda x: torch.func.vjp(ours, x)[0],
        exported.module(),
        torch.export.export(ours, (x,), strict=False).module(),
    ):
        assert torch.equal(compiled(x), expected)
    check_ran(ran, "")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("mode", ["auto", "eager", "compile"])
def test_modes(mode, device, ran, monkeypatch):
    """On a CPU the kernels run in eager mode, and on devices that they do not know never."""
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append((self, options)))
    agent = Agent(impala_cnn())
    agent.value_encoder, agent.mlp_encoder, agent.other = impala_cnn(), nn.Linear(1, 1), impala_cnn()
    with torch._dynamo.config.patch(suppress_errors=False):
        accelerate(agent.to(device), mode)
        assert torch._dynamo.config.suppress_errors == (mode == "compile")  # what does not compile runs as it is
    assert taken(agent) == (21 if device == "cpu" and mode in ("auto", "eager") else 0)
    encoders = [agent.encoder, agent.value_encoder] if mode == "compile" else []
    assert compiled == [(encoder, {"dynamic": False}) for encoder in encoders]
    with pytest.raises(InputError, match="--accelerate cudagraphs needs a CUDA GPU"):
        accelerate(agent, "cudagraphs")


def test_a_recorded_method_belongs_to_its_agent():
    """Calls with gradients and in evaluation run as they are, copies have their own, and nothing keeps an agent."""
    agent, x = Agent(nn.Linear(1, 1)), torch.ones(2, 1)
    agent.get_action = agent.head.forward
    record_calls(agent, "compile")
    assert isinstance(agent.encode, types.MethodType)
    record_calls(agent, "cudagraphs")
    assert [type(agent.get_action), type(agent.encode)] == [Recorded, RecordedEncode]
    assert agent.get_action(x).requires_grad
    with torch.no_grad():
        assert torch.equal(agent.get_action(input=x), agent.head(x))
        agent.get_action.graph, agent.get_action.inputs = "of bytes", [x.byte()]
        assert torch.equal(agent.get_action(x), agent.head(x))
        agent.eval()
        assert torch.equal(agent.get_action(x), agent.head(x))
    twin = copy.deepcopy(agent)
    record_calls(twin, "cudagraphs")  # which changes nothing
    assert twin.get_action.method().__self__ is twin.head
    assert twin.encode.method().__self__ is twin
    gone = weakref.ref(twin)
    del twin
    assert gone() is None


def test_which_passes_of_an_encoder_are_recorded(monkeypatch):
    """Training passes without hooks, of up to four kinds: shapes, and parameters that have gradients."""
    recorded = []
    busy = types.SimpleNamespace(pending=lambda: "a backward pass")  # not to be played back
    monkeypatch.setattr(graphs, "Recording", lambda method, *inputs: recorded.append(inputs) or busy)
    agent, x = Agent(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))), torch.ones(5, 3)
    encode = RecordedEncode(agent.encode)

    def records(obs):
        before = len(recorded)
        assert torch.equal(encode(agent.encoder, obs), agent.encode(agent.encoder, obs))
        return len(recorded) > before

    with torch.no_grad():
        assert not records(x)
    agent.encoder.eval()
    assert not records(x)
    agent.encoder.train()
    assert not records(x.clone().requires_grad_())
    hook = agent.encoder[0].register_forward_hook(lambda *arguments: None)
    assert not records(x)
    hook.remove()
    assert [records(x), records(x)] == [True, False]
    agent.encoder[1].requires_grad_(False)
    assert [records(x[:size]) for size in (5, 5, 4, 3, 2)] == [True, False, True, True, False]
    agent.encoder.requires_grad_(False)
    encode.recordings.clear()
    assert not records(x)


def test_aliases_have_the_gradients_of_parameters_and_none_of_their_hooks():
    agent, x = Agent(nn.Linear(3, 2)), torch.ones(5, 3)
    plain = copy.deepcopy(agent)
    agent.head.weight.register_hook(lambda gradient: pytest.fail("a hook ran"))
    encode, _, aliases = with_aliases(agent.encode, agent.encoder)
    agent.encoder.weight.data += 1  # in place
    plain.encoder.weight.data += 1
    plain.encode(plain.encoder, x).square().sum().backward()
    found = torch.autograd.grad(encode(x).square().sum(), aliases)
    assert all(map(torch.equal, found, [parameter.grad for parameter in plain.parameters()]))


def test_a_playback_has_one_backward_pass():
    parameters, x = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))], torch.ones(2, 3)
    recording = types.SimpleNamespace(parameters=parameters, pending=lambda: None)
    recording.obs, recording.features, recording.gradient = torch.zeros(3, 2, 3)
    recording.there = types.SimpleNamespace(replay=lambda: recording.features.copy_(2 * recording.obs))

    def replay():
        recording.gradients = torch.cat([recording.gradient.flatten(), recording.gradient.sum(0)])

    recording.back = types.SimpleNamespace(replay=replay)
    features = Playback.apply(recording, x, *parameters)
    assert torch.equal(features, 2 * x)
    assert recording.pending() is not None
    (3 * features).sum().backward(retain_graph=True)
    assert recording.pending() is None
    assert [p.grad.tolist() for p in parameters] == [[[3.0] * 3] * 2, [6.0] * 3]
    with pytest.raises(TrainingError, match="one backward pass"):
        features.sum().backward()
    features = Playback.apply(recording, x, *parameters)
    del features  # no backward pass comes
    assert recording.pending() is None
