"""Tells of kernels that gave up: a thread looks at the error records that kernels write.

A kernel that traps ends its process's use of the GPU; JAX raises an error that does not say why.
What the kernel recorded is printed on standard error, and the group's other kernels, which would
wait in vain, are told to give up as well.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pallasite_multigpu.protocol import layout
from pallasite_multigpu.runtime import process_life

INTERVAL = 0.1
"""Seconds between looks."""


@dataclasses.dataclass(frozen=True)
class KernelName:
    """A kernel as its user knows it.

    Attributes:
      name: of the kernel.
      location: the line that defines it, ``file:line``, or empty.
    """

    name: str
    location: str = ""


@dataclasses.dataclass
class _Watched:
    records: tuple[int, ...]
    names: dict[int, str]
    processes: dict[int, Mapping[str, Any]]
    ended: list[int] = dataclasses.field(default_factory=list)
    told: bool = False

    def tell(self, word: int) -> None:
        """Tells the kernels of this process that wait to give up."""
        for address in self.records:
            words = (ctypes.c_uint64 * layout.RECORD_WORDS).from_address(address)
            words[layout.RECORD_ABORT] = word

    def look_at_processes(self) -> None:
        """What waits for a process that has ended need not wait any longer."""
        for rank, process in list(self.processes.items()):
            if process_life.has_ended(process):
                del self.processes[rank]
                self.ended.append(rank)
                self.names[rank] = f"{self.names.get(rank, 'a process')}, which has ended"
                self.tell(layout.ABORT_SOON)


_lock = threading.Lock()
_watched: list[_Watched] = []
_kernels: dict[int, KernelName] = {}
_thread: threading.Thread | None = None


def know(fingerprint: int, kernel: KernelName) -> None:
    """Remembers the kernel of a fingerprint, for messages."""
    with _lock:
        _kernels[fingerprint] = kernel


def watch(
    records: Sequence[int],
    names: Mapping[int, str],
    processes: Mapping[int, Mapping[str, Any]] | None = None,
) -> None:
    """Looks at the error records of a group from now on.

    Args:
      records: their addresses in the host's memory: those of devices of this process.
      names: of the devices, by rank.
      processes: those of other devices, by rank, where they are of this machine; see
        :mod:`.process_life`.
    """
    global _thread
    with _lock:
        _watched.append(_Watched(tuple(records), dict(names), dict(processes or {})))
        if _thread is None:
            _thread = threading.Thread(target=_run, name="pallasite-multigpu-watcher", daemon=True)
            _thread.start()


def look() -> list[str]:
    """Looks once; returns what is to be told, each text once for a group."""
    texts = []
    with _lock:
        for group in _watched:
            if group.told:
                continue
            group.look_at_processes()
            found = []
            for address in group.records:
                words = (ctypes.c_uint64 * layout.RECORD_WORDS).from_address(address)
                record = layout.read_record(list(words))
                if record is not None:
                    found.append(record)
            if not found:
                continue
            group.told = True
            group.tell(layout.ABORT_NOW)
            texts += [text_of(record, group.names, group.ended) for record in found]
    return texts


def text_of(record: layout.ErrorRecord, names: Mapping[int, str], ended: Sequence[int] = ()) -> str:
    """What is told of a record: the user's line, the kernel, the devices.

    Args:
      record: the record.
      names: of devices by rank.
      ended: ranks of devices whose process has ended.
    """
    kernel = _kernels.get(record.fingerprint, KernelName("a kernel that is not known"))
    where = f"{kernel.location}: " if kernel.location else ""
    text = f"{where}kernel {kernel.name!r}: {record.describe(names)}"
    unnamed = [rank for rank in ended if rank not in record.peers]
    if unnamed:
        text += "".join(f"; device {rank} ({names[rank]})" for rank in unnamed)
    if record.peers:
        text += (
            "\n  expected: that each device of the mesh calls the kernel within the option"
            " peer_timeout\n  try: run the same programs in the same order on all devices"
        )
    return text


def _run() -> None:
    while True:
        for text in look():
            print(f"pallasite: {text}", file=sys.stderr, flush=True)
        time.sleep(INTERVAL)
