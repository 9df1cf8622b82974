"""What ptxas and the disassemblers made of files, by content, for all processes and later sessions.

Tests that want more than that ptxas accepts a text (``accepted_ptx``) read its messages, registers
and machine code, which are the same whenever the text and the program are.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import pickle
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Sequence
from typing import ClassVar

from tests import session_folders

from pallasite.codegen.tools import find_tool

TOOLS = ("ptxas", "nvdisasm", "cuobjdump")

MOST_BYTES = 1 << 27
"""What is kept from one session to the next."""

_INPUT = "\0input {}\0"
"""Stands for the name of an input, which is another one each time, in what a program prints."""

type Done = subprocess.CompletedProcess[str]


def run(command: Sequence[str | pathlib.Path], cwd: pathlib.Path) -> Done:
    """Runs a program in a folder, or does to its files what it did when it last got the same."""

    def execute(words: list[str]) -> Done:
        return subprocess.run(words, cwd=cwd, capture_output=True, text=True)

    words = [str(word) for word in command]
    known = ToolResults.of_session
    return execute(words) if known is None else known.run(words, execute, cwd)


class ToolResults:
    """Runs the tools that are installed for each input that they have not had before.

    Args:
      folder: with a file for each result; what was written first is deleted where there is more
        than ``MOST_BYTES``.
      programs: the tools; by default those that are found now.

    Attributes:
      of_session: the one of all tests of this process, if any.
    """

    of_session: ClassVar[ToolResults | None] = None

    def __init__(self, folder: pathlib.Path, programs: Sequence[pathlib.Path] | None = None):
        self._folder = folder
        found = [find_tool(name).path for name in TOOLS] if programs is None else programs
        self._programs = {str(program) for program in found if program is not None}
        session_folders.forget_the_oldest(folder, MOST_BYTES)

    def run(
        self,
        command: list[str],
        execute: Callable[[list[str]], Done],
        cwd: pathlib.Path | None = None,
    ) -> Done:
        """What a command returns; the file that it names after ``-o`` is written.

        Args:
          command: a program, its options and the files that it reads.
          execute: runs it.
          cwd: where, if its files are named from there.
        """
        if command[0] not in self._programs:
            return execute(command)
        place = cwd or pathlib.Path()
        at = command.index("-o") + 1 if "-o" in command else 0
        inputs = [
            number
            for number, word in enumerate(command)
            if number not in (0, at) and (place / word).is_file()
        ]
        file = self._folder / self._key(command, place, inputs, at)
        output = place / command[at] if at else None
        known = _read(file)
        if known is None:
            done = execute(command)
            if done.returncode < 0:  # Somebody has ended it.
                return done
            texts = [done.stdout, done.stderr]
            for number in inputs:
                texts = [text.replace(command[number], _INPUT.format(number)) for text in texts]
            made = output.read_bytes() if output is not None and output.is_file() else None
            _write(file, (done.returncode, texts[0], texts[1], made))
            return done
        status, *texts, made = known
        for number in inputs:
            texts = [text.replace(_INPUT.format(number), command[number]) for text in texts]
        if output is not None and made is not None:
            output.write_bytes(made)
        return subprocess.CompletedProcess(command, status, *texts)

    @staticmethod
    def _key(command: list[str], place: pathlib.Path, inputs: Sequence[int], output: int) -> str:
        digest = hashlib.sha256(_identity(command[0]))
        for number, word in enumerate(command[1:], 1):
            content = (place / word).read_bytes() if number in inputs else b""
            kind = os.path.splitext(word)[1] if number == output or number in inputs else word
            digest.update(f"\0{number in inputs} {kind} {len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()


@functools.cache
def _identity(program: str) -> bytes:
    """What changes whenever another program is installed."""
    status = os.stat(program)
    return f"{os.path.realpath(program)} {status.st_size} {status.st_mtime_ns}".encode()


def _read(file: pathlib.Path) -> tuple[int, str, str, bytes | None] | None:
    try:
        return pickle.loads(zlib.decompress(file.read_bytes()))
    except (OSError, zlib.error, EOFError, pickle.UnpicklingError):
        return None


def _write(file: pathlib.Path, result: tuple[int, str, str, bytes | None]) -> None:
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix="new-", delete=False) as written:
        written.write(zlib.compress(pickle.dumps(result), 1))
    os.replace(written.name, file)
