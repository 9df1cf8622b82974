"""Tensor maps that programs change: PTX ISA 9.7.9.28 (tensormap.replace) and 9.7.13.16
(tensormap.cp_fenceproxy)."""

from __future__ import annotations

from pallasite_simulator.instruction_set import InstructionSet

instructions = InstructionSet()
