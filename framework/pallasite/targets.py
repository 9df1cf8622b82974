"""What a chip can do: a :class:`Target` is plain data that a plugin contributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pallasite.resource import SHARED_MEMORY, Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One instruction set that kernels can be compiled for.

    Attributes:
      name: the public name, as in ``CompilerParams(target="sm_90a")``.
      ptx_version: version of the PTX ISA that is emitted, times ten (86 is PTX 8.6).
      architecture: what LLVM and ptxas call the chip; where it is empty, ``name``.
      compute_capability: major and minor number of the oldest device that runs it.
      features: names of what rules may rely on, such as ``"tma"``, ``"cluster"``, ``"mbarrier"``.
        A plugin may invent new ones.
      max_shared_memory: bytes of shared memory that one block may use (opt-in limit).
      max_threads: threads per block.
      max_registers: 32-bit registers per thread.
      registers_per_block: 32-bit registers that the threads of one block share.
      max_cluster_size: blocks per cluster (the non-portable limit).
      limits: of other resources that kernels reserve, how much one block can have, by name.
      multiprocessors: how many a full chip has; for estimates only.
      description: one line for ``pallasite targets``.
    """

    name: str
    ptx_version: int
    compute_capability: tuple[int, int]
    features: frozenset[str] = frozenset()
    max_shared_memory: Count = 232448
    max_threads: Count = 1024
    max_registers: Count = 255
    registers_per_block: Count = 65536
    max_cluster_size: Count = 16
    limits: Mapping[str, Count] = dataclasses.field(default_factory=dict, hash=False)
    multiprocessors: Count = 0
    description: str = ""
    architecture: str = ""

    def has(self, *features: str) -> bool:
        """Whether the target has all the features named."""
        return all(feature in self.features for feature in features)

    def limit(self, resource: str) -> int:
        """How much of a resource one block can have; 0 if the chip has none of it."""
        if resource == SHARED_MEMORY.name:
            return self.max_shared_memory
        return self.limits.get(resource, 0)


@dataclasses.dataclass(frozen=True)
class TargetPredicate:
    """Which targets a rule is for: those with all ``features`` and, if given, one of ``names``.

    The empty predicate matches every target and is the least specific. A predicate with names is
    more specific than one without; among equals, the one with more features is.
    """

    features: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()

    def matches(self, target: Target) -> bool:
        """Whether a rule with this predicate may be used for ``target``."""
        return self.features <= target.features and (not self.names or target.name in self.names)

    @property
    def specificity(self) -> tuple[int, int]:
        """Sort key: larger is more specific."""
        return (1 if self.names else 0, len(self.features))

    def __str__(self) -> str:
        parts = [", ".join(sorted(self.names))] if self.names else []
        if self.features:
            parts.append("with " + ", ".join(sorted(self.features)))
        return " ".join(parts) or "every target"


ANY_TARGET = TargetPredicate()

BASELINE_FEATURES = frozenset(
    {
        "bf16",
        "bulk_reduce",
        "cluster",
        "cp_async",
        "elect",
        "fp8",
        "griddepcontrol",
        "ldmatrix",
        "mbarrier",
        "stmatrix",
        "tma",
    }
)
"""Features of compute capability 9.0 that all later chips have, too."""
