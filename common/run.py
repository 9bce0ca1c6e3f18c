"""The run folder: settings, provenance, TensorBoard, CSVs, the saved model, and what a person sees meanwhile."""

import csv
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from common.envs import PROCGEN_GAMES, finished_episodes
from common.errors import InputError, TrainingError, flag

PACKAGES = ("numpy", "gymnasium", "procgen", "procgen-mirror")
SAVE_SECONDS = 60  # a model younger than this is not saved again before the run ends
LINE_SECONDS, BAR_SECONDS = 10, 0.1  # between progress lines where there is no terminal; between updates of the bar


def check_run(args: Any) -> None:
    """Raise InputError if no run folder can be made in --runs-dir, or if --track is set without its package."""
    if args.track and not importlib.util.find_spec("wandb"):
        raise InputError("--track needs Weights & Biases: pip install wandb, or leave --track out.")
    runs_dir = Path(args.runs_dir).absolute()
    try:
        existing = next(path for path in (runs_dir, *runs_dir.parents) if path.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise cannot_write(args, error) from error


def cannot_write(args: Any, error: OSError) -> InputError:
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


class Run:
    """One run's folder and its progress display.

    The folder holds `args.json` (every setting), `meta.json` (command, commit, versions, machine), TensorBoard events,
    `progress.csv` (a row an iteration), `episodes.csv` (a row an episode) and `model.pt`.

    Args:
        args: the script's `Args`.
        script: file name of the script, for the command that replays the run.
        agent: its parameters are counted for the header.
        device: shown in the header.
        total_steps: environment steps at which the run will end.

    Raises:
        InputError: the folder cannot be written, or Weights & Biases refuses (no login, say).
    """

    def __init__(self, args: Any, *, script: str, agent: torch.nn.Module, device: torch.device, total_steps: int):
        self.args, self.total_steps = args, total_steps
        try:
            self.path = path = make_run_dir(args)
            self.write_json("args.json", dataclasses.asdict(args))
            self.write_json("meta.json", provenance(command(args, script), device))
            self.files = [(path / name).open("w", newline="", buffering=1) for name in ("progress.csv", "episodes.csv")]
        except OSError as error:
            raise cannot_write(args, error) from error
        self.games = args.env_id.split(",")  # environment i plays games[i % len(games)]
        self.wandb_run = None
        if args.track:
            import wandb

            try:
                self.wandb_run = wandb.init(
                    project=args.wandb_project_name,
                    entity=args.wandb_entity,
                    name=path.name,
                    dir=path,
                    config=dataclasses.asdict(args),
                    sync_tensorboard=True,
                    save_code=True,
                )
            except wandb.errors.UsageError as error:  # no login, say
                shutil.rmtree(path)
                raise InputError(f"--track: Weights & Biases says: {error} (or set WANDB_MODE=offline)") from error
        self.progress_csv, self.episodes_csv = (csv.writer(file, lineterminator="\n") for file in self.files)
        self.progress_csv.writerow(("step", "seconds", "episodes", "episodic_return", "last_100_return"))
        self.episodes_csv.writerow(("step", "seconds", "env", "episodic_return", "episodic_length"))
        self.writer = SummaryWriter(str(path))
        table = "\n".join(f"|{key}|{value}|" for key, value in dataclasses.asdict(args).items())
        self.writer.add_text("hyperparameters", f"|setting|value|\n|-|-|\n{table}")

        self.recent = deque(maxlen=100)  # returns of the last 100 episodes
        self.new_returns = []  # returns of the episodes that ended since the last row
        self.num_episodes = self.step = 0
        self.start = self.last_shown = time.monotonic()
        self.last_save = -float("inf")
        parameters = sum(parameter.numel() for parameter in agent.parameters())
        task = f"{args.env_id} ({args.distribution_mode})" if self.games[0] in PROCGEN_GAMES else args.env_id
        print(
            f"{args.exp_name} on {task}, seed {args.seed}, {total_steps:,} steps | {device}, {args.precision} | "
            f"{parameters:,} parameters | {path}",
            flush=True,
        )
        self.bar = tqdm(
            total=total_steps,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} steps  SPS {rate_fmt}{postfix}  ETA {remaining}",
            unit="",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
        )
        self.save_model(agent)

    def episodes(self, step: int, infos: Mapping[str, Any]) -> None:
        """Record every episode that `infos` (of the vector environment's step) reports as finished."""
        for episode in finished_episodes(infos):
            self.episode(step, *episode)

    def episode(self, step: int, env: int, episodic_return: float, length: int) -> None:
        """Record an episode of environment number `env` that finished at `step`."""
        self.writer.add_scalar("charts/episodic_return", episodic_return, step)
        self.writer.add_scalar("charts/episodic_length", length, step)
        if len(self.games) > 1:
            game = self.games[env % len(self.games)]
            self.writer.add_scalar(f"charts/episodic_return/{game}", episodic_return, step)
        seconds = f"{time.monotonic() - self.start:.1f}"
        self.episodes_csv.writerow((step, seconds, env, f"{episodic_return:.6g}", length))
        self.recent.append(episodic_return)
        self.new_returns.append(episodic_return)
        self.num_episodes += 1
        self.show(step)

    def log(self, step: int, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Write the metrics of an iteration that ended at `step` and show the progress.

        This is where the host waits for the device, once an iteration.

        Raises:
            TrainingError: a metric is NaN or infinite.
        """
        values = {tag: float(value) for tag, value in metrics.items()}
        seconds = time.monotonic() - self.start
        sps = step / seconds
        for tag, value in (values | {"charts/SPS": sps}).items():
            self.writer.add_scalar(tag, value, step)
        self.writer.flush()
        new, recent = f"{mean(self.new_returns):.6g}", f"{mean(self.recent):.6g}"
        self.progress_csv.writerow((step, f"{seconds:.1f}", len(self.new_returns), new, recent))
        self.require_finite(step, values)
        self.new_returns.clear()
        self.step = step
        self.show(step, last=step >= self.total_steps)

    def summary(self) -> str:
        if not self.recent:
            return "no episode finished yet"
        return f"last-100-episodes return {mean(self.recent):.2f}"

    def require_finite(self, step: int, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Raise TrainingError for the first metric that is NaN or infinite."""
        for tag, value in metrics.items():
            if not np.isfinite(float(value)):
                self.fail(f"{tag} is {float(value)} at step {step:,}")

    def fail(self, reason: str) -> None:
        self.bar.close()
        raise TrainingError(f"{reason}: the run stops; its last good model is {self.path / 'model.pt'}")

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
        left = timedelta(seconds=round((self.total_steps - step) / sps))
        if step >= self.total_steps and not last:  # PPG's closing auxiliary phase
            left = "not known"
        print(f"step {step:,}/{self.total_steps:,}  SPS {sps:.0f}  {text}  ETA {left}", flush=True)

    def save_model(self, agent: torch.nn.Module, final: bool = False) -> None:
        """Write `model.pt` atomically, at most once in SAVE_SECONDS unless `final`.

        It is a dict of "agent" (the state_dict), "args" and "step" that `torch.load(..., weights_only=True)` accepts.

        Raises:
            TrainingError: a parameter is NaN or infinite; the model on disk stays as it is.
        """
        finite = torch.stack([parameter.isfinite().all() for parameter in agent.parameters()]).tolist()
        for (name, _), is_finite in zip(agent.named_parameters(), finite, strict=True):
            if not is_finite:
                self.fail(f"{name} is not finite after step {self.step:,}")
        if not final and time.monotonic() - self.last_save < SAVE_SECONDS:
            return
        self.last_save = time.monotonic()
        temporary = self.path / "model.pt.tmp"
        with temporary.open("wb") as file:
            weights = {name: value.cpu() for name, value in agent.state_dict().items()}
            torch.save({"agent": weights, "args": dataclasses.asdict(self.args), "step": self.step}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / "model.pt")

    def finish(self, agent: torch.nn.Module, stopped_at: int | None = None) -> None:
        """Save the model, close all files and print the summary, also of a run that was stopped before its end."""
        if stopped_at is not None:
            self.step = stopped_at
        self.save_model(agent, final=True)
        self.bar.close()
        self.writer.close()
        for file in self.files:
            file.close()
        if self.wandb_run is not None:
            self.wandb_run.finish()
        seconds = time.monotonic() - self.start
        end = "done" if stopped_at is None else "stopped"
        print(
            f"{end}: {self.step:,} steps in {timedelta(seconds=round(seconds))} ({self.step / seconds:.0f} SPS), "
            f"{self.num_episodes:,} episodes, {self.summary()} | model: {self.path / 'model.pt'}"
        )

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        (self.path / name).write_text(json.dumps(content, indent=2) + "\n")


def mean(values: Collection[float]) -> float:
    """The mean, or NaN where no episode has finished yet."""
    return sum(values) / len(values) if values else float("nan")


def command(args: Any, script: str) -> str:
    """The command line that repeats a run: the script's name and each flag that differs from its default."""
    words = ["python", script]
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
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
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
