"""Settings: the values they may have, the settings that all scripts share, and how the command line sets them."""

import inspect
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, make_dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import tyro

from common.errors import InputError

T = TypeVar("T", int, float)
HOST_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes


class Limits(NamedTuple):
    """The numbers that a setting may have: `holds` tells, `words` says."""

    words: str
    holds: Callable[[float], bool]


Positive = Annotated[T, Limits("a number above 0", lambda value: 0 < value < math.inf)]
NotNegative = Annotated[T, Limits("0 or a number above", lambda value: 0 <= value < math.inf)]
Fraction = Annotated[float, Limits("a number from 0 to 1", lambda value: 0 <= value <= 1)]
Seed = Annotated[int, Limits("a number from 0 to 2147483647, as Procgen's", lambda value: 0 <= value < 2**31)]

ALIASES = {"--baseline-coef": "--vf-coef"}  # another project's name of a flag, which the command line accepts
SECTIONS = "preset", "environment", "algorithm", "network", "evaluation", "intrinsic rewards", "run"  # of --help


def flag(name: str) -> str:
    """The command line's name of a setting."""
    return f"--{name.replace('_', '-')}"


def check_limits(args: Any) -> None:
    """Raise InputError for the first setting of a dataclass that is out of its limits or not one of its choices."""
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        given = getattr(args, name)
        values = [value for value in (given if isinstance(given, tuple) else (given,)) if value is not None]
        for value, each in itertools.product(values, (hint, *get_args(hint))):
            choices = get_args(each) if get_origin(each) is Literal else [value]
            if value not in choices:
                raise InputError(f"{flag(name)} {value} is not known: use one of {', '.join(map(str, choices))}.")
            for limits in getattr(each, "__metadata__", ()):
                if isinstance(limits, Limits) and not limits.holds(value):
                    raise InputError(f"{flag(name)} {value} cannot work: use {limits.words}.")


@dataclass
class RunArgs:
    # ---- evaluation
    eval_interval: NotNegative[int] = 0
    """environment steps between evaluations on held-out levels (the last is at the end of the run); 0 for none"""
    eval_episodes: Positive[int] = 64
    """episodes that each evaluation plays with sampled actions, and again with the most likely ones"""
    eval_num_levels: NotNegative[int] = 0
    """number of Procgen levels to evaluate on; 0 for all levels, the usual test set"""
    eval_start_level: NotNegative[int] = 0
    """first Procgen level to evaluate on (needs --eval-num-levels)"""

    # ---- run
    exp_name: str = "run"
    """name of the experiment, a part of the run folder's name; default: the script's, with its preset"""
    seed: Seed = 1
    """seed of the networks, the sampled actions and the environments"""
    device: str = "auto"
    """auto (a CUDA GPU if there is one, else the CPU), cpu, cuda or cuda:N"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """number format of the convolutional encoder; auto: bf16 where the device has instructions for it"""
    micro_batch_size: Positive[int] | None = None
    """steps of a minibatch that go through the network at a time; None: 512 on a CPU, all on a GPU"""
    accelerate: Literal["auto", "eager", "compile", "cudagraphs"] = "auto"
    """eager: as written, on a CPU by kernels of our own; cudagraphs: on a GPU by ours, recorded and replayed;
    compile: by torch.compile (a minute at the start), acting on a GPU replayed; auto: cudagraphs, on a CPU eager"""
    torch_deterministic: bool = True
    """use deterministic cuDNN kernels"""
    runs_dir: str = "runs"
    """folder for run folders"""
    resume: str | None = None
    """continue the run in this folder; auto: the newest unfinished run with the same settings"""
    init_from: str | None = None
    """start a new run with the weights of this run folder, model or checkpoint"""
    init_heads: Literal["keep", "policy", "reset"] = "keep"
    """heads to take over with --init-from: all, the policy's alone, or none"""
    checkpoint_interval: NotNegative[float] = 5.0
    """minutes between checkpoints on disk; 0 for one after each iteration"""
    keep_checkpoints: Positive[int] = 2
    """number of newest checkpoints to keep"""
    track: bool = False
    """also log to Weights & Biases (needs the package wandb)"""
    wandb_project_name: str = "procgen"
    """project in Weights & Biases"""
    wandb_entity: str | None = None
    """team in Weights & Biases"""
    capture_video: bool = False
    """write videos of environment 0 into the run folder (slower: Procgen then also draws 512x512 frames)"""

    title = property(lambda self: self.exp_name, doc="What the screen calls the algorithm.")

    @staticmethod
    def presets(named: dict[str, dict[str, Any]]) -> Callable[[type], type]:
        """Decorate a dataclass of settings: its `preset` names other defaults for the settings that are not given."""

        def decorate(args_class: type) -> type:
            def with_preset(self: Any, **given: Any) -> None:
                init(self, **named.get(given.get("preset", self.preset), {}) | given)

            init, args_class.__init__ = args_class.__init__, with_preset
            return args_class

        return decorate

    def constraints(self) -> Iterator[tuple[bool, str]]:
        """What must hold between settings: pairs of a condition and a sentence that says what to change."""
        heads = "--init-heads is for a run that starts from another: add --init-from, or leave it out."
        yield self.init_heads == "keep" or bool(self.init_from), heads
        levels = "--eval-num-levels and --eval-start-level are for evaluations: add --eval-interval, or leave them out."
        yield self.eval_interval > 0 or not (self.eval_num_levels or self.eval_start_level), levels
        for name, package in (("track", "wandb"), ("capture_video", "av")):
            message = f"{flag(name)} needs a package: pip install {package}, or leave {flag(name)} out."
            yield not getattr(self, name) or bool(find_spec(package)), message
        if hasattr(self, "intrinsic_reward"):
            for name in ("intrinsic_coef", "intrinsic_gamma", "pretraining"):
                message = f"{flag(name)} is for intrinsic rewards: add --intrinsic-reward rnd or icm, or omit it."
                yield self.intrinsic_reward != "none" or getattr(self, name) == getattr(type(self), name), message
            endless = "--intrinsic-gamma 1 cannot work, as intrinsic returns never end: use less."
            yield self.intrinsic_gamma < 1, endless
            nothing = "--pretraining with --intrinsic-coef 0 has nothing to learn from: use a number above 0."
            yield not self.pretraining or self.intrinsic_coef > 0, nothing

    def validate(self) -> None:
        """Raise InputError for the first setting, or combination of settings, that cannot work."""
        check_limits(self)
        for holds, message in self.constraints():
            if not holds:
                raise InputError(message)


def sections(args_class: type) -> dict[str, dict[str, str]]:
    """Each section's settings with their help, read from the source as tyro does. A comment like `# ---- algorithm`
    opens a section; the help of a setting is the string below it."""
    found, titles = {title: {} for title in SECTIONS}, {}
    pattern = re.compile(r'^    (?:# -+ (.+)|(\w+): .+(?:\n    """([^"]*)""")?)', re.M)
    for parent in reversed(args_class.__mro__[:-1]):
        title = SECTIONS[-1]
        for line in pattern.finditer(inspect.getsource(parent)):
            title, name, text = line[1] or title, line[2], line[3]
            if name in parent.__annotations__:
                section = found.setdefault(titles.setdefault(name, title), {})
                section[name] = " ".join(text.split()) if text else section.get(name, "")
    return {title: section for title, section in found.items() if section}


def parse(args_class: type, default: Any, words: Sequence[str] | None = None) -> Any:
    """`args_class` as the command line (or `words`) sets it, with `default` for all other settings."""
    words = sys.argv[1:] if words is None else words
    hints, groups = get_type_hints(args_class, include_extras=True), []
    *_, preset = None, *re.findall(r"(?:^|\0)--preset[=\0](\w+)", "\0".join(words))  # of several the last one counts
    if preset in get_args(hints.get("preset")) and default == args_class():  # else a run is resumed
        default = args_class(preset=preset)
    for title, helps in sections(args_class).items():  # a dataclass for each, since tyro's --help lists dataclasses
        flags = [
            (name, Annotated[hints[name], tyro.conf.arg(help=text)], field(default=getattr(default, name)))
            for name, text in helps.items()
        ]
        group = make_dataclass(title.replace(" ", "_"), flags, namespace={"__doc__": ""})
        groups.append((group.__name__, tyro.conf.OmitArgPrefixes[group], field(default_factory=group)))
    description = (inspect.getmodule(args_class).__doc__ or "").partition("\n")[0]
    words = [re.sub(r"^--[\w-]+", lambda name: ALIASES.get(name[0], name[0]), word) for word in words]
    view = tyro.cli(make_dataclass("Args", groups), args=words, description=description)
    return args_class(**{name: value for group in vars(view).values() for name, value in vars(group).items()})
