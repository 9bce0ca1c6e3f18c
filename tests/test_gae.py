"""Generalised advantage estimation against its definition."""

import pytest
import torch

import ppo
from helpers import PPO_AND_PPG

pytestmark = pytest.mark.quick
T, N = 12, 5
GAMMA = 0.97


def random_rollout(seed: int) -> tuple[ppo.Rollout, torch.Tensor]:
    """A float64 rollout in which a step ends its episode with probability .3, every other time by a time limit."""
    generator = torch.Generator().manual_seed(seed)
    values, rewards, finals = torch.randn(3, T, N, dtype=torch.float64, generator=generator)
    dones = (torch.rand(T, N, generator=generator) < 0.3).double()
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


@PPO_AND_PPG
@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_gae_is_the_weighted_mean_of_k_step_advantages(script, gae_lambda, seed):
    rollout, last_value = random_rollout(seed)
    expected = gae_by_definition(rollout, last_value, GAMMA, gae_lambda)
    advantages = script.compute_gae(rollout, last_value, GAMMA, gae_lambda)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
