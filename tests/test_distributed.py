"""Several ranks, as torchrun starts them, learn what one process would from all of their experience."""

import functools
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fast
import ppo
import ranks
from common.device import World
from common.learning import RewardNormalizer
from common.run import ROOT
from helpers import flags, newest, parameters, read_csv, read_json, resumed_at
from ranks import Ranks
from test_checkpoint import check_same_run

SMALL = {
    "ppo": {},
    "ppg": {"n_pi": 3, "num_aux_rollouts": 2, "e_aux": 2},
    "impala": {"batch_size": 2, "num_actors": 0, "queue_size": 2},
}
pytestmark = pytest.mark.usefixtures("small_networks")


def settings_of(script, runs_dir, **more):
    """8 iterations of 2 environments x 8 steps on each of 2 ranks."""
    small = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 8 * 32, "feature_dim": 16}
    small |= {"env_id": "bossfight", "device": "cpu", "seed": 4, "checkpoint_interval": 0.0}
    return {"script": script, **small, **SMALL[script], "runs_dir": str(runs_dir)} | more


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """What each of two ranks has learnt in each case."""
    folder = tmp_path_factory.mktemp("gradients")
    Ranks(folder, 2).run(ranks.gradients, folder)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", ranks.CASES)
def test_two_ranks_learn_what_one_process_does_from_the_joined_batch(case, learnt):
    joined = ranks.learn(case, World(torch.device("cpu")))
    torch.testing.assert_close(learnt[0][case], joined, rtol=1e-10, atol=1e-12)
    assert torch.equal(learnt[0][case], learnt[1][case])


def test_rewards_are_scaled_by_the_returns_of_all_ranks_and_metrics_averaged_over_those_that_have_them(learnt):
    rewards = np.random.default_rng(0).normal(size=(2, ranks.T, ranks.N))
    normalizer = RewardNormalizer(ranks.N, 0.9)
    joined = np.stack([normalizer(each, np.zeros((ranks.T, ranks.N))) for each in rewards])
    for rank, found in enumerate(learnt):
        np.testing.assert_allclose(found["scaled"], joined[..., ranks.OF_RANK[2][rank]], rtol=1e-6)
    means = {"losses/both": 0.5, "charts/first": 3.0, "charts/second": 4.0, "losses/other": 5.0}
    assert [found["means"] for found in learnt] == [means, means]


@pytest.mark.parametrize(("script", "hosts"), [("ppo", False), ("ppg", False), ("impala", True)])
def test_a_run_of_two_ranks(script, hosts, tmp_path):
    """All ranks have the same parameters in the end, and experience of their own, which one folder holds."""
    settings = settings_of(script, tmp_path / "runs", env_id="CartPole-v1", num_steps=16, total_timesteps=8 * 64)
    settings |= {"eval_interval": 128, "eval_episodes": 2}
    forks = Ranks(tmp_path, 2, hosts=hosts).run(ranks.train, tmp_path, settings)
    (path,) = (tmp_path / "runs").iterdir()
    states = [parameters(path), *(torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))]
    assert all(torch.equal(states[0][name], state[name]) for state in states for name in state)
    assert forks[0].output.count(" on CartPole-v1, seed ") == forks[0].output.count("done: 512 steps") == 1
    assert forks[1].output == ""
    launcher = "torchrun --nnodes 2 --nproc-per-node 1" if hosts else "torchrun --nproc-per-node 2"
    assert read_json(path / "meta.json")["command"].startswith(f"{launcher} {script}.py ")
    columns = ("step", "env", "episodic_length")
    steps, envs, lengths = np.array([[int(row[name]) for name in columns] for row in read_csv(path / "episodes.csv")]).T
    assert (np.diff(steps) >= 0).all()
    assert {*envs} == {0, 1, 2, 3}
    for env in range(4):  # every finished episode is there, at the step it ended at
        assert (np.abs(4 * np.cumsum(lengths[envs == env]) - steps[envs == env]) <= 4).all()
    assert list(lengths[envs == 0]) != list(lengths[envs == 2])  # the first ones of each rank
    assert len(read_csv(path / "eval.csv")) == 2 * 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs of two ranks that nothing has disturbed, each made once."""

    @functools.cache
    def make(script):
        folder = tmp_path_factory.mktemp("whole")
        Ranks(folder, 2).run(ranks.train, folder, settings_of(script, folder / "runs"))
        return next((folder / "runs").iterdir())

    return make


@pytest.mark.parametrize("script", SMALL)
def test_a_rank_that_is_killed_changes_nothing(script, whole, tmp_path):
    """The other one stops, too, and both go on with their run when they are started again. In PPG's mid-phase.

    Of IMPALA it is rank zero, of PPG it is rank zero that keeps the store: what it knew of the run is lost.
    """
    killed, statuses = int(script != "impala"), [1, 1]
    settings = settings_of(script, tmp_path / "runs", kill=[killed, 160], resume="auto")
    two = Ranks(tmp_path, 2, agent_store=script != "ppg")
    statuses[killed] = -signal.SIGKILL
    forks = two.run(ranks.train, tmp_path, settings, statuses=statuses)
    assert f"rank {1 - killed}: error: the connection to another rank is lost" in forks[1 - killed].errors
    two.run(ranks.train, tmp_path, settings)
    (path,) = (tmp_path / "runs").iterdir()
    assert resumed_at(path) == [128]
    check_same_run(path, whole(script))


def test_torchrun_starts_them_again(whole, tmp_path):
    settings = settings_of("ppo", tmp_path / "runs", kill=[1, 160], resume="auto")
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", ranks.__file__, "train", str(tmp_path)]
    with fast.Fork(tmp_path, ranks.torchrun, [*words, json.dumps(settings)]) as process:
        assert process.wait(120) == 0, process.output + process.errors
    (path,) = (tmp_path / "runs").iterdir()
    assert resumed_at(path) == [128]
    check_same_run(path, whole("ppo"))


def test_sigterm_and_resume(tmp_path):
    runs = tmp_path / "runs"
    settings = settings_of("ppo", runs, total_timesteps=10**6)
    del settings["script"]
    words = flags(ppo.Args(**settings))
    with Ranks(tmp_path / "two", 2).started(fast.run_script, "ppo", words) as forks:
        forks[0].wait_for(lambda: any(len(p.read_text().splitlines()) > 3 for p in runs.glob("*/progress.csv")))
        for fork in forks:
            fork.send(signal.SIGTERM)
        assert forks[0].wait() == 128 + signal.SIGTERM
        assert forks[1].wait() in (128 + signal.SIGTERM, 1)  # the latter where it finds the connection lost
    (path,) = runs.iterdir()
    assert f"resume with: torchrun --nproc-per-node 2 {ROOT / 'ppo.py'} --resume {path}" in forks[0].errors
    saved = newest(path)
    assert len(saved["ranks"]) == 2
    assert saved["ranks"][0]["random"] != saved["ranks"][1]["random"]
    total = saved["step"] + 4 * 32
    words = ["--resume", str(path), "--total-timesteps", str(total)]
    forks = Ranks(tmp_path / "again", 2).run(fast.run_script, "ppo", words)
    assert f"resumed at step {saved['step']:,}" in forks[0].output
    assert newest(path)["step"] == total


def test_all_ranks_have_the_settings_of_rank_zero(whole, tmp_path):
    """But for those of the machine; and only rank zero films and tracks. Started again without --resume, because they
    have died before they had a folder, they begin a new run."""
    older = Path(shutil.copytree(whole("ppo"), tmp_path / "runs/older"))
    (older / "meta.json").write_text(json.dumps(read_json(older / "meta.json") | {"finished": None}))
    two = Ranks(tmp_path, 2)
    two.starts = 1
    two.run(
        ranks.train, tmp_path, settings_of("ppo", tmp_path / "runs", on_rank_1={"learning_rate": 0.1, "gamma": 0.5})
    )
    (path,) = {*(tmp_path / "runs").iterdir()} - {older}
    check_same_run(path, whole("ppo"))
    shared, own = ppo.Args(gamma=0.5, capture_video=True, track=True, device="cuda"), ppo.Args(gamma=0.7, num_threads=9)
    rank_1 = SimpleNamespace(rank=1, broadcast=lambda args: shared)
    assert World.share_settings(rank_1, own) == ppo.Args(gamma=0.5, num_threads=9)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--num-envs 0", "--num-envs 0 cannot work: use a number above 0."),
        ("--resume nowhere", "--resume nowhere: no run folder"),  # which rank zero alone looks into
        ("--env-id CartPole-v1 --intrinsic-reward rnd", "--intrinsic-reward is for a single process: start it without"),
    ],
)
def test_bad_input_gets_one_sentence(words, sentence, tmp_path):
    words = ["--runs-dir", str(tmp_path / "runs"), *words.split()]
    for rank, fork in enumerate(Ranks(tmp_path, 2).run(fast.run_script, "ppo", words, statuses=[2, 2])):
        (line,) = [line for line in fork.errors.splitlines() if "rror: " in line]
        assert line.startswith(f"rank {rank}: error: {sentence}")
    assert not (tmp_path / "runs").exists()
