"""Which layouts lowering chose for arrays in registers and in shared memory, for those who ask.

Inside of ``with recording() as kernels:`` every kernel that is compiled is compiled anew, whatever
the caches hold, and leaves a :class:`KernelLayouts`. Outside, nothing is recorded.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pallasite import config
from pallasite.errors import SourceLocation
from pallasite.lowering.layout_report import LayoutReport

if TYPE_CHECKING:
    from pallasite.layouts.memory import MemoryLayout
    from pallasite.layouts.registers import RegisterLayout
    from pallasite.lowering.context import RuleContext

_LINE_BYTES = 128


@dataclasses.dataclass(frozen=True)
class Use:
    """One place in a kernel that makes an array, or that accesses one in shared memory.

    Attributes:
      location: the user's line.
      primitive: name of the primitive.
      dtype: name of the element type.
      name: of the reference, as the kernel's function calls it; empty for arrays in registers.
    """

    location: SourceLocation | None
    primitive: str
    dtype: str
    name: str = ""


@dataclasses.dataclass(frozen=True)
class SharedView:
    """A view of shared memory.

    Attributes:
      layout: where its elements lie, with tiling and swizzle.
      offset: how many elements after an address that is aligned to the swizzle and to 128 bytes it
        begins, as far as that is known during compilation.
      moves: whether the kernel adds to that what need not be a multiple of these.
    """

    layout: MemoryLayout
    offset: int = 0
    moves: bool = False


@dataclasses.dataclass
class KernelLayouts:
    """The layouts of one kernel, each with its uses in the order of the program.

    Attributes:
      name: of the kernel.
      target: name of the target.
      registers: layouts of arrays; without those of a single element or of one repeated value.
      shared: views of shared memory of more than one element.
      report: what layout inference says of its choices; None under lane semantics.
    """

    name: str
    target: str
    registers: dict[RegisterLayout, dict[Use, None]] = dataclasses.field(default_factory=dict)
    shared: dict[SharedView, dict[Use, None]] = dataclasses.field(default_factory=dict)
    report: LayoutReport | None = None


class Recorder:
    """Fills a :class:`KernelLayouts` while its kernel is lowered."""

    def __init__(self, layouts: KernelLayouts):
        self.layouts = layouts
        self._names: dict[int, tuple[Any, str]] = {}

    def enter(self, jaxpr: Any, values: Sequence[Any]) -> None:
        """Learns how the user calls the references that a jaxpr gets."""
        from pallasite.layouts.memory import MemoryLayout

        names = jaxpr.debug_info.safe_arg_names(len(jaxpr.invars))
        for value, name in zip(reversed(values), reversed(names), strict=False):
            name = re.sub(r"^named_scratch\['(\w+)'\]$", r"\1", name)
            if name.isidentifier() and isinstance(getattr(value, "layout", None), MemoryLayout):
                # The value is kept, so that its id stays its own.
                self._names.setdefault(id(value), (value, name))

    def results(self, ctx: RuleContext, results: Sequence[Any]) -> None:
        """Takes note of the layouts of the arrays that an equation makes."""
        from pallasite.layouts.registers import RegisterLayout

        if ctx.kernel.on_trial:
            return
        for value, used in zip(results, ctx.used, strict=True):
            if not used:
                continue
            layout = getattr(value, "layout", None)
            if isinstance(layout, RegisterLayout) and layout.size > 1:
                use = Use(ctx.location, ctx.primitive.name, str(value.dtype))
                self.layouts.registers.setdefault(layout, {})[use] = None

    def view(self, ctx: RuleContext, root: Any, memory: Any) -> None:
        """Takes note of a view of shared memory that an equation accesses.

        Args:
          ctx: the equation.
          root: the reference that is viewed.
          memory: the view.
        """
        if ctx.kernel.on_trial or memory.layout.size < 2:
            return
        period = math.lcm(_LINE_BYTES, memory.layout.atom_bytes) * 8 // memory.element_bits
        moves = any(part.divisor % period for part in memory.dynamic)
        view = SharedView(memory.layout, memory.offset % period, moves)
        _, name = self._names.get(id(root), (None, ""))
        use = Use(ctx.location, ctx.primitive.name, str(memory.dtype), name)
        self.layouts.shared.setdefault(view, {})[use] = None


class Recording:
    """What one :func:`recording` has found so far."""

    def __init__(self) -> None:
        self.kernels: list[KernelLayouts] = []

    def recorder(self, name: str, target: str) -> Recorder:
        """The recorder of the next kernel."""
        self.kernels.append(KernelLayouts(name, target))
        return Recorder(self.kernels[-1])


_active: contextvars.ContextVar[Recording | None] = contextvars.ContextVar(
    "pallasite_recording", default=None
)


@contextlib.contextmanager
def recording() -> Iterator[list[KernelLayouts]]:
    """Records the layouts of the kernels that are compiled inside, in the order of compilation."""
    made = Recording()
    with config.bound(_active, made):
        yield made.kernels


def active() -> Recording | None:
    """The innermost :func:`recording` around, if there is one."""
    return _active.get()
