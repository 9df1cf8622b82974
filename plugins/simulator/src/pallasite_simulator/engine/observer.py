"""What the engine and the instructions tell about an execution: the interface of the sanitizer.

All methods do nothing here. ``Wave.observer`` is None without a listener, so callers write
``if observer is not None``. Lanes are numbers in the wave; sync keys are any hashable values, one
for each thing (and phase) through which threads synchronize.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.lanes import Lanes
    from pallasite_simulator.engine.wave import Wave


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """Accesses of the generic proxy that one instruction makes for several lanes.

    Attributes:
      kind: ``"read"``, ``"write"`` or ``"atomic"`` (which includes mbarrier operations and weak
        accesses that are marked ``volatile``, ``relaxed``, ``acquire`` or ``release``).
      space: ``"global"``, ``"shared"``, ``"local"`` or ``"const"``; generic addresses are resolved.
      lanes: numbers of the accessing lanes.
      offsets: for each lane, the byte offset in the memory of the space: ``wave.memory`` says to
        which block and allocation it belongs.
      size: bytes that each lane accesses.
      instruction: which instruction.
      writes: whether it may change memory; of ``"atomic"`` accesses, loads do not.
      values: what a write is going to write, as :meth:`Memory.store` takes it, if known.
      contents: whether it matters what a read finds there.
    """

    kind: str
    space: str
    lanes: Array
    offsets: Array
    size: int
    instruction: Instruction
    writes: bool
    values: Array | None = None
    contents: bool = True


@dataclasses.dataclass(slots=True, eq=False)
class AsyncOperation:
    """An asynchronous operation, in flight after the instruction that issued it: a copy, a wgmma.

    One object stands for what one execution of an instruction begins, for all of its lanes.

    Attributes:
      engine: ``"tma"`` for bulk copies, ``"cp.async"``, ``"wgmma"``, or a plugin's own name.
      lanes: numbers of the lanes that began it, ascending.
      instruction: the instruction that did.
      proxy: ``"async"`` or ``"generic"`` (``cp.async`` without bulk).
      together: how many neighbouring threads begin one operation together: 1 for copies, 128 for
        ``wgmma``. Each such group of ``lanes`` has an operation of its own, which is waited for
        on its own.
      serial: whether those of this engine that one thread (or group of threads) begins are waited
        for in the order in which they began, so that a wait for one is a wait for all before it.
      in_order: whether they are also done in that order.
      required: whether somebody must wait for it before the kernel ends.
      title: what it is, for messages; ``""`` for the engines above.
      hint: how it is waited for.
      detail: for the observer's own use.
    """

    engine: str
    lanes: Array
    instruction: Instruction
    proxy: str = "async"
    together: int = 1
    serial: bool = False
    in_order: bool = False
    required: bool = True
    title: str = ""
    hint: str = ""
    detail: object = None


class Observer:
    """Gets every event of one wave, in the order in which they happen."""

    def attach(self, wave: Wave) -> None:
        """Called once, before the wave starts."""

    def checks(self, group: str) -> bool:
        """Whether a group of checks is on; asked by rules whose checks are their own."""
        return False

    def undefined_register(self, lanes: Array, name: str, instruction: Instruction) -> None:
        """Lanes read a register that they never wrote."""

    def reads_undefined(
        self, lanes: Lanes, register: int, name: str, instruction: Instruction
    ) -> None:
        """Lanes read a register of which some bits may be undefined, as ``wave.undefined`` says. If
        the observer sets ``wave.follow``, it is called when the instruction has been executed."""
        wrong = lanes.of(lanes.wave.undefined[register]) != 0
        if wrong.any():
            self.undefined_register(lanes.numbers[wrong], name, instruction)

    def follow(self, lanes: Lanes, instruction: Instruction) -> None:
        """Lanes have executed an instruction, for which ``wave.follow`` was set."""

    def decides(self, instruction: Instruction) -> None:
        """``wave.follow`` was set for what guards an instruction, or says where lanes branch."""

    def shuffled(
        self,
        lanes: Lanes,
        registers: tuple[int, int],
        sources: Array,
        absent: Array,
        instruction: Instruction,
    ) -> None:
        """A shuffle has moved values: each of the lanes got in the second register what the lane
        ``sources`` (numbers in the wave) had in the first; ``absent`` says for which of them the
        source does not take part."""
        if absent.any():
            message = "reads from a lane that does not take part in the shuffle"
            self.misuse(lanes.numbers[absent], message, instruction)

    def access(self, access: Access) -> None:
        """Lanes access memory; called before a read takes place and before a write does."""

    def barrier(self, arrived: Array, left: Array, proxy: str = "generic") -> None:
        """A barrier is complete: what ``arrived`` lanes did happens before what ``left`` lanes (who
        waited at it) do from now on."""

    def barriers(self, lanes: Array, groups: Array) -> None:
        """Many barriers (of blocks, or of warps) are complete at once: the lanes of each group
        (``groups`` has a number for each lane) have all arrived and waited at one."""
        for group in np.unique(groups):
            members = lanes[groups == group]
            self.barrier(members, members)

    def meets(self, lanes: Array) -> None:
        """Lanes wait for others at a barrier, or at an instruction of the whole warp."""

    def absent(self, waited: Array, absent: Array, instruction: Instruction) -> None:
        """Lanes that waited for others at an instruction go on, as the absent ones have ended."""

    def release(
        self, lanes: Array, key: Hashable, scope: str = "cta", relaxed: bool = False
    ) -> None:
        """All that the lanes did so far (``relaxed``: before their last fence) becomes part of
        ``key``.

        Keys are those of one wave, but for places in global memory, ``("location", "global",
        offset)``, which all waves of a launch share.
        """

    def acquire(
        self, lanes: Array, key: Hashable, scope: str = "cta", relaxed: bool = False
    ) -> None:
        """All that is part of ``key`` happens before what the lanes do from now on (``relaxed``:
        after their next fence)."""

    def releases(
        self, lanes: Array, places: Array, phases: Array, scope: str = "cta", relaxed: bool = False
    ) -> None:
        """:meth:`release` of each lane to the key ``("mbarrier", place, phase)``, given for
        each."""
        for chosen, key in _by_phase(places, phases):
            self.release(lanes[chosen], key, scope, relaxed)

    def acquires(
        self, lanes: Array, places: Array, phases: Array, scope: str = "cta", relaxed: bool = False
    ) -> None:
        """:meth:`acquire` of each lane from the key ``("mbarrier", place, phase)``, given for
        each."""
        for chosen, key in _by_phase(places, phases):
            self.acquire(lanes[chosen], key, scope, relaxed)

    def forget(self, key: Hashable) -> None:
        """``key`` will not be used again."""

    def proxy_fence(self, lanes: Array, kind: str) -> None:
        """``fence.proxy.<kind>``: generic accesses before, and accesses of the proxy after."""

    def fence(self, lanes: Array, semantics: str, scope: str) -> None:
        """``fence.<semantics>.<scope>`` or ``membar``."""

    def begin(self, operation: AsyncOperation) -> None:
        """An asynchronous operation begins: what its lanes did so far happens before it."""

    def async_access(
        self,
        operation: AsyncOperation,
        kind: str,
        space: str,
        offsets: Array,
        size: int,
        owners: Array | None = None,
    ) -> None:
        """The operation reads or writes (or, ``"atomic"``, reduces) ``size`` bytes at each of the
        offsets, which are as in :class:`Access`.

        ``owners`` has the number of a lane for each offset: of the one that began the operation, or
        of any that did together. It may be left out if there is only one group of lanes, or if
        there is just one offset for each lane, in order.
        """

    def complete_on(
        self, operation: AsyncOperation, key: Hashable, lanes: Array | None = None
    ) -> None:
        """The completion of the operation (with ``lanes``: of what these lanes began) becomes part
        of ``key``, such as a phase of an mbarrier."""

    def completions(
        self, operation: AsyncOperation, lanes: Array, places: Array, phases: Array
    ) -> None:
        """:meth:`complete_on` of what each lane began, with the key ``("mbarrier", place, phase)``,
        given for each. A lane may be there more than once."""
        for chosen, key in _by_phase(places, phases):
            self.complete_on(operation, key, np.unique(lanes[chosen]))

    def complete_for(
        self, operations: Sequence[AsyncOperation], lanes: Array, reads_only: bool = False
    ) -> None:
        """The lanes have waited for what they began with the operations (``reads_only``: only for
        the reads of it)."""

    def forget_contents(self, space: str, offsets: Array, size: int) -> None:
        """``size`` bytes at each of the offsets hold nothing of meaning any more."""

    def registers_in_flight(self, operation: AsyncOperation, registers: Sequence[int]) -> None:
        """The operation uses registers (by number) of its lanes until it is waited for.

        The observer keeps ``wave.in_flight``, so that it hears of instructions that touch them.
        """

    def registers_touched(
        self, lanes: Array, registers: frozenset[int], instruction: Instruction
    ) -> None:
        """Lanes execute an instruction that uses registers, while an operation is in flight."""

    def registers_fenced(self, lanes: Array) -> None:
        """Operations that the lanes begin from now on see what they wrote to registers before."""

    def misuse(self, lanes: Array, message: str, instruction: Instruction) -> None:
        """A wrong use of a barrier or an asynchronous operation that is not fatal at once."""

    def exit(self, lanes: Array) -> None:
        """Lanes end."""

    def finish(self) -> None:
        """All lanes of the wave have ended."""


def _by_phase(places: Array, phases: Array) -> Iterator[tuple[Array, Hashable]]:
    """Positions of equal places, whose phases are equal too, and their key."""
    for place in np.unique(places):
        chosen = np.flatnonzero(places == place)
        yield chosen, ("mbarrier", int(place), int(phases[chosen[0]]))
