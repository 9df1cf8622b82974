"""``BlockSpec``: which block of an operand a step of a pipeline works on, and how it is copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import checks
from pallasite_std.primitives.copy_options import OOBFillMode


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelinedBlockMapping(_jax.BlockMapping):  # type: ignore[misc]
    """A block mapping of ``pl.pallas_call`` that keeps what our :class:`BlockSpec` says besides."""

    delay_release: int = 0
    oob_fill_mode: OOBFillMode = OOBFillMode.ZEROS


def shared_axes(specs: Iterable[BlockSpec]) -> tuple[Any, ...]:
    """Cluster axes along which a block must hear of the release of some inputs.

    The blocks that share a copy along several axes count as one axis.
    """
    sets: list[tuple[Any, ...]] = []
    for spec in specs:
        axes = _names(spec.collective_axes)
        if axes and not any(set(axes) <= set(other) for other in sets):
            sets = [other for other in sets if not set(other) <= set(axes)] + [axes]
    names = [name for axes in sets for name in axes]
    if len(set(names)) < len(names):
        sets = [tuple(dict.fromkeys(names))]
    return tuple(axes[0] if len(axes) == 1 else axes for axes in sets)


def _names(axes: Any) -> tuple[Any, ...]:
    """Names of axes, without nesting."""
    result: list[Any] = []
    for axis in axes or ():
        result += axis if isinstance(axis, tuple) else (axis,)
    return tuple(result)


@dataclasses.dataclass
class BlockSpec(_jax.PallasBlockSpec):  # type: ignore[misc]
    """A ``pl.BlockSpec`` with what a GPU pipeline needs to know besides.

    Attributes:
      transforms: how a block lies in shared memory.
      delay_release: how many further steps a block stays untouched after the step that used it,
        because an asynchronous operation may still read it.
      collective_axes: cluster axes along which all blocks need the same block of the operand.
      oob_fill_mode: what is read where a block leaves the array.
    """

    transforms: Sequence[Any] = ()
    delay_release: int = 0
    collective_axes: tuple[Hashable, ...] | None = None
    oob_fill_mode: OOBFillMode = OOBFillMode.ZEROS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.transforms = tuple(self.transforms)
        checks.count(self.delay_release, "delay_release")

    def to_block_mapping(self, origin: Any, array_aval: Any, **context: Any) -> Any:
        """The canonical form that ``pl.pallas_call`` works with."""
        if self.collective_axes:
            raise checks.value_error(
                f"collective_axes of {origin} cannot be used in pallas_call",
                hint="write the kernel with gpu.kernel and a pipeline inside",
            )
        mapping = super().to_block_mapping(origin, array_aval, **context)
        physical = mapping.block_aval.inner_aval
        for transform in self.transforms:
            physical = transform.transform_type(physical)
        fields = {f.name: getattr(mapping, f.name) for f in dataclasses.fields(mapping)}
        fields["transformed_block_aval"] = mapping.block_aval.update(inner_aval=physical)
        fields["transforms"] = self.transforms
        return PipelinedBlockMapping(
            **fields,
            allow_captured_consts=True,
            delay_release=self.delay_release,
            oob_fill_mode=self.oob_fill_mode,
        )
