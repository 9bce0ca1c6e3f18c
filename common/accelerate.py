"""CPU kernels and torch.compile for convolutional encoders that are written in plain PyTorch.

The kernels of `common/kernels.py` replace `nn.Conv2d` with `nn.MaxPool2d(3, 2, 1)` after it in an `nn.Sequential`, and
blocks that `torch.fx` traces as x + conv1(relu(conv0(relu(x)))), with 3x3 convolutions in float32, and no more. That is
checked at each call: with a hook or a parametrisation, or under torch.compile, modules run as they are written.
"""

import dis
import operator
import sys
from itertools import pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F

from common.kernels import ResidualBlockFunction, build, conv_max_pool, convolves, ready

# PyTorch's modules that the kernels know, with the settings that they must have
CONV = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "padding_mode": "zeros"}
POOL = {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 1, "ceil_mode": False, "return_indices": False}
KNOWN = {nn.Conv2d: CONV, nn.MaxPool2d: POOL, nn.ReLU: {"inplace": False}, nn.Sequential: {}}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
PAIR = [nn.Conv2d, nn.MaxPool2d]
# the steps of a block, with the numbers of the steps that they take their inputs from; the block's input is number 0
BLOCK = [(nn.ReLU, 0), (nn.Conv2d, 1), (nn.ReLU, 2), (nn.Conv2d, 3), (operator.add, 0, 4), ("output", 5)]
SAME = {F.relu: nn.ReLU, torch.relu: nn.ReLU, "relu": nn.ReLU, torch.add: operator.add, "add": operator.add}


def accelerate(agent: nn.Module, mode: str) -> None:
    """Make the encoders of an agent faster, in place. On a CPU, a note on stderr names convolutions without a kernel.

    `mode` is "eager" for our kernels on a CPU, "compile" for torch.compile's, "cudagraphs" for PyTorch's own, recorded
    and launched as a whole; where compiling fails, PyTorch says so and runs the encoder as it is. Call this once, with
    the agent on its device, and before there are threads: `torch.fx` patches `nn.Module` for a moment.
    """
    missed = {module: name for name, module in agent.named_modules() if isinstance(module, nn.Conv2d)}
    if missed and all(parameter.is_cpu for parameter in agent.parameters()):
        for module in list(agent.modules()):
            names = residual_convolutions(module)
            convs = [module.get_submodule(name) for name in names]
            if names:
                module.__class__ = type(type(module).__name__, (FusedBlock, type(module)), {"fused_names": names})
            elif type(module) is nn.Sequential:
                convs = [pair[0] for pair in pairwise(module) if [*map(known_class, pair)] == PAIR]
                module.__class__ = FusedSequential if convs else nn.Sequential
            missed = {conv: name for conv, name in missed.items() if conv not in convs}
        if missed and mode == "eager" and build() is not None:
            print(f"note: PyTorch's own kernels run {', '.join(missed.values())}: ours cannot", file=sys.stderr)
    for name, module in agent.named_children():
        if mode != "eager" and name.endswith("encoder") and any(isinstance(x, nn.Conv2d) for x in module.modules()):
            torch._dynamo.config.suppress_errors = True
            module.compile(dynamic=False, backend="inductor" if mode == "compile" else mode)


class FusedSequential(nn.Sequential):
    """Runs a convolution and the max-pooling after it by the kernels."""

    def forward(self, input):
        layers = list(self)
        while layers:
            if type(layers[0]) is nn.Conv2d and ready(input) and [*map(known_class, layers[:2])] == PAIR:
                input = conv_max_pool(input, layers[0].weight, layers[0].bias)
                del layers[:2]
            else:
                input = layers.pop(0)(input)
        return input


class FusedBlock:
    """Runs a residual block by the kernels, or where they do not suit by its own class, which comes after this one."""

    def forward(self, *inputs, **named):
        if len(inputs) == 1 and not named and ready(inputs[0]):
            x, convs = inputs[0], [self.get_submodule(name) for name in self.fused_names]
            fits = all(type(c) is nn.Conv2d and len(c.weight) == x.shape[1] and convolves(x, c.weight) for c in convs)
            if fits and all(map(known_class, [*self.modules()][1:])):
                return ResidualBlockFunction.apply(x, *(each for conv in convs for each in (conv.weight, conv.bias)))
        return super().forward(*inputs, **named)


def known_class(module: nn.Module) -> type | None:
    """The class of a module that the kernels know; None where a setting, a weight or a hook makes it another thing."""
    own, settings = vars(module), KNOWN.get(type(module), {"known": True})
    changed = "forward" in own or any(own[name] for name in HOOKS) or any(own.get(k) != v for k, v in settings.items())
    if changed or type(module) is not nn.Conv2d:
        return None if changed else type(module)
    given = [(x.dtype, x.device.type, x.shape) for x in own["_parameters"].values() if x is not None]
    shapes = (module.out_channels, module.in_channels, 3, 3), (module.out_channels,)
    right = module.out_channels % 16 == 0 and given == [(torch.float32, "cpu", shape) for shape in shapes]
    return nn.Conv2d if right else None


def residual_convolutions(block: nn.Module) -> list[str]:
    """The names of conv0 and conv1 in a block that is x + conv1(relu(conv0(relu(x)))) and no more; else none."""
    parts, steps = dict(block.named_modules(remove_duplicate=False)), []
    if len(parts) == 1 or not all(known_class(part) for part in parts.values() if part is not block):
        return []
    # a trace takes one branch and shows no side effect: only code that names nothing but modules, relu and add has one
    attributes = {*".".join(parts).split("."), "relu", "add", "nn", "functional"} - {*dir(type(block))}
    try:
        code, scope = type(block).forward.__code__, type(block).forward.__globals__
        closed = not code.co_freevars and type(code) not in map(type, code.co_consts)
        uses = [(i.argval, i.opname == "LOAD_GLOBAL") for i in dis.get_instructions(code) if i.opcode in dis.hasname]
        plain = all(scope.get(name) in (torch, nn, F, *SAME) if given else name in attributes for name, given in uses)
        nodes = list(torch.fx.symbolic_trace(block).graph.nodes) if closed and plain else []
        for node in nodes[1:]:
            kind = type(parts[node.target]) if node.op == "call_module" else SAME.get(node.target, node.target)
            options = [value for value in node.kwargs.values() if value is not False]  # of inplace=False
            steps.append((kind, *sorted(map(nodes.index, node.args)), *options))
    except Exception:  # whatever code raises that gets no tensor, or ValueError for an input that is no step
        return []
    names = [node.target for node in nodes[2:5:2]] if steps == BLOCK else []
    return names if {width for name in names for width in parts[name].weight.shape[:2]} in ({16}, {32}) else []
