"""What a plugin can contribute, as plain records; those of rules are in ``rules.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from pallasite.barrier_kinds import BarrierKind, BarrierOrder, BarrierUse
from pallasite.errors import InvalidValueError
from pallasite.executors import Executor as Executor
from pallasite.executors import LaunchRequest as LaunchRequest
from pallasite.executors import PtxLaunch as PtxLaunch
from pallasite.executors import RunOptions as RunOptions
from pallasite.executors import RunReport as RunReport
from pallasite.jaxpr_table import JaxprPrimitive
from pallasite.lifecycle import KernelLifecycle
from pallasite.memory_events import MemoryEvents, ProxyFence
from pallasite.rules import InferenceRule as InferenceRule
from pallasite.rules import LayoutRule as LayoutRule
from pallasite.rules import LoweringRule as LoweringRule
from pallasite.rules import OperandPredicate as OperandPredicate
from pallasite.rules import ResourceRule as ResourceRule
from pallasite.rules import Rule as Rule
from pallasite.rules import RuleSet as RuleSet
from pallasite.semantics import Semantics as Semantics
from pallasite.stores import StoreNamespace as StoreNamespace
from pallasite.targets import ANY_TARGET, Target, TargetPredicate
from pallasite.view_rules import ViewRule as ViewRule

if TYPE_CHECKING:
    from pallasite.language.memory_space import MemorySpace
    from pallasite.layouts.registers import RegisterLayout
    from pallasite.layouts.tiled_layout import TiledSpecification

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
        llvmlite module, PTX text) and returns its replacement, None if it changed it in place, or
        False if it changed nothing.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replacement:
    """What a hook that returns names has for a name that another plugin has, too.

    Attributes:
      path: ``"module:attribute"``.
      overrides: names of plugins whose object of the name this one replaces.
    """

    path: str
    overrides: tuple[str, ...]


type Names = Mapping[str, str | Replacement]
"""Names, each with its ``"module:attribute"``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedLayout:
    """A register layout that programs and messages call by a name.

    Attributes:
      name: as in ``plgpu.Layout.NAME``.
      specification: the placement, a :class:`~pallasite.layouts.tiled_layout.TiledSpecification`;
        or ``specification(bits, *args, **kwargs)``, which makes one for elements of ``bits`` bits
        and the arguments that a program gives with the name. It raises ``InvalidValueError``.
      dtype_argument: the position of an argument that is a dtype (``dtype=`` by name), whose bits
        are passed instead of those of the array's elements.
      arguments: for a placement with arguments, ``arguments(shape)`` gives those that an array of
        a shape may have, so that messages can call it by its name; None if they cannot be told.
      public: whether ``plgpu.Layout`` has the name.
      overrides: names of plugins whose layout of the same name this one replaces.
    """

    name: str
    specification: TiledSpecification | Callable[..., TiledSpecification]
    dtype_argument: int | None = None
    arguments: Callable[[tuple[int, ...]], tuple[Any, ...]] | None = None
    public: bool = True
    overrides: tuple[str, ...] = ()
    plugin: str = ""


LayoutUse = Literal["broadcast", "transpose"]
"""What a proposed layout is good for; see :class:`LayoutProposal`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutProposal:
    """Register layouts that inference tries where an operation leaves several open.

    Attributes:
      name: unique name, for listings.
      propose: ``propose(shape)`` returns the layouts for arrays of a shape, best first; none for a
        shape that does not fit.
      uses: ``"broadcast"`` for results of broadcasts and operands of reductions and slices;
        ``"transpose"`` for arrays that are transposed between memory and registers, where lanes
        of a warp have to access both rows and columns of a tile without bank conflicts.
      target: the targets on which it is tried.
      order: proposals with smaller numbers are tried first, those of one number in the order of
        plugins.
      overrides: names of plugins whose proposal of the same name this one replaces.
    """

    name: str
    propose: Callable[[tuple[int, ...]], Iterable[RegisterLayout]]
    uses: tuple[LayoutUse, ...] = ("broadcast",)
    target: TargetPredicate = ANY_TARGET
    order: int = 0
    overrides: tuple[str, ...] = ()
    plugin: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation:
    """How an operation of MLIR is written as LLVM IR.

    Attributes:
      operation: the name of the operation, such as ``"memref.load"``.
      translate: ``translate(emitter, operation)`` appends instructions to an
        :class:`~pallasite.codegen.translation.emitter.Emitter` and binds the results.
      overrides: names of plugins whose translation of the same operation this one replaces.
    """

    operation: str
    translate: Callable[[Any, Any], None]
    overrides: tuple[str, ...] = ()
    plugin: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One implementation of an operation of ``pallasite.ops``.

    Attributes:
      name: of the operation, as in ``pallasite.ops.matmul``.
      implementation: ``"module:attribute"`` of the function, imported when it is first called. Its
        arguments are those of the portable implementation, if there is one, and what it adds.
      target: the targets that it is for; among those that match, the most specific is tried first.
      refuses: ``"module:attribute"`` of a function that takes the same arguments and returns None,
        or why the implementation cannot serve them; then the next one is tried.
      overrides: names of plugins whose equally specific implementation this one replaces.
    """

    name: str
    implementation: str
    target: TargetPredicate = ANY_TARGET
    refuses: str | None = None
    overrides: tuple[str, ...] = ()
    plugin: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One line of ``pallasite doctor``.

    Attributes:
      name: of what was looked at.
      text: what was found.
      remedy: what to do, in one line; empty if nothing is wrong.
    """

    name: str
    text: str
    remedy: str = ""
    plugin: str = ""


@dataclasses.dataclass(frozen=True)
class Contribution:
    """All that one plugin contributes, under the plugin's name."""

    plugin: str
    targets: tuple[Target, ...] = ()
    names: Names = dataclasses.field(default_factory=dict)
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
    memory_spaces: tuple[MemorySpace, ...] = ()
    views: tuple[ViewRule, ...] = ()
    passes: tuple[Pass, ...] = ()
    lifecycles: tuple[KernelLifecycle, ...] = ()
    executors: tuple[Executor, ...] = ()
    instructions: tuple[InstructionRule, ...] = ()
    stores: tuple[StoreNamespace, ...] = ()
    diagnoses: tuple[Diagnosis, ...] = ()
    options: tuple[type, ...] = ()
    exports: Names = dataclasses.field(default_factory=dict)
    front_ends: Names = dataclasses.field(default_factory=dict)
    implementations: Names = dataclasses.field(default_factory=dict)
    layouts: tuple[NamedLayout, ...] = ()
    layout_proposals: tuple[LayoutProposal, ...] = ()
    operations: tuple[Operation, ...] = ()
    translations: tuple[Translation, ...] = ()
