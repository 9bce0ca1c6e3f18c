"""Intrinsic rewards for PPO and PPG: random network distillation (RND) and the intrinsic curiosity module (ICM).
Intrinsic returns continue across the ends of episodes (Burda et al. 2018, section 2.3). Deviations from the papers:
1. The value function has a network of its own, so that the agent is the same in any run. RND adds a head to the agent.
2. A rollout updates the observation statistics before they normalise it, and all channels count. RND takes grey frames
   and initialises the statistics with a random agent. Here its predictor trains on all steps, not on a random part.
3. ICM differs from RND here in the model alone, and has 256 features. Pathak et al. add its reward to the task's.
4. The learning rate stays constant, gradients are not clipped, and no minibatch is split into micro-batches."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box, Discrete, MultiBinary
from torch import Tensor, nn

from common.learning import RewardNormalizer, mean_metrics, merge_moments, micro_batches

CLIP_OBS = 5.0  # standard deviations
CHUNK = 1024  # observations per forward pass without gradients; bounds its memory
WithMetrics = tuple[Tensor, Tensor, dict[str, Tensor]]  # two results, and metrics by tag


class RunningMoments(nn.Module):
    """Running mean and variance of each pixel or number of an observation."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.channels_last = len(shape) == 3 and shape[0] >= min(shape[1:])  # as in the scripts' ImpalaCNN
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
        """Normalise observations [B, *shape] to float32 and clip them; frames become [B, C, H, W]."""
        x = ((x - self.mean.float()) / (self.var + 1e-8).sqrt().float()).clamp(-CLIP_OBS, CLIP_OBS)
        return x.permute(0, 3, 1, 2) if self.channels_last else x


def embedding(moments: RunningMoments, *sizes: int) -> nn.Sequential:
    """Convolutions or, for vectors, a layer, then layers of `sizes`: orthogonal with gain sqrt(2), biases 0."""
    x = moments(torch.zeros(1, *moments.mean.shape))
    layers = [nn.LazyLinear(128), nn.LeakyReLU()]
    if x.dim() == 4:
        kernels = [(8, 4, 0), (4, 2, 0), (3, 1, 0)] if min(x.shape[2:]) >= 36 else [(3, 2, 1)] * 3
        layers = []
        for channels, kernel in zip((32, 64, 64), kernels, strict=True):  # size, stride, padding
            layers += [nn.LazyConv2d(channels, *kernel), nn.LeakyReLU()]
        layers.append(nn.Flatten())
    for size in sizes:
        layers += [nn.LazyLinear(size), nn.ReLU()]
    network = nn.Sequential(*layers[:-1])
    network(x)  # gives the layers their sizes
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.orthogonal_(layer.weight, 2**0.5)
            nn.init.zeros_(layer.bias)
    return network


class RND(nn.Module):
    """Random network distillation (Burda et al. 2018, https://arxiv.org/abs/1810.12894): a predictor learns the output
    of a fixed random network. Half its squared error at `next_obs` is the reward."""

    def __init__(self, envs: Any):
        super().__init__()
        self.moments = RunningMoments(envs.single_observation_space.shape)
        self.target = embedding(self.moments, 512).requires_grad_(False)
        self.predictor = embedding(self.moments, 512, 512, 512)

    def forward(self, obs: Tensor, actions: Tensor, next_obs: Tensor, within: Tensor) -> WithMetrics:
        x = self.moments(next_obs)
        squares = (self.predictor(x) - self.target(x)).square()
        loss = squares.mean()
        return 0.5 * squares.sum(-1), loss, {"losses/rnd_loss": loss}


class ICM(nn.Module):
    """The intrinsic curiosity module (Pathak et al. 2017, https://arxiv.org/abs/1705.05363): a forward model predicts
    the features of `next_obs` from the features of `obs` and the action. Half its squared error is the reward (equation
    6 with eta = 1). An inverse model trains the features: it predicts the action from both (equations 2 and 3)."""

    def __init__(self, envs: Any):
        super().__init__()
        space = self.action_space = envs.single_action_space
        num_actions = int(space.n) if isinstance(space, Discrete) else math.prod(space.shape)
        size = 256  # of the features
        if isinstance(space, Box):
            self.register_buffer("low", torch.tensor(space.low, dtype=torch.float32))  # a resume loads into it
            self.register_buffer("high", torch.tensor(space.high, dtype=torch.float32))
        self.moments = RunningMoments(envs.single_observation_space.shape)
        self.encoder = embedding(self.moments, size)
        self.forward_model = nn.Sequential(nn.Linear(size + num_actions, size), nn.ReLU(), nn.Linear(size, size))
        self.inverse_model = nn.Sequential(nn.Linear(2 * size, size), nn.ReLU(), nn.Linear(size, num_actions))

    def forward(self, obs: Tensor, actions: Tensor, next_obs: Tensor, within: Tensor) -> WithMetrics:
        """The loss is equation 7 with beta = 0.2, without the policy's part. Only transitions within episodes count."""
        now, then = self.encoder(self.moments(obs)), self.encoder(self.moments(next_obs))
        output = self.inverse_model(torch.cat([now, then], dim=-1))
        if isinstance(self.action_space, Discrete):
            inputs, inverse = F.one_hot(actions, output.shape[-1]), F.cross_entropy(output, actions, reduction="none")
        elif isinstance(self.action_space, MultiBinary):
            inputs, inverse = actions, F.binary_cross_entropy_with_logits(output, actions, reduction="none").sum(-1)
        else:
            inputs = actions.clamp(self.low, self.high)  # as environments do
            inverse = (output - inputs).square().sum(-1)
        errors = 0.5 * (self.forward_model(torch.cat([now, inputs.float()], dim=-1)) - then).square().sum(-1)
        weights = within / within.sum().clamp(min=1)
        forward_loss, inverse_loss = (errors * weights).sum(), (inverse * weights).sum()
        metrics = {"losses/icm_forward_loss": forward_loss, "losses/icm_inverse_loss": inverse_loss}
        return errors * within, 0.2 * forward_loss + 0.8 * inverse_loss, metrics


class Intrinsic(nn.Module):
    """An RND or ICM model, the value function of its rewards, and the optimizer of both. The model takes transitions
    obs, actions, next_obs and `within`, [B, ...] each, and returns their rewards [B], its loss and metrics. Where an
    episode ends, `next_obs` begins the next one and `within` is 0; elsewhere `within` is 1."""

    def __init__(self, args: Any, envs: Any, compute_gae: Callable, epochs: int, device: torch.device):
        super().__init__()
        self.args, self.compute_gae, self.epochs = args, compute_gae, epochs
        self.generator = torch.Generator().manual_seed(args.seed)  # separate: leaves the agent's draws as they are
        with torch.random.fork_rng(devices=[]):  # for the same reason
            self.model = {"rnd": RND, "icm": ICM}[args.intrinsic_reward](envs)
            self.value = nn.Sequential(self.model.moments, embedding(self.model.moments, 256, 1), nn.Flatten(0))
        self.value[1][-1].weight.data *= 0.01
        self.to(device)
        self.optimizer = torch.optim.Adam(self.parameters(), args.learning_rate, eps=args.adam_eps)
        self.normalizer = RewardNormalizer(args.num_envs, args.intrinsic_gamma, clip=math.inf)

    def forward(self, rollout: Any, last_obs: Tensor, advantages: Tensor) -> WithMetrics:
        """Reward a script's rollout [T, N] and train on it; `last_obs` [N, ...] are the observations after it. Return
        `advantages` A_E + intrinsic_coef A_I and value targets for the agent, [T, N] each, and metrics. With
        `--pretraining`, A_E is left out, and the targets are the intrinsic returns."""
        args, shape = self.args, rollout.rewards.shape
        next_obs = torch.cat([rollout.obs[1:], last_obs.unsqueeze(0)])
        transitions = [x.flatten(0, 1) for x in (rollout.obs, rollout.actions, next_obs, 1 - rollout.dones)]
        with torch.no_grad():
            for chunk in transitions[2].split(CHUNK):
                self.model.moments.update(chunk)
            rewards = torch.cat([self.model(*chunk)[0] for chunk in micro_batches(transitions, CHUNK)]).view(shape)
            values = torch.cat([self.value(chunk) for chunk in transitions[0].split(CHUNK)]).view(shape)
            last_value = self.value(last_obs)
        scaled = self.normalizer(rewards.cpu().numpy(), np.zeros(shape, np.float32))
        rewards = torch.as_tensor(scaled).to(rewards)
        zeros = torch.zeros_like(values)
        endless = rollout._replace(rewards=rewards, values=values, dones=zeros, truncation_values=zeros)
        intrinsic_advantages = self.compute_gae(endless, last_value, args.intrinsic_gamma, args.gae_lambda)
        returns = intrinsic_advantages + values
        metrics = self.learn(transitions, returns)
        metrics |= {"charts/intrinsic_reward": rewards.mean(), "charts/intrinsic_value": values.mean()}
        weighted = args.intrinsic_coef * intrinsic_advantages
        if args.pretraining:
            return weighted, returns, metrics
        return advantages + weighted, advantages + rollout.values, metrics

    def learn(self, transitions: list[Tensor], returns: Tensor) -> dict[str, Tensor]:
        """Train on transitions and their intrinsic returns [T, N]; return metrics, means over all minibatches."""
        history = []
        for _ in range(self.epochs):
            order = torch.randperm(returns.numel(), generator=self.generator).to(returns.device)
            for batch in order.chunk(self.args.num_minibatches):
                minibatch = [x.index_select(0, batch) for x in transitions]
                _, loss, metrics = self.model(*minibatch)
                value_loss = 0.5 * (self.value(minibatch[0]) - returns.flatten()[batch]).square().mean()
                self.optimizer.zero_grad()
                (loss + value_loss).backward()
                self.optimizer.step()
                metrics["losses/intrinsic_value_loss"] = value_loss
                history.append({tag: value.detach() for tag, value in metrics.items()})
        return mean_metrics(history)

    def get_extra_state(self) -> dict[str, Any]:
        """What `state_dict` holds beside parameters and buffers."""
        states = {name: getattr(self, name).state_dict() for name in ("optimizer", "normalizer")}
        return states | {"generator": self.generator.get_state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.normalizer.load_state_dict(state["normalizer"])
        self.generator.set_state(state["generator"])
