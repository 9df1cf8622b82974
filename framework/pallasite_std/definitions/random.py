"""Random bits as JAX makes them: Threefry-2x32.

A key is an array of words to kernels: its definition's functions work on these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from pallasite.plugin import jax_internals as _jax
from pallasite_std.definitions.record import Definition


def over_keys(function: Callable[..., Any], dimensions: Sequence[int]) -> Callable[..., Any]:
    """A function of single keys, for arrays of them.

    Args:
      function: of one argument for each of ``dimensions``.
      dimensions: how many dimensions of keys each argument has.
    """
    for level in range(max(dimensions)):
        axes = tuple(0 if level < count else None for count in reversed(dimensions))[::-1]
        function = jax.vmap(function, in_axes=axes)
    return function


def _threefry2x32(*operands: Any, **params: Any) -> list[Any]:
    return list(_jax.threefry2x32(*operands))


def _iota_2x32_shape(*, shape: Sequence[int]) -> list[Any]:
    """The place of each element in the row-major array, as two words."""
    low = jnp.zeros(shape, np.uint32)
    for d in range(len(shape)):
        stride = np.uint32(math.prod(shape[d + 1 :]))
        low += lax.broadcasted_iota(np.uint32, shape, d) * stride
    return [jnp.zeros(shape, np.uint32), low]


def _same(words: Any, **params: Any) -> list[Any]:
    return [words]


def _bits(words: Any, *, key: Any, bit_width: int, shape: Any) -> list[Any]:
    impl = key.dtype._impl
    return [over_keys(lambda k: impl.random_bits(k, bit_width, shape), [len(key.shape)])(words)]


def _split(words: Any, *, key: Any, shape: Any) -> list[Any]:
    impl = key.dtype._impl
    return [over_keys(lambda k: impl.split(k, shape), [len(key.shape)])(words)]


def _fold_in(words: Any, numbers: Any, *, key: Any) -> list[Any]:
    impl = key.dtype._impl
    return [over_keys(impl.fold_in, [len(key.shape), numbers.ndim])(words, numbers)]


def _seed(seeds: Any, *, impl: Any) -> list[Any]:
    return [over_keys(impl.seed, [seeds.ndim])(seeds)]


DEFINITIONS = {
    primitives.threefry2x32_p: Definition(_threefry2x32),
    _jax.iota_2x32_shape_p: Definition(_iota_2x32_shape),
    _jax.random_clone_p: Definition(_same),
    _jax.random_wrap_p: Definition(_same),
    _jax.random_unwrap_p: Definition(_same),
    primitives.random_seed_p: Definition(_seed),
}

OF_KEYS: dict[Any, Callable[..., Sequence[Any]]] = {
    primitives.random_bits_p: _bits,
    primitives.random_split_p: _split,
    primitives.random_fold_in_p: _fold_in,
}
"""Functions of the words of keys that also take the abstract value of the keys (``key``)."""
