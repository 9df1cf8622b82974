"""What the sanitizers of all waves of a launch share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.engine.lanes import WARP
from pallasite_simulator.engine.observer import Observer
from pallasite_simulator.engine.program import registers_in
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.sanitizer.clocks import Clocks
from pallasite_simulator.sanitizer.devices import DeviceChecks
from pallasite_simulator.sanitizer.findings import Findings
from pallasite_simulator.sanitizer.groups import FIRST, GROUPS
from pallasite_simulator.sanitizer.shadow import LARGEST, Shadow

if TYPE_CHECKING:
    from pallasite.plugin.lowering import Allocation
    from pallasite_simulator.arguments import Pointer
    from pallasite_simulator.engine.program import Program
    from pallasite_simulator.engine.wave import Wave
    from pallasite_simulator.sanitizer.outputs import Again


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a program can do, as far as its text says.

    Attributes:
      copies: whether it has ``cp.async`` without bulk.
      fences: whether it has fences that order accesses of the generic proxy.
      level: the level of granules for shared memory to begin with.
      narrow: whether it has accesses with the scope of a block or cluster.
      guesses: identities of the loads that only guess what ``atom.cas`` will find.
      takes: identities of the ``red`` that subtract.
    """

    copies: bool
    fences: bool
    level: int
    narrow: bool = False
    guesses: frozenset[int] = frozenset()
    takes: frozenset[int] = frozenset()

    @classmethod
    def of(cls, program: Program) -> Traits:
        """Looks at all instructions."""
        copies = fences = narrow = False
        levels: set[int] = set()
        for entry in program.code:
            one = entry.instruction
            copies |= one.opcode == "cp" and one.has("async") and not one.has("bulk")
            fences |= one.opcode in ("fence", "membar") and not one.has("proxy")
            narrow |= one.opcode in _ACCESSES and (one.has("cta") or one.has("cluster"))
            if one.opcode in _LARGE or "async" in one.modifiers:
                levels.add(LARGEST)
            elif one.opcode in _ACCESSES:
                spaces = {modifier.split("::")[0] for modifier in one.modifiers}
                if not spaces & {"global", "local", "param", "const"}:
                    levels.add(min(_level(one), LARGEST))
        level = levels.pop() if len(levels) == 1 else LARGEST
        return cls(copies, fences, level, narrow, _guesses(program), _takes(program))


def _takes(program: Program) -> frozenset[int]:
    """The ``red`` that add what ``neg`` has made."""
    instructions = [entry.instruction for entry in program.code]
    negated = {
        register.name
        for one in instructions
        if one.opcode == "neg"
        for register in registers_in(one.operands[:1])
    }
    return frozenset(
        id(one)
        for one in instructions
        if one.opcode == "red" and negated & {r.name for r in registers_in(one.operands[1:2])}
    )


def _guesses(program: Program) -> frozenset[int]:
    """The loads whose values reach what ``atom.cas`` compares, by moves alone."""
    instructions = [entry.instruction for entry in program.code]
    wanted = [
        register.name
        for one in instructions
        if one.opcode == "atom" and one.has("cas")
        for register in registers_in(one.operands[2:3])
    ]
    if not wanted:
        return frozenset()
    made: dict[str, list[Instruction]] = {}
    for one in instructions:
        if one.opcode in ("ld", "mov", "cvt"):
            for register in registers_in(one.operands[:1]):
                made.setdefault(register.name, []).append(one)
    loads, known = set(), set(wanted)
    while wanted:
        for one in made.get(wanted.pop(), ()):
            if one.opcode == "ld":
                loads.add(id(one))
                continue
            for register in registers_in(one.operands[1:]):
                if register.name not in known:
                    known.add(register.name)
                    wanted.append(register.name)
    return frozenset(loads)


_ACCESSES = ("ld", "st", "atom", "red")

_LARGE = ("cp", "wgmma", "tcgen05", "ldmatrix", "stmatrix", "mbarrier", "wmma")
"""Instructions that access shared memory in larger pieces, or in pieces of their own."""


def _level(instruction: Instruction) -> int:
    """The binary logarithm of the bytes that a load or store accesses."""
    count, bits = 1, 32
    for modifier in instruction.modifiers:
        if modifier in ("v2", "v4", "v8"):
            count = int(modifier[1:])
        elif modifier[:1] in "busf" and modifier[1:].isdigit():
            bits = int(modifier[1:])
    return (count * bits // 8).bit_length() - 1


class LaunchState:
    """Shared by the sanitizers of all waves of one launch: it collects what they find.

    Attributes:
      groups: what is checked.
      findings: all errors.
      allocations: who asked for which piece of dynamic shared memory.
      events: for each event, by its number, the instruction that made it.
      titles: of engines that plugins add: what their operations are, and how one waits for them.
      clocks: vector clocks.
      locations: places in global memory through which blocks synchronize: for each, by domain,
        what was released there. What is in it is replaced, never changed.
      domains: the blocks of each domain.
      devices: the device of each domain; None if there is one only.
      global_memory: shadow of global memory.
      between_devices: checks of several devices; None for one.
      early_reads: by the offset of an allocation in global memory, the first instruction that read
        rubbish there, where the shadow of global memory does not know what was written.
      untold: functions that tell of errors which else are told of at the end of waves.
    """

    clocks: Clocks
    traits: Traits
    global_memory: Shadow
    geometry: Geometry

    def __init__(
        self,
        groups: Collection[str] = GROUPS,
        allocations: Sequence[Allocation] = (),
    ):
        """Begins a launch.

        Args:
          groups: what to check, of :data:`GROUPS`; with :data:`FIRST`, the first error ends it.
          allocations: who asked for which piece of dynamic shared memory.
        """
        self.groups = frozenset(groups)
        self.findings = Findings(stop=FIRST in self.groups)
        self.allocations = tuple(allocations)
        self.events: list[Instruction | None] = [None]
        self.titles: dict[str, tuple[str, str]] = {}
        self.locations: dict[Hashable, Mapping[int, int]] = {}
        self.domains: list[Sequence[int]] = []
        self.devices: list[int | None] = []
        self.early_reads: dict[int, Instruction] = {}
        self._roots: list[Callable[[], Iterable[int]]] = []
        self.untold: list[Callable[[], None]] = []
        self._prepared = False
        self.between_devices: DeviceChecks | None = None

    @property
    def records(self) -> bool:
        """Whether it remembers accesses to memory."""
        return bool(self.groups & {"races", "async", "initialized"})

    def prepare(self, wave: Wave) -> None:
        """Called with every wave; the first says what the launch is like."""
        if self._prepared:
            return
        self._prepared = True
        self.findings.kernel = wave.program.name
        self.geometry = wave.geometry
        self.traits = Traits.of(wave.program)
        self.threads_per_block = -(-wave.geometry.threads // WARP) * WARP
        threads = wave.cluster_size * self.threads_per_block
        self.clocks = Clocks(threads, copies=self.traits.copies)
        self.global_memory = Shadow(wave.memory.global_memory.size)
        if wave.geometry.device is not None:
            self.between_devices = DeviceChecks(self)

    def event(self, instruction: Instruction) -> int:
        """The number of a new event."""
        self.events.append(instruction)
        self.clocks.time += 1
        return self.clocks.time

    # Rows that are in use -------------------------------------------------------------------------

    def hold(self, roots: Callable[[], Iterable[int]]) -> None:
        """Adds a function that gives rows of clocks in use."""
        self._roots.append(roots)

    def drop(self, roots: Callable[[], Iterable[int]]) -> None:
        """Takes it away again."""
        self._roots.remove(roots)

    def tidy(self) -> None:
        """Frees rows of clocks, if there are many. Rows in local variables are lost."""
        if self.clocks.crowded:
            used: list[int] = []
            for roots in self._roots:
                used.extend(roots())
            for rows in self.locations.values():
                used.extend(rows.values())
            self.clocks.collect(used)

    # Names ----------------------------------------------------------------------------------------

    def thread_name(self, domain: int, column: int) -> str:
        """``thread t of block (x, y, z)``."""
        rank, thread = divmod(column, self.threads_per_block)
        return f"thread {thread} of block {self.block_name(domain, rank)}"

    def block_name(self, domain: int, rank: int) -> str:
        """``(x, y, z)`` of a block by its rank in its cluster, and its device if there are
        several."""
        geometry = dataclasses.replace(self.geometry, device=self.devices[domain])
        return geometry.block_name(int(self.domains[domain][rank]))

    def name(self, domain: int, column: int) -> str:
        """Who did something: a thread, or what a thread began."""
        clocks = self.clocks
        if column < clocks.threads:
            return self.thread_name(domain, column)
        if column < clocks.fixed:
            return f"a copy begun by {self.thread_name(domain, column - clocks.threads)}"
        name = clocks.name(column)
        assert isinstance(name, tuple)
        engine, number = name
        if engine == "init":
            return self.thread_name(domain, number)
        if engine == "bulk":
            return f"a bulk copy begun by {self.thread_name(domain, number)}"
        if engine == "wgmma":
            first = self.thread_name(domain, number).split(" of ")
            return f"a wgmma of the warpgroup of {first[0]} of {first[1]}"
        if engine in self.titles:
            return f"{self.titles[engine][0]} begun by {self.thread_name(domain, number)}"
        block = self.block_name(domain, 0)
        return (
            f"an asynchronous operation of the cluster of block {block}"
            if (self.geometry.cluster_size > 1)
            else f"an asynchronous operation of block {block}"
        )

    def observer(self) -> Observer:
        """Makes the observer of a wave."""
        from pallasite_simulator.sanitizer.wave_sanitizer import WaveSanitizer

        return WaveSanitizer(self)

    def check_outputs(
        self,
        program: Program,
        outputs: Sequence[tuple[Pointer, int | None]],
        exact: bool,
        again: Again | None = None,
    ) -> None:
        """Looks for outputs that were not written, given with their offsets in global memory (None
        for those that the kernel never gets); ``exact`` if this process observed all blocks,
        ``again`` runs them again if nobody observed them; without it, nothing is said then."""
        if "outputs" in self.groups and outputs:
            from pallasite_simulator.sanitizer.outputs import check_outputs

            recorded = bool(self.groups & {"races", "async"})
            check_outputs(self, program, outputs, exact and recorded, again)

    def finish(self) -> None:
        """Called when all waves have ended.

        Raises:
          SanitizerError: there were errors.
        """
        if self.findings:
            raise self.findings.error()

    def annotate(self, error: SimulationError) -> None:
        """Adds what was found so far to an error that ended the launch."""
        for tell in self.untold:
            tell()
        self.findings.annotate(error)
