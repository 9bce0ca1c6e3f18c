"""Threads that act while a learner learns, and the bounded queue between them."""

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

from common.errors import TrainingError

T = TypeVar("T")


class InTurn(Generic[T]):
    """Batches of what an actor yields, which acts when it is asked to: no threads, and the same in every run."""

    def __init__(self, actor: Iterator[T], batch_size: int):
        self.actor, self.batch_size = actor, batch_size

    def __next__(self) -> list[T]:
        return [next(self.actor) for _ in range(self.batch_size)]

    def pop_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> bool:
        return False  # no thread hangs


class ActorThreads(Generic[T]):
    """Run actors in threads of their own; `next` gives a batch of what they hand over through a bounded queue.

    Args:
        actors: endless iterators, which stop soon after `stop` is set.
        batch_size: number of items in a batch.
        queue_size: number of items that may wait in the queue; a thread that finds it full waits.
        stop: set by `close`.
    """

    POLL_SECONDS = 0.2  # how often a waiting thread looks whether the run still goes on
    PATIENCE_SECONDS = 600  # an actor that gives nothing for so long is given up
    CLOSE_SECONDS = 3

    def __init__(self, actors: list[Iterator[T]], batch_size: int, queue_size: int, stop: threading.Event):
        self.batch_size, self.queue, self.stop, self.error = batch_size, queue.Queue(queue_size), stop, None
        self.silence = [0.0] * len(actors)  # seconds since each actor gave something or waited for the queue
        self.threads = [
            threading.Thread(target=self.run_actor, args=(number, actor), name=f"actor {number}", daemon=True)
            for number, actor in enumerate(actors)
        ]
        self.started = False

    def run_actor(self, number: int, actor: Iterator[T]) -> None:
        try:
            for item in actor:
                handed_over = False
                while not handed_over and not self.stop.is_set():
                    self.silence[number], start = 0.0, time.monotonic()
                    with contextlib.suppress(queue.Full):
                        self.queue.put(item, timeout=self.POLL_SECONDS)
                        handed_over = True
                    self.actor_waited[number] += time.monotonic() - start
        except Exception as error:  # for `check`, which raises it in the learner's thread
            self.error = error

    def start(self) -> None:
        self.started, self.checked = True, time.monotonic()
        self.reset_metrics()
        for thread in self.threads:
            thread.start()

    def check(self) -> None:
        """Raise an actor's error, RuntimeError if an actor has stopped without one, or TrainingError if one hangs."""
        now = time.monotonic()
        passed = min(now - self.checked, 10.0)  # an actor is not to blame while the process was stopped (Ctrl-Z)
        self.checked = now
        for number, thread in enumerate(self.threads):
            if not thread.is_alive():
                raise self.error or RuntimeError(f"{thread.name} has stopped without an error")
            self.silence[number] += passed
            if self.silence[number] > self.PATIENCE_SECONDS:
                raise TrainingError(f"{thread.name} has given nothing for {self.PATIENCE_SECONDS} s")

    def __next__(self) -> list[T]:
        """Wait for the next batch; the first call starts the threads. Raises what `check` does."""
        if not self.started:
            self.start()
        self.occupancies.append(self.queue.qsize() / self.queue.maxsize)
        start, batch = time.monotonic(), []
        while len(batch) < self.batch_size:
            self.check()
            with contextlib.suppress(queue.Empty):
                batch.append(self.queue.get(timeout=self.POLL_SECONDS))
        self.learner_waited += time.monotonic() - start
        return batch

    def reset_metrics(self) -> None:
        self.since, self.occupancies, self.learner_waited = time.monotonic(), [], 0.0
        self.actor_waited = [0.0] * len(self.threads)

    def pop_metrics(self) -> dict[str, float]:
        """Since the last call: how full the queue was when the learner came for a batch, and the shares of the time
        that learner and actors waited for each other."""
        seconds = time.monotonic() - self.since
        metrics = {
            "charts/queue_occupancy": sum(self.occupancies) / len(self.occupancies),
            "charts/learner_idle": self.learner_waited / seconds,
            "charts/actor_idle": sum(self.actor_waited) / len(self.threads) / seconds,
        }
        self.reset_metrics()
        return metrics

    def close(self) -> bool:
        """Stop all threads and wait for them, a few seconds at most. Return whether a thread hangs in its environment,
        which must not be closed then."""
        self.stop.set()
        deadline = time.monotonic() + self.CLOSE_SECONDS
        for thread in self.threads:
            if thread.is_alive():
                thread.join(timeout=max(0.0, deadline - time.monotonic()))
        hanging = [thread.name for thread in self.threads if thread.is_alive()]
        if hanging:
            print(f"note: {', '.join(hanging)} cannot be stopped and is left behind", file=sys.stderr)
        return bool(hanging)
