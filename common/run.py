"""The run folder: settings, provenance, TensorBoard, CSVs, and the progress that a person sees."""

import csv
import dataclasses
import itertools
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from common.envs import finished_episodes
from common.errors import InputError, TrainingError
from common.files import ROOT, lock_folder, make_run_dir, read_json, write_atomically, write_json
from common.procgen_env import PROCGEN_GAMES
from common.provenance import UTC, command, provenance

CSV_COLUMNS = {  # after "step" and "seconds"
    "progress.csv": "episodes episodic_return last_100_return",
    "episodes.csv": "env episodic_return episodic_length",
    "eval.csv": "policy env_id episodes episodic_return standard_error episodic_length normalized_return",
}
FLUSH_SECONDS = 2  # a signal may cost TensorBoard's thread its wake-up; `close` then waits for its next flush
LINE_SECONDS = 10  # between lines of progress, where there is no terminal


class Run:
    """One run's folder and its progress display. Rank zero writes; episodes and metrics of the others reach it.

    The folder holds `args.json` (every setting), `meta.json` (command, commit, versions, machine), a copy of the script
    (`script` is its path from the repository's root), TensorBoard events, `progress.csv` (a row per `log`),
    `episodes.csv` (a row per episode) and `eval.csv`. `world` are the ranks, `resumed` is what `find_run` returned.
    Raises OSError if the folder cannot be written, InputError if Weights & Biases refuses (no login, say)."""

    def __init__(
        self, args: Any, *, script: str, device: Any, total_steps: int, num_parameters: int, world: Any, resumed: Any
    ):
        self.args = dataclasses.replace(args, resume=None)  # a request to a process, no property of the run
        self.script, self.device, self.total_steps, self.world = script, device, total_steps, world
        self.world_size, self.games = world.world_size, args.env_id.split(",")  # environment i plays games[i % len]
        self.require_finite, self.waiting, self.wandb_run = require_finite, [], None  # for a script, which has a run
        self.step, state = (resumed.checkpoint["step"], resumed.checkpoint["run"]) if resumed else (0, {})
        self.recent = deque(state.get("recent", []), maxlen=100)  # returns of the last 100 episodes
        self.new_returns = list(state.get("new_returns", []))  # returns of the episodes since the last row
        self.num_episodes = state.get("num_episodes", 0)
        self.path = world.on_rank_zero(lambda: self.open(resumed))
        self.last_shown = time.monotonic()
        self.start = self.last_shown - state.get("seconds", 0.0)
        if world.rank == 0:
            task = args.env_id + (f" ({args.distribution_mode})" if self.games[0] in PROCGEN_GAMES else "")
            header = f"{args.title} on {task}, seed {args.seed}, {total_steps:,} steps | {device}, {args.precision}"
            ranks = f" | {world.world_size} ranks" if world.world_size > 1 else ""
            at = f" | resumed at step {self.step:,}" if resumed else ""
            print(f"{header} | {num_parameters:,} parameters{ranks} | {self.path}{at}", flush=True)

    def open(self, resumed: Any) -> Path:
        """Make or reopen the folder with its logs; return its path."""
        settings = dataclasses.asdict(self.args)
        self.meta = provenance(command(self.args, self.script, self.world.launcher), self.script, self.device)
        self.meta |= {"ranks": self.world_size, "finished": None, "resumed": []}
        self.path = path = resumed.path if resumed else make_run_dir(self.args)
        self.lock = resumed.lock if resumed else lock_folder(path)
        if resumed:
            self.meta = self.resumed_meta(self.meta)
            self.cut_logs()
            time.sleep(1 - time.time() % 1)  # TensorBoard sorts its files by the second in their names
        else:
            shutil.copy(ROOT / self.script, path)
        write_json(path / "meta.json", self.meta)
        write_json(path / "args.json", settings)  # what makes the folder one to resume
        if self.args.track:
            self.track(settings, new=resumed is None)
        self.files = {name: (path / name).open("a", newline="", buffering=1) for name in CSV_COLUMNS}
        self.csv = {name: csv.writer(file, lineterminator="\n") for name, file in self.files.items()}
        for name, columns in CSV_COLUMNS.items():
            if not (path / name).stat().st_size:
                self.csv[name].writerow(["step", "seconds", *columns.split()])
        purge_step = self.step + 1 if resumed else None  # TensorBoard hides what the run makes again
        self.writer = SummaryWriter(str(path), purge_step=purge_step, flush_secs=FLUSH_SECONDS)
        if resumed is None:
            table = "\n".join(f"|{key}|{value}|" for key, value in settings.items())
            self.writer.add_text("hyperparameters", f"|setting|value|\n|-|-|\n{table}")
        return path

    def track(self, settings: dict[str, Any], new: bool) -> None:
        import wandb

        names = {"project": self.args.wandb_project_name, "entity": self.args.wandb_entity, "name": self.path.name}
        names |= {"id": re.sub(r"\W", "-", self.path.name), "dir": self.path.parent}  # outside the folder it copies
        try:
            self.wandb_run = wandb.init(**names, resume="allow", sync_tensorboard=True, save_code=True, config=settings)
        except wandb.errors.UsageError as error:  # no login, say
            if new:
                shutil.rmtree(self.path)
            raise InputError(f"--track: Weights & Biases says: {error} (or set WANDB_MODE=offline)") from error

    def resumed_meta(self, meta: dict[str, Any]) -> dict[str, Any]:
        """The run's first `meta.json`, with this process added to the list of those that resumed it."""
        here = {name: meta[name] for name in ("script_sha256", "commit", "dirty", "versions", "machine", "started")}
        first = read_json(self.path / "meta.json")
        if not isinstance(first.get("resumed"), list):
            print(f"warning: {self.path / 'meta.json'} is damaged and starts anew", file=sys.stderr)
            first = meta
        if first.get("script_sha256") != meta["script_sha256"]:
            print(f"note: {self.script} is not what it was: this run began with the one in its folder", file=sys.stderr)
        return first | {
            "command": meta["command"],
            "finished": None,
            "resumed": [*first["resumed"], here | {"step": self.step}],
        }

    def cut_logs(self) -> None:
        """Drop the rows after the checkpoint's step, which the run will write again, and a last line cut short."""
        for file in (self.path / name for name in CSV_COLUMNS):
            if not file.exists():
                print(f"warning: {file} is gone and starts anew", file=sys.stderr)
                continue
            header, *rows = file.read_text().splitlines(keepends=True) or [""]
            kept = [row for row in rows if row[-1] == "\n" and int(row.partition(",")[0]) <= self.step]
            write_atomically(file, "".join([header, *kept]).encode())

    def state_dict(self) -> dict[str, Any]:
        """Statistics of the episodes. Every rank calls it."""
        self.flush()
        statistics = {"recent": list(self.recent), "new_returns": self.new_returns.copy()}
        return statistics | {"num_episodes": self.num_episodes, "seconds": time.monotonic() - self.start}

    def write(self, step: int, scalars: Mapping[str, float], rows: Mapping[str, list[tuple]]) -> None:
        """Write finite scalars to TensorBoard, and rows to CSVs by name, which get the seconds since the start."""
        seconds = f"{time.monotonic() - self.start:.1f}"
        try:
            for tag, value in scalars.items():
                if np.isfinite(value):
                    self.writer.add_scalar(tag, value, step)
            for name, cells in [(name, row) for name, each in rows.items() for row in each]:
                cells = (f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells)
                self.csv[name].writerow((step, seconds, *cells))
        except OSError as error:  # a log with a gap would not be the run's log
            raise TrainingError(f"nothing can be logged in {self.path} ({error.strerror})") from error

    def episodes(self, step: int, infos: Mapping[str, Any], first_env: int = 0) -> None:
        """Record every episode that a step of a vector environment has finished; `first_env` is its first number."""
        for env, episodic_return, length in finished_episodes(infos):
            self.episode(step, first_env + env, episodic_return, length)

    def episode(self, step: int, env: int, episodic_return: float, length: int) -> None:
        """Record an episode of environment number `env` that finished at `step`."""
        self.waiting.append((step, self.world.rank * self.args.num_envs + env, episodic_return, length))
        if self.world_size == 1:
            self.flush()

    def flush(self) -> None:
        """Write the episodes that wait on all ranks, in order of time. Every rank calls it."""
        waiting, self.waiting = self.world.all_gather(self.waiting), []
        for step, env, episodic_return, length in sorted(itertools.chain(*waiting)) if self.world.rank == 0 else ():
            scalars = {"charts/episodic_return": episodic_return, "charts/episodic_length": length}
            if len(self.games) > 1:
                scalars[f"charts/episodic_return/{self.games[env % len(self.games)]}"] = episodic_return
            self.write(step, scalars, {"episodes.csv": [(env, episodic_return, length)]})
            self.recent.append(episodic_return)
            self.new_returns.append(episodic_return)
            self.num_episodes += 1
            self.show(step)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of an iteration that ended at `step`, means over the ranks that all call this, and show the
        progress. Raises TrainingError if a metric is NaN or infinite, or nothing can be written."""
        self.flush()
        values = require_finite(step, self.world.all_reduce_mean(metrics))
        if self.world.rank == 0:
            returns = len(self.new_returns), mean(self.new_returns), mean(self.recent)
            sps = {"charts/SPS": step / (time.monotonic() - self.start)}
            self.write(step, values | sps, {"progress.csv": [returns]})
        self.new_returns.clear()
        self.show(step, last=step >= self.total_steps)

    def summary(self) -> str:
        return f"return {mean(self.recent):.2f}" if self.recent else "no episode yet"

    def show(self, step: int, phase: str = "", last: bool = False) -> None:
        """Show a line of progress: the same again and again on a terminal, elsewhere a new one now and then."""
        now, terminal = time.monotonic(), sys.stdout.isatty()
        if self.world.rank or (now - self.last_shown < (0.1 if terminal else LINE_SECONDS) and not last):
            return
        self.last_shown, sps = now, step / (now - self.start)
        hours, minutes = divmod(round(max(0, self.total_steps - step) / sps / 60), 60)
        line = f"{step:,}/{self.total_steps:,}  {sps:.0f} steps/s  {self.summary()}  ETA {hours}:{minutes:02} h"
        line = f"{line}  {phase}".rstrip()
        if terminal:
            line = "\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1]
        print(line, end="" if terminal else "\n", flush=True)

    def finish(self, end: str) -> None:
        """Close all files and print the summary of a run that is "done" or was "stopped"."""
        if self.world.rank:
            return
        if end == "done":
            write_json(self.path / "meta.json", self.meta | {"finished": time.strftime(UTC, time.gmtime())})
        self.close()
        seconds = time.monotonic() - self.start
        text = f"{self.step:,} steps in {timedelta(seconds=round(seconds))} ({self.step / seconds:.0f} steps/s), "
        text += f"{self.num_episodes:,} episodes, last 100: {self.summary()}"
        print(f"{end}: {text} | model: {self.path / 'model.pt'}")

    def close(self) -> None:
        """Close all files and unlock the folder. A failed write is reported elsewhere."""
        if self.world.rank:
            return
        if sys.stdout.isatty():
            print()  # below the line of progress
        for close in (self.writer.close, *(file.close for file in self.files.values())):
            with suppress(OSError):
                close()
        if self.wandb_run is not None:
            self.wandb_run.finish()
        self.lock.close()


def require_finite(step: int, metrics: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
    """The metrics as numbers, read from a device together. Raises TrainingError for one that is NaN or infinite."""
    tensors = {tag: value.double() for tag, value in metrics.items() if isinstance(value, torch.Tensor)}
    numbers = torch.stack([*tensors.values()]).tolist() if tensors else []
    values = {**metrics, **dict(zip(tensors, numbers, strict=True))}
    for tag, value in values.items():
        if not np.isfinite(value):
            raise TrainingError(f"{tag} is {value} at step {step:,}")
    return values


def mean(values: Collection[float]) -> float:
    """The mean, or NaN where no episode has finished yet."""
    return sum(values) / len(values) if values else float("nan")
