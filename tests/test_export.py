"""benchmarks/export.py: the policy in a file that needs none of this code."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import impala
import ppg
import ppo
from common.checkpoint import load_agent
from common.errors import InputError, TrainingError

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import export

CASES = [
    (ppo, {"env_id": "starpilot", "precision": "bf16"}),
    (ppo, {"env_id": "Pendulum-v1"}),
    (ppo, {"env_id": "TestDouble-v0"}),
    (ppg, {"env_id": "starpilot", "arch": "dual"}),
    (impala, {"env_id": "CartPole-v1"}),
    (impala, {"env_id": "starpilot", "use_lstm": True}),
]

WITHOUT_OUR_CODE = """
import sys, torch
policy, inputs = torch.jit.load(sys.argv[1]), torch.load(sys.argv[2])
torch.save(policy(*inputs), sys.argv[3])
"""


@pytest.mark.parametrize(("script", "settings"), CASES, ids=str)
def test_exported_policy_gives_the_same_logits(script, settings, tmp_path):
    small = {"num_envs": 4, "num_steps": 8, "total_timesteps": 32, "num_minibatches": 2, "device": "cpu"}
    if script is impala:
        small |= {"batch_size": 4, "num_actors": 0}
    run_dir = script.main(script.Args(**small | settings, runs_dir=str(tmp_path / "runs")))
    export.export(run_dir, tmp_path / "policy.pt")
    agent, args = load_agent(run_dir)
    agent.bf16 = False
    shape = {"starpilot": (64, 64, 3), "Pendulum-v1": (3,), "CartPole-v1": (4,), "TestDouble-v0": (1,)}[args.env_id]
    obs = torch.randint(0, 256, (5, *shape), dtype=torch.uint8) if len(shape) == 3 else torch.randn(5, *shape)
    state = (torch.randn(2, 5, args.feature_dim),) if settings.get("use_lstm") else ()
    torch.save((obs, *state), tmp_path / "inputs.pt")
    command = [sys.executable, "-c", WITHOUT_OUR_CODE, *(str(tmp_path / f"{name}.pt") for name in ("policy", "inputs"))]
    subprocess.run([*command, str(tmp_path / "outputs.pt")], cwd=tmp_path, check=True)
    found = torch.load(tmp_path / "outputs.pt")
    with torch.no_grad():
        if state:
            params, _, next_state = agent.step(obs, *state)
            torch.testing.assert_close(found[1], next_state, rtol=0, atol=1e-4)
            found = found[0]
        else:
            dist, _ = agent.get_action_dist(obs)
            params = torch.cat([dist.mean, dist.stddev.log()], -1) if args.env_id == "Pendulum-v1" else None
            params = dist.logits if params is None else params
            found = found if args.env_id == "Pendulum-v1" else found.log_softmax(-1)
    torch.testing.assert_close(found, params, rtol=0, atol=1e-4)
    assert params.abs().max() > 1e-3


def test_a_policy_that_differs_is_not_written(tmp_path, monkeypatch):
    small = {"num_envs": 4, "num_steps": 8, "total_timesteps": 32, "num_minibatches": 2, "device": "cpu"}
    run_dir = ppo.main(ppo.Args(env_id="CartPole-v1", **small, runs_dir=str(tmp_path / "runs")))
    trace = torch.jit.trace

    def other(policy, inputs):
        agent, _ = load_agent(run_dir)
        agent.policy_head.linear.bias.data += 1e-3
        return trace(export.Policy(agent).eval(), inputs)

    monkeypatch.setattr(torch.jit, "trace", other)
    with pytest.raises(TrainingError, match=r"differs from the agent, by up to 0\.001"):
        export.export(run_dir, tmp_path / "policy.pt")
    assert not (tmp_path / "policy.pt").exists()
    with pytest.raises(InputError, match="no run folder"):
        export.export(tmp_path, tmp_path / "policy.pt")
