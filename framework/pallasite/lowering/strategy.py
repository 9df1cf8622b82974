"""How arrays get their layouts while a kernel is lowered: what the walker asks of a strategy."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxlib.mlir import ir

from pallasite import _jax, plugins
from pallasite.errors import PluginError, UnsupportedError
from pallasite.lowering.arrays import RegisterArray
from pallasite.plugin_values import wrong_value

if TYPE_CHECKING:
    from pallasite.layouts.registers import Layout
    from pallasite.lowering.context import RuleContext, Value
    from pallasite.lowering.inference.plan import LayoutPlan, Path
    from pallasite.rules import LoweringRule

_NO_VALUES = (str, bytes, bool, int, float, complex, tuple, list, dict, type, type(wrong_value))
"""What a rule may return by mistake: of these, no value of a kernel is."""


class LayoutStrategy(abc.ABC):
    """Where the layouts of a kernel come from, and what follows from that for each equation.

    There are two: under lane semantics a kernel says which layouts it wants
    (the implementation ``"lane_layouts"`` of a plugin), under warpgroup semantics they have
    been inferred (:class:`~pallasite.lowering.planned_strategy.PlannedStrategy`).

    Attributes:
      plan: what inference has chosen, or None.
    """

    plan: LayoutPlan | None = None

    @abc.abstractmethod
    def enter(self, jaxpr: Any) -> None:
        """Takes account of a jaxpr that is about to be lowered."""

    @abc.abstractmethod
    def wanted(self, equation: Any, path: Path) -> tuple[Layout | None, int | None]:
        """What is wanted of an equation's first result: its layout, and how many elements one
        access should move at most; None where that is open."""

    @abc.abstractmethod
    def before(self, ctx: RuleContext, operands: Sequence[Value]) -> Sequence[Value]:
        """Emits what comes before an equation; returns the operands as its rule shall get them."""

    @abc.abstractmethod
    def after(self, ctx: RuleContext, results: Sequence[Value]) -> Sequence[Value]:
        """The results of an equation as the equations after it shall get them."""

    @abc.abstractmethod
    def outputs(self, ctx: RuleContext, jaxpr: Any, values: Sequence[Value]) -> Sequence[Value]:
        """The results of a jaxpr as what is around it shall get them.

        ``ctx`` has no equation; its path is that of the equation that holds the jaxpr.
        """

    @abc.abstractmethod
    def is_release(self, path: Path) -> bool:
        """Whether an equation is known to be an arrival that only other threads wait for."""

    @property
    @abc.abstractmethod
    def places_barriers(self) -> bool:
        """Whether barriers before copies are found for the whole kernel; otherwise, rules are to
        emit them."""

    def constant(self, value: Any, dtype: Any) -> Value:
        """The value of a literal or of a captured constant.

        Raises:
          UnsupportedError: an array whose elements differ; it must be passed as an input.
        """
        array = np.asarray(value, dtype=dtype)
        if array.size == 0 or (array.size > 1 and not bool(np.all(array == array.flat[0]))):
            raise UnsupportedError(
                "the kernel captures an array constant",
                got=f"{array.dtype}{list(array.shape)}",
                expected="scalars, or arrays of one repeated value",
                hint="pass the array to the kernel as an input",
            )
        return RegisterArray.constant(array.flat[0], array.dtype, array.shape)

    def check(self, context: RuleContext, equation: Any, value: Any) -> tuple[Value, ...]:
        """What a lowering rule returned, as a tuple.

        Raises:
          PluginError: it is not what the equation says, so that other rules would fail at it.
        """
        rule, outputs = context.rules[0], equation.outvars
        results = value if equation.primitive.multiple_results else (value,)
        results = () if results is None else results
        if isinstance(results, Iterable) and not isinstance(results, str | Mapping):
            results = tuple(results)
        if (
            not isinstance(results, tuple)
            or len(results) != len(outputs)
            or any(type(one) in _NO_VALUES or isinstance(one, ir.Value) for one in results)
            or any(one is None for one, used in zip(results, context.used, strict=True) if used)
        ):
            avals = ", ".join(str(variable.aval) for variable in outputs)
            raise wrong_value(
                _rule(equation, rule),
                value,
                f"a value for each of {len(outputs)} results: {avals}",
            )
        for variable, value in zip(equation.outvars, results, strict=True):
            aval = variable.aval
            if not isinstance(value, RegisterArray) or not isinstance(aval, _jax.ShapedArray):
                continue
            if value.shape != aval.shape or value.dtype != np.dtype(aval.dtype):
                raise PluginError(
                    f"{_rule(equation, rule)} returned {value.dtype}{list(value.shape)}"
                    f" for {aval.dtype}{list(aval.shape)}"
                )
        return results


def _rule(equation: Any, rule: LoweringRule) -> str:
    """A rule and whose it is, for messages."""
    plugin = plugins.manager().label(rule.plugin)
    return f"pallasite_lowering_rules of plugin {plugin}: the rule for {equation.primitive}"
