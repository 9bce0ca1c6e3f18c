"""Evaluation on held-out levels."""

import math
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Independent, Normal, Poisson

import impala
import ppo
from common.envs import make_envs
from common.evaluation import Evaluator, HeldOut, draw, share_episodes
from common.procgen_env import PROCGEN_GAMES
from common.scores import RETURN_RANGES, normalized
from helpers import ALL, deterministic_files, level_seeds, parameters, read_csv
from test_bad_input import check_rejected
from test_checkpoint import make_args
from test_run import read_scalars

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("small_networks")


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


def held_out(env_id, num_envs, seed=7, **settings):
    return HeldOut(make_envs(env_id, num_envs, seed=seed, **settings), seed, CPU)


@pytest.mark.quick
def test_every_environment_plays_its_first_episodes():
    """Episodes of 1 step and of 20: the first that end would be the short ones."""
    returns, lengths = held_out("TestLuck-v0", 8).play(Player(Categorical(torch.ones(2))), 3, greedy=False)
    expected = []
    for number in range(8):
        env = gym.make("TestLuck-v0").unwrapped
        expected.append([])
        for seed in (7 + number, None, None):
            env.reset(seed=seed)
            expected[-1].append(env.length)
    assert returns.tolist() == lengths.tolist() == expected  # the reward is 1 a step
    assert set(returns.flatten()) == {1, 20}


def test_evaluations_change_nothing_in_the_agent():
    """A copy plays, in evaluation mode; a part of the agent that was in this mode stays in it, and no other."""
    modes = []

    class Normal(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.frozen = torch.nn.BatchNorm1d(1), torch.nn.Dropout().eval()

        def get_action_dist(self, obs, state=None):
            modes.append((self.norm.training, self.frozen.training))
            return Categorical(logits=self.norm(obs) * torch.ones(2)), None

    agent = Normal()
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    held_out("TestCount-v0", 4).play(agent, 1, greedy=True)
    assert all(torch.equal(value, before[name]) for name, value in agent.state_dict().items())
    assert [module.training for module in agent.modules()] == [True, True, False]
    assert set(modes) == {(False, False)}


def test_greedy_and_stochastic_actions():
    """TestBits pays the share of bits guessed; TestArm the number of the action."""
    player = Player(Categorical(torch.tensor([0.4, 0.6])))
    greedy, _ = held_out("TestArm-v0", 50).play(player, 4, greedy=True)
    drawn, _ = held_out("TestArm-v0", 50).play(player, 4, greedy=False)
    assert (greedy == 10).all()
    assert drawn.mean() == pytest.approx(6, abs=0.5)  # of 2000 draws; the standard error is .11
    halves = Player(Independent(Bernoulli(torch.full((4,), 0.5)), 1))  # whose mode is NaN
    with np.errstate(invalid="raise"):
        held_out("TestBits-v0", 4).play(halves, 1, greedy=True)


@pytest.mark.quick
def test_a_state_starts_at_zero_with_each_episode():
    player = Player(Categorical(torch.ones(2)))
    _, lengths = held_out("TestLuck-v0", 6).play(player, 3, greedy=False)
    states = torch.stack(player.states, dim=1)  # [N, steps]
    for env in range(6):
        expected = [step for length in lengths[env] for step in range(int(length))]
        assert states[env][: len(expected)].tolist() == expected


@pytest.mark.parametrize("env_id", ["bossfight", "CartPole-v1"])
def test_evaluations_repeat_and_draw_no_random_numbers_of_the_run(env_id):
    """Of Procgen's environments, too, which cannot be reset; and while actors draw."""
    place, stop = held_out(env_id, 4), threading.Event()
    agent = ppo.Agent(place.envs.single_observation_space, place.envs.single_action_space, ppo.Args(precision="fp32"))
    before = torch.get_rng_state()
    first = place.play(agent, 2, greedy=False)
    assert torch.equal(torch.get_rng_state(), before)

    def act():
        while not stop.is_set():
            Categorical(torch.ones(2)).sample()

    actor = threading.Thread(target=act, daemon=True)
    actor.start()
    again = place.play(agent, 2, greedy=False)
    stop.set()
    actor.join()
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(np.unique(first[1])) > 4  # other levels, other episodes
    place.envs.close()


@pytest.mark.parametrize(
    "dist",
    [
        Categorical(torch.tensor([0.1, 0.2, 0.7])),
        Independent(Bernoulli(torch.tensor([0.2, 0.9])), 1),
        Independent(Normal(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 2.0])), 1),
    ],
    ids=lambda dist: type(getattr(dist, "base_dist", dist)).__name__,
)
def test_draws_are_of_the_distribution(dist):
    """Against PyTorch's own: shape, type, and mean and spread of 20,000 draws."""
    many = dist.expand((20_000,))
    drawn, theirs = draw(many, torch.Generator().manual_seed(1)), many.sample()
    assert (drawn.shape, drawn.dtype) == (theirs.shape, theirs.dtype)
    for mine, other in ((drawn.float().mean(0), theirs.float().mean(0)), (drawn.float().std(0), theirs.float().std(0))):
        assert torch.allclose(mine, other, atol=0.05)


def test_draws_of_what_is_not_known():
    with pytest.raises(TypeError, match=r"Poisson.*add one to common/evaluation\.py"):
        draw(Poisson(1.0), torch.Generator())


def test_levels_are_those_asked_for():
    args = make_args(
        ppo, ".", env_id="coinrun", num_levels=5, eval_interval=1, eval_num_levels=10, eval_start_level=5,
        eval_episodes=64, num_envs=64,
    )  # fmt: skip
    evaluator = Evaluator(args, None, CPU)
    seeds = set(level_seeds(evaluator.held_out.envs))
    assert seeds == set(range(5, 15))
    evaluator.close()
    args.eval_num_levels = args.eval_start_level = 0  # the full distribution, drawn otherwise than in training
    evaluator = Evaluator(args, None, CPU)
    training = make_envs("coinrun", 64, seed=args.seed)
    levels = [level_seeds(envs) for envs in (evaluator.held_out.envs, training)]
    assert len(set(levels[0] + levels[1])) == 128
    evaluator.close()
    training.close()


@pytest.mark.parametrize(
    ("training", "chosen", "told"),
    [((0, 200), (0, 100), True), ((0, 200), (199, 9), True), ((50, 10), (0, 51), True), ((0, 200), (200, 9), False),
     ((50, 10), (0, 50), False), ((0, 200), (0, 0), False), ((0, 0), (0, 9), False)],
)  # fmt: skip
def test_levels_of_training_are_told_from_held_out_ones(training, chosen, told, capsys):
    """Each a first level and a number; 0 is all there are."""
    args = make_args(ppo, ".", env_id="coinrun", eval_interval=1, eval_episodes=1)
    (args.start_level, args.num_levels), (args.eval_start_level, args.eval_num_levels) = training, chosen
    Evaluator(args, None, CPU).close()
    assert ("these are not held out" in capsys.readouterr().err) == told


def test_a_mode_of_one_level_has_none_held_out(capsys):
    settings = {"env_id": "coinrun", "distribution_mode": "exploration", "eval_interval": 1, "eval_episodes": 1}
    Evaluator(make_args(ppo, ".", **settings), None, CPU).close()
    assert "these are not held out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env_id", "num_envs", "episodes", "expected"),
    [("CartPole-v1", 8, 64, (8, 8)), ("CartPole-v1", 8, 3, (3, 1)), ("CartPole-v1", 8, 9, (8, 2)),
     ("coinrun,maze,heist", 6, 4, (3, 2)), ("coinrun,maze,heist", 6, 1, (3, 1))],
)  # fmt: skip
def test_environments_and_their_quota(env_id, num_envs, episodes, expected):
    assert share_episodes(episodes, num_envs, env_id.split(",")) == expected


@ALL
def test_an_evaluated_run_is_the_same_run(script, tmp_path):
    """But for the evaluations, which come every 100 steps, at the end of the iteration, and at the run's end."""
    plain = script.main(make_args(script, tmp_path / "plain"))
    path = script.main(make_args(script, tmp_path / "evaluated", eval_interval=100, eval_episodes=6))
    assert all(torch.equal(a, b) for a, b in zip(parameters(plain).values(), parameters(path).values(), strict=True))
    evaluations = read_csv(path / "eval.csv")
    assert [row for row in deterministic_files(path) if "policy" not in row] == deterministic_files(plain)
    steps = [112, 208, 304, 384] if script is impala else [128, 224, 320, 384]  # 16 or 32 steps at a time
    assert [(int(row["step"]), row["policy"]) for row in evaluations] == [
        (step, policy) for step in steps for policy in ("stochastic", "greedy")
    ]
    assert {row["episodes"] for row in evaluations} == {"8"}  # 6, in each of 4 environments as many
    scalars, others = read_scalars(path), read_scalars(plain)
    assert [step for step, _ in scalars["eval/episodic_return"]] == steps
    assert "eval/normalized_return" not in scalars  # there is none of CartPole's
    assert {tag for tag in scalars if not tag.startswith("eval/")} == set(others)


def test_what_is_logged_from_known_returns(tmp_path, monkeypatch):
    """Environments 0 and 2 play starpilot, 1 and 3 coinrun."""
    returns = {False: np.array([[10.0, 20], [5, 10], [30, 40], [0, 5]]), True: np.full((4, 2), 8.0)}
    monkeypatch.setattr(HeldOut, "play", lambda self, agent, quota, greedy, _: (returns[greedy], returns[greedy] + 1))
    args = make_args(ppo, tmp_path, env_id="starpilot,coinrun", eval_interval=384, eval_episodes=8, num_steps=96)
    path = ppo.main(args)
    rows = read_csv(path / "eval.csv")
    assert [(row["policy"], row["env_id"], row["episodes"], row["episodic_return"]) for row in rows] == [
        ("stochastic", "starpilot", "4", "25"), ("stochastic", "coinrun", "4", "5"),
        ("greedy", "starpilot", "4", "8"), ("greedy", "coinrun", "4", "8"),
    ]  # fmt: skip
    assert float(rows[0]["standard_error"]) == pytest.approx((500 / 3) ** 0.5 / 2, abs=1e-4)
    assert rows[0]["episodic_length"] == "26"
    assert float(rows[0]["normalized_return"]) == pytest.approx(22.5 / 61.5, abs=1e-5)
    scalars = {tag: points[0][1] for tag, points in read_scalars(path).items() if tag.startswith("eval/")}
    assert scalars == pytest.approx(
        {
            "eval/episodic_return": 15, "eval/episodic_return/starpilot": 25, "eval/episodic_return/coinrun": 5,
            "eval/episodic_length": 16, "eval/normalized_return": 22.5 / 61.5 / 2,
            "eval/greedy/episodic_return": 8, "eval/greedy/episodic_return/starpilot": 8,
            "eval/greedy/episodic_return/coinrun": 8, "eval/greedy/episodic_length": 9,
            "eval/greedy/normalized_return": (5.5 / 61.5 + 0.6) / 2,
        },
        abs=1e-4,
    )  # fmt: skip


def test_train_test_gap(tmp_path, monkeypatch):
    monkeypatch.setattr(HeldOut, "play", lambda *args: np.full((2, 4, 1), 7.0))
    path = ppo.main(make_args(ppo, tmp_path, eval_interval=1000))
    recent = float(read_csv(path / "progress.csv")[-1]["last_100_return"])
    assert read_scalars(path)["eval/train_test_gap"] == [(384, pytest.approx(recent - 7, abs=1e-3))]


@ALL
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eval_interval": 0, "eval_num_levels": 9}, ["--eval-num-levels", "add --eval-interval"]),
        ({"eval_start_level": 200}, ["--eval-start-level", "--eval-num-levels"]),
        ({"env_id": "CartPole-v1", "eval_num_levels": 3}, ["--eval-num-levels", "CartPole-v1"]),
    ],
)
def test_bad_settings(script, settings, words, tmp_path):
    check_rejected(script, tmp_path, {"env_id": "maze", "eval_interval": 64} | settings, *words)


def test_normalized_returns():
    assert all(RETURN_RANGES[mode].keys() == set(PROCGEN_GAMES) for mode in ("easy", "hard"))
    assert all(least < best for ranges in RETURN_RANGES.values() for least, best in ranges.values())
    assert normalized(2.5, "starpilot", "easy") == 0
    assert normalized(35.0, "starpilot", "hard") == 1
    assert normalized(15.45, "fruitbot", "easy") == pytest.approx(0.5)
    assert math.isnan(normalized(1.0, "CartPole-v1", "easy"))
    assert math.isnan(normalized(1.0, "maze", "memory"))
