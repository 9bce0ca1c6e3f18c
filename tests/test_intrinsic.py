"""Intrinsic rewards: what they are, what is learnt from them, and how they join the task's."""

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium.wrappers import TransformReward
from torch import nn

import impala
import ppg
import ppo
from common import intrinsic
from common.checkpoint import load_weights
from common.learning import RewardNormalizer
from helpers import ALL, PPO_AND_PPG, make_envs, parameters
from test_checkpoint import make_args, same
from test_losses import ACTION_SPACES, VECTOR

FRAMES = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
TINY = gym.spaces.Box(0, 255, (7, 7, 3), np.uint8)  # MiniGrid's view
T, N = 6, 4
KINDS = pytest.mark.parametrize("kind", ["rnd", "icm"])


def random_rollout(space=VECTOR, script=ppo):
    """A rollout and the observations after it."""
    frames = space.dtype == np.uint8
    obs = torch.randint(0, 256, (T + 1, N, *space.shape)) if frames else torch.randn(T + 1, N, *space.shape)
    obs, actions = obs.to(torch.uint8 if frames else torch.float32), torch.randint(0, 4, (T, N))
    logprobs, values, rewards, cut = torch.randn(4, T, N)
    return script.Rollout(obs[:-1], actions, logprobs, values, rewards, (torch.rand(T, N) < 0.3).float(), cut), obs[-1]


def envs_of(space=VECTOR, action_space=ACTION_SPACES["discrete"]):
    return SimpleNamespace(single_observation_space=space, single_action_space=action_space)


def make(kind, space=VECTOR, script=ppo, epochs=3, **settings):
    torch.manual_seed(0)
    args = script.Args(num_envs=N, num_steps=T, num_minibatches=2, intrinsic_reward=kind, **settings)
    return intrinsic.Intrinsic(args, envs_of(space), script.compute_gae, epochs, torch.device("cpu"))


def explored(made, rollout, last_obs):
    """The rollout with intrinsic rewards and values, in which no episode ends, and the values after it."""
    found, zeros = [], torch.zeros(T, N)
    made.compute_gae = lambda *args: found.extend(args) or zeros
    made(rollout, last_obs, zeros)
    endless, last_value, *_ = found
    return endless._replace(dones=zeros, truncation_values=zeros), last_value


def test_running_moments_are_those_of_all_observations():
    x = torch.randn(50, 3) * torch.tensor([1.0, 5.0, 0.0]) + torch.tensor([0.0, -7.0, 2.0])
    moments = intrinsic.RunningMoments((3,))
    for chunk in x.split(13):
        moments.update(chunk)
    var, mean = torch.var_mean(x.double(), 0, correction=0)
    np.testing.assert_allclose(moments.mean, mean, atol=1e-4)
    np.testing.assert_allclose(moments.var, var, atol=1e-4)
    np.testing.assert_allclose(moments(x)[:, :2], ((x - mean) / var.sqrt())[:, :2], atol=1e-3)
    assert moments(torch.tensor([[100.0, -7.0, 2.0]]))[0, 0] == 5  # standard deviations
    assert intrinsic.RunningMoments((84, 80, 4))(torch.zeros(5, 84, 80, 4)).shape == (5, 4, 84, 80)  # channels first


def test_rnd_rewards_what_it_cannot_predict():
    """In the next observation alone."""
    model = intrinsic.RND(envs_of())
    obs, next_obs = torch.randn(2, 64, 3)
    x = model.moments(next_obs)
    expected = ((model.predictor(x) - model.target(x)) ** 2).sum(1) / 2
    torch.testing.assert_close(model(obs, None, next_obs, torch.ones(64))[0], expected)


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_icm(name):
    """Rewards and losses; only actions within an episode count."""
    torch.manual_seed(0)
    space = ACTION_SPACES[name]
    model = intrinsic.ICM(envs_of(VECTOR, space))
    obs, next_obs = torch.randn(2, 8, 3)
    space.seed(0)
    actions = torch.as_tensor(np.stack([space.sample() for _ in range(8)]))
    if name == "discrete":
        inputs = F.one_hot(actions, 4).float()
    elif name == "multibinary":
        inputs = actions = actions.float()
    else:  # the environment gets them clipped
        actions = 3 * actions
        inputs = actions.clamp(-1, 1)
        pendulum = make_envs("Pendulum-v1", 1, seed=0)
        high = intrinsic.ICM(pendulum).high
        assert high == 2
        high.fill_(9)  # as a resume may
        assert pendulum.single_action_space.high == 2
    within = torch.tensor([1.0, 1, 0, 1, 1, 0, 1, 1])
    now, then = (model.encoder(model.moments(x)) for x in (obs, next_obs))
    errors = ((model.forward_model(torch.cat([now, inputs], 1)) - then) ** 2).sum(1) / 2
    told = model.inverse_model(torch.cat([now, then], 1))
    losses = {"discrete": F.cross_entropy, "multibinary": F.binary_cross_entropy_with_logits, "box": F.mse_loss}
    inverse = losses[name](told, inputs, reduction="none").view(8, -1).sum(1)
    rewards, loss, metrics = model(obs, actions, next_obs, within)
    torch.testing.assert_close(rewards, errors * within)
    forward, inverse = (each[within.bool()].mean() for each in (errors, inverse))
    torch.testing.assert_close(loss, 0.2 * forward + 0.8 * inverse)
    torch.testing.assert_close(metrics, {"losses/icm_forward_loss": forward, "losses/icm_inverse_loss": inverse})


@KINDS
@pytest.mark.parametrize("space", [VECTOR, FRAMES, TINY], ids=["vector", "frames", "tiny"])
def test_rewards_are_of_each_step_and_go_on_across_episodes(kind, space):
    made = make(kind, space, epochs=1, learning_rate=0.0)
    rollout, last_obs = random_rollout(space)
    novelty, last_value = explored(made, rollout, last_obs)
    next_obs = torch.cat([rollout.obs, last_obs[None]])[1:]
    with torch.no_grad():
        steps = zip(rollout.obs, rollout.actions, next_obs, 1 - rollout.dones, strict=True)
        raw = torch.stack([made.model(*step)[0] for step in steps])
        torch.testing.assert_close(last_value, made.value(last_obs))
        torch.testing.assert_close(novelty.values[2], made.value(rollout.obs[2]))
    scaled = RewardNormalizer(N, 0.99, clip=math.inf)(raw.numpy(), np.zeros((T, N)))  # no episode ends
    np.testing.assert_allclose(novelty.rewards, scaled, rtol=1e-4)
    moments = intrinsic.RunningMoments(space.shape)
    moments.update(next_obs.flatten(0, 1))
    torch.testing.assert_close(made.model.moments.mean, moments.mean)


@KINDS
@PPO_AND_PPG
def test_advantages_are_joined(kind, script):
    """A_E + coef A_I for the policy; the values' targets are of the task alone. In pretraining both are of A_I. The
    intrinsic values' targets are the intrinsic returns."""
    rollout, last_obs = random_rollout(script=script)
    advantages = script.compute_gae(rollout, torch.randn(N), 0.999, 0.95)
    found, learnt = {}, []
    for pretraining in (False, True):
        made = make(kind, script=script, intrinsic_coef=3.0, intrinsic_gamma=0.8, pretraining=pretraining)
        twin = make(kind, script=script)
        twin.normalizer.gamma = 0.8
        novelty, last_value = explored(twin, rollout, last_obs)
        intrinsic_advantages = script.compute_gae(novelty, last_value, 0.8, 0.95)
        made.learn = lambda transitions, returns: learnt.append(returns) or {}
        *found[pretraining], metrics = made(rollout, last_obs, advantages)
        torch.testing.assert_close(learnt.pop(), intrinsic_advantages + novelty.values)
        torch.testing.assert_close(metrics["charts/intrinsic_reward"], novelty.rewards.mean())
    torch.testing.assert_close(found[False][0], advantages + 3 * intrinsic_advantages)
    torch.testing.assert_close(found[False][1], advantages + rollout.values)
    torch.testing.assert_close(found[True][0], 3 * intrinsic_advantages)
    torch.testing.assert_close(found[True][1], intrinsic_advantages + novelty.values)


@KINDS
def test_model_and_value_learn_from_the_rollout(kind):
    """What it is shown again and again is new no more: `epochs` x minibatches of steps a call."""
    made, returns = make(kind, learning_rate=3e-3), torch.randn(T, N)
    rollout, last_obs = random_rollout()
    next_obs = torch.cat([rollout.obs, last_obs[None]])[1:]
    transitions = [x.flatten(0, 1) for x in (rollout.obs, rollout.actions, next_obs, 1 - rollout.dones)]
    history = [made.learn(transitions, returns) for _ in range(60)]
    for tag in ("rnd_loss",) if kind == "rnd" else ("icm_forward_loss", "icm_inverse_loss"):
        assert history[-1][f"losses/{tag}"] < 0.3 * history[0][f"losses/{tag}"]
    assert history[-1]["losses/intrinsic_value_loss"] < 0.1 * history[0]["losses/intrinsic_value_loss"]
    assert {int(state["step"]) for state in made.optimizer.state.values()} == {60 * 3 * 2}
    learning = [parameter for parameter in made.parameters() if parameter.requires_grad]
    assert len(made.optimizer.state) == len(learning)
    assert not any(parameter.requires_grad for parameter in getattr(made.model, "target", nn.Identity()).parameters())


gym.register("TestOtherRewards-v0", lambda **_: TransformReward(gym.make("CartPole-v1"), lambda r: -7 * r + 1))


@PPO_AND_PPG
def test_whole_runs(script, tmp_path):
    """Without weight, novelty changes nothing, as the agent draws the same numbers. Pretraining does not see the task:
    with other rewards the agent is the same."""

    def learnt(**settings):
        return parameters(script.main(make_args(script, tmp_path, total_timesteps=96, **settings)))

    for kind in ("rnd", "icm"):
        assert same(learnt(), learnt(intrinsic_reward=kind, intrinsic_coef=0.0))
    for pretraining in (True, False):
        settings = {"intrinsic_reward": "rnd", "pretraining": pretraining}
        assert same(learnt(**settings), learnt(**settings, env_id="TestOtherRewards-v0")) == pretraining


@ALL
def test_fine_tuning_keeps_or_resets_the_heads(script, tmp_path, capfd):
    settings = {"learning_rate": 1e-2, "total_timesteps": 64}
    if script is not impala:
        settings |= {"intrinsic_reward": "rnd", "pretraining": True}
    source = script.main(make_args(script, tmp_path / "pretrained", **settings))
    weights = parameters(source)
    frozen = {"learning_rate": 0.0, "total_timesteps": 32} | ({"aux_learning_rate": 0.0} if script is ppg else {})
    fresh = parameters(script.main(make_args(script, tmp_path / "fresh", **frozen)))
    heads = {name for name in weights if "_head." in name}
    policy = {name for name in heads if name.startswith("policy_head.")}
    for choice, anew in (("keep", set()), ("policy", heads - policy), ("reset", heads)):
        args = make_args(script, tmp_path / choice, **frozen, init_from=str(source), init_heads=choice)
        found = parameters(script.main(args))
        for name in weights:
            assert torch.equal(found[name], (fresh if name in anew else weights)[name]), (choice, name)

    space = gym.spaces.Box(-1, 1, (4,), np.float32)
    other = script.Agent(space, gym.spaces.Discrete(9), script.Args())  # another number of actions
    load_weights(other, str(source))
    for name in heads | {"encoder.0.weight"}:
        assert torch.equal(other.state_dict()[name], weights[name]) == (name not in policy), name
    note = f"note: --init-from {source}: policy_head.linear.weight, policy_head.linear.bias start anew\n"
    assert capfd.readouterr().err.endswith(note)
