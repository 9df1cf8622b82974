"""Calls, loops and branches.

Arrays are carried in their registers: the layout is part of the carry. A loop body or a branch that
changes it is an error that shows both, if the program chose one of them. References are never
carried, they are constants of the loop; conditions and bodies may still read and write them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf

from pallasite.plugin import InvalidValueError, RuleSet, Semantics, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import RegisterLayout, describe
from pallasite.plugin.lowering import RegisterArray, RuleContext, Value, relayout
from pallasite_std.carried import CarriedValue
from pallasite_std.divisors import mark_carried
from pallasite_std.memory.overwrites import staged_branch
from pallasite_std.memory.sums import counters_of
from pallasite_std.rules.opaque import opaque
from pallasite_std.rules.shape import is_anonymous

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)


# Carried values -------------------------------------------------------------------------------


class Carry:
    """Carried values as flat registers; anything else (references) stays what it is.

    Values of plugins that are carried are of a subclass of ``CarriedValue``.
    """

    def __init__(self, ctx: RuleContext, values: Sequence[Value], what: str):
        self.ctx = ctx
        self.values = list(values)
        self.what = what

    @staticmethod
    def _of(value: Value) -> tuple[ir.Value, ...]:
        if isinstance(value, RegisterArray):
            return value.registers
        if isinstance(value, CarriedValue):
            return tuple(value.carry_registers())
        return ()

    @property
    def registers(self) -> list[ir.Value]:
        """All registers, in order."""
        return [register for value in self.values for register in self._of(value)]

    def rebuild(self, registers: Sequence[ir.Value]) -> list[Value]:
        """The values with other registers in place of theirs."""
        results: list[Value] = []
        position = 0
        for value in self.values:
            count = len(self._of(value))
            mine = tuple(registers[position : position + count])
            position += count
            if isinstance(value, RegisterArray):
                results.append(RegisterArray(mine, value.layout, value.dtype))
            elif isinstance(value, CarriedValue):
                results.append(value.with_registers(mine))
            else:
                results.append(value)
        return results

    def flatten(self, values: Sequence[Value]) -> list[ir.Value]:
        """The registers of new values for the same carries.

        Splats are materialized where the carry is distributed, and arrays whose layout nobody asked
        for are brought into that of the carry.

        Raises:
          InvalidValueError: a value has another layout than its carry, which the program chose.
        """
        registers: list[ir.Value] = []
        for position, (old, new) in enumerate(zip(self.values, values, strict=True)):
            if isinstance(old, RegisterArray):
                assert isinstance(new, RegisterArray)
                if new.is_splat and isinstance(old.layout, RegisterLayout):
                    new = new.materialize(old.layout)
                layouts = (new.layout, old.layout)
                if all(map(is_anonymous, layouts)) and not (new.is_splat or self.ctx.in_warp):
                    new = relayout(self.ctx, new, old.layout)
                if new.layout != old.layout:
                    raise InvalidValueError(
                        f"{self.what}: value {position}, {new.dtype}{list(new.shape)}, has layout"
                        f" {describe(new.layout)}, when it should be {describe(old.layout)}",
                        hint="cast it inside with plgpu.layout_cast, or start with a value that has"
                        " this layout",
                    )
                registers += new.registers
            else:
                registers += self._of(new)
        return registers


def _distribute_splats(
    ctx: RuleContext, carries: Sequence[Value], trial: Callable[[list[Value]], Sequence[Value]]
) -> list[Value]:
    """Materializes splat carries that the body turns into distributed arrays.

    ``x = jnp.zeros(shape)`` before a loop is a splat, while what the loop makes of it is not. The
    body is lowered once on the side to see which layouts it gives; that code is thrown away.
    """
    result = list(carries)
    if ctx.kernel.plan is not None:  # It says which are materialized.
        return result
    for _ in range(len(result) + 1):
        suspects = [
            position
            for position, value in enumerate(result)
            if isinstance(value, RegisterArray) and value.is_splat and value.shape != ()
        ]
        if not suspects:
            return result
        with discarded(ctx):
            outputs = trial(result)
            layouts = {
                position: outputs[position].layout
                for position in suspects
                if not outputs[position].is_splat
            }
        if not layouts:
            return result
        for position, layout in layouts.items():
            result[position] = result[position].materialize(layout)
    return result


class discarded:  # noqa: N801  (used like a function)
    """Emits code on the side and throws it away.

    What the code asked of the launch stays: barriers return to the free list when their scope ends
    and serve the code that is kept.
    """

    def __init__(self, ctx: RuleContext):
        self._kernel = ctx.kernel
        self._outer = ctx.kernel.on_trial

    def __enter__(self) -> None:
        self._kernel.on_trial = True
        self._operation = scf.ExecuteRegionOp([])
        self._block = self._operation.regions[0].blocks.append()
        self._point = ir.InsertionPoint(self._block)
        self._point.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._point.__exit__(*exception)
        self._operation.operation.erase()
        self._kernel.on_trial = self._outer


# Calls ----------------------------------------------------------------------------------------


@rules.lowering(_jax.jit_p, *_ALL)
def _jit(ctx: RuleContext, *args: Value, jaxpr: Any, **params: Any) -> list[Value]:
    return ctx.lower(jaxpr, args)


@rules.lowering(_jax.closed_call_p, *_ALL)
def _closed_call(ctx: RuleContext, *args: Value, call_jaxpr: Any, **params: Any) -> list[Value]:
    return ctx.lower(call_jaxpr, args)


@rules.lowering(_jax.custom_jvp_call_p, *_ALL)
def _custom_jvp(ctx: RuleContext, *args: Value, call_jaxpr: Any, **params: Any) -> list[Value]:
    return ctx.lower(call_jaxpr, args)


@rules.lowering(_jax.custom_vjp_call_p, *_ALL)
def _custom_vjp(ctx: RuleContext, *args: Value, call_jaxpr: Any, **params: Any) -> list[Value]:
    return ctx.lower(call_jaxpr, args)


@rules.lowering(_jax.custom_vmap_p, *_ALL)
def _custom_vmap(ctx: RuleContext, *args: Value, call: Any, **params: Any) -> list[Value]:
    return ctx.lower(call, args)


@rules.lowering(_jax.remat_p, *_ALL)
def _remat(ctx: RuleContext, *args: Value, jaxpr: Any, **params: Any) -> list[Value]:
    return ctx.lower(jaxpr, args)


# Loops ----------------------------------------------------------------------------------------


@rules.lowering(_jax.scan_p, *_ALL)
def _scan(
    ctx: RuleContext,
    *args: Value,
    jaxpr: Any,
    length: Any,
    reverse: bool,
    unroll: int,
    ft_in: Any,
    **params: Any,
) -> list[Value]:
    consts_count, carry_count = _jax.scan_operand_counts({"ft_in": ft_in})[:2]
    consts = list(args[:consts_count])
    carries = list(args[consts_count : consts_count + carry_count])
    if len(args) > consts_count + carry_count:
        raise UnsupportedError(
            "a scan over the elements of arrays in registers",
            got=f"{len(args) - consts_count - carry_count} scanned inputs",
            expected="loops that carry values, such as jax.lax.fori_loop",
            hint="keep the data in a reference and index it with the loop's counter",
        )
    if len(jaxpr.outvars) > carry_count:
        raise UnsupportedError(
            "a scan that stacks results of its steps",
            expected="a loop that writes them to a reference",
        )
    del reverse  # Without scanned inputs or outputs the direction makes no difference.

    mark = mark_carried(ctx.kernel.jaxprs, jaxpr, consts, carries)

    def body(values: list[Value]) -> list[Value]:
        return ctx.lower(jaxpr, [*consts, *values])

    steps = int(length)
    if unroll is True:
        unroll = steps
    unroll = max(1, int(unroll))
    if steps == 0:
        return carries
    if unroll >= steps or steps == 1:
        for _ in range(steps):
            carries = body(carries)
        return carries
    carries = _distribute_splats(ctx, carries, body)
    carry = Carry(ctx, carries, "the loop body")

    counters = _counters(jaxpr.eqns, jaxpr.invars[consts_count:], jaxpr.outvars)

    def emit(_: ir.Value, registers: list[ir.Value]) -> list[ir.Value]:
        values = carry.rebuild(registers)
        # What is on trial will be thrown away: other values may take its place in MLIR's memory.
        for number, step in () if ctx.kernel.on_trial else counters.items():
            counters_of(ctx.kernel).note(ctx.scalar(values[number]), step * unroll)
        values = mark(values)
        for _ in range(unroll):
            values = carry.rebuild(carry.flatten(body(values)))
        return carry.flatten(values)

    zero = ops.i32_constant(0)
    results = carry.rebuild(
        ops.for_loop(zero, ops.i32_constant(steps // unroll), carry.registers, emit)
    )
    for _ in range(steps % unroll):
        results = carry.rebuild(carry.flatten(body(results)))
    return results


@rules.lowering(_jax.while_p, *_ALL)
def _while(
    ctx: RuleContext,
    *args: Value,
    cond_jaxpr: Any,
    body_jaxpr: Any,
    cond_nconsts: int,
    body_nconsts: int,
    **params: Any,
) -> list[Value]:
    cond_consts = list(args[:cond_nconsts])
    body_consts = list(args[cond_nconsts : cond_nconsts + body_nconsts])
    carries = list(args[cond_nconsts + body_nconsts :])
    counted = _counted_loop(cond_jaxpr, body_jaxpr, cond_nconsts, body_nconsts)

    mark = mark_carried(ctx.kernel.jaxprs, body_jaxpr, body_consts, carries)

    def body(values: list[Value]) -> list[Value]:
        return ctx.lower(body_jaxpr, [*body_consts, *mark(values)])

    carries = _distribute_splats(ctx, carries, body)
    carry = Carry(ctx, carries, "the loop body")
    if counted is not None:
        counter, bound = counted
        start, stop = ctx.scalar(carries[counter]), ctx.scalar(carries[bound])
        others = [v for i, v in enumerate(carries) if i != counter]
        rest = Carry(ctx, others, "the loop body")
        dtype = carries[counter].dtype

        def emit(index: ir.Value, registers: list[ir.Value]) -> list[ir.Value]:
            values = rest.rebuild(registers)
            values.insert(counter, RegisterArray.splat(index, dtype))
            results = body(values)
            del results[counter]
            return rest.flatten(results)

        finals = rest.rebuild(ops.for_loop(start, stop, rest.registers, emit))
        # The counter ends at the bound, or where it started if that is beyond the bound.
        finals.insert(counter, RegisterArray.splat(ops.arith.maxsi(start, stop), dtype, ()))
        return finals
    registers = carry.registers
    operation = scf.WhileOp([r.type for r in registers], registers)
    before = operation.before.blocks.append(*[r.type for r in registers])
    after = operation.after.blocks.append(*[r.type for r in registers])
    with ir.InsertionPoint(before):
        values = carry.rebuild(list(before.arguments))
        (condition,) = ctx.lower(cond_jaxpr, [*cond_consts, *values])
        scf.condition(ctx.scalar(condition), list(before.arguments))
    with ir.InsertionPoint(after):
        values = carry.rebuild(list(after.arguments))
        scf.yield_(carry.flatten(body(values)))
    return carry.rebuild(list(operation.results))


def _counters(
    equations: Sequence[Any], carried: Sequence[Any], results: Sequence[Any]
) -> dict[int, int]:
    """Which of the values that a loop's body takes and returns go up by a constant, and by what."""
    sums = {}
    for equation in equations:
        if equation.primitive is _jax.lax_primitives.add_p:
            sums[equation.outvars[0]] = equation.invars
    found = {}
    for number, (value, result) in enumerate(zip(carried, results, strict=False)):
        is_integer = value.aval.shape == () and np.issubdtype(value.aval.dtype, np.signedinteger)
        if not is_integer or isinstance(result, _jax.Literal) or result not in sums:
            continue
        left, right = sums[result]
        if left is value and isinstance(right, _jax.Literal):
            found[number] = int(right.val)
    return found


def _counted_loop(
    cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int
) -> tuple[int, int] | None:
    """Recognises ``while i < n: ...; i += 1`` and returns the positions of i and n in the carry.

    A for loop has a known number of steps, which the optimiser can unroll and strength-reduce.
    """
    if cond_nconsts or len(cond_jaxpr.eqns) != 1 or cond_jaxpr.consts:
        return None
    (comparison,) = cond_jaxpr.eqns
    if comparison.primitive is not _jax.lax_primitives.lt_p:
        return None
    if list(cond_jaxpr.outvars) != list(comparison.outvars):
        return None
    invars = list(cond_jaxpr.invars)
    if any(isinstance(atom, _jax.Literal) for atom in comparison.invars):
        return None
    counter, bound = (invars.index(atom) for atom in comparison.invars)
    aval = invars[counter].aval
    if aval.shape != () or aval.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        return None
    inner = list(body_jaxpr.invars)[-len(invars) :]
    if body_jaxpr.outvars[bound] is not inner[bound]:
        return None
    for equation in body_jaxpr.eqns:
        if body_jaxpr.outvars[counter] in equation.outvars:
            if equation.primitive is not _jax.lax_primitives.add_p:
                return None
            left, right = equation.invars
            if left is inner[counter] and isinstance(right, _jax.Literal) and right.val == 1:
                return counter, bound
    return None


# Branches -------------------------------------------------------------------------------------


@rules.lowering(_jax.cond_p, *_ALL)
def _cond(
    ctx: RuleContext, index: RegisterArray, *args: Value, branches: Sequence[Any], **params: Any
) -> list[Value]:
    if len(branches) == 1:
        return ctx.lower(branches[0], args)
    args = tuple(
        _apart(value) if any(_hands_back(branch, place) for branch in branches) else value
        for place, value in enumerate(args)
    )
    # The result types are needed before the branches are emitted. Each branch is lowered once, into
    # a region of its own, and the regions' blocks move into the operation afterwards.
    staged = []
    scalar = ctx.scalar(index)
    for number, branch in enumerate(branches):
        holder = scf.ExecuteRegionOp([])
        block = holder.regions[0].blocks.append()
        one_of = staged_branch(ctx, holder.operation, scalar, number, len(branches))
        with one_of, ir.InsertionPoint(block):
            values = ctx.lower(branch, args)
        staged.append((holder, block, values))
    merged = _common_layouts([values for _, _, values in staged])
    carry = Carry(ctx, merged, "the branches of a conditional")
    flat = []
    for _, block, values in staged:
        with ir.InsertionPoint(block):
            flat.append(carry.flatten(values))
    result_types = [register.type for register in flat[0]]
    if len(branches) == 2:
        if scalar.type != ops.i1():
            scalar = ops.compare("ne", scalar, 0)
        operation: Any = scf.IfOp(scalar, result_types, has_else=True)
        targets = [operation.else_block, operation.then_block]
    else:
        wide = ops.cast_integer(scalar, ops.i64())
        as_index = ops.arith.index_cast(ir.IndexType.get(), wide)
        operation = scf.IndexSwitchOp(result_types, as_index, list(range(len(branches) - 1)))
        regions = list(operation.regions)
        ordered = [*regions[1:], regions[0]]  # The default region comes first in MLIR.
        targets = [r.blocks[0] if len(r.blocks) else r.blocks.append() for r in ordered]
    for (holder, block, _), target, registers in zip(staged, targets, flat, strict=True):
        with ir.InsertionPoint(block):
            terminator = scf.yield_(registers)
        del terminator
        for existing in list(target.operations):
            existing.operation.erase()
        for inner in list(block.operations):
            inner.operation.detach_from_parent()
            target.append(inner.operation)
        holder.operation.erase()
    return carry.rebuild(list(operation.results))


_FEW_COPIES = 8


def _hands_back(branch: Any, place: int) -> bool:
    jaxpr = branch.jaxpr
    return any(variable is jaxpr.invars[place] for variable in jaxpr.outvars)


def _apart(value: Value) -> Value:
    """An array whose registers are one value, such as an accumulator's zeros, in one register each.

    The branch that hands it back needs them apart, and so may a loop in another branch. This way
    they are made once for both.
    """
    if not isinstance(value, RegisterArray) or len(value.registers) < _FEW_COPIES:
        return value
    first = value.registers[0]
    bits = types.bit_width(value.dtype) * value.vector_length
    if bits != 32 or any(register != first for register in value.registers):
        return value
    return RegisterArray(tuple(opaque(value.registers)), value.layout, value.dtype)


def _common_layouts(branches: Sequence[Sequence[Value]]) -> list[Value]:
    """For each result the value of a branch whose layout the others can take."""
    merged: list[Value] = []
    for values in zip(*branches, strict=True):
        chosen = values[0]
        for value in values:
            if isinstance(value, RegisterArray) and isinstance(value.layout, RegisterLayout):
                chosen = value
                break
        merged.append(chosen)
    return merged
