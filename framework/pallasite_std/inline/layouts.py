"""Our layouts by name as the layouts of ``jax.experimental.mosaic.gpu``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pallasite.plugin import InvalidValueError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.layouts import Replicated, TiledSpecification, named


def fragmented_layout(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], bits: int) -> Any:
    """The layout object of a ``FragmentedArray`` for one of our names.

    Args:
      name: of the layout.
      args: its positional arguments.
      kwargs: its keyword arguments.
      bits: of an element, for layouts that depend on it.

    Raises:
      InvalidValueError: wrong arguments, or a shape that such an array cannot have.
    """
    mosaic = _jax.mosaic_gpu()
    if name not in ("WG_SPLAT", "WG_STRIDED"):
        return tiled_layout(named.specification(name, args, kwargs, bits))
    make = mosaic.WGSplatFragLayout if name == "WG_SPLAT" else mosaic.WGStridedFragLayout
    try:
        return make(*_tuples(args), **dict(zip(kwargs, _tuples(kwargs.values()), strict=True)))
    except (TypeError, ValueError) as error:
        given = [*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())]
        whole = "" if name == "WG_SPLAT" else ", of a multiple of 128 vectors"
        raise InvalidValueError(
            f"the layout {name} of these arguments is none of a FragmentedArray",
            got=f"{name}({', '.join(given)})",
            expected=f"a shape{'' if name == 'WG_SPLAT' else ' and a vector length'}{whole}",
        ) from error


def _tuples(values: Any) -> list[Any]:
    return [tuple(value) if isinstance(value, list) else value for value in values]


def tiled_layout(specification: TiledSpecification) -> Any:
    """A tiling of ours as a ``TiledLayout``."""

    def dims(own: Sequence[int | Replicated]) -> tuple[Any, ...]:
        return tuple(
            _jax.replicated(dim.times) if isinstance(dim, Replicated) else dim for dim in own
        )

    return _jax.tiled_layout(
        specification.tiling.tiles,
        dims(specification.warp_dims),
        dims(specification.lane_dims),
        specification.vector_dim,
    )


def reduced_layout(layout: Any, axes: Sequence[int], name: str) -> Any:
    """What is left of a layout of a ``FragmentedArray`` without the dimensions ``axes``.

    Args:
      layout: from :func:`fragmented_layout`.
      axes: the dimensions, which must be among those of its first tile.
      name: of the reduced layout, for messages.

    Raises:
      InvalidValueError: another kind of layout, or other dimensions.
    """
    mosaic = _jax.mosaic_gpu()
    if isinstance(layout, mosaic.WGSplatFragLayout):
        rank = len(layout.shape)
    elif isinstance(layout, mosaic.TiledLayout):
        rank = len(layout.base_tile_shape)
    else:
        raise InvalidValueError(
            "only tiled layouts and splats are reduced as layouts of a FragmentedArray", got=name
        )
    if any(not -rank <= axis < rank for axis in axes):
        raise InvalidValueError(
            f"a layout of {rank} dimensions is reduced along others, as one of a FragmentedArray",
            got=name,
            expected=f"dimensions from 0 to {rank - 1}",
        )
    gone = sorted({axis % rank for axis in axes})
    if isinstance(layout, mosaic.TiledLayout):
        return layout.reduce(gone)
    kept = (extent for axis, extent in enumerate(layout.shape) if axis not in gone)
    return mosaic.WGSplatFragLayout(tuple(kept))
