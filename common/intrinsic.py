"""Intrinsic rewards: random network distillation (RND) and the intrinsic curiosity module (ICM).

This is the one algorithm that lives in common/ and not in a script, because PPO and PPG share it. Intrinsic returns
continue across the ends of episodes (Burda et al. 2018, section 2.3). Deviations from the papers and their code:

1. The intrinsic value function has its own encoder, where RND adds a head to the agent's network. So the agent's model
   file fits any run, but the agent's encoder learns nothing from the intrinsic value.
2. A rollout updates the observation statistics before they normalise it, and all channels count. RND takes grey frames
   and initialises the statistics with a random agent. Here its predictor trains on all steps, not on a random part.
3. ICM differs from RND here in the model alone, and has 256 features. Pathak et al. add its reward to the task's.
4. The learning rate stays constant, gradients are not clipped, and no minibatch is split: `--micro-batch-size` and
   `--max-grad-norm` apply to the agent alone.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gymnasium.spaces import Box, Discrete, MultiBinary, Space
from torch import Tensor, nn

from common.errors import InputError
from common.reward_scale import RewardNormalizer, merge_moments
from common.settings import flag
from common.world import World

CLIP_OBS = 5.0  # standard deviations
CHUNK = 1024  # observations per forward pass without gradients; bounds its memory


class RunningMoments(nn.Module):
    """Running mean and variance of each pixel or number of an observation."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Add observations [B, *shape] of any dtype to the statistics."""
        x = x.double()
        batch = len(x), x.mean(0), x.var(0, correction=0)
        self.count, self.mean, self.var = merge_moments((self.count, self.mean, self.var), batch)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise observations [B, *shape] to float32 and clip them at `CLIP_OBS` standard deviations."""
        return ((x - self.mean.float()) / (self.var + 1e-8).sqrt().float()).clamp(-CLIP_OBS, CLIP_OBS)


class Permute(nn.Module):
    def forward(self, frames: Tensor) -> Tensor:
        return frames.permute(0, 3, 1, 2)


def embedding(shape: tuple[int, ...], layers: list[nn.Module]) -> nn.Sequential:
    """Build a network for normalised observations [B, *shape]: convolutions for frames or one layer for vectors, then
    `layers`, which start with a lazy one. Weights are orthogonal with gain sqrt(2), biases 0."""
    if len(shape) == 3:
        a, b, c = ((8, 4, 0), (4, 2, 0), (3, 1, 0)) if min(shape[:2]) >= 36 else ((3, 2, 1),) * 3
        first = [Permute(), nn.Conv2d(shape[2], 32, *a), nn.LeakyReLU(), nn.Conv2d(32, 64, *b), nn.LeakyReLU()]
        first += [nn.Conv2d(64, 64, *c), nn.LeakyReLU(), nn.Flatten()]
    else:
        first = [nn.Linear(shape[0], 128), nn.LeakyReLU()]
    network = nn.Sequential(*first, *layers)
    network(torch.zeros(1, *shape))  # gives the lazy layer its size
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.orthogonal_(layer.weight, 2**0.5)
            nn.init.zeros_(layer.bias)
    return network


class RND(nn.Module):
    """Random network distillation (Burda et al. 2018, https://arxiv.org/abs/1810.12894): a predictor learns the output
    of a fixed random network. Half its squared error at `next_obs` is the reward."""

    def __init__(self, observation_space: Box, action_space: Space):
        super().__init__()
        shape, size = observation_space.shape, 512
        self.moments = RunningMoments(shape)
        self.target = embedding(shape, [nn.LazyLinear(size)]).requires_grad_(False)
        head = [nn.LazyLinear(size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size)]
        self.predictor = embedding(shape, head)

    def rewards(self, obs: Tensor, actions: Tensor, next_obs: Tensor, within: Tensor) -> Tensor:
        """Return float32 [B]. The arguments are those that `Intrinsic.transitions` returns."""
        x = self.moments(next_obs)
        return 0.5 * (self.predictor(x) - self.target(x)).square().sum(-1)

    def loss(self, obs: Tensor, actions: Tensor, next_obs: Tensor, within: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.moments(next_obs)
        loss = F.mse_loss(self.predictor(x), self.target(x))
        return loss, {"losses/rnd_loss": loss}


class ICM(nn.Module):
    """The intrinsic curiosity module (Pathak et al. 2017, https://arxiv.org/abs/1705.05363): a forward model predicts
    the features of `next_obs` from the features of `obs` and the action. Half its squared error is the reward (equation
    6 with eta = 1). An inverse model trains the features: it predicts the action from both (equations 2 and 3)."""

    def __init__(self, observation_space: Box, action_space: Space):
        super().__init__()
        size, self.action_space = 256, action_space
        if isinstance(action_space, Box):
            self.register_buffer("low", torch.as_tensor(action_space.low))
            self.register_buffer("high", torch.as_tensor(action_space.high))
        num_actions = int(action_space.n) if isinstance(action_space, Discrete) else math.prod(action_space.shape)
        self.moments = RunningMoments(observation_space.shape)
        self.encoder = embedding(observation_space.shape, [nn.LazyLinear(size)])
        self.forward_model = nn.Sequential(nn.Linear(size + num_actions, size), nn.ReLU(), nn.Linear(size, size))
        self.inverse_model = nn.Sequential(nn.Linear(2 * size, size), nn.ReLU(), nn.Linear(size, num_actions))

    def errors(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the errors of the forward model and of the inverse model, [B] each."""
        now, then = self.encoder(self.moments(obs)), self.encoder(self.moments(next_obs))
        output = self.inverse_model(torch.cat([now, then], dim=-1))
        if isinstance(self.action_space, Discrete):
            inputs, inverse = F.one_hot(actions, output.shape[-1]), F.cross_entropy(output, actions, reduction="none")
        elif isinstance(self.action_space, MultiBinary):
            inputs, inverse = actions, F.binary_cross_entropy_with_logits(output, actions, reduction="none").sum(-1)
        else:
            inputs = actions.clamp(self.low, self.high)  # as environments do
            inverse = (output - inputs).square().sum(-1)
        predicted = self.forward_model(torch.cat([now, inputs.float()], dim=-1))
        return 0.5 * (predicted - then).square().sum(-1), inverse

    def rewards(self, obs: Tensor, actions: Tensor, next_obs: Tensor, within: Tensor) -> Tensor:
        """Return float32 [B], 0 where an episode ends: no action leads to that `next_obs`, so it always surprises."""
        return self.errors(obs, actions, next_obs)[0] * within

    def loss(self, obs: Tensor, actions: Tensor, next_obs: Tensor, within: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return equation 7 without the policy's part, with beta = 0.2, as a mean over the steps with `within` = 1."""
        weights = within / within.sum().clamp(min=1)
        forward_loss, inverse_loss = ((error * weights).sum() for error in self.errors(obs, actions, next_obs))
        metrics = {"losses/icm_forward_loss": forward_loss, "losses/icm_inverse_loss": inverse_loss}
        return 0.2 * forward_loss + 0.8 * inverse_loss, metrics


class Intrinsic:
    """An RND or ICM model, the value function of its rewards, and the optimizer of both."""

    def __init__(self, model: RND | ICM, observation_space: Box, args: Any, epochs: int, device: torch.device):
        self.args, self.epochs = args, epochs
        self.generator = torch.Generator().manual_seed(args.seed)  # separate: leaves the agent's draws as they are
        value = embedding(observation_space.shape, [nn.LazyLinear(256), nn.ReLU(), nn.Linear(256, 1)])
        value[-1].weight.data *= 0.01
        self.networks = nn.ModuleDict({"model": model, "value": value}).to(device)
        trained = [parameter for parameter in self.networks.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(trained, args.learning_rate, eps=args.adam_eps)
        self.normalizer = RewardNormalizer(args.num_envs, args.intrinsic_gamma, clip=math.inf)

    def __call__(
        self, rollout: Any, last_obs: Tensor, advantages: Tensor, compute_gae: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Reward a script's rollout [T, N] and train on it. `last_obs` [N, ...] are the observations after it.

        Returns what the agent learns from: advantages A_E + intrinsic_coef A_I and value targets, [T, N] each; and
        metrics. A_E is `advantages`. In pretraining A_E is left out, and the targets are the intrinsic returns.
        """
        novelty, last_value = self.explore(rollout, last_obs)
        intrinsic_advantages = compute_gae(novelty, last_value, self.args.intrinsic_gamma, self.args.gae_lambda)
        intrinsic_returns = intrinsic_advantages + novelty.values
        metrics = self.learn(rollout, last_obs, intrinsic_returns)
        metrics |= {"charts/intrinsic_reward": novelty.rewards.mean(), "charts/intrinsic_value": novelty.values.mean()}
        weighted = self.args.intrinsic_coef * intrinsic_advantages
        if self.args.pretraining:
            return weighted, intrinsic_returns, metrics
        return advantages + weighted, advantages + rollout.values, metrics

    @torch.no_grad()
    def explore(self, rollout: Any, last_obs: Tensor) -> tuple[Any, Tensor]:
        """Return the rollout with intrinsic rewards and values and no ends of episodes, and the values after it [N]."""
        obs, _, next_obs, _ = data = self.transitions(rollout, last_obs)
        for chunk in next_obs.split(CHUNK):
            self.networks["model"].moments.update(chunk)
        chunks = zip(*(x.split(CHUNK) for x in data), strict=True)
        rewards = torch.cat([self.networks["model"].rewards(*chunk) for chunk in chunks]).view_as(rollout.rewards)
        values = torch.cat([self.value(chunk) for chunk in obs.split(CHUNK)]).view_as(rollout.values)
        zeros = torch.zeros_like(rewards)
        scaled = torch.as_tensor(self.normalizer(rewards.cpu().numpy(), zeros.cpu().numpy())).to(rewards)
        novelty = rollout._replace(rewards=scaled, values=values, dones=zeros, truncation_values=zeros)
        return novelty, self.value(last_obs)

    def learn(self, rollout: Any, last_obs: Tensor, returns: Tensor) -> dict[str, Tensor]:
        """Train on a rollout and its intrinsic returns [T, N]; return metrics, each the mean over all minibatches."""
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
        """Return the intrinsic values [B] of observations [B, ...]."""
        return self.networks["value"](self.networks["model"].moments(obs)).squeeze(-1)

    def transitions(self, rollout: Any, last_obs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return obs, actions, next_obs and `within`, [T x N, ...] each. Where an episode ends, next_obs is the first
        observation of the next episode and `within` is 0; elsewhere `within` is 1."""
        next_obs = torch.cat([rollout.obs[1:], last_obs.unsqueeze(0)])
        return tuple(x.flatten(0, 1) for x in (rollout.obs, rollout.actions, next_obs, 1 - rollout.dones))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.networks.named_parameters("intrinsic")

    def state_dict(self) -> dict[str, Any]:
        parts = {"networks": self.networks, "optimizer": self.optimizer, "normalizer": self.normalizer}
        return {name: part.state_dict() for name, part in parts.items()} | {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("networks", "optimizer", "normalizer"):
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"])


def make_intrinsic(
    args: Any, observation_space: Box, action_space: Space, epochs: int, world: World, device: torch.device
) -> Intrinsic | None:
    """Build what `--intrinsic-reward` names, to train for `epochs` passes over each rollout; None for `none`. Raises
    InputError if a setting does nothing or cannot work, or if several ranks train: their statistics would differ."""
    check(args)
    if args.intrinsic_reward == "none":
        return None
    if world.world_size > 1:
        raise InputError("--intrinsic-reward is for a single process: start it without torchrun, or leave it out.")
    with torch.random.fork_rng(devices=[]):  # leaves the agent's draws as they are
        model = {"rnd": RND, "icm": ICM}[args.intrinsic_reward](observation_space, action_space)
        return Intrinsic(model, observation_space, args, epochs, device)


def check(args: Any) -> None:
    """Raise InputError for settings of intrinsic rewards that would do nothing or cannot work."""
    for name in ("intrinsic_coef", "intrinsic_gamma", "pretraining"):
        if args.intrinsic_reward == "none" and getattr(args, name) != getattr(type(args), name):
            raise InputError(f"{flag(name)} is for intrinsic rewards: add --intrinsic-reward rnd or icm, or omit it.")
    if args.intrinsic_gamma >= 1:
        raise InputError("--intrinsic-gamma 1 cannot work, as intrinsic returns never end: use less.")
    if args.pretraining and args.intrinsic_coef <= 0:
        raise InputError("--pretraining with --intrinsic-coef 0 has nothing to learn from: use a number above 0.")
