"""Evaluation on held-out levels."""

import math
import threading
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Bernoulli, Beta, Categorical, Independent, Normal, Uniform

import impala
import ppo
from common import evaluation
from common.checkpoint import Checkpoints, read_model
from common.envs import Episode
from common.evaluation import RETURN_RANGES, DrawingFrom, Evaluator, normalized, play, share_episodes
from common.procgen_env import PROCGEN_GAMES
from common.run import CSV_COLUMNS
from helpers import ALL, deterministic_files, level_seeds, make_envs, parameters, read_csv, read_scalars, small_args
from test_checkpoint import make_args

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("small_networks")
gym.register("TestNormal-v0", lambda: gym.wrappers.NormalizeObservation(gym.make("CartPole-v1")))


class Player(torch.nn.Module):
    """Has the same distribution over actions everywhere, keeps the states it is given, and counts steps in them."""

    def __init__(self, dist):
        super().__init__()
        self.dist, self.states = dist, []

    def __deepcopy__(self, memo):
        return self

    def get_action_dist(self, obs, state=None):
        state = torch.zeros(2, len(obs), 1) if state is None else state
        self.states.append(state[0, :, 0].clone())
        return self.dist.expand((len(obs),)), state + 1


def play_in(env_id, num_envs, agent, quota, greedy):
    envs = make_envs(env_id, num_envs, seed=7)
    envs.reset(seed=7)
    return play(agent, envs, 7, CPU, quota, greedy, str)


def evaluator_of(**settings):
    args = make_args(ppo, ".", **{"env_id": "coinrun", "eval_interval": 1} | settings)
    return Evaluator(args, None, CPU, ppo.make_envs)


def returns_of(played):
    return np.array([[episode.episodic_return for episode in each] for each in played])


def episodes_with(returns):
    """What `play` gives for returns [N, quota]: an episode is a step longer, on level 0, and solves it from 10 on."""
    return [[Episode(env, value, value + 1, 0, value >= 10) for value in row] for env, row in enumerate(returns)]


@pytest.mark.quick
def test_every_environment_plays_its_first_episodes():
    """Episodes of 1 step and of 20: the first that end would be the short ones. A state starts at zero with each."""
    player = Player(Categorical(torch.ones(2)))
    played = play_in("TestLuck-v0", 8, player, 3, greedy=False)
    states, expected = torch.stack(player.states, dim=1), []  # [N, steps]
    for number in range(8):
        env = gym.make("TestLuck-v0").unwrapped
        expected.append([])
        for seed in (7 + number, None, None):
            env.reset(seed=seed)
            expected[-1].append(env.length)
        counts = [step for length in expected[-1] for step in range(length)]
        assert states[number][: len(counts)].tolist() == counts
    assert returns_of(played).tolist() == expected  # the reward is 1 a step
    assert [[episode.length for episode in each] for each in played] == expected
    assert set(np.array(expected).flatten()) == {1, 20}


def test_evaluations_change_nothing_in_the_agent():
    """A copy plays, in evaluation mode; a part of the agent that was in this mode stays in it, and no other."""

    class Normalizing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.frozen = torch.nn.BatchNorm1d(1), torch.nn.Dropout().eval()

        def get_action_dist(self, obs, state=None):
            assert not self.norm.training
            return Categorical(logits=self.norm(obs) * torch.ones(2)), None

    agent = Normalizing()
    play_in("TestCount-v0", 4, agent, 1, greedy=True)
    assert agent.norm.num_batches_tracked == 0
    assert [module.training for module in agent.modules()] == [True, True, False]


def test_greedy_and_stochastic_actions():
    """TestBits pays the share of bits guessed; TestArm the number of the action."""
    player = Player(Categorical(torch.tensor([0.4, 0.6])))
    greedy, drawn = (play_in("TestArm-v0", 50, player, 4, greedy) for greedy in (True, False))
    assert (returns_of(greedy) == 10).all()
    assert returns_of(drawn).mean() == pytest.approx(6, abs=0.5)  # of 2000 draws; the standard error is .11
    halves = Player(Independent(Bernoulli(torch.full((4,), 0.5)), 1))  # whose mode is NaN
    with np.errstate(invalid="raise"):
        play_in("TestBits-v0", 4, halves, 1, greedy=True)


@pytest.mark.parametrize("env_id", ["bossfight", "CartPole-v1", "TestNormal-v0"])
def test_evaluations_repeat(env_id, monkeypatch):
    """Of Procgen's environments, too, which cannot be reset, and of wrappers that remember all since they were made."""
    played = []
    monkeypatch.setattr(evaluation, "play", lambda *args: played.append(play(*args)) or played[-1])
    args = make_args(ppo, ".", env_id=env_id, eval_interval=1, num_envs=4, eval_episodes=8, precision="fp32")
    envs = make_envs(env_id, 4, seed=7)
    agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, args)
    agent.policy_head.linear.weight.data *= 100
    evaluator = Evaluator(args, agent, CPU, ppo.make_envs)
    for _ in range(2):
        evaluator(1, mock.Mock(recent=[], best_return=0))
    assert played[:2] == played[2:]
    assert len({episode.length for each in played[0] for episode in each}) > 4  # other levels, other episodes


@pytest.mark.parametrize(
    "dist",
    [
        Categorical(torch.tensor([0.1, 0.2, 0.7])), Independent(Bernoulli(torch.tensor([0.2, 0.9])), 1),
        Independent(Normal(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 2.0])), 1),
        Independent(Categorical(torch.tensor([[0.1, 0.9], [0.5, 0.5]])), 1), Beta(2.0, 3.0), Uniform(0.0, 1.0),
    ],
    ids=["categorical", "bernoulli", "normal", "multi-discrete", "beta", "uniform"],
)  # fmt: skip
def test_draws_are_those_of_a_generator_of_their_own(dist):
    """As PyTorch's own generator would draw them; that one goes on as without them, and so do other threads."""
    torch.manual_seed(1)
    theirs, others = dist.sample((20,)), torch.rand(3)
    torch.manual_seed(1)
    dist.sample((20,))
    drawn, thread = [], threading.Thread(target=lambda: drawn.append(torch.rand(3)))
    with DrawingFrom(torch.Generator().manual_seed(1)):
        assert torch.equal(dist.sample((20,)), theirs)
        thread.start()
        thread.join()
    assert torch.equal(drawn[0], others)


def test_levels_are_those_asked_for():
    """With 0 levels, those of the full distribution, drawn otherwise than in training."""
    many = {"eval_episodes": 64, "num_envs": 64}
    evaluator = evaluator_of(num_levels=5, eval_num_levels=10, eval_start_level=5, **many)
    assert set(level_seeds(evaluator.make_envs())) == set(range(5, 15))
    training = make_envs("coinrun", 64, seed=4)
    training.reset()  # the seeds are there once the first frames are
    assert len(set(level_seeds(evaluator_of(**many).make_envs()) + level_seeds(training))) == 128


@pytest.mark.parametrize(
    ("training", "chosen", "told"),
    [((0, 200), (199, 9), True), ((50, 10), (0, 51), True), ((0, 200), (200, 9), False), ((50, 10), (0, 50), False),
     ((0, 200), (0, 0), False), ((0, 0), (0, 9), False)],
)  # fmt: skip
def test_levels_of_training_are_told_from_held_out_ones(training, chosen, told, capsys):
    """Each a first level and a number; 0 is all there are."""
    settings = dict(zip(("start_level", "num_levels"), training, strict=True))
    settings |= dict(zip(("eval_start_level", "eval_num_levels"), chosen, strict=True))
    evaluator_of(eval_episodes=1, **settings)
    assert ("these are not held out" in capsys.readouterr().err) == told


@pytest.mark.parametrize(
    ("games", "num_envs", "episodes", "expected"),
    [(1, 8, 64, (8, 8)), (1, 8, 3, (3, 1)), (1, 8, 9, (8, 2)), (3, 6, 4, (3, 2)), (3, 6, 1, (3, 1))],
)
def test_environments_and_their_quota(games, num_envs, episodes, expected):
    assert share_episodes(episodes, num_envs, ["coinrun"] * games) == expected


@ALL
def test_an_evaluated_run_is_the_same_run(script, tmp_path):
    """But for the evaluations, which come every 100 steps, at the end of the iteration, and at the run's end."""
    plain = script.main(make_args(script, tmp_path / "plain"))
    path = script.main(make_args(script, tmp_path / "evaluated", eval_interval=100, eval_episodes=6))
    assert all(torch.equal(a, b) for a, b in zip(parameters(plain).values(), parameters(path).values(), strict=True))
    assert [row for row in deterministic_files(path) if "policy" not in row] == deterministic_files(plain)
    steps = [112, 208, 304, 384] if script is impala else [128, 224, 320, 384]  # 16 or 32 steps at a time
    expected = [(str(step), policy, "8") for step in steps for policy in ("stochastic", "greedy")]
    rows = read_csv(path / "eval.csv")  # with 6 episodes, in each of 4 environments as many
    assert [(row["step"], row["policy"], row["episodes"]) for row in rows] == expected
    scalars = read_scalars(path)
    assert [step for step, _ in scalars["eval/episodic_return"]] == steps
    gap = float(read_csv(path / "progress.csv")[-1]["last_100_return"]) - scalars["eval/episodic_return"][-1][1]
    assert scalars["eval/train_test_gap"][-1] == (384, pytest.approx(gap, abs=1e-3))


def test_what_is_logged_from_known_returns(tmp_path, monkeypatch):
    """Environments 0 and 2 play starpilot, 1 and 3 coinrun."""
    returns = {False: np.array([[10.0, 20], [5, 10], [30, 40], [0, 5]]), True: np.full((4, 2), 8.0)}
    monkeypatch.setattr(evaluation, "play", lambda *args: episodes_with(returns[args[5]]))
    args = make_args(ppo, tmp_path, env_id="starpilot,coinrun", eval_interval=384, eval_episodes=8, num_steps=96)
    path = ppo.main(args)
    rows = read_csv(path / "eval.csv")
    columns = ("policy", "env_id", "episodes", "episodic_return", "episodic_length", "level_complete")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("stochastic", "starpilot", "4", "25", "26", "1"), ("stochastic", "coinrun", "4", "5", "6", "0.25"),
        ("greedy", "starpilot", "4", "8", "9", "0"), ("greedy", "coinrun", "4", "8", "9", "0"),
    ]  # fmt: skip
    assert float(rows[0]["standard_error"]) == pytest.approx((500 / 3) ** 0.5 / 2, abs=1e-4)
    assert float(rows[0]["normalized_return"]) == pytest.approx(22.5 / 61.5, abs=1e-5)
    scalars = {tag: points[0][1] for tag, points in read_scalars(path).items() if tag.startswith("eval/")}
    assert scalars == pytest.approx(
        {
            "eval/episodic_return": 15, "eval/episodic_return/starpilot": 25, "eval/episodic_return/coinrun": 5,
            "eval/episodic_length": 16, "eval/normalized_return": 22.5 / 61.5 / 2,
            "eval/greedy/episodic_return": 8, "eval/greedy/episodic_return/starpilot": 8,
            "eval/greedy/episodic_return/coinrun": 8, "eval/greedy/episodic_length": 9,
            "eval/greedy/normalized_return": (5.5 / 61.5 + 0.6) / 2,
            "eval/level_complete": (1 + 1 / 4) / 2, "eval/greedy/level_complete": 0,
        },
        abs=1e-4,
    )  # fmt: skip


def test_normalized_returns():
    assert all(RETURN_RANGES[mode].keys() == set(PROCGEN_GAMES) for mode in ("easy", "hard"))
    assert normalized(2.5, "starpilot", "easy") == 0
    assert normalized(35.0, "starpilot", "hard") == 1
    assert normalized(15.45, "fruitbot", "easy") == pytest.approx(0.5)
    assert math.isnan(normalized(1.0, "CartPole-v1", "easy"))
    assert math.isnan(normalized(1.0, "maze", "memory"))


def test_the_agent_of_the_best_evaluation_is_kept(tmp_path, monkeypatch):
    """A copy may add a value to the evaluations, the last column."""
    add = lambda *given, old=evaluation.summaries: {game: row | {"mine": 7.5} for game, row in old(*given).items()}  # noqa: E731
    monkeypatch.setattr(evaluation, "summaries", add)
    monkeypatch.setitem(CSV_COLUMNS, "eval.csv", f"{CSV_COLUMNS['eval.csv']} mine")
    returns = iter([1.0, 9.0, 3.0, 9.0, 2.0, 9.0])  # of sampled and of greedy actions, in turn
    monkeypatch.setattr(evaluation, "play", lambda *_: [[Episode(0, next(returns), 5, None, None)]])
    settings = {"num_steps": 8, "total_timesteps": 3 * 32, "eval_interval": 32, "checkpoint_interval": 0.0}
    write, steps = Checkpoints.write, []

    def spied(checkpoints):  # a run that is killed has the best agent that its checkpoint knows of
        path = checkpoints.run.path / "best.pt"
        steps.append(read_model(path)["step"] if path.exists() else None)
        write(checkpoints)

    monkeypatch.setattr(Checkpoints, "write", spied)
    run_dir = ppo.main(small_args(ppo, tmp_path, {}, **settings | {"keep_checkpoints": 9}))
    assert steps == [None, None, None, 32, 32, 64, 64, 64]
    assert [row["best"] for row in read_csv(run_dir / "eval.csv")] == ["1", "1", "1", "1", "0", "0"]
    assert {row["mine"] for row in read_csv(run_dir / "eval.csv")} == {"7.5"}
    best, then = read_model(run_dir / "best.pt"), read_model(run_dir / "checkpoints/000000000064.pt")
    assert best["step"] == 64
    assert all(torch.equal(value, then["agent"][name]) for name, value in best["agent"].items())
