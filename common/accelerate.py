"""CPU kernels and torch.compile for convolutional encoders that are written in plain PyTorch.
The kernels of `common/kernels.py` replace 3x3 convolutions that have max-pooling after them in an `nn.Sequential`, and
residual blocks. Each call looks for hooks and other settings, with which modules run as they are written."""

import dis
import inspect
import operator
import sys
from itertools import pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F

from common.kernels import ResidualBlockFunction, build, conv_max_pool, convolves, suits

# PyTorch's modules that the kernels know, with the settings that they must have
CONV = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "padding_mode": "zeros"}
POOL = {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 1, "ceil_mode": False, "return_indices": False}
SETTINGS = {nn.Conv2d: CONV, nn.MaxPool2d: POOL, nn.ReLU: {"inplace": False}, nn.Sequential: {}}
# the trace of x + conv1(relu(conv0(relu(x)))): each step with the numbers of the steps that it takes; the input is 0
BLOCK = [("relu", 0), ("conv", 1), ("relu", 2), ("conv", 3), ("add", 0, 4), ("output", 5)]
STEPS = {nn.Conv2d: "conv", nn.ReLU: "relu", F.relu: "relu", torch.relu: "relu", operator.add: "add", torch.add: "add"}


def accelerate(agent: nn.Module, mode: str) -> None:
    """Make the encoders of an agent faster, in place: on a CPU by our kernels (`mode` "eager"), by torch.compile
    ("compile"), or by CUDA graphs of PyTorch's kernels ("cudagraphs"). A note on stderr names convolutions that have no
    kernel; where compiling fails, PyTorch says so and runs the encoder as it is. Call this once, before any threads."""
    missed = {module: name for name, module in agent.named_modules() if isinstance(module, nn.Conv2d)}
    if mode != "eager":
        for name, module in agent.named_children():
            if name.endswith("encoder") and not missed.keys().isdisjoint(module.modules()):
                torch._dynamo.config.suppress_errors = True
                module.compile(dynamic=False, backend="inductor" if mode == "compile" else mode)
    elif missed and all(parameter.is_cpu for parameter in agent.parameters()) and build() is not None:
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
    if len(inputs) == 1 and not named and suits(inputs[0]) and all(map(known, [*self.modules()][1:])):
        convs = [self.get_submodule(name) for name in self.convs]
        if all(convolves(inputs[0], conv.weight) and len(conv.weight) == inputs[0].shape[1] for conv in convs):
            return ResidualBlockFunction.apply(*inputs, *(each for conv in convs for each in (conv.weight, conv.bias)))
    return self.own_forward(*inputs, **named)


def block_convolutions(block: nn.Module) -> list[str]:
    """The names of conv0 and conv1 in a block that is traced as `BLOCK`, of 16 or 32 channels; none of any other."""
    parts, steps = dict(block.named_modules(remove_duplicate=False)), []
    if not all(known(part) for part in parts.values() if part is not block):
        return []
    try:
        # A trace shows one branch and no side effects. Code that names nothing but modules, relu and add has no others.
        code, scope = type(block).forward.__code__, type(block).forward.__globals__
        used = [(each.opname, each.argval, each.argrepr) for each in dis.get_instructions(code)]
        outer = {name for kind, name, _ in used if kind == "LOAD_GLOBAL"}
        inner = {*".".join(parts).split("."), "relu", "add", "nn", "functional"} - {*dir(type(block))} | outer
        plain = inner.issuperset(code.co_names) and {scope.get(name) for name in outer} <= {torch, nn, F, *STEPS}
        nested = code.co_freevars or any(map(inspect.iscode, code.co_consts))
        if not plain or nested or any(text == "+=" for _, _, text in used):
            return []
        nodes = list(torch.fx.symbolic_trace(block).graph.nodes)
        for node in nodes[1:]:
            kind = type(parts[node.target]) if node.op == "call_module" else node.target
            options = [value for value in node.kwargs.values() if value is not False]  # of inplace=False
            steps.append((STEPS.get(kind, kind), *sorted(map(nodes.index, node.args)), *options))
    except Exception:  # whatever code raises that gets no tensor
        return []
    convs = [node.target for node in nodes if node.op == "call_module" and type(parts[node.target]) is nn.Conv2d]
    sizes = {size for conv in convs for size in parts[conv].weight.shape[:2]}
    return convs if steps == BLOCK and sizes in ({16}, {32}) else []


def is_pair(first: nn.Module, second: nn.Module) -> bool:
    return type(first) is nn.Conv2d and type(second) is nn.MaxPool2d and known(first) and known(second)


def known(module: nn.Module) -> bool:
    """Whether a module is PyTorch's own and computes what the kernels do: no hooks, other weights or settings."""
    kind, own = type(module), vars(module)
    if kind not in SETTINGS or "forward" in own or any(own[name] for name in own if name.endswith("_hooks")):
        return False
    if any(own.get(name) != value for name, value in SETTINGS[kind].items()):
        return False
    shapes = [x.shape for x in own["_parameters"].values() if x is not None and x.dtype == torch.float32 and x.is_cpu]
    size = own.get("out_channels", 0)
    return kind is not nn.Conv2d or (shapes == [(size, module.in_channels, 3, 3), (size,)] and size % 16 == 0)
