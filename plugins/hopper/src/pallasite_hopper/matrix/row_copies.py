"""Asynchronous copies of parts of matrices whose rows are multiples of words apart.

Of what the copy engine does not take, since its rows are no multiples of 16 bytes, each lane copies
words, or two or four of them, where rows are multiples of so many. What is not there becomes zero.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallasite.plugin import InvalidValueError, RuleSet, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import AbstractValue, InferenceContext
from pallasite.plugin.ir import ops
from pallasite.plugin.language import GMEM, SMEM
from pallasite.plugin.lowering import RuleContext, Value, resolve
from pallasite_hopper.matrix.odd_rows import (
    FARTHEST,
    WORD,
    RowWindow,
    address_of_lane,
    place_of_lane,
)
from pallasite_std.api import arguments, plan_access, transfers

rules = RuleSet()

# The primitive as kernels call it -----------------------------------------------------------------

copy_row_words_p = _jax.Primitive("copy_row_words")
copy_row_words_p.multiple_results = True


@_jax.abstract_eval(copy_row_words_p)
def _copy_abstract_eval(*avals: Any, args_tree: Any, window: RowWindow) -> Any:
    del window
    return (), arguments.reference_effects(args_tree, len(avals), read=(0,), written=(3,))


arguments.no_discharge(copy_row_words_p)


def copy_row_words(ref: Any, window: RowWindow, row: Any, column: Any, destination: Any) -> None:
    """Starts the copy of a part of a matrix to shared memory, and closes a group of copies.

    ``plgpu.wait_gmem_to_smem`` waits for it, after which products need ``plgpu.commit_smem``.
    Elements beyond the ends of rows and of the matrix become zero.

    Args:
      ref: the whole matrix in global memory, that the kernel does not write; rows begin at words.
      window: which part.
      row, column: where it begins; the column at a multiple of the words that are copied.
      destination: shared memory of the shape of the part.

    PTX ISA: ``cp.async``.
    """
    whole = arguments.reference(ref, "ref", GMEM)
    target = arguments.reference(destination, "destination", SMEM)
    if window.shifted:
        raise InvalidValueError(
            "rows do not begin at words",
            got=f"{window.pitch} bytes from row to row",
            expected=f"a multiple of {WORD}",
        )
    row, column = jnp.asarray(row, jnp.int32), jnp.asarray(column, jnp.int32)
    arguments.bind(copy_row_words_p, whole, row, column, target, window=window)


# Layouts ------------------------------------------------------------------------------------------


@rules.inference(copy_row_words_p)
def _infer_copy(
    ctx: InferenceContext, *operands: AbstractValue, args_tree: Any, window: RowWindow
) -> None:
    *_, destination = args_tree.unflatten(operands)
    ctx.uses(destination, lambda view: None, "a copy by all lanes")


# Code ---------------------------------------------------------------------------------------------


@rules.lowering(copy_row_words_p, Semantics.LANE)
def _lower(ctx: RuleContext, *operands: Value, args_tree: Any, window: RowWindow) -> tuple[()]:
    reference, row, column, destination = args_tree.unflatten(operands)
    source, target = resolve(ctx, reference), resolve(ctx, destination)
    width = window.words * WORD // window.size
    plan = plan_access(window.result, target.layout, min(16, target.offset_alignment))
    if plan.width != width:
        raise InvalidValueError(
            "shared memory has no room for whole words in a row",
            got=str(target.layout),
            expected=f"{width} elements beside each other",
        )
    place = place_of_lane(ctx, source, window, row, column)
    address = address_of_lane(source, window, place)
    in_row = ops.compare("slt", place.behind, window.pitch)
    limit = ops.arith.subi(ops.i32_constant(window.rows), place.row)
    limit = ops.arith.select(in_row, limit, ops.i32_constant(-1))
    write = transfers.access_addresses(ctx.launch, target, plan)
    size = window.words * WORD
    cache = "cg" if size == 16 else "ca"
    for access in plan.accesses:
        # If the row is below the limit.
        below = access.parts[0][0] * window.row_step
        there, at = below * window.pitch, address
        if there >= FARTHEST:
            at, there = ops.add(address, there), 0
        text = (
            f"{{ .reg .pred p; .reg .b32 s; setp.gt.s32 p, $2, {below}; selp.b32 s, {size}, 0, p;"
            f" cp.async.{cache}.shared.global [$0], [$1+{there}], {size}, s; }}"
        )
        shared = ops.shared_address(write(access))
        ops.inline_assembly(text, "r,l,r,~{memory}", shared, at, limit)
    ops.inline_assembly("cp.async.commit_group;", "~{memory}")
    return ()
