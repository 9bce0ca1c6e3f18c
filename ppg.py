"""Phasic Policy Gradient (Cobbe et al. 2020, https://arxiv.org/abs/2009.04416) for Procgen and Gymnasium.

    python ppg.py --env-id starpilot
    torchrun --nproc-per-node 4 ppg.py --env-id starpilot --preset paper    # as in the paper: 4 x 64 environments

The policy phase is PPO with one pass over each rollout. After `n_pi` rollouts, an auxiliary phase trains the encoder
on the value targets of all of them, while a KL penalty holds the policy near where it was. `--preset paper` has the
settings of OpenAI's phasic-policy-gradient: not those of 7, and 5e-4 in 8. Deviations from the paper and from CleanRL:

1. `--total-timesteps` is rounded up to whole iterations; a run that ends in mid-phase closes with an auxiliary phase.
2. The logs have every finished episode. Losses are logged as means over all minibatches.
3. Where Gymnasium reports a truncation, the return bootstraps from the value of the final observation (Pardo et al.
   2018, https://arxiv.org/abs/1712.00378). Procgen reports none: its step limits terminate episodes, as for OpenAI.
4. Vector observations go through an MLP, and are not normalised.
5. The convolutional encoder computes in bfloat16 where the device has instructions for it (`--precision`).
6. Advantages are divided by the sample standard deviation (Bessel's correction), as in CleanRL; OpenAI uses the
   population's. Several ranks pool the moments of advantages and returns exactly; OpenAI averages the variances.
7. Phases are short, 8 iterations and 3 auxiliary passes, not 32 and 6. Minibatches have random steps of all
   environments, not whole rollouts of a few. Both learn faster at first (benchmarks/NOTES.md). One encoder, as in
   CleanRL, costs half of the paper's two. The value head's gradient does not reach it, as in OpenAI's code.
8. One process makes as many gradient steps in an iteration as the paper's four (torchrun: four ranks), on minibatches
   of a quarter of the size, as in CleanRL. So the policy phase has half of their learning rate; give four ranks 5e-4.
9. As in OpenAI's code, but not in CleanRL: no clipping of gradients or values, half the squared value error with weight
   1, reward scale as in `ppo.py`, and an Adam of its own for the auxiliary phase.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium.vector import VectorEnv
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal, kl_divergence
from torch.optim import Adam, Optimizer

from common.device import frame_store, to_device
from common.fast import accelerate
from common.learning import backward, mean_metrics
from common.reward_scale import RewardNormalizer
from common.run import Run
from common.session import Session, run_script
from common.settings import Fraction, NotNegative, Positive, RunArgs
from common.world import World

PAPER = {"arch": "dual", "learning_rate": 5e-4, "whole_rollouts": True, "n_pi": 32, "e_aux": 6}


@RunArgs.presets({"paper": PAPER | {"exp_name": f"{Path(__file__).stem}-paper"}})
@dataclass
class Args(RunArgs):
    exp_name: str = Path(__file__).stem

    # ---- preset
    preset: Literal["short", "paper"] = "short"
    """short phases, one encoder, half the learning rate; or the paper's settings; flags given beside it win"""

    # ---- environment
    env_id: str = "starpilot"
    """a Procgen game, several joined by commas, or a Gymnasium id"""
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "easy"
    """Procgen's difficulty; not every game has the last three"""
    num_levels: NotNegative[int] = 0
    """number of Procgen levels to train on; 0 for no limit"""
    start_level: NotNegative[int] = 0
    """first Procgen level to train on (needs --num-levels)"""
    num_threads: int = 4
    """C++ threads that step Procgen"""
    num_envs: Positive[int] = 64
    """number of environments, of each rank (N)"""
    num_env_groups: Positive[int] = 1
    """groups of environments that take turns: with 2, Procgen steps one half while the policy acts for the other"""

    # ---- algorithm
    total_timesteps: Positive[int] = 25_000_000
    """environment steps of the run; rounded up to whole iterations"""
    learning_rate: NotNegative[float] = 2.5e-4
    """step size of the optimizer in the policy phase (alpha)"""
    anneal_lr: bool = False
    """lower the learning rate of both phases linearly to 0 over the run"""
    adam_eps: NotNegative[float] = 1e-8
    """Adam's epsilon (eps)"""
    num_steps: Positive[int] = 256
    """steps of each environment in a rollout (T)"""
    gamma: Fraction = 0.999
    """discount factor (gamma)"""
    gae_lambda: Fraction = 0.95
    """decay of generalised advantage estimation (lambda)"""
    num_minibatches: Positive[int] = 8
    """minibatches that a rollout is split into"""
    whole_rollouts: bool = False
    """minibatches of both phases have whole rollouts of a few environments, not random steps of all"""
    e_policy: Positive[int] = 1
    """passes over each rollout for the policy (E_pi)"""
    e_value: Positive[int] = 1
    """passes over each rollout for the value (E_V); if it differs from E_pi, each has its own passes and Adam"""
    norm_adv: Literal["minibatch", "batch", "none"] = "batch"
    """normalise advantages over each minibatch, over the whole batch, or not at all"""
    clip_coef: Positive[float] = 0.2
    """clipping range of the policy ratio (epsilon)"""
    kl_penalty: Positive[float] | None = None
    """the KL variant: this weight (paper: 1) times half the squared log-ratio replaces clipping; None to clip"""
    clip_coef_vf: Positive[float] | None = None
    """clipping range of the change of the value; None for a plain squared error"""
    ent_coef: NotNegative[float] = 0.01
    """weight of the entropy bonus (c2)"""
    vf_coef: NotNegative[float] = 1.0
    """weight of the value loss, which is half the mean squared error (c1)"""
    max_grad_norm: Positive[float] | None = None
    """clip the gradient to this L2 norm; None for no clipping"""
    target_kl: Positive[float] | None = None
    """stop an iteration's epochs once a pass ends with an approximate KL (nats) above this; None for never"""
    norm_reward: Literal["return", "none"] = "return"
    """divide rewards by the running standard deviation of the discounted return and clip them to +-10, or do not"""
    norm_reward_gamma: Fraction | None = 0.99
    """discount factor of the return that --norm-reward return scales by; None for gamma"""
    n_pi: Positive[int] = 8
    """iterations in a policy phase (N_pi), whose frames are kept: 1.6 GB for 8 x 64 x 256 frames of Procgen"""
    aux_frames: Literal["memory", "disk"] = "memory"
    """where these frames are kept: in memory (a GPU's if they fit, else the host's), or in a file in --runs-dir"""
    e_aux: Positive[int] = 3
    """passes over the rollouts of a phase in the auxiliary phase (E_aux)"""
    aux_learning_rate: NotNegative[float] = 5e-4
    """step size of the auxiliary phase's optimizer"""
    beta_clone: NotNegative[float] = 1.0
    """weight of the KL divergence from the old policy in the auxiliary phase (beta_clone)"""
    num_aux_rollouts: Positive[int] = 4
    """size of a minibatch of the auxiliary phase, in rollouts of one environment (T steps each)"""
    num_aux_grad_accum: Positive[int] = 1
    """minibatches whose gradients the auxiliary phase accumulates before each step"""

    # ---- intrinsic rewards
    intrinsic_reward: Literal["none", "rnd", "icm"] = "none"
    """reward novelty, too: by random network distillation, or by the intrinsic curiosity module"""
    intrinsic_coef: NotNegative[float] = 0.5
    """weight of the intrinsic advantages; the task's have weight 1"""
    intrinsic_gamma: Fraction = 0.99
    """discount factor of the intrinsic rewards"""
    pretraining: bool = False
    """learn from intrinsic rewards alone: the task's rewards have weight 0, and values predict intrinsic returns"""

    # ---- network
    arch: Literal["detach", "dual", "shared"] = "detach"
    """detach: one encoder, no gradient from the value head; dual: a second encoder for it; shared: one for both"""
    feature_dim: Positive[int] = 256
    """width of the encoder's output"""
    hidden_dim: Positive[int] = 64
    """width of the MLP's hidden layer (vector observations only)"""
    init_fn: Literal["normed", "orthogonal", "xavier_uniform", "xavier_normal", "identity"] = "normed"
    """initial weights: rows of fixed L2 norm (OpenAI's PPG code), orthogonal, Xavier, or identity for PyTorch's own"""

    @property
    def iteration_steps(self) -> int:
        """Environment steps of a rank in an iteration: the batch that an update learns from."""
        return self.num_envs * self.num_steps

    def constraints(self) -> Iterator[tuple[bool, str]]:
        yield from super().constraints()
        count, of = (self.num_envs, "environments") if self.whole_rollouts else (self.iteration_steps, "steps")
        uneven = f"--num-minibatches {self.num_minibatches} does not divide the {count} {of} of a rollout: change one."
        yield count % self.num_minibatches == 0, uneven
        single = f"--num-minibatches {self.num_minibatches} leaves minibatches of one step: lower it."
        yield self.num_minibatches < self.iteration_steps, single


# ---------------------------------------------------------------------------------------------------------- networks

# Scale of the initial weights: the L2 norm of each output row for "normed", else the gain. The values of "normed" are
# those of OpenAI's phasic-policy-gradient; "residual" keeps the variance over 3 stacks of 2 blocks of 2 convolutions.
INIT_SCALES = {
    "normed": {"conv": 1.0, "residual": (3**-0.5 * 2**-0.5) ** 0.5, "dense": 1.4, "policy": 0.1, "value": 0.1},
    "orthogonal": {"conv": 2**0.5, "residual": 2**0.5, "dense": 2**0.5, "policy": 0.01, "value": 1.0},
    "xavier_uniform": {"conv": 1.0, "residual": 1.0, "dense": 1.0, "policy": 0.01, "value": 1.0},
    "xavier_normal": {"conv": 1.0, "residual": 1.0, "dense": 1.0, "policy": 0.01, "value": 1.0},
}


def init_layer(layer: nn.Module, init_fn: str, role: str) -> nn.Module:
    """Initialise a convolution or linear layer in place: weights by `init_fn`, scaled for `role`; biases 0."""
    if init_fn == "identity":
        return layer
    scale = INIT_SCALES[init_fn][role]
    if init_fn == "normed":
        rows = layer.weight.data.flatten(1)
        layer.weight.data *= (scale / rows.norm(dim=1)).view(-1, *[1] * (layer.weight.dim() - 1))
    else:  # nn.init.orthogonal_, xavier_uniform_ or xavier_normal_
        getattr(nn.init, f"{init_fn}_")(layer.weight, scale)
    nn.init.zeros_(layer.bias)
    return layer


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, init_fn: str):
        super().__init__()
        self.conv0 = init_layer(nn.Conv2d(channels, channels, 3, padding=1), init_fn, "residual")
        self.conv1 = init_layer(nn.Conv2d(channels, channels, 3, padding=1), init_fn, "residual")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv1(F.relu(self.conv0(F.relu(x))))


class ImpalaCNN(nn.Module):
    """The deep network of IMPALA (Espeholt et al. 2018, figure 3), without the LSTM.

    Frames uint8 [B, height, width, channels], or [B, channels, height, width] -> features [B, feature_dim].
    """

    def __init__(self, observation_shape: tuple[int, ...], feature_dim: int, init_fn: str):
        super().__init__()
        height, width, channels = observation_shape
        self.channels_first = height < channels  # as FrameStackObservation stacks frames
        if self.channels_first:
            channels, height, width = observation_shape
        layers = []
        for out_channels in (16, 32, 32):
            layers += [
                init_layer(nn.Conv2d(channels, out_channels, 3, padding=1), init_fn, "conv"),
                nn.MaxPool2d(3, 2, 1),
                ResidualBlock(out_channels, init_fn),
                ResidualBlock(out_channels, init_fn),
            ]
            channels, height, width = out_channels, (height + 1) // 2, (width + 1) // 2
        dense = init_layer(nn.Linear(channels * height * width, feature_dim), init_fn, "dense")
        self.layers = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), dense, nn.ReLU())

    def forward(self, frames: Tensor) -> Tensor:
        bf16 = torch.is_autocast_enabled(frames.device.type)  # in which 0 to 255 are exact
        frames = frames if self.channels_first else frames.permute(0, 3, 1, 2)
        return self.layers(frames.to(torch.bfloat16 if bf16 else torch.float32) / 255)


def make_encoder(space: gym.spaces.Box, feature_dim: int, hidden_dim: int, init_fn: str) -> nn.Module:
    """The network from observations [B, *space.shape] to features [B, feature_dim]: a CNN, or an MLP for vectors."""
    if len(space.shape or ()) == 3 and space.dtype == np.uint8:
        return ImpalaCNN(space.shape, feature_dim, init_fn)
    if len(space.shape or ()) != 1:
        raise NotImplementedError(f"no encoder for {space}: use uint8 frames [height, width, channels] or flat vectors")
    hidden = init_layer(nn.Linear(space.shape[0], hidden_dim), init_fn, "dense")
    output = init_layer(nn.Linear(hidden_dim, feature_dim), init_fn, "dense")
    return nn.Sequential(hidden, nn.Tanh(), output, nn.Tanh())


class PolicyHead(nn.Module):
    """Features [B, feature_dim] -> parameters of the action distribution, float32 [B, P], which `action_dist` reads.

    P is the number of actions of a `Discrete` space and the number of bits of a `MultiBinary`. For a `Box` it is twice
    its size: the means, and the logarithms of standard deviations that do not depend on the observation.
    """

    def __init__(self, space: gym.Space, feature_dim: int, init_fn: str):
        super().__init__()
        if isinstance(space, gym.spaces.Discrete) and space.start == 0:
            size = int(space.n)
        elif isinstance(space, gym.spaces.MultiBinary | gym.spaces.Box) and len(space.shape) == 1:
            size = space.shape[0]
        else:
            raise NotImplementedError(f"no distribution for {space}: use Discrete from 0, or flat MultiBinary or Box")
        self.linear = init_layer(nn.Linear(feature_dim, size), init_fn, "policy")
        self.log_std = nn.Parameter(torch.zeros(size)) if isinstance(space, gym.spaces.Box) else None

    def forward(self, features: Tensor) -> Tensor:
        output = self.linear(features)
        return output if self.log_std is None else torch.cat([output, self.log_std.expand_as(output)], dim=-1)


def action_dist(space: gym.Space, params: Tensor) -> Distribution:
    """The distribution over one action: categorical, independent Bernoulli, or diagonal Gaussian (not clipped)."""
    if isinstance(space, gym.spaces.Discrete):
        return Categorical(logits=params, validate_args=False)
    if isinstance(space, gym.spaces.MultiBinary):
        return Independent(Bernoulli(logits=params, validate_args=False), 1, validate_args=False)
    mean, log_std = params.chunk(2, dim=-1)
    return Independent(Normal(mean, log_std.exp(), validate_args=False), 1, validate_args=False)


class Agent(nn.Module):
    """Policy and value function, with an auxiliary value head on the policy's encoder; `arch` as in `Args`."""

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.Space, args: Args):
        super().__init__()
        self.action_space, self.arch = action_space, args.arch
        self.bf16 = args.precision == "bf16" and len(observation_space.shape or ()) == 3
        self.encoder = make_encoder(observation_space, args.feature_dim, args.hidden_dim, args.init_fn)
        if args.arch == "dual":
            self.value_encoder = make_encoder(observation_space, args.feature_dim, args.hidden_dim, args.init_fn)
        self.policy_head = PolicyHead(action_space, args.feature_dim, args.init_fn)
        self.value_head = init_layer(nn.Linear(args.feature_dim, 1), args.init_fn, "value")
        self.aux_value_head = init_layer(nn.Linear(args.feature_dim, 1), args.init_fn, "value")

    def encode(self, encoder: nn.Module, obs: Tensor) -> Tensor:
        # Autocast's cache of cast weights is off: the actor and learner threads of impala.py would share it.
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            features = encoder(obs)
        return features.float() if self.bf16 else features

    def get_value(self, obs: Tensor, features: Tensor | None = None) -> Tensor:
        """Value estimates, float32 [B], of observations [B, ...]; `features` of the policy's encoder save work."""
        if self.arch == "dual":
            features = self.encode(self.value_encoder, obs)
        elif features is None:
            features = self.encode(self.encoder, obs)
        return self.value_head(features.detach() if self.arch == "detach" else features).squeeze(-1)

    def get_policy(self, obs: Tensor) -> Tensor:
        """Parameters of the action distributions, float32 [B, P], as `action_dist` reads them."""
        return self.policy_head(self.encode(self.encoder, obs))

    def get_action_dist(self, obs: Tensor, state: None = None) -> tuple[Distribution, None]:
        """The distributions over actions at observations [N, ...]; there is no state to keep from step to step."""
        return action_dist(self.action_space, self.get_policy(obs)), state

    def get_action_and_value(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw actions [B, ...] or take those given; return them, their log-probabilities, entropies and values [B]."""
        features = self.encode(self.encoder, obs)
        dist = action_dist(self.action_space, self.policy_head(features))
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action), dist.entropy(), self.get_value(obs, features)

    def get_policy_and_values(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the auxiliary phase trains: distribution parameters [B, P], values [B] and auxiliary values [B]."""
        features = self.encode(self.encoder, obs)
        return self.policy_head(features), self.get_value(obs, features), self.aux_value_head(features).squeeze(-1)


# ----------------------------------------------------------------------------------------------------------- rollout


class Rollout(NamedTuple):
    """T steps of N environments. `dones[t]` is 1 where `actions[t]` ended its episode: same index as `rewards[t]`."""

    obs: Tensor  # [T, N, *observation_shape], uint8 frames or float32 vectors
    actions: Tensor  # [T, N] int64, or [T, N, size] float32
    logprobs: Tensor  # [T, N] float32, of the actions under the policy that took them
    values: Tensor  # [T, N] float32, V(obs[t]) of the agent that acted
    rewards: Tensor  # [T, N] float32, scaled with --norm-reward return
    dones: Tensor  # [T, N] float32
    truncation_values: Tensor  # [T, N] float32, value of the final observation where a time limit cut an episode


def new_rollout(
    num_steps: int, num_envs: int, observation_space: gym.Space, action_space: gym.Space, device: torch.device
) -> Rollout:
    """An empty rollout on `device`."""
    shape, discrete = (num_steps, num_envs), isinstance(action_space, gym.spaces.Discrete)
    obs_dtype = torch.uint8 if len(observation_space.shape) == 3 else torch.float32
    return Rollout(
        torch.empty(shape + observation_space.shape, dtype=obs_dtype, device=device),
        torch.zeros(shape + action_space.shape, dtype=torch.int64 if discrete else torch.float32, device=device),
        *(torch.zeros(shape, device=device) for _ in range(5)),
    )


@torch.no_grad()
def collect(
    agent: Agent, envs: VectorEnv, rollout: Rollout, obs: Tensor, step: int, normalizer: RewardNormalizer, run: Run
) -> tuple[Tensor, int]:
    """Fill `rollout` from `obs` [N, ...] on, the observations that the environments returned after `step` steps.

    Returns the observations and the number of steps at its end; tells `run` of every finished episode. With
    `--num-env-groups`, one group of environments steps while the policy acts for the next.
    """
    num_steps, num_envs = rollout.rewards.shape
    rewards, dones = np.zeros((2, num_steps, num_envs), np.float32)
    rollout.truncation_values.zero_()
    obs = obs.clone()
    for t in range(num_steps + 1):
        for group, part in envs.groups:
            if t > 0:  # finish step t - 1
                next_obs, rewards[t - 1, part], terminations, truncations, infos = group.step_wait()
                dones[t - 1, part] = terminations | truncations
                cut = np.flatnonzero(truncations & ~terminations)  # by a time limit alone
                if len(cut):
                    final_obs = to_device(np.stack(infos["final_obs"][cut]), obs.device).to(obs.dtype)
                    rollout.truncation_values[t - 1, part.start + cut] = agent.get_value(final_obs)
                obs[part] = to_device(next_obs, obs.device)
                run.episodes(step + t * num_envs * run.world_size, infos, part.start)
            if t < num_steps:  # begin step t
                rollout.obs[t, part] = obs[part]
                action, rollout.logprobs[t, part], _, rollout.values[t, part] = agent.get_action_and_value(obs[part])
                rollout.actions[t, part] = action
                group.step_async(action.cpu().numpy())
    rollout.rewards.copy_(torch.as_tensor(normalizer(rewards, dones)))
    rollout.dones.copy_(torch.as_tensor(dones))
    return obs, step + num_steps * num_envs * run.world_size


# ----------------------------------------------------------------------------------------------------------- learning


def compute_gae(rollout: Rollout, last_value: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates [T, N] (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16).

    delta_t = r_t + gamma V(s_(t+1)) - V(s_t);  A_t = delta_t + gamma lambda (1 - done_t) A_(t+1)

    V(s_(t+1)) is `values[t + 1]` within an episode, `truncation_values[t]` where a time limit cut it, and 0 where it
    ended by itself. `last_value` [N] is the value of the observations after the rollout.
    """
    not_done, next_values = 1 - rollout.dones, torch.cat([rollout.values[1:], last_value.unsqueeze(0)])
    targets = rollout.rewards + gamma * (not_done * next_values + rollout.truncation_values)
    deltas, decays = targets - rollout.values, gamma * gae_lambda * not_done
    advantages, advantage = torch.zeros_like(deltas), torch.zeros_like(last_value)
    for t in reversed(range(len(advantages))):
        advantage = advantages[t] = deltas[t] + decays[t] * advantage
    return advantages


def normalize_advantages(advantages: Tensor, world: World) -> Tensor:
    """Advantages [...] with mean 0 and standard deviation 1 over all ranks."""
    std, mean = world.std_mean(advantages)
    return (advantages - mean) / (std + 1e-8)


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_coef: float, kl_penalty: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate objective (PPO, equation 7), negated. Arguments [...]; returns the loss and its metrics.

    With `kl_penalty` (PPG, section 3.5), a penalty on half the squared log-ratio replaces the clipping.
    The approximate KL divergences are k1 and k3 of http://joschu.net/blog/kl-approx.html.
    """
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    if kl_penalty is None:
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()
    else:
        loss = -(ratio * advantages).mean() + kl_penalty * 0.5 * (logratio**2).mean()
    with torch.no_grad():
        metrics = {
            "losses/policy_loss": loss,
            "losses/old_approx_kl": -logratio.mean(),
            "losses/approx_kl": (ratio - 1 - logratio).mean(),
            "losses/clipfrac": ((ratio - 1).abs() > clip_coef).float().mean(),
            "losses/ratio_deviation": (ratio - 1).abs().mean(),
        }
    return loss, metrics


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_coef_vf: float | None) -> Tensor:
    """Half the mean squared error of values [B] against returns [B].

    With `clip_coef_vf`, errors are at least those of values clipped to this distance from the old ones (baselines).
    """
    errors = (values - returns) ** 2
    if clip_coef_vf is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef_vf, clip_coef_vf)
        errors = torch.max(errors, (clipped - returns) ** 2)
    return 0.5 * errors.mean()


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """1 - Var[returns - values] / Var[returns]: 1 is a perfect fit, 0 no better than a constant."""
    return 1 - (returns - values).var() / returns.var().clamp(min=1e-8)


def shuffled_steps(shape: tuple[int, int, int], whole_rollouts: bool, device: torch.device) -> Tensor:
    """The steps 0 to K x T x N - 1 of rollouts [K, T, N], int64, in random order: single steps, or rollouts [T]."""
    steps = torch.arange(math.prod(shape), device=device)
    units = steps.view(shape).transpose(1, 2).flatten(0, 1) if whole_rollouts else steps
    return units[torch.randperm(len(units), device=device)].flatten()


def update(
    agent: Agent, optimizers: tuple, rollout: Rollout, advantages: Tensor, returns: Tensor, args: Args, world: World
) -> dict[str, Tensor]:
    """Train on a rollout and its advantages and value targets [T, N], in random minibatches. Returns mean metrics."""

    def policy_loss_of(obs, actions, old_logprobs, old_values, returns, advantages):
        _, logprobs, entropy, _ = agent.get_action_and_value(obs, actions)
        pg_loss, metrics = policy_loss(logprobs, old_logprobs, advantages, args.clip_coef, args.kl_penalty)
        return pg_loss - args.ent_coef * entropy.mean(), metrics | {"losses/entropy": entropy.mean()}

    def value_loss_of(obs, actions, old_logprobs, old_values, returns, advantages):
        v_loss = value_loss(agent.get_value(obs), old_values, returns, args.clip_coef_vf)
        return args.vf_coef * v_loss, {"losses/value_loss": v_loss}

    def ppo_loss_of(obs, actions, old_logprobs, old_values, returns, advantages):
        _, logprobs, entropy, values = agent.get_action_and_value(obs, actions)
        pg_loss, metrics = policy_loss(logprobs, old_logprobs, advantages, args.clip_coef, args.kl_penalty)
        v_loss, entropy = value_loss(values, old_values, returns, args.clip_coef_vf), entropy.mean()
        loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
        return loss, metrics | {"losses/value_loss": v_loss, "losses/entropy": entropy}

    passes = [(ppo_loss_of, optimizers[0])] * args.e_policy
    if args.e_policy != args.e_value:
        passes = [(value_loss_of, optimizers[1])] * args.e_value + [(policy_loss_of, optimizers[0])] * args.e_policy
    if args.norm_adv == "batch":
        advantages = normalize_advantages(advantages, world)
    history = []
    for loss_of, optimizer in passes:
        order = shuffled_steps((1, *advantages.shape), args.whole_rollouts, advantages.device)
        for batch in order.chunk(args.num_minibatches):
            minibatch = [
                x.flatten(0, 1).index_select(0, batch)  # six times as fast as [batch] for frames
                for x in (rollout.obs, rollout.actions, rollout.logprobs, rollout.values, returns, advantages)
            ]
            if args.norm_adv == "minibatch":
                minibatch[-1] = normalize_advantages(minibatch[-1], world)
            optimizer.zero_grad()
            metrics = backward(loss_of, minibatch, args.micro_batch_size, world)  # the ranks' mean gradient
            metrics["losses/grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm or math.inf)
            optimizer.step()
            history.append(metrics)
        if args.target_kl is not None and world.all_reduce_mean(metrics).get("losses/approx_kl", 0) > args.target_kl:
            break
    return mean_metrics(history) | {
        "losses/initial_ratio_deviation": next(m for m in history if "losses/entropy" in m)["losses/ratio_deviation"],
        "losses/explained_variance": explained_variance(rollout.values, returns),
    }


# ---------------------------------------------------------------------------------------------------- auxiliary phase


class Phase:
    """The rollouts of a policy phase: `obs` [K, T, N, ...], on any device, `actions`, and value targets `returns`.
    A checkpoint has the actions in place of Procgen's frames, which `envs` replay; other observations are saved."""

    def __init__(self, size: int, envs: VectorEnv, rollout: Rollout, args: Args, device: torch.device):
        disk = args.runs_dir if args.aux_frames == "disk" else None
        obs = frame_store((size, *rollout.obs.shape), rollout.obs.dtype, device, disk)
        actions = torch.empty((size, *rollout.actions.shape), dtype=rollout.actions.dtype)
        self.envs, self.store = envs, (obs, actions, torch.empty((size, *rollout.values.shape), device=device))
        self.clear()

    def clear(self) -> None:
        """Begin a new phase where the environments are now."""
        self.start = self.envs.state_dict()
        self.resize(0)

    def resize(self, length: int) -> None:
        self.obs, self.actions, self.returns = (x[:length] for x in self.store)
        self.full = length == len(self.store[0])

    def add(self, rollout: Rollout, returns: Tensor) -> None:
        self.resize(len(self.obs) + 1)
        self.obs[-1], self.actions[-1], self.returns[-1] = rollout.obs, rollout.actions, returns

    def state_dict(self) -> dict:
        state = {"start": self.start, "actions": self.actions, "returns": self.returns}
        return state if self.envs.restorable else state | {"obs": self.obs}

    def load_state_dict(self, state: dict) -> None:
        """Restore a phase that led `envs` to where they are. Raises InputError if they do not repeat it."""
        self.start = state["start"]
        self.resize(len(state["actions"]))
        self.actions[:], self.returns[:] = state["actions"], state["returns"]
        if "obs" in state:
            self.obs[:] = state["obs"]
        else:
            self.envs.replay(self.start, self.actions, self.obs)


def policy_kl(old: Distribution, new: Distribution) -> Tensor:
    """KL(old || new) [B], computed from log-probabilities: finite where a new probability rounds to 0."""
    if isinstance(new, Categorical):
        return (old.probs * (old.logits - new.logits)).sum(-1)
    if isinstance(new.base_dist, Bernoulli):
        old, new = old.base_dist.logits, new.base_dist.logits
        on, off = F.logsigmoid(old) - F.logsigmoid(new), F.logsigmoid(-old) - F.logsigmoid(-new)
        return (old.sigmoid() * on + (-old).sigmoid() * off).sum(-1)
    return kl_divergence(old, new)


def auxiliary_phase(
    agent: Agent, optimizer: Optimizer, phase: Phase, args: Args, show: Callable[[str], None], world: World
) -> dict[str, Tensor]:
    """Train encoder and value heads on the rollouts of a phase. Returns the means of the metrics."""
    obs, returns, device = phase.obs.flatten(0, 2), phase.returns.flatten(), phase.returns.device

    def loss_of(obs, old_params, returns):  # L^joint (aux_value_loss and kl_loss) and L^value (PPG, section 2)
        params, values, aux_values = agent.get_policy_and_values(obs)
        kl_loss = policy_kl(action_dist(agent.action_space, old_params), action_dist(agent.action_space, params)).mean()
        aux_value_loss, real_value_loss = (0.5 * ((v - returns) ** 2).mean() for v in (aux_values, values))
        metrics = {"losses/aux/aux_value_loss": aux_value_loss, "losses/aux/real_value_loss": real_value_loss}
        return aux_value_loss + real_value_loss + args.beta_clone * kl_loss, metrics | {"losses/aux/kl_loss": kl_loss}

    history, at_a_time = [], args.num_aux_rollouts * args.num_steps
    with torch.no_grad():
        old_params = torch.cat([agent.get_policy(to_device(part, device)) for part in obs.split(at_a_time)])
    for epoch in range(1, args.e_aux + 1):
        order = shuffled_steps(phase.returns.shape, args.whole_rollouts, device)
        for batch in order.split(at_a_time * args.num_aux_grad_accum):
            show(f"aux. phase {epoch}/{args.e_aux}")
            optimizer.zero_grad()  # drops the policy phase's last gradient, too
            frames = obs.index_select(0, batch.to(obs.device))
            minibatch = to_device(frames, device), old_params[batch], returns[batch]
            metrics = backward(loss_of, minibatch, args.micro_batch_size, world, at_most=at_a_time)
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm or math.inf)
            metrics["losses/aux/grad_norm"] = grad_norm
            optimizer.step()
            history.append(metrics)
    return mean_metrics(history)


# --------------------------------------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train and return the run folder. Raises InputError before anything is started, TrainingError if it diverges."""
    with Session(args, __file__) as session:  # checks, ranks, the run to resume, seed, device
        # ---- set up
        args, world, device = session.args, session.world, session.device
        envs = session.make_envs()
        observation_space, action_space = envs.single_observation_space, envs.single_action_space
        agent = Agent(observation_space, action_space, args).to(device)
        accelerate(agent, args.accelerate)
        optimizer = Adam(agent.parameters(), args.learning_rate, eps=args.adam_eps, fused=device.type == "cuda")
        value_optimizer = Adam(agent.parameters(), args.learning_rate, eps=args.adam_eps, fused=device.type == "cuda")
        aux_optimizer = Adam(agent.parameters(), args.aux_learning_rate, eps=args.adam_eps, fused=device.type == "cuda")
        norm_gamma = args.gamma if args.norm_reward_gamma is None else args.norm_reward_gamma
        reward_normalizer = RewardNormalizer(args.num_envs, norm_gamma, args.norm_reward, world.moments)
        intrinsic = session.make_intrinsic(envs, epochs=args.e_value)
        rollout = new_rollout(args.num_steps, args.num_envs, observation_space, action_space, device)
        parts = {"optimizer": optimizer, "reward_normalizer": reward_normalizer, "intrinsic": intrinsic, "envs": envs}
        phase = Phase(min(args.n_pi, session.num_iterations), envs, rollout, args, device)
        parts |= {"value_optimizer": value_optimizer, "aux_optimizer": aux_optimizer, "phase": phase}
        run = session.open_run(agent, **parts)
        step, obs = run.step, to_device(envs.obs, device).to(rollout.obs.dtype)

        while step < run.total_steps:
            left = 1 - step / run.total_steps if args.anneal_lr else 1
            learning_rate = args.learning_rate * left
            optimizer.param_groups[0]["lr"] = value_optimizer.param_groups[0]["lr"] = learning_rate
            aux_optimizer.param_groups[0]["lr"] = args.aux_learning_rate * left

            # ---- collect
            obs, step = collect(agent, envs, rollout, obs, step, reward_normalizer, run)

            # ---- learn
            with torch.no_grad():
                last_value = agent.get_value(obs)
            advantages = compute_gae(rollout, last_value, args.gamma, args.gae_lambda)
            returns, metrics = advantages + rollout.values, {}
            if intrinsic is not None:
                advantages, returns, metrics = intrinsic(rollout, obs, advantages, compute_gae)
            metrics |= update(agent, (optimizer, value_optimizer), rollout, advantages, returns, args, world)

            # ---- auxiliary phase
            phase.add(rollout, returns)
            if phase.full or step >= run.total_steps:
                run.require_finite(step, metrics)  # before many passes are spent on a broken network
                metrics |= auxiliary_phase(agent, aux_optimizer, phase, args, partial(run.show, step), world)
                phase.clear()

            # ---- log
            run.log(step, metrics | {"charts/learning_rate": learning_rate})
            session.evaluate(step)
            session.save(step)
    return run.path


if __name__ == "__main__":
    run_script(main, Args)
