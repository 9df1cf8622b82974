"""The hook ``pallasite_options``: compiler parameters of plugins."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive

import pallasite
from pallasite import cli
from pallasite import gpu as plgpu
from pallasite.known_plugins import KnownPlugin
from pallasite.plugin import (
    Executor,
    InvalidTypeError,
    InvalidValueError,
    Pass,
    RuleSet,
    Semantics,
    config,
    hookimpl,
    manager,
    option,
)
from pallasite.plugin.ir import ops

OUT = jax.ShapeDtypeStruct((128,), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Options:
    """Compiler parameters of the plugin of these tests."""

    naps: int = option(1, "how many nanoseconds each thread sleeps")
    comment: str = option("", "what the PTX ends with")
    precise: bool = option(False, "whether it is done with care")
    ratio: float = option(0.5, "of something", keyword=True)
    order: tuple[int, ...] = option((), "any hashable value")

    def __post_init__(self) -> None:
        if self.naps < 0:
            raise ValueError("naps is negative")


nap_p = Primitive("nap")
nap_p.def_abstract_eval(lambda x: x)
rules = RuleSet()


@rules.lowering(nap_p, Semantics.LANE)
def _nap(ctx, x):
    for _ in range(ctx.params.options_of(Options).naps):
        ops.inline_assembly("nanosleep.u32 77;", "", results=[])
    return x


@rules.inference(nap_p)
def _infer(ctx, x):
    seen.append(ctx.params.options_of(Options).naps)
    return ctx.result(0)


seen = []
"""What layout inference was told."""


class Plugin:
    def __init__(self):
        self.requests = []

    @hookimpl
    def pallasite_options(self):
        return Options

    @hookimpl
    def pallasite_lowering_rules(self):
        return rules.lowering_rules

    @hookimpl
    def pallasite_inference_rules(self):
        return rules.inference_rules

    @hookimpl
    def pallasite_passes(self):
        def sign(ptx, context):
            comment = context.options.options_of(Options).comment
            return f"{ptx}\n// {comment}\n" if comment else None

        return [Pass(name="sign", stage="ptx", run=sign)]

    @hookimpl
    def pallasite_executors(self):
        def run(compiled, *operands, request):
            self.requests.append(request.params.options_of(Options))
            return list(operands)

        return [Executor(name="copying", platforms=("cuda",), run=run, priority=1)]


@pytest.fixture(autouse=True)
def plugin():
    one = Plugin()
    manager().register(one, "naps")
    yield one
    manager().unregister("naps")


def body(x_ref, out_ref):
    out_ref[...] = nap_p.bind(x_ref[...])


def kernel(options, body=body):
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, plugin_options=options
    )
    return plgpu.kernel(body, out_type=OUT, compiler_params=params)


def ptx(options, **keywords):
    return pallasite.compile(kernel(options, **keywords), OUT, target="sm_90").ptx


def test_rules_and_passes_see_the_options():
    assert ptx({}).count("nanosleep.u32") == 1
    signed = ptx({"naps": {"naps": 3, "comment": "by hand"}})
    assert signed.count("nanosleep.u32") == 3
    assert signed.endswith("// by hand\n")
    assert ptx({"naps": Options(naps=2)}).count("nanosleep.u32") == 2


def test_layout_inference_sees_the_options():
    params = plgpu.CompilerParams(plugin_options={"naps": {"naps": 7}})
    pallasite.compile(plgpu.kernel(body, out_type=OUT, compiler_params=params), OUT, target="sm_90")
    assert seen == [7]


def test_executors_see_the_options(plugin):
    call = jax.jit(kernel({"naps": {"ratio": 2}}))
    with config.scoped(target="sm_90"):
        call.trace(OUT).lower(lowering_platforms=("cuda",))
    assert plugin.requests == [Options(ratio=2)]


def test_kernels_of_every_kind():
    """Also those of ``pl.pallas_call`` and ``pl.kernel``."""
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, plugin_options={"naps": {"naps": 4}}
    )
    call = pl.pallas_call(body, out_shape=OUT, compiler_params=params)
    assert pallasite.compile(call, OUT, target="sm_90").ptx.count("nanosleep.u32") == 4
    mapped = jax.vmap(kernel({"naps": {"naps": 2}}))
    many = jax.ShapeDtypeStruct((3, 128), jnp.float32)
    assert pallasite.compile(mapped, many, target="sm_90").ptx.count("nanosleep.u32") == 2


def test_kernels_with_other_options_are_other_kernels():
    """What was compiled for one is not found for the other."""
    texts = [ptx({"naps": {"comment": one}}) for one in ("a", "b", "a")]
    assert texts[0] == texts[2] != texts[1]


def test_parameters_are_frozen():
    given = {"naps": {"naps": 2, "order": (1, 2)}}
    params = plgpu.CompilerParams(plugin_options=given)
    given["naps"]["naps"] = 5
    assert params.plugin_options["naps"]["naps"] == 2
    assert dict(params.plugin_options) == {"naps": {"naps": 2, "order": (1, 2)}}
    assert isinstance(params.plugin_options["naps"], types.MappingProxyType)
    turned = {"naps": {"order": (1, 2), "naps": 2}}
    same = plgpu.CompilerParams(plugin_options=turned)
    assert params == same and hash(params) == hash(same)
    assert params.replace(approx_math=True).plugin_options == params.plugin_options
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert params.options_of(Options) == Options(naps=2, order=(1, 2))
    assert repr(params.plugin_options) == "{'naps': {'naps': 2, 'order': (1, 2)}}"
    as_record = plgpu.CompilerParams(plugin_options={"naps": Options(naps=2, order=(1, 2))})
    assert as_record == params


LISTED = (
    "  expected: one of naps (default 1: how many nanoseconds each thread sleeps);"
    " comment (default '': what the PTX ends with);"
)


def refused(options, error):
    with pytest.raises(error) as caught:
        plgpu.CompilerParams(plugin_options=options)  # HERE
    location = caught.value.location
    assert location.file == __file__ and location.function == "refused"
    return str(caught.value).splitlines()


def test_unknown_options():
    lines = refused({"naps": {"nap": 1}}, InvalidValueError)
    assert lines[0].endswith("(refused): plugin 'naps' has no option 'nap'")
    assert lines[1].startswith(LISTED)
    assert lines[2] == "  try: did you mean naps?"


def test_values_that_the_plugin_refuses():
    lines = refused({"naps": {"naps": -1}}, InvalidValueError)
    assert lines[0].endswith("plugin 'naps' does not accept its options: naps is negative")
    assert lines[1] == "  got: naps=-1"


@pytest.mark.parametrize(
    ("name", "value", "got", "expected"),
    [
        ("naps", "3", "'3' of type str", "int, such as 1, its default"),
        ("naps", True, "True of type bool", "int, such as 1, its default"),
        ("precise", 1, "1 of type int", "bool, such as False, its default"),
        ("ratio", "half", "'half' of type str", "float, such as 0.5, its default"),
        ("comment", None, "None of type NoneType", "str, such as '', its default"),
    ],
)
def test_values_of_another_type(name, value, got, expected):
    lines = refused({"naps": {name: value}}, InvalidTypeError)
    assert lines[0].endswith(f"option {name!r} of plugin 'naps' is of another type")
    assert lines[1:] == [f"  got: {got}", f"  expected: {expected}"]


def test_what_is_no_mapping_of_options():
    assert refused(3, InvalidTypeError)[0].endswith("plugin_options is not a mapping")
    lines = refused({"naps": 3}, InvalidTypeError)
    assert lines[1] == "  got: 'naps': 3"
    lines = refused({"naps": {"order": [1]}}, InvalidTypeError)
    assert lines[0].endswith("option 'order' of plugin 'naps' is not hashable")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("nobody", "plugin_options are for plugin 'nobody', which is not in use", None),
        ("simulator", "plugin 'simulator' has no compiler options", None),
    ],
)
def test_plugins_without_options_are_found_out_when_a_kernel_is_traced(name, message, hint):
    """A library may have parameters for plugins that are not everywhere."""
    params = plgpu.CompilerParams(plugin_options={name: {"x": 1}})
    with pytest.raises(InvalidValueError) as error:
        jax.jit(plgpu.kernel(body, out_type=OUT, compiler_params=params)).trace(OUT)
    lines = str(error.value).splitlines()
    assert __file__ in lines[0] and lines[0].endswith(message)
    assert lines[1] == "  expected: a plugin that has some: multigpu, standard, naps"
    assert lines[2:] == ([f"  try: {hint}"] if hint else [])


def test_options_of_a_plugin_that_is_not_published(monkeypatch):
    known = (KnownPlugin(name="later"),)
    monkeypatch.setattr("pallasite.known_plugins.known_plugins", lambda: known)
    params = plgpu.CompilerParams(plugin_options={"later": {"x": 1}})
    with pytest.raises(InvalidValueError, match="for plugin 'later', which is not in use") as error:
        jax.jit(plgpu.kernel(body, out_type=OUT, compiler_params=params)).trace(OUT)
    assert "try: plugin 'later', which is to provide it, is not available yet" in str(error.value)


def test_options_of_a_disabled_plugin():
    params = plgpu.CompilerParams(plugin_options={"hopper": {"x": 1}})
    with config.scoped(disabled_plugins="hopper"), pytest.raises(InvalidValueError) as error:
        jax.jit(plgpu.kernel(body, out_type=OUT, compiler_params=params)).trace(OUT)
    assert "try: enable plugin 'hopper'" in str(error.value)


@dataclasses.dataclass
class NotFrozen:
    x: int = 1


@dataclasses.dataclass(frozen=True)
class NoDefault:
    x: int


@dataclasses.dataclass(frozen=True)
class NotHashable:
    x: object = dataclasses.field(default=types.MappingProxyType({}))


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"x": 1}, "no dataclass"),
        (Options(), "no dataclass"),
        (NotFrozen, "the dataclass is not frozen"),
        (NoDefault, "its field 'x' has no default"),
        (NotHashable, "its defaults do not work: TypeError: unhashable type"),
    ],
)
def test_wrong_declarations(declared, why):
    class Wrong:
        @hookimpl
        def pallasite_options(self):
            return declared

    manager().register(Wrong(), "wrong")
    try:
        with pytest.warns(UserWarning, match="plugin 'wrong'"):
            assert set(manager().options()) == {"standard", "multigpu", "naps"}
        (failed,) = [one for one in manager().plugins() if one.name == "wrong"]
    finally:
        manager().unregister("wrong")
    assert failed.error.startswith(
        f"pallasite_options of plugin 'wrong' (in process) returned the wrong thing: {why}"
    )


def test_options_that_nobody_declares():
    with pytest.raises(pallasite.InternalError, match="no plugin declares NotFrozen"):
        plgpu.CompilerParams().options_of(NotFrozen)


KERNEL = """
import jax
import jax.numpy as jnp
from pallasite import gpu as plgpu

OUT = jax.ShapeDtypeStruct((128,), jnp.float32)
ARGS = (OUT,)


def body(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


twice = plgpu.kernel(
    body,
    out_type=OUT,
    compiler_params=plgpu.CompilerParams(plugin_options={"naps": {"naps": 3}}),
)
"""


def test_commands_show_them(capsys, tmp_path):
    file = tmp_path / "twice.py"
    file.write_text(KERNEL)
    arguments = [f"{file}::twice", "--arg", "f32[128]", "--target", "sm_90"]
    assert cli.main(["inspect", *arguments]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["naps", "naps", "3"] in lines
    cli.main(["inspect", *arguments, "--json"])
    assert '"naps": "3"' in capsys.readouterr().out
    cli.main(["plugins"])
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("naps")]
    assert "options naps comment precise ratio order" in line


def test_options_that_are_keywords():
    params = plgpu.CompilerParams(ratio=0.75, plugin_options={"naps": {"naps": 2}})
    assert params.ratio == 0.75 and params.plugin_options["naps"] == {"naps": 2, "ratio": 0.75}
    assert params == plgpu.CompilerParams(plugin_options={"naps": {"naps": 2, "ratio": 0.75}})
    assert plgpu.CompilerParams().ratio == 0.5
    changed = params.replace(ratio=1, approx_math=True)
    assert changed.options_of(Options) == Options(naps=2, ratio=1) and changed.approx_math
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert not hasattr(params, "naps") and not hasattr(params, "nightmares")
    with pytest.raises(TypeError, match="unexpected keyword argument 'nightmares'"):
        plgpu.CompilerParams(nightmares=1)
    with pytest.raises(InvalidTypeError, match="option 'ratio' of plugin 'naps'"):
        plgpu.CompilerParams(ratio="many")


def test_the_profiler_has_its_options_as_keywords():
    params = plgpu.CompilerParams(
        profile_space=4, profile_dir="traces", profile_trace_scope=plgpu.TraceScope.WARP
    )
    assert dict(params.plugin_options["standard"]) == {
        "profile_space": 4,
        "profile_dir": "traces",
        "profile_trace_scope": plgpu.TraceScope.WARP,
    }
    assert (params.profile_space, params.profile_bounds_check) == (4, False)
    with pytest.raises(InvalidValueError, match="profile_space is negative"):
        plgpu.CompilerParams(profile_space=-1, profile_dir="traces")
    with pytest.raises(InvalidTypeError, match="profile_trace_scope is unknown"):
        plgpu.CompilerParams(profile_trace_scope="WARP")
