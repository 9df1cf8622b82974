"""The memory that a process shares with others: what lies in it, and how others reach it."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from pallasite.plugin import ExecutionError
from pallasite_multigpu.runtime import workspace_handler

ALIGNMENT = 512
"""Bytes, of everything in the heap."""


class SharedMemory(Protocol):
    """A way to share memory between processes of one GPU each.

    Attributes:
      name: as in the option ``peer_memory``.
    """

    name: str

    def allocate(self, ordinal: int, nbytes: int) -> int:
        """Memory of a GPU that can be shared, with zeros; returns its address."""

    def tell(self) -> Any:
        """What other processes have to know to reach it, for JSON."""

    def reach(self, process: int, told: Any) -> int:
        """Where the GPU reaches the memory that another process has allocated; 0 if only by the
        network.

        Raises:
          ExecutionError: it cannot.
        """

    def network(self, ordinal: int) -> int:
        """The address of what kernels have to know of the network, or 0."""


class Heap:
    """A piece of shared memory, with arrays from its beginning, and the workspace at its end.

    Args:
      memory: how it is shared.
      ordinal: CUDA's number of the GPU.
      nbytes: its size.
    """

    def __init__(self, memory: SharedMemory, ordinal: int, nbytes: int):
        self.memory, self.ordinal = memory, ordinal
        self.begin = memory.allocate(ordinal, nbytes)
        self.end = self.begin + nbytes
        self._used: dict[int, int] = {}
        self._workspace = 0
        self._lock = threading.Lock()
        workspace_handler.share(self.begin, self.end)

    def allocate(self, nbytes: int, what: str) -> int:
        """Memory of the heap; returns its address, a multiple of :data:`ALIGNMENT`.

        Args:
          nbytes: how much.
          what: is put there, for the message.

        Raises:
          ExecutionError: there is no room.
        """
        size = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            place = self.begin
            for used, length in sorted(self._used.items()):
                if used - place >= size:
                    break
                place = used + length
            if place + size > self.end - self._workspace:
                raise self._full(what, nbytes)
            self._used[place] = size
            return place

    def free(self, address: int) -> None:
        """Gives memory back."""
        with self._lock:
            del self._used[address]

    def reserve(self, nbytes: int, what: str) -> None:
        """Makes room for a workspace at the end.

        Raises:
          ExecutionError: there is none.
        """
        with self._lock:
            last = max((one + size for one, size in self._used.items()), default=self.begin)
            if last > self.end - nbytes:
                raise self._full(what, nbytes)
            self._workspace = max(self._workspace, nbytes)

    def _full(self, what: str, nbytes: int) -> ExecutionError:
        taken = sum(self._used.values())
        return ExecutionError(
            f"the memory that this process shares with others has no room for {what}",
            got=f"{nbytes} bytes, and of {self.end - self.begin} bytes {taken} are in use by"
            f" arrays, {self._workspace} by the largest kernel",
            hint="pallasite.config.update('symmetric_heap', '4G') before the first kernel, or"
            " PALLASITE_SYMMETRIC_HEAP=4G",
        )
