"""The check of outputs that are read before anybody has written them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pallasite.plugin import InvalidValueError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.jaxprs import JaxprTable
from pallasite_std.checks.accesses import Use
from pallasite_std.primitives import arrays, copies, layouts

lax = _jax.lax_primitives

_READS = frozenset({_jax.get_p, arrays.load_p})

_UPDATES = frozenset({_jax.addupdate_p, arrays.atomic_p})

_SUMS = frozenset({lax.add_p, lax.sub_p, lax.neg_p, lax.max_p, lax.min_p})
"""Primitives whose results differ where their operands do: those that choose, or multiply by 0, may
do away with rubbish."""

_MOVES = frozenset(
    {
        *(lax.broadcast_in_dim_p, lax.reshape_p, lax.squeeze_p, lax.transpose_p),
        *(lax.convert_element_type_p, layouts.layout_cast_p),
    }
)
"""Primitives that keep values: an output may be copied to itself, which leaves it as it is."""


def check_early_reads(
    uses: Sequence[Use],
    opaque: set[Any],
    outputs: Mapping[int, Any],
    first: int,
    jaxpr: Any,
    table: JaxprTable,
) -> None:
    """Raises if something is certainly added to an output that nobody has written.

    That is so if the first that each thread of each block does to the output is to add to it:
    whichever comes first, there is nothing yet.

    Args:
      uses: of references, by all threads, each in the order of its equations.
      opaque: references that something unknown is done to.
      outputs: those that do not begin as an input, by the number of the operand.
      first: the number of the first output.
      jaxpr: the kernel.
      table: the primitives that carry jaxprs.
    """
    earliest: dict[tuple[int, int], Use] = {}
    for use in uses:
        number = use.memory.number
        if number is not None and number in outputs:
            earliest.setdefault((number, use.thread), use)
    for number, variable in outputs.items():
        found = [use for (one, _), use in earliest.items() if one == number]
        if not found or variable in opaque:
            continue
        if not all(use.plain for use in uses if use.memory.number == number):
            continue  # Other devices may write it.
        if all(use.certain and not use.narrowed and _adds(use, jaxpr, table) for use in found):
            raise InvalidValueError(
                f"something is added to output {number - first} that nobody has written before",
                got="whatever is in that memory",
                expected="o_ref[...] = ... before, or input_output_aliases for an initial value",
                location=found[0].location,
            )


def _adds(use: Use, jaxpr: Any, table: JaxprTable) -> bool:
    """Whether a use certainly changes its memory according to what is there."""
    primitive, params = use.equation.primitive, use.equation.params
    if primitive is copies.copy_smem_to_gmem_p:
        return params["reduction_op"] is not None
    if primitive in _UPDATES:
        return True
    if primitive not in _READS:
        return False
    for inner in table.jaxprs(jaxpr):
        for number, equation in enumerate(inner.eqns):
            if equation is use.equation:
                return _written_back(equation, inner.eqns[number + 1 :])
    return False


def _written_back(read: Any, following: Sequence[Any]) -> bool:
    """Whether a sum with what was read is stored to the reference it comes from."""
    moved: set[Any] = set(read.outvars)
    sums: set[Any] = set()
    for equation in following:
        operands = [one for one in equation.invars if not isinstance(one, _jax.Literal)]
        if equation.primitive is _jax.swap_p and operands[0] is read.invars[0]:
            return operands[1] in sums
        added = equation.primitive in _SUMS
        if not (added or equation.primitive in _MOVES):
            continue
        if sums.intersection(operands) or (added and moved.intersection(operands)):
            sums.update(equation.outvars)
        elif moved.intersection(operands):
            moved.update(equation.outvars)
    return False
