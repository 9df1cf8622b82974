"""The memory space of tensor memory: what is allocated, reserved, viewed and refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax

from pallasite.plugin import Resource
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import bit_width
from pallasite.plugin.language import MemorySpace, array_type, checks
from pallasite_blackwell.targets import TENSOR_MEMORY_COLUMNS
from pallasite_blackwell.tensor_memory import layouts
from pallasite_blackwell.tensor_memory.layouts import CELL_BITS, TensorMemoryLayout

if TYPE_CHECKING:
    from pallasite.plugin.inference import AbstractValue, InferenceContext
    from pallasite.plugin.lowering import EstimatorContext, Resources, RuleContext

ALIGNMENT = 4
"""Columns of which allocations begin at a multiple: copies to tensor memory ask for it."""

_FEWEST = 32


class _Columns(Resource):
    def granted(self, amount: int) -> int:
        """Columns are allocated in powers of two, 32 at least (PTX ISA, ``tcgen05.alloc``)."""
        return max(_FEWEST, 1 << (amount - 1).bit_length())


_HINT = (
    "smaller accumulators, packed=True for operands, or plgpu.RefUnion for buffers that are not"
    " live at the same time"
)
PLAIN = _Columns(
    TENSOR_MEMORY_COLUMNS,
    unit="columns",
    title="tensor memory",
    symbol="tmem_columns",
    hint=_HINT,
)
"""Columns of one block."""

COLLECTIVE = _Columns(
    "tmem_collective_columns",
    unit="columns",
    title="tensor memory of pairs of blocks",
    symbol="tmem_columns",
    hint=_HINT,
    pool=TENSOR_MEMORY_COLUMNS,
)
"""Columns that the blocks of a pair allocate together."""


class AbstractTensorMemoryRef(_jax.AbstractRef):  # type: ignore[misc]
    """Type of a reference to tensor memory.

    Attributes:
      layout: how the matrices lie.
      collective: whether the blocks of a pair allocate it together.
    """

    def __init__(
        self, inner_aval: Any, memory_space: Any, layout: TensorMemoryLayout, collective: bool
    ):
        super().__init__(inner_aval, memory_space)
        self.layout = layout
        self.collective = collective

    def __repr__(self) -> str:
        kind = ", collective" if self.collective else ""
        return f"TMEM{{{self.inner_aval.str_short()}, {self.layout}{kind}}}"

    def _key(self) -> tuple[Any, ...]:
        return self.inner_aval, self.memory_space, self.layout, self.collective

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AbstractTensorMemoryRef) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def update(self, inner_aval: Any = None, memory_space: Any = None, kind: Any = None) -> Any:
        """The same with another array type."""
        ref = super().update(inner_aval, memory_space, kind)
        return type(self)(ref.inner_aval, ref.memory_space, self.layout, self.collective)

    def _getitem(self, tracer: Any, idx: Any) -> Any:
        del tracer, idx
        raise _asynchronous("read", "plgpu.async_load_tmem(ref)")

    def _setitem(self, tracer: Any, idx: Any, value: Any) -> None:
        del tracer, idx, value
        raise _asynchronous("written", "plgpu.async_store_tmem(ref, value)")


def _asynchronous(what: str, call: str) -> Exception:
    return checks.value_error(
        f"tensor memory is {what} as if it were shared memory",
        expected=f"{call}, which is asynchronous",
    )


@dataclasses.dataclass(frozen=True)
class TensorMemoryAllocation:
    """What ``plgpu.TMEM(shape, dtype)`` describes, for ``scratch_types=`` and ``pl.run_scoped``."""

    shape: tuple[int, ...]
    dtype: Any
    layout: TensorMemoryLayout
    collective: bool

    @property
    def memory_space(self) -> MemorySpace:
        """Tensor memory."""
        return TMEM

    def get_array_aval(self) -> Any:
        """The array type of the contents."""
        return _jax.ShapedArray(self.shape, self.dtype)

    def get_ref_aval(self) -> Any:
        """The type of the reference that the body gets."""
        return AbstractTensorMemoryRef(self.get_array_aval(), TMEM, self.layout, self.collective)


def width(aval: Any) -> int:
    """Columns that an array of tensor memory takes, with all its batch dimensions."""
    *batch, rows, columns = aval.shape
    return int(math.prod(batch) * aval.layout.width((rows, columns)))


def _aligned(columns: int) -> int:
    return int(-(-columns // ALIGNMENT) * ALIGNMENT)


class TensorMemory(MemorySpace):
    """Tensor memory of a multiprocessor, next to its tensor core."""

    name = "TMEM"
    per_block = True
    reuses_memory = True

    def describe(  # type: ignore[override]
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        packed: bool | None = None,
        collective: bool | None = None,
        layout: Any = None,
    ) -> TensorMemoryAllocation:
        """Matrices in tensor memory.

        Args:
          shape: (rows, columns), 64 rows or a multiple of 128; before them batch dimensions, whose
            matrices lie side by side.
          dtype: of the elements, of at most 32 bits.
          packed: whether a cell of 32 bits holds as many elements as fit, as for operands of
            products, or one, as for accumulators. Needed for elements of less than 32 bits.
          collective: whether the two blocks of a pair allocate it together, for products that they
            make together.
          layout: a :class:`TMEMLayout`, instead of ``packed``.

        Raises:
          InvalidValueError: tensor memory holds no such matrix.
        """
        aval = array_type(shape, dtype)
        bits = bit_width(aval.dtype)
        if len(aval.shape) < 2:
            raise checks.value_error(
                "tensor memory holds matrices",
                got=f"shape {aval.shape}",
                expected="(rows, columns)",
            )
        if bits > CELL_BITS:
            raise checks.value_error(
                "elements do not fit the cells of tensor memory",
                got=f"{aval.dtype}",
                expected=f"at most {CELL_BITS} bits",
            )
        pair = bool(collective)
        if layout is None:
            if packed is None and bits < CELL_BITS:
                raise checks.value_error(
                    f"it is not said how elements of {bits} bits lie in cells of {CELL_BITS} bits",
                    expected="packed=True for operands, packed=False for accumulators, or layout=",
                )
            packing = CELL_BITS // bits if packed else 1
            made = layouts.inferred(aval.shape[-2:], collective=pair, packing=packing)
        else:
            if packed is not None:
                raise checks.value_error(
                    "both packed= and layout= are given", expected="one of the two"
                )
            if not hasattr(layout, "made"):
                raise checks.type_error(
                    "layout is no layout of tensor memory",
                    got=repr(layout),
                    expected="a plgpu.TMEMLayout",
                )
            made = layout.made()
        made.check(aval.shape[-2:], bits)
        return TensorMemoryAllocation(tuple(aval.shape), aval.dtype, made, pair)

    def union_placement(self, members: Sequence[Any]) -> tuple[list[int], int]:
        """Columns where the members of one group begin, and where the group ends."""
        starts, end = [], 0
        for member in members:
            starts.append(end)
            end += _aligned(width(member))
        return starts, end

    def member_layout(self, member: Any) -> tuple[TensorMemoryLayout, bool]:
        """How a union's member lies, and whether it is collective."""
        return member.layout, member.collective

    def member_type(self, array_type: Any, layout: Any) -> Any:
        """The type of a reference to a union's member."""
        return AbstractTensorMemoryRef(array_type, self, *layout)

    def check_view(self, reference: Any, transform: Any) -> None:
        """Tensor memory is not transposed: lanes are no columns."""
        raise checks.value_error(
            "Can't transpose a TMEM reference.",
            got=f"shape {tuple(reference.shape)}",
            expected="rows in lanes and columns in columns, as they are",
        )

    def resources(self, ctx: EstimatorContext, variable: Any, axes: tuple[Any, ...]) -> Resources:
        """Its columns."""
        del axes
        aval = variable.aval
        if hasattr(aval, "refs"):
            members = [_physical(leaf) for leaf in jax.tree.leaves(aval.refs, is_leaf=_is_ref)]
            kinds = {member.collective for member in members}
            if len(kinds) > 1:
                raise checks.value_error(
                    "Some aliased TMEM references are collective and some are not."
                )
            needed, what, collective = aval.shape[0], "RefUnion", kinds.pop()
        else:
            needed, what, collective = (
                width(aval),
                f"{aval.dtype}{list(aval.shape)}",
                aval.collective,
            )
        resource = COLLECTIVE if collective else PLAIN
        return ctx.reserve(resource, _aligned(needed), what, size=needed)

    def allocate(
        self, ctx: RuleContext, variable: Any, axes: tuple[Any, ...]
    ) -> AbstractContextManager[Any]:
        """The next columns of the kernel's."""
        from pallasite_blackwell.tensor_memory.allocation import allocate

        del axes
        return allocate(ctx, variable)

    def view(self, ctx: RuleContext, reference: Any, transform: Any) -> Any:
        """A member of a union, matrices of a batch, whole tiles of columns."""
        from pallasite_blackwell.tensor_memory.references import view

        return view(ctx, reference, transform)

    def read(self, ctx: RuleContext, reference: Any, transforms: Sequence[Any]) -> Any:
        """Tensor memory is loaded asynchronously only."""
        raise _asynchronous("read", "plgpu.async_load_tmem(ref)")

    def write(self, ctx: RuleContext, reference: Any, transforms: Sequence[Any], value: Any) -> Any:
        """Tensor memory is stored to asynchronously only."""
        raise _asynchronous("written", "plgpu.async_store_tmem(ref, value)")

    def describe_layout(self, ctx: RuleContext, reference: Any, transforms: Sequence[Any]) -> str:
        """The name of the layout."""
        for transform in transforms:
            reference = self.view(ctx, reference, transform)
        return str(reference.layout)

    def infer_read(
        self,
        ctx: InferenceContext,
        reference: Any,
        transforms: Sequence[Any],
        result: AbstractValue,
    ) -> None:
        """Tensor memory is loaded asynchronously only."""
        raise _asynchronous("read", "plgpu.async_load_tmem(ref)")

    def infer_write(
        self, ctx: InferenceContext, reference: Any, transforms: Sequence[Any], value: AbstractValue
    ) -> None:
        """Tensor memory is stored to asynchronously only."""
        raise _asynchronous("written", "plgpu.async_store_tmem(ref, value)")


def _is_ref(x: Any) -> bool:
    return isinstance(x, _jax.TransformedRef | _jax.AbstractRef)


def _physical(ref: Any) -> Any:
    return ref.ref if isinstance(ref, _jax.TransformedRef) else ref


TMEM = TensorMemory()
