"""Copies of the scripts that try an idea, in few changed lines, keep every promise of a script."""

import difflib
import math
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

import evaluate
import fast
import ideas
from common.checkpoint import load_agent, load_script, newest_checkpoint
from common.envs import Envs
from helpers import read_csv
from ranks import Ranks
from test_checkpoint import check_same_run, same
from test_distributed import words_of

IDEAS = {  # the script that each changes
    "averaged_policy": "ppg",
    "augmentation": "ppo",
    "reward_head": "ppo",
    "level_replay": "ppo",
    "normalized_network": "impala",
    "own_environment": "impala",
}
ALL = pytest.mark.parametrize("name", IDEAS)
# 5 iterations of 4 environments x 8 steps; of PPG in phases of 3
SMALL = {"num_envs": 4, "num_steps": 8, "total_timesteps": 5 * 32, "num_minibatches": 2, "feature_dim": 16, "seed": 4}
SMALL |= {"device": "cpu", "precision": "fp32"}
OF_SCRIPT = {
    "ppo": {"update_epochs": 1},
    "ppg": {"n_pi": 3, "num_aux_rollouts": 2, "e_aux": 1},
    "impala": {"batch_size": 2, "num_actors": 0},
}
OF_IDEA = {
    "own_environment": {"env_id": "Catch-v0"},
    # rollouts in which episodes end, and levels that are soon replayed
    "level_replay": {"num_steps": 32, "total_timesteps": 5 * 128, "num_levels": 5, "start_level": 7},
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated"),
]


class Copy(NamedTuple):
    """A script that has been copied and changed, and its run that nothing has disturbed."""

    script: Path
    settings: dict
    run_dir: Path
    process: fast.Fork

    def words(self, runs_dir: Path, **settings) -> list[str]:
        return words_of(self.settings | {"runs_dir": str(runs_dir)} | settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Makes copies, each once, and trains them."""
    made = {}

    def make(name: str) -> Copy:
        if name not in made:
            script = IDEAS[name]
            settings = {"env_id": "bossfight"} | SMALL | OF_SCRIPT[script] | OF_IDEA.get(name, {})
            folder = tmp_path_factory.mktemp(name)
            path = folder / f"{name}.py"
            path.write_text(ideas.changed(ideas.changed(read(script), name), "fewer_pixels"))
            copy = Copy(path, settings, None, None)
            process = run(folder, copy, copy.words(folder / "runs"))
            (run_dir,) = (folder / "runs").iterdir()
            made[name] = copy._replace(run_dir=run_dir, process=process)
        return made[name]

    return make


def read(script: str) -> str:
    return (fast.ROOT / f"{script}.py").read_text()


def run(folder: Path, copy: Copy, words: list[str], status: int = 0, kill_at: int | None = None) -> fast.Fork:
    """`python <copy> <words>`, which prints into `folder`, until it ends with `status`."""
    with fast.Fork(folder / "printed", ideas.run, copy.script, words, kill_at) as process:
        assert process.wait() == status, process.errors
    return process


@ALL
def test_lines_that_an_idea_changes(name):
    script = read(IDEAS[name])
    sources = script, ideas.changed(script, name)
    _, _, *marked = difflib.unified_diff(*(source.splitlines() for source in sources), n=0, lineterm="")
    assert sum(line[0] in "+-" for line in marked) <= (60 if name == "level_replay" else 30)


@ALL
def test_it_trains_and_is_evaluated_and_exported(name, trained, tmp_path):
    _, settings, run_dir, process = trained(name)
    title = f"{name}-appo" if IDEAS[name] == "impala" else name
    assert process.output.startswith(f"{title} on {settings['env_id']}")
    assert f"done: {settings['total_timesteps']} steps" in process.output
    figures = evaluate.main(evaluate.Args(run_dir, episodes=2, num_envs=2, device="cpu"))
    assert math.isfinite(figures[f"{settings['env_id']} mean"])
    evaluate.export(run_dir, tmp_path / "policy.pt")
    agent, *_ = load_agent(run_dir)
    shape = (16, 16, 1) if name == "own_environment" else (64, 64, 3)
    obs = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    with torch.no_grad():
        dist, _ = agent.get_action_dist(obs)
        found = torch.jit.load(tmp_path / "policy.pt")(obs)
    torch.testing.assert_close(found.log_softmax(-1), dist.logits, rtol=0, atol=1e-4)


@ALL
def test_a_killed_run_is_the_same_run(name, trained, tmp_path):
    """Killed in its last iteration, which is PPG's mid-phase."""
    copy = trained(name)
    total = copy.settings["total_timesteps"]
    words = copy.words(tmp_path / "runs", checkpoint_interval=0)
    run(tmp_path, copy, words, status=-signal.SIGKILL, kill_at=total)
    (run_dir,) = (tmp_path / "runs").iterdir()
    process = run(tmp_path, copy, ["--resume", str(run_dir)])
    assert f"resumed at step {total * 4 // 5}" in process.output
    if copy.settings["env_id"] == "bossfight":
        check_same_run(run_dir, copy.run_dir)
        mine, theirs = newest_checkpoint(run_dir), newest_checkpoint(copy.run_dir)
        assert mine["step"] == theirs["step"] == total
        assert same([mine["parts"], mine["ranks"]], [theirs["parts"], theirs["ranks"]])
    else:
        assert "new episodes begin" in process.errors
        assert f"done: {total} steps" in process.output


@ALL
def test_two_ranks_train_it(name, trained, tmp_path):
    """All networks, with their buffers, are the same on both ranks before anything is learnt, and at the end."""
    copy = trained(name)
    forks = Ranks(tmp_path, 2).run(ideas.run, copy.script, copy.words(tmp_path / "runs"), None, tmp_path)
    assert "\ndone: " in forks[0].output
    start, end = ([torch.load(tmp_path / f"{when}{rank}.pt") for rank in range(2)] for when in ("start", "end"))
    assert start[0].keys() == ({"agent", "ema"} if name == "averaged_policy" else {"agent"})
    for mine, theirs in (start, end):
        for network, state in mine.items():
            assert [each for each in state if not torch.equal(state[each], theirs[network][each])] == []
    for network, state in start[0].items():
        assert not same(state, end[0][network])
    if name == "level_replay":
        (run_dir,) = (tmp_path / "runs").iterdir()
        states = [state["levels"] for state in newest_checkpoint(run_dir)["ranks"]]
        assert states[0]["seed"] != states[1]["seed"]  # each rank has a sampler of its own
        assert not same(states[0]["scores"], states[1]["scores"])


def test_level_replay_plays_what_it_chooses_and_scores_what_it_plays(trained, tmp_path):
    """A score is the mean |A| over the steps of the level's latest episode. The advantages come from all rollouts."""
    script, settings, *_ = trained("level_replay")
    module = load_script(str(script))
    compute_gae, set_next_level = module.compute_gae, Envs.set_next_level
    rollouts, chosen = [], [[] for _ in range(4)]

    def spied_gae(rollout, *args):
        advantages = compute_gae(rollout, *args)
        rollouts.append((advantages, rollout.dones.clone()))
        return advantages

    def spied_choice(envs, env, level):
        chosen[env].append(level)
        set_next_level(envs, env, level)

    gae_spy = mock.patch.object(module, "compute_gae", spied_gae)
    with gae_spy, mock.patch.object(Envs, "set_next_level", spied_choice):
        run_dir = module.main(module.Args(**settings, runs_dir=str(tmp_path)))
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


def test_level_replay_chooses_by_rank_and_staleness(trained):
    """Six levels, two of them unseen. The paper's equations, level by level, and the shares of 3,000 choices."""
    module = load_script(str(trained("level_replay").script))
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
