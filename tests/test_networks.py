"""Encoders and initial weights; the blocks that the scripts must hold byte for byte; and how long a script is."""

import inspect
import math
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import evaluate
import impala
import ppg
import ppo
from conftest import CountEnv
from helpers import ALL, small_args

FRAMES = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
COMMON = Path(__file__).parent.parent / "common"


# All that differs is here; any other function or class that two scripts define must be the same in both.
DIFFERENT = {
    ppg: {"Args", "Agent", "policy_loss", "ppo_loss", "update", "main"},
    impala: {"Args", "Agent", "value_loss", "update", "main"},
}


@pytest.mark.parametrize("script", DIFFERENT, ids=lambda script: script.__name__)
def test_what_scripts_share_is_the_same(script):
    shared = []
    for name, value in vars(ppo).items():
        if getattr(value, "__module__", None) == "ppo" and hasattr(script, name) and name not in DIFFERENT[script]:
            assert inspect.getsource(value) == inspect.getsource(getattr(script, name)), name
            shared.append(name)
    assert {"ResidualBlock", "ImpalaCNN", "make_encoder", "explained_variance"} < {*shared}


def test_the_files_of_common_lie_in_layers():
    """As common/README.md lists them: each imports from files before it alone, and none imports a script.

    Beside the scripts, only what loads an agent imports the folder for speed.
    """
    text = (COMMON / "README.md").read_text()
    order = re.search(r"imports from files before it alone: ([^.]*)\.", text)[1].replace("\n", " ").split(", ")
    assert sorted(order) == sorted(path.stem for path in COMMON.glob("*.py") if path.stem != "__init__")
    for number, name in enumerate(order):
        source = (COMMON / f"{name}.py").read_text()
        found = set(re.findall(r"^ *from common\.(\w+)", source, re.M))
        assert found <= {*order[:number]} | ({"fast"} if name == "checkpoint" else set()), name
        assert not re.search(r"^\s*(from|import) (ppo|ppg|impala)\b", source, re.M), name


def length(*paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_sizes():
    for script, lines, lines_of_main in ((ppo, 450, 60), (ppg, 600, 70), (impala, 680, 75)):
        assert length(Path(script.__file__)) <= lines
        assert len(inspect.getsource(script.main).splitlines()) <= lines_of_main
    assert len(list(COMMON.glob("*.py"))) <= 14
    assert length(*COMMON.glob("*.py")) <= 2535  # the bounds are below: until they hold, it may not grow
    assert length(*COMMON.rglob("*.py")) <= 3461


@pytest.mark.xfail(strict=True, reason="levels, a second Procgen package, stacks of frames and progress exceed it")
def test_common_is_within_its_bounds():
    assert length(*COMMON.glob("*.py")) <= 2246  # and should be 2000
    assert length(*COMMON.rglob("*.py")) <= 3177  # with common/fast/


@ALL
@pytest.mark.parametrize(("shape", "first"), [((4, 33, 47), True), ((7, 7, 20), False), ((12, 40, 24), True)])
def test_stacks_of_frames_come_with_their_channels_first_or_last(script, shape, first):
    """Of any size. FrameStackObservation puts the frames into a new first dimension. The channels are the fewer."""
    torch.manual_seed(0)
    agent = script.Agent(gym.spaces.Box(0, 255, shape, np.uint8), gym.spaces.Discrete(3), script.Args())
    frames = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    agent.encoder.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    seen = []
    agent.get_action_dist(frames)
    assert torch.equal(seen[0], (frames if first else frames.permute(0, 3, 1, 2)) / 255)


@ALL
def test_an_own_encoder_sees_real_numbers_as_they_are(script, tmp_path, monkeypatch):
    """Images of float64, as float32: in rollouts, at time limits, in evaluations and exports."""
    monkeypatch.setattr(CountEnv, "observation_space", gym.spaces.Box(0, 1, (2, 2, 1), np.float64))
    monkeypatch.setattr(CountEnv, "observe", lambda env: np.full((2, 2, 1), 0.3))
    seen, own = [], lambda *given: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 16))
    monkeypatch.setattr(script, "make_encoder", own)
    monkeypatch.setattr(torch.nn.Flatten, "forward", lambda _, x: seen.append(x.flatten()) or x.flatten(1))
    sizes = {"num_steps": 8, "total_timesteps": 64, "n_pi": 2, "feature_dim": 16}
    evaluated = {"env_id": "TestCount-v0", "eval_interval": 64, "eval_episodes": 1, "precision": "fp32"}
    path = script.main(small_args(script, tmp_path, sizes, **evaluated))
    evaluate.export(path, tmp_path / "policy.pt")
    assert torch.cat(seen).unique().tolist() == [np.float32(0.3)]


def layers_of(init_fn):
    """Weights by the role of their layer: [outputs, inputs]; every bias is 0."""
    torch.manual_seed(0)
    agent = ppo.Agent(FRAMES, gym.spaces.Discrete(15), ppo.Args(init_fn=init_fn))
    if init_fn != "identity":
        assert all((p == 0).all() for name, p in agent.named_parameters() if name.endswith("bias"))
    assert sum(p.numel() for p in agent.encoder.parameters()) == 622_144  # by hand, from figure 3 of the IMPALA paper
    layers = agent.encoder.layers
    roles = {"conv": layers[0], "residual": layers[2].conv1, "dense": layers[14]}
    roles |= {"policy": agent.policy_head.linear, "value": agent.value_head}
    return {role: layer.weight.detach().flatten(1) for role, layer in roles.items()}


def test_initial_weights():
    """Identity is what PyTorch gives a layer: uniform within 1 / sqrt(inputs)."""
    norms = {"conv": 1, "residual": 6**-0.25, "dense": 1.4, "policy": 0.1, "value": 0.1}
    for role, weight in layers_of("normed").items():
        rows = weight.norm(dim=1)
        torch.testing.assert_close(rows, torch.full_like(rows, norms[role]), msg=role)
    weight = layers_of("orthogonal")["policy"]
    torch.testing.assert_close(weight @ weight.T, 1e-4 * torch.eye(15), atol=1e-8, rtol=0)
    uniform, normal, identity = (layers_of(name) for name in ("xavier_uniform", "xavier_normal", "identity"))
    bound = math.sqrt(6 / (9 * 3 + 9 * 16))
    assert 0.9 * bound < uniform["conv"].abs().max() <= bound
    assert normal["dense"].std().item() == pytest.approx(math.sqrt(2 / (2048 + 256)), rel=0.01)
    assert normal["dense"].abs().max() > 4 * normal["dense"].std()  # a normal distribution has tails
    assert normal["policy"].std().item() == pytest.approx(0.01 * math.sqrt(2 / (256 + 15)), rel=0.1)
    for role, inputs in (("conv", 27), ("dense", 2048), ("value", 256)):
        assert 0.9 * inputs**-0.5 < identity[role].abs().max() <= inputs**-0.5
