"""V-trace against the sum of the IMPALA paper, written out term by term in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import impala

pytestmark = pytest.mark.quick
T, B = 9, 4


def random_case(seed: int):
    """logratio, rewards, discounts [T, B] and values [T + 1, B]; a fifth of the steps end their episodes."""
    generator = torch.Generator().manual_seed(seed)
    logratio, rewards = torch.randn(2, T, B, generator=generator, dtype=torch.float64)
    values = torch.randn(T + 1, B, generator=generator, dtype=torch.float64)
    dones = torch.rand(T, B, generator=generator, dtype=torch.float64) < 0.2
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
    case, (rho_bar, c_bar, pg_rho_bar) = random_case(seed), bounds
    args = SimpleNamespace(vtrace_lambda=vtrace_lambda, rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=pg_rho_bar)
    expected = vtrace_by_definition(*case, vtrace_lambda, *bounds)
    for ours, theirs in zip(impala.vtrace(*case, args), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
