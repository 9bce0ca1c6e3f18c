"""V-trace against the sum of the IMPALA paper, written out term by term in float64, and its limiting cases."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import impala
import ppo

pytestmark = pytest.mark.quick
T, B = 9, 4


def vtrace(*case, **settings):
    """With the bounds of the paper, unless `settings` say other."""
    paper = {"vtrace_lambda": 1.0, "rho_bar": 1.0, "c_bar": 1.0, "pg_rho_bar": 1.0}
    return impala.vtrace(*case, SimpleNamespace(**paper | settings))


def random_case(seed: int, end: float = 0.2):
    """logratio, rewards, discounts [T, B] and values [T + 1, B]; `end` is the probability that an episode ends."""
    generator = torch.Generator().manual_seed(seed)
    logratio, rewards = torch.randn(2, T, B, generator=generator, dtype=torch.float64)
    values = torch.randn(T + 1, B, generator=generator, dtype=torch.float64)
    dones = torch.rand(T, B, generator=generator, dtype=torch.float64) < end
    return 0.7 * logratio, rewards, 0.9 * (1 - dones.double()), values


def vtrace_by_definition(logratio, rewards, discounts, values, vtrace_lambda, rho_bar, c_bar, pg_rho_bar):
    """v_s = V(x_s) + sum_t gamma^(t-s) (prod_(i<t) c_i) delta_t V, section 4.1, with a discount for each step."""
    ratio, rewards, discounts, values = (x.numpy() for x in (logratio.exp(), rewards, discounts, values))
    targets = values.copy()
    for n in range(B):
        for s in range(T):
            for t in range(s, T):
                weight = 1.0
                for i in range(s, t):
                    weight *= discounts[i, n] * vtrace_lambda * min(c_bar, ratio[i, n])
                rho = min(rho_bar, ratio[t, n])
                delta = rho * (rewards[t, n] + discounts[t, n] * values[t + 1, n] - values[t, n])
                targets[s, n] += weight * delta
    advantages = np.empty_like(rewards)
    for n in range(B):
        for s in range(T):
            q = rewards[s, n] + discounts[s, n] * targets[s + 1, n]
            advantages[s, n] = min(pg_rho_bar, ratio[s, n]) * (q - values[s, n])
    return torch.as_tensor(targets[:-1]), torch.as_tensor(advantages)


@pytest.mark.parametrize("bounds", [(1.0, 1.0, 1.0), (2.0, 1.0, 1.5), (1.2, 0.6, 0.8), (1e9, 1e9, 1e9)])
@pytest.mark.parametrize("vtrace_lambda", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_vtrace_is_the_sum_of_the_paper(seed, vtrace_lambda, bounds):
    case = random_case(seed)
    expected = vtrace_by_definition(*case, vtrace_lambda, *bounds)
    settings = {"vtrace_lambda": vtrace_lambda} | dict(zip(("rho_bar", "c_bar", "pg_rho_bar"), bounds, strict=True))
    for ours, theirs in zip(vtrace(*case, **settings), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_on_policy_with_lambda_1_it_is_the_n_step_return():
    _, rewards, discounts, values = random_case(0)
    targets, advantages = vtrace(torch.zeros_like(rewards), rewards, discounts, values)
    returns = values[-1]
    for t in reversed(range(T)):
        returns = rewards[t] + discounts[t] * returns
        torch.testing.assert_close(targets[t], returns)
        torch.testing.assert_close(advantages[t], returns - values[t])


def test_on_policy_it_is_the_lambda_return_of_gae():
    """Advantages of GAE are v_t - V_t there (the paper's remark 2 with Schulman et al. 2016, equation 16)."""
    _, rewards, discounts, values = random_case(1)
    zeros = torch.zeros_like(rewards)
    rollout = ppo.Rollout(zeros, zeros, zeros, values[:-1], rewards, (discounts == 0).double(), zeros)
    advantages = ppo.compute_gae(rollout, values[-1], gamma=0.9, gae_lambda=0.8)
    targets, _ = vtrace(zeros, rewards, discounts, values, vtrace_lambda=0.8)
    torch.testing.assert_close(targets - values[:-1], advantages)


def test_a_discount_of_zero_splits_episodes():
    logratio, rewards, discounts, values = random_case(2, end=0)
    discounts[4] = 0
    targets, advantages = vtrace(logratio, rewards, discounts, values)
    after = vtrace(logratio[5:], rewards[5:], discounts[5:], values[5:])
    anything = torch.cat([values[:5], torch.full_like(values[:1], 1e3)])  # what follows the end has no say
    before = vtrace(logratio[:5], rewards[:5], discounts[:5], anything)
    torch.testing.assert_close(torch.cat([before[0], after[0]]), targets)
    torch.testing.assert_close(torch.cat([before[1], after[1]]), advantages)


def test_actions_that_the_learner_would_never_take_teach_nothing():
    _, rewards, discounts, values = random_case(3)
    targets, advantages = vtrace(torch.full_like(rewards, -100.0), rewards, discounts, values)
    torch.testing.assert_close(targets, values[:-1])
    torch.testing.assert_close(advantages, torch.zeros_like(rewards))


def test_no_gradient_flows_through_targets():
    case = [x.requires_grad_() for x in random_case(4)]
    assert not any(result.requires_grad for result in vtrace(*case))
