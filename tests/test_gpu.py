"""What only a CUDA GPU can show; skipped where there is none."""

import pytest
import torch

import impala
import ppg
import ppo
from common import device
from common.accelerate import accelerate
from helpers import parameters
from test_learning import FRAMES, learn
from test_training import short_args

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]
CUDA = torch.device("cuda")
SCRIPTS = pytest.mark.parametrize("script", [ppo, ppg, impala])


def make_args(script, tmp_path, **settings):
    """Three iterations, or updates."""
    if script is impala:
        settings = {"batch_size": 4, "queue_size": 4} | settings
    return short_args(script, tmp_path, device=CUDA.type, **settings)


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Convolutions in float32, not TF32, by kernels that repeat bit for bit."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@SCRIPTS
@pytest.mark.parametrize("mode", ["compile", "cudagraphs"])
def test_accelerate_has_the_results_of_eager(script, mode, monkeypatch):
    eager, eager_metrics = learn(script, FRAMES, torch.float32, 1e-4, device=CUDA)

    def prepare(agent):
        accelerate(agent, mode)
        monkeypatch.setattr(torch._dynamo.config, "suppress_errors", False)
        torch._dynamo.utils.counters.clear()

    fast, metrics = learn(script, FRAMES, torch.float32, 1e-4, device=CUDA, prepare=prepare)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert (fast - eager).norm() < 1e-3 * eager.norm()
    assert metrics == pytest.approx(eager_metrics, rel=1e-3, abs=1e-5)


@SCRIPTS
def test_the_gpu_learns_what_the_cpu_learns(script):
    cpu, cpu_metrics = learn(script, FRAMES, torch.float32, 1e-4)
    gpu, metrics = learn(script, FRAMES, torch.float32, 1e-4, device=CUDA)
    assert metrics.keys() == cpu_metrics.keys()
    assert torch.isfinite(gpu).all()
    assert 0.2 < gpu.norm() / cpu.norm() < 5  # other random minibatches


@SCRIPTS
@pytest.mark.parametrize("accelerate", ["eager", "compile", "cudagraphs"])
def test_a_run_in_each_mode(script, accelerate, tmp_path):
    settings = {"num_actors": 0} if script is impala and accelerate == "cudagraphs" else {}
    run_dir = script.main(make_args(script, tmp_path, accelerate=accelerate, precision="bf16", **settings))
    assert all(torch.isfinite(value).all() for value in parameters(run_dir).values())


@SCRIPTS
def test_same_seed_same_run_and_an_exact_resume(script, tmp_path):
    settings = {"checkpoint_interval": 0}
    if script is impala:
        settings |= {"num_actors": 0}
    whole, again = (parameters(script.main(make_args(script, tmp_path, **settings))) for _ in range(2))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    part = script.main(make_args(script, tmp_path, **settings, total_timesteps=64))
    args = make_args(script, tmp_path, **settings, resume=str(part))
    resumed = parameters(script.main(args))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_frames_in_pinned_host_memory_change_nothing(tmp_path, monkeypatch):
    on_gpu = parameters(ppg.main(make_args(ppg, tmp_path)))
    monkeypatch.setattr(device, "GPU_RESERVE", 1e15)
    on_host = parameters(ppg.main(make_args(ppg, tmp_path)))
    assert all(torch.equal(on_gpu[name], on_host[name]) for name in on_gpu)
