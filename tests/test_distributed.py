"""Several ranks, as torchrun starts them, learn what one process would from all of their experience."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fast
import numpy as np
import pytest
import ranks
import torch
from fast import Fork
from helpers import parameters
from ranks import Ranks
from test_checkpoint import check_same_run, resume
from test_run import read_scalars

import ppo
from common import session
from common.checkpoint import newest_checkpoint
from common.device import resolve_device
from common.errors import InputError
from common.resume import Resumed
from common.reward_scale import RewardNormalizer
from common.world import World

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SMALL = {
    "ppo": {},
    "ppg": {"n_pi": 3, "num_aux_rollouts": 2, "e_aux": 2},
    "impala": {"batch_size": 2, "num_actors": 0, "queue_size": 2},
}
ALL = pytest.mark.parametrize("script", SMALL)


@pytest.fixture(scope="module", autouse=True)
def _fast_runs():
    fast.start_server()
    with fast.small_networks():
        yield


def settings_of(script, runs_dir, **more):
    """8 iterations of 2 environments x 8 steps on each of 2 ranks."""
    small = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 8 * 32, "feature_dim": 16}
    small |= {"env_id": "bossfight", "device": "cpu", "seed": 4, "checkpoint_interval": 0.0}
    return {"script": script, **small, **SMALL[script], "runs_dir": str(runs_dir)} | more


def words_of(settings):
    """The command line of settings."""
    named = {name: value for name, value in settings.items() if name != "script"}
    return [word for name, value in named.items() for word in (f"--{name.replace('_', '-')}", str(value))]


# ---------------------------------------------------------------------------------------------- the same gradient


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """What each of two ranks has learnt in each case."""
    folder = tmp_path_factory.mktemp("gradients")
    Ranks(folder, 2).run(ranks.gradients, folder)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", ranks.CASES)
def test_two_ranks_learn_what_one_process_does_from_the_joined_batch(case, learnt):
    joined = ranks.learn(case, World())
    torch.testing.assert_close(learnt[0][case], joined, rtol=1e-10, atol=1e-12)
    assert torch.equal(learnt[0][case], learnt[1][case])


def test_rewards_are_scaled_by_the_returns_of_all_ranks(learnt):
    rewards = np.random.default_rng(0).normal(size=(2, ranks.T, ranks.N))
    normalizer = RewardNormalizer(ranks.N, 0.9)
    joined = np.stack([normalizer(each, np.zeros((ranks.T, ranks.N))) for each in rewards])
    for rank, found in enumerate(learnt):
        np.testing.assert_allclose(found["scaled"], joined[..., ranks.OF_RANK[2][rank]], rtol=1e-6)


def test_ranks_whose_parameters_differ_are_told(learnt):
    assert all(found["drift"].startswith("the ranks no longer have the same parameters") for found in learnt)


# ------------------------------------------------------------------------------------------------------- whole runs


@ALL
def test_a_run_of_two_ranks(script, tmp_path):
    """All ranks have the same parameters in the end, and experience of their own, which one folder holds."""
    settings = settings_of(script, tmp_path / "runs", env_id="CartPole-v1", num_steps=16, total_timesteps=8 * 64)
    settings |= {"eval_interval": 128, "eval_episodes": 2}
    forks = Ranks(tmp_path, 2).run(ranks.train, tmp_path, settings)
    (path,) = (tmp_path / "runs").iterdir()
    states = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert all(torch.equal(states[0][name], value) for name, value in parameters(path).items())
    assert forks[0].output.count(f"{script} on ") == forks[0].output.count("done: 512 steps") == 1
    assert forks[1].output == ""
    with (path / "episodes.csv").open() as file:
        episodes = [{name: int(float(value)) for name, value in row.items()} for row in csv.DictReader(file)]
    assert {row["env"] for row in episodes} == {0, 1, 2, 3}
    assert [row["step"] for row in episodes] == sorted(row["step"] for row in episodes)
    for env in range(4):  # every finished episode is there, at the step it ended at
        mine = [row for row in episodes if row["env"] == env]
        ends = np.cumsum([row["episodic_length"] for row in mine])
        assert (np.abs(4 * ends - [row["step"] for row in mine]) <= 4).all()
    of_rank = [[(row["env"] % 2, row["step"]) for row in episodes if row["env"] // 2 == rank] for rank in range(2)]
    assert of_rank[0] != of_rank[1]
    scalars = read_scalars(path)
    assert all(0 <= value <= 1 for _, value in scalars["charts/communication"])
    lags = {"charts/policy_lag", "charts/policy_lag_max"} if script == "impala" else set()
    assert {tag for tag in scalars if "lag" in tag} == lags
    assert len((path / "eval.csv").read_text().splitlines()) == 1 + 2 * 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs of two ranks that nothing has disturbed, each made once."""
    made = {}

    def make(script):
        if script not in made:
            folder = tmp_path_factory.mktemp("whole")
            Ranks(folder, 2).run(ranks.train, folder, settings_of(script, folder / "runs"))
            (made[script],) = (folder / "runs").iterdir()
        return made[script]

    return make


@ALL
def test_a_rank_that_is_killed_changes_nothing(script, whole, tmp_path):
    """The other one stops, too, and both go on with their run when they are started again. In PPG's mid-phase.

    Of IMPALA it is rank zero, of PPG it is rank zero that keeps the store: what it knew of the run is lost.
    """
    killed, settings = int(script != "impala"), settings_of(script, tmp_path / "runs")
    two = Ranks(tmp_path, 2, agent_store=script != "ppg")
    statuses = [1, 1]
    statuses[killed] = -signal.SIGKILL
    forks = two.run(ranks.train, tmp_path, settings | {"kill": [killed, 160]}, statuses=statuses)
    assert f"rank {1 - killed}: error: the connection to another rank is lost" in forks[1 - killed].errors
    two.run(ranks.train, tmp_path, settings | {"kill": [killed, 160]})
    (path,) = (tmp_path / "runs").iterdir()
    resumed = json.loads((path / "meta.json").read_text())["resumed"]
    assert [each["step"] for each in resumed] == [128]
    check_same_run(path, whole(script))


def test_torchrun_starts_them_again(whole, tmp_path):
    settings = settings_of("ppo", tmp_path / "runs", kill=[1, 160])
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["tests/ranks.py", "train", str(tmp_path), json.dumps(settings)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CXX": "false"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = (tmp_path / "runs").iterdir()
    meta = json.loads((path / "meta.json").read_text())
    assert [each["step"] for each in meta["resumed"]] == [128]
    assert meta["command"].startswith("torchrun --nproc-per-node 2 ppo.py ")
    check_same_run(path, whole("ppo"))


def test_sigterm_and_resume_with_other_numbers_of_ranks(tmp_path):
    runs = tmp_path / "runs"
    words = words_of(settings_of("ppo", runs, total_timesteps=10**6))
    with Ranks(tmp_path / "two", 2).started(fast.run_script, "ppo", words) as forks:
        forks[0].wait_for(lambda: any(len(p.read_text().splitlines()) > 3 for p in runs.glob("*/progress.csv")))
        for fork in forks:
            fork.send(signal.SIGTERM)
        assert forks[0].wait() == 128 + signal.SIGTERM
        assert forks[1].wait() in (128 + signal.SIGTERM, 1)  # the latter where it finds the connection lost
    (path,) = runs.iterdir()
    assert f"resume with: torchrun --nproc-per-node 2 ppo.py --resume {path}" in forks[0].output
    saved = newest_checkpoint(path)
    stopped_at = saved["step"]
    assert len(saved["ranks"]) == 2
    assert saved["ranks"][0]["random"] != saved["ranks"][1]["random"]

    def go_on(number, folder, steps):
        words = ["--resume", str(folder), "--total-timesteps", str(stopped_at + steps)]
        forks = Ranks(tmp_path / f"{number}-{steps}", number).run(fast.run_script, "ppo", words)
        return forks[0].output, forks[0].errors, newest_checkpoint(folder)

    copy = shutil.copytree(path, tmp_path / "copy")
    output, errors, checkpoint = go_on(2, copy, 4 * 32)
    assert f"2 ranks | resumed at step {stopped_at:,}" in output
    assert "note: another number of ranks" not in errors
    assert checkpoint["step"] == stopped_at + 4 * 32

    # one process draws other levels, and so do three ranks afterwards
    output, errors, checkpoint = go_on(1, path, 72)
    assert "note: another number of ranks (2 so far, now 1)" in errors
    assert checkpoint["step"] == stopped_at + 80  # whole iterations of 16
    assert len(checkpoint["ranks"]) == 1
    assert all(step <= stopped_at + 80 for step, _ in read_scalars(path).get("charts/episodic_return", []))
    output, errors, checkpoint = go_on(3, path, 180)
    assert errors.count("note: another number of ranks (1 so far, now 3)") == 1
    assert checkpoint["step"] == stopped_at + 80 + 3 * 48  # and no more: whole iterations from where it stood
    seen = [torch.stack([env["obs"] for env in each["envs"]["states"]]) for each in checkpoint["ranks"]]
    assert len({obs.numpy().tobytes() for obs in seen}) == 3
    with (path / "episodes.csv").open() as file:
        assert {int(row["env"]) for row in csv.DictReader(file) if int(row["step"]) > stopped_at + 80} <= set(range(6))


@pytest.mark.parametrize("script", ["ppg", "impala"])
def test_one_process_goes_on_with_a_run_of_two_ranks(script, whole, tmp_path):
    """PPG's with an auxiliary phase after 3 iterations of its own, and at the end."""
    path = Path(shutil.copytree(whole(script), tmp_path / "run"))
    resume(ranks.SCRIPTS[script], path, total_timesteps=8 * 32 + 5 * 16)
    checkpoint = newest_checkpoint(path)
    assert (checkpoint["step"], len(checkpoint["ranks"])) == (8 * 32 + 5 * 16, 1)
    steps = [int(row.split(",")[0]) for row in (path / "progress.csv").read_text().splitlines()[1:]]
    assert steps[-1] == checkpoint["step"]
    if script == "ppg":
        phases = [step for step, _ in read_scalars(path)["losses/aux/kl_loss"]]
        assert phases == [3 * 32, 6 * 32, 8 * 32, 8 * 32 + 3 * 16, 8 * 32 + 5 * 16]


def test_a_rank_that_dies_after_the_run_changes_nothing(tmp_path):
    settings = settings_of("ppo", tmp_path / "runs", env_id="CartPole-v1", total_timesteps=64, kill=[1, None])
    two = Ranks(tmp_path, 2)
    two.run(ranks.train, tmp_path, settings, statuses=[0, -signal.SIGKILL])
    two.run(ranks.train, tmp_path, settings)
    (path,) = (tmp_path / "runs").iterdir()
    assert newest_checkpoint(path)["step"] == 64
    assert json.loads((path / "meta.json").read_text())["finished"]


def check_refused(forks, sentence):
    """Each rank has printed one error, which starts so."""
    for rank, fork in enumerate(forks):
        lines = [line for line in fork.errors.splitlines() if "rror: " in line]
        assert [line.startswith(f"rank {rank}: error: {sentence}") for line in lines] == [True], fork.errors


def test_ranks_with_other_settings_are_refused(tmp_path):
    settings = settings_of("ppo", tmp_path / "runs", env_id="CartPole-v1", on_rank_1={"learning_rate": 0.1})
    forks = Ranks(tmp_path, 2).run(ranks.train, tmp_path, settings, statuses=[2, 2])
    check_refused(forks, "--learning-rate is not the same on all ranks (0.0005, 0.1): make it so.")
    assert not (tmp_path / "runs").exists()


def test_what_one_machine_lacks_is_told_there(tmp_path):
    """torchrun stops the other rank then, which waits for this one."""
    settings = settings_of("ppo", tmp_path / "runs", env_id="CartPole-v1", on_rank_1={"runs_dir": "/proc/none"})
    two = Ranks(tmp_path, 2)
    with two.started(ranks.train, tmp_path, settings) as (waiting, lacking):
        assert lacking.wait() == 2
        waiting.wait_for(lambda: two.store.check(["name/0"]))
        waiting.send(signal.SIGTERM)
        assert waiting.wait() == 128 + signal.SIGTERM
    assert lacking.errors.startswith("rank 1: error: no run folder can be written in /proc/none"), lacking.errors
    assert waiting.errors == "stopped by SIGTERM\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--num-envs", "0"], "--num-envs 0 cannot work: use a number above 0."),
        (["--resume", "nowhere"], "--resume nowhere: no run folder"),  # which rank zero alone looks into
        (["--env-id", "starpilott"], "--env-id 'starpilott' is not known"),
    ],
    ids=["settings", "folder", "environments"],
)
def test_bad_input_gets_one_sentence(words, sentence, tmp_path):
    words = ["--runs-dir", str(tmp_path / "runs"), *words]
    forks = Ranks(tmp_path, 2).run(fast.run_script, "ppo", words, statuses=[2, 2])
    check_refused(forks, sentence)
    assert not (tmp_path / "runs").exists()


def test_seeds_differ_by_rank_and_where_environments_are_drawn_anew(monkeypatch):
    def seed(rank, step=None, **own):
        world = World()
        world.rank = rank
        checkpoint = {"step": step, "ranks": [own]}
        monkeypatch.setattr(session, "init_world", lambda device: world)
        monkeypatch.setattr(session, "find_run", lambda *args: step and Resumed(Path(), None, checkpoint))
        return session.Session(ppo.Args(seed=4, device="cpu"), "ppo.py").seed

    assert seed(0) == seed(0, 64, random={}) == 4
    assert len({seed(rank, step) for rank in range(30) for step in (None, 64, 128)}) == 90


def test_ranks_have_a_gpu_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:1")
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="is one GPU for 2 ranks: use --device cuda"):
        resolve_device("cuda:0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # `torch.cuda.set_device` wants a number
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert resolve_device("auto") == resolve_device("cuda") == resolve_device("cuda:0") == torch.device("cuda:0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(InputError, match="3 ranks need a GPU each, and there are 2: lower --nproc-per-node"):
        resolve_device("auto")


def run_all_scripts(runs_dir):
    for name, script in ranks.SCRIPTS.items():
        settings = settings_of(name, runs_dir, env_id="CartPole-v1", total_timesteps=32)
        settings.pop("script")
        script.main(script.Args(**settings))
    print("modules:", *sorted(sys.modules))


def test_a_single_process_imports_nothing_of_it(tmp_path):
    fork = Fork(tmp_path, run_all_scripts, tmp_path / "runs")
    assert fork.wait() == 0, fork.errors
    modules = fork.output.rpartition("modules: ")[2].split()
    assert "common.world" in modules
    assert "common.distributed" not in modules


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
    settings = settings_of("ppo", tmp_path / "runs", kill=[1, 160])
    (_, _, first), processes = two_hosts[0], []
    for name, link, address in two_hosts:
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29400", "--rdzv-id", "test"]
        # torchrun would find out which host is the first by its name, which both have here
        rendezvous += ["--rdzv-conf", f"is_host={int(address == first)}"]
        words = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", *rendezvous]
        words += ["--local-addr", address]
        words += ["tests/ranks.py", "train", str(tmp_path), json.dumps(settings)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CXX": "false", "GLOO_SOCKET_IFNAME": link}
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
