"""Groups of devices of several processes: mailboxes in shared memory, and where each has them."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import jax

from pallasite.plugin import ExecutionError, UnsupportedError
from pallasite_multigpu.options import peer_memory, symmetric_heap
from pallasite_multigpu.protocol import layout
from pallasite_multigpu.runtime import exchange, process_life, watcher
from pallasite_multigpu.runtime.cuda import driver
from pallasite_multigpu.runtime.heap import Heap, SharedMemory

_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Meeting:
    """What this process knows of a group.

    Attributes:
      rank: of the device of this process.
      ordinal: CUDA's number of it.
      mailboxes: where this process has the mailboxes, by rank, as tables have them.
      offsets: for each device, what it adds to addresses of this process.
      record: address of the error record.
      numbers: of the devices in the network.
      network: address of the network's state, or 0.
    """

    rank: int
    ordinal: int
    mailboxes: tuple[int, ...]
    offsets: tuple[int, ...]
    record: int
    numbers: tuple[int, ...]
    network: int


_lock = threading.RLock()
_heap: Heap | None = None
_reached: dict[int, int] = {}
_mailboxes: dict[tuple[int, ...], int] = {}
_meetings: dict[tuple[int, ...], Meeting] = {}


def heap() -> Heap | None:
    """The memory that this process shares; None as long as it shares none."""
    return _heap


def meet(devices: Sequence[Any], ordinal: int) -> Meeting:
    """The group of some devices of several processes; each of these has to call this.

    Args:
      devices: JAX's, in the order of the mesh.
      ordinal: CUDA's number of the device of this process.

    Raises:
      ExecutionError: a process does not come, or cannot share memory with this one.
    """
    ids = tuple(one.id for one in devices)
    with _lock:
        if ids not in _meetings:
            _meetings[ids] = _meet(devices, ids, ordinal)
        return _meetings[ids]


def check_one_each(devices: Sequence[Any]) -> None:
    """Several processes must have one device each.

    Raises:
      UnsupportedError: one has several.
    """
    processes = [one.process_index for one in devices]
    crowded = sorted({one for one in processes if processes.count(one) > 1})
    if crowded:
        raise UnsupportedError(
            "a kernel communicates between several processes of which one has several GPUs",
            got=f"{processes.count(crowded[0])} devices of process {crowded[0]} in the mesh",
            expected="one GPU in each process, or one process for all GPUs",
            hint="start a process for each GPU: jax.distributed.initialize(...,"
            " local_device_ids=[process_id])",
        )


def use_heap(ordinal: int, kind: str) -> Heap:
    """The memory that this process shares, made when it is first asked for.

    Raises:
      ExecutionError: it is shared in another way, or lies on another GPU.
    """
    global _heap
    with _lock:
        if _heap is None:
            _heap = Heap(_memory(kind), ordinal, symmetric_heap())
        if _heap.ordinal != ordinal:
            raise ExecutionError(
                "a process shares memory of two GPUs with other processes",
                got=f"GPU {ordinal}, after GPU {_heap.ordinal}",
                expected="one GPU in each process",
            )
        if _heap.memory.name != kind:
            raise ExecutionError(
                "a process shares memory in two ways",
                got=f"{kind}, after {_heap.memory.name}",
                hint="set the option peer_memory to one of them",
            )
        return _heap


def _memory(kind: str) -> SharedMemory:
    if kind == "ipc":
        from pallasite_multigpu.runtime.ipc import IpcMemory

        return IpcMemory()
    from pallasite_multigpu.runtime.nvshmem import NvshmemMemory

    return NvshmemMemory()


def _meet(devices: Sequence[Any], ids: tuple[int, ...], ordinal: int) -> Meeting:
    processes = [one.process_index for one in devices]
    rank = processes.index(jax.process_index())
    key = "group/" + hashlib.sha256(repr(ids).encode()).hexdigest()[:16]

    def place() -> dict[str, Any]:
        machine = _BOOT.read_text().strip()
        return {
            "machine": machine,
            "choice": peer_memory(),
            "heap": symmetric_heap(),
            "process": process_life.identity(),
        }

    places = exchange.meet(f"{key}/place", rank, processes, place)
    kind = _kind(processes, places)
    if kind == "nvshmem" and _heap is None:
        _check_all_begin(processes, places, jax.process_count())

    def share() -> dict[str, Any]:
        shared = use_heap(ordinal, kind)
        if ids not in _mailboxes:  # Others may know the one of an attempt that failed.
            mailbox = shared.allocate(layout.MAILBOX_BYTES, "the mailbox of a mesh")
            driver().fill(ordinal, mailbox, layout.MAILBOX_BYTES)
            _mailboxes[ids] = mailbox
        return {"memory": shared.memory.tell(), "mailbox": _mailboxes[ids] - shared.begin}

    shares = exchange.meet(f"{key}/share", rank, processes, share)
    own = use_heap(ordinal, kind)

    def reach() -> dict[str, Any]:
        for process, told in zip(processes, shares, strict=True):
            if process not in _reached:
                mine = process == processes[rank]
                _reached[process] = own.begin if mine else own.memory.reach(process, told["memory"])
        return {"begins": [_reached[process] for process in processes]}

    reaches = exchange.meet(f"{key}/reach", rank, processes, reach)
    begins = reaches[rank]["begins"]
    bytes_of_record = -(-layout.RECORD_WORDS * layout.WORD // layout.LINE) * layout.LINE
    record = driver().allocate_pinned(bytes_of_record)
    names = {
        place: f"GPU {ordinal} of this process" if place == rank else f"process {process}"
        for place, process in enumerate(processes)
    }
    processes_here = {
        place: one["process"]
        for place, one in enumerate(places)
        if place != rank and one["machine"] == places[rank]["machine"]
    }
    watcher.watch((record,), names, processes_here)
    mailboxes, offsets = [], []
    for number, (begin, told, one) in enumerate(zip(begins, shares, reaches, strict=True)):
        # What is far has the addresses of this process here, and its own there.
        mailboxes.append((begin or own.begin + layout.FAR) + told["mailbox"])
        offsets.append((one["begins"][rank] or one["begins"][number]) - own.begin)
    return Meeting(
        rank,
        ordinal,
        tuple(mailboxes),
        tuple(offsets),
        record,
        tuple(processes),
        own.memory.network(ordinal),
    )


def _check_all_begin(processes: Sequence[int], places: Sequence[Any], count: int) -> None:
    """NVSHMEM is started by all processes of the program at once, with heaps of one size.

    Raises:
      ExecutionError: there are other processes, or other sizes.
    """
    if len(processes) != count:
        raise ExecutionError(
            "NVSHMEM would be started by some processes of the program only",
            got=f"a kernel of processes {list(processes)}, of {count}",
            expected="a first kernel that communicates between all of them",
            hint="pallasite_multigpu.symmetric_empty with a sharding over all devices starts it",
        )
    sizes = sorted({one["heap"] for one in places})
    if len(sizes) > 1:
        raise ExecutionError(
            "processes share memory of different sizes by NVSHMEM",
            got=f"the option symmetric_heap is {' and '.join(map(str, sizes))} bytes",
            expected="the same in all processes",
        )


def _kind(processes: Sequence[int], places: Sequence[Any]) -> str:
    """How the processes of a group share memory.

    Raises:
      ExecutionError: they want different ways, or one that does not go between machines.
    """
    choices = sorted({one["choice"] for one in places})
    machines = {one["machine"] for one in places}
    if len(choices) > 1:
        raise ExecutionError(
            "processes of one mesh share memory in different ways",
            got=f"the option peer_memory is {' and '.join(choices)}",
            expected="the same in all processes",
        )
    (choice,) = choices
    if choice == "ipc" and len(machines) > 1:
        raise ExecutionError(
            "processes of different machines cannot share memory by CUDA IPC",
            got=f"processes {list(processes)} on {len(machines)} machines",
            expected="the option peer_memory at 'auto' or 'nvshmem'",
        )
    if choice != "auto":
        return str(choice)
    return "ipc" if len(machines) == 1 else "nvshmem"
