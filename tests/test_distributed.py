"""Several ranks, started by torchrun, learn what one process would from all of their experience."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from helpers import parameters
from test_checkpoint import check_same_run, resume
from test_run import read_scalars

from common.checkpoint import Resumed, newest_checkpoint
from common.device import resolve_device
from common.envs import RewardNormalizer
from common.errors import InputError
from common.world import ALONE, World

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TWO = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
SMALL = {
    "ppo": {"num_envs": 2, "num_steps": 8, "num_minibatches": 2},
    "ppg": {
        "env_id": "starpilot",
        "num_envs": 2,
        "num_steps": 8,
        "num_minibatches": 2,
        "n_pi": 3,
        "num_aux_rollouts": 2,
        "e_aux": 2,
    },
    "impala": {"num_envs": 2, "num_steps": 8, "batch_size": 2, "num_minibatches": 2, "num_actors": 0, "queue_size": 2},
}
ALL = pytest.mark.parametrize("script", SMALL)


def settings_of(script, runs_dir, **more):
    """8 iterations of 2 environments x 8 steps on each of 2 ranks."""
    small = {"env_id": "CartPole-v1", "device": "cpu", "seed": 4, "total_timesteps": 8 * 32, "checkpoint_interval": 0.0}
    return small | SMALL[script] | {"runs_dir": str(runs_dir)} | more


def words_of(settings):
    """The command line of settings."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def execute(command, *, returncode=0, env=None):
    """Run a command; returns what it has printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == returncode, result.stdout + result.stderr
    return result


def two_ranks(function, folder, *settings, options=()):
    return execute([*TWO, *options, "tests/ranks.py", function, str(folder), *map(json.dumps, settings)])


# ---------------------------------------------------------------------------------------------- the same gradient


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """What each of two ranks has learnt in each case."""
    folder = tmp_path_factory.mktemp("gradients")
    two_ranks("gradients", folder)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", ranks.CASES)
def test_two_ranks_learn_what_one_process_does_from_the_joined_batch(case, learnt):
    joined = ranks.learn(case, ALONE)
    torch.testing.assert_close(learnt[0][case], joined, rtol=1e-10, atol=1e-12)
    assert torch.equal(learnt[0][case], learnt[1][case])


def test_rewards_are_scaled_by_the_returns_of_all_ranks(learnt):
    rewards = np.random.default_rng(0).normal(size=(2, ranks.T, ranks.N))
    normalizer = RewardNormalizer(ranks.N, 0.9)
    joined = np.stack([normalizer(each, np.zeros((ranks.T, ranks.N))) for each in rewards])
    for rank, found in enumerate(learnt):
        np.testing.assert_allclose(found["scaled"], joined[..., ranks.OF_RANK[2][rank]], rtol=1e-6)


def test_gradients_are_sent_while_the_last_backward_pass_goes_on(tmp_path):
    two_ranks("overlap", tmp_path)
    order = json.loads((tmp_path / "order.json").read_text())
    first, second = order[: order.index("piece")], order[order.index("piece") + 1 :]
    assert "sent" not in first
    layers = ["3.weight", "3.bias", "2.weight", "2.bias", "1.weight", "1.bias", "0.weight", "0.bias"]
    assert sorted(each for each in second if each in layers) == sorted(layers)
    before_the_first_layer = second[: min(second.index("0.weight"), second.index("0.bias"))]
    assert before_the_first_layer.count("sent") >= 2
    assert order.count("sent") == 8  # and nothing of the layer that the loss does not depend on


# ------------------------------------------------------------------------------------------------------- whole runs


@ALL
def test_a_rank_that_is_killed_changes_nothing(script, tmp_path):
    """And meanwhile: all ranks have the same parameters in the end, and experience of their own."""
    settings = settings_of(script, tmp_path / "whole") | {"script": script, "eval_interval": 64, "eval_episodes": 2}
    (tmp_path / "after").mkdir()
    result = two_ranks("train", tmp_path, settings)
    (whole,) = (tmp_path / "whole").iterdir()
    states = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert all(torch.equal(states[0][name], value) for name, value in parameters(whole).items())
    assert result.stdout.count(f"{script} on ") == 1
    assert result.stdout.count("done: 256 steps") == 1
    with (whole / "episodes.csv").open() as file:
        episodes = [{name: int(float(value)) for name, value in row.items()} for row in csv.DictReader(file)]
    assert script == "ppg" or {row["env"] for row in episodes} == {0, 1, 2, 3}
    assert [row["step"] for row in episodes] == sorted(row["step"] for row in episodes)
    for env in range(4):  # every finished episode is there, at the step it ended at
        mine = [row for row in episodes if row["env"] == env]
        ends = np.cumsum([row["episodic_length"] for row in mine])
        assert (np.abs(4 * ends - [row["step"] for row in mine]) <= 4).all()
    of_rank = [[(row["env"] % 2, row["step"]) for row in episodes if row["env"] // 2 == rank] for rank in range(2)]
    assert script == "ppg" or of_rank[0] != of_rank[1]
    scalars = read_scalars(whole)
    assert all(0 <= value <= 1 for _, value in scalars["charts/communication"])
    if script == "impala":
        assert {tag for tag in scalars if "lag" in tag} == {
            f"charts/{tag}/rank{rank}" for tag in ("policy_lag", "policy_lag_max") for rank in range(2)
        }
        assert "rank 0: policy lag" in result.stdout
        assert "rank 1: policy lag" in result.stdout
    assert len((whole / "eval.csv").read_text().splitlines()) == 1 + 2 * 4

    settings = settings | {"runs_dir": str(tmp_path / "killed"), "kill": [int(script != "impala"), 160]}
    begin = time.monotonic()
    two_ranks("train", tmp_path / "after", settings, options=["--max-restarts", "1"])
    assert time.monotonic() - begin < 120
    (killed,) = (tmp_path / "killed").iterdir()
    resumed = json.loads((killed / "meta.json").read_text())["resumed"]
    assert [each["step"] for each in resumed] == [128]
    check_same_run(killed, whole)


def test_sigterm_and_resume_with_other_numbers_of_ranks(tmp_path):
    settings = settings_of("ppo", tmp_path, total_timesteps=10**6)
    process = subprocess.Popen(
        [*TWO, "ppo.py", *words_of(settings)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not any(len(path.read_text().splitlines()) > 3 for path in tmp_path.glob("*/progress.csv")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    (path,) = tmp_path.iterdir()
    assert f"resume with: torchrun --nproc-per-node 2 ppo.py --resume {path}" in output
    stopped_at = newest_checkpoint(path)["step"]
    saved = newest_checkpoint(path)
    assert len(saved["other_ranks"]) == 1
    assert saved["other_ranks"][0]["random"] != saved["random"]

    # two ranks again go on exactly
    copy = shutil.copytree(path, tmp_path / "copy")
    more = stopped_at + 4 * 32
    output = execute([*TWO, "ppo.py", "--resume", str(copy), "--total-timesteps", str(more)]).stdout
    assert f"2 ranks | resumed at step {stopped_at:,}" in output
    assert newest_checkpoint(copy)["step"] == more

    # one process draws other levels, and so do three ranks afterwards
    words = ["--nproc-per-node", "1", "ppo.py", "--resume", str(path), "--total-timesteps", str(stopped_at + 72)]
    result = execute([*TORCHRUN, "--standalone", *words])
    assert "note: another number of ranks (2 so far, now 1)" in result.stderr
    assert newest_checkpoint(path)["step"] == stopped_at + 80  # whole iterations of 16
    assert newest_checkpoint(path)["other_ranks"] == []
    assert read_scalars(path)["charts/episodic_return"][-1][0] <= stopped_at + 80
    words = ["--nproc-per-node", "3", "ppo.py", "--resume", str(path), "--total-timesteps", str(stopped_at + 180)]
    result = execute([*TORCHRUN, "--standalone", *words])
    assert result.stderr.count("note: another number of ranks (1 so far, now 3)") == 1
    checkpoint = newest_checkpoint(path)
    assert checkpoint["step"] == stopped_at + 80 + 3 * 48  # and no more: whole iterations from where it stood
    states = [each["loop"]["envs"] for each in (checkpoint, *checkpoint["other_ranks"])]
    assert len(states) == 3
    assert len({str([env["obs"] for env in envs]) for envs in states}) == 3
    with (path / "episodes.csv").open() as file:
        assert {int(row["env"]) for row in csv.DictReader(file) if int(row["step"]) > stopped_at + 80} <= set(range(6))


@pytest.mark.parametrize("script", ["ppg", "impala"])
def test_one_process_goes_on_with_a_run_of_two_ranks(script, tmp_path):
    """PPG's in mid-phase."""
    settings = settings_of(script, tmp_path / "runs", env_id="CartPole-v1") | {"script": script}
    two_ranks("train", tmp_path, settings | ({"num_actors": 1} if script == "impala" else {}))
    (path,) = (tmp_path / "runs").iterdir()
    resume(ranks.SCRIPTS[script], path, total_timesteps=8 * 32 + 5 * 16)
    checkpoint = newest_checkpoint(path)
    assert (checkpoint["step"], checkpoint["other_ranks"]) == (8 * 32 + 5 * 16, [])
    steps = [int(row.split(",")[0]) for row in (path / "progress.csv").read_text().splitlines()[1:]]
    assert steps[-1] == checkpoint["step"]
    if script == "ppg":  # 5 iterations in phases of 3, counted from the first
        assert len(checkpoint["loop"]["returns"]) == 2


def test_a_rank_that_dies_after_the_run_changes_nothing(tmp_path):
    settings = settings_of("ppo", tmp_path / "runs", total_timesteps=64) | {"script": "ppo", "kill": [1, None]}
    two_ranks("train", tmp_path, settings, options=["--max-restarts", "1"])
    (path,) = (tmp_path / "runs").iterdir()
    assert newest_checkpoint(path)["step"] == 64
    assert json.loads((path / "meta.json").read_text())["finished"]


def test_ranks_that_differ(tmp_path):
    """In a setting: one sentence. On one machine alone: that rank says so."""
    settings = settings_of("ppo", tmp_path / "runs") | {"script": "ppo"}
    for own, sentence in (
        ({"learning_rate": 0.1}, "error: --learning-rate is not the same on all ranks (0.0005, 0.1): make it so."),
        ({"runs_dir": "/proc/none"}, "rank 1: error: no run folder can be written in /proc/none"),
    ):
        command = [*TWO, "tests/ranks.py", "train", str(tmp_path), json.dumps(settings | {"on_rank_1": own})]
        lines = [line for line in execute(command, returncode=1).stderr.splitlines() if "error: " in line]
        assert [line.startswith(sentence) for line in lines if "elastic" not in line] == [True], lines


def test_bad_input_gets_one_sentence(tmp_path):
    """From the settings, from the folder (which rank 0 alone looks into), and from the environments."""
    for words, sentence in (
        (["--num-envs", "0"], "error: --num-envs 0 cannot work: use a number above 0."),
        (["--resume", str(tmp_path / "none")], f"error: --resume {tmp_path / 'none'}: no run folder"),
        (["--env-id", "starpilott"], "error: --env-id 'starpilott' is not known"),
    ):
        result = execute([*TWO, "ppo.py", "--runs-dir", str(tmp_path), *words], returncode=1)
        lines = [line for line in result.stderr.splitlines() if "error: " in line and "elastic" not in line]
        assert [line.startswith(sentence) for line in lines] == [True], result.stderr
    assert not list(tmp_path.iterdir())


def test_seeds_differ_by_rank_and_where_environments_are_drawn_anew():
    def seed(rank, checkpoint=None):
        world = World()
        world.rank = rank
        return world.seed(4, checkpoint and Resumed(None, None, checkpoint))

    assert seed(0) == seed(0, {"step": 64, "loop": {"envs": []}}) == 4
    anew = [{"step": step, "loop": None} for step in (64, 128)]
    assert len({seed(rank, checkpoint) for rank in range(100) for checkpoint in (None, *anew)}) == 300
    assert World().seed(5, None) == 5


def test_ranks_have_a_gpu_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:1")
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="which gives each its own"):
        resolve_device("cuda:0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # `torch.cuda.set_device` wants a number
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert resolve_device("auto") == resolve_device("cuda") == resolve_device("cuda:0") == torch.device("cuda:0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(InputError, match="3 ranks need a GPU each, and there are 2: lower --nproc-per-node"):
        resolve_device("auto")


@ALL
def test_a_single_process_imports_nothing_of_it(script, tmp_path):
    settings = settings_of(script, tmp_path, total_timesteps=32)
    code = f"import sys, {script}; {script}.main({script}.Args(**{settings!r})); print(sorted(sys.modules))"
    modules = execute([sys.executable, "-c", code]).stdout
    assert "'common.world'" in modules
    assert "'common.distributed'" not in modules


# --------------------------------------------------------------------------------------------------------- two hosts


def can_make_namespaces():
    """Whether this is root on a Linux with `ip netns`."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    made = subprocess.run(["ip", "netns", "add", "procgen-probe"], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", "procgen-probe"], capture_output=True)
    return made


@pytest.fixture
def two_hosts():
    """Two network namespaces that see each other, and nothing else, over a veth pair: names, interfaces, addresses."""
    if not can_make_namespaces():
        pytest.skip("needs root and ip netns")
    names = [f"procgen-{os.getpid()}-{number}" for number in range(2)]
    links, addresses = [f"pg{os.getpid() % 10**6}{end}" for end in "ab"], ["10.77.0.1", "10.77.0.2"]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        subprocess.run(["ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1]], check=True)
        for name, link, address in zip(names, links, addresses, strict=True):
            subprocess.run(["ip", "link", "set", link, "netns", name], check=True)
            inside = ["ip", "-n", name]
            subprocess.run([*inside, "addr", "add", f"{address}/24", "dev", link], check=True)
            for each in ("lo", link):
                subprocess.run([*inside, "link", "set", each, "up"], check=True)
        yield list(zip(names, links, addresses, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_two_hosts_train_together(two_hosts, tmp_path):
    """And go on together when a rank on the second has been killed."""
    settings = settings_of("ppo", tmp_path / "runs") | {"script": "ppo", "kill": [1, 160]}
    (_, _, first), processes = two_hosts[0], []
    for name, link, address in two_hosts:
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29400", "--rdzv-id", "test"]
        # torchrun would find out which host is the first by its name, which both have here
        rendezvous += ["--rdzv-conf", f"is_host={int(address == first)}"]
        words = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", *rendezvous]
        words += ["--local-addr", address]
        words += ["tests/ranks.py", "train", str(tmp_path), json.dumps(settings)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": link}
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *words],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    states = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    (path,) = (tmp_path / "runs").iterdir()
    meta = json.loads((path / "meta.json").read_text())
    resumed = [each["step"] for each in meta["resumed"]]
    assert (meta["ranks"], resumed) == (2, [128]), outputs  # and not once more at the end
    gradient = 4 * sum(value.numel() for value in states[0].values())
    for name, link, _ in two_hosts:
        statistics = json.loads(subprocess.check_output(["ip", "-n", name, "-s", "-j", "link", "show", link]))
        sent = statistics[0]["stats64"]["tx"]["bytes"]
        assert sent > gradient * 8 * 2 * 3 / 2  # of 8 iterations, 2 minibatches and 3 epochs: half a gradient each
