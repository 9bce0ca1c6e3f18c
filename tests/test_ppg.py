"""The steps of PPG's auxiliary phase, and which rollouts a phase holds."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributions import kl_divergence

import ppg
from helpers import small_args
from test_losses import ACTION_SPACES, SPACES, VECTOR, WORLD, dist_of, make_agent

quick = pytest.mark.quick
T = 8


# ------------------------------------------------------------------------------------------------- auxiliary phase


def random_phase(iterations: int, num_envs: int) -> SimpleNamespace:
    """What an auxiliary phase needs of a `ppg.Phase`, in float64."""
    obs, returns = torch.randn(iterations, T, num_envs, *VECTOR.shape), torch.randn(iterations, T, num_envs)
    return SimpleNamespace(obs=obs.double(), returns=returns.double(), length=iterations)


@quick
@SPACES
def test_auxiliary_phase_follows_the_gradient_of_its_losses(space):
    """Three steps of plain gradient descent, each on all rollouts: L^joint and L^value (PPG, section 2).

    rllte zeroes the gradient between backward and step, so that its auxiliary phase trains nothing.
    """
    args = ppg.Args(num_envs=4, num_steps=T, e_aux=3, beta_clone=5.0, num_aux_rollouts=8)
    agent, phase = make_agent(ppg, space, args).double(), random_phase(2, 4)
    twin, obs, returns, losses = copy.deepcopy(agent), phase.obs.view(-1, 3), phase.returns.flatten(), []
    with torch.no_grad():
        old = twin.get_policy(obs)
    for _ in range(3):
        params, values, aux_values = twin.get_policy_and_values(obs)
        kl = kl_divergence(dist_of(space, old), dist_of(space, params)).mean()
        errors = [(each - returns).square().mean() / 2 for each in (aux_values, values)]
        losses.append([each.item() for each in (*errors, kl)])
        twin.zero_grad()
        (errors[0] + errors[1] + 5 * kl).backward()
        for parameter in twin.parameters():
            parameter.data -= 0.3 * parameter.grad if parameter.grad is not None else 0

    optimizer = torch.optim.SGD(agent.parameters(), lr=0.3)
    metrics = ppg.auxiliary_phase(agent, optimizer, phase, args, str, WORLD)
    for name, expected in twin.named_parameters():
        torch.testing.assert_close(agent.get_parameter(name), expected, rtol=1e-9, atol=1e-12, msg=name)
    means = torch.tensor(losses, dtype=torch.float64).mean(0).tolist()
    assert [metrics[f"losses/aux/{name}"].item() for name in ("aux_value_loss", "real_value_loss", "kl_loss")] == (
        pytest.approx(means, rel=1e-5)
    )
    assert means[2] > 1e-4  # the policy has moved


@quick
@pytest.mark.parametrize(("num_aux_rollouts", "num_aux_grad_accum", "steps"), [(2, 1, 2), (1, 2, 2), (3, 1, 1)])
def test_rollouts_in_memory_at_a_time(num_aux_rollouts, num_aux_grad_accum, steps, monkeypatch):
    """Of 3 rollouts. Those that are left over make a smaller minibatch, and are not dropped."""
    args = ppg.Args(num_envs=3, num_steps=T, num_aux_rollouts=num_aux_rollouts, num_aux_grad_accum=num_aux_grad_accum)
    agent = make_agent(ppg, ACTION_SPACES["discrete"], args).double()
    sizes, made, forward = [], [], agent.get_policy_and_values
    monkeypatch.setattr(agent, "get_policy_and_values", lambda obs: sizes.append(len(obs)) or forward(obs))
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: made.append(None))
    ppg.auxiliary_phase(agent, optimizer, random_phase(1, 3), args, str, WORLD)
    assert sizes == {1: [T, T, T], 2: [2 * T, T], 3: [3 * T]}[num_aux_rollouts] * args.e_aux
    assert len(made) == steps * args.e_aux


def test_after_a_run_that_ends_in_mid_phase_the_next_phase_starts_empty(tmp_path, monkeypatch):
    """The end is an auxiliary phase, too: resumed with more steps, no rollout is trained on twice."""
    lengths, auxiliary_phase = [], ppg.auxiliary_phase

    def spy(agent, optimizer, phase, *rest):
        lengths.append(phase.length)
        return auxiliary_phase(agent, optimizer, phase, *rest)

    monkeypatch.setattr(ppg, "auxiliary_phase", spy)
    args = small_args(ppg, tmp_path, {"num_steps": 4, "n_pi": 4, "total_timesteps": 6 * 16})
    run_dir = ppg.main(args)
    ppg.main(replace(args, total_timesteps=11 * 16, resume=str(run_dir)))
    assert lengths == [4, 2, 4, 1]
