"""A check of loads from tensor memory: columns that are overwritten while they may be loaded.

The equations of a thread are followed in order. What is known at a point is which columns certainly
were loaded without a ``wait_load_tmem`` since. Of a branch, all sides are followed, and what was
loaded after it is what was so after each. So only mistakes that happen whenever the code runs are
found, of views whose columns are numbers in the program; the simulator's sanitizer finds the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError, SourceLocation, jaxprs
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import transforms
from pallasite_blackwell.tensor_core.copies import PRIMITIVES as COPIES
from pallasite_blackwell.tensor_core.products import tcgen05_mma_p
from pallasite_blackwell.tensor_memory import primitives as prim
from pallasite_blackwell.tensor_memory.space import AbstractTensorMemoryRef
from pallasite_std.api import inline


@dataclasses.dataclass(frozen=True)
class _Part:
    """Columns ``start`` to ``stop`` of rows of a matrix of an allocation.

    Attributes:
      root: the variable that was allocated.
      matrix: the member of a union, and the index in a batch.
      rows: the first row, and the one after the last.
    """

    root: Any
    matrix: tuple[Any, ...]
    rows: tuple[int, int]
    start: int
    stop: int

    def overlaps(self, other: _Part) -> bool:
        """Whether something is certainly in both."""
        same = self.root is other.root and self.matrix == other.matrix
        same = same and self.rows[0] < other.rows[1] and other.rows[0] < self.rows[1]
        return same and self.start < other.stop and other.start < self.stop


type _Loads = dict[_Part, SourceLocation | None]
"""What was loaded, and where."""


def check_load_waits(jaxpr: Any, context: Any) -> Any:
    """Raises if columns are overwritten that were loaded without a wait since.

    Args:
      jaxpr: the kernel.
      context: the pass context.

    Returns:
      The kernel.

    Raises:
      InvalidValueError: at the line that overwrites them.
    """
    table: jaxprs.JaxprTable = context.jaxprs
    if any(one.primitive is prim.async_load_tmem_p for one in table.equations(jaxpr)):
        _Visitor(table).run(jaxpr, [_value(variable) for variable in jaxpr.invars])
    return jaxpr


def _value(variable: Any) -> Any:
    """A reference stands for its variable; of other values only numbers matter."""
    return variable if isinstance(variable.aval, _jax.AbstractRef) else None


class _Visitor(jaxprs.Visitor[Any]):
    """Follows the equations; values are variables of references, and numbers."""

    def __init__(self, table: jaxprs.JaxprTable):
        super().__init__(table)
        self.loads: _Loads = {}

    def unknown(self, variable: Any) -> Any:
        return _value(variable)

    def allocation(self, equation: Any, region: jaxprs.Region, position: int) -> Any:
        # Before columns are used again, the kernel waits.
        variable = region.inputs[position]
        self.loads = {one: where for one, where in self.loads.items() if one.root is not variable}
        return _value(variable)

    def literal(self, atom: Any) -> Any:
        value = np.asarray(atom.val)
        return int(value) if value.shape == () and value.dtype.kind in "iu" else None

    def join(self, values: Sequence[Any], variable: Any) -> Any:
        first, *rest = values
        return first if all(value is first for value in rest) else None

    def carried(self, value: Any, variable: Any) -> Any:
        return value if isinstance(getattr(value, "aval", None), _jax.AbstractRef) else None

    def primitive(self, equation: Any, operands: list[Any]) -> Sequence[Any] | None:
        primitive = equation.primitive
        if primitive is prim.wait_load_tmem_p or primitive is inline.inline_mgpu_p:
            self.loads = {}
        elif primitive is prim.async_load_tmem_p:
            (source,) = equation.params["args_tree"].unflatten(operands)
            part = _part(source)
            if part is not None:
                self.loads[part] = _jax.user_location(equation.source_info)
        elif primitive in _WRITES:
            self._write(equation, operands)
        return None

    def _write(self, equation: Any, operands: list[Any]) -> None:
        references = equation.params["args_tree"].unflatten(operands)
        part = _part(references[_WRITES[equation.primitive]])
        if part is None:
            return
        for loaded, location in self.loads.items():
            if loaded.overlaps(part):
                raise InvalidValueError(
                    "columns of tensor memory are overwritten while a load from them may not be"
                    " complete",
                    got=f"columns {part.start} to {part.stop - 1}, which were loaded at {location}",
                    expected="plgpu.wait_load_tmem() after the load, before they are overwritten",
                    location=_jax.user_location(equation.source_info),
                )

    def ways(
        self, equation: Any, regions: Sequence[jaxprs.Region], operands: list[Any]
    ) -> list[dict[int, Any]]:
        before, ends, results = self.loads, [], []
        for region in regions:
            self.loads = dict(before)
            results.append(self.call(equation, region, operands))
            ends.append(self.loads)
        self.loads = _in_all(ends)
        return results

    def loop(
        self, equation: Any, regions: Sequence[jaxprs.Region], operands: list[Any]
    ) -> dict[int, Any]:
        trips = regions[-1].trips
        before = dict(self.loads)
        results = super().loop(equation, regions, operands)
        if trips is None:  # Maybe it does not run at all.
            self.loads = _in_all([before, self.loads])
        elif trips > 1:
            results = super().loop(equation, regions, operands)
        return results


def _in_all(states: Sequence[_Loads]) -> _Loads:
    first, *rest = states
    return {part: place for part, place in first.items() if all(part in one for one in rest)}


def _part(reference: Any) -> _Part | None:
    """The columns that a reference views; None if that is not known."""
    views: Sequence[Any] = ()
    if isinstance(reference, _jax.TransformedRef):
        reference, views = reference.ref, reference.transforms
    aval = getattr(reference, "aval", None)
    if not isinstance(aval, AbstractTensorMemoryRef | _jax.AbstractRef):
        return None
    shape: Any = getattr(aval, "shape", None) or getattr(aval.inner_aval, "shape", ())
    matrix: list[Any] = []
    rows, columns = [(0, size) for size in (1, 1, *shape)[-2:]]
    for view in views:
        if isinstance(view, transforms.ExtractAliasedRef):
            # Other members share the columns; of them nothing is said.
            matrix.append(view)
            rows, columns = [(0, size) for size in (1, 1, *view.shape)[-2:]]
        elif isinstance(view, _jax.NDIndexer):
            *batch, row, column = view.indices
            if not all(isinstance(one, int | np.integer) for one in batch):
                return None
            matrix.append(tuple(map(int, batch)))
            found = _within(rows, row), _within(columns, column)
            if found[0] is None or found[1] is None:
                return None
            rows, columns = found[0], found[1]
        else:
            return None
    key = tuple(one for one in matrix if one != ())
    return _Part(reference, key, rows, *columns)


def _within(extent: tuple[int, int], index: Any) -> tuple[int, int] | None:
    """The part of an extent that a slice selects; None if that is not known."""
    if not isinstance(index, _jax.Slice) or index.stride != 1:
        return None
    if not isinstance(index.start, int | np.integer):
        return None
    start = extent[0] + int(index.start)
    return start, start + int(index.size)


_WRITES = {prim.async_store_tmem_p: 0, tcgen05_mma_p: 0, **dict.fromkeys(COPIES, 1)}
"""Which operand is written."""
