"""Losses against cases worked out by hand, distributions, and PPG's auxiliary phase.

What updates learn from them: test_restated.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Independent, Normal, kl_divergence

import ppg
import ppo
from common.device import World
from common.learning import action_dist, policy_kl
from helpers import small_args

pytestmark = pytest.mark.quick
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
    logratio = torch.tensor([1.5, 0.5, 1.1, 1.5]).log()
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


PYTORCHS = {  # the number of a distribution's parameters, and PyTorch's distribution
    "discrete": (4, lambda params: Categorical(logits=params)),
    "box": (4, lambda params: Independent(Normal(params[:, :2], params[:, 2:].exp()), 1)),
    "multibinary": (3, lambda params: Independent(Bernoulli(logits=params), 1)),
}


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_distributions_are_pytorchs(name):
    torch.manual_seed(0)
    space, (size, dist_of) = ACTION_SPACES[name], PYTORCHS[name]
    old, new = torch.randn(2, 6, size, dtype=torch.float64)
    dist, expected = action_dist(space, old), dist_of(old)
    torch.testing.assert_close(policy_kl(dist, action_dist(space, new)), kl_divergence(expected, dist_of(new)))
    torch.testing.assert_close(dist.entropy(), expected.entropy())
    action = expected.sample()
    torch.testing.assert_close(dist.log_prob(action), expected.log_prob(action))


@pytest.mark.parametrize("gap", [80.0, 200.0, 1e4])
def test_the_kl_of_an_action_that_the_new_policy_all_but_excludes_is_finite(gap):
    """Where a new probability is 0 (or 1, of a bit) in float32, PyTorch's own is infinite."""
    space = ACTION_SPACES["discrete"]
    old = torch.tensor([[0.5, 0.0, -1.0, 2.0], [gap, 0.0, 0.0, 0.0]])  # the old policy may be as sure of something
    new = torch.tensor([[gap, 0.0, -1.0, 2.0], [0.0, gap, 0.0, 0.0]], requires_grad=True)
    kl = policy_kl(action_dist(space, old), action_dist(space, new))
    p, q = old.double(), new.detach().double()
    expected = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=0)
    kl.sum().backward()
    torch.testing.assert_close(new.grad.double(), q.softmax(-1) - p.softmax(-1), rtol=1e-5, atol=1e-7)

    bits = [action_dist(ACTION_SPACES["multibinary"], torch.tensor([[logit] * 3])) for logit in (0.0, gap)]
    torch.testing.assert_close(policy_kl(*bits), torch.tensor([3 * (gap / 2 - math.log(2))]))


@pytest.mark.parametrize(("rollouts", "accumulated", "sizes"), [(2, 1, [16, 16]), (1, 2, [8] * 4)])
def test_metrics_and_memory_of_the_auxiliary_phase(rollouts, accumulated, sizes, monkeypatch):
    """Metrics of a minibatch, and their means over a phase of 4 rollouts of 8 steps, some of which are in memory at a
    time. What it learns: test_restated."""
    args = ppg.Args(num_envs=4, num_steps=8, e_aux=2, num_aux_rollouts=rollouts, num_aux_grad_accum=accumulated)
    torch.manual_seed(0)
    agent = ppg.Agent(VECTOR, ACTION_SPACES["discrete"], args)
    obs, old, returns = torch.randn(32, 3), torch.randn(32, 4), torch.randn(32)
    _, metrics = ppg.aux_loss(agent, ppg.AuxMinibatch(obs, old, returns), args)
    params, values, aux_values = agent.get_policy_and_values(obs)
    expected = {
        "losses/aux/aux_value_loss": (aux_values - returns).square().mean() / 2,
        "losses/aux/real_value_loss": (values - returns).square().mean() / 2,
        "losses/aux/kl_loss": kl_divergence(Categorical(logits=old), Categorical(logits=params)).mean(),
    }
    torch.testing.assert_close(metrics, expected)
    found, forward = [], agent.get_policy_and_values
    monkeypatch.setattr(agent, "get_policy_and_values", lambda obs: found.append(len(obs)) or forward(obs))
    phase = SimpleNamespace(obs=obs.view(1, 8, 4, 3), returns=returns.view(1, 8, 4), length=1)
    run = SimpleNamespace(world=World(torch.device("cpu")), show=lambda phase: None)
    means = ppg.auxiliary_phase(agent, torch.optim.SGD(agent.parameters(), lr=0.0), phase, args, run)
    assert found == sizes * args.e_aux
    for name in ("losses/aux/aux_value_loss", "losses/aux/real_value_loss"):
        assert means[name].item() == pytest.approx(expected[name].item())


def test_after_a_run_that_ends_in_mid_phase_the_next_phase_starts_empty(tmp_path, monkeypatch):
    """The end is an auxiliary phase, too: resumed with more steps, no rollout is trained on twice."""
    lengths, auxiliary_phase = [], ppg.auxiliary_phase
    monkeypatch.setattr(
        ppg, "auxiliary_phase", lambda *given: lengths.append(given[2].length) or auxiliary_phase(*given)
    )
    args = small_args(ppg, tmp_path, {"num_steps": 4, "n_pi": 4, "total_timesteps": 6 * 16})
    run_dir = ppg.main(args)
    ppg.main(replace(args, total_timesteps=11 * 16, resume=str(run_dir)))
    assert lengths == [4, 2, 4, 1]
