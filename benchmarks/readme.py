"""Tables, and the parts of README.md and benchmarks/README.md that scripts make, from `<!-- name -->` on."""

from collections.abc import Iterable
from pathlib import Path

from common import InputError
from common.run import ROOT

DOCUMENTS = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
# What tables and figures call the runs of a script, by their --exp-name, or the script; their order gives the colours
LABELS = {"ppo": "PPO", "ppg": "PPG", "impala-appo": "IMPALA (APPO)", "impala-paper": "IMPALA (paper)"}
LABELS |= {"ppg-long": "PPG (long phases)", "ppg-paper": "PPG (paper)", "ppg-dual": "PPG (dual)"}
LABELS |= {"impala": LABELS["impala-appo"], "impala-full-rate": "IMPALA (full rate)"}


def label(algorithm: str) -> str:
    return LABELS.get(algorithm, algorithm)


def one_line(text: str) -> str:
    """Text that ends no line of Markdown and begins no HTML."""
    return " ".join(text.split()).replace("<", "&lt;")


def colour(algorithm: str, others: Iterable[str]) -> str:
    """The colour of its curves in all reports. Without a label, one that `others`, drawn beside it, leave over."""
    labels = [*LABELS]
    if algorithm in labels:
        return f"C{labels.index(algorithm)}"
    taken = {7, *(labels.index(name) for name in others if name in labels)}  # C7 is grey, as published curves are
    unlabelled = [name for name in others if name not in labels]
    free = [f"C{number}" for number in range(10) if number not in taken]
    free += ["black", "gold", "lime", "navy", "maroon", "teal"]
    return free[unlabelled.index(algorithm) % len(free)]


def fill(documents: Iterable[Path], name: str, text: str) -> None:
    """Put `text` between the marks of `name`, in the document that has them. Raises InputError if none has."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    for document in documents:
        before, found, rest = document.read_text().partition(start)
        _, found_end, after = rest.partition(end)
        if found_end:
            document.write_text(before + found + text + end + after)
            return
    raise InputError(f"no lines {start.strip()} and {end} are in {', '.join(map(str, documents))}: add them.")


def markdown(columns: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table; none without rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    lines.insert(1, "|-" * len(columns) + "|")
    return lines if rows else []
