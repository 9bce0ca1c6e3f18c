"""What ranks do in tests/test_distributed.py: `torchrun ... tests/ranks.py FUNCTION FOLDER [JSON]`."""

import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from helpers import Silent, estimates
from torch.nn.utils import parameters_to_vector

import impala
import ppg
import ppo
from common import checkpoint, distributed
from common.envs import RewardNormalizer
from common.errors import one_line_errors
from common.world import World, join

SCRIPTS = {script.__name__: script for script in (ppo, ppg, impala)}
SPACE, ACTIONS = gym.spaces.Box(-1, 1, (5,), np.float32), gym.spaces.Discrete(4)
T, N = 6, 8  # steps and environments (of IMPALA: unrolls) of both ranks
# Environments of each rank, so that the two ranks' first minibatches make the joined batch's first, and so on.
OF_RANK = {2: [[0, 1, 4, 5], [2, 3, 6, 7]], 1: [list(range(N))]}
CASES = {
    "ppo": ("ppo", {"num_minibatches": 2, "micro_batch_size": 5, "target_kl": 1e9}),
    "ppo-stopped": ("ppo", {"num_minibatches": 2, "target_kl": 1e-9}),
    "ppo-batch": ("ppo", {"num_minibatches": 2, "norm_adv": "batch", "clip_coef_vf": None}),
    "ppg": ("ppg", {"num_minibatches": 2, "micro_batch_size": 5}),
    "ppg-passes": ("ppg", {"num_minibatches": 2, "e_value": 2, "arch": "dual"}),
    "ppg-auxiliary": ("ppg", {"num_aux_rollouts": 4, "num_aux_grad_accum": 2, "e_aux": 2, "micro_batch_size": 5}),
    "impala": ("impala", {"num_minibatches": 3, "micro_batch_size": 5}),
    "impala-lstm": ("impala", {"num_minibatches": 2, "use_lstm": True, "micro_batch_size": 12}),
}


def learn(case: str, world: World) -> torch.Tensor:
    """The parameters, float64, after learning from this rank's part of the experience that all ranks know."""
    name, settings = CASES[case]
    script, envs = SCRIPTS[name], OF_RANK[world.size][world.rank]
    torch.manual_seed(0)
    experience = [torch.randn(T + 1, N, 5, dtype=torch.float64), torch.randint(0, 4, (T, N))]
    experience += [-torch.rand(T, N, dtype=torch.float64) for _ in range(6)]
    obs, actions, logprobs, values, rewards, dones, cut, advantages = (x[:, envs] for x in experience)
    dones = (dones < -0.8).double()
    phase = torch.randn(2, T, N, 5, dtype=torch.float64)[:, :, envs], torch.randn(2, T, N).double()[:, :, envs]
    if name == "impala":
        args = script.Args(**{"sample_fraction": 1.0, "batch_size": len(envs), "num_steps": T} | settings)
    else:
        args = script.Args(**{"num_envs": len(envs), "num_steps": T} | settings)
    args.num_aux_rollouts = getattr(args, "num_aux_rollouts", 0) // world.size
    torch.manual_seed(world.rank)  # other parameters on each rank, until they are shared
    agent = script.Agent(SPACE, ACTIONS, args).double()
    world.share(agent)
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    with mock.patch.object(torch, "randperm", lambda n, **_: torch.arange(n)):
        if name == "impala":
            batch = impala.Unroll(obs, actions, logprobs, rewards, dones, cut, agent.initial_state(len(envs)).double())
            impala.update(agent, optimizer, batch, args, world)
        elif case == "ppg-auxiliary":
            ppg.auxiliary_phase(agent, optimizer, *phase, args, 0, Silent(), world)
        else:
            rollout = script.Rollout(obs[:-1], actions, logprobs, values, rewards, dones, cut)
            optimizers = [optimizer] * (2 if name == "ppg" else 1)
            script.update(agent, *optimizers, rollout, *estimates(rollout, advantages), args, world)
    return parameters_to_vector(agent.parameters()).detach()


def gradients(folder: Path) -> None:
    """Every case of learning, and the statistics that are of all ranks."""
    world, found = join("cpu"), {}
    distributed.BUCKET_BYTES = 10_000  # several buckets
    for case in CASES:
        found[case] = learn(case, world)
    rewards = np.random.default_rng(0).normal(size=(2, T, N))[..., OF_RANK[2][world.rank]]
    normalizer = RewardNormalizer(4, 0.9, moments=world.moments)
    found["scaled"] = torch.as_tensor(np.stack([normalizer(each, np.zeros((T, 4))) for each in rewards]))
    torch.save(found, folder / f"rank{world.rank}.pt")
    world.leave()


def overlap(folder: Path) -> None:
    """What happens in which order in a minibatch of two pieces, with a bucket for each parameter."""
    world, order = join("cpu"), []
    distributed.BUCKET_BYTES = 1
    torch.manual_seed(0)
    agent = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)), torch.nn.Linear(3, 3))
    unused = torch.nn.Linear(2, 2)  # the loss does not depend on it
    agent.register_module("unused", unused)
    for name, parameter in agent.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    world.share(agent)
    all_reduce = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", lambda *a, **k: (order.append("sent"), all_reduce(*a, **k))[1]):
        for piece in world.average_gradient(iter([torch.ones(2, 3), torch.ones(2, 3)])):
            agent[3](agent[2](agent[1](agent[0](piece)))).sum().backward()
            order.append("piece")
    if world.rank == 0:
        (folder / "order.json").write_text(json.dumps(order))
    assert unused.weight.grad is None
    world.leave()


def train(folder: Path, settings: dict) -> None:
    """A run of a script; `kill` = [rank, step] kills that rank, once, before it has a checkpoint of that step, or if
    there is no such step, after the run. `on_rank_1` has settings for that rank alone."""
    rank, agents, save = int(os.environ["RANK"]), [], checkpoint.Checkpoints.save
    settings |= settings.pop("on_rank_1", {}) if rank == 1 else {}
    settings.pop("on_rank_1", None)
    script, kill = SCRIPTS[settings.pop("script")], settings.pop("kill", None)

    class Agent(script.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            agents.append(self)

    def save_or_die(checkpoints, step, **loop):
        if kill == [rank, step] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        save(checkpoints, step, **loop)

    with mock.patch.object(script, "Agent", Agent), mock.patch.object(checkpoint.Checkpoints, "save", save_or_die):
        script.main(script.Args(**settings))
    torch.save(agents[0].state_dict(), folder / f"rank{rank}.pt")
    if kill == [rank, None] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    function, folder, *settings = sys.argv[1:]
    with one_line_errors():
        globals()[function](Path(folder), *map(json.loads, settings))
