"""Checkpoints: a run that dies and is resumed is the same run.
After an iteration, `Checkpoints.save` copies all that the rest of the run depends on into memory. The copy is written
to `<run>/checkpoints/<step>.pt` every `--checkpoint-interval` minutes, and when a signal or an error ends the run."""

import dataclasses
import io
import os
import random
import shlex
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from common.errors import InputError, TrainingError
from common.files import ROOT, write_atomically
from common.run import Run, require_finite
from common.world import World

FORMAT = 3
SHARED = (torch.nn.Module, torch.optim.Optimizer)  # parts that are the same on all ranks; others are each rank's own
RANKS_COPY_SECONDS = 10  # between copies with several ranks: to send 64 states of Procgen takes up to 100 ms
CONTENT = {"format": int, "script": str, "args": dict, "step": int, "run": dict, "ranks": list}


def checkpoint_files(path: Path) -> list[Path]:
    """The checkpoints of the run in folder `path`, the newest first."""
    return sorted((file for file in (path / "checkpoints").glob("*.pt") if file.stem.isdigit()), reverse=True)


def newest_checkpoint(path: Path) -> dict[str, Any]:
    """The newest readable checkpoint, with a warning for each that is damaged. Raises InputError if there is none."""
    for file in checkpoint_files(path):
        try:
            content = read_archive(file)
            if not all(isinstance(content.get(name), kind) for name, kind in CONTENT.items()):
                raise InputError(f"{file} lacks a part of a checkpoint.")
            return content
        except InputError as error:
            print(f"warning: {str(error).rstrip('.')}: it is skipped for the one before", file=sys.stderr)
    raise InputError(f"--resume {path}: it has no checkpoint that can be read: start a new run.")


def read_archive(path: Path) -> dict[str, Any]:
    """The dict in a file of PyTorch's; runs no code that the file might hold. Raises InputError if it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() or any(each.external_attr for each in archive.infolist())  # not in a checksum
        content = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).") from error
    except Exception as error:  # whatever foreign bytes drive the two modules to
        raise InputError(f"{path} is damaged, or not a file of tensors and plain values.") from error
    if not isinstance(content, dict) or str(content.get("format")) != str(FORMAT):
        raise InputError(f"{path} is {'damaged' if damaged else 'no model or checkpoint of this version'}.")
    return content


def write_archive(path: Path, content: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getbuffer())


def random_states(device: torch.device) -> dict[str, Any]:
    """The state of every generator that `setup_device` seeds, in plain values and tensors."""
    kind, keys, *rest = np.random.get_state()
    states = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def copy_to_cpu(value: Any) -> Any:
    """A copy of nested dicts, lists and tuples that shares no tensor with `value`."""
    return tree_map_only(torch.Tensor, lambda x: x.detach().to("cpu", copy=True), value)


def load_parts(parts: dict[str, Any], checkpoint: dict[str, Any], rank: int, path: Path) -> dict[str, Any]:
    """Put the parts of a run into the state that a checkpoint holds; return the random states of rank `rank`."""
    try:
        own = checkpoint["ranks"][rank]
        for name, part in parts.items():
            part.load_state_dict(checkpoint["parts"][name] if isinstance(part, SHARED) else own[name])
        return own["random"]
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"--resume {path}: its checkpoint does not fit this script ({error!r}).") from error


class Checkpoints:
    """Copies of a run's state, in memory after iterations and on disk from time to time. `parts` are whatever has a
    `state_dict` and belongs to the run, by name; "agent" is also written as `model.pt`. `written` is the step of the
    checkpoint that the run goes on from, if any."""

    def __init__(self, run: Run, parts: dict[str, Any], world: World, written: int | None):
        self.run, self.parts, self.world, self.written, self.snapshot = run, parts, world, written, None
        self.head = {"format": FORMAT, "script": run.script, "args": dataclasses.asdict(run.args)}
        self.last_write = self.last_copy = time.monotonic()
        if world.rank > 0:
            return
        for file in checkpoint_files(run.path):
            if int(file.stem) > run.step:  # damaged: it was skipped
                file.rename(file.with_suffix(".damaged"))
        self.write_model(copy_to_cpu(parts["agent"].state_dict()), run.step)

    def save(self, step: int) -> None:
        """Copy the state of the run after `step` steps; write it if the last checkpoint is old enough. Raises
        TrainingError if a parameter is NaN or infinite; the copy before this one stays."""
        networks = {name: part for name, part in self.parts.items() if hasattr(part, "named_parameters")}
        named = {f"{name}.{inner}": x for name, part in networks.items() for inner, x in part.named_parameters()}
        require_finite(step, {name: x.sum() for name, x in named.items()})  # a sum is NaN or infinite if a number is
        run, now = self.run, time.monotonic()
        due = now - self.last_copy >= min(RANKS_COPY_SECONDS, 60 * run.args.checkpoint_interval)
        if self.world.world_size > 1 and not self.world.broadcast(due or step >= run.total_steps):
            return
        self.last_copy = now
        own = {name: part.state_dict() for name, part in self.parts.items() if not isinstance(part, SHARED)}
        ranks = self.world.all_gather(copy_to_cpu(own | {"random": random_states(run.device)}))
        statistics = run.state_dict()
        if self.world.rank > 0:
            return
        shared = {name: part.state_dict() for name, part in self.parts.items() if isinstance(part, SHARED)}
        self.snapshot = self.head | {"step": step, "run": statistics, "parts": copy_to_cpu(shared), "ranks": ranks}
        run.step = step
        if now - self.last_write >= 60 * run.args.checkpoint_interval:
            self.last_write = now
            try:
                self.write()
            except OSError as error:
                print(f"warning: no checkpoint at step {step:,} ({error.strerror}); the run goes on", file=sys.stderr)

    def write(self) -> None:
        """Write the newest copy, unless that is done, and remove all but the `--keep-checkpoints` newest."""
        if self.snapshot is not None and self.snapshot["step"] != self.written:
            self.run.writer.flush()  # a run that is resumed from here does not make these events again
            folder = self.run.path / "checkpoints"
            folder.mkdir(exist_ok=True)
            write_archive(folder / f"{self.snapshot['step']:012}.pt", self.snapshot)
            self.write_model(self.snapshot["parts"]["agent"], self.snapshot["step"])
            self.written = self.snapshot["step"]
        for file in checkpoint_files(self.run.path)[self.run.args.keep_checkpoints :]:
            file.unlink()

    def write_model(self, weights: dict[str, torch.Tensor], step: int) -> None:
        """Write `model.pt`, which `common.load.load_agent` or `torch.load(..., weights_only=True)` reads."""
        write_archive(self.run.path / "model.pt", self.head | {"agent": weights, "step": step})

    def close(self, error: BaseException | None) -> None:
        """Write the newest copy, whatever ended the run, and close its folder. Raises TrainingError if the run is
        complete but its last checkpoint cannot be written. To an `error` of that class it adds how to resume."""
        run, path, unwritten = self.run, self.run.path, []
        words = [*self.world.launcher.split(), os.path.relpath(ROOT / run.script), "--resume", str(path)]
        try:
            if self.world.rank == 0:
                self.write()
            if error is None:
                run.finish("done")
        except OSError as failure:
            unwritten = [f"the newest checkpoint cannot be written ({failure.strerror})"]
        advice = f"resume with: {shlex.join(words)}" if checkpoint_files(path) else "it has no checkpoint to resume"
        if isinstance(error, KeyboardInterrupt):
            run.finish("stopped")
            if self.world.rank == 0:
                print(*unwritten, advice, sep="\n", file=sys.stderr)
        elif error is not None or unwritten:
            run.close()
        if error is None and unwritten:
            raise TrainingError(f"the run is complete, but {unwritten[0]}: free some space; {advice}")
        if isinstance(error, TrainingError):
            model = f"its last good model is {path / 'model.pt'}"
            raise TrainingError("; ".join([f"{error}: the run stops", model, *unwritten, advice])) from error
