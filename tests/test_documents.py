"""The documents keep up with the code: links, commands, numbers and versions."""

import importlib
import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
import tyro

import curves
import evaluate
import readme
from common.checkpoint import read_model
from common.run import ROOT
from common.settings import parse, read_json
from helpers import SCRIPTS

FOLDERS = ("benchmarks", "common", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", document.read_text()))
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = unquote(link).partition("#")
        target = document.parent / path if path else document
        if not re.match(r"\w+:", link) and (not target.exists() or (anchor and anchor not in anchors(target))):
            broken.append(link)
    return broken


def commands(text: str) -> list[list[str]]:
    """The script and the flags of every `python X.py ...` or `torchrun ... X.py ...` in blocks and in code spans."""
    blocks = [body for language, body in FENCED.findall(text) if language == "bash"]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`((?:python|torchrun) [^`\n]+)`", FENCED.sub("", text))
    found = (re.search(r"(?:^|\s)([\w/]+\.py)((?:\s[^;&]*)?)", line.partition(" # ")[0]) for line in lines)
    flags = ([match[1], match[2].replace("$seed", "1").replace("$game", "maze")] for match in found if match)
    return [[script, *shlex.split(words)] for script, words in flags]


def check_command(script: str, words: list[str]) -> None:
    """Raises SystemExit or InputError for flags that the script does not accept, or not together."""
    assert (ROOT / script).is_file(), script
    module = importlib.import_module(Path(script).stem)
    if module in SCRIPTS:
        if "--resume" in words and "auto" not in words:  # no such run is here
            del words[words.index("--resume") : words.index("--resume") + 2]
        parse(module.Args, words).validate()
        return
    split = words.index("--") if "--" in words else len(words)
    if hasattr(module, "Args"):
        args = tyro.cli(module.Args, args=words[:split])
    if words[split:]:
        module.make_jobs(replace(args, extra=words[split + 1 :]))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere_and_commands_are_accepted(document):
    assert not broken_links(document)
    for script, *words in commands(document.read_text()):
        try:
            check_command(script, words)
        except SystemExit:
            pytest.fail(f"{script} does not accept {words}")


def test_readme_has_the_measured_speeds():
    text = (ROOT / "README.md").read_text()
    speeds = re.findall(r"^\| .+ default \| (\d+) ", (ROOT / "benchmarks/results/throughput/cpu.md").read_text(), re.M)
    assert len(speeds) == len(SCRIPTS)
    assert all(f"| {speed} |" in text for speed in speeds)


def requirements(folder: str) -> set[str]:
    lines = (ROOT / folder / "requirements.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith(("#", "-r"))}


def test_requirements_and_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: set(packages) for name, packages in project["optional-dependencies"].items()}
    assert set(project["dependencies"]) == requirements(".")
    assert extras["benchmarks"] == requirements("benchmarks")
    others = {f"{project['name']}[benchmarks,track,video]"}
    assert extras["tests"] | extras["track"] | extras["video"] == requirements("tests") | others
    assert re.search(r"^## (\S+) ", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == project["version"]
    assert re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == project["version"]


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("fruitbot-impala", "models/fruitbot-impala"),
        ("starpilot-impala", "long/easy-all/impala-appo/starpilot/seed1"),
        ("starpilot-impala-full-rate", "long/easy-all/impala-full-rate/starpilot/seed1"),
        ("bigfish-ppo", "long/easy-all/ppo/bigfish/seed1"),
    ],
)
def test_shipped_agents_play(name, run):
    path, run = ROOT / f"benchmarks/results/models/{name}.pt", ROOT / f"benchmarks/results/{run}"
    model = read_model(path)
    assert curves.read(run.with_suffix(".csv")).steps[-1] == model["step"]
    assert read_json(run.with_suffix(".meta.json"))["command"].startswith(f"python {model['script']} ")
    agent = f"{readme.label(model['args']['exp_name'])} after {model['step']:,} steps of {model['args']['env_id']}"
    assert f"| `{path.name}` | {agent} " in (ROOT / "benchmarks/README.md").read_text()
    evaluate.main(evaluate.Args(path, episodes=2, num_envs=2, device="cpu"))
