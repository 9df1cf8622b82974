"""Names of register layouts, and ``layout_cast``.

A name is only data here; :meth:`SomeLayout.resolve` turns it into a layout for a concrete array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pallasite.plugin import InvalidValueError, manager
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import checks

if TYPE_CHECKING:
    from pallasite.plugin.layouts import Layout as ConcreteLayout


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
        from pallasite.plugin.layouts import named

        bits = _bits(self.layout.name, self.args, self.kwargs, dtype)
        return named.resolve(self.layout.name, self.args, self.kwargs, tuple(shape), bits)

    def base_tile(self, dtype: Any) -> tuple[int, ...]:
        """The smallest trailing extents of an array in this layout."""
        return _base_tile(self.layout.name, self.args, self.kwargs, dtype)

    def to_mgpu(self, *args: Any, **kwargs: Any) -> Any:
        """The layout as an object of ``jax.experimental.mosaic.gpu``."""
        make = manager().implementation("mosaic_layout")
        _no_arguments(self, args, kwargs)
        bits = _bits(self.layout.name, self.args, self.kwargs, np.float32)
        return make(self.layout.name, self.args, self.kwargs, bits)

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
        from pallasite.plugin.layouts import transforms

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
        make = manager().implementation("reduced_mosaic_layout")
        _no_arguments(self, args, kwargs)
        return make(self.layout.to_mgpu(), self.axes, str(self))

    def __str__(self) -> str:
        return f"{self.layout}.reduce({list(self.axes)})"


class _LayoutNames(type):
    """The class of :class:`Layout`: its attributes are the names that plugins contribute."""

    def __getattr__(cls, name: str) -> Layout:
        if name.startswith("__") or name == "name":
            raise AttributeError(name)  # The decorator below asks for a default of the field.
        return cls[name]

    def __getitem__(cls, name: str) -> Layout:
        from pallasite.plugin.layouts import named

        if name not in named.STRUCTURAL:
            named.named_layout(name)
        return _layout(name)

    def __iter__(cls) -> Iterator[Layout]:
        return iter(cls.__members__.values())

    def __len__(cls) -> int:
        return len(cls.__members__)

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *cls.__members__]

    @property
    def __members__(cls) -> Mapping[str, Layout]:
        """The public layouts by name."""
        from pallasite.plugin.layouts import named

        return {name: _layout(name) for name in named.names(public=True)}


@dataclasses.dataclass(frozen=True, repr=False)
class Layout(SomeLayout, metaclass=_LayoutNames):
    """Named register layouts, ``Layout.NAME``; calling one gives it arguments.

    Always there are ``WG_SPLAT(shape)``, in which every lane holds the same single value,
    ``WG_STRIDED(shape, vec_size)``, row-major over the lanes with ``vec_size`` elements each, and
    ``TILED(tiling, warp_dims, lane_dims, vector_dim)``. All others come from plugins (the hook
    ``pallasite_layouts``); ``list(Layout)`` has those of the plugins that are installed.

    Attributes:
      name: of the layout. ``Layout.NAME`` and ``Layout["NAME"]`` raise MissingNameError where no
        plugin has it.
    """

    name: str

    @property
    def value(self) -> str:
        """The name, as of a member of an enumeration."""
        return self.name

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

    def __str__(self) -> str:
        return f"Layout.{self.name}"

    def __repr__(self) -> str:
        return f"<Layout.{self.name}>"


@functools.cache
def _layout(name: str) -> Layout:
    """The one object of a name."""
    return Layout(name)


def _no_arguments(layout: SomeLayout, args: Any, kwargs: Any) -> None:
    if args or kwargs:
        raise InvalidValueError(f"the layout {layout} has its arguments", got=f"{args} {kwargs}")


def _bits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: Any) -> int:
    """Bits of an element, as the layout counts them: of a dtype among its arguments, if it takes
    one, or else of the array that is laid out."""
    from pallasite.plugin.layouts import named

    position = None if name in named.STRUCTURAL else named.named_layout(name).dtype_argument
    if position is not None:
        dtype = args[position] if len(args) > position else kwargs.get("dtype", dtype)
    return int(_jax.itemsize_bits(np.dtype(dtype)))


def _base_tile(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: Any
) -> tuple[int, ...]:
    from pallasite.plugin.layouts import named

    if name in ("WG_SPLAT", "WG_STRIDED"):
        return ()
    bits = _bits(name, args, kwargs, dtype)
    return named.specification(name, args, kwargs, bits).base_tile


layout_cast_p = _jax.Primitive("layout_cast")
"""The primitive of ``layout_cast``; its parameter ``new_layout`` is a ``SomeLayout``."""


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
