"""How shadow memory holds one access: who and when, in one 64-bit integer.

From the highest bit: the number of the event (27 bits), the domain (18), the column of the thread
or asynchronous engine within its domain (16), whether the scope of a strong access is only a block
(1), and whether the access is strong (1). A domain is a cluster, or a block where there are none:
shared memory does not reach beyond it. Later accesses are larger numbers; 0 is no access at all.
"""

from __future__ import annotations

from pallasite_simulator.types import Array, Values

STRONG = 1
NARROW = 2
COLUMN_SHIFT = 2
COLUMN_MASK = (1 << 16) - 1
DOMAIN_SHIFT = 18
DOMAIN_MASK = (1 << 18) - 1
TIME_SHIFT = 36


def encode(time: int, domain: Values, column: Values, strong: bool = False) -> Values:
    """An entry; ``domain`` and ``column`` may be arrays (int64)."""
    fixed = (time << TIME_SHIFT) | int(strong)
    return ((domain & DOMAIN_MASK) << DOMAIN_SHIFT) | (column << COLUMN_SHIFT) | fixed


def times(entries: Values) -> Values:
    """Numbers of the events."""
    return entries >> TIME_SHIFT


def domains(entries: Values) -> Values:
    """Domains."""
    return (entries >> DOMAIN_SHIFT) & DOMAIN_MASK


def columns(entries: Values) -> Values:
    """Columns within the domain."""
    return (entries >> COLUMN_SHIFT) & COLUMN_MASK


def strong(entries: Array) -> Array:
    """Which accesses are strong: such accesses do not race with one another."""
    found: Array = (entries & STRONG) != 0
    return found


def narrow(entries: Array) -> Array:
    """Which strong accesses have a scope that other blocks are not in."""
    found: Array = (entries & NARROW) != 0
    return found
