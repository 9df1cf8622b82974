"""``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``: what programs call.

All are called inside ``jax.shard_map``, over all axes of the mesh, on one device's part of arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite.plugin.jax_internals import itemsize_bits
from pallasite_multigpu.ops import choice, kernels, tuning
from pallasite_multigpu.ops.devices import devices_along, varying_along
from pallasite_multigpu.ops.tiles import VECTOR_BYTES, Tiles, split

type Reduction = Literal["add", "min", "max", "and", "or", "xor"]
type Method = Literal["one_step", "two_steps", "pipelined", "multicast"]

_BITWISE = ("and", "or", "xor")


def all_gather(
    x: jax.Array,
    *,
    axis_name: Hashable,
    gather_dimension: int = 0,
    num_blocks: int | None = None,
    tile_size: int | None = None,
    vec_size: int | None = None,
) -> jax.Array:
    """The arrays of all devices along an axis, one behind the other: ``lax.all_gather`` (tiled).

    Args:
      x: an array of numbers or bool, not complex; the same shape on all devices.
      axis_name: of the mesh; or a tuple of names, which stands for these axes joined.
      gather_dimension: the dimension along which they are put together.
      num_blocks: how many blocks the kernel has, at most; by default chosen by size.
      tile_size: elements that a block moves at once; likewise.
      vec_size: elements of an access of one lane, at most: ``tile_size`` is a multiple of 128 times
        as many. By default what 16 bytes hold.

    Gradients are those of ``lax.all_gather``.

    Returns:
      The same dtype and shape, but ``gather_dimension`` is larger by the number of devices.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit.
    """
    x = _array(x)
    dimension = _dimension(x, gather_dimension, "gather_dimension")
    plan = _chosen_plan(
        "all_gather",
        *(x, axis_name, 1, (num_blocks, tile_size, vec_size)),
        lambda one, x: _all_gather(x, axis_name, dimension, one),
        dimension,
        ways=(False, True),
    )
    return _all_gather(*varying_along(axis_name, x), axis_name, dimension, plan)


def reduce_scatter(
    x: jax.Array,
    *,
    axis_name: Hashable,
    scatter_dimension: int | None = 0,
    reduction: Reduction = "add",
    num_blocks: int | None = None,
    tile_size: int | None = None,
    vec_size: int | None = None,
) -> jax.Array:
    """This device's part of the reduction of all devices' arrays: ``lax.psum_scatter`` (tiled).

    Args:
      x: an array of the same shape on all devices; of floating-point numbers or integers.
      axis_name: of the mesh; or a tuple of names, which stands for these axes joined.
      scatter_dimension: the dimension whose parts the devices get; None for :func:`all_reduce`.
      reduction: ``"add"``, ``"min"``, ``"max"``; of integers also ``"and"``, ``"or"``, ``"xor"``.
        Sums of floating-point numbers of less than 32 bits are made in float32, in the order of
        the devices, and rounded once.
      num_blocks, tile_size, vec_size: as for :func:`all_gather`.

    Gradients are those of ``lax.psum_scatter``, of the reduction ``"add"``.

    Returns:
      The same dtype and shape, but ``scatter_dimension`` is smaller by the number of devices.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit, such as a dimension that the
        number of devices does not divide.
    """
    if scatter_dimension is None:
        return all_reduce(
            x,
            axis_name=axis_name,
            reduction=reduction,
            num_blocks=num_blocks,
            tile_size=tile_size,
            vec_size=vec_size,
        )
    x = _array(x)
    _check_reduction(x, reduction)
    dimension = _dimension(x, scatter_dimension, "scatter_dimension")
    _check_divisible(x, dimension, axis_name, "scatter_dimension")
    plan = _chosen_plan(
        "reduce_scatter",
        *(x, axis_name, devices_along(axis_name), (num_blocks, tile_size, vec_size)),
        lambda one, x: _reduce_scatter(x, axis_name, dimension, reduction, one),
        *(dimension, reduction),
    )
    (x,) = varying_along(axis_name, x)
    if reduction == "add":
        return _sum_scatter(x, axis_name, dimension, plan)
    return _reduce_scatter(x, axis_name, dimension, reduction, plan)


def all_reduce(
    x: jax.Array,
    *,
    axis_name: Hashable,
    reduction: Reduction = "add",
    method: Method | None = None,
    num_blocks: int | None = None,
    tile_size: int | None = None,
    vec_size: int | None = None,
) -> jax.Array:
    """The reduction of all devices' arrays, on each device: ``lax.psum``, ``pmin``, ``pmax``.

    All devices get the same bits.

    Args:
      x: an array of the same shape on all devices; of floating-point numbers or integers.
      axis_name: of the mesh; or a tuple of names, which stands for these axes joined.
      reduction: as for :func:`reduce_scatter`.
      method: ``"one_step"``: each device reads all arrays; ``"two_steps"``: each reduces its part
        and writes it to all; ``"pipelined"``: each writes the others' parts to them, reduces its
        own as it arrives, and writes it to all, which takes as much memory again;
        ``"multicast"``: the switch between the GPUs reduces and distributes, which needs GPUs that
        are set up for it, all axes of the mesh, and what ``plgpu.multimem_load_reduce`` computes.
        By default one of the first three, chosen by size.
      num_blocks, tile_size, vec_size: as for :func:`all_gather`.

    Where ``jax.shard_map`` checks how arrays vary over the mesh (``check_vma``, its default), the
    result does not vary over ``axis_name``, as that of ``lax.psum``. The gradient of the reduction
    ``"add"`` is then the result's, on each device; without the check, it is the sum of all
    devices' gradients.

    Returns:
      The same dtype and shape.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit.
    """
    x = _array(x)
    _check_reduction(x, reduction)
    if method not in (None, *get_args(Method.__value__)):
        raise InvalidValueError(
            "all_reduce: the method is unknown",
            got=method,
            expected='"one_step", "two_steps", "pipelined" or "multicast"',
        )
    nbytes, count = x.size * x.dtype.itemsize, devices_along(axis_name)
    _check_multicast(method, axis_name, count)
    chosen: str = method or choice.method_of_all_reduce(nbytes, count)
    unroll = choice.unroll_of_all_reduce(chosen, nbytes, x.dtype.itemsize)
    plan = _plan(x, count, num_blocks, tile_size, vec_size, unroll)
    if chosen != "multicast" and num_blocks is tile_size is vec_size is None:
        methods = (method,) if method else ("one_step", "two_steps", "pipelined")
        chosen, plan = tuning.chosen(
            "all_reduce",
            *([x], axis_name, lambda: [(m, p) for m in methods for p in tuning.plans(x, count)]),
            (chosen, plan),
            lambda one, x: _all_reduce(x, axis_name, reduction, *one),
            *(reduction, method),
        )
    (x,) = varying_along(axis_name, x)
    if reduction == "add":
        return _sum(x, axis_name, chosen, plan)
    return _all_reduce(x, axis_name, reduction, chosen, plan)


def all_to_all(
    x: jax.Array,
    *,
    axis_name: Hashable,
    split_dimension: int = 0,
    concat_dimension: int = 0,
    num_blocks: int | None = None,
    tile_size: int | None = None,
    vec_size: int | None = None,
) -> jax.Array:
    """Each device gets its part of each device's array: ``lax.all_to_all`` (tiled).

    Args:
      x: an array of numbers or bool, not complex; the same shape on all devices.
      axis_name: of the mesh; or a tuple of names, which stands for these axes joined.
      split_dimension: the dimension whose parts the devices get.
      concat_dimension: the dimension along which what they get is put together.
      num_blocks, tile_size, vec_size: as for :func:`all_gather`.

    Gradients are those of ``lax.all_to_all``.

    Returns:
      The same dtype; ``split_dimension`` is smaller by the number of devices, then
      ``concat_dimension`` larger.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit.
    """
    x = _array(x)
    from_ = _dimension(x, split_dimension, "split_dimension")
    to = _dimension(x, concat_dimension, "concat_dimension")
    _check_divisible(x, from_, axis_name, "split_dimension")
    plan = _chosen_plan(
        "all_to_all",
        *(x, axis_name, devices_along(axis_name), (num_blocks, tile_size, vec_size)),
        lambda one, x: _all_to_all(x, axis_name, from_, to, one),
        *(from_, to),
    )
    return _all_to_all(*varying_along(axis_name, x), axis_name, from_, to, plan)


# Arguments ----------------------------------------------------------------------------------------


def _checked(axis_name: Hashable) -> bool:
    """Whether ``jax.shard_map`` checks over which axes arrays vary."""
    return bool(jax.typeof(jax.lax.axis_index(axis_name)).manual_axis_type.varying)


def _array(x: Any) -> jax.Array:
    """An operand as an array: scalars of Python are, too."""
    if not isinstance(x, bool | int | float | np.generic | np.ndarray | jax.Array):
        raise InvalidTypeError(
            "a collective operation is of an array",
            got=f"a {type(x).__name__}",
            expected="a jax.Array",
            hint="jax.tree.map applies an operation to each array of a tree",
        )
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or jnp.issubdtype(x.dtype, np.complexfloating):
        raise InvalidTypeError(
            "kernels have no collective operations of this dtype",
            got=x.dtype,
            expected="bool, integers or floating-point numbers",
            hint="jax.random.key_data(x), or x.real and x.imag",
        )
    return x


def _dimension(x: jax.Array, dimension: int, name: str) -> int:
    if not isinstance(dimension, int | np.integer):
        raise InvalidTypeError(
            f"{name} is not an integer", got=repr(dimension), expected="a number of a dimension"
        )
    if not -x.ndim <= dimension < x.ndim:
        raise InvalidValueError(
            f"{name} is out of range", got=dimension, expected=f"one of {x.ndim} dimensions"
        )
    return int(dimension % x.ndim)


def _check_reduction(x: jax.Array, reduction: str) -> None:
    if reduction not in kernels.COMBINE:
        raise InvalidValueError(
            "the reduction is unknown", got=repr(reduction), expected=", ".join(kernels.COMBINE)
        )
    integers = jnp.issubdtype(x.dtype, jnp.integer)
    if not integers and not jnp.issubdtype(x.dtype, jnp.floating):
        raise InvalidTypeError(
            "a reduction of all devices' arrays is of numbers",
            got=x.dtype,
            expected="floating-point numbers or integers",
        )
    if reduction in _BITWISE and not integers:
        raise InvalidTypeError(
            f"the reduction {reduction!r} is of integers", got=x.dtype, expected="an integer dtype"
        )


def _check_multicast(method: Method | None, axis_name: Hashable, count: int) -> None:
    axes = jax.sharding.get_abstract_mesh().axis_names
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if method == "multicast" and count > 1 and not set(axes) <= set(names):
        raise UnsupportedError(
            "all_reduce: multicast along some axes of the device mesh only",
            got=list(names),
            expected=f"all of {list(axes)}",
            hint="use another method, or a mesh of just these axes",
        )


def _check_divisible(x: jax.Array, dimension: int, axis_name: Hashable, name: str) -> None:
    count = devices_along(axis_name)
    if x.shape[dimension] % count:
        raise InvalidValueError(
            f"{name} cannot be divided among the devices",
            got=f"{x.shape[dimension]} elements along dimension {dimension}",
            expected=f"a multiple of {count}, the number of devices along {axis_name!r}",
        )


def _plan(
    x: jax.Array,
    arrays: int,
    num_blocks: int | None,
    tile_size: int | None,
    vec_size: int | None,
    unroll: int | None = None,
) -> choice.Plan:
    for name, value in (
        ("num_blocks", num_blocks),
        ("tile_size", tile_size),
        ("vec_size", vec_size),
    ):
        if value is not None and (not isinstance(value, int | np.integer) or value < 1):
            raise InvalidValueError(f"{name} is no positive number", got=repr(value))
    if tile_size is not None and vec_size is not None and tile_size % (128 * vec_size):
        raise InvalidValueError(
            "the tile cannot be divided among the lanes",
            got=f"tile_size {tile_size}, vec_size {vec_size}",
            expected=f"a multiple of {128 * vec_size}",
        )
    return choice.plan(x.dtype.itemsize, x.size, arrays, num_blocks, tile_size, unroll)


def _chosen_plan(
    name: str,
    x: jax.Array,
    axis_name: Hashable,
    arrays: int,
    given: tuple[int | None, int | None, int | None],
    run: Callable[[choice.Plan, jax.Array], jax.Array],
    *key: Any,
    ways: Iterable[bool] = (False,),
) -> choice.Plan:
    """What the caller wants (``num_blocks``, ``tile_size``, ``vec_size``); else by size, or as
    measured."""
    plan = _plan(x, arrays, *given)
    if any(one is not None for one in given):
        return plan
    return tuning.chosen(
        name, [x], axis_name, lambda: tuning.plans(x, arrays, ways), plan, run, *key
    )


def _in_whole_bytes(x: jax.Array, columns: int) -> jax.Array:
    """``x``, in a wider dtype if a row of so many elements of 4 or 2 bits ends within a byte.

    Its values are exact there, and what integers wrap to when it is narrow again is the same.
    """
    if columns * itemsize_bits(x.dtype) % 8 == 0:
        return x
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int8 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.uint8)
    return x.astype(jnp.float32)


# Differentiation ----------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _all_gather(x: jax.Array, axis: Hashable, dimension: int, plan: choice.Plan) -> jax.Array:
    count = devices_along(axis)
    rows, columns = split(x.shape, dimension)
    shape = list(x.shape)
    shape[dimension] *= count
    if count == 1 or not x.size:
        return x.reshape(shape)
    tiles = plan.tiles(rows, columns)
    gather = kernels.gather_by_writing if plan.writes else kernels.gather_by_reading
    whole = _in_whole_bytes(x, columns).reshape(rows, columns)
    return gather(whole, axis, count, tiles).reshape(shape).astype(x.dtype)


def _all_gather_fwd(x: Any, axis: Any, dimension: Any, plan: Any) -> Any:
    return _all_gather(x, axis, dimension, plan), None


def _all_gather_bwd(axis: Any, dimension: Any, plan: Any, _: Any, gradient: Any) -> Any:
    return (_sum_scatter(gradient, axis, dimension, plan),)


_all_gather.defvjp(_all_gather_fwd, _all_gather_bwd)


def _reduce_scatter(
    x: jax.Array, axis: Hashable, dimension: int, reduction: str, plan: choice.Plan
) -> jax.Array:
    count = devices_along(axis)
    shape = list(x.shape)
    shape[dimension] //= count
    if count == 1 or not x.size:
        return x.reshape(shape)
    rows, columns = split(tuple(shape), dimension)
    tiles = plan.tiles(rows, columns)
    whole = _in_whole_bytes(x, columns).reshape(rows, count, columns)
    made = kernels.scatter_by_reading(whole, axis, count, reduction, tiles)
    return made.reshape(shape).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _sum_scatter(x: jax.Array, axis: Hashable, dimension: int, plan: choice.Plan) -> jax.Array:
    return _reduce_scatter(x, axis, dimension, "add", plan)


def _sum_scatter_fwd(x: Any, axis: Any, dimension: Any, plan: Any) -> Any:
    return _sum_scatter(x, axis, dimension, plan), None


def _sum_scatter_bwd(axis: Any, dimension: Any, plan: Any, _: Any, gradient: Any) -> Any:
    return (_all_gather(gradient, axis, dimension, plan),)


_sum_scatter.defvjp(_sum_scatter_fwd, _sum_scatter_bwd)


def _all_reduce(
    x: jax.Array, axis: Hashable, reduction: str, method: str, plan: choice.Plan
) -> jax.Array:
    count = devices_along(axis)
    if count == 1 or not x.size:
        # XLA leaves nothing of it: only the type changes, to one that does not vary over the axis.
        return jax.lax.psum(_in_whole_bytes(x, 1), axis).astype(x.dtype) if _checked(axis) else x
    flat = _in_whole_bytes(x, x.size).reshape(x.size)
    vector = VECTOR_BYTES // flat.dtype.itemsize
    part = x.size // (count * vector) * vector
    if method == "multicast":  # Whole tiles.
        part = -(-x.size // (count * plan.tile)) * plan.tile
        whole = jnp.pad(flat, (0, part * count - x.size)).reshape(1, count, part)
        tiles = plan.tiles(1, part)
        made = kernels.reduce_by_multicast(whole, axis, count, reduction, tiles)
        made = made.reshape(-1)[: x.size]
    elif method == "one_step" or not part:
        tiles = plan.tiles(1, x.size)
        whole = flat.reshape(1, x.size)
        made = kernels.reduce_in_one_step(whole, axis, count, reduction, tiles)
    elif method == "pipelined":
        width = plan.tiles(1, part).columns_of_tile
        made = kernels.reduce_by_writing(flat, axis, count, reduction, width, plan.blocks)
    else:
        tiles = plan.tiles(1, part)
        made = kernels.reduce_in_two_steps(flat, axis, count, reduction, tiles)
    return made.reshape(x.shape).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _sum(x: jax.Array, axis: Hashable, method: str, plan: choice.Plan) -> jax.Array:
    return _all_reduce(x, axis, "add", method, plan)


def _sum_fwd(x: Any, axis: Any, method: Any, plan: Any) -> Any:
    return _sum(x, axis, method, plan), None


def _sum_bwd(axis: Any, method: Any, plan: Any, _: Any, gradient: Any) -> Any:
    if _checked(axis):
        return varying_along(axis, gradient)  # Of the one result that all devices have.
    return (_sum(gradient, axis, method, plan),)


_sum.defvjp(_sum_fwd, _sum_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _all_to_all(x: jax.Array, axis: Hashable, from_: int, to: int, plan: choice.Plan) -> jax.Array:
    count = devices_along(axis)
    if count == 1:
        return x
    if not x.size:
        shape = list(x.shape)
        shape[from_] //= count
        shape[to] *= count
        return x.reshape(shape)
    parts = (
        jnp.stack(jnp.split(x, count, from_))
        if from_
        else x.reshape(count, x.shape[0] // count, *x.shape[1:])
    )
    elements = math.prod(parts.shape[1:])
    tiles: Tiles = plan.tiles(1, elements)
    whole = _in_whole_bytes(parts, elements).reshape(count, 1, elements)
    got = kernels.exchange_by_reading(whole, axis, count, tiles).astype(x.dtype)
    whole = jnp.moveaxis(got.reshape(parts.shape), 0, to)
    shape = list(parts.shape[1:])
    shape[to] *= count
    return whole.reshape(shape)


def _all_to_all_fwd(x: Any, axis: Any, from_: Any, to: Any, plan: Any) -> Any:
    return _all_to_all(x, axis, from_, to, plan), None


def _all_to_all_bwd(axis: Any, from_: Any, to: Any, plan: Any, _: Any, gradient: Any) -> Any:
    return (_all_to_all(gradient, axis, to, from_, plan),)


_all_to_all.defvjp(_all_to_all_fwd, _all_to_all_bwd)
