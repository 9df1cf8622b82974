"""The extension surface: what a plugin may contribute, one hook for each kind.

A plugin is a module (or object) with functions of these names, marked with :data:`hookimpl`, and an
entry point in the group ``pallasite.plugins`` that leads to it::

    from pallasite import hookimpl

    @hookimpl
    def pallasite_targets():
        return [Target(name="sm_90a", ...)]

The module that the entry point names should import little: it is loaded when the first target or
plugin name is asked for. Import rules inside the hook functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from pallasite.barrier_kinds import BarrierKind, BarrierOrder, BarrierUse
    from pallasite.extensions import (
        Diagnosis,
        Executor,
        InferenceRule,
        InstructionRule,
        LayoutProposal,
        LayoutRule,
        LoweringRule,
        NamedLayout,
        Names,
        Operation,
        Pass,
        ResourceRule,
        StoreNamespace,
        Translation,
        ViewRule,
    )
    from pallasite.jaxpr_table import JaxprPrimitive
    from pallasite.language.memory_space import MemorySpace
    from pallasite.lifecycle import KernelLifecycle
    from pallasite.memory_events import MemoryEvents, ProxyFence
    from pallasite.targets import Target

PROJECT = "pallasite"
ENTRY_POINT_GROUP = "pallasite.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function as the implementation of the hook of its name."""


@hookspec
def pallasite_targets() -> Iterable[Target]:  # type: ignore[empty-body]
    """Targets that kernels can be compiled for. Called when a target is first looked up by name;
    the names must not be those of another plugin's targets."""


@hookspec
def pallasite_names() -> Names:  # type: ignore[empty-body]
    """Names to add to ``pallasite.gpu``: name to ``"module:attribute"``. Called when a name that is
    not the core's own is first used; the module is imported only when that very name is."""


@hookspec
def pallasite_exports() -> Names:  # type: ignore[empty-body]
    """Names to add to the package ``pallasite`` itself, for what programs call rather than kernels:
    name to ``"module:attribute"``. Called when a name that is not the core's own is first used; the
    module is imported only when that very name is."""


@hookspec
def pallasite_options() -> type:  # type: ignore[empty-body]
    """The plugin's compiler parameters: a frozen dataclass whose fields are made with
    ``option(default, description)``. Called when a kernel first gives options of a plugin, or a
    rule asks for them. Kernels give values with ``CompilerParams(plugin_options={"plugin":
    {"option": value}})``; rules read them with ``ctx.params.options_of(TheDataclass)``."""


@hookspec
def pallasite_stores() -> Iterable[StoreNamespace]:  # type: ignore[empty-body]
    """Parts of the cache folder, in which a plugin keeps what is costly to find out. Called by
    ``pallasite cache`` and ``pallasite plugins``; names and folders must be unique."""


@hookspec
def pallasite_diagnoses() -> Iterable[Diagnosis]:  # type: ignore[empty-body]
    """What ``pallasite doctor`` says of what the plugin needs of the machine. It is called by that
    command only, so it may look around; if something is missing, that is what it says."""


@hookspec
def pallasite_lowering_rules() -> Iterable[LoweringRule]:  # type: ignore[empty-body]
    """Rules that emit code for primitives, usually ``rules.lowering_rules`` of a ``RuleSet``.
    Called once, before the first kernel is lowered. Of the rules that match an equation (by
    semantics, operands and target) the most specific is called; a tie between plugins is an error
    unless one rule's ``overrides`` names the other plugin. ``ctx.next_rule`` calls the one after
    it. So it is with rules of all kinds."""


@hookspec
def pallasite_resource_rules() -> Iterable[ResourceRule]:  # type: ignore[empty-body]
    """Rules that say what shared memory, barriers and other resources a primitive needs, usually
    ``rules.resource_rules``. Called once, before the first kernel is lowered."""


@hookspec
def pallasite_layout_rules() -> Iterable[LayoutRule]:  # type: ignore[empty-body]
    """Rules that find hints for layouts in lane semantics, usually
    ``rules.layout_rules``. Called once, before the first kernel is lowered."""


@hookspec
def pallasite_inference_rules() -> Iterable[InferenceRule]:  # type: ignore[empty-body]
    """What primitives ask of layouts that a program leaves open (warpgroup semantics), usually
    ``rules.inference_rules``. Called once, before the first kernel is lowered."""


@hookspec
def pallasite_jaxpr_primitives() -> Iterable[JaxprPrimitive]:  # type: ignore[empty-body]
    """Primitives that carry jaxprs in their parameters (calls, loops, branches, scopes), and what
    flows into and out of these. With an entry and a lowering rule, the estimator, layout inference
    and the checks of a kernel see inside. Called once, before the first kernel is lowered; two
    entries for one primitive are an error unless one's ``overrides`` names the other plugin."""


@hookspec
def pallasite_barrier_kinds() -> Iterable[BarrierKind]:  # type: ignore[empty-body]
    """Kinds of barriers: how their phases complete, and what arrivals and waits emit. Called once,
    before the first kernel is lowered; titles of kinds must be unique."""


@hookspec
def pallasite_barrier_orders() -> Iterable[BarrierOrder]:  # type: ignore[empty-body]
    """What barriers of any kind emit on some targets to order work that release and acquire leave
    out. Called once, before the first kernel is lowered; the order whose target predicate is most
    specific wins, and a tie between plugins is an error unless one's ``overrides`` names the
    other."""


@hookspec
def pallasite_barrier_uses() -> Iterable[BarrierUse]:  # type: ignore[empty-body]
    """Which primitives arrive on barriers or wait for them, for the checks and for layout
    inference. Called once, before the first kernel is lowered; there is one for each argument of a
    primitive that is a barrier."""


@hookspec
def pallasite_memory_events() -> Iterable[MemoryEvents]:  # type: ignore[empty-body]
    """What primitives do to memory, by which proxy, for layout inference (which inserts barriers
    and fences) and for checks. Called once, before the first kernel is lowered; a primitive has
    one."""


@hookspec
def pallasite_proxy_fences() -> Iterable[ProxyFence]:  # type: ignore[empty-body]
    """Primitives that order accesses by one proxy before those by another. Called once, before the
    first kernel is lowered; of the fences between two proxies, the one whose target predicate is
    most specific is inserted."""


@hookspec
def pallasite_operations() -> Iterable[Operation]:  # type: ignore[empty-body]
    """Implementations of operations of ``pallasite.ops``. Called when an operation is first looked
    up. For the selected target, the implementation whose target predicate is most specific is
    taken, unless it refuses the arguments; a tie between plugins is an error unless one of them
    says that it overrides the other."""


@hookspec
def pallasite_translations() -> Iterable[Translation]:  # type: ignore[empty-body]
    """How operations of MLIR are written as LLVM IR that the core does not translate itself (it
    knows arith, scf and llvm). Called once, before the first kernel is lowered; an operation has
    one translation, and one of two plugins has to override the other, or the core, which is
    ``"pallasite"``."""


@hookspec
def pallasite_front_ends() -> Names:  # type: ignore[empty-body]
    """Functions that make a ``KernelSpec`` of what other libraries' calls hold: name to
    ``"module:attribute"``. The names are ``"pallas_call"`` (of an equation of ``pl.pallas_call``)
    and ``"mesh_kernel"`` (of ``pl.kernel`` and ``pl.core_map`` over our ``Mesh``). Called when the
    first such kernel is lowered."""


@hookspec
def pallasite_implementations() -> Names:  # type: ignore[empty-body]
    """Parts that the core leaves to a library: name to ``"module:attribute"``, imported when the
    part is first needed. The names are ``"memory_access"`` (a ``MemoryAccess``: how memory with
    addresses is viewed, read and written), ``"lane_layouts"`` (a ``LayoutStrategy`` for lane
    semantics, made with a registry and a target), ``"layout_costs"`` (``LayoutCosts``: what layouts
    cost in inference), ``"check_layouts"`` (raises where no layouts suit), ``"interpretation"`` (an
    ``Interpretation``: which kernels run on the CPU in programs for a GPU), ``"layout_report"``
    (what inference has chosen), ``"missing_fences"`` and ``"missing_barriers"`` (what the events of
    a kernel lack), ``"divisor_of_result"`` and ``"loop_divisors"`` (what integers are multiples
    of), ``"encode_tensor_map"`` (TMA descriptors for the launcher), ``"batch_kernel"`` (the body of
    a kernel with one more grid axis, for ``jax.vmap``), ``"cache_keys"`` (what keys of the cache of
    kernels have to say of a kernel, and of the code that compiles it), ``"mosaic_layout"`` and
    ``"reduced_mosaic_layout"`` (layouts as objects of ``jax.experimental.mosaic.gpu``),
    ``"separate_llvm"`` (LLVM in a process of its own), ``"run_on_host"`` (runs a kernel by a Python
    function) and ``"kernel_errors"`` (a context in which the exceptions of such functions come out
    as they are). Two plugins with one name are an error, here and with other names, unless one has
    a ``Replacement`` for it that overrides the other."""


@hookspec
def pallasite_layouts() -> Iterable[NamedLayout]:  # type: ignore[empty-body]
    """Register layouts that programs and messages call by a name, as in ``plgpu.Layout.NAME``.
    Called when a layout is first looked up; a name that two plugins have is an error unless one of
    the records says that it overrides the other plugin."""


@hookspec
def pallasite_layout_proposals() -> Iterable[LayoutProposal]:  # type: ignore[empty-body]
    """Register layouts that inference tries where operations leave several open. Called once,
    before the first kernel is lowered; names must be unique."""


@hookspec
def pallasite_memory_spaces() -> Iterable[MemorySpace]:  # type: ignore[empty-body]
    """Memory spaces, each an object of a subclass of ``MemorySpace``, made once. Called when a
    space that the core does not have is first looked up by name, in ``plgpu.<NAME>`` or
    ``plgpu.MemorySpace.<NAME>``, and before the first kernel is lowered; names must be unique."""


@hookspec
def pallasite_views() -> Iterable[ViewRule]:  # type: ignore[empty-body]
    """What transforms of references mean for lowering, for layout inference and for checks. Called
    once, before the first kernel is lowered; a transform has one rule, unless one of two says that
    it overrides the other plugin."""


@hookspec
def pallasite_passes() -> Iterable[Pass]:  # type: ignore[empty-body]
    """Passes over the jaxpr, the MLIR module, the LLVM module or the PTX. Called once, before the
    first kernel is lowered; names must be unique."""


@hookspec
def pallasite_lifecycles() -> Iterable[KernelLifecycle]:  # type: ignore[empty-body]
    """What a plugin does at fixed moments in the life of every kernel: code before and after the
    body, steps on the host before the first launch. Called once, before the first kernel is traced
    to be called; names must be unique."""


@hookspec
def pallasite_executors() -> Iterable[Executor]:  # type: ignore[empty-body]
    """Ways to run compiled kernels. Called once, before the first kernel is lowered. On a platform,
    the available executor of the highest priority runs kernels, unless the option ``executor``
    names another one; the core's own, JAX's launcher on CUDA, has priority 0."""


@hookspec
def pallasite_instructions() -> Iterable[InstructionRule]:  # type: ignore[empty-body]
    """What PTX instructions do, for executors that interpret PTX, such as the simulator. Called
    once, when the first kernel is interpreted; of two rules for an instruction, the one with the
    longer name is taken, and names must be unique."""
