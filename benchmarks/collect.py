"""Copy the curves of finished runs to where the README's numbers come from.

    python benchmarks/collect.py runs/starpilot__ppo__1__1795158356 ...

Each run folder becomes benchmarks/results/<protocol>/<algorithm>/<game>/seed<k>.csv, a row an iteration: environment
steps, wall-clock seconds, number and mean return of the episodes that ended in the iteration, and mean return of the
last 100 episodes. A seed<k>.meta.json (command, commit, versions, machine) stands beside it.
"""

import json
import shutil
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def collect(run_dir: Path) -> Path:
    """Copy one run's curve; return the CSV written. Raises FileExistsError rather than replace another run's."""
    args = json.loads((run_dir / "args.json").read_text())
    levels = args["num_levels"] or "all"
    folder = RESULTS / f"{args['distribution_mode']}-{levels}" / args["exp_name"] / args["env_id"]
    target = folder / f"seed{args['seed']}.csv"
    curve = (run_dir / "progress.csv").read_text()
    if target.exists() and target.read_text() != curve:
        raise FileExistsError(f"{target} holds another run: remove it first")
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(curve)
    shutil.copyfile(run_dir / "meta.json", target.with_suffix(".meta.json"))
    return target


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(collect(Path(name)))
