"""Small tasks with known answers, made available to `gymnasium.make`, and a small network for frames."""

import os
import tempfile

# The tests' networks are too small to share: on a busy machine two threads wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # one cache folder for all, and not the user's
    CACHE = tempfile.TemporaryDirectory(prefix="cache")
    os.environ["XDG_CACHE_HOME"] = CACHE.name

import gymnasium as gym
import numpy as np
import pytest
import torch


class CountEnv(gym.Env):
    """The observation is the number of steps since the reset; the reward is 1; a time limit ends the episode."""

    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.array([self.count], self.observation_space.dtype), {}

    def step(self, action):
        self.count += 1
        return np.array([self.count], self.observation_space.dtype), 1.0, False, False, {}


class DoubleEnv(CountEnv):
    """CountEnv with observations of type float64, as MuJoCo's."""

    observation_space = gym.spaces.Box(0, 100, (1,), np.float64)


class BitsEnv(gym.Env):
    """A random bit pattern is shown; the reward is the share of bits that the action repeats. 10 steps an episode."""

    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.MultiBinary(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.show(), {}

    def show(self):
        self.bits = self.np_random.integers(0, 2, 4)
        return self.bits.astype(np.float32)

    def step(self, action):
        assert self.action_space.contains(action), repr(action)
        reward = float((action == self.bits).mean())
        self.count += 1
        return self.show(), reward, self.count == 10, False, {}


class CueEnv(gym.Env):
    """One of two cues is shown in the first step and asked for in the fourth and last: reward 1 if the action names it.

    The last observation is the same for both, so that a policy without memory earns .5 on average, whatever it is.
    """

    observation_space = gym.spaces.Box(0, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.cue = 0, int(self.np_random.integers(2))
        return np.array([self.cue == 0, self.cue == 1, 0], np.float32), {}

    def step(self, action):
        self.count += 1
        last = self.count == 4
        return np.array([0, 0, self.count == 3], np.float32), float(last and action == self.cue), last, False, {}


class LuckEnv(CountEnv):
    """Episodes of 1 step or of 20, by chance."""

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        self.length = int(self.np_random.choice([1, 20]))
        return result

    def step(self, action):
        obs, reward, *_ = super().step(action)
        return obs, reward, self.count == self.length, False, {}


class ArmEnv(CountEnv):
    """The reward is the number of the action. 10 steps an episode."""

    def step(self, action):
        obs, *_ = super().step(action)
        return obs, float(action), self.count == 10, False, {}


class CrashEnv(CountEnv):
    """Raises an error in its 50th step."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 50:
            raise ZeroDivisionError("the simulator has crashed")
        return super().step(action)


class SpoiltEnv(CountEnv):
    """Gives a bad observation or reward in its 25th step, or a bad last observation in its 30th."""

    spoilt = ("reward", 0.0)
    steps = 0

    def step(self, action):
        obs, reward, *rest = super().step(action)
        self.steps += 1
        what, value = self.spoilt
        if what == "reward" and self.steps == 25:
            reward = value
        if (what, self.steps) in (("observation", 25), ("last observation", 30)):
            obs = obs * value
        return obs, reward, *rest


class StillEnv(gym.Env):
    """Does nothing, in the spaces given; keeps the last action that it got."""

    def __init__(self, observation_space=None, action_space=None):
        self.observation_space = observation_space or gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = action_space or gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.action = action
        return self.observation_space.sample(), 0.0, False, False, {}


class Glance(torch.nn.Module):
    """An encoder that sees every 16th pixel of a frame: tests of other things than networks need not wait for one."""

    def __init__(self, shape, feature_dim):
        super().__init__()
        self.linear = torch.nn.Linear(np.zeros(shape)[::16, ::16].size, feature_dim)

    def forward(self, frames):
        return torch.tanh(self.linear(frames[:, ::16, ::16].flatten(1).float() / 255))


@pytest.fixture(scope="module")
def small_networks():
    """In all tests of a module the scripts' agents see frames through `Glance`."""
    import fast

    with fast.small_networks():
        yield


gym.register("TestCount-v0", CountEnv, max_episode_steps=5)
gym.register("TestBits-v0", BitsEnv, max_episode_steps=10)  # ends by itself just when its time is up
gym.register("TestDouble-v0", DoubleEnv, max_episode_steps=5)
gym.register("TestCue-v0", CueEnv)
gym.register("TestLuck-v0", LuckEnv)
gym.register("TestArm-v0", ArmEnv)
gym.register("TestCrash-v0", CrashEnv, max_episode_steps=5)
gym.register("TestSpoilt-v0", SpoiltEnv, max_episode_steps=30)
