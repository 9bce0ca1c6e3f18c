"""Generalised advantage estimation against its definition."""

import pytest
import torch

import ppg
import ppo

pytestmark = pytest.mark.quick
T, N = 12, 5
GAMMA, LAMBDA = 0.97, 0.9


def random_rollout(seed: int, end: float = 0.3) -> tuple[ppo.Rollout, torch.Tensor]:
    """A float64 rollout in which a step ends its episode with probability `end`, every other time by a time limit."""
    generator = torch.Generator().manual_seed(seed)
    values, rewards, finals = torch.randn(3, T, N, dtype=torch.float64, generator=generator)
    dones = (torch.rand(T, N, generator=generator) < end).double()
    truncated = dones * (torch.rand(T, N, generator=generator) < 0.5)
    unused = torch.zeros(T, N)
    rollout = ppo.Rollout(unused, unused, unused, values, rewards, dones, truncated * finals)
    return rollout, torch.randn(N, dtype=torch.float64, generator=generator)


def k_step_advantage(rollout: ppo.Rollout, last_value: torch.Tensor, t: int, n: int, k: int, gamma: float) -> float:
    """r_t + ... + gamma^(k-1) r_(t+k-1) + gamma^k V(s_(t+k)) - V(s_t), in an episode that lasts k steps or more."""
    total = sum(gamma**i * rollout.rewards[t + i, n].item() for i in range(k))
    if rollout.dones[t + k - 1, n]:
        value = rollout.truncation_values[t + k - 1, n].item()  # 0 where the episode ended by itself
    else:
        value = (rollout.values[t + k, n] if t + k < T else last_value[n]).item()
    return total + gamma**k * value - rollout.values[t, n].item()


def gae_by_definition(rollout, last_value, gamma, lam):
    """The exponentially weighted mean of the k-step advantages; the last takes the weight of all longer ones."""
    advantages = torch.zeros(T, N, dtype=torch.float64)
    for t in range(T):
        for n in range(N):
            ends = [k for k in range(1, T - t + 1) if rollout.dones[t + k - 1, n]]
            longest = ends[0] if ends else T - t
            for k in range(1, longest + 1):
                weight = lam ** (k - 1) * ((1 - lam) if k < longest else 1)
                advantages[t, n] += weight * k_step_advantage(rollout, last_value, t, n, k, gamma)
    return advantages


@pytest.mark.parametrize("script", [ppo, ppg], ids=["ppo", "ppg"])
@pytest.mark.parametrize("seed", range(3))
def test_gae_is_the_weighted_mean_of_k_step_advantages(script, seed):
    rollout, last_value = random_rollout(seed)
    expected = gae_by_definition(rollout, last_value, GAMMA, LAMBDA)
    torch.testing.assert_close(script.compute_gae(rollout, last_value, GAMMA, LAMBDA), expected, rtol=1e-12, atol=1e-12)


def test_lambda_0_is_the_temporal_difference_error():
    rollout, last_value = random_rollout(0, end=0)
    next_values = torch.cat([rollout.values[1:], last_value[None]])
    expected = rollout.rewards + GAMMA * next_values - rollout.values
    torch.testing.assert_close(ppo.compute_gae(rollout, last_value, GAMMA, 0.0), expected)


def test_lambda_1_is_the_discounted_return_minus_the_value():
    rollout, last_value = random_rollout(0, end=0)
    powers = GAMMA ** torch.arange(T + 1, dtype=torch.float64)
    returns = (powers[:-1, None] * rollout.rewards).sum(0) + powers[-1] * last_value
    torch.testing.assert_close(ppo.compute_gae(rollout, last_value, GAMMA, 1.0)[0], returns - rollout.values[0])


def test_a_termination_hides_all_that_follows():
    rollout, last_value = random_rollout(0, end=0)
    rollout.dones[5] = 1
    before = ppo.compute_gae(rollout, last_value, GAMMA, LAMBDA)
    rollout.rewards[6:] += 100
    rollout.values[6:] += 100
    after = ppo.compute_gae(rollout, last_value + 100, GAMMA, LAMBDA)
    torch.testing.assert_close(before[:6], after[:6], rtol=0, atol=0)
    assert (before[6:] != after[6:]).all()
