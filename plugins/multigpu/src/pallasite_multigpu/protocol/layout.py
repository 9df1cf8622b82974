"""The memory through which devices meet: tables, mailboxes and error records, as plain data.

A group of devices (a mesh, in the order of ``mesh.devices.flat``) has a *mailbox* on each device,
which all of them have mapped. A communicating kernel gets a *table*, an array of 64-bit words that
says who the device is and where the mailboxes are. The code that kernels begin with, the runtime
and the simulator all follow this module.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

import numpy as np

WORD = 8
"""Bytes of a word of tables, slots and records."""
MAX_DEVICES = 32
"""Devices of a group: each lane of a warp serves one."""
MAX_BUFFERS = 63
"""Buffers of one kernel that peers may reach."""
LINE = 128
"""Bytes between flags, so that no two of them share a cache line."""

# Table: words --------------------------------------------------------------------------------

RANK = 0
"""This device's index in the group; -1 lets the kernel return at once."""
COUNT = 1
"""Devices of the group."""
TIMEOUT = 2
"""Nanoseconds that a kernel waits for its peers; 0 for ever."""
RECORD = 3
"""Address of the device's error record, or 0."""
MULTICAST = 4
"""What to add to an address to get the one that means the same place on all devices (modulo 2^64);
0 if there is no multicast."""
MAILBOX = 5
"""Address of the own mailbox."""
NETWORK = 6
"""Address of the state of NVSHMEM's device library, or 0; only kernels that are made for devices of
several hosts use it. The word behind it is 0."""
MAILBOXES = 8
"""The first of :data:`WORDS_OF_DEVICE` words for each device of the group: the address of its
mailbox as seen from this device, and what that device adds to an address of this one to reach the
same place (modulo 2^64), which is 0 where both are in one process. Of a device that is reached by
the network only, the first is the symmetric address of the mailbox plus :data:`FAR`, and the second
leads to symmetric addresses."""
WORDS_OF_DEVICE = 2
FAR = 1
"""Mailboxes are at even addresses."""


def elements(devices: int) -> int:
    """The first word, of one for each device: its number in the network."""
    return MAILBOXES + WORDS_OF_DEVICE * devices


def table_words(devices: int) -> int:
    """Words of the table of a group."""
    return elements(devices) + devices


def devices_of(words: int) -> int:
    """Devices of the group whose table has so many words."""
    return (words - MAILBOXES) // (WORDS_OF_DEVICE + 1)


def table(
    rank: int,
    mailboxes: Sequence[int],
    offsets: Sequence[int] | None = None,
    *,
    timeout: int = 0,
    record: int = 0,
    multicast: int = 0,
    network: int = 0,
    numbers: Sequence[int] | None = None,
) -> np.ndarray:
    """The table of one device, uint64.

    Args:
      rank: its index in the group, or -1 (then ``mailboxes`` is of any content).
      mailboxes: addresses of all mailboxes, as seen from this device.
      offsets: for each device, what it adds to an address of this one; by default 0.
      timeout: in nanoseconds; 0 for ever.
      record: address of its error record, or 0.
      multicast: the offset of multicast addresses, or 0.
      network: address of the network's state, or 0.
      numbers: of the devices in the network; by default their places in the group.
    """
    own = mailboxes[rank] if rank >= 0 else 0
    words = [rank % 2**64, len(mailboxes), timeout, record, multicast % 2**64, own, network, 0]
    for mailbox, offset in zip(mailboxes, offsets or [0] * len(mailboxes), strict=True):
        words += [mailbox, offset % 2**64]
    words += range(len(mailboxes)) if numbers is None else numbers
    return np.array(words, np.uint64)


# Mailbox: bytes ------------------------------------------------------------------------------

TICKETS = 0
"""u64: in its low half, how many blocks of the present kernel have begun; in its high half, the
epoch: how many kernels have begun completely."""
EXITS = 8
"""u32: how many blocks have reached the exit barrier."""
LOCK = 12
"""u32: 1 once a thread of this device writes the error record."""
ENTRY_FLAGS = LINE
"""u64 for each device, :data:`LINE` bytes apart: in its low half, the epoch that its last kernel
belongs to; in its high half, the fingerprint of that kernel."""
EXIT_FLAGS = ENTRY_FLAGS + MAX_DEVICES * LINE
"""u32 for each device, :data:`LINE` bytes apart: the last epoch whose kernel has ended there."""
SLOTS = EXIT_FLAGS + MAX_DEVICES * LINE
"""A slot for each parity of the epoch, device and buffer: first an address that
tells launches apart, then those of its buffers."""
SLOT = 2 * WORD
"""Bytes of a slot, two words: in their low halves, the epoch; in their high halves, the low and the
high half of an address. So who reads a word sees whether it is the one that belongs to the epoch,
in whichever order words and flags arrive."""
SLOTS_OF_DEVICE = (1 + MAX_BUFFERS) * SLOT
"""Bytes of the slots of one device and parity."""
SLOTS_OF_PARITY = MAX_DEVICES * SLOTS_OF_DEVICE
"""Bytes of the slots of one parity."""
MAILBOX_BYTES = SLOTS + 2 * SLOTS_OF_PARITY
"""Bytes of a mailbox; it begins as zeros, aligned to :data:`LINE`."""

# Error record: words -------------------------------------------------------------------------

RECORD_STATE = 0
"""1 when the record is complete."""
RECORD_CODE = 1
RECORD_RANK = 2
RECORD_VALUE = 3
RECORD_EPOCH = 4
RECORD_FINGERPRINT = 5
RECORD_BLOCK = 6
RECORD_ABORT = 7
"""Written by the host: lets kernels that wait give up, see :data:`ABORT_NOW`."""
ABORT_NOW = 1
"""Another device has given up, and has said why."""
ABORT_SOON = 2
"""A process of the mesh has ended: what has not come soon will never come."""
RECORD_WORDS = 8


class Trap(enum.IntEnum):
    """Why a kernel gave up: the code of an error record, and what its value is."""

    #: Peers did not begin the kernel in time; the value is a mask of their ranks.
    NOT_BEGUN = 1
    #: Peers did not end the kernel in time; likewise.
    NOT_ENDED = 2
    #: A peer runs another kernel; the value is the fingerprint of that.
    OTHER_KERNEL = 3
    #: Two communicating kernels run on this device at once.
    OVERLAP = 4
    #: A device number is out of range; the value is that number.
    DEVICE_ID = 5
    #: Other devices did not signal in time; the low half of the value is what the semaphore has to
    #: reach, the high half what it has.
    NOT_SIGNALLED = 7
    #: A device gets more rows than it has room for; the value is their number.
    CAPACITY = 6


@dataclasses.dataclass(frozen=True)
class ErrorRecord:
    """What a kernel that gave up left.

    Attributes:
      code: why; 0 for a code that is not known.
      rank: of the device that gave up.
      value: see :class:`Trap`.
      epoch: of the kernel.
      fingerprint: of the kernel.
      block: linear number of the block.
    """

    code: int
    rank: int
    value: int
    epoch: int
    fingerprint: int
    block: int

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks of the devices that the kernel waited for, of a time-out."""
        if self.code not in (Trap.NOT_BEGUN, Trap.NOT_ENDED):
            return ()
        return tuple(rank for rank in range(MAX_DEVICES) if self.value >> rank & 1)

    def describe(self, names: Mapping[int, str] | None = None) -> str:
        """What happened, in words.

        Args:
          names: of devices by rank, as people know them.
        """

        def device(rank: int) -> str:
            name = (names or {}).get(rank)
            return f"device {rank}" + (f" ({name})" if name else "")

        missing = ", ".join(map(device, self.peers))
        texts = {
            Trap.NOT_BEGUN: f"waited in vain for the kernel to begin on {missing}",
            Trap.NOT_ENDED: f"waited in vain for the kernel to end on {missing}",
            Trap.OTHER_KERNEL: "met another kernel on another device of its mesh"
            f" (its fingerprint is {self.value & 0xFFFFFFFF:#010x}); all devices must run the same"
            " kernels in the same order",
            Trap.OVERLAP: "met another communicating kernel on its device at the same time",
            Trap.DEVICE_ID: f"was given the device id {np.int64(np.uint64(self.value))},"
            " which is out of range",
            Trap.NOT_SIGNALLED: "waited in vain for signals of other devices: a semaphore has"
            f" {self.value >> 32} of {self.value & 0xFFFFFFFF}",
            Trap.CAPACITY: f"gets {self.value} rows, more than it has room for (the capacity)",
        }
        known = {int(code): text for code, text in texts.items()}
        text = known.get(self.code, f"gave up with code {self.code}, value {self.value:#x}")
        return f"{device(self.rank)} {text}"


def read_record(words: Sequence[int] | np.ndarray) -> ErrorRecord | None:
    """The error record in memory; None as long as there is none.

    Args:
      words: :data:`RECORD_WORDS` words.
    """
    values = [int(one) for one in words]
    if values[RECORD_STATE] != 1:
        return None
    return ErrorRecord(
        code=values[RECORD_CODE],
        rank=values[RECORD_RANK],
        value=values[RECORD_VALUE],
        epoch=values[RECORD_EPOCH],
        fingerprint=values[RECORD_FINGERPRINT],
        block=values[RECORD_BLOCK],
    )
