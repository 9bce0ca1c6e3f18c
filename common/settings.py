"""Settings: the values that they may have, those that all scripts share, and the command line."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from enum import Enum
from functools import partial
from importlib.util import find_spec
from inspect import get_annotations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import tyro
from torch.utils._pytree import tree_leaves, tree_map_only
from tyro.constructors import ConstructorRegistry, PrimitiveTypeInfo

from common import InputError

T = TypeVar("T", int, float)
ROOT = Path(__file__).resolve().parent.parent  # of the repository; paths from it lead astray through links
HOST_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes


class Limits(NamedTuple):
    words: str
    holds: Callable[[float], bool]  # whether a setting may have this number


Positive = Annotated[T, Limits("a number above 0", lambda value: 0 < value < math.inf)]
NotNegative = Annotated[T, Limits("0 or a number above", lambda value: 0 <= value < math.inf)]
Fraction = Annotated[float, Limits("a number from 0 to 1", lambda value: 0 <= value <= 1)]
InitFn = Literal["normed", "orthogonal", "xavier_uniform", "xavier_normal", "identity"]
Seed = Annotated[int, Limits("a number from 0 to 2147483647, as Procgen's", lambda value: 0 <= value < 2**31)]


@dataclass
class ProcgenArgs:
    """Procgen"""

    use_backgrounds: bool = True
    """draw the games' backgrounds; without them they are black"""
    restrict_themes: bool = False
    """draw the same theme in all levels, in games that have several"""
    use_monochrome_assets: bool = False
    """draw rectangles of one colour in place of pictures"""
    center_agent: bool = True
    """keep the agent in the centre of the frame, in games that scroll; without it the frame shows the whole level"""
    paint_vel_info: bool = False
    """paint the agent's velocity into the frame's upper left corner, in games with platforms"""
    use_generated_assets: bool = False
    """draw generated pictures in place of the games' own: refused, as Procgen cannot save the state of such games"""
    use_sequential_levels: bool = False
    """play on when a level is solved: the episode goes on with another, which --num-levels does not bound"""


@dataclass
class EnvArgs(ProcgenArgs):
    """environment"""

    env_id: str = "starpilot"
    """a Procgen game, several joined by commas (environment i plays game i modulo their number), or a Gymnasium id"""
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "easy"
    """Procgen's difficulty; not every game has the last three"""
    num_levels: NotNegative[int] = 0
    """number of Procgen levels to train on; 0 for no limit"""
    start_level: NotNegative[int] = 0
    """first Procgen level to train on (needs --num-levels)"""
    num_threads: Annotated[int, Limits("a number from 0 to 1024", lambda value: 0 <= value <= 1024)] | None = None
    """C++ threads that step Procgen's environments (IMPALA: of each actor); None: one a core, at most 8"""
    num_envs: Positive[int] = 64
    """number of environments, of each rank (N); IMPALA's actors share them evenly"""
    frame_stack: Annotated[int, Limits("a number from 1 to 1000", lambda value: 1 <= value <= 1000)] = 1
    """number of newest frames that an observation holds (image tasks only)"""


@dataclass
class NetworkArgs:
    """network"""

    feature_dim: Positive[int] = 256
    """width of the encoder's output"""
    hidden_dim: Positive[int] = 64
    """width of the MLP's hidden layer (vector observations only)"""
    init_fn: InitFn = "xavier_uniform"
    """initial weights: rows of fixed L2 norm (OpenAI's PPG code), orthogonal, Xavier, or identity for PyTorch's own"""


@dataclass
class IntrinsicArgs:
    """intrinsic rewards"""

    intrinsic_reward: Literal["none", "rnd", "icm"] = "none"
    """reward novelty, too: by random network distillation, or by the intrinsic curiosity module"""
    intrinsic_coef: NotNegative[float] = 0.5
    """weight of the intrinsic advantages; the task's have weight 1"""
    intrinsic_gamma: Fraction = 0.99
    """discount factor of the intrinsic rewards"""
    pretraining: bool = False
    """learn from intrinsic rewards alone: the task's rewards have weight 0, and values predict intrinsic returns"""

    def validate(self) -> None:
        super().validate()
        for name in ("intrinsic_coef", "intrinsic_gamma", "pretraining"):
            if self.intrinsic_reward == "none" and getattr(self, name) != getattr(type(self), name):
                raise InputError(f"{flag(name)} is for intrinsic rewards: add --intrinsic-reward rnd or icm.")
        if self.intrinsic_gamma == 1:
            raise InputError("--intrinsic-gamma 1 cannot work, as intrinsic returns never end: use less.")
        if self.pretraining and self.intrinsic_coef == 0:
            raise InputError("--pretraining with --intrinsic-coef 0 has nothing to learn from: use a number above 0.")


@dataclass
class RunArgs(ProcgenArgs):  # whose section comes last in --help so
    """run"""

    exp_name: str = "run"
    """name of the experiment, a part of the run folder's name"""
    total_timesteps: Positive[int] = 25_000_000
    """environment steps of the run; rounded up to whole iterations"""
    seed: Seed = 1
    """seed of the networks, the sampled actions and the environments"""
    device: str = "auto"
    """auto (a CUDA GPU if there is one, else the CPU), cpu, cuda or cuda:N"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """number format of the convolutional encoder; auto: bf16 where the device has instructions for it"""
    micro_batch_size: Positive[int] | None = None
    """steps of a minibatch that go through the network at a time; None: 512 on a CPU, all on a GPU"""
    accelerate: Literal["auto", "eager", "compile", "cudagraphs"] = "auto"
    """eager: no compilation and no CUDA graphs; on a CPU our convolution kernels are used. cudagraphs: our kernels and
    CUDA graphs on a GPU. compile: torch.compile for the encoder. auto: cudagraphs on a GPU, eager on a CPU"""
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
    eval_interval: NotNegative[int] = 0
    """environment steps between evaluations on held-out levels (the last is at the end of the run); 0 for none"""
    eval_episodes: Positive[int] = 64
    """episodes of an evaluation with sampled actions, and again greedily; rounded up to as many per environment"""
    eval_num_levels: NotNegative[int] = 0
    """number of Procgen levels to evaluate on; 0 for all levels, the usual test set"""
    eval_start_level: NotNegative[int] = 0
    """first Procgen level to evaluate on (needs --eval-num-levels)"""
    track: bool = False
    """also log to Weights & Biases (needs the package wandb)"""
    wandb_project_name: str = "procgen"
    """project in Weights & Biases"""
    wandb_entity: str | None = None
    """team in Weights & Biases"""
    capture_video: bool = False
    """write videos of environment 0 into the run folder: of its episodes 0, 1, 8, 27, ... and every thousandth"""

    presets: ClassVar[dict[str, dict[str, Any]]] = {}  # by name: the settings of a preset that are not the defaults
    earlier: ClassVar[dict[str, Any]] = {}  # what runs of versions without a setting did, if not as its default says

    def validate(self) -> None:
        """Raise InputError for the first setting, or combination of settings, that cannot work."""
        check_limits(self)
        if hasattr(self, "__post_init__"):  # the command line would call it before flags are read
            raise InputError("Args has __post_init__: derive values in properties, such as iteration_steps.")
        try:
            kept = vars(from_json(type(self), to_json(self)))
        except Exception as error:  # of JSON's or of tyro's, which are of many kinds
            raise InputError(f"settings are numbers, text, None, paths, enums, tuples and lists: {error}") from error
        for name, given in vars(self).items():
            if kept[name] != given:
                raise InputError(f"{flag(name)} {given!r} would come back from args.json as {kept[name]!r}: use that.")
        if self.init_heads != "keep" and not self.init_from:
            raise InputError("--init-heads is for a run that starts from another: add --init-from, or leave it out.")
        if (self.eval_num_levels or self.eval_start_level) and not self.eval_interval and self.resume in (None, "auto"):
            raise InputError("--eval-num-levels and --eval-start-level need evaluations: add --eval-interval.")
        for name, package in {"track": "wandb", "capture_video": "av"}.items():
            if getattr(self, name) and not find_spec(package):
                raise InputError(f"{flag(name)} needs a package: pip install {package}, or leave {flag(name)} out.")


def flag(name: str) -> str:
    """The command line's name of a setting."""
    return f"--{name.replace('_', '-')}"


def check_limits(args: Any) -> None:
    """Raise InputError for a setting out of its limits or none of its choices, or a tool's flag without a value."""
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        if not isinstance(args, RunArgs) and getattr(args, name) == () != getattr(type(args), name, ()):
            raise InputError(f"{flag(name)} is empty: name one at least.")
        for value in [leaf for leaf in tree_leaves(getattr(args, name)) if leaf is not None]:
            if isinstance(value, int | float) and (2**62 if isinstance(value, int) else 2.0**100) <= value < math.inf:
                raise InputError(f"{flag(name)} {value} is too large.")  # for PyTorch's int64 and float32
            for each in (hint, *get_args(hint)):
                if get_origin(each) is Literal and value not in get_args(each):
                    raise InputError(f"{flag(name)} {value} is not known: use one of {', '.join(get_args(each))}.")
                for limits in getattr(each, "__metadata__", ()):
                    if isinstance(limits, Limits) and not limits.holds(value):
                        raise InputError(f"{flag(name)} {value} cannot work: use {limits.words}.")


def to_json(args: Any) -> dict[str, Any]:
    """Settings as args.json has them. Raises TypeError for what JSON cannot hold."""
    return json.loads(json.dumps(tree_map_only(Enum, lambda x: x.name, vars(args)), default=os.fspath))


def from_json(args_class: type, saved: dict[str, Any]) -> Any:
    """The settings of class `args_class` that `to_json` saved, by tyro's parser. Raises any error for others."""
    hints, settings = get_type_hints(args_class), args_class.earlier | saved
    for name, value in saved.items():
        if name in hints:
            parser = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(hints[name], set()))
            settings[name] = parser.instance_from_str([str(each) for each in tree_leaves(value)])
    return args_class(**settings)


def preset_args(args_class: type, preset: str, **given: Any) -> Any:
    """`args_class` with the settings of one of its presets; settings that are `given` win."""
    return args_class(**args_class.presets[preset] | {"preset": preset} | given)


def read_json(path: Path) -> dict[str, Any]:
    """The dict in a JSON file; an empty one if the file holds no dict or cannot be read."""
    if not os.path.isfile(path):  # a pipe would keep us waiting
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # the last two: not JSON, not text, or hostile
        return {}
    return content if isinstance(content, dict) else {}


def check_module(source: str, env_id: str, given: str | None) -> None:
    """Raise InputError for a task "module:name" of a file that the user has not `given`: Gymnasium imports modules."""
    module, found, _ = env_id.partition(":")
    if found and env_id != given:
        raise InputError(f"{source} plays {env_id!r}, which imports {module}: add --env-id {env_id}, if you trust it.")


def parse(args_class: type, words: Sequence[str] | None = None) -> Any:
    """`args_class` as the command line (or `words`) sets it, else as `--resume RUN_DIR`, `--preset` or the defaults."""
    words = sys.argv[1:] if words is None else list(words)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # for the flags that set other flags' defaults
    for name in ("resume", "preset", "env_id"):  # in both spellings, as tyro takes them
        early.add_argument(f"--{name}", flag(name), nargs="?")  # tyro says if a value is missing
    known, _ = early.parse_known_args(words)
    args = args_class()
    if known.resume not in (None, "None", "auto"):
        saved = read_json(Path(known.resume, "args.json"))
        if not saved:
            raise InputError(f"--resume {known.resume}: no run folder with a readable args.json is there.")
        check_module(f"--resume {known.resume}", str(saved.get("env_id")), known.env_id)
        try:
            own = {"resume": None, "track": False, "runs_dir": str(Path(known.resume).parent)}  # not the file's
            args = from_json(args_class, saved | own)
        except Exception as error:  # of tyro's, too
            raise InputError(f"--resume {known.resume}: use the script that made it ({error}).") from None
        if saved.get("track") and "--track" not in words:
            print("note: that run was tracked: add --track to go on with that, too", file=sys.stderr)
    elif known.preset in args_class.presets:
        args = preset_args(args_class, known.preset)
    script = sys.modules[args_class.__module__]
    shown = {"prog": Path(script.__file__).name, "description": (script.__doc__ or "").partition("\n")[0]}
    config = tyro.conf.SuppressFixed, tyro.conf.OmitArgPrefixes
    found = tyro.cli(command_line(args_class, vars(args)), args=words, config=config, **shown)
    for section in vars(found).values():
        args = replace(args, **{name: getattr(section, name) for name in section.own})
    return args


def command_line(args_class: type, defaults: dict[str, Any]) -> type:
    """What tyro shows as `--help`: for `args_class` and each class that it inherits from, a section of the fields that
    it declares first, its `own`. Sections are subclasses of `args_class`, in which tyro finds the help of a field."""
    hints = get_type_hints(args_class, include_extras=True)
    origin = {name: parent for parent in args_class.__mro__ for name in get_annotations(parent)}
    sections = []
    for parent in args_class.__mro__:
        own = [name for name in defaults if origin[name] is parent]
        if own:
            rest = [(name, tyro.conf.Fixed[hints[name]]) for name in defaults if name not in own]
            title = "algorithm" if parent is args_class else parent.__doc__.replace(" ", "_")
            part = make_dataclass(title, rest, bases=(args_class,), namespace={"own": own, "__doc__": ""}, kw_only=True)
            sections.append((title, part, field(default_factory=partial(part, **defaults))))
    return make_dataclass("Args", sections)
