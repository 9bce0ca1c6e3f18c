"""Initial weights, and the policy's head and distribution for each kind of action space."""

import gymnasium as gym
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal, kl_divergence

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
