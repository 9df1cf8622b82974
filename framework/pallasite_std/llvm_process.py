"""LLVM in a process of its own, for kernels that it may refuse to compile by ending the process.

LLVM does so for an instruction that it cannot select, for a call of an intrinsic with the wrong
arguments and for much else that its verifier lets pass. Pallasite emits none of it, but what rules,
passes and translations of others and inlined code emit is anything. Kernels in which these had a
part are read and emitted here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from pallasite.plugin import CompilationError, SourceLocation
from pallasite.plugin.codegen import deferred
from pallasite.plugin.ir import location_in_llvm
from pallasite_std import llvm_worker

_REASON = re.compile(r"(?:LLVM ERROR|error|fatal error): (.+)|.*(Assertion `.*' failed)")
_INTRINSIC = re.compile(r"%(llvm\.[\w.]+)")
_PLACE = re.compile(r", (\S+\.\w+):(\d+):(\d+)")


@contextlib.contextmanager
def separate_llvm(kernel: str, settings: Sequence[Any]) -> Iterator[SeparateLLVM | None]:
    """LLVM in a process that ends with the block; None where no such process can be started.

    Args:
      kernel: the name of the kernel, for messages.
      settings: options of LLVM, target triple and arguments of the target machine.
    """
    # It gets no more of this process than where packages are: not the environment, no ``.pth``.
    code = "import runpy, sys; sys.path[:] = sys.argv[2:]; "
    code += "runpy.run_path(sys.argv[1], run_name='__main__')"
    arguments = ["-I", "-S", "-c", code, llvm_worker.__file__, *map(os.path.abspath, sys.path)]
    with contextlib.ExitStack() as stack:
        complaints = stack.enter_context(tempfile.TemporaryFile())
        try:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=complaints,
                )
            )
        except OSError:
            yield None
            return
        found = SeparateLLVM(kernel, process, complaints)
        stack.callback(found.end)
        yield found if found.starts(settings) else None


class SeparateLLVM:
    """LLVM in a process of its own; :func:`separate_llvm` makes one."""

    def __init__(self, kernel: str, process: Any, complaints: Any):
        self._kernel, self._process, self._complaints = kernel, process, complaints

    def starts(self, settings: Sequence[Any]) -> bool:
        """Whether LLVM is there, with the settings."""
        self._send(json.dumps(settings).encode() + b"\n")
        return bool(self._process.stdout.readline() == llvm_worker.READY)

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # Some of a request may not have been sent.
            self._process.stdin.close()

    def read(self, llvm: str) -> None:
        """Parses and verifies LLVM IR, for those who want to do it themselves afterwards.

        Raises:
          CompilationError: LLVM ended the process.
        """
        self._ask(b"read", llvm)

    def emit_assembly(self, module: Any) -> str:
        """The assembly of a valid module.

        Raises:
          CompilationError: LLVM ended the process.
        """
        with deferred():
            text = str(module)
        return self._ask(b"emit", text)

    def _ask(self, verb: bytes, llvm: str) -> str:
        text = llvm.encode()
        self._send(b"%b %d\n%b" % (verb, len(text), text))
        size = self._process.stdout.readline()
        if not size:
            raise self._failure(llvm)
        return str(self._process.stdout.read(int(size)).decode())

    def _send(self, request: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # If it has ended, there will be no answer.
            self._process.stdin.write(request)
            self._process.stdin.flush()

    def _failure(self, llvm: str) -> CompilationError:
        """The error that says why LLVM ended, at the kernel's line if it says where."""
        status = self._process.wait()
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace")
        lines = said.strip().splitlines() or [f"it ended with status {status} and gave no reason"]
        found = [match for match in map(_REASON.match, lines) if match is not None]
        reason = (found[0][1] or found[0][2]) if found else lines[-1]
        return CompilationError(
            f"LLVM cannot compile kernel {self._kernel!r}: {reason}",
            expected="instructions, and calls of intrinsics, that LLVM has for this target",
            hint="PALLASITE_DUMP=directory keeps the text of every stage",
            location=_place(said, llvm),
        )


def _place(said: str, llvm: str) -> SourceLocation | None:
    """The source line of the instruction that LLVM cannot compile."""
    if (intrinsic := _INTRINSIC.search(said)) is not None:
        call = re.search(rf".*call .*@{re.escape(intrinsic[1])}\b.*", llvm)
        return None if call is None else location_in_llvm(call[0], llvm)
    if (place := _PLACE.search(said)) is None:
        return None
    file = re.search(rf'filename: "{re.escape(place[1])}", directory: "(.*?)"', llvm)
    path = os.path.join(file[1] if file is not None else "", place[1])
    return SourceLocation(path, int(place[2]), int(place[3]))
