"""Minibatches in pieces and number formats change neither gradients nor what is logged; and whole runs learn."""

from collections import namedtuple
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector

import impala
import ppg
import ppo
from common.device import World, resolve_precision
from common.learning import backward, micro_batches
from helpers import ALL, evaluate, parameters, small_args

quick = pytest.mark.quick
FRAMES, VECTORS = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8), gym.spaces.Box(-1, 1, (5,), np.float32)
SMALL = gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
ACTIONS = gym.spaces.Discrete(4)
CPU = torch.device("cpu")
WORLD = World(CPU)
CASES = [(ppo, {}), (ppg, {}), (ppg, {"arch": "dual"}), (impala, {}), (impala, {"use_lstm": True})]
CASES = pytest.mark.parametrize(("script", "settings"), CASES, ids=["ppo", "ppg", "ppg-dual", "impala", "impala-lstm"])


def learn(
    script, space, dtype, lr, device=CPU, prepare=lambda agent: None, read=float, world=WORLD, envs=range(6), **settings
):
    """How the parameters change by learning from random experience of `envs`, and the metrics.

    `prepare` is called with the agent once it lies on `device`, `read` with each metric.
    """
    torch.manual_seed(0)
    sizes = {} if script is impala else {"num_envs": len(envs), "num_steps": 8}
    args = script.Args(**{"num_minibatches": 2} | sizes | settings)
    agent = script.Agent(space, ACTIONS, args).to(device, dtype)
    prepare(agent)
    start = parameters_to_vector(agent.parameters()).detach().clone()
    optimizer, envs = torch.optim.SGD(agent.parameters(), lr=lr), list(envs)
    run = SimpleNamespace(world=world, show=lambda phase: None)  # what an update needs of a `Run`
    torch.manual_seed(0)

    def observations(*shape):
        if len(space.shape) == 3:
            return torch.randint(0, 256, (*shape, 8, *space.shape), dtype=torch.uint8)[..., envs, :, :, :].to(device)
        return torch.randn(*shape, 8, *space.shape, dtype=dtype)[..., envs, :].to(device)

    obs, actions = observations(9), torch.randint(0, 4, (8, 8))[:, envs].to(device)
    logprobs, values, rewards, dones, cut, returns = torch.randn(6, 8, 8, dtype=dtype)[..., envs].to(device)
    logprobs, dones = -logprobs.sigmoid(), (dones > 0.8).to(dtype)
    if script is impala:
        state = agent.initial_state(len(envs)).to(device, dtype)
        batch = impala.Unroll(actions, obs, logprobs, rewards, dones, cut, state)
        metrics = impala.update(agent, optimizer, batch, args, run)
    else:
        rollout = script.Rollout(obs[:-1], actions, logprobs, values, rewards, dones, cut)
        advantages = script.compute_gae(rollout, returns[0], 0.9, 0.9)
        rollout = rollout._replace(advantages=advantages, returns=advantages + values)
        optimizers = [optimizer] if script is ppo else [optimizer, optimizer]
        metrics = script.update(agent, *optimizers, rollout, args, run)
        if script is ppg:
            phase = SimpleNamespace(obs=observations(2, 8), returns=torch.stack([returns, -returns]), length=2)
            metrics |= ppg.auxiliary_phase(agent, optimizer, phase, args, run)
    change = parameters_to_vector(agent.parameters()).detach() - start
    return change, {tag: read(value) for tag, value in metrics.items()}


@quick
@CASES
@pytest.mark.parametrize("size", [1, 7, 16])
def test_pieces_have_the_gradient_and_the_metrics_of_the_whole_minibatch(script, settings, size):
    """In float64; 7 divides no minibatch."""
    whole, whole_metrics = learn(script, VECTORS, torch.float64, 0.05, micro_batch_size=1000, **settings)
    parts, parts_metrics = learn(script, VECTORS, torch.float64, 0.05, micro_batch_size=size, **settings)
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)
    assert parts_metrics == pytest.approx(whole_metrics, rel=1e-6, abs=1e-9)
    assert parts_metrics.keys() == whole_metrics.keys()


@quick
def test_a_metric_of_some_pieces_is_the_mean_over_these():
    """The last two of [0, 1], [3, 4] and [5]."""

    def loss_of(agent, piece, args):
        large = {"losses/large": piece.x.mean()} if piece.x[0] > 2 else {}
        return agent(piece.x).mean(), {"losses/all": piece.x.mean()} | large

    minibatch = namedtuple("Minibatch", "x")(torch.tensor([[0.0], [1.0], [3.0], [4.0], [5.0]]))
    metrics = backward(loss_of, torch.nn.Linear(1, 1), minibatch, SimpleNamespace(micro_batch_size=2), WORLD)
    assert metrics == pytest.approx({"losses/all": 2.6, "losses/large": 4.0})


@quick
@pytest.mark.parametrize(("script", "passes", "steps"), [
    (ppo, {"update_epochs": 5}, [10, 2]), (ppg, {"e_policy": 5, "e_value": 5}, [10, 2]),
    (ppg, {"e_policy": 5, "e_value": 3}, [16, 8]),  # the passes for the value come first, and are all made
], ids=["ppo", "ppg", "ppg-separate"])  # fmt: skip
def test_target_kl_stops_the_epochs(script, passes, steps, monkeypatch):
    """The actions of `learn` have had other probabilities."""
    made, step = [], torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda optimizer: made.append(1) or step(optimizer))
    monkeypatch.setattr(ppg, "auxiliary_phase", lambda *given: {})
    for target_kl, expected in zip((None, 1e-9), steps, strict=True):
        made.clear()
        learn(script, VECTORS, torch.float64, 0.01, target_kl=target_kl, **passes)
        assert len(made) == expected


@ALL
def test_bf16_has_nearly_the_gradient_of_float32(script):
    torch.manual_seed(0)
    obs, gradients = torch.randint(0, 256, (64, *SMALL.shape), dtype=torch.uint8), []
    for precision in ("fp32", "bf16"):
        torch.manual_seed(1)
        agent = script.Agent(SMALL, ACTIONS, script.Args(precision=precision, init_fn="xavier_uniform"))
        features = agent.encode(agent.encoder, obs)
        assert features.dtype == torch.float32
        (agent.policy_head(features).square().sum() + agent.value_head(features).square().sum()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in agent.encoder.parameters()]))
        assert all(p.grad.dtype == torch.float32 for p in agent.parameters() if p.grad is not None)
    exact, rounded = gradients
    assert 1e-5 < (exact - rounded).norm() / exact.norm() < 0.05
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.999


@quick
@pytest.mark.parametrize(("shape", "size", "dim", "expected"), [
    ((10,), 4, 0, [4, 4, 2]), ((1200,), None, 0, [512, 512, 176]), ((20, 5), 45, 1, [2, 2, 1]),
])  # fmt: skip
def test_sizes_of_pieces(shape, size, dim, expected):
    """512 steps by default, on a CPU; of sequences as many as there is room for."""
    assert [piece.shape[dim] for (piece,) in micro_batches([torch.empty(shape)], size, dim)] == expected


def test_precision(monkeypatch, capsys):
    for capabilities, expected in (({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16"), ({}, "fp32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capabilities=capabilities: capabilities)
        assert [resolve_precision(each, CPU) for each in ("auto", "fp32")] == [expected, "fp32"]
        assert not capsys.readouterr().err
        assert resolve_precision("bf16", CPU) == "bf16"
        assert ("no bf16 instructions on cpu" in capsys.readouterr().err) == (expected == "fp32")
    for capability, expected in (((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp32")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert resolve_precision("auto", torch.device("cuda")) == expected


def test_same_seed_same_run_in_bf16_on_two_threads(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    sizes = {"num_steps": 2, "total_timesteps": 16, "update_epochs": 1}
    args = small_args(ppo, tmp_path, sizes, env_id="starpilot", feature_dim=16, num_threads=1, precision="bf16")
    try:
        a, b = (parameters(ppo.main(args)) for _ in range(2))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a[name], b[name]) for name in a)


# What a script's run needs, of the flags that it has, and the least mean return after it
TASKS = {
    "CartPole-v1": ({"gamma": 0.99, "num_envs": 8, "num_steps": 128, "total_timesteps": 200_000}, 474),
    # a random policy scores about -1200, a good one better than -200
    "Pendulum-v1": ({
        "gamma": 0.9, "num_envs": 16, "num_steps": 128, "total_timesteps": 300_000, "learning_rate": 1e-3,
        "aux_learning_rate": 1e-3, "ent_coef": 0.0, "e_policy": 4, "e_value": 4, "update_epochs": 10,
    }, -400),
    # pays 5 an episode for random bits and 10 for the right ones
    "TestBits-v0": ({
        "gamma": 0.9, "num_envs": 8, "num_steps": 64, "total_timesteps": 40_000, "learning_rate": 2e-3,
        "aux_learning_rate": 2e-3,
    }, 9.5),
}  # fmt: skip
# PPG's losses on these spaces are held to PyTorch's in test_losses; a whole run takes a minute.
TASK_CASES = [(ppo, env_id) for env_id in TASKS] + [(ppg, "CartPole-v1")]
TASK_CASES += [pytest.param(ppg, env_id, marks=pytest.mark.soak) for env_id in ("Pendulum-v1", "TestBits-v0")]


@pytest.mark.parametrize(("script", "env_id"), TASK_CASES, ids=lambda value: getattr(value, "__name__", value))
def test_learns(script, env_id, tmp_path):
    settings, least = TASKS[env_id]
    own = {name: value for name, value in settings.items() if hasattr(script.Args, name)}
    own |= {"norm_reward_gamma": settings["gamma"], "anneal_lr": True, "device": "cpu", "runs_dir": str(tmp_path)}
    assert evaluate(script.main(script.Args(env_id=env_id, **own))) > least
