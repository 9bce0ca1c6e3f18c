"""The files of common/ lie in layers: each imports from the layers below it alone, and can be read after them."""

import ast
from pathlib import Path

COMMON = Path(__file__).parent.parent / "common"
LAYERS = [
    ["errors"],
    ["settings", "signals"],
    ["procgen_env", "video", "reward_scale"],
    ["envs"],
    ["files"],
    ["provenance", "scores"],
    ["run"],
    ["device"],
    ["kernels"],
    ["accelerate", "learning", "actors"],
    ["world"],
    ["intrinsic"],
    ["checkpoint"],
    ["resume", "load", "evaluation"],
    ["session"],
]
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}


def imported(source: str) -> set[str]:
    """The modules of common/ that a file imports, anywhere in it, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["common" if node.level else None, node.module]))
            modules = [f"{base}.{each.name}" for each in node.names] if base == "common" else [base]
        else:
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        found |= {parts[1] for parts in (module.split(".") for module in modules) if parts[0] == "common" and parts[1:]}
    return found


def test_imports_are_found():
    source = """
import os, common.a
from common.b import x
from common import c
from torch.common import no
if True:
    def f():
        import common.d as g
        from .e import x
        from . import h
"""
    assert imported(source) == set("abcdeh")


def test_every_file_has_a_layer():
    assert {path.stem for path in COMMON.glob("*.py")} - {"__init__"} == HEIGHT.keys()


def test_each_file_imports_from_lower_layers_alone():
    upwards = set()
    for name, height in HEIGHT.items():
        for other in imported((COMMON / f"{name}.py").read_text()):
            if HEIGHT[other] >= height:
                upwards.add((name, other))
    assert not upwards


def test_no_file_imports_a_script():
    for path in COMMON.glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not names & {"ppo", "ppg", "impala"}, path
