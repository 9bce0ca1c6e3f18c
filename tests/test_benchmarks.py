"""The scripts in benchmarks/."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import ppo

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import collect
import random_policy


def test_collect_copies_a_curve_and_its_origin(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "RESULTS", tmp_path / "results")
    args = ppo.Args(
        env_id="maze", num_levels=200, num_envs=4, num_steps=8, num_minibatches=2, total_timesteps=64, seed=3,
        runs_dir=str(tmp_path / "runs"), device="cpu",
    )  # fmt: skip
    run_dir = ppo.main(args)
    target = collect.collect(run_dir)
    assert target == tmp_path / "results" / "easy-200" / "ppo" / "maze" / "seed3.csv"
    with target.open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["32", "64"]
    assert "--num-levels 200" in json.loads((target.parent / "seed3.meta.json").read_text())["command"]
    assert collect.collect(run_dir) == target  # the same run again changes nothing
    curve = (run_dir / "progress.csv").read_text()
    (run_dir / "progress.csv").write_text(curve.replace("\n64,", "\n65,"))
    with pytest.raises(ValueError, match=r"seed3\.csv holds another run"):
        collect.collect(run_dir)
    (run_dir / "progress.csv").write_text(curve[: curve.index("\n64,")])
    with pytest.raises(ValueError, match="32 of 64 steps"):
        collect.collect(run_dir)


def test_collect_does_not_mix_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "RESULTS", tmp_path / "results")
    small = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 32, "runs_dir": str(tmp_path)}
    first, other_seed, other_rate = (
        ppo.main(ppo.Args(env_id="maze", **small, **settings))
        for settings in ({}, {"seed": 2}, {"seed": 3, "learning_rate": 1e-4})
    )
    assert collect.collect(first).parent == collect.collect(other_seed).parent
    with pytest.raises(ValueError, match="other settings"):
        collect.collect(other_rate)


def test_random_returns_have_the_quota_of_every_environment():
    returns = random_policy.random_returns("fruitbot", random_policy.Args(num_envs=4, episodes=3))
    assert returns.shape == (4, 3)
    assert np.isfinite(returns).all()
    assert len(np.unique(returns)) > 1
