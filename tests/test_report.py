"""benchmarks/report.py and its statistics: from curves to tables."""

import json
import math
import re
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

import collect
import convert
import curves
import ppo
import readme
import report
from common import InputError
from helpers import small_args
from test_run import read_scalars


def test_scores_count_every_episode_of_the_window():
    curve = curves.Curve([10, 20, 30, 40], [1.0, 2, 3, 4], [5, 0, 1, 3], [100.0, float("nan"), 2.0, 6.0])
    assert curves.score(curve, 40, window=20) == 5.0  # (1 x 2 + 3 x 6) / 4
    assert curves.score(curve, 30, window=20) == 2.0
    assert curves.score(curve, 40, window=40) == (500 + 2 + 18) / 9
    assert curves.score(curve, 35, window=20) == pytest.approx((2 + 1.5 * 6) / 2.5)  # half of the last row
    assert math.isnan(curves.score(curve, 20, window=10))


def test_differences_of_means():
    """By hand: means of 2, a pooled variance of 1.25, and t(.975) with 2 degrees of freedom 4.303; of 3 and 2, of 1."""
    assert curves.difference([1.0, 3.0], [1.5, 2.5]) == pytest.approx((0.0, -4.8106, 4.8106), abs=1e-3)
    assert curves.difference([3.0], [1.0, 2.0, 3.0]) == pytest.approx((1.0, -3.9684, 5.9684), abs=1e-3)


def test_statistics_over_games_from_known_numbers():
    games = [np.array([0.0, 1.0, 2.0, 3.0]), np.array([10.0, 10.0, 10.0, 30.0])]
    assert curves.mean_over_games(games) == (1.5 + 15) / 2
    assert curves.interquartile_mean(games) == (2 + 3 + 10 + 10) / 4  # without the two least and the two most of eight
    assert curves.mean_over_games([np.array([1.0]), np.array([2.0, 4.0])]) == 2  # a game is a game
    assert math.isnan(curves.interquartile_mean([np.array([1.0]), np.array([2.0, 4.0])]))  # no quarter to leave out
    # By hand: of the nine pairs of the first game X wins five and ties one, of the second all.
    x, y = [np.array([1.0, 2, 3]), np.array([5.0])], [np.array([0.0, 2, 2.5]), np.array([1.0, 2])]
    assert curves.probability_of_improvement(x + y) == pytest.approx(((5 + 0.5) / 9 + 1) / 2)
    assert curves.probability_of_improvement(y + x) == pytest.approx(1 - ((5 + 0.5) / 9 + 1) / 2)
    # At 0.5, half of the first game's runs are above, all of the second's.
    profile = curves.performance_profile([[0.4, 0.6], [0.7, 0.8]], np.array([-1, 0.5, 0.6, 1]))
    assert profile.tolist() == [1, 0.75, 0.5, 0]


def test_bootstrap_intervals_hold_the_mean():
    """In about 95 of 100 samples, and games keep their share: their means are far apart, their runs close together."""
    random, hits, trials = np.random.default_rng(0), 0, 60
    for _ in range(trials):
        games = [mean + random.standard_normal(10) for mean in (0, 100)]
        value, low, high = curves.with_interval(curves.mean_over_games, games)
        assert low < value < high < low + 2  # were the games drawn, too, it would be some 60 wide
        hits += low < 50 < high
    assert 0.85 < hits / trials < 1


def test_verdicts():
    published = [10.1, 9.9, 10.0]
    cases = {"matches": [10.0, 10.2], "above": [12.0, 12.2], "below": [8.0, 8.2], "inconclusive": [8.0, 12.2]}
    for words, ours in cases.items():  # the last interval holds 0, and nearly everything else
        assert report.verdict(ours, published)[2] == words
    assert report.verdict([10.0, 10.1], []) == ("-", "-", "nothing published")


def test_windows_are_the_blocks_of_published_curves():
    for name, mode in (("ppo_easy_all", "easy"), ("ppo_hard_all", "hard"), ("ppg_paper_ppg_hard_all", "hard")):
        maze, protocol = curves.read_reference(name)["maze"], report.Protocol(Path(f"{mode}-all"), {})
        blocks = zip(maze.steps[1:], np.diff(maze.steps), strict=True)
        off = [step for step, block in blocks if block != protocol.window(int(step))]
        assert set(off) <= {maze.steps[-1]}, name  # the last is what was left
        assert maze.scores(maze.steps[0] - 1) == maze.scores(maze.steps[-1] + 1) == []


@pytest.fixture
def no_pictures(monkeypatch):
    """Figures are drawn, but not written, which takes most of the time."""
    monkeypatch.setattr(report.figures, "save", lambda figure, path: report.plt.close(figure))


def write_run(results, protocol, algorithm, game, seed, value, steps=1_015_808):
    """A run whose policy returns `value`."""
    folder = results / protocol / algorithm / game
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{end},{end / 500:.1f},10,{value},{value}" for end in range(16_384, steps + 1, 16_384)]
    header = "step,seconds,episodes,episodic_return,last_100_return"
    (folder / f"seed{seed}.csv").write_text("\n".join([header, *rows]) + "\n")
    command = f"python {algorithm.partition('-')[0]}.py --env-id {game} --seed {seed}" + " --gamma 0.99" * (seed == 10)
    meta = {"command": command, "commit": f"012345{seed}89", "dirty": seed == 10}
    (folder / f"seed{seed}.meta.json").write_text(json.dumps(meta))


@pytest.fixture
def made(tmp_path, capsys):
    """Makes the report of the runs in `tmp_path`; returns what it prints."""

    def make():
        report.main(report.Args(results=tmp_path, documents=()))
        return capsys.readouterr().out

    return make


def table_rows(text, start):
    """The cells of the lines of a table that start so."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_report_of_runs_elsewhere(tmp_path, made):
    """What those in the tree have, `test_the_documents_are_what_the_report_makes` holds: gaps and README's table."""
    for seed, value in ((1, 10.0), (2, 10.2), (10, 10.4)):
        write_run(tmp_path, "easy-all", "ppo", "starpilot", seed, value)
        write_run(tmp_path, "easy-all", "ppo", "fruitbot", seed, 2 * value)
    write_run(tmp_path, "easy-all", "impala-appo", "starpilot", 1, 8.0, steps=940_000)
    write_run(tmp_path, "easy-all", "impala-appo", "CartPole-v1", 1, 7.0)
    write_run(tmp_path, "notes", "ppo", "starpilot", 1, 8.0)  # no protocol
    text = made()
    theirs = curves.read_reference("ppo_easy_all")["starpilot"].scores(1_000_000)
    (row,) = [row for row in table_rows(text, "PPO starpilot") if row[1] == "1M"]
    assert row[2:5:2] == ["10.00, 10.20, 10.40", f"{10.2 - mean(theirs):+.2f}"]
    assert (row[3], row[6]) == (", ".join(f"{score:.2f}" for score in theirs), "above")
    assert [row[1] for row in table_rows(text, "IMPALA (APPO) starpilot")] == ["0.5M"]
    (row,) = [row for row in table_rows(text, "IMPALA (APPO) CartPole-v1") if row[1] == "1M"]
    assert row[2:] == ["7.00", "-", "-", "-", "nothing published"]
    assert "### notes" not in text
    games, other = "for game in fruitbot starpilot; do", "python ppo.py --gamma 0.99 --env-id $game --seed 10; done"
    command = f"{games} for seed in 1 2; do python ppo.py --env-id $game --seed $seed; done; done"
    assert f"\n# PPO fruitbot, starpilot (made at 0123451, 0123452)\n{command}\n" in text
    assert f"\n# PPO fruitbot, starpilot (made at 0123451 with changes)\n{games} {other}\n" in text
    for name in ("curves.png", "profile.png"):
        assert (tmp_path / "easy-all" / name).stat().st_size > 5000
        assert f"/easy-all/{name})" in text


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [
        ("seed1.csv", "is no CSV of a learning curve", "a,b\n1,2\n"),
        ("seed1.eval.csv", "is no CSV of evaluations",
         "step,policy,episodic_return,standard_error\n64,stochastic,?,1\n"),
        ("seed1.meta.json", "does not say how its curve was made", '{"command": "python'),
    ],
)  # fmt: skip
def test_damaged_files_are_named(name, words, text, tmp_path, made, no_pictures):
    write_run(tmp_path, "easy-200", "ppo", "coinrun", 1, 7.0)
    (tmp_path / "easy-200" / "ppo" / "coinrun" / name).write_text(text)
    with pytest.raises(InputError, match=f"{re.escape(name)} {words}"):
        made()


def test_the_documents_are_what_the_report_makes(tmp_path):
    """Their tables and those in results/ are those of the curves in the tree."""
    shipped = [path.read_text() for path in readme.DOCUMENTS]
    copies = tuple(tmp_path / f"{number}.md" for number in range(len(shipped)))
    for copy, text in zip(copies, shipped, strict=True):
        copy.write_text(text)
    figures = {path: path.read_bytes() for path in collect.RESULTS.rglob("*.png")}
    tables = {path: path.read_text() for path in collect.RESULTS.rglob("*.md")}
    try:
        report.main(report.Args(documents=copies))
        assert [copy.read_text() for copy in copies] == shipped
        assert {path: path.read_text() for path in collect.RESULTS.rglob("*.md")} == tables
        assert set(collect.RESULTS.rglob("*.png")) == figures.keys()
    finally:
        for path, content in figures.items():
            path.write_bytes(content)


def test_curves_and_event_files_become_each_other(tmp_path):
    """A run's own event files hold every episode: they give its progress.csv again."""
    run_dir = ppo.main(small_args(ppo, tmp_path / "runs", {"num_steps": 64, "total_timesteps": 1024}))
    convert.main(convert.Args(run_dir, tmp_path / "curve.csv", every=256))
    mine, theirs = (curves.read(path) for path in (tmp_path / "curve.csv", run_dir / "progress.csv"))
    assert mine.steps[:-1] == theirs.steps[:-1]
    assert theirs.steps[-1] - 256 < mine.steps[-1] <= theirs.steps[-1]  # that of the last episode
    assert mine.episodes == theirs.episodes
    assert mine.returns == pytest.approx(theirs.returns)
    assert mine.seconds == pytest.approx(theirs.seconds, abs=3)
    convert.main(convert.Args(tmp_path / "curve.csv", tmp_path / "events"))
    scalars = read_scalars(tmp_path / "events")
    assert scalars["charts/episodes"] == list(zip(mine.steps, mine.episodes, strict=True))
    returns = [(step, value) for step, value in zip(mine.steps, mine.returns, strict=True) if not math.isnan(value)]
    assert scalars["charts/episodic_return"] == [(step, pytest.approx(value)) for step, value in returns]
    with pytest.raises(InputError, match="has the rows of a CSV and no single episodes"):
        convert.main(convert.Args(tmp_path / "events", tmp_path / "again.csv"))


def test_what_cannot_be_converted(tmp_path):
    (tmp_path / "some.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty").mkdir()
    for source, target, words in (
        ("some.csv", "events", "no CSV of a learning curve"),
        ("nothing", "x.csv", "there is no"),
        ("empty", "x.csv", "no event files"),
        ("empty", "some.csv", "remove it first"),
    ):
        with pytest.raises(InputError, match=words):
            convert.main(convert.Args(tmp_path / source, tmp_path / target))
