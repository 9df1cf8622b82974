"""The description of a GEMM, apart from its arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallasite_std.ops.dense.epilogue import Epilogue


@dataclasses.dataclass(frozen=True)
class MatmulProblem:
    """What is multiplied.

    Attributes:
      m, n, k: extents.
      dtype_a, dtype_b: of the operands.
      out_dtype: of the result.
      accumulator: dtype in which products are summed up.
      transpose_a: a is given as (k, m).
      transpose_b: b is given as (n, k).
    """

    m: int
    n: int
    k: int
    dtype_a: Any
    dtype_b: Any
    out_dtype: Any
    accumulator: Any
    transpose_a: bool
    transpose_b: bool

    @property
    def size(self) -> int:
        """Bytes of an element of the operands."""
        return int(np.dtype(self.dtype_a).itemsize)

    def key(self) -> tuple[Any, ...]:
        """What a choice of configuration depends on, besides shapes and dtypes of operands."""
        return (
            self.transpose_a,
            self.transpose_b,
            str(self.out_dtype),
            str(self.accumulator),
        )

    def swapped(self) -> MatmulProblem:
        """The transposed product, of the operands in the other order."""
        return dataclasses.replace(
            self,
            m=self.n,
            n=self.m,
            dtype_a=self.dtype_b,
            dtype_b=self.dtype_a,
            transpose_a=not self.transpose_b,
            transpose_b=not self.transpose_a,
        )


@dataclasses.dataclass(frozen=True)
class MatmulCall:
    """All of a product that is not an array.

    Attributes:
      problem: shapes and dtypes.
      epilogue: what is applied to the accumulator.
      config: how to cut it up, or None.
    """

    problem: MatmulProblem
    epilogue: Epilogue
    config: Any
