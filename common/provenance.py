"""Where a run's numbers come from: command, commit, versions, machine."""

import dataclasses
import importlib.metadata
import os
import platform
import shlex
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from common.settings import flag

UTC = "%Y-%m-%dT%H:%M:%SZ"


def command(args: Any, script: str, launcher: str = "python") -> str:
    """The command line that repeats a run: the script's name and each flag that differs from its default."""
    words = [*launcher.split(), script]
    for field in dataclasses.fields(args):
        value, name = getattr(args, field.name), flag(field.name)
        if isinstance(value, bool) and value != field.default:
            words.append(name if value else name.replace("--", "--no-", 1))
        elif value != field.default:
            words += [name, str(value)]
    return shlex.join(words)


def provenance(command_line: str, device: torch.device) -> dict[str, Any]:
    """Command, commit, whether the tree had changes, versions, machine and time."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}  # PyTorch's with its build (+cu130)
    for package in ("numpy", "gymnasium", "procgen", "procgen-mirror"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cpu = platform.processor()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    gpu = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    status = git("status", "--porcelain", "--", "*.py")  # a new script counts, run folders do not
    return {
        "command": command_line,
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "versions": versions,
        "machine": f"{os.cpu_count()} x {cpu}, {torch.get_num_threads()} PyTorch threads{gpu}",
        "started": time.strftime(UTC, time.gmtime()),
    }


def git(*words: str) -> str | None:
    """What git says of this source tree; None where it is no checkout or git is missing."""
    try:
        folder = Path(__file__).parent.parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
