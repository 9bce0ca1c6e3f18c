"""What a CUDA GPU has to show, in parts that survive the end of a short loan of the machine.

    python benchmarks/gpu_check.py --out ~/check             # all steps, in this order:

    tests       the tests marked `gpu`
    resume      a run killed in an update and resumed has the parameters of an unbroken one, bit for bit
    match       losses and gradients in float32 (no TF32) are the CPU's
    throughput  steps per second by --accelerate, environments and groups of them, and where the time goes
    profile     PyTorch's profile of an iteration of PPO, and of an auxiliary phase of PPG
    runs        25 million steps in the configuration that `throughput` has found fastest

    python benchmarks/gpu_check.py --out ~/check --steps throughput runs --algorithms ppo --num-envs 64
    python benchmarks/gpu_check.py --out /tmp/rehearsal --rehearse --num-envs 4 --total-timesteps 256

Each part of a step is a process of its own (gpu_parts.py), with a time limit and a log in `<out>/logs`.
`<out>/results.jsonl` gets a line when it ends. A part that --budget has no time for is left to the next call: the same
command goes on where this one ended, and runs go on from their checkpoints. With --pack, that folder gets all of --out
after each part, in files small enough to be copied back; `cat check.tar.gz.* | tar xz -C FOLDER` unpacks them.

On a bare machine with PyTorch for CUDA, in the repository's root, with `.gpu` from gather_gpu.py:

    [ -d /tmp/site ] || python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/site .gpu/wheels/*
    export PYTHONPATH=/tmp/site LD_LIBRARY_PATH=$PWD/.gpu/libs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    python3 benchmarks/gpu_check.py --out /tmp/check --pack "$OUT" --budget 540
"""

import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import readme
import throughput
from common.device import resolve_device
from common.files import ROOT
from common.provenance import command
from common.settings import Positive, check_limits
from common.signals import one_line_errors
from gpu_parts import Common, measurements, read_rows

SECONDS = {"tests": 420, "resume": 150, "match": 90, "throughput": 120, "profile": 90}  # that a part may take
LEAST_RUN, END = 60, 20  # seconds: the least that a run is started for; what a part has to save its state at its limit
PIECE, PIECES = "15M", 7  # size of the packed files, and how many can be copied back beside the results


@dataclasses.dataclass
class Args(Common):
    steps: tuple[Literal["tests", "resume", "match", "throughput", "profile", "runs"], ...] = (*SECONDS, "runs")
    """what to do"""
    algorithms: tuple[Literal["ppo", "ppg", "impala"], ...] = ("ppo", "ppg", "impala")
    """scripts to check"""
    configurations: tuple[Literal["default", "compile", "cudagraphs"], ...] = ("default", "compile", "cudagraphs")
    """what `throughput` compares: eager (default), compile and cudagraphs"""
    num_envs: tuple[Positive[int], ...] = (64, 256)
    """numbers of environments that `throughput` compares, in one group and in two"""
    run_seconds: Positive[int] = 480
    """seconds that a run may take of a call"""
    budget: Positive[float] = 540.0
    """seconds that this call may take"""
    again: bool = False
    """repeat parts that have failed or run out of time"""
    pack: Path | None = None
    """folder for packed results"""


class Part(NamedTuple):
    name: str
    command: list[str]
    seconds: int  # that it may take


def plan(args: Args) -> list[Part]:
    """All parts of a check, in order."""
    configurations = list(args.configurations)
    if resolve_device(args.device).type == "cpu" and "cudagraphs" in configurations:
        print("note: cudagraphs need a CUDA GPU and are left out")
        configurations.remove("cudagraphs")
    names = [("tests",)]
    names += [(step, algorithm) for step in ("resume", "match") for algorithm in args.algorithms]
    names += [
        ("throughput", algorithm, configuration, f"{num_envs}x{groups}")
        for algorithm in args.algorithms
        for num_envs in args.num_envs
        for groups in ((1,) if algorithm == "impala" else (1, 2))
        for configuration in configurations
    ]
    names += [("profile", algorithm) for algorithm in args.algorithms if algorithm != "impala"]
    names += [("runs", algorithm) for algorithm in args.algorithms]
    common = Common(*(getattr(args, field.name) for field in dataclasses.fields(Common)))
    own = [sys.executable, *shlex.split(command(common, "benchmarks/gpu_parts.py"))[1:]]
    marked = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text()]
    pytest = [sys.executable, "-m", "pytest", "--disable-plugin-autoload", "-m", "gpu", "-v", "--durations=10", *marked]
    return [
        Part(" ".join(name), pytest if name == ("tests",) else [*own, *name], SECONDS.get(name[0], args.run_seconds))
        for name in names
        if name[0] in args.steps
    ]


def do(part: Part, seconds: float, out: Path) -> None:
    """Do a part in `seconds` at most, and write its line of the results. Whatever it has started ends with it."""
    log, start, timed_out = out / "logs" / f"{part.name.replace(' ', '-')}.log", time.monotonic(), False
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(part.command, cwd=ROOT, process_group=0, **streams)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    taken = round(time.monotonic() - start, 1)
    result = {"name": part.name, "command": shlex.join(part.command), "rc": process.returncode, "seconds": taken}
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(result | {"timed_out": timed_out}) + "\n")
    end = "out of time" if timed_out else f"FAILED with {process.returncode}" if process.returncode else "ok"
    print(f"{part.name}: {end} after {taken} s", flush=True)
    lines = log.read_text(errors="replace").splitlines()
    print(*(f"    {line}" for line in lines[-12 if process.returncode else -2 :]), sep="\n", flush=True)


def done(args: Args) -> dict[str, int]:
    """The parts that this call leaves alone, with their exit status."""
    path = args.out / "results.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    again = [args.again or (each["timed_out"] and each["name"].startswith("runs")) for each in results]
    return {
        each["name"]: each["rc"] for each, repeat in zip(results, again, strict=True) if not (each["rc"] and repeat)
    }


def pack(out: Path, folder: Path) -> None:
    """Pack a folder into files that can be copied back, beside its results."""
    folder.mkdir(parents=True, exist_ok=True)
    tar = 'rm -f "$2"/check.tar.gz.*; tar cz -C "$1" . | split -b "$3" -d -a 2 - "$2/check.tar.gz."'
    subprocess.run(["bash", "-c", f"set -eo pipefail; {tar}", "pack", out, folder, PIECE], check=True)
    shutil.copy(out / "results.jsonl", folder)
    if len(list(folder.glob("check.tar.gz.*"))) > PIECES:
        print(f"warning: only {PIECES} packed files come back: move runs that are done out of {out}")


def shares(rows: list[dict[str, str]]) -> str:
    """Speeds, and shares of the time. IMPALA's actors act and step while its learner learns and waits."""
    cells = []
    for row in rows:
        speed, what = float(row["steps_per_second"]), f"{row['algorithm']} {row['configuration']}, {row['value']}"
        parts = [f"{float(row[f'{phase}_us']) * speed / 1e6:.0%}" for phase in (*throughput.PHASES, "wait")]
        cells.append([what, f"{speed:.0f}", *parts, f"{float(row['peak_gb']):.2f}"])
    return "\n".join(readme.markdown(["", "steps/s", *throughput.PHASES, "wait", "GB"], cells))


def main(args: Args) -> None:
    check_limits(args)
    start = time.monotonic()
    device = "cpu" if args.rehearse else args.device
    args = dataclasses.replace(args, out=args.out.expanduser().resolve(), device=device)
    parts, ended = plan(args), done(args)
    for number, part in enumerate(each for each in parts if each.name not in ended):
        seconds = args.budget - (time.monotonic() - start)
        if number and seconds < (LEAST_RUN if part.name.startswith("runs") else part.seconds):
            break
        do(part, min(seconds, part.seconds), args.out)
        if args.pack:
            pack(args.out, args.pack)
    if rows := read_rows(measurements(args)):
        print(shares(rows))
    ended = done(dataclasses.replace(args, again=False))
    failed = [part.name for part in parts if ended.get(part.name)]
    left = [part.name for part in parts if part.name not in ended]
    print(f"failed, until a call with --again: {', '.join(failed) or 'nothing'}")
    print(f"{len(left)} of {len(parts)} parts are left for another call: {', '.join(left) or 'nothing'}")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
