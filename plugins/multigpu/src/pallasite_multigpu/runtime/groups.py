"""Groups of devices: mailboxes that all of them have mapped, and their tables."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallasite.plugin import ExecutionError
from pallasite_multigpu.options import peer_timeout
from pallasite_multigpu.protocol import layout
from pallasite_multigpu.runtime import copy_table, process_groups, watcher
from pallasite_multigpu.runtime.cuda import driver

OTHER_MACHINE = 0
"""The number of the group in a program whose devices are not known, which cannot run."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices that meet in kernels, in the order of their mesh.

    Attributes:
      number: of the group in programs, the same in all processes.
      ordinals: CUDA's numbers of those of this process.
      mailboxes: addresses of their mailboxes, as this process has them.
      records: addresses of the error records of this process.
      far: whether some of them are reached by the network only.
    """

    number: int
    ordinals: tuple[int, ...]
    mailboxes: tuple[int, ...]
    records: tuple[int, ...]
    far: bool = False


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


def group_of(devices: Sequence[Any]) -> Group:
    """The group of some GPUs; makes its mailboxes when it is first asked for.

    If they are of several processes, each of these has to call this.

    Args:
      devices: JAX's, in the order of the mesh.

    Raises:
      UnsupportedError: several processes, of which one has several of the GPUs.
      ExecutionError: a GPU cannot access the memory of another one; a process does not come.
    """
    timeout = peer_timeout()
    number = number_of([one.id for one in devices], timeout)
    with _lock:
        if number not in _groups:
            make = _of_processes if is_of_processes(devices) else _of_one_process
            _groups[number] = make(number, devices, int(timeout * 1e9))
        return _groups[number]


def is_of_processes(devices: Sequence[Any]) -> bool:
    """Whether devices belong to several processes."""
    return len({one.process_index for one in devices}) > 1


def _of_processes(number: int, devices: Sequence[Any], timeout: int) -> Group:
    process_groups.check_one_each(devices)
    mine = [one for one in devices if one.process_index == jax.process_index()]
    if not mine:
        return Group(number, (), (), ())
    met = process_groups.meet(devices, _ordinal(mine[0]))
    words = layout.table(
        met.rank,
        met.mailboxes,
        met.offsets,
        timeout=timeout,
        record=met.record,
        network=met.network,
        numbers=met.numbers,
    )
    _add_table(number, met.ordinal, words)
    far = any(mailbox & layout.FAR for mailbox in met.mailboxes)
    return Group(number, (met.ordinal,), met.mailboxes, (met.record,), far)


def _of_one_process(number: int, devices: Sequence[Any], timeout: int) -> Group:
    ordinals = tuple(_ordinal(one) for one in devices)
    if ordinals not in _mailboxes:
        _mailboxes[ordinals] = _meet(ordinals)
    mailboxes, records = _mailboxes[ordinals]
    for rank, ordinal in enumerate(ordinals):
        words = layout.table(rank, mailboxes, timeout=timeout, record=records[rank])
        _add_table(number, ordinal, words)
    return Group(number, ordinals, mailboxes, records)


def _add_table(number: int, ordinal: int, words: np.ndarray) -> None:
    address = driver().allocate(ordinal, words.nbytes)
    driver().write(ordinal, address, words.tobytes())
    copy_table.TABLES.add(number, ordinal, address)


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
