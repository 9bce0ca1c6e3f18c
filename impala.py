"""IMPALA (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561) for Procgen and Gymnasium.

    python impala.py --env-id starpilot
    python impala.py --env-id starpilot --use-lstm
    python impala.py --env-id starpilot --num-actors 0    # act and learn in turn: repeats bit for bit
    torchrun --nproc-per-node 4 impala.py --env-id starpilot    # 4 ranks, each a learner with actors of its own
    python impala.py --env-id CartPole-v1 --num-envs 16 --num-steps 32 --batch-size 16 --queue-size 16 \
        --num-minibatches 4 --gamma 0.98 --total-timesteps 300000

Actor threads, each with environments of its own, play T steps at a time (an unroll) with the newest policy that the
learner has published, and put them into a bounded queue. The learner takes B unrolls, corrects with V-trace for what
the policy has learnt since they were played, makes one pass over them and publishes. What differs from the paper and
from DeepMind's scalable_agent:

1. The pass is PPO's, but for its normalised advantages and clipped values: V-trace's targets and advantages are
   computed once, then come many steps on random minibatches, with a clipped ratio of the policy to the one that V-trace
   was computed with (as in IMPACT, Luo et al. 2020, https://arxiv.org/abs/1912.00167, and other asynchronous PPOs).
   `--num-minibatches 1 --sample-fraction 1` makes the paper's one step.
2. The pass takes a random three quarters of a batch's steps (`--sample-fraction`): neighbouring frames are much alike,
   and a gradient costs three times what V-trace, which uses every step, does.
3. Losses are means over a minibatch, not sums. To carry a sum's settings over, divide the norm that the gradient is
   clipped to by the number of steps summed, and so RMSProp's epsilon, which PyTorch adds outside the root (TensorFlow
   inside: its .01 is .1 outside). PyTorch's RMSProp starts with a mean square of 0, TensorFlow's with 1.
4. The other defaults are nearer to ppo.py's than to the paper's, too: unrolls of 128 steps, Adam with a constant
   learning rate, gamma .999, lambda .95 (not 1), rewards divided by the running standard deviation of the discounted
   return. The paper clips rewards to +-1, which makes all of a Procgen game's rewards alike. With the paper's settings
   IMPALA learns far less from a step of Procgen (benchmarks/NOTES.md).
5. `--total-timesteps` is rounded up to whole batches, and counts the steps that the learner has taken. Unrolls that
   still wait in the queue when a run ends are dropped, and so are their episodes; every other finished episode is
   recorded.
6. Where Gymnasium reports a time limit, the actor's value of the final observation is bootstrapped. Procgen reports
   none: its step limits count as deaths, as in the published runs of PPO.
7. The LSTM does not see the last action and reward, is as wide as the features, and starts with PyTorch's weights.
8. Vector observations go through one MLP for policy and value, and are not normalised.
9. Where the processor has instructions for it, the convolutional encoder computes in bfloat16 (`--precision`).
"""

import copy
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal

from common.actors import ActorThreads, in_turn
from common.checkpoint import Checkpoints, find_run, load_weights, saved_args
from common.convolution import ConvMaxPool2d, residual_block
from common.device import compile_encoders, resolve_precision, setup_device
from common.env_state import env_states, load_env_states, replayable
from common.envs import RecordFirstEnv, RewardNormalizer, finished_episodes, group_seed, make_envs
from common.errors import TrainingError, check_settings, one_line_errors, require
from common.evaluation import Evaluator
from common.memory import micro_batches, to_device
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
    """run the learner's convolutional encoder as it is, compiled by torch.compile, or recorded as CUDA graphs (on a
    GPU, with --num-actors 0)"""
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
    """minutes between checkpoints on disk; 0 for one after each update"""
    keep_checkpoints: int = 2
    """how many of the newest checkpoints to keep"""
    log_interval: int = 16_384
    """environment steps between two rows of metrics"""
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
    """C++ threads that step Procgen, for each actor"""
    num_envs: int = 64
    """environments in all (N), shared evenly by the actors; of each rank, where torchrun starts several"""

    # ---- algorithm
    total_timesteps: int = 25_000_000
    """environment steps in all; rounded up to whole batches of B x T"""
    num_actors: int = 1
    """threads that act while the learner learns; 0 to act and learn in turn"""
    num_steps: int = 128
    """steps of each environment in an unroll (T)"""
    batch_size: int = 128
    """unrolls that make a batch of the learner (B); of each rank"""
    queue_size: int = 64
    """unrolls that may wait for the learner; actors pause while it is full"""
    sample_fraction: float = 0.75
    """share of a batch's steps that the learner's pass takes, drawn at random; V-trace uses all of them"""
    num_minibatches: int = 32
    """gradient steps in that pass, each on a part of the steps drawn (with --use-lstm, whole unrolls are drawn)"""
    clip_coef: float | None = 0.2
    """clipping range of the ratio of the policy in training to that at the start of the batch (epsilon of PPO), without
    effect where --num-minibatches is 1; None for no clipping"""
    optimizer: Literal["rmsprop", "adam"] = "adam"
    """RMSProp as in the paper (decay .99, no momentum), or Adam"""
    learning_rate: float = 1e-3
    """step size of the optimizer (alpha)"""
    anneal_lr: bool = False
    """lower the learning rate linearly to 0 over the run"""
    rmsprop_eps: float = 1e-4
    """RMSProp's epsilon, outside the root (the paper's .01, inside it and for a sum of n steps, is .1 / n here)"""
    adam_eps: float = 1e-5
    """Adam's epsilon (eps)"""
    gamma: float = 0.999
    """discount factor (gamma)"""
    vtrace_lambda: float = 0.95
    """decay of V-trace's corrections (lambda; 1 in the paper's experiments)"""
    rho_bar: float = 1.0
    """bound of the importance weights in V-trace's temporal differences (rho-bar)"""
    c_bar: float = 1.0
    """bound of the importance weights that carry corrections back in time (c-bar), not above rho-bar"""
    pg_rho_bar: float = 1.0
    """bound of the importance weights of the policy gradient"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    baseline_coef: float = 0.5
    """weight of the value loss, which is half the mean squared error"""
    max_grad_norm: float | None = 0.5
    """clip the gradient to this L2 norm; None for no clipping"""
    reward_norm: Literal["return", "clip", "soft-asymmetric", "none"] = "return"
    """divide rewards by the running standard deviation of the discounted return and clip them to +-10; clip them to
    +-1; squash them to 5 tanh(r / 5), times .3 if negative (for DMLab); or leave them as they are"""
    norm_reward_gamma: float | None = 0.99
    """discount factor of the return that rewards are scaled by; None for gamma (--reward-norm return only)"""

    # ---- networks
    use_lstm: bool = False
    """put an LSTM between encoder and heads"""
    feature_dim: int = 256
    """width of the encoder's output"""
    hidden_dim: int = 64
    """width of the MLP's hidden layer (vector observations only)"""
    init_fn: Literal["normed", "orthogonal", "xavier_uniform", "xavier_normal", "identity"] = "xavier_uniform"
    """how weights start: rows of fixed L2 norm (OpenAI's PPG code), orthogonal, Xavier's two, or identity, which leaves
    PyTorch's"""

    def validate(self) -> None:
        """Raise InputError for sizes that cannot work, before anything is started."""
        check_settings(
            self,
            positive="total_timesteps keep_checkpoints eval_episodes log_interval num_envs num_steps batch_size "
            "queue_size sample_fraction num_minibatches clip_coef max_grad_norm micro_batch_size feature_dim "
            "hidden_dim",
            not_negative="checkpoint_interval eval_interval num_actors learning_rate rmsprop_eps adam_eps ent_coef "
            "baseline_coef",
            fractions="sample_fraction gamma vtrace_lambda norm_reward_gamma",
        )
        share = self.num_actors * len(self.env_id.split(","))  # each actor plays every game
        require(
            not share or self.num_envs % share == 0,
            f"--num-envs {self.num_envs} cannot be shared evenly by --num-actors {self.num_actors}, with environments "
            f"of every game for each: use a multiple of {share}.",
        )
        require(self.batch_size * self.num_steps > 1, "one step is no batch: raise --num-steps or --batch-size.")
        drawn = math.ceil(self.sample_fraction * (self.batch_size * (1 if self.use_lstm else self.num_steps)))
        require(
            self.num_minibatches <= drawn,
            f"--num-minibatches {self.num_minibatches} is more than the {drawn} "
            f"{'unrolls' if self.use_lstm else 'steps'} drawn from a batch: lower it, or raise --batch-size.",
        )
        require(
            self.accelerate != "cudagraphs" or not self.num_actors,
            "--accelerate cudagraphs cannot record while actors draw actions: use compile, or --num-actors 0.",
        )
        require(
            0 < self.c_bar <= self.rho_bar and self.pg_rho_bar > 0,
            f"--rho-bar {self.rho_bar}, --c-bar {self.c_bar}, --pg-rho-bar {self.pg_rho_bar} cannot work: use numbers "
            "above 0 (inf for no bound) with --c-bar not above --rho-bar.",
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
    """Policy and value function on one encoder, with an LSTM between them if `use_lstm`.

    The recurrent state of N environments is one float32 tensor [2, N, H], h and c; without an LSTM, H is 0.
    """

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.Space, args: Args):
        super().__init__()
        self.action_space = action_space
        self.bf16 = args.precision == "bf16" and len(observation_space.shape) == 3
        self.encoder = make_encoder(observation_space, args.feature_dim, args.hidden_dim, args.init_fn)
        self.lstm = nn.LSTMCell(args.feature_dim, args.feature_dim) if args.use_lstm else None
        self.policy_head = PolicyHead(action_space, args.feature_dim, args.init_fn)
        self.value_head = init_layer(nn.Linear(args.feature_dim, 1), args.init_fn, "value")

    def encode(self, encoder: nn.Module, obs: Tensor) -> Tensor:
        # without a cache of cast weights, which threads would share
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            features = encoder(obs)
        return features.float() if self.bf16 else features

    def initial_state(self, num_envs: int) -> Tensor:
        """The recurrent state [2, num_envs, H] at the start of an episode: zeros."""
        size = 0 if self.lstm is None else self.lstm.hidden_size
        return torch.zeros(2, num_envs, size, device=self.value_head.weight.device)

    def step(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step of N environments, whose states [2, N, H] are zero where an episode starts with `obs` [N, ...].

        Returns parameters of the action distributions, float32 [N, P], values, float32 [N], and the next state.
        """
        features = self.encode(self.encoder, obs)
        if self.lstm is not None:
            state = torch.stack(self.lstm(features, tuple(state)))
            features = state[0]
        return self.policy_head(features), self.value_head(features).squeeze(-1), state

    def get_action_dist(self, obs: Tensor, state: Tensor | None = None) -> tuple[Distribution, Tensor]:
        """The distributions over actions at observations [N, ...], and the next state; None stands for the first."""
        params, _, state = self.step(obs, self.initial_state(len(obs)) if state is None else state)
        return action_dist(self.action_space, params), state

    def unroll(self, obs: Tensor, state: Tensor, dones: Tensor) -> tuple[Tensor, Tensor]:
        """S steps of B unrolls: obs [S, B, ...], the state before obs[0] [2, B, H], dones [S, B] or [S - 1, B].

        Returns parameters of the action distributions [S, B, P] and values [S, B]; what `step` returns, step by step,
        when the state is zeroed after each `done`.
        """
        features = self.encode(self.encoder, obs.flatten(0, 1)).unflatten(0, obs.shape[:2])
        if self.lstm is not None:
            outputs = []
            for t in range(len(features)):
                state = torch.stack(self.lstm(features[t], tuple(state)))
                outputs.append(state[0])
                if t < len(dones):
                    state = state * (1 - dones[t]).unsqueeze(-1)
            features = torch.stack(outputs)
        return self.policy_head(features), self.value_head(features).squeeze(-1)


# ------------------------------------------------------------------------------------------------------------- actors


class Unroll(NamedTuple):
    """T steps of one environment. In a batch, every field has B of them in dimension 1.

    `dones[t]` is 1 where `actions[t]` ended its episode: same index as `rewards[t]`.
    """

    obs: Tensor  # [T + 1, *observation_shape], uint8 frames or float32 vectors; the last starts the next unroll
    actions: Tensor  # [T] int64, or [T, size] float32
    logprobs: Tensor  # [T] float32, of the actions under the policy that took them (mu)
    rewards: Tensor  # [T] float32, after --reward-norm (but for its scaling, which is the learner's)
    dones: Tensor  # [T] float32
    truncation_values: Tensor  # [T] float32, value of the final observation where a time limit cut an episode
    state: Tensor  # [2, H] float32, the recurrent state before obs[0]


class Experience(NamedTuple):
    """What an actor hands to the learner."""

    unroll: Unroll
    version: int  # how many updates the acting policy had seen
    env: int  # number of the environment
    episodes: list[tuple[int, float, int]]  # those that ended: t, return (as the environment gave it), length
    end: dict[str, Any]  # where the environment and the recurrent state are after the unroll, to resume from


class PublishedPolicy:
    """What actors act with: a copy of the learner's agent and its number of updates.

    A new copy takes the old one's place in one assignment, and no copy is ever changed: an actor that took one for an
    unroll can neither see half of an update nor switch policies in mid-unroll.
    """

    def __init__(self, agent: Agent, version: int):
        self.newest = copy.deepcopy(agent), version

    def publish(self, agent: Agent) -> None:
        _, version = self.newest
        self.newest = copy.deepcopy(agent), version + 1


def treat_rewards(rewards: np.ndarray, reward_norm: str) -> np.ndarray:
    """Clip or squash rewards float32 [T, N] as `--reward-norm` says (soft-asymmetric: that of scalable_agent)."""
    if reward_norm == "clip":
        return rewards.clip(-1, 1)
    if reward_norm == "soft-asymmetric":
        squashed = 5 * np.tanh(rewards / 5)
        return np.where(rewards < 0, 0.3 * squashed, squashed)
    return rewards


def start_envs(
    envs: gym.vector.VectorEnv, first_env: int, agent: Agent, ends: dict[int, dict[str, Any]], args: Args
) -> tuple[Tensor, Tensor]:
    """Reset the environments, or put those back where they were that `ends` has (by their numbers, from `first_env`).

    Returns the observations [N, ...] and the recurrent states [2, N, H] to go on from.
    """
    state = agent.initial_state(envs.num_envs)
    obs = torch.as_tensor(envs.reset(seed=args.seed + first_env)[0])
    if ends:
        states = [ends.get(first_env + n, each) for n, each in enumerate(env_states(envs, obs))]
        obs = load_env_states(envs, states)
        for n, each in enumerate(states if replayable(states) else []):  # no memory of an episode that was lost
            if "recurrent" in each:
                state[:, n] = each["recurrent"]
    if obs.dim() == 2:
        obs = obs.float()  # vectors may come as float64
    return obs.to(state.device), state


@torch.no_grad()
def act(
    envs: gym.vector.VectorEnv,
    first_env: int,
    policy: PublishedPolicy,
    ends: dict[int, dict[str, Any]],
    args: Args,
    device: torch.device,
    stop: threading.Event,
) -> Iterator[Experience]:
    """Play `num_steps` steps of n environments with the newest policy, yield the n unrolls, and so on until `stop`.

    The environments are number `first_env` to `first_env + n - 1` of all, and start where `ends` says (`start_envs`).
    """
    num_envs, num_steps = envs.num_envs, args.num_steps
    obs, state = start_envs(envs, first_env, policy.newest[0], ends, args)
    while True:
        agent, version = policy.newest
        frames = torch.empty((num_steps + 1, *obs.shape), dtype=obs.dtype, device=device)
        actions, logprobs = [], []
        rewards, dones = np.zeros((2, num_steps, num_envs), np.float32)
        truncation_values = torch.zeros(num_steps, num_envs, device=device)
        first_state = state
        episodes = [[] for _ in range(num_envs)]
        for t in range(num_steps):
            if stop.is_set():
                return
            frames[t] = obs
            params, _, state = agent.step(obs, state)
            if not params.isfinite().all():
                reason = f"an output of the policy after {version:,} updates is NaN or infinite"
                raise TrainingError(reason, {"obs": obs, "params": params})
            dist = action_dist(agent.action_space, params)
            actions.append(dist.sample())
            logprobs.append(dist.log_prob(actions[t]))
            next_obs, rewards[t], terminations, truncations, infos = envs.step(actions[t].cpu().numpy())
            dones[t] = terminations | truncations
            cut = truncations & ~terminations  # by a time limit alone
            if cut.any():
                final_obs = to_device(np.stack(infos["final_obs"][cut]), device).to(obs.dtype)
                _, truncation_values[t, cut], _ = agent.step(final_obs, state[:, cut])
            obs = to_device(next_obs, device).to(obs.dtype)
            state = state * (1 - torch.as_tensor(dones[t], device=device).unsqueeze(-1))
            for env, episodic_return, length in finished_episodes(infos):
                episodes[env].append((t, episodic_return, length))
        frames[num_steps] = obs
        unrolls = Unroll(
            frames,
            torch.stack(actions),
            torch.stack(logprobs),
            torch.as_tensor(treat_rewards(rewards, args.reward_norm), device=device),
            torch.as_tensor(dones, device=device),
            truncation_values,
            first_state,
        )
        ends, recurrent = env_states(envs, obs), state.cpu()
        for env in range(num_envs):
            unroll = Unroll(*(field[:, env] for field in unrolls))
            end = ends[env] | {"recurrent": recurrent[:, env]}
            yield Experience(unroll, version, first_env + env, episodes[env], end)


# ----------------------------------------------------------------------------------------------------------- learning


def stack_unrolls(unrolls: list[Unroll]) -> Unroll:
    """A batch of unrolls: B of them side by side, in dimension 1."""
    return Unroll(*(torch.stack(field, dim=1) for field in zip(*unrolls, strict=True)))


def scale_rewards(batch: Unroll, envs: list[int], normalizer: RewardNormalizer) -> Tensor:
    """Rewards [T, B] divided by the scale of returns, which those of the whole batch enter first.

    The learner does it, not the actors, so that a checkpoint's statistics are those of what has been learnt from.

    Args:
        envs: number of the environment that each unroll is of; those of the same one follow each other in time.
    """
    rewards, dones = batch.rewards.cpu().numpy(), batch.dones.cpu().numpy()
    rounds, seen = defaultdict(list), Counter()  # the first unroll of each environment, then the second of each, ...
    for column, env in enumerate(envs):
        rounds[seen[env]].append(column)
        seen[env] += 1
    returns = np.empty(rewards.shape)
    for columns in rounds.values():
        numbers = [envs[column] for column in columns]
        returns[:, columns] = normalizer.discounted_returns(rewards[:, columns], dones[:, columns], numbers)
    normalizer.update(returns)
    return torch.as_tensor(normalizer.scale(rewards)).to(batch.rewards)


@torch.no_grad()
def vtrace(
    logratio: Tensor,
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    vtrace_lambda: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace targets and policy-gradient advantages, both [T, B] (IMPALA, section 4.1 and equation 4; remark 2).

    delta_t = rho_t (r_t + gamma_t V_(t+1) - V_t);  v_t = V_t + delta_t + gamma_t c_t (v_(t+1) - V_(t+1)),  v_T = V_T
    A_t = min(pg_rho_bar, ratio_t) (r_t + gamma_t v_(t+1) - V_t)

    with rho_t = min(rho_bar, ratio_t) and c_t = lambda min(c_bar, ratio_t).

    Args:
        logratio: [T, B], log of pi(a|x) / mu(a|x), of the learner's policy over the one that acted.
        rewards: [T, B].
        discounts: [T, B], gamma, or 0 where the action ended its episode.
        values: [T + 1, B], the learner's; the last bootstraps.
    """
    ratio = logratio.exp()
    rho, c = ratio.clamp(max=rho_bar), vtrace_lambda * ratio.clamp(max=c_bar)
    deltas = rho * (rewards + discounts * values[1:] - values[:-1])
    corrections = torch.zeros_like(values)  # v_t - V_t
    for t in reversed(range(len(rewards))):
        corrections[t] = deltas[t] + discounts[t] * c[t] * corrections[t + 1]
    targets = values + corrections
    advantages = ratio.clamp(max=pg_rho_bar) * (rewards + discounts * targets[1:] - values[:-1])
    return targets[:-1], advantages


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


def value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Half the mean squared error of values [...] against V-trace targets [...]."""
    return 0.5 * ((values - targets.detach()) ** 2).mean()


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
    agent: Agent, optimizer: torch.optim.Optimizer, batch: Unroll, args: Args, world: World = ALONE
) -> dict[str, Tensor]:
    """Learn from a batch of unrolls: V-trace, then one pass in random minibatches. Returns the means of the metrics."""
    with torch.no_grad():  # a few unrolls at a time, to save memory
        fields = (x.chunk(args.num_minibatches, dim=1) for x in (batch.obs, batch.state, batch.dones))
        outputs = [agent.unroll(*piece) for piece in zip(*fields, strict=True)]
        params, values = (torch.cat(output, dim=1) for output in zip(*outputs, strict=True))
        logprobs = action_dist(agent.action_space, params[:-1]).log_prob(batch.actions)
    logratio = logprobs - batch.logprobs
    targets, advantages = vtrace(
        logratio,
        batch.rewards + args.gamma * batch.truncation_values,
        args.gamma * (1 - batch.dones),
        values,
        args.vtrace_lambda,
        args.rho_bar,
        args.c_bar,
        args.pg_rho_bar,
    )

    # Minibatches are drawn from dimension 1: whole unrolls with an LSTM, else any steps, as unrolls of length 1.
    samples = batch.obs[:-1], batch.dones, batch.actions, logprobs, targets, advantages
    if not args.use_lstm:
        samples = [x.flatten(0, 1).unsqueeze(0) for x in samples]
    num_samples = samples[0].shape[1]
    clip_coef = math.inf if args.clip_coef is None else args.clip_coef
    history = []
    drawn = torch.randperm(num_samples, device=logprobs.device)[: math.ceil(args.sample_fraction * num_samples)]
    for index in drawn.tensor_split(args.num_minibatches):
        state = batch.state[:, index] if args.use_lstm else agent.initial_state(len(index))
        minibatch = [x.index_select(1, index) for x in samples] + [state]  # of frames eight times as fast as [:, index]
        optimizer.zero_grad()
        pieces = []
        for piece in world.average_gradient(micro_batches(minibatch, args.micro_batch_size, dim=1)):
            obs, dones, actions, old_logprobs, batch_targets, batch_advantages, state = piece
            params, new_values = agent.unroll(obs, state, dones)
            dist = action_dist(agent.action_space, params)
            pg_loss, metrics = policy_loss(dist.log_prob(actions), old_logprobs, batch_advantages, clip_coef)
            v_loss = value_loss(new_values, batch_targets)
            entropy_loss = dist.entropy().mean()
            loss = pg_loss - args.ent_coef * entropy_loss + args.baseline_coef * v_loss
            share = obs.shape[1] / len(index)
            (loss * share).backward()
            losses = {"losses/policy_loss": pg_loss, "losses/entropy": entropy_loss, "losses/value_loss": v_loss}
            pieces.append({tag: value.detach() * share for tag, value in (losses | metrics).items()})
        grad_norm = clip_gradient(agent, args.max_grad_norm)
        optimizer.step()
        history.append(sum_metrics(pieces) | {"losses/grad_norm": grad_norm})
    ratio = logratio.exp()
    return mean_metrics(history) | {
        "losses/initial_ratio_deviation": history[0]["losses/ratio_deviation"],
        "losses/behaviour_kl": (ratio - 1 - logratio).mean(),
        "losses/rho": ratio.mean(),
        "losses/rho_clipfrac": (ratio > args.rho_bar).float().mean(),
        "losses/c_clipfrac": (ratio > args.c_bar).float().mean(),
        "losses/pg_rho_clipfrac": (ratio > args.pg_rho_bar).float().mean(),
        "losses/explained_variance": explained_variance(values[:-1], targets),
    }


# --------------------------------------------------------------------------------------------------------------- main


def record_episodes(run: Run, step: int, batch: list[Experience], num_steps: int, world: World = ALONE) -> None:
    """Tell `run` of the episodes that ended in a batch whose first actions were taken at `step`, in order of time."""
    unrolls, earlier, episodes = Counter(each.env for each in batch), Counter(), []
    for each in batch:  # where an environment has several unrolls, they follow each other
        for t, episodic_return, length in each.episodes:
            time = (earlier[each.env] * num_steps + t + 1) * len(batch) * world.size // unrolls[each.env]
            episodes.append((step + time, each.env, episodic_return, length))
        earlier[each.env] += 1
    for episode in sorted(episodes):
        run.episode(*episode)


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
    num_groups = max(1, args.num_actors)
    envs_per_group = args.num_envs // num_groups
    groups = [
        make_envs(
            args.env_id,
            envs_per_group,
            seed=group_seed(seed, number),
            distribution_mode=args.distribution_mode,
            num_levels=args.num_levels,
            start_level=args.start_level,
            num_threads=args.num_threads,
            capture_video=args.capture_video and number == 0,
        )
        for number in range(num_groups)
    ]
    agent = Agent(groups[0].single_observation_space, groups[0].single_action_space, args).to(device)
    compile_encoders(agent, args.accelerate)
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam(
            agent.parameters(), args.learning_rate, eps=args.adam_eps, fused=device.type == "cuda"
        )
    else:
        optimizer = torch.optim.RMSprop(agent.parameters(), lr=args.learning_rate, alpha=0.99, eps=args.rmsprop_eps)
    reward_normalizer = None
    if args.reward_norm == "return":
        norm_gamma = args.gamma if args.norm_reward_gamma is None else args.norm_reward_gamma
        reward_normalizer = RewardNormalizer(args.num_envs, norm_gamma, moments=world.moments)
    batch_steps = args.batch_size * args.num_steps * world.size
    total_steps = world.total_steps(args.total_timesteps, batch_steps, resumed)
    evaluate = Evaluator(args, agent, device, batch_steps, total_steps, world)
    if args.init_from and not (resumed and resumed.checkpoint):
        load_weights(agent, args.init_from, args.init_heads)
    run = world.open_run(args, script=script, agent=agent, device=device, total_steps=total_steps, resumed=resumed)
    if args.capture_video:
        groups[0] = RecordFirstEnv(groups[0], run.path / "videos")

    parts = {"agent": agent, "optimizer": optimizer, "reward_normalizer": reward_normalizer}
    with Checkpoints(run, resumed, world=world, **parts) as checkpoints:
        world.share(agent)
        step, ends, history, lags, lag_sum, lag_max, num_lags = run.step, {}, [], [], 0, 0, 0
        if checkpoints.loop:
            ends, history, lags, lag_sum, lag_max = checkpoints.loop["progress"]
            num_lags = checkpoints.loop.get("num_lags", step // batch_steps * args.batch_size)  # older ones have none
            history = [{tag: value.to(device) for tag, value in metrics.items()} for metrics in history]
        version = first_update = step // batch_steps
        policy, stop = PublishedPolicy(agent, version), threading.Event()
        actors = [
            act(envs, number * envs_per_group, policy, ends, replace(args, seed=seed), device, stop)
            for number, envs in enumerate(groups)
        ]
        batches = in_turn(actors[0], args.batch_size)
        if args.num_actors:
            batches = ActorThreads(actors, args.batch_size, args.queue_size, stop)
        try:
            while step < total_steps:
                learning_rate = args.learning_rate * (1 - step / total_steps) if args.anneal_lr else args.learning_rate
                optimizer.param_groups[0]["lr"] = learning_rate

                # ---- collect
                experiences = next(batches)

                # ---- learn
                batch = stack_unrolls([experience.unroll for experience in experiences])
                if reward_normalizer is not None:
                    envs_played = [experience.env for experience in experiences]
                    batch = batch._replace(rewards=scale_rewards(batch, envs_played, reward_normalizer))
                metrics = update(agent, optimizer, batch, args, world)
                require_finite(step, metrics, batch._asdict())  # before an actor draws from a broken policy
                policy.publish(agent)

                # ---- log
                record_episodes(run, step, experiences, args.num_steps, world)
                step += batch_steps
                history.append(metrics)
                lags += [version - experience.version for experience in experiences]
                version += 1
                if step % args.log_interval < batch_steps or step >= total_steps:
                    lag_sum, lag_max, num_lags = lag_sum + sum(lags), max(lag_max, *lags), num_lags + len(lags)
                    metrics = mean_metrics(history) | {"charts/learning_rate": learning_rate}
                    lag = {"charts/policy_lag": sum(lags) / len(lags), "charts/policy_lag_max": max(lags)}
                    metrics |= world.per_rank(lag)
                    if args.num_actors:
                        metrics |= batches.pop_metrics()
                    run.log(step, metrics)
                    history, lags = [], []
                evaluate(step, run)
                ends = ends | {experience.env: experience.end for experience in experiences}
                # In turn, unrolls of this round that no batch has had yet; they are in no checkpoint.
                in_hand = (version - first_update) * args.batch_size % args.num_envs
                if args.num_actors or not in_hand or step >= total_steps:
                    checkpoints.save(step, progress=(ends, history, lags, lag_sum, lag_max), num_lags=num_lags)
        finally:
            if not batches.close():
                for envs in groups:
                    envs.close()
                evaluate.close()

    mean_lag = lag_sum / max(1, num_lags)
    lag = f"policy lag (updates between acting and learning): {mean_lag:.1f} on average, {lag_max} at most"
    print(world.label + lag)
    world.leave()
    return run.path


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, default=saved_args(Args)))
