"""Canonical texts of kernels: equal for equal kernels, in every process, and only for those."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.metadata
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from sample_kernels import CASES, copy_kernel, scaled, specs

from pallasite import config, plugins
from pallasite import gpu as plgpu
from pallasite.plugin.runtime import Unkeyable
from pallasite_std.caching.kernel_text import canonical_parts, fingerprint


def of(fn, *args) -> str:
    (spec,) = specs(fn, *args)
    return fingerprint(spec)


@pytest.mark.parametrize("name", CASES)
def test_two_traces_of_one_kernel_are_equal(name):
    make, args = CASES[name]
    assert of(make(), *args) == of(make(), *args)


def test_all_cases_differ():
    assert len({of(make(), *args) for make, args in CASES.values()}) == len(CASES)


SCRIPT = """
from sample_kernels import CASES, specs
from pallasite_std.caching.kernel_text import fingerprint
for make, args in CASES.values():
    (spec,) = specs(make(), *args)
    print(fingerprint(spec))
"""


def test_equal_in_every_process():
    texts = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert len(texts.pop().splitlines()[-len(CASES) :]) == len(CASES)


def test_what_makes_a_kernel_another_one(monkeypatch):
    monkeypatch.setattr(plgpu.CompilerParams, "check_plugin_options", lambda self, absent: None)
    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    variants = [
        (scaled(2.0), x),
        (scaled(3.0), x),
        (scaled(2.0, name="other"), x),
        (scaled(2.0, grid=2), x),
        (scaled(2.0, params=plgpu.CompilerParams(approx_math=True)), x),
        (scaled(2.0, params=plgpu.CompilerParams(plugin_options={"p": {"n": 1}})), x),
        (scaled(2.0, params=plgpu.CompilerParams(plugin_options={"p": {"n": True}})), x),
        (scaled(2.0, params=plgpu.CompilerParams(plugin_options={"p": {"m": 1}})), x),
        (scaled(2.0, params=plgpu.CompilerParams(plugin_options={"q": {"n": 1}})), x),
        (scaled(2.0, aliases={0: 0}), x),
        (scaled(2.0), jax.ShapeDtypeStruct((128,), jnp.bfloat16)),
    ]
    keys = [of(*variant) for variant in variants]
    assert len(set(keys)) == len(keys)
    assert of(scaled(2.0), x) == keys[0]


def shifted(by, factor):
    """A kernel with constants among the indices and the values of a loop."""

    def body(x, o):
        def step(i, carry):
            pl.when(carry > factor)(lambda: o.__setitem__(i + by, jnp.float32(1)))
            return carry * factor

        jax.lax.fori_loop(0, 4, step, x[0] + factor)

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))


def test_constants_count():
    """Python's numbers are literals of JAX's own classes in a jaxpr."""
    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    keys = [of(shifted(*constants), x) for constants in [(1, 0.5), (2, 0.5), (1, 0.25), (1, 0.5)]]
    assert len(set(keys[:3])) == 3 and keys[3] == keys[0]


@pytest.mark.parametrize("base", [int, float, complex, str, bytes])
def test_numbers_of_other_classes_count(base):
    class Typed(base):
        kind = "typed"

    values = [Typed(one if base is not bytes else one.encode()) for one in ("1", "2")]
    texts = ["\0".join(canonical_parts(one)) for one in values]
    assert texts[0] != texts[1]
    values[1] = Typed(base(values[0]))
    assert "\0".join(canonical_parts(values[1])) == texts[0]
    values[1].kind = "another"
    assert "\0".join(canonical_parts(values[1])) != texts[0]


def test_barrier_types_count():
    assert of(copy_kernel(arrivals=1), CASES["copy"][1][0]) != of(
        copy_kernel(arrivals=2), CASES["copy"][1][0]
    )


def test_source_lines_count():
    source = "def body(x, o):\n  o[...] = x[...]\n"
    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    keys = []
    for text in (source, source, "\n" + source):
        scope: dict = {}
        exec(compile(text, "/virtual/kernel.py", "exec"), scope)
        keys.append(of(plgpu.kernel(scope["body"], out_type=x), x))
    assert keys[0] == keys[1] != keys[2]


BODY = """
def body(x, o):
    y = x[...]
    o[...] = y * 2
""".lstrip()

LOOP = """
def body(x, o):
    def step(_, y):
        return y * 2

    o[...] = lax.fori_loop(0, 4, step, x[...])
""".lstrip()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (BODY, BODY.replace("    y = x", "\n    y = x")),
        (BODY, BODY.replace("    o[...]", "\n    o[...]")),
        (BODY, BODY.replace("= y * 2", "=  y * 2")),
        (LOOP, LOOP.replace("        return y * 2\n\n", "\n        return y * 2\n")),
    ],
    ids=["all", "last", "column", "in a loop"],
)
def test_locations_of_equations_count(before, after):
    """The kernel itself stays where it is, and does the same."""
    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    found = []
    for text in (before, before, after):
        scope: dict = {"lax": jax.lax}
        exec(compile(text, "/virtual/kernel.py", "exec"), scope)
        found += specs(plgpu.kernel(scope["body"], out_type=x), x)
    first, again, moved = found
    assert (moved.location, str(moved.jaxpr)) == (first.location, str(first.jaxpr))
    assert fingerprint(first) == fingerprint(again) != fingerprint(moved)


class Name:
    """An object that is compared by identity."""

    def __init__(self, label):
        self.label = label


def test_objects_are_numbered():
    a, b, c = Name("n"), Name("n"), Name("m")
    assert canonical_parts((a, a)) == canonical_parts((b, b))
    assert canonical_parts((a, b)) != canonical_parts((a, a))
    assert canonical_parts((a, b)) == canonical_parts((b, a))
    assert canonical_parts(a) != canonical_parts(c)


def test_nested_vmap_axes_are_told_apart():
    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    def add(x, y, o):
        o[...] = x[...] + y[...]

    x, m = jnp.zeros((2, 2, 128)), jnp.zeros((2, 128))
    inner = jax.vmap(jax.vmap(add, (0, 0)), (0, None))
    outer = jax.vmap(jax.vmap(add, (0, None)), (0, 0))
    assert of(inner, x, m) != of(outer, x, m)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


CLASSES = """
import dataclasses, enum

FACTOR = 3

def helper(x):
    return x * FACTOR

class Kind(enum.Enum):
    ONE = 1
    TWO = 2

@dataclasses.dataclass(frozen=True)
class Record:
    value: int = 4
    limit = 5

    def emit(self, x):
        return helper(x) + 6

    @property
    def double(self):
        return self.value * 7

    @classmethod
    def make(cls):
        return [lambda: 8]
"""


def classes(text):
    scope = {"__name__": "module_of_the_program"}
    exec(compile(text, "kernels.py", "exec", dont_inherit=True), scope)
    return [scope["Kind"].ONE, scope["Kind"], scope["Record"], scope["Record"](1)]


@pytest.mark.parametrize("old", ["ONE = 1", *(str(n) for n in range(3, 9))])
def test_classes_of_the_program_count_by_their_content(old):
    """Where they are does not count, and what they do does."""
    new = old.replace(old[-1], "9")
    before, moved = classes(CLASSES), classes("\n" + CLASSES)
    after = classes(CLASSES.replace(old, new))
    texts = [[canonical_parts(one) for one in group] for group in (before, moved, after)]
    assert texts[0] == texts[1]
    differs = [a != b for a, b in zip(texts[0], texts[2], strict=True)]
    assert differs == ([True, True, False, False] if "ONE" in old else [False, False, True, True])


def test_primitives_of_one_name_are_told_apart():
    from pallasite_std.primitives.barriers import barrier_wait_p

    def make(abstract_eval):
        primitive = Primitive("barrier_wait")
        primitive.def_abstract_eval(abstract_eval)
        return primitive

    text = canonical_parts(barrier_wait_p)
    assert canonical_parts(barrier_wait_p) == text
    other = make(jnp.sin.__wrapped__)
    assert canonical_parts(other)[0].startswith("primitive barrier_wait ")
    assert canonical_parts(other) != text
    with pytest.raises(Unkeyable, match="of which there are two"):
        canonical_parts(make(jnp.sin.__wrapped__))
    with pytest.raises(Unkeyable, match="of the program itself"):
        canonical_parts(make(lambda x: x))


@dataclasses.dataclass(frozen=True)
class Record:
    value: object


def values():
    return [
        None, 0, False, 0.0, "0", b"0", 1, True, 1.0, -0.0, 1j, Ellipsis,
        Color.RED, Color.BLUE, Record(1), Record("1"), Record((1,)),
        (), (1,), ((1,),), [1], {1}, {1: 2}, {2: 1}, {"a": 1, "b": 2},
        np.float32(1), np.float64(1), np.arange(3), np.arange(3.0), np.arange(3).reshape(3, 1),
        np.dtype("float32"), jnp.bfloat16, np.dtype(jnp.bfloat16), int, float,
        jnp.sin, np.sin, functools.partial(jnp.pad, 1), functools.partial(jnp.pad, 2),
        jax.tree.structure((1, 2)), jax.tree.structure([1, 2]), jax.tree.structure((1, None)),
        slice(1, 2), slice(1, 3), pl.Element(4),
    ]  # fmt: skip


def test_values_are_told_apart_and_recognised():
    texts = ["\n".join(canonical_parts(value)) for value in values()]
    assert texts == ["\n".join(canonical_parts(value)) for value in values()]
    duplicates = {text for text in texts if texts.count(text) > 1}
    assert not duplicates
    assert canonical_parts({"a": 1, "b": 2}) == canonical_parts({"b": 2, "a": 1})
    assert canonical_parts({"a", "b"}) == canonical_parts({"b", "a"})


def local_function():
    return 1


@pytest.mark.parametrize(
    "value",
    [lambda: 1, local_function, Record(local_function), np.array([object()]), iter([1])],
    ids=["lambda", "function", "field", "objects", "iterator"],
)
def test_values_without_a_text(value):
    with pytest.raises(Unkeyable):
        canonical_parts(value)


def test_a_value_that_contains_itself():
    loop: list = []
    loop.append(loop)
    with pytest.raises((Unkeyable, RecursionError)):
        canonical_parts(loop)
    name = Name("n")
    name.label = name
    assert canonical_parts(name)


PLUGIN = """
from pallasite import hookimpl

@hookimpl
def pallasite_names():
    return {}

def emit(ctx):
    return STEPS

made = lambda ctx: 1
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed plugin: a package, and the metadata of its distribution; gives the package."""
    package = tmp_path / "some_plugin"
    package.mkdir()
    (package / "__init__.py").write_text(PLUGIN)
    metadata = tmp_path / "some_distribution-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: some-distribution\nVersion: 1.5\n"
    )
    (metadata / "entry_points.txt").write_text("[pallasite.plugins]\nsome = some_plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_manager", plugins.PluginManager())
    yield package
    sys.modules.pop("some_plugin", None)


def test_functions_of_plugins_count_by_name(installed):
    module = importlib.import_module("some_plugin")
    assert canonical_parts(module.emit) == ["function some_plugin.emit"]
    assert len(canonical_parts(functools.partial(module.emit, 1))) > 1
    with pytest.raises(Unkeyable):
        canonical_parts(module.made)  # It is not found under its name.
    with config.scoped(disabled_plugins="some"), pytest.raises(Unkeyable):
        canonical_parts(module.emit)  # Its sources are not part of the key.


def test_functions_of_plugins_of_this_process_have_no_text():
    plugin = types.ModuleType("plugin_of_this_process")
    exec("def emit(ctx):\n  return 1\n", plugin.__dict__)
    sys.modules[plugin.__name__] = plugin
    try:
        with pytest.raises(Unkeyable):
            canonical_parts(plugin.emit)
    finally:
        del sys.modules[plugin.__name__]


def test_functions_of_the_standard_library_count_by_name(monkeypatch):
    """It comes with Pallasite, as a plugin of it; so it is trusted where it is installed."""
    from pallasite_std.tuning.store import _is_entry

    manager = plugins.PluginManager(
        entry_points=lambda: [
            importlib.metadata.EntryPoint("standard", "pallasite_std.plugin", "pallasite.plugins")
        ]
    )
    monkeypatch.setattr(plugins, "_manager", manager)
    assert canonical_parts(_is_entry) == ["function pallasite_std.tuning.store._is_entry"]
