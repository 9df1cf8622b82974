"""What rows of several benchmarks share: inputs, errors of products, tensors of PyTorch."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import contest
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PRODUCT_LIMITS = {"norm": 8e-3, "largest": 0.08}
"""Largest errors of products of 16-bit matrices that are right: of the whole result in the
Euclidean norm, and of one element in units of the root mean square of all."""


SMALL = 2**20
"""Elements of an array that is made sooner than a program that would make it is compiled."""


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normally distributed numbers."""
    if math.prod(shape) > SMALL or isinstance(key, jax.core.Tracer):
        return _normal(key, shape, dtype)
    generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return jnp.asarray(generator.standard_normal(shape, np.float32).astype(dtype))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def product_errors(*dtypes: Any) -> Callable[[jax.Array, jax.Array], dict[str, jax.Array]]:
    """The function that measures the errors of :data:`PRODUCT_LIMITS`.

    It raises contest.WrongResultError unless the result has the shape of the reference and one of
    the dtypes.
    """

    @jax.jit
    def errors(result: jax.Array, reference: jax.Array) -> dict[str, jax.Array]:
        if result.shape != reference.shape or result.dtype not in dtypes:
            raise contest.WrongResultError(f"the result is {result.dtype}{list(result.shape)}")
        difference = result.astype(jnp.float32) - reference
        scale = jnp.sqrt(jnp.mean(reference**2))
        return {
            "norm": jnp.sqrt(jnp.mean(difference**2)) / scale,
            "largest": jnp.max(jnp.abs(difference)) / scale,
        }

    return errors


def torch_is_there() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def able(contenders: Sequence[contest.Contender]) -> list[contest.Contender]:
    """The contenders but those of PyTorch where it is not installed."""
    return [one for one in contenders if one.framework != "torch" or torch_is_there()]


def only(candidate: contest.Candidate) -> contest.Candidates:
    """A single candidate."""
    yield candidate


def to_torch(*arrays: jax.Array) -> tuple[Any, ...]:
    """The same memory as PyTorch tensors; those of float8 go as bytes."""
    import torch

    def convert(x: jax.Array) -> Any:
        if x.dtype != jnp.float8_e4m3fn:
            return torch.from_dlpack(x)
        data = jax.block_until_ready(lax.bitcast_convert_type(x, jnp.uint8))
        return torch.from_dlpack(data).view(torch.float8_e4m3fn)

    return tuple(convert(x) for x in jax.block_until_ready(arrays))
