"""Saving, finding, resuming and loading runs. A resumed run equals one that was never interrupted. After an iteration,
all that the rest of it depends on is copied into memory; files are written now and then, and at the run's end."""

import copy
import io
import math
import os
import random
import re
import shlex
import shutil
import sys
import time
import zipfile
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map

from common import InputError, TrainingError
from common.device import World
from common.envs import Envs
from common.fast import accelerate
from common.run import Run, lock_folder, require_finite, sha256, write_atomically
from common.settings import ROOT, check_limits, check_module, flag, from_json, read_json, to_json

FORMAT = 3
SHARED = (torch.nn.Module, torch.optim.Optimizer)  # parts that are the same on all ranks; others are each rank's own
RANKS_COPY_SECONDS = 10  # between copies with several ranks: to send 64 states of Procgen takes up to 100 ms
NPY = ".npy"  # key of NumPy's arrays and numbers in a file
# What a resumed run may change. All else is refused, for it would be another run.
MAY_CHANGE = {
    *("total_timesteps", "checkpoint_interval", "keep_checkpoints", "log_interval", "resume", "runs_dir"),
    *("device", "torch_deterministic", "num_threads", "micro_batch_size", "accelerate", "aux_frames"),
    *("track", "wandb_project_name", "wandb_entity", "eval_interval", "eval_episodes"),
}
CONTENT = {"script": str, "args": dict, "step": int, "run": dict, "parts": dict, "ranks": list}


def checkpoint_files(path: Path) -> list[Path]:
    """The checkpoints of the run in folder `path`, the newest first."""
    return sorted((file for file in (path / "checkpoints").glob("*.pt") if file.stem.isdecimal()), reverse=True)


def newest_checkpoint(path: Path) -> dict[str, Any]:
    """The newest readable checkpoint, with a warning for each that is damaged. Raises InputError if there is none."""
    for file in checkpoint_files(path):
        try:
            return read_archive(file, CONTENT)
        except InputError as error:
            print(f"warning: {str(error).rstrip('.')}: it is skipped for the one before", file=sys.stderr)
    raise InputError(f"--resume {path}: it has no checkpoint that can be read: start a new run.")


def read_archive(path: Path, parts: dict[str, type]) -> dict[str, Any]:
    """The dict in a file of PyTorch's; runs no code in it. Raises InputError if it is damaged or lacks typed parts."""
    if os.path.exists(path) and not os.path.isfile(path):  # to read a pipe would wait for ever
        raise InputError(f"{str(path)!r} is no file.")
    try:
        with zipfile.ZipFile(path) as archive:
            changed = any(each.external_attr for each in archive.infolist())  # zip's checksums do not cover this field
            if archive.testzip() or changed:
                raise zipfile.BadZipFile
        saved = torch.load(path, map_location="cpu", weights_only=True)
        content = tree_map(load_leaf, saved, is_leaf=lambda x: isinstance(x, dict) and NPY in x)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).") from error
    except Exception as error:  # whatever foreign bytes drive the two modules to
        raise InputError(f"{path} is damaged, or not a file of tensors and plain values.") from error
    whole = isinstance(content, dict) and all(isinstance(content.get(name), kind) for name, kind in parts.items())
    if not whole or str(content.get("format")) != str(FORMAT):
        raise InputError(f"{path} is no model or checkpoint of this version.")
    return content


def write_archive(path: Path, content: dict[str, Any]) -> None:
    """Write a file for `read_archive`. Raises InputError for what that would refuse."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    foreign = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if foreign:
        raise InputError(f"a checkpoint cannot hold {', '.join(foreign)}: use tensors, NumPy arrays, numbers and text.")
    write_atomically(path, buffer.getbuffer())


def copy_leaf(x: Any) -> Any:
    """A copy on the CPU. NumPy's arrays and numbers become the bytes of .npy files, as their pickles can run code."""
    if isinstance(x, torch.Tensor):
        return x.detach().to("cpu", copy=True)
    if not (isinstance(x, np.generic) or type(x) is np.ndarray) or x.dtype.hasobject:
        return copy.copy(x)
    file = io.BytesIO()
    np.save(file, x, allow_pickle=False)
    return {NPY: torch.frombuffer(file.getbuffer(), dtype=torch.uint8), "number": isinstance(x, np.generic)}


def load_leaf(x: Any) -> Any:
    if not isinstance(x, dict) or NPY not in x:
        return x
    array = np.load(io.BytesIO(x[NPY].numpy().tobytes()), allow_pickle=False)
    return array[()] if x["number"] else array


class Kept(SimpleNamespace):
    """Plain values and tensors, as attributes, that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class RandomStates:
    """The state of every generator that `setup_device` seeds."""

    def state_dict(self) -> dict[str, Any]:
        states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        if torch.cuda.is_initialized() and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])


class ReplayedPhase:
    """PPG's phase as a checkpoint has it. Procgen's frames, 1.6 GB, are left out: `load_state_dict` plays the actions
    again, from `phase.start`, the environments' states. Observations of those that are not `replayable` are saved."""

    def __init__(self, phase: Any, envs: Envs):
        self.phase, self.envs, self.save_obs = phase, envs, False

    def state_dict(self) -> dict[str, Any]:
        self.save_obs = self.save_obs or not self.envs.replayable  # for good, as a phase may have begun replayable
        names = ("actions", "returns", "obs") if self.save_obs else ("actions", "returns")
        return {name: getattr(self.phase, name)[: self.phase.length] for name in names} | {"start": self.phase.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a phase that led the environments to where they are. Raises InputError if they do not repeat it."""
        phase, envs = self.phase, self.envs
        phase.start, phase.length = state["start"], len(state["actions"])
        for name in state.keys() - {"start"}:
            getattr(phase, name)[: phase.length] = state[name]
        if "obs" in state:
            self.save_obs = True
            return
        states = [envs.state_dict()]
        envs.load_state_dict(phase.start)
        for k, t in np.ndindex(state["actions"].shape[:2]):
            phase.obs[k, t] = torch.as_tensor(envs.obs)
            envs.step(phase.actions[k, t].numpy())
        states.append(envs.state_dict())
        states = tree_map(lambda x: x.cpu().flatten().view(torch.uint8).numpy() if torch.is_tensor(x) else x, states)
        try:
            np.testing.assert_equal(*states)  # NaN equals NaN
        except AssertionError as error:
            hint = "is another version of them installed? Or must `replayable` be False?"
            raise InputError(f"the environments do not repeat: {hint}") from error


class Checkpoints:
    """Copies of the state of a run's `parts`, which have a `state_dict`; "agent" is also written as `model.pt`."""

    def __init__(self, run: Run, parts: dict[str, Any]):
        self.run, self.parts, self.world = run, parts, run.world
        self.snapshot = None  # the newest copy, until it is written
        self.best = {}  # what to write as best.pt, with the checkpoint that knows of it
        self.head = {"format": FORMAT, "script": run.script, "script_sha256": sha256(ROOT / run.script)}
        self.head["args"] = to_json(run.args)
        self.last_write = self.last_copy = time.monotonic() if run.step else -math.inf
        for file in checkpoint_files(run.path) if self.world.rank == 0 else []:
            if int(file.stem) > run.step:  # damaged: it was skipped
                file.rename(file.with_suffix(".damaged"))

    def save(self, step: int) -> None:
        """Copy the state after `step` steps; write it if it is time. Raises TrainingError for NaN or unequal ranks."""
        networks = {name: part for name, part in self.parts.items() if isinstance(part, torch.nn.Module)}
        sums = {f"{name}.{inner}": x.sum() for name, part in networks.items() for inner, x in part.named_parameters()}
        sums = require_finite(step, sums)  # a sum is NaN or infinite if a number is
        run, now = self.run, time.monotonic()
        due = now - self.last_copy >= min(RANKS_COPY_SECONDS, 60 * run.args.checkpoint_interval)
        if self.world.world_size > 1 and not self.world.broadcast(due or step >= run.total_steps):
            return
        self.last_copy = now
        own = {name: part.state_dict() for name, part in self.parts.items() if not isinstance(part, SHARED)}
        shared = {name: part.state_dict() for name, part in self.parts.items() if isinstance(part, SHARED)}
        ranks = self.world.all_gather((tree_map(copy_leaf, own), sums))
        for name, value in sums.items():
            if any(not math.isclose(value, other[name], rel_tol=1e-3, abs_tol=1e-3) for _, other in ranks):
                raise TrainingError(f"{name} differs between the ranks at step {step:,}: they must learn alike")
        statistics = run.state_dict()
        if self.world.rank > 0:
            return
        snapshot = self.head | {"step": step, "run": statistics, "ranks": [state for state, _ in ranks]}
        self.snapshot = snapshot | {"parts": tree_map(copy_leaf, shared)}  # whole at once, as a signal may come
        run.step = step
        if now - self.last_write >= 60 * run.args.checkpoint_interval:
            self.last_write = now
            try:
                self.write()
            except OSError as error:
                print(f"warning: no checkpoint at step {step:,} ({error.strerror})", file=sys.stderr)

    def write(self) -> None:
        """Write the newest copy, unless that is done, and remove all but the `--keep-checkpoints` newest."""
        if self.snapshot is not None:
            self.run.writer.flush()  # a run that is resumed from here does not make these events again
            folder = self.run.path / "checkpoints"
            folder.mkdir(exist_ok=True)
            step = self.snapshot["step"]
            for name, (at, agent) in (self.best | {"model.pt": (step, self.snapshot["parts"]["agent"])}).items():
                write_archive(self.run.path / name, self.head | {"agent": tree_map(copy_leaf, agent), "step": at})
            write_archive(folder / f"{step:012}.pt", self.snapshot)
            self.snapshot, self.best = None, {}
        for file in checkpoint_files(self.run.path)[self.run.args.keep_checkpoints :]:
            file.unlink()

    def close(self, error: BaseException | None) -> None:
        """Write the newest copy and close the folder. Raises TrainingError if that fails, or `error` with advice."""
        run, unwritten = self.run, []
        try:
            if self.world.rank == 0 and not isinstance(error, InputError):
                self.write()
            run.close(error)
        except OSError as failure:
            run.close(failure)
            unwritten = [f"the newest checkpoint cannot be written ({failure.strerror})"]
        words = [*self.world.launcher.split(), os.path.abspath(ROOT / run.script), "--resume", str(run.path)]
        words += ["--track"] if run.args.track else []
        words += ["--env-id", run.args.env_id] if ":" in run.args.env_id else []  # what a file names is not imported
        advice = f"resume with: {shlex.join(words)}" if checkpoint_files(run.path) else "it has no checkpoint to resume"
        if isinstance(error, KeyboardInterrupt) and self.world.rank == 0:
            print(*unwritten, advice, sep="\n", file=sys.stderr)
        if error is None and unwritten:
            raise TrainingError(f"the run is complete, but {unwritten[0]}: free some space; {advice}")
        if isinstance(error, InputError) and self.world.rank == 0 and not checkpoint_files(run.path):
            shutil.rmtree(run.path)  # of a run that cannot begin
        if isinstance(error, TrainingError):
            model = f"its last good model is {run.path / 'model.pt'}"
            raise TrainingError("; ".join([f"{error}: the run stops", model, *unwritten, advice])) from error


class Resumed(NamedTuple):
    path: Path
    lock: IO | None  # held while the file is open, by rank zero
    checkpoint: dict[str, Any]

    def __reduce__(self) -> tuple:  # what the other ranks get
        return Resumed, (self.path, None, self.checkpoint)


def find_run(args: Any, script: str, world: World) -> Resumed | None:
    """Find, lock and read the run that `--resume` asks for; None for a new run. Raises InputError if there is no such
    run, it cannot be read or is in use, or a setting must not be changed."""
    if args.resume not in (None, "auto"):
        return read_run(Path(args.resume).absolute(), args, script, world)  # environments may chdir
    found = runs_of(args, script, world.world_size) if args.resume == "auto" else []
    for path in [path for path, finished in found if not finished]:
        try:
            return read_run(path, args, script, world)
        except InputError as error:
            print(f"note: --resume auto passes {path} over: {error}", file=sys.stderr)
    return None


def runs_of(args: Any, script: str, ranks: int = 1) -> list[tuple[Path, bool]]:
    """Run folders in --runs-dir with the settings of `args`, also of steps and evaluations (a run cannot make up for
    those that it has gone past), the newest first, and whether each run has ended."""
    may_differ = MAY_CHANGE - {"total_timesteps", "eval_interval", "eval_episodes"}
    found = []
    for path in Path(args.runs_dir).absolute().glob("*/"):
        settings, meta = read_json(path / "args.json"), read_json(path / "meta.json")
        gone = not os.path.exists(ROOT / str(meta.get("script")))  # it may have been moved
        known = meta.get("script") == script or (gone and sha256(ROOT / script) in str(meta))
        if known and meta.get("ranks", 1) == ranks and not differences(args, settings, may_differ):
            found.append((str(meta.get("started")), path.stat().st_ctime_ns, path, bool(meta.get("finished"))))
    return [(path, finished) for *_, path, finished in sorted(found, reverse=True)]


def differences(args: Any, settings: dict[str, Any], may_differ: set[str]) -> list[str]:
    """Names of the settings of `args` that differ from `settings`, but for those that may. `auto` is any precision."""
    may_differ = may_differ | ({"precision"} if args.precision == "auto" else set())
    there = to_json(type(args)()) | args.earlier | settings
    return [name for name, value in to_json(args).items() if name not in may_differ and there[name] != value]


def read_run(path: Path, args: Any, script: str, world: World) -> Resumed:
    """Lock and read a run. Raises InputError as `find_run`."""
    try:
        lock = lock_folder(path)
    except OSError as error:
        raise InputError(f"--resume {path}: no run folder that can be written is there ({error.strerror}).") from error
    with lock:  # let go at once, as a file that is closed later would end the lock of another try
        checkpoint, finished = newest_checkpoint(path), read_json(path / "meta.json").get("finished")
        step, settings, ranks = checkpoint["step"], checkpoint["args"], len(checkpoint["ranks"])
        ended = finished or settings.get("total_timesteps") != args.total_timesteps
        if step >= args.total_timesteps and ended:
            raise InputError(f"--resume {path}: it has made {step:,} steps: raise --total-timesteps to go on.")
        if checkpoint["script"] != script and checkpoint.get("script_sha256") != sha256(ROOT / script):
            raise InputError(f"--resume {path}: that is a run of {checkpoint['script']}, not of {script}.")
        if ranks != world.world_size:
            raise InputError(f"--resume {path}: that is a run of {ranks} ranks, not of {world.world_size}.")
        if changed := differences(args, settings, MAY_CHANGE):
            there = [f"{flag(name)} {getattr(args, name)} (there: {settings.get(name, 'unknown')})" for name in changed]
            other = f"to start a new run from its weights, use --init-from {path}."
            raise InputError(f"--resume {path}: a resumed run cannot change {', '.join(there)}; {other}")
    return Resumed(path, lock_folder(path, note=False), checkpoint)


def load_parts(parts: dict[str, Any], resumed: Resumed, rank: int) -> None:
    """Put the parts of a run into the state that its checkpoint holds for rank `rank`."""
    try:
        for name, part in parts.items():
            state = resumed.checkpoint["parts"] if isinstance(part, SHARED) else resumed.checkpoint["ranks"][rank]
            part.load_state_dict(state[name])
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InputError(f"--resume {resumed.path}: its checkpoint does not fit this script ({error!r}).") from error


def read_model(source: Path | str) -> dict[str, Any]:
    """The `script`, `args` and weights (`agent`) in a model, checkpoint or run folder. Raises InputError."""
    path = Path(source)
    content = read_archive(path / "model.pt" if os.path.isdir(path) else path, {"script": str, "args": dict})
    parts = content.get("parts", content)
    agent = parts.get("agent") if isinstance(parts, dict) else None
    if not isinstance(agent, dict) or not all(isinstance(value, torch.Tensor) for value in agent.values()):
        raise InputError(f"{source} holds no agent.")
    for name, value in agent.items():
        if value.isnan().any():  # a buffer may be infinite, as masks of attention are
            raise InputError(f"{source} cannot be used: {name} is NaN.")
    return content | {"agent": agent}


def load_weights(agent: torch.nn.Module, source: str, heads: Literal["keep", "policy", "reset"] = "keep") -> None:
    """Give `agent` the parameters that fit of `source`, which `--init-from` names, but for its `value_heads` (`heads`
    "policy") and `policy_heads` ("reset"). A further value head that `source` lacks starts as the first: a new one
    would inflate the features in PPG's first auxiliary phase. Raises InputError if nothing fits but heads."""
    own, weights = agent.state_dict(), read_model(source)["agent"]
    first, *others = agent.value_heads
    for name in [name for name in weights if name.startswith(f"{first}.")]:
        for other in others:
            weights.setdefault(name.replace(first, other, 1), weights[name])
    anew = {"keep": (), "policy": agent.value_heads, "reset": agent.policy_heads + agent.value_heads}[heads]
    same = [name for name in own if name in weights and getattr(weights[name], "shape", 0) == own[name].shape]
    fits = {name: weights[name] for name in same if name.split(".")[0] not in anew}
    if all(name.split(".")[0] in agent.policy_heads + agent.value_heads for name in fits):
        raise InputError(f"--init-from {source}: nothing of its encoder fits this network: use the same flags.")
    missing = ", ".join(name for name in own if name not in fits) or "no weights"
    print(f"note: --init-from {source}: {missing} start anew", file=sys.stderr)
    agent.load_state_dict(own | fits)


def load_agent(
    source: Path | str, device: torch.device | str = "cpu", script: Path | str | None = None, env_id: str | None = None
) -> tuple[torch.nn.Module, Any, Callable]:
    """The agent in a run folder, model or checkpoint, in evaluation mode, its settings, and its script's `make_envs`.
    `script` names another, such as the copy in a run folder, `env_id` a task of a module that may be imported. Raises
    InputError if it does not fit, there is none, or it names code not given nor ours; TrainingError for infinity."""
    model = read_model(source)
    check_module(str(source), str(model["args"].get("env_id")), env_id)
    if env_id not in (None, model["args"].get("env_id")):
        raise InputError(f"{source} plays {model['args'].get('env_id')!r}: leave --env-id {env_id} out.")
    path = Path(os.path.abspath(ROOT / model["script"])) if script is None else Path(script).absolute()
    if script is None and path.parent != ROOT:  # what comes with a model lies elsewhere
        raise InputError(f"{source} is of the script {model['script']!r}: name it by --script, if you trust it.")
    try:
        if model.get("script_sha256") not in (None, sha256(path)):  # None: an older model
            copy = f": --script RUN/{path.name} takes the copy in its run folder" if script is None else ""
            print(f"note: {path.name} is not the script that made {source}{copy}", file=sys.stderr)
        module = load_script(path)
        args = from_json(module.Args, model["args"])
        check_limits(args)
        envs = Envs(module.make_envs(args, len(args.env_id.split(",")), seed=0))
        envs.close()
        agent = module.Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
        agent.load_state_dict(model["agent"])
    except (OSError, ImportError, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{source} is of another {path.name} ({reason}): use its commit or --script.") from error
    require_finite(model.get("step", 0), {f"in {source}: {name}": x.sum() for name, x in agent.named_parameters()})
    accelerate(agent, "eager")
    return agent.eval(), args, module.make_envs


def load_script(script: Path | str) -> ModuleType:
    """The module of a script, by its path (from the repository's root); executed unless it has been imported before."""
    path = os.path.abspath(ROOT / script)
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == path:
            return module
    spec = spec_from_file_location(re.sub(r"\W", "_", str(script)), path)
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise ImportError(f"the script ends the process: {error!r}") from error
    return module
