"""benchmarks/export.py: the policy in a file that needs none of this code."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import export
import impala
import ppg
import ppo
from common import InputError, TrainingError
from common.checkpoint import load_agent

CASES = {
    "frames": (ppo, {"env_id": "starpilot", "precision": "bf16"}),
    "gaussian": (ppo, {"env_id": "Pendulum-v1"}),
    "float64": (ppo, {"env_id": "TestDouble-v0"}),
    "dual": (ppg, {"env_id": "starpilot", "arch": "dual"}),
    "vectors": (impala, {"env_id": "CartPole-v1"}),
    "lstm": (impala, {"env_id": "starpilot", "use_lstm": True}),
}
SHAPES = {"starpilot": (64, 64, 3), "Pendulum-v1": (3,), "CartPole-v1": (4,), "TestDouble-v0": (1,)}
SMALL = {"num_envs": 4, "num_steps": 2, "total_timesteps": 8, "num_minibatches": 2, "device": "cpu"}

WITHOUT_OUR_CODE = """
import sys, torch
for folder in sys.argv[1:]:
    policy, inputs = torch.jit.load(f"{folder}/policy.pt"), torch.load(f"{folder}/inputs.pt")
    torch.save(policy(*inputs), f"{folder}/outputs.pt")
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Agents, what is given to them, and what their exported policies make of it in a process without our code."""
    folders, found = {}, {}
    for case, (script, settings) in CASES.items():
        folder = folders[case] = tmp_path_factory.mktemp(case)
        more = {"batch_size": 4, "num_actors": 0} if script is impala else {}
        run_dir = script.main(script.Args(**SMALL | more | settings, runs_dir=str(folder / "runs")))
        export.export(run_dir, folder / "policy.pt")
        agent, args = load_agent(run_dir)
        agent.bf16 = False
        shape = SHAPES[args.env_id]
        obs = torch.randint(0, 256, (5, *shape), dtype=torch.uint8) if len(shape) == 3 else torch.randn(5, *shape)
        found[case] = agent, (obs, torch.randn(2, 5, args.feature_dim)) if case == "lstm" else (obs,)
        torch.save(found[case][1], folder / "inputs.pt")
    command = [sys.executable, "-c", WITHOUT_OUR_CODE, *map(str, folders.values())]
    subprocess.run(command, cwd=folders["frames"], check=True)
    return {case: (*found[case], torch.load(folder / "outputs.pt")) for case, folder in folders.items()}


@pytest.mark.parametrize("case", CASES)
def test_exported_policy_gives_the_same_logits(case, exported):
    agent, inputs, found = exported[case]
    with torch.no_grad():
        if case == "lstm":
            params, _, next_state = agent.step(*inputs)
            torch.testing.assert_close(found[1], next_state, rtol=0, atol=1e-4)
            found = found[0]
        else:
            dist, _ = agent.get_action_dist(*inputs)
            params = torch.cat([dist.mean, dist.stddev.log()], -1) if case == "gaussian" else dist.logits
            found = found if case == "gaussian" else found.log_softmax(-1)
    torch.testing.assert_close(found, params, rtol=0, atol=1e-4)
    assert params.abs().max() > 1e-3


def test_a_policy_that_differs_is_not_written(tmp_path, monkeypatch):
    run_dir = ppo.main(ppo.Args(env_id="CartPole-v1", **SMALL, runs_dir=str(tmp_path / "runs")))
    trace = torch.jit.trace

    def other(policy, inputs):
        agent, _ = load_agent(run_dir)
        agent.policy_head.linear.bias.data += 1e-3
        return trace(export.Policy(agent).eval(), inputs)

    monkeypatch.setattr(torch.jit, "trace", other)
    with pytest.raises(TrainingError, match=r"differs from the agent, by up to 0\.001"):
        export.export(run_dir, tmp_path / "policy.pt")
    assert not (tmp_path / "policy.pt").exists()
    with pytest.raises(InputError, match=r"model\.pt cannot be read \(No such file or directory\)"):
        export.export(tmp_path, tmp_path / "policy.pt")


def test_no_file_that_is_there_is_lost(tmp_path):
    model = ppo.main(ppo.Args(env_id="CartPole-v1", **SMALL, runs_dir=str(tmp_path / "runs"))) / "model.pt"
    content = model.read_bytes()
    for out in (model, Path("/dev/full"), tmp_path):
        with pytest.raises(InputError, match=f"^--out {out} exists: choose another name, or remove it first.$"):
            export.main(export.Args(model, out))
    assert model.read_bytes() == content
    with pytest.raises(InputError, match=r"policy\.pt cannot be written \(No such file or directory\)\.$"):
        export.main(export.Args(model, tmp_path / "nowhere" / "policy.pt"))
