"""Several ranks, as torchrun starts them, learn what one process would from all of their experience."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fast
import ppo
import ranks
from common import session
from common.checkpoint import newest_checkpoint
from common.device import resolve_device
from common.errors import InputError
from common.reward_scale import RewardNormalizer
from common.world import ProcessGroup, World
from fast import Fork
from helpers import parameters, read_csv
from ranks import Ranks
from test_checkpoint import check_same_run

SMALL = {
    "ppo": {},
    "ppg": {"n_pi": 3, "num_aux_rollouts": 2, "e_aux": 2},
    "impala": {"batch_size": 2, "num_actors": 0, "queue_size": 2},
}
ALL = pytest.mark.parametrize("script", SMALL)
pytestmark = pytest.mark.usefixtures("small_networks")


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
    assert forks[0].output.count(" on CartPole-v1, seed ") == forks[0].output.count("done: 512 steps") == 1
    assert forks[1].output == ""
    rows = read_csv(path / "episodes.csv")
    episodes = [{name: int(float(value)) for name, value in row.items()} for row in rows]
    assert {row["env"] for row in episodes} == {0, 1, 2, 3}
    assert [row["step"] for row in episodes] == sorted(row["step"] for row in episodes)
    for env in range(4):  # every finished episode is there, at the step it ended at
        mine = [row for row in episodes if row["env"] == env]
        ends = np.cumsum([row["episodic_length"] for row in mine])
        assert (np.abs(4 * ends - [row["step"] for row in mine]) <= 4).all()
    of_rank = [[(row["env"] % 2, row["step"]) for row in episodes if row["env"] // 2 == rank] for rank in range(2)]
    assert of_rank[0] != of_rank[1]
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


def torchrun(folder, words, settings, environment, network=None):
    """A process that does what torchrun does: in `folder` is what is printed and saved."""
    script = [ranks.__file__, "train", str(folder), json.dumps(settings)]
    return Fork(folder, ranks.torchrun, [*words, *script], environment, network)


def test_torchrun_starts_them_again(whole, tmp_path):
    settings = settings_of("ppo", tmp_path / "runs", kill=[1, 160])
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    with torchrun(tmp_path, words, settings, {}) as process:
        assert process.wait(120) == 0, process.output + process.errors
    (path,) = (tmp_path / "runs").iterdir()
    meta = json.loads((path / "meta.json").read_text())
    assert [each["step"] for each in meta["resumed"]] == [128]
    assert meta["command"].startswith("torchrun --nproc-per-node 2 ppo.py ")
    check_same_run(path, whole("ppo"))


def test_sigterm_and_resume(tmp_path):
    runs = tmp_path / "runs"
    words = words_of(settings_of("ppo", runs, total_timesteps=10**6))
    with Ranks(tmp_path / "two", 2).started(fast.run_script, "ppo", words) as forks:
        forks[0].wait_for(lambda: any(len(p.read_text().splitlines()) > 3 for p in runs.glob("*/progress.csv")))
        for fork in forks:
            fork.send(signal.SIGTERM)
        assert forks[0].wait() == 128 + signal.SIGTERM
        assert forks[1].wait() in (128 + signal.SIGTERM, 1)  # the latter where it finds the connection lost
    (path,) = runs.iterdir()
    assert f"resume with: torchrun --nproc-per-node 2 ppo.py --resume {path}" in forks[0].errors
    saved = newest_checkpoint(path)
    assert len(saved["ranks"]) == 2
    assert saved["ranks"][0]["random"] != saved["ranks"][1]["random"]
    words = ["--resume", str(path), "--total-timesteps", str(saved["step"] + 4 * 32)]
    forks = Ranks(tmp_path / "again", 2).run(fast.run_script, "ppo", words)
    assert f"resumed at step {saved['step']:,}" in forks[0].output
    assert newest_checkpoint(path)["step"] == saved["step"] + 4 * 32


def test_another_number_of_ranks_cannot_go_on(whole, tmp_path):
    path = Path(shutil.copytree(whole("ppo"), tmp_path / "run"))
    settings = json.loads((path / "args.json").read_text()) | {"resume": str(path), "total_timesteps": 9 * 32}
    with pytest.raises(InputError, match=f"^--resume {path}: that is a run of 2 ranks, not of 1.$"):
        ppo.main(ppo.Args(**settings))


def test_a_rank_that_dies_after_the_run_changes_nothing(tmp_path):
    settings = settings_of("ppo", tmp_path / "runs", env_id="CartPole-v1", total_timesteps=64, kill=[1, None])
    two = Ranks(tmp_path, 2)
    two.run(ranks.train, tmp_path, settings, statuses=[0, -signal.SIGKILL])
    two.run(ranks.train, tmp_path, settings)
    (path,) = (tmp_path / "runs").iterdir()
    assert newest_checkpoint(path)["step"] == 64
    assert json.loads((path / "meta.json").read_text())["finished"]


def check_refused(forks, sentence, first=0):
    """Each rank has printed one error, which starts so."""
    for rank, fork in enumerate(forks, start=first):
        lines = [line for line in fork.errors.splitlines() if "rror: " in line]
        assert [line.startswith(f"rank {rank}: error: {sentence}") for line in lines] == [True], fork.errors


def test_all_ranks_have_the_settings_of_rank_zero(whole, tmp_path):
    settings = settings_of("ppo", tmp_path / "runs", on_rank_1={"learning_rate": 0.1, "gamma": 0.5})
    Ranks(tmp_path, 2).run(ranks.train, tmp_path, settings)
    (path,) = (tmp_path / "runs").iterdir()
    check_same_run(path, whole("ppo"))


def test_settings_of_the_machine_are_a_rank_s_own():
    """And only rank zero films and tracks."""
    shared, own = ppo.Args(gamma=0.5, capture_video=True, track=True, device="cuda"), ppo.Args(gamma=0.7, num_threads=9)
    rank_1 = SimpleNamespace(rank=1, broadcast=lambda args: shared)
    assert ProcessGroup.share_settings(rank_1, own) == ppo.Args(gamma=0.5, num_threads=9)
    rank_0 = SimpleNamespace(rank=0, broadcast=lambda args: args)
    assert ProcessGroup.share_settings(rank_0, shared) is shared


def test_what_one_machine_lacks_is_told_there(tmp_path):
    """torchrun stops the other rank then, which waits for this one."""
    settings = settings_of("ppo", tmp_path / "runs", env_id="CartPole-v1", on_rank_1={"device": "tpu"})
    with Ranks(tmp_path, 2).started(ranks.train, tmp_path, settings) as (waiting, lacking):
        assert lacking.wait() == 2
        assert waiting.process.is_alive()
    check_refused([lacking], "--device 'tpu' is not known", first=1)
    assert not (tmp_path / "runs").exists()


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


def test_seeds_differ_by_rank(monkeypatch):
    def seed(rank):
        world = World()
        world.rank = rank
        monkeypatch.setattr(session, "init_world", lambda device: world)
        return session.Session(ppo.Args(seed=4, device="cpu"), "ppo.py").seed

    assert seed(0) == 4
    assert len({seed(rank) for rank in range(30)}) == 30


def test_ranks_have_a_gpu_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:1")
    assert resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert resolve_device("auto") == torch.device("cuda:0")  # `torch.cuda.set_device` wants a number
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match=r"cuda:2.* 2 CUDA GPUs"):
        resolve_device("auto")


# --------------------------------------------------------------------------------------------------------- two hosts


@pytest.fixture
def two_hosts():
    """Two network namespaces that see each other, and nothing else, over a veth pair: names, interfaces, addresses."""
    if not shutil.which("ip"):
        pytest.skip("needs ip netns")
    names = [f"procgen-{os.getpid()}-{number}" for number in range(2)]
    links, addresses = [f"pg{os.getpid() % 10**6}{end}" for end in "ab"], ["10.77.0.1", "10.77.0.2"]
    try:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name]).returncode:
                pytest.skip("needs root")
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
    """And end when a rank on the second has been killed, and go on when they are started again."""
    (_, _, first), outputs = two_hosts[0], []
    for number, change in enumerate(({"kill": [1, 160]}, {"resume": "auto"})):
        settings = settings_of("ppo", tmp_path / "runs", **change)
        with contextlib.ExitStack() as stack:
            processes = []
            for name, link, address in two_hosts:
                words = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", address, "--rdzv-id", f"{number}"]
                words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{29400 + number}"]
                # torchrun would find out which host is the first by its name, which both have here
                words += ["--rdzv-conf", f"is_host={int(address == first)}"]
                host = torchrun(tmp_path / name, words, settings, {"GLOO_SOCKET_IFNAME": link}, network=name)
                processes.append(stack.enter_context(host))
            ends = [each.wait(60) for each in processes]
            outputs += [each.output + each.errors for each in processes]
        assert [end == 0 for end in ends] == [number == 1] * 2, outputs
    states = [torch.load(tmp_path / name / f"rank{rank}.pt") for rank, (name, *_) in enumerate(two_hosts)]
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
