"""What an example is, and the list of all of them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

#: The modules of this package that define ``EXAMPLES``, simplest first.
MODULES = (
    "vector_add",
    "gelu",
    "reductions",
    "rms_norm",
    "layer_norm",
    "softmax",
    "control_flow",
    "transpose",
    "tiled_copy",
    "tma_reduce",
    "multicast",
    "pipelined",
    "sequential_grid",
    "persistent_softmax",
    "warp_specialized",
    "tuned",
    "debug_print",
    "warp_matmul",
    "warp_attention",
    "matmul_tile",
    "inferred_layouts",
    "paired_matmul",
    "matmul_steps.step1_tile",
    "matmul_steps.step2_swizzle",
    "matmul_steps.step3_ring",
    "matmul_steps.step4_two_warpgroups",
    "matmul_steps.step5_specialized",
    "matmul_steps.step6_persistent",
    "matmul_steps.step7_stores",
    "matmul_steps.step8_clusters",
)


@dataclasses.dataclass(frozen=True)
class Example:
    """A function that calls one kernel, and how to check it.

    Attributes:
      name: unique, with what distinguishes it from its siblings: ``softmax_bf16``.
      function: takes the arrays that ``make_inputs`` makes, returns an array.
      make_inputs: random inputs from a key of ``jax.random``.
      reference: the same function on NumPy arrays, whose floats are all float64.
      tolerance: the largest permitted error, as a part of the largest magnitude in the reference;
        0 asks for exactly equal results.
      needs: features that a target must have, beyond those of every target.
    """

    name: str
    function: Callable[..., jax.Array]
    make_inputs: Callable[[jax.Array], tuple[jax.Array, ...]]
    reference: Callable[..., np.ndarray]
    tolerance: float = 0.0
    needs: frozenset[str] = frozenset()

    def check(self, inputs: Sequence[jax.Array], output: jax.Array) -> float:
        """The relative error of ``output``; raises AssertionError if it is too large."""
        expected = self.reference(*[in_high_precision(array) for array in inputs])
        actual = in_high_precision(output)
        assert actual.shape == expected.shape, f"shape {actual.shape}, not {expected.shape}"
        largest = float(np.max(np.abs(expected), initial=0.0)) or 1.0
        error = float(np.max(np.abs(actual - expected), initial=0.0)) / largest
        assert error <= self.tolerance, f"relative error {error:.2e} > {self.tolerance:.0e}"
        return error


def in_high_precision(array: Any) -> np.ndarray:
    """A NumPy array with the same values: float64, or int64 for integers."""
    integer = np.issubdtype(array.dtype, np.integer)
    return np.asarray(array).astype(np.int64 if integer else np.float64)


def random_array(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Normally distributed floats, or integers from -100 to 99."""
    if np.issubdtype(dtype, np.integer):
        return jax.random.randint(key, shape, -100, 100, np.int32).astype(dtype)
    return jax.random.normal(key, shape, dtype)


def random_arrays(*types: tuple[Sequence[int], Any]) -> Callable[[jax.Array], Any]:
    """A ``make_inputs`` for arrays of the given (shape, dtype) pairs."""

    def make_inputs(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, len(types))
        return tuple(random_array(k, *t) for k, t in zip(keys, types, strict=True))

    return make_inputs


def all_examples() -> list[Example]:
    """The examples of all modules."""
    found: list[Example] = []
    for name in MODULES:
        found += importlib.import_module(f"examples.{name}").EXAMPLES
    return found
