"""Plugins that raise, return nonsense or contradict one another, at every hook that there is."""

from __future__ import annotations

import dataclasses
import itertools
import re
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_support import FakeEntryPoint, manager
from jax.extend.core import Primitive
from jaxlib.mlir.dialects import llvm

import pallasite
from pallasite import config, plugins
from pallasite import gpu as plgpu
from pallasite.errors import PallasiteError, PluginError
from pallasite.hookspecs import hookimpl
from pallasite.plugin import (
    SHARED_MEMORY,
    BarrierKind,
    BarrierOrder,
    BarrierPhase,
    BarrierRole,
    BarrierUse,
    Diagnosis,
    Executor,
    InferenceRule,
    InstructionRule,
    JaxprPrimitive,
    KernelLifecycle,
    LayoutProposal,
    LayoutRule,
    LoweringRule,
    MemoryEvents,
    NamedLayout,
    Operation,
    Pass,
    ProxyFence,
    Replacement,
    ResourceRule,
    RuleSet,
    Semantics,
    StoreNamespace,
    Target,
    Translation,
    ViewRule,
    option,
)
from pallasite.plugin.ir import ops
from pallasite.plugin.jaxprs import call
from pallasite.plugin.layouts import SplatLayout
from pallasite.plugin.lowering import Resources
from pallasite.plugin_checks import FIELDS
from pallasite.plugin_values import fits, guarded, wrong_field
from pallasite_std.primitives.barriers import barrier_wait_p

DIST = types.SimpleNamespace(name="bad-dist", version="1.7")
P = Primitive("misbehaving")


class _Space:
    name = "space"


def nothing(*args, **kwargs):
    return None


@dataclasses.dataclass(frozen=True)
class Options:
    size: int = option(1, "how large")


def space():
    from pallasite_std.spaces import BARRIERS

    return BARRIERS


def dtype():
    from pallasite_std.barriers.types import BarrierType

    return BarrierType


def proxy():
    from pallasite.memory_events import Proxy

    return Proxy("misbehaving")


TOY = Target(name="toy", ptx_version=80, compute_capability=(8, 0))
SAMPLES = {
    "pallasite_targets": lambda: TOY,
    "pallasite_names": lambda: {"toy": "os:getcwd"},
    "pallasite_exports": lambda: {"toy": "os:getcwd"},
    "pallasite_front_ends": lambda: {"toy": "os:getcwd"},
    "pallasite_implementations": lambda: {"toy": "os:getcwd"},
    "pallasite_options": lambda: Options,
    "pallasite_lowering_rules": lambda: LoweringRule(
        primitive=P, function=nothing, semantics=Semantics.LANE
    ),
    "pallasite_resource_rules": lambda: ResourceRule(primitive=P, function=nothing),
    "pallasite_layout_rules": lambda: LayoutRule(primitive=P, function=nothing),
    "pallasite_inference_rules": lambda: InferenceRule(primitive=P, function=nothing),
    "pallasite_jaxpr_primitives": lambda: JaxprPrimitive(primitive=P, regions=nothing),
    "pallasite_barrier_kinds": lambda: BarrierKind(dtype=_Kind, phase=nothing),
    "pallasite_barrier_orders": lambda: BarrierOrder(name="toy", after_wait=nothing),
    "pallasite_barrier_uses": lambda: BarrierUse(primitive=P, role=plugin_barriers().WAIT),
    "pallasite_memory_events": lambda: MemoryEvents(primitive=P, function=nothing),
    "pallasite_proxy_fences": lambda: ProxyFence(proxy=proxy(), primitive=P),
    "pallasite_memory_spaces": space,
    "pallasite_views": lambda: ViewRule(transform=_Space, lower=nothing),
    "pallasite_passes": lambda: Pass(name="toy", stage="ptx", run=nothing),
    "pallasite_lifecycles": lambda: KernelLifecycle(name="toy", begin=nothing),
    "pallasite_executors": lambda: Executor(name="toy", platforms=("x",), run=nothing),
    "pallasite_instructions": lambda: InstructionRule(name="toy", bind=nothing),
    "pallasite_stores": lambda: StoreNamespace(name="toy", noun="toy", folder="toy"),
    "pallasite_diagnoses": lambda: Diagnosis(name="toy", text="is well"),
    "pallasite_layouts": lambda: NamedLayout(name="TOY", specification=nothing),
    "pallasite_layout_proposals": lambda: LayoutProposal(name="toy", propose=nothing),
    "pallasite_operations": lambda: Operation(name="toy", implementation="os:getcwd"),
    "pallasite_translations": lambda: Translation(operation="toy.op", translate=nothing),
}
"""For each hook, something that it may return."""


class _Kind:
    title = "toy barrier"


def plugin_barriers():
    from pallasite.barrier_kinds import BarrierRole

    return BarrierRole


def plugin(hook, call):
    return types.SimpleNamespace(**{hook: hookimpl(call)})


def ask(found, hook):
    """Calls a hook of all plugins, and merges what they return as users of it do."""
    methods = {
        "pallasite_targets": found.targets,
        "pallasite_names": lambda: found.paths("names"),
        "pallasite_exports": lambda: found.paths("exports"),
        "pallasite_front_ends": lambda: found.paths("front_ends"),
        "pallasite_implementations": lambda: found.paths("implementations"),
        "pallasite_options": found.options,
        "pallasite_stores": found.stores,
        "pallasite_diagnoses": found.diagnoses,
        "pallasite_instructions": found.instructions,
        "pallasite_layouts": found.layouts,
        "pallasite_operations": lambda: found.operations("toy", TOY),
        "pallasite_executors": lambda: found.registry(),
    }
    return methods.get(hook, found.registry)()


def test_every_hook_is_tested():
    assert set(SAMPLES) == set(FIELDS)


@pytest.mark.parametrize("hook", FIELDS)
def test_the_samples_are_accepted(hook):
    value = SAMPLES[hook]()
    many = hook in ("pallasite_options",) or isinstance(value, dict)
    found = manager(
        FakeEntryPoint("good", lambda: plugin(hook, lambda: value if many else [value]))
    )
    ask(found, hook)
    assert [one.state for one in found.plugins()] == ["loaded"], found.plugins()[0].error


@pytest.mark.parametrize("hook", FIELDS)
@pytest.mark.parametrize("error", [ValueError("oh"), SystemExit("licence"), RecursionError()])
def test_a_hook_that_raises(hook, error):
    def fail():
        raise error

    found = manager(FakeEntryPoint("bad", lambda: plugin(hook, fail), dist=DIST))
    with pytest.warns(plugins.PluginWarning) as caught:
        ask(found, hook)
        found.registry()
    (message,) = [str(one.message) for one in caught]
    assert message.startswith(
        "plugin 'bad' (bad-dist 1.7) is not used, since it failed to load:"
        f" {type(error).__name__}: {error}"
    )
    assert message.endswith(f"(in {hook} of plugin 'bad' (bad-dist 1.7))")
    assert found.plugins()[0].state == "failed"


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("hook", FIELDS)
def test_a_hook_that_hangs(hook):
    """It can be interrupted, the message says what was running, and nothing is left behind."""
    hanging = [True]
    value = SAMPLES[hook]()
    many = hook in ("pallasite_options",) or isinstance(value, dict)

    def wait():
        if hanging:
            _is_interrupted()
        return value if many else [value]

    found = manager(FakeEntryPoint("slow", lambda: plugin(hook, wait), dist=DIST))
    with pytest.raises(KeyboardInterrupt) as error:
        ask(found, hook)
    assert error.value.__notes__ == [f"in {hook} of plugin 'slow' (bad-dist 1.7)"]
    hanging.clear()
    ask(found, hook)
    assert [one.state for one in found.plugins()] == ["loaded"], found.plugins()[0].error


@pytest.fixture
def interruptible():
    """Interrupts arrive, also where the session was started in the background, without them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _is_interrupted():
    """As if it hung until the user interrupts it; at once, so that nothing else gets the signal."""
    signal.raise_signal(signal.SIGINT)
    pytest.fail("the interrupt has not arrived")


@pytest.mark.usefixtures("interruptible")
def test_a_plugin_that_hangs_when_it_is_imported():
    found = manager(FakeEntryPoint("slow", _is_interrupted, dist=DIST))
    with pytest.raises(KeyboardInterrupt) as error:
        ask(found, "pallasite_targets")
    assert error.value.__notes__ == ["while plugin 'slow' (bad-dist 1.7) was imported"]


NONSENSE = {
    "number": 3,
    "text": "text",
    "objects": [object()],
    "nothing in it": [None],
    "endless": itertools.repeat(3),
    "mapping": {"name": 3},
    "path": {"name": ":attribute"},
    "class": int,
}


@pytest.mark.parametrize("hook", FIELDS)
@pytest.mark.parametrize("value", NONSENSE.values(), ids=NONSENSE)
def test_a_hook_that_returns_nonsense(hook, value):
    found = manager(FakeEntryPoint("bad", lambda: plugin(hook, lambda: value), dist=DIST))
    with pytest.warns(plugins.PluginWarning):
        ask(found, hook)
        found.registry()
    assert f"{hook} of plugin 'bad' (bad-dist 1.7)" in found.plugins()[0].error


@pytest.mark.parametrize("hook", FIELDS)
def test_records_with_wrong_fields(hook):
    """Each field in turn has a value of another type."""
    value = SAMPLES[hook]()
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        pytest.skip("no record")
    for field in dataclasses.fields(value):
        if field.type == "Any":
            continue
        for wrong in (object(), 1.5, None):
            if fits(wrong, str(field.type)):
                continue
            broken = object.__new__(type(value))
            for one in dataclasses.fields(value):
                object.__setattr__(broken, one.name, getattr(value, one.name))
            object.__setattr__(broken, field.name, wrong)
            assert wrong_field(broken) == (field.name, field.type)
            point = FakeEntryPoint("bad", lambda one=broken: plugin(hook, lambda: [one]), dist=DIST)
            found = manager(point)
            with pytest.warns(plugins.PluginWarning, match="bad-dist 1.7"):
                ask(found, hook)
            assert f"{field.name}=" in found.plugins()[0].error


def renamed(hook, name):
    """What a hook may return but for a name."""
    value = SAMPLES[hook]()
    if isinstance(value, dict):
        return dict.fromkeys([name], next(iter(value.values())))
    primitive = {"primitive": Primitive(name)} if hasattr(value, "primitive") else {}
    own = {field: name for field in ("name", "operation") if hasattr(value, field)}
    return [dataclasses.replace(value, **(primitive or own))]


_NAMED = [
    hook
    for hook, make in SAMPLES.items()
    if isinstance(make(), dict)
    or (
        dataclasses.is_dataclass(make())
        and any(hasattr(make(), field) for field in ("name", "operation", "primitive"))
        and hook not in ("pallasite_options", "pallasite_memory_spaces")
    )
]


_WRONG_NAMES = ("", " ", "two words", "two,names", "a=b", "line\n", 3, None)


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (hook, name)
        for hook in _NAMED
        for name in _WRONG_NAMES
        if hook != "pallasite_diagnoses" or not name  # Which any text may be.
    ],
)
def test_names_that_no_option_could_list(hook, name):
    returned = renamed(hook, name)
    found = manager(FakeEntryPoint("bad", lambda: plugin(hook, lambda: returned), dist=DIST))
    with pytest.warns(plugins.PluginWarning, match="bad-dist 1.7"):
        ask(found, hook)
        found.registry()
    assert f"{hook} of plugin 'bad' (bad-dist 1.7) returned the wrong thing" in (
        found.plugins()[0].error
    )
    assert repr(name) in found.plugins()[0].error


@pytest.mark.parametrize("name", ["", " ", "two words", "two,names", 3])
def test_names_of_plugins_that_no_option_could_list(name):
    found = manager()
    with pytest.raises(PluginError, match="a plugin has a wrong name") as error:
        found.register(plugin("pallasite_targets", lambda: [TOY]), name)
    assert error.value.got == repr(name) and "without blanks" in error.value.expected
    assert found.plugins() == ()


_OWN = ("pallasite_options", "pallasite_diagnoses")
"""What belongs to each plugin, so that no two can clash."""


@pytest.mark.parametrize("hook", [hook for hook in FIELDS if hook not in _OWN])
def test_two_plugins_that_contradict_each_other(hook):
    """The error names both."""
    value = SAMPLES[hook]()
    returned = value if isinstance(value, dict) else [value]
    points = [
        FakeEntryPoint(name, lambda: plugin(hook, lambda: returned), dist=DIST)
        for name in ("first", "second")
    ]
    found = manager(*points)
    with pytest.raises(PluginError) as error:
        ask(found, hook)
    assert "'first'" in str(error.value) and "'second'" in str(error.value)
    with config.scoped(disabled_plugins="second"):
        ask(found, hook)


# What functions of plugins do ---------------------------------------------------------------------


def records_with_functions():
    for hook, make in SAMPLES.items():
        value = make()
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            continue
        for field in dataclasses.fields(value):
            if str(field.type).startswith("Callable[") and field.name not in ("run", "available"):
                yield pytest.param(hook, field.name, id=f"{hook}-{field.name}")


@pytest.mark.parametrize(("hook", "field"), records_with_functions())
def test_functions_that_raise_name_their_plugin(hook, field):
    def fail(*args, **kwargs):
        raise KeyError("oh")

    record = dataclasses.replace(SAMPLES[hook](), **{field: fail})
    with pytest.raises(PluginError) as error:
        getattr(guarded(record, "'bad' (bad-dist 1.7)", hook), field)()
    assert error.value.message.startswith(f"{hook} of plugin 'bad' (bad-dist 1.7): {field} of ")
    assert error.value.message.endswith("failed: KeyError: 'oh'")

    def hang(*args, **kwargs):
        raise KeyboardInterrupt  # From the user, who has waited long enough.

    record = dataclasses.replace(record, **{field: hang})
    with pytest.raises(KeyboardInterrupt) as interrupt:
        getattr(guarded(record, "'bad' (bad-dist 1.7)", hook), field)()
    (note,) = interrupt.value.__notes__
    assert note.startswith(f"in {hook} of plugin 'bad' (bad-dist 1.7): {field} of ")

    def refuse(*args, **kwargs):
        raise pallasite.UnsupportedError("not here")

    record = dataclasses.replace(record, **{field: refuse})
    with pytest.raises(pallasite.UnsupportedError, match="not here"):
        getattr(guarded(record, "'bad' (bad-dist 1.7)", hook), field)()


@pytest.mark.parametrize(
    ("hook", "field", "value"),
    [
        ("pallasite_barrier_kinds", "phase", 3),
        ("pallasite_barrier_kinds", "arrivals", "one"),
        ("pallasite_barrier_uses", "arrivals", True),
        ("pallasite_resource_rules", "function", None),
        ("pallasite_layout_rules", "function", "layout"),
        ("pallasite_memory_events", "function", "events"),
        ("pallasite_memory_events", "function", [3]),
        ("pallasite_lifecycles", "applies", "yes"),
        ("pallasite_lifecycles", "named_scope", 3),
        ("pallasite_lifecycles", "before_first_launch", "module:function"),
        ("pallasite_layout_proposals", "propose", itertools.count()),
        ("pallasite_jaxpr_primitives", "regions", [3]),
        ("pallasite_instructions", "bind", 3),
        ("pallasite_executors", "inspect", "report"),
        ("pallasite_stores", "valid", "yes"),
        ("pallasite_stores", "table", 3),
    ],
)
def test_functions_that_return_nonsense_name_their_plugin(hook, field, value):
    record = dataclasses.replace(SAMPLES[hook](), **{field: lambda *args: value})
    with pytest.raises(PluginError, match=rf"{hook} of plugin 'bad' \(bad-dist 1.7\): {field} of"):
        getattr(guarded(record, "'bad' (bad-dist 1.7)", hook), field)()


def kernel(**options):
    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((128,), jnp.float32), **options)
    def twice(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...]) + x_ref[...]

    return twice


class _Rules:
    """A plugin with another rule for exponentials."""

    def __init__(self, function):
        self.rules = RuleSet()
        common = {"overrides": ["standard"], "layouts": "any"}
        both = (Semantics.LANE, Semantics.WARPGROUP)
        self.rules.lowering(jax.lax.exp_p, *both, **common)(function)

    @hookimpl
    def pallasite_lowering_rules(self):
        return self.rules.lowering_rules


@pytest.mark.parametrize(
    "value",
    [None, "text", 3, [], (), dataclasses.fields, float],
    ids=["None", "text", "3", "[]", "()", "function", "class"],
)
def test_a_rule_that_returns_nonsense_is_blamed_itself(registered, value):
    registered(_Rules(lambda ctx, x, **params: value))
    with pytest.raises(PluginError) as error:
        pallasite.compile(kernel(), jnp.zeros(128), target="sm_90")
    assert error.value.message == (
        "pallasite_lowering_rules of plugin 'bad' (in process): the rule for exp returned the wrong"
        " thing"
    )
    assert error.value.location is not None and error.value.location.file == __file__


def test_a_rule_that_raises_is_no_defect_of_pallasite(registered):
    registered(_Rules(lambda ctx, x, **params: {}["key"]))
    with pytest.raises(PluginError) as error:
        pallasite.compile(kernel(), jnp.zeros(128), target="sm_90")
    assert error.value.message == (
        "pallasite_lowering_rules of plugin 'bad' (in process): function of LoweringRule 'exp'"
        " failed: KeyError: 'key'"
    )
    assert error.value.location is not None and error.value.location.file == __file__


@pytest.mark.parametrize(
    "rule", [lambda ctx, x, **params: x.registers[0], lambda ctx, x, **params: x.map(lambda one: 3)]
)
def test_a_rule_that_returns_no_array_is_blamed_itself(registered, rule):
    registered(_Rules(rule))
    with pytest.raises(PluginError, match="exp.* returned the wrong thing|exp.* no MLIR value: 3"):
        pallasite.compile(kernel(), jnp.zeros(128), target="sm_90")


def test_what_looks_like_a_defect_names_the_plugin_whose_rule_it_was_in(registered):
    registered(_Rules(lambda ctx, x, **params: dataclasses.replace(x, registers=())))
    with pytest.raises(PluginError) as error:
        pallasite.compile(kernel(), jnp.zeros(128), target="sm_90")
    assert error.value.message.endswith(
        "needs 1 registers, not 0, in pallasite_lowering_rules of plugin 'bad' (in process):"
        " function of LoweringRule 'exp'"
    )
    assert error.value.location is not None and error.value.location.file == __file__


WRONG_LAYOUTS = {
    "number": [3],
    "none": [],
    "two": [None, None],
    "of another shape": [SplatLayout((3,))],
}


@pytest.mark.parametrize("wrong", WRONG_LAYOUTS)
def test_layouts_of_results_that_are_none_name_their_plugin(registered, wrong):
    rules = RuleSet()
    common = {"overrides": ["standard"], "layouts": "any"}
    layouts = WRONG_LAYOUTS[wrong]
    one = rules.lowering(
        jax.lax.exp_p, Semantics.LANE, result_layouts=lambda *avals, **params: layouts, **common
    )
    one(lambda ctx, x, **params: x)
    registered(plugin("pallasite_lowering_rules", lambda: rules.lowering_rules))
    with pytest.raises(PluginError) as error:
        pallasite.compile(kernel(), jnp.zeros(128), target="sm_90")
    assert error.value.message == (
        "pallasite_lowering_rules of plugin 'bad' (in process): result_layouts of LoweringRule"
        " 'exp' returned the wrong thing"
    )
    assert error.value.got == str(layouts) and error.value.location.file == __file__
    if wrong != "number":
        assert error.value.expected == "a layout or None for arrays of shapes [(128,)]"


@pytest.mark.parametrize("wrong", WRONG_LAYOUTS)
def test_hints_that_are_none_name_their_plugin(registered, wrong):
    rules = RuleSet()
    layouts = WRONG_LAYOUTS[wrong]
    rules.layout(jax.lax.exp_p, overrides=["standard"])(lambda ctx, wanted, **params: layouts)
    registered(plugin("pallasite_layout_rules", lambda: rules.layout_rules))
    lane = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    with pytest.raises(PluginError) as error:
        pallasite.compile(kernel(compiler_params=lane), jnp.zeros(128), target="sm_90")
    assert error.value.message == (
        "pallasite_layout_rules of plugin 'bad' (in process): function of LayoutRule 'exp' returned"
        " the wrong thing"
    )
    assert error.value.location.file == __file__


def needs(**fields):
    return lambda ctx, *avals, **params: Resources(**fields)


@pytest.mark.parametrize(
    "function",
    [
        needs(peaks={"smem": 1}),
        needs(peaks={SHARED_MEMORY: "1"}),
        needs(peaks={SHARED_MEMORY: 1.5}),
        needs(peaks={SHARED_MEMORY: -1}),
        needs(peaks=None),
        needs(kept={3: 4}),
        needs(allocations=(3,)),
    ],
)
def test_resources_that_are_none_name_their_plugin(registered, function):
    rules = RuleSet()
    rules.resources(jax.lax.exp_p)(function)
    registered(plugin("pallasite_resource_rules", lambda: rules.resource_rules))
    with pytest.raises(PluginError, match="plugin 'bad'.* (reserves|returned the wrong thing)"):
        pallasite.compile(kernel(), jnp.zeros(128), target="sm_90")


def changed(**fields):
    return lambda equation: [
        dataclasses.replace(call(equation.params["jaxpr"].jaxpr), **fields)  # Of a loop.
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"operands": (-1, 0)}, "an operand that is not among the equation's 2"),
        ({"operands": (0, 2)}, "an operand that is not among the equation's 2"),
        ({"selector": 2}, "an operand that is not among the equation's 2"),
        ({"results": (2, 0)}, "a result that is not among the equation's 2"),
        ({"carried": (0, 9)}, "an input that is not among its 2"),
        ({"scoped": frozenset([9])}, "an input that is not among its 2"),
        ({"states": ((9, 0),)}, "an input that is not among its 2"),
        ({"states": ((0, 9),)}, "a result that is not among the equation's 2"),
    ],
)
def test_regions_that_are_none_name_their_plugin(registered, fields, message):
    def looped(x_ref, o_ref):
        o_ref[...] = jax.lax.fori_loop(0, 3, lambda i, x: jnp.exp(x), x_ref[...])

    one = JaxprPrimitive(
        primitive=jax.lax.scan_p, regions=changed(**fields), overrides=("standard",)
    )
    registered(plugin("pallasite_jaxpr_primitives", lambda: [one]))
    out = jax.ShapeDtypeStruct((128,), jnp.float32)
    with pytest.raises(PluginError) as error:
        pallasite.compile(plgpu.kernel(looped, out_type=out), jnp.zeros(128), target="sm_90")
    assert error.value.message.startswith("plugin 'bad' describes a region of primitive scan")
    assert error.value.message.endswith(message)


def copying():
    def copied(x_ref, o_ref, s_ref, barrier):
        plgpu.copy_gmem_to_smem(x_ref, s_ref, barrier)
        plgpu.barrier_wait(barrier)
        o_ref[...] = s_ref[...]

    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    scratch = [plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()]
    return plgpu.kernel(copied, out_type=x, scratch_types=scratch)


@pytest.mark.parametrize("positions", [(9, None), (-1, None), (0, 9), (0, -1)])
def test_uses_of_barriers_that_are_none_name_their_plugin(registered, positions):
    barrier, predicate = positions
    one = BarrierUse(
        primitive=barrier_wait_p,
        role=BarrierRole.WAIT,
        barrier=barrier,
        predicate=predicate,
        overrides=("standard",),
    )
    registered(plugin("pallasite_barrier_uses", lambda: [one]))
    with pytest.raises(PluginError) as error:
        pallasite.compile(copying(), jnp.zeros(128), target="sm_90")
    number = predicate if barrier == 0 else barrier
    assert error.value.message == (
        f"pallasite_barrier_uses of plugin 'bad' (in process): argument {number} of primitive"
        " barrier_wait"
    )


@pytest.mark.parametrize("fields", [{"phase": -1}, {"arrivals": 0}])
def test_barriers_that_count_nothing_name_their_plugin(registered, fields):
    given = {"phase": 1, "arrivals": 1} | fields
    one = BarrierKind(
        dtype=dtype(),
        phase=lambda dtype, geometry: BarrierPhase(given["phase"]),
        arrivals=lambda dtype: given["arrivals"],
        overrides=("standard",),
    )
    registered(plugin("pallasite_barrier_kinds", lambda: [one]))
    with (
        config.scoped(disabled_passes="check-barriers,check-arrivals,check-copies"),
        pytest.raises(PluginError) as error,
    ):
        pallasite.compile(copying(), jnp.zeros(128), target="sm_90")
    text = r"pallasite_barrier_kinds of plugin 'bad' \(in process\): (a )?phase of"
    assert re.search(text, str(error.value))


def spoilt(ctx, x, **params):
    llvm.unreachable()
    return x


@pytest.mark.parametrize(
    "rule",
    [
        lambda ctx, x, **params: object(),
        lambda ctx, x, **params: np.zeros(128, np.float32),
        lambda ctx, x, **params: (one for one in [x]),
        lambda ctx, x, **params: ctx,
        spoilt,
    ],
    ids=["object", "array", "generator", "context", "terminator"],
)
def test_where_another_rule_fails_the_plugin_is_named(registered, rule):
    """At what this one returned or emitted."""
    registered(_Rules(rule))
    with pytest.raises(PluginError) as error:
        pallasite.compile(kernel(), jnp.zeros(128), target="sm_90")
    assert error.value.message.endswith(
        "; kernel 'twice' uses pallasite_lowering_rules of plugin 'bad' (in process): function of"
        " LoweringRule 'exp'"
    )
    assert error.value.hint == "report it to the plugin's authors"
    assert error.value.location.file == __file__


def test_registers_of_another_type_name_the_plugin(registered):
    registered(_Rules(lambda ctx, x, **params: x.map(lambda one: ops.i64_constant(1))))
    with pytest.raises(pallasite.CompilationError, match="must be floating-point-like") as error:
        pallasite.compile(kernel(), jnp.zeros(128), target="sm_90")
    assert error.value.message.endswith("function of LoweringRule 'exp'")


@pytest.mark.parametrize("name", ["memory_access", "lane_layouts"])
@pytest.mark.parametrize("path", ["os:getcwd", "os:sep", "no.such:thing"])
def test_implementations_that_are_none_name_their_plugin(registered, name, path):
    one = Replacement(path=path, overrides=("standard",))
    registered(plugin("pallasite_implementations", lambda: {name: one}))
    lane = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    with pytest.raises(PluginError) as error:
        pallasite.compile(kernel(compiler_params=lane), jnp.zeros(128), target="sm_90")
    assert f"pallasite_implementations of plugin 'bad' (in process): '{name}'" in str(error.value)


def test_what_a_pass_makes_of_a_kernel_is_no_defect_of_pallasite(registered):
    def spoil(jaxpr, context):
        equations = [
            one.replace(invars=one.invars[:1]) if one.primitive is jax.lax.add_p else one
            for one in jaxpr.eqns
        ]
        return jaxpr.replace(eqns=equations)

    registered(plugin("pallasite_passes", lambda: [Pass(name="odd", stage="jaxpr", run=spoil)]))
    with pytest.raises(PluginError) as error:
        pallasite.compile(kernel(), jnp.zeros(128), target="sm_90")
    assert error.value.message.endswith(
        "kernel 'twice' was changed by jaxpr pass 'odd' of plugin 'bad' (in process)"
    )


def test_exceptions_of_the_program_stay_what_they_are(registered):
    """Also in a kernel that a plugin has a part in."""
    registered(_Rules(lambda ctx, x, **params: x))

    @plgpu.inline_mgpu()
    def inlined(ctx):
        raise LookupError("of the program")

    def body(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...])
        inlined()

    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    with pytest.raises(LookupError, match="of the program"):
        pallasite.compile(plgpu.kernel(body, out_type=x), x, target="sm_90")


def test_what_a_function_of_a_plugin_refuses_has_the_line_of_the_kernel():
    def refuses(x):
        raise pallasite.InvalidTypeError("only integers", got=x.dtype)

    def body(x_ref, o_ref):
        o_ref[...] = refuses(x_ref[...])

    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    with pytest.raises(pallasite.InvalidTypeError) as error:
        pallasite.compile(plgpu.kernel(body, out_type=x), x, target="sm_90")
    assert error.value.location is not None and error.value.location.file == __file__


@pytest.mark.parametrize("stage", ["jaxpr", "mlir", "llvm", "ptx"])
def test_a_pass_that_returns_nonsense_is_named(registered, stage):
    one = Pass(name="nonsense", stage=stage, run=lambda value, context: 3)
    registered(plugin("pallasite_passes", lambda: [one]))
    with pytest.raises(PluginError) as error:
        pallasite.compile(kernel(), jnp.zeros(128), target="sm_90")
    assert error.value.message == (
        "pallasite_passes of plugin 'bad' (in process): pass 'nonsense' returned the wrong thing"
    )
    assert str(error.value.expected).startswith(f"what stage '{stage}' holds, a ")


def test_a_target_that_is_wrong_stops_nobody_else(registered):
    broken = dataclasses.replace(TOY, features=None)
    registered(plugin("pallasite_targets", lambda: [broken]))
    with pytest.warns(plugins.PluginWarning, match=r"plugin 'bad' \(in process\) is not used"):
        pallasite.compile(kernel(), jnp.zeros(128), target="sm_90")
    (info,) = [one for one in plugins.plugins() if one.name == "bad"]
    assert "features=None" in info.error and "features: frozenset[str]" in info.error


def test_a_misspelt_plugin_is_not_ignored(monkeypatch):
    found = manager(FakeEntryPoint("toy", lambda: plugin("pallasite_targets", lambda: [TOY])))
    monkeypatch.setenv("PALLASITE_DISABLE_PLUGINS", "tou,multigpu")
    with pytest.warns(plugins.PluginWarning) as caught:
        found.targets()
        found.registry()
    assert [str(one.message) for one in caught] == [
        "PALLASITE_DISABLE_PLUGINS names 'tou', and there is no such plugin; did you mean 'toy'?"
    ]


def test_what_an_installed_plugin_gets_wrong_deeper_down_is_its_own(tmp_path, monkeypatch):
    """Errors in its methods (of a memory space, say) are told by the module of the code."""
    (tmp_path / "deep_plugin.py").write_text("def fail():\n    return {}['key']\n")
    monkeypatch.syspath_prepend(tmp_path)
    import deep_plugin

    point = FakeEntryPoint("deep", lambda: None, module="deep_plugin", dist=DIST)
    found = manager(point)
    with pytest.raises(KeyError) as error:
        deep_plugin.fail()
    assert found.culprit(error.value) == "'deep' (bad-dist 1.7)"
    with pytest.raises(ZeroDivisionError) as error:
        1 / 0  # noqa: B018
    assert found.culprit(error.value) is None


def test_errors_of_the_family_keep_their_type():
    assert issubclass(PluginError, PallasiteError)


@pytest.mark.parametrize(
    "value",
    [None, "text", [], [1], [jnp.zeros(3)], [jnp.zeros(128, jnp.int32)], [jnp.zeros(128)] * 2],
    ids=str,
)
def test_an_executor_that_returns_something_else_than_the_outputs(registered, value):
    run = lambda compiled, *operands, request: value  # noqa: E731
    one = Executor(name="mine", platforms=("cpu",), priority=99, run=run)
    registered(plugin("pallasite_executors", lambda: [one]))
    with pytest.raises(PluginError, match=r"pallasite_executors of plugin 'bad' \(in process\)"):
        jax.jit(kernel())(jnp.zeros(128))


@pytest.mark.parametrize(
    ("implementation", "refuses", "message"),
    [
        ("no.such:thing", None, "no.such:thing, of operation 'odd', cannot be imported"),
        ("os:nothing", None, "os:nothing, of operation 'odd', cannot be imported"),
        ("os:sep", None, "os:sep, of operation 'odd', is no function"),
        ("os:getcwd", "builtins:len", "builtins:len returned the wrong thing"),
    ],
)
def test_an_operation_that_leads_nowhere(registered, implementation, refuses, message):
    one = Operation(name="odd", implementation=implementation, refuses=refuses)
    registered(plugin("pallasite_operations", lambda: [one]))
    with pytest.raises(PluginError) as error:
        pallasite.ops.odd(jnp.zeros(128))
    assert error.value.message.startswith("pallasite_operations of plugin 'bad' (in process): ")
    assert message in error.value.message


def test_a_translation_without_a_result_is_named(registered):
    one = Translation(
        operation="arith.addf", translate=nothing, overrides=("pallasite", "standard")
    )
    registered(plugin("pallasite_translations", lambda: [one]))
    with pytest.raises(PluginError) as error:
        pallasite.compile(kernel(), jnp.zeros(128), target="sm_90")
    assert error.value.message == (
        "pallasite_translations of plugin 'bad' (in process): the translation of arith.addf does"
        " not bind its result"
    )


@pytest.mark.parametrize("value", [None, "text", 3], ids=repr)
def test_a_rule_of_inference_that_returns_nonsense_is_blamed_itself(registered, value):
    rules = RuleSet()
    rules.inference(jax.lax.exp_p, overrides=["standard"])(lambda ctx, *args, **params: value)
    registered(plugin("pallasite_inference_rules", lambda: rules.inference_rules))
    with pytest.raises(PluginError) as error:
        pallasite.compile(kernel(), jnp.zeros(128), target="sm_90")
    assert error.value.message == (
        "pallasite_inference_rules of plugin 'bad' (in process): the rule for exp returned the"
        " wrong thing"
    )


@pytest.mark.parametrize(
    "fields", [{"folder": "../other"}, {"folder": "/etc"}, {"folder": "a", "suffix": ""}]
)
def test_parts_of_the_cache_are_within_its_folder(fields):
    """What clears the cache would remove files elsewhere."""
    with pytest.raises(pallasite.InvalidValueError, match="is not within it"):
        StoreNamespace(name="toy", noun="toy", **fields)
