"""What a script trains in, from its settings to the end of its run."""

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any

import torch

from common import intrinsic
from common.actors import ActorThreads
from common.checkpoint import Checkpoints, load_parts, set_random_states
from common.device import resolve_precision, setup_device
from common.envs import EnvGroups, Envs, group_seed, make_envs
from common.errors import InputError, TrainingError
from common.evaluation import Evaluator
from common.files import ROOT
from common.load import load_weights
from common.resume import find_run, saved_args
from common.run import Run
from common.settings import HOST_MEMORY, parse
from common.signals import hold_signals, one_line_errors
from common.world import init_world

RANK_SEEDS = 20_000  # in place of a group's number: seeds unlike those of groups and evaluations


class Session:
    """Settings, ranks, device and seed of a run, its environments and its folder. Closes them, whatever ends the run.
    Attributes: `args`, with `precision` resolved; `world`, the ranks; `device`; `iteration_steps` of all ranks;
    `total_steps`, `num_iterations`, at which the run ends; `save(step)`, which keeps a copy to resume from.
    Raises InputError for settings that cannot work, or a run that cannot be resumed, before anything is written."""

    def __init__(self, args: Any, script: str):
        args.validate()
        self.script, self.world = os.path.relpath(script, ROOT), init_world(args.device)
        args = replace(args, precision=resolve_precision(args.precision, args.device))
        self.args = args = self.world.share_settings(args)
        self.resumed = find_run(args, self.script, self.world)
        self.seed = group_seed(args.seed, RANK_SEEDS + self.world.rank) if self.world.rank else args.seed
        self.device = setup_device(args.device, self.seed, args.torch_deterministic)
        if args.accelerate == "cudagraphs" and self.device.type != "cuda":
            raise InputError(f"--accelerate cudagraphs needs a CUDA GPU, not {self.device}: use eager or compile.")
        self.iteration_steps = args.iteration_steps * self.world.world_size
        self.num_iterations = math.ceil(args.total_timesteps / self.iteration_steps)
        self.total_steps = self.num_iterations * self.iteration_steps
        self.exits, self.envs, self.checkpoints, self.batches = ExitStack(), [], None, None

    def make_envs(self, num_envs: int | None = None, number: int = 0) -> Envs | EnvGroups:
        """Make and reset `num_envs` environments of actor `number` (None: all, in `--num-env-groups` groups)."""
        args, names = self.args, ("distribution_mode", "num_levels", "start_level", "num_threads")
        settings = {name: getattr(args, name) for name in names} | {"seed": group_seed(self.seed, number)}
        video, groups = args.capture_video and number == 0, 1 if num_envs else args.num_env_groups
        envs = make_envs(args.env_id, num_envs or args.num_envs, capture_video=video, num_groups=groups, **settings)
        self.envs.append(envs)
        envs.reset(seed=self.seed + number * (num_envs or 0))
        batch = args.iteration_steps * getattr(envs.obs, "nbytes", 0) // envs.num_envs
        if batch > HOST_MEMORY:  # Linux would grant it, and kill the process when it is filled
            raise InputError(f"the observations of a batch take {batch / 1e9:,.0f} GB: lower --num-steps.")
        return envs

    def make_intrinsic(self, envs: Envs | EnvGroups, epochs: int) -> intrinsic.Intrinsic | None:
        """What `--intrinsic-reward` names, or None; `epochs` are its passes over each rollout."""
        if self.args.intrinsic_reward == "none":
            return None
        if self.world.world_size > 1:  # their statistics would differ
            raise InputError("--intrinsic-reward is for a single process: start it without torchrun, or leave it out.")
        return intrinsic.Intrinsic(self.args, envs, epochs, self.device)

    def open_run(self, agent: torch.nn.Module, **parts: Any) -> Run:
        """Make the run's folder, or put `agent` and all `parts` back where a resumed run's checkpoint left them: what
        else has a `state_dict` and belongs to the run. None is left out."""
        args, world, resumed = self.args, self.world, self.resumed
        parts = {"agent": agent} | {name: part for name, part in parts.items() if part is not None}
        if args.eval_interval and not world.rank:
            self.evaluator = Evaluator(args, agent, self.device)
            self.exits.callback(self.evaluator.close)
        if resumed:
            random_states = load_parts(parts, resumed.checkpoint, world.rank, resumed.path)
        elif args.init_from:
            load_weights(agent, args.init_from, args.init_heads)
        world.broadcast_parameters(part for part in parts.values() if isinstance(part, torch.nn.Module))
        shown = {"script": self.script, "device": self.device, "total_steps": self.total_steps}
        shown["num_parameters"] = sum(parameter.numel() for parameter in agent.parameters())
        try:
            self.run = run = Run(args, **shown, world=world, resumed=resumed)
            self.checkpoints = Checkpoints(run, parts, world, written=run.step if resumed else None)
        except OSError as error:
            raise InputError(f"no run folder can be written ({error}): choose another --runs-dir.") from error
        self.save = self.checkpoints.save
        if args.capture_video:
            self.envs[0].video.folder = run.path / "videos"
        if resumed:
            set_random_states(random_states, self.device)
        return run

    def run_actors(self, actors: list[Iterator], stop: Event) -> ActorThreads:
        """Batches of what `actors` yield, in threads until `stop` is set; with `--num-actors 0` one acts on demand."""
        queue_size = self.args.queue_size if self.args.num_actors else 0
        self.batches = ActorThreads(actors, self.args.batch_size, queue_size, stop, str(self.device))
        return self.batches

    def evaluate(self, step: int) -> None:
        """Evaluate the agent, if an evaluation fell due since the last iteration or the run ends at `step`."""
        interval = self.args.eval_interval
        if interval and (step % interval < self.iteration_steps or step >= self.total_steps):
            self.run.flush()
            if self.world.rank == 0:
                self.evaluator(step, self.run)
            self.world.broadcast(None)  # the other ranks wait

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.checkpoints is not None:
            hold_signals()  # actors end in their own time
        with self.exits:
            if self.batches is None or not self.batches.close():  # else a thread hangs in its environment
                for envs in self.envs:
                    self.exits.callback(envs.close)
            if isinstance(error, FloatingPointError):
                error = TrainingError(*error.args)
            if isinstance(error, NotImplementedError) and self.checkpoints is None:  # of a space, by the networks
                raise InputError(f"--env-id {self.args.env_id}: {error}.") from error
            if isinstance(error, MemoryError) or re.search(
                "out of memory|allocate memory|size calculation|Overflow when", str(error)
            ):
                advice = "out of memory: lower --micro-batch-size, --num-envs, --num-steps or --feature-dim"
                if self.checkpoints is None:
                    raise InputError(f"{advice}.") from error
                error = TrainingError(advice)
            if self.checkpoints is not None:
                self.checkpoints.close(error)
        if error is None:
            self.world.destroy()


def run_script(main: Callable[[Any], Path], args_class: type) -> None:
    """Call a script's `main` with the settings of the command line; show errors as one sentence."""
    with one_line_errors():
        main(parse(args_class, default=saved_args(args_class)))
