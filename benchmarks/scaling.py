"""Steps per second of the three scripts by number of ranks (torchrun), and how long ranks wait for each other.

    python benchmarks/scaling.py                            # 1 and 2 ranks: 15 minutes on two cores
    python benchmarks/scaling.py --ranks 1 2 4 8 --num-steps 256

Each measurement is a run of a script on Procgen, with one process or under torchrun; numbers of ranks take turns
(1 2 1 2 ...). Each rank has environments of its own, as many as the one process has. On a CPU, the ranks share its
cores: PyTorch gets as many threads in each as there are cores for it. Rollouts are shorter than by default
(`--num-steps`), in minibatches of the same size.

Writes `<cpu or gpu>.csv` (a row a measurement), `.meta.json` and `.md` (the table) in `results/scaling/`.
"""

import csv
import importlib
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).parent.parent))
import readme
from common.device import resolve_device
from common.errors import InputError
from common.files import ROOT, write_json
from common.provenance import command, provenance
from common.settings import Positive, check_limits
from common.signals import one_line_errors
from throughput import column, ratios, shorten, spread


@dataclass
class Args:
    algorithms: tuple[Literal["ppo", "ppg", "impala"], ...] = ("ppo", "ppg", "impala")
    """scripts to measure"""
    ranks: tuple[Positive[int], ...] = (1, 2)
    """numbers of ranks, on this machine; the first is what the others are compared with"""
    env_id: str = "starpilot"
    """a Procgen game"""
    device: str = "auto"
    """auto, cpu or cuda"""
    repeats: Positive[int] = 3
    """measurements of each, in turn"""
    num_steps: Positive[int] = 32
    """steps of each environment in an iteration"""
    iterations: Positive[int] = 4
    """iterations that count, after one to warm up"""
    from_csv: bool = False
    """measure nothing: make the table from the CSV that is there"""
    out: Path = ROOT / "benchmarks" / "results" / "scaling"
    """where CSV and table go"""


def measure(args: Args, algorithm: str, ranks: int) -> float:
    """Steps per second of a run."""
    script = importlib.import_module(algorithm)
    settings = script.Args(env_id=args.env_id, device=args.device)
    shorten(algorithm, settings, args.num_steps, args.iterations)
    settings.total_timesteps *= ranks
    if algorithm == "impala":
        settings.log_interval = settings.batch_size * settings.num_steps * ranks
    launcher, environment = shlex.quote(sys.executable), dict(os.environ)
    if ranks > 1:
        launcher += f" -m torch.distributed.run --standalone --nproc-per-node {ranks}"
    if resolve_device(args.device).type == "cpu":
        environment["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // ranks))
    with tempfile.TemporaryDirectory() as folder:
        settings.runs_dir = folder
        words = shlex.split(command(settings, f"{algorithm}.py", launcher))
        result = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        if result.returncode != 0:
            raise InputError(f"{shlex.join(words)} has failed:\n{result.stderr}")
        (run_dir,) = Path(folder).iterdir()
        events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
        events.Reload()
    warm_up = getattr(settings, "n_pi", 1) - 1
    first, *_, last = events.Scalars("charts/SPS")[warm_up:]
    return (last.step - first.step) / (last.wall_time - first.wall_time)


def table(rows: list[dict[str, str]]) -> list[str]:
    """A row for each script and number of ranks: medians, and minimum and maximum in brackets."""
    groups, lines = {}, []
    for row in rows:
        groups.setdefault((row["algorithm"], row["ranks"]), []).append(row)
    for (algorithm, ranks), group in groups.items():
        base = next(each for (name, _), each in groups.items() if name == algorithm)
        speeds = column(group, "steps_per_second")
        lines.append([readme.label(algorithm), ranks, spread(speeds), ratios(group, base)])
    return readme.markdown(["script", "ranks", "steps/s, all ranks", "x the first"], lines)


def main(args: Args) -> None:
    check_limits(args)
    path = readme.measurement_path(args.out, args.device)
    if not args.from_csv:
        device = resolve_device(args.device)
        command = shlex.join(["python", "benchmarks/scaling.py", *sys.argv[1:]])
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(path.with_suffix(".meta.json"), provenance(command, "benchmarks/scaling.py", device))
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("algorithm", "ranks", "repeat", "steps_per_second"))
            for algorithm in args.algorithms:
                for repeat in range(args.repeats):
                    for ranks in args.ranks:
                        speed = measure(args, algorithm, ranks)
                        writer.writerow((algorithm, ranks, repeat, f"{speed:.6g}"))
                        file.flush()
                        print(f"{algorithm}, {ranks} ranks: {speed:.0f} steps/s", flush=True)
    rows, origin = readme.read_measurement(path)
    text = "\n".join([*table(rows), "", origin, ""])
    path.with_suffix(".md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
