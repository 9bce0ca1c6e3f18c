"""Which loss reaches which parameters in PPG, which phase moves them, and which rollouts a phase holds."""

import copy
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from helpers import Silent, estimates, parameters
from test_losses import ACTION_SPACES, SPACES, VECTOR, WORLD

import ppg
from common.envs import make_envs
from common.errors import InputError

quick = pytest.mark.quick
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


def random_phase(size: tuple = (K, T, N)) -> SimpleNamespace:
    """What an auxiliary phase needs of a `ppg.Phase`."""
    return SimpleNamespace(obs=torch.randn(*size, *VECTOR.shape), returns=torch.randn(size))


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
    optimizers = tuple(torch.optim.Adam(agent.parameters(), lr=rate) for rate in (lr, value_lr))
    rollout = random_rollout(agent, agent.action_space)
    ppg.update(agent, optimizers, rollout, *estimates(rollout, torch.randn(T, N)), args, WORLD)
    return optimizers


def run_auxiliary_phase(agent: ppg.Agent, args: ppg.Args, phase=None, optimizer=None) -> dict[str, torch.Tensor]:
    optimizer = optimizer or torch.optim.Adam(agent.parameters(), lr=0.01)
    return ppg.auxiliary_phase(agent, optimizer, phase or random_phase(), args, Silent().show_phase, WORLD)


# -------------------------------------------------------------------------------------------------- gradient flow


@quick
@SPACES
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


@quick
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


@quick
def test_minibatches_are_whole_environments(monkeypatch):
    agent, args = make_agent()
    rollout = random_rollout(agent, agent.action_space)
    rollout.obs[:] = torch.arange(N)[:, None]  # each observation tells its environment
    seen = []
    forward = agent.get_action_and_value
    monkeypatch.setattr(agent, "get_action_and_value", lambda obs, action: seen.append(obs) or forward(obs, action))
    optimizer = torch.optim.Adam(agent.parameters())
    ppg.update(agent, (optimizer, optimizer), rollout, *estimates(rollout, torch.randn(T, N)), args, WORLD)
    counts = [torch.bincount(obs[:, 0].long(), minlength=N) for obs in seen]
    assert len(counts) == 2
    assert all(sorted(count.tolist()) == [0, 0, T, T] for count in counts)
    assert sum(counts).tolist() == [T] * N


# ------------------------------------------------------------------------------------------------- auxiliary phase


@quick
@SPACES
@pytest.mark.parametrize("arch", ARCHES)
def test_auxiliary_phase_moves_everything(arch, space):
    """rllte zeroes the gradient between backward and step, so that its auxiliary phase trains nothing."""
    agent, args = make_agent(arch, space)
    before = snapshot(agent)
    run_auxiliary_phase(agent, args)
    assert moved(agent, before) == {name for name, _ in agent.named_children()}


@quick
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


def kl_by_definition(space, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """KL divergence [B] of the distribution with parameters `new` from that with `old`, from closed forms."""
    if space is ACTION_SPACES["discrete"]:
        p, q = old.softmax(-1), new.softmax(-1)
        return (p * (p / q).log()).sum(-1)
    if space is ACTION_SPACES["multibinary"]:
        p, q = old.sigmoid(), new.sigmoid()
        return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum(-1)
    (m0, m1), (s0, s1) = (old[:, :2], new[:, :2]), (old[:, 2:].exp(), new[:, 2:].exp())
    return ((s1 / s0).log() + (s0**2 + (m0 - m1) ** 2) / (2 * s1**2) - 0.5).sum(-1)


@quick
@SPACES
@pytest.mark.parametrize("arch", ARCHES)
def test_auxiliary_phase_follows_the_gradient_of_its_losses(arch, space):
    """Three steps of plain gradient descent, each on all rollouts: L^joint and L^value (PPG, section 2)."""
    agent, args = make_agent(arch, space, e_aux=3, beta_clone=5.0)
    args.num_aux_rollouts = K * N
    for parameter in agent.policy_head.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    agent.double()
    phase = random_phase()
    phase.obs, phase.returns = phase.obs.double(), phase.returns.double()
    twin, obs, returns, losses = copy.deepcopy(agent), phase.obs.view(-1, 3), phase.returns.flatten(), []
    with torch.no_grad():
        old = twin.get_policy(obs)
    for _ in range(3):
        params, values, aux_values = twin.get_policy_and_values(obs)
        kl = kl_by_definition(space, old, params).mean()
        errors = [(each - returns).square().mean() / 2 for each in (aux_values, values)]
        losses.append([each.item() for each in (*errors, kl)])
        twin.zero_grad()
        (errors[0] + errors[1] + 5 * kl).backward()
        for parameter in twin.parameters():
            parameter.data -= 0.3 * parameter.grad if parameter.grad is not None else 0

    metrics = run_auxiliary_phase(agent, args, phase, torch.optim.SGD(agent.parameters(), lr=0.3))
    for name, expected in twin.named_parameters():
        torch.testing.assert_close(agent.get_parameter(name), expected, rtol=1e-9, atol=1e-12, msg=name)
    means = torch.tensor(losses, dtype=torch.float64).mean(0).tolist()
    assert [metrics[f"losses/aux/{name}"].item() for name in ("aux_value_loss", "real_value_loss", "kl_loss")] == (
        pytest.approx(means, rel=1e-5)
    )
    assert means[2] > 1e-4  # the policy has moved


@quick
@SPACES
def test_the_clone_is_the_policy_before_the_phase(space, monkeypatch):
    """Each divergence is of the new policy from that which the observations had before the phase: old || new."""
    agent, args = make_agent(space=space)
    phase = random_phase()
    with torch.no_grad():
        before = {
            tuple(o.tolist()): params
            for o, params in zip(phase.obs.view(-1, 3), agent.get_policy(phase.obs.view(-1, 3)), strict=True)
        }
    batches, compared = [], []
    forward, divergence = agent.get_policy_and_values, ppg.policy_kl

    def spy_forward(batch):
        batches.append((batch, forward(batch)))
        return batches[-1][1]

    def spy_kl(old, new):
        obs, (params, _, _) = batches[-1]
        expected = torch.stack([before[tuple(o.tolist())] for o in obs])
        given = [*old.base_dist.__dict__.values()] if hasattr(old, "base_dist") else [old.logits]
        assert not any(isinstance(each, torch.Tensor) and each.requires_grad for each in given)
        kl = divergence(old, new)
        compared.append(kl.mean().item())
        torch.testing.assert_close(kl, kl_by_definition(space, expected, params), rtol=1e-3, atol=2e-6)
        return kl

    monkeypatch.setattr(agent, "get_policy_and_values", spy_forward)
    monkeypatch.setattr(ppg, "policy_kl", spy_kl)
    run_auxiliary_phase(agent, args, phase)
    assert len(compared) == args.e_aux * K * N // args.num_aux_rollouts
    assert compared[0] == pytest.approx(0, abs=1e-6)
    assert compared[-1] > 1e-5


def test_targets_stay_with_their_observations():
    """A value that can be read off the observation is learnt: frames, environments and targets are not mixed up."""
    agent, args = make_agent(e_aux=100)
    phase = random_phase()
    phase.returns = phase.obs[..., 0].clone()
    metrics = run_auxiliary_phase(agent, args, phase)
    with torch.no_grad():
        _, values, aux_values = agent.get_policy_and_values(phase.obs.view(-1, 3))
    target = phase.obs[..., 0].flatten()
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
        phase = random_phase()
        with torch.no_grad():
            old = ppg.action_dist(agent.action_space, agent.get_policy(phase.obs.view(-1, 3)))
        run_auxiliary_phase(agent, args, phase)
        with torch.no_grad():
            new = ppg.action_dist(agent.action_space, agent.get_policy(phase.obs.view(-1, 3)))
        drift[beta_clone] = torch.distributions.kl_divergence(old, new).mean().item()
    assert drift[0.0] > 5 * max(drift[1.0], drift[100.0])


@quick
@pytest.mark.parametrize("arch", ARCHES)
def test_gradient_accumulation_is_a_larger_minibatch(arch):
    results = []
    for num_aux_rollouts, num_aux_grad_accum in ((4, 1), (1, 4), (2, 2)):
        agent, args = make_agent(arch)
        args.num_aux_rollouts, args.num_aux_grad_accum = num_aux_rollouts, num_aux_grad_accum
        agent.double()
        forward, sizes = agent.get_policy_and_values, set()
        agent.get_policy_and_values = lambda obs, f=forward, sizes=sizes: sizes.add(len(obs)) or f(obs)
        torch.manual_seed(1)
        phase = random_phase()
        phase.obs, phase.returns = phase.obs.double(), phase.returns.double()
        # plain gradient descent: Adam would hide a wrong scale
        run_auxiliary_phase(agent, args, phase, torch.optim.SGD(agent.parameters(), lr=1e-3))
        assert sizes == {num_aux_rollouts * T}  # what has to fit into the memory
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
    run_auxiliary_phase(agent, args, random_phase((1, T, 3)))
    assert sizes == [2 * T, T] * args.e_aux


# --------------------------------------------------------------------------------------------- rollouts of a phase


def short_args(tmp_path, **settings) -> ppg.Args:
    """Iterations of 16 steps, 4 of which make a phase."""
    small = {"num_envs": 4, "num_steps": 4, "num_minibatches": 2, "n_pi": 4, "e_aux": 1, "device": "cpu"}
    return ppg.Args(**{"env_id": "CartPole-v1", "runs_dir": str(tmp_path)} | small | settings)


@pytest.fixture
def phases(monkeypatch):
    """The numbers of the iterations whose rollouts each auxiliary phase trains on."""
    found, targets = [], []
    update, auxiliary_phase = ppg.update, ppg.auxiliary_phase

    def spy_update(agent, optimizers, rollout, advantages, returns, *rest):
        targets.append((rollout.obs.clone(), returns.clone()))
        return update(agent, optimizers, rollout, advantages, returns, *rest)

    def spy_phase(agent, optimizer, phase, *rest):
        found.append([])
        for obs, returns in zip(phase.obs, phase.returns, strict=True):
            found[-1] += [n for n, each in enumerate(targets) if torch.equal(each[0], obs)]
            assert torch.equal(targets[found[-1][-1]][1], returns)
        return auxiliary_phase(agent, optimizer, phase, *rest)

    monkeypatch.setattr(ppg, "update", spy_update)
    monkeypatch.setattr(ppg, "auxiliary_phase", spy_phase)
    return found


def test_each_phase_trains_on_the_rollouts_since_the_last(phases, tmp_path):
    ppg.main(short_args(tmp_path, total_timesteps=8 * 16))
    assert phases == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_after_a_run_that_ends_in_mid_phase_the_next_phase_starts_empty(phases, tmp_path):
    """The end is an auxiliary phase, too: resumed with more steps, no rollout is trained on twice."""
    run_dir = ppg.main(short_args(tmp_path, total_timesteps=6 * 16))
    assert phases == [[0, 1, 2, 3], [4, 5]]
    ppg.main(short_args(tmp_path, total_timesteps=11 * 16, resume=str(run_dir)))
    assert phases[2:] == [[6, 7, 8, 9], [10]]


@pytest.mark.parametrize(("env_id", "num_env_groups", "aux_frames"), [
    ("starpilot", 1, "memory"), ("coinrun", 2, "disk"), ("TestCount-v0", 1, "memory"),
])  # fmt: skip
def test_a_phase_is_put_back_as_it_was(env_id, num_env_groups, aux_frames, tmp_path, request):
    """Procgen's frames are played again; other observations are saved."""
    made = []
    args = ppg.Args(num_steps=3, num_envs=4, aux_frames=aux_frames, runs_dir=str(tmp_path))
    for _ in range(2):
        envs = make_envs(env_id, 4, seed=1, num_groups=num_env_groups)
        request.addfinalizer(envs.close)  # Procgen may hang where garbage collection closes it, as after a failure
        envs.reset(seed=1)
        spaces = envs.single_observation_space, envs.single_action_space
        rollout = ppg.new_rollout(3, 4, *spaces, torch.device("cpu"))
        made.append((envs, rollout, ppg.Phase(4, envs, rollout, args, torch.device("cpu"))))
    (envs, rollout, phase), (other_envs, _, other) = made
    torch.manual_seed(0)

    class Random:
        def get_action_and_value(self, obs):
            values = torch.randn(len(obs))
            return torch.randint(0, int(envs.single_action_space.n), (len(obs),)), values, values, values

        def get_value(self, obs):
            return torch.zeros(len(obs))

    def play(iterations):
        obs = torch.as_tensor(envs.obs)
        for _ in range(iterations):
            obs, _ = ppg.collect(Random(), envs, rollout, obs, 0, lambda rewards, dones: rewards, Silent())
            phase.add(rollout, torch.randn(3, 4))

    play(4)
    assert phase.full
    phase.clear()
    assert not phase.full
    assert len(phase.obs) == len(phase.actions) == len(phase.returns) == 0
    play(2)
    assert not phase.full
    state = copy.deepcopy({"envs": envs.state_dict(), "phase": phase.state_dict()})
    assert ("obs" in state["phase"]) == (env_id == "TestCount-v0")
    other_envs.load_state_dict(state["envs"])
    other.load_state_dict(state["phase"])
    for name in ("obs", "actions", "returns"):
        mine, theirs = getattr(phase, name), getattr(other, name)
        assert len(mine) == 2
        assert torch.equal(mine, theirs), name
    if env_id != "TestCount-v0":
        assert (torch.as_tensor(other_envs.obs) == torch.as_tensor(envs.obs)).all()
        state["phase"]["actions"][0] = (state["phase"]["actions"][0] + 3) % 15
        with pytest.raises(InputError, match="do not repeat what they did"):
            other.load_state_dict(state["phase"])


def test_frames_on_disk_change_nothing(tmp_path):
    """The same run as with the frames in memory, without a file left behind."""
    results = []
    for aux_frames in ("memory", "disk"):
        run_dir = ppg.main(short_args(tmp_path / aux_frames, total_timesteps=6 * 16, aux_frames=aux_frames))
        assert list(run_dir.parent.iterdir()) == [run_dir]
        results.append(parameters(run_dir))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
