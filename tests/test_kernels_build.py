"""How the CPU's kernels are compiled, and kept in the user's cache folder."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from common.fast import kernels
from common.run import ROOT

SLOWER = "note: convolution and max-pooling run PyTorch's slower kernels"


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """The folder for libraries, in a home where nothing has been compiled yet. The kernels are one small function."""
    (tmp_path / "kernels.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    monkeypatch.setattr(kernels, "build", functools.cache(kernels.build.__wrapped__))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "ppo-ppg-impala"


def write_compiler(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "compiler").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "compiler").chmod(0o755)
    return str(folder / "compiler")


@pytest.fixture
def compilations(kept, monkeypatch, capsys):
    """Builds as a new process would, without a word, and counts the compilations."""
    run, commands = subprocess.run, []
    monkeypatch.setattr(subprocess, "run", lambda command, **named: commands.append(command) or run(command, **named))

    def count() -> int:
        commands.clear()
        assert kernels.build.__wrapped__().one() == 1
        assert not capsys.readouterr().err
        return sum("-o" in command for command in commands)

    return count


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"], ids=["missing", "failing"])
def test_a_missing_compiler_is_said_once_and_changes_no_number(compiler, kept, monkeypatch, capsys):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(kernels, "call", None)  # no kernel runs
    conv, x = nn.Conv2d(3, 16, 3, padding=1), torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        expected = nn.functional.max_pool2d(conv(x), 3, stride=2, padding=1)
        assert torch.equal(kernels.conv_max_pool(x, conv.weight, conv.bias), expected)
    assert capsys.readouterr().err.count(SLOWER) == 1


@pytest.mark.parametrize(("output", "case", "calls"), [("", "*", 1), ("echo warning >&2", "*-o*", 3)])
def test_a_compiler_that_hangs_is_given_up(output, case, calls, kept, tmp_path, monkeypatch, capsys):
    """At once, or as it compiles."""
    run, waited = subprocess.run, []
    compiler = write_compiler(tmp_path, f'{output}\ncase "$*" in {case}) exec sleep 9;; esac')
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(
        subprocess, "run", lambda *given, timeout, **named: waited.append(timeout) or run(*given, timeout=0.5, **named)
    )
    assert kernels.build() is None
    assert waited == [60] * calls
    assert SLOWER in capsys.readouterr().err


@pytest.mark.parametrize(("given", "compiler"), [(None, " "), ("relative", "c++"), ("/absolute", "c++ -g")])
def test_a_second_run_compiles_nothing(given, compiler, compilations, kept, tmp_path, monkeypatch):
    """What is kept is the user's alone, under any umask."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", compiler)
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given.replace("/", f"{tmp_path}/"))
    umask = os.umask(0)
    try:
        assert [compilations(), compilations()] == [1, 0]
    finally:
        os.umask(umask)
    folder = tmp_path / "absolute" / kept.name if given == "/absolute" else kept
    (file,) = folder.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder, file)] == [0o700, 0o700, 0o600]
    assert not (tmp_path / "relative").exists()


def test_a_kept_library_is_of_one_source_compiler_options_and_processor(kept, tmp_path, monkeypatch):
    answers = 'case "$*" in *--version) echo "$VERSION";; *-march=native*-dM*) test "$MACROS" && echo "$MACROS";; esac'
    for folder in ("here", "there"):
        write_compiler(tmp_path / folder, answers)
    found, source, options = set(), tmp_path / "kernels.cpp", ["-march=native"]
    for setting in ("PATH=here", "VERSION=1", "MACROS=znver3", "MACROS=znver4", "VERSION=2", "PATH=there"):
        name, value = setting.split("=")
        monkeypatch.setenv(name, f"{tmp_path}/{value}" if name == "PATH" else value)
        found.add(kernels.kept_library(["compiler"], options, source))
    assert len(found) == 5  # with None, of a compiler that names no macros
    found.add(kernels.kept_library(["compiler", "-g"], options, source))
    found.add(kernels.kept_library(["compiler"], [*options, "-g"], source))
    source.write_text("")
    found.add(kernels.kept_library(["compiler"], options, source))
    assert len(found) == 8


def needs_root(spoil):
    return pytest.param(spoil, marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away"))


@pytest.mark.parametrize("spoil", [
    lambda folder: folder.parent.chmod(0o1777),  # as /tmp
    lambda folder: folder.parent.parent.chmod(0o777),
    lambda folder: folder.chmod(0o702),
    lambda folder: folder.chmod(0o720),
    lambda folder: folder.symlink_to(folder.rename(folder.with_name("elsewhere"))),
    needs_root(lambda folder: os.chown(folder, 1, -1)),
])  # fmt: skip
def test_a_folder_that_others_could_write_to_is_not_used(spoil, compilations, kept):
    """Nothing is read from there, nor written."""
    assert compilations() == 1
    spoil(kept)
    assert compilations() == 1
    for file in kept.iterdir():
        file.unlink()
    assert compilations() == 1
    assert not list(kept.iterdir())


@pytest.mark.parametrize("spoil", [
    lambda file: file.write_bytes(file.read_bytes()[:9000]),  # loading a part would be fatal
    lambda file: kernels.write_library(file, b"no library"),
    lambda file: file.chmod(0o602),
    needs_root(lambda file: os.chown(file, 1, -1)),
])  # fmt: skip
def test_a_damaged_or_foreign_library_is_compiled_again(spoil, compilations, kept):
    assert compilations() == 1
    for file in kept.iterdir():
        spoil(file)
    assert [compilations(), compilations()] == [1, 0]


@pytest.mark.parametrize("home", ["/dev/null", "missing", pytest.param("~", id="none"), pytest.param(None, id="full")])
def test_where_nothing_can_be_kept_each_run_compiles(home, compilations, kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    else:
        monkeypatch.setattr(os, "replace", lambda *paths: Path("/dev/full").write_text("OSError"))
    assert [compilations(), compilations()] == [1, 1]
    assert not (kept.exists() and list(kept.iterdir()))
    assert not Path("missing").exists()


def test_two_processes_at_once(kept, tmp_path, monkeypatch):
    meet = 'mkdir "$0.$$"; until [ "$(ls -d "$0".* | wc -l)" = 2 ]; do sleep 0.01; done'
    compiler = write_compiler(tmp_path, f'case "$*" in *" -o "*) {meet};; esac\nexec c++ "$@"')
    monkeypatch.setenv("CXX", compiler)
    program = f"from common.fast import kernels; kernels.__file__ = {kernels.__file__!r}; assert kernels.build().one()"
    processes = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) for _ in range(2)]
    assert [process.wait(timeout=100) for process in processes] == [0, 0]
    assert len(list(kept.iterdir())) == 1
