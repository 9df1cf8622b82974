"""The texts of PTX that ptxas has accepted, by content, for all processes and later sessions."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import tempfile

OPTIONS = ("-O1",)
"""Of ptxas. With less effort, it takes longer for large kernels, since there is more to write."""

MOST_TEXTS = 50_000
"""What is kept from one session to the next; a session of the whole suite has a tenth of it."""

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
    """

    def __init__(self, program: pathlib.Path, folder: pathlib.Path | None):
        self.program = program
        command = [str(program), "--version"]
        version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self._salt = _digest(version, *OPTIONS)
        self._known: set[str] = set()
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
        with tempfile.TemporaryDirectory(prefix="pallasite-ptx-") as folder:
            source = pathlib.Path(folder, "kernel.ptx")
            source.write_text(ptx)
            command = [str(self.program), f"-arch={target}", *OPTIONS, str(source)]
            done = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True)
        assert done.returncode == 0, f"ptxas refuses the PTX of a kernel:\n{done.stderr}"
        self._add(key)

    def add(self, ptx: str, target: str) -> None:
        """Takes note that ptxas has accepted a text."""
        key = self._key(ptx, target)
        if not self._has(key):
            self._add(key)

    def _key(self, ptx: str, target: str) -> str:
        return _digest(self._salt, target, ptx)

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


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
