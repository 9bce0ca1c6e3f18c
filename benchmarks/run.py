"""Run a matrix of algorithms, games and seeds, some at a time. What is done is not done again; what is broken goes on.

    python benchmarks/run.py --algorithms ppo impala --env-ids starpilot fruitbot --seeds 2 --total-timesteps 1000000
    python benchmarks/run.py --launcher slurm --slurm-partition gpu --slurm-gpus 1 --sweep learning-rate 5e-4 1e-3

What follows `--` goes to the scripts. Each run is `python <algorithm>.py ... --resume auto` in a process of its own,
which prints to `<runs-dir>/logs/`. A finished run of the same settings in --runs-dir is skipped, an unfinished one goes
on from its last checkpoint: after Ctrl-C, a crash or a reboot, repeat the command. The exit code is 0 once all runs are
done or submitted. On Slurm, the matrix is one job array, whose jobs are queued again when their time is up.
"""

import csv
import ctypes
import fcntl
import hashlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal

import gymnasium as gym
import torch
import tyro
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import InputError, TrainingError
from common.checkpoint import load_script, runs_of
from common.device import resolve_device
from common.envs import check_envs, unknown_env
from common.evaluation import held_out_settings
from common.procgen_env import PROCGEN_GAMES
from common.run import ROOT, lock_folder, sha256, write_atomically
from common.session import one_line_errors
from common.settings import NotNegative, Positive, check_limits, flag, parse, read_json

# Of the Procgen paper: levels to train on (0: all), length of a run, and steps between evaluations on all levels.
PROTOCOLS = {
    "easy-all": (0, 25_000_000, 0),
    "easy-200": (200, 25_000_000, 262_144),
    "hard-all": (0, 200_000_000, 0),
    "hard-500": (500, 200_000_000, 1_048_576),
}
OWN_FLAGS = ("--env-id", "--seed", "--runs-dir", "--resume", "--device")  # which this script gives to the others
LOCAL_FLAGS = ("devices", "runs_per_device", "threads", "attempts")  # of no use on Slurm
POLL_SECONDS = 5.0
PRCTL = ctypes.CDLL(None).prctl


@dataclass
class Args:
    algorithms: tuple[Literal["ppo", "ppg", "impala"], ...] | None = None
    """scripts of this repository to run; all, where neither this nor --scripts names one"""
    scripts: tuple[Path, ...] | None = None
    """scripts of your own to run, in any folder: changed copies of those"""
    env_ids: tuple[str, ...] | None = None
    """Procgen games, or other tasks; None: the task that a script has as its default"""
    sweep: tuple[str, ...] | None = None
    """a flag of the scripts and its values: a run for each, with the flag and the value in its --exp-name"""
    seeds: Positive[int] = 3
    """runs of each algorithm on each game (and value of --sweep): seeds 1, 2, ..."""
    protocol: Literal[*PROTOCOLS] = "easy-all"
    """difficulty, number of levels to train on, and length of a run"""
    total_timesteps: Positive[int] | None = None
    """environment steps of a run; None for the protocol's (25M easy, 200M hard)"""
    extra: tyro.conf.Suppress[tuple[str, ...]] = ()
    """further flags of the scripts: what follows `--` on the command line"""
    runs_dir: str = "runs"
    """where run folders are made and looked for"""
    dry_run: bool = False
    """show the commands and what there is of them, and stop"""
    launcher: Literal["local", "slurm"] = "local"
    """run here, or submit a Slurm job array (needs submitit)"""
    devices: tuple[str, ...] = ("auto",)
    """where runs go: cpu, cuda:0, cuda:1, ...; auto for all GPUs, or else the CPU"""
    runs_per_device: Positive[int] | None = None
    """runs at a time; None for 1 on a GPU, and on the CPU for as many as have --threads each"""
    threads: Positive[int] = 1
    """PyTorch's threads of a run on the CPU: two runs with one each make more steps than one with two"""
    attempts: Positive[int] = 2
    """how often a run that fails is started in all"""
    slurm_partition: str | None = None
    """partition; None for the cluster's default"""
    slurm_gpus: NotNegative[int] = 1
    """GPUs of a run"""
    slurm_cpus: Positive[int] = 8
    """CPUs of a run"""
    slurm_minutes: Positive[int] = 240
    """time limit of a job; a run that needs more is queued again"""
    slurm_at_a_time: Positive[int] = 16
    """runs at a time"""


@dataclass
class Job:
    """A run to make. `state`: waiting, running, stopped, done, failed, elsewhere (in another process) or submitted."""

    algorithm: str  # its script's path from the repository's root, without .py
    words: list[str]  # flags of the script
    settings: Any  # what the script will make of them
    state: str = "waiting"
    path: Path | None = None  # of the run folder, once there is one
    attempts: int = 0
    note: str = ""
    swept: str = ""  # the value of --sweep

    @property
    def name(self) -> str:
        return f"{self.algorithm} {self.settings.env_id} {self.settings.seed} {self.swept}".rstrip()

    def command(self, runs_dir: str) -> list[str]:
        script = os.path.normpath(ROOT / f"{self.algorithm}.py")  # from any folder, as flags may name files
        return [script, *self.words, "--runs-dir", runs_dir, "--resume", "auto"]

    def file(self, logs: Path, suffix: str) -> Path:
        """A file of this run, and of none with other settings, in folder `logs`."""
        digest = hashlib.sha256(shlex.join([self.algorithm, *self.words]).encode()).hexdigest()[:8]
        return logs / f"{self.name.lstrip('./').translate(str.maketrans(' /:', '---'))}-{digest}{suffix}"


def make_jobs(args: Args) -> list[Job]:
    """A job for each seed, game, algorithm and value of --sweep, in this order, so that one seed of all is there first.
    Raises InputError for settings that cannot work; for a flag that no script has, tyro exits with a message."""
    check_limits(args)
    paths = [os.path.relpath(path.parent.resolve() / path.name, ROOT) for path in args.scripts or ()]
    algorithms = [*(args.algorithms or ()), *(path.removesuffix(".py") for path in paths)] or ["ppo", "ppg", "impala"]
    swept, *values = [args.sweep[0].replace("_", "-"), *args.sweep[1:]] if args.sweep else ("", "")
    if args.sweep and not (swept and values):  # check_limits has seen to the others
        raise InputError("--sweep is empty: name one at least.")
    for name, several in {"algorithms": algorithms, "env_ids": args.env_ids or (), "sweep": values}.items():
        if twice := [value for value, count in Counter(several).items() if count > 1]:
            raise InputError(f"{flag(name)} has {twice[0]} more than once: leave one out.")
    own = OWN_FLAGS if len(algorithms) == 1 else (*OWN_FLAGS, "--exp-name")  # which tells scripts apart
    for word in (*args.extra, f"--{swept}"):
        if word.partition("=")[0].replace("_", "-") in own:
            raise InputError(f"{word} cannot be given here, as each run has its own: leave it out.")
    slurm_flags = [name for name in vars(args) if name.startswith("slurm_")]
    for name in slurm_flags if args.launcher == "local" else LOCAL_FLAGS:
        if getattr(args, name) != getattr(Args, name):
            raise InputError(f"{flag(name)} is not for --launcher {args.launcher}: leave it out.")
    classes = {}
    for name in algorithms:
        try:
            classes[name] = type(load_script(f"{name}.py").Args())
        except (OSError, ImportError, SyntaxError, AttributeError, TypeError) as error:
            raise InputError(f"--scripts {name}.py cannot be used: {error}: name a changed copy of ours.") from error
    for env_id in [each for each in args.env_ids or () if {each} != {script.env_id for script in classes.values()}]:
        check_env_id(env_id)  # the scripts may have registered it
    levels, length, eval_interval = PROTOCOLS[args.protocol]
    common = ["--distribution-mode", args.protocol.partition("-")[0], "--num-levels", str(levels)]
    common += ["--total-timesteps", str(args.total_timesteps or length)]
    common += ["--eval-interval", str(eval_interval)] if eval_interval else []
    common += args.extra
    kinds, jobs = [], []
    for algorithm, value in itertools.product(algorithms, values):
        words = common + sweep_words(swept, value, parse(classes[algorithm], common).exp_name)
        kinds.append((algorithm, value, words, parse(classes[algorithm], words)))
    for seed, env_id, kind in itertools.product(range(1, args.seeds + 1), args.env_ids or [None], kinds):
        algorithm, value, words, settings = kind
        settings = replace(settings, env_id=env_id or settings.env_id, seed=seed)
        settings.validate()
        check_envs(settings, settings.num_envs)
        if settings.eval_interval:
            held_out_settings(settings)
        jobs.append(Job(algorithm, ["--env-id", settings.env_id, "--seed", str(seed), *words], settings, swept=value))
    return jobs


def sweep_words(swept: str, value: str, exp_name: str) -> list[str]:
    """The words that give flag `swept` a value, and its run a name that says so."""
    switches = {"True": [f"--{swept}"], "False": [f"--no-{swept}"]}
    words = switches.get(value, [f"--{swept}", *value.split()])
    return [*words, "--exp-name", f"{exp_name}-{swept}-{value}".replace(" ", "-")] if swept else []


def check_env_id(env_id: str) -> None:
    """Raise InputError for what is neither Procgen games nor a task of Gymnasium's (`module:Env-v0`, too)."""
    if set(env_id.split(",")) <= set(PROCGEN_GAMES) or env_id.startswith("ALE/"):  # the scripts register these
        return
    module, _, name = env_id.rpartition(":")
    try:
        if ":" in env_id:
            import_module(module)
        gym.spec(name)
    except gym.error.Error:
        raise InputError(str(unknown_env(env_id)).replace("--env-id", "--env-ids")) from None
    except (Exception, SystemExit) as error:  # of the module
        raise InputError(f"--env-ids {env_id}: {module!r} cannot be imported: {error}.") from error


def look(job: Job, runs_dir: str) -> None:
    """Find the run folder with a job's settings, and whether that run has ended or is under way elsewhere."""
    found = runs_of(replace(job.settings, runs_dir=runs_dir), f"{job.algorithm}.py")
    finished, used = [path for path, ended in found if ended], [path for path, _ in found if in_use(path)]
    if job.state in ("waiting", "elsewhere") and (finished or used):
        job.state = "done" if finished else "elsewhere"
    paths = used + finished if job.state == "running" else finished + used
    job.path = next(iter([*paths, *(path for path, _ in found)]), None)
    script = ROOT / f"{job.algorithm}.py"
    if job.path and not job.note and read_json(job.path / "meta.json").get("script_sha256") != sha256(script):
        job.note = f"begun by another version of {script.name}: a new version needs a file name of its own"


def in_use(path: Path) -> bool:
    try:
        lock_folder(path, note=False).close()
        return False
    except (InputError, OSError) as error:  # the latter: nothing can be written there, by no one
        return isinstance(error, InputError)


def table(jobs: list[Job]) -> Table:
    """All runs: how far they are, how fast, what they return, and how long they still need."""
    title = ", ".join(f"{count} {state}" for state, count in Counter(job.state for job in jobs).items())
    numbers = [Column(name, justify="right") for name in ("steps", "of", "SPS", "return", "left")]
    shown = Table("run", "state", *numbers, "note", title=f"{len(jobs)} runs: {title}")
    for job in jobs:
        row = last_row(job.path / "progress.csv") if job.path else None
        total = job.settings.total_timesteps
        total += -total % job.settings.iteration_steps  # of whole iterations
        cells = ["0", f"{total:,}", "-", "-", "-"]
        with suppress(TypeError, ValueError, ArithmeticError):  # there is no row yet, or a damaged one
            step, seconds, last_return = row
            sps = step / max(seconds, 0.1)
            left = timedelta(seconds=round(max(total - step, 0) / sps))
            cells = [f"{step:,}", f"{total:,}", f"{sps:.0f}", f"{last_return:.2f}".replace("nan", "-"), str(left)]
        shown.add_row(job.name, job.state, *cells, escape(job.note))
    return shown


def last_row(path: Path) -> tuple[int, float, float] | None:
    """Steps, seconds and mean return of 100 episodes from the last whole row of a progress.csv, if there is one."""
    with suppress(OSError, csv.Error), path.open(newline="", errors="replace") as file:
        for row in reversed(deque(csv.DictReader(file), maxlen=2)):  # the last may be half written
            with suppress(KeyError, TypeError, ValueError):
                return int(row["step"]), float(row["seconds"]), float(row["last_100_return"])
    return None


def places(args: Args) -> list[str]:
    """The device of each of the runs that go on at a time. Raises InputError for one that is not there."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    devices = (gpus or ["cpu"]) if args.devices == ("auto",) else args.devices
    found = []
    for device in devices:
        resolve_device(device)
        default = max(1, len(os.sched_getaffinity(0)) // args.threads) if device == "cpu" else 1
        found += [device] * (args.runs_per_device or default)
    return found


def claim(job: Job, runs_dir: str, log: Path) -> IO | None:
    """Lock a job that waits, until the file returned is closed. None, and another state, where that cannot be."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.fdopen(os.open(log, flags, 0o666), "a")
    except OSError as error:  # for example a link, or a FIFO that nobody reads
        job.state, job.note = "failed", f"{log} cannot be opened ({error.strerror})"
        return None
    try:
        # A record lock: the run does not inherit it, and closing any handle of the file in this process ends it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        job.state = "elsewhere"
    except OSError as error:  # a file system without locks
        print(f"note: {log} cannot be locked ({error.strerror}): see that no other process makes it", file=sys.stderr)
    look(job, runs_dir)
    if job.state == "waiting":
        return file
    file.close()
    return None


def start(job: Job, device: str, args: Args, file: IO) -> subprocess.Popen:
    command = [*job.command(str(Path(args.runs_dir).resolve())), "--device", device]
    job.state, job.attempts, job.note = "running", job.attempts + 1, "; ".join(filter(None, (device, job.note)))
    with suppress(OSError):  # of a full disk, which the run tells
        os.write(file.fileno(), f"$ {shlex.join(['python', *command])}\n".encode())
    streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    # In a session of its own: Ctrl-C is for this process, which tells the runs. When it is killed, the kernel does.
    own = {"start_new_session": True, "preexec_fn": lambda: PRCTL(1, signal.SIGTERM)}  # PR_SET_PDEATHSIG
    return subprocess.Popen([sys.executable, *command], env=env, **own, **streams)


def end(job: Job, code: int, args: Args, log: Path) -> None:
    """Look whether a process has ended its run. If not, it waits for another attempt, but not after code 0 or 2."""
    job.state, job.note = "waiting", ""
    look(job, args.runs_dir)
    if job.state == "waiting":
        job.state = "waiting" if job.attempts < args.attempts and code not in (0, 2) else "failed"
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        job.note = f"not finished, exit code {code}: {lines[-1] if lines else 'no output'} ({log})"


def run_here(jobs: list[Job], args: Args, logs: Path, console: Console) -> None:
    """Run the jobs that wait, and show all of them; on a signal, stop all runs, which save a checkpoint."""
    free, running, shown = places(args), [], None  # running: (job, process, device, its log, locked)
    with Live(console=console, auto_refresh=False, transient=True) as live:  # shows nothing where there is no terminal
        try:
            while True:
                for each in [each for each in running if each[1].poll() is not None]:
                    running.remove(each)
                    job, process, device, file = each
                    free.append(device)
                    file.close()
                    end(job, process.returncode, args, job.file(logs, ".log"))
                for job in jobs:
                    if job.state == "waiting" and free:
                        file = claim(job, args.runs_dir, job.file(logs, ".log"))
                        if file is not None:
                            device = free.pop(0)
                            running.append((job, start(job, device, args, file), device, file))
                    if job.state in ("running", "elsewhere"):
                        look(job, args.runs_dir)
                before, shown = shown, [(job.state, job.attempts) for job in jobs]
                live.update(table(jobs), refresh=True)
                if not running:
                    return
                if shown != before and not console.is_terminal:
                    console.print(table(jobs))
                time.sleep(POLL_SECONDS)
        finally:
            for _, process, *_ in running:
                process.send_signal(signal.SIGTERM)
            for job, process, *_ in running:
                process.wait()
                look(job, args.runs_dir)
                job.state, job.note = "stopped", "repeat the command to go on"
            console.print(table(jobs))


class SlurmRun:
    """What a Slurm job does. submitit calls `checkpoint` when its time is up or it is preempted."""

    process = None

    def __call__(self, command: list[str]) -> None:
        self.process = subprocess.Popen([sys.executable, *command])
        if code := self.process.wait():
            raise RuntimeError(f"exit code {code}")

    def checkpoint(self, command: list[str]) -> Any:
        from submitit.helpers import DelayedSubmission

        self.process.send_signal(signal.SIGTERM)  # should Slurm's own have missed it
        with suppress(ChildProcessError):  # it has been waited for
            os.waitpid(self.process.pid, 0)  # not process.wait(), whose lock the interrupted __call__ holds
        return DelayedSubmission(SlurmRun(), command)


def submit(jobs: list[Job], args: Args, logs: Path) -> None:
    """Submit the jobs that wait as one array. Raises InputError where Slurm, or submitit, is not there or refuses."""
    # submitit reads it as it is imported. Slurm's signal goes to the run as well, which knows how to end on this one.
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"
    try:
        import submitit
    except ImportError:
        raise InputError("--launcher slurm needs submitit: pip install submitit.") from None
    try:
        executor = submitit.SlurmExecutor(folder=logs, max_num_timeout=10_000)
        wanted = {"gpus_per_node": args.slurm_gpus, "partition": args.slurm_partition}
        wanted = {name: value for name, value in wanted.items() if value}
        wanted |= {"time": args.slurm_minutes, "cpus_per_task": args.slurm_cpus}
        executor.update_parameters(job_name="procgen", array_parallelism=args.slurm_at_a_time, **wanted)
        for job in [job for job in jobs if job.state == "waiting" and job.file(logs, ".slurm").is_file()]:
            number = job.file(logs, ".slurm").read_text()  # of an earlier call
            queue = subprocess.run(["squeue", "--noheader", f"--jobs={number}"], capture_output=True, text=True)
            if queue.stdout.strip():
                job.state, job.note = "submitted", f"Slurm job {number}"
        waiting = [job for job in jobs if job.state == "waiting"]
        commands = [job.command(str(Path(args.runs_dir).resolve())) for job in waiting]
        submitted = executor.map_array(SlurmRun(), commands) if commands else []
    except RuntimeError as error:
        raise InputError(f"--launcher slurm: {str(error).strip().splitlines()[-1]}") from error
    for job, its in zip(waiting, submitted, strict=True):
        job.state, job.note = "submitted", f"Slurm job {its.job_id}, {its.paths.stderr}"
        write_atomically(job.file(logs, ".slurm"), its.job_id.encode())


def main(args: Args) -> list[Job]:
    """Make all runs of the matrix that are not there. Raises InputError before any is started."""
    jobs = make_jobs(args)
    for job in jobs:
        look(job, args.runs_dir)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if args.dry_run:
        for job in jobs:
            command = shlex.join(["python", *job.command(args.runs_dir)])
            print(f"{job.state}: {command}  # {job.note or job.path or 'new'}")
        return jobs
    logs = Path(args.runs_dir).resolve() / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=logs).close()
    except OSError as error:
        raise InputError(f"no run folder can be written ({error}): choose another --runs-dir.") from error
    if args.launcher == "slurm":
        submit(jobs, args, logs)
        console.print(table(jobs))
    else:
        run_here(jobs, args, logs, console)
    return jobs


if __name__ == "__main__":
    fatal = [OSError] if "--dry-run" in sys.argv else []  # a matrix goes on without a terminal
    with one_line_errors(*fatal):
        os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")  # ":" at its end: the cwd
        words = sys.argv[1:]
        split = words.index("--") if "--" in words else len(words)
        args = replace(tyro.cli(Args, args=words[:split], description=__doc__), extra=tuple(words[split + 1 :]))
        states = Counter(job.state for job in main(args))
        if not args.dry_run and not states.keys() <= {"done", "submitted"}:
            counts = ", ".join(f"{count} {state}" for state, count in states.items())
            raise TrainingError(f"the matrix is not complete ({counts}): repeat the command to go on.")
