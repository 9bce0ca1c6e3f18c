"""Proximal Policy Optimization (Schulman et al. 2017, https://arxiv.org/abs/1707.06347) for Procgen and Gymnasium.

    python ppo.py --env-id starpilot
    python ppo.py --env-id coinrun --distribution-mode hard --num-levels 500 --total-timesteps 200000000
    python ppo.py --env-id CartPole-v1 --num-envs 8 --num-steps 128 --total-timesteps 200000 --gamma 0.99
    torchrun --nproc-per-node 4 ppo.py --env-id starpilot    # 4 ranks with 64 environments each

    until total_timesteps:
        play T steps in each of N environments                         collect
        scale rewards; estimate advantages and returns                 RewardNormalizer, compute_gae
        K times, for each random minibatch:                            update
            minimise policy loss - c2 entropy + c1 value loss          ppo_loss

The defaults are the Procgen paper's (Cobbe et al. 2020, https://arxiv.org/abs/1912.01588) for the easy mode, as run
with OpenAI's baselines. README.md lists the choices that all three scripts share.

Differs from the paper and from baselines:
1. Max-pooling pads both sides; TensorFlow pads one side.
2. Weights start Xavier-uniform, the policy head's with gain 0.01. The heads of baselines are orthogonal.
3. The scale of rewards takes in a whole rollout before it scales it. VecNormalize of baselines goes step by step.
4. Advantages are divided by the sample standard deviation (Bessel's correction). Baselines uses the population's.

Differs from CleanRL's ppo_procgen.py:
1. The scale of rewards discounts returns by 0.99, as in baselines. CleanRL discounts by gamma.
2. CleanRL has orthogonal heads, and PyTorch's default initialisation elsewhere.
3. Losses are logged as means over all minibatches. CleanRL logs the last minibatch's.
"""

from common import InputError  # isort: skip (first: a Ctrl-C in other imports is one line)
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution
from torch.optim import Adam, Optimizer

from common.device import World, to_device
from common.envs import Envs, make_vec
from common.fast import accelerate
from common.learning import PolicyHead, RewardNormalizer, action_dist, backward, init_layer, mean_metrics
from common.run import Run
from common.session import Session, run_script
from common.settings import EnvArgs, Fraction, IntrinsicArgs, NetworkArgs, NotNegative, Positive, RunArgs


@dataclass
class Args(EnvArgs, NetworkArgs, IntrinsicArgs, RunArgs):
    exp_name: str = Path(__file__).stem
    """name of the experiment, a part of the run folder's name"""
    learning_rate: NotNegative[float] = 5e-4
    """step size of the optimizer (alpha)"""
    anneal_lr: bool = False
    """lower the learning rate linearly to 0 over the run"""
    adam_eps: NotNegative[float] = 1e-5
    """Adam's epsilon (eps)"""
    num_steps: Positive[int] = 256
    """steps of each environment in a rollout (T)"""
    gamma: Fraction = 0.999
    """discount factor (gamma)"""
    gae_lambda: Fraction = 0.95
    """decay of generalised advantage estimation (lambda)"""
    num_minibatches: Positive[int] = 8
    """minibatches that a rollout is split into"""
    update_epochs: Positive[int] = 3
    """passes over each rollout (K)"""
    norm_adv: Literal["minibatch", "batch", "none"] = "minibatch"
    """normalise advantages over each minibatch, over the whole batch, or not at all"""
    clip_coef: Positive[float] = 0.2
    """clipping range of the policy ratio (epsilon)"""
    clip_coef_vf: Positive[float] | None = 0.2
    """clipping range of the change of the value; None for a plain squared error"""
    ent_coef: NotNegative[float] = 0.01
    """weight of the entropy bonus (c2)"""
    vf_coef: NotNegative[float] = 0.5
    """weight of the value loss, which is half the mean squared error (c1)"""
    max_grad_norm: Positive[float] | None = 0.5
    """clip the gradient to this L2 norm; None for no clipping"""
    target_kl: Positive[float] | None = None
    """stop an iteration's epochs once a pass ends with an approximate KL (nats) above this; None for never"""
    norm_reward: Literal["return", "none"] = "return"
    """divide rewards by the running standard deviation of the discounted return and clip them to +-10, or do not"""
    norm_reward_gamma: Fraction | None = 0.99
    """discount factor of the return that --norm-reward return scales by; None for gamma"""

    @property
    def iteration_steps(self) -> int:
        """Environment steps of a rank in an iteration: the batch that an update learns from."""
        return self.num_envs * self.num_steps

    def validate(self) -> None:
        super().validate()
        if self.iteration_steps % self.num_minibatches or self.iteration_steps == self.num_minibatches:
            parts = f"the {self.iteration_steps} steps of a rollout into minibatches of two steps or more"
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
    """Policy and value function on one encoder."""

    policy_heads, value_heads = ["policy_head"], ["value_head"]  # for --init-heads

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.Space, args: Args):
        super().__init__()
        self.action_space = action_space
        self.bf16 = args.precision == "bf16" and len(observation_space.shape or ()) == 3
        self.encoder = make_encoder(observation_space, args.feature_dim, args.hidden_dim, args.init_fn)
        self.policy_head = PolicyHead(action_space, args.feature_dim, args.init_fn)
        self.value_head = init_layer(nn.Linear(args.feature_dim, 1), args.init_fn, "value")

    def encode(self, encoder: nn.Module, obs: Tensor) -> Tensor:
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
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action), dist.entropy(), self.value_head(features).squeeze(-1)


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
    pg_loss, metrics = policy_loss(logprobs, minibatch.logprobs, minibatch.advantages, args.clip_coef)
    v_loss = value_loss(values, minibatch.values, minibatch.returns, args.clip_coef_vf)
    entropy = entropies.mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    return loss, metrics | {"losses/value_loss": v_loss, "losses/entropy": entropy}


def update(agent: Agent, optimizer: Optimizer, rollout: Rollout, args: Args, run: Run) -> dict[str, Tensor]:
    """Train on a rollout with advantages and returns, in random minibatches. Returns mean metrics."""
    if args.norm_adv == "batch":
        rollout = rollout._replace(advantages=normalize_advantages(rollout.advantages, run.world))
    history = []
    for _ in range(args.update_epochs):
        for indices in torch.randperm(args.iteration_steps, device=rollout.obs.device).chunk(args.num_minibatches):
            run.show(f"learning {len(history)}/{args.update_epochs * args.num_minibatches}")
            minibatch = select_steps(rollout, indices)
            if args.norm_adv == "minibatch":
                minibatch = minibatch._replace(advantages=normalize_advantages(minibatch.advantages, run.world))
            optimizer.zero_grad()
            metrics = backward(ppo_loss, agent, minibatch, args, run.world)  # the ranks' mean gradient
            metrics["losses/grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm or math.inf)
            optimizer.step()
            history.append(metrics)
        if args.target_kl is not None and run.world.all_reduce_mean(metrics)["losses/approx_kl"] > args.target_kl:
            break
    return mean_metrics(history) | {
        "losses/initial_ratio_deviation": history[0]["losses/ratio_deviation"],
        "losses/explained_variance": explained_variance(rollout.values, rollout.returns),
    }


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
        rates = [group["lr"] for group in optimizer.param_groups]  # a resume loads annealed ones
        norm_gamma = args.gamma if args.norm_reward_gamma is None else args.norm_reward_gamma
        reward_normalizer = RewardNormalizer(args.num_envs, norm_gamma, args.norm_reward, world.moments)
        intrinsic = session.make_intrinsic(envs, compute_gae, epochs=args.update_epochs)
        rollout = new_rollout(args.num_steps, envs, device)
        parts = {"optimizer": optimizer, "reward_normalizer": reward_normalizer, "intrinsic": intrinsic, "envs": envs}
        run = session.open_run(agent, **parts)
        step = run.step
        obs = to_device(envs.obs, device).to(rollout.obs.dtype)

        while step < run.total_steps:
            if args.anneal_lr:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
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
            metrics |= update(agent, optimizer, batch, args, run)

            # ---- log
            run.log(step, metrics | {"charts/learning_rate": optimizer.param_groups[0]["lr"]})
            session.evaluate(step)
            session.save(step)
    return run.path


if __name__ == "__main__":
    run_script(main, Args)
