"""Agents and weights from run folders and files."""

import importlib
from pathlib import Path
from typing import Any, Literal

import torch

from common.accelerate import accelerate
from common.checkpoint import read_archive
from common.envs import make_envs
from common.errors import InputError

VALUE_HEADS = ("value_head.", "aux_value_head.")
ANEW = {"keep": (), "policy": VALUE_HEADS, "reset": ("policy_head.", *VALUE_HEADS)}  # by --init-heads


def read_model(source: Path | str) -> dict[str, Any]:
    """The `script`, `args` and weights (`agent`) in a model, checkpoint or run folder. Raises InputError."""
    path = Path(source)
    content = read_archive(path / "model.pt" if path.is_dir() else path)
    return content | {"agent": content["parts"]["agent"]} if "parts" in content else content


def load_weights(agent: torch.nn.Module, source: str, heads: Literal["keep", "policy", "reset"] = "keep") -> None:
    """Give `agent` the parameters of `source`, which `--init-from` names: a run folder, its model, or a checkpoint.

    With `heads` "policy" the value heads keep their own parameters, with "reset" all heads. Raises InputError if there
    are no parameters, or if they are of another network.
    """
    own, anew, weights = agent.state_dict(), ANEW[heads], read_model(source)["agent"]
    weights = {name: value for name, value in weights.items() if not name.startswith(anew)}
    weights |= {name: value for name, value in own.items() if name.startswith(anew)}
    wrong = [name for name in own if getattr(weights.get(name), "shape", None) != own[name].shape]
    if wrong := wrong or sorted(weights.keys() - own.keys()):
        what = "use the same flags" if not all("_head." in name for name in wrong) else "add --init-heads reset"
        raise InputError(f"--init-from {source}: its network is another one ({wrong[0]} does not fit): {what}.")
    agent.load_state_dict(weights)


def load_agent(source: Path | str, device: torch.device | str = "cpu") -> tuple[torch.nn.Module, Any]:
    """The agent in a run folder, model or checkpoint, and its settings (the script's `Args`).

    Python must find the script, for example in the working directory. Raises InputError if there is no agent, or if the
    script or its network is not what it was.
    """
    model = read_model(source)
    try:
        script = importlib.import_module(Path(model["script"]).stem)
        args = script.Args(**model["args"])
        envs = make_envs(args.env_id, len(args.env_id.split(",")), seed=0)
        envs.close()
        agent = script.Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
        agent.load_state_dict(model["agent"])
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:  # no such script, flags or network here
        reason = str(error).partition("\n")[0]
        raise InputError(f"{source} is of another {model['script']} ({reason}): use its commit.") from error
    accelerate(agent, "eager")
    return agent, args
