"""The primitives of warpgroup MMA, as kernels call them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import SMEM, checks, in_warp_region
from pallasite.plugin.language import tensor_core_pipeline_effect as pipeline_effect
from pallasite_hopper.matrix.accumulators import AbstractAccumulatorRef
from pallasite_hopper.matrix.types import check_dtypes, depth_of
from pallasite_std.api import arguments

_WAITS = 8
"""``wgmma.wait_group`` counts at most 7 groups in flight."""

wgmma_ref_p = _jax.Primitive("wgmma_ref")
wgmma_ref_p.multiple_results = True

wgmma_p = _jax.Primitive("wgmma")
"""The MMA as a function: returns the accumulator's new value."""


def wgmma(acc: Any, a: Any, b: Any, *, accumulate: Any = True) -> None:
    """Starts ``acc += a @ b``, or ``acc = a @ b``, on the tensor cores of the warpgroup.

    Until :func:`wgmma_wait` says that it has completed, the operands in shared memory must not
    be written. Each call is one group for ``wgmma_wait``.

    Args:
      acc: an accumulator (:class:`ACC`) of shape (m, n), or a part of one.
      a: (m, k), a reference to shared memory or an array in registers. In shared memory it may lie
        in row- or column-major tiles, with any swizzle; transposed views are fine. In registers it
        needs the layout ``WGMMA``, for 8-bit elements ``WGMMA_8BIT``, for float32 ``WGMMA_TF32``.
      b: (k, n), a reference to shared memory.
      accumulate: False replaces the accumulator's contents; also a boolean scalar.

    m is a multiple of 64, n of 8, k of 32 bytes.
    Dtypes of a and b: bfloat16, float16, float32 (computed as tf32), float8_e4m3fn and float8_e5m2
    (which may differ), int8 and uint8 (which may differ). Elements that do not have 16 bits need a
    and b contiguous along k.

    Raises:
      InvalidTypeError, InvalidValueError: for other operands.

    PTX ISA: ``wgmma.mma_async``, ``wgmma.commit_group``. Needs a target with the feature ``wgmma``.
    """
    _check_warpgroup("wgmma")
    accumulator = _accumulator(acc, "acc")
    a = _left_operand(a)
    b = _in_memory(b, "b")
    for what, operand in (("acc", accumulator), ("a", a), ("b", b)):
        if len(operand.shape) != 2:
            raise checks.value_error(
                f"{what} is not a matrix", got=f"shape {tuple(operand.shape)}", expected="rank 2"
            )
    (m, n), (rows, depth), (depth_of_b, columns) = accumulator.shape, a.shape, b.shape
    if (m, n, depth) != (rows, columns, depth_of_b):
        raise checks.value_error(
            "the shapes do not fit together as acc (m, n) += a (m, k) @ b (k, n)",
            got=f"acc {(m, n)}, a {tuple(a.shape)}, b {tuple(b.shape)}",
            expected=f"a ({m}, k) and b (k, {n})",
        )
    check_dtypes(a.dtype, b.dtype, accumulator.dtype)
    step = depth_of(a.dtype)
    if depth % step:
        raise checks.value_error(
            f"the depth of products of {a.dtype} is no multiple of 32 bytes",
            got=f"k={depth}",
            expected=f"k a multiple of {step}",
        )
    arguments.bind(wgmma_ref_p, accumulator, a, b, _flag(accumulate))


def _check_warpgroup(what: str) -> None:
    if in_warp_region():
        raise checks.unsupported(
            f"{what} in code that runs per warp",
            expected="the four warps of a warpgroup together",
            hint="call it outside of plgpu.warp_map",
        )


def _flag(accumulate: Any) -> Any:
    """True as None, so that the flag takes no operand where it is not needed."""
    if isinstance(accumulate, bool | np.bool_):
        return None if accumulate else jnp.zeros((), jnp.bool_)
    return arguments.predicate(accumulate, "accumulate")


def _left_operand(a: Any) -> Any:
    aval = None if isinstance(a, _jax.TransformedRef) else _typeof(a)
    if isinstance(aval, _jax.ShapedArray):
        return a
    return _in_memory(a, "a", " or an array")


def _in_memory(operand: Any, what: str, alternative: str = "") -> Any:
    base = operand.ref if isinstance(operand, _jax.TransformedRef) else operand
    aval = _typeof(base)
    if isinstance(aval, AbstractAccumulatorRef):
        raise checks.type_error(
            f"{what} is an accumulator",
            got=aval,
            expected="a reference to shared memory" + alternative,
            hint="read it and convert it: acc[...].astype(dtype)" if alternative else None,
        )
    if not isinstance(aval, _jax.AbstractRef):
        shown = aval.str_short() if isinstance(aval, _jax.ShapedArray) else type(base).__name__
        raise checks.type_error(
            f"{what} is not in shared memory",
            got=shown,
            expected="a reference to shared memory" + alternative,
            hint=None if alternative else "store it: ref[...] = value, then plgpu.commit_smem()",
        )
    return arguments.reference(operand, what, SMEM)


def _typeof(value: Any) -> Any:
    """The type of an array or a reference; None for anything else, such as a Python number."""
    if isinstance(value, int | float | complex | str) or value is None:
        return None
    try:
        return _jax.typeof(value)
    except TypeError:
        return None


def _accumulator(value: Any, what: str) -> Any:
    ref = value if isinstance(value, _jax.TransformedRef) else None
    base = value if ref is None else ref.ref
    if not isinstance(_typeof(base), AbstractAccumulatorRef):
        raise checks.type_error(
            f"{what} is not an accumulator",
            got=_typeof(base) or type(base).__name__,
            expected="a reference allocated as plgpu.ACC((m, n), dtype)",
        )
    if ref is None:
        ref = _jax.TransformedRef(base, ())
    for view in ref.transforms:
        static = isinstance(view, _jax.NDIndexer) and all(
            isinstance(index, _jax.Slice)
            and isinstance(index.start, int)
            and isinstance(index.size, int)
            and index.stride == 1
            for index in view.indices
        )
        if not static:
            raise checks.unsupported(
                f"{what} is a part that is not known while tracing, or no matrix",
                got=_describe(view),
                expected="slices with numbers that are known while tracing: acc.at[:, 0:64]",
            )
    return ref


def _describe(view: Any) -> str:
    """An index as it is written; other views by name."""
    if not isinstance(view, _jax.NDIndexer):
        return type(view).__name__

    def one(index: Any) -> str:
        if not isinstance(index, _jax.Slice):
            return "an index" if np.ndim(index) == 0 else "an array of indices"
        if not isinstance(index.start, int) or not isinstance(index.size, int):
            return f"pl.ds(..., {index.size})"
        stop = index.start + index.size * index.stride
        return f"{index.start}:{stop}" + ("" if index.stride == 1 else f":{index.stride}")

    return f"acc.at[{', '.join(one(index) for index in view.indices)}]"


def _effects(args_tree: Any, num_operands: int) -> set[Any]:
    acc, a, b, _ = args_tree.unflatten(list(range(num_operands)))
    effects: set[Any] = {pipeline_effect, _jax.ReadEffect(b.ref)}
    if isinstance(a, _jax.TransformedRef):
        effects.add(_jax.ReadEffect(a.ref))
    del acc
    return effects


@_jax.abstract_eval(wgmma_ref_p)
def _wgmma_ref_abstract_eval(*avals: Any, args_tree: Any) -> Any:
    effects = _effects(args_tree, len(avals))
    return (), effects | {_jax.ReadEffect(0), _jax.WriteEffect(0)}


@_jax.discharge_rule(wgmma_ref_p)
def _wgmma_ref_discharge(ctx: Any, *operands: Any, args_tree: Any) -> Any:
    del ctx
    new = wgmma_p.bind(*operands, args_tree=args_tree)
    return (new, *[None] * (len(operands) - 1)), ()


@_jax.abstract_eval(wgmma_p)
def _wgmma_abstract_eval(*avals: Any, args_tree: Any) -> Any:
    acc = avals[0]
    inner = acc.inner_aval if isinstance(acc, _jax.AbstractRef) else acc
    return inner, _effects(args_tree, len(avals))


for _primitive in (wgmma_ref_p, wgmma_p):
    arguments.pretty(
        _primitive,
        lambda args, params: (
            [args[0], "<-", args[1], "@", args[2]]
            + ([] if args[3] is None else ["accumulate", args[3]])
        ),
    )


# Waiting ----------------------------------------------------------------------------------------

wgmma_wait_p = _jax.Primitive("wgmma_wait")
wgmma_wait_p.multiple_results = True

wgmma_added_wait_p = _jax.Primitive("wgmma_added_wait")
wgmma_added_wait_p.multiple_results = True
"""A wait that the program lacks, before an equation of another primitive."""


def wgmma_wait(n: int) -> None:
    """Waits until at most ``n`` of the ``wgmma`` that the thread has issued are in flight.

    Args:
      n: calls of :func:`wgmma`, an integer from 0 to 7. The last ones stay in flight.

    Raises:
      InvalidTypeError, InvalidValueError: for anything else.

    PTX ISA: ``wgmma.wait_group``.
    """
    _check_warpgroup("wgmma_wait")
    wgmma_wait_p.bind(n=_groups(n))


def _groups(n: Any) -> int:
    groups = checks.count(n, "n")
    if groups >= _WAITS:
        raise checks.value_error(
            "wgmma in flight cannot be told apart so far back",
            got=f"n={n}",
            expected=f"an integer from 0 to {_WAITS - 1}",
        )
    return groups


@_jax.abstract_eval(wgmma_wait_p)
@_jax.abstract_eval(wgmma_added_wait_p)
def _wgmma_wait_abstract_eval(*, n: int, before: str = "") -> Any:
    del n, before
    return (), {pipeline_effect}


# Reading and writing ----------------------------------------------------------------------------

wgmma_accumulator_deref_p = _jax.Primitive("wgmma_accumulator_deref")

wgmma_accumulator_read_p = _jax.Primitive("wgmma_accumulator_read")
wgmma_accumulator_read_p.multiple_results = True
"""Reading as a function: returns the accumulator as it is after the wait, and its contents."""

wgmma_accumulator_store_p = _jax.Primitive("wgmma_accumulator_store")


def wgmma_accumulator_load(acc: Any, *, wait_n: int | None = 0) -> jax.Array:
    """Reads an accumulator; ``acc[...]`` is the same with ``wait_n=0``.

    Args:
      acc: a whole accumulator.
      wait_n: first wait until at most so many ``wgmma`` are in flight, none of which may be one of
        this accumulator's; None does not wait: a :func:`wgmma_wait` did it before.

    Returns:
      An array of the accumulator's shape and dtype, in the register layout ``WGMMA``.

    Raises:
      InvalidTypeError: not an accumulator.
    """
    ref = _accumulator(acc, "acc")
    if ref.transforms:
        raise checks.unsupported(
            "a part of an accumulator is read",
            expected="the whole accumulator",
            hint="slice the array: acc[...][:, 0:64]",
        )
    _check_warpgroup("wgmma_accumulator_load")
    groups = None if wait_n is None else _groups(wait_n)
    return wgmma_accumulator_deref_p.bind(ref.ref, wait_n=groups)


@_jax.abstract_eval(wgmma_accumulator_deref_p)
def _deref_abstract_eval(acc: Any, *, wait_n: int | None) -> Any:
    del wait_n
    return acc.inner_aval, {pipeline_effect, _jax.ReadEffect(0)}


@_jax.discharge_rule(wgmma_accumulator_deref_p)
def _deref_discharge(ctx: Any, acc: Any, *, wait_n: int | None) -> Any:
    del ctx
    # The registers of before the wait must not be used again: they would be copied, in flight.
    after, contents = wgmma_accumulator_read_p.bind(acc, wait_n=wait_n)
    return (after,), contents


@_jax.abstract_eval(wgmma_accumulator_read_p)
def _read_abstract_eval(acc: Any, *, wait_n: int | None) -> Any:
    del wait_n
    return [acc, acc], {pipeline_effect}


def wgmma_accumulator_store(acc: Any, value: Any) -> None:
    """Replaces the contents of an accumulator; ``acc[...] = value`` is the same.

    No ``wgmma`` into the accumulator may be in flight.

    Args:
      acc: a whole accumulator.
      value: an array of its shape and dtype, or a scalar.

    Raises:
      InvalidTypeError, InvalidValueError: for anything else.
    """
    ref = _accumulator(acc, "acc")
    if ref.transforms:
        raise part_is_written(_describe(ref.transforms[0]))
    _check_warpgroup("wgmma_accumulator_store")
    aval = _jax.typeof(ref.ref)
    value = jnp.asarray(value)
    if value.shape not in ((), aval.shape):
        raise checks.value_error(
            "the array does not have the shape of the accumulator",
            got=tuple(value.shape),
            expected=str(tuple(aval.shape)),
        )
    value = jnp.broadcast_to(value, aval.shape)
    arguments.same_dtype(_jax.typeof(value), "value", aval, "acc")
    wgmma_accumulator_store_p.bind(ref.ref, value)


def part_is_written(index: Any) -> Exception:
    """The error for a store to a part of an accumulator."""
    return checks.unsupported(
        "a part of an accumulator is written",
        got=str(index),
        expected="acc[...] = value",
        hint="wgmma can accumulate into a part: plgpu.wgmma(acc.at[:, 0:64], ...)",
    )


@_jax.abstract_eval(wgmma_accumulator_store_p)
def _store_abstract_eval(acc: Any, value: Any) -> Any:
    if isinstance(acc, _jax.AbstractRef):
        # The result before the accumulator is a value means nothing and is not used.
        return acc.inner_aval, {pipeline_effect, _jax.WriteEffect(0)}
    return value, {pipeline_effect}


@_jax.discharge_rule(wgmma_accumulator_store_p)
def _store_discharge(ctx: Any, acc: Any, value: Any) -> Any:
    del ctx
    new = wgmma_accumulator_store_p.bind(acc, value)
    return (new, None), new
