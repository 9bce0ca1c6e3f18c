"""How large an agent's features are: `python feature_norms.py CHECKPOINT_OR_MODEL...`, agents of one game.

Prints CSV: the mean L2 norm of the features, the standard deviation of the logits around the mean of their frame, and
the mean value, over 256 frames that the first agent meets in 160 steps of 64 environments (easy or hard mode).
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[4]))
from common.checkpoint import load_agent


@torch.no_grad()
def frames(path: str) -> torch.Tensor:
    """Frames uint8 [256, 64, 64, 3]: those of every 40th step."""
    torch.manual_seed(1)
    agent, args, make_envs = load_agent(path)
    envs = make_envs(args, num_envs=64, seed=2)
    obs, _ = envs.reset()
    kept = []
    for step in range(1, 161):
        dist, _ = agent.get_action_dist(torch.as_tensor(obs))
        obs = envs.step(dist.sample().numpy())[0]
        if step % 40 == 0:
            kept.append(torch.tensor(obs))
    envs.close()
    return torch.cat(kept)


if __name__ == "__main__":
    obs = frames(sys.argv[1])
    print("agent,feature_norm,logit_std,value")
    for path in sys.argv[1:]:
        agent, *_ = load_agent(path)
        with torch.no_grad():
            features = agent.encode(agent.encoder, obs)
            logits = agent.policy_head(features)
            spread = (logits - logits.mean(dim=1, keepdim=True)).std()
            norm, value = features.norm(dim=1).mean(), agent.value_head(features).mean()
        print(f"{path},{norm:.2f},{spread:.2f},{value:.2f}")
