"""CUDA C++ that nvcc makes PTX of, unless what it makes is recorded."""

from __future__ import annotations

import functools
import pathlib
import shutil
import subprocess
import tempfile

from recorded_ptx import recorded

COMPILER = shutil.which("nvcc")
SOURCES = pathlib.Path(__file__).parent / "cuda"


@functools.cache
def compiled(source: pathlib.Path, *options: str) -> str:
    """The PTX of a source for sm_90a; raises subprocess.CalledProcessError if nvcc fails."""
    if not source.is_relative_to(SOURCES):
        return _compiled(source, *options)
    parts = (_version(), str(source), source.read_text(), *options)
    return str(recorded(parts, lambda: _compiled(source, *options)))


def _compiled(source: pathlib.Path, *options: str) -> str:
    with tempfile.TemporaryDirectory(prefix="pallasite-cuda-") as folder:
        result = pathlib.Path(folder, "kernel.ptx")
        _run("-ptx", "-std=c++17", "-arch=sm_90a", *options, str(source), "-o", str(result))
        return result.read_text()


@functools.cache
def _version() -> str:
    return _run("--version")


def _run(*words: str) -> str:
    assert COMPILER is not None
    done = subprocess.run([COMPILER, *words], check=True, capture_output=True, text=True)
    return done.stdout
