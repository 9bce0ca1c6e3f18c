"""Copies of the scripts that try an idea, in 30 changed lines at most, keep every promise of a script."""

import difflib
import math
import signal
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch

import evaluate
import export
import fast
import ideas
from common import session
from common.checkpoint import newest_checkpoint
from common.errors import TrainingError
from common.load import load_agent, load_script
from helpers import parameters
from ranks import Ranks
from test_checkpoint import check_same_run, same
from test_distributed import words_of


class Idea(NamedTuple):
    script: str
    lines: int  # changed, as `diff` counts them: `<` and `>`
    env_id: str = "bossfight"


IDEAS = {
    "averaged_policy": Idea("ppg", lines=17),
    "augmentation": Idea("ppo", lines=9),
    "reward_head": Idea("ppo", lines=17),
    "normalized_network": Idea("impala", lines=7),
    "own_environment": Idea("impala", lines=30, env_id="Catch-v0"),
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


@pytest.fixture(scope="module", autouse=True)
def _server():
    fast.start_server()
    yield
    gym.registry.pop("Catch-v0", None)


class Copy(NamedTuple):
    """A script that has been copied and changed, and its run that nothing has disturbed."""

    name: str
    script: Path
    settings: dict
    run_dir: Path
    process: fast.Fork

    def words(self, runs_dir: Path, **settings) -> list[str]:
        return words_of(self.settings | {"runs_dir": str(runs_dir)} | settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Makes copies, each once, and trains them: idea `name` as a copy of `script`; without a name, the script itself,
    with the network that all copies have."""
    made = {}

    def make(name: str = "", script: str = "") -> Copy:
        script = script or IDEAS[name].script
        if (name, script) not in made:
            folder = tmp_path_factory.mktemp(name or script)
            path = folder / f"{name or script}.py"
            source = ideas.changed(read(script), name) if name else read(script)
            path.write_text(ideas.changed(source, "fewer_pixels"))
            settings = SMALL | OF_SCRIPT[script] | {"env_id": IDEAS[name].env_id if name else "bossfight"}
            copy = Copy(name, path, settings, None, None)
            process = run(folder, copy, copy.words(folder / "runs"))
            (run_dir,) = (folder / "runs").iterdir()
            made[name, script] = copy._replace(run_dir=run_dir, process=process)
        return made[name, script]

    return make


def read(script: str) -> str:
    return (fast.ROOT / f"{script}.py").read_text()


def run(folder: Path, copy: Copy, words: list[str], status: int = 0, kill_at: int | None = None) -> fast.Fork:
    """`python <copy> <words>`, which prints into `folder`, until it ends with `status`."""
    with fast.Fork(folder / "printed", ideas.run, copy.script, words, kill_at) as process:
        assert process.wait() == status, process.errors
    return process


def killed(tmp_path: Path, copy: Copy) -> Path:
    """The folder of a run that was killed in its last iteration; PPG's is in mid-phase."""
    words = copy.words(tmp_path / "runs", checkpoint_interval=0)
    run(tmp_path, copy, words, status=-signal.SIGKILL, kill_at=copy.settings["total_timesteps"])
    (run_dir,) = (tmp_path / "runs").iterdir()
    return run_dir


# ----------------------------------------------------------------------------------------- the promises, for all ideas


@ALL
def test_lines_that_an_idea_changes(name):
    script, lines, _ = IDEAS[name]
    sources = read(script), ideas.changed(read(script), name)
    _, _, *marked = difflib.unified_diff(*(source.splitlines() for source in sources), n=0, lineterm="")
    assert sum(line[0] in "+-" for line in marked) == lines <= 30


@ALL
def test_it_trains(name, trained):
    copy = trained(name)
    title = f"{name} (APPO)" if IDEAS[name].script == "impala" else name
    assert copy.process.output.startswith(f"{title} on {copy.settings['env_id']}")
    assert f"done: {copy.settings['total_timesteps']} steps" in copy.process.output
    assert newest_checkpoint(copy.run_dir)["step"] == copy.settings["total_timesteps"]


@ALL
def test_a_killed_run_is_the_same_run(name, trained, tmp_path):
    copy = trained(name)
    run_dir = killed(tmp_path, copy)
    process = run(tmp_path, copy, ["--resume", str(run_dir)])
    total = copy.settings["total_timesteps"]
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
def test_it_is_evaluated(name, trained):
    run_dir = trained(name).run_dir
    model = (run_dir / "model.pt").read_bytes()
    figures = evaluate.main(evaluate.Args(run_dir, episodes=2, num_envs=2, device="cpu"))
    assert math.isfinite(figures[f"{IDEAS[name].env_id} mean"])
    assert (run_dir / "model.pt").read_bytes() == model


@ALL
def test_it_is_exported(name, trained, tmp_path):
    run_dir = trained(name).run_dir
    export.main(export.Args(run_dir, tmp_path / "policy.pt"))
    agent, _ = load_agent(run_dir)
    shape = (16, 16, 1) if name == "own_environment" else (64, 64, 3)
    obs = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    with torch.no_grad():
        dist, _ = agent.get_action_dist(obs)
        found = torch.jit.load(tmp_path / "policy.pt")(obs)
    torch.testing.assert_close(found.log_softmax(-1), dist.logits, rtol=0, atol=1e-4)


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


# --------------------------------------------------------------------------------------------- what one idea calls for


def test_an_average_that_is_nan_is_told_from_the_agent(trained, tmp_path):
    """Its parameters have the names of the agent's."""
    copy = trained("averaged_policy")
    script, save = load_script(str(copy.script)), session.Checkpoints.save

    def spoil(checkpoints, step):
        if step == 64:
            checkpoints.parts["ema"].policy_head.linear.bias.data[3] = torch.nan
        save(checkpoints, step)

    settings = copy.settings | {"runs_dir": str(tmp_path)}
    with (
        mock.patch.object(session.Checkpoints, "save", spoil),
        pytest.raises(TrainingError, match=r"^ema\.policy_head\.linear\.bias is nan at step 64: "),
    ):
        script.main(script.Args(**settings))


def test_what_augmentation_teaches_does_not_depend_on_the_pieces_of_a_minibatch(trained, tmp_path):
    copy = trained("augmentation")
    script, found = load_script(str(copy.script)), []
    for size in (512, 5):
        settings = {"total_timesteps": 32, "micro_batch_size": size, "runs_dir": str(tmp_path / f"{size}")}
        found.append(parameters(script.main(script.Args(**copy.settings | settings))))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


def test_a_further_head_starts_anew_from_a_run_without_it(trained, tmp_path):
    copy, source = trained("reward_head"), trained(script="ppo").run_dir
    words = copy.words(tmp_path / "runs", init_from=source, learning_rate=0.0, total_timesteps=32)
    (note,) = [line for line in run(tmp_path, copy, words).errors.splitlines() if "start anew" in line]
    assert note == f"note: --init-from {source}: reward_head.weight, reward_head.bias start anew"
    (run_dir,) = (tmp_path / "runs").iterdir()
    found, weights = parameters(run_dir), parameters(source)
    assert found.keys() - weights.keys() == {"reward_head.weight", "reward_head.bias"}
    assert same({name: found[name] for name in weights}, weights)


def test_evaluations_change_no_normalised_network(trained, tmp_path):
    """They neither enter the running means nor leave the network in the evaluation mode."""
    copy = trained("normalized_network")
    run(tmp_path, copy, copy.words(tmp_path / "runs", eval_interval=64, eval_episodes=2))
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert len((run_dir / "eval.csv").read_text().splitlines()) == 1 + 2 * 3
    assert same(parameters(run_dir), parameters(copy.run_dir))


def test_a_loaded_normalised_network_sees_each_sample_alone(trained):
    """And computes what is written: the kernels take none of its blocks."""
    copy = trained("normalized_network")
    agent, args = load_agent(copy.run_dir)
    plain = load_script(str(copy.script)).Agent(gym.spaces.Box(0, 255, (64, 64, 3), np.uint8), agent.action_space, args)
    assert list(map(type, agent.modules())) == list(map(type, plain.modules()))
    plain.load_state_dict(agent.state_dict())
    frames = torch.randint(0, 256, (5, 64, 64, 3), dtype=torch.uint8)
    with torch.no_grad():
        (_, values, _), (_, expected, _) = (each.step(frames, each.initial_state(5)) for each in (agent, plain.eval()))
        alone = torch.cat([agent.step(frame, agent.initial_state(1))[1] for frame in frames.split(1)])
    torch.testing.assert_close(alone, values, rtol=0, atol=1e-5)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)


def test_a_phase_keeps_its_frames_of_an_own_environment(trained, tmp_path):
    copy = trained("own_environment", "ppg")
    run_dir = killed(tmp_path, copy)
    phase, seen = newest_checkpoint(run_dir)["ranks"][0]["phase"], []
    script = load_script(str(copy.script))
    auxiliary_phase = script.auxiliary_phase

    def look(agent, optimizer, phase, *args):
        seen.append(phase.obs.clone())
        return auxiliary_phase(agent, optimizer, phase, *args)

    with mock.patch.object(script, "auxiliary_phase", look):
        script.main(script.Args(**copy.settings | {"runs_dir": str(tmp_path / "runs"), "resume": str(run_dir)}))
    assert [len(obs) for obs in seen] == [2]
    assert torch.equal(seen[0][0], phase["obs"][0])
