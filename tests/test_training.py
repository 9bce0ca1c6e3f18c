"""Whole runs: repeatability and learning. What they learn from, step by step: test_restated."""

import pytest
import torch

import ppg
import ppo
from helpers import PPO_AND_PPG, evaluate, parameters, small_args


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

# PPG's losses on these spaces are held to closed forms in test_losses and test_ppg; a whole run takes a minute.
SOAKED = [ppo, pytest.param(ppg, marks=pytest.mark.soak)]
PPO_AND_PPG_IN_SOAK = pytest.mark.parametrize("script", SOAKED, ids=["ppo", "ppg"])


def learnt(script, tmp_path, env_id, gamma, **settings):
    """The mean return after a run."""
    settings |= {"norm_reward_gamma": gamma, "anneal_lr": True, "device": "cpu", "runs_dir": str(tmp_path)}
    return evaluate(script.main(script.Args(env_id=env_id, gamma=gamma, **settings)))


@PPO_AND_PPG
def test_solves_cartpole(script, tmp_path):
    sizes = {"num_envs": 8, "num_steps": 128, "total_timesteps": 200_000}
    assert learnt(script, tmp_path, "CartPole-v1", 0.99, **sizes) >= 475


@PPO_AND_PPG_IN_SOAK
def test_improves_pendulum(script, tmp_path):
    """A random policy scores about -1200, a good one better than -200."""
    settings = {"num_envs": 16, "num_steps": 128, "total_timesteps": 300_000, "learning_rate": 1e-3, "ent_coef": 0.0}
    settings |= {"e_policy": 4, "e_value": 4, "aux_learning_rate": 1e-3} if script is ppg else {"update_epochs": 10}
    assert learnt(script, tmp_path, "Pendulum-v1", 0.9, **settings) > -400


@PPO_AND_PPG_IN_SOAK
def test_learns_multibinary_actions(script, tmp_path):
    """TestBits-v0 pays 5 a episode for random bits and 10 for the right ones."""
    settings = {"num_envs": 8, "num_steps": 64, "total_timesteps": 40_000, "learning_rate": 2e-3}
    settings |= {"aux_learning_rate": 2e-3} if script is ppg else {}
    assert learnt(script, tmp_path, "TestBits-v0", 0.9, **settings) > 9.5
