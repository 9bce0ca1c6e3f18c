"""Proximal Policy Optimization (Schulman et al. 2017, https://arxiv.org/abs/1707.06347) for Procgen and Gymnasium.

    python ppo.py --env-id starpilot
    python ppo.py --env-id coinrun --distribution-mode hard --num-levels 500 --total-timesteps 200000000
    python ppo.py --env-id CartPole-v1 --num-envs 8 --num-steps 128 --total-timesteps 200000 --gamma 0.99
    torchrun --nproc-per-node 4 ppo.py --env-id starpilot    # 4 ranks with 64 environments each

The defaults are those of the Procgen paper (Cobbe et al. 2020, https://arxiv.org/abs/1912.01588) for the easy mode, as
run by OpenAI's baselines. What differs from those runs and from CleanRL's ppo_procgen.py:

1. `--total-timesteps` is rounded up to whole iterations, and the learning-rate schedule ends where the run ends.
2. Every finished episode is recorded. Losses are logged as means over all minibatches.
3. Where Gymnasium reports a time limit, the value of the final observation is bootstrapped (Pardo et al. 2018,
   https://arxiv.org/abs/1712.00378). Procgen reports none: its step limits count as deaths, as in the published runs.
4. Rewards are scaled a rollout at a time: its returns enter the running statistics before it is divided by them. These
   returns are discounted by .99, the default of baselines' VecNormalize that the published runs used, not by gamma as
   in CleanRL.
5. All weights start Xavier-uniform (the heads' scaled by .01 and 1) with zero biases: in baselines the convolutions do,
   and the heads are orthogonal; CleanRL has PyTorch's default and orthogonal heads. Max-pooling pads both sides of a
   frame, as in CleanRL; TensorFlow's pads one.
6. Vector observations go through one MLP for policy and value, and are not normalised.
7. Where the processor has instructions for it, the convolutional encoder computes in bfloat16 (`--precision`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal

from common.checkpoint import Checkpoints, find_run, load_weights, saved_args
from common.convolution import ConvMaxPool2d, residual_block
from common.device import compile_encoders, resolve_precision, setup_device
from common.env_state import env_states, load_env_states
from common.envs import RecordFirstEnv, RewardNormalizer, env_groups, make_envs, start_step
from common.errors import check_settings, one_line_errors, require
from common.evaluation import Evaluator
from common.intrinsic import check_intrinsic, make_intrinsic
from common.memory import empty, micro_batches, to_device
from common.run import Run, check_run
from common.world import ALONE, World, join


@dataclass
class Args:
    # ---- run
    exp_name: str = Path(__file__).stem
    """name of the experiment, part of the run folder's name; by default that of the script's file"""
    seed: int = 1
    """seed of the networks, the action draws and the environments"""
    device: str = "auto"
    """auto (a CUDA GPU, or else the CPU), cpu, cuda or cuda:N"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """number format in the convolutional encoder (on a GPU, fp32 convolutions run in TF32), all else is float32 in any
    case; auto: bf16 on a processor with instructions for it"""
    micro_batch_size: int | None = None
    """steps of a minibatch whose gradient is computed at a time, to save memory; None: 512 on a CPU, all on a GPU"""
    accelerate: Literal["eager", "compile", "cudagraphs"] = "eager"
    """run the convolutional encoder as it is, compiled by torch.compile, or recorded as CUDA graphs (on a GPU)"""
    torch_deterministic: bool = True
    """use deterministic cuDNN kernels"""
    runs_dir: str = "runs"
    """where run folders are made"""
    resume: str | None = None
    """go on with the run in this folder, or with auto the newest unfinished run of the same settings"""
    init_from: str | None = None
    """start a new run with the weights of this run folder, model or checkpoint"""
    init_heads: Literal["keep", "policy", "reset"] = "keep"
    """with --init-from: keep the heads of its policy and value, that of the policy alone, or none"""
    checkpoint_interval: float = 5.0
    """minutes between checkpoints on disk; 0 for one after each iteration"""
    keep_checkpoints: int = 2
    """how many of the newest checkpoints to keep"""
    track: bool = False
    """also log to Weights & Biases (needs the package wandb)"""
    wandb_project_name: str = "procgen"
    """project in Weights & Biases"""
    wandb_entity: str | None = None
    """team in Weights & Biases"""
    capture_video: bool = False
    """write videos of environment 0 into the run folder (slower: Procgen then draws 512x512 frames, too)"""

    # ---- evaluation on held-out levels
    eval_interval: int = 0
    """environment steps between evaluations (the last is at the end of the run); 0 for none"""
    eval_episodes: int = 64
    """episodes of an evaluation with actions drawn, and again with the likeliest; rounded up to as many for each
    environment"""
    eval_num_levels: int = 0
    """number of Procgen levels to evaluate on; 0 for no limit, which is the usual test set"""
    eval_start_level: int = 0
    """the first of them (needs --eval-num-levels)"""

    # ---- environment
    env_id: str = "starpilot"
    """a Procgen game, several joined by commas, or a Gymnasium id"""
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "easy"
    """Procgen's difficulty; not every game has the last three"""
    num_levels: int = 0
    """number of Procgen levels to train on; 0 for no limit"""
    start_level: int = 0
    """the first Procgen level (needs --num-levels)"""
    num_threads: int = 4
    """C++ threads that step Procgen"""
    num_envs: int = 64
    """environments stepped side by side (N); of each rank, where torchrun starts several"""
    num_env_groups: int = 1
    """groups that take turns: with 2, Procgen steps one half of the environments while the policy acts for the other"""

    # ---- algorithm
    total_timesteps: int = 25_000_000
    """environment steps in all; rounded up to whole iterations of N x T"""
    learning_rate: float = 5e-4
    """step size of Adam (alpha)"""
    anneal_lr: bool = False
    """lower the learning rate linearly to 0 over the run"""
    adam_eps: float = 1e-5
    """Adam's epsilon (eps)"""
    num_steps: int = 256
    """steps of each environment in a rollout (T)"""
    gamma: float = 0.999
    """discount factor (gamma)"""
    gae_lambda: float = 0.95
    """decay of generalised advantage estimation (lambda)"""
    num_minibatches: int = 8
    """minibatches that a rollout is split into"""
    update_epochs: int = 3
    """passes over each rollout (K)"""
    norm_adv: Literal["minibatch", "batch", "none"] = "minibatch"
    """normalise advantages over each minibatch, over the whole batch, or not at all"""
    clip_coef: float = 0.2
    """clipping range of the policy ratio (epsilon)"""
    clip_coef_vf: float | None = 0.2
    """clipping range of the change of the value; None for a plain squared error"""
    ent_coef: float = 0.01
    """weight of the entropy bonus (c2)"""
    vf_coef: float = 0.5
    """weight of the value loss, which is half the mean squared error (c1)"""
    max_grad_norm: float | None = 0.5
    """clip the gradient to this L2 norm; None for no clipping"""
    target_kl: float | None = None
    """stop an iteration's epochs once a pass ends with an approximate KL (nats) above this; None for never"""
    norm_reward: bool = True
    """divide rewards by the running standard deviation of the discounted return and clip them to +-10"""
    norm_reward_gamma: float | None = 0.99
    """discount factor of the return that rewards are scaled by; None for gamma"""

    # ---- intrinsic rewards (common/intrinsic.py)
    intrinsic_reward: Literal["none", "rnd", "icm"] = "none"
    """also reward what is new: by random network distillation, or by the intrinsic curiosity module"""
    intrinsic_coef: float = 0.5
    """weight of their advantages, beside 1 for those of the task's rewards (normalised, only the ratio counts)"""
    intrinsic_gamma: float = 0.99
    """their discount factor"""
    pretraining: bool = False
    """learn from them alone: the task's rewards have weight 0, and the agent's values are of intrinsic returns"""

    # ---- networks
    feature_dim: int = 256
    """width of the encoder's output"""
    hidden_dim: int = 64
    """width of the MLP's hidden layer (vector observations only)"""
    init_fn: Literal["normed", "orthogonal", "xavier_uniform", "xavier_normal", "identity"] = "xavier_uniform"
    """how weights start: rows of fixed L2 norm (OpenAI's PPG code), orthogonal, Xavier's two, or identity, which leaves
    PyTorch's"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    def validate(self) -> None:
        """Raise InputError for sizes that cannot work, before anything is started."""
        check_settings(
            self,
            positive="total_timesteps keep_checkpoints eval_episodes num_envs num_env_groups num_steps num_minibatches "
            "update_epochs clip_coef clip_coef_vf max_grad_norm target_kl micro_batch_size feature_dim hidden_dim",
            not_negative="checkpoint_interval eval_interval learning_rate adam_eps ent_coef vf_coef intrinsic_coef",
            fractions="gamma gae_lambda norm_reward_gamma intrinsic_gamma",
        )
        require(
            self.batch_size % self.num_minibatches == 0,
            f"--num-minibatches {self.num_minibatches} does not divide the batch of {self.num_envs} environments x "
            f"{self.num_steps} steps = {self.batch_size}: change one of the three.",
        )
        check_intrinsic(self)
        require(self.batch_size > 1, "one step of one environment is no batch: raise --num-steps or --num-envs.")
        require(
            self.norm_adv != "minibatch" or self.num_minibatches < self.batch_size,
            "--norm-adv minibatch cannot normalise a single step: lower --num-minibatches or choose batch or none.",
        )


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
    """Initialise a convolution or linear layer in place: weights by `init_fn`, scaled for `role`; biases 0. With
    "identity" it stays as it is."""
    if init_fn == "identity":
        return layer
    scale = INIT_SCALES[init_fn][role]
    if init_fn == "normed":
        rows = layer.weight.data.flatten(1)
        layer.weight.data *= (scale / rows.norm(dim=1)).view(-1, *[1] * (layer.weight.dim() - 1))
    elif init_fn == "orthogonal":
        nn.init.orthogonal_(layer.weight, scale)
    elif init_fn == "xavier_normal":
        nn.init.xavier_normal_(layer.weight, scale)
    else:
        nn.init.xavier_uniform_(layer.weight, scale)
    nn.init.zeros_(layer.bias)
    return layer


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, init_fn: str):
        super().__init__()
        self.conv0 = init_layer(nn.Conv2d(channels, channels, 3, padding=1), init_fn, "residual")
        self.conv1 = init_layer(nn.Conv2d(channels, channels, 3, padding=1), init_fn, "residual")

    def forward(self, x: Tensor) -> Tensor:
        return residual_block(x, self.conv0, self.conv1)  # x + conv1(relu(conv0(relu(x))))


class ImpalaCNN(nn.Module):
    """The deep network of IMPALA (Espeholt et al. 2018, figure 3), without the LSTM.

    Frames uint8 [B, height, width, channels] -> features [B, feature_dim]. The permuted frames are in PyTorch's
    channels_last layout, which convolutions keep and are fastest in.
    """

    def __init__(self, observation_shape: tuple[int, ...], feature_dim: int, init_fn: str):
        super().__init__()
        height, width, channels = observation_shape
        layers = []
        for out_channels in (16, 32, 32):
            layers += [
                init_layer(ConvMaxPool2d(channels, out_channels), init_fn, "conv"),
                ResidualBlock(out_channels, init_fn),
                ResidualBlock(out_channels, init_fn),
            ]
            channels, height, width = out_channels, (height + 1) // 2, (width + 1) // 2
        layers += [
            nn.ReLU(),
            nn.Flatten(),
            init_layer(nn.Linear(channels * height * width, feature_dim), init_fn, "dense"),
            nn.ReLU(),
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, frames: Tensor) -> Tensor:
        bf16 = torch.is_autocast_enabled(frames.device.type)  # where 0 to 255 are exact, so that both ways agree
        return self.layers(frames.permute(0, 3, 1, 2).to(torch.bfloat16 if bf16 else torch.float32) / 255)


class MLP(nn.Module):
    """Vectors float32 [B, size] -> features [B, feature_dim]."""

    def __init__(self, size: int, hidden_dim: int, feature_dim: int, init_fn: str):
        super().__init__()
        self.layers = nn.Sequential(
            init_layer(nn.Linear(size, hidden_dim), init_fn, "dense"),
            nn.Tanh(),
            init_layer(nn.Linear(hidden_dim, feature_dim), init_fn, "dense"),
            nn.Tanh(),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        return self.layers(vectors)


def make_encoder(space: gym.spaces.Box, feature_dim: int, hidden_dim: int, init_fn: str) -> nn.Module:
    """The network from observations [B, *space.shape] to features [B, feature_dim]."""
    if len(space.shape) == 3:
        return ImpalaCNN(space.shape, feature_dim, init_fn)
    return MLP(space.shape[0], hidden_dim, feature_dim, init_fn)


class PolicyHead(nn.Module):
    """Features [B, feature_dim] -> parameters of the action distribution, float32 [B, P], which `action_dist` reads.

    P is the number of actions of a `Discrete` space, the number of bits of a `MultiBinary`, and for a `Box` twice its
    size: the means, and the logarithms of standard deviations that do not depend on the observation.
    """

    def __init__(self, space: gym.Space, feature_dim: int, init_fn: str):
        super().__init__()
        size = int(space.n) if isinstance(space, gym.spaces.Discrete) else space.shape[0]
        self.linear = init_layer(nn.Linear(feature_dim, size), init_fn, "policy")
        self.log_std = nn.Parameter(torch.zeros(size)) if isinstance(space, gym.spaces.Box) else None

    def forward(self, features: Tensor) -> Tensor:
        output = self.linear(features)
        if self.log_std is None:
            return output
        return torch.cat([output, self.log_std.expand_as(output)], dim=-1)


def action_dist(space: gym.Space, params: Tensor) -> Distribution:
    """The distribution over one action: categorical, independent Bernoulli, or diagonal Gaussian (not clipped)."""
    if isinstance(space, gym.spaces.Discrete):
        return Categorical(logits=params, validate_args=False)
    if isinstance(space, gym.spaces.MultiBinary):
        return Independent(Bernoulli(logits=params, validate_args=False), 1, validate_args=False)
    mean, log_std = params.chunk(2, dim=-1)
    return Independent(Normal(mean, log_std.exp(), validate_args=False), 1, validate_args=False)


class Agent(nn.Module):
    """Policy and value function on one encoder."""

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.Space, args: Args):
        super().__init__()
        self.action_space = action_space
        self.bf16 = args.precision == "bf16" and len(observation_space.shape) == 3
        self.encoder = make_encoder(observation_space, args.feature_dim, args.hidden_dim, args.init_fn)
        self.policy_head = PolicyHead(action_space, args.feature_dim, args.init_fn)
        self.value_head = init_layer(nn.Linear(args.feature_dim, 1), args.init_fn, "value")

    def encode(self, encoder: nn.Module, obs: Tensor) -> Tensor:
        # without a cache of cast weights, which threads would share
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            features = encoder(obs)
        return features.float() if self.bf16 else features

    def get_value(self, obs: Tensor) -> Tensor:
        """Value estimates, float32 [B], of observations [B, ...]."""
        return self.value_head(self.encode(self.encoder, obs)).squeeze(-1)

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
        if action is None:
            action = dist.sample()
        return action, dist.log_prob(action), dist.entropy(), self.value_head(features).squeeze(-1)


# ----------------------------------------------------------------------------------------------------------- rollout


class Rollout(NamedTuple):
    """T steps of N environments. `dones[t]` is 1 where `actions[t]` ended its episode: same index as `rewards[t]`."""

    obs: Tensor  # [T, N, *observation_shape], uint8 frames or float32 vectors
    actions: Tensor  # [T, N] int64, or [T, N, size] float32
    logprobs: Tensor  # [T, N] float32, of the actions under the policy that took them
    values: Tensor  # [T, N] float32, V(obs[t]) of the agent that acted
    rewards: Tensor  # [T, N] float32, scaled if --norm-reward
    dones: Tensor  # [T, N] float32
    truncation_values: Tensor  # [T, N] float32, value of the final observation where a time limit cut an episode


def new_rollout(
    num_steps: int, num_envs: int, observation_space: gym.Space, action_space: gym.Space, device: torch.device
) -> Rollout:
    """An empty rollout on `device`."""
    shape, flags = (num_steps, num_envs), "--num-envs or --num-steps"
    frames = len(observation_space.shape) == 3
    discrete = isinstance(action_space, gym.spaces.Discrete)
    return Rollout(
        empty(shape + observation_space.shape, torch.uint8 if frames else torch.float32, device, flags),
        torch.zeros(shape + action_space.shape, dtype=torch.int64 if discrete else torch.float32, device=device),
        *(torch.zeros(shape, device=device) for _ in range(5)),
    )


@torch.no_grad()
def collect(
    agent: Agent,
    envs: gym.vector.VectorEnv,
    rollout: Rollout,
    obs: Tensor,
    step: int,
    reward_normalizer: RewardNormalizer | None,
    run: Run,
    world: World = ALONE,
) -> tuple[Tensor, int]:
    """Fill `rollout`, starting from the observations `obs` [N, ...] that the environments gave after `step` steps.

    Returns the observations and the number of steps at its end. `run` is told of every episode that ends. Groups of
    environments (`--num-env-groups`) take turns: each is stepped while the policy acts for the next.
    """
    rewards, dones = np.zeros(rollout.rewards.shape, np.float32), np.zeros(rollout.dones.shape, np.float32)
    rollout.truncation_values.zero_()
    obs = obs.clone()

    def play(group: gym.vector.VectorEnv, part: slice) -> Iterator[None]:
        for t in range(len(rewards)):
            rollout.obs[t, part] = obs[part]
            action, rollout.logprobs[t, part], _, rollout.values[t, part] = agent.get_action_and_value(obs[part])
            rollout.actions[t, part] = action
            actions = action.cpu().numpy()
            start_step(group, actions)
            yield  # the next group's turn, if there is one
            next_obs, rewards[t, part], terminations, truncations, infos = group.step(actions)
            dones[t, part] = terminations | truncations
            cut = np.flatnonzero(truncations & ~terminations)  # by a time limit alone
            if len(cut):
                final_obs = to_device(np.stack(infos["final_obs"][cut]), obs.device).to(obs.dtype)
                rollout.truncation_values[t, part.start + cut] = agent.get_value(final_obs)
            obs[part] = to_device(next_obs, obs.device)
            run.episodes(step + (t + 1) * envs.num_envs * world.size, infos, part.start)

    for _ in zip_longest(*(play(*group) for group in env_groups(envs))):  # in turn
        pass
    if reward_normalizer is not None:
        rewards = reward_normalizer(rewards, dones)
    rollout.rewards.copy_(torch.as_tensor(rewards))
    rollout.dones.copy_(torch.as_tensor(dones))
    return obs, step + rewards.size * world.size


# ----------------------------------------------------------------------------------------------------------- learning


def compute_gae(rollout: Rollout, last_value: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates [T, N] (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16).

    delta_t = r_t + gamma V(s_(t+1)) - V(s_t);  A_t = delta_t + gamma lambda (1 - done_t) A_(t+1)

    V(s_(t+1)) is `values[t + 1]` within an episode, `truncation_values[t]` where a time limit cut it, and 0 where it
    ended by itself. `last_value` [N] is that of the observations which follow the rollout.
    """
    advantages = torch.zeros_like(rollout.rewards)
    advantage, next_value = torch.zeros_like(last_value), last_value
    for t in reversed(range(len(advantages))):
        not_done = 1 - rollout.dones[t]
        target = rollout.rewards[t] + gamma * (not_done * next_value + rollout.truncation_values[t])
        delta = target - rollout.values[t]
        advantage = advantages[t] = delta + gamma * gae_lambda * not_done * advantage
        next_value = rollout.values[t]
    return advantages


def normalize_advantages(advantages: Tensor, world: World = ALONE) -> Tensor:
    std, mean = world.std_mean(advantages)
    return (advantages - mean) / (std + 1e-8)


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate objective (PPO, equation 7), negated. Arguments [...]; returns the loss and its metrics.

    The approximate KL divergences are k1 and k3 of http://joschu.net/blog/kl-approx.html.
    """
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()
    with torch.no_grad():
        metrics = {
            "losses/old_approx_kl": -logratio.mean(),
            "losses/approx_kl": (ratio - 1 - logratio).mean(),
            "losses/clipfrac": ((ratio - 1).abs() > clip_coef).float().mean(),
            "losses/ratio_deviation": (ratio - 1).abs().mean(),
        }
    return loss, metrics


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_coef_vf: float | None) -> Tensor:
    """Half the mean squared error of values [B] against returns [B].

    With `clip_coef_vf`, the worse of the errors of the value and of the value clipped to that distance from the old one
    (as in OpenAI's baselines).
    """
    errors = (values - returns) ** 2
    if clip_coef_vf is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef_vf, clip_coef_vf)
        errors = torch.max(errors, (clipped - returns) ** 2)
    return 0.5 * errors.mean()


def clip_gradient(agent: nn.Module, max_norm: float | None) -> Tensor:
    """Scale the gradient down to an L2 norm of `max_norm`, unless that is None; return the norm that it had."""
    return nn.utils.clip_grad_norm_(agent.parameters(), math.inf if max_norm is None else max_norm)


def mean_metrics(history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each tag over the minibatches that have it, still on the device."""
    tags = dict.fromkeys(tag for metrics in history for tag in metrics)
    return {tag: torch.stack([m[tag] for m in history if tag in m]).mean() for tag in tags}


def sum_metrics(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The sum of each tag over the pieces of a minibatch, still on the device."""
    return {tag: sum(piece[tag] for piece in pieces) for tag in pieces[0]}


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """1 - Var[returns - values] / Var[returns]: 1 is a perfect fit, 0 no better than a constant."""
    return 1 - (returns - values).var() / returns.var().clamp(min=1e-8)


def update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    advantages: Tensor,
    returns: Tensor,
    args: Args,
    world: World = ALONE,
) -> dict[str, Tensor]:
    """Train on a rollout: `update_epochs` passes in random minibatches. Returns the means of the metrics.

    advantages, returns: [T, N], what the policy learns from and what the values are to be.
    """
    if args.norm_adv == "batch":
        advantages = normalize_advantages(advantages, world)

    history = []
    for _ in range(args.update_epochs):
        for batch in torch.randperm(args.batch_size, device=advantages.device).chunk(args.num_minibatches):
            *minibatch, batch_advantages = (
                x.flatten(0, 1).index_select(0, batch)  # of frames six times as fast as [batch]
                for x in (rollout.obs, rollout.actions, rollout.logprobs, rollout.values, returns, advantages)
            )
            if args.norm_adv == "minibatch":
                batch_advantages = normalize_advantages(batch_advantages, world)
            optimizer.zero_grad()
            pieces = []
            for piece in world.average_gradient(micro_batches([*minibatch, batch_advantages], args.micro_batch_size)):
                obs, actions, logprobs, values, piece_returns, piece_advantages = piece
                _, new_logprobs, entropy, new_values = agent.get_action_and_value(obs, actions)
                pg_loss, metrics = policy_loss(new_logprobs, logprobs, piece_advantages, args.clip_coef)
                v_loss = value_loss(new_values, values, piece_returns, args.clip_coef_vf)
                entropy_loss = entropy.mean()
                loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss
                share = len(obs) / len(batch)
                (loss * share).backward()
                losses = {"losses/policy_loss": pg_loss, "losses/entropy": entropy_loss, "losses/value_loss": v_loss}
                pieces.append({tag: value.detach() * share for tag, value in (losses | metrics).items()})
            grad_norm = clip_gradient(agent, args.max_grad_norm)
            optimizer.step()
            history.append(sum_metrics(pieces) | {"losses/grad_norm": grad_norm})
        if args.target_kl is not None and world.mean(history[-1])["losses/approx_kl"] > args.target_kl:
            break
    return mean_metrics(history) | {
        "losses/initial_ratio_deviation": history[0]["losses/ratio_deviation"],
        "losses/explained_variance": explained_variance(rollout.values, returns),
    }


# --------------------------------------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train and return the run folder. Raises InputError before anything is started, TrainingError if it diverges."""
    # ---- set up
    args.validate()
    check_run(args)
    script = Path(__file__).name
    world = join(args.device)  # with other ranks, where torchrun has started this process
    args = world.own(replace(args, precision=resolve_precision(args.precision, args.device)))
    resumed = find_run(args, script, world)
    seed = world.seed(args.seed, resumed)
    device = setup_device(
        args.device, seed=seed, torch_deterministic=args.torch_deterministic, accelerate=args.accelerate
    )
    envs = make_envs(
        args.env_id,
        args.num_envs,
        seed=seed,
        distribution_mode=args.distribution_mode,
        num_levels=args.num_levels,
        start_level=args.start_level,
        num_threads=args.num_threads,
        capture_video=args.capture_video,
        num_groups=args.num_env_groups,
    )
    observation_space, action_space = envs.single_observation_space, envs.single_action_space
    agent = Agent(observation_space, action_space, args).to(device)
    compile_encoders(agent, args.accelerate)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=args.adam_eps, fused=device.type == "cuda")
    reward_normalizer = None
    if args.norm_reward:
        norm_gamma = args.gamma if args.norm_reward_gamma is None else args.norm_reward_gamma
        reward_normalizer = RewardNormalizer(args.num_envs, norm_gamma, moments=world.moments)
    intrinsic = make_intrinsic(args, observation_space, action_space, args.update_epochs, world, device)
    iteration_steps = args.batch_size * world.size
    total_steps = world.total_steps(args.total_timesteps, iteration_steps, resumed)
    rollout = new_rollout(args.num_steps, args.num_envs, observation_space, action_space, device)
    evaluate = Evaluator(args, agent, device, iteration_steps, total_steps, world)
    if args.init_from and not (resumed and resumed.checkpoint):
        load_weights(agent, args.init_from, args.init_heads)
    run = world.open_run(args, script=script, agent=agent, device=device, total_steps=total_steps, resumed=resumed)
    if args.capture_video:
        envs = RecordFirstEnv(envs, run.path / "videos")

    step, obs = run.step, torch.as_tensor(envs.reset(seed=seed)[0]).to(rollout.obs)
    parts = {"agent": agent, "optimizer": optimizer, "reward_normalizer": reward_normalizer, "intrinsic": intrinsic}
    with Checkpoints(run, resumed, world=world, **parts) as checkpoints:
        world.share(agent)
        if checkpoints.loop:
            obs = load_env_states(envs, checkpoints.loop["envs"]).to(rollout.obs)
        while step < total_steps:
            learning_rate = args.learning_rate * (1 - step / total_steps) if args.anneal_lr else args.learning_rate
            optimizer.param_groups[0]["lr"] = learning_rate

            # ---- collect
            obs, step = collect(agent, envs, rollout, obs, step, reward_normalizer, run, world)

            # ---- learn
            with torch.no_grad():
                last_value = agent.get_value(obs)
            advantages = compute_gae(rollout, last_value, args.gamma, args.gae_lambda)
            returns, metrics = advantages + rollout.values, {}
            if intrinsic is not None:
                advantages, returns, metrics = intrinsic(rollout, obs, advantages, compute_gae)
            metrics |= update(agent, optimizer, rollout, advantages, returns, args, world)

            # ---- log
            run.log(step, metrics | {"charts/learning_rate": learning_rate}, rollout._asdict())
            evaluate(step, run)
            checkpoints.save(step, envs=env_states(envs, obs))

    envs.close()
    evaluate.close()
    world.leave()
    return run.path


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, default=saved_args(Args)))
