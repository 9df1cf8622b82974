"""CUDA C++ that nvcc makes PTX of, once in a session for all its processes."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import shutil
import subprocess

from tests import session_folders

COMPILER = shutil.which("nvcc")
SOURCES = pathlib.Path(__file__).parent / "cuda"


@functools.cache
def compiled(source: pathlib.Path, *options: str) -> str:
    """The PTX of a source for sm_90a; raises subprocess.CalledProcessError if nvcc fails."""
    assert COMPILER is not None
    words = [source.read_text(), str(source), *options]
    name = hashlib.sha256("\0".join(words).encode()).hexdigest()
    result = session_folders.shared("cuda") / f"{name}.ptx"
    if not result.exists():
        # Two processes may do it at the same time: what they rename is the same.
        made = result.with_suffix(f".{os.getpid()}")
        words = ["-ptx", "-std=c++17", "-arch=sm_90a", *options, str(source), "-o", str(made)]
        subprocess.run([COMPILER, *words], check=True, capture_output=True, text=True)
        made.rename(result)
    return result.read_text()
