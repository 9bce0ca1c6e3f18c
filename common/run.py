"""The run folder: settings, provenance, TensorBoard, CSVs, and the progress that a person sees."""

import csv
import dataclasses
import itertools
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from common.envs import finished_episodes
from common.errors import InputError, TrainingError
from common.files import cannot_write, lock_folder, make_run_dir, read_json, write_json
from common.procgen_env import PROCGEN_GAMES
from common.provenance import command, made_with, provenance, utc_now


class Summary(NamedTuple):
    """The results of an evaluation on one game."""

    episodes: int
    episodic_return: float  # mean
    standard_error: float
    episodic_length: float  # mean
    normalized_return: float


CSV_COLUMNS = {
    "progress.csv": ("step", "seconds", "episodes", "episodic_return", "last_100_return"),
    "episodes.csv": ("step", "seconds", "env", "episodic_return", "episodic_length"),
    "eval.csv": ("step", "seconds", "policy", "env_id", *Summary._fields),
}
EVENTS_SUFFIX = ".run"  # tells the run's own TensorBoard files from those that others put beside them
FLUSH_SECONDS = 2  # between TensorBoard's writes
LINE_SECONDS, BAR_SECONDS = 10, 0.1  # between progress lines where there is no terminal; between updates of the bar


class Run:
    """One run's folder and its progress display. Rank zero writes; episodes and metrics of the others reach it.

    The folder holds `args.json` (every setting), `meta.json` (command, commit, versions, machine), TensorBoard events,
    `progress.csv` (a row per iteration) and `episodes.csv` (a row per episode).

    Args:
        args: the script's `Args`.
        script: file name of the script, for the command that repeats the run.
        total_steps: environment steps at which the run will end.
        num_parameters: of the agent, shown in the header.
        world: the ranks (`common.world.World`, a layer above this one).
        resumed: what `find_run` returned. The logs of the run are cut back to its checkpoint.

    Raises:
        InputError: the folder cannot be written, or Weights & Biases refuses (no login, say).
    """

    def __init__(
        self,
        args: Any,
        *,
        script: str,
        device: torch.device,
        total_steps: int,
        num_parameters: int,
        world: Any,
        resumed: Any = None,
    ):
        self.args = dataclasses.replace(args, resume=None)  # a request to a process, no property of the run
        self.script, self.device, self.total_steps, self.world = script, device, total_steps, world
        self.world_size, self.games = world.world_size, args.env_id.split(",")  # environment i plays games[i % len]
        self.require_finite, self.waiting, self.files = require_finite, [], {}
        checkpoint = resumed and resumed.checkpoint
        self.step, state = (checkpoint["step"], checkpoint["run"]) if checkpoint else (0, {})
        self.recent = deque(state.get("recent", []), maxlen=100)  # returns of the last 100 episodes
        self.new_returns = list(state.get("new_returns", []))  # returns of the episodes since the last row
        self.num_episodes = state.get("num_episodes", 0)
        self.path, self.made_with = world.on_rank_zero(lambda: self.open(resumed, state.get("logs", {})))
        self.last_shown, self.shown = time.monotonic(), self.step
        self.start = self.last_shown - state.get("seconds", 0.0)
        if world.rank:
            return
        task = f"{args.env_id} ({args.distribution_mode})" if self.games[0] in PROCGEN_GAMES else args.env_id
        header = f"{args.exp_name} on {task}, seed {args.seed}, {total_steps:,} steps | {device}, {args.precision} | "
        header += f"{num_parameters:,} parameters | {self.path}"
        header += f" | {world.world_size} ranks" if world.world_size > 1 else ""
        print(header + (f" | resumed at step {self.step:,}" if resumed else ""), flush=True)
        bar_format = "{l_bar}{bar}| {n_fmt}/{total_fmt} steps  SPS {rate_fmt}{postfix}  ETA {remaining}"
        bar = {"bar_format": bar_format, "unit": "", "unit_scale": True, "disable": not sys.stderr.isatty()}
        self.bar = tqdm(total=total_steps, initial=self.step, **bar)

    def open(self, resumed: Any, log_sizes: Mapping[str, int]) -> tuple[Path, str]:
        """Make or reopen the folder with its logs; return its path, and what the run is made with."""
        args, settings = self.args, dataclasses.asdict(self.args)
        meta = provenance(command(args, self.script, self.world.launcher), self.device)
        meta |= {"script": self.script, "ranks": self.world_size, "finished": None, "resumed": []}
        versions = made_with(meta)
        try:
            if resumed is None:
                self.path = path = make_run_dir(args)
                self.lock = lock_folder(path)
            else:
                self.path, self.lock, _ = resumed
                path, meta = self.path, self.resumed_meta(meta)
                self.cut_logs(log_sizes)
                time.sleep(1 - time.time() % 1)  # TensorBoard sorts its files by the second in their names
            write_json(path / "meta.json", meta)
            write_json(path / "args.json", settings)  # what makes the folder one to resume
            self.files = {name: (path / name).open("a", newline="", buffering=1) for name in CSV_COLUMNS}
        except OSError as error:
            raise cannot_write(args, error, resumed and self.path) from error
        self.meta, self.wandb_run = meta, self.track(path, settings, resumed) if args.track else None
        self.csv = {name: csv.writer(file, lineterminator="\n") for name, file in self.files.items()}
        # A signal that interrupts `Condition.notify` costs the writer's thread its wake-up. The thread then sleeps
        # until its next flush, and `close` waits for it: hence a short interval.
        self.writer = SummaryWriter(str(path), flush_secs=FLUSH_SECONDS, filename_suffix=EVENTS_SUFFIX)
        for name, columns in CSV_COLUMNS.items():
            if not (path / name).stat().st_size:
                self.csv[name].writerow(columns)
        if not log_sizes:
            table = "\n".join(f"|{key}|{value}|" for key, value in settings.items())
            self.writer.add_text("hyperparameters", f"|setting|value|\n|-|-|\n{table}")
        return path, versions

    def track(self, path: Path, settings: dict[str, Any], resumed: Any) -> Any:
        import wandb

        names = {"project": self.args.wandb_project_name, "entity": self.args.wandb_entity, "name": path.name}
        names |= {"id": re.sub(r"\W", "-", path.name), "resume": "allow"}
        # Not in the run's folder: there, wandb would copy its own copies of the events.
        logs = {"dir": path.parent, "sync_tensorboard": True, "save_code": True}
        try:
            return wandb.init(**names, **logs, config=settings)
        except wandb.errors.UsageError as error:  # no login, say
            if resumed is None:
                shutil.rmtree(path)
            raise InputError(f"--track: Weights & Biases says: {error} (or set WANDB_MODE=offline)") from error

    def resumed_meta(self, meta: dict[str, Any]) -> dict[str, Any]:
        """The run's first `meta.json`, with this process added to the list of those that resumed it."""
        here = {key: meta[key] for key in ("commit", "dirty", "versions", "machine", "started")} | {"step": self.step}
        first = read_json(self.path / "meta.json")
        if not isinstance(first.get("resumed"), list):
            print(f"warning: {self.path / 'meta.json'} is damaged and starts anew", file=sys.stderr)
            first = meta
        now = {name: meta[name] for name in ("command", "ranks")}
        return first | now | {"finished": None, "resumed": [*first["resumed"], here]}

    def cut_logs(self, sizes: Mapping[str, int]) -> None:
        """Cut the logs back to `sizes`, in bytes by name: the run will write the rest again."""
        for file in self.log_files():
            size = sizes.get(file.name, 0)
            if file.stat().st_size < size:
                print(f"warning: {file} has lost some of its last lines", file=sys.stderr)
            elif size or file.suffix == ".csv":
                os.truncate(file, size)
            else:
                file.unlink()

    def log_files(self) -> list[Path]:
        """The run's own logs, as far as they exist."""
        return [path for name in (*CSV_COLUMNS, f"events.*{EVENTS_SUFFIX}") for path in self.path.glob(name)]

    def state_dict(self) -> dict[str, Any]:
        """Statistics, and the sizes of all logs. Every rank calls it."""
        self.flush()
        if self.world.rank:
            return {}
        with self.logging():
            self.writer.flush()
            sizes = {file.name: file.stat().st_size for file in self.log_files()}
        statistics = {"recent": list(self.recent), "new_returns": self.new_returns.copy(), "logs": sizes}
        return statistics | {"num_episodes": self.num_episodes, "seconds": time.monotonic() - self.start}

    def sync(self) -> None:
        """See to it that the logs survive a loss of power."""
        for file in self.log_files():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Turn an error of the file system into a TrainingError: a log with a gap would not be the run's log."""
        try:
            yield
        except OSError as error:
            raise TrainingError(f"nothing can be logged in {self.path} ({error.strerror})") from error

    def write(self, name: str, step: int, *cells: Any) -> None:
        """Write a row of a CSV, with the seconds since the start."""
        cells = (f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells)
        self.csv[name].writerow((step, f"{time.monotonic() - self.start:.1f}", *cells))

    def episodes(self, step: int, infos: Mapping[str, Any], first_env: int = 0) -> None:
        """Record every episode that a step of a vector environment has finished; `first_env` is its first number."""
        self.shown = step
        for env, episodic_return, length in finished_episodes(infos):
            self.episode(step, first_env + env, episodic_return, length)

    def episode(self, step: int, env: int, episodic_return: float, length: int) -> None:
        """Record an episode of environment number `env` that finished at `step`."""
        self.waiting.append((step, self.world.rank * self.args.num_envs + env, episodic_return, length))
        if self.world_size == 1:
            self.flush()

    def flush(self) -> None:
        """Write the episodes that wait on all ranks, in order of time. Every rank calls it."""
        waiting, self.waiting = self.world.gather(self.waiting), []
        for step, env, episodic_return, length in sorted(itertools.chain(*(waiting or []))):
            with self.logging():
                self.writer.add_scalar("charts/episodic_return", episodic_return, step)
                self.writer.add_scalar("charts/episodic_length", length, step)
                if len(self.games) > 1:
                    game = self.games[env % len(self.games)]
                    self.writer.add_scalar(f"charts/episodic_return/{game}", episodic_return, step)
                self.write("episodes.csv", step, env, episodic_return, length)
            self.recent.append(episodic_return)
            self.new_returns.append(episodic_return)
            self.num_episodes += 1
            self.show(step)

    def log(self, step: int, metrics: Mapping[str, Any], batch: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write the metrics of an iteration that ended at `step`, means over the ranks, and show the progress.

        Every rank calls it. Here the host waits for the device, once an iteration.

        Raises:
            TrainingError: a metric is NaN or infinite (the error then carries `batch`), or nothing can be written.
        """
        self.flush()
        values = to_floats(self.world.all_reduce_mean({**metrics, **self.world.communication()}))
        self.step = step
        if not self.world.rank:
            with self.logging():
                for tag, value in (values | {"charts/SPS": step / (time.monotonic() - self.start)}).items():
                    self.writer.add_scalar(tag, value, step)
                self.writer.flush()
                self.write("progress.csv", step, len(self.new_returns), mean(self.new_returns), mean(self.recent))
        require_finite(step, values, batch)
        self.new_returns.clear()
        self.show(step, last=step >= self.total_steps)

    def evaluation(self, step: int, metrics: Mapping[str, float], rows: list[tuple]) -> None:
        """Write an evaluation at `step`: metrics by tag (NaN is left out), and the rows of `eval.csv` from column 3."""
        with self.logging():
            for tag, value in metrics.items():
                if np.isfinite(value):
                    self.writer.add_scalar(tag, value, step)
            for row in rows:
                self.write("eval.csv", step, *row)

    def summary(self) -> str:
        return f"last-100-episodes return {mean(self.recent):.2f}" if self.recent else "no episode finished yet"

    def show(self, step: int, phase: str = "", last: bool = False) -> None:
        """Move the bar to `step`, with the summary and the present `phase`. Without a terminal, print lines."""
        now, self.shown = time.monotonic(), step
        if self.world.rank:
            return
        if not last and now - self.last_shown < (LINE_SECONDS if self.bar.disable else BAR_SECONDS):
            return
        self.last_shown, text = now, ", ".join(filter(None, (self.summary(), phase)))
        if not self.bar.disable:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.n = step
            self.bar.refresh()
            return
        sps = step / (now - self.start)
        left = timedelta(seconds=max(0, round((self.total_steps - step) / sps)))
        if step >= self.total_steps and not last:  # PPG's last auxiliary phase
            left = "not known"
        print(f"step {step:,}/{self.total_steps:,}  SPS {sps:.0f}  {text}  ETA {left}", flush=True)

    def show_phase(self, phase: str) -> None:
        """Show the present `phase` at the step that was shown last."""
        self.show(self.shown, phase)

    def finish(self, end: str) -> None:
        """Close all files and print the summary of a run that is "done" or was "stopped"."""
        if self.world.rank:
            return
        if end == "done":
            with self.logging():
                write_json(self.path / "meta.json", self.meta | {"finished": utc_now()})
        self.close()
        seconds = time.monotonic() - self.start
        text = f"{self.step:,} steps in {timedelta(seconds=round(seconds))} ({self.step / seconds:.0f} SPS), "
        print(f"{end}: {text}{self.num_episodes:,} episodes, {self.summary()} | model: {self.path / 'model.pt'}")

    def close(self) -> None:
        """Close all files and unlock the folder. A failed write is reported elsewhere."""
        if self.world.rank:
            return
        self.bar.close()
        for close in (self.writer.close, *(file.close for file in self.files.values())):
            with suppress(OSError):
                close()
        if self.wandb_run is not None:
            self.wandb_run.finish()
        self.lock.close()


def to_floats(metrics: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
    """The metrics as numbers: those on a device are read together, for each read waits for the device."""
    tensors = {tag: value.double() for tag, value in metrics.items() if isinstance(value, torch.Tensor)}
    numbers = torch.stack([*tensors.values()]).tolist() if tensors else []
    return {**metrics, **dict(zip(tensors, numbers, strict=True))}


def require_finite(step: int, metrics: Mapping[str, Any], batch: Mapping[str, Any] | None = None) -> dict[str, float]:
    """The metrics as numbers. Raises TrainingError, with `batch`, where they come from, for one that is not finite."""
    values = to_floats(metrics)
    for tag, value in values.items():
        if not np.isfinite(value):
            raise TrainingError(f"{tag} is {value} at step {step:,}", batch)
    return values


def mean(values: Collection[float]) -> float:
    """The mean, or NaN where no episode has finished yet."""
    return sum(values) / len(values) if values else float("nan")
