"""Gather into one folder what gpu_check.py needs on a bare machine that has PyTorch for CUDA, but no network.

    python benchmarks/gather_gpu.py                       # into .gpu/, for Python 3.12 on x86-64

`wheels/` gets requirements.txt and pytest with all that they need, in the versions that are installed here, except what
the machine has (`--there`, and all that these need) and what gym3 needs for windows and videos alone. `libs/` gets the
shared libraries of this machine that Procgen's own draws in, except those of the C and C++ runtimes and zlib.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import tyro
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).parent.parent))
from common.errors import InputError
from common.files import ROOT
from common.signals import one_line_errors

LIMIT = 60  # MB that can travel to the machine beside the repository
UNUSED = {"imageio-ffmpeg", "glfw", "moderngl"}
RUNTIME = re.compile(r"(libc|libm|libdl|librt|libpthread|libresolv|libz|libstdc\+\+|libgcc_s|ld-linux-x86-64)\.so")
PLATFORMS = ("manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 40)))


@dataclass
class Args:
    out: Path = ROOT / ".gpu"
    """folder to fill; its wheels/ and libs/ are made anew"""
    python: str = "3.12"
    """version of Python there"""
    there: tuple[str, ...] = ("torch", "numpy", "tensorboard", "imageio")
    """packages that the machine has"""


def needed(names: Iterable[str], python: str, without: set[str]) -> set[str]:
    """Packages, and all that they need with this version of Python; those `without` and their needs are left out."""
    found, waiting = set(), [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found or name in without:
            continue
        found.add(name)
        try:
            requirements = [Requirement(line) for line in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            raise InputError(f"{name} is not installed here: pip install -r tests/requirements.txt first.") from None
        here = {"python_version": python, "extra": ""}
        waiting += [
            canonicalize_name(each.name) for each in requirements if not each.marker or each.marker.evaluate(here)
        ]
    return found


def fetch(name: str, python: str, folder: Path) -> None:
    """Download a package's wheel, or build it where there is none and one suits every machine."""
    pip, before = [sys.executable, "-m", "pip"], set(folder.iterdir())
    wanted = ["--quiet", "--no-deps", f"{name}=={metadata.version(name)}"]
    platforms = [word for each in PLATFORMS for word in ("--platform", f"{each}_x86_64")]
    there = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    if subprocess.run([*pip, "download", *wanted, *there, "--dest", folder], capture_output=True).returncode:
        built = subprocess.run([*pip, "wheel", *wanted, "--wheel-dir", folder], capture_output=True, text=True)
        if built.returncode or not all(path.name.endswith("none-any.whl") for path in set(folder.iterdir()) - before):
            raise InputError(f"there is no wheel of {name} for Python {python}: {built.stderr.strip()[-300:]}")


def libraries() -> dict[str, Path]:
    """The shared libraries that Procgen's own draws in and its wheel does not hold."""
    package = Path(importlib.util.find_spec("procgen").origin).parent
    ldd = subprocess.run(
        ["ldd", package / "data/prebuilt/libenv.so"], capture_output=True, text=True, check=True
    ).stdout
    if lacking := re.findall(r"(\S+) => not found", ldd):
        raise InputError(f"Procgen's libraries {', '.join(lacking)} are not on this machine: install them first.")
    found = {name: Path(path).resolve() for name, path in re.findall(r"(\S+) => (/\S+)", ldd)}
    bundled = package.resolve().parent
    return {name: path for name, path in found.items() if bundled not in path.parents and not RUNTIME.match(name)}


def main(args: Args) -> None:
    pinned = (ROOT / "requirements.txt").read_text().splitlines()
    names = [line.partition("==")[0] for line in pinned if not line.startswith("#")]
    there = needed(args.there, args.python, set()) | UNUSED
    wheels, libs = args.out / "wheels", args.out / "libs"
    for folder in (wheels, libs):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for name in sorted(needed([*names, "pytest"], args.python, there)):
        fetch(name, args.python, wheels)
    for name, path in libraries().items():
        shutil.copy(path, libs / name)
    sizes = {path: path.stat().st_size / 1e6 for path in sorted([*wheels.iterdir(), *libs.iterdir()])}
    print(*(f"{size:6.2f} MB  {path.relative_to(args.out)}" for path, size in sizes.items()), sep="\n")
    total = sum(sizes.values())
    print(f"{total:6.2f} MB  in {args.out}")
    if total > LIMIT:
        raise InputError(f"{args.out} takes more than {LIMIT} MB: name packages that the machine has in --there.")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
