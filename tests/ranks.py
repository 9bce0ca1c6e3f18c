"""Ranks as processes of their own, and what they do in tests/test_distributed.py.

torchrun calls this file, too: `torchrun ... tests/ranks.py FUNCTION FOLDER JSON`.
"""

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import gymnasium as gym
import numpy as np
import torch
from torch.nn.utils import parameters_to_vector

import fast
import helpers
import impala
import ppg
from common.checkpoint import Checkpoints
from common.reward_scale import RewardNormalizer
from common.session import one_line_errors
from common.world import World
from fast import Fork

NAMED = {script.__name__: script for script in helpers.SCRIPTS}
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


class Ranks:
    """Starts ranks as torchrun does, in far less time: forked, with its environment variables and a store that stays.

    With `agent_store` False rank zero keeps the store, as with torchrun's static rendezvous. With `hosts` it is as if
    each rank had a machine of its own.
    """

    def __init__(self, folder: Path, number: int, agent_store: bool = True, hosts: bool = False):
        self.folder, self.number, self.agent_store, self.hosts, self.starts = folder, number, agent_store, hosts, 0
        if agent_store:
            self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.port = self.store.port
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]

    def environment(self, rank: int) -> dict[str, str]:
        local, locals_, hosts = (0, 1, self.number) if self.hosts else (rank, self.number, 1)
        names = {"RANK": rank, "WORLD_SIZE": self.number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        names |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": locals_, "GROUP_WORLD_SIZE": hosts}
        names |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": self.starts - 1}
        names |= {"TORCHELASTIC_USE_AGENT_STORE": self.agent_store}
        names["CXX"] = "false"  # nothing to compile for vectors and small networks
        return {name: str(value) for name, value in names.items()}

    @contextlib.contextmanager
    def started(self, function: Callable, *args) -> Iterator[list[Fork]]:
        """Start them for the first time, or again: each calls `function(*args)`. What is left at the end is killed."""
        self.starts += 1
        with contextlib.ExitStack() as stack:
            forks = []
            for rank in range(self.number):
                place = self.folder / f"start{self.starts}-rank{rank}"
                forks.append(stack.enter_context(Fork(place, as_rank, self.environment(rank), function, *args)))
            yield forks

    def run(self, function: Callable, *args, statuses: list[int] | None = None) -> list[Fork]:
        """Start them, and wait until they end with `statuses` (without any: all with 0)."""
        with self.started(function, *args) as forks:
            ends = [fork.wait(120) for fork in forks]
            assert ends == (statuses or [0] * self.number), [fork.output + fork.errors for fork in forks]
            return forks


def torchrun(words: list[str]) -> None:
    """`torchrun <words>`, but its ranks are forked from this process."""
    os.environ.update({"OMP_NUM_THREADS": "1", "CXX": "false"})
    from torch.distributed import run

    run.main(["--run-path", "--start-method", "fork", *words])


def as_rank(environment: dict[str, str], function: Callable, *args) -> None:
    os.environ.update(environment)
    with one_line_errors():
        function(*args)


def learn(case: str, world: World) -> torch.Tensor:
    """The parameters, float64, after learning from this rank's part of the experience that all ranks know."""
    name, settings = CASES[case]
    script, envs = NAMED[name], OF_RANK[world.world_size][world.rank]
    torch.manual_seed(0)
    experience = torch.randn(T + 1, N, 5).double(), torch.randint(0, 4, (T, N)), *-torch.rand(6, T, N).double()
    obs, actions, logprobs, values, rewards, dones, cut, advantages = (x[:, envs] for x in experience)
    dones = (dones < -0.8).double()
    phase = SimpleNamespace(obs=torch.randn(2, T, N, 5).double()[:, :, envs], length=2)
    phase.returns = torch.randn(2, T, N).double()[:, :, envs]
    sizes = {"sample_fraction": 1.0, "batch_size": len(envs)} if name == "impala" else {"num_envs": len(envs)}
    args = script.Args(num_steps=T, **sizes, **settings)
    args.num_aux_rollouts = getattr(args, "num_aux_rollouts", 0) // world.world_size
    torch.manual_seed(world.rank)  # other parameters on each rank, until those of rank zero are sent
    agent = script.Agent(SPACE, ACTIONS, args).double()
    world.broadcast_parameters([agent])
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    with mock.patch.object(torch, "randperm", lambda n, **_: torch.arange(n)):
        if name == "impala":
            batch = impala.Unroll(actions, obs, logprobs, rewards, dones, cut, agent.initial_state(len(envs)).double())
            impala.update(agent, optimizer, batch, args, world)
        elif case == "ppg-auxiliary":
            ppg.auxiliary_phase(agent, optimizer, phase, args, lambda text: None, world)
        else:
            rollout = script.Rollout(obs[:-1], actions, logprobs, values, rewards, dones, cut)
            optimizers = [optimizer, optimizer] if name == "ppg" else [optimizer]
            script.update(agent, *optimizers, helpers.with_advantages(rollout, advantages), args, world)
    return parameters_to_vector(agent.parameters()).detach()


def gradients(folder: Path) -> None:
    """Every case of learning, and the statistics that are of all ranks."""
    world, found = World(torch.device("cpu")), {}
    for case in CASES:
        found[case] = learn(case, world)
    rewards = np.random.default_rng(0).normal(size=(2, T, N))[..., OF_RANK[2][world.rank]]
    normalizer = RewardNormalizer(4, 0.9, moments=world.moments)
    found["scaled"] = torch.as_tensor(np.stack([normalizer(each, np.zeros((T, 4))) for each in rewards]))
    torch.save(found, folder / f"rank{world.rank}.pt")
    world.destroy()


def train(folder: Path, settings: dict) -> None:
    """A run of a script; `kill` = [rank, step] kills that rank, once, before it has a checkpoint of that step.
    `on_rank_1` has settings for that rank alone."""
    rank, agents, save = int(os.environ["RANK"]), [], Checkpoints.save
    script, kill, own = NAMED[settings.pop("script")], settings.pop("kill", None), settings.pop("on_rank_1", {})
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if rank == 1:
        settings |= own

    class Agent(script.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            agents.append(self)

    def die(checkpoints, step):
        if kill == [rank, step] and first:
            os.kill(os.getpid(), signal.SIGKILL)
        save(checkpoints, step)

    with fast.small_networks(), mock.patch.multiple(script, Agent=Agent), mock.patch.object(Checkpoints, "save", die):
        script.main(script.Args(**settings))
    torch.save(agents[0].state_dict(), folder / f"rank{rank}.pt")


if __name__ == "__main__":  # in a fork of `torchrun`
    fast.die_with_parent()
    _, function, folder, settings = sys.argv
    with one_line_errors():
        globals()[function](Path(folder), json.loads(settings))
