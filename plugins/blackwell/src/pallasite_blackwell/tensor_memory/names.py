"""``plgpu.TMEMLayout``: layouts of tensor memory as kernels name them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

from pallasite.plugin.language import checks
from pallasite.plugin.layouts import (
    RegisterLayout,
    Replicated,
    TiledSpecification,
    tiled_specification,
)
from pallasite_blackwell.tensor_memory import layouts
from pallasite_std.api import SomeLayout

_SPARSE = tiled_specification(((128, 16), (32, 1), (16, 1), (8, 1)), (-8,), (-2, -4, -6), -7)
_SCALES = tiled_specification(((128, 4), (32, 1)), (Replicated(4),), (-2,), -3)
_SCALES_M64 = tiled_specification(((256, 4), (128, 4), (32, 4)), (Replicated(2), -6), (-2,))


class _Named(SomeLayout):
    """What all names have in common: a layout, and how registers correspond to it."""

    def made(self) -> layouts.TensorMemoryLayout:
        """The layout."""
        raise NotImplementedError

    def _registers(self) -> TiledSpecification:
        raise NotImplementedError

    def resolve(self, shape: Sequence[int], dtype: Any) -> Any:
        """The register layout in which each lane holds what its lane of tensor memory does."""
        del dtype
        return self._registers().layout(tuple(shape))

    def base_tile(self, dtype: Any) -> tuple[int, ...]:
        """The smallest trailing extents of an array in this layout."""
        del dtype
        return self._registers().base_tile


@dataclasses.dataclass(frozen=True)
class _Parameterized(_Named):
    """A name with arguments."""

    name: TMEMLayout
    args: tuple[Any, ...]

    def made(self) -> layouts.TensorMemoryLayout:
        return self.name.maker()(*self.args)

    def _registers(self) -> TiledSpecification:
        from pallasite_blackwell.layouts import m64_collective_native

        return m64_collective_native(*self.args)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})"


class TMEMLayout(_Named, enum.Enum):
    """How matrices lie in tensor memory, for ``plgpu.TMEM(..., layout=)``.

    SCALES_LAYOUT: scale factors of 8 bits, (rows, factors), rows a multiple of 128.
    SPARSE_METADATA_LAYOUT: positions in a sparse operand, (rows, 2-bit numbers).
    M64_COLLECTIVE_LAYOUT: ``(columns, packing=1)``: 64 rows of each block of a pair.
    SCALES_M64_COLLECTIVE_LAYOUT: scale factors of b, (256, factors), for pairs of blocks with 64
    rows each.
    """

    SCALES_LAYOUT = "SCALES_LAYOUT"
    SPARSE_METADATA_LAYOUT = "SPARSE_METADATA_LAYOUT"
    M64_COLLECTIVE_LAYOUT = "M64_COLLECTIVE_LAYOUT"
    SCALES_M64_COLLECTIVE_LAYOUT = "SCALES_M64_COLLECTIVE_LAYOUT"

    __hash__ = object.__hash__

    def __call__(self, *args: Any, **kwargs: Any) -> _Parameterized:
        """The layout with arguments.

        Raises:
          InvalidValueError: arguments that it does not take.
        """
        takes = ("columns", "packing") if self is TMEMLayout.M64_COLLECTIVE_LAYOUT else ()
        given = dict(zip(takes, args, strict=False)) | kwargs
        if len(args) > len(takes) or set(given) - set(takes) or (takes and "columns" not in given):
            raise checks.value_error(
                f"wrong arguments of {self}",
                got=(*args, *kwargs.items()),
                expected=f"{self.name}({', '.join(takes)})" if takes else "none",
            )
        made = _Parameterized(self, tuple(given[name] for name in takes if name in given))
        made.made()
        return made

    def __str__(self) -> str:
        return f"TMEMLayout.{self.name}"

    def maker(self) -> Callable[..., layouts.TensorMemoryLayout]:
        """The function that makes it of its arguments."""
        return _MAKERS[self]

    def made(self) -> layouts.TensorMemoryLayout:
        """The layout.

        Raises:
          InvalidValueError: it needs arguments.
        """
        if self is TMEMLayout.M64_COLLECTIVE_LAYOUT:
            raise checks.value_error(
                f"{self} needs the number of columns", expected=f"{self}(columns)"
            )
        return self.maker()()

    def _registers(self) -> TiledSpecification:
        found = _REGISTERS.get(self)
        if found is None:
            self.made()
            raise AssertionError
        return found


_MAKERS: dict[TMEMLayout, Callable[..., layouts.TensorMemoryLayout]] = {
    TMEMLayout.SCALES_LAYOUT: lambda: layouts.SCALES,
    TMEMLayout.SPARSE_METADATA_LAYOUT: lambda: layouts.SPARSE_METADATA,
    TMEMLayout.M64_COLLECTIVE_LAYOUT: layouts.m64_collective,
    TMEMLayout.SCALES_M64_COLLECTIVE_LAYOUT: lambda: layouts.SCALES_M64_COLLECTIVE,
}

_REGISTERS = {
    TMEMLayout.SCALES_LAYOUT: _SCALES,
    TMEMLayout.SPARSE_METADATA_LAYOUT: _SPARSE,
    TMEMLayout.SCALES_M64_COLLECTIVE_LAYOUT: _SCALES_M64,
}


def native_registers(layout: layouts.TensorMemoryLayout, shape: tuple[int, int]) -> RegisterLayout:
    """The register layout in which each lane holds what its lane of tensor memory does.

    Raises:
      InvalidValueError: a shape that does not fit.
    """
    from pallasite_blackwell.layouts import m64_collective_native, native

    match layout.kind:
        case layouts.Kind.DEFAULT:
            made = native(layout.packing)
        case layouts.Kind.M64_COLLECTIVE:
            made = m64_collective_native(layout.columns, layout.packing)
        case layouts.Kind.HALF_LANE:
            tiles = ((64, layout.columns), (16, layout.columns // 2), (layout.packing,))
            made = tiled_specification(tiles, (-5,), (-4, -3))
        case layouts.Kind.SCALES:
            made = _SCALES
        case layouts.Kind.SCALES_M64_COLLECTIVE:
            made = _SCALES_M64
        case _:
            made = _SPARSE
    found: RegisterLayout = made.layout(shape)
    return found
