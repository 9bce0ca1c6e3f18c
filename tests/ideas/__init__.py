"""Eight ideas that a researcher might have, as changes of the scripts; and what a process does that runs such a copy.

An idea is a `diff`, without line numbers: a hunk is whatever stands between two lines with @@. Its lines with a minus
or none must be in the script, once, next to each other; the lines with a plus or none take their place.
"""

import os
import runpy
import sys
import time
from pathlib import Path
from unittest import mock

from common.checkpoint import Checkpoints

HERE = Path(__file__).parent


def changed(source: str, name: str) -> str:
    """`source`, a script's, with the changes in `<name>.diff`."""
    source = f"\n{source}"
    for hunk in (HERE / f"{name}.diff").read_text().split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        old, new = ("\n" + "".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert source.count(old) == 1, f"{name}.diff: the script has these lines {source.count(old)} times:{old}"
        source = source.replace(old, new)
    return source[1:]


def run(words: list[str], stays: bool = False) -> None:
    """`python <words>`. If it `stays`, it does not get to its last checkpoint, but waits to be killed."""
    os.environ["CXX"] = "false"  # compiling kernels would take longer than the run
    save = Checkpoints.save

    def save_or_stay(checkpoints, step):
        if stays and step >= checkpoints.run.total_steps:
            time.sleep(60)
        save(checkpoints, step)

    sys.argv = words
    with mock.patch.object(Checkpoints, "save", save_or_stay):
        runpy.run_path(words[0], run_name="__main__")
