"""Printing, run-time checks and delays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.plugin import InvalidValueError, RuleSet, Semantics, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import RegisterLayout, default_strided, describe
from pallasite.plugin.lowering import RegisterArray, RuleContext, Value
from pallasite_std.memory.elements import element_indices, once_per_element
from pallasite_std.memory.references import constant_integer
from pallasite_std.primitives.arrays import print_layout_p
from pallasite_std.rules.device_print import (
    call_external,
    escaped,
    literal_pieces,
    printf,
    promoted,
    string_pointer,
)

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)

LONGEST_SLEEP = 1_000_000
"""Nanoseconds that one ``nanosleep`` can sleep at most (PTX ISA 9.7.13.15)."""


@rules.lowering(_jax.debug_print_p, *_ALL)
def _debug_print(
    ctx: RuleContext,
    *operands: Value,
    fmt: str,
    ordered: bool,
    in_tree: Any,
    static_args: Any,
    **params: Any,
) -> Sequence[Value]:
    if ordered:
        raise UnsupportedError(
            "an ordered debug_print in a kernel",
            expected="ordered=False: the threads of a kernel print when they get there",
        )
    args, keywords = _jax.merge_callback_args(in_tree, operands, static_args)
    if keywords:
        raise UnsupportedError(
            "debug_print with keyword arguments in a kernel",
            got=", ".join(keywords),
            expected="positional arguments and {} placeholders",
        )
    pieces = literal_pieces(fmt, len(args))
    arrays = [arg for arg in args if isinstance(arg, RegisterArray) and arg.shape != ()]
    if not arrays:
        with ops.when(ctx.leader):
            _print_scalars(ctx, pieces, args)
        return ()
    if len(args) > 1:
        raise UnsupportedError(
            "debug_print of an array together with other values",
            got=", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays),
            expected="any number of scalars, or exactly one array",
            hint="print them one by one",
        )
    if ctx.in_warp:
        raise UnsupportedError("debug_print of an array in a warp-mapped region", got=repr(fmt))
    _print_elements(ctx, pieces, arrays[0])
    return ()


def _print_scalars(ctx: RuleContext, pieces: Sequence[str], args: Sequence[Any]) -> None:
    """Prints one line; static arguments become part of the text."""
    text = escaped(pieces[0])
    values: list[ir.Value] = []
    for arg, piece in zip(args, pieces[1:], strict=True):
        if isinstance(arg, RegisterArray):
            directive, value = promoted(ctx.kernel, arg.scalar, arg.dtype)
            values.append(value)
            text += directive
        else:
            text += escaped(str(arg))
        text += escaped(piece)
    printf(ctx.kernel, text + "\n", values)


def _print_elements(ctx: RuleContext, pieces: Sequence[str], array: RegisterArray) -> None:
    """Prints a line ``[i, j]: value`` for each element, by the first thread that holds it."""
    if array.is_splat:
        bits = types.bit_width(array.dtype)
        array = array.materialize(default_strided(array.shape, bits))
    layout = array.layout
    assert isinstance(layout, RegisterLayout)
    indices = ", ".join(["%d"] * len(array.shape))
    before, after = escaped(pieces[0]), escaped(pieces[1])
    with once_per_element(ctx.launch, layout):
        for register, element, index in element_indices(ctx.launch, layout):
            scalar = ops.extract(array.registers[register], element)
            directive, value = promoted(ctx.kernel, scalar, array.dtype)
            printf(ctx.kernel, f"{before}[{indices}]: {directive}{after}\n", [*index, value])


@rules.lowering(_jax.check_p, *_ALL)
def _check(ctx: RuleContext, *operands: Value, err_tree: Any, debug: bool) -> Sequence[Value]:
    """A failed check reports through the driver's ``__assertfail`` and ends the grid."""
    if not debug:
        raise UnsupportedError(
            "checkify.check inside a kernel",
            expected="pl.debug_check, which stops the kernel when it fails",
        )
    if not _jax.debug_checks_enabled():
        return ()
    error = jax.tree.unflatten(err_tree, operands)
    (failed,) = error._pred.values()
    (metadata,) = error._metadata.values()
    (payload,) = error._payload.values()
    exception = jax.tree.unflatten(metadata, payload)
    if not isinstance(exception, _jax.FailedCheckError):
        raise UnsupportedError("an automatic check inside a kernel", got=type(exception).__name__)
    location = ctx.location
    file = location.file if location else "<unknown>"
    line = location.line if location else 0
    with ops.when(ctx.scalar(failed)):
        with ops.when(ctx.leader):
            _print_failure(ctx, exception, f"{file}:{line}")
            call_external(
                ctx.kernel,
                "__assertfail",
                "void (ptr, ptr, i32, ptr, i64)",
                string_pointer(ctx.kernel, exception.fmt_string),
                string_pointer(ctx.kernel, file),
                ops.i32_constant(line),
                string_pointer(ctx.kernel, ctx.launch.name),
                ops.i64_constant(1),
            )
            llvm.intr_trap()
        # The others wait for the end, and touch nothing until it comes.
        ctx.synchronize()
    return ()


def _print_failure(ctx: RuleContext, exception: Any, where: str) -> None:
    """Prints the message with its values, if they are scalars in plain placeholders."""
    args = list(exception.args)
    if not args or exception.kwargs:
        return
    if any(isinstance(arg, RegisterArray) and arg.shape != () for arg in args):
        return
    try:
        pieces = literal_pieces(exception.fmt_string, len(args))
    except InvalidValueError:
        return
    _print_scalars(ctx, [f"{where}: check failed: {pieces[0]}", *pieces[1:]], args)


@rules.lowering(_jax.delay_p, *_ALL)
def _delay(ctx: RuleContext, nanoseconds: Value) -> Sequence[Value]:
    """Sleeps in all lanes; long delays are several sleeps."""
    duration = ctx.scalar(nanoseconds, ops.i32())
    known = constant_integer(duration)
    if known is not None and known <= LONGEST_SLEEP:
        _sleep(max(0, known))
        return ()
    duration = ops.arith.maxsi(duration, ops.i32_constant(0))

    def sleep(_: ir.Value, carries: list[ir.Value]) -> list[ir.Value]:
        _sleep(LONGEST_SLEEP)
        return carries

    times = ops.divide_unsigned(duration, LONGEST_SLEEP)
    ops.for_loop(ops.i32_constant(0), times, [], sleep)
    _sleep(ops.remainder_unsigned(duration, LONGEST_SLEEP))
    return ()


def _sleep(nanoseconds: ir.Value | int) -> None:
    if isinstance(nanoseconds, int):
        ops.inline_assembly(f"nanosleep.u32 {nanoseconds};", "~{memory}")
    else:
        ops.inline_assembly("nanosleep.u32 $0;", "r,~{memory}", nanoseconds)


@rules.lowering(print_layout_p, *_ALL)
def _print_layout(ctx: RuleContext, *operands: Value, args_tree: Any, fmt: str) -> Sequence[Value]:
    """Prints while the kernel is compiled; no code is emitted."""
    if ctx.kernel.on_trial:
        return ()
    (value,) = args_tree.unflatten(operands)
    if isinstance(value, RegisterArray):
        text = describe(value.layout)
    else:
        reference = value.ref if isinstance(value, _jax.TransformedRef) else value
        text = reference.space.describe_layout(ctx, reference, getattr(value, "transforms", ()))
    print(fmt.format(text))
    return ()
