"""Copies of the scripts that try an idea, in 30 changed lines at most, keep every promise of a script."""

import difflib
import math
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import evaluate
import fast
import ideas
from common.checkpoint import load_agent, newest_checkpoint
from ranks import Ranks
from test_checkpoint import check_same_run, same
from test_distributed import words_of

IDEAS = {  # the script that each changes
    "averaged_policy": "ppg",
    "augmentation": "ppo",
    "reward_head": "ppo",
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


pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Overriding environment Catch-v0"),  # by another copy of it
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
            script, env_id = IDEAS[name], "Catch-v0" if name == "own_environment" else "bossfight"
            folder = tmp_path_factory.mktemp(name)
            path = folder / f"{name}.py"
            path.write_text(ideas.changed(ideas.changed(read(script), name), "fewer_pixels"))
            copy = Copy(path, SMALL | OF_SCRIPT[script] | {"env_id": env_id}, None, None)
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
    assert sum(line[0] in "+-" for line in marked) <= 30


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
    assert f"resumed at step {total - 32}" in process.output
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
