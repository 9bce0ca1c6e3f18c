"""Encoders, initial weights and agents; the blocks that the scripts must hold byte for byte; and what a script is."""

import inspect
import math
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import common
import impala
import ppg
import ppo
from common.networks import PolicyHead
from helpers import ALL, PPO_AND_PPG

FRAMES = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
COMMON = Path(__file__).parent.parent / "common"


# ------------------------------------------------------------------------------------------------- what a script is

# All that differs is here; any other function or class that two scripts define must be the same in both.
DIFFERENT = {
    ppg: {"Args", "Agent", "policy_loss", "ppo_loss", "update", "main"},
    impala: {"Args", "Agent", "value_loss", "update", "main"},
}


def shared_blocks(script):
    defined = {
        name
        for name, value in vars(ppo).items()
        if (inspect.isroutine(value) or inspect.isclass(value)) and value.__module__ == "ppo"
    }
    return sorted(name for name in defined - DIFFERENT[script] if hasattr(script, name))


def test_the_blocks_to_compare_are_found():
    networks = {"ResidualBlock", "ImpalaCNN", "make_encoder"}
    assert networks | {"explained_variance"} <= set(shared_blocks(ppg)) & set(shared_blocks(impala))
    gae = {"Rollout", "new_rollout", "select_steps", "collect", "compute_gae", "normalize_advantages", "value_loss"}
    assert gae <= set(shared_blocks(ppg))
    assert "policy_loss" in shared_blocks(impala)


@pytest.mark.parametrize(
    ("script", "block"),
    [(script, block) for script in DIFFERENT for block in shared_blocks(script)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_copies_are_equal(script, block):
    assert inspect.getsource(getattr(ppo, block)) == inspect.getsource(getattr(script, block))


def imports_from_common(source: str) -> list[tuple[str, str]]:
    """The files of common/ and the names that a file imports from them, also inside functions."""
    assert not re.search(r"^\s*(import common|from common import \*|from \.)", source, re.M)
    lines = re.findall(r"^ *from common(?:\.(\w+))?(?:\.\w+)? import (.+)$", source, re.M)
    return [(module, name) for module, names in lines for name in names.split(", ")]


def test_the_files_of_common_lie_in_layers():
    """As common/__init__.py lists them: each imports from files before it alone, and none imports a script.

    Beside the scripts, only what loads an agent imports the folder for speed.
    """
    order = re.findall(r"^(\w+)  ", common.__doc__, re.M)
    assert sorted(order) == sorted(path.stem for path in COMMON.glob("*.py") if path.stem != "__init__")
    for number, name in enumerate(order):
        source = (COMMON / f"{name}.py").read_text()
        found = {module for module, _ in imports_from_common(source)} - {""}
        assert found <= {*order[:number]} | ({"fast"} if name == "checkpoint" else set()), name
        assert not re.search(r"^\s*(from|import) (ppo|ppg|impala)\b", source, re.M), name


@ALL
def test_a_script_holds_its_network(script):
    """Encoder, agent, losses and the update are the script's own; layers are PyTorch's, but for the policy's head."""
    for space in (FRAMES, gym.spaces.Box(-1, 1, (3,), np.float32)):
        agent = script.Agent(space, gym.spaces.Discrete(3), script.Args())
        modules = {type(module) for module in agent.modules()} - {PolicyHead}
        assert {module.__module__.partition(".")[0] for module in modules} == {"torch", script.__name__}
    own = "make_encoder", "policy_loss", "value_loss", "update"
    assert {vars(script)[name].__module__ for name in own} == {script.__name__}


LENGTHS = {"ppo": (ppo, 450, 60), "ppg": (ppg, 600, 70), "impala": (impala, 680, 75)}


@pytest.mark.parametrize(("script", "lines", "lines_of_main"), LENGTHS.values(), ids=LENGTHS)
def test_a_script_is_short(script, lines, lines_of_main):
    assert len(inspect.getsource(script).splitlines()) <= lines
    assert len(inspect.getsource(script.main).splitlines()) <= lines_of_main


def test_what_the_scripts_share_does_not_grow():
    assert len(list(COMMON.glob("*.py"))) <= 14
    assert sum(len(path.read_text().splitlines()) for path in COMMON.glob("*.py")) <= 2000


# ------------------------------------------------------------------------------------------------------------ networks


def test_impala_cnn_has_the_published_size():
    """Worked out by hand from figure 3 of the IMPALA paper, for frames of 64 x 64 x 3."""
    expected = 0
    channels = 3
    for out in (16, 32, 32):
        expected += 9 * channels * out + out + 4 * (9 * out * out + out)
        channels = out
    expected += 32 * 8 * 8 * 256 + 256
    assert sum(p.numel() for p in ppo.ImpalaCNN((64, 64, 3), 256, "normed").parameters()) == expected == 622_144


@ALL
@pytest.mark.parametrize(("shape", "first"), [((4, 33, 47), True), ((33, 47, 4), False), ((12, 40, 24), True)])
def test_stacks_of_frames_come_with_their_channels_first_or_last(script, shape, first):
    """Of any size. FrameStackObservation puts the frames into a new first dimension. The channels are the fewer."""
    torch.manual_seed(0)
    agent = script.Agent(gym.spaces.Box(0, 255, shape, np.uint8), gym.spaces.Discrete(3), script.Args())
    frames = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    agent.encoder.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    seen = []
    agent.get_action_dist(frames)
    assert torch.equal(seen[0], (frames if first else frames.permute(0, 3, 1, 2)) / 255)


def test_normed_init_gives_rows_of_fixed_norm():
    torch.manual_seed(0)
    agent = ppg.Agent(FRAMES, gym.spaces.Discrete(15), ppg.Args())
    norms = {name: w.flatten(1).norm(dim=1) for name, w in agent.named_parameters() if name.endswith("weight")}
    for name, rows in norms.items():
        if "head" in name:
            scale = 0.1
        elif "conv" in name:
            scale = math.sqrt(1 / math.sqrt(3) / math.sqrt(2))
        else:
            scale = 1.4 if rows.numel() == 256 else 1.0
        torch.testing.assert_close(rows, torch.full_like(rows, scale), msg=name)
    assert all((p == 0).all() for name, p in agent.named_parameters() if name.endswith("bias"))


def test_orthogonal_and_xavier_init():
    torch.manual_seed(0)
    agent = ppo.Agent(FRAMES, gym.spaces.Discrete(15), ppo.Args(init_fn="orthogonal"))
    weight = agent.policy_head.linear.weight
    torch.testing.assert_close(weight @ weight.T, 1e-4 * torch.eye(15), atol=1e-8, rtol=0)
    agent = ppo.Agent(FRAMES, gym.spaces.Discrete(15), ppo.Args(init_fn="xavier_uniform"))
    weight = agent.encoder.layers[0].weight
    bound = math.sqrt(6 / (9 * 3 + 9 * 16))
    assert 0.9 * bound < weight.abs().max() <= bound


@ALL
def test_identity_and_xavier_normal_init(script):
    """Identity is what PyTorch gives a layer: uniform within 1 / sqrt(inputs), biases too."""
    torch.manual_seed(0)
    agent = script.Agent(FRAMES, gym.spaces.Discrete(15), script.Args(init_fn="identity"))
    for layer, inputs in ((agent.encoder.layers[0], 27), (agent.encoder.layers[14], 2048), (agent.value_head, 256)):
        bound = inputs**-0.5
        for values in (layer.weight, layer.bias):
            assert 0 < values.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
    agent = script.Agent(FRAMES, gym.spaces.Discrete(15), script.Args(init_fn="xavier_normal"))
    weight, bias = agent.encoder.layers[14].weight, agent.encoder.layers[14].bias
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (2048 + 256)), rel=0.01)
    assert weight.abs().max() > 4 * weight.std()  # a normal distribution has tails
    assert not bias.any()
    assert agent.policy_head.linear.weight.std().item() == pytest.approx(0.01 * math.sqrt(2 / (256 + 15)), rel=0.1)


@PPO_AND_PPG
def test_box_actions_are_not_clipped_by_the_agent(script):
    space = gym.spaces.Box(-0.01, 0.01, (2,), np.float32)
    agent = script.Agent(gym.spaces.Box(-1, 1, (3,), np.float32), space, script.Args())
    torch.manual_seed(0)
    action, logprob, *_ = agent.get_action_and_value(torch.zeros(100, 3))
    assert action.abs().max() > 1
    expected = torch.distributions.Normal(0, 1).log_prob(action).sum(-1)  # zero mean (bias 0), log std 0
    torch.testing.assert_close(logprob, expected, rtol=1e-4, atol=1e-4)
