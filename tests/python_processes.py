"""Processes of tests that run Python, without each taking the time to import JAX.

They are forked from one that has imported what Pallasite and its tests import of other packages,
and in which nothing else has happened: no part of Pallasite is imported, no device looked for.
Tests of what is imported, of hash seeds and of signals start theirs with ``subprocess``.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tests import xla_programs

ORIGIN = pathlib.Path(__file__).parent / "python_origin.py"

_READ_AT_START = ("JAX_", "LD_", "PYTHON")
_PLATFORMS = "JAX_PLATFORMS"  # The forked process sets what it is there.
_ANY_VALUE = {
    *(name.upper() for name in (xla_programs.FOLDER, *xla_programs.EVERYTHING)),
    *("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", _PLATFORMS),
}


def run(
    arguments: Sequence[Any],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Any = None,
    timeout: float | None = 300,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True)``.

    Args:
      arguments: of Python: ``-c`` and code, ``-m`` and a module, or a script; then its own.
      env: the environment, by default that of this process.
      cwd: the folder where the process begins, by default that of this one.
      timeout: seconds until it is killed, and subprocess.TimeoutExpired raised.
      check: whether to raise subprocess.CalledProcessError unless its status is 0.
    """
    words = [os.fspath(one) for one in arguments]
    variables = dict(os.environ if env is None else env)
    folder = os.fspath(cwd or os.getcwd())
    origin = _origin()
    if _read_at_start(variables) == origin.read_at_start:
        done = origin.run(words, variables, folder, timeout)
    else:
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            env=variables,
            cwd=folder,
            timeout=timeout,
        )
    if check:
        done.check_returncode()
    return done


class _Origin:
    """The process that others are forked from; it ends when this one does."""

    def __init__(self) -> None:
        self.read_at_start = _read_at_start(os.environ)
        self._channel, other = socket.socketpair()
        without = {name: value for name, value in os.environ.items() if name != _PLATFORMS}
        with other:
            self._process = subprocess.Popen(
                [sys.executable, ORIGIN, str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env={**without, "PYTHONPATH": ""},
            )
        atexit.register(self._end, os.getpid())

    def _end(self, process: int) -> None:
        if os.getpid() == process:
            self._channel.close()
            self._process.wait()

    def run(
        self, words: list[str], variables: dict[str, str], folder: str, timeout: float | None
    ) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, *words]
        with (
            tempfile.TemporaryFile("w+") as request,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as errors,
        ):
            json.dump({"arguments": words, "environment": variables, "folder": folder}, request)
            request.flush()
            files = [file.fileno() for file in (request, out, errors)]
            socket.send_fds(self._channel, [b"."], files)
            process = self._answer(None)
            try:
                status = self._answer(timeout)
            except TimeoutError:
                os.kill(process, signal.SIGKILL)
                self._answer(None)
                raise subprocess.TimeoutExpired(program, timeout or 0) from None
            texts = []
            for file in (out, errors):
                file.seek(0)
                texts.append(file.read())
        return subprocess.CompletedProcess(program, status, *texts)

    def _answer(self, timeout: float | None) -> int:
        """The next number from the origin."""
        self._channel.settimeout(timeout)
        data = self._channel.recv(8, socket.MSG_WAITALL)
        assert len(data) == 8, f"the process that others are forked from is gone: {self._process}"
        (number,) = struct.unpack("q", data)
        return int(number)


@functools.cache
def _origin_of(process: int) -> _Origin:
    return _Origin()


def _origin() -> _Origin:
    return _origin_of(os.getpid())


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    """What JAX, Python and the loader of libraries read when they begin, of an environment."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(_READ_AT_START) and name not in _ANY_VALUE
    }
