"""Whole runs: repeatability and learning. What they learn from, step by step: test_restated."""

import pytest
import torch

import ppg
import ppo
from helpers import evaluate, parameters, small_args


def test_same_seed_same_run_in_bf16_on_two_threads(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    sizes = {"num_steps": 2, "total_timesteps": 16, "update_epochs": 1}
    args = small_args(ppo, tmp_path, sizes, env_id="starpilot", feature_dim=16, num_threads=1, precision="bf16")
    try:
        a, b = (parameters(ppo.main(args)) for _ in range(2))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------------------------- learning

# What a script's run needs, of the flags that it has, and the least mean return after it
TASKS = {
    "CartPole-v1": ({"gamma": 0.99, "num_envs": 8, "num_steps": 128, "total_timesteps": 200_000}, 474),
    # a random policy scores about -1200, a good one better than -200
    "Pendulum-v1": ({
        "gamma": 0.9, "num_envs": 16, "num_steps": 128, "total_timesteps": 300_000, "learning_rate": 1e-3,
        "aux_learning_rate": 1e-3, "ent_coef": 0.0, "e_policy": 4, "e_value": 4, "update_epochs": 10,
    }, -400),
    # pays 5 an episode for random bits and 10 for the right ones
    "TestBits-v0": ({
        "gamma": 0.9, "num_envs": 8, "num_steps": 64, "total_timesteps": 40_000, "learning_rate": 2e-3,
        "aux_learning_rate": 2e-3,
    }, 9.5),
}  # fmt: skip
# PPG's losses on these spaces are held to PyTorch's in test_losses; a whole run takes a minute.
CASES = [(ppo, env_id) for env_id in TASKS] + [(ppg, "CartPole-v1")]
CASES += [pytest.param(ppg, env_id, marks=pytest.mark.soak) for env_id in ("Pendulum-v1", "TestBits-v0")]


@pytest.mark.parametrize(("script", "env_id"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_learns(script, env_id, tmp_path):
    settings, least = TASKS[env_id]
    own = {name: value for name, value in settings.items() if hasattr(script.Args, name)}
    own |= {"norm_reward_gamma": settings["gamma"], "anneal_lr": True, "device": "cpu", "runs_dir": str(tmp_path)}
    assert evaluate(script.main(script.Args(env_id=env_id, **own))) > least
