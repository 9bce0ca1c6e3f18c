"""The run folder, its logs, and what a person sees of a run."""

import contextlib
import dataclasses
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

import fast
import impala
import ppg
import ppo
from common import InputError, run
from common.checkpoint import load_agent
from common.device import resolve_precision
from common.run import ROOT
from common.settings import parse
from helpers import ALL, SCRIPTS, flags, read_csv, read_json, read_scalars, small_args

NUM_ENVS, NUM_STEPS = 4, 64
ENDS = [256, 512, 768, 1024]  # of iterations

CLEANRL_TAGS = [f"charts/{name}" for name in ("episodic_return", "episodic_length", "SPS", "learning_rate")]
CLEANRL_TAGS += [f"losses/{name}" for name in ("value_loss", "policy_loss", "entropy", "explained_variance")]
CLEANRL_TAGS += ["losses/old_approx_kl", "losses/approx_kl", "losses/clipfrac"]
IMPALA_TAGS = ["charts/policy_lag", "charts/policy_lag_max", "losses/behaviour_kl", "losses/rho"]
IMPALA_TAGS += ["losses/rho_clipfrac", "losses/c_clipfrac", "losses/pg_rho_clipfrac"]
AUX_TAGS = ["losses/aux/kl_loss", "losses/aux/aux_value_loss", "losses/aux/real_value_loss"]


def make_args(script, runs_dir, **settings):
    """4 iterations of CartPole, the last of which PPG ends in mid-phase; 1000 steps do not fill them."""
    return small_args(script, runs_dir, {"num_steps": NUM_STEPS, "total_timesteps": 1000, "n_pi": 3}, **settings)


@pytest.fixture(scope="module", params=SCRIPTS, ids=lambda script: script.__name__)
def finished(request, tmp_path_factory):
    """One finished run of each script, with a metric of one's own, and with what it has printed."""
    script, agents, make, update = request.param, [], request.param.Agent, request.param.update
    mine = iter([np.nan, np.inf, np.float32(0.5), 2])
    args = make_args(script, tmp_path_factory.mktemp("finished") / "runs", seed=3)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(script, "Agent", lambda *arguments: agents.append(make(*arguments)) or agents[-1])
        patch.setattr(script, "update", lambda *arguments: update(*arguments) | {"charts/mine": next(mine)})
        patch.setattr(run, "LINE_SECONDS", 0)
        path = script.main(args)
    precision = resolve_precision("auto", torch.device("cpu"))
    args = dataclasses.replace(args, precision=precision)  # what it was made with, it records
    return SimpleNamespace(script=script, args=args, path=path, agent=agents[0], output=output.getvalue())


def test_folder_with_settings_and_provenance(finished):
    assert re.fullmatch(rf"CartPole-v1__{finished.args.exp_name}__3__\d+", finished.path.name)
    assert list(finished.path.parent.iterdir()) == [finished.path]
    names = sorted(path.name.partition(".tfevents.")[0] for path in finished.path.iterdir())
    files = "args.json checkpoints episodes.csv eval.csv events.out lock meta.json metrics.csv model.pt progress.csv"
    assert names == sorted([*files.split(), Path(finished.script.__file__).name])
    assert read_json(finished.path / "args.json") == dataclasses.asdict(finished.args)
    meta = read_json(finished.path / "meta.json")
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert meta["commit"] == (git.stdout.strip() if git.returncode == 0 else None)
    assert (meta["versions"]["torch"], meta["versions"]["numpy"]) == (torch.__version__, np.__version__)
    assert meta["machine"]
    words = shlex.split(meta["command"])
    assert words[:2] == ["python", f"{finished.script.__name__}.py"]
    assert parse(finished.script.Args, words[2:]) == finished.args


def test_a_tree_is_dirty_by_its_own_files_and_the_script(tmp_path, monkeypatch):
    """Other new files may be anyone's."""
    (tmp_path / "beside.py").write_text("")
    tmp_path = tmp_path / "tree"
    monkeypatch.setattr(run, "ROOT", tmp_path)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", str(tmp_path)]
    tmp_path.mkdir()
    (tmp_path / "old.py").write_text("")
    (tmp_path / ".gitignore").write_text("ignored.py")
    for words in (["init"], ["config", "status.showUntrackedFiles", "no"], ["add", "."], ["commit", "-m", "x"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    (tmp_path / "new.py").write_text("")
    (tmp_path / "ignored.py").write_text("")

    def dirty(script):
        return run.provenance("", script, torch.device("cpu"))["dirty"]

    assert [dirty("old.py"), dirty("new.py"), dirty("../beside.py"), dirty("ignored.py")] == [False, True, True, True]
    (tmp_path / "old.py").write_text("changed")
    assert dirty("old.py")


@ALL
def test_command_repeats_every_setting(script):
    """No field is left out: each has another value than its default."""
    values = {}
    for field in dataclasses.fields(script.Args):
        hint = get_type_hints(script.Args)[field.name]
        if hint is bool:
            value = not field.default
        elif get_origin(hint) is Literal:
            value = next(option for option in get_args(hint) if option != field.default)
        elif str in (hint, *get_args(hint)):
            value = "auto" if field.name == "resume" else "it's a folder/$HOME/*"
        else:
            value = 2 * (field.default or 1)
        assert value != field.default
        values[field.name] = value
    for args in (script.Args(**values), script.Args(max_grad_norm=None, seed=0, capture_video=True)):
        assert parse(script.Args, flags(args)) == args


def test_tensorboard_and_metrics_csv(finished):
    """They have CleanRL's tags and all that `log` gets, also metrics of one's own. A chart that is NaN is left out; a
    loss is not (tests/test_bad_input.py)."""
    scalars, rows = read_scalars(finished.path), read_csv(finished.path / "metrics.csv")
    tags = CLEANRL_TAGS + (IMPALA_TAGS if finished.script is impala else [])
    assert set(tags) <= scalars.keys()
    for tag in tags[2:]:
        assert [step for step, _ in scalars[tag]] == ENDS, tag
    aux_tags = {tag for tag in scalars if tag.startswith("losses/aux/")}
    assert aux_tags >= set(AUX_TAGS) if finished.script is ppg else not aux_tags
    for tag in aux_tags:  # one whole phase of 3 iterations, and one on the iteration that is left at the end
        assert [step for step, _ in scalars[tag]] == [768, 1024], tag
    assert all(np.isfinite(value) for points in scalars.values() for _, value in points)
    assert scalars["charts/mine"] == [(768, 0.5), (1024, 2.0)]
    assert list(rows[0]) == ["step", "seconds", "tag", "value"]
    tags = {row["tag"] for row in rows}
    assert tags >= {"charts/mine", "charts/learning_rate", "losses/entropy"}
    for tag in tags:
        found = [(int(row["step"]), float(row["value"])) for row in rows if row["tag"] == tag]
        assert [step for step, _ in found] == [step for step, _ in scalars[tag]]
        assert [value for _, value in found] == pytest.approx([value for _, value in scalars[tag]], rel=1e-4)


def test_a_second_log_of_a_step_has_metrics_alone(tmp_path, monkeypatch):
    update, second = ppo.update, lambda run: run.log(run.now_at, {"own/second": 2.0})
    monkeypatch.setattr(ppo, "update", lambda *given: second(given[-1]) or update(*given))
    path = ppo.main(make_args(ppo, tmp_path))
    assert [step for step, _ in read_scalars(path)["own/second"]] == ENDS
    progress = read_csv(path / "progress.csv")
    assert [int(row["step"]) for row in progress] == ENDS
    assert sum(int(row["episodes"]) for row in progress) == len(read_csv(path / "episodes.csv"))


def test_every_episode_and_the_progress_are_in_csv_and_tensorboard(finished):
    progress, episodes = read_csv(finished.path / "progress.csv"), read_csv(finished.path / "episodes.csv")
    scalars = read_scalars(finished.path)
    columns = "step seconds env episodic_return episodic_length level_seed level_complete"
    assert list(episodes[0]) == columns.split()
    assert len(episodes) > 10
    for column in ("episodic_return", "episodic_length"):
        assert scalars[f"charts/{column}"] == [(int(row["step"]), float(row[column])) for row in episodes]
    for env in range(NUM_ENVS):
        rows = [row for row in episodes if int(row["env"]) == env]
        lengths = [int(row["episodic_length"]) for row in rows]
        # Each episode follows the one before, so that the lengths add up to the steps that the environment has made.
        assert [int(row["step"]) for row in rows] == list(NUM_ENVS * np.cumsum(lengths))
        assert [float(row["episodic_return"]) for row in rows] == lengths  # CartPole's
        assert sum(lengths) <= 4 * NUM_STEPS
    logged = [value for _, value in scalars["charts/last_100_return"]]
    assert logged == pytest.approx([float(row["last_100_return"]) for row in progress], rel=1e-5)
    columns = "step seconds episodes episodic_return last_100_return last_100_level_complete"
    assert list(progress[0]) == columns.split()
    assert [int(row["step"]) for row in progress] == ENDS
    for row in progress:
        step = int(row["step"])
        returns = [float(episode["episodic_return"]) for episode in episodes if int(episode["step"]) <= step]
        number = sum(step - 256 < int(episode["step"]) <= step for episode in episodes)
        assert int(row["episodes"]) == number
        expected = np.mean(returns[-number:]) if number else np.nan, np.mean(returns[-100:])
        found = float(row["episodic_return"]), float(row["last_100_return"])
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("file", ["", "model.pt", "checkpoints/*.pt"])
def test_a_file_alone_is_the_agent(file, finished, tmp_path):
    """A model or a checkpoint in an empty folder; or the run folder."""
    place = shutil.copy(next(finished.path.glob(file)), tmp_path / "some.pt") if file else finished.path
    agent, args, _ = load_agent(place)
    assert args == finished.args
    assert not agent.training
    trained = finished.agent.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in agent.state_dict().items())
    obs = torch.randn(16, 4)
    assert torch.equal(agent.get_action_dist(obs)[0].logits, finished.agent.get_action_dist(obs)[0].logits)


def test_an_agent_that_cannot_be_loaded(finished, tmp_path):
    model = torch.load(finished.path / "model.pt", weights_only=True)
    weights = {name: value for name, value in model["agent"].items() if "head" not in name}
    for change, words in (
        ({"script": "no_script.py"}, r"some\.pt is of another no_script.py"),
        ({"script": None}, r"some\.pt is no model"),
        ({"args": [1]}, r"some\.pt is no model"),
        ({"agent": [1]}, r"some\.pt holds no agent"),
        ({"args": model["args"] | {"wings": 2}}, "is of another .*wings"),
        ({"args": model["args"] | {"init_fn": "__class__"}}, "is of another .*not in"),
        ({"agent": weights}, "is of another .*state_dict"),
        ({"array": np.zeros(1)}, "is damaged, or not a file of tensors and plain values"),  # its pickle calls functions
    ):
        torch.save(model | change, tmp_path / "some.pt")
        with pytest.raises(InputError, match=words):
            load_agent(tmp_path / "some.pt")
    with pytest.raises(InputError, match="cannot be read"):
        load_agent("x" * 300)  # no file can have this name


def test_runs_of_the_same_second_get_their_own_folders(tmp_path, monkeypatch):
    """Also where the environment's id has separators."""
    monkeypatch.setattr(time, "time", lambda: 1e9)
    args = ppo.Args(env_id="coinrun,ALE/Pong-v5")
    names = [run.make_run_dir(args, tmp_path / "a/b").name for _ in range(3)]
    assert names == [f"coinrun+ALE-Pong-v5__ppo__1__{10**9 + n}" for n in range(3)]


def test_plain_progress_lines(finished):
    """What is run, how far it is, and where the agent lies."""
    header, *lines, done = finished.output.splitlines()
    title = f"{finished.script.Args().exp_name} on CartPole-v1, seed 3, 1,024 steps"
    assert header.startswith(title)
    assert header.endswith(str(finished.path))
    said = r"return [\d.]+|no episode logged"
    doing = r"  (?:collecting|learning.*|auxiliary phase.*|waiting for actors, \d+/\d+ unrolls)"
    pattern = rf"([\d,]+)/1,024  (?:{said})(?:  \d+ steps/s  ETA 0:\d\d:\d\d)?(?:{doing})?"
    shown = [int(re.fullmatch(pattern, line)[1].replace(",", "")) for line in lines]
    assert shown == sorted(shown)
    assert shown[-1] == 1024
    with_speed = [step for step, line in zip(shown, lines, strict=True) if "steps/s" in line]
    assert with_speed[0] == (768 if finished.script is ppg else 256)  # once there has been a whole phase or iteration
    phases = {"collecting", "learning"} | ({"auxiliary"} if finished.script is ppg else set())
    assert set(re.findall(r"collecting|learning|auxiliary", finished.output)) == phases
    last = float(read_csv(finished.path / "progress.csv")[-1]["last_100_return"])
    assert done.startswith("done: 1,024 steps in ")
    assert f"last 100: return {last:.2f} | model: {finished.path / 'model.pt'}" in done


def test_progress_on_a_terminal(monkeypatch, capsys, tmp_path):
    """The same line again and again, as long as the terminal is wide."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    ppo.main(make_args(ppo, tmp_path))
    _, line, done, _ = capsys.readouterr().out.split("\n")
    start, *shown = line.split("\r\x1b[K")
    assert start == ""
    assert all(each[0].isdigit() and len(each) <= 39 for each in shown)
    assert shown[-1].startswith("1,024/1,024  ")
    assert done.startswith("done: ")


def run_tracked(folder, words):
    """A tracked run beside other logs of TensorBoard's: W&B would wait ten seconds for some, to name them apart."""
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR"):  # else it writes below the home folder
        os.environ[f"WANDB_{name}"] = str(folder / "wandb")
    os.environ["WANDB_MODE"] = "offline"
    os.chdir(folder)
    close = run.Run.close
    run.Run.close = lambda *args: SummaryWriter(str(folder / "runs" / "other")).close() or close(*args)
    fast.run_script("ppo", words)


def test_track_offline(tmp_path):
    pytest.importorskip("wandb")
    args = make_args(ppo, tmp_path / "runs", track=True, wandb_project_name="mine-project", wandb_entity="our-team")
    with fast.Fork(tmp_path, run_tracked, tmp_path, flags(args)) as process:
        assert process.wait(120) == 0, process.errors
    (path,) = (tmp_path / "runs").glob("CartPole*")
    assert (path / "model.pt").exists()
    (log,) = tmp_path.glob(f"runs/wandb/offline-run-*/run-{path.name}.wandb")
    content = log.read_bytes()
    for word in (*CLEANRL_TAGS, path.name):
        assert word.encode() in content, word
    assert b"\x12\x08our-team\x1a\x0cmine-project" in content  # fields 2 and 3 of wandb's RunRecord, with their lengths
