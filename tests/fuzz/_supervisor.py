"""Runs the parts of a long run in processes, and starts those again that end before they are done.

A program that ends its process, or spoils its GPU, is a crash; one that keeps a process for too
long, and cannot be interrupted, is ended with the process. The next process goes on behind it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.fuzz._progress import LOST, append

STARTS_IN_VAIN = 3
GRACE = 60
"""Seconds that a process may take to start, or to end a program that hangs."""


@dataclasses.dataclass
class Part:
    """One process after the other, which run every so many programs.

    Attributes:
      number: of the part.
      command: of its processes.
      folder: of its files.
      variables: further ones of the environment.
      seconds: after which a program hangs.
    """

    number: int
    command: Sequence[str]
    folder: pathlib.Path
    variables: dict[str, str]
    seconds: int
    process: subprocess.Popen[bytes] | None = None
    starts_in_vain: int = 0
    size: int = -1
    changed: float = 0.0
    done: bool = False

    @property
    def path(self) -> pathlib.Path:
        """Of what came of its programs."""
        return self.folder / f"part-{self.number:03d}.jsonl"

    @property
    def log(self) -> pathlib.Path:
        """Of what its processes print."""
        return self.folder / f"part-{self.number:03d}.log"

    def start(self) -> None:
        """Starts its first process, or the next one."""
        before, self.size, self.changed = self.size, self._size(), time.monotonic()
        self.starts_in_vain = self.starts_in_vain + 1 if before == self.size else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=os.environ | self.variables, stdout=log, stderr=log
            )

    def poll(self) -> None:
        """Looks after the process."""
        assert self.process is not None
        status = self.process.poll()
        if status is None:
            now = self._size()
            if now != self.size:
                self.size, self.changed = now, time.monotonic()
            elif time.monotonic() - self.changed > self.seconds + GRACE:
                self.kill("hang", f"more than {self.seconds + GRACE} s, could not be interrupted")
        elif status in (0, 1):
            self.done = True
        else:
            if status != LOST:
                end = self.log.read_text(errors="replace").splitlines()[-15:]
                self._note("crash", "\n".join([f"exit status {status}", *end]))
            if self.starts_in_vain >= STARTS_IN_VAIN:
                print(f"part {self.number} ends at its start, with status {status}: {self.log}")
                self.done = True
            else:
                self.start()

    def kill(self, outcome: str, message: str) -> None:
        """Ends the process, and says what came of its program."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            self._note(outcome, message)
        self.process = None
        if outcome == "hang":
            self.start()
        else:
            self.done = True

    def _note(self, outcome: str, message: str) -> None:
        """Completes the line of the program that has begun."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        with contextlib.suppress(json.JSONDecodeError):
            entry: dict[str, Any] = json.loads(lines[-1]) if lines else {}
            if entry and "outcome" not in entry:
                append(self.path, {**entry, "outcome": outcome, "message": message[:2000]})

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0


def run(
    commands: Sequence[Sequence[str]],
    folder: pathlib.Path,
    variables: Sequence[dict[str, str]],
    *,
    minutes: float | None,
    seconds: int,
) -> None:
    """Runs parts at once until all are done.

    Args:
      commands: of the parts.
      folder: of their files.
      variables: of their environments.
      minutes: after which no program begins, which the parts keep themselves.
      seconds: after which a program hangs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pairs = zip(commands, variables, strict=True)
    parts = [Part(i, command, folder, own, seconds) for i, (command, own) in enumerate(pairs)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end = None if minutes is None else time.monotonic() + 60 * minutes + seconds
    try:
        for part in parts:
            part.start()
        while not all(part.done for part in parts):
            time.sleep(0.2)
            for part in parts:
                if not part.done:
                    part.poll()
            if end is not None and time.monotonic() > end:
                break
    finally:
        for part in parts:
            part.kill("interrupted", "the run ended")


def command(subject: str, *arguments: str) -> list[str]:
    """Of a process that runs programs."""
    return [sys.executable, "-u", "-m", "tests.fuzz", subject, *arguments]
