"""Passes of plugins that leave what later steps refuse: errors name the pass and the plugin."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import llvmlite.binding
import numpy as np
import pytest
from jax.extend.core import Primitive
from jaxlib.mlir import ir

import pallasite
from pallasite import config, plugins
from pallasite import gpu as plgpu
from pallasite.plugin import Pass, hookimpl
from pallasite_simulator import PtxError, SanitizerError, simulate

X = jnp.arange(128, dtype=jnp.float32)
HINT = "PALLASITE_DISABLE_PASSES={0} or PALLASITE_DISABLE_PLUGINS=acme compiles without it"


def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1.0


def kernel():
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))


@pytest.fixture(autouse=True)
def _every_ptx_assembles():
    """It need not: passes spoil it."""


@pytest.fixture
def passes(monkeypatch):
    """Registers a plugin with some passes, for one test; nothing is kept on disk."""
    monkeypatch.setenv("PALLASITE_CACHE", "0")
    names = []

    def register(*found):
        one = types.SimpleNamespace()
        one.pallasite_passes = hookimpl(_named(lambda: list(found), "pallasite_passes"))
        names.append(plugins.register(one, "acme"))

    yield register
    for name in names:
        plugins.unregister(name)


def _named(function, name):
    function.__name__ = name
    return function


def refused(error, call):
    """What a call raises, which is at a line of the kernel above."""
    with pytest.raises(error) as caught:
        call()
    found = caught.value
    first = body.__code__.co_firstlineno
    assert found.location is not None and found.location.file == __file__
    assert found.location.line in (first, first + 1)
    return found


def assembled():
    return pallasite.compile(kernel(), X, target="sm_90a", assemble=True)


def run():
    return kernel()(X)


def spoil(old, new):
    return lambda value, context: value.replace(old, new)


def test_ptx_that_the_assembler_refuses(passes):
    passes(Pass(name="spoil", stage="ptx", run=spoil("add.", "frobnicate.")))
    error = refused(pallasite.CompilationError, assembled)
    assert error.message.startswith(
        "ptx pass 'spoil' of plugin 'acme' (in process) left invalid PTX: ptxas refused kernel"
        " 'body': "
    )
    assert "frobnicate" in error.got
    assert error.expected == "what is valid, as it was before this pass"
    assert error.hint == HINT.format("spoil")
    with config.scoped(disabled_passes="spoil"):
        assert assembled().cubin
    with config.scoped(disabled_plugins="acme"):
        assert assembled().cubin


@pytest.mark.parametrize("culprit", ["first", "second", "third"])
def test_of_several_passes_the_first_that_is_at_fault_is_named(passes, culprit):
    """Each adds a comment; one of them also what is invalid."""

    def change(name):
        wrong = " frobnicate;" if name == culprit else ""
        return spoil("ret;", f"// {name}\n{wrong} ret;")

    names = ["first", "second", "third"]
    passes(*(Pass(name=one, stage="ptx", run=change(one)) for one in names))
    error = refused(pallasite.CompilationError, assembled)
    assert error.message.startswith(f"ptx pass '{culprit}' of plugin 'acme' (in process) left")
    assert error.hint == HINT.format(culprit)
    assert not any(f"'{one}'" in str(error) for one in names if one != culprit)


def test_a_pass_is_not_blamed_for_what_was_refused_before(passes):
    """The text was invalid already: by an instruction that the kernel has from another stage."""

    def add(module, context):
        text = str(module).replace("ret void", 'call void asm sideeffect "frob;", ""()\n  ret void')
        return llvmlite.binding.parse_assembly(text)

    passes(
        Pass(name="add", stage="llvm", run=add),
        Pass(name="comment", stage="ptx", run=spoil("ret;", "// the end\n ret;")),
    )
    error = refused(pallasite.CompilationError, assembled)
    assert error.message.startswith("ptxas refused kernel 'body': ")
    assert error.message.endswith(
        "; kernel 'body' was changed by llvm pass 'add' of plugin 'acme' (in process)"
    )
    assert error.hint == HINT.format("add")
    assert "comment" not in str(error)


@pytest.mark.parametrize("disk", [False, True])
def test_ptx_that_the_simulator_refuses(passes, disk, monkeypatch, tmp_path):
    if disk:
        monkeypatch.setenv("PALLASITE_CACHE", "1")
        monkeypatch.setenv("PALLASITE_CACHE_DIR", str(tmp_path))
    passes(
        Pass(name="comment", stage="ptx", run=spoil("ret;", "// the end\n ret;")),
        Pass(name="same", stage="ptx", run=lambda value, context: value),
        Pass(name="spoil", stage="ptx", run=spoil("add.", "frobnicate.")),
    )
    compiled = pallasite.compile(kernel(), X)
    for call in (run, lambda: simulate(compiled, np.asarray(X))):
        error = refused(PtxError, call)
        assert "in: frobnicate." in error.message
        assert error.message.endswith(
            "; kernel 'body' was changed by ptx pass 'comment' of plugin 'acme' (in process), ptx"
            " pass 'spoil' of plugin 'acme' (in process)"
        )
        assert error.hint == "; ".join(HINT.format(one) for one in ("comment", "spoil"))
        assert error.expected is not None


def test_what_only_the_sanitizer_finds(passes):
    passes(
        Pass(name="drop", stage="jaxpr", run=lambda value, _: value.replace(eqns=value.eqns[:-1]))
    )
    error = refused(SanitizerError, run)
    assert "was never written" in error.message
    assert error.message.endswith(
        "\nkernel 'body' was changed by jaxpr pass 'drop' of plugin 'acme' (in process)"
    )
    assert error.hint == HINT.format("drop")


def drop_first(jaxpr, context):
    return jaxpr.replace(eqns=jaxpr.eqns[1:])


def unknown_primitive(jaxpr, context):
    first, second, *rest = jaxpr.eqns
    second = second.replace(primitive=Primitive("acme_magic"), params={})
    return jaxpr.replace(eqns=[first, second, *rest])


def _insert(module, make):
    for one in module.body.operations:
        if one.operation.name == "llvm.func" and one.regions[0].blocks:
            with (
                module.context,
                ir.Location.unknown(),
                ir.InsertionPoint.at_block_begin(one.regions[0].blocks[0]),
            ):
                make()


def unknown_operation(module, context):
    module.context.allow_unregistered_dialects = True
    _insert(module, lambda: ir.Operation.create("acme.magic"))


def invalid_operation(module, context):
    integer = ir.IntegerType.get_signless(32, module.context)
    _insert(module, lambda: ir.Operation.create("arith.addi", results=[integer]))


def invalid_llvm(module, context):
    """Parsed, but not valid: a value that depends on itself."""
    text = str(module).replace("ret void", "%bad = add i32 %bad, 1\n  ret void")
    return llvmlite.binding.parse_assembly(text)


def renamed_llvm(module, context):
    return llvmlite.binding.parse_assembly(str(module).replace("@body", "@other"))


def ends_the_program(value, context):
    raise SystemExit("no licence")


@pytest.mark.parametrize(
    ("stage", "function", "message"),
    [
        ("jaxpr", drop_first, "KeyError: "),
        ("jaxpr", unknown_primitive, "no lowering rule for primitive 'acme_magic'"),
        ("mlir", unknown_operation, "operation 'acme.magic' has no translation to LLVM IR"),
        ("mlir", invalid_operation, "left invalid MLIR: 'arith.addi' op expected 2 operands"),
        ("llvm", invalid_llvm, "LLVM refused the code that llvm pass"),
        ("llvm", renamed_llvm, "left no kernel 'body'"),
        ("ptx", lambda value, context: "", "left no kernel 'body'"),
        ("ptx", spoil(".entry body", ".entry other"), "left no kernel 'body'"),
        *(
            (stage, ends_the_program, "failed: SystemExit: no licence")
            for stage in ("jaxpr", "mlir", "llvm", "ptx")
        ),
    ],
)
def test_what_stops_the_compiler(passes, stage, function, message):
    passes(Pass(name="spoil", stage=stage, run=function))
    for call in (run, lambda: pallasite.compile(kernel(), X)):
        error = refused(pallasite.PallasiteError, call)
        assert message in error.message
        assert f"{stage} pass 'spoil' of plugin 'acme' (in process)" in error.message
        assert HINT.format("spoil") in error.hint
    with config.scoped(disabled_plugins="acme"):
        np.testing.assert_array_equal(run(), np.arange(128) + 1)


def test_what_a_pass_refuses_itself_says_which_it_was(passes):
    def refuse(value, context):
        raise pallasite.UnsupportedError("kernels on Sundays")

    passes(Pass(name="calendar", stage="ptx", run=refuse))
    error = refused(pallasite.UnsupportedError, run)
    assert error.message == "kernels on Sundays"
    assert "  in ptx pass 'calendar' of plugin 'acme' (in process)" in error.__notes__


def test_passes_that_change_nothing_are_not_named(passes):
    """What the program itself does wrong is told without them."""
    passes(
        Pass(name="look", stage="jaxpr", run=lambda value, context: None),
        Pass(name="look-again", stage="mlir", run=lambda value, context: False),
        Pass(name="return", stage="ptx", run=lambda value, context: value + ""),
    )

    def nothing(x_ref, o_ref):
        pass

    wrong = plgpu.kernel(nothing, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    with pytest.raises(SanitizerError) as error:
        wrong(X)
    assert "acme" not in str(error.value)
    np.testing.assert_array_equal(run(), np.arange(128) + 1)
