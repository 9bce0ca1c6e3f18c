"""What a CUDA GPU has to show.

    python benchmarks/gpu_check.py --out ~/check        # repeat it until nothing is left

    tests     the tests marked `gpu`
    resume    check_copy.py of each script: killed and resumed, a run is the same run, bit for bit
    speed     throughput.py of each script with --accelerate eager, compile and cudagraphs

Each part is a process of its own, with a time limit and a log in `<out>/logs`. Its line in `<out>/results.jsonl` has
the machine and the commit. What failed, or had no time, is left to the next call. The exit code is 0 if nothing is.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
from common.device import resolve_device
from common.run import ROOT, provenance
from common.session import one_line_errors
from common.settings import Positive, check_limits

SECONDS = {"tests": 420, "resume": 300, "speed": 420}  # that a part may take


@dataclass
class Args:
    out: Path = Path("runs", "gpu_check")
    """folder of results, logs and tables"""
    steps: tuple[Literal["tests", "resume", "speed"], ...] = ("tests", "resume", "speed")
    """what to do"""
    device: Literal["cuda", "cpu"] = "cuda"
    """cuda; or cpu to rehearse, with short speed runs"""
    budget: Positive[float] = 3600.0
    """seconds that this call may take"""


def plan(args: Args) -> dict[str, list[str]]:
    """The commands of all parts, by name, in order."""
    marked = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text()]
    parts = {"tests": ["-m", "pytest", "--disable-plugin-autoload", "-m", "gpu", "-v", "--durations=10", *marked]}
    speed = f"--device {args.device} --repeats 1 --no-memory --configurations default"
    speed += " --num-steps 4" if args.device == "cpu" else " compile cudagraphs --num-steps 256"
    for each in ("ppo", "ppg", "impala"):
        parts[f"resume {each}"] = ["benchmarks/check_copy.py", f"{each}.py", "--", "--device", args.device]
        out = ["--out", str(args.out / "speed" / each)]
        parts[f"speed {each}"] = ["benchmarks/throughput.py", "--algorithms", each, *out, *speed.split()]
    return {name: [sys.executable, *words] for name, words in parts.items() if name.split()[0] in args.steps}


def do(command: list[str], seconds: float, log: Path, kill_when: Callable = lambda: False, cwd: Any = ROOT) -> int:
    """Run a command; return its exit status. SIGKILL ends it and what it has started, in time or when it should."""
    end = time.monotonic() + seconds
    with log.open("a") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")}  # see run.py
        process = subprocess.Popen(command, cwd=cwd, env=env, process_group=0, **streams)
        try:
            while process.poll() is None and time.monotonic() < end and not kill_when():
                time.sleep(0.005)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def main(args: Args) -> int:
    check_limits(args)
    end = time.monotonic() + args.budget
    args.out = args.out.expanduser().resolve()
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    results = args.out / "results.jsonl"
    text = results.read_text() if results.exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]  # not of a cut one
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
            file.write("\n" + json.dumps(result))
        print(f"{name}: {'FAILED' if result['rc'] else 'ok'} after {result['seconds']} s", flush=True)
        print(*(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-12:]), sep="\n", flush=True)
        if result["rc"] == 0:
            left.remove(name)
    print(f"left for another call: {', '.join(left) or 'nothing'}")
    return len(left)


if __name__ == "__main__":
    with one_line_errors(OSError):
        sys.exit(main(tyro.cli(Args, description=__doc__)))
