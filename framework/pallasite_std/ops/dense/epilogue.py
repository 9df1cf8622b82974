"""What is done to sums before they are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallasite_std.ops.padding import aligned, whole_vector


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """Scaling, bias, activation and residual, in this order.

    The operands come after a and b: the scales of rows and of columns, the bias, what the
    activation captures, the residual, as far as they are there.

    Attributes:
      row_scale: ``"none"``, ``"scalar"`` or ``"vector"`` (one factor for each row).
      column_scale: the same for columns.
      bias: a vector is added to every row.
      residual: a matrix is added in the end.
      activation: a function of a float32 array, or None.
      captured: how many numbers are further arguments of the activation.
    """

    row_scale: str = "none"
    column_scale: str = "none"
    bias: bool = False
    residual: bool = False
    activation: Callable[..., Any] | None = None
    captured: int = 0

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in their order."""
        there = {
            "row_scale": self.row_scale != "none",
            "column_scale": self.column_scale != "none",
            "bias": self.bias,
            **{f"captured {number}": True for number in range(self.captured)},
            "residual": self.residual,
        }
        return tuple(name for name, one in there.items() if one)

    def extents(self, name: str) -> tuple[bool, bool]:
        """Whether an operand has something for each row, and for each column."""
        rows = name == "residual" or (name == "row_scale" and self.row_scale == "vector")
        of_columns = name in ("bias", "residual")
        return rows, of_columns or (name == "column_scale" and self.column_scale == "vector")

    @property
    def count(self) -> int:
        """Of the operands."""
        return len(self.operands)

    def key(self) -> tuple[Any, ...]:
        """What a choice of configuration depends on."""
        activation = self.activation
        return (
            self.row_scale,
            self.column_scale,
            self.bias,
            self.residual,
            None if activation is None else getattr(activation, "__qualname__", "activation"),
        )

    def padded_operands(
        self, extras: Sequence[jax.Array], m_multiple: int, n_multiple: int
    ) -> list[jax.Array]:
        """The operands as kernels read them: vectors in whole tiles, aligned rows."""
        remaining = iter(extras)
        operands = []
        for kind, multiple in ((self.row_scale, m_multiple), (self.column_scale, n_multiple)):
            if kind == "scalar":
                operands.append(next(remaining).reshape(1))
            elif kind == "vector":
                operands.append(whole_vector(next(remaining), multiple))
        if self.bias:
            operands.append(whole_vector(next(remaining), n_multiple))
        operands += [next(remaining).reshape(1) for _ in range(self.captured)]
        if self.residual:
            operands.append(aligned(next(remaining)))
        return operands

    def apply(
        self,
        values: Any,
        operands: Any,
        rows: Any,
        columns: Any,
        residual: Any,
        *,
        swapped: bool,
    ) -> Any:
        """The values to be written, of float32 (or still integers if nothing is done).

        Args:
          values: sums of one part of the result.
          operands: references to the epilogue's operands.
          rows, columns: which part it is, in the dimensions of ``values``.
          residual: its part of the residual, or None.
          swapped: the values are those of the transposed result.
        """
        remaining = iter(operands)
        shape = values.shape
        by_row, by_column = (rows, 1), (columns, 0)
        if swapped:
            by_row, by_column = by_column, by_row
        for kind, (window, axis) in ((self.row_scale, by_row), (self.column_scale, by_column)):
            if kind == "none":
                continue
            ref = next(remaining)
            values = values.astype(jnp.float32)
            if kind == "scalar":
                values = values * ref[0].astype(jnp.float32)
            else:
                values = values * _spread(ref, window, axis, shape)
        if self.bias:
            bias = _spread(next(remaining), *by_column, shape)
            values = values.astype(jnp.float32) + bias
        if self.activation is not None:
            captured = [next(remaining)[0] for _ in range(self.captured)]
            values = self.activation(values.astype(jnp.float32), *captured)
        if residual is not None:
            values = values.astype(jnp.float32) + residual.astype(jnp.float32)
        return values


def _spread(ref: Any, window: Any, axis: int, shape: tuple[int, int]) -> Any:
    """A part of a vector, repeated along ``axis``."""
    vector = ref[window].astype(jnp.float32)
    return jnp.broadcast_to(vector[:, None] if axis == 1 else vector[None, :], shape)
