"""Small tasks with known answers, made available to `gymnasium.make`, and a small network for frames."""

import os
import tempfile
import threading
import time

# The tests' networks are too small to share: on a busy machine two threads wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # one cache folder for all, and not the user's
    CACHE = tempfile.TemporaryDirectory(prefix="cache")
    os.environ["XDG_CACHE_HOME"] = CACHE.name

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary


class CountEnv(gym.Env):
    """The observation is the number of steps since the reset; the reward is 1; a time limit ends the episode."""

    observation_space, action_space = Box(0, 100, (1,), np.float32), Discrete(2)
    length = None  # of episodes that end by themselves

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        self.begin()
        return self.observe(), {}

    def step(self, action):
        reward = self.reward(action)
        self.count += 1
        return self.observe(), reward, self.count == self.length, False, {}

    def begin(self):
        """Draw what is random in an episode."""

    def observe(self):
        return np.array([self.count], self.observation_space.dtype)

    def reward(self, action):
        return 1.0


class BitsEnv(CountEnv):
    """A random bit pattern is shown; the reward is the share of bits that the action repeats. 10 steps an episode."""

    observation_space, action_space, length = Box(0, 1, (4,), np.float32), MultiBinary(4), 10

    def observe(self):
        self.bits = self.np_random.integers(0, 2, 4)
        return self.bits.astype(np.float32)

    def reward(self, action):
        assert self.action_space.contains(action), repr(action)
        return float((action == self.bits).mean())


class LuckEnv(CountEnv):
    """Episodes of 1 step or of 20, by chance."""

    def begin(self):
        self.length = int(self.np_random.choice([1, 20]))


class ArmEnv(CountEnv):
    """The reward is the number of the action. 10 steps an episode."""

    length = 10

    def reward(self, action):
        return float(action)


class PushEnv(CountEnv):
    """Actions push a point away from where it is punished most. An episode has the 8 steps of an unroll.

    So a run that is resumed with new episodes is the same run.
    """

    observation_space, action_space, length = Box(-20, 20, (2,), np.float32), Box(-1, 1, (2,), np.float32), 8

    def begin(self):
        self.place = np.array([0.5, -0.25], np.float32)

    def observe(self):
        return self.place

    def reward(self, action):
        self.place = self.place + action
        return -float(np.abs(self.place).sum())


class CrashEnv(CountEnv):
    """Raises an error in its 50th step."""

    def reward(self, action):
        if self.count == 49:
            raise ZeroDivisionError("the simulator has crashed")
        return 1.0


class HangEnv(CountEnv):
    """Never comes back from its 20th step."""

    def reward(self, action):
        if self.count == 19:
            print("hangs", flush=True)
            threading.Event().wait()
        return 1.0


class StuckEnv(CountEnv):
    """Cannot be closed, and has a thread that does not end."""

    def close(self):
        threading.Thread(target=time.sleep, args=(600,)).start()
        print("closing", flush=True)
        time.sleep(600)


class SpoiltEnv(CountEnv):
    """Gives a bad first observation, observation or reward in its 25th step, or last observation in its 30th."""

    spoilt = ("reward", 0.0)

    def observe(self):
        what, value = self.spoilt
        when = {"first observation": 0, "observation": 25, "last observation": 30}.get(what)
        return super().observe() * (value if self.count == when else 1)

    def reward(self, action):
        what, value = self.spoilt
        return value if what == "reward" and self.count == 24 else 1.0


class StillEnv(CountEnv):
    """Does nothing, in the spaces given; keeps the last action that it got."""

    def __init__(self, **spaces):
        self.observation_space, self.action_space = Box(-1, 1, (2,), np.float32), Discrete(2)
        vars(self).update(spaces)

    def observe(self):
        return self.observation_space.sample()

    def reward(self, action):
        self.action = action
        return 0.0


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


limits = {CountEnv: 5, StuckEnv: 5, SpoiltEnv: 30, BitsEnv: 10}
for kind, limit in (dict.fromkeys([LuckEnv, ArmEnv, PushEnv, CrashEnv, HangEnv]) | limits).items():
    gym.register(f"Test{kind.__name__.removesuffix('Env')}-v0", kind, max_episode_steps=limit)
