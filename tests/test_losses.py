"""Each loss against a case worked out by hand, and the step that an update takes against the gradient of the sum."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import estimates

import ppg
import ppo

VECTOR = gym.spaces.Box(-1, 1, (3,), np.float32)
ACTION_SPACES = {
    "discrete": gym.spaces.Discrete(4),
    "box": gym.spaces.Box(-1, 1, (2,), np.float32),
    "multibinary": gym.spaces.MultiBinary(3),
}


def test_clipped_policy_loss():
    # ratio 1.5, advantage  1: min( 1.5,  1.2) =  1.2, clipped
    # ratio 0.5, advantage -1: min(-0.5, -0.8) = -0.8, clipped
    # ratio 1.1, advantage  2: min( 2.2,  2.2) =  2.2
    # ratio 1.5, advantage -1: min(-1.5, -1.2) = -1.5, not clipped: the step back into the range is wanted
    logratio = torch.tensor([1.5, 0.5, 1.1, 1.5]).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 2.0, -1.0])
    old = torch.tensor([-1.0, -2.0, -0.5, -1.0])
    for loss, metrics in (
        ppo.policy_loss(old + logratio, old, advantages, 0.2),
        ppg.policy_loss(old + logratio, old, advantages, 0.2, kl_penalty=None),
    ):
        assert loss.item() == pytest.approx(-(1.2 - 0.8 + 2.2 - 1.5) / 4)
        assert metrics["losses/clipfrac"].item() == pytest.approx(3 / 4)
        k1 = -(2 * math.log(1.5) + math.log(0.5) + math.log(1.1)) / 4
        assert metrics["losses/old_approx_kl"].item() == pytest.approx(k1)
        assert metrics["losses/approx_kl"].item() == pytest.approx((0.5 - 0.5 + 0.1 + 0.5) / 4 + k1)
        (gradient,) = torch.autograd.grad(loss, logratio)
        # d(-ratio * advantage / 4) / d(logratio) = -ratio * advantage / 4, and 0 where clipped
        torch.testing.assert_close(gradient, torch.tensor([0, 0, -2.2 / 4, 1.5 / 4]))


def test_policy_loss_with_kl_penalty():
    logratio, advantages = torch.tensor([1.5, 0.5]).log(), torch.tensor([1.0, -1.0])
    loss, _ = ppg.policy_loss(logratio, torch.zeros(2), advantages, 0.2, kl_penalty=3.0)
    penalty = 3.0 * 0.5 * (math.log(1.5) ** 2 + math.log(0.5) ** 2) / 2
    assert loss.item() == pytest.approx(-(1.5 - 0.5) / 2 + penalty, abs=1e-6)


@pytest.mark.parametrize("script", [ppo, ppg])
def test_value_loss(script):
    values, old, returns = torch.tensor([1.0, 1.0, 0.1]), torch.tensor([0.0, 0.0, 0.0]), torch.tensor([2.0, 0.0, 1.0])
    # plain: half the mean of 1, 1 and .81
    assert script.value_loss(values, old, returns, None).item() == pytest.approx(0.5 * 2.81 / 3)
    # clipped to .2 of the old value: errors max(1, 1.8^2), max(1, .2^2) and, within the range, .81
    assert script.value_loss(values, old, returns, 0.2).item() == pytest.approx(0.5 * (3.24 + 1 + 0.81) / 3)


def test_auxiliary_loss():
    space = gym.spaces.Discrete(2)
    new, old = (ppg.action_dist(space, torch.tensor([p, 1 - p]).log()[None]) for p in (0.25, 0.5))
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)  # old || new
    values, aux_values, returns = torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor([2.0])
    loss, metrics = ppg.auxiliary_loss(new, old, values, aux_values, returns, beta_clone=2.0)
    assert metrics["losses/aux/real_value_loss"].item() == pytest.approx(0.5)
    assert metrics["losses/aux/aux_value_loss"].item() == pytest.approx(2.0)
    assert metrics["losses/aux/kl_loss"].item() == pytest.approx(kl)
    assert loss.item() == pytest.approx(0.5 + 2.0 + 2.0 * kl)


def test_distributions_against_closed_forms():
    generator = torch.Generator().manual_seed(0)

    def params(size):
        return torch.randn(2, 6, size, generator=generator, dtype=torch.float64)

    old, new = params(4)
    space = ACTION_SPACES["discrete"]
    p, q = old.softmax(-1), new.softmax(-1)
    dist, other = ppo.action_dist(space, old), ppo.action_dist(space, new)
    torch.testing.assert_close(ppg.policy_kl(dist, other), (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(dist.entropy(), -(p * p.log()).sum(-1))
    torch.testing.assert_close(dist.log_prob(torch.full((6,), 2)), p[:, 2].log())

    old, new = params(3)
    space = ACTION_SPACES["multibinary"]
    p, q = old.sigmoid(), new.sigmoid()
    dist, other = ppo.action_dist(space, old), ppo.action_dist(space, new)
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(ppg.policy_kl(dist, other), kl.sum(-1))
    torch.testing.assert_close(dist.entropy(), -(p * p.log() + (1 - p) * (1 - p).log()).sum(-1))
    torch.testing.assert_close(
        dist.log_prob(torch.tensor([1.0, 0, 1]).double().expand(6, 3)),
        p[:, 0].log() + (1 - p[:, 1]).log() + p[:, 2].log(),
    )

    old, new = params(4)
    space = ACTION_SPACES["box"]
    (m0, s0), (m1, s1) = ((x[:, :2], x[:, 2:].exp()) for x in (old, new))
    dist, other = ppo.action_dist(space, old), ppo.action_dist(space, new)
    kl = (s1 / s0).log() + (s0**2 + (m0 - m1) ** 2) / (2 * s1**2) - 0.5
    torch.testing.assert_close(ppg.policy_kl(dist, other), kl.sum(-1))
    torch.testing.assert_close(dist.entropy(), (s0.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1))
    log_prob = -0.5 * (m0 / s0) ** 2 - s0.log() - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(dist.log_prob(torch.zeros(6, 2).double()), log_prob.sum(-1))


def test_the_kl_of_bits_that_are_almost_certain_is_finite():
    """Where a probability of 1 - 1e-8 rounds to 1, PyTorch's own is infinite."""
    space = ACTION_SPACES["multibinary"]
    old = torch.tensor([[16.0, 12.0, -30.0], [90.0, -90.0, 0.0]])
    new = torch.tensor([[17.0, 17.5, 25.0], [-90.0, 90.0, 0.0]], requires_grad=True)
    kl = ppg.policy_kl(ppg.action_dist(space, old), ppg.action_dist(space, new))
    p, q = old.double(), new.detach().double()
    expected = p.sigmoid() * (q.neg().exp().log1p() - p.neg().exp().log1p())
    expected += p.neg().sigmoid() * (q.exp().log1p() - p.exp().log1p())
    torch.testing.assert_close(kl.double(), expected.sum(-1), rtol=1e-5, atol=1e-9)
    kl.sum().backward()
    torch.testing.assert_close(new.grad.double(), q.sigmoid() - p.sigmoid(), rtol=1e-5, atol=1e-7)


def random_rollout(script, space: gym.Space, agent, num_steps: int, num_envs: int):
    """A rollout of random observations and of actions from the agent itself, with rewards and values that differ."""
    rollout = script.new_rollout(num_steps, num_envs, VECTOR, space, torch.device("cpu"))
    rollout.obs.normal_()
    rollout.rewards.normal_()
    with torch.no_grad():
        action, logprobs, _, values = agent.get_action_and_value(rollout.obs.flatten(0, 1))
    return rollout._replace(
        actions=action.view_as(rollout.actions),
        # as of an older policy: some ratios lie outside the clipping range
        logprobs=logprobs.view_as(rollout.logprobs) + 0.3 * torch.randn(num_steps, num_envs),
        values=values.view_as(rollout.values),
    )


@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
@pytest.mark.parametrize("script", [ppo, ppg])
def test_update_follows_the_gradient_of_the_weighted_sum(script, space):
    """One epoch of one minibatch with plain gradient descent: the parameters move by minus the gradient of the sum."""
    torch.manual_seed(0)
    args = script.Args(num_envs=4, num_steps=8, num_minibatches=1, norm_adv="batch", max_grad_norm=None)
    args.ent_coef, args.vf_coef, args.clip_coef_vf = 0.03, 0.7, 0.2
    if script is ppo:
        args.update_epochs = 1
    agent = script.Agent(VECTOR, space, args)
    rollout = random_rollout(script, space, agent, 8, 4)
    advantages = torch.randn(8, 4)

    obs, actions, old_logprobs, old_values = (x.flatten(0, 1) for x in rollout[:4])
    returns = (advantages + rollout.values).flatten()
    normalized = ((advantages - advantages.mean()) / (advantages.std() + 1e-8)).flatten()
    _, logprobs, entropy, values = agent.get_action_and_value(obs, actions)
    ratio = (logprobs - old_logprobs).exp()
    surrogate = torch.minimum(ratio * normalized, ratio.clip(0.8, 1.2) * normalized).mean()
    clipped_values = old_values + (values - old_values).clip(-0.2, 0.2)
    value_error = torch.maximum((values - returns) ** 2, (clipped_values - returns) ** 2).mean() / 2
    (-surrogate - 0.03 * entropy.mean() + 0.7 * value_error).backward()
    expected = {
        name: parameter.detach() - (0.1 * parameter.grad if parameter.grad is not None else 0)
        for name, parameter in agent.named_parameters()
    }

    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    optimizers = [optimizer] if script is ppo else [optimizer, optimizer]
    script.update(agent, *optimizers, rollout, *estimates(rollout, advantages), args)
    for name, parameter in agent.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], msg=name)


@pytest.mark.parametrize("script", [ppo, ppg])
def test_advantages_are_normalised_over_the_minibatch_or_the_batch(script, monkeypatch):
    seen = []

    def spy(logprobs, old_logprobs, advantages, *rest):
        seen.append(advantages)
        return policy_loss(logprobs, old_logprobs, advantages, *rest)

    policy_loss = script.policy_loss
    monkeypatch.setattr(script, "policy_loss", spy)
    space = ACTION_SPACES["discrete"]
    for norm_adv in ("minibatch", "batch", "none"):
        torch.manual_seed(0)
        args = script.Args(num_envs=4, num_steps=8, num_minibatches=2, norm_adv=norm_adv)
        agent = script.Agent(VECTOR, space, args)
        optimizer = torch.optim.Adam(agent.parameters())
        optimizers = [optimizer] if script is ppo else [optimizer, optimizer]
        advantages = 5 + 2 * torch.randn(8, 4)
        seen.clear()
        rollout = random_rollout(script, space, agent, 8, 4)
        script.update(agent, *optimizers, rollout, *estimates(rollout, advantages), args)
        first, epoch = seen[0], torch.cat(seen[:2])
        assert len(first) == 16
        if norm_adv == "minibatch":
            assert (first.mean().item(), first.std().item()) == pytest.approx((0, 1), abs=1e-5)
        elif norm_adv == "batch":
            assert (epoch.mean().item(), epoch.std().item()) == pytest.approx((0, 1), abs=1e-5)
            assert abs(first.mean().item()) > 1e-3
        else:
            assert sorted(epoch.tolist()) == sorted(advantages.flatten().tolist())


def test_ppo_visits_every_step_once_an_epoch(monkeypatch):
    torch.manual_seed(0)
    space = ACTION_SPACES["discrete"]
    args = ppo.Args(num_envs=4, num_steps=8, num_minibatches=4, update_epochs=3)
    agent = ppo.Agent(VECTOR, space, args)
    rollout = random_rollout(ppo, space, agent, 8, 4)
    seen = []
    forward = agent.get_action_and_value
    monkeypatch.setattr(agent, "get_action_and_value", lambda obs, action: seen.append(obs) or forward(obs, action))
    ppo.update(agent, torch.optim.Adam(agent.parameters()), rollout, *estimates(rollout, torch.randn(8, 4)), args)
    everything = sorted(rollout.obs.flatten(0, 1).tolist())
    for epoch in range(3):
        assert sorted(torch.cat(seen[4 * epoch : 4 * epoch + 4]).tolist()) == everything
    assert len(seen) == 12


def test_gradients_are_clipped_to_their_norm():
    layer = torch.nn.Linear(3, 2)
    for max_norm, factor in ((None, 1.0), (2.0, 0.4), (7.0, 1.0)):
        layer.weight.grad, layer.bias.grad = torch.zeros(2, 3), torch.tensor([3.0, 4.0])
        assert ppo.clip_gradient(layer, max_norm) == 5
        torch.testing.assert_close(layer.bias.grad, factor * torch.tensor([3.0, 4.0]))


def test_target_kl_stops_the_epochs():
    torch.manual_seed(0)
    space = ACTION_SPACES["discrete"]
    steps = {}
    for target_kl in (None, 1e-9):
        args = ppo.Args(num_envs=4, num_steps=8, num_minibatches=2, update_epochs=5, target_kl=target_kl)
        agent = ppo.Agent(VECTOR, space, args)
        optimizer = torch.optim.Adam(agent.parameters(), lr=0.01)
        rollout = random_rollout(ppo, space, agent, 8, 4)
        ppo.update(agent, optimizer, rollout, *estimates(rollout, torch.randn(8, 4)), args)
        steps[target_kl] = int(optimizer.state[agent.value_head.weight]["step"])
    assert steps == {None: 10, 1e-9: 2}


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert ppo.explained_variance(returns, returns).item() == 1
    assert ppo.explained_variance(torch.full((4,), 7.0), returns).item() == pytest.approx(0)
    assert ppo.explained_variance(-returns, returns).item() == pytest.approx(-3)
