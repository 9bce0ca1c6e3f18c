"""torch.compile, and CUDA graphs: one call replays the hundreds of short kernels of a pass on a GPU."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any
from weakref import WeakMethod, ref

import torch
import torch.nn as nn
from torch import Tensor

from common import TrainingError
from common.fast.kernels import refuse_second_derivatives
from common.fast.modules import has_hooks

# Held while a graph is recorded, and while acting is replayed. No other thread may draw random numbers on the GPU
# during a recording, as actors do when they act, nor right after it, when another rehearsal has only begun.
RECORDING = threading.Lock()


def compile_encoders(agent: nn.Module) -> None:
    """Compile the convolutional encoders that are not (in a copy of an agent none is)."""
    for name, module in agent.named_children():
        convolutional = any(isinstance(each, nn.Conv2d) for each in module.modules())
        if name.endswith("encoder") and convolutional and module._compiled_call_impl is None:
            torch._dynamo.config.suppress_errors = True
            module.compile(dynamic=False)


def record_calls(agent: nn.Module, mode: str) -> None:
    """Record the methods by which an agent acts, and with "cudagraphs" the passes of its encoders."""
    for name in ("get_action_and_value", "get_action"):
        method = getattr(agent, name, None)
        if method is not None and not isinstance(method, Recorded):
            setattr(agent, name, Recorded(method, mode))
    encode = getattr(agent, "encode", None)
    if mode == "cudagraphs" and encode is not None and not isinstance(encode, RecordedEncode):
        agent.encode = RecordedEncode(encode)


class Recorded:
    """A method of an agent on a GPU. Its first call is recorded as a CUDA graph. Calls outside of autograd with tensors
    of the same shapes and types replay it, with parameters and buffers as they are then (changed in place), random
    numbers that go on, and results that later calls leave alone. Others run as they are, and so do all in evaluation
    mode. A copy of the agent records anew. PyTorch forbids other threads to draw random numbers on the GPU while a call
    is recorded. Raises TrainingError if it cannot be, as where it waits for the GPU (`.item()`)."""

    def __init__(self, method: Callable[..., tuple[Tensor, ...]], mode: str):
        self.method, self.mode, self.graph = WeakMethod(method), mode, None  # weak: agents go when nobody needs them

    def __call__(self, *inputs: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
        method = self.method()
        if torch.is_grad_enabled() or named or not method.__self__.training:
            return method(*inputs, **named)
        if self.graph is None:
            self.record(method, *inputs)
        if [(x.shape, x.dtype) for x in inputs] != [(x.shape, x.dtype) for x in self.inputs]:
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
    """`agent.encode` with aliases, on the same memory, in place of the agent's parameters that have gradients; these
    parameters; the aliases. So a recording meets no hooks and no graph of earlier passes, which PyTorch forbids."""
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
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
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
    """Call three times before a recording, to load all kernels; return the last result. Buffers stay as they were."""
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
