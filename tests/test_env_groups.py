"""Groups of environments that take turns, --num-env-groups."""

import numpy as np
import pytest
import torch

import ppo
from common.envs import make_envs
from common.reward_scale import RewardNormalizer
from helpers import PPO_AND_PPG, Silent, level_seeds
from test_envs import read_video


@pytest.mark.parametrize(("env_id", "num_actions"), [("starpilot", 15), ("CartPole-v1", 2)])
def test_a_step_in_two_halves_is_a_step(env_id, num_actions):
    whole, halves = (make_envs(env_id, 4, seed=3, num_threads=number) for number in (0, 2))  # of Procgen's
    assert np.array_equal(whole.reset(seed=3)[0], halves.reset(seed=3)[0])
    for actions in np.random.default_rng(0).integers(0, num_actions, (100, 4)):
        expected = whole.step(actions)
        halves.step_async(actions)
        step = halves.step_wait()
        assert all(np.array_equal(a, b) for a, b in zip(expected[:4], step[:4], strict=True))
        assert np.array_equal(halves.obs, step[0])
    whole.close(), halves.close()


class Oracle:
    """Stands in for an agent: actions and values that depend on each observation alone, and a diary of its calls."""

    def __init__(self, num_actions):
        self.num_actions, self.diary = num_actions, []

    def get_action_and_value(self, obs):
        self.diary.append(f"act {len(obs)}")
        values = obs.flatten(1).double().sum(1)
        return (values * 1000).long() % self.num_actions, values.float(), values.float(), values.float()

    def get_value(self, obs):
        return obs.flatten(1).double().sum(1).float() + 1


def collect(script, envs, obs, num_steps, agent):
    spaces = envs.single_observation_space, envs.single_action_space
    rollout, run = script.new_rollout(num_steps, envs.num_envs, *spaces, torch.device("cpu")), Silent()
    raw = RewardNormalizer(envs.num_envs, 0.9, "none")
    last_obs, step = script.collect(agent, envs, rollout, obs, 1000, raw, run)
    assert step == 1000 + num_steps * envs.num_envs
    return rollout, last_obs, run.finished


@PPO_AND_PPG
@pytest.mark.parametrize(("env_id", "num_actions"), [("bossfight", 15), ("CartPole-v1", 2), ("TestCount-v0", 2)])
def test_two_groups_see_what_one_does(script, env_id, num_actions):
    """From the same starts, 6 environments give the same rollout, episodes and last frames in 1, 2 or 3 groups."""
    one = make_envs(env_id, 6, seed=5)
    start = torch.as_tensor(one.reset(seed=5)[0]).clone()
    states = one.state_dict()
    expected = collect(script, one, start.clone(), 60, Oracle(num_actions))
    one.close()
    assert expected[2], "no episode has ended"
    for num_groups in (2, 3):
        envs = make_envs(env_id, 6, seed=5, num_groups=num_groups)
        envs.reset(seed=5)  # gives each of Gymnasium's the seed that it has in one group
        if envs.restorable:
            envs.load_state_dict(states)
        obs = torch.as_tensor(envs.obs)
        assert torch.equal(obs, start)
        rollout, last_obs, finished = collect(script, envs, obs, 60, Oracle(num_actions))
        assert torch.equal(obs, start)  # the caller's is left as it was
        assert torch.equal(last_obs, torch.as_tensor(envs.obs))
        for name, value in rollout._asdict().items():
            assert torch.equal(value, getattr(expected[0], name)), name
        assert torch.equal(last_obs, expected[1])
        assert finished == expected[2]
        envs.close()


@PPO_AND_PPG
def test_one_group_is_stepped_while_the_policy_acts_for_the_other(script, monkeypatch):
    envs, agent = make_envs("starpilot", 4, seed=0, num_groups=2), Oracle(15)
    for (group, _), name in zip(envs.groups, "AB", strict=True):
        base = group.unwrapped.gym3_env
        act, observe = base.act, base.observe
        monkeypatch.setattr(base, "act", lambda actions, n=name, f=act: agent.diary.append(f"start {n}") or f(actions))
        monkeypatch.setattr(base, "observe", lambda n=name, f=observe: agent.diary.append(f"wait {n}") or f())
    collect(script, envs, torch.as_tensor(envs.reset()[0]), 2, agent)
    envs.close()
    first, turn_a, turn_b = ["wait A", "wait B"], ["act 2", "start A"], ["act 2", "start B"]  # the first is reset's
    assert agent.diary == [*first, *turn_a, *turn_b, "wait A", *turn_a, "wait B", *turn_b, "wait A", "wait B"]


def test_groups_have_other_levels():
    envs = make_envs("starpilot", 6, seed=1, num_groups=3)
    assert len({level for group, _ in envs.groups for level in level_seeds(group)}) == 6
    envs.close()


def test_the_first_environment_of_the_first_group_is_filmed(tmp_path):
    """Once there is a folder for it, to the end of the run."""
    pytest.importorskip("av")
    envs = make_envs("starpilot", 4, seed=0, num_groups=2, capture_video=True)
    _, obs, _ = collect(ppo, envs, torch.as_tensor(envs.reset()[0]), 2, Oracle(15))
    envs.video.folder = tmp_path / "videos"
    collect(ppo, envs, obs, 5, Oracle(15))
    envs.close()
    assert [path.name for path in envs.video.folder.iterdir()] == ["episode-0.mp4"]
    assert len(read_video(tmp_path / "videos" / "episode-0.mp4")) == 5
