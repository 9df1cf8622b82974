"""What a plugin can contribute, as plain records, and :class:`RuleSet`, which collects rules."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from pallasite.errors import InvalidValueError
from pallasite.jaxpr_table import JaxprPrimitive
from pallasite.targets import ANY_TARGET, Target, TargetPredicate

if TYPE_CHECKING:
    from jax.extend.core import Primitive

Stage = Literal["jaxpr", "mlir", "llvm", "ptx"]
"""The stages at which a pass can run, in the order in which a kernel goes through them."""

STAGES: tuple[Stage, ...] = get_args(Stage)


class Semantics(enum.Enum):
    """What one user thread is.

    LANE: a warpgroup of 128 lanes whose arrays have explicit register layouts.
    WARP: one warp, inside a warp-mapped region.
    WARPGROUP: a warpgroup whose layouts are inferred.
    """

    LANE = "lane"
    WARP = "warp"
    WARPGROUP = "warpgroup"

    # Members are singletons, and rules are looked up for each equation: hash by identity.
    __hash__ = object.__hash__


@dataclasses.dataclass(frozen=True)
class LoweringRule:
    """How to emit one primitive: ``function(ctx, *operands, **params)`` returns its results.

    Attributes:
      primitive: the JAX primitive.
      semantics: what one user thread is where the rule applies.
      function: the rule.
      target: the targets that it is for; the most specific rule wins.
      overrides: names of plugins whose equally specific rules this one replaces.
      plugin: who contributed it; the registry fills it in.
    """

    primitive: Primitive
    semantics: Semantics
    function: Callable[..., Any]
    target: TargetPredicate = ANY_TARGET
    overrides: tuple[str, ...] = ()
    plugin: str = ""


@dataclasses.dataclass(frozen=True)
class ResourceRule:
    """What one primitive needs on chip: ``function(ctx, *avals, **params) -> Resources``."""

    primitive: Primitive
    function: Callable[..., Any]
    overrides: tuple[str, ...] = ()
    plugin: str = ""


@dataclasses.dataclass(frozen=True)
class LayoutRule:
    """How layouts of one primitive's operands and results constrain one another."""

    primitive: Primitive
    function: Callable[..., Any]
    overrides: tuple[str, ...] = ()
    plugin: str = ""


@dataclasses.dataclass(frozen=True)
class InferenceRule:
    """What layout inference has to know of one primitive, where a program leaves layouts open."""

    primitive: Primitive
    function: Callable[..., Any]
    overrides: tuple[str, ...] = ()
    plugin: str = ""


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
    passes: tuple[Pass, ...] = ()
    executors: tuple[Executor, ...] = ()
    instructions: tuple[InstructionRule, ...] = ()


class RuleSet:
    """Collects a module's rules by decorators, which stack and return the function unchanged.

    The lists ``lowering_rules``, ``resource_rules``, ``layout_rules`` and ``inference_rules`` are
    what the plugin's hook implementations return.
    """

    def __init__(self) -> None:
        self.lowering_rules: list[LoweringRule] = []
        self.resource_rules: list[ResourceRule] = []
        self.layout_rules: list[LayoutRule] = []
        self.inference_rules: list[InferenceRule] = []

    def lowering[Function: Callable[..., Any]](
        self,
        primitive: Primitive,
        *semantics: Semantics,
        requires: Iterable[str] = (),
        targets: Iterable[str] = (),
        overrides: Iterable[str] = (),
    ) -> Callable[[Function], Function]:
        """Registers ``function(ctx, *operands, **params)`` as a lowering rule of ``primitive``.

        Args:
          primitive: the JAX primitive.
          *semantics: where the rule applies; at least one.
          requires: features that a target must have.
          targets: names of the only targets that it is for; empty means any.
          overrides: names of plugins whose equally specific rules it replaces.
        """
        for one in semantics:
            if not isinstance(one, Semantics):
                raise InvalidValueError(
                    f"the rule of {primitive} has a wrong semantics",
                    got=repr(one),
                    expected="members of Semantics: LANE, WARP, WARPGROUP",
                )
        if not semantics:
            raise InvalidValueError(
                f"the rule of {primitive} does not say for which semantics it is",
                expected="one or more of Semantics.LANE, Semantics.WARP, Semantics.WARPGROUP",
            )
        predicate = TargetPredicate(_names("requires", requires), _names("targets", targets))
        replaced = tuple(sorted(_names("overrides", overrides)))

        def register(function: Function) -> Function:
            self.lowering_rules += [
                LoweringRule(primitive, one, function, predicate, replaced) for one in semantics
            ]
            return function

        return register

    def resources[Function: Callable[..., Any]](
        self, primitive: Primitive, *, overrides: Iterable[str] = ()
    ) -> Callable[[Function], Function]:
        """Registers ``function(ctx, *avals, **params)`` as the estimator rule of ``primitive``."""
        replaced = tuple(sorted(_names("overrides", overrides)))

        def register(function: Function) -> Function:
            self.resource_rules.append(ResourceRule(primitive, function, replaced))
            return function

        return register

    def layout[Function: Callable[..., Any]](
        self, primitive: Primitive, *, overrides: Iterable[str] = ()
    ) -> Callable[[Function], Function]:
        """Registers ``function`` as the rule that finds hints for layouts in lane semantics."""
        replaced = tuple(sorted(_names("overrides", overrides)))

        def register(function: Function) -> Function:
            self.layout_rules.append(LayoutRule(primitive, function, replaced))
            return function

        return register

    def inference[Function: Callable[..., Any]](
        self, primitive: Primitive, *, overrides: Iterable[str] = ()
    ) -> Callable[[Function], Function]:
        """Registers ``function(ctx, *operands, **params)`` as the rule of layout inference.

        It gets an ``InferenceContext`` and an abstract value for each operand, tells the context
        what the primitive asks of layouts, and returns abstract values of the results, just as a
        lowering rule returns values.
        """
        replaced = tuple(sorted(_names("overrides", overrides)))

        def register(function: Function) -> Function:
            self.inference_rules.append(InferenceRule(primitive, function, replaced))
            return function

        return register

    def extend(self, *others: RuleSet) -> None:
        """Adds all the rules of ``others``, for a plugin whose rules are in several modules."""
        for other in others:
            self.lowering_rules += other.lowering_rules
            self.resource_rules += other.resource_rules
            self.layout_rules += other.layout_rules
            self.inference_rules += other.inference_rules


def _names(what: str, values: Iterable[str]) -> frozenset[str]:
    """A set of names; a plain string is a common slip and would become its letters."""
    if isinstance(values, str):
        raise InvalidValueError(
            f"{what} takes a tuple of names", got=repr(values), hint=f"{what}=({values!r},)"
        )
    return frozenset(values)
