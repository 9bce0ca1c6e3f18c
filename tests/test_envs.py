"""Procgen and Gymnasium behind one interface, and videos."""

import dataclasses
import functools
import gc
import importlib.util
import os
import signal
import sys
import weakref
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorWrapper

import fast
from common import InputError, procgen_env
from common.envs import Envs, finished_episodes
from common.procgen_env import EXPLORATION_LEVELS, MODE_NUMBERS, PROCGEN_GAMES, PROCGEN_MODES
from common.settings import ProcgenArgs
from conftest import CountEnv, StillEnv
from helpers import level_seeds, make_envs

BOTH = all(importlib.util.find_spec(package) for package in ("procgen", "procgen_gym"))


def procgen_envs(env_id, num_envs, seed=0, **settings):
    return make_envs(env_id, num_envs, seed=seed, **{"num_threads": 0} | settings)


class CountedFrames(CountEnv):
    """RGB frames [5, 4, 3] of which each is another, in episodes of 2 to 7 steps."""

    observation_space = gym.spaces.Box(0, 255, (5, 4, 3), np.uint8)

    def begin(self):
        self.length = int(self.np_random.integers(2, 8))

    def observe(self):
        return self.np_random.integers(0, 256, self.observation_space.shape, np.uint8)


def random_actions(num_steps, num_envs):
    return np.random.default_rng(0).integers(0, 15, (num_steps, num_envs))


@pytest.mark.parametrize("games", [["coinrun"], ["coinrun", "starpilot"], ["maze", "heist", "coinrun"]])
def test_procgen_env_i_plays_game_i(games):
    """The draws of the levels do not depend on the games, so that a game alone starts with the same frames."""
    envs = procgen_envs(",".join(games), 6)
    obs, _ = envs.reset()
    envs.close()
    for g, game in enumerate(games):
        alone = procgen_envs(game, 6)
        np.testing.assert_array_equal(obs[g :: len(games)], alone.reset()[0][g :: len(games)])
        alone.close()


@pytest.mark.skipif(not BOTH, reason="needs procgen-mirror and procgen-gym")
@pytest.mark.parametrize("game", [*PROCGEN_GAMES, "coinrun,maze"])
def test_both_packages_of_procgen_play_the_same(game, monkeypatch):
    """Frames may differ by a little. A state of one goes on in the other."""
    pair = []
    for package in ("procgen", "procgen_gym"):
        monkeypatch.setattr(procgen_env, "PACKAGE", package)
        pair.append(procgen_envs(game, 4, num_levels=9))
    mirror, other = pair
    np.testing.assert_allclose(mirror.reset()[0].mean(), other.reset()[0].mean(), rtol=1e-3)
    for number, action in enumerate(random_actions(150, 4)):
        if number == 75:
            states = [envs.state_dict() for envs in pair]
            mirror.load_state_dict(states[1])
            other.load_state_dict(states[0])
        (_, *mine, infos), (_, *theirs, other_infos) = mirror.step(action), other.step(action)
        np.testing.assert_array_equal(mine, theirs)
        for name in ("level_seed", "prev_level_seed", "prev_level_complete"):
            np.testing.assert_array_equal(infos[name], other_infos[name])
        for env in range(4):
            assert mirror.unwrapped.get_state(env) == other.unwrapped.get_state(env)
    for envs in pair:
        envs.close()


def make_every_pair():
    for mode, games in PROCGEN_MODES.items():
        for game in games:
            print(game, mode, flush=True)
            envs = procgen_envs(game, 2, distribution_mode=mode)
            obs, *_ = envs.step(np.zeros(2, np.int64))
            assert obs.std() > 0
            if mode == "exploration":
                assert len(set(level_seeds(envs))) == 1
            envs.close()


def test_procgen_every_supported_pair_of_game_and_mode_can_be_made_and_prints_nothing(tmp_path):
    """In a process of its own: on an unsupported pair the C++ code aborts it. The last line printed is the culprit."""
    env = importlib.import_module(f"{procgen_env.PACKAGE}.env")
    assert PROCGEN_GAMES == env.ENV_NAMES
    assert MODE_NUMBERS | {"exploration": 20} == env.DISTRIBUTION_MODE_DICT
    assert dict(zip(PROCGEN_MODES["exploration"], EXPLORATION_LEVELS, strict=True)) == env.EXPLORATION_LEVEL_SEEDS
    with fast.Fork(tmp_path, make_every_pair) as process:
        assert process.wait() == 0, f"aborted at {process.output.splitlines()[-1:]}: {process.errors}"
    pairs = [f"{game} {mode}" for mode, games in PROCGEN_MODES.items() for game in games]
    assert (process.output.splitlines(), process.errors) == (pairs, "")  # the packages below print nothing


def test_episodes_of_procgen_and_their_levels():
    """Each step says which level is played and, at an episode's end, which it was on and whether it was solved. In both
    games the only reward, 10, ends an episode: it comes with the end, not a step later."""
    envs = procgen_envs("coinrun,jumper", 8, num_levels=50, start_level=7)
    assert envs.single_action_space == gym.spaces.Discrete(15)
    frames, infos = envs.reset()
    kept, level_seed, found = frames.copy(), infos["level_seed"], []
    for action in random_actions(1200, 8):
        obs, rewards, ended, truncated, infos = envs.step(action)
        assert obs in envs.observation_space
        assert ended[rewards != 0].all()
        assert not truncated.any()
        assert [infos[name].dtype for name in ("level_seed", "prev_level_seed")] == [np.int32] * 2
        assert infos["prev_level_complete"].dtype == bool
        episodes = finished_episodes(infos)
        assert [episode.env for episode in episodes] == list(np.flatnonzero(ended))
        for env, episodic_return, _, seed, complete in episodes:
            assert seed == infos["prev_level_seed"][env] == level_seed[env]
            assert episodic_return == rewards[env] == (10 if complete else 0)
        level_seed = np.where(ended, infos["level_seed"], level_seed)
        np.testing.assert_array_equal(level_seed, infos["level_seed"])
        found += episodes
    envs.close()
    np.testing.assert_array_equal(frames, kept)  # not overwritten by the steps
    assert {each.level_complete for each in found} == {True, False}
    levels = {each.level_seed for each in found}
    assert len(levels) > 10
    assert levels <= set(range(7, 57))
    task = make_envs("CartPole-v1", 1, seed=0)
    task.reset(seed=0)
    while not (episodes := finished_episodes(task.step(np.zeros(1, np.int64))[-1])):
        pass
    assert episodes[0][3:] == (None, None)


@pytest.mark.parametrize("mode", ["easy", "hard"])
def test_levels_can_be_chosen(mode):
    """The first frames of chosen levels are those of environments that have no other level."""
    for game in PROCGEN_GAMES:
        envs = procgen_envs(game, 2, seed=3, distribution_mode=mode, num_levels=5)
        frames, infos = envs.reset(options={"levels": [123, 2**31 - 2]})
        assert infos["level_seed"].tolist() == [123, 2**31 - 2]
        for env, level in enumerate((123, 2**31 - 2)):
            alone = procgen_envs(game, 1, distribution_mode=mode, num_levels=1, start_level=level)
            np.testing.assert_array_equal(frames[env], alone.reset()[0][0], err_msg=game)
            alone.close()
        envs.close()


def test_states_are_copies(monkeypatch):
    """PPG's phases and evaluations keep them, while a wrapper may go on using what it gives."""
    envs, age = procgen_envs("bossfight", 1), np.zeros(1)
    monkeypatch.setattr(envs.unwrapped, "state_dict", lambda: [{"age": age}])
    envs.reset()
    (kept,) = envs.state_dict()
    age += 1
    assert kept["age"] == 0
    wrapper = VectorWrapper(envs.env)  # which has no state
    wrapper.replayable = False
    assert not Envs(wrapper).replayable
    envs.close()


def test_the_next_level_is_chosen_from_outside():
    """It begins when the episode under way has ended, stays until another is chosen, and returns to the range."""
    envs, seen = procgen_envs("bossfight,fruitbot", 4, num_levels=3), [[] for _ in range(4)]
    assert envs.replayable
    envs.reset()
    envs.unwrapped.set_next_level(0, 50)
    for action in random_actions(1500, 4):
        _, _, ended, _, infos = envs.step(action)
        for env in np.flatnonzero(ended):
            seen[env].append(int(infos["level_seed"][env]))
            number = len(seen[env])
            if number <= 3:
                envs.unwrapped.set_next_level(env, 100 * number + env if number < 3 else None)
    assert not envs.replayable
    assert seen[0][:3] == [50, 100, 200]
    for env in (1, 2, 3):
        assert seen[env][1:3] == [100 + env, 200 + env]
    assert all(set(levels[3:]) <= {0, 1, 2} and len(levels) > 4 for levels in seen)
    for env, level in ((0, -1), (0, 2**31 - 1), (-1, 5), (envs.num_envs, 5)):
        with pytest.raises(InputError, match=f"level {level}, environment {env}: use at most 2147483646 and 3"):
            envs.unwrapped.set_next_level(env, level)
    with pytest.raises(ValueError, match="shorter"):
        envs.reset(options={"levels": [5] * 3})
    state = envs.unwrapped.get_state(0)
    envs.unwrapped.get_state = lambda env: b"\1" + state[1:]  # of another version
    with pytest.raises(InputError, match="levels cannot be chosen"):
        envs.unwrapped.set_next_level(0, 1)
    envs.close()


OPTIONS = [each for each in dataclasses.fields(ProcgenArgs) if each.name != "use_generated_assets"]
OPTIONS = [{each.name: not each.default} for each in OPTIONS] + [{"distribution_mode": "hard"}]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: next(iter(option)))
def test_procgens_options_change_what_is_drawn_or_played(option):
    seen = []
    for settings in ({}, option):
        envs = procgen_envs("coinrun,jumper,climber,ninja", 16, num_levels=1, start_level=6, **settings)
        first, infos = envs.reset()
        levels = set(infos["level_seed"].tolist())
        for action in random_actions(600, 16) if "use_sequential_levels" in option else ():
            levels |= set(envs.step(action)[-1]["level_seed"].tolist())
        seen.append((first, levels))
        envs.close()
    (first, levels), (other_first, other_levels) = seen
    if "use_sequential_levels" in option:
        assert levels == {6}
        assert {6, 6 + 997} <= other_levels
    else:
        assert not np.array_equal(first, other_first)


def test_stacks_of_frames_become_channels(monkeypatch):
    """The oldest frame first, and otherwise as Gymnasium's wrapper does it. A task may bring that wrapper.
    Environments that reset a step later are refused."""
    wrapped = functools.partial(gym.wrappers.FrameStackObservation, stack_size=3)
    for name, make in {"TestFrames-v0": CountedFrames, "TestStack-v0": lambda: wrapped(CountedFrames())}.items():
        monkeypatch.setitem(gym.registry, name, EnvSpec(name, make, max_episode_steps=5))
    theirs = gym.make_vec("TestStack-v0", 2, "sync", {"autoreset_mode": AutoresetMode.SAME_STEP})
    both = make_envs("TestStack-v0", 2, seed=0), make_envs("TestFrames-v0", 2, seed=0, frame_stack=3)

    def channels(stacks):
        """Stacks [..., 3, 5, 4, 3] as images [..., 5, 4, 9]."""
        return np.concatenate([stacks[..., frame, :, :, :] for frame in range(3)], axis=-1)

    with pytest.raises(InputError, match="give it AutoresetMode"):
        Envs(gym.make_vec("TestStack-v0", 2))
    expected, _ = theirs.reset(seed=0)
    for envs in both:
        assert envs.single_observation_space == gym.spaces.Box(0, 255, (5, 4, 9), np.uint8)
        np.testing.assert_array_equal(envs.reset(seed=0)[0], channels(expected))
    for actions in np.zeros((50, 2), np.int64):
        expected, *_, expected_infos = theirs.step(actions)
        for envs in both:
            obs, *_, infos = envs.step(actions)
            np.testing.assert_array_equal(obs, channels(expected))
            for env in np.flatnonzero(expected_infos.get("_final_obs", ())):
                np.testing.assert_array_equal(infos["final_obs"][env], channels(expected_infos["final_obs"][env]))
    for shape in ((3, 5, 4), (5, 8, 3), (3, 8)):  # three of the second have more channels than rows
        monkeypatch.setattr(CountedFrames, "observation_space", gym.spaces.Box(0, 255, shape, np.uint8))
        with pytest.raises(InputError, match="images with the channels last"):
            make_envs("TestFrames-v0", 2, seed=0, frame_stack=3)


def test_gymnasium_tasks_start_new_episodes_and_say_so(capsys):
    envs = make_envs("CartPole-v1", 2, seed=0)
    first = envs.reset(seed=0)[0].copy()
    envs.step(np.zeros(2, np.int64))
    assert not envs.restorable
    envs.load_state_dict(envs.state_dict())
    assert capsys.readouterr().err == "note: the environments cannot be put back where they were: new episodes begin\n"
    assert np.abs(envs.obs).max() <= 0.05  # as CartPole begins an episode
    assert not np.array_equal(envs.obs, first)  # but another than the run began with
    number, infos = 0, {}
    while "episode" not in infos:
        *_, infos = envs.step(np.zeros(2, np.int64))
        number += 1
    assert infos["episode"]["l"].max() == number  # without the step of before


@pytest.mark.parametrize(
    ("space", "sent", "expected"),
    [
        (gym.spaces.Box(np.array([-1, 0], np.float32), np.array([1, 3], np.float32)),
         [[-7, 8], [0.5, -0.25]], [[-1, 3], [0.5, 0]]),
        (gym.spaces.MultiBinary(3), [[1, 0, 1], [0, 0, 1]], [[1, 0, 1], [0, 0, 1]]),
    ],
)  # fmt: skip
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


def test_closed_environments_are_freed_at_once():
    """The garbage collector need not: cffi's buffers can crash it."""
    envs = make_envs("coinrun", 1, seed=0)
    envs.reset()
    freed = [weakref.ref(envs), weakref.ref(envs.unwrapped.library)]
    gc.disable()
    envs.close()
    del envs
    gc.enable()
    assert [each() for each in freed] == [None, None]


def test_done_flags_that_are_numbers_become_masks():
    envs = procgen_envs("bossfight", 2)
    obs, _ = envs.reset()
    envs.env.step = lambda _: (obs, np.zeros(2), np.array([1, 0]), np.array([0, 1]), {})
    _, _, terminations, truncations, _ = envs.step(np.zeros(2, int))
    assert terminations.dtype == truncations.dtype == bool
    assert [terminations.tolist(), truncations.tolist()] == [[True, False], [False, True]]


def test_videos_of_the_first_environment(tmp_path, monkeypatch, capsys):
    """Episodes 0, 1 and 8 are on the schedule, 2 to 7 are not; the numbers go on after a resume. A Ctrl-C that comes
    while a frame is encoded leaves a video with all frames."""
    pytest.importorskip("av")
    read_video = functools.partial(pytest.importorskip("imageio.v3").imread, plugin="pyav")
    envs, other = (procgen_envs("dodgeball", 2, video=True, frame_stack=2) for _ in range(2))
    obs, _ = envs.reset()
    other.reset()
    envs.video.folder, other.video.folder = tmp_path / "videos", tmp_path / "others"
    actions, lengths = iter(random_actions(2000, 2)), []
    first_frame, shown = obs[0, ..., -3:].repeat(4, 0).repeat(4, 1), []
    wandb = SimpleNamespace(log=shown.append, Video=str)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    envs.video.track = True
    while len(lengths) < 3:
        *_, infos = envs.step(next(actions))
        if infos.get("_episode", [False])[0]:
            lengths.append(infos["episode"]["l"][0])
    assert shown == [{"videos": str(envs.video.folder / f"episode-{n}.mp4")} for n in (0, 1)]
    envs.video.episode = 8
    other.load_state_dict(envs.state_dict())
    for each in (envs, other):
        each.step(next(actions))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # another test may have it ignored
    write = other.video.writer.write_frame
    other.video.writer.write_frame = lambda frame: (os.kill(os.getpid(), signal.SIGINT), write(frame))
    with pytest.raises(KeyboardInterrupt):
        other.step(next(actions))
    signal.signal(signal.SIGINT, handler)
    for each in (envs, other):
        each.close()
    assert sorted(path.name for path in envs.video.folder.iterdir()) == [f"episode-{n}.mp4" for n in (0, 1, 8)]
    assert [path.name for path in other.video.folder.iterdir()] == ["episode-8.mp4"]
    assert len(read_video(other.video.folder / "episode-8.mp4")) == 2
    odd = procgen_envs("dodgeball", 1, video=True)
    odd.reset()
    odd.video.folder, odd.video.env.render = tmp_path / "odd", lambda: [np.zeros((301, 401, 4), np.uint8)]
    odd.step(np.zeros(1, int))
    odd.video.finish_video(upload=False)
    (tmp_path / "linked").hardlink_to(tmp_path / "odd" / "episode-0.mp4")
    odd.video.episode = 0
    odd.step(np.zeros(1, int))
    odd.video.finish_video(upload=False)
    assert (tmp_path / "linked").stat().st_nlink == 1  # it is not written over
    odd.video.folder = tmp_path / "odd" / "episode-0.mp4"  # where none can be written, as on a full disk
    odd.step(np.zeros(1, int))
    odd.close()
    assert capsys.readouterr().err.startswith("warning: ")
    assert read_video(tmp_path / "odd" / "episode-0.mp4").shape == (1, 300, 400, 3)
    for episode in (0, 1):
        frames = read_video(tmp_path / "videos" / f"episode-{episode}.mp4")
        assert (frames.shape, frames.dtype) == ((lengths[episode], 256, 256, 3), np.uint8)
        if episode == 0:
            assert np.abs(frames[0].astype(int) - first_frame).mean() < 8  # but for the compression
