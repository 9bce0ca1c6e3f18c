import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from helpers import level_seeds

from common.envs import make_envs
from common.errors import InputError
from common.procgen_env import PROCGEN_GAMES, PROCGEN_MODES, ProcgenVectorEnv
from common.reward_scale import RewardNormalizer, merge_moments, moments

ROOT = Path(__file__).parent.parent


def procgen_envs(env_id, num_envs, seed=0, **settings):
    return make_envs(env_id, num_envs, seed=seed, **{"num_threads": 0} | settings)


def random_actions(num_steps, num_envs, seed=0):
    return np.random.default_rng(seed).integers(0, 15, (num_steps, num_envs))


def play(envs, actions):
    """Frames [T + 1, ...], rewards [T, N], terminations [T, N], and the infos of each step; closes the environments."""
    frames, rewards, terminations, infos = [envs.reset(seed=0)[0]], [], [], []
    for action in actions:
        obs, reward, terminated, truncated, info = envs.step(action)
        assert not truncated.any()
        frames.append(obs)
        rewards.append(reward)
        terminations.append(terminated)
        infos.append(info)
    envs.close()
    return np.stack(frames), np.stack(rewards), np.stack(terminations), infos


def check_episodes(rewards, dones, infos):
    """Compare the episodes in `infos` with sums over `rewards` [T, N]; return the most episodes that one env had."""
    total, length, count = np.zeros(rewards.shape[1]), np.zeros(rewards.shape[1], int), np.zeros(rewards.shape[1], int)
    for t, info in enumerate(infos):
        total += rewards[t]
        length += 1
        assert ("episode" in info) == dones[t].any()
        if dones[t].any():
            np.testing.assert_array_equal(info["_episode"], dones[t])
            np.testing.assert_allclose(info["episode"]["r"][dones[t]], total[dones[t]], rtol=1e-6)
            np.testing.assert_array_equal(info["episode"]["l"][dones[t]], length[dones[t]])
            total[dones[t]], length[dones[t]] = 0, 0
            count += dones[t]
    return count.max()


def run_python(code, cwd):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


# ----------------------------------------------------------------------------------------------------------- Procgen


def test_procgen_is_a_vector_env():
    envs = procgen_envs("coinrun", 3)
    inner = envs.unwrapped
    assert isinstance(envs, VectorEnv)
    assert isinstance(inner, ProcgenVectorEnv)
    assert envs.num_envs == 3
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert envs.single_observation_space == gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    assert envs.single_action_space == gym.spaces.Discrete(15)
    assert envs.observation_space == batch_space(envs.single_observation_space, 3)
    assert envs.action_space == batch_space(envs.single_action_space, 3)
    obs, infos = envs.reset(seed=0)
    assert infos == {}
    assert obs in envs.observation_space
    envs.action_space.seed(0)
    for _ in range(3):
        obs, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
        assert obs.shape == (3, 64, 64, 3)
        assert obs.dtype == np.uint8
        assert obs.std() > 0
        assert rewards.shape == (3,)
        assert np.issubdtype(rewards.dtype, np.floating)
        assert terminations.shape == truncations.shape == (3,)
        assert terminations.dtype == truncations.dtype == np.bool_
        assert isinstance(infos, dict)
    envs.close()


def test_procgen_observations_are_not_overwritten_by_the_next_step():
    envs = procgen_envs("starpilot", 2)
    before, _ = envs.reset()
    kept = before.copy()
    after = before
    for action in random_actions(5, 2):
        after, *_ = envs.step(action)
    assert not np.array_equal(after, kept)
    np.testing.assert_array_equal(before, kept)
    envs.close()


def test_procgen_truncations_are_always_false_although_episodes_end():
    *_, terminations, _ = play(procgen_envs("bossfight", 4), random_actions(200, 4))  # play checks the truncations
    assert terminations.sum() > 4


@pytest.mark.parametrize("num_threads", [0, 2])
def test_procgen_same_seed_same_episodes(num_threads):
    actions = random_actions(100, 4)
    first = play(procgen_envs("starpilot", 4, seed=3), actions)
    second = play(procgen_envs("starpilot", 4, seed=3, num_threads=num_threads), actions)
    for a, b in zip(first[:3], second[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    assert first[1].any()


def test_procgen_different_seed_different_levels():
    levels = []
    for seed in (1, 2):
        envs = procgen_envs("coinrun", 8, seed=seed)
        levels.append(level_seeds(envs))
        envs.close()
    assert len({*levels[0], *levels[1]}) == 16  # drawn from 2^31: neither shared nor repeated


@pytest.mark.parametrize(("num_levels", "start_level"), [(1, 0), (3, 100), (20, 1000)])
def test_procgen_levels_stay_in_range(num_levels, start_level):
    envs = procgen_envs("bossfight", 8, num_levels=num_levels, start_level=start_level)
    seen = set(level_seeds(envs))
    ended = 0
    for action in random_actions(300, 8):
        _, _, terminations, *_ = envs.step(action)
        if terminations.any():
            seen |= set(level_seeds(envs))
            ended += terminations.sum()
    envs.close()
    assert ended > 8
    assert seen <= set(range(start_level, start_level + num_levels))
    assert len(seen) > num_levels // 2


def games_played(envs):
    """The game's name that each environment's saved state begins with: 4 bytes, its length, and the name itself."""
    states = envs.unwrapped.gym3_env.get_state()
    return [state[8 : 8 + int.from_bytes(state[4:8], "little")].decode() for state in states]


@pytest.mark.parametrize("games", [["coinrun"], ["coinrun", "starpilot"], ["maze", "heist", "coinrun"]])
def test_procgen_env_i_plays_game_i(games):
    envs = procgen_envs(",".join(games), 6)
    assert games_played(envs) == [games[i % len(games)] for i in range(6)]
    obs, _ = envs.reset()
    envs.close()
    # The draws of the levels do not depend on the games, so that a game alone starts with the same frames.
    for g, game in enumerate(games):
        alone = procgen_envs(game, 6)
        np.testing.assert_array_equal(obs[g :: len(games)], alone.reset()[0][g :: len(games)])
        alone.close()


def test_procgen_tables_are_those_of_the_package():
    from procgen import env

    assert PROCGEN_GAMES == env.ENV_NAMES
    assert PROCGEN_MODES.keys() == env.DISTRIBUTION_MODE_DICT.keys()
    assert sorted(PROCGEN_MODES["exploration"]) == sorted(env.EXPLORATION_LEVEL_SEEDS)


def test_procgen_every_supported_pair_of_game_and_mode_can_be_made_and_prints_nothing(tmp_path):
    # In a process of its own: on an unsupported pair the C++ code aborts the whole process. The last line printed is
    # then the culprit.
    code = """
import numpy as np
from common.envs import make_envs
from common.procgen_env import PROCGEN_MODES
for mode, games in PROCGEN_MODES.items():
    for game in games:
        print(game, mode, flush=True)
        envs = make_envs(game, 1, seed=0, distribution_mode=mode, num_threads=0)
        obs, *_ = envs.step(np.zeros(1, np.int64))
        assert obs.std() > 0
        envs.close()
"""
    result = run_python(code, tmp_path)
    assert result.returncode == 0, f"aborted at {result.stdout.splitlines()[-1:]}: {result.stderr}"
    pairs = [f"{game} {mode}" for mode, games in PROCGEN_MODES.items() for game in games]
    assert (result.stdout.splitlines(), result.stderr) == (pairs, "")  # the packages below print nothing


def test_procgen_exploration_is_one_level_and_hard_differs_from_easy():
    envs = procgen_envs("coinrun", 4, distribution_mode="exploration")
    assert len(set(level_seeds(envs))) == 1
    envs.close()
    frames = []
    for mode in ("easy", "hard"):
        envs = procgen_envs("maze", 4, distribution_mode=mode)
        frames.append(envs.reset()[0])
        envs.close()
    assert not np.array_equal(*frames)


@pytest.mark.parametrize("game", ["chaser", "starpilot", "bossfight"])
def test_procgen_records_every_episode(game):
    _, rewards, terminations, infos = play(procgen_envs(game, 4), random_actions(400, 4))
    assert check_episodes(rewards, terminations, infos) >= 4


def test_procgen_reward_of_the_last_action_belongs_to_the_episode_it_ends():
    # A jumper's only reward, 10, ends its episode: it has to come with the termination, not a step later.
    _, rewards, terminations, infos = play(procgen_envs("jumper", 16), random_actions(300, 16))
    won = rewards != 0
    assert won.sum() >= 3
    assert terminations[won].all()
    for t, env in np.argwhere(terminations):
        assert infos[t]["episode"]["r"][env] == rewards[t, env] == (10 if won[t, env] else 0)


def test_procgen_replay_shows_the_frames_again():
    envs = procgen_envs("starpilot", 4, num_groups=2)
    envs.reset()
    start, actions = envs.state_dict(), torch.as_tensor(random_actions(12, 4)).view(3, 4, 4)
    seen = torch.empty(3, 4, 4, 64, 64, 3, dtype=torch.uint8)
    for k, t in np.ndindex(3, 4):
        seen[k, t] = torch.as_tensor(envs.obs)
        for group, part in envs.groups:
            group.step(actions[k, t, part].numpy())
    last, frames = envs.obs.copy(), torch.empty_like(seen)
    envs.replay(start, actions, frames)
    assert torch.equal(frames, seen)
    assert np.array_equal(envs.obs, last)
    with pytest.raises(InputError, match="the environments do not repeat what they did"):
        envs.replay(start, actions.flip(0), frames)
    envs.close()


# --------------------------------------------------------------------------------------------------------- Gymnasium


def test_gymnasium_tasks_start_new_episodes_and_say_so(capsys):
    envs = make_envs("CartPole-v1", 2, seed=0)
    first = envs.reset(seed=0)[0].copy()
    envs.step(np.zeros(2, np.int64))
    state = envs.state_dict()
    assert not envs.restorable
    assert state == [{}, {}]
    envs.load_state_dict(state)
    assert capsys.readouterr().err == "note: the environments cannot be put back where they were: new episodes begin\n"
    assert np.abs(envs.obs).max() <= 0.05  # as CartPole begins an episode
    assert not np.array_equal(envs.obs, first)  # but another than the run began with
    *_, infos = envs.step(np.zeros(2, np.int64))
    for _ in range(20):
        if "episode" in infos:
            break
        *_, infos = envs.step(np.zeros(2, np.int64))
    assert infos["episode"]["r"].max() <= 21  # without the step of before
    envs.close()


def test_gymnasium_cartpole_shapes_and_episodes():
    envs = make_envs("CartPole-v1", 3, seed=0)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert envs.single_observation_space.shape == (4,)
    assert envs.single_action_space == gym.spaces.Discrete(2)
    obs, rewards, terminations, infos = play(envs, random_actions(150, 3) % 2)
    assert obs.shape == (151, 3, 4)
    assert obs.dtype == np.float32
    # Every step gives 1, so that an episode's return is its length only if its first reward is counted in it.
    assert (rewards == 1).all()
    assert check_episodes(rewards, terminations, infos) >= 2


def test_gymnasium_seeds():
    firsts = []
    for seed in (0, 0, 1):
        envs = make_envs("CartPole-v1", 2, seed=seed)
        firsts.append(envs.reset(seed=seed)[0])
        envs.close()
    np.testing.assert_array_equal(firsts[0], firsts[1])
    np.testing.assert_array_equal(firsts[0][1], firsts[2][0])  # environment i has seed + i
    assert not np.array_equal(firsts[0][0], firsts[0][1])


class ActionRecorder(gym.Env):
    """Two-step episodes; keeps the actions it gets."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, action_space, render_mode=None):
        self.action_space, self.actions = action_space, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.actions.append(action)
        return np.zeros(2, np.float32), 0.0, len(self.actions) % 2 == 0, False, {}


@pytest.fixture
def recorder_id():
    """Registers ActionRecorder, which takes `action_space`, and cleans up."""
    ids = []

    def register(action_space):
        ids.append(f"TestActionRecorder{len(ids)}-v0")
        gym.register(ids[-1], entry_point=ActionRecorder, kwargs={"action_space": action_space})
        return ids[-1]

    yield register
    for env_id in ids:
        del gym.registry[env_id]


def actions_received(envs):
    return [env.unwrapped.actions[-1] for env in envs.unwrapped.envs]


def test_gymnasium_box_actions_reach_the_environment_clipped(recorder_id):
    low, high = np.array([-1, 0], np.float32), np.array([1, 3], np.float32)
    envs = make_envs(recorder_id(gym.spaces.Box(low, high)), 2, seed=0)
    envs.reset(seed=0)
    actions = np.array([[-7, 8], [0.5, -0.25]], np.float32)
    envs.step(actions)
    np.testing.assert_array_equal(actions_received(envs), [[-1, 3], [0.5, 0]])
    np.testing.assert_array_equal(actions, np.array([[-7, 8], [0.5, -0.25]], np.float32))  # the agent's stay as drawn
    envs.close()


def test_gymnasium_multibinary_actions_become_int8(recorder_id):
    envs = make_envs(recorder_id(gym.spaces.MultiBinary(3)), 2, seed=0)
    envs.reset(seed=0)
    actions = np.array([[1, 0, 1], [0, 0, 1]], np.float32)  # as torch's Bernoulli draws them
    obs, *_ = envs.step(actions)
    assert obs.shape == (2, 2)
    for received, sent in zip(actions_received(envs), actions, strict=True):
        assert received.dtype == np.int8
        assert received.shape == (3,)
        np.testing.assert_array_equal(received, sent)
    envs.close()


def test_gymnasium_time_limit():
    envs = make_envs("Pendulum-v1", 3, seed=0)
    envs.reset(seed=0)
    reference = gym.make("Pendulum-v1")
    reference.reset(seed=1)  # environment 1
    action, total = np.full((3, 1), 0.5, np.float32), np.zeros(3)
    for step in range(1, 201):
        obs, rewards, terminations, truncations, infos = envs.step(action)
        last, *_ = reference.step(action[1])
        total += rewards
        assert not terminations.any()
        assert truncations.tolist() == [step == 200] * 3
        assert ("final_obs" in infos) == ("episode" in infos) == (step == 200)
    assert infos["_final_obs"].all()
    final_obs = np.stack(infos["final_obs"])
    np.testing.assert_allclose(final_obs[1], last, rtol=1e-6)
    assert (np.abs(final_obs - obs).max(axis=1) > 0).all()
    assert infos["_episode"].all()  # all that end in one step
    np.testing.assert_allclose(infos["episode"]["r"], total)
    assert infos["episode"]["l"].tolist() == [200] * 3

    total = np.zeros(3)
    for _ in range(200):
        _, rewards, _, truncations, infos = envs.step(action)
        total += rewards
    assert truncations.all()
    np.testing.assert_allclose(infos["episode"]["r"], total)
    assert infos["episode"]["l"].tolist() == [200] * 3
    envs.close()
    reference.close()


# --------------------------------------------------------------------------------------------------------- normaliser


class SlowNormalizer:
    """RewardNormalizer from its definition: all returns so far, and 1e-4 of a sample of mean 0 and variance 1."""

    def __init__(self, num_envs, gamma):
        self.gamma, self.running, self.all_returns = gamma, [0.0] * num_envs, []

    def __call__(self, rewards, dones):
        for reward, done in zip(rewards.astype(np.float64), dones, strict=True):
            for env in range(len(self.running)):
                self.running[env] = reward[env] + self.gamma * self.running[env]
                self.all_returns.append(self.running[env])
                if done[env]:
                    self.running[env] = 0.0
        returns, prior = np.array(self.all_returns), 1e-4
        weight = prior + len(returns)
        var = (prior * 1.0 + (returns**2).sum()) / weight - (returns.sum() / weight) ** 2
        return np.clip(rewards / np.sqrt(var + 1e-8), -10, 10)


def segment(rng, num_steps=20, num_envs=3, offset=0.0):
    rewards = rng.normal(offset, 2, (num_steps, num_envs)).astype(np.float32)
    return rewards, (rng.random((num_steps, num_envs)) < 0.1).astype(np.float32)


@pytest.mark.parametrize(("gamma", "offset"), [(0.99, 0.0), (0.999, 5.0), (0.0, -1.0)])
def test_normalizer_is_its_definition(gamma, offset):
    rng = np.random.default_rng(0)
    fast, slow = RewardNormalizer(3, gamma), SlowNormalizer(3, gamma)
    for _ in range(5):
        rewards, dones = segment(rng, offset=offset)
        before = rewards.copy()
        scaled = fast(rewards, dones)
        assert scaled.dtype == np.float32
        np.testing.assert_allclose(scaled, slow(rewards, dones), rtol=1e-5)
        np.testing.assert_array_equal(rewards, before)
    returns = np.array(slow.all_returns)
    np.testing.assert_allclose(fast.mean, returns.mean(), rtol=1e-5)
    np.testing.assert_allclose(fast.var, np.var(returns), rtol=1e-5)


def test_normalizer_carries_returns_across_segments():
    one, two = RewardNormalizer(1, 0.5), RewardNormalizer(1, 0.5)
    rewards, dones = np.ones((4, 1), np.float32), np.zeros((4, 1), np.float32)
    one(rewards, dones)
    two(rewards[:2], dones[:2])
    assert two.returns == [1.5]
    two(rewards[2:], dones[2:])
    assert one.returns == two.returns == [1.875]
    np.testing.assert_allclose((one.mean, one.var, one.count), (two.mean, two.var, two.count), rtol=1e-12)
    one(rewards[:1], np.ones((1, 1), np.float32))
    assert one.returns == [0]


@pytest.mark.parametrize("sign", [1, -1])
def test_normalizer_clips(sign):
    rewards = np.zeros((400, 1), np.float32)
    rewards[200] = sign * 1000  # about 20 standard deviations
    scaled = RewardNormalizer(1, 0.0)(rewards, np.zeros_like(rewards))
    assert scaled[200] == sign * 10
    assert not scaled[np.arange(400) != 200].any()
    assert abs(RewardNormalizer(1, 0.0, clip=100)(rewards, np.zeros_like(rewards))[200, 0]) == pytest.approx(20, 0.01)


def test_normalizer_continues_from_its_saved_state():
    rng = np.random.default_rng(1)
    original = RewardNormalizer(3, 0.99)
    original(*segment(rng))
    copy = RewardNormalizer(3, 0.99)
    copy.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for _ in range(3):
        rewards, dones = segment(rng)
        np.testing.assert_array_equal(copy(rewards, dones), original(rewards, dones))
    assert copy.state_dict() == original.state_dict()


def test_moments_of_a_union():
    x = np.random.default_rng(0).normal(3, 2, 30)
    for cut in (1, 10, 29):
        merged = merge_moments(moments(x[:cut]), moments(x[cut:]))
        np.testing.assert_allclose(merged, (30, x.mean(), x.var()), rtol=1e-12)


def test_rewards_stay_as_they_are_without_normalisation():
    rewards, dones = segment(np.random.default_rng(0))
    normalizer = RewardNormalizer(3, 0.99, "none")
    assert normalizer(rewards, dones) is rewards
    assert normalizer.state_dict() == RewardNormalizer(3, 0.99).state_dict()


def test_gymnasium_task_that_cannot_render():
    envs = make_envs("TestBlind-v0", 2, seed=0)
    assert envs.reset()[0].tolist() == [[0], [0]]
    envs.close()


# -------------------------------------------------------------------------------------------------------------- video


def read_video(path):
    import imageio.v3

    return imageio.v3.imread(path, plugin="pyav")


def test_videos_of_the_first_environment(tmp_path):
    pytest.importorskip("av")
    envs = procgen_envs("dodgeball", 2, capture_video=True)
    envs.reset()
    envs.video.folder = tmp_path / "videos"
    first_frame = envs.render()[0]
    rng, lengths = np.random.default_rng(0), []
    for _ in range(2000):
        *_, infos = envs.step(rng.integers(0, 15, 2))
        if "episode" in infos and infos["_episode"][0]:
            lengths.append(infos["episode"]["l"][0])
        if len(lengths) == 3:
            break
    envs.step(np.zeros(2, np.int64))
    envs.close()
    assert len(lengths) == 3
    # Episodes 0 and 1 are on the schedule, 2 and 3 are not.
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == ["episode-0.mp4", "episode-1.mp4"]
    for episode in (0, 1):
        frames = read_video(tmp_path / "videos" / f"episode-{episode}.mp4")
        assert frames.shape == (lengths[episode], 512, 512, 3)
        assert frames.dtype == np.uint8
        if episode == 0:
            assert np.abs(frames[0].astype(int) - first_frame).mean() < 8  # but for the compression


@pytest.mark.parametrize("num_groups", [1, 2])
def test_video_of_an_episode_that_has_not_ended(num_groups, tmp_path):
    """Of environment 0, and so of the first group."""
    pytest.importorskip("av")
    envs = procgen_envs("starpilot", 2, capture_video=True, num_groups=num_groups)
    envs.reset()
    step_all(envs)  # nothing is written until there is a folder
    envs.video.folder = tmp_path / "videos"
    for _ in range(5):
        step_all(envs)
    envs.close()
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["episode-0.mp4"]
    assert read_video(tmp_path / "videos" / "episode-0.mp4").shape == (5, 512, 512, 3)


def step_all(envs):
    for group, _ in envs.groups:
        group.step(np.zeros(group.num_envs, np.int64))


def test_video_without_the_package_that_draws(monkeypatch):
    pytest.importorskip("av")
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(InputError, match="pygame"):
        make_envs("CartPole-v1", 2, seed=0, capture_video=True)
