"""`common/fast/` is for speed alone: without it, and without the lines that name it, all works as before."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.run import ROOT

KERNELS = [f"tests/test_{name}.py" for name in ("accelerate", "kernels", "kernels_build", "gpu_kernels", "gpu")]
LINES = re.compile(r"^ *(from common\.fast import accelerate|accelerate\(agent, .*\))\n", re.M)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the tree without the folder and these lines."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this tree is not a git repository")
    copy = tmp_path_factory.mktemp("tree")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("common/fast/", "benchmarks/results/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    changed = []
    for path in [*copy.glob("*.py"), *copy.glob("common/*.py")]:
        text, count = LINES.subn("", path.read_text())
        path.write_text(text)
        changed += [count] if count else []
    assert changed == [2, 2, 2, 2]  # the three scripts, and what loads an agent
    return copy


RUNS = [
    "tests/test_evaluation.py::test_an_evaluated_run_is_the_same_run",
    "tests/test_evaluate.py::test_figures_of_a_task_with_known_returns",
]


@pytest.mark.parametrize("words", [["-m", "quick"], RUNS], ids=["quick", "runs"])
def test_the_quick_tests_and_those_of_runs_and_their_agents_pass(words, tree):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ignored = [f"--ignore={file}" for file in [*KERNELS, "tests/test_without_fast.py"]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, *ignored]
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
