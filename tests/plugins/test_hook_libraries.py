"""Passes that link device libraries: a plugin whose primitive is a function in LLVM bitcode."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
import numpy as np
import pytest
from jax.extend.core import Primitive
from jaxlib.mlir import ir

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import CompilationError
from pallasite.plugin import Pass, RuleSet, Semantics, hookimpl, manager
from pallasite.plugin.lowering import RegisterArray
from pallasite_std import device_libraries
from pallasite_std.api import library_key, link_library, trimmed_library

IR = """
target triple = "nvptx64-nvidia-cuda"

@unused.table = internal addrspace(1) global [4 x float] zeroinitializer
@llvm.used = appending global [1 x ptr] [ptr @unrelated], section "llvm.metadata"

define float @cubed(float %x) #0 {
  %y = call float @times(float %x, float %x)
  %z = call float @times(float %y, float %x)
  ret float %z
}

define linkonce_odr float @times(float %x, float %y) #0 section ".text.compute" {
  %z = fmul float %x, %y
  ret float %z
}

define void @unrelated() #0 {
  ret void
}

attributes #0 = { noinline nounwind "target-cpu"="sm_70" "target-features"="+ptx63,+sm_70" }
"""

cubed_p = Primitive("cubed")
cubed_p.def_abstract_eval(lambda x: x)
rules = RuleSet()


@rules.lowering(cubed_p, Semantics.LANE)
def _cubed(ctx, x):
    body = ctx.launch.module.body
    if not any(
        "sym_name" in one.attributes and "cubed" in str(one.attributes["sym_name"])
        for one in body.operations
    ):
        declared = ir.Operation.parse("llvm.func @cubed(f32) -> f32")
        ir.InsertionPoint.at_block_begin(body).insert(declared)

    def one(value):
        return ir.Operation.create(
            "llvm.call",
            results=[value.type],
            operands=[value],
            attributes={
                "callee": ir.FlatSymbolRefAttr.get("cubed"),
                "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 0]),
                "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
            },
        ).result

    return x.map(one) if hasattr(x, "map") else RegisterArray.splat(one(x), np.dtype(np.float32))


def bitcode(text=IR):
    with llvm.create_context() as context, llvm.parse_assembly(text, context) as module:
        return module.as_bitcode()


class Plugin:
    @hookimpl
    def pallasite_lowering_rules(self):
        return rules.lowering_rules

    @hookimpl
    def pallasite_passes(self):
        library = trimmed_library(bitcode(), ["cubed"])

        def link(module, context):
            if "@cubed" not in context.llvm:
                return False
            return link_library(module, context, library)

        return [Pass(name="link-cubed", stage="llvm", run=link, before=("llvm-optimize",))]


@pytest.fixture(autouse=True)
def plugin():
    one = Plugin()
    manager().register(one, "cubes")
    yield
    manager().unregister("cubes")


def body(x_ref, out_ref):
    out_ref[0] = cubed_p.bind(x_ref[0])


PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
OUT = jax.ShapeDtypeStruct((1,), jnp.float32)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_function_of_bitcode_is_inlined(target):
    kernel = plgpu.kernel(body, out_type=OUT, compiler_params=PARAMS)
    found = pallasite.compile(kernel, OUT, target=target)
    assert (
        "call" not in found.ptx and ".func" not in found.ptx and found.ptx.count("mul.rn.f32") == 2
    )
    with pallasite.target(target):
        np.testing.assert_array_equal(kernel(jnp.full((1,), 3.0)), [27.0])


def test_only_what_is_used_is_kept():
    text = trimmed_library(bitcode(), ["cubed"])
    assert "@cubed" in text and "@times" in text and "alwaysinline" in text
    for gone in ("unrelated", "unused", "target-cpu", "section", "noinline"):
        assert gone not in text


def test_libraries_that_cannot_be_read():
    with pytest.raises(CompilationError, match="LLVM cannot read a device library"):
        trimmed_library(b"no bitcode", ["cubed"])
    with pytest.raises(CompilationError, match="lacks functions") as caught:
        trimmed_library(bitcode(), ["cubed", "squared"])
    assert "squared" in str(caught.value)


def test_libraries_that_do_not_fit():
    text = "define void @kernel() {\n  ret void\n}\n"
    with (
        llvm.create_context() as context,
        llvm.parse_assembly(text, context) as module,
        pytest.raises(CompilationError, match="cannot link a device library"),
    ):
        link_library(module, types.SimpleNamespace(), text)


def test_a_key_holds_all_that_a_cut_library_depends_on(monkeypatch):
    key = library_key(bitcode(), ["cubed"])
    assert library_key(bitcode(), {"cubed": "float (float)"}) == key
    others = [library_key(bitcode() + b"0", ["cubed"]), library_key(bitcode(), ["squared"])]
    monkeypatch.setattr(device_libraries, "_SOURCE", "other code")
    others.append(library_key(bitcode(), ["cubed"]))
    assert len({key, *others}) == 4
