"""What a plugin can contribute, as plain records; those of rules are in ``rules.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from pallasite.barrier_kinds import BarrierKind, BarrierOrder, BarrierUse
from pallasite.errors import InvalidValueError
from pallasite.jaxpr_table import JaxprPrimitive
from pallasite.memory_events import MemoryEvents, ProxyFence
from pallasite.rules import InferenceRule as InferenceRule
from pallasite.rules import LayoutRule as LayoutRule
from pallasite.rules import LoweringRule as LoweringRule
from pallasite.rules import OperandPredicate as OperandPredicate
from pallasite.rules import ResourceRule as ResourceRule
from pallasite.rules import Rule as Rule
from pallasite.rules import RuleSet as RuleSet
from pallasite.semantics import Semantics as Semantics
from pallasite.targets import ANY_TARGET, Target, TargetPredicate

Stage = Literal["jaxpr", "mlir", "llvm", "ptx"]
"""The stages at which a pass can run, in the order in which a kernel goes through them."""

STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One transformation of a kernel; any can be switched off by its name.

    Attributes:
      name: unique name, as in ``PALLASITE_DISABLE_PASSES=name``.
      stage: ``"jaxpr"``, ``"mlir"``, ``"llvm"`` or ``"ptx"``.
      run: ``run(value, context)`` takes what the stage holds (a jaxpr, an ``ir.Module``, an
        llvmlite module, PTX text) and returns its replacement, or None if it changed it in place.
      before: names of passes of the same stage that must come later, if they are there.
      after: names of passes of the same stage that must come earlier, if they are there.
      target: the targets for which it runs.
      overrides: names of plugins whose pass of the same name this one replaces.
      description: one line for ``pallasite passes``.
    """

    name: str
    stage: Stage
    run: Callable[[Any, Any], Any]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    target: TargetPredicate = ANY_TARGET
    overrides: tuple[str, ...] = ()
    description: str = ""
    plugin: str = ""

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise InvalidValueError(
                f"pass {self.name!r} has an unknown stage",
                got=repr(self.stage),
                expected="one of " + ", ".join(STAGES),
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a kernel is run for a report; None leaves a thing to the executor and its options.

    Attributes:
      blocks: linear numbers of the blocks of the grid to run (x fastest); None for all.
      processes: how many processes share the work.
      progress: whether a progress bar is shown on standard error.
      sanitize: whether what the kernel does is checked, or names of checks.
      statistics: whether what the kernel does is counted.
    """

    blocks: tuple[int, ...] | None = None
    processes: int | None = None
    progress: bool | None = None
    sanitize: bool | tuple[str, ...] | None = None
    statistics: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PtxLaunch:
    """A kernel that is given as PTX, and one launch of it.

    Attributes:
      ptx: the text of a module.
      arguments: one for each parameter: a NumPy array (which the kernel may change) for a pointer,
        a NumPy scalar by value, None for a null pointer.
      grid, block, cluster: extents in CUDA's order (x, y, z); ``grid`` in blocks.
      shared_memory_bytes: dynamic shared memory of each block.
      name: of the kernel; may be left out if the module has only one.
      target: what the figures of a report are for; None for that of the module.
    """

    ptx: str
    arguments: tuple[Any, ...]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_memory_bytes: int = 0
    name: str | None = None
    target: Target | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport:
    """What one run of a kernel gave.

    Attributes:
      name: of the kernel.
      outputs: NumPy arrays.
      printed: what the kernel printed.
      findings: what is wrong with what it did, one text for each.
      sections: further text by title, for people.
      data: the same and more for programs, such as can be written as JSON.
    """

    name: str
    outputs: tuple[Any, ...] = ()
    printed: str = ""
    findings: tuple[str, ...] = ()
    sections: Mapping[str, str] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executor:
    """A way to run compiled kernels.

    Attributes:
      name: unique name, as in ``pallasite doctor``.
      platforms: JAX platforms on which it can serve (``"cuda"``, ``"cpu"``).
      run: ``run(compiled, *operands)`` returns the list of outputs; it is traced by JAX, so it
        must be made of JAX operations (an FFI call, a callback).
      available: whether it can work in this process; None means always.
      priority: the largest that is available for a platform is chosen.
      overrides: names of plugins whose executor of the same name this one replaces.
      description: one line for ``pallasite doctor``.
      inspect: ``inspect(compiled, inputs, options)`` runs a kernel on NumPy arrays with
        :class:`RunOptions` and returns a :class:`RunReport`; None if it has nothing to report.
      run_ptx: ``run_ptx(launch, options)`` runs a :class:`PtxLaunch` and returns a
        :class:`RunReport`; None if it runs compiled kernels only.
    """

    name: str
    platforms: tuple[str, ...]
    run: Callable[..., Any]
    available: Callable[[], bool] | None = None
    priority: int = 0
    overrides: tuple[str, ...] = ()
    description: str = ""
    plugin: str = ""
    inspect: Callable[[Any, Any, RunOptions], RunReport] | None = None
    run_ptx: Callable[[PtxLaunch, RunOptions], RunReport] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstructionRule:
    """What PTX instructions do, for executors that interpret PTX.

    Attributes:
      name: dotted beginning of the instructions' names, such as ``"cp.async.bulk"``; the rule with
        the longest one that fits is taken.
      bind: ``bind(instruction, binder)`` returns the function that executes one instruction.
      needs_warp: whether the lanes of a warp execute it together.
      overrides: names of plugins whose rule of the same name this one replaces.
    """

    name: str
    bind: Callable[..., Any]
    needs_warp: bool = False
    overrides: tuple[str, ...] = ()
    plugin: str = ""


@dataclasses.dataclass(frozen=True)
class Contribution:
    """All that one plugin contributes, under the plugin's name."""

    plugin: str
    targets: tuple[Target, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lowering_rules: tuple[LoweringRule, ...] = ()
    resource_rules: tuple[ResourceRule, ...] = ()
    layout_rules: tuple[LayoutRule, ...] = ()
    inference_rules: tuple[InferenceRule, ...] = ()
    jaxpr_primitives: tuple[JaxprPrimitive, ...] = ()
    barrier_kinds: tuple[BarrierKind, ...] = ()
    barrier_orders: tuple[BarrierOrder, ...] = ()
    barrier_uses: tuple[BarrierUse, ...] = ()
    memory_events: tuple[MemoryEvents, ...] = ()
    proxy_fences: tuple[ProxyFence, ...] = ()
    passes: tuple[Pass, ...] = ()
    executors: tuple[Executor, ...] = ()
    instructions: tuple[InstructionRule, ...] = ()
