"""Register layouts by name: those that plugins contribute, and a few that need no table.

A plugin contributes :class:`~pallasite.extensions.NamedLayout` records by the hook
``pallasite_layouts``. The names ``WG_SPLAT``, ``WG_STRIDED`` and ``TILED`` are always there: they
take all that they say from their arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from pallasite import plugins
from pallasite.errors import InvalidValueError, MissingNameError
from pallasite.extensions import NamedLayout
from pallasite.known_plugins import remedy
from pallasite.layouts import description
from pallasite.layouts.construct import Replicated, Tiling, strided
from pallasite.layouts.registers import Layout, RegisterLayout, SplatLayout
from pallasite.layouts.tiled_layout import TiledSpecification
from pallasite.plugin_values import wrong_value

STRUCTURAL = ("WG_SPLAT", "WG_STRIDED", "TILED")
"""Names that stand for no one placement: one repeated value, strided vectors, any tiling."""


def known_layouts() -> Mapping[str, NamedLayout]:
    """The layouts that the enabled plugins contribute, by name."""
    return plugins.manager().layouts()


def names(*, public: bool = False) -> tuple[str, ...]:
    """All names that :func:`resolve` takes; with ``public``, those of ``plgpu.Layout``."""
    found = (one.name for one in known_layouts().values() if one.public or not public)
    return (*found, *STRUCTURAL)


def named_layout(name: str) -> NamedLayout:
    """The contributed layout of a name.

    Raises:
      MissingNameError: there is none; says which plugin would provide it.
    """
    found = known_layouts().get(name)
    if found is None:
        hint = remedy("layouts", name, plugins.manager().absences())
        raise MissingNameError(
            f"there is no register layout {name}",
            expected=f"one of {', '.join(names())}",
            hint=hint,
        )
    return found


def specification(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], bits: int
) -> TiledSpecification:
    """The tiling behind a named layout, for elements of ``bits`` bits.

    Raises:
      MissingNameError: no such name.
      InvalidValueError: arguments that the layout does not take.
    """
    try:
        if name == "TILED":
            return _tiled(*args, **kwargs)
        made = named_layout(name).specification
        if not callable(made):
            if args or kwargs:
                raise TypeError(f"{name} takes no arguments")
            fixed: TiledSpecification = made
            return fixed
        found: TiledSpecification = made(bits, *args, **kwargs)
    except TypeError as error:
        raise InvalidValueError(f"wrong arguments for the layout {name}: {error}") from error
    if not isinstance(found, TiledSpecification):
        plugin = plugins.manager().label(named_layout(name).plugin)
        what = f"pallasite_layouts of plugin {plugin}: the specification of {name}"
        raise wrong_value(what, found, "TiledSpecification")
    return found


def _tiled(
    tiling: Any, warp_dims: Sequence[Any], lane_dims: Sequence[Any], vector_dim: int
) -> TiledSpecification:
    """Any objects with ``tiles`` and ``times`` will do for the tiling and for replication."""

    def own(dims: Sequence[Any]) -> tuple[int | Replicated, ...]:
        return tuple(Replicated(d.times) if hasattr(d, "times") else int(d) for d in dims)

    tiles = tiling.tiles if hasattr(tiling, "tiles") else tiling
    return TiledSpecification(Tiling(tiles), own(warp_dims), own(lane_dims), vector_dim)


def resolve(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shape: Sequence[int],
    itemsize_bits: int,
) -> Layout:
    """The layout that a user names, for an array of ``shape`` and ``itemsize_bits`` per element.

    Args:
      name: one of :func:`names`.
      args: positional arguments given with the name, such as a vector length.
      kwargs: keyword arguments given with the name.
      shape: shape of the array.
      itemsize_bits: bits of an element of the array.

    Raises:
      MissingNameError: an unknown name.
      InvalidValueError: wrong arguments, or a shape that does not fit.
    """
    shape = tuple(shape)
    if name not in ("WG_SPLAT", "WG_STRIDED"):
        return specification(name, args, kwargs, itemsize_bits).layout(shape)
    keys = ("shape", "vec_size") if name == "WG_STRIDED" else ("shape",)
    given = dict(zip(keys, args, strict=False)) | dict(kwargs)
    if len(args) > len(keys) or set(given) - set(keys) or (len(keys) == 2 and keys[1] not in given):
        raise InvalidValueError(
            f"wrong arguments for the layout {name}: {tuple(args)} {dict(kwargs)}",
            expected=f"{name}({', '.join(f'{key}=' for key in keys)})",
        )
    if tuple(given.get("shape", shape)) != shape:
        raise InvalidValueError(
            f"the layout {name} is for shape {tuple(given['shape'])}, but the array has {shape}"
        )
    return SplatLayout(shape) if name == "WG_SPLAT" else strided(shape, given["vec_size"])


def fitting(one: NamedLayout, shape: tuple[int, ...]) -> RegisterLayout | None:
    """The layout of a contributed name for a shape; None if it does not fit, or takes arguments
    that its record does not derive from a shape."""
    made = one.specification
    try:
        if callable(made):
            if one.arguments is None or not shape:
                return None
            made = made(32, *one.arguments(shape))
        layout: RegisterLayout = made.layout(shape)
        return layout
    except InvalidValueError:
        return None


def _name_of(layout: RegisterLayout) -> str | None:
    return _cached_name(layout, tuple(known_layouts().values()))


@functools.lru_cache(maxsize=1024)
def _cached_name(layout: RegisterLayout, known: tuple[NamedLayout, ...]) -> str | None:
    for one in sorted(known, key=lambda entry: callable(entry.specification)):
        if fitting(one, layout.shape) == layout:
            return one.name
    return None


description.name_layouts_by(_name_of)
