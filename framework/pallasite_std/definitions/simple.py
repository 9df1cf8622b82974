"""Small primitives: parts and stacks of arrays, reductions by a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

from pallasite.plugin import UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite_std.batched_loops import while_each
from pallasite_std.definitions.record import Definition


def _split(x: Any, *, sizes: Sequence[int], axis: int) -> list[Any]:
    parts, start = [], 0
    for size in sizes:
        parts.append(lax.slice_in_dim(x, start, start + size, axis=axis))
        start += size
    return parts


def _stack(*arrays: Any, axis: int, **params: Any) -> list[Any]:
    return [lax.concatenate([lax.expand_dims(x, (axis,)) for x in arrays], axis)]


def _unstack(x: Any, *, axis: int, **params: Any) -> list[Any]:
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]


def _reduce(*operands: Any, jaxpr: Any, dimensions: Sequence[int], **params: Any) -> list[Any]:
    """Halves are combined, and halves of that, along each dimension in turn."""
    count = len(operands) // 2
    arrays, initial = list(operands[:count]), list(operands[count:])
    consts = params.get("consts", ())

    def combine(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        return list(_elementwise(jaxpr, consts, left[0].shape, [*left, *right]))

    for axis in sorted(dimensions, reverse=True):
        while arrays[0].shape[axis] > 1:
            size = arrays[0].shape[axis]
            half = size // 2
            left = [lax.slice_in_dim(x, 0, half, axis=axis) for x in arrays]
            right = [lax.slice_in_dim(x, half, 2 * half, axis=axis) for x in arrays]
            rest = [lax.slice_in_dim(x, 2 * half, size, axis=axis) for x in arrays]
            arrays = combine(left, right)
            if size % 2:
                arrays = [lax.concatenate(p, axis) for p in zip(arrays, rest, strict=True)]
        arrays = [lax.squeeze(x, (axis,)) for x in arrays]
    starts = [jnp.broadcast_to(one, arrays[0].shape) for one in initial]
    return combine(starts, arrays)


def _is_applied(params: dict[str, Any]) -> bool:
    """Whether a scatter stores a function of the old element, as ``x.at[i].apply(f)`` does."""
    function = params["update_jaxpr"]
    return function is not None and function.outvars[0] is not function.invars[1]


def _scatter(x: Any, indices: Any, updates: Any, **params: Any) -> list[Any]:
    """Elements that several indices name get the function as many times."""
    if 0 in updates.shape:
        return [x]
    function, consts = params.pop("update_jaxpr"), params.pop("update_consts")
    unique = params["unique_indices"] or math.prod(indices.shape[:-1]) == 1
    counts = lax.scatter_add(
        jnp.zeros(x.shape, jnp.int32), indices, jnp.ones(updates.shape, jnp.int32), **params
    )

    def apply(number: Any, x: Any) -> Any:
        (made,) = _elementwise(function, consts, x.shape, [x, x])
        return lax.select(counts > number, made, x)

    return [lax.fori_loop(0, 1 if unique else jnp.max(counts), apply, x)]


def _composite(*operands: Any, call_jaxpr: Any, **params: Any) -> list[Any]:
    return list(_jax.jaxpr_as_function(call_jaxpr)(*operands))


def _composed(*operands: Any, _prim: Any) -> list[Any]:
    """A primitive that is an object with a definition of its own, as ``lax.custom_root`` has."""
    found = _prim.expand(*jax.tree.unflatten(_prim.in_tree, operands))
    return list(jax.tree.leaves(found))


def _solved(*operands: Any, const_lengths: Any, jaxprs: Any) -> list[Any]:
    counts = list(const_lengths)
    first = sum(counts[: const_lengths._fields.index("solve")])
    constants = operands[first : first + const_lengths.solve]
    return list(_jax.jaxpr_as_function(jaxprs.solve)(*constants, *operands[sum(counts) :]))


def _while_any(
    *operands: Any, cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int
) -> Sequence[Any]:
    condition, body = map(_jax.jaxpr_as_function, (cond_jaxpr, body_jaxpr))
    constants = operands[:cond_nconsts]
    others = operands[cond_nconsts : cond_nconsts + body_nconsts]
    return while_each(
        lambda *carried: condition(*constants, *carried)[0],
        lambda *carried: body(*others, *carried),
        operands[cond_nconsts + body_nconsts :],
    )


def _empty(*, dtype: Any, shape: Sequence[int] = (), **params: Any) -> list[Any]:
    return [jnp.zeros(shape, dtype)]


def _elementwise(jaxpr: Any, consts: Any, shape: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """A jaxpr of scalars on the elements of arrays."""
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        if isinstance(atom, _jax.Literal):
            return jnp.full(shape, atom.val, atom.aval.dtype)
        return values[atom]

    inner = getattr(jaxpr, "jaxpr", jaxpr)
    for variable, value in zip(inner.invars, operands, strict=True):
        values[variable] = value
    for variable, value in zip(inner.constvars, consts or jaxpr.consts, strict=True):
        values[variable] = jnp.broadcast_to(value, shape)
    for equation in inner.eqns:
        nested = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        given = [read(atom) for atom in equation.invars]
        if nested is not None:
            results = _elementwise(nested, (), shape, given)
        elif any(v.aval.shape for v in (*equation.invars, *equation.outvars)):
            raise UnsupportedError(
                f"a reduction by a function with {equation.primitive}",
                expected="a function of scalars",
            )
        else:
            found = equation.primitive.bind(*given, **equation.params)
            results = found if equation.primitive.multiple_results else [found]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in inner.outvars]


def _is_empty(atom: Any) -> bool:
    return 0 in getattr(atom.aval, "shape", ())


def _concatenate(*arrays: Any, dimension: int) -> list[Any]:
    return [lax.concatenate([x for x in arrays if 0 not in x.shape], dimension)]


def _pad(x: Any, value: Any, *, padding_config: Any) -> list[Any]:
    sizes = [low + high for low, high, _ in padding_config]
    shape = [
        max(0, n + extent + max(0, n - 1) * step)
        for n, extent, (_, _, step) in zip(x.shape, sizes, padding_config, strict=True)
    ]
    return [jnp.broadcast_to(value, shape)]


def _sum_of_cotangents(x: Any, y: Any) -> list[Any]:
    return [lax.add(x, y)]


def _by_platform(platforms: Sequence[Sequence[str] | None]) -> int:
    """Which of some branches is that for CUDA."""
    return next((i for i, one in enumerate(platforms) if one is None or "cuda" in one), -1)


def _platform_index(*, platforms: Any) -> list[Any]:
    return [jnp.int32(_by_platform(platforms))]


def _for_platform(
    index: Any, *operands: Any, branches: Any, branches_platforms: Any, **params: Any
) -> Sequence[Any]:
    """The branch of ``lax.platform_dependent`` for CUDA; others may not compile."""
    run = _jax.jaxpr_as_function(branches[_by_platform(branches_platforms)])
    return list(run(*operands))


def _in_order(x: Any) -> Any:
    """Integers in the total order of IEEE 754: -NaN, numbers with -0 before 0, NaN."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    bits = jnp.finfo(x.dtype).bits
    whole = lax.bitcast_convert_type(x, jnp.dtype(f"int{bits}"))
    # Of negative numbers, the larger magnitude is the smaller number.
    return whole ^ ((whole >> (bits - 1)) & jnp.iinfo(whole.dtype).max)


def _bits(dtype: Any) -> int:
    if dtype == jnp.bool_:
        return 8
    return int((jnp.finfo if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo)(dtype).bits)


def _bitcast(x: Any, *, new_dtype: Any, **params: Any) -> list[Any]:
    """Between dtypes of different widths: the last dimension counts the narrow elements of a wide
    one, the lowest bits first."""
    old, new = _bits(x.dtype), _bits(new_dtype)
    narrow, wide = jnp.dtype(f"uint{min(old, new)}"), jnp.dtype(f"uint{max(old, new)}")
    shape = x.shape if old < new else (*x.shape, old // new)
    first = lax.broadcasted_iota(wide, shape, len(shape) - 1) * min(old, new)
    if old > new:
        whole = lax.bitcast_convert_type(x, wide)
        parts = lax.broadcast_in_dim(whole, shape, tuple(range(x.ndim))) >> first
        return [lax.bitcast_convert_type(parts.astype(narrow), new_dtype)]
    parts = lax.bitcast_convert_type(x, narrow).astype(wide) << first
    # No two have a bit in common.
    whole = jnp.sum(parts, axis=-1, dtype=wide)
    return [lax.bitcast_convert_type(whole, new_dtype)]


def _compared(function: Any) -> Definition:
    def compare(x: Any, y: Any, **params: Any) -> list[Any]:
        return [function(_in_order(x), _in_order(y))]

    return Definition(compare)


def _of_one(*parameters: str) -> Callable[[Any], bool]:
    """Whether all dimensions that an equation works along have one element."""

    def applies(equation: Any) -> bool:
        shape = equation.invars[0].aval.shape
        found = [equation.params[name] for name in parameters]
        dims = [d for one in found for d in ((one,) if isinstance(one, int) else one)]
        return all(shape[d] == 1 for d in dims)

    return applies


def _is_whole(equation: Any) -> bool:
    """Whether a slice is all of an array, as the one of what is rolled along one element."""
    return bool(equation.invars[0].aval.shape == equation.outvars[0].aval.shape)


def _squeezed(x: Any, *, axes: Sequence[int], **params: Any) -> list[Any]:
    return [lax.squeeze(x, axes)]


def _broadcast(x: Any, *dynamic: Any, shape: Sequence[int], **params: Any) -> list[Any]:
    return [lax.reshape(x, shape)]


def _adds_dimensions(equation: Any) -> bool:
    """Whether a broadcast of an array of odd shape adds dimensions of one element only; of an array
    of one dimension, before it, since what is left of rows belongs beside these."""
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    odd = any(n & (n - 1) for n in before) and (len(before) > 1 or after[-1:] == before)
    return odd and len(equation.invars) == 1 and math.prod(before) == math.prod(after)


def _reshaped(x: Any, *, permutation: Sequence[int]) -> list[Any]:
    return [lax.reshape(x, [x.shape[d] for d in permutation])]


def _keeps_order(equation: Any) -> bool:
    """Whether a transposition of an array of an odd shape only moves dimensions of one element."""
    shape = equation.invars[0].aval.shape
    kept = [d for d in equation.params["permutation"] if shape[d] != 1]
    return kept == sorted(kept) and any(n & (n - 1) for n in shape)


def _permuted(x: Any, *, new_sizes: Sequence[int], dimensions: Any, **params: Any) -> list[Any]:
    return [lax.reshape(lax.transpose(x, dimensions), new_sizes)]


def _same(*operands: Any, **params: Any) -> list[Any]:
    return list(operands)


DEFINITIONS = {
    **{
        reduction: Definition(_squeezed, _of_one("axes"))
        for reduction in (
            *(lax.reduce_max_p, lax.reduce_min_p, lax.reduce_sum_p, lax.reduce_prod_p),
            *(lax.reduce_and_p, lax.reduce_or_p, lax.reduce_xor_p),
        )
    },
    primitives.broadcast_in_dim_p: Definition(_broadcast, _adds_dimensions),
    primitives.sort_p: Definition(_same, _of_one("dimension")),
    primitives.rev_p: Definition(_same, _of_one("dimensions")),
    primitives.slice_p: Definition(_same, _is_whole),
    primitives.transpose_p: Definition(_reshaped, _keeps_order),
    lax.reshape_p: Definition(
        _permuted, lambda equation: equation.params["dimensions"] is not None
    ),
    **{
        scan: Definition(_same, _of_one("axis"))
        for scan in (
            *(primitives.cumsum_p, primitives.cumprod_p),
            *(primitives.cummax_p, primitives.cummin_p, primitives.cumlogsumexp_p),
        )
    },
    primitives.eq_to_p: _compared(lax.eq),
    primitives.le_to_p: _compared(lax.le),
    primitives.lt_to_p: _compared(lax.lt),
    _jax.platform_index_p: Definition(_platform_index),
    primitives.cond_p: Definition(
        _for_platform, lambda equation: equation.params.get("branches_platforms") is not None
    ),
    primitives.add_jaxvals_p: Definition(_sum_of_cotangents),
    lax.bitcast_convert_type_p: Definition(
        _bitcast,
        lambda equation: (
            _bits(equation.invars[0].aval.dtype) != _bits(equation.outvars[0].aval.dtype)
        ),
    ),
    lax.split_p: Definition(_split),
    lax.stack_p: Definition(_stack),
    lax.unstack_p: Definition(_unstack),
    primitives.reduce_p: Definition(_reduce),
    _jax.lax_primitives.composite_p: Definition(_composite),
    primitives.name_p: Definition(_same),  # It says to transformations what an array is called.
    _jax.lax_primitives.empty_p: Definition(_empty),
    _jax.lax_primitives.empty2_p: Definition(_empty),
    _jax.call_hi_primitive_p: Definition(_composed),
    primitives.linear_solve_p: Definition(_solved),
    primitives.device_put_p: Definition(
        _same, lambda equation: all(one is None for one in equation.params["devices"])
    ),
    _jax.while_p: Definition(
        _while_any, lambda equation: bool(equation.params["cond_jaxpr"].out_avals[0].shape)
    ),
    primitives.concatenate_p: Definition(
        _concatenate, lambda equation: any(map(_is_empty, equation.invars))
    ),
    primitives.dynamic_update_slice_p: Definition(
        lambda x, *others: [x], lambda equation: _is_empty(equation.invars[1])
    ),
    primitives.pad_p: Definition(_pad, lambda equation: _is_empty(equation.invars[0])),
    primitives.scatter_p: Definition(
        _scatter, lambda equation: _is_empty(equation.invars[2]) or _is_applied(equation.params)
    ),
    **{
        scatter: Definition(
            lambda x, *others, **params: [x], lambda equation: _is_empty(equation.invars[2])
        )
        for scatter in (
            *(primitives.scatter_add_p, primitives.scatter_mul_p),
            *(primitives.scatter_min_p, primitives.scatter_max_p, lax.scatter_sub_p),
        )
    },
}
