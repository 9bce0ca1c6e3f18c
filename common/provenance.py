"""Where a run's numbers come from: command, commit, versions, machine."""

import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from common.files import ROOT
from common.settings import flag

UTC = "%Y-%m-%dT%H:%M:%SZ"


def command(args: Any, script: str, launcher: str = "python") -> str:
    """The command line that repeats a run: the script's name and each flag that differs from its default."""
    words, defaults = [*launcher.split(), script], type(args)()
    if getattr(args, "preset", None) != getattr(defaults, "preset", None):
        words, defaults = [*words, "--preset", args.preset], type(args)(preset=args.preset)
    for setting, value in vars(args).items():
        name = flag(setting)
        if value != getattr(defaults, setting):
            words += [name if value else f"--no-{name[2:]}"] if isinstance(value, bool) else [name, str(value)]
    return shlex.join(words)


def provenance(command_line: str, script: str, device: torch.device) -> dict[str, Any]:
    """Command, script and its hash, commit, whether the tree had changes, versions, machine and time."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}  # PyTorch's with its build (+cu130)
    for package in ("numpy", "gymnasium", "procgen", "procgen-mirror"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cpuinfo = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    cpu = (re.findall("model name\t: (.*)", cpuinfo) or [platform.processor()])[0]
    gpu = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    status = git("status", "--porcelain", "--", "*.py", "*.cpp")  # a new script counts, run folders do not
    return {
        "command": command_line,
        "script": script,
        "script_sha256": hashlib.sha256((ROOT / script).read_bytes()).hexdigest(),
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "versions": versions,
        "machine": f"{os.cpu_count()} x {cpu}, {torch.get_num_threads()} PyTorch threads{gpu}",
        "started": time.strftime(UTC, time.gmtime()),
    }


def git(*words: str) -> str | None:
    """What git says of this source tree; None where it is no checkout or git is missing."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
