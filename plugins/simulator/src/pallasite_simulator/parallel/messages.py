"""What processes tell one another."""

from __future__ import annotations

import dataclasses
import pickle
import struct
from typing import IO, TYPE_CHECKING, Any

from pallasite.plugin import PallasiteError, SourceLocation
from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.engine.memory import Allocation
from pallasite_simulator.engine.wave import Watchdog
from pallasite_simulator.launch import Execution
from pallasite_simulator.ptx.syntax import Position
from pallasite_simulator.sanitizer.findings import Findings
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite.plugin.lowering import Allocation as Request

_LENGTH = struct.Struct("<Q")


class Channel:
    """Sends objects to another process, and receives them, over two pipes."""

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]):
        self._incoming = incoming
        self._outgoing = outgoing

    def send(self, message: Any) -> None:
        """Sends an object; raises OSError if the other process has ended."""
        contents = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._outgoing.write(_LENGTH.pack(len(contents)) + contents)
        self._outgoing.flush()

    def receive(self) -> Any:
        """Waits for an object; raises EOFError if the other process has ended."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def close(self) -> None:
        """Closes both pipes."""
        self._incoming.close()
        self._outgoing.close()

    def _read(self, count: int) -> bytes:
        contents = self._incoming.read(count)
        if len(contents) < count:
            raise EOFError
        return contents


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a new process must know of the one that starts it.

    Attributes:
      path: where modules are found.
      plugins: plugins that the program registered itself: pairs of name and module.
    """

    path: tuple[str, ...]
    plugins: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Job:
    """A launch whose blocks are shared.

    Attributes:
      ptx, name, multiprocessors: the program, as :func:`pallasite_simulator.programs.load` takes
        it.
      disabled_plugins: the option of this name.
      geometry: of the grid.
      dynamic_shared_bytes: of each block.
      parameters: the parameter buffer.
      allocations: of global memory.
      file: with the contents of global memory, and behind it, for each process that needs them, a
        byte for each sector that it reads, and for each that it writes.
      memory_bytes: size of global memory.
      sectors_at: where the bytes of the process are; None if it needs none.
      statistics: whether accesses to memory are counted.
      checks: what the sanitizer checks; None if nothing.
      requests: who asked for which piece of dynamic shared memory.
      watchdog: says when the launch has to have ended; None for never.
    """

    ptx: str
    name: str
    multiprocessors: int
    disabled_plugins: tuple[str, ...]
    geometry: Geometry
    dynamic_shared_bytes: int
    parameters: bytes
    allocations: tuple[Allocation, ...]
    file: str
    memory_bytes: int
    sectors_at: int | None
    statistics: bool
    checks: frozenset[str] | None
    requests: tuple[Request, ...]
    watchdog: Watchdog | None


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Blocks of the present job to run, in order; None: the job is over."""

    blocks: Array | None


@dataclasses.dataclass(frozen=True)
class Done:
    """What a chunk did, and what the sanitizer found in it; for the end of a job, what is counted
    for all of it."""

    execution: Execution | None
    findings: Findings | None = None


@dataclasses.dataclass(frozen=True)
class Failed:
    """What a chunk raised, and what the sanitizer found in it before; ``details`` is the traceback
    of what no user can cause."""

    error: PallasiteError
    details: str = ""
    findings: Findings | None = None

    def __reduce__(self) -> Any:
        # Exceptions with keyword arguments cannot be made anew by calling their class.
        error = self.error
        state = {key: _portable(value) for key, value in vars(error).items()}
        return _rebuild, (type(error), error.args, state, self.details, self.findings)


def _rebuild(
    kind: type[PallasiteError],
    arguments: tuple[Any, ...],
    state: dict[str, Any],
    details: str,
    findings: Findings | None,
) -> Failed:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(state)
    return Failed(error, details, findings)


def _portable(value: Any) -> Any:
    """Offending values can be anything; messages show their text."""
    return value if value is None or isinstance(value, _KEPT) else str(value)


_KEPT = (str, int, float, list, SourceLocation, Position)
