"""Six ideas that a researcher might have, as changes of the scripts; and what a process does that runs such a copy.

An idea is a `diff`, without line numbers: a hunk is whatever stands between two lines with @@. Its lines with a minus
or none must be in the script, once, next to each other; the lines with a plus or none take their place.
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from unittest import mock

import torch

from common import checkpoint, session

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


def run(script: Path, words: list[str], kill_at: int | None = None, keep: Path | None = None) -> None:
    """`python <script> <words>`. SIGKILL ends it before it saves step `kill_at`; the states of its networks, before
    anything is learnt and at the end, are saved in the folder `keep`."""
    os.environ["CXX"] = "false"  # compiling kernels would take longer than the run

    class Checkpoints(checkpoint.Checkpoints):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            self.keep_networks("start")

        def save(self, step):
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            super().save(step)

        def close(self, error):
            self.keep_networks("end")
            super().close(error)

        def keep_networks(self, when):
            if keep is not None:
                networks = {name: part for name, part in self.parts.items() if isinstance(part, torch.nn.Module)}
                states = {name: network.state_dict() for name, network in networks.items()}
                torch.save(states, keep / f"{when}{self.world.rank}.pt")

    sys.argv = [str(script), *words]
    with mock.patch.object(session, "Checkpoints", Checkpoints):
        runpy.run_path(str(script), run_name="__main__")
