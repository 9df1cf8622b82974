"""Memory spaces: where data lives. Plugins add theirs as subclasses of :class:`MemorySpace`.

A space is one object, known by its name: ``plgpu.SMEM``, ``plgpu.MemorySpace.SMEM``. References
carry it in their type (``aval.memory_space``), and so do the values that stand for them while a
kernel is lowered (an attribute ``space``) or while layouts are inferred. Whatever the compiler
wants to know of a reference, it asks its space.

The methods get contexts, with which a space does its work:

* :class:`~pallasite.lowering.resources.EstimatorContext`: ``ctx.reserve(resource, amount, what)``;
* :class:`~pallasite.lowering.context.RuleContext`: ``ctx.shared_array(variable)``, and the kernel's
  own ``ctx.kernel`` and ``ctx.launch``;
* :class:`~pallasite.lowering.inference.context.InferenceContext`:
  ``ctx.shared_allocation(variable, name)``, ``ctx.load``, ``ctx.store``.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from pallasite import _jax
from pallasite.errors import MissingNameError, UnsupportedError
from pallasite.language import checks

if TYPE_CHECKING:
    from pallasite.layouts.registers import Layout
    from pallasite.lowering.arrays import RegisterArray
    from pallasite.lowering.context import RuleContext
    from pallasite.lowering.inference.context import InferenceContext
    from pallasite.lowering.inference.values import AbstractValue
    from pallasite.lowering.inference.views import View
    from pallasite.lowering.resources import EstimatorContext, Resources


class _ByName(abc.ABCMeta):
    """Spaces of plugins are found as ``MemorySpace.NAME``, and all spaces by iteration."""

    # Faster than that of abstract classes, which would have virtual subclasses.
    __instancecheck__ = type.__instancecheck__

    def __getattr__(cls, name: str) -> Any:
        if cls.__name__ != "MemorySpace" or name.startswith("_"):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        return find_space(name)

    def __getitem__(cls, name: str) -> MemorySpace:
        return find_space(name)

    def __iter__(cls) -> Iterator[MemorySpace]:
        return iter(memory_spaces().values())

    @property
    def __members__(cls) -> Mapping[str, MemorySpace]:
        """All spaces by name."""
        return memory_spaces()


class MemorySpace(metaclass=_ByName):
    """Where data lives. Calling one describes an allocation: ``SMEM((64, 64), jnp.float16)``.

    A plugin's space sets ``name``, and overrides what differs from the defaults: usually
    ``resources`` and ``allocate``, and for memory that is accessed in its own way ``read``,
    ``write`` and ``view``.

    Attributes:
      name: unique among all spaces; ``plgpu.MemorySpace.<name>`` finds it.
      is_shared: whether it is (a part of) the block's shared memory, so that whatever takes shared
        memory takes a reference to it.
      is_global: the same for global memory.
      is_value: whether a reference stands for a value that has no address, such as an accumulator.
        Where one is allocated, the body becomes a function of its value, which loops and branches
        carry in registers: see :meth:`enter_scope`.
      per_block: whether an allocation belongs to all threads of a block, who therefore have to
        allocate it together (``collective_axes=``).
      reuses_memory: whether an allocation may lie where one of an earlier scope did, so that
        threads have to synchronize before the scope begins.
      copied_to: whether asynchronous copies may write it, which are ordered after ordinary
        accesses of earlier scopes by a fence.
    """

    GMEM: ClassVar[MemorySpace]
    SMEM: ClassVar[MemorySpace]
    REGS: ClassVar[MemorySpace]

    is_shared: ClassVar[bool] = False
    is_global: ClassVar[bool] = False
    is_value: ClassVar[bool] = False
    per_block: ClassVar[bool] = True
    reuses_memory: ClassVar[bool] = True
    copied_to: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name, usually a class attribute."""

    @property
    def value(self) -> str:
        """The name in small letters, as messages have it."""
        return self.name.lower()

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return f"<MemorySpace.{self.name}: {self.value!r}>"

    def __reduce__(self) -> Any:
        if dataclasses.is_dataclass(self):
            return object.__reduce__(self)
        return find_space, (self.name,)

    # Describing allocations -----------------------------------------------------------------------

    def __call__(self, shape: Sequence[int], dtype: Any, **options: Any) -> Any:
        """Describes an allocation, for ``scratch_types=`` and ``pl.run_scoped``.

        Args:
          shape: logical shape.
          dtype: element type.
          **options: the keyword arguments of the space's :meth:`describe`.

        Raises:
          InvalidTypeError: an argument that this space does not take.
          InvalidValueError: an extent of 0 in shared memory.
        """
        accepted = inspect.signature(self.describe).parameters
        keywords = [name for name in accepted if name not in ("shape", "dtype")]
        for option in options:
            if option not in keywords:
                raise checks.type_error(
                    f"{self.name}(shape, dtype) takes no argument {option!r}",
                    got=f"{option}={options[option]!r}",
                    expected=", ".join(f"{one}=" for one in keywords) or "no further arguments",
                )
        return self.describe(shape, dtype, **options)

    def like(self, shape_dtype_like: Any) -> Any:
        """An allocation with the shape and dtype of another object."""
        return self(shape_dtype_like.shape, shape_dtype_like.dtype)

    def describe(self, shape: Sequence[int], dtype: Any, *, transforms: Sequence[Any] = ()) -> Any:
        """What a call returns: an object with ``get_ref_aval()``, the type of the reference.

        A plugin that overrides it chooses the keyword arguments.

        Args:
          shape: logical shape.
          dtype: element type.
          transforms: how the data lies in memory; applied to the logical shape in order.
        """
        from pallasite.language.memory import GPUMemoryRef, array_type

        allocation = GPUMemoryRef(array_type(shape, dtype), self, tuple(transforms))
        allocation.get_ref_aval()  # Transforms that do not fit are an error here, at this line.
        return allocation

    def union_placement(self, members: Sequence[Any]) -> tuple[list[int], int]:
        """Where the members of one group of a ``RefUnion`` begin, and where the group ends.

        Args:
          members: the types of the references, physical ones.

        Returns:
          Offsets and the end, in a unit of the space's choice. The reference of the whole union is
          one to ``int8[end]``.

        Raises:
          InvalidValueError: unions of this space do not exist.
        """
        raise checks.value_error(
            "the members of a RefUnion must all be in shared memory",
            got=str(self),
            expected="allocations described by SMEM(shape, dtype)",
        )

    def member_layout(self, member: Any) -> Any:
        """What the space has to know of a union's member beyond its dtype and shape; hashable.

        It is the ``layout`` of the :class:`~pallasite.language.transforms.ExtractAliasedRef` that
        selects the member.
        """
        del member
        return None

    def member_type(self, array_type: Any, layout: Any) -> Any:
        """The type of a reference to a union's member."""
        del layout
        return _jax.AbstractRef(array_type, self)

    def check_view(self, reference: Any, transform: Any) -> None:
        """Raises, where the view is made, if no reference of this space has such a view.

        Args:
          reference: the TransformedRef that is viewed.
          transform: the view.
        """

    # Allocating -----------------------------------------------------------------------------------

    def resources(self, ctx: EstimatorContext, variable: Any, axes: tuple[Any, ...]) -> Resources:
        """What a scoped allocation reserves, of whichever resources.

        Args:
          ctx: what is known of the kernel and its target.
          variable: the scope's variable; ``variable.aval`` is the type of the reference.
          axes: the threads that allocate it together, empty if each has its own.
        """
        raise self.no_allocation(variable.aval)

    def allocate(
        self, ctx: RuleContext, variable: Any, axes: tuple[Any, ...]
    ) -> AbstractContextManager[Any]:
        """A context that yields the value of the reference and releases the memory at the end.

        That value is a ``MemoryReference`` of memory with addresses, or anything with an attribute
        ``space`` that the methods of the space understand.
        """
        raise self.no_allocation(variable.aval)

    def no_allocation(self, aval: Any) -> UnsupportedError:
        """The error for an allocation that this space does not have."""
        return UnsupportedError(
            f"an allocation in {self}",
            got=f"{aval.dtype}{list(aval.shape)}",
            expected="plgpu.SMEM, plgpu.Barrier, plgpu.ClusterBarrier or a semaphore",
            hint="a value is in registers anyway; global memory to work in is a further output",
        )

    # References that are values -------------------------------------------------------------------

    def enter_scope(
        self, ctx: RuleContext, aval: Any, axes: tuple[Any, ...], initial: Any = None
    ) -> Any:
        """The value of a reference at the beginning of its scope, if ``is_value``.

        Until the scope ends, the reference is replaced by its value, which primitives that write it
        return.

        Args:
          ctx: the context of the equation.
          aval: the type of the reference.
          axes: as for :meth:`resources`.
          initial: the value to begin with, for ``pl.run_state``: an array, or the value of a
            reference of a scope further out.
        """
        raise self.no_allocation(aval)

    def leave_scope(self, ctx: RuleContext, aval: Any, value: Any, initial: Any) -> Any:
        """What ``pl.run_state`` returns for the last value of a reference: an array, or where
        ``initial`` is the value of a reference of a scope further out, such a value."""
        del ctx, aval, initial
        return value

    def value_layout(self, aval: Any) -> Layout | None:
        """The register layout of the value within its scope, which is never converted."""
        del aval
        return None

    def scope_layout(self, aval: Any) -> Layout | None:
        """The register layout of the arrays that a ``pl.run_state`` begins and ends with."""
        del aval
        return None

    # Access ---------------------------------------------------------------------------------------

    def view(self, ctx: RuleContext, reference: Any, transform: Any) -> Any:
        """A view of a reference; by default what the table of views says."""
        return ctx.view(reference, transform)

    def read(self, ctx: RuleContext, reference: Any, transforms: Sequence[Any]) -> Any:
        """``ref[...]``: the array that a reference views, in ``ctx.layout_hint`` if it can be."""
        return ctx.read(reference, transforms)

    def write(
        self, ctx: RuleContext, reference: Any, transforms: Sequence[Any], value: RegisterArray
    ) -> Any:
        """``ref[...] = value``; returns what was there if ``ctx.used`` says that it is wanted."""
        return ctx.write(reference, transforms, value)

    def update(
        self,
        ctx: RuleContext,
        reference: Any,
        transforms: Sequence[Any],
        value: RegisterArray,
        combine: Callable[[Any, Any], Any],
    ) -> None:
        """``ref[...] += value``, where ``combine(old, value)`` gives the sum."""
        old = self.read(ctx, reference, transforms)
        self.write(ctx, reference, transforms, combine(old, value))

    def describe_layout(self, ctx: RuleContext, reference: Any, transforms: Sequence[Any]) -> str:
        """How the viewed elements lie, for ``plgpu.print_layout``."""
        return ctx.describe_memory(reference, transforms)

    # Layout inference -----------------------------------------------------------------------------

    def infer_allocation(self, ctx: InferenceContext, variable: Any, name: str) -> AbstractValue:
        """What layout inference has in place of an allocation; ``name`` is what the kernel calls
        it. By default something that has no layout."""
        del name
        return ctx.opaque(variable.aval)

    def infer_view(self, view: View, transform: Any) -> None:
        """Changes a view, whose memory has a certain layout, as ``transform`` does."""
        view.by_table(transform)

    def infer_read(
        self,
        ctx: InferenceContext,
        reference: AbstractValue,
        transforms: Sequence[Any],
        result: AbstractValue,
    ) -> None:
        """What ``ref[...]`` asks of the layouts of its result and of the memory."""
        ctx.load(reference, result, transforms)

    def infer_write(
        self,
        ctx: InferenceContext,
        reference: AbstractValue,
        transforms: Sequence[Any],
        value: AbstractValue,
    ) -> None:
        """What ``ref[...] = value`` and updates ask of the layouts of ``value`` and the memory."""
        ctx.store(reference, value, transforms)


def memory_spaces() -> Mapping[str, MemorySpace]:
    """All memory spaces by name: the core's, then those of plugins."""
    from pallasite import plugins

    return plugins.manager().memory_spaces()


def find_space(name: str) -> MemorySpace:
    """The memory space of a name.

    Raises:
      MissingNameError: neither the core nor a plugin has it.
    """
    from pallasite import plugins

    spaces = memory_spaces()
    found = spaces.get(name)
    if found is None:
        raise MissingNameError(
            f"there is no memory space {name!r}",
            expected=", ".join(spaces),
            hint=plugins.manager().remedy("names", name),
        )
    return found
