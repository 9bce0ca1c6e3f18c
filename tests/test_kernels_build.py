"""How the CPU's kernels are compiled, and kept in the user's cache folder."""

import functools
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from common.fast import kernels


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """The folder for libraries, in a home where nothing has been compiled yet. The kernels are one small function."""
    (tmp_path / "kernels.cpp").write_text('extern "C" int pool_forward_float32() { return 1; }')
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    monkeypatch.setattr(kernels, "build", functools.cache(kernels.build.__wrapped__))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "ppo-ppg-impala"


@pytest.fixture
def compilations(kept, monkeypatch):
    """Builds as a new process would, and counts the compilations."""
    run, commands = subprocess.run, []
    monkeypatch.setattr(subprocess, "run", lambda command, **named: commands.append(command) or run(command, **named))

    def count() -> int:
        commands.clear()
        assert kernels.build.__wrapped__().pool_forward_float32() == 1
        return sum("-o" in command for command in commands)

    return count


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "sh hanging", "c++ -Dpool_forward_float32=other"])
def test_without_a_compiler_pytorch_computes_and_a_note_says_so_once(compiler, kept, tmp_path, monkeypatch, capsys):
    """A compiler that hangs is given up after a minute, here after half a second."""
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *words, timeout, **named: run(*words, timeout=timeout / 120, **named))
    monkeypatch.chdir(tmp_path)
    Path("hanging").write_text('case "$*" in *-o*) exec sleep 9;; esac')
    monkeypatch.setenv("CXX", compiler)
    conv, x = nn.Conv2d(3, 16, 3, padding=1), torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    found = kernels.conv_max_pool(x, conv.weight, conv.bias)  # which asks for the kernels several times
    assert torch.equal(found, nn.functional.max_pool2d(conv(x), 3, stride=2, padding=1))
    assert capsys.readouterr().err.count("PyTorch's slower kernels") == 1


def test_a_second_run_compiles_nothing(compilations, tmp_path, monkeypatch):
    """What is kept is the user's alone, under any umask. A damaged or writable library is compiled again."""
    monkeypatch.setenv("CXX", "c++ -g")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    umask = os.umask(0)
    assert compilations() == 1
    os.umask(umask)
    (file,) = tmp_path.glob("cache/ppo-ppg-impala/*")
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent, file.parent.parent)] == [0o600, 0o700, 0o700]
    content = file.read_bytes()
    file.unlink()  # this process has loaded it
    file.write_bytes(content[:9000])  # loading a part would be fatal
    assert [compilations(), compilations()] == [1, 0]
    file.chmod(0o602)
    assert [compilations(), compilations()] == [1, 0]
    file.unlink()
    assert kernels.build.__wrapped__()._name == str(file)  # not of a temporary folder, which may forbid execution


def test_a_kept_library_is_of_one_source_compiler_options_and_processor(kept, tmp_path, monkeypatch):
    answers = 'case "$*" in *--version) echo "$VERSION";; *-march=native*-dM*) test "$MACROS" && echo "$MACROS";; esac'
    compiler, options, source = ["sh", str(tmp_path / "compiler")], ["-march=native"], tmp_path / "kernels.cpp"
    (tmp_path / "compiler").write_text(answers)
    found = {kernels.kept_library(compiler, options, source)}  # None, of a compiler that names no macros
    for setting in ("MACROS=znver3", "MACROS=znver4", "VERSION=2"):
        monkeypatch.setenv(*setting.split("="))
        found.add(kernels.kept_library(compiler, options, source))
    found.add(kernels.kept_library([*compiler, "-g"], options, source))
    found.add(kernels.kept_library(compiler, [*options, "-g"], source))
    source.write_text("")
    found.add(kernels.kept_library(compiler, options, source))
    assert None in found
    assert len(found) == 7


@pytest.mark.parametrize("spoil", [
    lambda folder: folder.parent.chmod(0o1777),  # as /tmp
    lambda folder: folder.parent.parent.chmod(0o777),
    lambda folder: folder.chmod(0o720),
    lambda folder: folder.symlink_to(folder.rename(folder.with_name("elsewhere"))),
    lambda folder: os.chown(folder, 1, -1) if os.getuid() == 0 else pytest.skip("only root can give files away"),
])  # fmt: skip
def test_a_folder_that_others_could_write_to_is_not_used(spoil, compilations, kept):
    """Nothing is read from there, nor written."""
    assert compilations() == 1
    (file,) = kept.iterdir()
    written = file.stat().st_mtime_ns
    spoil(kept)
    assert compilations() == 1
    assert file.stat().st_mtime_ns == written


def test_where_nothing_can_be_kept_each_run_compiles(compilations, kept, monkeypatch):
    """On a full disk, and without a home."""
    monkeypatch.setattr(os, "replace", lambda *paths: Path("/dev/full").write_text("OSError"))
    assert [compilations(), compilations()] == [1, 1]
    assert not list(kept.iterdir())
    for home in ("/dev/null", "~"):
        monkeypatch.setenv("HOME", home)
        assert compilations() == 1
