"""Agents and weights from run folders and files."""

import os
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from common.checkpoint import read_archive
from common.envs import make_envs
from common.errors import InputError
from common.fast import accelerate
from common.files import ROOT

VALUE_HEADS = ("value_head.", "aux_value_head.")
ANEW = {"keep": (), "policy": VALUE_HEADS, "reset": ("policy_head.", *VALUE_HEADS)}  # by --init-heads


def read_model(source: Path | str) -> dict[str, Any]:
    """The `script`, `args` and weights (`agent`) in a model, checkpoint or run folder. Raises InputError."""
    path = Path(source)
    content = read_archive(path / "model.pt" if path.is_dir() else path)
    return content | {"agent": content["parts"]["agent"]} if "parts" in content else content


def load_weights(agent: torch.nn.Module, source: str, heads: Literal["keep", "policy", "reset"] = "keep") -> None:
    """Give `agent` the parameters of `source`, which `--init-from` names: a run folder, its model, or a checkpoint.
    With `heads` "policy" the value heads keep their own parameters, with "reset" all heads. So does whatever does not
    fit, and a note names it. An auxiliary head that `source` lacks starts as its value head: a new one would inflate
    the features in PPG's first auxiliary phase. Raises InputError if nothing fits but heads."""
    own, weights = agent.state_dict(), read_model(source)["agent"]
    weights = {f"aux_{name}": value for name, value in weights.items() if name.startswith("value_head.")} | weights
    weights = {name: value for name, value in weights.items() if not name.startswith(ANEW[heads])}
    fits = {name: x for name, x in weights.items() if name in own and getattr(x, "shape", 0) == own[name].shape}
    if all("_head." in name for name in fits):
        raise InputError(f"--init-from {source}: nothing of its encoder fits this network: use the same flags.")
    if anew := ", ".join(name for name in own if name not in fits):
        print(f"note: --init-from {source}: {anew} start anew", file=sys.stderr)
    agent.load_state_dict(own | fits)


def load_agent(source: Path | str, device: torch.device | str = "cpu") -> tuple[torch.nn.Module, Any]:
    """The agent in a run folder, model or checkpoint, in evaluation mode, and its settings (the script's `Args`).
    Raises InputError if there is no agent, or if the script or its network is not what it was."""
    model = read_model(source)
    try:
        script = load_script(model["script"])
        args = script.Args(**model["args"])
        envs = make_envs(args.env_id, len(args.env_id.split(",")), seed=0)
        envs.close()
        agent = script.Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
        agent.load_state_dict(model["agent"])
    except (OSError, ImportError, AttributeError, TypeError, RuntimeError) as error:  # no such script, flags or network
        reason = str(error).partition("\n")[0]
        raise InputError(f"{source} is of another {model['script']} ({reason}): use its commit.") from error
    accelerate(agent, "eager")
    return agent.eval(), args


def load_script(script: str) -> ModuleType:
    """The module of a script, by its path from the repository's root; executed unless it has been imported before."""
    path = os.path.abspath(ROOT / script)
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == path:
            return module
    spec = spec_from_file_location(re.sub(r"\W", "_", script), path)
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
