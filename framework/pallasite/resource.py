"""What of a chip is limited and what kernels reserve: shared memory, barriers, a plugin's own."""

from __future__ import annotations

import dataclasses

type Count = int
"""Of something: it is not negative."""


@dataclasses.dataclass(frozen=True)
class Resource:
    """Something that kernels reserve parts of, such as shared memory.

    Attributes:
      name: unique, such as ``"shared_memory"``; targets state their limits by it.
      unit: what amounts count, in the plural.
      title: what messages and reports call it; the name if empty.
      symbol: what the message of a kernel that needs too much calls the amount; the name if empty.
      hint: what to do about a kernel that needs too much.
      pool: the name of the limit that it counts against, if that is another's; resources of one
        pool are added up.
      limited: whether targets have a limit at all.
    """

    name: str
    unit: str = "bytes"
    title: str = ""
    symbol: str = ""
    hint: str | None = None
    pool: str = ""
    limited: bool = True

    def granted(self, amount: int) -> int:
        """What a kernel gets that needs ``amount`` at its peak, such as the next power of two."""
        return amount

    def in_pool(self, amount: int) -> int:
        """What ``amount`` takes of the limit, in the unit of the pool."""
        return self.granted(amount)

    @property
    def limit_name(self) -> str:
        """The name by which targets state the limit."""
        return self.pool or self.name

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.title or self.name


SHARED_MEMORY = Resource(
    "shared_memory",
    title="shared memory",
    symbol="smem_bytes",
    hint="smaller blocks, fewer pipeline stages (max_concurrent_steps), or plgpu.RefUnion for"
    " buffers that are not live at the same time",
)
"""Shared memory of one block, in bytes."""


BARRIER_BYTES = 8
"""Of one mbarrier."""


class _Barriers(Resource):
    def in_pool(self, amount: int) -> int:
        return BARRIER_BYTES * amount


BARRIERS = _Barriers("barriers", unit="barriers", title="barriers", pool=SHARED_MEMORY.name)
"""Mbarriers of one block, which lie in shared memory."""
