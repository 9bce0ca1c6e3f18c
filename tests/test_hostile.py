"""Folders and models of strangers, and what fails beside a run: nothing runs that was not named, nothing is lost."""

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
import wandb

import evaluate
import fast
import ideas
import ppo
from common import InputError, TrainingError, evaluation
from common.checkpoint import load_agent, newest_checkpoint
from common.run import ROOT, lock_folder, write_atomically
from common.settings import parse
from conftest import CountEnv, SpoiltEnv
from helpers import flags, newest, read_csv, read_json, small_args


def make_args(runs, **settings):
    return small_args(ppo, runs, {"num_steps": 16}, **{"total_timesteps": 192, "checkpoint_interval": 0.0} | settings)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return ppo.main(make_args(tmp_path_factory.mktemp("runs")))


@pytest.fixture
def stranger(finished, tmp_path):
    """A run folder from elsewhere, with a module of its own."""
    path = Path(shutil.copytree(finished, tmp_path / "stranger"))
    (path / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    return path


def resume(path, *words):
    return ppo.main(parse(ppo.Args, [f"--resume={path}", "--total-timesteps=320", *words]))


def test_code_that_came_with_a_model_is_not_run(stranger, monkeypatch, capsys):
    monkeypatch.syspath_prepend(stranger)
    evil, model = stranger / "evil.py", torch.load(stranger / "model.pt", weights_only=True)
    inside = os.path.relpath(evil, ROOT)
    for script in (str(evil), inside, f"tests/../{inside}", "tests/conftest.py", "."):
        torch.save(model | {"script": script}, stranger / "model.pt")
        with pytest.raises(InputError, match=r"is of the script .*: name it by --script, if you trust it\.$"):
            load_agent(stranger)
    for env_id in ("ppo:E-v0", "evil:E-v0"):  # our own, too
        settings = read_json(stranger / "args.json") | {"env_id": env_id}
        (stranger / "args.json").write_text(json.dumps(settings))
        torch.save(model | {"args": settings}, stranger / "model.pt")
        for attempt in (load_agent, resume):
            with pytest.raises(InputError, match=rf"which imports \w+: add --env-id {env_id}, if you trust it\.$"):
                attempt(stranger)
    assert not (stranger / "ran").exists()
    for name in ("--env-id", "--env_id"):
        assert parse(ppo.Args, ["--resume", str(stranger), name, "evil:E-v0"]).env_id == "evil:E-v0"
    with pytest.raises(InputError, match="is not known"):
        load_agent(stranger, env_id="evil:E-v0")
    assert (stranger / "ran").exists()
    torch.save(model | {"script_sha256": "another"}, stranger / "model.pt")
    with pytest.raises(InputError, match=r"plays 'CartPole-v1': leave --env-id evil:E-v0 out\.$"):
        load_agent(stranger, env_id="evil:E-v0")  # a flag is not ignored
    load_agent(stranger)
    assert f"that made {stranger}: --script RUN/ppo.py takes the copy in its run folder\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lock", "progress.csv", ".tmp-0", "checkpoints/000000000001.pt", "videos", "new"])
def test_a_folder_with_links_is_not_written_to(name, stranger, tmp_path):
    (tmp_path / "kept").write_text("mine")
    (stranger / name).unlink(missing_ok=True)
    (stranger / name).symlink_to(tmp_path / "kept")
    with pytest.raises(InputError, match=f"{name} is a link or no regular file"):
        resume(stranger)
    assert (tmp_path / "kept").read_text() == "mine"


def test_a_file_that_the_lock_is_a_hard_link_to_is_not_emptied(tmp_path):
    (tmp_path / "kept").write_text("mine")
    (tmp_path / "lock").hardlink_to(tmp_path / "kept")
    lock_folder(tmp_path).close()
    assert (tmp_path / "kept").read_text() == "mine"


@pytest.mark.parametrize("name", ["lock", "args.json", "meta.json", "model.pt"])
def test_a_pipe_is_not_waited_for(name, stranger):
    (stranger / name).unlink()
    os.mkfifo(stranger / name)
    with pytest.raises(InputError, match=r"no r(egular file|un folder)"):
        resume(stranger)
    if name == "model.pt":
        with pytest.raises(InputError, match="is no file"):
            load_agent(stranger)


def test_writers_of_one_folder_do_not_meet(tmp_path, monkeypatch):
    sync = os.fsync

    def write_another(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        write_atomically(tmp_path / "b", b"second")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", write_another)
    write_atomically(tmp_path / "a", b"first")
    assert [(tmp_path / name).read_bytes() for name in "ab"] == [b"first", b"second"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_fork_of_an_environment_does_not_keep_the_lock(tmp_path):
    lock = lock_folder(tmp_path)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    lock.close()
    lock_folder(tmp_path).close()
    child.kill()


def test_rows_that_are_lost_are_named_at_each_resume(stranger, capsys):
    header, first, *rows = (stranger / "progress.csv").read_text().splitlines(keepends=True)
    (stranger / "progress.csv").write_text("".join([header, first.replace(".", "\0"), *rows]))
    (stranger / ".tmp-0").write_text("of a killed process")
    for total in (320, 384):
        resume(stranger, f"--total-timesteps={total}")
        (stranger / "metrics.csv").write_text("")
        assert f"warning: {stranger / 'progress.csv'} has lost 1 rows\n" in capsys.readouterr().err
    assert "\0" not in (stranger / "progress.csv").read_text()
    assert newest_checkpoint(stranger)["run"]["rows"]["progress.csv"] == 6
    assert len(read_csv(stranger / "progress.csv")) == 5
    assert not list(stranger.rglob(".tmp*"))


def test_tracking_may_fail_and_goes_on_only_if_the_user_says_so(stranger, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wandb, "init", mock.Mock(side_effect=wandb.errors.UsageError("no login")))
    before = {file: file.read_bytes() for file in stranger.rglob("*") if file.is_file()}
    with pytest.raises(InputError, match="no login"):
        resume(stranger, "--track")
    for name in ("meta.json", "args.json", "model.pt"):
        assert (stranger / name).read_bytes() == before[stranger / name]
    monkeypatch.setattr(wandb, "init", mock.Mock(side_effect=wandb.errors.CommError("timed out")))
    assert read_json(ppo.main(make_args(tmp_path / "runs", track=True)) / "meta.json")["finished"]
    assert "warning: Weights & Biases does not answer, so the run is not tracked" in capsys.readouterr().err
    gone, answered = SimpleNamespace(finish=lambda: 1 / 0), threading.Event()
    monkeypatch.setattr(wandb, "init", lambda **_: gone)
    assert read_json(ppo.main(make_args(tmp_path / "runs", track=True)) / "meta.json")["finished"]
    assert "warning: Weights & Biases has not got all of the run: ZeroDivisionError" in capsys.readouterr().err
    gone.finish = mock.Mock(side_effect=KeyboardInterrupt(signal.SIGUSR1))  # Slurm would begin the run anew
    assert read_json(ppo.main(make_args(tmp_path / "runs", track=True)) / "meta.json")["finished"]
    gone.finish = answered.wait
    monkeypatch.setattr(ppo, "update", mock.Mock(side_effect=KeyboardInterrupt))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ppo.main(make_args(tmp_path / "runs", track=True))
    answered.set()
    assert time.monotonic() - began < 30
    assert "warning: Weights & Biases has not got all of the run: TimeoutError" in capsys.readouterr().err
    settings = read_json(stranger / "args.json") | {"track": True, "wandb_entity": "stranger"}
    (stranger / "args.json").write_text(json.dumps(settings))
    assert not parse(ppo.Args, ["--resume", str(stranger)]).track
    assert "note: that run was tracked: add --track" in capsys.readouterr().err
    assert parse(ppo.Args, ["--resume", str(stranger), "--track"]).track


def test_numbers_that_no_network_can_use(stranger, tmp_path, monkeypatch):
    monkeypatch.setattr(SpoiltEnv, "spoilt", ("observation", 1e300))
    monkeypatch.setattr(SpoiltEnv, "observation_space", gym.spaces.Box(-np.inf, np.inf, (1,), np.float64))
    with pytest.raises(TrainingError, match="an observation of the environments is NaN or infinite"):
        ppo.main(make_args(tmp_path / "runs", env_id="TestSpoilt-v0"))
    model = torch.load(stranger / "model.pt", weights_only=True)
    model["agent"]["encoder.0.weight"][0, 0] = np.nan
    torch.save(model, stranger / "model.pt")
    attempts = load_agent, lambda path: ppo.main(make_args(tmp_path / "runs", init_from=str(path)))
    for attempt in attempts:
        with pytest.raises(InputError, match=r"encoder\.0\.weight is NaN\."):
            attempt(stranger)
    model["agent"]["encoder.0.weight"][0, 0] = -np.inf
    monkeypatch.chdir(stranger.rename(tmp_path / "charts").parent)
    torch.save(model, "charts/model.pt")
    for attempt in attempts:
        with pytest.raises(TrainingError, match=r"encoder\.0\.weight is -inf at step"):
            attempt("charts/model.pt")
    make = ppo.Agent.__init__
    masked = lambda agent, *args: make(agent, *args) or agent.register_buffer("mask", torch.tensor(-np.inf))  # noqa: E731
    monkeypatch.setattr(ppo.Agent, "__init__", masked)
    assert load_agent(ppo.main(make_args(tmp_path / "runs")))[0].mask == -np.inf  # a buffer may be


def test_an_evaluation_whose_episodes_do_not_end_ends(tmp_path, monkeypatch, capsys):
    """The newest copy is written before it: that of the iteration before."""
    play, saved = evaluation.play, []

    def spy(*given):
        saved.append(newest(next(tmp_path.iterdir()))["step"])
        return play(*given)

    gym.register("TestEndless-v0", CountEnv)
    monkeypatch.setattr(evaluation, "LONGEST", 20)
    monkeypatch.setattr(evaluation, "play", spy)
    args = make_args(tmp_path, env_id="TestEndless-v0", eval_interval=100, eval_episodes=4, checkpoint_interval=1e9)
    path = ppo.main(args)
    assert saved == [64, 64, 128, 128]
    assert "warning: 4 episodes have not ended within 20 steps: left out" in capsys.readouterr().err
    assert {(row["episodes"], row["episodic_return"]) for row in read_csv(path / "eval.csv")} == {("0", "nan")}


@pytest.mark.parametrize("close", [lambda _: sys.exit(0), lambda _: 1 / 0])
def test_environments_that_change_or_end_the_process(close, finished, tmp_path, monkeypatch, capsys):
    """`finished` has imported all of PyTorch, some of which needs a working directory."""

    def vanish(_):  # when it is made, too
        os.chdir(tempfile.mkdtemp(dir=tmp_path))
        os.rmdir(os.getcwd())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CountEnv, "begin", vanish)
    monkeypatch.setattr(CountEnv, "close", close)
    path = ppo.main(make_args("runs", env_id="TestCount-v0"))
    assert (path.parent.parent, newest(path)["step"]) == (tmp_path, 192)
    assert "warning: the environments cannot be closed (" in capsys.readouterr().err
    monkeypatch.setattr(CountEnv, "reward", lambda *_: sys.exit(0))
    with pytest.raises(TrainingError, match=r"something ends the process \(SystemExit\(0\)\): the run stops"):
        ppo.main(make_args(tmp_path, env_id="TestCount-v0"))
    resets = itertools.count()  # of four environments, first as they are made
    monkeypatch.setattr(CountEnv, "reset", lambda *_, **__: (np.zeros(1, "f"), {}) if next(resets) < 4 else sys.exit(0))
    with pytest.raises(InputError, match=r"something ends the process \(SystemExit\(0\)\)"):
        ppo.main(make_args(tmp_path, env_id="TestCount-v0"))
    monkeypatch.chdir(tmp_path)
    for line, words in (
        ("def make_envs(*_, **__): sys.exit(0)", "error: something ends the process (SystemExit(0))"),
        ("raise SystemExit(0)", "(the script ends the process: SystemExit(0)): use its commit or --script."),
    ):
        copy = tmp_path / f"{len(line)}.py"
        copy.write_text(f"{Path(ppo.__file__).read_text()}import sys\n{line}\n")
        with fast.Fork(tmp_path / "printed", ideas.run, [evaluate.__file__, str(path), f"--script={copy}"]) as process:
            assert process.wait() in (1, 2)
        assert process.errors.endswith(f"{words}\n")


def test_a_signal_ends_a_run_whose_environments_cannot_be_closed(tmp_path):
    words = flags(make_args(tmp_path, env_id="TestStuck-v0", total_timesteps=64))
    with fast.Fork(tmp_path / "printed", fast.run_script, "ppo", words) as process:
        process.wait_for(lambda: "closing" in process.output)
        process.send(signal.SIGTERM)
        assert process.wait() == 143
    assert newest(next(tmp_path.glob("TestStuck*")))["step"] == 64


def test_ctrl_c_while_pytorch_is_imported():
    restore = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "ppo.py"], cwd=ROOT, preexec_fn=restore, **pipes) as process:
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "stopped by Ctrl-C\n")
    assert process.returncode == -signal.SIGINT
