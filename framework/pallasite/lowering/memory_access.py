"""Memory with addresses, as the library that implements it offers it to the core and to rules.

How an array lies in memory and in registers is data of the core; the code that views, reads and
writes it is contributed by the hook ``pallasite_implementations`` as ``"memory_access"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

from pallasite import plugins

if TYPE_CHECKING:
    from pallasite.language.memory import MemorySpace
    from pallasite.launch import Buffer
    from pallasite.layouts.memory import MemoryLayout
    from pallasite.layouts.registers import Layout
    from pallasite.lowering.arrays import RegisterArray
    from pallasite.lowering.context import RuleContext, Value
    from pallasite.lowering.launch import LaunchContext


class MemoryAccess(Protocol):
    """What an implementation of memory with addresses can do."""

    relayout: Callable[..., RegisterArray]
    resolve: Callable[..., Any]
    resolve_barrier: Callable[..., Any]
    """As the functions of this module."""

    def kernel_argument(
        self, launch: LaunchContext, buffer: Buffer, *, may_be_read: bool, constant: bool
    ) -> Value:
        """The reference to a whole array in global memory that a kernel gets as an argument."""

    def whole_window(self, shape: tuple[int, ...]) -> list[Any]:
        """Where the window of a whole array in global memory begins, for each dimension."""

    def without_pointer(
        self, layout: MemoryLayout, dtype: Any, space: MemorySpace, alignment: int
    ) -> Any:
        """A reference without a pointer, for the functions that plan accesses."""

    def suitable_layouts(self, reference: Any) -> Sequence[Layout]:
        """The register layouts that suit what a reference views, the default first."""

    def view(self, ctx: RuleContext, reference: Any, transform: Any) -> Any:
        """One view of a reference, by the table of views."""

    def read(
        self, ctx: RuleContext, reference: Value, transforms: Sequence[Any] = ()
    ) -> RegisterArray:
        """Loads what a reference views, in the hinted layout if there is one."""

    def swap(
        self,
        ctx: RuleContext,
        reference: Value,
        transforms: Sequence[Any],
        value: RegisterArray,
    ) -> RegisterArray:
        """Stores a value; returns what was there, if it is used."""

    def update(
        self,
        ctx: RuleContext,
        reference: Value,
        transforms: Sequence[Any],
        value: RegisterArray,
        combine: Callable[[RegisterArray, RegisterArray], RegisterArray],
    ) -> None:
        """Stores what ``combine`` makes of the elements that are there and of a value."""

    def describe(self, ctx: RuleContext, reference: Value, transforms: Sequence[Any]) -> str:
        """How the viewed elements lie, in words."""

    def shared_array(self, ctx: RuleContext, variable: Any) -> AbstractContextManager[Any]:
        """A scope's array in shared memory, in the layout that inference has chosen for it."""


def memory_access() -> MemoryAccess:
    """The implementation that a plugin contributes.

    Raises:
      MissingNameError: no plugin has one.
    """
    return cast(MemoryAccess, plugins.implementation("memory_access"))


def relayout(ctx: RuleContext, array: RegisterArray, target: Layout) -> RegisterArray:
    """The array in another layout of the same shape.

    If every thread already holds its elements, this only renames registers. Otherwise the array
    goes through the kernel's scratch shared memory.

    Raises:
      InvalidValueError: a distributed array cannot become a splat, or does not fit the scratch.
    """
    return ctx.kernel.accesses.relayout(ctx, array, target)


def resolve(
    ctx: RuleContext,
    reference: Value,
    transforms: Any = (),
    *,
    pointer: bool = True,
    other_blocks: bool = False,
    copied_to: bool = False,
) -> Any:
    """The memory that a reference and its transforms stand for.

    Args:
      ctx: the rule's context.
      reference: a reference value, or a TransformedRef whose ``ref`` is one.
      transforms: its transforms, outermost view last.
      pointer: whether plain accesses will happen; a copy by TMA needs no pointer of a global array.
      other_blocks: whether the rule accesses the shared memory of other blocks of the cluster too.
      copied_to: whether the rule is of a copy to what the reference stands for.

    Raises:
      InvalidTypeError: not a reference to memory.
      InvalidValueError, UnsupportedError: a view that the memory layout cannot express.
    """
    return ctx.kernel.accesses.resolve(
        ctx,
        reference,
        transforms,
        pointer=pointer,
        other_blocks=other_blocks,
        copied_to=copied_to,
    )


def resolve_barrier(ctx: RuleContext, reference: Value, transforms: Any = ()) -> Any:
    """The barrier that a reference and its transforms select.

    Indices may be chained; a slice must cover its dimension.

    Raises:
      InvalidTypeError: not a barrier.
      InvalidValueError: an array of barriers from which none is selected.
    """
    return ctx.kernel.accesses.resolve_barrier(ctx, reference, transforms)
