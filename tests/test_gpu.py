"""What only a CUDA GPU can show; skipped where there is none."""

import copy

import pytest
import torch

import impala
import ppg
import ppo
from common import TrainingError, device
from common.fast import accelerate
from common.fast.graphs import Playback, Recorded
from common.fast.modules import FastBlock, FastSequential
from helpers import ALL, parameters, small_args
from test_learning import ACTIONS, FRAMES, learn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]
CUDA = torch.device("cuda")


def make_args(script, tmp_path, **settings):
    """Three iterations, or updates."""
    sizes = {"num_steps": 8, "total_timesteps": 96, "n_pi": 2, "queue_size": 4, "log_interval": 16_384}
    return small_args(script, tmp_path, sizes, **{"env_id": "starpilot", "device": CUDA.type} | settings)


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Convolutions in float32, not TF32, by kernels that repeat bit for bit."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@ALL
def test_a_compiled_encoder_learns_as_an_eager_one(script, monkeypatch):
    eager, eager_metrics = learn(script, FRAMES, torch.float32, 1e-4, device=CUDA)

    def prepare(agent):
        accelerate(agent, "compile")
        monkeypatch.setattr(torch._dynamo.config, "suppress_errors", False)
        torch._dynamo.utils.counters.clear()

    fast, metrics = learn(script, FRAMES, torch.float32, 1e-4, device=CUDA, prepare=prepare)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert (fast - eager).norm() < 1e-3 * eager.norm()
    assert metrics == pytest.approx(eager_metrics, rel=1e-3, abs=1e-5)


def test_the_kernels_are_as_exact_as_cudnns():
    """Features and gradients in bfloat16 against those in float32; the same again and again."""
    frames = torch.randint(0, 256, (37, *FRAMES.shape), dtype=torch.uint8, device=CUDA)

    def results(precision, mode):
        torch.manual_seed(0)
        agent = ppo.Agent(FRAMES, ACTIONS, ppo.Args(precision=precision, init_fn="orthogonal")).to(CUDA)
        accelerate(agent, mode)
        taken = sum(isinstance(layer, FastSequential | FastBlock) for layer in agent.modules())
        assert taken == (7 if mode == "cudagraphs" else 0)
        features = agent.encode(agent.encoder, frames)
        features.square().sum().backward()
        return [features.detach(), *(p.grad for p in agent.encoder.parameters())]

    modes = ("fp32", "eager"), ("bf16", "eager"), ("bf16", "cudagraphs"), ("bf16", "cudagraphs")
    for exact, cudnns, ours, again in zip(*(results(*each) for each in modes), strict=True):
        assert torch.equal(ours, again)
        assert (ours - exact).norm() < 1.5 * (cudnns - exact).norm() + 1e-3 * exact.norm()
        assert (cudnns - exact).norm() < 0.2 * exact.norm()


@ALL
@pytest.mark.parametrize("accelerate", ["eager", "compile", "cudagraphs"])
def test_a_run_in_each_mode(script, accelerate, tmp_path):
    settings = {"eval_interval": 1, "eval_episodes": 1} | ({"num_actors": 2} if script is impala else {})
    run_dir = script.main(make_args(script, tmp_path, accelerate=accelerate, precision="bf16", **settings))
    assert all(torch.isfinite(value).all() for value in parameters(run_dir).values())


@ALL
@pytest.mark.parametrize("accelerate", ["eager", "cudagraphs"])
def test_same_seed_same_run_and_an_exact_resume(script, accelerate, tmp_path):
    settings = {"checkpoint_interval": 0, "accelerate": accelerate}
    whole, again = (parameters(script.main(make_args(script, tmp_path, **settings))) for _ in range(2))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    part = script.main(make_args(script, tmp_path, **settings, total_timesteps=64))
    resumed = parameters(script.main(make_args(script, tmp_path, **settings, resume=str(part))))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@ALL
@pytest.mark.parametrize("micro_batch_size", [None, 5])
def test_what_is_played_back_changes_nothing(script, micro_batch_size, tmp_path, monkeypatch):
    """A float32 run with it is that without it, bit for bit, with the same random numbers, also in uneven pieces."""
    recorded, record, play = [], Recorded.record, Playback.forward
    monkeypatch.setattr(Recorded, "record", lambda self, *inputs: recorded.append("acting") or record(self, *inputs))
    monkeypatch.setattr(Playback, "forward", lambda *inputs: recorded.append("encoder") or play(*inputs))
    settings = {"precision": "fp32", "micro_batch_size": micro_batch_size}
    runs = [make_args(script, tmp_path, accelerate=mode, **settings) for mode in ("eager", "cudagraphs")]
    eager, played_back = (parameters(script.main(args)) for args in runs)
    assert recorded.count("acting") == 1
    assert "encoder" in recorded
    assert all(torch.equal(eager[name], played_back[name]) for name in eager)


def test_calls_that_are_not_played_back():
    """Those with gradients, other shapes or types. Results stay; parameters may change; a copy plays with its own."""
    torch.manual_seed(0)
    agent = impala.Agent(FRAMES, ACTIONS, impala.Args(precision="fp32")).to(CUDA)
    plain = copy.deepcopy(agent)
    accelerate(agent, "cudagraphs")
    frames = torch.randint(0, 256, (3, 4, *FRAMES.shape), dtype=torch.uint8, device=CUDA)

    def draw(agent, obs):
        torch.manual_seed(1)
        return agent.get_action(obs, agent.initial_state(len(obs)))

    with torch.no_grad():
        first, second, other = draw(agent, frames[0]), draw(agent, frames[1]), draw(agent, frames[0, :2])
        halves, twin = draw(agent, frames[0] / 2), copy.deepcopy(agent)
        twin.policy_head.linear.bias[0] += 1
        moved = draw(twin, frames[2])
        for found, obs in ((first, frames[0]), (second, frames[1]), (other, frames[0, :2]), (halves, frames[0] / 2)):
            assert all(map(torch.equal, found, draw(plain, obs)))
        plain.policy_head.linear.bias[0] += 1
        assert all(map(torch.equal, moved, draw(plain, frames[2])))
        agent.load_state_dict(plain.state_dict())
        assert all(map(torch.equal, moved, draw(agent, frames[2])))
    assert draw(agent, frames[0])[1].requires_grad


@pytest.mark.parametrize("accelerate", ["eager", "cudagraphs"])
def test_actors_do_not_draw_from_a_policy_that_has_diverged(accelerate, tmp_path):
    """With NaN, PyTorch's kernel would end all work on the GPU."""
    one_step = {"num_minibatches": 1, "sample_fraction": 1.0, "max_grad_norm": None, "num_actors": 0}
    with pytest.raises(TrainingError, match="an output of the policy after 1 updates is NaN or infinite"):
        impala.main(make_args(impala, tmp_path, accelerate=accelerate, learning_rate=1e18, **one_step))
    assert torch.ones(2, device=CUDA).sum() == 2


def test_frames_in_pinned_host_memory_change_nothing(tmp_path, monkeypatch):
    on_gpu = parameters(ppg.main(make_args(ppg, tmp_path)))
    monkeypatch.setattr(device, "GPU_RESERVE", 1e15)
    on_host = parameters(ppg.main(make_args(ppg, tmp_path)))
    assert all(torch.equal(on_gpu[name], on_host[name]) for name in on_gpu)
