"""What PTX instructions do, by subject; each module has an ``InstructionSet`` of its rules."""

from __future__ import annotations

import importlib

from pallasite_simulator.instruction_set import InstructionSet

MODULES = (
    "arithmetic",
    "integers",
    "extended_precision",
    "bit_fields",
    "video",
    "floats",
    "functions",
    "logic",
    "moves",
    "state_spaces",
    "warp",
    "miscellaneous",
    "compare",
    "conversions",
    "loads",
    "caches",
    "atomics",
    "fences",
    "calls",
    "frames",
    "heap",
    "barriers",
    "mbarriers",
    "async_copies",
    "tensor_copies",
    "matrices",
    "register_counts",
)


def all_instructions() -> InstructionSet:
    """The rules of all modules."""
    everything = InstructionSet()
    for name in MODULES:
        everything.extend(importlib.import_module(f"{__name__}.{name}").instructions)
    return everything
