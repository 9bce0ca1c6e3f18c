"""The run folder: settings, provenance, TensorBoard, CSVs, and what a person sees meanwhile."""

import csv
import dataclasses
import fcntl
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from common.envs import PROCGEN_GAMES, finished_episodes
from common.errors import InputError, TrainingError, flag

PACKAGES = ("numpy", "gymnasium", "procgen", "procgen-mirror")
CSV_COLUMNS = {
    "progress.csv": ("step", "seconds", "episodes", "episodic_return", "last_100_return"),
    "episodes.csv": ("step", "seconds", "env", "episodic_return", "episodic_length"),
    "eval.csv": (
        *("step", "seconds", "policy", "env_id", "episodes", "episodic_return", "standard_error", "episodic_length"),
        "normalized_return",
    ),
}
EVENTS_SUFFIX = ".run"  # tells the run's own TensorBoard files from those that others put beside them
FLUSH_SECONDS = 2  # between TensorBoard's writes
LINE_SECONDS, BAR_SECONDS = 10, 0.1  # between progress lines where there is no terminal; between updates of the bar


def check_run(args: Any) -> None:
    """Raise InputError if no run folder can be made in --runs-dir, --track or --capture-video lacks its package, or
    --init-heads or the levels of evaluations are given without what they are for."""
    if args.init_heads != "keep" and not args.init_from:
        raise InputError("--init-heads is for a run that starts from another: add --init-from, or leave it out.")
    if not args.eval_interval and (args.eval_num_levels or args.eval_start_level):
        flags = "--eval-num-levels and --eval-start-level"
        raise InputError(f"{flags} are for evaluations: add --eval-interval, or leave them out (or at 0).")
    if args.track and not importlib.util.find_spec("wandb"):
        raise InputError("--track needs Weights & Biases: pip install wandb, or leave --track out.")
    if args.capture_video and not importlib.util.find_spec("av"):
        raise InputError("--capture-video needs a video encoder: pip install av, or leave --capture-video out.")
    runs_dir = Path(args.runs_dir).absolute()
    try:
        existing = next(path for path in (runs_dir, *runs_dir.parents) if path.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise cannot_write(args, error) from error


def cannot_write(args: Any, error: OSError, resumed: Path | None = None) -> InputError:
    if resumed is not None:
        return InputError(f"--resume {resumed}: nothing can be written there ({error.strerror}).")
    return InputError(f"no run folder can be written in {args.runs_dir} ({error.strerror}): choose another --runs-dir.")


def make_run_dir(args: Any) -> Path:
    """Make the folder of a run that starts now: <runs_dir>/<env>__<script>__<seed>__<time>, with a suffix if taken."""
    title = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    path = name = Path(args.runs_dir) / title.replace("/", "-").replace(",", "+")
    for number in itertools.count(2):
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not path.is_dir():
                raise
            path = name.with_name(f"{name.name}-{number}")


def lock_folder(path: Path) -> IO:
    """Lock a run's folder against other processes, until the file returned is closed or this process ends.

    Raises:
        InputError: another process has locked it.
        OSError: nothing can be written there.
    """
    file = (path / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InputError(f"{path} is in use by another process: wait for its end, or stop it.") from None
    except OSError as error:
        print(f"note: {path} cannot be locked ({error.strerror}): see that no other run uses it", file=sys.stderr)
    return file


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, even if the machine loses power."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some file systems have no fsync for a folder, that is for the new name
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class Run:
    """One run's folder and its progress display.

    The folder holds `args.json` (every setting), `meta.json` (command, commit, versions, machine), TensorBoard events,
    `progress.csv` (a row an iteration) and `episodes.csv` (a row an episode).

    Args:
        args: the script's `Args`.
        script: file name of the script, for the command that replays the run.
        agent: its parameters are counted for the header.
        device: shown in the header.
        total_steps: environment steps at which the run will end.
        resumed: what `find_run` has returned. The logs of the run are then cut back to where its checkpoint stands.
        launcher, ranks: what starts the script, and how many processes make the run.

    Raises:
        InputError: the folder cannot be written, or Weights & Biases refuses (no login, say).
    """

    def __init__(
        self,
        args: Any,
        *,
        script: str,
        agent: torch.nn.Module,
        device: torch.device,
        total_steps: int,
        resumed: Any = None,
        launcher: str = "python",
        ranks: int = 1,
    ):
        self.args = args = dataclasses.replace(args, resume=None)  # which is asked of a process, not of the run
        self.script, self.device, self.total_steps = script, device, total_steps
        checkpoint = resumed and resumed.checkpoint
        state = (
            checkpoint["run"] if checkpoint else {"seconds": 0.0, "recent": [], "new_returns": [], "num_episodes": 0}
        )
        meta = provenance(command(args, script, launcher), device)
        meta |= {"script": script, "ranks": ranks, "finished": None, "resumed": []}
        changed = " with changes" if meta["dirty"] else ""
        versions = " ".join(f"{name}-{version}" for name, version in meta["versions"].items())
        self.made_with = f"commit {meta['commit']}{changed}, {versions}, {meta['machine']}"
        try:
            if resumed is None:
                self.path = make_run_dir(args)
                self.lock = lock_folder(self.path)
            else:
                self.path, self.lock, _ = resumed
                meta = self.resumed_meta(meta, checkpoint["step"] if checkpoint else 0)
                self.cut_logs(state.get("logs", {}))
                time.sleep(1 - time.time() % 1)  # TensorBoard sorts its files by the second in their names
            path = self.path
            self.write_json("meta.json", meta)
            self.write_json("args.json", dataclasses.asdict(args))  # what makes the folder one to resume
            self.files = {name: (path / name).open("a", newline="", buffering=1) for name in CSV_COLUMNS}
        except OSError as error:
            raise cannot_write(args, error, resumed and self.path) from error
        self.meta = meta
        self.games = args.env_id.split(",")  # environment i plays games[i % len(games)]
        self.wandb_run = None
        if args.track:
            import wandb

            try:
                self.wandb_run = wandb.init(
                    project=args.wandb_project_name,
                    entity=args.wandb_entity,
                    id=re.sub(r"\W", "-", path.name),
                    resume="allow",
                    name=path.name,
                    dir=path.parent,  # not in the run's folder, where it would copy its own copies of the events
                    config=dataclasses.asdict(args),
                    sync_tensorboard=True,
                    save_code=True,
                )
            except wandb.errors.UsageError as error:  # no login, say
                if resumed is None:
                    shutil.rmtree(path)
                raise InputError(f"--track: Weights & Biases says: {error} (or set WANDB_MODE=offline)") from error
        self.csv = {name: csv.writer(file, lineterminator="\n") for name, file in self.files.items()}
        # A signal that interrupts `Condition.notify` costs the writer's thread its wake-up: it then sleeps until it
        # flushes next, and `close`, that is the end of the run, waits for it.
        self.writer = SummaryWriter(str(path), flush_secs=FLUSH_SECONDS, filename_suffix=EVENTS_SUFFIX)
        for name, columns in CSV_COLUMNS.items():
            if not (path / name).stat().st_size:
                self.csv[name].writerow(columns)
        if checkpoint is None:
            table = "\n".join(f"|{key}|{value}|" for key, value in dataclasses.asdict(args).items())
            self.writer.add_text("hyperparameters", f"|setting|value|\n|-|-|\n{table}")

        self.recent = deque(state["recent"], maxlen=100)  # returns of the last 100 episodes
        self.new_returns = list(state["new_returns"])  # returns of the episodes that ended since the last row
        self.num_episodes, self.step = state["num_episodes"], checkpoint["step"] if checkpoint else 0
        self.last_shown = time.monotonic()
        self.start = self.last_shown - state["seconds"]
        parameters = sum(parameter.numel() for parameter in agent.parameters())
        task = f"{args.env_id} ({args.distribution_mode})" if self.games[0] in PROCGEN_GAMES else args.env_id
        print(
            f"{args.exp_name} on {task}, seed {args.seed}, {total_steps:,} steps | {device}, {args.precision} | "
            f"{parameters:,} parameters | {path}"
            + (f" | {ranks} ranks" if ranks > 1 else "")
            + (f" | resumed at step {self.step:,}" if resumed else ""),
            flush=True,
        )
        self.bar = tqdm(
            total=total_steps,
            initial=self.step,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} steps  SPS {rate_fmt}{postfix}  ETA {remaining}",
            unit="",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
        )

    def resumed_meta(self, meta: dict[str, Any], step: int) -> dict[str, Any]:
        """The run's first `meta.json`, with this process in its list of those that went on with it."""
        here = {key: meta[key] for key in ("commit", "dirty", "versions", "machine", "started")} | {"step": step}
        first = read_json(self.path / "meta.json")
        if not isinstance(first.get("resumed"), list):
            print(f"warning: {self.path / 'meta.json'} is damaged and starts anew", file=sys.stderr)
            first = meta
        now = {name: meta[name] for name in ("command", "ranks")}
        return first | now | {"finished": None, "resumed": [*first["resumed"], here]}

    def cut_logs(self, sizes: Mapping[str, int]) -> None:
        """Cut the logs back to `sizes`, in bytes by name: what was written after that will be written again."""
        for file in self.log_files():
            size = sizes.get(file.name, 0)
            if file.stat().st_size < size:
                print(f"warning: {file} has lost some of its last lines", file=sys.stderr)
            elif size or file.suffix == ".csv":
                os.truncate(file, size)
            else:
                file.unlink()

    def log_files(self) -> list[Path]:
        """The logs that are there, and are the run's own."""
        return [path for name in (*CSV_COLUMNS, f"events.*{EVENTS_SUFFIX}") for path in self.path.glob(name)]

    def sync(self) -> None:
        """See to it that the logs survive a loss of power."""
        for file in self.log_files():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())

    def state_dict(self) -> dict[str, Any]:
        """Statistics, and the sizes of all logs."""
        with self.logging():
            self.writer.flush()
            sizes = {file.name: file.stat().st_size for file in self.log_files()}
        return {
            "seconds": time.monotonic() - self.start,
            "recent": list(self.recent),
            "new_returns": list(self.new_returns),
            "num_episodes": self.num_episodes,
            "logs": sizes,
        }

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Turn an error of the file system into a TrainingError: a log with a gap would be no log of this run."""
        try:
            yield
        except OSError as error:
            raise TrainingError(f"nothing can be logged in {self.path} ({error.strerror})") from error

    def flush(self) -> None:
        """Nothing waits here; of several ranks, episodes do (`distributed.JoinedRun`)."""

    def episodes(self, step: int, infos: Mapping[str, Any], first_env: int = 0) -> None:
        """Record every episode that `infos` reports as finished: those of a step of a vector environment, whose
        environments are number `first_env` and up."""
        for env, episodic_return, length in finished_episodes(infos):
            self.episode(step, first_env + env, episodic_return, length)

    def episode(self, step: int, env: int, episodic_return: float, length: int) -> None:
        """Record an episode of environment number `env` that finished at `step`."""
        seconds = f"{time.monotonic() - self.start:.1f}"
        with self.logging():
            self.writer.add_scalar("charts/episodic_return", episodic_return, step)
            self.writer.add_scalar("charts/episodic_length", length, step)
            if len(self.games) > 1:
                game = self.games[env % len(self.games)]
                self.writer.add_scalar(f"charts/episodic_return/{game}", episodic_return, step)
            self.csv["episodes.csv"].writerow((step, seconds, env, f"{episodic_return:.6g}", length))
        self.recent.append(episodic_return)
        self.new_returns.append(episodic_return)
        self.num_episodes += 1
        self.show(step)

    def log(
        self, step: int, metrics: Mapping[str, torch.Tensor | float], batch: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Write the metrics of an iteration that ended at `step` and show the progress.

        This is where the host waits for the device, once an iteration.

        Raises:
            TrainingError: a metric is NaN or infinite (the error then carries `batch`), or nothing can be written.
        """
        values = {tag: float(value) for tag, value in metrics.items()}
        seconds = time.monotonic() - self.start
        sps = step / seconds
        new, recent = f"{mean(self.new_returns):.6g}", f"{mean(self.recent):.6g}"
        with self.logging():
            for tag, value in (values | {"charts/SPS": sps}).items():
                self.writer.add_scalar(tag, value, step)
            self.writer.flush()
            self.csv["progress.csv"].writerow((step, f"{seconds:.1f}", len(self.new_returns), new, recent))
        require_finite(step, values, batch)
        self.new_returns.clear()
        self.step = step
        self.show(step, last=step >= self.total_steps)

    def evaluation(self, step: int, metrics: Mapping[str, float], rows: list[tuple]) -> None:
        """Write what an evaluation at `step` has found: metrics by tag (NaN is left out), and the rest of each row of
        `eval.csv`."""
        seconds = f"{time.monotonic() - self.start:.1f}"
        with self.logging():
            for tag, value in metrics.items():
                if np.isfinite(value):
                    self.writer.add_scalar(tag, value, step)
            for row in rows:
                cells = (f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row)
                self.csv["eval.csv"].writerow((step, seconds, *cells))

    def summary(self) -> str:
        if not self.recent:
            return "no episode finished yet"
        return f"last-100-episodes return {mean(self.recent):.2f}"

    def show(self, step: int, phase: str = "", last: bool = False) -> None:
        """Move the bar to `step`, beside it the summary and what is being done, if `phase` says so; without a terminal,
        print a line every few seconds."""
        now = time.monotonic()
        if not last and now - self.last_shown < (LINE_SECONDS if self.bar.disable else BAR_SECONDS):
            return
        self.last_shown = now
        text = ", ".join(filter(None, (self.summary(), phase)))
        if not self.bar.disable:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.n = step
            self.bar.refresh()
            return
        sps = step / (now - self.start)
        left = timedelta(seconds=max(0, round((self.total_steps - step) / sps)))
        if step >= self.total_steps and not last:  # PPG's closing auxiliary phase
            left = "not known"
        print(f"step {step:,}/{self.total_steps:,}  SPS {sps:.0f}  {text}  ETA {left}", flush=True)

    def finish(self, end: str) -> None:
        """Close all files and print the summary of a run that is "done" or was "stopped"."""
        if end == "done":
            with self.logging():
                self.write_json("meta.json", self.meta | {"finished": utc_now()})
        self.close()
        seconds = time.monotonic() - self.start
        print(
            f"{end}: {self.step:,} steps in {timedelta(seconds=round(seconds))} ({self.step / seconds:.0f} SPS), "
            f"{self.num_episodes:,} episodes, {self.summary()} | model: {self.path / 'model.pt'}"
        )

    def close(self) -> None:
        """Close all files and unlock the folder. What cannot be written is reported elsewhere."""
        self.bar.close()
        for close in (self.writer.close, *(file.close for file in self.files.values())):
            with suppress(OSError):
                close()
        if self.wandb_run is not None:
            self.wandb_run.finish()
        self.lock.close()

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds a dict; an empty one if it does not, or cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # the last two are of a file that is no JSON, no text, or hostile
        return {}
    return content if isinstance(content, dict) else {}


def require_finite(
    step: int, metrics: Mapping[str, torch.Tensor | float], batch: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Raise TrainingError, with the batch that they are of, for the first metric that is NaN or infinite."""
    for tag, value in metrics.items():
        if not np.isfinite(float(value)):
            raise TrainingError(f"{tag} is {float(value)} at step {step:,}", batch)


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def mean(values: Collection[float]) -> float:
    """The mean, or NaN where no episode has finished yet."""
    return sum(values) / len(values) if values else float("nan")


def command(args: Any, script: str, launcher: str = "python") -> str:
    """The command line that repeats a run: the script's name and each flag that differs from its default."""
    words = [*launcher.split(), script]
    for field in dataclasses.fields(args):
        value, name = getattr(args, field.name), flag(field.name)
        if value == field.default:
            continue
        words += [name if value else name.replace("--", "--no-", 1)] if isinstance(value, bool) else [name, str(value)]
    return shlex.join(words)


def provenance(command_line: str, device: torch.device) -> dict[str, Any]:
    """Where a run's numbers come from: command, commit, whether the tree was dirty, versions, machine."""
    # PyTorch's with its build (+cu130), which the package's metadata may leave out
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cpu = next(
        (line.split(":")[1].strip() for line in read_lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    machine = f"{os.cpu_count()} x {cpu}, {torch.get_num_threads()} PyTorch threads"
    if device.type == "cuda":
        machine += f", {torch.cuda.get_device_name(device)}"
    status = git("status", "--porcelain", "--", "*.py")  # a new script counts, run folders do not
    return {
        "command": command_line,
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "versions": versions,
        "machine": machine,
        "started": utc_now(),
    }


def git(*words: str) -> str | None:
    """What git says of this source tree, or None where it is no checkout or git is missing."""
    try:
        result = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
