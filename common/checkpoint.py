"""Checkpoints and exact resume: a run that dies and is resumed is the same run.

After each iteration, `Checkpoints.save` copies all that the rest of the run depends on into memory: parameters,
optimisers, reward scale, random generators, the environments' own state, statistics, and how long each log is. (Where
several ranks make the run, it does so every ten seconds, and rank 0 keeps the copy for all of them.) The
copy is written to `<run>/checkpoints/<step>.pt` every `--checkpoint-interval` minutes, and whenever the run ends: by
its last step, a signal, an error. So a signal never waits for an iteration to end, and loses that iteration alone.

Files are written under another name, synced and renamed. `<step>.sha256` beside a checkpoint is what `sha256sum -c`
takes. Nothing is unpickled but tensors and plain values (`weights_only=True`).
"""

import dataclasses
import hashlib
import importlib
import io
import itertools
import random
import shlex
import sys
import time
import zipfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import torch

from common.env_state import decode, encode
from common.envs import make_envs
from common.errors import InputError, TrainingError, flag, hold_signals, require
from common.run import Run, cannot_write, lock_folder, read_json, write_atomically
from common.world import ALONE, World

FORMAT = 1
CONTENT = {"format": int, "script": str, "args": dict, "step": int, "made_with": str, "run": dict, "loop": dict}
# What a resumed run may change. All else is refused, for it would be another run.
MAY_CHANGE = {
    *("total_timesteps", "checkpoint_interval", "keep_checkpoints", "log_interval", "resume", "runs_dir"),
    *("device", "torch_deterministic", "num_threads", "micro_batch_size", "accelerate", "aux_frames"),
    *("track", "wandb_project_name", "wandb_entity"),
    *("eval_interval", "eval_episodes", "eval_num_levels", "eval_start_level"),
}
ALL_STEPS = {"total_timesteps"}  # among them, but `auto` looks for a run of the same length
PER_RANK = {"reward_normalizer"}  # parts that are not the same on all ranks
RANKS_COPY_SECONDS = 10


class Damaged(Exception):
    """A file that is no whole checkpoint. The message completes "<file> ..."."""


class Resumed(NamedTuple):
    """A run to go on with."""

    path: Path
    lock: IO  # held while the file is open
    checkpoint: dict[str, Any] | None  # None where the run died before its first


# ----------------------------------------------------------------------------------------------------- finding a run


def saved_args(args_class: type) -> Any:
    """Defaults for the command line: the settings of the run that `--resume RUN_DIR` names, or else `args_class()`."""
    words = sys.argv[1:]
    given = [after for word, after in zip(words, [*words[1:], ""], strict=True) if word == "--resume"]
    given += [word.removeprefix("--resume=") for word in words if word.startswith("--resume=")]
    if not given or given[-1] in ("auto", "None"):
        return args_class()
    settings = read_args(Path(given[-1]))
    hints = get_type_hints(args_class)
    # flags that are younger than the run have their defaults, where that cannot make it another run
    settings = {name: getattr(args_class(), name) for name in MAY_CHANGE & hints.keys()} | settings
    unknown = [
        name for name in settings.keys() | hints if name not in hints or not fits(settings.get(name), hints[name])
    ]
    if unknown:
        names = ", ".join(map(flag, sorted(unknown)))
        raise InputError(f"--resume {given[-1]}: that run is of a script with other flags ({names}).")
    return args_class(**settings | {"resume": None})


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON is of an annotated type."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    kinds = get_args(hint) or (hint,)
    return type(value) in kinds or (type(value) is int and float in kinds)


def read_args(path: Path) -> dict[str, Any]:
    """The settings of the run in folder `path`."""
    settings = read_json(path / "args.json")
    if not settings:
        raise InputError(f"--resume {path}: no run folder with a readable args.json is there.")
    return settings


def find_run(args: Any, script: str, world: World = ALONE) -> Resumed | None:
    """Find, lock and read the run that `--resume` asks for; None for a new run.

    `auto` takes the newest run in `--runs-dir` that has not ended, is not in use, and has the same settings and number
    of ranks. Ranks that torchrun has restarted go on with the run that they were making.

    Raises:
        InputError: no such run, a setting that must not change, a run in use, or no checkpoint that can be read.
    """
    resumed = world.first(lambda: search(args, script, world), send=lambda found: found and found._replace(lock=None))
    if resumed is None or resumed.checkpoint is None:
        return resumed
    return resumed._replace(checkpoint=of_rank(resumed.checkpoint, world))


def of_rank(checkpoint: dict[str, Any], world: World) -> dict[str, Any]:
    """A checkpoint as rank `world.rank` goes on from it; "loop" is None, and there is no "random", if it cannot."""
    own = [{}, *checkpoint.get("other_ranks", [])]
    checkpoint = {name: value for name, value in checkpoint.items() if name != "other_ranks"}
    if len(own) == world.size:
        return checkpoint | own[world.rank]
    if world.rank == 0:
        print(
            f"note: another number of ranks ({len(own)} so far, now {world.size}): the run goes on from its "
            "parameters, but with new environments, which draw other levels",
            file=sys.stderr,
        )
    checkpoint = {name: value for name, value in checkpoint.items() if name != "random"} | {"loop": None}
    if "reward_normalizer" in checkpoint:  # the new environments have no return as yet
        scale = checkpoint["reward_normalizer"]
        checkpoint["reward_normalizer"] = scale | {"returns": [0.0] * len(scale["returns"])}
    return checkpoint


def search(args: Any, script: str, world: World) -> Resumed | None:
    """`find_run` on rank 0."""
    if world.begun not in (None, "auto"):
        return open_run(Path(world.begun), args, script, complete=True)  # a rank may have died at the very end
    if "auto" not in (args.resume, world.begun):
        return args.resume and open_run(Path(args.resume), args, script)
    for path, finished in runs_of(args, script, world.size):
        if finished:
            continue
        try:
            return open_run(path, args, script)
        except InputError as error:
            print(f"note: --resume auto passes {path} over: {error}", file=sys.stderr)
    print(f"--resume auto: no run with these settings waits in {args.runs_dir}, so that a new one starts", flush=True)
    return None


def runs_of(args: Any, script: str, ranks: int = 1) -> list[tuple[Path, bool]]:
    """Run folders in --runs-dir with the settings of `args`, the newest first, and whether each run has ended.

    Of the settings that a resumed run may change, the number of steps must be the same, and where `args` want
    evaluations theirs: those that a run has gone past without, it cannot make any more.
    """
    found, also = [], ALL_STEPS
    if args.eval_interval:
        also = also | {name for name in vars(args) if name.startswith("eval_")}
    for path in Path(args.runs_dir).glob("*/"):
        settings, meta = read_json(path / "args.json"), read_json(path / "meta.json")
        same = meta.get("script") == script and meta.get("ranks", 1) == ranks
        if same and not differences(args, settings, also):
            found.append((str(meta.get("started")), path.stat().st_ctime_ns, path, bool(meta.get("finished"))))
    return [(path, finished) for *_, path, finished in sorted(found, reverse=True)]


def differences(args: Any, settings: dict[str, Any], also: set[str] = frozenset()) -> list[str]:
    """Names of the settings of `args` that a resumed run must not change, and those of `also`, which differ."""
    fixed = [field.name for field in dataclasses.fields(args) if field.name not in MAY_CHANGE or field.name in also]
    return [name for name in fixed if name not in settings or settings[name] != getattr(args, name)]


def open_run(path: Path, args: Any, script: str, complete: bool = False) -> Resumed:
    """Lock and read a run; one that is complete only if `complete` allows it."""
    settings = read_args(path)
    try:
        lock = lock_folder(path)
    except OSError as error:
        raise cannot_write(args, error, path) from error
    checkpoint, meta = newest_checkpoint(path), read_json(path / "meta.json")
    if checkpoint is None:
        print(f"note: {path} has no checkpoint yet, so that it starts from the beginning", file=sys.stderr)
        made_by = meta.get("script")
    else:
        settings, made_by = checkpoint["args"], checkpoint["script"]
        other_end = settings.get("total_timesteps") != args.total_timesteps
        ended = checkpoint["step"] >= args.total_timesteps and (meta.get("finished") or other_end)
        if ended and not complete:
            raise InputError(
                f"--resume {path}: it has made {checkpoint['step']:,} steps: raise --total-timesteps to go on."
            )
    if made_by != script:
        raise InputError(f"--resume {path}: that is a run of {made_by}, not of {script}.")
    changed = differences(args, settings)
    if changed:
        listed = ", ".join(
            f"{flag(name)} {getattr(args, name)} (there: {settings.get(name, 'unknown')})" for name in changed
        )
        raise InputError(
            f"--resume {path}: a resumed run cannot change {listed}; to start a new run from its weights, use "
            f"--init-from {path}."
        )
    return Resumed(path, lock, checkpoint)


# ------------------------------------------------------------------------------------------------------------- files


def checkpoint_files(path: Path) -> list[Path]:
    """The checkpoints of the run in folder `path`, the newest first."""
    return sorted((file for file in (path / "checkpoints").glob("*.pt") if file.stem.isdigit()), reverse=True)


def newest_checkpoint(path: Path) -> dict[str, Any] | None:
    """The newest checkpoint that can be read, with a warning for each that cannot; None where there is none at all."""
    files = checkpoint_files(path)
    for file in files:
        try:
            return read_checkpoint(file)
        except Damaged as error:
            print(f"warning: {file} {error}: it is skipped for the one before", file=sys.stderr)
    if files:
        raise InputError(f"--resume {path}: none of its {len(files)} checkpoints can be read.")
    return None


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getbuffer()
    # The checksum first: without its checkpoint it does no harm.
    write_atomically(path.with_suffix(".sha256"), f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode())
    write_atomically(path, data)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of this format. Raises Damaged; runs no code that the file might hold."""
    try:
        data, checksum = path.read_bytes(), path.with_suffix(".sha256").read_bytes()
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror}: {Path(error.filename).name})") from error
    if hashlib.sha256(data).hexdigest().encode() != checksum.partition(b" ")[0]:
        raise Damaged("is damaged (its checksum does not match)")
    content = unpickle(io.BytesIO(data))
    whole = all(isinstance(content.get(name), kind) for name, kind in CONTENT.items()) and content["loop"]
    if not whole or content["format"] != FORMAT:
        raise Damaged("is no checkpoint of this version")
    return content


def unpickle(file: Path | IO) -> dict[str, Any]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever foreign bytes drive the unpickler to
        raise Damaged("is no checkpoint (PyTorch cannot load it as plain tensors)") from error
    if not isinstance(content, dict):
        raise Damaged("is no checkpoint")
    return content


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The agent in a file of PyTorch's. Raises Damaged, also where a checksum of the archive does not match."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() is not None
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from error
    except Exception:  # whatever foreign bytes drive the module to
        damaged = True
    weights = None if damaged else unpickle(path).get("agent")
    if not isinstance(weights, dict):
        raise Damaged("is damaged or holds no agent")
    return weights


HEADS = Literal["keep", "policy", "reset"]


def load_weights(agent: torch.nn.Module, source: str, heads: HEADS = "keep") -> None:
    """Give `agent` the parameters of `source`, which `--init-from` names: a run folder, its model, or a checkpoint.

    Only with `heads` "keep" it gets all; with "policy", the heads of its value start anew, whatever those of `source`
    are, and with "reset" that of its policy, too.

    Raises:
        InputError: there are none, or they are of another network.
    """
    path = Path(source)
    path = path / "model.pt" if path.is_dir() else path
    try:
        weights = read_weights(path)
    except Damaged as error:
        raise InputError(f"--init-from {source}: {path} {error}.") from error
    own = agent.state_dict()
    values = ("value_head.", "aux_value_head.")
    anew = {"keep": (), "policy": values, "reset": ("policy_head.", *values)}[heads]
    weights = {name: value for name, value in weights.items() if not name.startswith(anew)}
    weights |= {name: value for name, value in own.items() if name.startswith(anew)}
    wrong = [name for name in own if getattr(weights.get(name), "shape", None) != own[name].shape]
    if wrong or weights.keys() != own.keys():
        wrong = wrong or sorted(weights.keys() - own.keys())
        what = "use the same flags" if not all("_head." in name for name in wrong) else "add --init-heads reset"
        raise InputError(f"--init-from {source}: its network is another one ({wrong[0]} does not fit): {what}.")
    agent.load_state_dict(weights)


def load_agent(run_dir: Path | str, device: torch.device | str = "cpu") -> tuple[torch.nn.Module, Any]:
    """The agent of a finished or running run, and its settings (the script's `Args`).

    The run's script is imported, as it is now: it must be where Python finds it, such as in the working directory.

    Raises:
        InputError: there is no such run, or it is of another script or network than that is now.
    """
    run_dir = Path(run_dir)
    meta, settings = read_json(run_dir / "meta.json"), read_json(run_dir / "args.json")
    require(bool(meta.get("script") and settings), f"{run_dir} is no run folder: it has no readable args.json.")
    try:
        script = importlib.import_module(Path(meta["script"]).stem)
        args = script.Args(**settings)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{run_dir} is of {meta['script']}, which cannot be used here: {error}.") from error
    except TypeError as error:
        raise InputError(f"{run_dir} is of a script with other flags ({error}): use its commit.") from None
    try:
        weights = read_weights(run_dir / "model.pt")
    except Damaged as error:
        raise InputError(f"{run_dir / 'model.pt'} {error}.") from error
    envs = make_envs(args.env_id, len(args.env_id.split(",")), seed=0)
    agent = script.Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
    envs.close()
    try:
        agent.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"{run_dir} is of another network than this {meta['script']} has.") from error
    return agent, args


# -------------------------------------------------------------------------------------------------------------- a run


def random_states(device: torch.device) -> dict[str, Any]:
    """The state of every generator that `setup_device` seeds."""
    states = {"python": random.getstate(), "numpy": encode(np.random.get_state()), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(decode(states["numpy"]))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def copy_to_cpu(value: Any) -> Any:
    """A copy of nested dicts, lists and tuples that shares no tensor with `value`."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_cpu(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copy_to_cpu, value))
    return value


class Checkpoints:
    """Around a script's loop: `save` at each iteration's end, and whatever ends the loop, the run can be resumed.

    Args:
        run: its folder, logs and settings.
        resumed: what `find_run` has returned. `loop` is then what the script gave to `save`; else it is None, as where
            the run goes on with another number of ranks.
        world: the ranks that make the run. Each has a random generator, a reward scale and a `loop` of its own.
        agent: its parameters are also written as `model.pt`.
        parts: what else has a `state_dict` and belongs to the run; None is left out.
    """

    def __init__(
        self, run: Run, resumed: Resumed | None, *, world: World = ALONE, agent: torch.nn.Module, **parts: Any
    ):
        self.run, self.args, self.agent, self.world = run, run.args, agent, world
        self.parts = {"agent": agent} | {name: part for name, part in parts.items() if part is not None}
        self.folder = run.path / "checkpoints"
        self.loop = self.snapshot = self.written = None
        self.last_write = self.last_copy = time.monotonic()
        checkpoint = resumed and resumed.checkpoint
        if checkpoint is not None:
            self.load(checkpoint)
        if world.rank > 0:
            return
        try:
            self.tidy()
            write_model(run.path, copy_to_cpu(agent.state_dict()), self.args, run.step)
        except OSError as error:
            raise cannot_write(self.args, error, resumed and run.path) from error

    def load(self, checkpoint: dict[str, Any]) -> None:
        run = self.run
        try:
            for name, part in self.parts.items():
                if isinstance(part, torch.optim.Optimizer):  # which kernels it uses is a matter of the device
                    for group, saved in zip(part.param_groups, checkpoint[name]["param_groups"], strict=True):
                        if "fused" in group:  # RMSprop has none
                            saved["fused"] = group["fused"]
                part.load_state_dict(checkpoint[name])
            if checkpoint["loop"] is not None:
                set_random_states(checkpoint["random"], run.device)
            self.loop, self.written = checkpoint["loop"], checkpoint["step"]
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise InputError(f"--resume {run.path}: its checkpoint does not fit this script ({error!r}).") from error
        if checkpoint["made_with"] != run.made_with and self.world.rank == 0:
            print(f"note: made with {checkpoint['made_with']}, resumed with {run.made_with}", file=sys.stderr)

    def tidy(self) -> None:
        """Remove what a killed process has left half written; rename checkpoints that were skipped, out of the way."""
        for file in checkpoint_files(self.run.path):
            if int(file.stem) > self.run.step:
                file.rename(file.with_suffix(".damaged"))
        for file in [*self.folder.glob("*.tmp"), *self.folder.glob("*.sha256")]:
            if file.suffix == ".tmp" or not file.with_suffix(".pt").exists():
                file.unlink()

    def __enter__(self) -> "Checkpoints":
        return self

    def save(self, step: int, **loop: Any) -> None:
        """Take a copy of the run as it is after `step` steps; write it if the last one written is old enough.

        Args:
            loop: what else the script needs to go on: tensors and plain values.

        Raises:
            TrainingError: a parameter is NaN or infinite; the copy before this stays.
        """
        networks = [part for part in self.parts.values() if hasattr(part, "named_parameters")]
        named = dict(itertools.chain(*(network.named_parameters() for network in networks)))
        finite = torch.stack([parameter.isfinite().all() for parameter in named.values()]).tolist()
        for name, is_finite in zip(named, finite, strict=True):
            if not is_finite:
                raise TrainingError(f"{name} is not finite after step {step:,}")
        copies, writes = self.world.agree(self.due(step))
        if not copies:
            return
        self.last_copy = time.monotonic()
        self.world.compare(self.agent)
        content = {name: part.state_dict() for name, part in self.parts.items()}
        own = {name: content.pop(name) for name in PER_RANK & content.keys()}
        own = copy_to_cpu(own | {"random": random_states(self.run.device), "loop": loop})
        ranks, statistics = self.world.gather(own), self.run.state_dict()
        if ranks is not None:  # on rank 0
            self.snapshot = copy_to_cpu(content) | {
                "format": FORMAT,
                "script": self.run.script,
                "args": dataclasses.asdict(self.args),
                "step": step,
                "made_with": self.run.made_with,
                "run": statistics,
                **own,
                "other_ranks": ranks[1:],
            }
            if writes:
                self.write_or_warn()
        if writes:
            self.world.agree(None)  # wait for rank 0, however long it takes

    def write_or_warn(self) -> None:
        self.last_write = time.monotonic()
        try:
            self.write()
        except OSError as error:
            last = "there is none yet" if self.written is None else f"the last is of step {self.written:,}"
            print(
                f"warning: no checkpoint at step {self.snapshot['step']:,} ({error.strerror}), {last}; the run goes on",
                file=sys.stderr,
            )

    def due(self, step: int) -> tuple[bool, bool]:
        """Whether to take a copy now (of several ranks only every few seconds, for all send theirs to rank 0), and
        whether to write it."""
        now = time.monotonic()
        writes = now - self.last_write >= 60 * self.args.checkpoint_interval
        copies = self.world.size == 1 or step >= self.run.total_steps or now - self.last_copy >= RANKS_COPY_SECONDS
        return copies or writes, writes

    def write(self) -> None:
        """Write the newest copy, unless that is done, and remove all but the `--keep-checkpoints` newest."""
        if self.snapshot is None or self.snapshot["step"] == self.written:
            return
        self.run.sync()
        self.folder.mkdir(exist_ok=True)
        write_checkpoint(self.folder / f"{self.snapshot['step']:012}.pt", self.snapshot)
        write_model(self.run.path, self.snapshot["agent"], self.args, self.snapshot["step"])
        self.written = self.snapshot["step"]
        for file in checkpoint_files(self.run.path)[self.args.keep_checkpoints :]:
            file.unlink()
            file.with_suffix(".sha256").unlink(missing_ok=True)

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        hold_signals()
        path, unwritten = self.run.path, None
        again = f"{self.world.launcher} {self.run.script} --resume {shlex.quote(str(path))}"
        try:
            self.write()
        except OSError as failure:
            unwritten = f"the newest checkpoint cannot be written ({failure.strerror})"
        if error is None and unwritten is None:
            self.run.finish("done")
        elif error is None:
            self.run.close()
            raise TrainingError(
                f"the run is complete, but {unwritten}: free some space and repeat its end with {again}"
            )
        elif isinstance(error, KeyboardInterrupt):
            self.run.finish("stopped")
            if self.world.rank == 0:
                print(*filter(None, [unwritten]), f"resume with: {again}", sep="\n", flush=True)
        else:
            self.run.close()
        if isinstance(error, TrainingError):
            name = f"bad_batch.rank{self.world.rank}.pt" if self.world.rank else "bad_batch.pt"
            batch = error.batch and write_batch(path / name, error.batch)
            model = f"its last good model is {path / 'model.pt'}"
            raise TrainingError(
                "; ".join(filter(None, [f"{error}: the run stops", model, unwritten, batch or f"resume with: {again}"]))
            ) from error


def write_model(path: Path, weights: dict[str, torch.Tensor], args: Any, step: int) -> None:
    """Write `model.pt`: a dict of "agent", "args" and "step" that `torch.load(..., weights_only=True)` accepts.

    `weights` are on the CPU, as those of a copy that `Checkpoints.save` has taken already are.
    """
    buffer = io.BytesIO()
    torch.save({"agent": weights, "args": dataclasses.asdict(args), "step": step}, buffer)
    write_atomically(path / "model.pt", buffer.getbuffer())


def write_batch(path: Path, batch: dict[str, torch.Tensor]) -> str:
    """Write what a run has stumbled over; return a sentence on where it lies."""
    try:
        torch.save(copy_to_cpu(batch), path)
    except (OSError, RuntimeError) as error:  # the second is PyTorch's own for a full disk
        path.unlink(missing_ok=True)
        return f"the batch could not be written ({error})"
    return f"the batch is {path}"
