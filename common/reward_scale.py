"""The scale of rewards, from the running variance of their discounted sum."""

from typing import Any

import numpy as np


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
