"""Random calls of operations: what they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

BF16, F16, F32 = (np.dtype(one) for one in (ml_dtypes.bfloat16, np.float16, np.float32))
FLOAT8 = tuple(np.dtype(one) for one in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
INT8 = (np.dtype(np.int8), np.dtype(np.uint8))
INT4 = (np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4))
TOLERANCES = {BF16: 1.5e-2, F16: 4e-3, F32: 4e-3, np.dtype(np.int32): 0.0}
"""Of the largest difference, by the largest number. Products of float32 are those of tf32."""

ROUNDING = {FLOAT8[0]: 0.07, FLOAT8[1]: 0.13}
"""Of results, which gradients by operands of 8 bits are."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A call of an operation.

    Attributes:
      name: of the operation.
      arrays: its operands by name; None for those that are not given.
      options: further arguments.
      function: ``function(**arrays)`` calls the operation, with the options.
      reference: the same of float64 arrays; returns a tuple of results and gradients.
      gradients: names of the operands by which the sum of the results is differentiated.
      tolerance: of the largest difference.
      least: what the largest number is taken for if it is smaller.
      terms: ``terms(**arrays)`` returns, for each result and gradient, how large sums of its
        terms are if nothing cancels out; ``unit`` of that is tolerated, too.
      unit: how exact each term is.
      mappable: whether it computes the same when it is mapped over one more axis.
      mapping: "vmap" or "shard_map" over one more axis, or "".
      over: names of the operands that have this axis; the others are the same for all.
    """

    name: str
    arrays: dict[str, Any]
    options: dict[str, Any]
    function: Callable[..., Any]
    reference: Callable[..., Any]
    gradients: tuple[str, ...] = ()
    tolerance: float = 1.5e-2
    least: float = 1e-2
    terms: Callable[..., Any] | None = None
    unit: float = 0.0
    mappable: bool = True
    mapping: str = ""
    over: tuple[str, ...] = ()

    def __str__(self) -> str:
        operands = {k: f"{a.dtype}{list(a.shape)}" for k, a in self.arrays.items() if a is not None}
        marks = "".join(f" by {name}" for name in self.gradients) + (
            f" {self.mapping} over {', '.join(self.over)}" if self.mapping else ""
        )
        return f"{self.name} {operands} {self.options}{marks}"


class Draw:
    """Random choices of one program."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)

    def one[T](self, *choices: T) -> T:
        """One of the choices."""
        return choices[int(self.random.integers(len(choices)))]

    def chance(self, probability: float) -> bool:
        """True with a probability."""
        return bool(self.random.random() < probability)

    def extent(self, *usual: int) -> int:
        """One of the usual extents; seldom 0 or 1."""
        return self.one(0, 1) if self.chance(0.06) else self.one(*usual)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], scale: float = 1.0) -> np.ndarray:
        """Normally distributed numbers, or any integers."""
        if dtype in INT8:
            limits = np.iinfo(dtype)
            return self.random.integers(limits.min, limits.max + 1, shape).astype(dtype)
        if dtype in INT4:
            limits = ml_dtypes.iinfo(dtype)
            return self.random.integers(limits.min, limits.max + 1, shape).astype(dtype)
        return (self.random.standard_normal(shape) * scale).astype(dtype)

    def maybe(self, probability: float, make: Callable[[], Any]) -> Any:
        """What is made with a probability, else None."""
        return make() if self.chance(probability) else None


def typical(terms: int, *factors: np.ndarray | None) -> float:
    """How large sums of so many products are. Where they cancel out, of a single result even, what
    their terms are rounded by does not."""
    sizes = [np.asarray(one, np.float64) for one in factors if one is not None and one.size]
    return float(np.sqrt(terms) * np.prod([np.sqrt(np.mean(np.square(one))) for one in sizes]))


def steepness(dtype: np.dtype[Any], q: np.ndarray, k: np.ndarray, scale: float) -> float:
    """By how much errors of scores grow that are products of rows of q and k, times a scale.

    Weights are as exact as the differences of scores, which grow with the scores. Products of 16
    bits are exact, of float32 they are not: factors are cut off to tf32.
    """
    return max(1.0, scale * typical(q.shape[-1], q, k) / 2) if dtype == F32 else 1.0


def lengths(draw: Draw, batch: int, most: int) -> np.ndarray:
    """Of sequences, each up to a number; some are below 0 or above, which count as the nearest."""
    found = draw.random.integers(0, most + 1, batch)
    return np.where(
        draw.random.random(batch) < 0.25, draw.one(-2, 0, 1, most, most + 9), found
    ).astype(np.int32)
