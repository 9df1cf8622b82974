"""A CUDA driver whose memory is files that processes map: for the logic between processes."""

from __future__ import annotations

import ctypes
import mmap
import os
import pathlib
import tempfile

from pallasite.plugin import ExecutionError


class FakeDriver:
    """As ``runtime.cuda.Driver``, for one GPU in each process.

    Args:
      apart: handles of GPUs that cannot be reached.
    """

    def __init__(self, ordinal=0, apart=()):
        self.ordinal, self.apart = ordinal, apart
        self._names, self._maps = {}, []

    def _map(self, path, nbytes):
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), nbytes)
        self._maps.append(mapped)
        return ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def allocate(self, ordinal, nbytes):
        assert ordinal == self.ordinal
        number, path = tempfile.mkstemp(prefix=f"gpu{ordinal}-", dir=os.environ["FAKE_GPUS"])
        os.ftruncate(number, nbytes)
        os.close(number)
        address = self._map(path, nbytes)
        self._names[address] = pathlib.Path(path).name
        return address

    def allocate_pinned(self, nbytes):
        return self.allocate(self.ordinal, nbytes)

    def fill(self, ordinal, address, nbytes):
        ctypes.memset(address, 0, nbytes)

    def write(self, ordinal, address, data):
        ctypes.memmove(address, data, len(data))

    def handle(self, ordinal, address):
        return self._names[address].ljust(64).encode()

    def open(self, ordinal, handle):
        path = pathlib.Path(os.environ["FAKE_GPUS"]) / handle.decode().strip()
        if any(path.name.startswith(f"gpu{one}-") for one in self.apart):
            raise ExecutionError("cuIpcOpenMemHandle failed", got="217: no peer access")
        mmap.mmap(-1, 4096 * (3 + ordinal))  # Addresses differ between processes.
        return self._map(path, path.stat().st_size)
