"""Memory shared by CUDA IPC, between processes of one machine."""

from __future__ import annotations

from typing import Any

from pallasite.plugin import ExecutionError
from pallasite_multigpu.runtime.cuda import driver


class IpcMemory:
    """Memory of the CUDA driver, which other processes open by its handle."""

    name = "ipc"

    def __init__(self) -> None:
        self._ordinal = 0
        self._handle = b""

    def allocate(self, ordinal: int, nbytes: int) -> int:
        """Memory of a GPU that can be shared, with zeros; returns its address."""
        cuda = driver()
        address = cuda.allocate(ordinal, nbytes)
        self._ordinal, self._handle = ordinal, cuda.handle(ordinal, address)
        return address

    def tell(self) -> Any:
        """The handle, and the GPU."""
        return {"handle": self._handle.hex(), "ordinal": self._ordinal}

    def network(self, ordinal: int) -> int:
        """There is none."""
        del ordinal
        return 0

    def reach(self, process: int, told: Any) -> int:
        """Where the GPU reaches the memory that another process has allocated.

        Raises:
          ExecutionError: the GPUs cannot access each other's memory, or the driver does not let
            these processes share any.
        """
        try:
            return driver().open(self._ordinal, bytes.fromhex(told["handle"]))
        except ExecutionError as error:
            raise ExecutionError(
                "a kernel communicates between GPUs that cannot access each other's memory",
                got=f"GPU {self._ordinal} of this process and GPU {told['ordinal']} of process"
                f" {process}: {error.got}",
                expected="GPUs of one machine that are connected by NVLink, or by PCIe with peer"
                " access, and processes that share an IPC namespace",
                hint="nvidia-smi topo -p2p rw lists which are; leave the others out of the mesh",
            ) from error
