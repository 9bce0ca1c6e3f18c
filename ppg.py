"""Phasic Policy Gradient (Cobbe et al. 2020, https://arxiv.org/abs/2009.04416) for Procgen and Gymnasium.

    python ppg.py --env-id starpilot
    torchrun --nproc-per-node 4 ppg.py --env-id starpilot --preset paper    # as in the paper: 4 x 64 environments

    until total_timesteps:
        N_pi times (policy phase):
            play T steps in each of N environments                     collect
            scale rewards; estimate advantages and returns             RewardNormalizer, compute_gae
            E_pi and E_V times, for each minibatch: train as PPO       update, ppo_loss
            store observations and value targets                       Phase.add
        remember the policy at all observations                        auxiliary_phase
        E_aux times, for each minibatch of all N_pi rollouts:
            minimise L^aux + beta_clone KL + L^value                   aux_loss

README.md lists the choices that all three scripts share.

Differs from the paper and from OpenAI's phasic-policy-gradient (`--preset long` undoes 1 to 3, `paper` also 4):
1. Phases have 8 iterations and 3 auxiliary passes, not 32 and 6. This learns faster at first (benchmarks/NOTES.md).
2. Minibatches have random steps of all environments, not whole rollouts of a few. This learns faster at first, too.
3. The policy phase halves the paper's learning rate, for minibatches a quarter as large. With four ranks use 5e-4.
4. One encoder costs half of two. Of the value heads only the auxiliary one trains it, as in OpenAI's `detach`.
5. If E_pi and E_V differ, the value's passes come first, as in OpenAI's code.
6. A run that ends in mid-phase closes with an auxiliary phase.
7. Advantages are divided by the sample standard deviation (Bessel's correction). OpenAI uses the population's.

Differs from CleanRL's ppg_procgen.py:
1. Gradients and values are not clipped, and the value loss has weight 1, as in OpenAI's code.
2. The scale of rewards discounts returns by 0.99, as in OpenAI's code. CleanRL discounts by gamma.
3. The auxiliary phase has an Adam of its own, as in OpenAI's code.
4. CleanRL has the paper's phases and learning rate, and drops a last phase that is not complete.
"""

from common import InputError  # isort: skip (first: a Ctrl-C in other imports is one line)
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution
from torch.optim import Adam, Optimizer

from common.checkpoint import ReplayedPhase
from common.device import World, frame_store, to_device
from common.envs import Envs, make_vec
from common.fast import accelerate
from common.learning import PolicyHead, RewardNormalizer, action_dist, backward, init_layer, mean_metrics, policy_kl
from common.run import Run
from common.session import Session, run_script
from common.settings import EnvArgs, Fraction, InitFn, IntrinsicArgs, NetworkArgs, NotNegative, Positive, RunArgs


@dataclass
class Args(EnvArgs, NetworkArgs, IntrinsicArgs, RunArgs):
    long_phases: ClassVar[dict[str, Any]] = {"learning_rate": 5e-4, "whole_rollouts": True, "n_pi": 32, "e_aux": 6}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "long": long_phases | {"exp_name": f"{Path(__file__).stem}-long"},
        "paper": long_phases | {"exp_name": f"{Path(__file__).stem}-paper", "arch": "dual"},
    }

    exp_name: str = Path(__file__).stem
    """name of the experiment, a part of the run folder's name"""
    preset: Literal["short", "long", "paper"] = "short"
    """short: phases for runs of up to 5M steps. long: the paper's phases and learning rate, ahead from there on in one
    run on bigfish. paper: also two encoders, for 4 ranks"""
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
    """where a phase's frames are kept: memory (a GPU's if they fit, else the host's), or a file in --runs-dir"""
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
    arch: Literal["detach", "dual", "shared"] = "detach"
    """detach: one encoder, no gradient from the value head; dual: a second encoder for it; shared: one for both"""
    init_fn: InitFn = "normed"
    """initial weights: rows of fixed L2 norm (OpenAI's PPG code), orthogonal, Xavier, or identity for PyTorch's own"""

    @property
    def iteration_steps(self) -> int:
        """Environment steps of a rank in an iteration: the batch that an update learns from."""
        return self.num_envs * self.num_steps

    def validate(self) -> None:
        super().validate()
        count, units = (self.num_envs, "environments") if self.whole_rollouts else (self.iteration_steps, "steps")
        if count % self.num_minibatches or self.iteration_steps == self.num_minibatches:
            parts = f"the {count} {units} of a rollout into minibatches of two steps or more"
            raise InputError(f"--num-minibatches {self.num_minibatches} does not divide {parts}: change one.")


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
    """Policy and value function, with an auxiliary value head on the policy's encoder; `arch` as in `Args`."""

    policy_heads, value_heads = ["policy_head"], ["value_head", "aux_value_head"]  # for --init-heads

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.Space, args: Args):
        super().__init__()
        self.action_space = action_space
        self.arch = args.arch
        self.bf16 = args.precision == "bf16" and len(observation_space.shape or ()) == 3
        self.encoder = make_encoder(observation_space, args.feature_dim, args.hidden_dim, args.init_fn)
        if args.arch == "dual":
            self.value_encoder = make_encoder(observation_space, args.feature_dim, args.hidden_dim, args.init_fn)
        self.policy_head = PolicyHead(action_space, args.feature_dim, args.init_fn)
        self.value_head = init_layer(nn.Linear(args.feature_dim, 1), args.init_fn, "value")
        self.aux_value_head = init_layer(nn.Linear(args.feature_dim, 1), args.init_fn, "value")

    def encode(self, encoder: nn.Module, obs: Tensor) -> Tensor:
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


def make_envs(args: Args, num_envs: int, seed: int, render: bool = False) -> gym.vector.VectorEnv:
    """The environments of training and evaluation. A copy that needs others makes or wraps them here."""
    return make_vec(args, num_envs, seed, render)


class Rollout(NamedTuple):
    """T steps of N environments; a minibatch has B steps in place of [T, N]."""

    obs: Tensor  # [T, N, *observation_shape], uint8 frames or float32 vectors
    actions: Tensor  # [T, N] int64, or [T, N, size] float32
    logprobs: Tensor  # [T, N] float32, of the actions under the policy that took them
    values: Tensor  # [T, N] float32, V(obs[t]) of the agent that acted
    rewards: Tensor  # [T, N] float32, scaled with --norm-reward return
    dones: Tensor  # [T, N] float32, 1 where `actions[t]` ended its episode: same index as `rewards[t]`
    truncation_values: Tensor  # [T, N] float32, value of the final observation where a time limit cut an episode
    advantages: Tensor | None = None  # [T, N] float32, once they are estimated
    returns: Tensor | None = None  # [T, N] float32, the value targets


def new_rollout(num_steps: int, envs: Envs, device: torch.device) -> Rollout:
    """An empty rollout on `device`."""
    observation_space, action_space = envs.single_observation_space, envs.single_action_space
    frames = len(observation_space.shape) == 3 and observation_space.dtype == np.uint8
    obs_dtype = torch.uint8 if frames else torch.float32
    action_dtype = torch.int64 if isinstance(action_space, gym.spaces.Discrete) else torch.float32
    shape = (num_steps, envs.num_envs)
    return Rollout(
        obs=torch.empty(shape + observation_space.shape, dtype=obs_dtype, device=device),
        actions=torch.zeros(shape + action_space.shape, dtype=action_dtype, device=device),
        logprobs=torch.zeros(shape, device=device),
        values=torch.zeros(shape, device=device),
        rewards=torch.zeros(shape, device=device),
        dones=torch.zeros(shape, device=device),
        truncation_values=torch.zeros(shape, device=device),
    )


def select_steps(rollout: Rollout, indices: Tensor) -> Rollout:
    """The minibatch of steps `indices` [B] of the T x N steps of a rollout."""
    return Rollout(*[x.flatten(0, 1).index_select(0, indices) for x in rollout])  # six times as fast as x[indices]


@torch.no_grad()
def collect(
    agent: Agent, envs: Envs, rollout: Rollout, obs: Tensor, step: int, normalizer: RewardNormalizer, run: Run
) -> tuple[Tensor, int]:
    """Fill `rollout` from `obs` [N, ...] on, the observations that the environments returned after `step` steps.

    Returns the observations and the number of steps at its end; tells `run` of every finished episode."""
    num_steps, num_envs = rollout.rewards.shape
    rewards = np.zeros((num_steps, num_envs), np.float32)
    dones = np.zeros((num_steps, num_envs), np.float32)
    rollout.truncation_values.zero_()
    for t in range(num_steps):
        rollout.obs[t] = obs
        action, rollout.logprobs[t], _, rollout.values[t] = agent.get_action_and_value(obs)
        rollout.actions[t] = action
        next_obs, rewards[t], terminations, truncations, infos = envs.step(action.cpu().numpy())
        dones[t] = terminations | truncations
        cut = truncations & ~terminations  # by a time limit alone
        if cut.any():
            final_obs = to_device(np.stack(infos["final_obs"][cut]), obs.device).to(obs.dtype)
            rollout.truncation_values[t, cut] = agent.get_value(final_obs)
        obs = to_device(next_obs, obs.device).to(obs.dtype)
        step += num_envs * run.world.world_size
        run.record(step, infos)
    rollout.rewards.copy_(torch.as_tensor(normalizer(rewards, dones)))
    rollout.dones.copy_(torch.as_tensor(dones))
    return obs, step


# ----------------------------------------------------------------------------------------------------------- learning


def compute_gae(rollout: Rollout, last_value: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates [T, N] (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16).

    delta_t = r_t + gamma V(s_(t+1)) - V(s_t);  A_t = delta_t + gamma lambda (1 - done_t) A_(t+1)

    V(s_(t+1)) is `values[t + 1]` within an episode, `truncation_values[t]` where a time limit cut it, and 0 where it
    ended by itself. `last_value` [N] is the value of the observations after the rollout."""
    not_done = 1 - rollout.dones
    next_values = torch.cat([rollout.values[1:], last_value.unsqueeze(0)])
    targets = rollout.rewards + gamma * (not_done * next_values + rollout.truncation_values)
    deltas = targets - rollout.values
    decays = gamma * gae_lambda * not_done
    advantages = torch.zeros_like(deltas)
    advantage = torch.zeros_like(last_value)
    for t in reversed(range(len(advantages))):
        advantage = deltas[t] + decays[t] * advantage
        advantages[t] = advantage
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
    The approximate KL divergences are k1 and k3 of http://joschu.net/blog/kl-approx.html."""
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

    With `clip_coef_vf`, takes the larger of the plain squared error and of the clipped value's (baselines)."""
    errors = (values - returns) ** 2
    if clip_coef_vf is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef_vf, clip_coef_vf)
        errors = torch.max(errors, (clipped - returns) ** 2)
    return 0.5 * errors.mean()


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """1 - Var[returns - values] / Var[returns]: 1 is a perfect fit, 0 no better than a constant."""
    return 1 - (returns - values).var(correction=0) / returns.var(correction=0).clamp(min=1e-8)


def ppo_loss(agent: Agent, minibatch: Rollout, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss, entropy bonus and value loss of a minibatch (PPO, equation 9, negated), and metrics."""
    _, logprobs, entropies, values = agent.get_action_and_value(minibatch.obs, minibatch.actions)
    pg_loss, metrics = policy_loss(logprobs, minibatch.logprobs, minibatch.advantages, args.clip_coef, args.kl_penalty)
    v_loss = value_loss(values, minibatch.values, minibatch.returns, args.clip_coef_vf)
    entropy = entropies.mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    return loss, metrics | {"losses/value_loss": v_loss, "losses/entropy": entropy}


def policy_only_loss(agent: Agent, minibatch: Rollout, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """What the E_pi passes minimise if E_V differs: policy loss and entropy bonus (PPG, algorithm 1)."""
    dist, _ = agent.get_action_dist(minibatch.obs)
    logprobs = dist.log_prob(minibatch.actions)
    pg_loss, metrics = policy_loss(logprobs, minibatch.logprobs, minibatch.advantages, args.clip_coef, args.kl_penalty)
    entropy = dist.entropy().mean()
    return pg_loss - args.ent_coef * entropy, metrics | {"losses/entropy": entropy}


def value_only_loss(agent: Agent, minibatch: Rollout, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """What the E_V passes minimise if E_pi differs: the value loss (PPG, L^value)."""
    v_loss = value_loss(agent.get_value(minibatch.obs), minibatch.values, minibatch.returns, args.clip_coef_vf)
    return args.vf_coef * v_loss, {"losses/value_loss": v_loss}


def random_steps(shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """The steps 0 to N_pi x T x N - 1 of rollouts [N_pi, T, N], int64, in random order."""
    return torch.randperm(math.prod(shape), device=device)


def whole_rollouts(shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """The numbers of these steps, int64. Whole rollouts are in random order, each with its T steps in a row."""
    rollouts = torch.arange(math.prod(shape), device=device).view(shape).transpose(1, 2).flatten(0, 1)
    return rollouts[torch.randperm(len(rollouts), device=device)].flatten()


def update(
    agent: Agent, optimizer: Optimizer, value_optimizer: Optimizer, rollout: Rollout, args: Args, run: Run
) -> dict[str, Tensor]:
    """Train on a rollout with advantages and returns, in minibatches. Returns mean metrics."""
    if args.norm_adv == "batch":
        rollout = rollout._replace(advantages=normalize_advantages(rollout.advantages, run.world))
    shuffle = whole_rollouts if args.whole_rollouts else random_steps
    passes = [(ppo_loss, optimizer)] * args.e_policy
    if args.e_policy != args.e_value:
        passes = [(value_only_loss, value_optimizer)] * args.e_value + [(policy_only_loss, optimizer)] * args.e_policy
    history = []
    for loss_of, each_optimizer in passes:
        for indices in shuffle((1, *rollout.rewards.shape), rollout.obs.device).chunk(args.num_minibatches):
            run.show(f"learning {len(history)}/{len(passes) * args.num_minibatches}")
            minibatch = select_steps(rollout, indices)
            if args.norm_adv == "minibatch":
                minibatch = minibatch._replace(advantages=normalize_advantages(minibatch.advantages, run.world))
            each_optimizer.zero_grad()
            metrics = backward(loss_of, agent, minibatch, args, run.world)  # the ranks' mean gradient
            metrics["losses/grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm or math.inf)
            each_optimizer.step()
            history.append(metrics)
        if args.target_kl is not None:
            kl = run.world.all_reduce_mean(metrics).get("losses/approx_kl", 0)  # of a policy pass
            if kl > args.target_kl:
                break
    first = 0 if args.e_policy == args.e_value else args.e_value * args.num_minibatches  # step of a policy pass
    return mean_metrics(history) | {
        "losses/initial_ratio_deviation": history[first]["losses/ratio_deviation"],
        "losses/explained_variance": explained_variance(rollout.values, rollout.returns),
    }


# ---------------------------------------------------------------------------------------------------- auxiliary phase


class Phase:
    """The rollouts of a policy phase, of which the first `length` are there."""

    def __init__(self, size: int, rollout: Rollout, args: Args, device: torch.device):
        disk = args.runs_dir if args.aux_frames == "disk" else None
        self.obs = frame_store((size, *rollout.obs.shape), rollout.obs.dtype, device, disk)  # [N_pi, T, N, ...]
        self.returns = torch.empty((size, *rollout.rewards.shape), device=device)  # [N_pi, T, N] float32, value targets
        self.actions = torch.empty((size, *rollout.actions.shape), dtype=rollout.actions.dtype)  # for checkpoints

    def begin(self, envs: Envs) -> None:
        """Begin a phase where the environments are now."""
        self.start = envs.state_dict()  # for checkpoints
        self.length = 0

    def add(self, rollout: Rollout, returns: Tensor) -> None:
        self.obs[self.length] = rollout.obs
        self.returns[self.length] = returns
        self.actions[self.length] = rollout.actions
        self.length += 1


class AuxMinibatch(NamedTuple):
    """B steps of a phase."""

    obs: Tensor  # [B, *observation_shape]
    old_params: Tensor  # [B, P], of the action distributions before the auxiliary phase
    returns: Tensor  # [B], the value targets of the policy phase


def aux_loss(agent: Agent, minibatch: AuxMinibatch, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """L^joint, which is L^aux and the cloning term, plus L^value (PPG, section 2), and metrics."""
    params, values, aux_values = agent.get_policy_and_values(minibatch.obs)
    old_dist = action_dist(agent.action_space, minibatch.old_params)
    kl_loss = policy_kl(old_dist, action_dist(agent.action_space, params)).mean()
    aux_value_loss = 0.5 * ((aux_values - minibatch.returns) ** 2).mean()
    real_value_loss = 0.5 * ((values - minibatch.returns) ** 2).mean()
    metrics = {
        "losses/aux/aux_value_loss": aux_value_loss,
        "losses/aux/real_value_loss": real_value_loss,
        "losses/aux/kl_loss": kl_loss,
    }
    return aux_value_loss + real_value_loss + args.beta_clone * kl_loss, metrics


def auxiliary_phase(agent: Agent, optimizer: Optimizer, phase: Phase, args: Args, run: Run) -> dict[str, Tensor]:
    """Train encoder and value heads on the rollouts of a phase. Returns mean metrics."""
    shuffle = whole_rollouts if args.whole_rollouts else random_steps
    obs = phase.obs[: phase.length].flatten(0, 2)
    returns = phase.returns[: phase.length].flatten()
    device = returns.device
    at_a_time = args.num_aux_rollouts * args.num_steps
    with torch.no_grad():
        old_params = []
        for part in obs.split(at_a_time):
            run.show(f"auxiliary phase: old policy, piece {len(old_params) + 1}")
            old_params.append(agent.get_policy(to_device(part, device)))
        old_params = torch.cat(old_params)
    history = []
    for _ in range(args.e_aux):
        order = shuffle((phase.length, args.num_steps, args.num_envs), device)
        minibatches = order.split(at_a_time * args.num_aux_grad_accum)
        for indices in minibatches:
            run.show(f"auxiliary phase {len(history)}/{args.e_aux * len(minibatches)}")
            frames = to_device(obs.index_select(0, indices.to(obs.device)), device)
            minibatch = AuxMinibatch(frames, old_params[indices], returns[indices])
            optimizer.zero_grad()
            metrics = backward(aux_loss, agent, minibatch, args, run.world, at_most=at_a_time)
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm or math.inf)
            metrics["losses/aux/grad_norm"] = grad_norm
            optimizer.step()
            history.append(metrics)
    return mean_metrics(history)


# --------------------------------------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train and return the run folder. Raises InputError before anything is started, TrainingError if it diverges."""
    with Session(args, __file__, make_envs) as session:
        # ---- set up
        args, world, device = session.args, session.world, session.device
        envs = session.make_envs()
        agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
        accelerate(agent, args.accelerate)
        optimizer = Adam(agent.parameters(), args.learning_rate, eps=args.adam_eps, fused=device.type == "cuda")
        value_optimizer = Adam(agent.parameters(), args.learning_rate, eps=args.adam_eps, fused=device.type == "cuda")
        aux_optimizer = Adam(agent.parameters(), args.aux_learning_rate, eps=args.adam_eps, fused=device.type == "cuda")
        optimizers = optimizer, value_optimizer, aux_optimizer
        rates = [group["lr"] for each in optimizers for group in each.param_groups]  # a resume loads annealed ones
        norm_gamma = args.gamma if args.norm_reward_gamma is None else args.norm_reward_gamma
        reward_normalizer = RewardNormalizer(args.num_envs, norm_gamma, args.norm_reward, world.moments)
        intrinsic = session.make_intrinsic(envs, compute_gae, epochs=args.e_value)
        rollout = new_rollout(args.num_steps, envs, device)
        parts = {"optimizer": optimizer, "reward_normalizer": reward_normalizer, "intrinsic": intrinsic, "envs": envs}
        phase = Phase(min(args.n_pi, session.num_iterations), rollout, args, device)
        phase.begin(envs)
        parts |= {"value_optimizer": value_optimizer, "aux_optimizer": aux_optimizer}
        parts["phase"] = ReplayedPhase(phase, envs)  # after the environments, which are put back first
        run = session.open_run(agent, **parts)
        step = run.step
        obs = to_device(envs.obs, device).to(rollout.obs.dtype)

        while step < run.total_steps:
            if args.anneal_lr:
                groups = [group for each in optimizers for group in each.param_groups]
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate * (1 - step / run.total_steps)

            # ---- collect
            obs, step = collect(agent, envs, rollout, obs, step, reward_normalizer, run)

            # ---- learn
            with torch.no_grad():
                last_value = agent.get_value(obs)
            advantages = compute_gae(rollout, last_value, args.gamma, args.gae_lambda)
            returns = advantages + rollout.values
            metrics = {}
            if intrinsic is not None:
                advantages, returns, metrics = intrinsic(rollout, obs, advantages)
            batch = rollout._replace(advantages=advantages, returns=returns)
            metrics |= update(agent, optimizer, value_optimizer, batch, args, run)

            # ---- auxiliary phase
            phase.add(rollout, returns)
            if phase.length == len(phase.obs) or step >= run.total_steps:
                metrics |= auxiliary_phase(agent, aux_optimizer, phase, args, run)
                phase.begin(envs)

            # ---- log
            run.log(step, metrics | {"charts/learning_rate": optimizer.param_groups[0]["lr"]}, whole=phase.length == 0)
            session.evaluate(step)
            session.save(step)
    return run.path


if __name__ == "__main__":
    run_script(main, Args)
