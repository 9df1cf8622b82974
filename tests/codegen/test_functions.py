"""Kernels, their parameters and attributes, globals, and debug locations."""

# ruff: noqa: E501

from __future__ import annotations

import re

import pytest
from codegen_support import HOPPER, assemble, check, kernel, llvm_to_ptx, parse, to_llvm, to_ptx

from pallasite.codegen.llvm_ir import translate
from pallasite.errors import CompilationError


def test_kernel_attributes():
    source = kernel(
        "",
        "",
        ", nvvm.reqntid = array<i32: 384>, nvvm.minctasm = 1 : i32, nvvm.maxnreg = 168 : i32,"
        " nvvm.cluster_dim = array<i32: 2, 1, 1>",
    )
    check(
        to_llvm(source),
        """CHECK: define ptx_kernel void @k()
        CHECK-SAME: "nvvm.reqntid"="384"
        CHECK-SAME: "nvvm.minctasm"="1"
        CHECK-SAME: "nvvm.maxnreg"="168"
        CHECK-SAME: "nvvm.cluster_dim"="2,1,1\"""",
    )
    check(
        to_ptx(source),
        """CHECK: .visible .entry k()
        CHECK: .reqntid 384
        CHECK: .minnctapersm 1
        CHECK: .maxnreg 168
        CHECK: .reqnctapercluster 2, 1, 1""",
    )


def test_parameters():
    source = kernel(
        """%i = llvm.ptrtoint %d : !llvm.ptr to i64
        llvm.inline_asm has_side_effects "prefetch.tensormap [$0];", "l" %i : (i64) -> ()
        %v = llvm.load %a {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xf32>
        llvm.store %v, %b {alignment = 16 : i64} : vector<4xf32>, !llvm.ptr<1>""",
        "%d: !llvm.ptr {llvm.byval = !llvm.array<128 x i8>, llvm.align = 64 : i64,"
        " nvvm.grid_constant}, %a: !llvm.ptr<1> {llvm.noalias, llvm.readonly, llvm.align = 256 : i64},"
        " %b: !llvm.ptr<1> {llvm.noalias}",
    )
    check(
        to_llvm(source),
        """CHECK: @k(ptr byval([128 x i8]) align 64 "nvvm.grid_constant" %a0,
        CHECK-SAME: ptr addrspace(1) align 256 noalias readonly %a1, ptr addrspace(1) noalias %a2)""",
    )
    check(
        to_ptx(source),
        """CHECK: .param .align 64 .b8 k_param_0[128]
        CHECK: .param .u64 .ptr .global .align 256 k_param_1
        CHECK-NOT: .local
        CHECK: cvta.param.u64
        CHECK: ld.global.nc""",
    )


def test_globals():
    head = """
    llvm.mlir.global external @smem() {addr_space = 3 : i32, alignment = 1024 : i64} : !llvm.array<0 x i8>
    llvm.mlir.global internal constant @text("ab\\00") : !llvm.array<3 x i8>
    llvm.mlir.global internal constant @table(dense<[1, 2, 3]> : tensor<3xi32>) {addr_space = 4 : i32} : !llvm.array<3 x i32>
    llvm.mlir.global internal @scratch() {addr_space = 3 : i32} : !llvm.array<16 x f32>
    """
    source = kernel(
        """%s = llvm.mlir.addressof @smem : !llvm.ptr<3>
        %u = llvm.mlir.addressof @scratch : !llvm.ptr<3>
        %t = llvm.mlir.addressof @table : !llvm.ptr<4>
        %x = llvm.mlir.addressof @text : !llvm.ptr
        %e = llvm.getelementptr %t[%i] : (!llvm.ptr<4>, i32) -> !llvm.ptr<4>, i32
        %v = llvm.load %e : !llvm.ptr<4> -> i32
        llvm.store volatile %v, %s : i32, !llvm.ptr<3>
        llvm.store volatile %v, %u : i32, !llvm.ptr<3>
        %a = llvm.ptrtoint %x : !llvm.ptr to i64
        llvm.store volatile %a, %s : i64, !llvm.ptr<3>""",
        "%i: i32",
        head=head,
    ).replace("\\00", "\\00")
    check(
        to_llvm(source),
        """CHECK: @smem = external addrspace(3) global [0 x i8], align 1024
        CHECK-NEXT: @text = internal constant [3 x i8] c"ab\\00"
        CHECK-NEXT: @table = internal addrspace(4) constant [3 x i32] [i32 1, i32 2, i32 3]
        CHECK-NEXT: @scratch = internal addrspace(3) global [16 x float] undef""",
    )
    check(
        to_ptx(source),
        """CHECK-DAG: .extern .shared .align 1024 .b8 smem[];
        CHECK-DAG: .const .align {{[0-9]+}} .b8 table[12] = {1, 0, 0, 0, 2, 0, 0, 0, 3
        CHECK-DAG: .shared""",
    )


LOCATED = """
#line = loc("/home/user/kernel.py":12:5)
#other = loc("/home/user/helpers.py":7:3)
#named = loc("body"(#other))
#call = loc(callsite(#named at #line))
#fused = loc(fused[#line, #other])
llvm.func @k(%p: !llvm.ptr<1>, %x: f32) attributes {nvvm.kernel} {
  %a = arith.addf %x, %x : f32 loc(#line)
  %b = arith.mulf %a, %x : f32 loc(#call)
  %c = arith.subf %b, %a : f32 loc(#fused)
  llvm.store volatile %c, %p : f32, !llvm.ptr<1> loc("/home/user/kernel.py":20:1)
  llvm.return loc(unknown)
} loc("/home/user/kernel.py":10:0)
"""


def test_locations_become_line_directives():
    text = to_ptx(LOCATED, debug_info=True)
    files = dict(re.findall(r'\.file\s+(\d) "([^"]*)"', text))
    lines = {
        (files[number], int(line))
        for number, line, _ in re.findall(r"\.loc\s+(\d+) (\d+) (\d+)", text)
    }
    assert {
        ("/home/user/kernel.py", 12),
        ("/home/user/helpers.py", 7),
        ("/home/user/kernel.py", 20),
    } <= lines
    assert ".section" not in text
    assert "debug" not in text.split(".target")[1].split("\n")[0]
    assert "$L__tmp" not in text


def test_assembler_messages_point_at_the_kernel():
    text = llvm_to_ptx(translate(parse(LOCATED)), HOPPER)
    assemble(text)
    with pytest.raises(CompilationError, match="ptxas refused kernel 'kernel'") as caught:
        assemble(text.replace("mul.rn.f32", "mul.rn.f31"))
    location = caught.value.location
    assert location is not None
    assert (location.file, location.line) == ("/home/user/helpers.py", 7)
    assert "mul.rn.f31" in str(caught.value)


def test_operations_without_translation_name_their_line():
    source = LOCATED.replace("arith.subf %b, %a : f32", "math.erf %b : f32")
    with pytest.raises(CompilationError) as caught:
        translate(parse(source))
    assert str(caught.value).startswith("/home/user/kernel.py:12: operation 'math.erf'")


@pytest.mark.parametrize(
    "type_", ["vector<2x2xf32>", "f8E4M3FN", "tensor<2xf32>", "vector<[4]xf32>"]
)
def test_types_without_translation(type_):
    source = f"""func.func @f() {{ return }}
    llvm.func @k(%p: !llvm.ptr) {{
      %r = builtin.unrealized_conversion_cast %p : !llvm.ptr to {type_}
      %s = arith.select %c, %r, %r : {type_}
      llvm.return
    }}"""
    source = source.replace("func.func @f() { return }\n", "").replace(
        "      %s = arith.select %c, %r, %r : " + type_ + "\n", ""
    )
    with pytest.raises(CompilationError, match="cannot be expressed|a cast from"):
        translate(parse(source))


def test_vectors_of_higher_rank_are_refused():
    source = kernel(
        """%a = arith.constant dense<1.0> : vector<2x2xf32>
        %b = arith.addf %a, %a : vector<2x2xf32>"""
    )
    with pytest.raises(CompilationError, match="cannot be expressed in LLVM IR"):
        translate(parse(source))


def test_other_operations_at_the_top_are_refused():
    with pytest.raises(CompilationError, match=r"'func.func' at the top"):
        translate(parse("func.func @f() { return }"))
