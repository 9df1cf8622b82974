"""What others emit cannot end the program by ending LLVM: it is compiled in another process."""

from __future__ import annotations

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import llvmlite.binding
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

import pallasite
from pallasite import gpu as plgpu
from pallasite import plugins
from pallasite.plugin import Pass, RuleSet, Semantics, Translation, hookimpl
from pallasite.plugin.ir import ops
from pallasite.plugin.language import MemorySpace

X = jnp.arange(128, dtype=jnp.float32)
P = Primitive("acme_op")
P.def_abstract_eval(lambda x: x)

INTRINSICS = {
    "of another target": (
        "llvm.amdgcn.workitem.id.x", (), "Cannot select: intrinsic %llvm.amdgcn.workitem.id.x"
    ),
    "of another generation": (
        "llvm.nvvm.tcgen05.wait.ld", None, "Cannot select: intrinsic %llvm.nvvm.tcgen05.wait.ld"
    ),
    "without instruction": ("llvm.sin.f64", ("x",), "Cannot select: "),
    "with too few operands": ("llvm.nvvm.abs.i", (), "Assertion `i < arg_size()"),
}  # fmt: skip


def body(x_ref, o_ref):
    o_ref[...] = P.bind(x_ref[...])


def plain(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1.0


def compiled(function=body):
    kernel = plgpu.kernel(function, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    return pallasite.compile(kernel, X, target="sm_90a")


def refused(function, line):
    with pytest.raises(pallasite.CompilationError) as caught:
        compiled(function)
    first = function.__code__.co_firstlineno
    assert caught.value.location.file == __file__
    assert caught.value.location.line == first + line
    return caught.value


@pytest.fixture
def started(monkeypatch):
    """The processes of LLVM that were started; nothing is kept on disk."""
    monkeypatch.setenv("PALLASITE_CACHE", "0")
    found = []
    start = subprocess.Popen

    def popen(arguments, **options):
        process = start(arguments, **options)
        if "-c" in arguments:  # No tool of JAX's or of Python's.
            found.append(process)
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    yield found
    assert all(one.returncode is not None for one in found), "a process is left"


@pytest.fixture
def plugin():
    """Registers a plugin for one test: what its hooks return, by name."""
    names = []

    def register(**hooks):
        one = types.SimpleNamespace()
        for hook, value in hooks.items():
            setattr(one, hook, hookimpl(_returning(hook, value)))
        names.append(plugins.register(one, "acme"))

    yield register
    for name in names:
        plugins.unregister(name)


def _returning(hook, value):
    def function():
        return value

    function.__name__ = hook
    return function


def lowering(emit):
    """A rule of the primitive: its result is what ``emit`` makes of a register, as a float."""
    rules = RuleSet()

    @rules.lowering(P, Semantics.LANE, Semantics.WARP, Semantics.WARPGROUP)
    def rule(ctx, x):
        return x.map(emit)

    return {"pallasite_lowering_rules": list(rules.lowering_rules)}


def call(name, operands):
    """Calls an intrinsic with some constants or a register, in the type that its name says."""

    def emit(register):
        if operands is None:
            ops.intrinsic(None, name)
            return register
        kind = ir.F64Type.get() if operands else ops.i32()
        values = [llvm.fpext(kind, register) for _ in operands]
        result = ops.intrinsic(kind, name, *values)
        single = ir.F32Type.get()
        return llvm.fptrunc(single, result) if operands else llvm.bitcast(single, result)

    return emit


@pytest.mark.parametrize("what", INTRINSICS)
def test_intrinsics_of_rules(plugin, started, what):
    name, operands, message = INTRINSICS[what]
    plugin(**lowering(call(name, operands)))
    error = refused(body, 1 if "Cannot select" in message else 0)
    assert error.message.startswith(f"LLVM cannot compile kernel 'body': {message}")
    assert error.message.endswith(
        "; kernel 'body' uses pallasite_lowering_rules of plugin 'acme' (in process): function of"
        " LoweringRule 'acme_op'"
    )
    assert len(started) == 1


def at_end(text, top=""):
    """An LLVM pass that adds lines before the end of the kernel, and others before it."""

    def run(module, context):
        changed = str(module).replace("  ret void", f"  {text}\n  ret void")
        return llvmlite.binding.parse_assembly(changed.replace("define", f"{top}\ndefine", 1))

    return Pass(name="spoil", stage="llvm", run=run)


USE = "store volatile i32 %zz, ptr null"
MODULES = {
    "intrinsic": (f"%zz = call i32 @llvm.amdgcn.workitem.id.x()\n{USE}", "", "Cannot select: "),
    "constraint": (f'%zz = call i32 asm "mov $0;", "=Z"()\n{USE}', "", "couldn't allocate output"),
    "scope": ('fence syncscope("agent") seq_cst', "", "NVPTX backend does not support syncscope"),
    "type": ("%zz = load volatile fp128, ptr null\n%yy = fadd fp128 %zz, %zz\n"
             "store volatile fp128 %yy, ptr null", "", "unsupported library call operation"),
    "initial value": (f"%zz = load volatile i32, ptr addrspace(3) @g\n{USE}",
                      "@g = addrspace(3) global i32 5", "initial value of 'g' is not allowed"),
    "circle": ("", "@a = global ptr @b\n@b = global ptr @a", "Circular dependency found"),
}  # fmt: skip


@pytest.mark.parametrize("what", MODULES)
def test_what_passes_leave(plugin, started, what):
    text, top, message = MODULES[what]
    plugin(pallasite_passes=[at_end(text, top)])
    error = refused(plain, 0)
    assert error.message.startswith(f"LLVM cannot compile kernel 'plain': {message}")
    assert error.message.endswith(
        "kernel 'plain' was changed by llvm pass 'spoil' of plugin 'acme' (in process)"
    )
    assert error.hint.endswith(
        "PALLASITE_DISABLE_PASSES=spoil or PALLASITE_DISABLE_PLUGINS=acme compiles without it"
    )
    assert len(started) == 1


def test_what_translations_write(plugin, started):
    def add(emitter, operation):
        emitter.define(operation, "float", "call float @llvm.amdgcn.rcp.f32(float 1.0)")

    one = Translation(operation="arith.addf", translate=add, overrides=("pallasite",))
    plugin(pallasite_translations=[one])
    error = refused(plain, 1)
    assert "Cannot select: intrinsic %llvm.amdgcn.rcp" in error.message
    assert "pallasite_translations of plugin 'acme' (in process): translate of" in error.message
    assert len(started) == 1


def test_inlined_code(started):
    @plgpu.inline_mgpu()
    def inlined(ctx):
        ops.intrinsic(None, "llvm.nvvm.tcgen05.wait.ld")

    def with_inlined(x_ref, o_ref):
        inlined()
        o_ref[...] = x_ref[...]

    error = refused(with_inlined, 1)
    assert error.message.endswith("; kernel 'with_inlined' uses inlined code inlined")


def test_memory_spaces(plugin, started):
    class Acme(MemorySpace):
        name = "ACME"
        is_shared = True

        def resources(self, ctx, variable, axes):
            return MemorySpace.SMEM.resources(ctx, variable, axes)

        def allocate(self, ctx, variable, axes):
            ops.intrinsic(None, "llvm.nvvm.tcgen05.wait.ld")
            return ctx.shared_array(variable)

    space = Acme()
    plugin(pallasite_memory_spaces=[space])

    def scoped(x_ref, o_ref):
        def within(scratch):
            o_ref[...] = x_ref[...]

        pl.run_scoped(within, space((128,), jnp.float32))

    error = refused(scoped, 4)
    assert error.message.endswith(
        "; kernel 'scoped' uses memory space ACME of plugin 'acme' (in process)"
    )


def test_results_are_those_of_one_process(plugin, started):
    """What is valid is compiled as ever, with rules and with passes of plugins."""
    expected = compiled(plain)
    assert not started
    plugin(
        pallasite_passes=[
            Pass(name="comment", stage="mlir", run=lambda value, context: value),
            Pass(name="again", stage="llvm", run=lambda value, context: value),
        ],
        **lowering(lambda register: arith.addf(register, register)),
    )
    assert compiled(plain).ptx == expected.ptx
    assert len(started) == 1
    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    np.testing.assert_array_equal(kernel(X), 2 * X)
    assert len(started) == 2


def test_kernels_that_a_plugin_has_no_part_in_need_no_process(plugin, started):
    unused = Pass(name="jaxpr", stage="jaxpr", run=lambda value, context: value)
    plugin(pallasite_passes=[unused], **lowering(lambda register: register))
    assert compiled(plain).ptx
    assert not started


@pytest.mark.parametrize("program", ["/nonexistent/python", "/bin/true"])
def test_without_a_process_it_is_compiled_in_this_one(plugin, started, monkeypatch, program):
    plugin(**lowering(lambda register: arith.addf(register, register)))
    monkeypatch.setattr(sys, "executable", program)
    assert compiled().ptx
