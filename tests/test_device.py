"""Device set-up, and learning without a single look at the device from the host."""

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from common import InputError, device
from common.device import frame_store, resolve_device, setup_device
from test_learning import CASES, FRAMES, learn


def test_resolve_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, found in {"auto": "cuda", "cuda:1": "cuda:1", "cpu": "cpu"}.items():
        assert resolve_device(name) == torch.device(found)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")  # ranks have a GPU each
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name, found in {"auto": "cuda:1", "cuda": "cuda:1", "cpu": "cpu"}.items():
        assert resolve_device(name) == torch.device(found)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match="cuda:2: PyTorch sees 2 CUDA GPUs here: use --device auto or another"):
        resolve_device("auto")


def test_setup_device(monkeypatch):
    """All generators are seeded. With a GPU, the cores are left to the environments, unless the user says otherwise."""
    draws, calls = [], []
    for seed in (3, 3, 4):
        setup_device(torch.device("cpu"), seed=seed)
        draws.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert draws[0] == draws[1]
    assert not set(draws[0]) & set(draws[2])
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: calls.append(f"{count} threads"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    setup_device(torch.device("cuda"), seed=0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    setup_device(torch.device("cuda:1"), seed=0)
    assert calls == [0, "1 threads", 1]


@pytest.mark.quick
@CASES
def test_learning_never_waits_for_the_device(script, settings, monkeypatch):
    """On the meta device, whose tensors have no content, any `.item()`, `if tensor` or copy to the host raises."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())  # knows no meta device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    meta = torch.device("meta")
    _, metrics = learn(script, FRAMES, torch.float32, 0.1, device=meta, read=lambda value: value, **settings)
    assert all(value.device == meta for value in metrics.values())


def test_frames_on_disk(tmp_path):
    place = tmp_path / "runs"
    for disk in (str(place), None):
        with pytest.raises(InputError, match=r"lower --n-pi, --num-envs or --num-steps\.$"):
            frame_store((2**45,), torch.uint8, torch.device("cpu"), disk)
    store = frame_store((3, 5, 7), torch.uint8, torch.device("cpu"), str(place))
    store.fill_(7)
    assert (store.shape, store.sum()) == ((3, 5, 7), 7 * 105)
    assert not list(place.iterdir())  # the file has no name
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(place) in line]
    assert mapped, "the frames lie in memory, not in a file"


def test_frames_that_do_not_fit_on_the_gpu_stay_in_pinned_host_memory(monkeypatch, capsys):
    empty, made, cuda = torch.empty, [], torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10e9, 16e9))
    monkeypatch.setattr(torch, "empty", lambda shape, **options: made.append(options) or empty(0, dtype=torch.uint8))
    frame_store((10**9,), torch.uint8, cuda)
    assert made[-1]["device"] == cuda
    frame_store((3 * 10**9,), torch.uint8, cuda)
    assert made[-1]["pin_memory"]
    assert "3.0 GB of frames do not fit" in capsys.readouterr().err
    monkeypatch.setattr(device, "HOST_MEMORY", 10**8)  # of a host that is smaller than its GPU
    with pytest.raises(InputError, match="do not fit into memory"):
        frame_store((3 * 10**9,), torch.uint8, cuda)
