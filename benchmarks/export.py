"""Write a run's policy as TorchScript: a file that runs without this code, in Python or C++.

    python benchmarks/export.py runs/starpilot__ppg__1__1795202643 --out policy.pt

The exported policy takes a batch of observations, uint8 frames [B, height, width, channels] or float32 vectors
[B, size], and returns the parameters of the action distributions, float32 [B, P] (of discrete actions the logits), as
`get_action_dist` makes them, in float32 throughout. With an LSTM it takes and returns the state [2, B, H], too, which
is zero where an episode starts. It is compared with the agent before it is written.
"""

import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from common.envs import make_envs
from common.errors import InputError, TrainingError
from common.files import write_atomically
from common.load import load_agent
from common.signals import one_line_errors

TOLERANCE = 1e-4  # of logits: PyTorch's kernels and ours add up in another order


@dataclass
class Args:
    source: tyro.conf.Positional[Path]
    """run folder, model or checkpoint"""
    out: Path
    """file to write; it must be new, so that no model is lost"""


class Policy(nn.Module):
    """What is exported of an agent."""

    def __init__(self, agent: nn.Module):
        super().__init__()
        self.agent = agent

    def forward(self, obs: Tensor, state: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if not hasattr(self.agent, "step"):
            return self.agent.get_policy(obs)
        params, _, next_state = self.agent.step(obs, self.agent.initial_state(len(obs)) if state is None else state)
        return params if state is None else (params, next_state)


def export(source: Path, out: Path) -> torch.jit.ScriptModule:
    """Write the policy in a run folder, model or checkpoint to `out`, and return it. Raises InputError if there is no
    agent, or `out` exists or cannot be written; TrainingError if the exported policy does not give what the agent does.
    """
    if os.path.exists(out):
        raise InputError(f"--out {out} exists: choose another name, or remove it first.")
    agent, args = load_agent(source)
    agent.bf16 = False
    envs = make_envs(args.env_id, 8 * len(args.env_id.split(",")), seed=1, distribution_mode=args.distribution_mode)
    obs = torch.as_tensor(envs.reset(seed=1)[0])
    obs = obs if obs.dim() == 4 else obs.float()
    envs.close()
    inputs = (obs,)
    if getattr(agent, "lstm", None) is not None:
        inputs += (torch.randn_like(agent.initial_state(len(obs))),)
    policy = Policy(agent).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript itself
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of sizes that might be kept: see below
        scripted = torch.jit.freeze(torch.jit.trace(policy, inputs))
        for size in (len(obs), 1):  # and another batch than the one that it was traced with
            batch = tuple(x[:, :size] if x is not obs else x[:size] for x in inputs)
            expected, found = policy(*batch), scripted(*batch)
            for mine, theirs in zip(*((x,) if isinstance(x, Tensor) else x for x in (expected, found)), strict=True):
                error = (mine - theirs).abs().max().item()
                if not error <= TOLERANCE:
                    raise TrainingError(f"the exported policy differs from the agent, by up to {error:.3g}")
    try:
        write_atomically(out, scripted.save_to_buffer())
    except OSError as error:
        raise InputError(f"--out {out} cannot be written ({error.strerror}).") from error
    return scripted


def main(args: Args) -> None:
    export(args.source, args.out)
    print(f"{args.out} gives the same as the agent of {args.source} (within {TOLERANCE}, float32).")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
