"""What the algorithms share: initial weights, the policy's head, the backward pass in pieces, the scale of rewards."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal, kl_divergence

CPU_MICRO_BATCH = 512  # steps; fewer make more of PyTorch's overhead, more take more memory and are not faster
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


class PolicyHead(nn.Module):
    """Features [B, feature_dim] -> parameters of the action distribution, float32 [B, P], which `action_dist` reads: of
    each action or bit, or the means for a `Box` and logarithms of standard deviations that no observation changes."""

    def __init__(self, space: gym.Space, feature_dim: int, init_fn: str):
        super().__init__()
        box = isinstance(space, gym.spaces.Box) and space.dtype.kind == "f"
        if isinstance(space, gym.spaces.Discrete) and space.start == 0:
            size = int(space.n)
        elif (box or isinstance(space, gym.spaces.MultiBinary)) and len(space.shape) == 1:
            size = space.shape[0]
        else:
            raise NotImplementedError(f"no distribution for {space}: use Discrete from 0, flat MultiBinary or real Box")
        self.linear = init_layer(nn.Linear(feature_dim, size), init_fn, "policy")
        self.log_std = nn.Parameter(torch.zeros(size)) if box else None

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


def policy_kl(old: Distribution, new: Distribution) -> Tensor:
    """KL(old || new) [B], computed from log-probabilities: finite where a new probability rounds to 0."""
    if isinstance(new, Categorical):
        return (old.probs * (old.logits - new.logits)).sum(-1)
    if isinstance(new.base_dist, Bernoulli):
        old, new = old.base_dist.logits, new.base_dist.logits
        on, off = F.logsigmoid(old) - F.logsigmoid(new), F.logsigmoid(-old) - F.logsigmoid(-new)
        return (old.sigmoid() * on + (-old).sigmoid() * off).sum(-1)
    return kl_divergence(old, new)


def micro_batches(minibatch: Sequence[Tensor], size: int | None, dim: int = 0, at_most: int | None = None) -> Iterator:
    """Split the tensors of a minibatch along `dim` into pieces of `size` steps, and `at_most` so many. With `dim` = 1,
    dimension 0 of the first is time, and a piece holds whole sequences. `size` None: 512 on a CPU, all on a GPU."""
    first = minibatch[0]
    if size is None:
        size = CPU_MICRO_BATCH if first.device.type == "cpu" else first.shape[: dim + 1].numel()
    items = max(1, min(size, at_most or size) // first.shape[:dim].numel())
    return zip(*(x.split(items, dim) for x in minibatch), strict=True)


def backward(
    loss_of: Callable, agent: nn.Module, minibatch: Any, args: Any, world: Any, dim: int = 0, at_most: int | None = None
) -> dict[str, Tensor]:
    """Compute the gradient of a minibatch's mean loss in `micro_batches`, averaged over the ranks. Returns this rank's
    metrics. `loss_of(agent, piece, args)` gives loss and metrics, means over a piece; draw no random numbers in it."""
    totals, shares = {}, {}
    for tensors in micro_batches(minibatch, args.micro_batch_size, dim, at_most):
        piece = type(minibatch)(*tensors)
        share = piece[0].shape[dim] / minibatch[0].shape[dim]
        loss, metrics = loss_of(agent, piece, args)
        (loss * share).backward()
        for tag, value in metrics.items():
            number = value.item() if value.is_cpu else value.detach()  # small tensors would fragment a CPU's heap
            totals[tag] = totals.get(tag, 0) + number * share
            shares[tag] = shares.get(tag, 0) + share
    world.all_reduce_gradients()
    return {tag: total / shares[tag] for tag, total in totals.items()}


def mean_metrics(history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each metric over the gradient steps that have it, float64, still on the device."""
    means = {}
    for tag in dict.fromkeys(tag for metrics in history for tag in metrics):
        values = [torch.as_tensor(metrics[tag], dtype=torch.float64) for metrics in history if tag in metrics]
        means[tag] = torch.stack(values).mean()
    return means


def merge_moments(running: tuple[Any, Any, Any], batch: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Size, mean and variance of the union of two sets, from those of each (Chan et al. 1979): numbers or tensors."""
    (count, mean, var), (size, batch_mean, batch_var) = running, batch
    total, delta = count + size, batch_mean - mean
    squares = var * count + batch_var * size + delta**2 * count * size / total
    return total, mean + delta * size / total, squares / total


class RewardNormalizer:
    """Divide rewards by the running standard deviation of the discounted return and clip them (`--norm-reward return`).
    The return R_t = r_t + gamma R_(t-1) restarts with each episode. A rollout enters the statistics before it is scaled
    (as in OpenAI's code of PPG). Centring could change which policy is best. `World.moments` joins the ranks."""

    def __init__(self, num_envs: int, gamma: float, norm_reward: str = "return", moments: Any = None, clip: float = 10):
        self.gamma, self.norm_reward, self.clip = gamma, norm_reward, clip
        self.moments = moments or (lambda x: (x.size, x.mean(), x.var()))
        self.returns = np.zeros(num_envs)  # R_(t-1); 0 where an episode has just ended
        self.count, self.mean, self.var = 1e-4, 0.0, 1.0  # of all returns so far; starts as in baselines

    def __call__(self, rewards: np.ndarray, dones: np.ndarray) -> np.ndarray:
        """Scale rewards [T, N]; `dones[t]` is true where the action of step t ended its episode."""
        if self.norm_reward != "return":
            return rewards
        self.update(self.discounted_returns(rewards, dones))
        return self.scale(rewards)

    def discounted_returns(self, rewards: np.ndarray, dones: np.ndarray, envs: Any = slice(None)) -> np.ndarray:
        """R_t [T, n] of the next T steps of the n environments `envs`, a slice or a list (default: all)."""
        returns = np.empty(rewards.shape)
        for t in range(len(rewards)):
            returns[t] = rewards[t] + self.gamma * self.returns[envs]
            self.returns[envs] = returns[t] * (1 - dones[t])
        return returns

    def scale(self, rewards: np.ndarray) -> np.ndarray:
        """Divide rewards [...] by the present scale, and clip them; float32."""
        return np.clip(rewards / np.sqrt(self.var + 1e-8), -self.clip, self.clip).astype(np.float32)

    def update(self, returns: np.ndarray) -> None:
        """Merge the moments of a batch of returns [...] into the running ones."""
        self.count, self.mean, self.var = merge_moments((self.count, self.mean, self.var), self.moments(returns))

    def state_dict(self) -> dict[str, Any]:
        return {"returns": self.returns.tolist(), "count": self.count, "mean": float(self.mean), "var": float(self.var)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.returns = np.array(state["returns"])
        self.count, self.mean, self.var = state["count"], state["mean"], state["var"]
