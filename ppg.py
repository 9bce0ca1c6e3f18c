"""Phasic Policy Gradient (Cobbe et al. 2020, https://arxiv.org/abs/2009.04416) for Procgen and Gymnasium.

    python ppg.py --env-id starpilot
    python ppg.py --env-id starpilot --arch dual
    python ppg.py --env-id starpilot --kl-penalty 1
    torchrun --nproc-per-node 4 ppg.py --env-id starpilot    # the paper's 4 processes with 64 environments each

The policy phase is PPO with one pass over each rollout. After `n_pi` of them, an auxiliary phase trains the encoder on
the value targets of all these rollouts, while a KL divergence holds the policy where it was. The defaults are those of
OpenAI's phasic-policy-gradient, for one process with 64 environments. What differs from the paper and from CleanRL:

1. `--total-timesteps` is rounded up to whole iterations, and the learning-rate schedule ends where the run ends. A run
   that ends in mid-phase closes with an auxiliary phase on the iterations since the last one, so that it trains on all
   it collected (OpenAI's and CleanRL's do not). Rollouts that fill no whole minibatch there make a smaller one.
2. Every finished episode is recorded. Losses are logged as means over all minibatches.
3. Where Gymnasium reports a time limit, the value of the final observation is bootstrapped (Pardo et al. 2018,
   https://arxiv.org/abs/1712.00378). Procgen reports none: its step limits count as deaths, as in the published runs.
4. The default is `--arch detach`, as in CleanRL: one encoder where the paper's default `dual` has two, so half the work
   in every pass. It stops the gradient of the value head in both phases, as OpenAI's code does for its single network;
   the paper's, which scored what `dual` did (mean normalised return .755 against .756), does so in the policy phase.
5. The paper has 4 processes with 64 environments. One process with 64 makes as many minibatches, each of a quarter of
   the size, at the same learning rate, as in CleanRL: so it makes as many gradient steps in a phase as the paper. With
   four ranks (torchrun) it has the paper's batches, advantages normalised over all of them.
6. As in OpenAI's code, from which the paper's curves come, but not in CleanRL: no gradient clipping, no clipping of
   the value loss and a weight of 1 (not .5) on half its square, minibatches of whole environments, rewards scaled a
   rollout at a time by a return discounted by .99 (not .999), an Adam of its own for the auxiliary phase, and the
   value's passes before the policy's where `--e-value` differs from `--e-policy`.
7. Vector observations go through MLPs and are not normalised.
8. Where the processor has instructions for it, the convolutional encoder computes in bfloat16 (`--precision`).
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
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal, kl_divergence

from common.checkpoint import Checkpoints, find_run, load_weights, saved_args
from common.convolution import ConvMaxPool2d, residual_block
from common.device import compile_encoders, resolve_precision, setup_device
from common.env_state import env_states, load_env_states, recording, replay
from common.envs import RecordFirstEnv, RewardNormalizer, env_groups, make_envs, start_step
from common.errors import check_settings, one_line_errors, require
from common.evaluation import Evaluator
from common.intrinsic import check_intrinsic, make_intrinsic
from common.memory import empty, frame_store, micro_batches, to_device
from common.run import Run, check_run, require_finite
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
    adam_eps: float = 1e-8
    """Adam's epsilon (eps)"""
    num_steps: int = 256
    """steps of each environment in a rollout (T)"""
    gamma: float = 0.999
    """discount factor (gamma)"""
    gae_lambda: float = 0.95
    """decay of generalised advantage estimation (lambda)"""
    num_minibatches: int = 8
    """minibatches, of whole environments, that a rollout is split into"""
    e_policy: int = 1
    """passes over each rollout for the policy (E_pi)"""
    e_value: int = 1
    """passes over each rollout for the value; where it differs from E_pi, each has its own passes and Adam (E_V)"""
    norm_adv: Literal["minibatch", "batch", "none"] = "batch"
    """normalise advantages over each minibatch, over the whole batch, or not at all"""
    clip_coef: float = 0.2
    """clipping range of the policy ratio (epsilon)"""
    kl_penalty: float | None = None
    """replace the clipping by this weight times half the squared log-ratio (the paper's KL variant: 1); None to clip"""
    clip_coef_vf: float | None = None
    """clipping range of the change of the value; None for a plain squared error"""
    ent_coef: float = 0.01
    """weight of the entropy bonus (c2)"""
    vf_coef: float = 1.0
    """weight of the value loss, which is half the mean squared error (c1)"""
    max_grad_norm: float | None = None
    """clip the gradient to this L2 norm; None for no clipping"""
    target_kl: float | None = None
    """stop an iteration's epochs once a pass ends with an approximate KL (nats) above this; None for never"""
    norm_reward: bool = True
    """divide rewards by the running standard deviation of the discounted return and clip them to +-10"""
    norm_reward_gamma: float | None = 0.99
    """discount factor of the return that rewards are scaled by; None for gamma"""
    n_pi: int = 32
    """iterations in a policy phase (N_pi), whose frames are kept: 6.4 GB for 32 x 64 x 256 of Procgen's"""
    aux_frames: Literal["memory", "disk"] = "memory"
    """where these frames are kept: memory (a GPU's if they fit, or else the host's), or a file in --runs-dir"""
    e_aux: int = 6
    """passes over the rollouts of these n_pi iterations in the auxiliary phase (E_aux)"""
    beta_clone: float = 1.0
    """weight of the KL divergence from the old policy in the auxiliary phase (beta_clone)"""
    num_aux_rollouts: int = 4
    """rollouts of one environment, T steps each, that are worked through at a time in the auxiliary phase"""
    num_aux_grad_accum: int = 1
    """how many times `num_aux_rollouts` enter one gradient step of the auxiliary phase"""

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
    arch: Literal["detach", "dual", "shared"] = "detach"
    """detach: one encoder that the value head sends no gradient to; dual: an encoder each for policy and value;
    shared: one encoder for both. In all three an auxiliary value head teaches the policy's encoder"""
    feature_dim: int = 256
    """width of the encoder's output"""
    hidden_dim: int = 64
    """width of the MLP's hidden layer (vector observations only)"""
    init_fn: Literal["normed", "orthogonal", "xavier_uniform", "xavier_normal", "identity"] = "normed"
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
            "e_policy e_value clip_coef clip_coef_vf max_grad_norm target_kl kl_penalty n_pi e_aux num_aux_rollouts "
            "num_aux_grad_accum micro_batch_size feature_dim hidden_dim",
            not_negative="checkpoint_interval eval_interval learning_rate adam_eps ent_coef vf_coef beta_clone "
            "intrinsic_coef",
            fractions="gamma gae_lambda norm_reward_gamma intrinsic_gamma",
        )
        require(
            self.num_envs % self.num_minibatches == 0,
            f"--num-minibatches {self.num_minibatches} does not divide --num-envs {self.num_envs} (a minibatch is made "
            "of whole environments): change one of the two.",
        )
        check_intrinsic(self)
        require(self.batch_size > 1, "one step of one environment is no batch: raise --num-steps or --num-envs.")
        require(
            self.norm_adv != "minibatch" or self.num_minibatches < self.batch_size,
            "--norm-adv minibatch cannot normalise a single step: lower --num-minibatches or choose batch or none.",
        )
        aux_batch = self.num_aux_rollouts * self.num_aux_grad_accum
        require(
            self.num_envs * self.n_pi % aux_batch == 0,
            f"--num-aux-rollouts {self.num_aux_rollouts} x --num-aux-grad-accum {self.num_aux_grad_accum} = "
            f"{aux_batch} does not divide the {self.num_envs} x {self.n_pi} rollouts of a phase: change one of these.",
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
    """Policy and value function, with an auxiliary value head on the policy's encoder; `arch` as in `Args`."""

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.Space, args: Args):
        super().__init__()
        self.action_space, self.arch = action_space, args.arch
        self.bf16 = args.precision == "bf16" and len(observation_space.shape) == 3
        self.encoder = make_encoder(observation_space, args.feature_dim, args.hidden_dim, args.init_fn)
        if args.arch == "dual":
            self.value_encoder = make_encoder(observation_space, args.feature_dim, args.hidden_dim, args.init_fn)
        self.policy_head = PolicyHead(action_space, args.feature_dim, args.init_fn)
        self.value_head = init_layer(nn.Linear(args.feature_dim, 1), args.init_fn, "value")
        self.aux_value_head = init_layer(nn.Linear(args.feature_dim, 1), args.init_fn, "value")

    def encode(self, encoder: nn.Module, obs: Tensor) -> Tensor:
        # without a cache of cast weights, which threads would share
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            features = encoder(obs)
        return features.float() if self.bf16 else features

    def value_from(self, obs: Tensor, features: Tensor) -> Tensor:
        """Value estimates [B] of observations whose features in the policy's encoder are given."""
        if self.arch == "dual":
            features = self.encode(self.value_encoder, obs)
        elif self.arch == "detach":
            features = features.detach()
        return self.value_head(features).squeeze(-1)

    def get_value(self, obs: Tensor) -> Tensor:
        """Value estimates, float32 [B], of observations [B, ...]."""
        features = None if self.arch == "dual" else self.encode(self.encoder, obs)
        return self.value_from(obs, features)

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
        return action, dist.log_prob(action), dist.entropy(), self.value_from(obs, features)

    def get_policy_and_values(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the auxiliary phase trains: distribution parameters [B, P], values [B] and auxiliary values [B]."""
        features = self.encode(self.encoder, obs)
        aux_values = self.aux_value_head(features).squeeze(-1)
        return self.policy_head(features), self.value_from(obs, features), aux_values


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
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_coef: float, kl_penalty: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate objective (PPO, equation 7), negated. Arguments [...]; returns the loss and its metrics.

    With `kl_penalty` (PPG, section 3.5), the plain surrogate with a penalty of half the squared log-ratio instead. The
    approximate KL divergences are k1 and k3 of http://joschu.net/blog/kl-approx.html.
    """
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    if kl_penalty is None:
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()
    else:
        loss = -(ratio * advantages).mean() + kl_penalty * 0.5 * (logratio**2).mean()
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
    value_optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    advantages: Tensor,
    returns: Tensor,
    args: Args,
    world: World = ALONE,
) -> dict[str, Tensor]:
    """Policy phase: train on a rollout in minibatches of whole environments. Returns the means of the metrics.

    advantages, returns: [T, N], what the policy learns from and what the values are to be.
    """
    if args.norm_adv == "batch":
        advantages = normalize_advantages(advantages, world)

    if args.e_policy == args.e_value:
        passes = [(optimizer, args.e_policy, True, True)]
    else:
        passes = [(value_optimizer, args.e_value, False, True), (optimizer, args.e_policy, True, False)]
    history = []
    for opt, epochs, train_policy, train_value in passes:
        for _ in range(epochs):
            for batch in torch.randperm(args.num_envs, device=advantages.device).chunk(args.num_minibatches):
                *minibatch, batch_advantages = (
                    x.index_select(1, batch).flatten(0, 1)  # of frames four times as fast as [:, batch]
                    for x in (rollout.obs, rollout.actions, rollout.logprobs, rollout.values, returns, advantages)
                )
                if args.norm_adv == "minibatch":
                    batch_advantages = normalize_advantages(batch_advantages, world)
                opt.zero_grad()
                pieces = []
                for piece in world.average_gradient(
                    micro_batches([*minibatch, batch_advantages], args.micro_batch_size)
                ):
                    obs, actions, logprobs, values, piece_returns, piece_advantages = piece
                    _, new_logprobs, entropy, new_values = agent.get_action_and_value(obs, actions)
                    loss, losses, metrics = 0.0, {}, {}
                    if train_policy:
                        clip_coef, kl_penalty = args.clip_coef, args.kl_penalty
                        pg_loss, metrics = policy_loss(new_logprobs, logprobs, piece_advantages, clip_coef, kl_penalty)
                        entropy_loss = entropy.mean()
                        loss = loss + pg_loss - args.ent_coef * entropy_loss
                        losses |= {"losses/policy_loss": pg_loss, "losses/entropy": entropy_loss}
                    if train_value:
                        v_loss = value_loss(new_values, values, piece_returns, args.clip_coef_vf)
                        loss = loss + args.vf_coef * v_loss
                        losses |= {"losses/value_loss": v_loss}
                    share = len(obs) / len(batch_advantages)
                    (loss * share).backward()
                    pieces.append({tag: value.detach() * share for tag, value in (losses | metrics).items()})
                grad_norm = clip_gradient(agent, args.max_grad_norm)
                opt.step()
                history.append(sum_metrics(pieces) | {"losses/grad_norm": grad_norm})
            if train_policy and args.target_kl is not None:
                approx_kl = world.mean(history[-1])["losses/approx_kl"]
                if approx_kl > args.target_kl:
                    break
    deviations = [metrics["losses/ratio_deviation"] for metrics in history if "losses/ratio_deviation" in metrics]
    return mean_metrics(history) | {
        "losses/initial_ratio_deviation": deviations[0],
        "losses/explained_variance": explained_variance(rollout.values, returns),
    }


# ---------------------------------------------------------------------------------------------------- auxiliary phase


def policy_kl(old_dist: Distribution, dist: Distribution) -> Tensor:
    """KL divergence [B] of `dist` from `old_dist`."""
    if isinstance(dist, Independent) and isinstance(dist.base_dist, Bernoulli):
        # from the logits: PyTorch's takes probabilities and is infinite where a new one rounds to 1
        old, new = old_dist.base_dist.logits, dist.base_dist.logits
        on, off = F.logsigmoid(old) - F.logsigmoid(new), F.logsigmoid(-old) - F.logsigmoid(-new)
        return (old.sigmoid() * on + (-old).sigmoid() * off).sum(-1)
    return kl_divergence(old_dist, dist)


def auxiliary_loss(
    dist: Distribution, old_dist: Distribution, values: Tensor, aux_values: Tensor, returns: Tensor, beta_clone: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The auxiliary phase's L^joint and L^value (PPG, section 2) in one sum: values, aux_values and returns [B]."""
    aux_value_loss = 0.5 * ((aux_values - returns) ** 2).mean()
    real_value_loss = 0.5 * ((values - returns) ** 2).mean()
    kl_loss = policy_kl(old_dist, dist).mean()
    metrics = {
        "losses/aux/aux_value_loss": aux_value_loss,
        "losses/aux/real_value_loss": real_value_loss,
        "losses/aux/kl_loss": kl_loss,
    }
    return aux_value_loss + real_value_loss + beta_clone * kl_loss, metrics


def auxiliary_phase(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    obs: Tensor,
    returns: Tensor,
    args: Args,
    step: int,
    run: Run,
    world: World = ALONE,
) -> dict[str, Tensor]:
    """Train encoder and value heads on K iterations of T steps in N environments. Returns the means of the metrics.

    Args:
        obs: [K, T, N, *observation_shape], what the policy phase saw, on any device.
        returns: [K, T, N] float32, their value targets, computed when they were collected.
        step, run: where the progress is shown.
    """
    iterations, num_steps, num_envs = returns.shape
    # Rollout number k * N + n is that of environment n in iteration k.
    rollouts = torch.arange(iterations * num_envs, device=returns.device)

    def steps_of(batch: Tensor, x: Tensor) -> Tensor:  # [B x T, ...]
        batch = batch.to(x.device)
        return to_device(x[batch // num_envs, :, batch % num_envs].flatten(0, 1), returns.device)

    old_params = []
    for batch in rollouts.split(args.num_aux_rollouts):
        run.show(step, "auxiliary phase: old policy")
        with torch.no_grad():
            old_params.append(agent.get_policy(steps_of(batch, obs)).unflatten(0, (len(batch), -1)))
    old_params = torch.cat(old_params)  # [K x N, T, P]

    def pieces_of(group: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for batch in group.split(args.num_aux_rollouts):
            minibatch = steps_of(batch, obs), old_params[batch].flatten(0, 1), steps_of(batch, returns)
            yield from micro_batches(minibatch, args.micro_batch_size)

    history = []
    for epoch in range(1, args.e_aux + 1):
        order = rollouts[torch.randperm(len(rollouts), device=rollouts.device)]
        for group in order.split(args.num_aux_rollouts * args.num_aux_grad_accum):
            run.show(step, f"auxiliary phase: epoch {epoch}/{args.e_aux}")
            optimizer.zero_grad()  # also of the last gradient of the policy phase
            pieces = []
            for piece_obs, piece_old_params, piece_returns in world.average_gradient(pieces_of(group)):
                params, values, aux_values = agent.get_policy_and_values(piece_obs)
                dist = action_dist(agent.action_space, params)
                old_dist = action_dist(agent.action_space, piece_old_params)
                loss, metrics = auxiliary_loss(dist, old_dist, values, aux_values, piece_returns, args.beta_clone)
                share = len(piece_obs) / (len(group) * num_steps)
                (loss * share).backward()
                pieces.append({tag: value.detach() * share for tag, value in metrics.items()})
            grad_norm = clip_gradient(agent, args.max_grad_norm)
            optimizer.step()
            history.append(sum_metrics(pieces) | {"losses/aux/grad_norm": grad_norm})
    return mean_metrics(history)


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
    optimizer, value_optimizer, aux_optimizer = (
        torch.optim.Adam(agent.parameters(), args.learning_rate, eps=args.adam_eps, fused=device.type == "cuda")
        for _ in range(3)
    )
    reward_normalizer = None
    if args.norm_reward:
        norm_gamma = args.gamma if args.norm_reward_gamma is None else args.norm_reward_gamma
        reward_normalizer = RewardNormalizer(args.num_envs, norm_gamma, moments=world.moments)
    intrinsic = make_intrinsic(args, observation_space, action_space, args.e_value, world, device)
    iteration_steps = args.batch_size * world.size
    total_steps = world.total_steps(args.total_timesteps, iteration_steps, resumed)
    rollout = new_rollout(args.num_steps, args.num_envs, observation_space, action_space, device)
    num_kept = min(args.n_pi, math.ceil(total_steps / iteration_steps))
    shape, flags = (num_kept, *rollout.obs.shape), "--n-pi, --num-envs or --num-steps"
    aux_obs = frame_store(shape, rollout.obs.dtype, device, args.aux_frames, Path(args.runs_dir), flags)
    aux_actions = torch.empty((num_kept, *rollout.actions.shape), dtype=rollout.actions.dtype)  # for checkpoints
    aux_returns = torch.empty((num_kept, *rollout.values.shape), device=device)
    evaluate = Evaluator(args, agent, device, iteration_steps, total_steps, world)
    if args.init_from and not (resumed and resumed.checkpoint):
        load_weights(agent, args.init_from, args.init_heads)
    run = world.open_run(args, script=script, agent=agent, device=device, total_steps=total_steps, resumed=resumed)
    if args.capture_video:
        envs = RecordFirstEnv(envs, run.path / "videos")

    step, k, obs = run.step, 0, torch.as_tensor(envs.reset(seed=seed)[0]).to(rollout.obs)
    parts = {"agent": agent, "optimizer": optimizer, "reward_normalizer": reward_normalizer, "intrinsic": intrinsic}
    parts |= {"value_optimizer": value_optimizer, "aux_optimizer": aux_optimizer}
    with Checkpoints(run, resumed, world=world, **parts) as checkpoints:
        world.share(agent)
        if checkpoints.loop:
            saved = checkpoints.loop
            phase_start, k = saved["phase"]["start"], len(saved["returns"])
            aux_actions[:k], aux_returns[:k] = saved["phase"]["actions"], saved["returns"]
            replay(envs, saved["phase"], aux_obs[:k], saved["envs"])
            obs = load_env_states(envs, saved["envs"]).to(rollout.obs)
        while step < total_steps:
            learning_rate = args.learning_rate * (1 - step / total_steps) if args.anneal_lr else args.learning_rate
            for each in (optimizer, value_optimizer, aux_optimizer):
                each.param_groups[0]["lr"] = learning_rate

            # ---- collect
            if k == 0:
                phase_start = env_states(envs, obs)
            obs, step = collect(agent, envs, rollout, obs, step, reward_normalizer, run, world)

            # ---- learn
            with torch.no_grad():
                last_value = agent.get_value(obs)
            advantages = compute_gae(rollout, last_value, args.gamma, args.gae_lambda)
            returns, metrics = advantages + rollout.values, {}
            if intrinsic is not None:
                advantages, returns, metrics = intrinsic(rollout, obs, advantages, compute_gae)
            metrics |= update(agent, optimizer, value_optimizer, rollout, advantages, returns, args, world)

            # ---- auxiliary phase
            batch = rollout._asdict()
            aux_obs[k], aux_actions[k], aux_returns[k] = rollout.obs, rollout.actions, returns
            if k == args.n_pi - 1 or step >= total_steps:
                require_finite(step, metrics, batch)  # before a phase of many passes is spent on a broken network
                batch = {"obs": aux_obs[: k + 1], "returns": aux_returns[: k + 1]}
                metrics |= auxiliary_phase(agent, aux_optimizer, *batch.values(), args, step, run, world)

            # ---- log
            run.log(step, metrics | {"charts/learning_rate": learning_rate}, batch)
            k = (k + 1) % args.n_pi  # iterations that wait for the next auxiliary phase
            phase = recording(phase_start, aux_actions[:k], aux_obs[:k])
            evaluate(step, run)
            checkpoints.save(step, phase=phase, returns=aux_returns[:k], envs=env_states(envs, obs))

    envs.close()
    evaluate.close()
    world.leave()
    return run.path


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, default=saved_args(Args)))
