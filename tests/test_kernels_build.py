"""How the CPU's kernels are compiled."""

import functools
import subprocess

import pytest
import torch

from common import kernels
from test_kernels import layers, rgb, run

# ------------------------------------------------------------------------------------------------------- the compiler


@pytest.fixture
def rebuilt(monkeypatch):
    """As if nothing had been compiled yet."""
    monkeypatch.setattr(kernels, "build", functools.cache(kernels.build.__wrapped__))


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"], ids=["missing", "failing"])
def test_a_missing_compiler_is_said_once_and_changes_no_number(compiler, rebuilt, monkeypatch, capsys):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(kernels, "call", None)  # no kernel runs
    x, (conv, plain) = rgb(2, 8, 8), layers()
    assert torch.equal(run(x, conv), plain(x))
    assert torch.equal(run(x, conv), plain(x))
    assert capsys.readouterr().err.count("note: convolution and max-pooling run PyTorch's slower kernels") == 1


@pytest.mark.parametrize("output", ["", "echo warning >&2"], ids=["silent", "with output"])
def test_a_compiler_that_hangs_is_given_up(output, rebuilt, tmp_path, monkeypatch, capsys):
    compiler, run, waited = tmp_path / "hangs", subprocess.run, []
    compiler.write_text(f"#!/bin/sh\n{output}\nsleep 9\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(
        subprocess, "run", lambda *given, timeout, **named: waited.append(timeout) or run(*given, timeout=0.5, **named)
    )
    assert kernels.build() is None
    assert waited == [60]
    assert "note: convolution and max-pooling run PyTorch's slower kernels" in capsys.readouterr().err


def test_an_empty_name_of_a_compiler_is_none(rebuilt, monkeypatch, capsys):
    monkeypatch.setenv("CXX", " ")
    assert kernels.build() is not None
    assert not capsys.readouterr().err
