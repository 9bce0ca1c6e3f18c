"""What makes tests of whole runs fast: a small network for Procgen, and processes that need not load anything."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO
from unittest import mock

import impala
import ppg
import ppo
from common.run import ROOT
from conftest import Glance

FORKS = multiprocessing.get_context("forkserver")
SCRIPTS = {"ppo": ppo, "ppg": ppg, "impala": impala}

if "PRELOAD" in os.environ:  # in the server that the processes are forked from
    import torch._dynamo  # noqa: F401  (which PyTorch does when it makes the first optimizer)

    from common.procgen_env import ProcgenVectorEnv
    from common.settings import EnvArgs

    ProcgenVectorEnv(EnvArgs(env_id="coinrun", num_threads=0), 1, seed=0).close()  # the assets; starts no thread


@contextlib.contextmanager
def small_networks():
    """The scripts' agents see frames through `Glance`."""
    with contextlib.ExitStack() as stack:
        for script in SCRIPTS.values():
            stack.enter_context(mock.patch.object(script, "ImpalaCNN", lambda shape, dim, init_fn: Glance(shape, dim)))
        yield


class Fork:
    """`function(*args)` in a process of its own; `output` and `errors` are what it has printed so far.

    It is forked from a server that has loaded PyTorch and Procgen, which takes ten times as long as the run of a test.
    A `with` statement kills it at its end. It also dies with the process that has made it.
    """

    def __init__(self, folder: Path, function: Callable, *args):
        environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "PRELOAD": "1"}
        with mock.patch.dict(os.environ, environment):  # of the server, which starts unless it runs
            FORKS.set_forkserver_preload(["fast"])
            multiprocessing.forkserver.ensure_running()
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [folder / "output", folder / "errors"]
        for file in self.files:
            file.write_text("")
        self.process = FORKS.Process(target=run_fork, args=(self.files, function, args), daemon=True)
        self.process.start()

    def __enter__(self) -> "Fork":
        return self

    def __exit__(self, *error) -> None:
        self.process.kill()
        self.process.join()

    output, errors = (property(lambda fork, n=number: fork.files[n].read_text()) for number in range(2))

    def wait_for(self, condition: Callable[[], object], seconds: float = 60) -> None:
        """Wait until the process has come so far that `condition` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.is_alive(), self.errors
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def wait(self, seconds: float = 60) -> int:
        """Wait until the process ends; its exit status, or minus the signal that killed it."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, self.output
        return self.process.exitcode

    def send(self, number: int) -> None:
        """Send a signal; nothing happens if an earlier one has ended the process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


def run_fork(files: list[Path], function: Callable, args: tuple) -> None:
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background shell's children ignore
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which those of nohup ignore
    die_with_parent()
    multiprocessing.current_process().daemon = False  # it may have children
    function(*args)


def die_with_parent() -> None:
    """Kill this process when the one that has made it is no more, for example because a test has failed."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def run_script(name: str, words: list[str]) -> None:
    """`python <name>.py <words>`, with `small_networks`."""
    script = SCRIPTS[name]
    sys.argv = [f"{name}.py", *words]
    with small_networks():
        script.run_script(script.main, script.Args)


class ForkedScript(multiprocessing.get_context("fork").Process):
    """In place of `subprocess.Popen(["python", "ppo.py", ...])`: forked from this process, which has loaded PyTorch."""

    def __init__(self, command: list[str], *, stdout: IO, **settings):
        _, script, *words = command
        super().__init__(target=run_forked, args=(stdout, Path(script).stem, words))
        self.wait = self.join
        self.start()

    def poll(self) -> int | None:
        return self.exitcode

    returncode = property(poll)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def run_forked(output: IO, name: str, words: list[str]) -> None:
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    die_with_parent()
    mock.patch.stopall()
    run_script(name, words)


def run_launcher(words: list[str]) -> None:
    """`python benchmarks/run.py <words>`, with `ForkedScript`s."""
    sys.argv = ["run.py", *words]
    mock.patch.object(subprocess, "Popen", ForkedScript).start()
    runpy.run_path(str(ROOT / "benchmarks" / "run.py"), run_name="__main__")
