"""The run folder: settings, provenance, TensorBoard, CSVs, and the progress that a person sees."""

import csv
import dataclasses
import errno
import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import IO, Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.tensorboard import SummaryWriter

from common import InputError, TrainingError
from common.envs import Episode, finished_episodes
from common.procgen_env import PROCGEN_GAMES
from common.settings import ROOT, flag, preset_args, read_json, to_json

UTC = "%Y-%m-%dT%H:%M:%SZ"
CSV_COLUMNS = {  # after "step" and "seconds"
    "progress.csv": "episodes episodic_return last_100_return last_100_level_complete",
    "metrics.csv": "tag value",
    "episodes.csv": "env episodic_return episodic_length level_seed level_complete",
    "eval.csv": "policy env_id episodes episodic_return standard_error episodic_length normalized_return"
    " level_complete best",
}
LINE_SECONDS = 10  # between lines of progress, where there is no terminal


class Interrupt:
    """A signal handler that raises KeyboardInterrupt. Further signals within ten seconds are ignored, so that saving
    can finish. Later ones count, because Python drops an exception that is raised in an object's finaliser."""

    held, last = False, -math.inf

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if not self.held and time.monotonic() - self.last > 10:
            self.last = time.monotonic()
            for number in (1, 2):
                with suppress(OSError):  # it is closed
                    os.set_blocking(number, os.isatty(number))  # a reader that has stopped would hold the run
            raise KeyboardInterrupt(signum)


INTERRUPT = Interrupt()


class Run:
    """One run's folder (README.md lists what it holds) and progress, by rank zero. `script` is its path from the root.
    Raises OSError if the folder cannot be written, InputError if Weights & Biases refuses."""

    def __init__(self, args: Any, script: str, runs_dir: Path, total_steps: int, world: Any, resumed: Any):
        self.args = dataclasses.replace(args, resume=None)  # a request to a process, no property of the run
        self.script, self.runs_dir, self.total_steps, self.world = script, runs_dir, total_steps, world
        self.games = args.env_id.split(",")  # environment i plays games[i % len(games)]
        self.step, state = (resumed.checkpoint["step"], resumed.checkpoint["run"]) if resumed else (0, {})
        self.waiting = []  # episodes of this rank that are not written yet
        self.recent = deque(state.get("recent", []), maxlen=100)  # returns of the last 100 episodes
        self.recent_complete = deque(state.get("recent_complete", []), maxlen=100)  # whether they solved their levels
        self.new_returns = list(state.get("new_returns", []))  # returns of the episodes since the last row
        self.num_episodes = state.get("num_episodes", 0)
        self.best_return = state.get("best_return", -math.inf)  # of all evaluations
        self.least = state.get("rows", {})  # that each CSV had at the checkpoint; older versions may have counted fewer
        self.rows = dict(self.least) if "logged" in state else {}  # in each CSV
        self.path = world.on_rank_zero(lambda: self.open(resumed))
        self.last_shown = self.began = time.monotonic()
        self.seconds = state.get("seconds", 0.0)  # that the steps up to `step` took
        self.start = self.began - self.seconds
        self.step_began = self.step  # steps when this process began
        self.now_at = self.logged = state.get("logged", self.step)  # steps now, and at the last row of progress.csv
        self.saved = f"{self.num_episodes:,} episodes, last 100: {self.summary()}"  # up to `step`
        self.speed = None  # steps a second of this process, once it is known

    def open(self, resumed: Any) -> Path:
        """Make or reopen the folder with its logs; return its path."""
        self.path = path = resumed.path if resumed else make_run_dir(self.args, self.runs_dir)
        self.lock = resumed.lock if resumed else lock_folder(path)
        self.meta = self.make_meta(resumed)
        if resumed:
            for number, file in enumerate(sorted(path.glob("events*"))):  # TensorBoard sorts by the time in names
                file.rename(path / re.sub(r"tfevents\.\d+", f"tfevents.{number:010}", file.name))
            for file in path.rglob(".tmp-*"):  # of a process that was killed as it wrote
                file.unlink()
        else:
            shutil.copy(ROOT / self.script, path)
        settings = to_json(self.args)
        self.wandb_run = self.track(settings) if self.args.track else None
        self.files = {}
        for name, columns in CSV_COLUMNS.items():
            self.cut_log(path / name, f"step,seconds,{columns.replace(' ', ',')}\n")
            self.files[name] = (path / name).open("a", newline="", buffering=1)
        purge_step = self.step + 1 if resumed else None  # TensorBoard hides what the run makes again
        self.writer = SummaryWriter(str(path), purge_step=purge_step, flush_secs=2)  # a signal can delay it by this
        write_json(path / "meta.json", self.meta)  # after all that may be refused
        write_json(path / "args.json", settings)  # what makes the folder one to resume
        return path

    def make_meta(self, resumed: Any) -> dict[str, Any]:
        """What `meta.json` says of the run's start, and of each process that has resumed it."""
        here = provenance(command(self.args, self.script, self.world.launcher), self.script, self.world.device)
        first = read_json(self.path / "meta.json")
        if resumed and not isinstance(first.get("resumed"), list):
            print(f"warning: {self.path / 'meta.json'} is damaged and starts anew", file=sys.stderr)
            first = {}
        meta = here | {"ranks": self.world.world_size, "resumed": []} | first
        if meta["script_sha256"] != here["script_sha256"]:
            print(f"note: {self.script} is not what it was: this run began with the one in its folder", file=sys.stderr)
        if resumed:
            meta["resumed"].append({key: here[key] for key in here if key != "command"} | {"step": self.step})
            now, was = self.args.total_timesteps, resumed.checkpoint["args"].get("total_timesteps")
            if getattr(self.args, "anneal_lr", False) and now != was:
                print(f"note: --anneal-lr now ends at {now:,} steps, not at {was:,}", file=sys.stderr)
                meta["resumed"][-1]["annealed_to"] = was
        return meta | {"command": here["command"], "script": here["script"], "finished": None}

    def track(self, config: dict[str, Any]) -> Any:
        """Begin or go on with a run of Weights & Biases. Its files lie outside of the folder, which it copies."""
        import wandb

        names = {"project": self.args.wandb_project_name, "entity": self.args.wandb_entity, "name": self.path.name}
        names |= {"id": re.sub(r"\W", "-", self.path.name), "dir": self.path.parent}
        names["settings"] = wandb.Settings(console="off", init_timeout=20)  # its console could stop at each print
        try:
            return wandb.init(**names, resume="allow", sync_tensorboard=True, save_code=True, config=config)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:  # no login, say
            if not self.meta["resumed"]:
                shutil.rmtree(self.path)
            raise InputError(f"--track: Weights & Biases says: {error} (or set WANDB_MODE=offline)") from error
        except wandb.errors.Error as error:
            print(f"warning: Weights & Biases does not answer, so the run is not tracked: {error}", file=sys.stderr)

    def cut_log(self, file: Path, header: str) -> None:
        """Begin a CSV, or drop rows that are damaged or of later steps. Add new columns. Say how many rows are lost."""
        text = file.read_text(errors="replace") if file.exists() else ""
        old_header, *rows = text.splitlines(keepends=True) or [header]
        kept = []
        for row in rows:
            step = row.partition(",")[0]
            if row[-1] == "\n" and "\0" not in row and step.isdecimal() and int(step) <= self.step:
                kept.append(row[:-1] + "," * (header.count(",") - old_header.count(",")) + "\n")
        number = self.rows.setdefault(file.name, max(len(kept), self.least.get(file.name, 0)))  # at the checkpoint
        if len(kept) < number:
            print(f"warning: {file} has lost {number - len(kept)} rows", file=sys.stderr)
        write_atomically(file, "".join([header, *kept[:number]]).encode())

    def state_dict(self) -> dict[str, Any]:
        """Statistics of the episodes. Every rank calls it."""
        self.flush()
        self.seconds = time.monotonic() - self.start
        self.saved = f"{self.num_episodes:,} episodes, last 100: {self.summary()}"
        statistics = {"recent": list(self.recent), "recent_complete": list(self.recent_complete)}
        statistics |= {"new_returns": self.new_returns.copy(), "best_return": self.best_return, "logged": self.logged}
        return statistics | {"num_episodes": self.num_episodes, "rows": self.rows.copy(), "seconds": self.seconds}

    def write(self, step: int, scalars: Mapping[str, float], rows: Mapping[str, list[tuple]]) -> None:
        """Write finite scalars to TensorBoard, and rows to CSVs by name, which get the seconds since the start."""
        if self.world.rank > 0:
            return
        seconds = f"{time.monotonic() - self.start:.1f}"
        try:
            for tag, value in scalars.items():
                if np.isfinite(value):
                    self.writer.add_scalar(tag, value, step)
            for name, new_rows in rows.items():
                writer = csv.writer(self.files[name], lineterminator="\n")
                for row in new_rows:
                    cells = [f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row]
                    writer.writerow([step, seconds, *cells])
                self.rows[name] += len(new_rows)
        except OSError as error:  # a log with a gap would not be the run's log
            raise TrainingError(f"nothing can be logged in {self.path} ({error.strerror})") from error

    def record(self, step: int, infos: Mapping[str, Any]) -> None:
        """Take note of every episode that a step of a vector environment has finished; `flush` writes them."""
        for episode in finished_episodes(infos):
            self.record_episode(step, episode)
        self.now_at = step
        self.show("collecting")

    def record_episode(self, step: int, episode: Episode) -> None:
        """Take note of an episode that finished at `step`."""
        self.waiting.append((step, episode._replace(env=self.world.rank * self.args.num_envs + episode.env)))

    def flush(self) -> None:
        """Write the episodes that wait on all ranks, in order of time. Every rank calls it."""
        waiting, self.waiting = self.world.all_gather(self.waiting), []
        for step, episode in sorted(itertools.chain(*waiting)):
            scalars = {"charts/episodic_return": episode.episodic_return, "charts/episodic_length": episode.length}
            if len(self.games) > 1:
                game = self.games[episode.env % len(self.games)]
                scalars[f"charts/episodic_return/{game}"] = episode.episodic_return
            self.write(step, scalars, {"episodes.csv": [episode]})
            self.recent.append(episode.episodic_return)
            self.new_returns.append(episode.episodic_return)
            self.num_episodes += 1
            if episode.level_complete is not None:
                self.recent_complete.append(episode.level_complete)

    def log(self, step: int, metrics: Mapping[str, Any], whole: bool = True) -> None:
        """Write the means over the ranks, which all call this, of an iteration's metrics; show the progress. Steps tell
        the speed if they are `whole`, with all their work. Raises TrainingError as `require_finite` and `write`."""
        self.flush()
        values = require_finite(step, self.world.all_reduce_mean(metrics))
        rows = {"metrics.csv": [*values.items()]}
        values |= {"charts/SPS": step / (time.monotonic() - self.start), "charts/last_100_return": mean(self.recent)}
        solved = mean(self.recent_complete) if self.recent_complete else None
        values |= {} if solved is None else {"charts/level_complete": solved}
        if step != self.logged:  # a second log of a step adds metrics alone
            rows["progress.csv"] = [(len(self.new_returns), mean(self.new_returns), mean(self.recent), solved)]
            self.new_returns.clear()
        self.now_at = self.logged = step
        self.write(step, values, rows)
        if whole:
            self.speed = (step - self.step_began) / (time.monotonic() - self.began)
        self.show(last=step >= self.total_steps)

    def show_header(self, num_parameters: int) -> None:
        """Show in one line what begins or goes on here."""
        if self.world.rank > 0:
            return
        args, mode = self.args, f" ({self.args.distribution_mode})" if self.games[0] in PROCGEN_GAMES else ""
        line = f"{args.exp_name} on {args.env_id}{mode}, seed {args.seed}, {self.total_steps:,} steps"
        line += f" | {self.world.device}, {args.precision} | {num_parameters:,} parameters"
        line += f" | {self.world.world_size} ranks" if self.world.world_size > 1 else ""
        line += f" | {self.path}" + (f" | resumed at step {self.step:,}" if self.step else "")
        print(line, flush=True)

    def show(self, phase: str = "", last: bool = False) -> None:
        """Show a line of progress: the same again on a terminal, elsewhere a new one now and then, with its `phase`."""
        now, terminal = time.monotonic(), sys.stdout.isatty()
        if self.world.rank > 0 or (now - self.last_shown < (0.1 if terminal else LINE_SECONDS) and not last):
            return
        self.last_shown = now
        fields = [f"{self.now_at:,}/{self.total_steps:,}", self.summary(), phase]
        if self.speed:
            left = timedelta(seconds=round(min(max(0, self.total_steps - self.now_at) / self.speed, 1e12)))  # at most
            fields[2:2] = [f"{self.speed:.0f} steps/s", f"ETA {left}"]
        if terminal:
            while len(fields) > 2 and len("  ".join(fields)) >= shutil.get_terminal_size().columns:
                del fields[-2]  # the phase is the last to go
            print(end="\r\x1b[K")
        print("  ".join(fields).rstrip(), end="" if terminal else "\n", flush=True)

    def summary(self) -> str:
        """The mean return of the last 100 episodes, and the share of them that solved their levels."""
        return describe(mean(self.recent), mean(self.recent_complete)) if self.recent else "no episode logged"

    def close(self, error: BaseException | None) -> None:
        """Close all files and unlock the folder. Raises OSError, with all open, if a run's end cannot be noted."""
        if self.world.rank > 0:
            return
        if error is None:
            write_json(self.path / "meta.json", self.meta | {"finished": time.strftime(UTC, time.gmtime())})
        if sys.stdout.isatty():
            print()  # below the line of progress
        for each in (self.writer, *self.files.values()):
            with suppress(OSError):  # which an earlier write has raised, too
                each.close()
        INTERRUPT.held = False  # all is saved
        if self.wandb_run is not None:
            try:
                ThreadPoolExecutor(1).submit(self.wandb_run.finish).result(300 if error is None else 5)
            except (Exception, KeyboardInterrupt) as failure:  # its process is gone or mute; a whole run stays whole
                print(f"warning: Weights & Biases has not got all of the run: {failure!r}", file=sys.stderr)
        self.lock.close()
        if error is None or isinstance(error, KeyboardInterrupt):
            text = f"{self.step:,} steps in {timedelta(seconds=round(self.seconds))} "
            text += f"({self.step / max(self.seconds, 0.1):.0f} steps/s), {self.saved}"
            text += f", {self.now_at - self.step:,} more steps are dropped" if self.now_at > self.step else ""
            print(f"{'stopped' if error else 'done'}: {text} | model: {self.path / 'model.pt'}")


def require_finite(step: int, metrics: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
    """The metrics as numbers, without charts that are NaN or infinite. Raises TrainingError for others that are."""
    tensors = {tag: value.double() for tag, value in metrics.items() if isinstance(value, torch.Tensor)}
    numbers = torch.stack([*tensors.values()]).tolist() if tensors else []
    values = {**metrics, **dict(zip(tensors, numbers, strict=True))}
    for tag, value in values.items():
        if not np.isfinite(value) and not tag.startswith("charts/"):
            raise TrainingError(f"{tag} is {value} at step {step:,}")
    return {tag: value for tag, value in values.items() if np.isfinite(value)}


def describe(episodic_return: float, level_complete: float) -> str:
    """A mean return, and the share of solved levels; NaN for environments without levels."""
    return f"return {episodic_return:.2f}" + ("" if math.isnan(level_complete) else f", {level_complete:.0%} solved")


def mean(values: Collection[float]) -> float:
    """The mean, or NaN where no episode has finished yet."""
    return sum(values) / len(values) if values else float("nan")


def command(args: Any, script: str, launcher: str = "python") -> str:
    """The command line that repeats a run: the script's name and each flag that differs from its default."""
    words, defaults = [*launcher.split(), script], type(args)()
    if args.presets and args.preset in args.presets:
        words += ["--preset", args.preset]
        defaults = preset_args(type(args), args.preset)
    defaults = to_json(defaults)
    for setting, value in to_json(args).items():
        name = flag(setting)
        given = [name if value else f"--no-{name[2:]}"] if isinstance(value, bool) else [name, *tree_leaves(value)]
        words += map(str, given if value != defaults[setting] else [])
    return shlex.join(words)


def provenance(command_line: str, script: str, device: torch.device) -> dict[str, Any]:
    """Command, script and its hash, commit, whether the tree had changes, versions, machine and time."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}  # PyTorch's with its build (+cu130)
    for package in ("numpy", "gymnasium", "procgen", "procgen-mirror", "procgen-gym"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cpu = re.findall("model name\t: (.*)", Path("/proc/cpuinfo").read_text())[0]
    gpu = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    changes = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.cpp")
    new = git("status", "--porcelain", "--ignored", "--untracked-files=all", "--", script)  # others may be anyone's
    return {
        "command": command_line,
        "script": script,
        "script_sha256": sha256(ROOT / script),
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes or new != ""),  # None: it lies outside
        "versions": versions,
        "machine": f"{os.cpu_count()} x {cpu}, {torch.get_num_threads()} PyTorch threads{gpu}",
        "started": time.strftime(UTC, time.gmtime()),
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git(*words: str) -> str | None:
    """What git says of this source tree; None where it is no checkout or git is missing."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def make_run_dir(args: Any, runs_dir: Path) -> Path:
    """Make the folder of a run that starts now: <runs_dir>/<env>__<exp_name>__<seed>__<seconds since 1970>."""
    title = f"{args.env_id}__{args.exp_name}__{args.seed}".replace("/", "-").replace(",", "+")
    runs_dir.mkdir(parents=True, exist_ok=True)
    for seconds in itertools.count(int(time.time())):  # the next one, if another run has begun in this second
        path = Path(runs_dir, f"{title}__{seconds}")
        with suppress(FileExistsError):
            path.mkdir()
            return path


def lock_folder(path: Path, note: bool = True) -> IO:
    """Lock a run's folder until the returned file is closed, if there are locks. Raises InputError if it is in use, and
    OSError if it holds a link or a device: what is written into the folder could go elsewhere."""
    for each in path.rglob("*"):
        if each.is_symlink() or not (each.is_file() or each.is_dir() or not each.exists()):  # its writer took it away
            raise OSError(errno.ELOOP, f"{each} is a link or no regular file")
    file = (path / "lock").open("a")  # not "w", as it may be a hard link
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: a fork of the environment would inherit it
    except BlockingIOError:
        file.close()
        raise InputError(f"{path} is in use by another process: wait for its end, or stop it.") from None
    except OSError as error:
        if note:
            print(f"note: {path} cannot be locked ({error.strerror}): see that no other run uses it", file=sys.stderr)
    return file


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file in place of the one before, which stays whole if this fails or the machine loses power."""
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")  # of this writer alone
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
