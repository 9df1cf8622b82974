"""Kernels with random inputs and references, which the tests compile everywhere and run on a GPU.

A case is made by a function decorated with :func:`case`; it returns the kernel, its inputs as NumPy
arrays, and the reference, which gets the same arrays and computes in higher precision.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite import gpu as plgpu

CASES: dict[str, Case] = {}


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel to test; ``build`` returns (function, inputs, reference)."""

    name: str
    build: Callable[[], tuple[Any, tuple[np.ndarray, ...], Callable[..., Any]]]
    tolerance: float = 0.0
    targets: tuple[str, ...] = ("sm_90a", "sm_100a")


def case(*parameters: Any, tolerance: float = 0.0, **options: Any) -> Callable[..., Any]:
    """Adds a case for every parameter tuple given (one without parameters if there is none)."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for values in parameters or ((),):
            values = values if isinstance(values, tuple) else (values,)
            label = "-".join(_label(value) for value in values)
            name = f"{function.__name__}[{label}]" if label else function.__name__
            limit = tolerance
            assert name not in CASES, name
            CASES[name] = Case(name, functools.partial(function, *values), limit, **options)
        return function

    return decorate


def _label(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "x".join(_label(part) for part in value)
    try:
        return np.dtype(value).name if not isinstance(value, str | int | float) else str(value)
    except TypeError:
        return getattr(value, "__name__", str(value))


def random(name: str, shape: tuple[int, ...], dtype: Any, low: Any = None, high: Any = None) -> Any:
    """A random array that depends on ``name``: normal floats, or uniform integers."""
    generator = np.random.default_rng(zlib.crc32(f"{name}{shape}{np.dtype(dtype)}".encode()))
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return generator.integers(0, 2, shape).astype(np.bool_)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        low = max(int(info.min), -100) if low is None else low
        high = min(int(info.max), 100) if high is None else high
        return generator.integers(low, high, shape, endpoint=True).astype(dtype)
    if low is not None:
        return generator.uniform(low, high, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


def block_kernel(shape: tuple[int, ...], dtype: Any, **arguments: Any) -> Any:
    """``plgpu.kernel`` with one output of a shape and dtype."""
    return plgpu.kernel(out_type=jax.ShapeDtypeStruct(shape, dtype), **arguments)


def whole(function: Callable[..., Any], out_shape: Any, out_dtype: Any, **arguments: Any) -> Any:
    """A kernel of one block that loads its inputs whole, applies ``function``, and stores."""

    def body(*refs: Any) -> None:
        *inputs, output = refs
        output[...] = function(*[ref[...] for ref in inputs])

    return block_kernel(out_shape, out_dtype, **arguments)(body)


def wide(x: Any) -> Any:
    """A NumPy array in the precision of references."""
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(np.float64)
    return x
