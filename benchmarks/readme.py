"""Parts of README.md that are made by scripts: what stands between `<!-- name -->` and `<!-- end of name -->`."""

from pathlib import Path


def fill(readme: Path, name: str, text: str) -> None:
    """Put `text` between the marks of `name`. Exits with a sentence where there are none."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = readme.read_text().partition(start)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise SystemExit(f"error: {readme} has no lines {start.strip()} and {end} to put the text between: add them.")
    readme.write_text(before + start + text + end + after)
