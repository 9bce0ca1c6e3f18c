"""Kernels for convolutional encoders that are written in plain PyTorch, torch.compile, and CUDA graphs.
The kernels of `common/fast/kernels.py` replace 3x3 convolutions that have max-pooling after them in an `nn.Sequential`, and
residual blocks. Each call looks for hooks and other settings, with which modules run as they are written."""

import copy
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import compress, pairwise
from typing import Any
from weakref import WeakMethod, ref

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common import TrainingError
from common.fast.kernels import ResidualBlockFunction, build, conv_max_pool, convolves, gpu, suits

# PyTorch's modules that the kernels know, with the settings that they must have
CONV = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "padding_mode": "zeros"}
POOL = {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 1, "ceil_mode": False, "return_indices": False}
SETTINGS = {nn.Conv2d: CONV, nn.MaxPool2d: POOL}
HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"  # run by a call
# Held while a graph is recorded, and while acting is replayed: a recording must meet no random numbers, which actors
# draw then, or right afterwards, when another thread's rehearsal has only begun
RECORDING = threading.Lock()


def accelerate(agent: nn.Module, mode: str) -> None:
    """Make an agent faster, in place; call this once, before any threads. "eager": on a CPU the encoders run by our
    kernels, and a note on stderr names convolutions that have none. "cudagraphs": on a GPU they do, in bfloat16, and
    acting (`Recorded`) and the encoders' two passes (`RecordedEncode`), which are hundreds of short kernels, are
    recorded and replayed. "compile": torch.compile compiles the encoders; where it cannot, PyTorch says so and runs
    them as they are. On a GPU acting is recorded, too. "auto": "cudagraphs" on a GPU, else "eager"."""
    missed = {module: name for name, module in agent.named_modules() if isinstance(module, nn.Conv2d)}
    devices = {parameter.device.type for parameter in agent.parameters()}
    if mode == "auto":
        mode = "cudagraphs" if devices == {"cuda"} else "eager"
    device, kernels = ("cpu", build) if mode == "eager" else ("cuda", gpu)
    if mode == "compile":
        compile_encoders(agent)
    elif missed and devices == {device} and kernels() is not None:
        for module in list(agent.modules()):
            kind, names = type(module), block_convolutions(module)
            convs, forward = [module.get_submodule(name) for name in names], block_forward
            if kind is nn.Sequential:
                convs, forward = [pair[0] for pair in pairwise(module) if is_pair(*pair)], sequential_forward
            if convs:
                own = {"forward": forward, "own_forward": kind.forward, "convs": names}
                module.__class__ = type(kind.__name__, (kind,), own)
            missed = {conv: name for conv, name in missed.items() if conv not in convs}
        if missed:
            print(f"note: PyTorch's own kernels run {', '.join(missed.values())}: ours cannot", file=sys.stderr)
    if mode != "eager" and devices == {"cuda"}:
        for name in ("get_action_and_value", "get_action"):  # by which agents act
            if hasattr(agent, name):
                setattr(agent, name, Recorded(getattr(agent, name), mode))
        if hasattr(agent, "encode") and mode == "cudagraphs":
            agent.encode = RecordedEncode(agent.encode)


def compile_encoders(agent: nn.Module) -> None:
    """Compile the convolutional encoders that are not (in a copy of an agent none is)."""
    for name, module in agent.named_children():
        convolutional = any(isinstance(each, nn.Conv2d) for each in module.modules())
        if name.endswith("encoder") and convolutional and module._compiled_call_impl is None:
            torch._dynamo.config.suppress_errors = True
            module.compile(dynamic=False)


class Recorded:
    """A method of an agent on a GPU. Its first call is recorded as a CUDA graph. Calls outside of autograd with tensors
    of the same shapes replay it, with parameters as they are then (changed in place), random numbers that go on as
    without it, and results that later calls leave alone. Other calls run as they are, and so do all in evaluation mode.
    A copy of the agent records anew. PyTorch forbids other threads to draw random numbers on the GPU while a call is
    recorded. Raises TrainingError if it cannot be, as where it waits for the GPU (`.item()`)."""

    def __init__(self, method: Callable[..., tuple[Tensor, ...]], mode: str):
        self.method, self.mode, self.graph = WeakMethod(method), mode, None  # weak: agents go when nobody needs them

    def __call__(self, *inputs: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
        method = self.method()
        if torch.is_grad_enabled() or named or not method.__self__.training:
            return method(*inputs, **named)
        if self.graph is None:
            self.record(method, *inputs)
        if [x.shape for x in inputs] != [x.shape for x in self.inputs]:
            return method(*inputs)
        with RECORDING:
            for own, x in zip(self.inputs, inputs, strict=True):
                own.copy_(x)
            self.graph.replay()
            return tuple(x.clone() for x in self.outputs)

    def record(self, method: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> None:
        agent, stream = method.__self__, torch.cuda.Stream()
        if self.mode == "compile":
            compile_encoders(agent)
        self.inputs = [x.clone() for x in inputs]
        with RECORDING, torch.random.fork_rng([inputs[0].device]):  # a resumed run, too, begins with a recording
            rehearse(lambda: method(*self.inputs), agent, stream)
            self.graph, self.outputs = record(lambda: method(*self.inputs), stream)

    def __deepcopy__(self, memo: dict) -> "Recorded":
        return type(self)(copy.deepcopy(self.method(), memo), self.mode)


class RecordedEncode:
    """`agent.encode` on a GPU. The first call with gradients for an encoder and a shape of observations is recorded as
    two CUDA graphs, the forward and the backward pass; later ones replay them, with parameters as they are then
    (changed in place). Calls run as they are with hooks on modules, from the fifth shape on (a recording keeps its
    activations), and while another call's backward pass may still come."""

    def __init__(self, method: Callable[[nn.Module, Tensor], Tensor]):
        self.method, self.recordings = WeakMethod(method), {}

    def __call__(self, encoder: nn.Module, obs: Tensor) -> Tensor:
        method = self.method()
        trains = torch.is_grad_enabled() and encoder.training and any(x.requires_grad for x in encoder.parameters())
        if not trains or obs.requires_grad or any(map(has_hooks, encoder.modules())):
            return method(encoder, obs)
        key = encoder, obs.shape, obs.dtype, *(id(x) for x in method.__self__.parameters() if x.requires_grad)
        if key not in self.recordings and len(self.recordings) < 4:
            self.recordings[key] = Recording(method, encoder, obs)
        recording = self.recordings.get(key)
        if recording is None or recording.pending() is not None:
            return method(encoder, obs)
        return Playback.apply(recording, obs, *recording.parameters)

    def __deepcopy__(self, memo: dict) -> "RecordedEncode":
        return type(self)(copy.deepcopy(self.method(), memo))


class Recording:
    """The forward and the backward pass of `agent.encode` for one encoder and shape of observations. `pending()` is the
    context of the last playback, if its backward pass has not come but may."""

    def __init__(self, method: Callable[[nn.Module, Tensor], Tensor], encoder: nn.Module, obs: Tensor):
        stream, (encode, parameters, aliases) = torch.cuda.Stream(), with_aliases(method, encoder)
        self.obs, self.gradient, self.pending = obs.clone(), None, lambda: None
        with RECORDING, torch.random.fork_rng([obs.device]):
            found = rehearse(lambda: self.backward(encode(self.obs), aliases), method.__self__, stream)
            used = [x is not None for x in found]
            self.parameters, aliases = list(compress(parameters, used)), list(compress(aliases, used))
            self.there, features = record(lambda: encode(self.obs), stream)
            self.back, self.gradients = record(
                lambda: torch.cat([x.flatten() for x in self.backward(features, aliases)]), stream, self.there.pool()
            )
        self.features = features.detach()

    def backward(self, features: Tensor, parameters: list[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradients of parameters from `gradient`, that of the features."""
        if self.gradient is None:
            self.gradient = torch.ones_like(features)
        return torch.autograd.grad(features, parameters, self.gradient, allow_unused=True)


def with_aliases(
    method: Callable[[nn.Module, Tensor], Tensor], encoder: nn.Module
) -> tuple[Callable[[Tensor], Tensor], list[nn.Parameter], list[Tensor]]:
    """`agent.encode` of observations with other tensors, on the same memory, in place of the agent's parameters that
    have gradients; these; and the others. So a recording touches neither hooks of the parameters nor what is left of
    earlier passes in autograd's graph, which PyTorch forbids."""
    holder = nn.Module()
    holder.agent, holder.forward = method.__self__, lambda obs: method(encoder, obs)
    parameters = {name: x for name, x in holder.named_parameters() if x.requires_grad}
    aliases = {name: x.detach().requires_grad_() for name, x in parameters.items()}
    return partial(torch.func.functional_call, holder, aliases), list(parameters.values()), list(aliases.values())


class Playback(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recording: Recording, obs: Tensor, *parameters: Tensor) -> Tensor:
        ctx.recording, recording.pending = recording, ref(ctx)
        recording.obs.copy_(obs)
        recording.there.replay()
        return recording.features.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        recording = ctx.recording
        if recording.pending() is not ctx:
            raise TrainingError("a recorded encoder has one backward pass per forward pass: use --accelerate eager.")
        recording.pending = lambda: None
        recording.gradient.copy_(gradient)
        recording.back.replay()
        gradients = recording.gradients.clone().split([each.numel() for each in recording.parameters])
        shaped = [each.view_as(parameter) for each, parameter in zip(gradients, recording.parameters, strict=True)]
        return None, None, *shaped


def rehearse(call: Callable[[], Any], module: nn.Module, stream: torch.cuda.Stream) -> Any:
    """Call three times before a recording, so that kernels are compiled, chosen and loaded; return the last result. The
    module's buffers, of batch normalisation, say, stay as they were."""
    buffers = [(x, x.clone()) for x in module.buffers()]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            result = call()
        for x, before in buffers:
            x.copy_(before)
    torch.cuda.current_stream().wait_stream(stream)
    return result


def record(call: Callable[[], Any], stream: torch.cuda.Stream, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record a call after its rehearsal; return the graph, and the call's results, which each playback overwrites."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            return graph, call()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = f"the agent cannot be recorded as a CUDA graph ({str(error).splitlines()[0]})"
        raise TrainingError(f"{reason}: use --accelerate eager.") from error


def sequential_forward(self: nn.Sequential, input: torch.Tensor) -> torch.Tensor:
    """Run each convolution with max-pooling after it by the kernels, and other layers as they are."""
    layers = list(self)
    while layers:
        if len(layers) > 1 and suits(input) and is_pair(*layers[:2]):
            input = conv_max_pool(input, layers[0].weight, layers[0].bias)
            del layers[:2]
        else:
            input = layers.pop(0)(input)
    return input


def block_forward(self: nn.Module, *inputs, **named) -> torch.Tensor:
    """Run a residual block by the kernels, or by its own forward where they do not suit."""
    if len(inputs) == 1 and not named and suits(inputs[0]):
        convs, width = [self._modules.get(name) for name in self.convs], inputs[0].shape[1]
        if all(is_conv(conv) and len(conv.weight) == width and convolves(inputs[0], conv.weight) for conv in convs):
            return ResidualBlockFunction.apply(*inputs, *(each for conv in convs for each in (conv.weight, conv.bias)))
    return self.own_forward(*inputs, **named)


def residual_block(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The forward that a residual block must have, but for the names of its convolutions."""
    return x + self.conv1(F.relu(self.conv0(F.relu(x))))


def block_convolutions(block: nn.Module) -> list[str]:
    """The names of conv0 and conv1 in a block of 16 or 32 channels with the forward of `residual_block`, else none."""
    forward = type(block).forward
    code = getattr(forward, "__code__", None)
    if code is None or code.co_code != residual_block.__code__.co_code:
        return []
    second, functional, relu, first = code.co_names  # in the order of the code, as those of residual_block
    own = relu == "relu" and forward.__globals__.get(functional) is F
    convs = [block._modules.get(name) for name in (first, second) if not hasattr(type(block), name)]
    if not own or len(convs) < 2 or not all(map(is_conv, convs)):
        return []
    sizes = {size for conv in convs for size in conv.weight.shape[:2]}
    return [first, second] if sizes in ({16}, {32}) else []


def is_conv(module: nn.Module | None) -> bool:
    return type(module) is nn.Conv2d and known(module)


def is_pair(first: nn.Module, second: nn.Module) -> bool:
    return is_conv(first) and type(second) is nn.MaxPool2d and known(second)


def has_hooks(module: nn.Module) -> bool:
    return any(vars(module)[name] for name in HOOKS)


def known(module: nn.Module) -> bool:
    """Whether a module is PyTorch's own and computes what the kernels do: no hooks, other weights or settings."""
    kind, own = type(module), vars(module)
    if "forward" in own or has_hooks(module):
        return False
    if any(own.get(name) != value for name, value in SETTINGS[kind].items()):
        return False
    shapes = [x.shape for x in own["_parameters"].values() if x is not None and x.dtype == torch.float32]
    size = own.get("out_channels", 0)
    return kind is not nn.Conv2d or (shapes == [(size, module.in_channels, 3, 3), (size,)] and size % 16 == 0)
