"""IMPALA's learner and its step, its actors' threads, and whole runs: what they do, and how they fail."""

import copy
import dataclasses
import gc
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import impala
from common.envs import make_envs
from common.networks import action_dist
from common.reward_scale import RewardNormalizer
from common.session import Session
from conftest import CountEnv
from fast import Fork, run_script, small_networks
from helpers import evaluate, level_seeds, parameters, read_csv, small_args, wait_until
from test_losses import ACTION_SPACES, SPACES, VECTOR, WORLD, make_agent
from test_run import read_scalars

quick = pytest.mark.quick


def agent_and_args(space=ACTION_SPACES["discrete"], **settings):
    small = {"feature_dim": 8, "hidden_dim": 8, "num_actors": 0, "num_minibatches": 2, "device": "cpu"}
    args = impala.Args(**small | settings)
    return make_agent(impala, space, args), args


def random_unrolls(agent, space, num_steps=6, batch_size=4):
    """A batch as of an older policy: random observations, and the agent's own actions with shifted probabilities."""
    obs = torch.randn(num_steps + 1, batch_size, *VECTOR.shape)
    state = 0.5 * torch.randn_like(agent.initial_state(batch_size))
    dones = (torch.rand(num_steps, batch_size) < 0.3).float()
    with torch.no_grad():
        dist = action_dist(space, agent.unroll(obs, state, dones)[0][:-1])
        actions = dist.sample()
        logprobs = dist.log_prob(actions) + 0.3 * torch.randn(num_steps, batch_size)
    truncation_values = torch.randn(num_steps, batch_size) * dones * (torch.rand(num_steps, batch_size) < 0.5)
    rewards = torch.randn(num_steps, batch_size)
    return impala.Unroll(actions, obs, logprobs, rewards, dones, truncation_values, state)


# ------------------------------------------------------------------------------------------------------------- learner


@quick
@pytest.mark.parametrize(("micro_batch_size", "num_steps", "expected"), [
    (10, 5, [2, 2, 2, 1]), (35, 5, [7]), (1, 5, [1] * 7), (None, 128, [4, 3]),  # None: 512 steps
])  # fmt: skip
@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_vtrace_takes_the_batch_in_pieces(micro_batch_size, num_steps, expected, num_minibatches, monkeypatch):
    """Whole unrolls, as many as --micro-batch-size has room for, however many minibatches the pass then makes."""
    agent, args = agent_and_args(micro_batch_size=micro_batch_size, num_minibatches=num_minibatches)
    batch, sizes, unroll = random_unrolls(agent, agent.action_space, num_steps, batch_size=7), [], agent.unroll

    def spy(obs, state, dones):
        if not torch.is_grad_enabled():
            sizes.append(obs.shape[:2])
        return unroll(obs, state, dones)

    monkeypatch.setattr(agent, "unroll", spy)
    impala.update(agent, torch.optim.SGD(agent.parameters(), lr=0.1), batch, args, WORLD)
    assert sizes == [(num_steps + 1, unrolls) for unrolls in expected]


@quick
@SPACES
@pytest.mark.parametrize("use_lstm", [False, True])
def test_the_papers_step_is_a_pass_of_one_minibatch(space, use_lstm):
    """The gradient of the clipped surrogate at a ratio of 1 is that of the policy-gradient loss."""
    bounds = {"rho_bar": 1.1, "c_bar": 0.9, "pg_rho_bar": 1.2}
    settings = {"use_lstm": use_lstm, "num_minibatches": 1, "micro_batch_size": 6}
    agent, args = agent_and_args(space, sample_fraction=1.0, **settings, **bounds)
    batch, found = random_unrolls(agent, space), []
    with torch.no_grad():
        logprobs, entropies, values, targets, _ = impala.learner_outputs(agent, batch, args)
    ratio = (logprobs - batch.logprobs).exp()
    almost = dataclasses.replace(args, sample_fraction=1 - 1e-9)  # all steps are drawn, but not in the paper's way
    for each in (args, almost):
        learner = copy.deepcopy(agent)
        metrics = impala.update(learner, torch.optim.SGD(learner.parameters(), lr=0.1), batch, each, WORLD)
        found.append((metrics, torch.cat([each.flatten() for each in learner.parameters()])))
    (metrics, ours), (expected, theirs) = found
    assert "losses/clipfrac" in expected.keys() - metrics.keys()
    assert not torch.allclose(ours, torch.cat([each.flatten() for each in agent.parameters()]), atol=1e-3)
    torch.testing.assert_close(ours, theirs)
    both = metrics.keys() - {"losses/policy_loss", "losses/explained_variance"}
    assert {"losses/behaviour_kl", "losses/rho", "losses/grad_norm"} < both
    assert {tag: float(metrics[tag]) for tag in both} == pytest.approx(
        {tag: float(expected[tag]) for tag in both}, rel=1e-4
    )
    logged = {name.replace("_bar", "_clipfrac"): (ratio > bound).float().mean() for name, bound in bounds.items()}
    assert 0 < logged["rho_clipfrac"] < logged["c_clipfrac"] < 1
    logged |= {"rho": ratio.mean(), "behaviour_kl": (ratio - 1 - ratio.log()).mean(), "entropy": entropies.mean()}
    for name, value in logged.items():
        assert float(metrics[f"losses/{name}"]) == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name
    explained = 1 - (targets - values).var() / targets.var()
    assert float(expected["losses/explained_variance"]) == pytest.approx(explained.item(), rel=1e-4)
    assert float(metrics["losses/explained_variance"]) != 0


@pytest.mark.parametrize(
    ("norm_reward", "expected"),
    [
        ("none", [-10, -0.5, 0, 0.5, 10]),
        ("clip", [-1, -0.5, 0, 0.5, 1]),
        # 5 tanh(r / 5), negative ones times .3: 5 tanh(2) = 4.82014, 5 tanh(.1) = .49834
        ("soft-asymmetric", [-0.3 * 4.82014, -0.3 * 0.49834, 0, 0.49834, 4.82014]),
    ],
)
def test_rewards_treated(norm_reward, expected):
    batch = impala.Unroll(*[None] * 3, torch.tensor([[-10.0, -0.5, 0.0, 0.5, 10.0]]), *[None] * 3)
    treated = impala.treat_rewards(batch, [0] * 5, RewardNormalizer(1, 0.9, norm_reward))
    assert treated.tolist()[0] == pytest.approx(expected, rel=1e-5)


def test_rewards_are_scaled_in_order_of_time():
    """As if the unrolls of each environment were one."""
    rng = np.random.default_rng(0)
    rewards, dones = rng.normal(size=(3, 5, 4)).astype(np.float32), rng.random((3, 5, 4)) < 0.2
    plain, mine = RewardNormalizer(4, 0.9), RewardNormalizer(6, 0.9)
    envs = [2, 5, 2, 0, 5, 3, 0, 2, 3, 0, 3, 5]  # three rounds, as two actors may hand them over
    batch, expected = np.empty((2, 5, 12), np.float32), np.empty((5, 12), np.float32)
    scaled = plain(np.concatenate(rewards), np.concatenate(dones))
    for count, columns in enumerate(np.argsort(envs, kind="stable").reshape(4, 3).T):
        batch[:, :, columns] = rewards[count], dones[count]
        expected[:, columns] = scaled[5 * count : 5 * (count + 1)]
    unrolls = impala.Unroll(*[None] * 3, *map(torch.as_tensor, batch), *[None] * 2)
    np.testing.assert_allclose(impala.treat_rewards(unrolls, envs, mine), expected, rtol=1e-5)
    np.testing.assert_allclose(mine.returns[[0, 2, 3, 5]], plain.returns)
    assert mine.returns[[1, 4]].tolist() == [0, 0]
    assert mine.var == pytest.approx(plain.var)


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
    seen = []

    class Recorded(impala.ActorThreads):
        def take(self, batch_size):
            batch = super().take(batch_size)
            seen.extend(batch)
            return batch

    monkeypatch.setattr(impala, "ActorThreads", Recorded)
    args = short_args(tmp_path, num_actors=2, learning_rate=0.01, use_lstm=True, total_timesteps=20 * 32)
    impala.main(args)
    assert len(copies) == 21
    for published, then in copies:  # no training has touched it
        assert all(map(torch.equal, published.state_dict().values(), then.state_dict().values()))
    assert not torch.equal(copies[0][1].value_head.weight, copies[1][1].value_head.weight)
    assert len({each.version for each in seen}) > 5
    for each in seen:
        (_, agent), unroll = copies[each.version], impala.stack_unrolls([each.unroll])
        with torch.no_grad():
            params, _ = agent.unroll(unroll.obs, unroll.state, unroll.dones)
        dist = action_dist(agent.action_space, params[:-1])
        torch.testing.assert_close(dist.log_prob(unroll.actions), unroll.logprobs, rtol=1e-4, atol=1e-5)


def count_up(stop, name=0, log=None):
    """An actor that gives (name, 0), (name, 1), ..., and notes each before it does."""
    for number in itertools.count():
        if stop.is_set():
            return
        if log is not None:
            log.append(number)
        yield name, number


def start_threads(*actors, queue_size=4, stop):
    threads = impala.ActorThreads(actors, queue_size, torch.device("cpu"), stop)
    threads.start()
    return threads


@pytest.fixture
def stop():
    event = threading.Event()
    yield event
    event.set()


def test_a_slow_learner_fills_the_queue_and_no_more(stop):
    log = []
    threads = start_threads(count_up(stop, log=log), queue_size=3, stop=stop)
    for taken in range(1, 6):
        assert threads.take(1) == [(0, taken - 1)]
        wait_until(threads.queue.full)
        wait_until(lambda: len(log) == taken + 4)  # noqa: B023  those taken, 3 in the queue, one in the actor's hands
        time.sleep(0.1)
        assert (threads.queue.qsize(), len(log)) == (3, taken + 4)
    assert threads.close() is False
    assert not any(thread.is_alive() for thread in threads.threads)


def test_unrolls_of_several_actors_come_once_and_in_order(stop):
    threads = start_threads(count_up(stop, "a"), count_up(stop, "b"), stop=stop)
    received = [each for _ in range(4) for each in threads.take(5)]
    for name in "ab":
        numbers = [number for each, number in received if each == name]
        assert numbers == list(range(len(numbers)))
    assert threads.close() is False


def test_a_dead_actor_stops_the_learner(stop):
    def actor():
        yield 0
        raise failure

    failure = ValueError("the simulator has crashed")
    threads = start_threads(actor(), count_up(stop), stop=stop)  # the other one keeps the queue full
    with pytest.raises(ValueError, match="the simulator has crashed") as error:
        threads.take(1000)
    assert error.value is failure
    threads.close()


def test_a_hanging_actor_is_left_behind(stop, capsys):
    def hang():
        yield 0
        release.wait()

    release = threading.Event()
    threads = start_threads(hang(), count_up(stop), stop=stop)
    threads.take(2)
    start = time.monotonic()
    assert threads.close() is True
    assert 2.9 <= time.monotonic() - start < 5
    assert capsys.readouterr().err == "note: an actor cannot be stopped and is left behind\n"
    assert [thread.is_alive() for thread in threads.threads] == [True, False]
    release.set()


# ----------------------------------------------------------------------------------------------------------- whole runs


def test_lag_counts_updates_between_acting_and_learning(tmp_path):
    """In turn, with 8 environments and batches of 4 unrolls, every second batch is an update old."""
    args = short_args(tmp_path, num_actors=0, num_envs=8, log_interval=1, total_timesteps=4 * 32)
    scalars = read_scalars(impala.main(args))
    for tag in ("charts/policy_lag", "charts/policy_lag_max"):
        assert scalars[tag] == [(32, 0), (64, 1), (96, 0), (128, 1)]


def test_an_asynchronous_run(tmp_path):
    settings = {"env_id": "coinrun,maze", "num_actors": 2, "use_lstm": True, "precision": "bf16", "log_interval": 8}
    settings |= {"num_steps": 2, "total_timesteps": 24, "feature_dim": 16}  # three batches of eight frames
    run_dir = impala.main(short_args(tmp_path, **settings, num_threads=1))
    assert all(torch.isfinite(value).all() for value in parameters(run_dir).values())
    scalars = read_scalars(run_dir)
    for tag in ("policy_lag", "policy_lag_max", "queue_occupancy"):
        assert len(scalars[f"charts/{tag}"]) >= 3


def test_actors_play_different_levels(tmp_path):
    levels = []
    for seed in (1, 2, 3):
        with Session(short_args(tmp_path, env_id="starpilot", seed=seed), "impala.py") as session:
            for number in range(4):
                levels += level_seeds(session.make_envs(2, number))
    assert len(set(levels)) == 24
    with Session(short_args(tmp_path), "impala.py") as session:
        actors = np.concatenate([session.make_envs(2, number).obs for number in range(3)])
    one = make_envs("CartPole-v1", 6, seed=1)
    assert np.array_equal(one.reset(seed=1)[0], actors)  # as Gymnasium seeds them: 1, 2, ..., 6
    one.close()


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


# ------------------------------------------------------------------------------------------------------------- failures


class HangEnv(CountEnv):
    """Never comes back from its 20th step."""

    def step(self, action):
        if self.count == 19:
            print("hangs", flush=True)
            threading.Event().wait()
        return super().step(action)


def run_hanging(words):
    gym.register("TestHang-v0", HangEnv)
    run_script("impala", words)


def test_a_signal_ends_a_run_whose_actor_hangs(tmp_path):
    words = ["--env-id=TestHang-v0", "--num-envs=2", "--num-steps=4", "--batch-size=2", "--num-minibatches=2"]
    words += ["--log-interval=1", "--device=cpu", f"--runs-dir={tmp_path / 'runs'}", "--checkpoint-interval=0"]
    with Fork(tmp_path, run_hanging, words) as process:
        process.wait_for(lambda: list(tmp_path.glob("runs/*/checkpoints/*32.pt")))  # after 4 updates of 8 steps
        process.wait_for(lambda: "hangs" in process.output)
        process.send(signal.SIGINT)
        assert process.wait(10) == 130
    (path,) = tmp_path.glob("runs/*/model.pt")
    note, advice = "note: an actor cannot be stopped and is left behind", "resume with: python impala.py --resume"
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
    words = ["--env-id=TestCrash-v0", "--num-envs=2", "--num-actors=2", "--device=cpu", f"--runs-dir={tmp_path}"]
    process = Fork(tmp_path, run_script, "impala", words)
    assert process.wait() == 1
    assert "ZeroDivisionError: the simulator has crashed" in process.errors
    assert "in step\n" in process.errors  # where it happened


# ------------------------------------------------------------------------------------------------------------- learning


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


def test_learns_multibinary_actions(tmp_path):
    """TestBits-v0 pays 5 a episode for random bits and 10 for the right ones."""
    args = impala.Args(
        runs_dir=str(tmp_path), env_id="TestBits-v0", num_envs=8, num_actors=2, num_steps=16, batch_size=8,
        queue_size=8, num_minibatches=4, gamma=0.9, norm_reward_gamma=0.9, total_timesteps=80_000, learning_rate=3e-3,
        anneal_lr=True, device="cpu",
    )  # fmt: skip
    assert evaluate(impala.main(args)) > 9.5


@pytest.mark.parametrize(("use_lstm", "low", "high"), [(True, 0.95, 1.0), (False, 0.3, 0.7)])
def test_a_cue_is_remembered_with_an_lstm_alone(use_lstm, low, high, tmp_path):
    args = impala.Args(
        runs_dir=str(tmp_path), env_id="TestCue-v0", num_envs=16, num_actors=0, num_steps=10, batch_size=16,
        num_minibatches=4, gamma=0.9, feature_dim=32, use_lstm=use_lstm, norm_reward="none", learning_rate=3e-3,
        total_timesteps=60_000, device="cpu",
    )  # fmt: skip
    run_dir = impala.main(args)
    assert low <= evaluate(run_dir, episodes=200) <= high


def test_memory_stays_flat(tmp_path, monkeypatch):
    """300 batches, after the last of which there are as many tensors, and as much memory in use, as after the 60th."""
    calls, tensors, megabytes, update = itertools.count(), [], [], impala.update

    def spy(*arguments):
        if next(calls) in (60, 299):
            gc.collect()
            tensors.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
            megabytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)
        return update(*arguments)

    monkeypatch.setattr(impala, "update", spy)
    args = short_args(tmp_path, env_id="starpilot", num_actors=2, num_steps=2, total_timesteps=2400, learning_rate=0.0)
    with small_networks():
        impala.main(args)
    in_flight = 7 * (4 + 4 + 4 + 4)  # tensors of unrolls in the queue, the actors' hands and the batch
    assert tensors[1] <= tensors[0] + in_flight
    # The frames of one batch are .15 MB: were they kept, there would be 36 MB more.
    assert megabytes[1] <= megabytes[0] + 20
