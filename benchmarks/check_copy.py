"""Which promises of a script does a copy keep? A line for each; the exit code is 0 if it keeps all.

    python benchmarks/check_copy.py my_idea.py
    python benchmarks/check_copy.py my_idea.py -- --env-id CartPole-v1    # flags of the copy, which win

What `open_run` does not get, an optimizer say, starts anew in a resumed run, without an error. Procgen shows it here.
"""

import csv
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils._pytree import tree_map

sys.path.insert(1, str(Path(__file__).parent.parent))  # after the folder of curves.py and others
from common import TrainingError
from common.checkpoint import load_script, newest_checkpoint
from common.run import CSV_COLUMNS
from common.session import one_line_errors
from common.settings import flag, read_json
from gpu_check import do

SIZES = {  # of flags that a copy has: eleven rollouts, the last in mid-phase of PPG, for a policy with preferences
    "num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1, "n_pi": 3, "e_aux": 1, "batch_size": 2,
    "num_aux_rollouts": 2, "num_actors": 0, "log_interval": 1, "checkpoint_interval": 0, "total_timesteps": 11 * 32,
    "eval_interval": 11 * 32, "eval_episodes": 8, "learning_rate": 0.002, "precision": "fp32",  # draws survive rounding
}  # fmt: skip


@contextmanager
def promise(name: str, broken: list[str]) -> Iterator[list[str]]:
    """Print whether the block raises no error, with what it adds to a list; else the name joins the `broken` ones."""
    print(f"...     {name}", flush=True)
    words = [f"ok      {name}"]
    try:
        yield words
    except Exception as error:  # the copy's own, too
        broken.append(name)
        words = [f"FAILED  {name}", " ".join(str(error).split()) or repr(error)]
    print(*words, sep=": ", flush=True)


def python(log: Path, *words: Any, **kill_when: Callable) -> str:
    """What `python <words>` prints. Raises TrainingError if it fails, or ends before it is to be killed."""
    log.write_text("")
    status = do([sys.executable, *map(str, words)], 300, log, **kill_when, cwd=None)
    printed = log.read_text(errors="replace")
    if status != (-signal.SIGKILL if kill_when else 0):
        reasons = re.findall(".*[Ee]rror: .*", printed) or printed.splitlines()[-1:]
        raise TrainingError(f"exit code {status}, {' '.join(reasons[:1])}")
    return printed


def contents(run_dir: Path) -> dict[str, Any]:
    """The parts in a run's last checkpoint, and the rows of its CSVs without their second column, a time."""
    checkpoint = newest_checkpoint(run_dir)
    rows = {name: re.sub("(?m)^([^,]*),[^,]*", r"\1", (run_dir / name).read_text()) for name in CSV_COLUMNS}
    parts = checkpoint["parts"] | checkpoint["ranks"][0]
    return rows | tree_map(lambda x: x.tolist() if hasattr(x, "tolist") else x, parts)


def check(script: Path, extra: list[str], folder: Path) -> list[str]:
    """Print a line for each promise; return the broken ones. Runs and the log are in `folder`."""
    here, log, broken, words = Path(__file__).resolve(), folder / "log", [], []
    with promise("trained", broken):
        for name, value in SIZES.items():
            words += [flag(name), value] if hasattr(load_script(script).Args, name) else []
        words += [*extra, "--runs-dir"]
        python(log, script, *words, folder / "whole")
        (whole,) = (folder / "whole").iterdir()
        args = read_json(whole / "args.json")
        task = ["--env-id", args["env_id"], "--device", args["device"]]  # the task may be of a module
    if broken:
        return broken
    with promise("killed and resumed", broken) as said:

        def late() -> bool:  # after PPG's first phase
            return any(3 * int(pt.stem) > args["total_timesteps"] for pt in folder.glob("killed/*/checkpoints/*.pt"))

        python(log, script, *words, folder / "killed", kill_when=late)
        (killed,) = (folder / "killed").iterdir()
        exact = "new episodes begin" not in python(log, script, "--resume", killed, *task)
        said.append("the same run" if exact else "not exact: such environments cannot be put back")
        mine, theirs = contents(killed), contents(whole)
        if exact and (different := [name for name in mine | theirs if mine.get(name) != theirs.get(name)]):
            raise TrainingError(f"not as in an undisturbed run (does open_run get all that learns?): {different}")
    with promise("loaded, evaluated and exported", broken):
        evaluate = [here.with_name("evaluate.py"), whole, "--script", script, *task, "--export", folder / "policy.pt"]
        evaluate += ["--seed", args["seed"], "--episodes", args["eval_episodes"], "--num-envs", args["num_envs"]]
        found = [float(mean) for mean in re.findall(r"(?m)^\S+ mean(?: length)?: (.+)", python(log, *evaluate))]
        rows = [row for row in csv.DictReader(contents(whole)["eval.csv"].split()) if row["policy"] == "stochastic"]
        means = [float(row[name]) for row in rows for name in ("episodic_return", "episodic_length")][-len(found) :]
        if rows and not args["eval_num_levels"] and not np.allclose(found, means, rtol=1e-5, atol=1e-3):
            raise TrainingError(f"return and length {found}, in the run {means}: does it use attributes or np.random?")
    with promise("two ranks with the same networks", broken):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
        python(log, *torchrun, script, *words, folder / "ranks", "--device", "cpu")
    return broken


if __name__ == "__main__":
    if not sys.argv[1:] or not sys.argv[1].endswith(".py") or sys.argv[2:3] not in ([], ["--"]):
        print(__doc__)
        sys.exit(0 if "--help" in sys.argv else 2)
    script, extra = Path(sys.argv[1]).resolve(), sys.argv[3:]
    with one_line_errors(OSError), tempfile.TemporaryDirectory() as folder:
        sys.exit(len(check(script, extra, Path(folder))))
