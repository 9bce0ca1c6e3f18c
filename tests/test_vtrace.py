"""V-trace against the sum of the IMPALA paper, in float64: with ratios on both sides of each bound."""

from types import SimpleNamespace

import pytest
import torch

import impala
import restated

pytestmark = pytest.mark.quick
T, B = 9, 4


def random_case(seed: int):
    """logratio, rewards, discounts [T, B] and values [T + 1, B]; a fifth of the steps end their episodes."""
    generator = torch.Generator().manual_seed(seed)
    logratio, rewards = torch.randn(2, T, B, generator=generator, dtype=torch.float64)
    values = torch.randn(T + 1, B, generator=generator, dtype=torch.float64)
    dones = torch.rand(T, B, generator=generator, dtype=torch.float64) < 0.2
    return 0.7 * logratio, rewards, 0.9 * (1 - dones.double()), values


@pytest.mark.parametrize("bounds", [(1.0, 1.0, 1.0), (2.0, 1.0, 1.5), (1.2, 0.6, 0.8), (1e9, 1e9, 1e9)])
@pytest.mark.parametrize("vtrace_lambda", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_vtrace_is_the_sum_of_the_paper(seed, vtrace_lambda, bounds):
    case, (rho_bar, c_bar, pg_rho_bar) = random_case(seed), bounds
    args = SimpleNamespace(vtrace_lambda=vtrace_lambda, rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=pg_rho_bar)
    columns = zip(case[0].exp().T, *(each.T for each in case[1:]), strict=True)
    expected = zip(*(restated.vtrace(*map(list, column), args) for column in columns), strict=True)
    for ours, theirs in zip(impala.vtrace(*case, args), expected, strict=True):
        torch.testing.assert_close(ours.T, torch.tensor(theirs), rtol=1e-12, atol=1e-12)
