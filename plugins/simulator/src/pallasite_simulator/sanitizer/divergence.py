"""Barriers and instructions of whole warps in divergent branches, around which some lanes go.

Where lanes wait for others and these end, hardware lets the waiting ones go on. That is what is
meant where lanes end early; where they went around the instruction, it is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.engine.program import STEP, successors
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.sanitizer.report import Reporter
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.wave import Wave


class DivergenceChecks:
    """Checks one wave."""

    def __init__(self, wave: Wave, reporter: Reporter):
        self.wave = wave
        self.reporter = reporter
        # Whether lanes ever waited for others, when they began to, and when each lane accessed
        # memory last (both count accesses, also those of which no event is kept), and by what.
        self._meeting = False
        self._accesses = 0
        self._waits_since: Array = np.zeros(wave.lane_count, np.int64)
        self._busy: Array = np.zeros(wave.lane_count, np.int64)
        self._busy_with: Array = np.zeros(wave.lane_count, np.int64)
        self._reachable: dict[int, frozenset[int]] = {}

    def access(self, lanes: Array, instruction: Instruction) -> None:
        """Lanes are about to access memory."""
        if self._meeting:
            self._accesses += 1
            self._busy[lanes] = self._accesses
            self._busy_with[lanes] = id(instruction)

    def meets(self, lanes: Array) -> None:
        """Lanes wait for others."""
        self._meeting = True
        self._waits_since[lanes] = self._accesses

    def absent(self, waited: Array, absent: Array, instruction: Instruction) -> None:
        """Reports lanes that have taken another path around an instruction at which others waited:
        that have accessed memory since, where the others come too. Those that merely ended early
        are none of them."""
        if not self._meeting:
            return
        late = absent[self._busy[absent] > int(self._waits_since[waited].min())]
        behind = self._behind(instruction) if len(late) else frozenset()
        late = late[[one in behind for one in self._busy_with[late].tolist()]]
        if len(late):
            whom = "block" if instruction.opcode in ("bar", "barrier") else "warp"
            self.reporter.simple(
                f"{instruction.opcode} in a divergent branch",
                late,
                f"went around an instruction that all threads of the {whom} must execute, at which"
                f" {self.wave.thread_name(int(waited[0]))} waited",
                instruction,
                "move it out of the branch"
                + (
                    ", or name in its mask only the lanes that execute it"
                    if whom == "warp" or instruction.has("warp")
                    else ""
                ),
            )

    def _behind(self, instruction: Instruction) -> frozenset[int]:
        """Identities of the instructions that may be executed after one."""
        found = self._reachable.get(id(instruction))
        if found is None:
            code = self.wave.program.code
            stack = [pc for pc, entry in enumerate(code) if entry.instruction is instruction]
            seen: set[int] = set()
            while stack:
                entry = code[pc := stack.pop()]
                onward = list(successors(entry))
                if entry.kind == STEP or entry.guard is not None:
                    onward.append(pc + 1)
                for one in onward:
                    if one not in seen and one < len(code):
                        seen.add(one)
                        stack.append(one)
            found = frozenset(id(code[pc].instruction) for pc in seen)
            self._reachable[id(instruction)] = found
        return found
