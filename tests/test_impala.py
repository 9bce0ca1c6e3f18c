"""IMPALA's learner, its actors' threads, and whole runs: what they do, and how they fail."""

import copy
import math
import signal
import threading
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import impala
from common.learning import action_dist
from common.run import ROOT
from common.session import Session
from fast import Fork, run_script
from helpers import evaluate, flags, level_seeds, read_csv, read_scalars, small_args, wait_until


@pytest.mark.quick
def test_logged_ratios():
    """Ratios 0.5, 1, 1.1 and 4; values that are off by 1 and -1 from targets with a variance of 4."""
    ratio = torch.tensor([0.5, 1.0, 1.1, 4.0])
    targets = torch.tensor([1.0, 1.0, 5.0, 5.0])
    values = targets + torch.tensor([1.0, -1.0, 1.0, -1.0])
    metrics = impala.vtrace_metrics(ratio.log(), values, targets, impala.Args(rho_bar=2.0, c_bar=1.05, pg_rho_bar=0.9))
    expected = {
        "rho": 6.6 / 4, "behaviour_kl": 6.6 / 4 - 1 - math.log(0.5 * 1.1 * 4) / 4, "explained_variance": 1 - 1 / 4,
        "rho_clipfrac": 1 / 4, "c_clipfrac": 2 / 4, "pg_rho_clipfrac": 3 / 4,
    }  # fmt: skip
    assert {tag: value.item() for tag, value in metrics.items()} == pytest.approx(
        {f"losses/{name}": value for name, value in expected.items()}
    )


def short_args(tmp_path, **settings):
    sizes = {"num_steps": 8, "queue_size": 4, "total_timesteps": 320, "log_interval": 64, "num_actors": 1}
    return small_args(impala, tmp_path, sizes, **settings)


@pytest.fixture
def copies(monkeypatch):
    """The agents that `main` publishes, in order of their versions, each with a copy of the time when it was."""
    found = []

    def deepcopy(agent):
        published = copy.deepcopy(agent)
        if all(agent is not each for each, _ in found):  # else the copy is an actor's own
            found.append((published, copy.deepcopy(agent)))
        return published

    monkeypatch.setattr(impala, "copy", SimpleNamespace(deepcopy=deepcopy))
    return found


def test_every_unroll_is_played_by_one_published_policy(copies, tmp_path, monkeypatch):
    """Not by half of an update, nor by two policies: its probabilities are those of the version that it names."""
    seen, update, take = [], impala.update, impala.ActorThreads.take

    def slow_update(agent, *rest):
        bias = agent.policy_head.linear.bias.data
        bias[0] += 5
        time.sleep(0.02)
        bias[0] -= 5
        return update(agent, *rest)

    def recorded(*arguments):
        batch = take(*arguments)
        seen.extend(batch)
        return batch

    monkeypatch.setattr(impala, "update", slow_update)
    monkeypatch.setattr(impala.ActorThreads, "take", recorded)
    args = short_args(tmp_path, num_actors=2, learning_rate=0.01, use_lstm=True, total_timesteps=20 * 32)
    impala.main(args)
    assert len(copies) == 21
    assert not torch.equal(copies[0][1].value_head.weight, copies[1][1].value_head.weight)
    assert len({each.version for each in seen}) > 5
    for each in seen:
        (_, agent), unroll = copies[each.version], impala.stack_unrolls([each.unroll])
        with torch.no_grad():
            params, _ = agent.unroll(unroll.obs, unroll.state, unroll.dones)
        dist = action_dist(agent.action_space, params[:-1])
        torch.testing.assert_close(dist.log_prob(unroll.actions), unroll.logprobs, rtol=1e-4, atol=1e-5)


def test_a_slow_learner_fills_the_queue_and_no_more():
    stop, given = threading.Event(), []

    def actor():
        while not stop.is_set():
            given.append(len(given))
            yield given[-1]

    threads = impala.ActorThreads([actor()], 3, torch.device("cpu"), stop)
    for taken in range(1, 6):
        assert threads.take(1, mock.Mock()) == [taken - 1]
        wait_until(lambda: len(given) == taken + 4)  # noqa: B023  those taken, 3 in the queue, one in the actor's hands
        time.sleep(0.1)
        assert (threads.queue.qsize(), len(given)) == (3, taken + 4)
    assert threads.close() is False
    assert not any(thread.is_alive() for thread in threads.threads)


def test_lag_counts_updates_between_acting_and_learning(tmp_path):
    """In turn, with 8 environments and batches of 4 unrolls, every second batch is an update old."""
    args = short_args(tmp_path, num_actors=0, num_envs=8, log_interval=1, total_timesteps=4 * 32)
    scalars = read_scalars(impala.main(args))
    for tag in ("charts/policy_lag", "charts/policy_lag_max"):
        assert scalars[tag] == [(32, 0), (64, 1), (96, 0), (128, 1)]


def test_an_asynchronous_run_of_two_games(tmp_path):
    """Three batches of eight frames."""
    settings = {"env_id": "coinrun,maze", "num_actors": 2, "use_lstm": True, "precision": "bf16", "log_interval": 8}
    run_dir = impala.main(short_args(tmp_path, num_steps=2, total_timesteps=24, feature_dim=16, **settings))
    assert len(read_scalars(run_dir)["charts/queue_occupancy"]) == 3


def test_environments_of_actors_and_of_neighbouring_seeds_differ(tmp_path):
    """Gymnasium's own seeds are 1, 2, 3, ... and 2, 3, 4, ..."""

    def open_session(**settings):
        return Session(short_args(tmp_path, **settings), "impala.py", impala.make_envs)

    levels, firsts = [], []
    for seed in (1, 2, 3):
        with open_session(env_id="starpilot", seed=seed) as session:
            for number in range(4):
                levels += level_seeds(session.make_envs(2, number))
        with open_session(num_envs=8, seed=seed) as session:
            firsts += session.make_envs().obs.tolist()
    assert len(set(levels)) == 24
    assert len({tuple(first) for first in firsts}) == 24
    with open_session() as session:
        actors = np.concatenate([session.make_envs(2, number).obs for number in range(3)])
    with open_session(num_envs=6) as session:
        np.testing.assert_array_equal(session.make_envs().obs, actors)


def test_every_episode_is_counted_once(tmp_path):
    """TestLuck-v0's episodes of 1 or 20 steps follow each other: their lengths add up to the steps of the run."""
    args = short_args(tmp_path, env_id="TestLuck-v0", num_actors=2, total_timesteps=40 * 32)
    rows = read_csv(impala.main(args) / "episodes.csv")
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(steps)
    assert steps[-1] <= args.total_timesteps
    assert {(row["env"], row["episodic_length"]) for row in rows} == {(env, n) for env in "0123" for n in ("1", "20")}
    assert all(float(row["episodic_return"]) == int(row["episodic_length"]) for row in rows)
    assert args.total_timesteps - 4 * 19 <= sum(int(row["episodic_length"]) for row in rows) <= args.total_timesteps


def test_a_signal_ends_a_run_whose_actor_hangs(tmp_path):
    sizes = {"num_envs": 2, "num_steps": 4, "batch_size": 2, "total_timesteps": 10**6, "log_interval": 1}
    args = short_args(tmp_path / "runs", env_id="TestHang-v0", checkpoint_interval=0.0, **sizes)
    with Fork(tmp_path, run_script, "impala", flags(args)) as process:
        process.wait_for(lambda: list(tmp_path.glob("runs/*/checkpoints/*32.pt")))  # after 4 updates of 8 steps
        process.wait_for(lambda: "hangs" in process.output)
        process.send(signal.SIGINT)
        assert process.wait(10) == 130
    (path,) = tmp_path.glob("runs/*/model.pt")
    note = "note: an actor cannot be stopped and is left behind"
    advice = f"resume with: python {ROOT / 'impala.py'} --resume"
    assert process.errors == f"{note}\n{advice} {path.parent}\nstopped by Ctrl-C\n"
    assert torch.load(path, weights_only=True)["step"] == 4 * 8


def test_a_model_saved_on_a_signal_is_a_published_one(copies, tmp_path, monkeypatch):
    """The learner's own parameters may be half of a step ahead."""

    def update(agent, *rest):
        if len(copies) == 4:
            agent.value_head.weight.data += 1  # some of the parameters have been stepped
            raise KeyboardInterrupt
        return original(agent, *rest)

    original = impala.update
    monkeypatch.setattr(impala, "update", update)
    with pytest.raises(KeyboardInterrupt):
        impala.main(short_args(tmp_path, num_actors=2, total_timesteps=10**6))
    (run_dir,) = tmp_path.iterdir()
    saved = torch.load(run_dir / "model.pt", weights_only=True)
    assert saved["step"] == 3 * 32
    assert all(torch.equal(saved["agent"][name], value) for name, value in copies[-1][1].state_dict().items())


def test_a_crash_shows_its_traceback_and_fails(tmp_path):
    args = short_args(tmp_path, env_id="TestCrash-v0", num_actors=2, total_timesteps=10**6)
    process = Fork(tmp_path, run_script, "impala", flags(args))
    assert process.wait() == 1
    assert "ZeroDivisionError: the simulator has crashed" in process.errors
    assert "in step\n" in process.errors  # where it happened


@pytest.mark.parametrize("num_actors", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_solves_cartpole(num_actors, tmp_path):
    """These settings reached 500 with each of 5 seeds in turn, and each of 5 with actors, whose lag is up to the
    machine: busy with other things, it once ended at 455."""
    args = impala.Args(
        runs_dir=str(tmp_path), env_id="CartPole-v1", num_envs=16, num_actors=num_actors, num_steps=32, batch_size=16,
        queue_size=16, num_minibatches=4, gamma=0.98, vtrace_lambda=1.0, vf_coef=0.05, norm_reward="none",
        feature_dim=64, anneal_lr=True, total_timesteps=300_000, device="cpu",
    )  # fmt: skip
    assert evaluate(impala.main(args)) >= (400 if num_actors else 475)
