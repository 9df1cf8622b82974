"""Tables and mailboxes in the memory of the simulator, which runs all devices at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from pallasite_multigpu.protocol import layout

MAILBOX = "mailbox"
RECORD = "error record"

_calls = itertools.count()


@dataclasses.dataclass(frozen=True)
class SimulatedTables:
    """The tables of a kernel's devices, for the simulator.

    Attributes:
      count: devices of the mesh.
      communicating: whether the kernel waits for other devices.
    """

    count: int
    communicating: bool

    @property
    def sizes(self) -> dict[str, int]:
        """By name, bytes of memory that each device has for all of them to find each other."""
        if not self.communicating:
            return {}
        return {MAILBOX: layout.MAILBOX_BYTES, RECORD: layout.RECORD_WORDS * layout.WORD}

    def fill(
        self,
        ranks: Sequence[int],
        addresses: Mapping[str, Sequence[int]],
        multicast: Sequence[int],
    ) -> tuple[list[np.ndarray], dict[str, list[np.ndarray]]]:
        """The tables and the mailboxes of devices.

        The epoch is another one in each launch, as it is on GPUs, and passes its largest number.

        Args:
          ranks: of the devices.
          addresses: by name, of the memory of each.
          multicast: for each, the distance to the addresses that mean all devices.
        """
        mailboxes = addresses.get(MAILBOX, [0] * self.count)
        records = addresses.get(RECORD, [0] * self.count)
        tables = [
            layout.table(rank, mailboxes, record=records[place], multicast=multicast[place])
            for place, rank in enumerate(ranks)
        ]
        if not self.communicating:
            return tables, {}
        epoch = (2**32 - 2 + next(_calls)) % 2**32
        record = np.zeros(layout.RECORD_WORDS, np.uint64)
        return tables, {
            MAILBOX: [self._mailbox(epoch) for _ in ranks],
            RECORD: [record for _ in ranks],
        }

    def explain(self, contents: Mapping[str, Sequence[np.ndarray]]) -> str | None:
        """Why a device has given up, in words; None if none has.

        Args:
          contents: by name, bytes of the memory of each device.
        """
        for one in contents.get(RECORD, ()):
            record = layout.read_record(one.view(np.uint64))
            if record is not None:
                return record.describe()
        return None

    def _mailbox(self, epoch: int) -> np.ndarray:
        """A mailbox as the kernels before leave it."""
        contents = np.zeros(layout.MAILBOX_BYTES, np.uint8)
        contents[layout.TICKETS + 4 : layout.TICKETS + 8] = _bytes(epoch, 4)
        for device in range(self.count):
            entry = layout.ENTRY_FLAGS + device * layout.LINE
            contents[entry : entry + 4] = _bytes(epoch, 4)
            ended = layout.EXIT_FLAGS + device * layout.LINE
            contents[ended : ended + 4] = _bytes(epoch, 4)
        return contents


def _bytes(value: int, size: int) -> np.ndarray:
    return np.frombuffer(value.to_bytes(size, "little"), np.uint8)
