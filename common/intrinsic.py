"""Rewards for what is new: random network distillation and the intrinsic curiosity module.

Both are networks beside the agent, with an optimizer and a value function of their own, which a script calls once a
rollout (`make_intrinsic`, `Intrinsic`). Intrinsic returns go on across the ends of episodes (Burda et al. 2018, section
2.3), and have a discount of their own.

What differs from the papers (and their code):

- The value function has an encoder of its own, where RND has a second head on the agent's: so the agent is the same one
  with and without, and its model file fits any run; but its encoder learns nothing from the intrinsic value.
- A rollout's observations, with all channels, enter the statistics that they are normalised by before they are, where
  RND has grey frames and steps of a random agent before the first rollout. The predictor learns from all steps.
- ICM has the same form as RND: returns, a value and a discount of their own, where Pathak et al. add the reward to the
  task's; the same normalised observations and scaled rewards; RND's convolutions and 256 features.
- Step sizes stay as at the start, gradients are not clipped, and minibatches are worked through whole
  (`--micro-batch-size` and `--max-grad-norm` are for the agent).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.envs import RewardNormalizer, merge_moments
from common.errors import flag, require
from common.world import World

CLIP_OBS = 5.0  # standard deviations
OUTPUT = 512  # size of RND's embedding
CHUNK = 1024  # observations that go through a network at a time where no gradient is needed


class RunningMoments(nn.Module):
    """Mean and variance of all observations so far, of each pixel or number."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Let observations [B, *shape] of any type enter."""
        x = x.double()
        running = self.count, self.mean, self.var
        merged = merge_moments(running, (len(x), x.mean(0), x.var(0, correction=0)))
        for buffer, value in zip(running, merged, strict=True):
            buffer.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        """Observations [B, *shape] less their mean, over their standard deviation, clipped; float32."""
        mean, std = self.mean.float(), (self.var + 1e-8).sqrt().float()
        return ((x - mean) / std).clamp(-CLIP_OBS, CLIP_OBS)


def embedding(shape: tuple[int, ...], layers: list[nn.Module]) -> nn.Sequential:
    """Observations [B, *shape], normalised, through convolutions (of frames) or a layer (of vectors), then `layers`,
    the first of which finds out its input's size by itself; weights are orthogonal with a gain of sqrt 2."""
    if len(shape) == 3:
        kernels = ((8, 4, 0), (4, 2, 0), (3, 1, 0)) if min(shape[:2]) >= 36 else ((3, 2, 1),) * 3
        first, channels = [Permute()], shape[2]
        for out_channels, (size, stride, padding) in zip((32, 64, 64), kernels, strict=True):
            first += [nn.Conv2d(channels, out_channels, size, stride, padding), nn.LeakyReLU()]
            channels = out_channels
        first += [nn.Flatten()]
    else:
        first = [nn.Linear(shape[0], 128), nn.LeakyReLU()]
    network = nn.Sequential(*first, *layers)
    network(torch.zeros(1, *shape))  # sizes of lazy layers
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.orthogonal_(layer.weight, 2**0.5)
            nn.init.zeros_(layer.bias)
    return network


class Permute(nn.Module):
    def forward(self, frames: Tensor) -> Tensor:
        return frames.permute(0, 3, 1, 2)


class RND(nn.Module):
    """Random network distillation (Burda et al. 2018, https://arxiv.org/abs/1810.12894).

    The reward for reaching an observation is the squared error of a network that is trained to predict what a fixed
    random one makes of it.
    """

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.Space):
        super().__init__()
        shape = observation_space.shape
        self.moments = RunningMoments(shape)
        self.target = embedding(shape, [nn.LazyLinear(OUTPUT)]).requires_grad_(False)
        self.predictor = embedding(
            shape,
            [nn.LazyLinear(OUTPUT), nn.ReLU(), nn.Linear(OUTPUT, OUTPUT), nn.ReLU(), nn.Linear(OUTPUT, OUTPUT)],
        )

    def rewards(self, obs: Tensor, actions: Tensor, next_obs: Tensor, within: Tensor) -> Tensor:
        """Half the squared error at `next_obs` [B, *observation_shape]: float32 [B]. (The rest is for ICM.)"""
        x = self.moments(next_obs)
        return 0.5 * (self.predictor(x) - self.target(x)).square().sum(-1)

    def loss(self, obs: Tensor, actions: Tensor, next_obs: Tensor, within: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean squared error, and metrics."""
        x = self.moments(next_obs)
        loss = F.mse_loss(self.predictor(x), self.target(x))
        return loss, {"losses/rnd_loss": loss}


class ICM(nn.Module):
    """The intrinsic curiosity module (Pathak et al. 2017, https://arxiv.org/abs/1705.05363).

    The reward for a step is the squared error of a network that predicts the features of the next observation from
    those of this one and the action. The features are learnt to tell which action was taken between two observations
    (equations 2 to 7, with beta = .2).
    """

    BETA = 0.2  # weight of the forward model's loss; that of the inverse model's is 1 - BETA
    FEATURES = 256

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.Space):
        super().__init__()
        shape = observation_space.shape
        self.action_space = action_space
        discrete = isinstance(action_space, gym.spaces.Discrete)
        if isinstance(action_space, gym.spaces.Box):  # within which environments clip actions
            self.register_buffer("low", torch.as_tensor(action_space.low))
            self.register_buffer("high", torch.as_tensor(action_space.high))
        num_actions = int(action_space.n) if discrete else math.prod(action_space.shape)
        self.moments = RunningMoments(shape)
        self.encoder = embedding(shape, [nn.LazyLinear(self.FEATURES)])
        size = self.FEATURES
        self.forward_model = nn.Sequential(nn.Linear(size + num_actions, size), nn.ReLU(), nn.Linear(size, size))
        self.inverse_model = nn.Sequential(nn.Linear(2 * size, size), nn.ReLU(), nn.Linear(size, num_actions))

    def taken(self, actions: Tensor) -> Tensor:
        """What environments get of actions [B, ...]: those of a `Box` within its bounds."""
        return actions.clamp(self.low, self.high) if isinstance(self.action_space, gym.spaces.Box) else actions

    def features(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features of the next observations, those predicted, and the inverse model's output: [B, ...] each."""
        now, then = self.encoder(self.moments(obs)), self.encoder(self.moments(next_obs))
        inputs = self.taken(actions)
        if isinstance(self.action_space, gym.spaces.Discrete):
            inputs = F.one_hot(actions, int(self.action_space.n))
        predicted = self.forward_model(torch.cat([now, inputs.float()], dim=-1))
        return then, predicted, self.inverse_model(torch.cat([now, then], dim=-1))

    def rewards(self, obs: Tensor, actions: Tensor, next_obs: Tensor, within: Tensor) -> Tensor:
        """Half the squared error of the forward model (equation 6, without its scale eta): float32 [B].

        Of steps from `obs` to `next_obs` [B, *observation_shape] by `actions` [B, ...]. 0 where `within` [B] is 0 and
        not 1, as at an episode's end: no action leads into the next one, which would always surprise.
        """
        then, predicted, _ = self.features(obs, actions, next_obs)
        return 0.5 * (predicted - then).square().sum(-1) * within

    def loss(self, obs: Tensor, actions: Tensor, next_obs: Tensor, within: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The losses of both models, means over the steps that are `within` [B] an episode, and metrics."""
        then, predicted, told = self.features(obs, actions, next_obs)
        forward_loss = 0.5 * (predicted - then).square().sum(-1)
        if isinstance(self.action_space, gym.spaces.Discrete):
            inverse_loss = F.cross_entropy(told, actions, reduction="none")
        elif isinstance(self.action_space, gym.spaces.MultiBinary):
            inverse_loss = F.binary_cross_entropy_with_logits(told, actions, reduction="none").sum(-1)
        else:
            inverse_loss = (told - self.taken(actions)).square().sum(-1)
        weights = within / within.sum().clamp(min=1)
        forward_loss, inverse_loss = (forward_loss * weights).sum(), (inverse_loss * weights).sum()
        metrics = {"losses/icm_forward_loss": forward_loss, "losses/icm_inverse_loss": inverse_loss}
        return self.BETA * forward_loss + (1 - self.BETA) * inverse_loss, metrics


class Intrinsic:
    """A model that rewards what is new, the value of its rewards, and their optimizer.

    Args:
        model: an `RND` or an `ICM`.
        observation_space: of one environment.
        args: settings of a script: `seed`, `num_envs` (N), `intrinsic_gamma`, `intrinsic_coef`, `pretraining`,
            `gae_lambda`, `learning_rate`, `adam_eps`, `num_minibatches`.
        epochs: passes over each rollout.
        device: where all of it lies.
    """

    def __init__(
        self, model: RND | ICM, observation_space: gym.spaces.Box, args: Any, epochs: int, device: torch.device
    ):
        self.args, self.epochs = args, epochs
        self.generator = torch.Generator().manual_seed(args.seed)  # of its own: the agent's draws are as without it
        value = embedding(observation_space.shape, [nn.LazyLinear(256), nn.ReLU(), nn.Linear(256, 1)])
        value[-1].weight.data *= 0.01
        self.networks = nn.ModuleDict({"model": model, "value": value}).to(device)
        trained = [parameter for parameter in self.networks.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(trained, args.learning_rate, eps=args.adam_eps)
        self.normalizer = RewardNormalizer(args.num_envs, args.intrinsic_gamma, clip=math.inf)

    def __call__(
        self, rollout: Any, last_obs: Tensor, advantages: Tensor, compute_gae: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Reward a script's rollout [T, N] and learn from it.

        Args:
            last_obs: [N, ...], what the environments gave after the rollout.
            advantages: [T, N], of the task's rewards.
            compute_gae: the script's, of a rollout, the values after it, discount and lambda.

        Returns:
            The advantages A_E + intrinsic_coef A_I and value targets [T, N] that the agent is to learn from, and
            metrics. In pretraining A_E is left out, and the targets are the intrinsic returns: nothing that the agent
            learns from depends on the task's rewards.
        """
        novelty, last_value = self.explore(rollout, last_obs)
        intrinsic_advantages = compute_gae(novelty, last_value, self.args.intrinsic_gamma, self.args.gae_lambda)
        intrinsic_returns = intrinsic_advantages + novelty.values
        metrics = self.learn(rollout, last_obs, intrinsic_returns)
        metrics |= {"charts/intrinsic_reward": novelty.rewards.mean(), "charts/intrinsic_value": novelty.values.mean()}
        joined, returns = self.args.intrinsic_coef * intrinsic_advantages, intrinsic_returns
        if not self.args.pretraining:
            joined, returns = advantages + joined, advantages + rollout.values
        return joined, returns, metrics

    @torch.no_grad()
    def explore(self, rollout: Any, last_obs: Tensor) -> tuple[Any, Tensor]:
        """A script's rollout [T, N] and the observations [N, ...] after it -> the same rollout with intrinsic rewards,
        their values, and no ends of episodes; and the values [N] after it.

        Rewards are divided by the running standard deviation of their discounted returns.
        """
        obs, actions, next_obs, within = self.transitions(rollout, last_obs)
        for chunk in next_obs.split(CHUNK):
            self.networks["model"].moments.update(chunk)
        chunks = zip(*(x.split(CHUNK) for x in (obs, actions, next_obs, within)), strict=True)
        rewards = torch.cat([self.networks["model"].rewards(*chunk) for chunk in chunks]).view_as(rollout.rewards)
        scaled = self.normalizer(rewards.cpu().numpy(), np.zeros(rewards.shape))
        values = torch.cat([self.value(chunk) for chunk in obs.split(CHUNK)]).view_as(rollout.values)
        zeros = torch.zeros_like(rewards)
        rollout = rollout._replace(
            rewards=torch.as_tensor(scaled).to(rewards), values=values, dones=zeros, truncation_values=zeros
        )
        return rollout, self.value(last_obs)

    def learn(self, rollout: Any, last_obs: Tensor, returns: Tensor) -> dict[str, Tensor]:
        """Train on a script's rollout [T, N] and the intrinsic returns [T, N]; metrics are means over minibatches."""
        data = *self.transitions(rollout, last_obs), returns.flatten()
        history = []
        for _ in range(self.epochs):
            order = torch.randperm(len(data[0]), generator=self.generator).to(returns.device)
            for batch in order.chunk(self.args.num_minibatches):
                *transitions, targets = (x.index_select(0, batch) for x in data)
                loss, metrics = self.networks["model"].loss(*transitions)
                value_loss = 0.5 * (self.value(transitions[0]) - targets).square().mean()
                self.optimizer.zero_grad()
                (loss + value_loss).backward()
                self.optimizer.step()
                history.append(metrics | {"losses/intrinsic_value_loss": value_loss})
        return {tag: torch.stack([metrics[tag].detach() for metrics in history]).mean() for tag in history[0]}

    def value(self, obs: Tensor) -> Tensor:
        """Discounted sums of intrinsic rewards [B] that are expected after observations [B, ...]."""
        return self.networks["value"](self.networks["model"].moments(obs)).squeeze(-1)

    def transitions(self, rollout: Any, last_obs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Observations, actions, the observations after them, and 1 where those are of the same episode, [T x N, ...]
        each. (After an episode's last observation there is the first of the next.)"""
        next_obs = torch.cat([rollout.obs[1:], last_obs.unsqueeze(0)])
        return tuple(x.flatten(0, 1) for x in (rollout.obs, rollout.actions, next_obs, 1 - rollout.dones))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.networks.named_parameters("intrinsic")

    def state_dict(self) -> dict[str, Any]:
        parts = {"networks": self.networks, "optimizer": self.optimizer, "normalizer": self.normalizer}
        return {name: part.state_dict() for name, part in parts.items()} | {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.networks.load_state_dict(state["networks"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.normalizer.load_state_dict(state["normalizer"])
        self.generator.set_state(state["generator"])


MODELS = {"rnd": RND, "icm": ICM}


def make_intrinsic(
    args: Any,
    observation_space: gym.spaces.Box,
    action_space: gym.Space,
    epochs: int,
    world: World,
    device: torch.device,
) -> Intrinsic | None:
    """What `--intrinsic-reward` names, None for none; `epochs` are passes over each rollout.

    The agent's random draws are the same with and without it.

    Raises:
        InputError: several ranks train (their statistics would differ).
    """
    if args.intrinsic_reward == "none":
        return None
    require(world.size == 1, "--intrinsic-reward is for a single process: start it without torchrun, or leave it out.")
    with torch.random.fork_rng(devices=[]):
        model = MODELS[args.intrinsic_reward](observation_space, action_space)
        return Intrinsic(model, observation_space, args, epochs, device)


def check_intrinsic(args: Any) -> None:
    """Raise InputError for settings of intrinsic rewards that would do nothing, or cannot work."""
    if args.intrinsic_reward == "none":
        defaults = type(args)()
        for name in ("intrinsic_coef", "intrinsic_gamma", "pretraining"):
            message = f"{flag(name)} is for intrinsic rewards: add --intrinsic-reward rnd or icm, or leave it out."
            require(getattr(args, name) == getattr(defaults, name), message)
    require(args.intrinsic_gamma < 1, "--intrinsic-gamma 1 cannot work, as intrinsic returns never end: use less.")
    require(
        args.intrinsic_coef > 0 or not args.pretraining,
        "--pretraining with --intrinsic-coef 0 has nothing to learn from: use a number above 0.",
    )
