"""Groups of devices of one process: mailboxes that all of them have mapped, and their tables."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import ExecutionError, UnsupportedError
from pallasite_multigpu.options import peer_timeout
from pallasite_multigpu.protocol import layout
from pallasite_multigpu.runtime import copy_table, watcher
from pallasite_multigpu.runtime.cuda import driver

OTHER_MACHINE = 0
"""The number of the group in a program whose devices are not known, which cannot run."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices that meet in kernels, in the order of their mesh.

    Attributes:
      number: of the group in programs, the same in all processes.
      ordinals: CUDA's numbers of the devices.
      mailboxes: addresses of their mailboxes.
      records: addresses of their error records.
    """

    number: int
    ordinals: tuple[int, ...]
    mailboxes: tuple[int, ...]
    records: tuple[int, ...]


_lock = threading.RLock()
_mailboxes: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
_groups: dict[int, Group] = {}


def number_of(devices: Sequence[int], timeout: float) -> int:
    """The number of a group in programs: the same for the same devices in any process.

    Args:
      devices: JAX's ids in the order of the mesh.
      timeout: how long kernels wait for peers, in seconds.
    """
    text = repr((tuple(devices), timeout)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def local_group(devices: Sequence[Any]) -> Group:
    """The group of GPUs of this process; makes its mailboxes when it is first asked for.

    Args:
      devices: JAX's, in the order of the mesh.

    Raises:
      UnsupportedError: devices of other processes.
      ExecutionError: a GPU cannot access the memory of another one.
    """
    elsewhere = sorted({one.process_index for one in devices})
    if len(elsewhere) > 1:
        raise UnsupportedError(
            "a kernel communicates with devices of other processes",
            got=f"a mesh of devices of processes {elsewhere}",
            expected="GPUs of one process",
            hint="run one process for all GPUs of the machine",
        )
    timeout = peer_timeout()
    number = number_of([one.id for one in devices], timeout)
    with _lock:
        if number not in _groups:
            ordinals = tuple(_ordinal(one) for one in devices)
            if ordinals not in _mailboxes:
                _mailboxes[ordinals] = _meet(ordinals)
            mailboxes, records = _mailboxes[ordinals]
            group = Group(number, ordinals, mailboxes, records)
            for rank, ordinal in enumerate(ordinals):
                words = layout.table(
                    rank, mailboxes, timeout=int(timeout * 1e9), record=records[rank]
                )
                address = driver().allocate(ordinal, words.nbytes)
                driver().write(ordinal, address, words.tobytes())
                copy_table.TABLES.add(number, ordinal, address)
            _groups[number] = group
        return _groups[number]


def _ordinal(device: Any) -> int:
    found = device.local_hardware_id
    return int(device.id if found is None else found)


def _meet(ordinals: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Mailboxes and error records of devices, which may reach each other from now on."""
    cuda = driver()
    for one in ordinals:
        for other in ordinals:
            if not cuda.reaches(one, other):
                raise ExecutionError(
                    "a kernel communicates between GPUs that cannot access each other's memory",
                    got=f"GPU {one} and GPU {other}",
                    expected="GPUs that are connected by NVLink, or by PCIe with peer access",
                    hint="nvidia-smi topo -p2p rw lists which do; leave the others out of the mesh",
                )
    for one in ordinals:
        for other in ordinals:
            if one != other:
                cuda.let_reach(one, other)
    mailboxes = tuple(cuda.allocate(one, layout.MAILBOX_BYTES) for one in ordinals)
    bytes_of_record = -(-layout.RECORD_WORDS * layout.WORD // layout.LINE) * layout.LINE
    memory = cuda.allocate_pinned(bytes_of_record * len(ordinals))
    records = tuple(memory + bytes_of_record * rank for rank in range(len(ordinals)))
    names = {rank: f"GPU {ordinal}" for rank, ordinal in enumerate(ordinals)}
    watcher.watch(records, names)
    return mailboxes, records
