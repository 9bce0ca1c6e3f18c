"""IMPALA (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561) or asynchronous PPO, for Procgen and Gymnasium.

    python impala.py --env-id starpilot                    # asynchronous PPO (APPO): V-trace, then PPO's minibatches
    python impala.py --env-id starpilot --preset paper     # IMPALA as published: V-trace, then one gradient step
    python impala.py --env-id starpilot --use-lstm --num-actors 0    # act and learn in turn: repeats bit for bit
    torchrun --nproc-per-node 4 impala.py --env-id starpilot    # 4 ranks, each a learner with actors of its own

    each actor, in a thread of its own:                                act, ActorThreads
        play T steps with the newest published policy, and put the unroll into the bounded queue
    the learner, until total_timesteps:                                main
        take B unrolls from the queue, and scale their rewards         treat_rewards
        correct for the lag of their policies                          vtrace
        paper: one gradient step on all of them                        vtrace_loss, update
        appo: one pass over random minibatches, ratios clipped         appo_loss, update
        publish the policy

README.md lists the choices that all three scripts share.

Differs from the paper and from DeepMind's scalable_agent (1 and 2: by default, not with `--preset paper`):
1. After V-trace comes a pass like PPO's, over a random three quarters of the steps. The ratio to the policy that
   V-trace used is clipped, as in IMPACT (Luo et al. 2020, https://arxiv.org/abs/1912.00167).
2. The other defaults, too, are nearer to ppo.py's, and the learning rate halves once (benchmarks/NOTES.md says why).
3. Losses are means over a minibatch. For the paper's sums over T x B steps, `--preset paper` divides RMSProp's epsilon
   (0.1) and the gradient's norm limit (40) by T x B. Set both again when you change T or B.
4. RMSProp's epsilon is outside the root, where TensorFlow's 0.01 equals 0.1. The mean square starts at 0, not at 1.
5. With lambda below 1, on-policy advantages are delta_t + gamma (v_(t+1) - V_(t+1)), as in SEED RL, not as in rlax.
6. The LSTM does not see the last action and reward, is as wide as the features, and starts with PyTorch's weights.
7. Max-pooling pads both sides; TensorFlow pads one side.
8. Unrolls that wait in the queue when a run ends are dropped, and their episodes are not logged.
"""

from common import InputError, TrainingError  # isort: skip (first: a Ctrl-C in other imports is one line)
import copy
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.distributions import Distribution
from torch.optim import Adam, Optimizer, RMSprop

from common.checkpoint import Kept
from common.device import World, to_device
from common.envs import Envs, Episode, finished_episodes, make_vec
from common.fast import accelerate
from common.learning import PolicyHead, RewardNormalizer, action_dist, backward, init_layer, mean_metrics, micro_batches
from common.run import Run, require_finite
from common.session import Session, run_script
from common.settings import EnvArgs, Fraction, NetworkArgs, NotNegative, Positive, RunArgs


@dataclass
class Args(EnvArgs, NetworkArgs, RunArgs):
    presets: ClassVar[dict[str, dict[str, Any]]] = {  # "paper" has the settings of the paper for Atari
        "paper": {
            "exp_name": f"{Path(__file__).stem}-paper", "num_steps": 20, "batch_size": 32, "gamma": 0.99,
            "vtrace_lambda": 1.0, "sample_fraction": 1.0, "num_minibatches": 1, "clip_coef": None,
            "norm_reward": "clip", "optimizer": "rmsprop", "learning_rate": 6e-4, "anneal_lr": True,
            "halve_lr_at": None, "rmsprop_eps": 0.1 / 640, "max_grad_norm": 40 / 640,
        },
    }  # fmt: skip
    earlier: ClassVar[dict[str, Any]] = {"halve_lr_at": None}

    exp_name: str = f"{Path(__file__).stem}-appo"
    """name of the experiment, a part of the run folder's name"""
    preset: Literal["appo", "paper"] = "appo"
    """asynchronous PPO, or IMPALA with the paper's settings; flags given beside it win"""
    learning_rate: NotNegative[float] = 1e-3
    """step size of the optimizer (alpha)"""
    anneal_lr: bool = False
    """lower the learning rate linearly to 0 over the run"""
    halve_lr_at: Positive[int] | None = 1_015_808
    """environment steps after which the learning rate is half, against falls of the return; None for never"""
    optimizer: Literal["rmsprop", "adam"] = "adam"
    """RMSProp as in the paper (decay 0.99, no momentum), or Adam"""
    rmsprop_eps: NotNegative[float] = 1e-4
    """RMSProp's epsilon, outside the root"""
    adam_eps: NotNegative[float] = 1e-5
    """Adam's epsilon (eps)"""
    num_actors: NotNegative[int] = 1
    """threads that act while the learner learns; 0 to act and learn in turn"""
    num_steps: Positive[int] = 128
    """steps of an unroll (T)"""
    batch_size: Positive[int] = 128
    """unrolls in a batch of the learner, of each rank (B)"""
    queue_size: Positive[int] = 64
    """unrolls that may wait for the learner; actors pause while the queue is full"""
    gamma: Fraction = 0.999
    """discount factor (gamma)"""
    vtrace_lambda: Fraction = 0.95
    """decay of V-trace's corrections (lambda; 1 in the paper's experiments)"""
    rho_bar: float = 1.0
    """bound of the importance weights in V-trace's temporal differences (rho-bar)"""
    c_bar: float = 1.0
    """bound of the importance weights that carry corrections back in time (c-bar), not above rho-bar"""
    pg_rho_bar: float = 1.0
    """bound of the importance weights of the policy gradient"""
    sample_fraction: Fraction = 0.75
    """share of a batch's steps that the learner's pass takes, drawn at random; V-trace uses all of them"""
    num_minibatches: Positive[int] = 32
    """minibatches that the steps drawn are split into (with --use-lstm: the unrolls drawn)"""
    clip_coef: Positive[float] | None = 0.2
    """PPO's clipping range of the policy ratio, without effect with a single minibatch; None for no clipping"""
    ent_coef: NotNegative[float] = 0.01
    """weight of the entropy bonus (c2)"""
    vf_coef: Annotated[NotNegative[float], tyro.conf.arg(aliases=["--baseline-coef"])] = 0.5
    """weight of the value loss, which is half the mean squared error (c1)"""
    max_grad_norm: Positive[float] | None = 0.5
    """clip the gradient to this L2 norm; None for no clipping"""
    norm_reward: Literal["return", "clip", "soft-asymmetric", "none"] = "return"
    """return: as in ppo.py. clip: to +-1. soft-asymmetric: 5 tanh(r / 5), times 0.3 if negative (DMLab)"""
    norm_reward_gamma: Fraction | None = 0.99
    """discount factor of the return that --norm-reward return scales by; None for gamma"""
    log_interval: Positive[int] = 16_384
    """environment steps between two rows of metrics"""
    use_lstm: bool = False
    """put an LSTM between encoder and heads"""

    @property
    def iteration_steps(self) -> int:
        """Environment steps of a rank in an iteration: the batch that an update learns from."""
        return self.batch_size * self.num_steps

    @property
    def samples(self) -> int:
        """What the learner's pass draws from a batch: steps, or whole unrolls with an LSTM."""
        return math.ceil(self.sample_fraction * (self.batch_size if self.use_lstm else self.iteration_steps))

    def validate(self) -> None:
        super().validate()
        share = max(1, self.num_actors) * len(self.env_id.split(","))
        if self.num_envs % share:
            each = f"--num-actors {self.num_actors} with environments of every game"
            raise InputError(f"--num-envs {self.num_envs} cannot be shared by {each}: use a multiple of {share}.")
        if self.num_minibatches > self.samples or self.iteration_steps == 1:
            drawn = f"the {self.samples} {'unrolls' if self.use_lstm else 'steps'} of --sample-fraction"
            raise InputError(f"--num-minibatches {self.num_minibatches} is too many for {drawn}: raise --batch-size.")
        if not 0 < self.c_bar <= self.rho_bar or self.pg_rho_bar <= 0:
            given = f"--rho-bar {self.rho_bar}, --c-bar {self.c_bar}, --pg-rho-bar {self.pg_rho_bar}"
            raise InputError(f"{given} cannot work: use numbers above 0 with --c-bar not above --rho-bar.")


# ---------------------------------------------------------------------------------------------------------- networks


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, init_fn: str):
        super().__init__()
        self.conv0 = init_layer(nn.Conv2d(channels, channels, 3, padding=1), init_fn, "residual")
        self.conv1 = init_layer(nn.Conv2d(channels, channels, 3, padding=1), init_fn, "residual")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv1(F.relu(self.conv0(F.relu(x))))


class ImpalaCNN(nn.Module):
    """The deep network of IMPALA (Espeholt et al. 2018, figure 3), without the LSTM.

    Frames uint8 [B, height, width, channels], or [B, channels, height, width] -> features [B, feature_dim]."""

    def __init__(self, observation_shape: tuple[int, ...], feature_dim: int, init_fn: str):
        super().__init__()
        height, width, channels = observation_shape
        self.channels_first = height < min(width, channels)  # as FrameStackObservation stacks frames
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
        bf16 = torch.is_autocast_enabled(frames.device.type)  # bf16 holds 0 to 255 exactly
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


class Agent(nn.Module):
    """Policy and value function on one encoder, with an LSTM between them if `use_lstm`. The recurrent state of N
    environments is one float32 tensor [2, N, H], h and c; without an LSTM, H is 0."""

    policy_heads, value_heads = ["policy_head"], ["value_head"]  # for --init-heads

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.Space, args: Args):
        super().__init__()
        self.action_space = action_space
        self.bf16 = args.precision == "bf16" and len(observation_space.shape or ()) == 3
        self.encoder = make_encoder(observation_space, args.feature_dim, args.hidden_dim, args.init_fn)
        self.lstm = nn.LSTMCell(args.feature_dim, args.feature_dim) if args.use_lstm else None
        self.policy_head = PolicyHead(action_space, args.feature_dim, args.init_fn)
        self.value_head = init_layer(nn.Linear(args.feature_dim, 1), args.init_fn, "value")

    def encode(self, encoder: nn.Module, obs: Tensor) -> Tensor:
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            features = encoder(obs)
        return features.float() if self.bf16 else features

    def initial_state(self, num_envs: int) -> Tensor:
        """The recurrent state [2, num_envs, H] at the start of an episode: zeros."""
        size = 0 if self.lstm is None else self.lstm.hidden_size
        return torch.zeros(2, num_envs, size, device=self.value_head.weight.device)

    def step(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step of N environments: obs [N, ...], state [2, N, H], which is zero where an episode starts. Returns
        parameters of the action distributions, float32 [N, P], values, float32 [N], and the next state."""
        features = self.encode(self.encoder, obs)
        if self.lstm is not None:
            state = torch.stack(self.lstm(features, tuple(state)))
            features = state[0]
        return self.policy_head(features), self.value_head(features).squeeze(-1), state

    def get_action_dist(self, obs: Tensor, state: Tensor | None = None) -> tuple[Distribution, Tensor]:
        """The distributions over actions at observations [N, ...], and the next state; None stands for the first."""
        params, _, state = self.step(obs, self.initial_state(len(obs)) if state is None else state)
        return action_dist(self.action_space, params), state

    def get_action(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw actions [N, ...]; return them, their log-probabilities [N] and the next state."""
        params, _, state = self.step(obs, state)
        action = action_dist(self.action_space, params.nan_to_num()).sample()  # NaN would end all work on a GPU
        return action, action_dist(self.action_space, params).log_prob(action), state

    def unroll(self, obs: Tensor, state: Tensor, dones: Tensor) -> tuple[Tensor, Tensor]:
        """S steps of B unrolls: obs [S, B, ...], state before obs[0] [2, B, H], dones [S, B] (the last is optional).
        Returns parameters of the action distributions [S, B, P] and values [S, B]."""
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


def make_envs(args: Args, num_envs: int, seed: int, render: bool = False) -> gym.vector.VectorEnv:
    """The environments of training and evaluation. A copy that needs others makes or wraps them here."""
    return make_vec(args, num_envs, seed, render)


class Unroll(NamedTuple):
    """T steps of N environments. `dones[t]` is 1 where `actions[t]` ended its episode: same index as `rewards[t]`."""

    actions: Tensor  # [T, N] int64, or [T, N, size] float32; the first field, because micro_batches reads T from it
    obs: Tensor  # [T + 1, N, *observation_shape], uint8 frames or float32 vectors; the last starts the next unroll
    logprobs: Tensor  # [T, N] float32, of the actions under the policy that took them
    rewards: Tensor  # [T, N] float32, as the environment gave them
    dones: Tensor  # [T, N] float32
    truncation_values: Tensor  # [T, N] float32, value of the final observation where a time limit cut an episode
    state: Tensor  # [2, N, H] float32, the recurrent state before obs[0]


class Experience(NamedTuple):
    """What an actor hands to the learner."""

    unroll: Unroll  # of one environment: without dimension N
    version: int  # number of updates that the acting policy had seen
    env: int  # number of the environment
    episodes: list[tuple[int, Episode]]  # finished ones, and t
    end: dict[str, Any]  # the states of environment and LSTM after the unroll, to resume from


@torch.no_grad()
def act(
    envs: Envs, first_env: int, published: list, ends: dict[int, dict], args: Args, stop: Event, run: Run
) -> Iterator[Experience | None]:
    """Set up and yield None. Then, until `stop`, play T steps of n environments with the newest policy, and yield each.

    `published` holds one pair: a copy of the learner's agent, which never changes, and the updates that it has seen.
    `ends` has the states that environments `first_env` to `first_env + n - 1` resume from; it is empty in a new run."""
    num_envs, num_steps = envs.num_envs, args.num_steps
    agent = copy.deepcopy(published[0][0])  # its own, so that a CUDA graph finds its parameters at fixed addresses
    state = agent.initial_state(num_envs)
    device = state.device
    if ends:
        envs.load_state_dict([ends.get(first_env + n, each) for n, each in enumerate(envs.state_dict())])
        for n in range(num_envs):
            if envs.restorable and first_env + n in ends:  # other environments start new episodes
                state[:, n] = ends[first_env + n]["recurrent"]
    obs_dtype = torch.uint8 if envs.obs.ndim == 4 and envs.obs.dtype == np.uint8 else torch.float32
    obs = to_device(envs.obs, device).to(obs_dtype)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # a resumed run, too, begins with this call
        agent.get_action(obs, state)  # a GPU records this call; meanwhile no other thread may draw random numbers
    yield None
    while True:
        newest, version = published[0]
        agent.load_state_dict(newest.state_dict())
        frames = torch.empty((num_steps + 1, *obs.shape), dtype=obs_dtype, device=device)
        actions, logprobs = [], []
        rewards = np.zeros((num_steps, num_envs), np.float32)
        dones = np.zeros((num_steps, num_envs), np.float32)
        truncation_values = torch.zeros(num_steps, num_envs, device=device)
        first_state = state
        episodes = [[] for _ in range(num_envs)]
        for t in range(num_steps):
            if stop.is_set():
                return
            if not args.num_actors:
                run.show("collecting")
            frames[t] = obs
            action, logprob, state = agent.get_action(obs, state)
            actions.append(action)
            logprobs.append(logprob)
            next_obs, rewards[t], terminations, truncations, infos = envs.step(action.cpu().numpy())
            dones[t] = terminations | truncations
            cut = truncations & ~terminations  # by a time limit alone
            if cut.any():
                final_obs = to_device(np.stack(infos["final_obs"][cut]), device).to(obs_dtype)
                _, truncation_values[t, cut], _ = agent.step(final_obs, state[:, cut])
            obs = to_device(next_obs, device).to(obs_dtype)
            state = state.index_fill(1, torch.as_tensor(np.flatnonzero(dones[t]), device=device), 0)
            for episode in finished_episodes(infos):
                episodes[episode.env].append((t, episode))
        frames[num_steps] = obs
        unrolls = Unroll(
            actions=torch.stack(actions),
            obs=frames,
            logprobs=torch.stack(logprobs),
            rewards=torch.as_tensor(rewards, device=device),
            dones=torch.as_tensor(dones, device=device),
            truncation_values=truncation_values,
            state=first_state,
        )
        states = envs.state_dict()
        recurrent = state.cpu()
        if not unrolls.logprobs.isfinite().all():  # waits for the GPU, so the learner's stream can read the unrolls
            raise TrainingError(f"an output of the policy after {version:,} updates is NaN or infinite")
        for n in range(num_envs):
            unroll = Unroll(*[field[:, n] for field in unrolls])
            yield Experience(unroll, version, first_env + n, episodes[n], states[n] | {"recurrent": recurrent[:, n]})


class ActorThreads:
    """Actors, each in a thread of its own, and the bounded queue from which the learner takes their unrolls."""

    def __init__(self, actors: list[Iterator[Experience]], queue_size: int, device: torch.device, stop: Event):
        self.queue = Queue(queue_size)
        self.device, self.stop = device, stop
        self.threads = [Thread(target=self.run, args=[actor], name="actor", daemon=True) for actor in actors]
        for thread in self.threads:
            thread.start()

    def run(self, actor: Iterator[Experience]) -> None:
        """Act until `stop`. On a GPU, a stream of its own lets an actor act while an update is computed."""
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None):
                for experience in actor:
                    self.queue.put(experience)
        except BaseException as error:
            self.queue.put(error)

    def take(self, batch_size: int, run: Run) -> list[Experience]:
        """Wait for a batch of unrolls. Raises an actor's error."""
        self.occupancy = self.queue.qsize() / self.queue.maxsize
        batch = []
        while len(batch) < batch_size:
            run.show(f"waiting for actors, {len(batch)}/{batch_size} unrolls")
            with suppress(Empty):
                batch.append(self.queue.get(timeout=1))
            if batch and isinstance(batch[-1], BaseException):
                raise batch[-1]
        return batch

    def close(self) -> bool:
        """Stop all actors. Return whether one hangs in its environment, which must not be closed then."""
        self.stop.set()
        deadline = time.monotonic() + 3
        hanging = self.threads
        while hanging and time.monotonic() < deadline:
            with suppress(Empty):
                self.queue.get(timeout=0.01)  # an actor may wait for room
            hanging = [thread for thread in hanging if thread.is_alive()]
        if hanging:
            print("note: an actor cannot be stopped and is left behind", file=sys.stderr)
        return bool(hanging)


# ----------------------------------------------------------------------------------------------------------- learning


def stack_unrolls(unrolls: list[Unroll]) -> Unroll:
    """A batch of unrolls: B of them side by side, in dimension 1."""
    return Unroll(*[torch.stack(field, dim=1) for field in zip(*unrolls, strict=True)])


def treat_rewards(batch: Unroll, envs: list[int], normalizer: RewardNormalizer) -> Tensor:
    """Rewards [T, B] as `--norm-reward` says. Statistics take in the returns of the whole batch before they scale it.

    Unroll b is of environment `envs[b]`; unrolls of one environment follow each other in time. The learner does this,
    so that the statistics of a checkpoint are those of the batches that it has learnt from."""
    if normalizer.norm_reward == "clip":
        return batch.rewards.clamp(-1, 1)
    if normalizer.norm_reward == "soft-asymmetric":  # scalable_agent's
        return 5 * torch.tanh(batch.rewards / 5) * torch.where(batch.rewards < 0, 0.3, 1.0)
    if normalizer.norm_reward == "none":
        return batch.rewards
    rewards, dones = batch.rewards.cpu().numpy(), batch.dones.cpu().numpy()
    returns, envs = np.empty(rewards.shape), np.array(envs)
    earlier = np.array([np.sum(envs[:column] == env) for column, env in enumerate(envs)])  # unrolls of the same one
    for number in range(earlier.max() + 1):  # the first unroll of each environment, then the second of each, ...
        columns = np.flatnonzero(earlier == number)
        returns[:, columns] = normalizer.discounted_returns(rewards[:, columns], dones[:, columns], envs[columns])
    normalizer.update(returns)
    return torch.as_tensor(normalizer.scale(rewards)).to(batch.rewards)


@torch.no_grad()
def vtrace(logratio: Tensor, rewards: Tensor, discounts: Tensor, values: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """V-trace targets and policy-gradient advantages, both [T, B] (IMPALA, section 4.1 and equation 4; remark 2).

    delta_t = rho_t (r_t + gamma_t V_(t+1) - V_t);  v_t = V_t + delta_t + gamma_t c_t (v_(t+1) - V_(t+1)),  v_T = V_T
    A_t = min(pg_rho_bar, ratio_t) (r_t + gamma_t v_(t+1) - V_t)

    with rho_t = min(rho_bar, ratio_t) and c_t = lambda min(c_bar, ratio_t).

    Args:
        logratio: [T, B], log of pi(a|x) / mu(a|x), with the learner's policy pi and the acting policy mu.
        rewards, discounts: [T, B]; the discount is gamma, or 0 where the action ended its episode.
        values: [T + 1, B], the learner's; the last bootstraps."""
    ratio = logratio.exp()
    rho = ratio.clamp(max=args.rho_bar)
    c = args.vtrace_lambda * ratio.clamp(max=args.c_bar)
    deltas = rho * (rewards + discounts * values[1:] - values[:-1])
    corrections = torch.zeros_like(values)  # v_t - V_t
    for t in reversed(range(len(rewards))):
        corrections[t] = deltas[t] + discounts[t] * c[t] * corrections[t + 1]
    targets = values + corrections
    advantages = ratio.clamp(max=args.pg_rho_bar) * (rewards + discounts * targets[1:] - values[:-1])
    return targets[:-1], advantages


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate objective (PPO, equation 7), negated. Arguments [...]; returns the loss and its metrics.

    The approximate KL divergences are k1 and k3 of http://joschu.net/blog/kl-approx.html."""
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()
    with torch.no_grad():
        metrics = {
            "losses/policy_loss": loss,
            "losses/old_approx_kl": -logratio.mean(),
            "losses/approx_kl": (ratio - 1 - logratio).mean(),
            "losses/clipfrac": ((ratio - 1).abs() > clip_coef).float().mean(),
            "losses/ratio_deviation": (ratio - 1).abs().mean(),
        }
    return loss, metrics


def value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Half the mean squared error of values [...] against V-trace targets [...]."""
    return 0.5 * ((values - targets) ** 2).mean()


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """1 - Var[returns - values] / Var[returns]: 1 is a perfect fit, 0 no better than a constant."""
    return 1 - (returns - values).var(correction=0) / returns.var(correction=0).clamp(min=1e-8)


def learner_outputs(agent: Agent, unrolls: Unroll, args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the learner makes of unrolls: log-probabilities, entropies, values, V-trace targets, advantages; [T, B]."""
    params, values = agent.unroll(unrolls.obs, unrolls.state, unrolls.dones)
    dist = action_dist(agent.action_space, params[:-1])
    logprobs = dist.log_prob(unrolls.actions)
    rewards = unrolls.rewards + args.gamma * unrolls.truncation_values
    targets, advantages = vtrace(logprobs - unrolls.logprobs, rewards, args.gamma * (1 - unrolls.dones), values, args)
    return logprobs, dist.entropy(), values[:-1], targets, advantages


def vtrace_metrics(logratio: Tensor, values: Tensor, targets: Tensor, args: Args) -> dict[str, Tensor]:
    """How far the learner's policy is from the acting one, and its values from V-trace's targets; arguments [T, B]."""
    ratio = logratio.exp()
    return {
        "losses/behaviour_kl": (ratio - 1 - logratio).mean(),
        "losses/rho": ratio.mean(),
        "losses/rho_clipfrac": (ratio > args.rho_bar).float().mean(),
        "losses/c_clipfrac": (ratio > args.c_bar).float().mean(),
        "losses/pg_rho_clipfrac": (ratio > args.pg_rho_bar).float().mean(),
        "losses/explained_variance": explained_variance(values, targets),
    }


def vtrace_loss(agent: Agent, unrolls: Unroll, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """The paper's losses of unrolls (IMPALA, section 4.2), with V-trace from the same pass, and metrics."""
    logprobs, entropies, values, targets, advantages = learner_outputs(agent, unrolls, args)
    pg_loss = -(logprobs * advantages).mean()
    v_loss = value_loss(values, targets)
    entropy = entropies.mean()
    metrics = {"losses/policy_loss": pg_loss, "losses/value_loss": v_loss, "losses/entropy": entropy}
    metrics |= vtrace_metrics((logprobs - unrolls.logprobs).detach(), values.detach(), targets, args)
    return pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss, metrics


class Minibatch(NamedTuple):
    """S steps of B unrolls: whole unrolls with an LSTM, else single steps, S = 1."""

    obs: Tensor  # [S, B, *observation_shape]
    dones: Tensor  # [S, B]
    actions: Tensor  # [S, B] or [S, B, size]
    logprobs: Tensor  # [S, B], under the policy that V-trace used
    targets: Tensor  # [S, B], of the values
    advantages: Tensor  # [S, B]
    state: Tensor  # [2, B, H], the recurrent state before obs[0]


def appo_loss(agent: Agent, minibatch: Minibatch, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's loss of a minibatch with V-trace's targets and advantages, and metrics."""
    params, values = agent.unroll(minibatch.obs, minibatch.state, minibatch.dones)
    dist = action_dist(agent.action_space, params)
    logprobs = dist.log_prob(minibatch.actions)
    pg_loss, metrics = policy_loss(logprobs, minibatch.logprobs, minibatch.advantages, args.clip_coef or math.inf)
    v_loss = value_loss(values, minibatch.targets)
    entropy = dist.entropy().mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    return loss, metrics | {"losses/value_loss": v_loss, "losses/entropy": entropy}


def update(agent: Agent, optimizer: Optimizer, batch: Unroll, args: Args, run: Run) -> dict[str, Tensor]:
    """Learn from a batch of unrolls. Returns mean metrics."""

    def step(loss_of, minibatch):
        optimizer.zero_grad()
        metrics = backward(loss_of, agent, minibatch, args, run.world, dim=1)  # the ranks' mean gradient
        metrics["losses/grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm or math.inf)
        optimizer.step()
        return metrics

    if args.num_minibatches == 1 and args.sample_fraction == 1:  # as in the paper
        return step(vtrace_loss, batch)
    outputs = []
    with torch.no_grad():
        for piece in micro_batches(batch, args.micro_batch_size, dim=1):
            run.show(f"learning: V-trace, piece {len(outputs) + 1}")
            outputs.append(learner_outputs(agent, Unroll(*piece), args))
    logprobs, _, values, targets, advantages = [torch.cat(pieces, dim=1) for pieces in zip(*outputs, strict=True)]
    samples = Minibatch(batch.obs[:-1], batch.dones, batch.actions, logprobs, targets, advantages, batch.state)
    if not args.use_lstm:  # whose state has size 0
        samples = Minibatch(*[x.flatten(0, 1).unsqueeze(0) for x in samples])
        samples = samples._replace(state=agent.initial_state(args.iteration_steps))
    drawn = torch.randperm(samples.dones.shape[1], device=logprobs.device)[: args.samples]
    history = []
    for indices in drawn.tensor_split(args.num_minibatches):
        run.show(f"learning {len(history)}/{args.num_minibatches}")
        minibatch = Minibatch(*[x.index_select(1, indices) for x in samples])  # eight times as fast as x[:, indices]
        history.append(step(appo_loss, minibatch))
    metrics = mean_metrics(history) | vtrace_metrics(logprobs - batch.logprobs, values, targets, args)
    return metrics | {"losses/initial_ratio_deviation": history[0]["losses/ratio_deviation"]}


# --------------------------------------------------------------------------------------------------------------- main


def episodes_of(step: int, batch: list[Experience], num_steps: int, world: World) -> list[tuple[int, Episode]]:
    """The episodes that ended in a batch which began after `step` steps, with their steps."""
    unrolls = Counter(each.env for each in batch)
    earlier = Counter()
    episodes = []
    for each in batch:  # several unrolls of an environment follow each other
        for t, episode in each.episodes:
            after = (earlier[each.env] * num_steps + t + 1) * len(batch) * world.world_size // unrolls[each.env]
            episodes.append((step + after, episode._replace(env=each.env)))
        earlier[each.env] += 1
    return sorted(episodes)


def main(args: Args) -> Path:
    """Train and return the run folder. Raises InputError before anything is started, TrainingError if it diverges."""
    with Session(args, __file__, make_envs) as session:
        # ---- set up
        args, world, device = session.args, session.world, session.device
        envs_per_actor = args.num_envs // max(1, args.num_actors)
        actor_envs = [session.make_envs(envs_per_actor, number) for number in range(max(1, args.num_actors))]
        agent = Agent(actor_envs[0].single_observation_space, actor_envs[0].single_action_space, args).to(device)
        accelerate(agent, args.accelerate)
        optimizer = Adam(agent.parameters(), args.learning_rate, eps=args.adam_eps, fused=device.type == "cuda")
        if args.optimizer == "rmsprop":
            optimizer = RMSprop(agent.parameters(), args.learning_rate, alpha=0.99, eps=args.rmsprop_eps)
        rates = [group["lr"] for group in optimizer.param_groups]  # a resume loads annealed ones
        norm_gamma = args.gamma if args.norm_reward_gamma is None else args.norm_reward_gamma
        reward_normalizer = RewardNormalizer(args.num_envs, norm_gamma, args.norm_reward, world.moments)
        progress = Kept(history=[], ends={})  # metrics since the last row; environments' states after their last unroll
        run = session.open_run(agent, optimizer=optimizer, reward_normalizer=reward_normalizer, progress=progress)
        step = run.step
        version = first_version = step // session.iteration_steps
        published = [(copy.deepcopy(agent), version)]
        stop = Event()
        actors = []
        for number, envs in enumerate(actor_envs):
            actors.append(act(envs, number * envs_per_actor, published, progress.ends, args, stop, run))
            next(actors[-1])  # sets it up
        if args.num_actors:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the actors' first policy is there
            threads = ActorThreads(actors, args.queue_size, device, stop)
            session.stop_actors = threads.close

        while step < run.total_steps:
            share = 1 - step / run.total_steps if args.anneal_lr else 1.0
            if step >= (args.halve_lr_at or math.inf):
                share /= 2
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share

            # ---- collect
            if args.num_actors:
                experiences = threads.take(args.batch_size, run)
            else:
                experiences = [next(actors[0]) for _ in range(args.batch_size)]

            # ---- learn
            batch = stack_unrolls([experience.unroll for experience in experiences])
            batch = batch._replace(rewards=treat_rewards(batch, [each.env for each in experiences], reward_normalizer))
            metrics = update(agent, optimizer, batch, args, run)
            newest = copy.deepcopy(agent)
            version += 1
            metrics = require_finite(step, metrics)  # waits for the GPU: `newest` is whole, the batch's memory may go
            published[0] = newest, version

            # ---- log
            for episode in episodes_of(step, experiences, args.num_steps, world):
                run.record_episode(*episode)
            step += session.iteration_steps
            lags = [version - 1 - experience.version for experience in experiences]
            metrics |= {"charts/policy_lag": sum(lags) / len(lags), "charts/policy_lag_max": float(max(lags))}
            if args.num_actors:
                metrics["charts/queue_occupancy"] = threads.occupancy
            progress.history.append(metrics)
            progress.ends = progress.ends | {experience.env: experience.end for experience in experiences}
            if step % args.log_interval < session.iteration_steps or step >= run.total_steps:
                run.log(step, mean_metrics(progress.history) | {"charts/learning_rate": rates[0] * share})
                progress.history = []
            session.evaluate(step)
            # With --num-actors 0, unrolls of this round may still wait for a batch. Checkpoints lack them: save later.
            in_hand = (version - first_version) * args.batch_size % args.num_envs
            if args.num_actors or not in_hand or step >= run.total_steps:
                session.save(step)
    return run.path


if __name__ == "__main__":
    run_script(main, Args)
