"""What views of references mean, one record for each kind of transform."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallasite.lowering.context import RuleContext
    from pallasite.lowering.inference.values import MemoryValue
    from pallasite.lowering.inference.views import View


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewRule:
    """What a transform of references means for lowering, for layout inference and for checks.

    It holds for memory with addresses; a memory space of its own kind says itself what views of it
    are, by ``MemorySpace.view`` and ``MemorySpace.infer_view``.

    Attributes:
      transform: the class of the transform; its subclasses are meant, too, unless they have a rule.
      lower: ``lower(ctx, reference, transform)`` returns the ``MemoryReference`` of the view. Its
        indices, if it has any, are values of the kernel.
      infer: ``infer(view, transform)`` changes a ``View`` of memory whose layout is given, and
        raises InvalidValueError or UnsupportedError if that layout has no such view; None if
        layout inference knows nothing of the transform.
      region: ``region(builder, transform)`` tells checks what of the memory the view covers, by the
        methods of the standard library's ``RegionBuilder``; None
        if that is not known more exactly than for what is viewed.
      physical: whether a program that views an allocation like this has said itself how it lies, so
        that inference chooses no layout for it.
      member: ``member(root, transform)`` returns the ``MemoryValue`` of an allocation whose layout
        is chosen on its own, if the transform selects one; None for all others.
      overrides: names of plugins whose rule for the transform this one replaces.
      plugin: who contributed it; the registry fills it in.
    """

    transform: type
    lower: Callable[[RuleContext, Any, Any], Any]
    infer: Callable[[View, Any], None] | None = None
    region: Callable[[Any, Any], None] | None = None
    physical: bool = False
    member: Callable[[MemoryValue, Any], MemoryValue] | None = None
    overrides: tuple[str, ...] = ()
    plugin: str = ""


def nothing_changes(view: View, transform: Any) -> None:
    """An ``infer`` for transforms after which the elements lie as before."""
    del view, transform
