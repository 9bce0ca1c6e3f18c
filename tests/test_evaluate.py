"""benchmarks/evaluate.py: figures and videos of an agent or a random policy, and the policy in a file of its own."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributions import Beta, Categorical

import evaluate
import impala
import ppg
import ppo
from common import InputError, TrainingError
from common.checkpoint import load_agent
from common.envs import Episode, make_vec, spread_seed
from common.evaluation import EVALUATION
from common.run import ROOT, lock_folder
from common.settings import flag
from helpers import ALL, level_seeds, make_envs, read_csv, small_args


def train(script, runs_dir, env_id, **settings):
    sizes = {"num_steps": 2, "total_timesteps": 8, "n_pi": 2}
    return script.main(small_args(script, runs_dir, sizes, env_id=env_id, **settings))


def figures_of(source, **settings):
    return evaluate.main(evaluate.Args(source, device="cpu", **settings))


@pytest.fixture(scope="module")
def bossfight(tmp_path_factory, small_networks):
    """A run on a game of short episodes, and of frames that change little from step to step."""
    return train(ppo, tmp_path_factory.mktemp("runs"), "bossfight", num_levels=3, start_level=4)


@pytest.mark.usefixtures("small_networks")
@ALL
def test_figures_of_a_task_with_known_returns(script, tmp_path, capsys):
    """TestCount pays 1 a step and lasts 5."""
    run_dir = train(script, tmp_path, "TestCount-v0", **({"use_lstm": True} if script is impala else {}))
    lock = lock_folder(run_dir)  # as if it were still running
    figures = figures_of(run_dir, episodes=7, num_envs=3)
    lock.close()
    assert {name: round(value, 6) for name, value in figures.items() if not np.isnan(value)} == {
        "TestCount-v0 mean": 5, "TestCount-v0 standard error": 0, "TestCount-v0 IQM": 5, "TestCount-v0 mean length": 5,
    }  # fmt: skip
    output = capsys.readouterr().out
    assert "9 episodes" in output  # three of each environment
    assert "TestCount-v0 IQM: 5.000" in output
    assert "nan" not in output


@pytest.mark.usefixtures("small_networks")
def test_a_grid_that_games_cannot_share(tmp_path):
    run_dir = train(ppo, tmp_path, "coinrun,maze")
    with pytest.raises(InputError, match="--video-grid 3 1 cannot be shared by 2 games: use a multiple of 2"):
        figures_of(run_dir, video=tmp_path / "out.gif", video_grid=(3, 1))


def test_words_for_levels(bossfight, tmp_path):
    """The run's levels are 4, 5 and 6."""
    for levels in ("train", "unseen", "all"):
        path = tmp_path / f"{levels}.csv"
        figures_of(bossfight, episodes=32, num_envs=32, levels=levels, per_level=path)
        rows = read_csv(path)
        assert sum(int(row["episodes"]) for row in rows) == 32
        trained = {int(row["level_seed"]) for row in rows} & {4, 5, 6}
        assert trained == ({4, 5, 6} if levels == "train" else set())
        assert {row["training_level"] for row in rows} == {str(int(levels == "train"))}
    assert evaluate.levels_of(ppo.Args(num_levels=3, start_level=4), "unseen") == (2**31 - 1 - 7, 7, [])
    with pytest.raises(InputError, match="none is unseen: use --levels all"):
        evaluate.levels_of(ppo.Args(), "unseen")
    for settings in ({"use_sequential_levels": True}, {"distribution_mode": "exploration"}):
        with pytest.raises(InputError, match="need Procgen, one level an episode: leave them out"):
            evaluate.Task(evaluate.Args(levels="3"), None, ppo.Args(env_id="maze", **settings), make_vec)


@pytest.mark.parametrize(
    ("games", "levels", "num_envs", "episodes", "expected", "count"),
    [
        ("bossfight", "3,7,11-12,3", 9, 1, {3, 7, 11, 12}, 1),
        ("bossfight", "2147483646,0-29", 4, 40, {*range(30), 2**31 - 2}, 2),
        ("starpilot,bossfight", "5,8-12", 4, 36, {5, *range(8, 13)}, 3),
        ("starpilot,bossfight", "8-10", 14, 7, {8, 9, 10}, 2),
    ],
)
def test_levels_by_number(games, levels, num_envs, episodes, expected, count, tmp_path, monkeypatch, capsys):
    """Fewer than environments, and more. Later episodes on a level than those asked for do not count."""
    played, play, table = [], evaluate.play, tmp_path / "levels.csv"
    monkeypatch.setattr(evaluate, "play", lambda *args: played.extend(play(*args)) or list(played))
    figures_of(None, random_policy=(games,), levels=levels, num_envs=num_envs, episodes=episodes, per_level=table)
    games = games.split(",")
    assert f"levels {levels}, {len(games) * len(expected) * count} episodes" in capsys.readouterr().out
    rows = {(row["env_id"], int(row["level_seed"])): row for row in read_csv(table)}
    assert rows.keys() == set(itertools.product(games, expected))
    for (game, level), row in rows.items():
        episodes = [episode for turn in zip(*played[games.index(game) :: len(games)], strict=True) for episode in turn]
        own = [episode for episode in episodes if episode.level_seed == level][:count]
        assert int(row["episodes"]) == len(own) == count
        assert float(row["episodic_return"]) == pytest.approx(np.mean([episode.episodic_return for episode in own]))
        assert float(row["level_complete"]) == np.mean([episode.level_complete for episode in own])


def test_figures_and_gap_of_known_returns(bossfight, tmp_path, monkeypatch):
    """The gap is of means over the episodes of levels; 4, 5 and 6 are the run's."""
    returns = {3: (1, 3), 4: (0, 2), 5: (3, 3), 7: (1.5, 2.5), 8: (11, 5)}  # levels are solved above 1
    played = [[Episode(0, each, each + 1, level, each > 1) for each in pair] for level, pair in returns.items()]
    monkeypatch.setattr(evaluate, "play", lambda *args: played)
    table = tmp_path / "levels.csv"
    figures = figures_of(bossfight, levels="3-5,7-8", episodes=10, num_envs=5, per_level=table)
    found = [(row["level_seed"], row["training_level"], row["episodic_return"]) for row in read_csv(table)]
    assert found == [("3", "0", "2.0"), ("4", "1", "1.0"), ("5", "1", "3.0"), ("7", "0", "2.0"), ("8", "0", "8.0")]
    means = [figures[f"bossfight {name}"] for name in ("mean", "IQM", "normalised mean", "mean length")]
    assert means == pytest.approx([3.2, 15 / 6, 2.7 / 12.5, 4.2])
    assert figures["bossfight standard error"] == pytest.approx(np.std(list(returns.values()), ddof=1) / 10**0.5)
    assert figures["bossfight share of levels solved"] == 0.8
    gap, share = "bossfight gap", "bossfight gap in share of levels solved"
    assert {name: value for name, value in figures.items() if "gap" in name} == pytest.approx({
        gap: 2 - 4, f"{gap}, standard error": (2 / 2 + 12 / 3) ** 0.5,
        share: 3 / 4 - 5 / 6, f"{share}, standard error": (1 / 8 / 2 + 1 / 12 / 3) ** 0.5,
    })  # fmt: skip
    rows = [{"training_level": n, "episodic_return": 7.0 * n, "level_complete": 0.0} for n in (0, 1)]
    for levels in (rows, rows * 2):  # one a side, and equal ones, tell no standard error
        assert list(evaluate.gaps(levels).values()) == pytest.approx([7, np.nan, 0, np.nan], nan_ok=True)
    assert evaluate.gaps(rows[1:]) == {}


def test_a_gif(bossfight, tmp_path, monkeypatch, capsys):
    """Environments fill the grid row by row; levels by number fill it from the first. No step is made after it."""
    monkeypatch.setattr(evaluate, "LINE_SECONDS", -1)
    path, first, play = tmp_path / "out.gif", [], evaluate.play
    monkeypatch.setattr(evaluate, "play", lambda *args: first.append(level_seeds(args[1])) or play(*args))
    size = {"video_grid": (2, 2), "video_seconds": 0.5, "video_size": 40}  # at 15 frames a second
    figures_of(bossfight, episodes=0, levels="17,19-20", video=path, **size)
    with Image.open(path) as gif:
        assert (gif.n_frames, gif.size) == (8, (80, 80))
    assert first == [[17, 19, 20, 17]]
    assert capsys.readouterr().err.count("film: ") == 8 + 1
    frames = [np.full((8, 8, 3), 40 * n, np.uint8) for n in range(6)]
    assert evaluate.tile(frames, columns=3, size=4)[::4, ::4, 0].tolist() == [[0, 40, 80], [120, 160, 200]]


def test_a_video(bossfight, tmp_path):
    av = pytest.importorskip("av")
    path = tmp_path / "out.mp4"
    figures_of(bossfight, episodes=2, num_envs=2, video=path, video_grid=(2, 1), video_seconds=0.4)
    with av.open(str(path)) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert len(frames) == 6
    assert frames[0].shape == (512, 1024, 3)
    envs = make_envs("bossfight", 2, seed=spread_seed(1, EVALUATION), render=True)
    assert abs(frames[0].astype(float) - np.concatenate(envs.render(), axis=1)).mean() < 12
    envs.close()


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "TestBits-v0", "coinrun,maze"])
def test_random_actions_of_any_kind(env_id, capsys):
    figures = figures_of(None, random_policy=("TestCount-v0", env_id), num_envs=4, episodes=6)
    games = env_id.split(",")
    assert figures["TestCount-v0 mean"] == figures["TestCount-v0 mean length"] == 5
    assert len(figures) == 6 * (1 + len(games))
    assert all(figures[f"{game} mean length"] > 0 for game in games)
    levels = ", easy, levels all" if len(games) > 1 else ""  # Procgen's
    assert f"random policy: {env_id}{levels}, 8 episodes\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_envs": 0}, "--num-envs 0 cannot work"),
        ({"video": Path("nowhere/out.gif"), "video_grid": (1, 1)}, r"nowhere/out.gif cannot be written \(No such file"),
        ({"video": Path("out.gif"), "video_size": 5462}, "--video-size 5462 is too large .*: use at most 5461"),
        ({"video": Path("out.mp4"), "video_size": 85}, "--video-size 85 cannot work for out.mp4"),
        ({"source": None}, "nothing to play is named"),
        ({"random_policy": ("maze",)}, "--random-policy plays without an agent: leave out the run, --greedy"),
        *(({"levels": f"3,{part}"}, f"--levels {part} cannot work: use all") for part in ("5-3", "x", "2147483647")),
        *(({"levels": part}, f"--levels {part} cannot work: use all") for part in ("", "-4", "1-2-3", "0-1000000")),
        ({"per_level": Path("nowhere/levels.csv")}, r"--per-level nowhere/levels.csv cannot be written \(No such file"),
        ({"per_level": Path("levels.csv"), "episodes": 0, "export": Path("x.pt")}, "--episodes 0 leaves nothing to do"),
        ({"source": None, "random_policy": ("maze", "TestCount-v0"), "levels": "3"}, "numbers in --levels need"),
        ({"source": None, "random_policy": ("CartPole-v1",), "per_level": Path("x.csv")}, "--per-level and numbers in"),
        ({"source": None, "random_policy": ("maze", "nothing")}, "'nothing' is not known"),
        ({"random_policy": ()}, "--random-policy is empty: name one at least."),
    ],
)  # fmt: skip
def test_bad_settings(bossfight, settings, words, tmp_path, monkeypatch):
    """Nothing is played or written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "play", mock.Mock(side_effect=AssertionError))
    with pytest.raises(InputError, match=words):
        figures_of(**{"source": bossfight} | settings)
    assert not list(tmp_path.iterdir())


def test_readmes_code_lets_agents_act(bossfight, tmp_path):
    """Of each script; and no step keeps the graph of the one before. IMPALA's block follows README's."""
    texts = ((ROOT / path).read_text() for path in ("README.md", "common/README.md"))
    act, act_with_state = (re.search(r"```python\n([^`]*torch.no_grad.*?)```", text, re.DOTALL)[1] for text in texts)
    recurrent = train(impala, tmp_path, "TestCount-v0", use_lstm=True)
    for run_dir, code in ((bossfight, act), (recurrent, act + act_with_state)):
        names = {}
        exec(code.replace("runs/starpilot__ppg__1__1795202643", str(run_dir)), names)
        saved = torch.load(run_dir / "model.pt", weights_only=True)["agent"]
        assert all(torch.equal(saved[name], value) for name, value in names["agent"].state_dict().items())
        assert len(names["obs"]) == 8
        assert not names["dist"].logits.requires_grad
    assert names["truncations"].all()  # after 100 steps of episodes of 5
    assert not names["state"].any()
    exec(act_with_state.replace("range(100)", "range(4)"), names)
    assert names["state"].all()


CASES = {  # and the shape of an observation
    "frames": (ppo, {"env_id": "starpilot", "precision": "bf16"}, (64, 64, 3)),
    "gaussian": (ppo, {"env_id": "Pendulum-v1"}, (3,)),
    "dual": (ppg, {"env_id": "starpilot", "arch": "dual"}, (64, 64, 3)),
    "vectors": (impala, {"env_id": "CartPole-v1"}, (4,)),
    "lstm": (impala, {"env_id": "starpilot", "use_lstm": True}, (64, 64, 3)),
}
WITHOUT_OUR_CODE = """
import sys, torch
for folder in sys.argv[1:]:
    origin = {"script_sha256": ""}
    policy, inputs = torch.jit.load(f"{folder}/policy.pt", _extra_files=origin), torch.load(f"{folder}/inputs.pt")
    assert len(origin["script_sha256"]) == 64
    torch.save(policy(*inputs), f"{folder}/outputs.pt")
"""


def test_a_policy_that_differs_is_not_written_and_no_file_is_lost(tmp_path, monkeypatch):
    model, out = train(ppo, tmp_path / "runs", "CartPole-v1") / "model.pt", tmp_path / "policy.pt"
    content, link, fifo = model.read_bytes(), tmp_path / "link.gif", tmp_path / "fifo.gif"
    link.symlink_to(tmp_path / "nothing")
    os.mkfifo(fifo)
    old = [("export", model), ("per_level", model), *itertools.product(("export", "per_level", "video"), (link, fifo))]
    for name, path in old:
        with pytest.raises(InputError, match=f"^{flag(name)} {path} exists: choose another name, or remove it first.$"):
            figures_of(model, **{name: path})
    assert model.read_bytes() == content
    trace, (agent, *_) = torch.jit.trace, load_agent(model)
    for change, error in ((1e-2, r"0\.00[45]"), (torch.nan, "nan")):
        agent.policy_head.linear.bias.data[0] += change
        monkeypatch.setattr(torch.jit, "trace", lambda policy, inputs: trace(evaluate.Policy(agent).eval(), inputs))
        with pytest.raises(TrainingError, match=rf"differs from the agent .*absolute difference: {error}"):
            evaluate.export(model, out)
    monkeypatch.undo()
    fixed = lambda agent, obs, state=None: (Categorical(logits=torch.zeros(len(obs), 2)), state)  # noqa: E731

    def baked(agent, obs, state=None):  # a number that a trace keeps
        state = torch.zeros(1, obs.shape[0], 1) if state is None else state
        return Categorical(logits=obs[:, :2] + torch.tensor([state.mean().item(), 0.0])), state + 1

    def branching(agent, obs, state=None):  # as a trace of the first step does not
        return Categorical(logits=obs[:, :2] * (-1 if (obs.abs() > 0.2).any() else 1)), None

    cases = {fixed: r"for len\(obs\) use obs.shape\[0\]\): .*shape"}
    cases |= {baked: "differs from the agent", branching: "differs from the agent"}
    for give, words in cases.items():
        monkeypatch.setattr(ppo.Agent, "get_action_dist", give)
        with pytest.raises(TrainingError, match=words):
            evaluate.export(model, out)
    monkeypatch.setattr(ppo.Agent, "get_action_dist", lambda *_: (Beta(torch.ones(8, 1), 1.0), None))
    with pytest.raises(InputError, match="--export takes no Beta: use categorical"):
        evaluate.export(model, out)
    assert not out.exists()


def test_exported_policies_give_the_same_logits(tmp_path, monkeypatch):
    """In a process without our code. What a copy does in `get_action_dist` is exported, too."""
    expected, plain, recurrent = {}, ppg.Agent.get_action_dist, impala.Agent.get_action_dist
    zeros = torch.zeros(2, 8, 256)
    nameless = lambda agent, obs, state=zeros: recurrent(agent, obs, zeros if state is None else state)  # noqa: E731
    mask = torch.zeros(15).index_fill(0, torch.tensor([3]), -torch.inf)
    masked = lambda *given: (Categorical(logits=mask + plain(*given)[0].logits), None)  # noqa: E731
    monkeypatch.setattr(ppg.Agent, "get_action_dist", masked)
    for case, (script, settings, shape) in CASES.items():
        folder = tmp_path / case
        run_dir = train(script, folder / "runs", **settings)
        if case == "lstm":  # nor has a copy to call it `initial_state`
            monkeypatch.setattr(impala.Agent, "get_action_dist", nameless)
            monkeypatch.delattr(impala.Agent, "initial_state")
        assert figures_of(run_dir, episodes=0, export=folder / "policy.pt") == {}
        agent, args, _ = load_agent(run_dir)
        agent.bf16 = False
        obs = torch.randint(0, 256, (5, *shape), dtype=torch.uint8) if len(shape) == 3 else torch.randn(5, *shape)
        inputs = (obs, torch.randn(2, 5, args.feature_dim)) if case == "lstm" else (obs,)
        torch.save(inputs, folder / "inputs.pt")
        with torch.no_grad():
            expected[case] = agent.get_action_dist(*inputs)
    subprocess.run([sys.executable, "-c", WITHOUT_OUR_CODE, *CASES], cwd=tmp_path, check=True)
    for case, (dist, next_state) in expected.items():
        params = torch.load(tmp_path / case / "outputs.pt")
        if case == "lstm":
            params, state = params
            torch.testing.assert_close(state, next_state, rtol=0, atol=1e-4)
        gaussian = case == "gaussian"
        found = params if gaussian else params.log_softmax(-1)
        wanted = torch.cat([dist.mean, dist.stddev.log()], -1) if gaussian else dist.logits
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
