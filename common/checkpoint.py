"""Checkpoints: a run that dies and is resumed is the same run.

After each iteration, `Checkpoints.save` copies all that the rest of the run depends on into memory: parameters,
optimisers, reward scale, random generators, environments, statistics, and how long each log is. (With several ranks it
does so every ten seconds, and rank zero keeps the copy for all.) The copy is written to `<run>/checkpoints/<step>.pt`
every `--checkpoint-interval` minutes, and whenever the run ends: by its last step, a signal, an error. So a signal need
not wait for an iteration to end, and loses that iteration alone.

PyTorch's archives hold a checksum of each record, and nothing is unpickled but tensors and plain values.
"""

import dataclasses
import io
import random
import shlex
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import InputError, TrainingError
from common.files import cannot_write, write_atomically
from common.run import Run
from common.world import World

FORMAT = 2
CONTENT = {"format": int, "script": str, "args": dict, "step": int, "made_with": str, "run": dict, "ranks": list}
RANKS_COPY_SECONDS = 10


class Damaged(Exception):
    """A file that is not a whole checkpoint. The message completes "<file> ..."."""


def checkpoint_files(path: Path) -> list[Path]:
    """The checkpoints of the run in folder `path`, the newest first."""
    return sorted((file for file in (path / "checkpoints").glob("*.pt") if file.stem.isdigit()), reverse=True)


def newest_checkpoint(path: Path) -> dict[str, Any] | None:
    """The newest readable checkpoint, with a warning for each that is damaged; None where the run has none at all."""
    files = checkpoint_files(path)
    for file in files:
        try:
            content = read_archive(file)
            whole = all(isinstance(content.get(name), kind) for name, kind in CONTENT.items()) and content["ranks"]
            if whole and content["format"] == FORMAT:
                return content
            raise Damaged("is no checkpoint of this version")
        except Damaged as error:
            print(f"warning: {file} {error}: it is skipped for the one before", file=sys.stderr)
    if files:
        raise InputError(f"--resume {path}: none of its {len(files)} checkpoints can be read.")
    return None


def read_archive(path: Path) -> dict[str, Any]:
    """The dict in a file of PyTorch's. Raises Damaged; runs no code that the file might hold."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                raise Damaged("is damaged (a checksum does not match)")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from error
    except Damaged:
        raise
    except Exception as error:  # whatever foreign bytes drive the two modules to
        raise Damaged("is damaged, or not a file of tensors and plain values") from error
    if not isinstance(content, dict):
        raise Damaged("is no checkpoint")
    return content


def write_archive(path: Path, content: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getbuffer())


def write_model(path: Path, weights: dict[str, torch.Tensor], args: Any, step: int) -> None:
    """Write `model.pt`: a dict of "agent", "args" and "step" that `torch.load(..., weights_only=True)` accepts."""
    write_archive(path / "model.pt", {"agent": weights, "args": dataclasses.asdict(args), "step": step})


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
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_cpu(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copy_to_cpu, value))
    return value


def is_shared(part: Any) -> bool:
    """Whether a part of a run is the same on all ranks; reward scale, environments and rollouts are each rank's own."""
    return isinstance(part, torch.nn.Module | torch.optim.Optimizer)


def load_parts(parts: dict[str, Any], checkpoint: dict[str, Any], rank: int, path: Path) -> dict[str, Any]:
    """Put the parts of a run into the state that a checkpoint holds; return what else rank `rank` had saved.

    With another number of ranks the environments of the checkpoint cannot go on: what is returned is then empty.
    """
    own = checkpoint["ranks"][rank]
    try:
        for name, part in parts.items():
            if is_shared(part):
                state = checkpoint["parts"][name]
                if isinstance(part, torch.optim.Optimizer):  # its choice of kernels is a matter of the device
                    for group, saved in zip(part.param_groups, state["param_groups"], strict=True):
                        if "fused" in group:  # RMSprop has none
                            saved["fused"] = group["fused"]
                part.load_state_dict(state)
            elif "random" in own or name in own:
                part.load_state_dict(own[name])
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"--resume {path}: its checkpoint does not fit this script ({error!r}).") from error
    return own


class Checkpoints:
    """Copies of a run's state, in memory after each iteration and on disk from time to time.

    Args:
        run: its folder, logs and settings.
        parts: whatever has a `state_dict` and belongs to the run, by name; "agent" is also written as `model.pt`.
        world: the ranks that make the run.
        written: the step of the checkpoint that the run goes on from, if any.
    """

    def __init__(self, run: Run, parts: dict[str, Any], world: World, written: int | None):
        self.run, self.args, self.parts, self.world = run, run.args, parts, world
        self.folder, self.snapshot, self.written = run.path / "checkpoints", None, written
        self.last_write = self.last_copy = time.monotonic()
        if world.rank > 0:
            return
        try:
            for file in checkpoint_files(run.path):  # those that were skipped
                if int(file.stem) > run.step:
                    file.rename(file.with_suffix(".damaged"))
            for file in self.folder.glob("*.tmp"):  # what a killed process left half written
                file.unlink()
            write_model(run.path, copy_to_cpu(parts["agent"].state_dict()), self.args, run.step)
        except OSError as error:
            raise cannot_write(self.args, error, None if written is None else run.path) from error

    def save(self, step: int) -> None:
        """Copy the state of the run after `step` steps; write it if the last checkpoint is old enough.

        Raises:
            TrainingError: a parameter is NaN or infinite; the copy before this one stays.
        """
        self.check_finite(step)
        now = time.monotonic()
        writes = now - self.last_write >= 60 * self.args.checkpoint_interval
        copies = self.world.world_size == 1 or now - self.last_copy >= RANKS_COPY_SECONDS
        copies, writes = self.world.broadcast((copies or writes or step >= self.run.total_steps, writes))
        if not copies:
            return
        self.last_copy = now
        self.world.check_parameters(self.parts["agent"])
        own = {name: part.state_dict() for name, part in self.parts.items() if not is_shared(part)}
        own = copy_to_cpu(own | {"random": random_states(self.run.device)})
        ranks, statistics = self.world.gather(own), self.run.state_dict()
        if ranks is not None:  # on rank zero
            self.snapshot = {
                "format": FORMAT,
                "script": self.run.script,
                "args": dataclasses.asdict(self.args),
                "step": step,
                "made_with": self.run.made_with,
                "run": statistics,
                "parts": copy_to_cpu({name: part.state_dict() for name, part in self.parts.items() if is_shared(part)}),
                "ranks": ranks,
            }
        if writes:
            self.last_write = now
            try:
                self.write()
            except OSError as error:
                last = "there is none yet" if self.written is None else f"the last is of step {self.written:,}"
                reason = f"no checkpoint at step {step:,} ({error.strerror})"
                print(f"warning: {reason}, {last}; the run goes on", file=sys.stderr)
            self.world.barrier()

    def check_finite(self, step: int) -> None:
        """Raise TrainingError for the first parameter that is NaN or infinite."""
        networks = [(name, part) for name, part in self.parts.items() if hasattr(part, "named_parameters")]
        named = {f"{name}.{inner}": x for name, network in networks for inner, x in network.named_parameters()}
        finite = torch.stack([parameter.isfinite().all() for parameter in named.values()]).tolist()
        for name, is_finite in zip(named, finite, strict=True):
            if not is_finite:
                raise TrainingError(f"{name.removeprefix('agent.')} is not finite after step {step:,}")

    def write(self) -> None:
        """Write the newest copy, unless that is done, and remove all but the `--keep-checkpoints` newest."""
        if self.snapshot is None or self.snapshot["step"] == self.written:
            return
        self.run.sync()
        self.folder.mkdir(exist_ok=True)
        write_archive(self.folder / f"{self.snapshot['step']:012}.pt", self.snapshot)
        write_model(self.run.path, self.snapshot["parts"]["agent"], self.args, self.snapshot["step"])
        self.written = self.snapshot["step"]
        for file in checkpoint_files(self.run.path)[self.args.keep_checkpoints :]:
            file.unlink()

    def close(self, error: BaseException | None) -> None:
        """Write the newest copy, whatever ended the run, and close its folder.

        Raises:
            TrainingError: instead of such an `error`, with where the last good model is and how to resume; or where the
                run is complete and its last checkpoint cannot be written.
        """
        path, unwritten = self.run.path, None
        again = f"{self.world.launcher} {self.run.script} --resume {shlex.quote(str(path))}"
        try:
            self.write()
        except OSError as failure:
            unwritten = f"the newest checkpoint cannot be written ({failure.strerror})"
        if error is None and unwritten is None:
            self.run.finish("done")
        elif isinstance(error, KeyboardInterrupt):
            self.run.finish("stopped")
            if self.world.rank == 0:
                print(*filter(None, [unwritten]), f"resume with: {again}", sep="\n", flush=True)
        else:
            self.run.close()
        if error is None and unwritten is not None:
            raise TrainingError(
                f"the run is complete, but {unwritten}: free some space and repeat its end with {again}"
            )
        if isinstance(error, TrainingError):
            rest = f"resume with: {again}"
            if error.batch:
                batch = path / f"bad_batch{f'.rank{self.world.rank}' if self.world.rank else ''}.pt"
                rest = f"the batch is {batch}"
                try:
                    write_archive(batch, copy_to_cpu(error.batch))
                except OSError as failure:
                    rest = f"the batch could not be written ({failure.strerror})"
            model = f"its last good model is {path / 'model.pt'}"
            raise TrainingError("; ".join(filter(None, [f"{error}: the run stops", model, unwritten, rest]))) from error
