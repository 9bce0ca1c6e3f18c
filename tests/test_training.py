"""Whole runs: collecting, repeatability, learning, and every Procgen game."""

import numpy as np
import pytest
import torch
from helpers import Silent, deterministic_files, evaluate, parameters
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppg
import ppo
from common.envs import make_envs
from common.load import load_agent
from common.procgen_env import PROCGEN_GAMES
from common.reward_scale import RewardNormalizer

quick = pytest.mark.quick
SCRIPTS = pytest.mark.parametrize("script", [ppo, ppg], ids=["ppo", "ppg"])


def collect(script, env_id, num_envs, num_steps, reward_normalizer=None, rollouts=1, prepare=lambda agent: None):
    """A rollout, the last of several, with its agent and the observations after it."""
    torch.manual_seed(0)
    envs = make_envs(env_id, num_envs, seed=0)
    spaces = envs.single_observation_space, envs.single_action_space
    agent = script.Agent(*spaces, script.Args())
    prepare(agent)
    rollout = script.new_rollout(num_steps, num_envs, *spaces, torch.device("cpu"))
    obs, step, run = torch.as_tensor(envs.reset(seed=0)[0]), 0, Silent()
    reward_normalizer = reward_normalizer or RewardNormalizer(num_envs, 0.9, "none")
    for _ in range(rollouts):
        obs, step = script.collect(agent, envs, rollout, obs, step, reward_normalizer, run)
    envs.close()
    assert run.steps == [num_envs * (t + 1) for t in range(num_steps * rollouts)]
    assert step == num_envs * num_steps * rollouts
    return agent, rollout, obs


@quick
@SCRIPTS
def test_collect_aligns_time_and_bootstraps_truncations(script):
    """TestCount-v0 shows the step's number in the episode and is cut by a time limit after step 5."""
    agent, rollout, obs = collect(script, "TestCount-v0", num_envs=3, num_steps=12)
    counts = torch.arange(12) % 5
    assert rollout.obs[:, 1, 0].tolist() == counts.tolist()
    assert obs[:, 0].tolist() == [2, 2, 2]
    assert rollout.dones[:, 1].tolist() == (counts == 4).float().tolist()
    assert (rollout.rewards == 1).all()
    with torch.no_grad():
        final_value = agent.get_value(torch.tensor([[5.0]]))
        torch.testing.assert_close(rollout.values[:, 1], agent.get_value(rollout.obs[:, 1]))
    torch.testing.assert_close(rollout.truncation_values[:, 1], (counts == 4) * final_value)


@quick
@SCRIPTS
def test_collect_does_not_bootstrap_terminations(script):
    """TestBits-v0 ends by itself in step 10, its time limit; a rollout filled twice keeps no old bootstrap values."""
    _, rollout, _ = collect(script, "TestBits-v0", num_envs=2, num_steps=10, rollouts=2)
    assert rollout.dones[9].tolist() == [1, 1]
    assert (rollout.truncation_values == 0).all()
    _, rollout, _ = collect(script, "TestCount-v0", num_envs=2, num_steps=6, rollouts=2)
    assert (rollout.truncation_values != 0).sum() == 2  # steps 5 and 10 lie in different rollouts


@quick
@SCRIPTS
@pytest.mark.parametrize("norm_reward", ["none", "return"])
def test_a_reward_for_the_last_step_alone_is_learnt_from(script, norm_reward):
    """TestLast-v0 pays 1 for step 3, the end of its episode, and nothing else. All values are .5 here."""

    def prepare(agent):
        agent.value_head.weight.data.zero_()
        agent.value_head.bias.data.fill_(0.5)

    normalizer = RewardNormalizer(2, 0.9, norm_reward)
    _, rollout, _ = collect(script, "TestLast-v0", 2, num_steps=8, reward_normalizer=normalizer, prepare=prepare)
    ends = (torch.arange(8) % 3 == 2).float()
    scale = 1.0 if norm_reward == "none" else rollout.rewards[2, 0].item()
    assert scale > 0
    for n in range(2):
        assert rollout.dones[:, n].tolist() == ends.tolist()
        assert rollout.rewards[:, n].tolist() == (scale * ends).tolist()
    advantages = script.compute_gae(rollout, torch.full((2,), 0.5), gamma=0.9, gae_lambda=0.8)
    last = scale - 0.5
    before = 0.9 * 0.5 - 0.5 + 0.9 * 0.8 * last
    first = 0.9 * 0.5 - 0.5 + 0.9 * 0.8 * before
    open_end = 0.9 * 0.5 - 0.5  # of the episode that goes on after the rollout
    expected = [first, before, last] * 2 + [open_end + 0.9 * 0.8 * open_end, open_end]
    for n in range(2):
        assert advantages[:, n].tolist() == pytest.approx(expected, rel=1e-5)


@quick
@SCRIPTS
def test_collect_stores_what_the_policy_did(script):
    agent, rollout, _ = collect(script, "TestBits-v0", num_envs=4, num_steps=8)
    obs, actions = rollout.obs.flatten(0, 1), rollout.actions.flatten(0, 1)
    dist = script.action_dist(agent.action_space, agent.get_policy(obs))
    torch.testing.assert_close(dist.log_prob(actions), rollout.logprobs.flatten())
    expected = (actions == obs).float().mean(-1)  # the reward stands at the index of the action that earned it
    torch.testing.assert_close(rollout.rewards.flatten(), expected)


@quick
@SCRIPTS
def test_collect_normalises_rewards(script):
    _, raw, _ = collect(script, "TestBits-v0", num_envs=4, num_steps=32)
    _, scaled, _ = collect(script, "TestBits-v0", num_envs=4, num_steps=32, reward_normalizer=RewardNormalizer(4, 0.9))
    expected = RewardNormalizer(4, 0.9)(raw.rewards.numpy(), raw.dones.numpy())
    np.testing.assert_allclose(scaled.rewards.numpy(), expected, rtol=1e-6)
    assert not np.allclose(expected, raw.rewards.numpy())


def short_args(script, tmp_path, **settings):
    """Three iterations, or updates."""
    sizes = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 96, "device": "cpu"}
    if script is ppg:
        sizes |= {"n_pi": 2, "e_aux": 1}
    return script.Args(**(sizes | {"runs_dir": str(tmp_path)} | settings))


def tiny_args(script, tmp_path, **settings):
    """As few frames as show that Procgen and the convolutions are in order: three iterations of eight frames."""
    tiny = {"num_steps": 2, "total_timesteps": 24, "feature_dim": 16, "num_threads": 1}
    if script is ppo:
        tiny["update_epochs"] = 1
    return short_args(script, tmp_path, **tiny | settings)


@SCRIPTS
@pytest.mark.parametrize("env_id", ["coinrun,maze", "CartPole-v1", "Pendulum-v1"])
def test_same_seed_same_run(script, env_id, tmp_path):
    sized = short_args if env_id.endswith("-v1") else tiny_args
    first, second, other = (script.main(sized(script, tmp_path, env_id=env_id, seed=seed)) for seed in (5, 5, 6))
    a, b, c = (parameters(run_dir) for run_dir in (first, second, other))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)
    assert deterministic_files(first) == deterministic_files(second)


def test_same_seed_same_run_in_bf16_on_two_threads(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        args = tiny_args(ppo, tmp_path, precision="bf16", total_timesteps=16)
        a, b = (parameters(ppo.main(args)) for _ in range(2))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("game", PROCGEN_GAMES)
def test_every_game(game, tmp_path):
    run_dir = ppo.main(tiny_args(ppo, tmp_path, env_id=game, num_envs=2, total_timesteps=8))
    load_agent(run_dir)


@pytest.mark.parametrize("settings", [
    {"arch": "dual", "num_aux_grad_accum": 2}, {"arch": "shared", "kl_penalty": 1.0}, {"e_value": 2},
    {"clip_coef_vf": 0.2, "max_grad_norm": 0.5, "norm_adv": "minibatch", "target_kl": 0.01, "norm_reward": "none"},
])  # fmt: skip
def test_ppg_variants_run(settings, tmp_path):
    run_dir = ppg.main(tiny_args(ppg, tmp_path, **settings))
    assert all(torch.isfinite(value).all() for value in parameters(run_dir).values())


@SCRIPTS
def test_learning_rate_falls_linearly_over_the_whole_run(script, tmp_path):
    """CleanRL's PPG restarts the schedule in every phase. 5 iterations: 2 phases of 2 and a remainder."""
    args = short_args(
        script, tmp_path, env_id="CartPole-v1", total_timesteps=5 * 32, anneal_lr=True, learning_rate=1.0e-3
    )
    events = EventAccumulator(str(script.main(args))).Reload()
    rates = [event.value for event in events.Scalars("charts/learning_rate")]
    assert rates == pytest.approx([1.0e-3 * (1 - i / 5) for i in range(5)])


def test_learning_rate_reaches_the_auxiliary_optimizer(tmp_path, monkeypatch):
    seen = []

    def spy(agent, optimizer, *rest):
        seen.append(optimizer.param_groups[0]["lr"])
        return phase(agent, optimizer, *rest)

    phase = ppg.auxiliary_phase
    monkeypatch.setattr(ppg, "auxiliary_phase", spy)
    ppg.main(
        short_args(ppg, tmp_path, env_id="CartPole-v1", total_timesteps=4 * 32, anneal_lr=True, learning_rate=1e-3)
    )
    assert seen == pytest.approx([1e-3 * (1 - 1 / 4), 1e-3 * (1 - 3 / 4)])


# ------------------------------------------------------------------------------------------------------- learning

# PPG's losses on these spaces are held to closed forms in test_losses and test_ppg; a whole run takes a minute.
SOAKED = [ppo, pytest.param(ppg, marks=pytest.mark.soak)]
PPO_AND_PPG_IN_SOAK = pytest.mark.parametrize("script", SOAKED, ids=["ppo", "ppg"])

CARTPOLE = {
    "env_id": "CartPole-v1", "num_envs": 8, "num_steps": 128, "gamma": 0.99, "norm_reward_gamma": 0.99,
    "total_timesteps": 200_000, "anneal_lr": True, "device": "cpu",
}  # fmt: skip


@SCRIPTS
def test_solves_cartpole(script, tmp_path):
    args = script.Args(runs_dir=str(tmp_path), **CARTPOLE)
    if script is ppg:
        args.n_pi = 8
    assert evaluate(script.main(args)) >= 475


@PPO_AND_PPG_IN_SOAK
def test_improves_pendulum(script, tmp_path):
    """A random policy scores about -1200, a good one better than -200."""
    args = script.Args(
        runs_dir=str(tmp_path), env_id="Pendulum-v1", num_envs=16, num_steps=128, gamma=0.9, norm_reward_gamma=0.9,
        total_timesteps=300_000, learning_rate=1e-3, ent_coef=0.0, anneal_lr=True, device="cpu",
    )  # fmt: skip
    if script is ppg:
        args.n_pi, args.e_policy, args.e_value = 8, 4, 4
    else:
        args.update_epochs = 10
    assert evaluate(script.main(args)) > -400


@PPO_AND_PPG_IN_SOAK
def test_learns_multibinary_actions(script, tmp_path):
    """TestBits-v0 pays 5 a episode for random bits and 10 for the right ones."""
    args = script.Args(
        runs_dir=str(tmp_path), env_id="TestBits-v0", num_envs=8, num_steps=64, gamma=0.9, norm_reward_gamma=0.9,
        total_timesteps=40_000, learning_rate=2e-3, anneal_lr=True, device="cpu",
    )  # fmt: skip
    if script is ppg:
        args.n_pi = 8
    assert evaluate(script.main(args)) > 9.5
