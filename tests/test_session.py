"""What the scripts share around their loops: settings and their command line, the end of a run, its metrics."""

import dataclasses
import inspect
import json
import math
import re
from typing import Literal, get_origin, get_type_hints

import pytest
import torch

import impala
import ppg
import ppo
from common import InputError, TrainingError, settings
from common.envs import Envs
from common.run import Run, command
from common.settings import parse, preset_args
from helpers import ALL, small_args


def make_args(script, runs_dir, **settings):
    """Three iterations of CartPole."""
    sizes = {"num_steps": 4, "total_timesteps": 48, "n_pi": 2, "log_interval": 16}
    return small_args(script, runs_dir, sizes, **settings)


@pytest.fixture
def left_open(monkeypatch):
    """The environments that have been made and not been closed, as it changes."""
    envs, init, close = [], Envs.__init__, Envs.close
    monkeypatch.setattr(Envs, "__init__", lambda self, *args: (init(self, *args), envs.append(self))[0])
    monkeypatch.setattr(Envs, "close", lambda self, **kw: (close(self, **kw), self in envs and envs.remove(self))[0])
    return envs


@pytest.mark.parametrize(
    ("script", "num_made", "changes"),
    [(ppo, 2, {}), (ppg, 2, {}), (impala, 2, {}), (impala, 3, {"num_actors": 2, "queue_size": 4})],
    ids=["ppo", "ppg", "impala", "impala actors"],
)
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_closes_environments_and_evaluator(script, num_made, changes, error, left_open, tmp_path, monkeypatch):
    update, opened = script.update, []

    def fail(*args):
        if opened:
            raise error("in mid-run")
        opened.extend(left_open)
        return update(*args)

    monkeypatch.setattr(script, "update", fail)
    with pytest.raises(error, match="in mid-run"):
        script.main(make_args(script, tmp_path, eval_interval=16, eval_episodes=1, **changes))
    assert len(opened) == num_made
    assert not left_open


@ALL
def test_a_run_that_cannot_begin_closes_its_environments(script, left_open, tmp_path):
    with pytest.raises(InputError, match=r"none cannot be read \(No such file or directory\)"):
        script.main(make_args(script, tmp_path, eval_interval=16, eval_episodes=1, init_from=str(tmp_path / "none")))
    assert not left_open
    assert not list(tmp_path.iterdir())


def test_a_part_of_the_actors_that_fails_is_a_training_error(tmp_path, monkeypatch):
    def broken(*args):
        raise FloatingPointError("an output is NaN")
        yield

    monkeypatch.setattr(impala, "act", broken)
    with pytest.raises(TrainingError, match=r"^an output is NaN: the run stops; .*; it has no checkpoint to resume$"):
        impala.main(make_args(impala, tmp_path, num_actors=1))


@ALL
def test_an_iteration_reads_its_metrics_once(script, tmp_path, monkeypatch):
    """On a GPU, each read waits for the device."""
    log, reads, counts = Run.log, [], []

    def spy(name):
        original = getattr(torch.Tensor, name)
        return lambda tensor, *args, **kwargs: reads.append(name) or original(tensor, *args, **kwargs)

    def count(self, *args):
        reads.clear()
        log(self, *args)
        counts.append(len(reads))

    for name in ("tolist", "item", "__float__", "__int__", "__bool__", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, spy(name))
    monkeypatch.setattr(Run, "log", count)
    script.main(make_args(script, tmp_path))
    assert counts == [1, 1, 1]


@ALL
def test_help(script, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        parse(script.Args, ["--help"])
    assert not end.value.code
    shown = capsys.readouterr()
    assert not shown.err
    titles = re.findall(r"^(?:╭─)? ((?:[\w-]+ )?options)(?: ─+╮| *)$", shown.out, re.M)
    groups = ["algorithm", "environment", "network", "intrinsic-rewards", "run"]
    lacking = {impala: "intrinsic-rewards"}.get(script)
    assert titles == ["options", *(f"{title} options" for title in groups if title != lacking)]
    _, description, *_ = shown.out.split("\n\n")
    assert " ".join(description.split()) == script.__doc__.splitlines()[0]
    content = re.sub(r"[\s│]", "", shown.out)
    for name in (field.name for field in dataclasses.fields(script.Args)):
        text = help_of(script.Args, name)
        assert f"--{name.replace('_', '-')}" in content
        assert text, name
        assert re.sub(r"\s", "", text) in content, name


def help_of(args_class, name):
    """The string below the declaration of a setting, of the last class that declares it."""
    for parent in args_class.__mro__:
        declared = re.search(rf'^    {name}: .+\n    """([^"]+)"""', inspect.getsource(parent), re.M)
        if declared:
            return declared[1]


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--seed 3 --baseline-coef 0.7 --env-id x", {"seed": 3, "vf_coef": 0.7, "env_id": "x"}),
        ("--baseline-coef=0.7", {"vf_coef": 0.7}),
        ("--vf-coef 0.7", {"vf_coef": 0.7}),
        ("--preset paper --learning-rate 1e-3", {"preset": "paper", "learning_rate": 1e-3}),
        ("--learning-rate=1e-3 --preset=paper", {"preset": "paper", "learning_rate": 1e-3}),
        ("--preset appo --preset=paper", {"preset": "paper"}),  # of several the last one counts
    ],
)
def test_words_that_are_more_than_a_flag(words, given):
    """Another project's name of a flag, and presets."""
    expected = preset_args(impala.Args, **given) if "preset" in given else impala.Args(**given)
    assert parse(impala.Args, words.split()) == expected


def test_presets_are_defaults(tmp_path, capsys):
    """Flags beside a preset win, also with appo's value; the command repeats a run."""
    paper = preset_args(impala.Args, "paper", learning_rate=1e-3)
    assert (paper.num_steps, paper.learning_rate, paper.exp_name) == (20, 1e-3, "impala-paper")
    assert command(paper, "impala.py") == "python impala.py --preset paper --learning-rate 0.001"
    assert command(impala.Args(), "impala.py") == "python impala.py"
    assert impala.Args(**dataclasses.asdict(paper)) == paper
    assert [each.exp_name for each in (impala.Args(), ppg.Args(), ppo.Args())] == ["impala-appo", "ppg", "ppo"]
    openai = preset_args(ppg.Args, "paper", e_aux=3)
    assert (openai.arch, openai.whole_rollouts, openai.n_pi, openai.e_aux) == ("dual", True, 32, 3)
    assert openai.exp_name == "ppg-paper"
    assert command(openai, "ppg.py") == "python ppg.py --preset paper --e-aux 3"
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(impala.Args(seed=3))))
    changed = parse(impala.Args, ["--resume", str(tmp_path), "--preset", "paper"])
    assert changed == impala.Args(seed=3, preset="paper", resume=str(tmp_path))  # which `--resume` refuses
    with pytest.raises(SystemExit):
        parse(impala.Args, ["--preset", "paper", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "steps of an unroll (T) (default: 20)" in shown


def test_what_a_preset_is_not_is_told(tmp_path, capsys):
    small = {"env_id": "CartPole-v1", "num_envs": 4, "num_steps": 4, "total_timesteps": 16, "device": "cpu"}
    small |= {"batch_size": 4, "num_actors": 0, "runs_dir": str(tmp_path)}
    impala.main(preset_args(impala.Args, "paper", **small, num_minibatches=2, exp_name="mine"))
    note = "note: --preset paper with other values of --num-steps, --batch-size, --num-minibatches\n"
    assert capsys.readouterr().err == note
    impala.main(impala.Args(**small, num_minibatches=2))
    assert not capsys.readouterr().err


LIMITS = {  # settings: values within their limits, and outside
    "num_envs total_timesteps num_steps num_minibatches update_epochs clip_coef clip_coef_vf "
    "max_grad_norm target_kl feature_dim hidden_dim eval_episodes micro_batch_size keep_checkpoints e_policy e_value "
    "kl_penalty n_pi e_aux num_aux_rollouts num_aux_grad_accum batch_size queue_size log_interval": (
        [1, 1e-9], [0, -1]
    ),
    "learning_rate adam_eps ent_coef vf_coef intrinsic_coef eval_interval num_actors aux_learning_rate "
    "checkpoint_interval beta_clone rmsprop_eps num_levels start_level eval_num_levels eval_start_level": (
        [0, 1e9], [-1, -1e-9]
    ),
    "gamma gae_lambda norm_reward_gamma intrinsic_gamma vtrace_lambda sample_fraction": ([0, 1, 0.5], [1.5, -0.1]),
    "seed": ([0, 2**31 - 1], [-1, 2**31]),
}  # fmt: skip


@pytest.mark.quick
@ALL
def test_limits_and_choices_belong_to_the_fields(script):
    """A number without limits is checked elsewhere: Procgen's threads, by the environments; the bounds of V-trace."""
    hints = get_type_hints(script.Args)
    numbers = {name for name, hint in hints.items() if "int" in str(hint) or "float" in str(hint)}
    elsewhere = {"num_threads"} | ({"rho_bar", "c_bar", "pg_rho_bar"} if script is impala else set())
    assert numbers - set(" ".join(LIMITS).split()) == elsewhere
    for limited, (inside, outside) in LIMITS.items():
        for name in numbers & set(limited.split()):
            for value in inside:
                settings.check_limits(script.Args(**{name: value}))
            for value in (*outside, math.nan, math.inf, -math.inf):
                with pytest.raises(InputError, match=f"^--{name.replace('_', '-')} {value} cannot work: use "):
                    script.Args(**{name: value}).validate()
    choices = [name for name, hint in hints.items() if get_origin(hint) is Literal]
    assert {"precision", "init_fn", "norm_reward", "init_heads", "accelerate", "distribution_mode"} < {*choices}
    for name in choices:
        with pytest.raises(InputError, match=f"^--{name.replace('_', '-')} other is not known: use one of "):
            script.Args(**{name: "other"}).validate()
    for name in ("max_grad_norm", "clip_coef" if script is impala else "target_kl", "micro_batch_size"):
        settings.check_limits(script.Args(**{name: None}))
