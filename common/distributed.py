"""The ranks that torchrun starts, which train one agent on environments of their own (data parallelism).

Everything is sent by torch.distributed: over NCCL between GPUs, over Gloo otherwise. Every rank calls every method that
sends something, in the same order. One that dies takes its connections with it, so that the others get an error, and
torchrun, which sees it, too, stops them and starts all anew (with `--max-restarts`).
"""

import hashlib
import io
import itertools
import os
import pickle
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.convolution import build
from common.device import resolve_device
from common.errors import InputError, TrainingError, flag
from common.run import Run, require_finite
from common.world import World

BUCKET_BYTES = 2**20  # of gradients, which are then sent together
TIMEOUT = timedelta(minutes=10)  # for a rank that is late in the midst of training, if its machine has vanished, say
PATIENCE = timedelta(hours=2)  # where rank 0 may take its time: it evaluates, and writes checkpoints
PER_HOST = {"runs_dir", "resume", "init_from", "num_threads", "device"}  # settings that ranks need not share


def pack(value: Any) -> bytes:
    """What `unpack` makes a value from. (Not all tensors survive the pickle that torch.distributed would make.)"""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def print_error(message: str) -> None:
    """Print an error on stderr; on ranks other than 0 only if it is not that of rank 0, too (bad input mostly is)."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    try:
        store, *_ = next(dist.rendezvous("env://"))
        if rank == 0:
            store.set("error", message)
            return
        store.wait(["error"], timedelta(seconds=3))
        same = store.get("error").decode() == message
    except RuntimeError:  # torchrun is gone, or rank 0 has no error
        same = False
    if rank and not same:
        print(f"rank {rank}: error: {message}", file=sys.stderr, flush=True)


def digest(agent: torch.nn.Module) -> str:
    tensors = [tensor.cpu().numpy() for tensor in agent.state_dict().values()]
    return hashlib.sha256(pickle.dumps(tensors)).hexdigest()


class Ranks(World):
    """This process's view of all ranks."""

    def __init__(self, device: str):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.label = f"rank {self.rank}: "
        hosts = os.environ["GROUP_WORLD_SIZE"]
        self.launcher = "torchrun" + (f" --nnodes {hosts}" if hosts != "1" else "")
        self.launcher += f" --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
        self.device = resolve_device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        self.seconds = 0.0  # that this process has waited for others
        with self.sending():
            self.store, *_ = next(dist.rendezvous("env://"))
            self.met = dist.PrefixStore(self.meet(), self.store)
            dist.init_process_group(backend, store=self.met, rank=self.rank, world_size=self.size, timeout=TIMEOUT)
            self.patient = dist.new_group(backend="gloo", timeout=PATIENCE)
        begun = self.store.get("run").decode() if self.store.check(["run"]) else None
        restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
        if restarted and os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True":  # that store is a new one
            begun = "auto"
        self.begun = self.agree(begun)
        self.last_piece, self.collected, self.sent = False, [], []

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Measure the time, and turn PyTorch's error of a broken connection into one line."""
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise TrainingError(f"the connection to another rank is lost, or none could be made ({reason})") from error
        self.seconds += time.perf_counter() - start

    def meet(self) -> str:
        """A name that all ranks of this start have, and no other.

        The store is torchrun's, which keeps it when it restarts the ranks. PyTorch finds addresses of the dead in it
        then (https://github.com/pytorch/pytorch/issues/135712; the restarts that torchrun counts differ from host to
        host). So rank 0 repeats the names that all ranks have drawn until each has found its own among them.
        """
        name = uuid.uuid4().hex
        self.store.set(f"name/{self.rank}", name)
        while True:
            # Never `get` what is not there yet: no signal would be heard while it waits.
            if self.rank == 0 and self.store.check([f"name/{rank}" for rank in range(self.size)]):
                names = [self.store.get(f"name/{rank}").decode() for rank in range(self.size)]
                self.store.set("names", " ".join(names))
                if all(self.store.check([f"{name}/{each}"]) for each in names[1:]):
                    return name
            elif self.rank > 0 and self.store.check(["names"]):
                names = self.store.get("names").decode().split()
                if name in names:
                    self.store.set(f"{names[0]}/{name}", "met")
                    return names[0]
            time.sleep(0.02)

    def own(self, args: Any) -> Any:
        mine = {flag(field): value for field, value in asdict(args).items() if field not in PER_HOST}
        mine |= {"the version of PyTorch": torch.__version__, "having a C++ compiler": build() is not None}
        for name, values in {name: [each[name] for each in self.gather_all(mine)] for name in mine}.items():
            if any(value != values[0] for value in values):
                raise InputError(f"{name} is not the same on all ranks ({', '.join(map(str, values))}): make it so.")
        return args if self.rank == 0 else replace(args, capture_video=False, track=False)

    # ------------------------------------------------------------------------------------------------ plain values

    def agree(self, value: Any) -> Any:
        values = [pack(value)]
        with self.sending():
            dist.broadcast_object_list(values, src=0, group=self.patient)
        return unpack(values[0])

    def first(self, function: Callable[[], Any], send: Callable[[Any], Any] = lambda result: result) -> Any:
        result = error = None
        if self.rank == 0:
            try:
                result = function()
            except (InputError, TrainingError) as failure:
                error = failure
        sent, message = self.agree((send(result), error and (type(error), str(error))) if self.rank == 0 else None)
        if error is not None:
            raise error
        if message is not None:
            kind, text = message
            raise kind(text)
        return result if self.rank == 0 else sent

    def gather(self, value: Any) -> list[Any] | None:
        values = [None] * self.size if self.rank == 0 else None
        with self.sending():
            dist.gather_object(pack(value), values, dst=0, group=self.patient)
        return values and [unpack(each) for each in values]

    def gather_all(self, value: Any) -> list[Any]:
        values = [None] * self.size
        with self.sending():
            dist.all_gather_object(values, pack(value), group=self.patient)
        return [unpack(each) for each in values]

    # ----------------------------------------------------------------------------------------------------- numbers

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place."""
        with self.sending():
            dist.all_reduce(tensor)
        return tensor

    def joined_moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Size, mean and sum of squared deviations of `x` of all ranks, float64 scalars."""
        x = x.double()
        size, total = self.sum(torch.stack([x.new_tensor(x.numel()), x.sum()]))
        mean = total / size
        return size, mean, self.sum((x - mean).square().sum())

    def std_mean(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size, mean, squares = self.joined_moments(x)
        return (squares / (size - 1)).sqrt().to(x.dtype), mean.to(x.dtype)

    def moments(self, x: np.ndarray) -> tuple[int, float, float]:
        size, mean, squares = self.joined_moments(torch.as_tensor(x))
        return int(size), float(mean), float(squares / size)

    def mean(self, metrics: dict[str, Any]) -> dict[str, Any]:
        if not metrics:
            return {}
        values = torch.stack([torch.as_tensor(value, device=self.device).double() for value in metrics.values()])
        return dict(zip(metrics, self.sum(values) / self.size, strict=True))

    def per_rank(self, metrics: dict[str, float]) -> dict[str, float]:
        return {
            f"{tag}/rank{rank}": value
            for rank, each in enumerate(self.gather_all(metrics))
            for tag, value in each.items()
        }

    # --------------------------------------------------------------------------------------------------- gradients

    def share(self, agent: torch.nn.Module) -> None:
        with self.sending():
            for tensor in agent.state_dict().values():
                dist.broadcast(tensor, src=0)
        self.compare(agent)
        for parameter in agent.parameters():
            parameter.register_post_accumulate_grad_hook(self.collect)

    def compare(self, agent: torch.nn.Module) -> None:
        if len(set(self.gather_all(digest(agent)))) > 1:
            raise TrainingError("the ranks no longer have the same parameters: have they different processors or GPUs?")

    def average_gradient(self, pieces: Iterable[Any]) -> Iterator[Any]:
        """As in `World`. While the backward pass of the last piece goes on, what it has finished is sent."""
        pieces = iter(pieces)
        piece = next(pieces)
        for following in pieces:
            yield piece
            piece = following
        self.last_piece, self.collected, self.sent = True, [], []
        yield piece
        self.last_piece = False
        self.send_collected()
        for gradients, joined, work in self.sent:
            with self.sending():
                work.wait()
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, mean in zip(gradients, (joined / self.size).split(sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))

    def collect(self, parameter: torch.nn.Parameter) -> None:
        """Called when a backward pass has finished a parameter's gradient: in the same order on every rank, for their
        graphs are the same. Parameters that the loss does not depend on have none, and nothing of them is sent."""
        if not self.last_piece:
            return
        self.collected.append(parameter.grad)
        if sum(gradient.nbytes for gradient in self.collected) >= BUCKET_BYTES:
            self.send_collected()

    def send_collected(self) -> None:
        if self.collected:
            joined = torch.cat([gradient.flatten() for gradient in self.collected])
            with self.sending():
                self.sent.append((self.collected, joined, dist.all_reduce(joined, async_op=True)))
            self.collected = []

    # ---------------------------------------------------------------------------------------------- the run folder

    def open_run(self, args: Any, **rest: Any) -> "JoinedRun":
        return JoinedRun(self, args, **rest)

    def leave(self) -> None:
        """Wait until all are done: rank 0 with its last checkpoint (until then the others can still start again), all
        with what they send, for who closes a connection is an error to who still waits at its other end."""
        with self.sending():
            for word in ("done", "seen"):
                self.met.set(f"{word}/{self.rank}", "")
                everyone = [f"{word}/{rank}" for rank in range(self.size)]
                # All must see that all are done; that all have seen it, only rank 0, which may be keeping the store.
                while (word == "done" or self.rank == 0) and not self.met.check(everyone):
                    time.sleep(0.02)
        dist.destroy_process_group()


class JoinedRun:
    """What all ranks tell their run: the `Run` of rank 0 writes it.

    Episodes wait on their rank until the next row of metrics, which are means over the ranks.
    """

    def __init__(self, world: Ranks, args: Any, *, script: str, device: torch.device, total_steps: int, **rest: Any):
        self.world, self.args, self.script, self.device = world, replace(args, resume=None), script, device
        self.total_steps = total_steps
        self.waiting: list[tuple[int, int, float, int]] = []  # episodes
        self.last_row = time.perf_counter(), world.seconds
        rest |= {"launcher": world.launcher, "ranks": world.size}
        run = world.first(
            lambda: Run(args, script=script, device=device, total_steps=total_steps, **rest),
            send=lambda run: run and (run.path, run.step, run.made_with),
        )
        self.run = run if world.rank == 0 else None
        self.path, self.step, self.made_with = (run.path, run.step, run.made_with) if world.rank == 0 else run
        world.store.set("run", str(self.path))

    @property
    def recent(self) -> Any:
        return self.run.recent if self.run else ()

    episodes = Run.episodes  # by way of:

    def episode(self, step: int, env: int, episodic_return: float, length: int) -> None:
        self.waiting.append((step, self.world.rank * self.args.num_envs + env, episodic_return, length))

    def flush(self) -> None:
        """Have rank 0 write the episodes of all ranks, in order of time."""
        episodes, self.waiting = self.world.gather(self.waiting), []
        for episode in sorted(itertools.chain(*(episodes or []))):
            self.run.episode(*episode)

    def log(self, step: int, metrics: dict[str, Any], batch: dict[str, Tensor] | None = None) -> None:
        self.flush()
        start, seconds = self.last_row
        self.last_row = time.perf_counter(), self.world.seconds
        waited = (self.world.seconds - seconds) / (self.last_row[0] - start)
        metrics = self.world.mean(metrics | {"charts/communication": waited})
        self.step = step
        if self.run:
            self.run.log(step, metrics, batch)
        else:
            require_finite(step, metrics, batch)

    def evaluation(self, *rest: Any) -> None:
        self.run.evaluation(*rest)

    def show(self, *rest: Any, **more: Any) -> None:
        if self.run:
            self.run.show(*rest, **more)

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        return self.run.state_dict() if self.run else {}

    def sync(self) -> None:
        if self.run:
            self.run.sync()

    def finish(self, end: str) -> None:
        if self.run:
            self.run.finish(end)

    def close(self) -> None:
        if self.run:
            self.run.close()
