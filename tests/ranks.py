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
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

import fast
import test_learning
from common.checkpoint import Checkpoints
from common.device import World
from common.learning import RewardNormalizer
from common.session import one_line_errors
from fast import SCRIPTS, Fork

T, N = 6, 8  # steps and environments of both ranks
# Environments of each rank, so that the two ranks' first minibatches make the joined batch's first, and so on.
OF_RANK = {2: [[0, 1, 4, 5], [2, 3, 6, 7]], 1: [list(range(N))]}
CASES = {
    "ppo": ("ppo", {"micro_batch_size": 5, "target_kl": 1e9}),
    "ppo-stopped": ("ppo", {"target_kl": 1e-9}),
    "ppo-batch": ("ppo", {"norm_adv": "batch", "clip_coef_vf": None}),
    "ppg": ("ppg", {"micro_batch_size": 5}),
    "ppg-passes": ("ppg", {"e_value": 2, "arch": "dual"}),
    "ppg-auxiliary": ("ppg", {"num_aux_rollouts": 4, "num_aux_grad_accum": 2, "e_aux": 2, "micro_batch_size": 5}),
    "impala": ("impala", {"num_minibatches": 4, "micro_batch_size": 5, "sample_fraction": 1.0}),
    "impala-lstm": ("impala", {"use_lstm": True, "micro_batch_size": 16, "sample_fraction": 1.0}),
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
    """How the parameters, float64, change by learning from this rank's part of the experience that all ranks know."""
    name, settings = CASES[case]
    if name == "ppg":
        settings = settings | {"num_aux_rollouts": settings.get("num_aux_rollouts", 16) // world.world_size}

    def prepare(agent: torch.nn.Module) -> None:
        for parameter in agent.parameters():
            parameter.data += world.rank  # until the parameters of rank zero are sent
        world.broadcast_parameters([agent])

    own = {"world": world, "envs": OF_RANK[world.world_size][world.rank], "prepare": prepare}
    with mock.patch.object(torch, "randperm", lambda n, **_: torch.arange(n)):
        return test_learning.learn(SCRIPTS[name], test_learning.VECTORS, torch.float64, 0.1, **own, **settings)[0]


def gradients(folder: Path) -> None:
    """Every case of learning, and the statistics that are of all ranks."""
    world, found = World(torch.device("cpu")), {}
    for case in CASES:
        found[case] = learn(case, world)
    rewards = np.random.default_rng(0).normal(size=(2, T, N))[..., OF_RANK[2][world.rank]]
    normalizer = RewardNormalizer(4, 0.9, moments=world.moments)
    found["scaled"] = torch.as_tensor(np.stack([normalizer(each, np.zeros((T, 4))) for each in rewards]))
    own = {"charts/first": 3.0} if world.rank == 0 else {"charts/second": 4.0, "losses/other": 5.0}
    found["means"] = world.all_reduce_mean({"losses/both": torch.tensor(world.rank)} | own)
    torch.save(found, folder / f"rank{world.rank}.pt")
    world.destroy()


def train(folder: Path, settings: dict) -> None:
    """A run of a script; `kill` = [rank, step] kills that rank, once, before it has a checkpoint of that step.
    `on_rank_1` has settings for that rank alone."""
    rank, agents, save = int(os.environ["RANK"]), [], Checkpoints.save
    script, kill, own = SCRIPTS[settings.pop("script")], settings.pop("kill", None), settings.pop("on_rank_1", {})
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
