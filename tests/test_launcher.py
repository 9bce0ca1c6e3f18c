"""benchmarks/run.py: the matrix of runs, here and on Slurm."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from rich.console import Console

import collect
import fast
import ppo
import run as launcher
from common import InputError
from common.run import ROOT
from helpers import read_json, resumed_at, wait_until

SMALL = ["--num-envs=4", "--num-steps=32", "--num-minibatches=2", "--checkpoint-interval=100", "--update-epochs=1"]


def make_args(runs_dir, **settings):
    small = {"algorithms": ("ppo",), "env_ids": ("CartPole-v1",), "seeds": 1, "total_timesteps": 256}
    small |= {"devices": ("cpu",), "runs_dir": str(runs_dir), "extra": tuple(SMALL)}
    return launcher.Args(**small | settings)


@pytest.fixture
def in_process(monkeypatch):
    """Let the launcher make its runs in this process: for what it decides, not for how it starts them.
    Seeds with an exit code make none."""
    codes = {}

    def start(job, device, args, file):
        job.state, job.attempts = "running", job.attempts + 1
        file.write("first line\nlast line\n")
        if job.settings.seed not in codes:
            ppo.main(replace(job.settings, runs_dir=args.runs_dir, device=device, resume="auto"))
        return SimpleNamespace(poll=lambda: 0, returncode=codes.get(job.settings.seed, 0))

    monkeypatch.setattr(launcher, "start", start)
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)
    return codes


def run_folders(runs_dir):
    return [path for path in runs_dir.iterdir() if path.name != "logs"]


def words_of(runs_dir, total_timesteps, *words, env_ids="CartPole-v1", seeds=2):
    """The launcher's command line after `python benchmarks/run.py`."""
    what = f"--algorithms ppo --env-ids {env_ids} --seeds {seeds} --total-timesteps {total_timesteps}"
    return [*what.split(), "--runs-dir", str(runs_dir), *words, "--", *SMALL]


def run_command(*args, **settings):
    """The launcher as a command of its own."""
    cwd = settings.pop("cwd", ROOT)
    command = [sys.executable, str(ROOT / "benchmarks/run.py"), *words_of(*args, **settings)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def states(jobs):
    return [(job.state, job.attempts) for job in jobs]


def test_scripts_of_ones_own_are_in_the_matrix(tmp_path, in_process, monkeypatch):
    """ppo.py with another gamma and a task that it registers. It finds `common/`, takes no other script's run for its
    own, and its curve can be collected. The command tells a failure: the scripts alone know the games of the Atari."""
    idea, runs, results = tmp_path / "ideas" / "ppo.py", tmp_path / "runs", tmp_path / "results"
    source = (ROOT / "ppo.py").read_text().replace("gamma: Fraction = 0.999", "gamma: Fraction = 0.9")
    task = 'gym.register("MyPole-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=20)\n'
    idea.parent.mkdir()
    idea.write_text(f"import gymnasium as gym\n{task}{source}")
    launcher.main(make_args(runs))
    (tmp_path / "queue.py").write_text("1 / 0")  # no module of Python's is looked for in the user's folder
    words = "--scripts", str(idea)
    result = run_command(runs, 256, *words, env_ids="CartPole-v1 ALE/Nothing-v5", seeds=1, cwd=tmp_path)
    assert "4 runs: 2 done, 2 failed" in result.stdout, result.stdout + result.stderr
    assert result.stdout[-1] == "\n"
    assert "exit code 2: error: --env-id" in " ".join(result.stdout.split())
    assert result.returncode == 1
    monkeypatch.chdir(tmp_path)
    mine, own = launcher.main(make_args(runs, scripts=(Path("ideas/ppo.py"),), dry_run=True))
    assert states([mine, own]) == [("done", 0), ("done", 0)]
    assert (mine.settings.gamma, own.settings.gamma) == (0.999, 0.9)
    assert (ROOT / own.command("runs")[0]).resolve() == idea
    assert collect.collect(own.path, results) == results / "easy-all" / "ppo" / "CartPole-v1" / "seed1.csv"
    with pytest.raises(InputError, match="has other settings"):
        collect.collect(mine.path, results)
    (tmp_path / "poles.py").write_text(f"import gymnasium as gym\n{task.replace('v0', 'v1')}")
    monkeypatch.syspath_prepend(tmp_path)
    jobs = launcher.make_jobs(launcher.Args(scripts=(idea,), env_ids=("MyPole-v0", "poles:MyPole-v1"), seeds=1))
    assert [job.settings.env_id for job in jobs] == ["MyPole-v0", "poles:MyPole-v1"]
    assert ":" not in jobs[1].file(runs, ".log").name
    own = idea.with_name("own.py")  # which makes its task itself
    own.write_text(source.replace("    gamma: Fraction", '    env_id: str = "Own"\n    gamma: Fraction'))
    for env_ids in (None, ("Own",)):
        (job,) = launcher.make_jobs(launcher.Args(scripts=(own,), env_ids=env_ids, seeds=1))
        assert job.settings.env_id == "Own"
    with pytest.raises(InputError, match="'Own' is not known"):
        launcher.make_jobs(launcher.Args(scripts=(own,), algorithms=("ppg",), env_ids=("Own",)))
    for source, words in {"x = (": r"'\(' was never closed", "x = 3": "no attribute 'Args'"}.items():
        broken = tmp_path / f"broken{len(source)}.py"
        broken.write_text(source)
        with pytest.raises(InputError, match=rf"^--scripts .*\.py cannot be used: .*{words}.*: name a changed copy"):
            launcher.make_jobs(launcher.Args(scripts=(broken,)))


def test_paths_are_those_of_the_users_folder_and_of_no_link(tmp_path, monkeypatch):
    """A script beside a link to the folder of `common/` is another than the one beside that folder."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    shutil.copy(ROOT / "ppo.py", tmp_path / "real" / "idea.py")
    monkeypatch.chdir(tmp_path)
    (job,) = launcher.make_jobs(make_args("runs", algorithms=None, scripts=(Path("link/idea.py"),)))
    assert job.command("runs")[0] == str(tmp_path / "real" / "idea.py")
    monkeypatch.setattr(job, "command", lambda _: ["-c", "import os; print(os.getcwd())"], raising=False)
    with Path("log").open("w") as file:
        assert launcher.start(job, "cpu", make_args("runs"), file).wait() == 0
    assert Path("log").read_text().endswith(f"\n{tmp_path}\n")
    with Path("/dev/full").open("w") as full:  # a full disk
        assert launcher.start(job, "cpu", make_args("runs"), full).wait() != 0


@pytest.mark.parametrize(("mode", "levels", "steps"), [("easy", 200, 25e6), ("hard", 500, 200e6)])
def test_protocols(mode, levels, steps):
    """The matrix has one seed of all first."""
    for number in (0, levels):
        protocol = f"{mode}-{number or 'all'}"
        jobs = launcher.make_jobs(launcher.Args(protocol=protocol, seeds=2, extra=("--vf-coef", "0.9")))
        names = [f"{script} starpilot {seed}" for seed in (1, 2) for script in ("ppo", "ppg", "impala")]
        assert [job.name for job in jobs] == names
        for settings in (job.settings for job in jobs):
            assert (settings.distribution_mode, settings.num_levels, settings.total_timesteps) == (mode, number, steps)
            assert (settings.eval_interval > 0, settings.eval_num_levels) == (number > 0, 0)
            assert settings.vf_coef == 0.9  # by its other name


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"scripts": (ROOT / "ppo.py",)}, "--algorithms has ppo more than once"),
        ({"extra": ("--num-minibatches", "7")}, "--num-minibatches 7"),
        ({"extra": ("--env_id=maze",)}, "--env_id=maze cannot be given here"),
        ({"algorithms": ("ppo", "ppg"), "extra": ("--exp-name=new",)}, "--exp-name=new cannot be given here"),
        ({"env_ids": ()}, "--env-ids is empty"),
        ({"scripts": ()}, "--scripts is empty"),
        ({"sweep": ("gamma",)}, "--sweep is empty"),
        ({"sweep": ("", "0.9")}, "--sweep is empty"),
        ({"sweep": ("gamma", "0.9", "0.9")}, "--sweep has 0.9 more than once"),
        ({"sweep": ("gamma", "0.9", "2")}, "--gamma 2.0 cannot work"),
        ({"sweep": ("seed", "1", "2")}, "--seed cannot be given here"),
        ({"seeds": 0}, "--seeds 0 cannot work"),
        ({"protocol": "easy-200"}, "leave them out for CartPole-v1 (--num-levels)"),
        ({"env_ids": ("CartPole",)}, "--env-ids 'CartPole' is not known. Did you mean CartPole-v1?"),
        ({"env_ids": ("none:CartPole-v1",)}, "--env-ids none:CartPole-v1: 'none' cannot be imported: No module named"),
    ],
)
def test_bad_settings(settings, word, tmp_path):
    """No run is started."""
    with pytest.raises(InputError, match=re.escape(word)):
        launcher.main(make_args(tmp_path / "runs", **settings))
    assert not list(tmp_path.rglob("*__ppo__*"))


def test_places(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(launcher, "resolve_device", lambda device: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for settings, expected in (
        ({"devices": ("cpu",), "threads": 2}, ["cpu"] * 4),
        ({"devices": ("cuda:0",), "runs_per_device": 2}, ["cuda:0", "cuda:0"]),
        ({}, ["cuda:0", "cuda:1"]),
    ):
        assert launcher.places(launcher.Args(**settings)) == expected


def test_runs_are_made_once(tmp_path, in_process, capsys):
    assert states(launcher.main(make_args(tmp_path, seeds=2))) == [("done", 1)] * 2
    folders = run_folders(tmp_path)
    capsys.readouterr()
    assert states(launcher.main(make_args(tmp_path, seeds=2))) == [("done", 0)] * 2
    assert "2 runs: 2 done" in capsys.readouterr().out  # shown where nothing is left to do
    with pytest.raises(SystemExit):
        launcher.make_jobs(make_args(tmp_path, extra=("--nonsense",)))
    assert "run ppo.py --help" in capsys.readouterr().err
    meta = folders[0] / "meta.json"
    meta.write_text(meta.read_text().replace('"script_sha256": "', '"script_sha256": "other'))
    launcher.main(make_args(tmp_path, seeds=2, dry_run=True))
    assert capsys.readouterr().out.count("# begun by another version of ppo.py") == 1
    damaged = b"step,seconds,last_100_return\n\xff,\x00,b\n1,2\n64,nan,1\n"  # stops no other run
    (folders[0] / "progress.csv").write_bytes(damaged)
    assert states(launcher.main(make_args(tmp_path, seeds=3))) == [("done", 0), ("done", 0), ("done", 1)]
    other = make_args(tmp_path, total_timesteps=384, dry_run=True)
    assert states(launcher.main(other)) == [("waiting", 0)]


def test_a_sweep_has_a_run_for_each_value(tmp_path, in_process):
    """The names tell them apart, in the table and among the run folders."""
    for sweep, values in (("learning_rate", ["1e-3", "2e-3"]), ("anneal_lr", ["True", "False"])):
        jobs = launcher.main(make_args(tmp_path / sweep, sweep=(sweep, *values)))
        assert states(jobs) == [("done", 1)] * 2
        assert [job.name for job in jobs] == [f"ppo CartPole-v1 1 {value}" for value in values]
        settings = [read_json(job.path / "args.json") for job in jobs]
        assert [each["exp_name"] for each in settings] == [f"ppo-{sweep.replace('_', '-')}-{value}" for value in values]
        assert [str(each[sweep]) for each in settings] == [str(eval(value)) for value in values]
        assert states(launcher.main(make_args(tmp_path / sweep, sweep=(sweep, *values)))) == [("done", 0)] * 2


def test_a_stopped_matrix_goes_on(tmp_path, in_process, monkeypatch):
    """SIGTERM stops all runs, which save checkpoints; the same command resumes them."""
    runs = tmp_path / "runs"
    words = words_of(runs, 10**9, "--devices", "cpu", "--runs-per-device", "2")
    with fast.Fork(tmp_path, fast.run_launcher, words) as process:
        process.wait_for(lambda: len(list(runs.glob("*/progress.csv"))) == 2)
        # Four rows: an iteration's state is copied after its row, so that of the third is there.
        process.wait_for(lambda: all(len(path.read_text().splitlines()) > 4 for path in runs.glob("*/progress.csv")))
        process.send(signal.SIGTERM)
        assert process.wait() == 143
        assert "2 runs: 2 stopped" in process.output
    folders = run_folders(runs)
    assert len([path for path in folders if list(path.glob("checkpoints/*.pt"))]) == 2
    assert not any(launcher.in_use(path) for path in folders)
    assert all("--resume auto" in path.read_text().splitlines()[0] for path in runs.glob("logs/*.log"))
    monkeypatch.setattr(ppo, "update", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        launcher.main(make_args(runs, total_timesteps=10**9))
    (step,) = [step for path in folders for step in resumed_at(path)]  # of the first seed, from where it stood
    assert step >= 3 * 128


def test_two_launchers_share_a_matrix(tmp_path, in_process, monkeypatch):
    """Each run is made once: a second launcher passes over what the first has claimed, and this over what that made."""
    start, runs = launcher.start, tmp_path / "runs"

    def start_beside_another(*args):  # which comes when the first run has been claimed but not begun
        words = words_of(runs, 256, "--devices", "cpu", "--runs-per-device", "1")
        with fast.Fork(tmp_path, fast.run_launcher, words) as other:
            assert other.wait() == 1, other.output + other.errors
        assert "error: the matrix is not complete (1 elsewhere, 1 done): repeat the command" in other.errors
        assert "2 runs: 1 elsewhere, 1 done" in other.output
        return start(*args)

    monkeypatch.setattr(launcher, "start", start_beside_another)
    jobs = launcher.main(make_args(runs, seeds=2, runs_per_device=1))
    assert states(jobs) == [("done", 1), ("done", 0)]
    assert len(run_folders(runs)) == 2


def launch(folder):
    (job,) = launcher.make_jobs(make_args(folder))
    file = launcher.claim(job, str(folder), folder / "log")
    job.algorithm = str(folder / "idle")
    launcher.start(job, "cpu", make_args(folder), file).wait()


def test_a_killed_launcher_leaves_no_run_and_no_lock(tmp_path):
    """Its run gets SIGTERM, and the processes that this has started keep no other launcher from it."""
    idle = f"import os, signal, subprocess, time\nos.chdir({str(tmp_path)!r})\nsubprocess.Popen(['sleep', '20'])\n"
    idle += "signal.signal(signal.SIGTERM, lambda *_: exit(open('ended', 'w').close()))\nopen('begun', 'w')\n"
    (tmp_path / "idle.py").write_text(f"{idle}time.sleep(20)")
    with fast.Fork(tmp_path / "fork", launch, tmp_path) as process:
        process.wait_for((tmp_path / "begun").exists)
    wait_until((tmp_path / "ended").exists, seconds=10)
    (job,) = launcher.make_jobs(make_args(tmp_path))
    assert launcher.claim(job, str(tmp_path), tmp_path / "log")


@pytest.mark.parametrize(
    ("code", "attempts", "spoil"), [(1, 3, Path.mkdir), (2, 1, os.mkfifo), (-9, 3, lambda log: log.symlink_to("other"))]
)
def test_failures(code, attempts, spoil, tmp_path, in_process):
    """Of four runs, the second always fails: on bad input (code 2) only once. The third makes no run, without an error.
    The last one's log is no plain file."""
    in_process |= {2: code, 3: 0}
    args = make_args(tmp_path, seeds=4, attempts=3)
    log = launcher.make_jobs(args)[3].file(tmp_path / "logs", ".log")
    log.parent.mkdir()
    spoil(log)
    jobs = launcher.main(args)
    assert states(jobs) == [("done", 1), ("failed", attempts), ("failed", 1), ("failed", 0)]
    assert jobs[3].note.startswith(f"{log} cannot be opened (")
    for job, status in zip(jobs[1:3], (code, 0), strict=True):
        assert job.note.startswith(f"not finished, exit code {status}: last line (")


def test_the_table(tmp_path):
    (job, other) = launcher.make_jobs(make_args(tmp_path, seeds=2, total_timesteps=1000))
    job.state, job.path = "running", tmp_path
    rows = ["step,seconds,episodes,episodic_return,last_100_return", "128,2.0,3,20,21", "256,4.0,3,20,22.5", "384,6"]
    (tmp_path / "progress.csv").write_text("\n".join(rows))
    other.note = "exit code 1: cannot open [/x]"  # no markup
    console = Console(file=io.StringIO(), width=120)
    console.print(launcher.table([job, other]))
    text = re.sub(r"[^\S\n]*[│┃][^\S\n]*", "|", console.file.getvalue())
    assert "2 runs: 1 running, 1 waiting" in text
    assert "|left|note|" in text
    assert "\n|ppo CartPole-v1 1|running|256|1,024|64|22.50|0:00:12|" in text  # eight iterations of 128 steps
    assert "\n|ppo CartPole-v1 2|waiting|0|1,024|-|-|-|exit code 1: cannot open [/x]|" in text


def test_slurm_is_not_there_or_refuses(tmp_path, monkeypatch):
    slurm = make_args(tmp_path, launcher="slurm", devices=("auto",), slurm_partition="nowhere")
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "")  # so that what `submit` sets is taken back
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "submitit", None)
        with pytest.raises(InputError, match="pip install submitit"):
            launcher.main(slurm)
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with pytest.raises(InputError, match="--launcher slurm: "):
        launcher.main(slurm)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A cluster of this one machine, with an authentication service of its own."""
    if not all(map(shutil.which, ("munged", "slurmctld", "slurmd"))) or os.geteuid() != 0:
        pytest.skip("needs root and Debian's packages slurm-wlm and munge")
    tmp_path.chmod(0o755)
    name = subprocess.check_output(["hostname", "-s"], text=True).strip()
    (tmp_path / "key").write_bytes(os.urandom(1024))
    (tmp_path / "key").chmod(0o400)
    paths = "StateSaveLocation=state SlurmdSpoolDir=spool SlurmctldPidFile=slurmctld.pid SlurmdPidFile=slurmd.pid"
    settings = "ClusterName=test SlurmUser=root SlurmdUser=root SlurmctldPort=26817 SlurmdPort=26818"
    settings += " ProctrackType=proctrack/linuxproc TaskPlugin=task/none JobAcctGatherType=jobacct_gather/none"
    settings += " SelectType=select/cons_tres SelectTypeParameters=CR_CPU ReturnToService=2"
    lines = [*settings.split(), *(each.replace("=", f"={tmp_path}/") for each in paths.split())]
    lines += [f"SlurmctldHost={name}(127.0.0.1)", f"AuthInfo=socket={tmp_path}/munge.socket"]
    lines += [f"NodeName={name} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN"]
    lines += ["PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP", ""]
    (tmp_path / "slurm.conf").write_text("\n".join(lines))
    for folder in ("state", "spool"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    own = {"key-file": "key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
    munge = [f"--{flag}={tmp_path / file}" for flag, file in (own | {"seed-file": "munge.seed"}).items()]
    daemons = []
    try:
        for command in (["munged", "-F", "-f", *munge], ["slurmctld", "-D", "-c"], ["slurmd", "-D"]):
            daemons.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(1)
        wait_until(lambda: b"idle" in subprocess.run(["sinfo", "-h"], capture_output=True).stdout)
        yield
    finally:
        subprocess.run(["scancel", "--user", "root"])
        time.sleep(1)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


@pytest.mark.slurm
def test_a_matrix_on_slurm(slurm, tmp_path):
    """Two runs as a job array; one gets the signal that Slurm sends before a job's time is up, and is queued again."""
    runs = tmp_path / "runs"
    words = ["--launcher", "slurm", "--slurm-gpus", "0", "--slurm-cpus", "1", "--slurm-partition", "main"]
    result = run_command(runs, 150_000, *words)
    assert result.returncode == 0, result.stderr
    assert "2 runs: 2 submitted" in result.stdout
    (script,) = (runs / "logs").glob("[0-9]*_submission.sh")
    assert "#SBATCH --signal=USR1@" in script.read_text()
    assert "2 runs: 2 submitted" in run_command(runs, 150_000, *words).stdout
    assert list((runs / "logs").glob("[0-9]*_submission.sh")) == [script]
    job, queue = re.search(r"Slurm job (\d+_0)", result.stdout)[1], ["squeue", "-h", "-o", "%i %t"]
    wait_until(lambda: len(list(runs.glob("*/progress.csv"))) == 2)
    wait_until(lambda: all(len(path.read_text().splitlines()) > 3 for path in runs.glob("*/progress.csv")))
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    wait_until(lambda: f"{job} PD" in subprocess.check_output(queue, text=True))
    time.sleep(5)  # slurmd refuses a job that comes back at once
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)  # else in two minutes
    wait_until(lambda: not subprocess.check_output(queue, text=True), seconds=300)
    assert all(read_json(path / "meta.json")["finished"] for path in run_folders(runs))
    assert sorted(len(resumed_at(path)) for path in run_folders(runs)) == [0, 1]
    assert "2 runs: 2 done" in run_command(runs, 150_000, *words).stdout
