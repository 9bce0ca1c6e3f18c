"""benchmarks/report.py and its statistics: from runs to tables."""

import json
import math
import os
import re
from pathlib import Path
from statistics import mean
from unittest import mock

import numpy as np
import pytest
from matplotlib.text import Text
from scipy import stats
from torch.utils.tensorboard import SummaryWriter

import collect
import convert
import curves
import ppo
import readme
import report
from common import InputError
from common.checkpoint import FORMAT, write_archive
from common.evaluation import RETURN_RANGES
from common.run import write_json
from common.settings import read_json
from helpers import small_args


def test_scores_count_every_episode_of_the_window():
    curve = curves.Curve([10, 20, 30, 40], [1.0, 2, 3, 4], [5, 0, 1, 3], [100.0, float("nan"), 2.0, 6.0])
    assert curves.score(curve, 40, window=20) == 5.0  # (1 x 2 + 3 x 6) / 4
    assert curves.score(curve, 30, window=20) == 2.0
    assert curves.score(curve, 40, window=40) == (500 + 2 + 18) / 9
    assert curves.score(curve, 35, window=20) == pytest.approx((2 + 1.5 * 6) / 2.5)  # half of the last row
    assert math.isnan(curves.score(curve, 20, window=10))
    assert math.isnan(curves.score(curve, 9, window=20))  # before the first row


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


def test_bootstrap_intervals_hold_the_mean():
    """In about 95 of 100 samples, and games keep their share: their means are far apart, their runs close together."""
    random, hits, trials = np.random.default_rng(0), 0, 60
    for _ in range(trials):
        games = [mean + random.standard_normal(10) for mean in (0, 100)]
        value, low, high = curves.with_interval(curves.mean_over_games, games)
        assert low < value < high < low + 2  # were the games drawn, too, it would be some 60 wide
        hits += low < 50 < high
    assert 0.85 < hits / trials < 1


@pytest.mark.filterwarnings("error")
def test_differences_of_means_and_verdicts():
    """By hand: of 3 and 2, with the variance of 1 of the second."""
    assert curves.difference([3.0], [1.0, 2.0, 3.0]) == pytest.approx((1.0, -3.9684, 5.9684), abs=1e-3)
    published = [10.1, 9.9, 10.0]
    cases = {"matches": [10, 10.2, 10.1], "above": [12, 12.2, 12.1], "below": [8, 8.2, 8.1]}
    cases["inconclusive"] = [8, 12.2, 10]  # the interval holds 0, and nearly everything else
    for words, ours in cases.items():
        assert report.verdict(ours, published)[2] == words
        assert report.verdict(ours[:2], published)[2] == report.verdict(published, ours[:2])[2] == "inconclusive"
    assert report.verdict([1.0], [3.0]) == ("-2.00", "-", "inconclusive")  # no interval of two


def test_windows_are_the_blocks_of_published_curves():
    for name, mode in (("ppo_easy_all", "easy"), ("ppo_hard_all", "hard"), ("ppg_paper_ppg_hard_all", "hard")):
        maze, protocol = curves.read_reference(name)["maze"], report.Protocol(Path(f"{mode}-all"), {})
        blocks = zip(maze.steps[1:], np.diff(maze.steps), strict=True)
        off = [step for step, block in blocks if block != protocol.window(int(step))]
        assert set(off) <= {maze.steps[-1]}, name  # the last is what was left
        assert maze.scores(maze.steps[0] - 1) == maze.scores(maze.steps[-1] + 1) == []


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes a report; returns its text, and its first figure."""
    save = mock.Mock(wraps=report.save)
    monkeypatch.setattr(report, "save", save)

    def make(*run_dirs, **settings):
        report.main(report.Args(run_dirs, out=tmp_path / "out", **settings))
        return (tmp_path / "out" / "report.md").read_text(), save.call_args_list[0].args[0]

    return make


def write_run(runs, name, game, seed, value, steps=1_015_808, flags="", **settings):
    """The folder of a run whose policy returns `value`."""
    number = len(list(runs.glob("*")))
    run_dir = runs / f"{game}__{name}__{seed}__{number}"
    run_dir.mkdir(parents=True)
    row = min(16_384, steps // 16 or 1)
    rows = [f"{end},{end / 500:.1f},{10 * (value > 0)},{value},0\n" for end in range(row, steps + 1, row)]
    (run_dir / "progress.csv").write_text("step,seconds,episodes,episodic_return,last_100_return\n" + "".join(rows))
    args = {"exp_name": name, "env_id": game, "seed": seed, "num_levels": 0, "distribution_mode": "easy"}
    args |= {"total_timesteps": steps, "gamma": 0.999, "anneal_lr": False, "halve_lr_at": 64} | settings
    command = f"python {name}.py --env-id {game} --seed {seed} --total-timesteps {args['total_timesteps']}{flags}"
    meta = {"command": command, "commit": f"012345{seed}89", "dirty": seed == 3, "finished": "2026-11-28T05:10:03Z"}
    meta |= {"started": str(number), "script": f"{name}.py"}
    meta["script_sha256"] = name.removesuffix("-copy") + str(seed) * (name == "idea")
    (run_dir / "args.json").write_text(json.dumps(args))
    (run_dir / "meta.json").write_text(json.dumps(meta))
    return run_dir


def table_rows(text, start):
    """The cells of the lines of a table that start so."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_from_run_folders_to_tables_and_figures(tmp_path, made):
    """A baseline and an idea on three games, of which a run goes on, and tasks without published curves."""
    runs, games = tmp_path / "runs", ("bigfish", "fruitbot", "starpilot")
    ppo, idea = [10.0, 10.2, 10.4], [12.0, 12.5, 14.0]
    for game, seed in [(game, seed) for game in games for seed in (1, 2, 3)]:
        write_run(runs, "ppo", game, seed, ppo[seed - 1])
        total = 2_000_000 if (game, seed) == ("starpilot", 2) else 1_015_808
        run_dir = write_run(runs, "idea", game, seed, idea[seed - 1], total_timesteps=total, eval_interval=total)
        rows = "7,stochastic,9,1\n1015808,stochastic,9,1\n" if total < 2_000_000 else ""
        (run_dir / "eval.csv").write_text("step,policy,episodic_return,standard_error\n" + rows)
    write_run(runs, "ppo", "CartPole-v1", 1, 7.0, steps=12_288)
    write_run(runs, "ppo", "maze", 1, 5.0, distribution_mode="hard", num_levels=500)
    text, figure = made(*runs.iterdir(), baseline="ppo")
    seeds = [line for line in text.splitlines() if ", seed " in line]
    assert seeds == ["- idea starpilot, seed 2: running or stopped at step 1,015,808"]
    against_ppo, against_published, gap = table_rows(text, "idea starpilot")
    low, high = stats.ttest_ind(idea, ppo).confidence_interval()
    listed = ["12.83 (n = 3: 12.00, 12.50, 14.00)", "10.20 (n = 3: 10.00, 10.20, 10.40)"]
    assert against_ppo[1:] == ["1,015,808", *listed, "+2.63", f"{low:+.2f} to {high:+.2f}", "above"]
    published = curves.read_reference("ppo_easy_all")["starpilot"].scores(1_015_808 + (131_072 - 126_976) / 2)
    assert against_published[4] == f"{mean(idea) - mean(published):+.2f}"
    gaps = [(mean(idea) - mean(ppo)) / -float(np.subtract(*RETURN_RANGES["easy"][game])) for game in games]
    low, high = stats.ttest_1samp(gaps, 0).confidence_interval()
    over_games, _ = table_rows(text, "idea | each game's | 3 x 3")
    assert over_games[8:] == [f"{mean(gaps):+.3f}", f"{low:+.3f} to {high:+.3f}", "above"]
    (cart_pole,) = table_rows(text, "PPO CartPole-v1")
    assert cart_pole[1:] == ["12,288", "7.00 (n = 1: 7.00)", "-", "-", "-", "nothing to compare with"]
    assert gap[2:5:2] == ["12.00, 14.00", "4.00"]  # the other waits for its first evaluation
    assert table_rows(text.partition("### hard-500")[2], "PPO maze")
    line = "starpilot 1 2 3 (made at 0123451, 0123452, 0123453 with changes)"
    assert f"{line}\npython ppo.py --total-timesteps 1015808 --env-id $game --seed $seed\n" in text
    assert {path.name for path in (tmp_path / "out" / "easy-all").iterdir()} == {"curves.png", "curves.pdf"}
    steps = figure.axes[0].lines[0].get_xdata()  # of CartPole
    assert (len(steps), steps[-1]) == (32, 12_288)
    assert {round(text.get_fontsize(), 3) for text in figure.findobj(Text) if text.get_text()} == {12}  # at 6.6 inches
    assert "PPO, train-procgen" in [line.get_label() for line in figure.axes[3].lines]
    with pytest.raises(InputError, match=r"--baseline pp needs its runs and others\. There are idea, ppo"):
        made(*runs.iterdir(), baseline="pp")
    names = ["ppo", "ppg", *"abcdefghijklm"]
    assert len({readme.colour(name, names) for name in names}) == len(names)


def test_a_seed_without_a_score_is_left_out_of_the_gap(tmp_path, made):
    for seed in (1, 2):
        run_dir = write_run(tmp_path / "runs", "ppo", "maze", seed, 5.0, 1600, num_levels=200, eval_interval=800)
        rows = "800,stochastic,4,1\n1600,stochastic,4,1\n"
        (run_dir / "eval.csv").write_text(f"step,policy,episodic_return,standard_error\n{rows}")
    first, middle, rest = (run_dir / "progress.csv").read_text().partition("\n800,")
    (run_dir / "progress.csv").write_text(first + middle + rest.replace(",10,5.0,", ",0,nan,"))
    text, _ = made(*(tmp_path / "runs").iterdir())
    assert table_rows(text, "PPO maze")[1][2:6] == ["5.00", "4.00 ± 0.88", "1.00", "-"]


def test_a_short_run_does_not_make_all_curves_as_fine(tmp_path, made):
    write_run(tmp_path, "ppo", "starpilot", 1, 7.0)
    write_run(tmp_path, "idea", "starpilot", 1, 7.0, steps=6_400)
    _, figure = made(*tmp_path.glob("*__*"))
    assert 1600 <= max(len(line.get_xdata()) for line in figure.axes[0].lines) < 1610


def test_published_blocks_are_drawn_by_their_middles(tmp_path, made):
    write_run(tmp_path, "ppo", "starpilot", 1, 7.0, steps=8_000_000)
    write_run(tmp_path, "idea", "starpilot", 1, 7.0, steps=524_288)  # 1/8 of this is the window
    _, figure = made(*tmp_path.glob("*__*"))
    (drawn,) = [line.get_xdata() for line in figure.axes[0].lines if line.get_label() == "PPO, train-procgen"]
    assert drawn[0] == 131_072 - (131_072 - 65_536) / 2
    assert drawn[50] == 50 * 131_072 + 524_288 - (524_288 - 65_536) / 2


def test_what_tells_an_idea_from_its_baseline(tmp_path, made):
    plain, changed = {"num_envs": 4}, {"num_envs": 8, "gamma": 0.9}
    for idea, seeds, settings in (("ppo", (1, 2), plain), ("ppo-copy", (1,), plain), ("idea", (1, 2), changed)):
        for seed in seeds:
            write_run(tmp_path, idea, "CartPole-v1", seed, 7.0 + seed, 16, **settings)
    write_run(tmp_path, "last", "CartPole-v1", 1, 7.0, 2, " --lr '<\n'", exp_name="../../<!-- x -->|\n$\\frac$")
    text, _ = made(*tmp_path.glob("*__*"), baseline="ppo")
    flags = "--gamma 0.9 --num-envs 8, PPO with --gamma 0.999 --num-envs 4"
    assert f"\n- idea was started with {flags}: CartPole-v1\n" in text
    assert "\n- idea CartPole-v1 was made by several versions of its script\n" in text
    assert "\n- ppo-copy has the same script and flags as PPO: CartPole-v1\n" in text
    assert "- CartPole-v1, seed 1: finished at step 2, with too few rows for a curve (2)\n" in text
    assert text.count("The interval takes a single run to vary as") == 1
    assert not re.search("<|published", text)
    assert len(table_rows(text, "..-..-----")[0]) == 7
    results = tmp_path / "results"
    for run_dir in tmp_path.glob("*__ppo*"):
        collect.collect(run_dir, results).with_suffix(".meta.json").unlink()  # as convert.py makes curves
    made(results=results, baseline="ppo")


def test_damaged_files_are_named(tmp_path, made):
    content, reasons = {"format": FORMAT, "script": "", "args": {}, "step": 163_840, "parts": {}, "ranks": []}, {}
    content["run"] = {"rows": {"progress.csv": 16, "eval.csv": 1}}
    for name, old, new, words in (
        ("args.json", '"seed": 2', '"seed": "../../x"', "has a seed that no script has"),
        ("progress.csv", "\n10240,", "\n40960,", "is no CSV of a learning curve"),
        ("progress.csv", "163840,327.7,10,5.0", "163840,327.7,10,nan", "has 10 episodes of return nan at step 163,840"),
        ("progress.csv", "\n10240,20.5,10,5.0,0", "", "has 15 rows up to step 163,840 where its checkpoint has 16"),
        ("progress.csv", "163840,327.7,10,5.0,0\n", "163840,327.7,10,5.0", "has 15 rows up to step 163,840 where"),
        ("eval.csv", "64,1,1,stochastic\n", "", "has 0 rows up to step 163,840 where its checkpoint has 1"),
        ("eval.csv", "64,1,", "64,\0,", "is no CSV of evaluations"),
        ("eval.csv", "", "", "pipe is not a regular file"),
    ):
        bad = write_run(tmp_path, "ppo", "maze", 2, 5.0, steps=163_840, eval_interval=64)
        (bad / "checkpoints").mkdir()
        write_archive(bad / "checkpoints" / "000000163840.pt", content)
        (bad / "eval.csv").write_text("step,episodic_return,standard_error,policy\n64,1,1,stochastic\n")
        (bad / name).write_text((bad / name).read_text().replace(old, new))
        reasons[bad] = words
    os.mkfifo(bad / "pipe")
    text, _ = made(write_run(tmp_path, "ppo", "maze", 1, 5.0), *reasons)
    assert [bad for bad, words in reasons.items() if not re.search(f"\n- {bad}.*{words}", text)] == []
    curve = collect.collect(write_run(tmp_path / "runs", "ppo", "coinrun", 1, 7.0), tmp_path / "results")
    for name, words, text in (
        ("seed1.meta.json", "does not say how its curve was made", '{"command": "python'),
        ("seed1.eval.csv", "is no CSV of evaluations", "step,policy,episodic_return\n64,stochastic,1\n"),
        ("seed1.csv", "is no CSV of a learning curve", "a,b\n1,2\n"),
    ):
        curve.with_name(name).write_text(text)
        with pytest.raises(InputError, match=f"{re.escape(name)} {words}"):
            made(results=tmp_path / "results")


def test_runs_that_are_left_out_are_named(tmp_path, made, monkeypatch):
    """Also where they are only collected. A seed that stopped early takes nothing from the comparison of the others."""
    runs = tmp_path / "runs"
    older = write_run(runs, "ppo", "maze", 1, 6.0)
    write_run(runs, "ppo", "maze", 1, 5.0)
    write_run(runs, "ppo", "maze", 2, 6.0, steps=507_904)
    write_run(runs, "ppo", "maze", 3, 7.0, steps=163_840, total_timesteps=1_015_808)
    gamma = write_run(runs, "ppo", "maze", 6, 5.0, 2_000_000, gamma=0.9)
    full_rate = write_run(runs, "ppo", "maze", 8, 5.0)
    args, meta = (read_json(full_rate / name) for name in ("args.json", "meta.json"))
    del args["halve_lr_at"]  # of a version without it
    write_json(full_rate / "args.json", args)
    write_json(full_rate / "meta.json", meta | {"script": "impala.py"})
    left_out = {
        " is no run folder": runs,
        "has no rows": write_run(runs, "ppo", "maze", 4, 5.0, steps=0),
        "no episode has finished": write_run(runs, "ppo", "maze", 5, 0.0),
        "other settings than maze__ppo__1__1: --gamma 0.9 .there: 0.999.:": gamma,
        "other settings than .*--anneal-lr True": write_run(runs, "ppo", "maze", 7, 5.0, steps=32_768, anneal_lr=True),
        "other settings than .*--halve-lr-at None": full_rate,
        r"another run of this seed is there .maze__ppo__1__1\)": older,
        "another run of this seed is there": write_run(runs, "ppo", "maze", 1, 6.0, steps=999_424),
    }
    run_dirs = (runs, *sorted(runs.iterdir()))
    text, _ = made(*run_dirs)
    for words, run_dir in left_out.items():
        assert re.search(f"\n- {run_dir}.*{words}", text), words
    assert "seed 3: running or stopped at step 163,840, without a score at 507,904\n" in text
    (row,) = table_rows(text, "PPO maze")
    assert row[1:3] + row[6:] == ["507,904", "5.50 (n = 2: 5.00, 6.00)", "inconclusive"]
    assert table_rows(made(*run_dirs, mark=163_840)[0], "PPO maze")[0][2] == "6.00 (n = 3: 5.00, 6.00, 7.00)"
    with pytest.raises(InputError, match=r"there are no runs to report: .*is no run folder.*has no rows"):
        made(*list(left_out.values())[:2])
    with pytest.raises(InputError, match=r"--baseline ppo needs its runs and others\. There are ppo"):
        made(*run_dirs, baseline="ppo")
    with pytest.raises(InputError, match=r"8 of 11 runs are not collected: .*no run folder.*let it end first"):
        collect.main(collect.Args(run_dirs, tmp_path / "results"))
    text, _ = made(results=tmp_path / "results")
    assert "6.00 (n = 2: 6.00, 6.00)" in text  # collect.py keeps the first that it gets
    monkeypatch.setattr(collect, "write_atomically", mock.Mock(side_effect=OSError("a full disk")))
    with pytest.raises(OSError, match="a full disk"):  # no curve is cut
        made(*run_dirs)


def test_the_documents_are_what_the_report_makes(tmp_path, monkeypatch):
    """Their tables and those in results/ are those of the curves in the tree, or of scripts that were removed."""
    shipped = [path.read_text() for path in readme.DOCUMENTS]
    copies = tuple(tmp_path / f"{number}.md" for number in range(len(shipped)))
    for copy, text in zip(copies, shipped, strict=True):
        copy.write_text(text)
    monkeypatch.setattr(readme, "DOCUMENTS", copies)
    tables, drawn = {path: path.read_text() for path in collect.RESULTS.rglob("*.md")}, set()
    monkeypatch.setattr(report, "save", lambda figure, *paths: drawn.update(paths))
    report.main(report.Args())
    assert [copy.read_text() for copy in copies] == shipped
    assert {path: path.read_text() for path in collect.RESULTS.rglob("*.md")} == tables
    assert drawn < set(collect.RESULTS.rglob("*.png"))
    for name in ("scaling/cpu", "easy-all/phases", "precision/precision", "exploration/exploration"):
        assert f"-->\n{tables[collect.RESULTS / f'{name}.md']}<!-- end of " in shipped[1]


def test_event_files_become_a_curve(tmp_path, capsys):
    """A run's own event files hold every episode: they give its progress.csv again. A cut end is named."""
    run_dir = ppo.main(small_args(ppo, tmp_path / "runs", {"num_steps": 64, "total_timesteps": 1024}))
    with next(run_dir.glob("*tfevents*")).open("ab") as events:
        events.write(b"cut")
    convert.main(convert.Args(run_dir, tmp_path / "curve.csv", every=256))
    assert f"warning: {events.name} has truncated record" in capsys.readouterr().err
    mine, theirs = (curves.read(path) for path in (tmp_path / "curve.csv", run_dir / "progress.csv"))
    assert mine.steps[:-1] == theirs.steps[:-1]
    assert theirs.steps[-1] - 256 < mine.steps[-1] <= theirs.steps[-1]  # that of the last episode
    assert mine.episodes == theirs.episodes
    assert mine.returns == pytest.approx(theirs.returns)
    assert mine.seconds == pytest.approx(theirs.seconds, abs=3)
    with pytest.raises(InputError, match=r"has an episode at step [\d,]+, too far for rows of"):
        convert.from_events(run_dir, every=1e-4)


def test_what_cannot_be_converted(tmp_path):
    (tmp_path / "some.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty").mkdir()
    with SummaryWriter(str(tmp_path / "nan")) as writer:
        writer.add_scalar(convert.EPISODE, math.nan, 8)
    os.mkfifo(tmp_path / "pipe")
    for source, target, words in (
        ("nothing", "x.csv", "there is no"),
        ("empty", "x.csv", "no event files"),
        ("pipe", "x.csv", "not a regular file"),
        ("empty", "some.csv", "remove it first"),
        ("nan", "x.csv", "has 1 episodes of return nan at step 8"),
    ):
        with pytest.raises(InputError, match=words):
            convert.main(convert.Args(tmp_path / source, tmp_path / target))
