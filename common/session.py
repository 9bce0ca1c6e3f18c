"""A script's run from its settings to its end: errors as one sentence, and signals that leave time to save."""

import copy
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import nn

from common import InputError, TrainingError
from common.checkpoint import Checkpoints, RandomStates, find_run, load_parts, load_weights
from common.device import World, resolve_device, resolve_precision, setup_device
from common.envs import Envs, spread_seed
from common.evaluation import Evaluator
from common.intrinsic import Intrinsic
from common.procgen_env import PROCGEN_GAMES
from common.run import INTERRUPT, ROOT, Run
from common.settings import HOST_MEMORY, flag, parse

RANK_SEEDS = 20_000  # first number of the ranks' seeds; actors count from 0, evaluations have 10,000
# What ends a run in good order, each as a KeyboardInterrupt. Slurm can send the last before a job's time is up.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
OUT_OF_MEMORY = "out of memory: lower --micro-batch-size, --num-envs, --num-steps or --feature-dim"


class Session:
    """Settings, ranks, device and seed of a run, its environments and its folder. Closes them, whatever ends the run.
    Attributes: `args`, with `precision` resolved; `world`, the ranks; `device`; `iteration_steps` of all ranks;
    `total_steps` and `num_iterations`, at which the run ends; `stop_actors()`, called before environments are closed,
    returns whether an actor hangs in one. Raises InputError, before anything is written, for what cannot work."""

    def __init__(self, args: Any, script: str, make_envs: Callable):
        args.validate()
        self.make_vector_env = make_envs
        self.device = resolve_device(args.device)
        self.world = world = World(self.device)
        self.script = os.path.relpath(Path(script).parent.resolve() / Path(script).name, ROOT)
        self.runs_dir = Path(args.runs_dir).absolute()  # an environment may chdir as it is made
        self.resumed = world.on_rank_zero(lambda: find_run(args, self.script, world))
        precision = self.resumed.checkpoint["args"]["precision"] if self.resumed else args.precision
        self.args = args = world.share_settings(replace(args, precision=resolve_precision(precision, self.device)))
        self.given = copy.deepcopy(args)
        self.seed = spread_seed(args.seed, RANK_SEEDS + world.rank) if world.rank else args.seed
        self.exits = ExitStack()
        if self.resumed and world.rank == 0:
            self.exits.push(self.resumed.lock)
        self.exits.callback(torch.set_num_threads, torch.get_num_threads())  # for the next run of this process
        setup_device(self.device, self.seed, args.torch_deterministic)
        preset = args.presets.get(getattr(args, "preset", None), {})
        others = [flag(name) for name, value in preset.items() if name != "exp_name" and getattr(args, name) != value]
        if world.rank == 0 and others:
            print(f"note: --preset {args.preset} with other values of {', '.join(others)}", file=sys.stderr)
        self.iteration_steps = args.iteration_steps * world.world_size
        self.num_iterations = math.ceil(args.total_timesteps / self.iteration_steps)
        self.total_steps = self.num_iterations * self.iteration_steps
        self.envs, self.stop_actors, self.checkpoints = [], lambda: False, None

    def make_envs(self, num_envs: int | None = None, number: int = 0) -> Envs:
        """Make and reset `num_envs` environments (None: all) of actor `number`."""
        args, num_envs = self.args, num_envs or self.args.num_envs
        video = args.capture_video and number == 0
        render = video and args.env_id.split(",")[0] not in PROCGEN_GAMES  # whose observations are filmed
        envs = Envs(self.make_vector_env(args, num_envs, spread_seed(self.seed, number), render), video=video)
        self.envs.append(envs)
        self.exits.callback(envs.close)
        played = self.resumed.checkpoint["step"] if self.resumed and not envs.restorable else 0  # new episodes begin
        envs.reset(seed=[spread_seed(self.seed + played, number * num_envs + env) for env in range(num_envs)])
        if len(envs.single_observation_space.shape or ()) == 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # MLPs gain nothing from a second one, and wait for it on a busy machine
        batch = args.iteration_steps * getattr(envs.obs, "nbytes", 0) // num_envs
        if batch > HOST_MEMORY:  # Linux would grant it, and kill the process when it is filled
            raise InputError(f"the observations of a batch take {batch / 1e9:,.0f} GB: lower --num-steps.")
        return envs

    def make_intrinsic(self, envs: Envs, compute_gae: Callable, epochs: int) -> Intrinsic | None:
        """What `--intrinsic-reward` names, or None. It makes `epochs` passes over each rollout."""
        if self.args.intrinsic_reward == "none":
            return None
        if self.world.world_size > 1:  # their statistics would differ
            raise InputError("--intrinsic-reward is for a single process: start it without torchrun, or leave it out.")
        return Intrinsic(self.args, envs, compute_gae, epochs, self.device)

    def open_run(self, agent: nn.Module, **parts: Any) -> Run:
        """Make the run's folder, or put `agent` and `parts` back where a resumed run's checkpoint left them. The parts
        are further objects with a `state_dict`, or None."""
        args, world, resumed = self.args, self.world, self.resumed
        if changed := [flag(name) for name, value in vars(self.given).items() if getattr(args, name) != value]:
            raise InputError(f"the script sets {', '.join(changed)}: derive values in properties of Args.")
        parts = {"agent": agent} | {name: part for name, part in parts.items() if part is not None}
        if args.eval_interval and world.rank == 0:
            self.evaluator = Evaluator(args, agent, self.device, self.make_vector_env)
        if resumed:
            load_parts(parts, resumed, world.rank)
        elif args.init_from is not None:
            load_weights(agent, args.init_from, args.init_heads)
        world.broadcast_parameters(part for part in parts.values() if isinstance(part, nn.Module))
        try:
            self.run = run = Run(args, self.script, self.runs_dir, self.total_steps, world, resumed)
            self.checkpoints = Checkpoints(run, dict(**parts, random=RandomStates()))  # TypeError for another "random"
        except OSError as error:
            raise InputError(f"no run folder can be written ({error}): choose another --runs-dir.") from error
        run.show_header(sum(parameter.numel() for parameter in agent.parameters()))
        self.save = self.checkpoints.save
        if args.capture_video:
            self.envs[0].video.folder = run.path / "videos"
            self.envs[0].video.track = run.wandb_run is not None
        if resumed:
            load_parts({"random": RandomStates()}, resumed, world.rank)
        else:
            self.save(0)  # a run that is stopped in its first iteration can be resumed, too
        return run

    def evaluate(self, step: int) -> None:
        """Evaluate the agent, if an evaluation fell due since the last iteration or the run ends at `step`."""
        interval = self.args.eval_interval
        if interval and (step % interval < self.iteration_steps or step >= self.total_steps):
            self.run.flush()
            if self.world.rank == 0:
                with suppress(OSError):  # the next checkpoint warns
                    self.checkpoints.write()  # an evaluation may take long
                if self.evaluator(step, self.run):
                    self.checkpoints.best = {"best.pt": (step, copy.deepcopy(self.evaluator.agent.state_dict()))}
            self.world.broadcast(None)  # the other ranks wait

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        opened = self.checkpoints is not None
        INTERRUPT.held = opened  # actors end, and the checkpoint is written, in their own time
        with self.exits:
            if self.stop_actors():
                self.exits.pop_all()  # an actor hangs in its environment
            if isinstance(error, NotImplementedError) and not opened:  # of a space, by the networks
                error = InputError(f"--env-id {self.args.env_id}: {error}.")
            if isinstance(error, SystemExit):  # of an environment, say, whose code would be the process's
                error = (TrainingError if opened else InputError)(f"something ends the process ({error!r})")
            said = type(error) is RuntimeError and re.search("DefaultCPUAllocator|Storage size calculation", str(error))
            if said or isinstance(error, MemoryError | torch.OutOfMemoryError):  # `said`: PyTorch's has no type
                error = (TrainingError if opened else InputError)(OUT_OF_MEMORY)
            if opened:
                self.checkpoints.close(error)
                INTERRUPT.held = False  # environments may hang as they are closed
            elif isinstance(error, InputError):
                raise error
        if error is None:
            self.world.destroy()


class Outlet:
    """A stream of text that may be closed, full or gone. What it `forgives` neither ends a run nor changes its code."""

    def __init__(self, stream: TextIO | None, *forgives: type[Exception]):  # None: closed from the start
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
        self.forgives = forgives
        with suppress(OSError, AttributeError):
            self.stream.reconfigure(errors="backslashreplace")  # a folder's name, where the terminal takes ASCII alone

    def write(self, text: str) -> None:
        with suppress(*self.forgives):
            self.stream.write(text)

    def flush(self) -> None:
        with suppress(*self.forgives):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def one_line_errors(*others: type[Exception]) -> Iterator[None]:
    """Print an InputError, a TrainingError or one of the `others` as a line on stderr, and exit with 2, 1 or 1; on a
    signal with 128 plus its number. Tools, whose results are what they print, give OSError."""
    forgiven = () if others else (OSError,)
    sys.stdout, sys.stderr = Outlet(sys.stdout, *forgiven), Outlet(sys.stderr, OSError)
    threading.excepthook = lambda failure: (  # an error of TensorBoard's thread comes in the main thread, too
        type(failure.thread).__module__.startswith("tensorboard.") or threading.__excepthook__(failure)
    )
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as in a background job of a shell script, or under nohup
            signal.signal(number, INTERRUPT)
    code = 0
    try:
        yield
        sys.stdout.flush()
    except (InputError, TrainingError, *others) as error:
        label = f"rank {os.environ['RANK']}: " if "TORCHELASTIC_RUN_ID" in os.environ else ""
        print(f"{label}error: {error}", file=sys.stderr, flush=True)
        code = 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt as error:
        number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
        print(f"stopped by {'Ctrl-C' if number == signal.SIGINT else number.name}", file=sys.stderr)
        code = 128 + number
    INTERRUPT.held = True
    for number in SIGNALS:  # the interpreter's end takes Python's handlers away
        signal.signal(number, signal.SIG_IGN)
    if any(not each.daemon or each.name.startswith(("actor", "wandb")) for each in threading.enumerate()[1:]):
        sys.stdout.flush()
        os._exit(code)  # the interpreter's own way out would wait for what may hang, and abort beside an actor
    sys.exit(code)


def run_script(main: Callable[[Any], Path], args_class: type) -> None:
    """Call a script's `main` with the settings of the command line; show errors as one sentence."""
    with one_line_errors():
        main(parse(args_class))
