"""benchmarks/evaluate.py: the figures and the video of a run's agent."""

import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

import evaluate
import impala
import ppo
from common import InputError
from common.envs import make_envs, spread_seed
from common.evaluation import EVALUATION, HeldOut
from common.run import ROOT, lock_folder
from helpers import ALL, level_seeds, small_args

pytestmark = pytest.mark.usefixtures("small_networks")


def train(script, runs_dir, env_id, **settings):
    sizes = {"num_steps": 2, "total_timesteps": 8, "n_pi": 2}
    return script.main(small_args(script, runs_dir, sizes, env_id=env_id, **settings))


@pytest.fixture(scope="module")
def bossfight(tmp_path_factory):
    """A run on a game of short episodes, and of frames that change little from step to step."""
    return train(ppo, tmp_path_factory.mktemp("runs"), "bossfight", num_levels=3, start_level=4)


@ALL
def test_figures_of_a_task_with_known_returns(script, tmp_path, capsys):
    """TestCount pays 1 a step and lasts 5."""
    run_dir = train(script, tmp_path, "TestCount-v0", **({"use_lstm": True} if script is impala else {}))
    lock = lock_folder(run_dir)  # as if it were still running
    figures = evaluate.main(evaluate.Args(run_dir, episodes=7, num_envs=3, device="cpu"))
    lock.close()
    assert {name: round(value, 6) for name, value in figures.items() if "normalised" not in name} == {
        "TestCount-v0 mean": 5, "TestCount-v0 standard error": 0, "TestCount-v0 IQM": 5, "TestCount-v0 mean length": 5,
    }  # fmt: skip
    output = capsys.readouterr().out
    assert "9 episodes" in output  # three of each environment
    assert "TestCount-v0 IQM: 5.000" in output


def test_figures_of_known_returns(tmp_path, monkeypatch):
    run_dir = train(ppo, tmp_path, "coinrun,maze")
    returns = np.array([[0.0, 10], [5, 5], [10, 10], [5, 10]])  # rows 0 and 2 are coinrun's
    monkeypatch.setattr(HeldOut, "play", lambda *args: (returns, returns + 1))
    figures = evaluate.main(evaluate.Args(run_dir, episodes=8, num_envs=4, device="cpu"))
    assert figures["coinrun mean"] == 7.5
    assert figures["coinrun standard error"] == pytest.approx(5 / 2)
    assert figures["coinrun IQM"] == 10
    assert figures["coinrun normalised mean"] == 0.5
    assert figures["maze mean"] == 6.25
    assert figures["maze mean length"] == 7.25


def test_levels(bossfight, monkeypatch):
    seeds = []

    def play(held_out, *args):
        seeds.extend(level_seeds(held_out.envs))
        return np.zeros((2, 32, 1))

    monkeypatch.setattr(HeldOut, "play", play)
    evaluate.main(evaluate.Args(bossfight, episodes=32, num_envs=32, levels="train", device="cpu"))
    assert set(seeds) == {4, 5, 6}


def test_level_ranges():
    limited, unlimited = ppo.Args(num_levels=200, start_level=10), ppo.Args()
    assert evaluate.level_range(limited, "unseen") == {"num_levels": 2**31 - 1 - 210, "start_level": 210}
    assert evaluate.level_range(limited, "all") == {"num_levels": 0, "start_level": 0}
    assert evaluate.level_range(limited, "train") == {"num_levels": 200, "start_level": 10}
    assert evaluate.level_range(unlimited, "train") == {"num_levels": 0, "start_level": 0}
    with pytest.raises(InputError, match="none is unseen: use --levels all"):
        evaluate.level_range(unlimited, "unseen")


def test_a_gif(bossfight, tmp_path):
    path = tmp_path / "out.gif"
    args = evaluate.Args(bossfight, episodes=6, num_envs=6, levels="train", device="cpu", video=path)
    args.video_seconds, args.video_size = 0.5, 40  # at 15 frames a second
    evaluate.main(args)
    with Image.open(path) as gif:
        assert (gif.n_frames, gif.size) == (8, (120, 80))
        tiles = [np.asarray(gif.convert("RGB"))[:40, 40 * n : 40 * n + 40] for n in range(3)]
    assert all(tile.std() > 10 for tile in tiles)


def test_environments_fill_the_grid_row_by_row(tmp_path):
    video = evaluate.Video(tmp_path / "out.gif", columns=3, size=4, fps=1)
    video.add([np.full((8, 8, 3), 40 * n, np.uint8) for n in range(6)])
    video.finish()
    with Image.open(tmp_path / "out.gif") as gif:
        assert np.asarray(gif.convert("L"))[::4, ::4].tolist() == [[0, 40, 80], [120, 160, 200]]


def test_a_video(bossfight, tmp_path):
    av = pytest.importorskip("av")
    path = tmp_path / "out.mp4"
    args = evaluate.Args(bossfight, episodes=2, num_envs=2, device="cpu", video=path, video_grid=(2, 1))
    args.video_seconds = 0.4
    evaluate.main(args)
    with av.open(str(path)) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert len(frames) == 6
    assert frames[0].shape == (512, 1024, 3)
    envs = make_envs("bossfight", 2, seed=spread_seed(1, EVALUATION), capture_video=True)
    # the first frame is that after a step, nearly the first of all
    assert abs(frames[0].astype(float) - np.concatenate(envs.render(), axis=1)).mean() < 12
    envs.close()


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_a_full_disk_is_noticed_before_the_evaluation(suffix, bossfight, tmp_path, capsys):
    path = tmp_path / f"out{suffix}"
    path.symlink_to("/dev/full")
    args = evaluate.Args(bossfight, episodes=2, num_envs=2, device="cpu", video=path, video_grid=(2, 1), video_size=64)
    with pytest.raises(InputError, match=rf"--video .*out{suffix} cannot be written \(No space left on device\)\.$"):
        evaluate.main(args)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"video": Path("out.avi")}, ".mp4 or .gif"),
        ({"video": Path("nowhere/out.gif"), "video_grid": (1, 1)}, r"nowhere/out.gif cannot be written \(No such file"),
        ({"video": Path("folder.gif"), "video_grid": (1, 1)}, r"folder.gif cannot be written \(Is a directory\)"),
        ({"video": Path("out.gif"), "video_size": 5462}, "--video-size 5462 is too large .*: use at most 5461"),
        ({"video": Path("out.mp4"), "video_size": 85}, "--video-size 85 cannot work for out.mp4"),
        ({"device": "cuda:77"}, "--device cuda:77"),
    ],
)
def test_bad_settings(bossfight, settings, words, tmp_path, monkeypatch):
    """Nothing is played or written."""
    monkeypatch.chdir(tmp_path)
    Path("folder.gif").mkdir()
    monkeypatch.setattr(HeldOut, "play", mock.Mock(side_effect=AssertionError))
    with pytest.raises(InputError, match=words):
        evaluate.main(evaluate.Args(bossfight, **settings))
    assert list(tmp_path.iterdir()) == [tmp_path / "folder.gif"]


def test_a_grid_of_several_games(tmp_path):
    run_dir = train(ppo, tmp_path, "coinrun,maze,heist,jumper")
    args = evaluate.Args(run_dir, episodes=6, num_envs=6, device="cpu", video=tmp_path / "out.gif")
    with pytest.raises(InputError, match="--video-grid 3 2 cannot be shared by 4 games: use a multiple of 4"):
        evaluate.main(args)


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
