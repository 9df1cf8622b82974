"""Random numbers of ``jax.random`` made by NumPy: see ``numpy_programs``.

A key is the array of the two words that it consists of. The generator is Threefry-2x32 with 20
rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3), as JAX uses it by default.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax._src.lax import lax
from jax._src.random import prng, threefry2x32
from tests.numpy_rules import RULES, Function, Unsupported

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_MOST_NUMBERS = 1 << 20  # XLA takes less time for more.
_PARITY = np.uint32(0x1BD11BDA)


def generate(first: Any, second: Any, x: Any, y: Any) -> list[Any]:
    """Two words for each two words of a counter, for a key of two words."""
    keys = [np.asarray(one, np.uint32) for one in (first, second)]
    keys.append(keys[0] ^ keys[1] ^ _PARITY)
    x, y = np.broadcast_arrays(x, y)
    x, y = (np.asarray(one, np.uint32) + key for one, key in zip((x, y), keys[:2], strict=True))
    shape = np.broadcast_shapes(np.shape(x), np.shape(y))
    x, y = (np.array(np.broadcast_to(one, shape), ndmin=1) for one in (x, y))
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x += y
            lowest = y >> np.uint32(32 - bits)
            y <<= np.uint32(bits)
            y |= lowest
            y ^= x
        x += keys[(group + 1) % 3]
        y += keys[(group + 2) % 3] + np.uint32(group + 1)
    return [one.reshape(shape) for one in (x, y)]


def _counters(shape: tuple[int, ...]) -> list[Any]:
    numbers = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    return [(numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32)]


def is_key(aval: Any) -> bool:
    """Whether a type is one of keys of this generator."""
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, prng.KeyTy) and dtype._impl is threefry2x32.threefry_prng_impl


def _check_key(aval: Any) -> None:
    if aval.shape or not jax.config.jax_threefry_partitionable:
        raise Unsupported


def _bits(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    _check_key(operands[0])
    shape, dtype = results[0].shape, results[0].dtype
    if math.prod(shape) > _MOST_NUMBERS:
        raise Unsupported

    def bits(key: Any) -> Any:
        high, low = generate(key[0], key[1], *_counters(shape))
        if dtype.itemsize == 8:
            return high.astype(np.uint64) << np.uint64(32) | low
        return (high ^ low).astype(dtype)

    return bits


def _split(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    _check_key(operands[0])
    shape = tuple(params["shape"])
    return lambda key: np.stack(generate(key[0], key[1], *_counters(shape)), -1)


def _unstack(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    axis = params["axis"] % operands[0].ndim
    return lambda x: list(np.moveaxis(x, axis, 0))


OF_KEYS = {prng.random_bits_p, prng.random_split_p, prng.random_unwrap_p, lax.unstack_p}
"""What takes or returns keys."""

RULES.update(
    {
        prng.random_bits_p: _bits,
        prng.random_split_p: _split,
        prng.random_unwrap_p: lambda *_: lambda key: key,
        prng.iota_2x32_shape_p: lambda params, *_: lambda: _counters(params["shape"]),
        threefry2x32.threefry2x32_p: lambda *_: generate,
        lax.unstack_p: _unstack,
    }
)
