"""How the threads of a pipeline divide the registers of a block among themselves.

All warpgroups are launched with an equal share. The producer warpgroup gives up what it does not
need, and the consumer warpgroups take it (PTX ISA, ``setmaxnreg``). Both sides of the exchange have
to agree with the share at the launch, which is known only when the kernel is lowered.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive

from pallasite.plugin import InvalidValueError, RuleSet, Semantics, Target
from pallasite.plugin.ir import ops
from pallasite.plugin.language import checks, memory_effect
from pallasite_std.rules.registers import LARGEST, SMALLEST, STEP

WARPGROUP_SIZE = 128

split_registers_p = Primitive("split_registers")
split_registers_p.multiple_results = True

rules = RuleSet()


def _abstract_evaluation(*, memory_registers: int, in_memory_thread: bool) -> tuple[Any, set[Any]]:
    return (), {memory_effect}


split_registers_p.def_effectful_abstract_eval(_abstract_evaluation)


def checked_registers(memory_registers: Any) -> int | None:
    """The argument ``memory_registers`` of a pipeline.

    Raises:
      InvalidTypeError, InvalidValueError: not None and not a number of registers.
    """
    if memory_registers is None:
        return None
    count = checks.count(memory_registers, "memory_registers")
    if count % STEP or not SMALLEST <= count <= LARGEST:
        raise checks.value_error(
            "the producer warpgroup cannot have this number of registers per lane",
            got=count,
            expected=f"None, or a multiple of {STEP} from {SMALLEST} to {LARGEST}",
            hint="40, which is enough for most pipelines",
        )
    return count


def split_registers(memory_registers: int, *, in_memory_thread: bool) -> None:
    """Moves registers from the producer to the consumer warpgroups; each of them calls it.

    On targets that cannot move registers, it does nothing.
    """
    split_registers_p.bind(memory_registers=memory_registers, in_memory_thread=in_memory_thread)


def registers_at_launch(target: Target, warpgroups: int, min_blocks: int) -> int:
    """Registers of each lane when a block starts: an equal share of the file."""
    lanes = warpgroups * WARPGROUP_SIZE * min_blocks
    return min(LARGEST, target.registers_per_block // lanes // STEP * STEP)


def compute_registers(at_launch: int, warpgroups: int, memory_registers: int) -> int:
    """Registers of each lane of the consumer warpgroups: all that the producer warpgroup leaves."""
    left = at_launch * warpgroups - memory_registers
    return min(LARGEST, left // (warpgroups - 1) // STEP * STEP)


@rules.lowering(split_registers_p, Semantics.LANE, Semantics.WARPGROUP)
def _lower_nowhere(ctx: Any, **params: Any) -> tuple[()]:
    return ()


@rules.lowering(split_registers_p, Semantics.LANE, Semantics.WARPGROUP, requires=("setmaxnreg",))
def _lower(ctx: Any, *, memory_registers: int, in_memory_thread: bool) -> tuple[()]:
    warpgroups = ctx.kernel.geometry.threads
    at_launch = registers_at_launch(ctx.target, warpgroups, ctx.params.min_blocks)
    if memory_registers > at_launch:
        raise InvalidValueError(
            "the producer warpgroup of a pipeline would have more registers than at the launch",
            got=f"memory_registers={memory_registers}",
            expected=f"at most {at_launch}: {warpgroups} threads share {ctx.target.name}'s"
            f" {ctx.target.registers_per_block} registers, min_blocks={ctx.params.min_blocks}",
        )
    compute = compute_registers(at_launch, warpgroups, memory_registers)
    if compute == at_launch:
        return ()  # There is nothing to gain, so the producer warpgroup keeps its share.
    # Warps of a warpgroup must have converged between two changes: a pipeline may run in a loop.
    ctx.synchronize()
    change = f"dec.sync.aligned.u32 {memory_registers}"
    if not in_memory_thread:
        change = f"inc.sync.aligned.u32 {compute}"
    ops.inline_assembly(f"setmaxnreg.{change};", "")
    return ()
