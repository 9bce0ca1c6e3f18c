"""No flag is ignored: each that says what is learnt, and how, leaves other parameters behind."""

import dataclasses
import functools

import pytest

from helpers import ALL, SCRIPTS, parameters, small_args
from test_checkpoint import same

# Of runs this short everything is deterministic, IMPALA's with its actors in the learner's thread.
SMALL = {"num_steps": 8, "total_timesteps": 128, "learning_rate": 0.01, "n_pi": 4, "e_aux": 2}
# Another value of each flag
OTHERS = {
    "seed": 2, "env_id": "Acrobot-v1", "num_envs": 8, "total_timesteps": 192, "num_steps": 16,
    "learning_rate": 0.02, "anneal_lr": True, "aux_learning_rate": 0.02, "adam_eps": 0.1, "rmsprop_eps": 0.1,
    "halve_lr_at": 64, "optimizer": "rmsprop", "gamma": 0.5, "gae_lambda": 0.5, "vtrace_lambda": 0.5,
    "num_minibatches": 4, "sample_fraction": 0.5, "batch_size": 2, "update_epochs": 2, "e_policy": 2, "e_value": 2,
    "n_pi": 2, "e_aux": 3, "beta_clone": 0.0, "whole_rollouts": True, "num_aux_rollouts": 2, "num_aux_grad_accum": 2,
    "norm_adv": "none", "clip_coef": 1e-3, "clip_coef_vf": 1e-3, "kl_penalty": 1.0, "target_kl": 1e-9,
    "ent_coef": 0.5, "vf_coef": 0.1, "max_grad_norm": 1e-3, "norm_reward": "none", "norm_reward_gamma": 0.5,
    "intrinsic_reward": "rnd", "intrinsic_coef": 5.0, "intrinsic_gamma": 0.5, "pretraining": True,
    "arch": "shared", "use_lstm": True, "feature_dim": 32, "hidden_dim": 32, "init_fn": "identity",
}  # fmt: skip
# Settings that some flags need, which the run to compare with has, too
NEEDED = {name: {"intrinsic_reward": "rnd"} for name in ("intrinsic_coef", "intrinsic_gamma", "pretraining")}
NEEDED |= {"rmsprop_eps": {"optimizer": "rmsprop"}, "clip_coef_vf": {"e_value": 3}}
NEEDED |= {"target_kl": {"e_policy": 3, "e_value": 3}}
# The others change where and how fast a run is made, what is logged, or need more than this: other files test them.
ELSEWHERE = """
    exp_name torch_deterministic runs_dir capture_video track wandb_project_name wandb_entity device preset precision
    micro_batch_size accelerate resume init_from init_heads checkpoint_interval keep_checkpoints aux_frames
    eval_interval eval_episodes eval_num_levels eval_start_level distribution_mode num_levels start_level num_threads
    num_actors queue_size log_interval rho_bar c_bar pg_rho_bar frame_stack
    use_backgrounds restrict_themes use_monochrome_assets center_agent paint_vel_info use_generated_assets
    use_sequential_levels
"""


def learnt(script, folder, **settings):
    """The parameters of a run."""
    return parameters(script.main(small_args(script, folder, SMALL, **settings)))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Runs to compare with, each made once."""
    return functools.cache(lambda script, **settings: learnt(script, tmp_path_factory.mktemp("base"), **settings))


CASES = [(script, flag) for script in SCRIPTS for flag in OTHERS if hasattr(script.Args, flag)]


@pytest.mark.parametrize(("script", "flag"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_no_flag_is_ignored(script, flag, base, tmp_path):
    """It could not fail if runs of the same flags differed: test_evaluation holds that they do not."""
    needed = {name: value for name, value in NEEDED.get(flag, {}).items() if hasattr(script.Args, name)}
    before, after = base(script, **needed), learnt(script, tmp_path, **needed | {flag: OTHERS[flag]})
    assert not same(before, after)


@ALL
def test_every_flag_is_listed(script):
    for field in dataclasses.fields(script.Args):
        assert (field.name in OTHERS) != (field.name in ELSEWHERE.split()), field.name
