"""What the sanitizer can check."""

from __future__ import annotations

from collections.abc import Iterable

from pallasite.plugin import ConfigError

GROUPS = ("bounds", "initialized", "races", "barriers", "async", "registers", "outputs")
"""What can be checked:

- ``bounds``: accesses of shared memory outside of allocations, or across their ends;
- ``initialized``: reads of shared and local memory, and of registers, that were not written;
- ``races``: accesses of threads to the same place without an order;
- ``barriers``: wrong use of barriers;
- ``async``: accesses that race with an asynchronous operation, missing proxy fences, operations
  that are never waited for;
- ``registers``: use of registers while a ``wgmma`` is in flight;
- ``outputs``: outputs that the kernel does not write, or reads before.
"""

FURTHER = ("fences",)
"""What is checked only by name:

- ``fences``: ``tcgen05.fence`` between accesses of different warps to tensor memory, which some
  compilers leave out.
"""

FAST = ("bounds", "barriers", "outputs")
"""What ``"fast"`` stands for: checks that cost little, which are on by default.

Without ``races`` or ``async``, nobody knows what was written: an output that holds rubbish at the
end is unwritten if it holds other rubbish after a second run, which began with that."""

IN_TESTS = (*(name for name in GROUPS if name != "outputs"), *FURTHER)
"""What the plugin for pytest checks: tests look at the outputs themselves, and at parts of them."""

FIRST = "first"
"""A further name: the first error ends the launch."""


def parse_groups(value: str | bool | Iterable[str]) -> frozenset[str]:
    """Groups of checks from what a user says: ``"all"``, ``"fast"``, ``"none"``, a bool, or names.

    :data:`FIRST` among the names is part of the result; with no other name, everything is checked.

    Raises:
      ConfigError: there is no such group.
    """
    if isinstance(value, bool):
        return frozenset(GROUPS if value else ())
    names = value.split(",") if isinstance(value, str) else list(value)
    found: set[str] = set()
    for name in (name.strip().lower() for name in names):
        if name in ("all", "on", "true", "1"):
            found.update(GROUPS)
        elif name == "fast":
            found.update(FAST)
        elif name in (*GROUPS, *FURTHER, FIRST):
            found.add(name)
        elif name not in ("", "none", "off", "false", "0"):
            raise ConfigError(
                "there is no such group of checks",
                got=name,
                expected="all, fast, none, or some of " + ", ".join((*GROUPS, *FURTHER, FIRST)),
            )
    return frozenset(GROUPS) | found if found == {FIRST} else frozenset(found)
