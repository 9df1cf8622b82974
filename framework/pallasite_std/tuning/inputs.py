"""What candidates are run on: copies of the arguments, or random arrays of their types."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import InvalidTypeError
from pallasite.plugin import jax_internals as _jax
from pallasite_std.tuning.encoding import is_array

ROTATED_BYTES = 2**28
"""How much the sets of inputs have together, if there may be that many: twice the L2 cache of the
largest GPU, so that none of a set is left in it when its turn comes again."""
MAX_SETS = 8

Arguments = tuple[Any, ...]


def input_sets(
    args: Arguments, make_inputs: Callable[[jax.Array], Sequence[Any]] | None = None
) -> list[Arguments]:
    """Sets of arguments, to be used in turn.

    Args:
      args: as the operation was called. If all arrays are there, every set is a copy of them; if
        some are tracers or ``jax.ShapeDtypeStruct``, all arrays are random: floats normally
        distributed, integers from -4 (unsigned ones from 0) to 4.
      make_inputs: makes a set from a key of ``jax.random`` instead.

    Raises:
      InvalidTypeError: ``make_inputs`` makes something that has no values.
    """

    def make(number: int) -> Arguments:
        if make_inputs is not None:
            made = tuple(make_inputs(jax.random.key(number)))
            if not _is_concrete(made):
                raise InvalidTypeError("make_inputs makes something else than arrays with values")
            return made
        if not _is_concrete(args):
            return _random(args, number)
        return args if number == 0 else _map_arrays(jnp.copy, args)

    first = make(0)
    count = min(MAX_SETS, max(1, math.ceil(ROTATED_BYTES / max(1, array_bytes(first)))))
    if not array_bytes(first):
        count = 1
    return [first, *(make(number) for number in range(1, count))]


def array_bytes(args: Any) -> int:
    """Bytes of all arrays in a tree."""
    leaves = [leaf for leaf in jax.tree.leaves(args) if is_array(leaf)]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def split(args: Arguments) -> tuple[list[Any], Callable[[Sequence[Any]], Arguments]]:
    """The arrays among the leaves, and what puts others in their places; the rest is static."""
    leaves, tree = jax.tree.flatten(args)
    positions = [position for position, leaf in enumerate(leaves) if is_array(leaf)]

    def join(arrays: Sequence[Any]) -> Arguments:
        filled = list(leaves)
        for position, array in zip(positions, arrays, strict=True):
            filled[position] = array
        joined: Arguments = jax.tree.unflatten(tree, filled)
        return joined

    return [leaves[position] for position in positions], join


def _is_concrete(args: Any) -> bool:
    return all(
        isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and not isinstance(leaf, _jax.Tracer)
        for leaf in jax.tree.leaves(args)
        if is_array(leaf)
    )


def _map_arrays(function: Callable[[Any], Any], args: Arguments) -> Arguments:
    mapped: Arguments = jax.tree.map(lambda leaf: function(leaf) if is_array(leaf) else leaf, args)
    return mapped


def _random(args: Arguments, seed: int) -> Arguments:
    keys = (jax.random.fold_in(jax.random.key(seed), number) for number in itertools.count())
    return _map_arrays(lambda leaf: _random_array(next(keys), leaf.shape, leaf.dtype), args)


def _random_array(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    shape = tuple(shape)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(key, shape)
    if jax.dtypes.issubdtype(dtype, np.bool_):
        return jax.random.bernoulli(key, shape=shape)
    if jax.dtypes.issubdtype(dtype, np.integer):
        lowest = max(-4, int(jnp.iinfo(dtype).min))
        highest = min(4, int(jnp.iinfo(dtype).max))
        return jax.random.randint(key, shape, lowest, highest + 1, np.int32).astype(dtype)
    if jax.dtypes.issubdtype(dtype, np.complexfloating):
        return jax.random.normal(key, shape, dtype)
    values = jax.random.normal(key, shape, np.float32)
    if float(jnp.finfo(dtype).min) > 0:  # A format of scales, which has no sign.
        values = jnp.exp2(jnp.round(values))
    return values.astype(dtype)
