"""What tests of asynchronous copies share: PTX that moves blocks of bytes, and an observer."""

from __future__ import annotations

import numpy as np

from pallasite_simulator.engine.observer import Observer

SETUP = """
.reg .b64 %p<6>;
.reg .b32 %r<16>, %i, %v<4>, %rank, %tile, %bar;
.reg .b16 %h;
.reg .pred %p, %q, %first, %done;
setp.eq.u32 %first, %prologue2, 0;
mov.u32 %rank, %cluster_ctarank;
mov.u32 %tile, tile;
mov.u32 %bar, bar;
"""


def shared(tile_bytes: int) -> str:
    """Shared memory: ``tile``, and the mbarrier ``bar``."""
    return f".shared .align 1024 .b8 tile[{tile_bytes}];\n.shared .align 8 .b64 bar;\n"


def move(label: str, array: int, count: int, *, load: bool, start: str = "0") -> str:
    """All threads of a block move ``count`` bytes, a multiple of 4, between ``tile`` and an array,
    from ``start`` (a number or a 32-bit register) on; block by block one behind the other."""
    access = (
        "ld.global.b32 %v0, [%p0];\nst.shared.b32 [%r1], %v0;"
        if load
        else "ld.shared.b32 %v0, [%r1];\nst.global.b32 [%p0], %v0;"
    )
    return f"""
shl.b32 %i, %prologue2, 2;
{label}:
setp.ge.u32 %p, %i, {count};
@%p bra {label}_END;
mad.lo.u32 %r0, %prologue0, {count}, %i;
add.u32 %r0, %r0, {start};
cvt.u64.u32 %p0, %r0;
add.u64 %p0, %p0, %array{array};
add.u32 %r1, %tile, %i;
{access}
mov.u32 %r0, %ntid.x;
shl.b32 %r0, %r0, 2;
add.u32 %i, %i, %r0;
bra {label};
{label}_END:
"""


def barrier(expected: int = 1) -> str:
    """Makes the mbarrier."""
    return f"""
@%first mbarrier.init.shared::cta.b64 [bar], {expected};
fence.mbarrier_init.release.cluster;
fence.proxy.async;
bar.sync 0;
"""


def wait(parity: int = 0, label: str = "WAIT") -> str:
    """Waits at the mbarrier."""
    return f"""
{label}:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %done, [bar], {parity};
@!%done bra {label};
"""


class Listener(Observer):
    """Notes what is told of asynchronous operations."""

    def __init__(self) -> None:
        self.events = []

    def begin(self, operation):
        self.events.append(("begin", operation))

    def async_access(self, operation, kind, space, offsets, size, owners=None):
        self.events.append((kind, operation, space, np.array(offsets), size, owners))

    def complete_on(self, operation, key, lanes=None):
        self.events.append(("complete_on", operation, key, lanes))

    def complete_for(self, operations, lanes, reads_only=False):
        for operation in operations:
            self.events.append(("complete_for", operation, lanes.tolist(), reads_only))

    def misuse(self, lanes, message, instruction):
        self.events.append(("misuse", lanes.tolist(), message))

    def named(self, *names):
        """The events of these names."""
        return [event for event in self.events if event[0] in names]
