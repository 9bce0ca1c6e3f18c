"""The states of environments, taken and put back, so that a resumed run goes on in mid-episode.

Procgen has functions for it. Of a Gymnasium task it is what its attributes hold, layer by layer; where that is more
than numbers, strings, arrays, random generators and collections of these (a physics engine's world, say), it cannot be
kept. Spaces are not looked into: a task that draws from its own, with `action_space.sample()`, is not kept exactly.
"""

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from common.envs import EnvGroups, ProcgenVectorEnv, RecordFirstEnv, env_groups
from common.errors import InputError


def env_states(envs: VectorEnv, obs: torch.Tensor) -> list[dict[str, Any]]:
    """The state of each environment of `envs` after the step that gave the observations `obs` [N, ...].

    Its "env" is None where that cannot be kept.
    """
    if isinstance(envs, EnvGroups):
        return [state for group, part in env_groups(envs) for state in env_states(group, obs[part])]
    base, obs = envs.unwrapped, obs.cpu()
    statistics = wrapper(envs, RecordEpisodeStatistics)
    if isinstance(base, ProcgenVectorEnv):
        states = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in base.gym3_env.get_state()]
    else:
        states = [attributes(env) for env in base.envs]
    video = wrapper(envs, RecordFirstEnv)
    return [
        {
            "env": state,
            "obs": obs[n].clone(),
            "return": float(statistics.episode_returns[n]),
            "length": int(statistics.episode_lengths[n]),
            "episode": 0 if video is None else video.episode,
        }
        for n, state in enumerate(states)
    ]


def load_env_states(envs: VectorEnv, states: list[dict[str, Any]]) -> torch.Tensor:
    """Put environments that have been reset into `states`; return the observations [N, ...] to go on from."""
    if isinstance(envs, EnvGroups):
        return torch.cat([load_env_states(group, states[part]) for group, part in env_groups(envs)])
    base, statistics, video = envs.unwrapped, wrapper(envs, RecordEpisodeStatistics), wrapper(envs, RecordFirstEnv)
    if not replayable(states):
        print("note: these environments cannot be put back where they were: they start new episodes", file=sys.stderr)
        return torch.as_tensor(envs.reset()[0])  # without a seed: other episodes than the run began with
    if isinstance(base, ProcgenVectorEnv):
        base.gym3_env.set_state([state["env"].numpy().tobytes() for state in states])
    else:
        for env, state in zip(base.envs, states, strict=True):
            set_attributes(env, state["env"])
    for n, state in enumerate(states):
        statistics.episode_returns[n], statistics.episode_lengths[n] = state["return"], state["length"]
    if video is not None:
        video.episode = states[0]["episode"]
    return torch.stack([state["obs"] for state in states])


def replayable(states: list[dict[str, Any]]) -> bool:
    """Whether environments can be put into `states` at all."""
    return all(state["env"] is not None for state in states)


def recording(start: list[dict[str, Any]], actions: torch.Tensor, obs: torch.Tensor) -> dict[str, Any]:
    """What `replay` gets `obs` [K, T, N, ...] from: where the environments started, and the actions [K, T, N, ...].

    Thirty-two rollouts of Procgen's frames are 6.4 GB; this is 2.8 MB and 4 MB, and some 35 us of work per step. Where
    environments cannot be put back, the observations themselves are kept.
    """
    return {"start": start, "actions": actions} | ({} if replayable(start) else {"obs": obs})


def replay(envs: VectorEnv, recorded: dict[str, Any], obs: torch.Tensor, end: list[dict[str, Any]]) -> None:
    """Fill `obs` with what was seen in a `recording`, which led to the states `end`.

    Raises:
        InputError: the environments do not repeat what they did.
    """
    if "obs" in recorded:
        obs.copy_(recorded["obs"])
    elif isinstance(envs, EnvGroups):
        for group, part in env_groups(envs):
            of_group = {"start": recorded["start"][part], "actions": recorded["actions"][:, :, part]}
            replay(group, of_group, obs[:, :, part], end[part])
    elif len(obs):
        video = wrapper(envs, RecordFirstEnv)
        envs = envs if video is None else video.env  # nothing is filmed twice
        now = load_env_states(envs, recorded["start"])
        for k, t in np.ndindex(obs.shape[:2]):
            obs[k, t] = now
            now = torch.as_tensor(envs.step(recorded["actions"][k, t].numpy())[0]).to(now)
        if not same(env_states(envs, now), [each | {"episode": 0} for each in end]):
            raise InputError(
                "the environments do not repeat what they did before: is another version of them installed?"
            )


def same(a: Any, b: Any) -> bool:
    """Whether two values as of `env_states` are equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def wrapper(envs: VectorEnv, kind: type) -> VectorWrapper | None:
    """The outermost wrapper of that kind."""
    while isinstance(envs, VectorWrapper):
        if isinstance(envs, kind):
            return envs
        envs = envs.env
    return None


class Opaque(TypeError):
    """A value that a checkpoint cannot hold."""


def layers(env: gym.Env) -> Iterator[gym.Env]:
    yield env
    while isinstance(env, gym.Wrapper):
        env = env.env
        yield env


def attributes(env: gym.Env) -> list[dict[str, Any]] | None:
    """The attributes of a Gymnasium task and its wrappers, or None if one of them is beyond `encode`."""
    try:
        return [
            {name: encode(value) for name, value in vars(layer).items() if not is_fixed(value)} for layer in layers(env)
        ]
    except Opaque:
        return None


def set_attributes(env: gym.Env, saved: list[dict[str, Any]]) -> None:
    for layer, values in zip(layers(env), saved, strict=True):
        for name, value in values.items():
            now = getattr(layer, name, None)
            if isinstance(now, np.random.Generator):
                now.bit_generator.state = decode(value)
            elif not is_fixed(now):
                setattr(layer, name, decode(value))


def is_fixed(value: Any) -> bool:
    """Whether an attribute is part of how a task is built or drawn, not of its state."""
    drawing = type(value).__module__.partition(".")[0] == "pygame"
    return drawing or isinstance(value, gym.Env | gym.Space | gym.envs.registration.EnvSpec | type) or callable(value)


def encode(value: Any) -> Any:
    """Write a value of NumPy's or Python's with types that `weights_only` lets pass. Raises Opaque."""
    if type(value) is int and value.bit_length() > 1000:
        raise Opaque("an integer that is too long for weights_only")
    if value is None or type(value) in (bool, int, float, str):  # NumPy's float64 is a kind of float
        return value
    if isinstance(value, np.random.Generator):
        return encode(value.bit_generator.state)
    if isinstance(value, np.ndarray | np.generic):
        try:
            return "array" if isinstance(value, np.ndarray) else "number", torch.from_numpy(np.array(value))
        except (TypeError, ValueError) as error:  # not of numbers, or of such as PyTorch does not have
            raise Opaque(str(error)) from error
    if type(value) in (list, tuple):
        return type(value).__name__, [encode(each) for each in value]
    if type(value) is deque:
        return "deque", value.maxlen, [encode(each) for each in value]
    if type(value) is dict and all(isinstance(key, str | int) for key in value):
        return "dict", {key: encode(each) for key, each in value.items()}
    raise Opaque(type(value).__name__)


def decode(value: Any) -> Any:
    """What `encode` was given (of a generator its state)."""
    if not isinstance(value, tuple):
        return value
    kind, *content = value
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(decode, content[0]))
    if kind == "deque":
        return deque(map(decode, content[1]), content[0])
    if kind == "dict":
        return {key: decode(each) for key, each in content[0].items()}
    array = content[0].numpy().copy()
    return array if kind == "array" else array[()]
