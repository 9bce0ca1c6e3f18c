"""Copies of the scripts that try an idea, in few changed lines, keep every promise of a script."""

import contextlib
import difflib
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import tyro

import check_copy
import evaluate
import fast
import ideas
from common.checkpoint import load_script, newest_checkpoint
from common.procgen_env import ProcgenVectorEnv
from helpers import checkpoints, read_csv, small_args
from ranks import Ranks

IDEAS = {  # the script that each changes, and the most lines
    "averaged_policy": ("ppg", 30),
    "augmentation": ("ppo", 30),
    "gru": ("ppo", 80),
    "hl_gauss": ("ppo", 50),
    "reward_head": ("ppo", 30),
    "level_replay": ("ppo", 60),
    "normalized_network": ("impala", 30),
    "own_environment": ("impala", 30),
}
FLAGS = ["--env-id", "bossfight", "--feature-dim", "16", "--device", "cpu", "--precision", "fp32", "--seed", "4"]
OF_IDEA = {
    "own_environment": ["--env-id", "Catch-v0"],
    # rollouts in which episodes end, and levels that are soon replayed
    "level_replay": ["--num-steps", "32", "--total-timesteps", "640", "--num-levels", "5", "--start-level", "7"],
}


def copy_with(name: str, folder: Path) -> Path:
    """A copy with an idea, and with fewer pixels."""
    path = folder / f"{name}.py"
    path.write_text(ideas.changed(ideas.changed(read(IDEAS[name][0]), name), "fewer_pixels"))
    return path


def read(script: str) -> str:
    return (fast.ROOT / f"{script}.py").read_text()


@pytest.fixture(autouse=True)
def forks(tmp_path, monkeypatch):
    """check_copy forks what it runs, and evaluates in this process."""

    def do(command, seconds, log, kill_when=None, cwd=None):
        words = command[1:]
        if Path(words[0]) == Path(evaluate.__file__):
            with log.open("w") as file, contextlib.redirect_stdout(file):
                evaluate.main(tyro.cli(evaluate.Args, args=words[1:]))
            return 0
        if words[0] == "-m":  # torchrun, with four more words
            with Ranks(tmp_path, 2).started(ideas.run, words[5:]) as ranks:
                status = max([rank.wait(seconds) for rank in ranks])
                log.write_text("".join([rank.output + rank.errors for rank in ranks]))
            return status
        with fast.Fork(tmp_path, ideas.run, words, kill_when is not None) as fork:
            if kill_when is not None:
                fork.wait_for(kill_when)
                fork.process.kill()
            status = fork.wait(seconds)
            log.write_text(fork.output + fork.errors)
        return status

    monkeypatch.setattr(check_copy, "do", do)


@pytest.mark.parametrize("name", IDEAS)
def test_an_idea_changes_few_lines_and_keeps_the_promises_of_a_script(name, tmp_path, capsys):
    script, most = IDEAS[name]
    sources = read(script), ideas.changed(read(script), name)
    _, _, *marked = difflib.unified_diff(*(source.splitlines() for source in sources), n=0, lineterm="")
    assert sum(line[0] in "+-" for line in marked) <= most
    broken = check_copy.check(copy_with(name, tmp_path), FLAGS + OF_IDEA.get(name, []), tmp_path)
    output = capsys.readouterr().out
    assert broken == [], output
    assert ("not exact" in output) == (name == "own_environment")
    (whole,), (ranks,) = (list((tmp_path / each).glob(f"*__{name}*")) for each in ("whole", "ranks"))
    new, old = (torch.load(path)["parts"] for path in checkpoints(whole))
    assert all(not torch.equal(x, new["agent"][name]) for name, x in old["agent"].items() if "weight" in name)
    states = newest_checkpoint(ranks)["ranks"]
    if name == "level_replay":  # each rank has a sampler of its own
        assert states[0]["levels"]["seed"] != states[1]["levels"]["seed"]
        assert not torch.equal(states[0]["levels"]["scores"], states[1]["levels"]["scores"])


DEFECTS = {  # a part of ppg.py, what takes its place, and what is said of it
    "killed and resumed": ('"aux_optimizer": aux_optimizer', "", "undisturbed run .*agent"),
    "loaded": ("accelerate(agent, args.accelerate)", "agent.encode = lambda net, x: 9 * net(x)", "length.* in the run"),
    "two ranks": ("aux_learning_rate, eps", "aux_learning_rate * (1 + world.rank), eps", "differs between the ranks"),
    "trained": ("gamma: Fraction = 0.999", "gamma: Fraction = 2", "error: --gamma 2 cannot work"),
}


@pytest.mark.parametrize("promise", DEFECTS)
def test_a_broken_promise_is_found(promise, tmp_path, capsys):
    old, new, reason = DEFECTS[promise]
    source = ideas.changed(read("ppg"), "fewer_pixels")
    assert source.count(old) == 1
    (tmp_path / "defect.py").write_text(source.replace(old, new))
    assert len(check_copy.check(tmp_path / "defect.py", FLAGS, tmp_path)) == 1
    assert re.search(f"FAILED  {promise}.*{reason}", capsys.readouterr().out)


def test_the_exit_code_tells_of_a_broken_promise(tmp_path):
    with fast.Fork(tmp_path, ideas.run, [check_copy.__file__, str(tmp_path / "nothing.py")]) as fork:
        assert fork.wait() == 1
        assert "\nFAILED  trained: [Errno 2] No such file" in fork.output


def test_a_gru_learns_from_the_policy_that_has_acted(tmp_path):
    """Across ends of episodes, and with the state that the rollout before has left. Evaluations act alike."""
    module = load_script(copy_with("gru", tmp_path))
    update, rollouts = module.update, []

    def spied_update(agent, optimizer, rollout, args, run):
        state = rollout.state
        with torch.no_grad():
            for obs, actions, logprobs, dones in zip(*rollout[:3], rollout.dones, strict=True):
                dist, state = agent.get_action_dist(obs, state)
                torch.testing.assert_close(dist.log_prob(actions), logprobs, rtol=0, atol=1e-5)
                state[:, dones > 0] = 0
            _, metrics = module.ppo_loss(agent, rollout, args)
            _, values = agent.unroll(rollout.obs, rollout.state, rollout.dones)
        assert metrics["losses/ratio_deviation"] < 1e-5
        torch.testing.assert_close(values, rollout.values, rtol=0, atol=1e-5)
        rollouts.append(rollout)
        return update(agent, optimizer, rollout, args, run)

    with mock.patch.object(module, "update", spied_update):
        module.main(small_args(module, tmp_path, {}, num_steps=64, total_timesteps=3 * 256, init_fn="identity"))
    assert not rollouts[0].state.any()
    assert all(rollout.state.any() and rollout.dones[:-1].any() for rollout in rollouts[1:])


def test_hl_gauss_targets_and_loss(tmp_path):
    """Bin by bin: the share of the normal distribution that falls in; and a cross-entropy by hand."""
    module = load_script(copy_with("hl_gauss", tmp_path))
    edges = torch.linspace(-5, 5, 21)
    returns = torch.tensor([-3.1, 0.0, 0.26, 2.75, 9.0])  # the last is beyond the edge
    found = module.target_probabilities(returns, edges)
    expected = torch.zeros(5, 20)
    for row, y in zip(expected, returns.clamp(max=5).tolist(), strict=True):
        cdf = [math.erf((edge - y) / (0.75 * 0.5) / 2**0.5) for edge in edges.tolist()]
        row[:] = torch.tensor([right - left for left, right in itertools.pairwise(cdf)]) / (cdf[-1] - cdf[0])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    logits = torch.randn(5, 20)
    by_hand = -(expected * logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(module.value_loss(logits, returns, edges), by_hand)


def test_level_replay_plays_what_it_chooses_and_scores_what_it_plays(tmp_path):
    """A score is the mean |A| over the steps of the level's latest episode. The advantages come from all rollouts."""
    module = load_script(copy_with("level_replay", tmp_path))
    sizes = {"num_steps": 32, "total_timesteps": 5 * 128, "num_levels": 5, "start_level": 7, "feature_dim": 16}
    compute_gae, set_next_level = module.compute_gae, ProcgenVectorEnv.set_next_level
    rollouts, chosen = [], [[] for _ in range(4)]

    def spied_gae(rollout, *args):
        advantages = compute_gae(rollout, *args)
        rollouts.append((advantages, rollout.dones.clone()))
        return advantages

    def spied_choice(envs, env, level):
        chosen[env].append(level)
        set_next_level(envs, env, level)

    gae_spy = mock.patch.object(module, "compute_gae", spied_gae)
    with gae_spy, mock.patch.object(ProcgenVectorEnv, "set_next_level", spied_choice):
        run_dir = module.main(small_args(module, tmp_path / "runs", sizes, env_id="bossfight"))
    played = [[] for _ in range(4)]
    for row in read_csv(run_dir / "episodes.csv"):
        played[int(row["env"])].append(int(row["level_seed"]))
    for levels, choices in zip(played, chosen, strict=True):  # a choice at its end, and one before the first episode
        assert len(choices) == len(levels) + 1
        assert levels[1:] == choices[: len(levels) - 1]

    advantages, dones = (torch.cat(parts).numpy() for parts in zip(*rollouts, strict=True))
    scores, starts, spanning = np.zeros(5), [0] * 4, 0
    for t, env in np.argwhere(dones):
        level = played[env].pop(0)
        scores[level - 7] = np.abs(advantages[starts[env] : t + 1, env]).mean()
        spanning += starts[env] // 32 < t // 32
        starts[env] = t + 1
    state = newest_checkpoint(run_dir)["ranks"][0]["levels"]
    np.testing.assert_allclose(state["scores"], scores, rtol=1e-5)
    assert spanning > 0
    assert np.count_nonzero(scores) > 2


def test_level_replay_chooses_by_rank_and_staleness(tmp_path):
    """Six levels, two of them unseen. The paper's equations, level by level, and the shares of 3,000 choices."""
    module = load_script(copy_with("level_replay", tmp_path))
    args = SimpleNamespace(num_levels=6, num_envs=1, start_level=20)
    state = {"scores": torch.tensor([0.2, 0.0, 0.5, 0.0, 0.3, 0.1]), "stamps": torch.tensor([9, 0, 4, 0, 1, 10])}

    def replay(seed=0):
        plr = module.PLR(args, seed)
        plr.load_state_dict({name: value.clone() for name, value in state.items()} | {"count": 10})
        return plr

    seen, scores, stamps = [0, 2, 4, 5], state["scores"].tolist(), state["stamps"].tolist()
    for beta, rho in ((0.1, 0.1), (1, 0), (2, 0.7)):
        by_score, staleness = np.zeros(6), np.zeros(6)
        for level in seen:
            rank = 1 + sum(scores[other] > scores[level] for other in seen)
            by_score[level] = (1 / rank) ** (1 / beta)
            staleness[level] = 10 - stamps[level]
        expected = (1 - rho) * by_score / by_score.sum() + rho * staleness / staleness.sum()
        np.testing.assert_allclose(replay().replay_probabilities(beta, rho), expected, rtol=1e-12)

    counts = np.zeros(6)
    for seed in range(3000):
        plr = replay(seed)
        level = plr.choose() - 20
        assert plr.stamps[level] == plr.count == 11
        counts[level] += 1
    plr = replay()
    plr.count = 11
    expected = (4 * plr.replay_probabilities().numpy() + 2 * np.array([0, 0.5, 0, 0.5, 0, 0])) / 6
    np.testing.assert_allclose(counts / 3000, expected, atol=0.03)
    assert counts.min() > 0
