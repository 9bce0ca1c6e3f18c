"""Each loss against a case worked out by hand, and the step that an update takes against the gradient of the sum."""

import copy
import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import Silent, estimates

import ppg
import ppo
from common.world import World

pytestmark = pytest.mark.quick
VECTOR = gym.spaces.Box(-1, 1, (3,), np.float32)
ACTION_SPACES = {
    "discrete": gym.spaces.Discrete(4),
    "box": gym.spaces.Box(-1, 1, (2,), np.float32),
    "multibinary": gym.spaces.MultiBinary(3),
}
SPACES = pytest.mark.parametrize("space", ACTION_SPACES.values(), ids=ACTION_SPACES)
# PPG also with separate passes: two for the value, then one for the policy
CASES = {"ppo": (ppo, {"update_epochs": 1}), "ppg": (ppg, {}), "ppg-separate": (ppg, {"e_value": 2})}
CASES = pytest.mark.parametrize(("script", "settings"), CASES.values(), ids=CASES)
WORLD = World()


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


@pytest.mark.parametrize("script", [ppo, ppg], ids=["ppo", "ppg"])
def test_value_loss(script):
    values, old, returns = torch.tensor([1.0, 1.0, 0.1]), torch.tensor([0.0, 0.0, 0.0]), torch.tensor([2.0, 0.0, 1.0])
    # plain: half the mean of 1, 1 and .81
    assert script.value_loss(values, old, returns, None).item() == pytest.approx(0.5 * 2.81 / 3)
    # clipped to .2 of the old value: errors max(1, 1.8^2), max(1, .2^2) and, within the range, .81
    assert script.value_loss(values, old, returns, 0.2).item() == pytest.approx(0.5 * (3.24 + 1 + 0.81) / 3)


class Fixed(torch.nn.Module):
    """An agent whose outputs are the same for all observations; before the phase, its policy was another one."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        super().__init__()
        self.params = torch.nn.Parameter(torch.tensor([0.25, 0.75]).log())
        self.value, self.aux_value = (torch.nn.Parameter(torch.tensor(value)) for value in (1.0, 4.0))

    def get_policy(self, obs):
        return torch.tensor([0.5, 0.5]).log().expand(len(obs), 2)

    def get_policy_and_values(self, obs):
        return self.params.expand(len(obs), 2), self.value.expand(len(obs)), self.aux_value.expand(len(obs))


def test_auxiliary_loss():
    agent, args = Fixed(), ppg.Args(beta_clone=2.0, e_aux=1)
    phase = SimpleNamespace(obs=torch.zeros(1, 1, 1, 3), returns=torch.full((1, 1, 1), 2.0))
    optimizer = torch.optim.SGD(agent.parameters(), lr=1.0)
    metrics = ppg.auxiliary_phase(agent, optimizer, phase, args, Silent().show_phase, WORLD)
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)  # old || new
    assert metrics["losses/aux/real_value_loss"].item() == pytest.approx(0.5)
    assert metrics["losses/aux/aux_value_loss"].item() == pytest.approx(2.0)
    assert metrics["losses/aux/kl_loss"].item() == pytest.approx(kl)
    # a step of 1 against the gradient of value loss + auxiliary value loss + 2 x KL, which is 2 (new - old)
    assert (agent.value.item(), agent.aux_value.item()) == pytest.approx((1.0 - (1 - 2), 4.0 - (4 - 2)))
    expected = torch.tensor([0.25, 0.75]).log() - 2 * torch.tensor([0.25 - 0.5, 0.75 - 0.5])
    torch.testing.assert_close(agent.params.detach(), expected)


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


def test_the_kl_of_categories_is_pytorchs():
    """Bit for bit, value and gradient, on ordinary logits."""
    generator = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 10.0):
        old, new = scale * torch.randn(2, 64, 15, generator=generator)
        results = []
        for divergence in (ppg.policy_kl, torch.distributions.kl_divergence):
            logits = new.clone().requires_grad_()
            kl = divergence(*(ppg.action_dist(ACTION_SPACES["discrete"], params) for params in (old, logits)))
            (gradient,) = torch.autograd.grad(kl.sum(), logits)
            results.append((kl.detach(), gradient))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("gap", [80.0, 104.0, 200.0, 1e4])
def test_the_kl_of_a_category_that_the_new_policy_all_but_excludes_is_finite(gap):
    """Where a new probability is 0 in float32, PyTorch's own is infinite."""
    space = ACTION_SPACES["discrete"]
    old = torch.tensor([[0.5, 0.0, -1.0, 2.0], [gap, 0.0, 0.0, 0.0]])  # the old policy may be as sure of something
    new = torch.tensor([[gap, 0.0, -1.0, 2.0], [0.0, gap, 0.0, 0.0]], requires_grad=True)
    kl = ppg.policy_kl(ppg.action_dist(space, old), ppg.action_dist(space, new))
    p, q = (x.detach().double() for x in (old, new))
    expected = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=0)
    kl.sum().backward()
    torch.testing.assert_close(new.grad.double(), q.softmax(-1) - p.softmax(-1), rtol=1e-5, atol=1e-7)
    assert (new.grad[0].abs() > 0.01).all()
    if gap > 103.98:  # the smallest number of float32 is exp(-103.97)
        assert (ppg.action_dist(space, new).probs == 0).any()


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
        # as of an older agent: some ratios and values lie outside the clipping range
        logprobs=logprobs.view_as(rollout.logprobs) + 0.3 * torch.randn(num_steps, num_envs),
        values=values.view_as(rollout.values) + 0.5 * torch.randn(num_steps, num_envs),
    )


def make_args(script, **settings):
    return script.Args(**{"num_envs": 4, "num_steps": 8, "num_minibatches": 1, "max_grad_norm": None} | settings)


def make_agent(script, space, args):
    """An agent with a policy far from uniform, and from a standard deviation of 1."""
    torch.manual_seed(0)
    agent = script.Agent(VECTOR, space, args)
    for parameter in agent.policy_head.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    return agent


def run_update(script, agent, rollout, advantages, returns, args, optimizer):
    """An update with the same optimizer for all passes."""
    optimizers = optimizer if script is ppo else (optimizer, optimizer)
    return script.update(agent, optimizers, rollout, advantages, returns, args, WORLD)


@SPACES
@CASES
def test_update_follows_the_gradient_of_the_weighted_sum(script, settings, space):
    """Plain gradient descent on the whole batch: the parameters move by minus the gradient of the sum."""
    args = make_args(script, norm_adv="batch", ent_coef=0.03, vf_coef=0.7, clip_coef_vf=0.2, **settings)
    agent = make_agent(script, space, args)
    rollout = random_rollout(script, space, agent, 8, 4)
    advantages = torch.randn(8, 4)
    twin = copy.deepcopy(agent)

    obs, actions, old_logprobs, old_values = (x.flatten(0, 1) for x in rollout[:4])
    returns = (advantages + rollout.values).flatten()
    normalized = ((advantages - advantages.mean()) / (advantages.std() + 1e-8)).flatten()
    seen = {"policy": [], "value": [], "entropy": []}
    for what in ["value", "value", "policy"] if "e_value" in settings else ["both"]:
        _, logprobs, entropy, values = twin.get_action_and_value(obs, actions)
        ratio = (logprobs - old_logprobs).exp()
        surrogate = torch.minimum(ratio * normalized, ratio.clip(0.8, 1.2) * normalized).mean()
        clipped_values = old_values + (values - old_values).clip(-0.2, 0.2)
        value_error = torch.maximum((values - returns) ** 2, (clipped_values - returns) ** 2).mean() / 2
        loss = 0
        if what != "value":
            loss = loss - surrogate - 0.03 * entropy.mean()
            seen["policy"].append(-surrogate.item()), seen["entropy"].append(entropy.mean().item())
        if what != "policy":
            loss = loss + 0.7 * value_error
            seen["value"].append(value_error.item())
        twin.zero_grad()
        loss.backward()
        for parameter in twin.parameters():
            parameter.data -= 0.1 * parameter.grad if parameter.grad is not None else 0

    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    metrics = run_update(script, agent, rollout, *estimates(rollout, advantages), args, optimizer)
    expected = dict(twin.named_parameters())
    for name, parameter in agent.named_parameters():
        torch.testing.assert_close(parameter, expected[name], msg=name)
    for tag, name in (("policy_loss", "policy"), ("value_loss", "value"), ("entropy", "entropy")):
        assert metrics[f"losses/{tag}"].item() == pytest.approx(np.mean(seen[name]), rel=1e-4, abs=1e-5)


@SPACES
@CASES
def test_the_entropy_bonus_raises_the_entropy(script, settings, space):
    """Alone, without advantages."""
    args = make_args(script, norm_adv="none", ent_coef=1.0, vf_coef=0.0, **settings)
    agent = make_agent(script, space, args)
    rollout, zeros = random_rollout(script, space, agent, 8, 4), torch.zeros(8, 4)
    obs, entropies = rollout.obs.flatten(0, 1), []
    for _ in range(2):
        with torch.no_grad():
            entropies.append(script.action_dist(space, agent.get_policy(obs)).entropy().mean().item())
        run_update(script, agent, rollout, zeros, zeros, args, torch.optim.SGD(agent.parameters(), lr=0.05))
    assert entropies[1] > entropies[0] + 1e-3


@SPACES
@CASES
def test_the_change_of_values_is_clipped(script, settings, space):
    """A value that has moved further than the range towards its target is let be; one nearer, or beyond, is not."""
    for old_value, target, moves in ((-1.0, 5.0, False), (1.0, -5.0, False), (-0.1, 5.0, True), (-1.0, -5.0, True)):
        for clip_coef_vf in (0.2, None):
            args = make_args(script, norm_adv="none", ent_coef=0.0, clip_coef_vf=clip_coef_vf, **settings)
            agent = make_agent(script, space, args)
            rollout = random_rollout(script, space, agent, 8, 4)
            values = agent.get_value(rollout.obs.flatten(0, 1)).detach().view(8, 4)
            before = agent.value_head.bias.item()
            optimizer = torch.optim.SGD(agent.parameters(), lr=1e-3)
            rollout = rollout._replace(values=values + old_value)
            run_update(script, agent, rollout, torch.zeros(8, 4), values + target, args, optimizer)
            change = agent.value_head.bias.item() - before
            assert (change * target > 0) if moves or clip_coef_vf is None else change == 0


@pytest.mark.parametrize("script", [ppo, ppg], ids=["ppo", "ppg"])
def test_advantages_are_normalised_over_the_minibatch_or_the_batch(script, monkeypatch):
    seen = []

    def spy(logprobs, old_logprobs, advantages, *rest):
        seen.append(advantages)
        return policy_loss(logprobs, old_logprobs, advantages, *rest)

    policy_loss = script.policy_loss
    monkeypatch.setattr(script, "policy_loss", spy)
    space = ACTION_SPACES["discrete"]
    for norm_adv in ("minibatch", "batch", "none"):
        args = make_args(script, num_minibatches=2, norm_adv=norm_adv)
        agent = make_agent(script, space, args)
        advantages = 5 + 2 * torch.randn(8, 4)
        seen.clear()
        rollout = random_rollout(script, space, agent, 8, 4)
        optimizer = torch.optim.Adam(agent.parameters())
        run_update(script, agent, rollout, *estimates(rollout, advantages), args, optimizer)
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
    space = ACTION_SPACES["discrete"]
    args = make_args(ppo, num_minibatches=4, update_epochs=3)
    agent = make_agent(ppo, space, args)
    rollout = random_rollout(ppo, space, agent, 8, 4)
    seen = []
    forward = agent.get_action_and_value
    monkeypatch.setattr(agent, "get_action_and_value", lambda obs, action: seen.append(obs) or forward(obs, action))
    optimizer = torch.optim.Adam(agent.parameters())
    run_update(ppo, agent, rollout, *estimates(rollout, torch.randn(8, 4)), args, optimizer)
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


@pytest.mark.parametrize(("script", "passes", "steps"), [
    (ppo, {"update_epochs": 5}, [10, 2]), (ppg, {"e_policy": 5, "e_value": 5}, [10, 2]),
    (ppg, {"e_policy": 5, "e_value": 3}, [16, 8]),  # the passes for the value come first, and are all made
], ids=["ppo", "ppg", "ppg-separate"])  # fmt: skip
def test_target_kl_stops_the_epochs(script, passes, steps):
    made = []
    for target_kl in (None, 1e-9):
        args = make_args(script, num_minibatches=2, target_kl=target_kl, **passes)
        agent = make_agent(script, ACTION_SPACES["discrete"], args)
        optimizer = torch.optim.Adam(agent.parameters(), lr=0.01)
        rollout = random_rollout(script, ACTION_SPACES["discrete"], agent, 8, 4)
        count = []
        optimizer.register_step_post_hook(lambda *_, count=count: count.append(1))
        run_update(script, agent, rollout, *estimates(rollout, torch.randn(8, 4)), args, optimizer)
        made.append(len(count))
    assert made == steps


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert ppo.explained_variance(returns, returns).item() == 1
    assert ppo.explained_variance(torch.full((4,), 7.0), returns).item() == pytest.approx(0)
    assert ppo.explained_variance(-returns, returns).item() == pytest.approx(-3)
