"""Which loss reaches which parameters in PPG, and which phase moves them."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import Silent, estimates

import ppg

VECTOR = gym.spaces.Box(-1, 1, (3,), np.float32)
ACTION_SPACES = {
    "discrete": gym.spaces.Discrete(4),
    "box": gym.spaces.Box(-1, 1, (2,), np.float32),
    "multibinary": gym.spaces.MultiBinary(3),
}
ARCHES = ["detach", "dual", "shared"]
K, T, N = 2, 8, 4


def make_agent(arch: str = "detach", space: gym.Space = ACTION_SPACES["discrete"], **settings):
    torch.manual_seed(0)
    args = ppg.Args(arch=arch, num_envs=N, num_steps=T, num_minibatches=2, n_pi=K, num_aux_rollouts=2, **settings)
    return ppg.Agent(VECTOR, space, args), args


def reached(agent: ppg.Agent, loss: torch.Tensor) -> set[str]:
    """The modules in which `loss` has a gradient other than zero."""
    agent.zero_grad()
    loss.backward()
    return {name.split(".")[0] for name, p in agent.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


def moved(agent: ppg.Agent, before: dict[str, torch.Tensor]) -> set[str]:
    """The modules whose parameters differ from `before`."""
    return {name.split(".")[0] for name, value in agent.state_dict().items() if not torch.equal(value, before[name])}


def snapshot(agent: ppg.Agent) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in agent.state_dict().items()}


def random_phase() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(K, T, N, *VECTOR.shape), torch.randn(K, T, N)


def random_rollout(agent: ppg.Agent, space: gym.Space) -> ppg.Rollout:
    rollout = ppg.new_rollout(T, N, VECTOR, space, torch.device("cpu"))
    rollout.obs.normal_()
    with torch.no_grad():
        actions, logprobs, _, values = agent.get_action_and_value(rollout.obs.flatten(0, 1))
    return rollout._replace(
        actions=actions.view_as(rollout.actions), logprobs=logprobs.view(T, N), values=values.view(T, N)
    )


def run_update(agent: ppg.Agent, args: ppg.Args, lr: float = 0.01, value_lr: float = 0.01):
    """One policy phase update; returns its two optimisers."""
    optimizer, value_optimizer = (torch.optim.Adam(agent.parameters(), lr=rate) for rate in (lr, value_lr))
    rollout = random_rollout(agent, agent.action_space)
    ppg.update(agent, optimizer, value_optimizer, rollout, *estimates(rollout, torch.randn(T, N)), args)
    return optimizer, value_optimizer


def run_auxiliary_phase(agent: ppg.Agent, args: ppg.Args, phase=None) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.01)
    return ppg.auxiliary_phase(agent, optimizer, *(phase or random_phase()), args, 0, Silent())


# -------------------------------------------------------------------------------------------------- gradient flow


@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
@pytest.mark.parametrize("arch", ARCHES)
def test_gradient_flow(arch, space):
    agent, _ = make_agent(arch, space)
    obs = torch.randn(16, 3)
    value_path = {
        "detach": {"value_head"},
        "dual": {"value_encoder", "value_head"},
        "shared": {"encoder", "value_head"},
    }
    with torch.no_grad():
        actions, *_ = agent.get_action_and_value(obs)

    _, logprobs, entropy, values = agent.get_action_and_value(obs, actions)
    assert reached(agent, (logprobs * torch.randn(16)).sum()) == {"encoder", "policy_head"}
    _, logprobs, entropy, values = agent.get_action_and_value(obs, actions)
    # the entropy of a diagonal Gaussian depends on its free standard deviation alone
    assert reached(agent, entropy.sum()) == (
        {"policy_head"} if arch and "box" in str(space).lower() else {"encoder", "policy_head"}
    )
    _, logprobs, entropy, values = agent.get_action_and_value(obs, actions)
    assert reached(agent, values.square().sum()) == value_path[arch]
    assert reached(agent, agent.get_value(obs).square().sum()) == value_path[arch]

    _, values, _ = agent.get_policy_and_values(obs)
    assert reached(agent, values.square().sum()) == value_path[arch]
    _, _, aux_values = agent.get_policy_and_values(obs)
    assert reached(agent, aux_values.square().sum()) == {"encoder", "aux_value_head"}
    params, _, _ = agent.get_policy_and_values(obs)
    assert reached(agent, (params * torch.randn_like(params)).sum()) == {"encoder", "policy_head"}


@pytest.mark.parametrize("arch", ARCHES)
def test_all_ways_to_ask_give_the_same_answer(arch):
    agent, _ = make_agent(arch)
    obs = torch.randn(16, 3)
    actions, logprobs, _, values = agent.get_action_and_value(obs)
    params, aux_phase_values, _ = agent.get_policy_and_values(obs)
    dist = ppg.action_dist(agent.action_space, params)
    torch.testing.assert_close(dist.log_prob(actions), logprobs)
    torch.testing.assert_close(aux_phase_values, values)
    torch.testing.assert_close(agent.get_value(obs), values)
    torch.testing.assert_close(agent.get_policy(obs), params)


# ---------------------------------------------------------------------------------------------------- policy phase


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("epochs", [{}, {"e_policy": 2, "e_value": 1}])
def test_policy_phase_moves_all_but_the_auxiliary_head(arch, epochs):
    agent, args = make_agent(arch, **epochs)
    before = snapshot(agent)
    run_update(agent, args)
    value_encoder = {"value_encoder"} if arch == "dual" else set()
    assert moved(agent, before) == {"encoder", "policy_head", "value_head"} | value_encoder


@pytest.mark.parametrize("arch", ARCHES)
def test_separate_passes_have_their_own_optimizers(arch):
    value_path = {
        "detach": {"value_head"},
        "dual": {"value_encoder", "value_head"},
        "shared": {"encoder", "value_head"},
    }
    agent, args = make_agent(arch, e_policy=1, e_value=3)
    before = snapshot(agent)
    optimizer, value_optimizer = run_update(agent, args, lr=0)
    assert moved(agent, before) == value_path[arch]
    # 1 and 3 passes of 2 minibatches
    assert optimizer.state[agent.policy_head.linear.weight]["step"] == 2
    assert value_optimizer.state[agent.value_head.weight]["step"] == 6
    assert agent.policy_head.linear.weight not in value_optimizer.state
    assert agent.value_head.weight not in optimizer.state

    agent, args = make_agent(arch, e_policy=1, e_value=3)
    before = snapshot(agent)
    run_update(agent, args, value_lr=0)
    assert moved(agent, before) == {"encoder", "policy_head"}


def test_minibatches_are_whole_environments(monkeypatch):
    agent, args = make_agent()
    rollout = random_rollout(agent, agent.action_space)
    rollout.obs[:] = torch.arange(N)[:, None]  # each observation tells its environment
    seen = []
    forward = agent.get_action_and_value
    monkeypatch.setattr(agent, "get_action_and_value", lambda obs, action: seen.append(obs) or forward(obs, action))
    optimizer = torch.optim.Adam(agent.parameters())
    ppg.update(agent, optimizer, optimizer, rollout, *estimates(rollout, torch.randn(T, N)), args)
    counts = [torch.bincount(obs[:, 0].long(), minlength=N) for obs in seen]
    assert len(counts) == 2
    assert all(sorted(count.tolist()) == [0, 0, T, T] for count in counts)
    assert sum(counts).tolist() == [T] * N


# ------------------------------------------------------------------------------------------------- auxiliary phase


@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
@pytest.mark.parametrize("arch", ARCHES)
def test_auxiliary_phase_moves_everything(arch, space):
    """rllte zeroes the gradient between backward and step, so that its auxiliary phase trains nothing."""
    agent, args = make_agent(arch, space)
    before = snapshot(agent)
    run_auxiliary_phase(agent, args)
    assert moved(agent, before) == {name for name, _ in agent.named_children()}


@pytest.mark.parametrize("arch", ARCHES)
def test_no_policy_gradient_leaks_into_the_auxiliary_phase(arch):
    """CleanRL's first auxiliary step contains the last gradient of the policy phase."""
    phase, results = random_phase(), []
    for leftover in (None, 100.0):
        agent, args = make_agent(arch)
        for parameter in agent.parameters():
            parameter.grad = None if leftover is None else torch.full_like(parameter, leftover)
        torch.manual_seed(1)
        run_auxiliary_phase(agent, args, phase)
        results.append(snapshot(agent))
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("arch", ARCHES)
def test_no_auxiliary_gradient_leaks_into_the_policy_phase(arch):
    results = []
    for leftover in (None, 100.0):
        agent, args = make_agent(arch)
        for parameter in agent.parameters():
            parameter.grad = None if leftover is None else torch.full_like(parameter, leftover)
        torch.manual_seed(1)
        run_update(agent, args)
        results.append(snapshot(agent))
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
def test_the_clone_is_the_policy_before_the_phase(space, monkeypatch):
    """Each divergence is taken from the distributions that the policy had for these observations before the phase."""
    agent, args = make_agent(space=space)
    obs, returns = random_phase()
    with torch.no_grad():
        before = {
            tuple(o.tolist()): params
            for o, params in zip(obs.view(-1, 3), agent.get_policy(obs.view(-1, 3)), strict=True)
        }
    batches, compared = [], []
    forward, loss = agent.get_policy_and_values, ppg.auxiliary_loss

    def spy_forward(batch):
        batches.append(batch)
        return forward(batch)

    def spy_loss(dist, old_dist, *rest):
        expected = ppg.action_dist(space, torch.stack([before[tuple(o.tolist())] for o in batches[-1]]))
        compared.append((torch.distributions.kl_divergence(expected, old_dist), loss(dist, old_dist, *rest)[1]))
        return loss(dist, old_dist, *rest)

    monkeypatch.setattr(agent, "get_policy_and_values", spy_forward)
    monkeypatch.setattr(ppg, "auxiliary_loss", spy_loss)
    run_auxiliary_phase(agent, args, (obs, returns))
    assert len(compared) == args.e_aux * K * N // args.num_aux_rollouts
    for distance, _ in compared:
        torch.testing.assert_close(distance, torch.zeros_like(distance), rtol=0, atol=1e-6)
    assert compared[0][1]["losses/aux/kl_loss"].item() == pytest.approx(0, abs=1e-6)
    assert compared[-1][1]["losses/aux/kl_loss"].item() > 1e-5


def test_targets_stay_with_their_observations():
    """A value that can be read off the observation is learnt: frames, environments and targets are not mixed up."""
    agent, args = make_agent(e_aux=100)
    obs, _ = random_phase()
    metrics = run_auxiliary_phase(agent, args, (obs, obs[..., 0].clone()))
    with torch.no_grad():
        _, values, aux_values = agent.get_policy_and_values(obs.view(-1, 3))
    target = obs[..., 0].flatten()
    assert (aux_values - target).square().mean() < 0.05 * target.var()
    assert (values - target).square().mean() < 0.2 * target.var()
    assert set(metrics) == {
        f"losses/aux/{name}" for name in ("aux_value_loss", "real_value_loss", "kl_loss", "grad_norm")
    }


def test_beta_clone_holds_the_policy():
    drift = {}
    for beta_clone in (0.0, 1.0, 100.0):
        agent, args = make_agent(beta_clone=beta_clone, e_aux=20)
        agent.policy_head.linear.weight.data *= 10  # a policy far from uniform has something to lose
        obs, returns = random_phase()
        with torch.no_grad():
            old = ppg.action_dist(agent.action_space, agent.get_policy(obs.view(-1, 3)))
        run_auxiliary_phase(agent, args, (obs, returns))
        with torch.no_grad():
            new = ppg.action_dist(agent.action_space, agent.get_policy(obs.view(-1, 3)))
        drift[beta_clone] = torch.distributions.kl_divergence(old, new).mean().item()
    assert drift[0.0] > 5 * max(drift[1.0], drift[100.0])


@pytest.mark.parametrize("arch", ARCHES)
def test_gradient_accumulation_is_a_larger_minibatch(arch):
    results = []
    for num_aux_rollouts, num_aux_grad_accum in ((4, 1), (1, 4), (2, 2)):
        agent, args = make_agent(arch)
        args.num_aux_rollouts, args.num_aux_grad_accum = num_aux_rollouts, num_aux_grad_accum
        agent.double()
        torch.manual_seed(1)
        obs, returns = (x.double() for x in random_phase())
        # plain gradient descent: Adam would hide a wrong scale
        ppg.auxiliary_phase(agent, torch.optim.SGD(agent.parameters(), lr=1e-3), obs, returns, args, 0, Silent())
        results.append(snapshot(agent))
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], msg=name)
        torch.testing.assert_close(results[0][name], results[2][name], msg=name)


def test_a_remainder_of_rollouts_is_trained_on(monkeypatch):
    """3 rollouts in minibatches of 2: the last one is smaller, not dropped."""
    agent, args = make_agent()
    sizes = []
    forward = agent.get_policy_and_values
    monkeypatch.setattr(agent, "get_policy_and_values", lambda obs: sizes.append(len(obs)) or forward(obs))
    run_auxiliary_phase(agent, args, (torch.randn(1, T, 3, 3), torch.randn(1, T, 3)))
    assert sizes == [2 * T, T] * args.e_aux


def test_frames_on_disk_change_nothing(tmp_path):
    """The same run as with the frames in memory, without a file left behind."""
    results = []
    for number, aux_frames in enumerate(["memory", "disk"]):
        args = ppg.Args(
            env_id="starpilot", num_envs=4, num_steps=8, num_minibatches=2, n_pi=2, e_aux=2, total_timesteps=96,
            aux_frames=aux_frames, runs_dir=str(tmp_path / str(number)), device="cpu",
        )  # fmt: skip
        run_dir = ppg.main(args)
        assert list(run_dir.parent.iterdir()) == [run_dir]
        results.append(torch.load(run_dir / "model.pt", weights_only=True)["agent"])
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
