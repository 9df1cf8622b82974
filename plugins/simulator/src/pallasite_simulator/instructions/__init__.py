"""What PTX instructions do, by subject; each module has an ``InstructionSet`` of its rules."""

from __future__ import annotations

import importlib
import importlib.util

from pallasite_simulator.instruction_set import InstructionSet

MODULES = (
    "arithmetic",
    "integers",
    "extended_precision",
    "bit_fields",
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
    "barriers",
    "mbarriers",
    "async_copies",
    "tensor_copies",
    "matrices",
)


def all_instructions() -> InstructionSet:
    """The rules of all modules."""
    everything = InstructionSet()
    for name in MODULES:
        if importlib.util.find_spec(f"{__name__}.{name}") is None:
            continue
        try:
            module = importlib.import_module(f"{__name__}.{name}")
        except ImportError:  # while modules are being written
            continue
        everything.extend(module.instructions)
    return everything
