"""The resource estimator: what a kernel reserves on chip, found before anything is lowered.

It walks the jaxpr bottom up with rules registered like any other. Allocations that are alive at
once add up; alternatives and what follows one another share (the largest counts).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

from pallasite import _jax
from pallasite.errors import InternalError, PallasiteError, SourceLocation, UnsupportedError
from pallasite.launch import Allocation
from pallasite.lowering.geometry import Geometry
from pallasite.registry import Registry
from pallasite.targets import Target


@dataclasses.dataclass(frozen=True)
class Resources:
    """What (part of) a kernel reserves, and who asks for it where the peak is.

    Attributes:
      shared_bytes: peak of scoped shared memory; each allocation counts its aligned size.
      tmem_columns: peak of tensor-memory columns, plain and collective ones apart.
      barriers: how many mbarriers each scoped allocation has, by its variable.
      semaphores: how many semaphores of each scope (``"block"`` or ``"global"``).
      allocations: the requests behind ``shared_bytes``, with their source lines.
    """

    shared_bytes: int = 0
    tmem_columns: int = 0
    tmem_collective_columns: int = 0
    barriers: Counter[Hashable] = dataclasses.field(default_factory=Counter)
    semaphores: Counter[str] = dataclasses.field(default_factory=Counter)
    allocations: tuple[Allocation, ...] = ()

    def __add__(self, other: Resources) -> Resources:
        """Both are alive at the same time."""
        if other is _NOTHING:
            return self
        if self is _NOTHING:
            return other
        return Resources(
            shared_bytes=self.shared_bytes + other.shared_bytes,
            tmem_columns=self.tmem_columns + other.tmem_columns,
            tmem_collective_columns=self.tmem_collective_columns + other.tmem_collective_columns,
            barriers=self.barriers + other.barriers,
            semaphores=self.semaphores + other.semaphores,
            allocations=self.allocations + other.allocations,
        )

    def __or__(self, other: Resources) -> Resources:
        """One after the other, or one instead of the other.

        Barriers of different scopes add up, and so do global semaphores, which are never released.
        """
        if other is _NOTHING:
            return self
        if self is _NOTHING:
            return other
        larger = self if self.shared_bytes >= other.shared_bytes else other
        semaphores = self.semaphores | other.semaphores
        semaphores["global"] = self.semaphores["global"] + other.semaphores["global"]
        return Resources(
            shared_bytes=larger.shared_bytes,
            tmem_columns=max(self.tmem_columns, other.tmem_columns),
            tmem_collective_columns=max(
                self.tmem_collective_columns, other.tmem_collective_columns
            ),
            barriers=self.barriers | other.barriers,
            semaphores=+semaphores,
            allocations=larger.allocations,
        )

    @property
    def barrier_count(self) -> int:
        """How many mbarriers in all."""
        return sum(self.barriers.values())


_NOTHING = Resources()


def nothing() -> Resources:
    """Resources of something that reserves nothing."""
    return _NOTHING


@contextlib.contextmanager
def errors_at_equation(equation: Any) -> Iterator[None]:
    """Gives the errors of a rule the user's line; exceptions of another kind are ours to mend.

    What the user's own code raises, if a rule calls some, passes through.
    """
    location = _jax.user_location(equation.source_info)
    try:
        yield
    except PallasiteError as error:
        error.at(location)
        raise
    except Exception as error:
        if _jax.raised_by_user(error):
            raise
        operands = ", ".join(_type_of(atom.aval) for atom in equation.invars)
        raise InternalError(
            f"the rule of primitive {equation.primitive} failed: {type(error).__name__}: {error}",
            got=f"operands {operands or 'none'}",
            hint="report this; no kernel should make a rule fail like this",
            location=location,
        ) from error


def _type_of(aval: Any) -> str:
    return str(aval.str_short() if isinstance(aval, _jax.ShapedArray) else aval)


@dataclasses.dataclass(frozen=True)
class EstimatorContext:
    """What a resource rule gets to work with.

    Attributes:
      registry: where rules come from.
      target: what is compiled for.
      geometry: grid, cluster and threads.
      params: the kernel's ``CompilerParams``.
      location: the source line of the equation, or else of the kernel.
    """

    registry: Registry
    target: Target
    geometry: Geometry
    params: Any
    location: SourceLocation | None = None

    def estimate(self, jaxpr: Any) -> Resources:
        """Resources of a nested jaxpr: its equations follow one another.

        Raises:
          UnsupportedError: a primitive that holds a jaxpr has no resource rule.
        """
        total = _NOTHING
        for equation in jaxpr.eqns:
            rule = self.registry.resource_rule(equation.primitive)
            if rule is None:
                for _ in _jax.jaxprs_in_params(equation.params):
                    raise UnsupportedError(
                        f"primitive {equation.primitive.name} holds a jaxpr, but no plugin has a"
                        " resource rule for it",
                        hint="register one with RuleSet.resources, for example"
                        " lambda ctx, *avals, jaxpr, **params: ctx.estimate(jaxpr)",
                        location=_jax.user_location(equation.source_info),
                    )
                continue
            location = _jax.user_location(equation.source_info) or self.location
            with errors_at_equation(equation):
                needed = rule.function(
                    dataclasses.replace(self, location=location),
                    *[atom.aval for atom in equation.invars],
                    **equation.params,
                )
            total = total | needed
        return total
