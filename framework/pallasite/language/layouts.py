"""Names of register layouts, and ``layout_cast``.

A name is only data here; :meth:`SomeLayout.resolve` turns it into a layout for a concrete array.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pallasite import _jax
from pallasite.errors import InvalidValueError
from pallasite.language import checks
from pallasite.layouts.construct import Replicated, Tiling

if TYPE_CHECKING:
    from pallasite.layouts import Layout as ConcreteLayout

__all__ = [
    "Layout",
    "ParameterizedLayout",
    "ReducedLayout",
    "Replicated",
    "SomeLayout",
    "Tiling",
    "layout_cast",
    "layout_cast_p",
]


class SomeLayout:
    """How a user says which lane of a warpgroup holds which element of an array."""

    def reduce(self, axes: int | Sequence[int]) -> ReducedLayout:
        """The layout of an array from which the dimensions ``axes`` were reduced away."""
        return ReducedLayout(self, (axes,) if checks.is_integer(axes) else tuple(axes))  # type: ignore[arg-type]

    def resolve(self, shape: Sequence[int], dtype: Any) -> ConcreteLayout:
        """The layout for an array; InvalidValueError when the array does not fit it."""
        raise NotImplementedError

    def base_tile(self, dtype: Any) -> tuple[int, ...]:
        """The smallest trailing extents of an array in this layout."""
        del dtype
        return ()

    def to_mgpu(self, *args: Any, **kwargs: Any) -> Any:
        """The same layout as an object of ``jax.experimental.mosaic.gpu``, for inlined code.

        Args:
          *args: arguments of the layout, if it has none yet.
          **kwargs: the same by name.

        Raises:
          InvalidValueError: wrong arguments, or no ``FragmentedArray`` has this layout.
        """
        raise NotImplementedError


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    return value


@dataclasses.dataclass(frozen=True, init=False)
class ParameterizedLayout(SomeLayout):
    """A named layout with arguments, such as ``Layout.WG_STRIDED((128, 64), vec_size=4)``."""

    layout: Layout
    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    def __init__(self, layout: Layout, args: Sequence[Any], kwargs: dict[str, Any]):
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "args", _hashable(args))
        pairs = tuple((key, _hashable(value)) for key, value in sorted(kwargs.items()))
        object.__setattr__(self, "keywords", pairs)

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        return dict(self.keywords)

    def resolve(self, shape: Sequence[int], dtype: Any) -> ConcreteLayout:
        """The layout for an array; InvalidValueError when the array does not fit it."""
        from pallasite.layouts import named

        bits = _bits(self.layout.name, self.args, self.kwargs, dtype)
        return named.resolve(self.layout.name, self.args, self.kwargs, tuple(shape), bits)

    def base_tile(self, dtype: Any) -> tuple[int, ...]:
        """The smallest trailing extents of an array in this layout."""
        return _base_tile(self.layout.name, self.args, self.kwargs, dtype)

    def to_mgpu(self, *args: Any, **kwargs: Any) -> Any:
        """The layout as an object of ``jax.experimental.mosaic.gpu``."""
        from pallasite_std.inline import layouts as mosaic_layouts

        _no_arguments(self, args, kwargs)
        bits = _bits(self.layout.name, self.args, self.kwargs, np.float32)
        return mosaic_layouts.fragmented_layout(self.layout.name, self.args, self.kwargs, bits)

    def __str__(self) -> str:
        arguments = [*map(str, self.args), *(f"{k}={v}" for k, v in self.keywords)]
        return f"{self.layout}({', '.join(arguments)})"


@dataclasses.dataclass(frozen=True)
class ReducedLayout(SomeLayout):
    """What is left of ``layout`` when the dimensions ``axes`` are reduced away."""

    layout: SomeLayout
    axes: tuple[int, ...]

    def resolve(self, shape: Sequence[int], dtype: Any) -> ConcreteLayout:
        """The layout for an array of the reduced shape."""
        from pallasite.layouts import transforms

        rank = len(shape) + len(self.axes)
        for axis in self.axes:
            if not -rank <= axis < rank:
                raise InvalidValueError(
                    f"a layout of {rank} dimensions is reduced along dimension {axis}",
                    got=str(self),
                    expected=f"dimensions from 0 to {rank - 1}",
                )
        gone = {axis % rank for axis in self.axes}
        tile = self.layout.base_tile(dtype)
        smallest = (1,) * (rank - len(tile)) + tile
        kept = iter(shape)
        full = tuple(smallest[i] if i in gone else next(kept) for i in range(rank))
        return transforms.reduce(self.layout.resolve(full, dtype), sorted(gone))

    def to_mgpu(self, *args: Any, **kwargs: Any) -> Any:
        """The layout as an object of ``jax.experimental.mosaic.gpu``."""
        from pallasite_std.inline import layouts as mosaic_layouts

        _no_arguments(self, args, kwargs)
        return mosaic_layouts.reduced_layout(self.layout.to_mgpu(), self.axes, str(self))

    def __str__(self) -> str:
        return f"{self.layout}.reduce({list(self.axes)})"


class Layout(SomeLayout, enum.Enum):
    """Named register layouts. Calling one gives it arguments: ``Layout.WG_STRIDED(shape, 4)``."""

    #: Accumulators of wgmma: (m, n), m a multiple of 64, n of 8.
    WGMMA = enum.auto()
    #: The same for 8-bit operands in registers.
    WGMMA_8BIT = enum.auto()
    #: The same for 32-bit operands in registers, which are multiplied as tf32.
    WGMMA_TF32 = enum.auto()
    #: From which a conversion to an element twice as wide leads to WGMMA without data movement.
    WGMMA_UPCAST_2X = enum.auto()
    #: The same for four times.
    WGMMA_UPCAST_4X = enum.auto()
    #: The transpose of WGMMA.
    WGMMA_TRANSPOSED = enum.auto()
    #: Every lane holds the same single value: ``WG_SPLAT(shape)``.
    WG_SPLAT = enum.auto()
    #: Row-major over the lanes, ``vec_size`` elements each: ``WG_STRIDED(shape, vec_size)``.
    WG_STRIDED = enum.auto()
    #: ``TILED(tiling, warp_dims, lane_dims, vector_dim)``.
    TILED = enum.auto()
    TCGEN05 = enum.auto()
    TCGEN05_TRANSPOSED = enum.auto()
    TCGEN05_M64_COLLECTIVE = enum.auto()
    TCGEN05_TMEM_NATIVE = enum.auto()
    TCGEN05_M64_COLLECTIVE_NATIVE = enum.auto()
    #: For copies between shared and global memory: ``SMEM_GMEM_COPY(shape, dtype, swizzle)``.
    SMEM_GMEM_COPY = enum.auto()
    #: Row numbers of a gathering copy.
    TMA_INDICES = enum.auto()
    TMA_INDICES_4 = enum.auto()
    _WGMMA_ACC_32BIT = enum.auto()
    #: Operands and accumulator of mma.sync: ``MMA_LHS(dtype, m_warps=4)`` and so on.
    MMA_LHS = enum.auto()
    MMA_RHS = enum.auto()
    MMA_ACC = enum.auto()

    def __call__(self, *args: Any, **kwargs: Any) -> ParameterizedLayout:
        return ParameterizedLayout(self, args, kwargs)

    def resolve(self, shape: Sequence[int], dtype: Any) -> ConcreteLayout:
        """The layout for an array; InvalidValueError when the array does not fit it."""
        return ParameterizedLayout(self, (), {}).resolve(shape, dtype)

    def base_tile(self, dtype: Any) -> tuple[int, ...]:
        """The smallest trailing extents of an array in this layout."""
        return _base_tile(self.name, (), {}, dtype)

    def to_mgpu(self, *args: Any, **kwargs: Any) -> Any:
        """The layout with these arguments as an object of ``jax.experimental.mosaic.gpu``."""
        return ParameterizedLayout(self, args, kwargs).to_mgpu()


def _no_arguments(layout: SomeLayout, args: Any, kwargs: Any) -> None:
    if args or kwargs:
        raise InvalidValueError(f"the layout {layout} has its arguments", got=f"{args} {kwargs}")


# Layouts that are chosen by a dtype argument rather than by the dtype of the array in them.
_DTYPE_ARGUMENT = {"MMA_LHS": 0, "MMA_RHS": 0, "MMA_ACC": 0, "SMEM_GMEM_COPY": 1}


def _bits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: Any) -> int:
    position = _DTYPE_ARGUMENT.get(name)
    if position is not None:
        dtype = args[position] if len(args) > position else kwargs.get("dtype", dtype)
    return int(_jax.itemsize_bits(np.dtype(dtype)))


def _base_tile(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: Any
) -> tuple[int, ...]:
    from pallasite.layouts import named

    if name in ("WG_SPLAT", "WG_STRIDED"):
        return ()
    bits = _bits(name, args, kwargs, dtype)
    return named.specification(name, args, kwargs, bits).base_tile


layout_cast_p = _jax.Primitive("layout_cast")


@_jax.abstract_eval(layout_cast_p)
def _layout_cast_abstract_eval(x: Any, *, new_layout: Any) -> Any:
    del new_layout
    return x, set()


def layout_cast(x: Any, new_layout: SomeLayout) -> Any:
    """The array ``x`` in another register layout; its elements stay the same.

    Right after an operation that makes an array (a load, an iota), the cast also tells that
    operation which layout to make. Raises InvalidTypeError unless ``new_layout`` is a layout.
    """
    if not isinstance(new_layout, SomeLayout):
        raise checks.type_error(
            "new_layout is not a layout",
            got=repr(new_layout),
            expected="a member of Layout, with arguments if it needs some",
        )
    if isinstance(x, _jax.TransformedRef) or isinstance(_jax.typeof(x), _jax.AbstractRef):
        raise checks.type_error(
            "a reference has no register layout", got=x, hint="read it first: ref[...]"
        )
    return layout_cast_p.bind(x, new_layout=new_layout)
