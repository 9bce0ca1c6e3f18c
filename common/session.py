"""What a script trains in, from its settings to the end of its run."""

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from common.actors import ActorThreads, InTurn
from common.checkpoint import Checkpoints, load_parts, set_random_states
from common.device import resolve_precision, setup_device
from common.envs import EnvGroups, Envs, group_seed, make_envs
from common.errors import TrainingError
from common.evaluation import Evaluator
from common.files import check_writable
from common.intrinsic import Intrinsic, make_intrinsic
from common.load import load_weights
from common.resume import find_run, saved_args
from common.run import Run
from common.settings import parse
from common.signals import hold_signals, one_line_errors
from common.world import init_world

T = TypeVar("T")
RANK_SEEDS = 20_000  # in place of a group's number: seeds unlike those of groups and evaluations


class Session:
    """Settings, ranks, device and seed of a run, its environments and its folder. Closes them, whatever ends the run.

    Attributes: `args`, with `precision` resolved; `world`, the ranks; `device`; `iteration_steps` of all ranks;
    `total_steps` and `num_iterations`, at which the run will end.

    Raises:
        InputError: settings that cannot work, or a run that cannot be resumed. Nothing has been started or written.
    """

    def __init__(self, args: Any, script: str):
        args.validate()
        check_writable(args)
        self.script, self.world = Path(script).name, init_world(args.device)
        args = replace(args, precision=resolve_precision(args.precision, args.device))
        self.args = args = self.world.check_settings(args)
        self.resumed = find_run(args, self.script, self.world)
        self.checkpoint = self.resumed and self.resumed.checkpoint
        done = self.checkpoint["step"] if self.checkpoint else 0
        self.seed = args.seed
        redrawn_at = done if done and "random" not in self.checkpoint["ranks"][0] else 0  # other levels from there on
        if self.world.rank or redrawn_at:
            self.seed = group_seed(args.seed, RANK_SEEDS + self.world.rank + 1_000_000 * redrawn_at)
        options = {"torch_deterministic": args.torch_deterministic, "accelerate": args.accelerate}
        self.device = setup_device(args.device, seed=self.seed, **options)
        self.iteration_steps = args.iteration_steps * self.world.world_size
        iterations = math.ceil((args.total_timesteps - done) / self.iteration_steps)
        self.total_steps = done + max(0, iterations) * self.iteration_steps
        self.num_iterations = math.ceil(self.total_steps / self.iteration_steps)
        self.envs, self.exits, self.checkpoints, self.batches = [], ExitStack(), None, None

    def make_envs(self, num_envs: int | None = None, number: int = 0) -> Envs | EnvGroups:
        """Make and reset `num_envs` environments of actor `number` (None: all, in `--num-env-groups` groups)."""
        args, names = self.args, ("distribution_mode", "num_levels", "start_level", "num_threads")
        settings = {name: getattr(args, name) for name in names}
        settings |= {"capture_video": args.capture_video and number == 0, "seed": group_seed(self.seed, number)}
        groups = 1 if num_envs else args.num_env_groups
        envs = make_envs(args.env_id, num_envs or args.num_envs, num_groups=groups, **settings)
        self.envs.append(envs)
        envs.reset(seed=self.seed + number * (num_envs or 0))
        return envs

    def make_intrinsic(self, envs: Envs | EnvGroups, epochs: int) -> Intrinsic | None:
        """What `--intrinsic-reward` names, or None; `epochs` are its passes over each rollout."""
        spaces = envs.single_observation_space, envs.single_action_space
        return make_intrinsic(self.args, *spaces, epochs, self.world, self.device)

    def open_run(self, agent: torch.nn.Module, **parts: Any) -> Run:
        """Make the run's folder, or put `agent` and all parts back where a resumed run's checkpoint left them.

        `parts` are what else has a `state_dict` and belongs to the run; None is left out.
        """
        args, world, checkpoint = self.args, self.world, self.checkpoint
        parts = {"agent": agent} | {name: part for name, part in parts.items() if part is not None}
        if args.eval_interval and not world.rank:
            self.evaluator = Evaluator(args, agent, self.device)
            self.exits.callback(self.evaluator.close)
        own = {}
        if checkpoint:
            own = load_parts(parts, checkpoint, world.rank, self.resumed.path)
        elif args.init_from:
            load_weights(agent, args.init_from, args.init_heads)
        world.broadcast_parameters(part for part in parts.values() if isinstance(part, torch.nn.Module))
        shown = {"script": self.script, "device": self.device, "total_steps": self.total_steps}
        shown["num_parameters"] = sum(parameter.numel() for parameter in agent.parameters())
        self.run = run = Run(args, **shown, world=world, resumed=self.resumed)
        world.remember_run(str(run.path))
        if checkpoint and checkpoint["made_with"] != run.made_with and not world.rank:
            print(f"note: made with {checkpoint['made_with']}, resumed with {run.made_with}", file=sys.stderr)
        self.checkpoints = Checkpoints(run, parts, world, written=checkpoint and checkpoint["step"])
        if args.capture_video:
            self.envs[0].film(run.path / "videos")
        if "random" in own:
            set_random_states(own["random"], self.device)
        return run

    def evaluate(self, step: int) -> None:
        """Evaluate the agent, if an evaluation fell due since the last iteration or the run ends at `step`."""
        interval = self.args.eval_interval
        if not interval or (step % interval >= self.iteration_steps and step < self.total_steps):
            return
        self.run.flush()
        if self.world.rank == 0:
            self.evaluator(step, self.run)
        self.world.barrier()

    def save(self, step: int) -> None:
        """Keep a copy of the run as it is after `step` steps, from which it can be resumed (`Checkpoints.save`)."""
        self.checkpoints.save(step)

    def run_actors(self, actors: list[Iterator[T]], stop: threading.Event) -> ActorThreads[T] | InTurn[T]:
        """Batches of what `actors` yield, in threads until `stop` is set; with `--num-actors 0` one acts on demand."""
        args = self.args
        self.batches = InTurn(actors[0], args.batch_size)
        if args.num_actors:
            self.batches = ActorThreads(actors, args.batch_size, args.queue_size, stop)
        return self.batches

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with self.exits:
            if self.batches is None or not self.batches.close():  # else a thread hangs in its environment
                for envs in self.envs:
                    self.exits.callback(envs.close)
            if isinstance(error, FloatingPointError):
                error = TrainingError(*error.args)
            if self.checkpoints is not None:
                hold_signals()
                self.checkpoints.close(error)
        if error is None:
            self.world.destroy()


def run_script(main: Callable[[Any], Path], args_class: type) -> None:
    """Call a script's `main` with the settings of the command line; show errors as one sentence."""
    with one_line_errors():
        main(parse(args_class, default=saved_args(args_class)))
