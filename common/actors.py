"""Threads that act while a learner learns, and the bounded queue between them."""

import contextlib
import queue
import sys
import time
from collections.abc import Iterator
from threading import Event, Thread

import torch


class ActorThreads(Iterator):
    """Batches of what actors yield in threads of their own, through a bounded queue. Actors end once `stop` is set.
    Without a queue (`queue_size` 0), a single actor acts when it is asked to, in no thread: the same in every run.
    On a GPU, each thread has a CUDA stream of its own, so that acting does not wait until a whole update is done. The
    learner must wait for the GPU before it publishes a policy, and before it lets go of a batch, whose memory the
    actor's stream then uses again."""

    POLL_SECONDS = 0.2  # how often a waiting thread looks whether the run still goes on
    CLOSE_SECONDS = 3

    def __init__(self, actors: list[Iterator], batch_size: int, queue_size: int, stop: Event, device: str = "cpu"):
        self.actors, self.batch_size, self.queue, self.stop = actors, batch_size, queue.Queue(queue_size), stop
        self.threads, self.error, self.device = [], None, torch.device(device)

    def run_actor(self, actor: Iterator) -> None:
        stream, context = None, contextlib.nullcontext()
        try:
            if self.device.type == "cuda":
                stream = torch.cuda.Stream(self.device, priority=-1)
                context = torch.cuda.stream(stream)
            with context:
                for item in actor:
                    if stream is not None:
                        stream.synchronize()
                    self.put(item)
        except Exception as error:  # `__next__` raises it in the learner's thread
            self.error = error

    def put(self, item: object) -> None:
        handed_over = False
        while not handed_over and not self.stop.is_set():
            start = time.monotonic()
            with contextlib.suppress(queue.Full):
                self.queue.put(item, timeout=self.POLL_SECONDS)
                handed_over = True
            self.actor_waits.append(time.monotonic() - start)

    def __next__(self) -> list:
        """Wait for a batch; the first call starts the threads. Raises an actor's error, or RuntimeError if one ends."""
        if not self.queue.maxsize:
            return [next(self.actors[0]) for _ in range(self.batch_size)]
        if not self.threads:
            self.reset_metrics()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the actors' first policy is there
            for number, actor in enumerate(self.actors):
                self.threads.append(Thread(target=self.run_actor, args=[actor], name=f"actor {number}", daemon=True))
                self.threads[-1].start()
        self.occupancies.append(self.queue.qsize() / self.queue.maxsize)
        start, batch = time.monotonic(), []
        while len(batch) < self.batch_size:
            if not all(thread.is_alive() for thread in self.threads):
                raise self.error or RuntimeError("an actor has stopped without an error")
            with contextlib.suppress(queue.Empty):
                batch.append(self.queue.get(timeout=self.POLL_SECONDS))
        self.learner_waits.append(time.monotonic() - start)
        return batch

    def reset_metrics(self) -> None:
        self.since, self.occupancies, self.learner_waits, self.actor_waits = time.monotonic(), [], [], []

    def pop_metrics(self) -> dict[str, float]:
        """Since the last call: how full the queue was at each batch, and the shares of time that both sides waited."""
        if not self.threads:
            return {}
        seconds = time.monotonic() - self.since
        metrics = {
            "charts/queue_occupancy": sum(self.occupancies) / len(self.occupancies),
            "charts/learner_idle": sum(self.learner_waits) / seconds,
            "charts/actor_idle": sum(self.actor_waits) / len(self.actors) / seconds,
        }
        self.reset_metrics()
        return metrics

    def close(self) -> bool:
        """Stop all threads. Return whether one hangs in its environment, which must not be closed then."""
        self.stop.set()
        deadline = time.monotonic() + self.CLOSE_SECONDS
        while (hanging := [t.name for t in self.threads if t.is_alive()]) and time.monotonic() < deadline:
            time.sleep(0.01)
        if hanging:
            print(f"note: {', '.join(hanging)} cannot be stopped and is left behind", file=sys.stderr)
        return bool(hanging)
