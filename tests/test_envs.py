import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from common.envs import Envs, make_envs, make_gymnasium
from common.errors import InputError
from common.files import ROOT
from common.procgen_env import PROCGEN_GAMES, PROCGEN_MODES, ProcgenVectorEnv
from common.reward_scale import RewardNormalizer
from common.video import RecordFirstEnv
from conftest import StillEnv
from helpers import level_seeds


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


# ----------------------------------------------------------------------------------------------------------- Procgen


def test_procgen_is_a_vector_env():
    envs = procgen_envs("coinrun", 3)
    inner = envs.unwrapped
    assert isinstance(envs, VectorEnv)
    assert isinstance(inner, ProcgenVectorEnv)
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
        assert obs in envs.observation_space
        assert obs.std() > 0
        assert rewards.shape == (3,)
        assert np.issubdtype(rewards.dtype, np.floating)
        assert terminations.shape == truncations.shape == (3,)
        assert terminations.dtype == truncations.dtype == np.bool_
    envs.close()


def test_procgen_observations_are_not_overwritten_by_the_next_step():
    envs = procgen_envs("starpilot", 2)
    before, _ = envs.reset()
    kept = before.copy()
    for action in random_actions(5, 2):
        after, *_ = envs.step(action)
    assert not np.array_equal(after, kept)
    np.testing.assert_array_equal(before, kept)
    envs.close()


def test_procgen_levels_stay_in_range():
    envs = procgen_envs("bossfight", 8, num_levels=20, start_level=1000)
    seen = set(level_seeds(envs))
    ended = 0
    for action in random_actions(300, 8):
        _, _, terminations, *_ = envs.step(action)
        if terminations.any():
            seen |= set(level_seeds(envs))
            ended += terminations.sum()
    envs.close()
    assert ended > 8
    assert seen <= set(range(1000, 1020))
    assert len(seen) > 10


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


def test_procgen_every_supported_pair_of_game_and_mode_can_be_made_and_prints_nothing():
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
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
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


def test_procgen_reward_of_the_last_action_belongs_to_the_episode_it_ends():
    # A jumper's only reward, 10, ends its episode: it has to come with the termination, not a step later.
    _, rewards, terminations, infos = play(procgen_envs("jumper", 16), random_actions(300, 16))
    won = rewards != 0
    assert won.sum() >= 3
    assert terminations[won].all()
    for t, env in np.argwhere(terminations):
        assert infos[t]["episode"]["r"][env] == rewards[t, env] == (10 if won[t, env] else 0)


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


@pytest.mark.parametrize(
    ("space", "sent", "expected"),
    [
        (
            gym.spaces.Box(np.array([-1, 0], np.float32), np.array([1, 3], np.float32)),
            [[-7, 8], [0.5, -0.25]],
            [[-1, 3], [0.5, 0]],
        ),
        (gym.spaces.MultiBinary(3), [[1, 0, 1], [0, 0, 1]], [[1, 0, 1], [0, 0, 1]]),
    ],
)
def test_gymnasium_actions_reach_the_environment_clipped_and_in_its_type(space, sent, expected, monkeypatch):
    """They are drawn as float32."""
    monkeypatch.setitem(gym.registry, "TestKeep-v0", EnvSpec("TestKeep-v0", StillEnv, kwargs={"action_space": space}))
    envs, actions = make_envs("TestKeep-v0", 2, seed=0), np.array(sent, np.float32)
    envs.reset(seed=0)
    envs.step(actions)
    received = [env.unwrapped.action for env in envs.unwrapped.envs]
    assert [each.dtype for each in received] == [space.dtype] * 2
    np.testing.assert_array_equal(received, expected)
    np.testing.assert_array_equal(actions, sent)  # the agent's stay as drawn
    envs.close()


# --------------------------------------------------------------------------------------------------------- normaliser


def test_normalizer_clips():
    rewards, signs = np.zeros((400, 1), np.float32), np.zeros(400)
    signs[[100, 300]] = 1, -1
    rewards[:, 0] = 1000 * signs  # about 14 standard deviations
    clipped, wider = (RewardNormalizer(1, 0.0, clip=clip)(rewards, np.zeros_like(rewards))[:, 0] for clip in (10, 100))
    np.testing.assert_array_equal(clipped, 10 * signs)
    np.testing.assert_allclose(wider, 200**0.5 * signs, rtol=1e-2)


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


def test_videos_are_numbered_on_after_a_resume():
    envs, other = (Envs(RecordFirstEnv(make_gymnasium("CartPole-v1", 2, None))) for _ in range(2))
    envs.reset(), other.reset()
    envs.video.episode = 7
    other.load_state_dict(envs.state_dict())
    assert other.video.episode == 7


def test_video_without_the_package_that_draws(monkeypatch):
    pytest.importorskip("av")
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(InputError, match="pygame"):
        make_envs("CartPole-v1", 2, seed=0, capture_video=True)
