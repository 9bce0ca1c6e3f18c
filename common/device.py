"""Device, seeds and number format of a run."""

import os
import random
import re

import numpy as np
import torch

from common.errors import InputError
from common.memory import keep_freed_memory


def setup_device(
    device: str, *, seed: int, torch_deterministic: bool = True, accelerate: str = "eager"
) -> torch.device:
    """Seed Python, NumPy and PyTorch, set the allocator up, and return the device to train on.

    Args:
        device: "auto" (the first CUDA GPU, or else the CPU), "cpu", "cuda" or "cuda:N".
        seed: of all three generators; the environments take theirs from `make_envs`.
        torch_deterministic: let cuDNN use deterministic kernels only. The CPU's are deterministic anyway.
        accelerate: the mode that `common.accelerate.accelerate` will get.

    Raises:
        InputError: no such device exists, it cannot do `accelerate`, or the seed is out of range.
    """
    if not 0 <= seed < 2**32:
        raise InputError(f"--seed {seed} is out of range: use 0 to {2**32 - 1}.")
    resolved = resolve_device(device)
    if accelerate == "cudagraphs" and resolved.type != "cuda":
        raise InputError(f"--accelerate cudagraphs needs a CUDA GPU, not {resolved}: use eager or compile.")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = torch_deterministic
    if resolved.type == "cpu":
        keep_freed_memory()
    return resolved


def resolve_device(device: str) -> torch.device:
    """Turn the `--device` flag into a `torch.device`. Raises InputError where that device does not exist.

    `auto` and `cuda` give each process that torchrun has started on this machine a GPU of its own.
    """
    count = torch.cuda.device_count()
    ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0
    if device == "auto":
        device = "cuda" if count else "cpu"
    if ranks > 1 and device.startswith("cuda:"):
        raise InputError(f"--device {device} is one GPU for {ranks} ranks: use --device cuda, one GPU for each.")
    if ranks and count and device == "cuda":
        if count < ranks:
            raise InputError(f"{ranks} ranks need a GPU each, and there are {count}: lower --nproc-per-node.")
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    kind, _, index = device.partition(":")
    if device != "cpu" and not re.fullmatch(r"cuda(:[0-9]+)?", device):
        raise InputError(f"--device {device!r} is not known: use auto, cpu, cuda or cuda:N.")
    if kind == "cuda" and int(index or 0) >= count:
        found = f"there are {count} GPUs, cuda:0 to cuda:{count - 1}" if count else "PyTorch sees no CUDA GPU here"
        raise InputError(f"--device {device} is not there ({found}): use --device auto or another device.")
    return torch.device(device)


def resolve_precision(precision: str, device: str) -> str:
    """Turn the `--precision` flag into "fp32" or "bf16": `auto` is bf16 where `--device` computes in it natively.

    These are CPUs with AVX-512 BF16 or AMX (others emulate bfloat16, which is slower than float32) and GPUs of NVIDIA's
    compute capability 8.0 or later. Raises InputError as `resolve_device` does.
    """
    if precision != "auto":
        return precision
    resolved = resolve_device(device)
    if resolved.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(resolved) >= (8, 0) else "fp32"
    return "bf16" if cpu_has("avx512_bf16") or cpu_has("amx_bf16") else "fp32"


def cpu_has(instructions: str) -> bool:
    """Whether this processor has `instructions`, by PyTorch's name for them. Older versions of PyTorch cannot tell."""
    return hasattr(torch.cpu, "get_capabilities") and bool(torch.cpu.get_capabilities().get(instructions))
