"""Layout inference of loads from tensor memory and stores to it: every layout that can be moved."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import InvalidValueError, RuleSet
from pallasite.plugin.inference import AbstractValue, ArrayValue, Factor, Fixed, InferenceContext
from pallasite.plugin.ir import types
from pallasite.plugin.layouts import RegisterLayout
from pallasite_blackwell.tensor_memory import primitives as prim
from pallasite_blackwell.tensor_memory.layouts import TensorMemoryLayout
from pallasite_blackwell.tensor_memory.rules import batched, memory_layout
from pallasite_blackwell.tensor_memory.transfers import (
    candidates,
    default_registers,
    find_transfer,
)

rules = RuleSet()

_SECOND_CHOICE = 0.25
"""What a layout costs that is not the one to prefer, all other things being equal."""


@dataclasses.dataclass(eq=False)
class Transferred(Factor):
    """A matrix that is moved between tensor memory and registers.

    Attributes:
      options: the layouts to prefer; whatever else can be moved will do, too.
      layout: of tensor memory.
      makes: whether it is loaded, rather than stored.
    """

    place: Any
    weight: float
    variable: int
    options: tuple[RegisterLayout, ...]
    layout: TensorMemoryLayout
    shape: tuple[int, ...]
    bits: int
    makes: bool

    def __post_init__(self) -> None:
        self.variables = (self.variable,)
        self._known: dict[Any, float] = {}

    def cost(self, layouts: Sequence[Any], memory: Sequence[Any]) -> float:
        (layout,) = layouts
        if layout not in self._known:
            self._known[layout] = self._cost(layout)
        return self._known[layout]

    def _cost(self, layout: Any) -> float:
        if layout in self.options:
            return 0.0 if layout == self.options[0] else _SECOND_CHOICE
        if (
            isinstance(layout, RegisterLayout)
            and len(self.shape) == 2
            and find_transfer(layout, self.layout, self.shape, self.bits) is not None
        ):
            return _SECOND_CHOICE
        return min(
            Fixed(self.place, self.weight, self.variable, one, self.bits, makes=self.makes).cost(
                ((layout,)), ()
            )
            for one in self.options
        )

    def proposals(self, position: int, layouts: Sequence[Any], memory: Sequence[Any]) -> list[Any]:
        return list(self.options)


def _transfer(
    ctx: InferenceContext,
    value: AbstractValue,
    aval: Any,
    layout: TensorMemoryLayout,
    *,
    makes: bool,
    only: Sequence[RegisterLayout] = (),
) -> None:
    if not isinstance(value, ArrayValue):
        return
    shape = tuple(aval.shape)
    bits = types.bit_width(aval.dtype)
    default_registers(layout, shape[-2:], bits)  # An error if there is none.
    options = only or tuple(
        batched(one, shape[:-2]) for one in candidates(layout, shape[-2:], bits)
    )
    ctx.walk.problem.factors.append(
        Transferred(
            ctx.place, ctx.weight, value.variable, tuple(options), layout, shape, bits, makes
        )
    )


@rules.inference(prim.async_load_tmem_p)
def _load(
    ctx: InferenceContext, *operands: AbstractValue, args_tree: Any, reduce: str | None
) -> list[AbstractValue]:
    position = args_tree.unflatten(list(range(len(operands))))[0]
    layout = memory_layout(ctx.avals_in[position.ref], position.transforms)
    aval = ctx.avals_out[0]
    result = ctx.result(aval)
    if reduce is None:
        _transfer(ctx, result, aval, layout, makes=True)
        return [result]
    from pallasite_blackwell.layouts import native

    try:
        whole = native().layout(tuple(aval.shape))
    except InvalidValueError as error:
        raise InvalidValueError(
            "a load that reduces has whole rows in its lanes",
            got=f"shape {list(aval.shape)}",
            expected="128 rows, and an even number of columns",
        ) from error
    ctx.makes(result, whole, "a load that reduces has whole rows in its lanes")
    reduced = ctx.result(ctx.avals_out[1])
    rest = whole.reduce((1,))
    ctx.makes(reduced, rest, "a load that reduces has one element for each row")
    return [result, reduced]


@rules.inference(prim.async_store_tmem_p)
def _store(ctx: InferenceContext, *operands: AbstractValue, args_tree: Any) -> None:
    target, position = args_tree.unflatten(list(range(len(operands))))
    layout = memory_layout(ctx.avals_in[target.ref], target.transforms)
    _transfer(ctx, operands[position], ctx.avals_in[position], layout, makes=False)


@rules.inference(prim.commit_tmem_p)
@rules.inference(prim.wait_load_tmem_p)
def _no_layouts(ctx: InferenceContext, **params: Any) -> None:
    """They ask nothing of layouts."""
