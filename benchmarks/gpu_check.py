"""What a CUDA GPU has to show.

    python benchmarks/gpu_check.py --out ~/check        # repeat it until nothing is left

    tests     the tests marked `gpu`
    resume    check_copy.py of each script: killed and resumed, a run is the same run, bit for bit
    speed     throughput.py of each script with --accelerate eager, compile and cudagraphs

Each part is a process of its own, with a time limit and a log in `<out>/logs`. Its line in `<out>/results.jsonl` has
the machine and the commit. A part that failed, or that --budget had no time for, is left to the next call. A machine
with PyTorch for CUDA but without network gets the rest in a folder that the first command fills, and goes on so:

    python benchmarks/gpu_check.py --gather .gpu --there torch numpy tensorboard imageio
    python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/site .gpu/wheels/*
    export PYTHONPATH=/tmp/site LD_LIBRARY_PATH=$PWD/.gpu/libs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    python3 benchmarks/gpu_check.py --out "$OUT" --budget 540
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import tyro
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).parent.parent))
from common.device import resolve_device
from common.run import ROOT, provenance
from common.session import one_line_errors
from common.settings import Positive, check_limits

ALGORITHMS = ("ppo", "ppg", "impala")
SECONDS = {"tests": 420, "resume": 300, "speed": 420}  # that a part may take
UNUSED = {"imageio-ffmpeg", "glfw", "moderngl"}  # which gym3 needs for windows and videos alone
RUNTIME = re.compile(r"(libc|libm|libdl|librt|libpthread|libresolv|libz|libstdc\+\+|libgcc_s|ld-linux-x86-64)\.so")
PLATFORMS = ("manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 40)))


@dataclass
class Args:
    out: Path = Path("runs", "gpu_check")
    """folder of results, logs and tables"""
    steps: tuple[Literal["tests", "resume", "speed"], ...] = ("tests", "resume", "speed")
    """what to do"""
    device: str = "auto"
    """auto, cpu or cuda"""
    rehearse: bool = False
    """short speed runs, without compilation and CUDA graphs"""
    budget: Positive[float] = 3600.0
    """seconds that this call may take"""
    gather: Path | None = None
    """do nothing but gather wheels and libraries for another machine in this folder"""
    there: tuple[str, ...] = ("torch", "numpy", "tensorboard", "imageio")
    """packages that the other machine has"""
    python: str = "3.12"
    """version of Python on the other machine, which is x86-64"""


def plan(args: Args) -> dict[str, list[str]]:
    """The commands of all parts, by name, in order."""
    marked = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text()]
    parts = {"tests": ["-m", "pytest", "--disable-plugin-autoload", "-m", "gpu", "-v", "--durations=10", *marked]}
    speed = f"--device {args.device} --repeats 1 --no-memory --configurations default"
    speed += " --num-steps 4" if args.rehearse else " compile cudagraphs --num-steps 256"
    for each in ALGORITHMS:
        parts[f"resume {each}"] = ["benchmarks/check_copy.py", f"{each}.py", "--", "--device", args.device]
        out = ["--out", str(args.out / "speed" / each)]
        parts[f"speed {each}"] = ["benchmarks/throughput.py", "--algorithms", each, *out, *speed.split()]
    return {name: [sys.executable, *words] for name, words in parts.items() if name.split()[0] in args.steps}


def do(command: list[str], seconds: float, log: Path, kill_when: Callable = lambda: False) -> int:
    """Run a command; return its exit status. SIGKILL ends it and what it has started, in time or when it should."""
    end = time.monotonic() + seconds
    with log.open("a") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = subprocess.Popen(command, cwd=ROOT, process_group=0, **streams)
        try:
            while process.poll() is None and time.monotonic() < end and not kill_when():
                time.sleep(0.005)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def needed(names: list[str], python: str, without: set[str]) -> set[str]:
    """Packages, and all that they need with this version of Python; those `without` and their needs are left out."""
    found, waiting = set(), [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found or name in without:
            continue
        found.add(name)
        for requirement in map(Requirement, metadata.requires(name) or ()):
            if not requirement.marker or requirement.marker.evaluate({"python_version": python, "extra": ""}):
                waiting.append(canonicalize_name(requirement.name))
    return found


def gather(args: Args) -> None:
    """Fill wheels/ with requirements.txt and pytest, in the versions installed here, and libs/ with what Procgen draws
    in. Left out is what the machine has: --there with all that these need, and the runtimes of C and C++."""
    wheels, libs = args.gather / "wheels", args.gather / "libs"
    pip = [sys.executable, "-m", "pip"]
    for folder in (wheels, libs):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "requirements.txt").read_text(), re.M)
    platforms = [word for each in PLATFORMS for word in ("--platform", f"{each}_x86_64")]
    there = ["--only-binary=:all:", "--implementation", "cp", "--python-version", args.python, *platforms]
    for name in sorted(needed([*pinned, "pytest"], args.python, needed(list(args.there), args.python, set()) | UNUSED)):
        wanted = ["--quiet", "--no-deps", f"{name}=={metadata.version(name)}"]
        if subprocess.run([*pip, "download", *wanted, *there, "--dest", wheels], capture_output=True).returncode:
            subprocess.run([*pip, "wheel", *wanted, "--wheel-dir", wheels], check=True)
    package = Path(importlib.util.find_spec("procgen").origin).resolve().parent
    ldd = subprocess.check_output(["ldd", package / "data/prebuilt/libenv.so"], text=True)
    for name, path in re.findall(r"(\S+) => (/\S+|not found)", ldd):
        if package.parent not in Path(path).resolve().parents and not RUNTIME.match(name):  # its wheel has the others
            shutil.copy(path, libs / name)  # of a library that is not found, an error
    print(f"{sum(path.stat().st_size for path in args.gather.glob('*/*')) / 1e6:.0f} MB in {args.gather}")


def main(args: Args) -> None:
    check_limits(args)
    if args.gather:
        return gather(args)
    end = time.monotonic() + args.budget
    args.out = args.out.expanduser().resolve()
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    results = args.out / "results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    tries = Counter(line["name"] for line in lines)
    origin = provenance("", "benchmarks/gpu_check.py", resolve_device(args.device))
    parts = plan(args)
    left = [name for name in parts if not any(line["name"] == name and line["rc"] == 0 for line in lines)]
    for number, name in enumerate(sorted(left, key=tries.__getitem__)):
        start = time.monotonic()
        seconds = SECONDS[name.split()[0]]
        if number and start + seconds > end:
            break
        log = args.out / "logs" / f"{name.replace(' ', '-')}.log"
        result = {"name": name, "rc": do(parts[name], seconds, log), "seconds": round(time.monotonic() - start, 1)}
        result |= {"command": shlex.join(parts[name]), "machine": origin["machine"], "commit": origin["commit"]}
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{name}: {'FAILED' if result['rc'] else 'ok'} after {result['seconds']} s", flush=True)
        print(*(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-12:]), sep="\n", flush=True)
        if result["rc"] == 0:
            left.remove(name)
    print(f"left for another call: {', '.join(left) or 'nothing'}")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
