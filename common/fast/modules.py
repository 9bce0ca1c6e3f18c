"""Which modules of an agent the kernels of `common/fast/kernels.py` can run, and how: such a module becomes one of a
subclass of its class. It stays the same object, with its parameters, state dict and hooks."""

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Set
from functools import cache
from types import CodeType
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.fast.kernels import ResidualBlockFunction, build, conv_max_pool, convolves, gpu, suits

# PyTorch's modules that the kernels know, with the settings that they must have
CONV = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "padding_mode": "zeros"}
POOL = {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 1, "ceil_mode": False, "return_indices": False}
SETTINGS = {nn.Conv2d: CONV, nn.MaxPool2d: POOL}
HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"  # run by a call
PLAIN = vars(nn.Module()).keys()  # the attributes of a module that has none of its own
# What a block's code may name beside its convolutions, and what a global of such a name may be. By other names it could
# record something, draw random numbers, or change during a run.
NAMES = {"F", "torch", "nn", "functional", "relu", "relu_", "add", "add_", "clone"}
GLOBALS = torch, nn, F, F.relu, torch.relu, None
# How far a kernel's results may be from PyTorch's in a trial, as a part of their norm. In bfloat16 pooled values tie.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def use_kernels(agent: nn.Module) -> None:
    """Let our kernels run the modules that they can. A note on stderr names the convolutions that they cannot."""
    missed = {module: name for name, module in agent.named_modules() if isinstance(module, nn.Conv2d)}
    kernels = build if next(agent.parameters()).is_cpu else gpu
    if not missed or kernels() is None:
        return
    classes = {}
    for module in agent.modules():
        if (faster := faster_class(module, classes)) is not None:
            module.__class__ = faster
        if isinstance(module, FastSequential | FastBlock):
            for conv in module._convolutions():
                missed.pop(conv, None)
    if missed:
        print(f"note: PyTorch's own kernels run {', '.join(missed.values())}: ours cannot", file=sys.stderr)


def faster_class(module: nn.Module, classes: dict[tuple, type | None]) -> type | None:
    """A subclass of a module's class that computes the same by our kernels, or None. `classes` keeps what trials of
    blocks have shown: all of a class and a size compute the same, as they have nothing of their own but weights."""
    if type(module) is nn.Sequential:
        pairs = list(pairs_of(module))
        if pairs and all(pair_agrees(*pair) for pair in pairs):
            return FastSequential
    elif may_be_block(module):
        names = tuple(module._modules)
        kind = type(module), names, len(list(module.parameters())), next(module.parameters()).shape
        if kind not in classes:
            agreeing = [order for order in (names, names[::-1]) if block_agrees(module, order)]
            classes[kind] = fast_block(type(module), agreeing[0]) if agreeing else None
        return classes[kind]
    return None


class FastSequential(nn.Sequential):
    """An `nn.Sequential` that runs each convolution with max-pooling after it by the kernels."""

    def _convolutions(self) -> list[nn.Module]:
        return [conv for conv, _ in pairs_of(self)]

    def forward(self, input: Tensor) -> Tensor:
        layers = list(self)
        while layers:
            if len(layers) > 1 and suits(input) and is_pair(*layers[:2]):
                input = conv_max_pool(input, layers[0].weight, layers[0].bias)
                del layers[:2]
            else:
                input = layers.pop(0)(input)
        return input


class FastBlock(nn.Module):
    """A residual block, x + second(relu(first(relu(x)))), that the kernels run; where they do not suit, its class's own
    code runs. `_order` has the names of the two convolutions."""

    def _convolutions(self) -> list[nn.Module | None]:
        return [self._modules.get(name) for name in self._order]

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        if len(inputs) == 1 and not named and suits(inputs[0]) and vars(self).keys() == PLAIN:
            convs, width = self._convolutions(), inputs[0].shape[1]
            if all(is_conv(conv) and len(conv.weight) == width and convolves(inputs[0], conv.weight) for conv in convs):
                first, second = convs
                return ResidualBlockFunction.apply(inputs[0], first.weight, first.bias, second.weight, second.bias)
        return super().forward(*inputs, **named)

    def __reduce_ex__(self, protocol: int) -> tuple:  # for copies and pickles: its class has no place in a module
        return new_block, (type(self).__bases__[1], self._order), vars(self)


@cache
def fast_block(kind: type, order: tuple[str, ...]) -> type:
    """The subclass of a class of blocks that the kernels run."""
    return type(kind.__name__, (FastBlock, kind), {"_order": order, "__module__": kind.__module__})


def new_block(kind: type, order: tuple[str, ...]) -> nn.Module:
    return kind.__new__(fast_block(kind, order))


def pairs_of(row: nn.Sequential) -> Iterator[tuple[nn.Module, nn.Module]]:
    return (pair for pair in itertools.pairwise(row) if is_pair(*pair))


def is_pair(first: nn.Module, second: nn.Module) -> bool:
    return is_conv(first) and type(second) is nn.MaxPool2d and known(second)


def is_conv(module: nn.Module | None) -> bool:
    return type(module) is nn.Conv2d and known(module)


def may_be_block(module: nn.Module) -> bool:
    """Whether a module is made of two convolutions that the kernels can run, and its code of these and ReLU."""
    convs, own = list(module._modules.values()), vars(module)
    if own.keys() != PLAIN or own["_parameters"] or has_hooks(module):
        return False
    if len(convs) != 2 or not all(map(is_conv, convs)) or not names_relu_alone(type(module), module._modules.keys()):
        return False
    return {size for conv in convs for size in conv.weight.shape[:2]} in ({16}, {32})


def names_relu_alone(kind: type, children: Set[str]) -> bool:
    """Whether the code of a class's `forward` names nothing but its children and PyTorch's ReLU and sums."""
    code, own = getattr(kind.forward, "__code__", None), getattr(kind.forward, "__globals__", {})
    if code is None or code.co_freevars or kind.forward.__defaults__ or kind.forward.__kwdefaults__:
        return False
    if any(isinstance(each, CodeType) for each in code.co_consts) or not {*code.co_names} <= NAMES | children:
        return False
    values = [getattr(kind, name, own.get(name)) for name in code.co_names]  # a method may be called relu
    return all(any(value is each for each in GLOBALS) for value in values)


def has_hooks(module: nn.Module) -> bool:
    return any(vars(module)[name] for name in HOOKS)


def known(module: nn.Module) -> bool:
    """Whether a module is PyTorch's own and computes what the kernels do: no hooks, other weights or settings."""
    kind, own = type(module), vars(module)
    if own.keys() & {"forward", "_conv_forward"} or has_hooks(module):
        return False
    if any(own.get(name) != value for name, value in SETTINGS[kind].items()):
        return False
    shapes = [x.shape for x in own["_parameters"].values() if x is not None and x.dtype == torch.float32]
    size = own.get("out_channels", 0)
    return kind is not nn.Conv2d or (shapes == [(size, module.in_channels, 3, 3), (size,)] and size % 16 == 0)


@torch.enable_grad()
def block_agrees(block: nn.Module, order: tuple[str, ...]) -> bool:
    """Whether a block is x + second(relu(first(relu(x)))), with first and second named in this order. A copy with
    random weights must compute, on a CPU, the very numbers of this formula. On the block's device it must compute the
    numbers of our kernels, but for rounding."""
    trial, frames = trial_of(block)
    first, second = [trial._modules[name] for name in order]
    try:
        check_formula(trial, lambda x: x + second(F.relu(first(F.relu(x)))), frames)
        device, fast = next(block.parameters()).device, copy.copy(trial)
        fast.__class__ = fast_block(type(trial), order)
        return vars(trial).keys() == PLAIN and near(fast.to(device), trial, frames.to(device), True)
    except Exception:  # of this check, or as these are not the inputs that it was written for
        return False


@torch.enable_grad()
def pair_agrees(conv: nn.Conv2d, pool: nn.MaxPool2d) -> bool:
    """Whether our kernels compute the numbers of PyTorch's two modules, but for rounding."""
    trial, frames = trial_of(nn.Sequential(conv, pool))
    device = conv.weight.device
    fast = FastSequential(*trial).to(device)
    return all(near(fast, trial, frames.to(device), requires_grad) for requires_grad in (False, True))


def trial_of(module: nn.Module) -> tuple[nn.Module, Tensor]:
    """A copy on the CPU with random weights, as zeros would hide much, and frames with zeros and large numbers."""
    generator = torch.Generator().manual_seed(0)
    trial = copy.deepcopy(module).cpu().requires_grad_()
    for parameter in trial.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    frames = torch.randn(3, 8, 12, next(trial.parameters()).shape[1], generator=generator).permute(0, 3, 1, 2)
    frames[frames.abs() < 0.3] = 0
    frames[1] *= 1000
    return trial, frames


def check_formula(trial: nn.Module, formula: Callable[[Tensor], Tensor], frames: Tensor) -> None:
    """Raise AssertionError unless a module computes a formula bit for bit, in both formats, with and without NaN."""
    for dtype, x in itertools.product(ROUNDING, (frames, with_nan(frames))):
        found, expected = (outcome(call, trial, x.to(dtype)) for call in (trial, formula))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def near(fast: nn.Module, trial: nn.Module, frames: Tensor, requires_grad: bool) -> bool:
    """Whether a module with kernels computes what the trial does, but for rounding, in both formats."""
    for dtype, rounding in ROUNDING.items():
        x = frames.to(dtype)
        found = outcome(fast, trial, x, requires_grad)
        expected = outcome(trial, trial, x, requires_grad)
        for mine, other in zip(found, expected, strict=True):
            close = (mine.double() - other.double()).norm() <= rounding * other.double().norm()
            if mine.dtype != other.dtype or not close:
                return False
        # Kernels may spread a NaN further within its frame. PyTorch's own in bfloat16 do so, too.
        mine = outcome(fast, trial, with_nan(x), requires_grad)[0].isnan()
        must = outcome(trial, trial, with_nan(frames.float()), requires_grad)[0].isnan()
        if mine[1:].any() or not mine[must].all():
            return False
    return True


def with_nan(frames: Tensor) -> Tensor:
    """These frames, with NaN in a pixel of the first."""
    frames = frames.clone()
    frames[0, 0, 2, 3] = float("nan")
    return frames


def outcome(call: Callable[[Tensor], Tensor], trial: nn.Module, x: Tensor, requires_grad: bool = True) -> list[Tensor]:
    """What a call returns, what it leaves of its input, and the gradients of the parameters and the input."""
    x = x.clone().requires_grad_(requires_grad)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.dtype == torch.bfloat16, cache_enabled=False):
        y = call(x)
    inputs = [*trial.parameters(), *([x] if requires_grad else [])]
    gradient = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    return [y, x, *torch.autograd.grad(y, inputs, gradient)]
