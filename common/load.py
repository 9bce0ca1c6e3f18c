"""Agents and weights from run folders and files."""

import importlib
from pathlib import Path
from typing import Any, Literal

import torch

from common.accelerate import accelerate
from common.checkpoint import Damaged, read_archive
from common.envs import make_envs
from common.errors import InputError
from common.files import read_json

VALUE_HEADS = ("value_head.", "aux_value_head.")
ANEW = {"keep": (), "policy": VALUE_HEADS, "reset": ("policy_head.", *VALUE_HEADS)}  # by --init-heads


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The agent's parameters in a model or checkpoint. Raises Damaged."""
    content = read_archive(path)
    weights = content.get("agent", content.get("parts", {}).get("agent"))
    if not isinstance(weights, dict):
        raise Damaged("is damaged or holds no agent")
    return weights


def load_weights(agent: torch.nn.Module, source: str, heads: Literal["keep", "policy", "reset"] = "keep") -> None:
    """Give `agent` the parameters of `source`, which `--init-from` names: a run folder, its model, or a checkpoint.

    With `heads` "policy", the value heads start anew, and with "reset" all heads, whatever those of `source` are.

    Raises:
        InputError: there are none, or they are of another network.
    """
    path = Path(source)
    path = path / "model.pt" if path.is_dir() else path
    try:
        weights = read_weights(path)
    except Damaged as error:
        raise InputError(f"--init-from {source}: {path} {error}.") from error
    own, anew = agent.state_dict(), ANEW[heads]
    weights = {name: value for name, value in weights.items() if not name.startswith(anew)}
    weights |= {name: value for name, value in own.items() if name.startswith(anew)}
    wrong = [name for name in own if getattr(weights.get(name), "shape", None) != own[name].shape]
    if wrong := wrong or sorted(weights.keys() - own.keys()):
        what = "use the same flags" if not all("_head." in name for name in wrong) else "add --init-heads reset"
        raise InputError(f"--init-from {source}: its network is another one ({wrong[0]} does not fit): {what}.")
    agent.load_state_dict(weights)


def load_agent(run_dir: Path | str, device: torch.device | str = "cpu") -> tuple[torch.nn.Module, Any]:
    """The agent of a finished or running run, and its settings (the script's `Args`).

    The run's script is imported, as it is now: it must be where Python finds it, such as in the working directory.

    Raises:
        InputError: there is no such run, or its script or network is not what it was.
    """
    run_dir = Path(run_dir)
    meta, settings = read_json(run_dir / "meta.json"), read_json(run_dir / "args.json")
    if not (meta.get("script") and settings):
        raise InputError(f"{run_dir} is no run folder: it has no readable args.json.")
    try:
        script = importlib.import_module(Path(meta["script"]).stem)
        args = script.Args(**settings)
        weights = read_weights(run_dir / "model.pt")
    except (ImportError, AttributeError) as error:
        raise InputError(f"{run_dir} is of {meta['script']}, which cannot be used here: {error}.") from error
    except TypeError as error:
        raise InputError(f"{run_dir} is of a script with other flags ({error}): use its commit.") from None
    except Damaged as error:
        raise InputError(f"{run_dir / 'model.pt'} {error}.") from error
    envs = make_envs(args.env_id, len(args.env_id.split(",")), seed=0)
    agent = script.Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
    envs.close()
    accelerate(agent, "eager")
    try:
        agent.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"{run_dir} is of another network than this {meta['script']} has.") from error
    return agent, args
