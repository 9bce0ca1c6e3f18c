"""What the scripts share around their loops: settings and their command line, and the end of a run."""

import dataclasses
import inspect
import json
import math
import re
import time
from typing import Literal, get_origin, get_type_hints

import pytest
import torch

import impala
import ppg
import ppo
from common import InputError, evaluation, settings
from common.checkpoint import differences
from common.envs import Envs
from common.run import command
from common.session import Session
from common.settings import parse, preset_args
from helpers import ALL, small_args


def make_args(script, runs_dir, **settings):
    return small_args(script, runs_dir, {"num_steps": 4}, **settings)


@pytest.mark.parametrize("num_actors", [0, 2])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize(("place", "name", "more"), [(impala, "update", 0), (evaluation, "play", 1)])
def test_an_error_closes_all_environments(place, name, more, error, num_actors, tmp_path, monkeypatch):
    """An evaluation has environments of its own."""
    opened, init, close = [], Envs.__init__, Envs.close
    monkeypatch.setattr(Envs, "__init__", lambda envs, *a, **named: opened.append(envs) or init(envs, *a, **named))
    monkeypatch.setattr(Envs, "close", lambda envs, **named: opened.remove(envs) or close(envs, **named))

    def fail(*args):
        assert len(opened) == max(1, num_actors) + more
        raise error("in mid-run")

    monkeypatch.setattr(place, name, fail)
    args = make_args(impala, tmp_path, eval_interval=16, eval_episodes=1, num_actors=num_actors, queue_size=4)
    with pytest.raises(error, match="in mid-run"):
        impala.main(args)
    assert not opened


def test_vectors_need_one_thread(tmp_path, monkeypatch):
    """Unless the user says otherwise. The next run of this process has as many as before."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", lambda count: calls.append((env_id, count)))
    for env_id in ("maze", "CartPole-v1"):
        with Session(make_args(ppo, tmp_path, env_id=env_id), "ppo.py", ppo.make_envs) as session:
            session.make_envs()
            monkeypatch.setenv("OMP_NUM_THREADS", "2")
            session.make_envs()
            monkeypatch.delenv("OMP_NUM_THREADS")
    assert calls == [("maze", 7), ("CartPole-v1", 1), ("CartPole-v1", 7)]


@ALL
def test_help(script, monkeypatch, capsys):
    """Every flag is there, with the string below its declaration."""
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        parse(script.Args, ["--help"])
    assert not end.value.code
    content = re.sub(r"[\s│]", "", capsys.readouterr().out)
    assert re.sub(r"\s", "", script.__doc__.splitlines()[0]) in content
    for title in ("algorithm", "environment", "network", "run"):
        assert f"{title}options" in content
    source = "".join(inspect.getsource(parent) for parent in script.Args.__mro__[:-1])
    for field in dataclasses.fields(script.Args):
        assert f"--{field.name.replace('_', '-')}" in content
        text = re.search(rf'^    {field.name}: .+\n    """([^"]+)"""', source, re.M)[1]
        assert re.sub(r"\s", "", text) in content, field.name


@pytest.mark.parametrize("function", ["ppo.update", "common.session.Evaluator.__call__"])
def test_dropped_steps_do_not_count_in_a_stopped_run(function, tmp_path, monkeypatch, capsys):
    def wait_in_vain(*args):
        time.sleep(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(function, wait_in_vain)
    with pytest.raises(KeyboardInterrupt):
        ppo.main(make_args(ppo, tmp_path, num_steps=64, eval_interval=1))
    assert "stopped: 0 steps in 0:00:00 (0 steps/s), 0 episodes, last 100: no episode logged" in capsys.readouterr().out


def test_presets_are_defaults(tmp_path, capsys):
    """Flags before and after a preset win, and the command repeats a run. What a preset is not is told. Another
    project's name of a flag is known."""
    assert parse(impala.Args, ["--seed", "3", "--baseline-coef", "0.7"]) == impala.Args(seed=3, vf_coef=0.7)
    paper = preset_args(impala.Args, "paper", learning_rate=1e-3)
    for words in ("--preset paper --learning-rate 1e-3", "--learning-rate=1e-3 --preset=paper"):
        assert parse(impala.Args, words.split()) == paper
    assert (paper.num_steps, paper.learning_rate, paper.exp_name) == (20, 1e-3, "impala-paper")
    assert command(paper, "impala.py") == "python impala.py --preset paper --learning-rate 0.001"
    assert command(impala.Args(), "impala.py") == "python impala.py"
    openai = preset_args(ppg.Args, "paper", e_aux=3)
    assert (openai.arch, openai.whole_rollouts, openai.n_pi, openai.e_aux) == ("dual", True, 32, 3)
    assert command(openai, "ppg.py") == "python ppg.py --preset paper --e-aux 3"
    long = preset_args(ppg.Args, "long")
    assert (long.arch, long.whole_rollouts, long.n_pi, long.e_aux) == ("detach", True, 32, 6)
    names = [each.exp_name for each in (impala.Args(), openai, long, ppg.Args(), ppo.Args())]
    assert names == ["impala-appo", "ppg-paper", "ppg-long", "ppg", "ppo"]
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(impala.Args(seed=3))))
    changed = parse(impala.Args, ["--resume", str(tmp_path), "--preset", "paper"])
    there = {"resume": str(tmp_path), "runs_dir": str(tmp_path.parent)}  # not where a file says
    assert changed == impala.Args(seed=3, preset="paper", **there)  # which `--resume` refuses
    for args in (paper, impala.Args(halve_lr_at=None)):
        older = {name: value for name, value in dataclasses.asdict(args).items() if name != "halve_lr_at"}
        (tmp_path / "args.json").write_text(json.dumps(older))  # of a version without this flag
        read = parse(impala.Args, ["--resume", str(tmp_path)])
        assert dataclasses.replace(read, resume=None, runs_dir="runs") == args
        assert differences(args, older, set()) == []
    assert differences(impala.Args(), older, set()) == ["halve_lr_at"]
    (tmp_path / "args.json").write_text('{"num_envs": null}')
    with pytest.raises(InputError, match="use the script that made it"):
        parse(impala.Args, ["--resume", str(tmp_path)])
    own = {"env_id": "CartPole-v1", "total_timesteps": 16, "device": "cpu", "runs_dir": str(tmp_path)}
    own |= {"num_actors": 0, "num_envs": 4, "batch_size": 4, "num_steps": 4}
    impala.main(preset_args(impala.Args, "paper", **own, exp_name="mine"))
    assert capsys.readouterr().err == "note: --preset paper with other values of --num-steps, --batch-size\n"


LIMITS = {  # settings: values within their limits, and outside
    "num_envs total_timesteps num_steps num_minibatches update_epochs clip_coef clip_coef_vf max_grad_norm "
    "target_kl feature_dim hidden_dim eval_episodes micro_batch_size keep_checkpoints e_policy e_value kl_penalty n_pi "
    "e_aux num_aux_rollouts num_aux_grad_accum batch_size queue_size log_interval halve_lr_at": ([1, 1e-9], [0, -1]),
    "learning_rate adam_eps ent_coef vf_coef intrinsic_coef eval_interval num_actors aux_learning_rate beta_clone "
    "checkpoint_interval rmsprop_eps num_levels start_level eval_num_levels eval_start_level": ([0, 1e9], [-1, -1e-9]),
    "gamma gae_lambda norm_reward_gamma intrinsic_gamma vtrace_lambda sample_fraction": ([0, 1, 0.5], [1.5, -0.1]),
    "seed": ([0, 2**31 - 1], [-1, 2**31]),
    "frame_stack": ([1, 1000], [0, 1001]),
}  # fmt: skip


@pytest.mark.quick
@ALL
def test_limits_and_choices_belong_to_the_fields(script):
    """A number without limits is checked elsewhere: Procgen's threads, by the environments; the bounds of V-trace."""
    hints = get_type_hints(script.Args)
    numbers = {name for name, hint in hints.items() if "int" in str(hint) or "float" in str(hint)}
    assert numbers - set(" ".join(LIMITS).split()) <= {"num_threads", "rho_bar", "c_bar", "pg_rho_bar"}
    for limited, (inside, outside) in LIMITS.items():
        for name in numbers & set(limited.split()):
            for value in inside:
                settings.check_limits(script.Args(**{name: value}))
            for value in (*outside, math.nan, math.inf, -math.inf):
                with pytest.raises(InputError, match=f"^--{name.replace('_', '-')} {value} cannot work: use "):
                    script.Args(**{name: value}).validate()
    for name in (name for name, hint in hints.items() if get_origin(hint) is Literal):
        with pytest.raises(InputError, match=f"^--{name.replace('_', '-')} other is not known: use one of "):
            script.Args(**{name: "other"}).validate()
