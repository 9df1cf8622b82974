"""Where scoped allocations lie in shared memory: a strict stack, with no code at run time.

The resource estimator finds the peak before lowering starts; the stack then hands out offsets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxlib.mlir import ir

from pallasite.errors import InternalError, SourceLocation
from pallasite.ir import ops
from pallasite.lowering.launch import SHARED_MEMORY_ALIGNMENT, LaunchContext


def aligned(size: int, alignment: int = SHARED_MEMORY_ALIGNMENT) -> int:
    """``size`` rounded up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


class SharedStack:
    """Byte offsets of scoped shared-memory allocations, up to the estimated peak ``limit``.

    ``untouched`` says whether no scope has allocated anything yet.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._top = 0
        self._scratch: tuple[int, int] | None = None
        self.untouched = True

    @contextlib.contextmanager
    def allocate(self, size: int) -> Iterator[int]:
        """Yields the offset of ``size`` bytes, aligned to 1024, for the duration of a scope."""
        offset = self._top
        self._top = aligned(offset + size)
        if self._top > self.limit:
            raise InternalError(
                f"scoped shared memory reaches {self._top} bytes, but {self.limit} were estimated:"
                " a resource rule disagrees with its lowering rule"
            )
        try:
            yield offset
        finally:
            self._top = offset

    def thread_scratch(
        self, launch: LaunchContext, size: int, what: str, location: SourceLocation | None
    ) -> tuple[ir.Value, int]:
        """This user thread's region of scratch memory, of at least ``size`` bytes.

        A region serves all uses in a kernel that fit: it lies behind the scoped allocations, and
        every thread has its own part, so concurrent uses by several threads do not overlap. It
        grows where it can, or there is a new one; small sizes are powers of two, so that few are.
        """
        size = aligned(size, 16) if size > 4096 else max(16, 1 << (size - 1).bit_length())
        if self._scratch is None or self._scratch[1] < size:
            threads = launch.geometry.threads
            if self._scratch is not None and threads == 1:
                launch.release_shared(*self._scratch)
            offset = launch.reserve_shared(
                size * threads, alignment=128, what=what, location=location
            )
            self._scratch = (offset, size)
        offset, reserved = self._scratch
        base = launch.shared_pointer(offset)
        if launch.geometry.threads == 1:
            return base, reserved
        thread = launch.warpgroup_id
        pointer = launch.emit_once(
            f"scratch.{offset}",
            lambda: ops.byte_pointer(base, ops.multiply(thread, reserved)),
        )
        return pointer, reserved
