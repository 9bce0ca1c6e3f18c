"""A run that dies and is resumed is the same run; and what happens to checkpoints when things go wrong."""

import contextlib
import errno
import functools
import gc
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils._pytree import tree_flatten, tree_map

import fast
import helpers
import impala
import ppg
import ppo
from common import InputError, TrainingError, checkpoint, session
from common.device import resolve_precision
from common.envs import Envs
from common.learning import RewardNormalizer
from common.procgen_env import ProcgenVectorEnv
from common.run import ROOT, Run, command
from common.settings import parse
from conftest import SpoiltEnv
from helpers import ALL, SCRIPTS, checkpoints, flags, newest, parameters, read_csv, read_json, read_scalars, resumed_at

AUTO = resolve_precision("auto", torch.device("cpu"))
OTHER = "fp32" if AUTO == "bf16" else "bf16"
GAMES = {"env_id": "bossfight,fruitbot", "feature_dim": 16}  # only Procgen is put back where it was
NEVER = {"checkpoint_interval": 1e9}

pytestmark = pytest.mark.usefixtures("small_networks")


def make_args(script, runs_dir, **settings):
    """12 iterations of 4 environments x 8 steps, that PPG makes in phases of 5; a checkpoint after each."""
    sizes = {"num_steps": 8, "total_timesteps": 12 * 32, "n_pi": 5, "e_aux": 2}
    sizes |= {"batch_size": 2, "log_interval": 48}  # every other update of IMPALA, unrolls wait for their turn
    same = {"anneal_lr": True, "checkpoint_interval": 0.0, "seed": 4}
    return helpers.small_args(script, runs_dir, sizes, **same | settings)


def game_args(script, runs_dir, **settings):
    return make_args(script, runs_dir, **GAMES | settings)


def resume(script, path, **changes):
    """Go on with the run in `path`, in process, as `python script.py --resume path` does."""
    return script.main(script.Args(**read_json(path / "args.json") | {"resume": str(path)} | changes))


def stopping(place, name, calls, error=KeyboardInterrupt):
    """Let the `calls`-th call of a function of `place` raise an error."""
    effects = [mock.DEFAULT] * (calls - 1) + [error]
    return mock.patch.object(place, name, mock.Mock(wraps=getattr(place, name), side_effect=effects))


def interrupted(script, calls, runs_dir, name="update", **settings):
    """The folder of a run that was stopped in its `calls`-th update, or call of another function."""
    with stopping(script, name, calls), pytest.raises(KeyboardInterrupt):
        script.main(make_args(script, runs_dir, **settings))
    return next(runs_dir.iterdir())


def files_of(path):
    """What is in all files of a folder."""
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def same(a, b):
    """Whether two nested values are equal."""
    (mine, structure), (theirs, other) = tree_flatten(a), tree_flatten(b)
    pairs = zip(mine, theirs, strict=False)
    equal = [torch.equal(x, y) if isinstance(x, torch.Tensor) else np.array_equal(x, y) for x, y in pairs]
    return structure == other and all(equal)


def what_a_run_leaves(path):
    """Parameters, TensorBoard's scalars and the CSVs, but for what a clock says."""
    scalars = read_scalars(path)
    scalars["charts/SPS"] = [step for step, _ in scalars["charts/SPS"]]
    return {"parameters": parameters(path), "scalars": scalars, "files": helpers.deterministic_files(path)}


def check_same_run(path, undisturbed):
    mine, theirs = what_a_run_leaves(path), what_a_run_leaves(undisturbed)
    for name in mine:
        assert same(mine[name], theirs[name]), name


def before_saving(function):
    """Call `function` with the content of each checkpoint just before it is written."""
    save = torch.save

    def spy(content, file):
        if "ranks" in content:  # else it is a model
            function(content)
        save(content, file)

    return mock.patch.object(torch, "save", spy)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs that nothing has disturbed, each made once."""
    folder = tmp_path_factory.mktemp
    return functools.cache(lambda script, **some: script.main(game_args(script, folder("undisturbed"), **some)))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Runs of each script that were interrupted in their eighth iteration."""
    return functools.cache(lambda script: interrupted(script, 8, tmp_path_factory.mktemp("stopped"), **GAMES))


@pytest.fixture
def run_copy(stopped, tmp_path):
    """Makes copies of these runs, that may be changed."""
    return lambda script: Path(shutil.copytree(stopped(script), tmp_path / "runs" / stopped(script).name))


PUSH = {"env_id": "TestPush-v0", "eval_interval": 50, "eval_episodes": 5}
SHORT = {"num_steps": 4, "total_timesteps": 6 * 16}
CASES = [(script, "update", calls, {}) for script in SCRIPTS for calls in (1, 3, 6, 8)]
CASES += [(script, "update", 8, PUSH) for script in (ppo, ppg)] + [(impala, "update", 8, PUSH | {"use_lstm": True})]
CASES += [
    (ppg, "policy_kl", 20, {}),  # in the auxiliary phase
    (ppg, "update", 3, {"env_id": "bossfight", "frame_stack": 2}),
    (ppo, "update", 4, {"intrinsic_reward": "rnd"} | SHORT),
    (ppg, "update", 4, {"intrinsic_reward": "icm"} | SHORT),
    (ppo, "update", 5, {"env_id": "leaper", "eval_interval": 100, "eval_episodes": 2, "total_timesteps": 6 * 32}),
    (impala, "update", 8, {"env_id": "starpilot", "use_lstm": True, "optimizer": "rmsprop"}),
]


@pytest.mark.parametrize(
    ("script", "name", "calls", "settings"), CASES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_interrupted_run_is_the_same_run(script, name, calls, settings, undisturbed, tmp_path):
    """In the first iteration, too. PPG is interrupted in mid-phase, at the start of a phase, and in mid-phase after an
    auxiliary phase."""
    path = interrupted(script, calls, tmp_path, name, **NEVER | GAMES | settings)
    assert len(checkpoints(path)) == (1 if calls == 1 else 2)  # the first is of the start
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert resume(script, path) == path
    check_same_run(path, undisturbed(script, **settings))
    assert settings or len(read_scalars(path)["charts/episodic_return"]) > 3


LOGS_FIRST = [(ppo, "collect", "update"), (impala, "update", "require_finite")]


@pytest.mark.parametrize(("script", "first", "stop"), LOGS_FIRST, ids=["ppo", "impala"])
def test_a_script_that_logs_before_an_iteration(script, first, stop, tmp_path, monkeypatch):
    """Each row is there once. TensorBoard has the metric of the interrupted iteration twice."""
    function, log = getattr(script, first), lambda run: run.log(run.now_at, {"own/first": 1.0})
    monkeypatch.setattr(script, first, lambda *given: log(given[-1]) or function(*given))
    undisturbed = script.main(game_args(script, tmp_path / "undisturbed"))
    path = interrupted(script, 6, tmp_path / "runs", stop, **GAMES)  # IMPALA's checkpoint lies between two rows
    resume(script, path)
    assert helpers.deterministic_files(path) == helpers.deterministic_files(undisturbed)
    counts = [int(row["episodes"]) for row in read_csv(path / "progress.csv")]
    assert sum(counts) == len(read_csv(path / "episodes.csv")) > 3


@pytest.mark.parametrize("script", [ppo, impala], ids=lambda script: script.__name__)
def test_a_run_made_longer_is_the_longer_run(script, undisturbed, tmp_path):
    """Also where it is interrupted once more."""
    path = script.main(game_args(script, tmp_path, total_timesteps=6 * 32 - 10, anneal_lr=False))
    with pytest.raises(InputError, match="it has made 192 steps: raise --total-timesteps"):
        resume(script, path)
    with stopping(script, "update", 3), pytest.raises(KeyboardInterrupt):
        resume(script, path, total_timesteps=12 * 32)
    resume(script, path)
    check_same_run(path, undisturbed(script, anneal_lr=False))
    assert read_json(path / "args.json")["total_timesteps"] == 12 * 32


def start(script, args, folder, *words):
    """The script in a process of its own, which prints into `folder`."""
    return fast.Fork(folder, fast.run_script, script.__name__, [*flags(args), *words])


@ALL
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_killed_run_is_the_same_run(script, kills, undisturbed, tmp_path):
    """Killed again and again, at any moment once it has a checkpoint, and resumed each time, with a clock set back."""
    settings = {"total_timesteps": kills * 15 * 32} | ({"use_lstm": True} if script is impala else {})
    runs, rng, words = tmp_path / "runs", random.Random(0), []
    reference = undisturbed(script, **settings)
    for _ in range(kills):
        with start(script, game_args(script, runs, **settings), tmp_path, *words) as process:
            process.wait_for(lambda: process.output and list(runs.glob("*/checkpoints/*.pt")))
            time.sleep(rng.uniform(0, 0.4))
        assert process.wait() in (0, -signal.SIGKILL), process.errors
        assert "Traceback" not in process.errors, process.errors
        (path,) = runs.iterdir()
        words = [f"--resume={path}"]
        for file in path.glob("events*"):
            file.rename(path / file.name.replace("tfevents.1", "tfevents.9"))
        if read_json(path / "meta.json")["finished"]:
            break
    else:
        resume(script, path)
    assert resumed_at(path)
    check_same_run(path, reference)
    assert not list(path.rglob(".tmp-*"))
    assert len(list((path / "checkpoints").iterdir())) == 2


@ALL
def test_a_run_killed_after_its_last_checkpoint_just_ends(script, undisturbed, tmp_path):
    with stopping(Run, "close", 1, SystemExit), pytest.raises(SystemExit):
        script.main(game_args(script, tmp_path))
    (path,) = tmp_path.iterdir()
    kept = checkpoints(path)
    shutil.copy(kept[1], kept[1].with_name("000000000001.pt"))  # killed before it could remove it
    resume(script, path)
    check_same_run(path, undisturbed(script))
    assert checkpoints(path) == kept


def test_killed_actors_resume_with_nothing_counted_twice(tmp_path):
    """Episodes follow each other, across the kill, too: their lengths add up to the steps they ended at."""
    total = 120 * 32
    settings = {"num_actors": 1, "batch_size": 4, "queue_size": 4, "total_timesteps": total, "env_id": "leaper"}
    with start(impala, game_args(impala, tmp_path / "runs", **settings), tmp_path) as process:
        process.wait_for(lambda: len(list(tmp_path.glob("runs/*/checkpoints/*.pt"))) >= 2)
    (path,) = (tmp_path / "runs").iterdir()
    killed_at = newest(path)["step"]
    resume(impala, path, **NEVER)
    rows = read_csv(path / "episodes.csv")
    steps, envs, lengths = np.array([[int(row[key]) for key in ("step", "env", "episodic_length")] for row in rows]).T
    assert (np.diff(steps) >= 0).all()
    for env in range(4):
        ends, ended_at = np.cumsum(lengths[envs == env]), steps[envs == env]
        assert 0 < killed_at < ended_at[-1]
        # An environment may be some unrolls ahead of its share of the steps.
        assert (np.abs(4 * ends - ended_at) <= 4 * 8 * 12).all()
    steps_made = {float(state["step"]) for state in newest(path)["parts"]["optimizer"]["state"].values()}
    assert steps_made == {120 * 2}  # minibatches


@pytest.mark.parametrize(
    ("script", "sent", "code", "settings"),
    [
        (ppo, [signal.SIGINT], 130, {}), (ppo, [signal.SIGTERM], 143, {}), (ppg, [signal.SIGHUP], 129, {}),
        (impala, [signal.SIGUSR1], 138, {"log_interval": 160}),
        (impala, [signal.SIGINT, signal.SIGTERM, signal.SIGINT], 130, {"num_actors": 2}),  # the first counts
    ],
    ids=str,
)  # fmt: skip
def test_signals_write_a_checkpoint(script, sent, code, settings, tmp_path, capsys):
    """Not that of the next iteration, which is not waited for. What is printed resumes the run, once it has ended."""
    runs, endless = tmp_path / "runs", {"total_timesteps": 10**7} | NEVER
    with start(script, game_args(script, runs, **endless, **settings), tmp_path) as process:
        process.wait_for(lambda: any(len(path.read_text().splitlines()) > 3 for path in runs.glob("*/progress.csv")))
        (path,) = runs.iterdir()
        with pytest.raises(InputError, match="is in use by another process"):
            resume(script, path)
        for each in sent:
            process.send(each)
            time.sleep(0.02)
        assert process.wait(10) == code
    again = f"python {script.__file__} --resume {path}"
    name = "Ctrl-C" if sent[0] == signal.SIGINT else sent[0].name
    assert process.errors == f"resume with: {again}\nstopped by {name}\n"
    stopped_at = newest(path)["step"]
    assert stopped_at == torch.load(path / "model.pt", weights_only=True)["step"] >= 3 * 16
    assert process.output.splitlines()[-1].startswith(f"stopped: {stopped_at:,} steps in ")
    words = [*shlex.split(again)[2:], f"--total-timesteps={stopped_at + 64}"]
    assert script.main(parse(script.Args, words)) == path
    assert f"resumed at step {stopped_at:,}" in capsys.readouterr().out


def test_each_resume_of_a_gymnasium_task_begins_other_episodes(tmp_path):
    begun, reset = [], Envs.reset

    def spied(envs, **named):
        begun.append(str(reset(envs, **named)[0]))
        return envs.obs, {}

    with mock.patch.object(Envs, "reset", spied):
        path = ppo.main(make_args(ppo, tmp_path, env_id="CartPole-v1"))
        for total in (13 * 32, 14 * 32):
            resume(ppo, path, total_timesteps=total)
    assert len({*begun}) == len(begun) == 1 + 2 * 2  # a resume starts twice, as layers may remember


def test_a_refused_resume_lets_go_of_the_folder(run_copy, monkeypatch):
    """Also in a notebook, which keeps the error. A file closed later would take the lock of the next try with it."""
    path, refused = run_copy(ppo), []
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = [sys.executable, "-c", code, str(path / "lock")]
    update, kept = ppo.update, []

    def locked():
        return subprocess.run(other, stderr=subprocess.DEVNULL).returncode != 0

    def update_unseen(*given):
        refused.clear()
        gc.collect()
        kept.append(locked())
        return update(*given)

    with pytest.raises(InputError, match="cannot change --gamma") as error:
        resume(ppo, path, gamma=0.5)
    refused.append(error)
    assert not locked()
    with mock.patch.object(Run, "open", side_effect=OSError), pytest.raises(InputError, match="another") as error:
        resume(ppo, path)
    refused.append(error)
    assert not locked()
    del error
    monkeypatch.setattr(ppo, "update", update_unseen)
    resume(ppo, path)
    assert set(kept) == {True}


def test_slurm_examples(tmp_path):
    """They requeue themselves once the run has saved when Slurm's signal has come, and not when the run is done."""
    jobs = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "common/README.md").read_text(), re.DOTALL)
    run = """#!/bin/bash
        [ -e log ] && exit  # the second time
        trap 'sleep .5; echo saved >> log; exit {code}' {signal}  # as test_signals_write_a_checkpoint says
        sleep .5; kill -USR1 $PPID
        for _ in {{1..200}}; do sleep .05; done
    """
    stubs = {"python": run.format(code=138, signal="USR1"), "srun": run.format(code=1, signal="TERM")}
    stubs["scontrol"] = '#!/bin/bash\nif [ "$1" = requeue ]; then echo $* >> log; fi\n'
    for name, text in stubs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"SLURM_JOB_ID": "77", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert len(jobs) == 2
    for job in jobs:
        assert "--resume auto" in job
        for _ in range(2):
            subprocess.run(["bash", "-c", job], cwd=tmp_path, env=env, check=False)
            assert (tmp_path / "log").read_text() == "saved\nrequeue 77\n"
        (tmp_path / "log").unlink()


def test_checkpoint_interval(tmp_path, monkeypatch):
    """In minutes; the last checkpoint does not wait. TensorBoard's events come first: else SIGKILL in between loses
    them, as the run that is resumed does not make them again."""
    times, steps, logged, update, write = [], [], [], ppo.update, RecordWriter.write

    def look(content):
        times.append(time.monotonic())
        steps.append(content["step"])
        logged.append(read_scalars(next(tmp_path.iterdir())).get("charts/SPS", [(0, 0)])[-1][0])

    monkeypatch.setattr(RecordWriter, "write", lambda *arguments: (time.sleep(0.005), write(*arguments)))  # a thread
    monkeypatch.setattr(ppo, "update", lambda *arguments: (time.sleep(0.1), update(*arguments))[1])
    with before_saving(look):
        ppo.main(make_args(ppo, tmp_path, checkpoint_interval=0.25 / 60))
    assert min(np.diff(times[:-1])) > 0.2
    assert len(steps) > 3
    assert steps[-1] == 12 * 32
    assert logged == steps


def change_checkpoints(path, change):
    """Let each checkpoint hold what `change` makes of it."""
    for file in checkpoints(path):
        saved = torch.load(file, weights_only=True)
        change(saved)
        torch.save(saved, file)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize(
    ("script", "changes", "words", "change"),
    [
        (ppo, {"precision": OTHER, "gamma": 0.9},
         f"cannot change --precision {OTHER} (there: {AUTO}), --gamma 0.9 (there: 0.999); to start a new run", None),
        (ppo, {"eval_interval": 9, "eval_num_levels": 8}, "cannot change --eval-num-levels 8 (there: 0)", None),
        (impala, {"total_timesteps": 90}, "it has made 96 steps: raise --total-timesteps", None),
        (ppo, {}, "that is a run of other.py, not of ppo.py.",
         lambda saved: saved.update(script="other.py", script_sha256="")),
        (ppo, {}, "that is a run of 2 ranks, not of 1.", lambda saved: saved.update(ranks=2 * saved["ranks"])),
        (ppo, {}, "--env-id bossfight,fruitbot (there: unknown)", lambda saved: saved["args"].clear()),
        (ppo, {}, "its checkpoint does not fit this script", lambda saved: saved["parts"]["agent"].clear()),
        (ppg, {}, "the environments do not repeat: is another version of them installed?",
         lambda saved: saved["ranks"][0]["phase"]["actions"].bitwise_xor_(1)),
        (ppo, {}, "it has no checkpoint that can be read: start a new run.", lambda saved: saved.update(step=Bomb())),
        (ppo, {}, "it has no checkpoint that can be read", lambda saved: saved.update(format=saved["format"] - 1)),
        (ppo, {}, "it has no checkpoint that can be read", lambda saved: saved.update(ranks=None)),
    ],
    ids=["settings", "levels", "shorter", "script", "ranks", "older", "network", "replay", "code", "version", "part"],
)  # fmt: skip
def test_what_would_be_another_run_is_refused(script, changes, words, change, run_copy, monkeypatch):
    """Nothing is changed in its folder, and nothing that a checkpoint holds is run."""
    path = run_copy(script)
    monkeypatch.chdir(path)
    if change is not None:
        change_checkpoints(path, change)
    before = files_of(path)
    with pytest.raises(InputError, match=re.escape(words)):
        resume(script, path, **changes)
    assert files_of(path) == before


def test_a_changed_script_is_named_and_the_first_one_kept(tmp_path, monkeypatch, capsys):
    """The command that resumes it works in any folder. An agent is loaded with a note, unless the script that made it
    is named; scripts of other folders than ours must be."""
    monkeypatch.chdir(tmp_path)
    file, source, notes = tmp_path / "my.idea.py", Path(ppo.__file__).read_text(), []
    for text in (source, source.replace("nn.Tanh()", "nn.SiLU()")):
        file.write_text(text)
        script = checkpoint.load_script(str(file))
        monkeypatch.delitem(sys.modules, script.__name__)
        if not notes:
            path = interrupted(script, 3, tmp_path / "runs")
            assert capsys.readouterr().err.endswith(f"resume with: python {file} --resume {path}\n")
        resume(script, path, total_timesteps=(4 + len(notes)) * 32)
        notes.append("is not what it was: this run began with" in capsys.readouterr().err)
    assert notes == [False, True]
    assert (path / file.name).read_text() == source
    meta = read_json(path / "meta.json")
    first, unchanged, changed = (each["script_sha256"] for each in (meta, *meta["resumed"]))
    assert first == unchanged != changed
    for named, layer in ((file, torch.nn.SiLU), (path / file.name, torch.nn.Tanh)):
        assert isinstance(checkpoint.load_agent(path, script=named)[0].encoder[1], layer)
        notes = capsys.readouterr().err
        assert ("my.idea.py is not the script that made" in notes) == (named != file)
        assert "--script" not in notes  # advice for those who name none


def test_settings_of_all_kinds_come_back(tmp_path):
    """From args.json, a checkpoint, and the command that repeats a run."""
    source = Path(ppo.__file__).read_text()
    added = """
    colour: Enum("Colour", "RED BLUE", type=str) | None = None
    names: list[str] = field(default_factory=list)
    pair: tuple[Path, float] = (Path("a b"), 0.1)
    sizes: tuple[Positive[int], ...] = (16, 32)
    learning_rate:"""
    source = source.replace("import dataclass\n", "import dataclass, field\nfrom enum import Enum\n")
    (tmp_path / "idea.py").write_text(source.replace("\n    learning_rate:", added, 1))
    script, runs = checkpoint.load_script(tmp_path / "idea.py"), tmp_path / "runs"
    default = script.Args(**vars(make_args(ppo, runs, **NEVER, total_timesteps=96, resume="auto", precision=AUTO)))
    words = [*flags(default), *shlex.split("--sizes 8 4 2 --pair c/d 1e-3 --names x 'y z' --colour BLUE")]
    changed = parse(script.Args, words)
    assert (changed.sizes, changed.pair, changed.names) == ((8, 4, 2), (Path("c/d"), 1e-3), ["x", "y z"])
    for args in (default, changed, replace(default, sizes=())):
        with stopping(script, "update", 2), pytest.raises(KeyboardInterrupt):
            script.main(args)
        ((path, _),) = checkpoint.runs_of(args, os.path.relpath(script.__file__, ROOT))
        assert parse(script.Args, ["--resume", str(path)]) == replace(args, resume=str(path))
        assert script.main(args) == path
        assert checkpoint.load_agent(path, script=script.__file__)[1] == replace(args, resume=None)
        words = shlex.split(read_json(path / "meta.json")["command"])[2:]
        assert parse(script.Args, words) == replace(args, resume=None)
    grow = lambda args, *given: args.names.append("x") or ppo.make_envs(args, *given)  # noqa: E731
    with mock.patch.object(script, "make_envs", grow), pytest.raises(InputError, match="the script sets --names"):
        script.main(replace(default, names=[]))
    moved = checkpoint.load_script(shutil.copy(script.__file__, tmp_path / "moved.py"))  # a run is of its content
    args = moved.Args(**vars(args) | {"total_timesteps": 128, "resume": str(path)})
    for there in (True, False):
        found = checkpoint.runs_of(replace(args, total_timesteps=96), os.path.relpath(moved.__file__, ROOT))
        assert [each for each, _ in found] == [path] * (not there)  # another copy has runs of its own
        Path(script.__file__).unlink(missing_ok=True)
    assert moved.main(args) == path
    for changes, words in (
        ({"sizes": (1, 0)}, "--sizes 0 cannot work: use a number above 0"),
        ({"sizes": [16, 32]}, "--sizes [16, 32] would come back from args.json as (16, 32)"),
        ({"names": {"x"}}, "settings are numbers, text, None, paths, enums, tuples and lists: "),
        ({"runs_dir": Path("x")}, "--runs-dir PosixPath('x') would come back from args.json as 'x'"),
        ({"seed": np.int64(3)}, "settings are numbers"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            script.main(replace(default, **changes))


def test_settings_that_a_script_changes_are_refused(tmp_path, monkeypatch):
    """Before the run begins. In its loop they may follow a schedule, and what is no setting may be added."""
    args, make, update = make_args(ppo, tmp_path), ppo.make_envs, ppo.update
    change = lambda name, args: vars(args).update({name: 8, "batch_size": 9})  # noqa: E731
    monkeypatch.setattr(ppo, "update", lambda *given: change("ent_coef", given[3]) or update(*given))
    assert "batch_size" not in read_json(ppo.main(args) / "args.json")
    monkeypatch.setattr(ppo, "make_envs", lambda args, *given: change("num_envs", args) or make(args, *given))
    with pytest.raises(InputError, match="the script sets --num-envs: derive values in properties"):
        ppo.main(args)
    assert len([*tmp_path.iterdir()]) == 1
    monkeypatch.setattr(ppo.Args, "__post_init__", int, raising=False)
    with pytest.raises(InputError, match="derive values in properties"):
        ppo.main(args)


@ALL
def test_annealing_is_of_each_group_from_its_own_rate(script, tmp_path, monkeypatch, capsys):
    """In a resumed run, too."""
    make, rates = script.Adam, []

    def in_groups(parameters, lr, **named):
        first, *others = parameters
        rates.append([3 * lr, lr])
        return make([{"params": [first], "lr": 3 * lr}, {"params": others}], lr, **named)

    monkeypatch.setattr(script, "Adam", in_groups)
    resume(script, path := interrupted(script, 8, tmp_path))
    optimizers = {name: part for name, part in newest(path)["parts"].items() if "optimizer" in name}
    left = 1 - (384 - (16 if script is impala else 32)) / 384
    for part, initial in zip(optimizers.values(), rates[len(optimizers) :], strict=True):
        assert [group["lr"] for group in part["param_groups"]] == [rate * left for rate in initial]
    resume(script, path, total_timesteps=416)
    assert "note: --anneal-lr now ends at 416 steps, not at 384" in capsys.readouterr().err
    assert [each.get("annealed_to") for each in read_json(path / "meta.json")["resumed"]] == [None, 384]


def test_any_plain_values_in_the_state_of_a_part_or_of_environments_come_back(undisturbed, tmp_path, monkeypatch):
    """As they were, and as they were when the checkpoint was copied. PPG's phase is played again from such states. What
    no checkpoint can hold is refused at the start."""
    names = ("returns", "count", "mean", "var")
    monkeypatch.setattr(RewardNormalizer, "state_dict", lambda part: {name: getattr(part, name) for name in names})
    monkeypatch.setattr(RewardNormalizer, "load_state_dict", lambda part, state: vars(part).update(state))
    old = ProcgenVectorEnv.state_dict
    more = {"nan": torch.tensor(math.nan), "big": 2**100, "nested": {"a": np.ones(2), "b": "c"}}
    more["half"] = torch.ones((), dtype=torch.bfloat16)
    some = itertools.cycle([{"set": {8, 0}}, {"set": {0, 8}}, {"set": {8, 0}}])  # equal, but for their order
    monkeypatch.setattr(ProcgenVectorEnv, "state_dict", lambda envs: [each | more | next(some) for each in old(envs)])
    path = interrupted(ppg, 3, tmp_path / "runs", **NEVER | GAMES)
    state = checkpoint.newest_checkpoint(path)["ranks"][0]["reward_normalizer"]
    assert [type(state[name]) for name in ("returns", "var")] == [np.ndarray, np.float64]
    resume(ppg, path)
    check_same_run(path, undisturbed(ppg))
    kept = {"array": np.zeros(()), "number": np.float32(0.1), "set": {1}, "counter": Counter("a"), "none": None}
    checkpoint.write_archive(path / "some.pt", {"format": 3, "copy": tree_map(checkpoint.copy_leaf, kept)})
    found = checkpoint.read_archive(path / "some.pt", {})["copy"]
    assert [*map(type, found.values())] == [*map(type, kept.values())]
    assert found == kept
    assert tree_map(checkpoint.copy_leaf, kept)["set"] is not kept["set"]
    monkeypatch.setattr(RewardNormalizer, "state_dict", lambda part: {"folder": path})
    with pytest.raises(InputError, match="a checkpoint cannot hold pathlib"):
        ppo.main(make_args(ppo, tmp_path / "refused"))
    assert not list((tmp_path / "refused").iterdir())


def test_a_run_of_an_older_version_goes_on(run_copy, undisturbed, capsys):
    """It lacks settings, which had today's defaults, columns and what a state holds of solved levels; some count rows
    from a resume. Fewer rows than counted are lost."""
    path = run_copy(ppo)

    def forget(saved):
        del saved["args"]["center_agent"], saved["args"]["frame_stack"], saved["run"]["recent_complete"]
        del saved["run"]["logged"]
        counted = {name: min(number, 1) for name, number in saved["run"]["rows"].items()}
        saved["run"]["rows"] = counted | {"metrics.csv": 10**6}

    change_checkpoints(path, forget)
    settings = read_json(path / "args.json")
    del settings["center_agent"], settings["frame_stack"]
    (path / "args.json").write_text(json.dumps(settings))
    rows = {}
    for name, added in (("episodes.csv", 2), ("progress.csv", 1), ("eval.csv", 1)):
        rows[name] = [line.split(",")[:-added] for line in (path / name).read_text().splitlines()]
        (path / name).write_text("".join(f"{','.join(row)}\n" for row in rows[name]))
    with pytest.raises(InputError, match=r"cannot change --no-center-agent|cannot change --center-agent False"):
        resume(ppo, path, center_agent=False)
    resume(ppo, path)
    lost = re.findall(r"warning: (\S+) has lost \d+ rows", capsys.readouterr().err)
    assert lost == [str(path / "metrics.csv")]
    assert same(parameters(path), parameters(undisturbed(ppo)))
    for name, old in rows.items():
        found = read_csv(path / name)
        assert all(None not in row and None not in row.values() for row in found)
        assert [list(row.values())[: len(old[0])] for row in found][: len(old) - 2] == old[1:-1]
    episodes = read_csv(path / "episodes.csv")
    assert episodes[0]["level_seed"] == ""
    assert episodes[-1]["level_seed"].isdigit()
    assert episodes[-1]["level_complete"] in ("0", "1")


def test_levels_chosen_from_outside(tmp_path, monkeypatch):
    """PPG is resumed twice in a phase whose levels were chosen before: its checkpoints keep the frames. (PPO with
    chosen levels: tests/test_ideas.py.)"""
    collect = ppg.collect

    def choosing(agent, envs, rollout, obs, step, normalizer, run):
        if step in (0, 32):
            for env in range(envs.num_envs):
                envs.unwrapped.set_next_level(env, step + env)
        return collect(agent, envs, rollout, obs, step, normalizer, run)

    monkeypatch.setattr(ppg, "collect", choosing)
    expected = ppg.main(game_args(ppg, tmp_path / "undisturbed"))
    path = interrupted(ppg, 3, tmp_path / "runs", **NEVER | GAMES)
    for _ in range(2):
        with stopping(ppg, "update", 2), pytest.raises(KeyboardInterrupt):
            resume(ppg, path)
    assert "obs" in newest(path)["ranks"][0]["phase"]
    resume(ppg, path)
    check_same_run(path, expected)
    assert {row["level_seed"] for row in read_csv(path / "episodes.csv")} & {"32", "33", "34", "35"}


def test_no_run_to_go_on_with(tmp_path):
    for name, reason in {"nowhere": "No such file or directory", "x" * 300: "File name too long"}.items():
        place = f"^--resume {tmp_path / name}: no run folder"
        with pytest.raises(InputError, match=f"{place} .* is there .{reason}"):
            ppo.main(make_args(ppo, tmp_path, resume=str(tmp_path / name)))
        with pytest.raises(InputError, match=f"{place} with a readable args.json is there"):
            parse(ppo.Args, ["--resume", str(tmp_path / name)])


def test_auto_takes_the_newest_unfinished_run_of_the_same_settings(run_copy, undisturbed, monkeypatch, capsys):
    """Also on a machine where another precision is the default."""
    path, expected = run_copy(ppg), undisturbed(ppg)
    monkeypatch.setattr(session, "resolve_precision", lambda precision, _: OTHER if precision == "auto" else precision)
    runs = path.parent
    for name, file, change in (
        ("other", "args.json", {"seed": 5}),
        ("longer", "args.json", {"total_timesteps": 10**6}),
        ("evaluated", "args.json", {"eval_interval": 100}),
        ("ended", "meta.json", {"finished": "2030-01-01T00:00:00Z"}),
        ("ranks", "meta.json", {"ranks": 2}),
        ("older", "meta.json", {"started": "2000-01-01T00:00:00Z"}),
        ("in-use", "meta.json", {}),
        ("no-checkpoint", "meta.json", {}),
    ):
        copy = Path(shutil.copytree(path, runs / name))
        for each, values in (("meta.json", {"started": "2100-01-01T00:00:00Z"}), (file, change)):
            (copy / each).write_text(json.dumps(read_json(copy / each) | values))
    shutil.rmtree(runs / "no-checkpoint/checkpoints")
    (runs / "broken").mkdir()
    (runs / "broken/args.json").write_text("{")
    args = game_args(ppg, runs, resume="auto")
    with helpers.in_use(runs / "in-use"):
        assert ppg.main(args) == path
    notes = capsys.readouterr().err
    assert all(f"passes {runs / name} over" in notes for name in ("in-use", "no-checkpoint"))
    check_same_run(path, expected)
    assert path in [each for each, _ in checkpoint.runs_of(args, "ppg.py")]
    assert [each for each, _ in checkpoint.runs_of(replace(args, eval_interval=100), "ppg.py")] == [runs / "evaluated"]
    shutil.rmtree(runs / "older")
    there = [*runs.iterdir()]
    with helpers.in_use(runs / "in-use"):
        assert ppg.main(args) not in there  # none is left to go on with


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(run_copy, undisturbed, capsys):
    """A flipped bit may pass where it has no meaning, as between the records of the archive. What is damaged or not of
    this run stays; a log without rows may be gone."""
    path = run_copy(ppo)
    newest_file, older = checkpoints(path)
    data, good, rng, skipped = newest_file.read_bytes(), checkpoint.newest_checkpoint(path), random.Random(0), 0
    places = [rng.randrange(i * len(data) // 50, (i + 1) * len(data) // 50) for i in range(50)]
    cases = [data[:place] for place in places]
    places.append(data.rindex(b"PK\1\2") + 38)  # a folder, to PyTorch an empty tensor
    cases += [data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :] for place in places]
    capsys.readouterr()
    for damaged in cases:
        newest_file.write_bytes(damaged)
        found = checkpoint.newest_checkpoint(path)
        if warning := capsys.readouterr().err:
            skipped += 1
            assert found["step"] == int(older.stem)
            assert warning.startswith(f"warning: {newest_file} is damaged")
        else:
            assert same(found, good)
    assert skipped > 90
    backup, notes = newest_file.with_name(f"{newest_file.stem}-backup.pt"), path / "notes.csv"
    backup.write_bytes(data)
    notes.write_text("not of this run")
    newest_file.write_bytes(data[:-100])
    (path / "eval.csv").unlink()
    resume(ppo, path)
    assert (backup.read_bytes(), notes.read_text()) == (data, "not of this run")
    assert newest_file.with_suffix(".damaged").read_bytes() == data[:-100]
    assert "eval.csv" not in capsys.readouterr().err
    check_same_run(path, undisturbed(ppo))


def test_ppg_from_an_agent_without_an_auxiliary_head_starts_it_as_the_value_head(run_copy, tmp_path):
    """What fits nowhere is refused."""
    path = run_copy(ppo)
    changes = {"learning_rate": 0.0, "aux_learning_rate": 0.0, "num_steps": 16, "total_timesteps": 64}
    new = parameters(ppg.main(game_args(ppg, tmp_path / "new", init_from=str(path), **changes)))
    old = parameters(path)
    assert same(new, old | {f"aux_{name}": old[name] for name in ("value_head.weight", "value_head.bias")})
    with pytest.raises(InputError, match="nothing of its encoder fits this network: use the same flags"):
        ppo.main(make_args(ppo, tmp_path / "other", init_from=str(path), env_id="Pendulum-v1"))


def test_disk_full_for_a_checkpoint(undisturbed, tmp_path, capsys):
    """Training goes on without; when there is room again, so are there checkpoints."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with before_saving(mock.Mock(side_effect=itertools.chain([None, None, full, full], itertools.repeat(None)))):
        path = ppo.main(game_args(ppo, tmp_path))
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert all("(No space left on device)" in line for line in warnings)
    check_same_run(path, undisturbed(ppo))


@pytest.mark.parametrize("script", [ppo, impala], ids=lambda script: script.__name__)
def test_disk_full_for_the_logs(script, tmp_path, request):
    """The run stops with one message, and goes on from its last checkpoint when there is room again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("only the superuser can mount a file system")
    request.addfinalizer(lambda: subprocess.run(["umount", "--lazy", disk], check=True))
    ballast = disk / "ballast"
    with start(script, game_args(script, disk / "runs", total_timesteps=10**6), tmp_path) as process:
        process.wait_for(lambda: list(disk.glob("runs/*/checkpoints/*.pt")))
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert process.wait(60) == 1
    *warnings, error = process.errors.splitlines()
    assert all(line.startswith("warning: no checkpoint at step") for line in warnings)
    (path,) = (disk / "runs").iterdir()
    assert error.startswith(f"error: nothing can be logged in {path} (No space left on device): the run stops; ")
    assert f"--resume {path}" in error
    ballast.unlink()
    resume(script, path, total_timesteps=newest(path)["step"] + 64)
    steps = [point for point, _ in read_scalars(path)["losses/entropy"]]
    assert steps == sorted(set(steps))
    assert len(steps) >= 2


@ALL
@pytest.mark.parametrize("what", ["first observation", "observation", "reward", "last observation"])
def test_environments_that_give_nan(script, what, tmp_path, monkeypatch):
    monkeypatch.setattr(SpoiltEnv, "spoilt", (what, np.inf if what == "reward" else np.nan))
    words = f"^an? {what.removeprefix('first ')} of the environments is NaN or infinite"
    words += "$" if what == "first observation" else ": the run stops; its last good model is .*; resume with"
    with pytest.raises(TrainingError, match=words):
        script.main(make_args(script, tmp_path, env_id="TestSpoilt-v0", total_timesteps=10**6))
    if what == "first observation":
        assert not list(tmp_path.iterdir())
        return
    (path,) = tmp_path.iterdir()
    assert newest(path)["step"] >= 64
    assert all(parameter.isfinite().all() for parameter in newest(path)["parts"]["agent"].values())


@ALL
def test_nan_in_a_parameter_leaves_a_checkpoint(script, tmp_path, monkeypatch):
    """Metrics say nothing of the last step that their optimizer made. (NaN in a metric: tests/test_bad_input.py.)"""
    update, calls = script.update, itertools.count(1)

    def spoil(agent, *rest):
        metrics = update(agent, *rest)
        if next(calls) == 8:
            agent.policy_head.linear.bias.detach().fill_(np.nan)
        return metrics

    monkeypatch.setattr(script, "update", spoil)
    words = r"^agent.policy_head.linear.bias is nan at step \d+: .* last good model .* resume with: "
    with pytest.raises(TrainingError, match=words):
        script.main(make_args(script, tmp_path, **NEVER))
    (path,) = tmp_path.iterdir()
    assert newest(path)["step"] == (96 if script is impala else 7 * 32)
    assert all(parameter.isfinite().all() for parameter in parameters(path).values())


@pytest.mark.parametrize(
    ("script", "changes"), [(ppo, {"num_threads": 2, "torch_deterministic": False}), (ppg, {"aux_frames": "disk"})]
)
def test_settings_that_may_change(script, changes, run_copy, undisturbed):
    path = run_copy(script)
    changes = changes | {"keep_checkpoints": 3, "checkpoint_interval": 3.0, "micro_batch_size": 500}
    resume(script, path, **changes)
    assert torch.backends.cudnn.deterministic == changes.get("torch_deterministic", True)  # before another run
    check_same_run(path, undisturbed(script))
    assert len(checkpoints(path)) == 3
    settings, meta = (read_json(path / name) for name in ("args.json", "meta.json"))
    assert settings == settings | changes | {"resume": None}
    assert meta["finished"]
    assert resumed_at(path) == [224]
    assert meta["command"] == command(script.Args(**settings), f"{script.__name__}.py")


def print_megabytes(name, args):
    """Run a script, and print how much memory the process has as it writes each checkpoint."""
    pages = Path("/proc/self/statm")
    with fast.small_networks(), before_saving(lambda _: print("MB", int(pages.read_text().split()[1]) * 0.004096)):
        fast.SCRIPTS[name].main(args)


@ALL
def test_memory_stays_flat(script, tmp_path):
    """Over 100 iterations with a checkpoint each."""
    args = game_args(script, tmp_path / "runs", total_timesteps=100 * 8, num_steps=2, feature_dim=256)
    with fast.Fork(tmp_path, print_megabytes, script.__name__, args) as process:
        assert process.wait() == 0, process.errors
    megabytes = [float(line[3:]) for line in process.output.splitlines() if line.startswith("MB ")]
    slope, _ = np.polyfit(range(80), megabytes[-80:], 1)
    assert slope < 0.02  # a checkpoint has 0.7 MB
