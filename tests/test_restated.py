"""Whole runs of PPO, PPG and IMPALA against their restatement from the papers: the same parameters to rounding."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

import impala
import ppg
import ppo
import restated
from helpers import parameters

pytestmark = pytest.mark.quick


class TapeEnv(gym.Env):
    """Random observations, rewards and ends of episodes, whatever the actions. `steps` are those of all episodes."""

    observation_space = gym.spaces.Box(-9, 9, (3,), np.float64)
    action_space = gym.spaces.Discrete(4)
    made: tuple["TapeEnv", ...] = ()

    def __init__(self):
        self.steps = []
        TapeEnv.made += (self,)

    def observe(self) -> np.ndarray:
        self.obs = self.np_random.normal(size=3).astype(np.float32).astype(np.float64)  # impala.py stores float32
        return self.obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        obs, next_obs = torch.tensor(self.obs), torch.tensor(self.observe())
        reward, (terminated, truncated) = np.float32(self.np_random.normal()), self.np_random.random(2) < 0.15
        if self is TapeEnv.made[0] and len(self.steps) == 38:
            reward, terminated = 300.0, True  # more than 10 standard deviations of all returns
        self.steps.append(restated.Step(obs, int(action), float(reward), next_obs, bool(terminated), bool(truncated)))
        return self.obs, reward, terminated, truncated, {}


gym.register("TestTape-v0", TapeEnv)


@pytest.fixture
def check(monkeypatch, tmp_path):
    """A function that makes a run of a script in float64, and again by the restatement: with the same initial
    parameters, on the same steps of the environments, with the same orders of minibatches (each a `torch.randperm`)."""

    def check(script, restatement, **settings):
        small = {"env_id": "TestTape-v0", "num_envs": 4, "num_steps": 5, "total_timesteps": 60, "num_minibatches": 2}
        small |= {"learning_rate": 0.03, "feature_dim": 5, "hidden_dim": 6, "device": "cpu", "runs_dir": str(tmp_path)}
        # In a phase's first auxiliary step the gradient of the KL divergence is 0, but for rounding errors of 1e-17;
        # Adam divides them by their size and eps. With 1e-8, PPG's default, the results would differ by 5e-10.
        args, params, orders = script.Args(**small | {"adam_eps": 1e-5} | settings), {}, []
        storage, randperm = "stack_unrolls" if script is impala else "new_rollout", torch.randperm
        make_storage = getattr(script, storage)

        class Agent(script.Agent):
            def __init__(self, *inputs):
                super().__init__(*inputs)
                params.update({name: value.clone().detach() for name, value in self.named_parameters()})

            def encode(self, encoder, obs):
                return super().encode(encoder, obs.double())

        class RewardNormalizer(script.RewardNormalizer):  # NumPy 1 divides float32 by a float64 in float32, NumPy 2 not
            def scale(self, rewards):
                return super().scale(rewards.astype(np.float64))

        def make_double(*inputs):
            fields = make_storage(*inputs)
            return type(fields)(*[x.double() if x is not None and x.is_floating_point() else x for x in fields])

        monkeypatch.setattr(TapeEnv, "made", ())
        monkeypatch.setattr(script, "Agent", Agent)
        monkeypatch.setattr(script, "RewardNormalizer", RewardNormalizer)
        monkeypatch.setattr(script, storage, make_double)
        monkeypatch.setattr(torch, "randperm", lambda *size, **options: orders.append(randperm(*size)) or orders[-1])
        trained = parameters(script.main(args))

        remaining = iter([order.tolist() for order in orders])
        start = {name: value.clone() for name, value in params.items()}
        for value in params.values():
            value.requires_grad_()
        history = [env.steps for env in TapeEnv.made]
        if script is impala:  # whose last unrolls end with an observation that awaits its action
            history = [[*env.steps, restated.Step(torch.tensor(env.obs), *[None] * 5)] for env in TapeEnv.made]
        restatement(params, history, remaining, args)
        assert not list(remaining)
        for name, value in params.items():
            assert not torch.allclose(value, start[name], atol=1e-4), name
            where = partial("{}: {}".format, name)
            torch.testing.assert_close(trained[name], value.detach(), rtol=0, atol=1e-10, msg=where)

    torch.set_default_dtype(torch.float64)
    yield check
    torch.set_default_dtype(torch.float32)


PPO = {
    "default": {},
    "unclipped": {"clip_coef_vf": None, "max_grad_norm": None, "norm_adv": "batch", "ent_coef": 0.1, "vf_coef": 2.0},
    "annealed, in pieces of 3": {"norm_adv": "none", "anneal_lr": True, "micro_batch_size": 3, "num_minibatches": 4},
    "clipped reward": {"total_timesteps": 160, "update_epochs": 1, "gamma": 0.9, "gae_lambda": 0.8},
    "reward as it is": {"norm_reward": "none", "max_grad_norm": 0.05, "clip_coef": 0.05},
}


@pytest.mark.parametrize("settings", PPO.values(), ids=PPO)
def test_ppo(settings, check):
    check(ppo, restated.ppo, **{"update_epochs": 2} | settings)


PPG = {
    "default": {},
    "whole rollouts": {"whole_rollouts": True},
    "more passes for the value": {"e_value": 3, "norm_adv": "minibatch", "clip_coef_vf": 0.2, "num_minibatches": 4},
    "more passes for the policy": {"e_policy": 2, "anneal_lr": True, "vf_coef": 2.0, "ent_coef": 0.1},
    "slower policy": {"learning_rate": 0.01, "aux_learning_rate": 0.02, "anneal_lr": True},
    "KL variant": {"kl_penalty": 2.0, "e_policy": 2, "e_value": 2, "beta_clone": 3.0, "max_grad_norm": 0.05},
    "accumulation": {"num_aux_rollouts": 1, "num_aux_grad_accum": 3, "norm_adv": "none", "micro_batch_size": 3},
    "accumulation of whole rollouts": {"num_aux_rollouts": 1, "num_aux_grad_accum": 3, "whole_rollouts": True},
}


@pytest.mark.parametrize("settings", PPG.values(), ids=PPG)
@pytest.mark.parametrize("arch", ["detach", "dual", "shared"])
def test_ppg(arch, settings, check):
    """A phase of two iterations, and another of one, which the end of the run cuts short."""
    check(ppg, restated.ppg, **{"arch": arch, "n_pi": 2, "e_aux": 2} | settings)


SMALL = {"num_steps": 6, "batch_size": 2, "total_timesteps": 96, "learning_rate": 0.03}
OTHER = {"gamma": 0.9, "vtrace_lambda": 0.8, "rho_bar": 1.02, "c_bar": 0.98, "pg_rho_bar": 0.99, "ent_coef": 0.1}
OTHER |= {"vf_coef": 2.0, "max_grad_norm": 0.03}
IMPALA = {
    "the paper's T and B": {"num_envs": 64, "total_timesteps": 1280},
    "small": SMALL | {"micro_batch_size": 6},
    "all settings": SMALL | OTHER | {"anneal_lr": False, "rmsprop_eps": 1e-3},
}
APPO = {"default": {}, "other settings": OTHER | {"sample_fraction": 0.6, "num_minibatches": 5, "clip_coef": 0.05}}
APPO["other settings"] |= {"anneal_lr": True, "halve_lr_at": 96, "micro_batch_size": 6}
# Batches have two unrolls of some environments, and one of the others.
APPO["scaled rewards"] = {"norm_reward": "return", "num_envs": 4, "batch_size": 6, "total_timesteps": 180}
IMPALA |= {f"{name}, LSTM": IMPALA[name] | {"use_lstm": True} for name in ("small", "all settings")}
IMPALA |= {f"rewards: {name}": SMALL | {"norm_reward": name} for name in ("none", "soft-asymmetric")}
APPO |= {f"{name}, LSTM": settings | {"use_lstm": True} for name, settings in APPO.items()}


@pytest.mark.parametrize("settings", IMPALA.values(), ids=IMPALA)
def test_impala(settings, check):
    """Rounds of unrolls make two batches each, the second of which lags behind by an update."""
    check(impala, restated.impala, **impala.Args.presets["paper"] | {"preset": "paper", "num_actors": 0} | settings)


@pytest.mark.parametrize("settings", APPO.values(), ids=APPO)
def test_appo(settings, check):
    """As above: V-trace's ratios are not 1 in every second batch."""
    small = {"num_actors": 0, "num_envs": 16, "num_steps": 6, "batch_size": 8, "num_minibatches": 3}
    check(impala, restated.impala, **small | {"norm_reward": "clip", "total_timesteps": 192} | settings)
