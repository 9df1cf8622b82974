"""The texts of PTX that ptxas has accepted, by content, for all processes and later sessions.

Half of the time that ptxas takes for a small kernel is its start, so it gets many at once.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Sequence
from typing import ClassVar

# As it is now: tests replace it.
from pallasite.codegen.assembler import _run as run_program

OPTIONS = ("-O1",)
"""Of ptxas. With less effort, it takes longer for large kernels, since there is more to write."""

STRICT_OPTIONS = ("--warn-on-spills", "--warning-as-error")
"""Where it must not warn; as for programs, it then takes all the effort it can."""

MOST_TEXTS = 50_000
"""What is kept from one session to the next; a session of the whole suite has a tenth of it."""

TOGETHER = 32
"""How many texts ptxas gets at once."""

LENGTH_TOGETHER = 300_000
"""And how long they are: large kernels take so long that nothing is gained."""

_LENGTH = 65
"""Bytes of a line: a digest of 64 digits and the end of the line."""


class AcceptedPtx:
    """Runs ptxas for each text that it has not accepted before.

    What it has accepted is in one file of a folder, a digest of the text, the target, the options
    and the version of ptxas in each line. Lines are added in one piece, so several processes can
    use the folder. What another version has accepted is deleted.

    Args:
      program: ptxas.
      folder: where the file is; None to remember texts in this process only.

    Attributes:
      of_session: the one of all tests of this process; None where there is no ptxas.
    """

    of_session: ClassVar[AcceptedPtx | None] = None

    def __init__(self, program: pathlib.Path, folder: pathlib.Path | None):
        self.program = program
        command = [str(program), "--version"]
        version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self._salt = _digest(version, *OPTIONS, *STRICT_OPTIONS)
        self._known: set[str] = set()
        self._later: dict[tuple[str, bool], list[tuple[str, str]]] = {}
        self._read_bytes = 0
        self._file: pathlib.Path | None = None
        if folder is not None:
            self._file = folder / f"accepted-{self._salt[:16]}"
            for other in folder.glob("accepted-*"):
                if other != self._file:
                    other.unlink(missing_ok=True)
            self._forget_the_oldest()

    def check(self, ptx: str, target: str) -> None:
        """Fails unless ptxas accepts the text, now or when it was last asked."""
        key = self._key(ptx, target)
        if self._has(key):
            return
        error = self._assemble([ptx], target)
        assert error is None, f"ptxas refuses the PTX of a kernel:\n{error}"
        self._add(key)

    def check_later(self, ptx: str, target: str, test: str, *, strict: bool = False) -> None:
        """Notes a text of a test that :meth:`check_noted` checks.

        Where many have come together, they are checked now, and whatever test this is fails,
        naming the tests whose texts ptxas refuses.

        Args:
          ptx: the text.
          target: what it is for.
          test: the test's name.
          strict: whether ptxas must not warn either, of registers that it spills for example.
        """
        noted = {one for one, _ in self._later.get((target, True), ())}
        if ptx not in noted and not self._has(self._key(ptx, target, strict)):
            texts = self._later.setdefault((target, strict), [])
            texts.append((ptx, test))
            if len(texts) >= TOGETHER or sum(len(one) for one, _ in texts) > LENGTH_TOGETHER:
                self.check_noted(target)

    def check_noted(self, *targets: str) -> None:
        """Checks what was noted for some targets, or for all if none is named."""
        errors = []
        for target, strict in tuple(self._later):
            if targets and target not in targets:
                continue
            texts = {
                ptx: test
                for ptx, test in self._later.pop((target, strict))
                if not self._has(self._key(ptx, target, strict))
            }
            alone = self._assemble(_made_distinct(list(texts)), target, strict) is not None
            for ptx, test in texts.items():
                error = self._assemble([ptx], target, strict) if alone else None
                if error is None:
                    for key in {self._key(ptx, target), self._key(ptx, target, strict)}:
                        self._add(key)
                else:
                    errors.append(f"ptxas refuses the PTX of a kernel of {test}:\n{error}")
        assert not errors, "\n".join(errors)

    def _assemble(self, texts: Sequence[str], target: str, strict: bool = False) -> str | None:
        """What is wrong with the texts; None if they were accepted."""
        if not texts:
            return None
        with tempfile.TemporaryDirectory(prefix="pallasite-ptx-") as folder:
            sources = [pathlib.Path(folder, f"kernel-{number}.ptx") for number in range(len(texts))]
            for source, ptx in zip(sources, texts, strict=True):
                source.write_text(ptx)
            options = STRICT_OPTIONS if strict else OPTIONS
            command = [str(self.program), f"-arch={target}", *options, *map(str, sources)]
            done = run_program([*command, "-o", os.devnull])
        refused = done.returncode or (strict and done.stderr)
        return done.stderr or f"status {done.returncode}" if refused else None

    def add(self, ptx: str, target: str) -> None:
        """Takes note that ptxas has accepted a text."""
        key = self._key(ptx, target)
        if not self._has(key):
            self._add(key)

    def _key(self, ptx: str, target: str, strict: bool = False) -> str:
        return _digest(self._salt, target, ptx, *(["strict"] if strict else []))

    def _has(self, key: str) -> bool:
        if key not in self._known:
            self._read()
        return key in self._known

    def _add(self, key: str) -> None:
        self._known.add(key)
        if self._file is not None:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, f"{key}\n".encode())
            finally:
                os.close(descriptor)

    def _read(self) -> None:
        """Takes in what this and other processes have added."""
        if self._file is None or not self._file.exists():
            return
        with self._file.open("rb") as file:
            if self._file.stat().st_size < self._read_bytes:
                self._read_bytes = 0  # It is another file, with what is left of this one.
            file.seek(self._read_bytes)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._known.update(complete.decode("ascii", "replace").split())
        self._read_bytes += len(complete)

    def _forget_the_oldest(self) -> None:
        assert self._file is not None
        if not self._file.exists() or self._file.stat().st_size <= MOST_TEXTS * _LENGTH:
            return
        with tempfile.NamedTemporaryFile(dir=self._file.parent, delete=False) as file:
            file.write(self._file.read_bytes()[-MOST_TEXTS // 2 * _LENGTH :])
        os.replace(file.name, self._file)


def _made_distinct(texts: Sequence[str]) -> list[str]:
    """The same kernels with names and numbers of source files that no other text has.

    What is declared outside of kernels belongs to a text of its own; what they define does not.
    """
    return [_with_suffix(ptx, number) for number, ptx in enumerate(texts)]


_DEFINED = re.compile(r"(?m)^(?:\.visible |\.weak )?\.(?:entry|func) (?:\([^)]*\) )?([\w$]+)")
_PART = re.compile(r"[\w$%.]")
_FILES = re.compile(r"(\.(?:file|loc)\s+|inlined_at\s+)(\d+)")


def _with_suffix(ptx: str, number: int) -> str:
    def renamed(match: re.Match[str]) -> str:
        before = match.string[match.start() - 1]
        return match[0] if _PART.match(before) else f"{match[0]}_{number}"

    # Patterns that begin with letters are found much faster than those that look behind.
    for name in set(_DEFINED.findall(ptx)):
        ptx = re.sub(rf"{re.escape(name)}(?![\w$])", renamed, ptx)
    return _FILES.sub(lambda match: f"{match[1]}{1000 * number + int(match[2])}", ptx)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
