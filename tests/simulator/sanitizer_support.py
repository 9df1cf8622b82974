"""Runs kernels with the sanitizer, and drives the sanitizer by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from simulator_support import module, run_body, run_ptx

from pallasite.launch import Allocation
from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.engine.memory import GlobalMemory
from pallasite_simulator.engine.observer import Access
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.errors import SanitizerError
from pallasite_simulator.programs import load
from pallasite_simulator.ptx.syntax import Instruction, Position
from pallasite_simulator.sanitizer import GROUPS, LaunchState
from pallasite_simulator.sanitizer.findings import Finding
from pallasite_simulator.sanitizer.wave_sanitizer import WaveSanitizer


def sanitize(body: str, *arrays: np.ndarray, allocations: Any = (), **options: Any) -> str:
    """The message of what the sanitizer finds in a kernel body; empty if it finds nothing."""
    groups = options.pop("groups", GROUPS)
    state = LaunchState(groups, allocations)
    try:
        run_body(body, *arrays, sanitizer=state, **options)
    except SanitizerError as error:
        return str(error)
    return ""


def sanitize_ptx(ptx: str, *arguments: Any, allocations: Any = (), **options: Any) -> str:
    """The same for a module."""
    state = LaunchState(GROUPS, allocations)
    try:
        run_ptx(ptx, *arguments, sanitizer=state, **options)
    except SanitizerError as error:
        return str(error)
    return ""


def kinds(message: str) -> list[str]:
    """The kinds of the errors in a message."""
    found = re.findall(r"^ *\d+\. (.*?)(?: \(\d+ times\))?:$", message, re.MULTILINE)
    return [str(one) for one in found]


class Driver:
    """A wave whose events are made by hand: each instruction is known by its number."""

    def __init__(
        self,
        *,
        threads: int = 32,
        blocks: int = 1,
        cluster: int = 1,
        shared: int = 256,
        allocations: Sequence[Allocation] = (),
        body: str = "",
        state: LaunchState | None = None,
        first: int = 0,
        grid: int | None = None,
    ):
        self.state = state or LaunchState(GROUPS, allocations)
        memory = GlobalMemory()
        memory.allocate("array", 1024)
        memory.seal()
        variables = ".extern .shared .align 16 .b8 dynamic[];\n"
        program = load(module(body, variables=variables))
        geometry = Geometry((grid or blocks, 1, 1), (threads, 1, 1), (cluster, 1, 1))
        self.sanitizer = self.state.observer()
        assert isinstance(self.sanitizer, WaveSanitizer)
        self.wave = Wave(
            program,
            geometry,
            np.arange(first, first + blocks),
            memory,
            np.zeros(16, np.uint8),
            shared,
            self.sanitizer,
        )
        self.global_offset = memory.allocations[0].offset
        self.instructions: list[Instruction] = []

    def instruction(self, opcode: str, *modifiers: str) -> Instruction:
        """A new instruction."""
        number = len(self.instructions)
        name = ".".join((opcode, *modifiers))
        position = Position(number + 1, 1)
        self.instructions.append(Instruction(opcode, modifiers, (), position, f"{name} {number}"))
        return self.instructions[-1]

    def access(
        self,
        kind: str,
        lanes: Sequence[int],
        offsets: Sequence[int],
        size: int = 4,
        values: np.ndarray | None = None,
        space: str = "shared",
        block: int = 0,
    ) -> Instruction:
        """Lanes access shared memory (at offsets behind the system's) or the global array."""
        instruction = self.instruction({"read": "ld", "write": "st", "atomic": "atom"}[kind])
        base = 1024 + block * self.wave.memory.shared_stride
        if space == "global":
            base = self.global_offset
        self.sanitizer.access(
            Access(
                kind,
                space,
                np.array(lanes),
                base + np.array(offsets),
                size,
                instruction,
                kind != "read",
                values,
            )
        )
        return instruction

    @property
    def findings(self) -> list[Finding]:
        """What was found so far."""
        return list(self.state.findings.found.values())

    @property
    def found(self) -> list[str]:
        """The kinds of what was found."""
        return [one.kind for one in self.findings]
