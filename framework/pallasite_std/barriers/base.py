"""What all kinds of barriers have in common: the type of their references, how they are described.

A plugin makes a kind of its own from :class:`BarrierDType` and :class:`BarrierAllocation`, and
registers it as a :class:`~pallasite.barrier_kinds.BarrierKind`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import checks, find_space

BARRIER_SPACE = "BARRIERS"
"""The name of the memory space of all barriers, which :mod:`pallasite_std.spaces` provides."""


class barrier_dtype(_jax.extended):  # type: ignore[misc]  # noqa: N801
    """Scalar type of barriers."""


class BarrierDType(_jax.ExtendedDType):  # type: ignore[misc]
    """Element type of a reference to barriers; each kind has a frozen dataclass of its own.

    Attributes:
      name: the kind in jaxprs and tables, such as ``"barrier"``.
      title: the kind as users write it, such as ``"Barrier"``; unique among all kinds.
      counts_bytes: whether asynchronous copies can complete its phases.
      num_arrivals: how many arrivals of the program complete a phase.
    """

    type: ClassVar[Any] = barrier_dtype
    name: ClassVar[str]
    title: ClassVar[str]
    counts_bytes: ClassVar[bool] = True

    num_arrivals: int

    @property
    def orders(self) -> tuple[str, ...]:
        """Names of what arrivals and waits order beyond ordinary accesses of memory."""
        return ()

    def __str__(self) -> str:
        return self.name


class BarrierAllocation(abc.ABC):
    """Describes barriers in shared memory, for ``scratch_types=`` and ``pl.run_scoped``.

    A kind is a frozen dataclass with the fields ``num_arrivals`` and ``num_barriers``.

    Raises:
      InvalidTypeError, InvalidValueError: ``num_arrivals`` or an extent is no positive integer.
    """

    num_arrivals: int
    num_barriers: int | Sequence[int]

    def __post_init__(self) -> None:
        checks.count(self.num_arrivals, "num_arrivals", minimum=1)
        shape = self.num_barriers
        sizes = shape if isinstance(shape, Sequence) else (shape,)
        object.__setattr__(self, "num_barriers", checks.positive_integers(sizes, "num_barriers"))

    @abc.abstractmethod
    def element_type(self) -> BarrierDType:
        """The element type of the references."""

    def get_array_aval(self) -> Any:
        """Always an error: a barrier is not data."""
        raise checks.value_error("a barrier is not an array", hint="use it in scratch_types=")

    def get_ref_aval(self) -> Any:
        """The type of the reference that the body gets."""
        array_type = _jax.ShapedArray(self.num_barriers, self.element_type())
        return _jax.AbstractRef(array_type, find_space(BARRIER_SPACE))


def is_barrier(aval: Any) -> bool:
    """Whether a reference type is one of barriers, of any kind."""
    return isinstance(getattr(aval, "dtype", None), BarrierDType)
