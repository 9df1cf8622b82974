"""The llvm dialect: memory, atomics, aggregates, inline assembly, intrinsics, vectors."""

# ruff: noqa: E501

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from codegen_support import (
    call_host,
    check,
    compile_host,
    elementwise,
    kernel,
    parse,
    to_llvm,
    to_ptx,
)

from pallasite.errors import CompilationError
from pallasite_std.dialects.ub import PoisonOp


def test_undefined_values():
    """The bindings know the class of ``ub.poison``: else they would look for it every time."""
    source = kernel("%x = ub.poison : f32\nllvm.store %x, %p : f32, !llvm.ptr", "%p: !llvm.ptr")
    check(to_llvm(source), "CHECK: store float poison, ptr %a0")
    module = parse(source)
    (function,) = module.body.operations
    assert isinstance(next(iter(function.regions[0].blocks[0].operations)), PoisonOp)


def test_addresses():
    source = kernel(
        """%i64 = arith.extsi %i : i32 to i64
        %a = llvm.getelementptr %p[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, f32
        %b = llvm.getelementptr %a[3] {inbounds} : (!llvm.ptr<1>) -> !llvm.ptr<1>, f32
        %c = llvm.getelementptr %b[%i64, 1, %i] : (!llvm.ptr<1>, i64, i32) -> !llvm.ptr<1>, !llvm.struct<(i32, array<4 x f32>)>
        %d = llvm.getelementptr %s[%i] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
        %v = llvm.load %c : !llvm.ptr<1> -> f32
        llvm.store %v, %d : f32, !llvm.ptr<3>""",
        "%p: !llvm.ptr<1>, %s: !llvm.ptr<3>, %i: i32",
    )
    check(
        to_llvm(source),
        """CHECK: %1 = getelementptr float, ptr addrspace(1) %a0, i32 %a2
        CHECK-NEXT: %2 = getelementptr inbounds float, ptr addrspace(1) %1, i32 3
        CHECK-NEXT: %3 = getelementptr {i32, [4 x float]}, ptr addrspace(1) %2, i64 %0, i32 1, i32 %a2
        CHECK-NEXT: %4 = getelementptr i8, ptr addrspace(3) %a1, i32 %a2""",
    )
    to_ptx(source)


def test_loads_and_stores():
    source = kernel(
        """%d = llvm.load %p invariant : !llvm.ptr<1> -> i32
        llvm.store %d, %q : i32, !llvm.ptr<1>
        %a = llvm.load %p {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xf32>
        llvm.store %a, %q {alignment = 16 : i64, nontemporal} : vector<4xf32>, !llvm.ptr<1>
        %b = llvm.load volatile %p : !llvm.ptr<1> -> i32
        llvm.store volatile %b, %q {alignment = 8 : i64} : i32, !llvm.ptr<1>
        %c = llvm.load %p atomic syncscope("device") acquire {alignment = 4 : i64} : !llvm.ptr<1> -> i32
        llvm.store %c, %q atomic release {alignment = 4 : i64} : i32, !llvm.ptr<1>
        llvm.fence syncscope("block") acq_rel
        llvm.fence seq_cst""",
        "%p: !llvm.ptr<1>, %q: !llvm.ptr<1>",
    )
    check(
        to_llvm(source),
        """CHECK: load i32, ptr addrspace(1) %a0, !invariant.load
        CHECK-NEXT: store i32
        CHECK-NEXT: load <4 x float>, ptr addrspace(1) %a0, align 16
        CHECK-NEXT: store <4 x float> %1, ptr addrspace(1) %a1, align 16, !nontemporal
        CHECK-NEXT: load volatile i32, ptr addrspace(1) %a0
        CHECK-NEXT: store volatile i32 %2, ptr addrspace(1) %a1, align 8
        CHECK-NEXT: load atomic i32, ptr addrspace(1) %a0 syncscope("device") acquire, align 4
        CHECK-NEXT: store atomic i32 %3, ptr addrspace(1) %a1 release, align 4
        CHECK-NEXT: fence syncscope("block") acq_rel
        CHECK-NEXT: fence seq_cst""",
    )
    check(
        to_ptx(source),
        """CHECK: ld.global.nc.b32
        CHECK: ld.global.v4.b32
        CHECK: st.global.v4.b32
        CHECK: ld.volatile.global.b32
        CHECK: ld.acquire.gpu.global.b32
        CHECK: st.release.sys.global.b32
        CHECK: fence.acq_rel.cta
        CHECK: fence.sc.sys""",
    )


def test_atomics():
    source = kernel(
        """%a = llvm.atomicrmw add %p, %i syncscope("device") monotonic : !llvm.ptr<1>, i32
        %b = llvm.atomicrmw umax %s, %a monotonic : !llvm.ptr<3>, i32
        %c = llvm.atomicrmw fadd %p, %x monotonic : !llvm.ptr<1>, f32
        %d = llvm.atomicrmw xchg %p, %b syncscope("device") acq_rel : !llvm.ptr<1>, i32
        %g = llvm.atomicrmw _or %p, %d seq_cst : !llvm.ptr<1>, i32
        %e = llvm.cmpxchg %p, %g, %i acq_rel monotonic : !llvm.ptr<1>, i32
        %f = llvm.extractvalue %e[0] : !llvm.struct<(i32, i1)>
        llvm.store %f, %s : i32, !llvm.ptr<3>""",
        "%p: !llvm.ptr<1>, %s: !llvm.ptr<3>, %i: i32, %x: f32",
    )
    check(
        to_llvm(source),
        """CHECK: atomicrmw add ptr addrspace(1) %a0, i32 %a2 syncscope("device") monotonic
        CHECK-NEXT: atomicrmw umax ptr addrspace(3) %a1, i32 %0 monotonic
        CHECK: cmpxchg ptr addrspace(1) %a0, i32 %4, i32 %a2 acq_rel monotonic
        CHECK-NEXT: extractvalue {i32, i1} %5, 0""",
    )
    check(
        to_ptx(source),
        """CHECK: atom.global.add.u32
        CHECK: atom.shared.max.u32
        CHECK: atom.relaxed.sys.global.add.f32
        CHECK: atom.acq_rel.gpu.global.exch.b32
        CHECK: fence.sc.sys
        CHECK: atom.acquire.sys.global.or.b32
        CHECK: atom.acq_rel.sys.global.cas.b32""",
    )


def test_atomics_that_the_target_cannot_do():
    body = "%a = llvm.atomicrmw fmax %p, %x acq_rel : !llvm.ptr<1>, f32"
    with pytest.raises(CompilationError, match="atomicrmw fmax of type float"):
        to_llvm(kernel(body, "%p: !llvm.ptr<1>, %x: f32"))


def test_aggregates_and_pointers():
    source = """
    llvm.func @f(%x: i32, %y: f32) -> i32 {
      %u = llvm.mlir.undef : !llvm.struct<(i32, struct<(f32, array<2 x i32>)>)>
      %a = llvm.insertvalue %x, %u[0] : !llvm.struct<(i32, struct<(f32, array<2 x i32>)>)>
      %b = llvm.insertvalue %y, %a[1, 0] : !llvm.struct<(i32, struct<(f32, array<2 x i32>)>)>
      %c = llvm.insertvalue %x, %b[1, 1, 1] : !llvm.struct<(i32, struct<(f32, array<2 x i32>)>)>
      %d = llvm.extractvalue %c[1] : !llvm.struct<(i32, struct<(f32, array<2 x i32>)>)>
      %e = llvm.extractvalue %d[0] : !llvm.struct<(f32, array<2 x i32>)>
      %g = llvm.extractvalue %d[1, 1] : !llvm.struct<(f32, array<2 x i32>)>
      %h = llvm.fptosi %e : f32 to i32
      %r = llvm.add %g, %h : i32
      %one = llvm.mlir.constant(1 : i32) : i32
      %p = llvm.alloca %one x i32 {alignment = 16 : i64} : (i32) -> !llvm.ptr
      llvm.store %r, %p : i32, !llvm.ptr
      %i = llvm.ptrtoint %p : !llvm.ptr to i64
      %q = llvm.inttoptr %i : i64 to !llvm.ptr
      %s = llvm.load %q : !llvm.ptr -> i32
      llvm.return %s : i32
    }"""
    assert call_host(source, "i32", ("i32", 5), ("f32", 3.0)) == 8


@pytest.mark.parametrize("space", [0, 5])
def test_memory_that_is_allocated_behind_a_branch(space):
    """It becomes registers like any other: there is nothing in local memory."""
    pointer = f"!llvm.ptr<{space}>" if space else "!llvm.ptr"
    source = kernel(
        f"""%c1 = llvm.mlir.constant(1 : i32) : i32
        %zero = llvm.mlir.constant(0 : i32) : i32
        %some = llvm.icmp "sgt" %x, %zero : i32
        scf.if %some {{
          llvm.inline_asm has_side_effects "membar.gl;", "" : () -> ()
        }}
        %p = llvm.alloca %c1 x i32 : (i32) -> {pointer}
        llvm.store %zero, %p : i32, {pointer}
        scf.if %some {{
          llvm.inline_asm has_side_effects "membar.gl;", "" : () -> ()
          llvm.store %x, %p : i32, {pointer}
        }}
        %y = llvm.load %p : {pointer} -> i32
        llvm.store %y, %o : i32, !llvm.ptr<1>""",
        "%o: !llvm.ptr<1>, %x: i32",
    )
    assert "local" not in to_ptx(source)


def test_constants_of_the_llvm_dialect():
    source = kernel(
        """%a = llvm.mlir.constant(dense<[1.0, 2.0]> : vector<2xf32>) : vector<2xf32>
        %b = llvm.mlir.zero : !llvm.ptr<1>
        %c = llvm.mlir.zero : !llvm.struct<(i32, array<2 x ptr<3>>)>
        %d = llvm.mlir.poison : i32
        llvm.store %a, %p : vector<2xf32>, !llvm.ptr<1>
        llvm.store %b, %p : !llvm.ptr<1>, !llvm.ptr<1>
        llvm.store %c, %p : !llvm.struct<(i32, array<2 x ptr<3>>)>, !llvm.ptr<1>
        llvm.store %d, %p : i32, !llvm.ptr<1>""",
        "%p: !llvm.ptr<1>",
    )
    check(
        to_llvm(source),
        """CHECK: store <2 x float> <float 1.000000e+00, float 2.000000e+00>
        CHECK-NEXT: store ptr addrspace(1) null
        CHECK-NEXT: store {i32, [2 x ptr addrspace(3)]} zeroinitializer
        CHECK-NEXT: store i32 poison""",
    )


def test_address_spaces():
    source = kernel(
        """%g = llvm.addrspacecast %s : !llvm.ptr<3> to !llvm.ptr
        %i = llvm.ptrtoint %s : !llvm.ptr<3> to i32
        llvm.store %i, %g : i32, !llvm.ptr""",
        "%s: !llvm.ptr<3>",
    )
    check(to_llvm(source), "CHECK: addrspacecast ptr addrspace(3) %a0 to ptr")
    to_ptx(source)


def test_inline_assembly():
    source = kernel(
        """%r = llvm.inline_asm has_side_effects "{\\n .reg .pred p; add.u32 $0, $2, 1; sub.u32 $1, $2, 1;\\n}", "=r,=r,r,~{memory}" %i : (i32) -> !llvm.struct<(i32, i32)>
        %a = llvm.extractvalue %r[0] : !llvm.struct<(i32, i32)>
        %b = llvm.extractvalue %r[1] : !llvm.struct<(i32, i32)>
        %c = llvm.inline_asm "mul.lo.u32 $0, $1, $2;", "=r,r,r" %a, %b : (i32, i32) -> i32
        %unused = llvm.inline_asm "not.b32 $0, $1;", "=r,r" %a : (i32) -> i32
        llvm.inline_asm has_side_effects "bar.sync 1, $0;", "n" %k : (i32) -> ()
        llvm.store %c, %p : i32, !llvm.ptr<1>""",
        "%i: i32, %k: i32, %p: !llvm.ptr<1>",
    ).replace('"n" %k : (i32)', '"r" %k : (i32)')
    check(
        to_llvm(source),
        """CHECK: call {i32, i32} asm sideeffect "{\\0A .reg .pred p; add.u32 $0, $2, 1; sub.u32 $1, $2, 1;\\0A}", "=r,=r,r,~{memory}"(i32 %a0) #2
        CHECK: call i32 asm "mul.lo.u32 $0, $1, $2;", "=r,r,r"(i32 %1, i32 %2) #1
        CHECK: call void asm sideeffect "bar.sync 1, $0;", "r"(i32 %a1) #2
        CHECK: attributes #0 = { convergent nounwind }
        CHECK: attributes #1 = { nounwind willreturn memory(none) }
        CHECK: attributes #2 = { convergent nounwind willreturn }
        CHECK: attributes #3 = { convergent nounwind willreturn memory(none) }""",
    )
    text = to_ptx(source)
    assert "bar.sync 1" in text
    assert "not.b32" not in text


def test_assembly_of_whole_warps_stays_outside_of_branches():
    """Where only some lanes need a result, all have to take part nevertheless."""
    source = kernel(
        """%sum = llvm.inline_asm "redux.sync.add.s32 $0, $1, -1;", "=r,r" %i : (i32) -> i32
        %not = llvm.inline_asm "not.b32 $0, $1;", "=r,r" %i : (i32) -> i32
        %unused = llvm.inline_asm "redux.sync.max.s32 $0, $1, -1;", "=r,r" %i : (i32) -> i32
        scf.if %c {
          llvm.store %sum, %p : i32, !llvm.ptr<1>
          llvm.store %not, %q : i32, !llvm.ptr<1>
        }""",
        "%i: i32, %c: i1, %p: !llvm.ptr<1>, %q: !llvm.ptr<1>",
    )
    text = to_ptx(source)
    assert text.index("redux.sync.add") < text.index("bra") < text.index("not.b32")
    assert "redux.sync.max" not in text


@pytest.mark.parametrize(
    ("assembly", "message"),
    [
        ('"mov $0, $1;", "=r,x" %i : (i32) -> i32', "unknown assembly constraint 'x'"),
        ('"mov $0, $1;", "=r,l" %i : (i32) -> i32', "type i32 in a register of 64 bits"),
        ('"mov $0, $1;", "=r,r" %w : (i64) -> i32', "type i64 in a register of 32 bits"),
        ('"mov $0, $1;", "=r,0" %w : (i64) -> i32', "tied to a result of another type"),
        ('"mov $0, $1;", "=r,n" %i : (i32) -> i32', "operand 0 of assembly must be a constant"),
        ('"mov $0, $1;", "=r,r,r" %i : (i32) -> i32', "with 1 results and 1 operands"),
    ],
)
def test_assembly_that_the_back_end_cannot_do(assembly, message):
    body = f"%r = llvm.inline_asm has_side_effects {assembly}"
    with pytest.raises(CompilationError, match=message):
        to_llvm(kernel(body, "%i: i32, %w: i64"))


def test_assembly_operands():
    body = """%k = arith.constant 3 : i32
    %b = llvm.inline_asm "setp.eq.u32 $0, $1, $2;", "=b,r,n" %i, %k : (i32, i32) -> i1
    llvm.inline_asm has_side_effects "st.shared.v2.b32 [$0], {$1, $2};", "r,r,f,~{memory}" %s, %v, %x
      : (!llvm.ptr<3>, vector<2xbf16>, f32) -> ()
    llvm.inline_asm has_side_effects "st.shared.b16 [$0], $1;", "r,h,~{memory}" %s, %h : (!llvm.ptr<3>, f16) -> ()
    llvm.store %b, %s : i1, !llvm.ptr<3>"""
    parameters = "%i: i32, %s: !llvm.ptr<3>, %v: vector<2xbf16>, %x: f32, %h: f16"
    check(
        to_ptx(kernel(body, parameters)),
        """CHECK-DAG: setp.eq.u32 %p{{[0-9]+}}, %r{{[0-9]+}}, 3;
        CHECK-DAG: st.shared.v2.b32""",
    )


def test_assembly_without_side_effects_leaves_loops():
    source = kernel(
        """%c0 = arith.constant 0 : i32
        %c1 = arith.constant 1 : i32
        scf.for %i = %c0 to %n step %c1 : i32 {
          %v = llvm.inline_asm "cvt.u32.u64 $0, $1;", "=r,l" %x : (i64) -> i32
          llvm.store volatile %v, %p : i32, !llvm.ptr<1>
        }""",
        "%n: i32, %x: i64, %p: !llvm.ptr<1>",
    )
    text = to_ptx(source)
    loop = text.index("$L__BB0_2:")
    assert text.index("cvt.u32.u64") < loop < text.index("st.volatile")


def test_intrinsics():
    source = kernel(
        """%t = llvm.call_intrinsic "llvm.nvvm.read.ptx.sreg.tid.x"() : () -> i32
        llvm.call_intrinsic "llvm.nvvm.barrier.cta.sync.aligned.all"(%t) : (i32) -> ()
        %a = "llvm.intr.fshl"(%t, %i, %i) : (i32, i32, i32) -> i32
        %b = "llvm.intr.ctlz"(%a) <{is_zero_poison = false}> : (i32) -> i32
        %c = "llvm.intr.umin"(%a, %b) : (i32, i32) -> i32
        %d = "llvm.intr.fma"(%x, %x, %x) {fastmathFlags = #llvm.fastmath<contract>} : (f32, f32, f32) -> f32
        %e = "llvm.intr.fabs"(%d) : (f32) -> f32
        %f = llvm.fneg %e : f32
        llvm.store %c, %p : i32, !llvm.ptr<1>
        llvm.store %f, %p : f32, !llvm.ptr<1>""",
        "%i: i32, %x: f32, %p: !llvm.ptr<1>",
    )
    check(
        to_llvm(source),
        """CHECK: call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
        CHECK-NEXT: call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 %0)
        CHECK-NEXT: call i32 @llvm.fshl.i32(i32 %0, i32 %a0, i32 %a0)
        CHECK-NEXT: call i32 @llvm.ctlz.i32(i32 %1, i1 false)
        CHECK-NEXT: call i32 @llvm.umin.i32(i32 %1, i32 %2)
        CHECK-NEXT: call contract float @llvm.fma.f32(float %a1, float %a1, float %a1)
        CHECK-NEXT: call float @llvm.fabs.f32(float %4)
        CHECK-NEXT: fneg float %5""",
    )
    check(to_ptx(source), "CHECK: mov.u32 {{.*}}, %tid.x")


def test_flags_of_the_llvm_dialect():
    source = kernel(
        """%a = llvm.udiv exact %i, %j : i32
        %b = llvm.or disjoint %a, %j : i32
        %c = llvm.zext nneg %b : i32 to i64
        %d = llvm.icmp "ult" %c, %c : i64
        %e = llvm.fcmp "une" %x, %x : f32
        %f = llvm.select %d, %e, %d : i1, i1
        llvm.store %f, %p : i1, !llvm.ptr<1>""",
        "%i: i32, %j: i32, %x: f32, %p: !llvm.ptr<1>",
    )
    check(
        to_llvm(source),
        """CHECK: udiv exact i32
        CHECK-NEXT: or disjoint i32
        CHECK-NEXT: zext nneg i32
        CHECK-NEXT: icmp ult i64
        CHECK-NEXT: fcmp une float
        CHECK-NEXT: select i1""",
    )


def test_calls():
    source = """
    llvm.func @twice(%x: i32) -> i32 {
      %r = llvm.add %x, %x : i32
      llvm.return %r : i32
    }
    llvm.func internal @"odd name"(%p: !llvm.ptr, %x: i32) {
      llvm.store %x, %p : i32, !llvm.ptr
      llvm.return
    }
    llvm.func @f(%x: i32) -> i32 {
      %c1 = arith.constant 1 : i32
      %p = llvm.alloca %c1 x i32 : (i32) -> !llvm.ptr
      %y = llvm.call @twice(%x) : (i32) -> i32
      llvm.call @"odd name"(%p, %y) : (!llvm.ptr, i32) -> ()
      %z = llvm.load %p : !llvm.ptr -> i32
      llvm.return %z : i32
    }"""
    assert call_host(source, "i32", ("i32", 21)) == 42


def _vectors(body: str, length: int, result: int) -> np.ndarray:
    """Runs a body from ``%v``, ``%w`` (vectors) and ``%s`` (scalar) to the vector ``%r``."""
    source = f"""
    llvm.func @f(%a: !llvm.ptr, %b: !llvm.ptr, %o: !llvm.ptr) {{
      %v = llvm.load %a {{alignment = 4 : i64}} : !llvm.ptr -> vector<{length}xf32>
      %w = llvm.load %b {{alignment = 4 : i64}} : !llvm.ptr -> vector<{length}xf32>
      %s = arith.constant 9.0 : f32
      %t = llvm.load %b : !llvm.ptr -> f32
      {body}
      llvm.store %r, %o {{alignment = 4 : i64}} : vector<{result}xf32>, !llvm.ptr
      llvm.return
    }}"""
    v = np.arange(length, dtype=np.float32)
    w = v + 100
    out = np.zeros(result, np.float32)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(compile_host(source))
    function(v.ctypes.data, w.ctypes.data, out.ctypes.data)
    return out


VECTORS = [
    ("%r = vector.broadcast %s : f32 to vector<3xf32>", 4, [9, 9, 9]),
    ("%r = vector.broadcast %t : f32 to vector<3xf32>", 4, [100, 100, 100]),
    ("%r = vector.broadcast %t : f32 to vector<1xf32>", 4, [100]),
    ("%r = vector.insert %t, %v[2] : f32 into vector<4xf32>", 4, [0, 1, 100, 3]),
    (
        "%e = vector.extract %v[3] : f32 from vector<4xf32>\n"
        "%r = vector.from_elements %e, %s, %t : vector<3xf32>",
        4,
        [3, 9, 100],
    ),
    ("%r = vector.from_elements %s, %s : vector<2xf32>", 4, [9, 9]),
    (
        "%r = vector.shuffle %v, %w [0, 5, -1, 3] : vector<4xf32>, vector<4xf32>",
        4,
        [0, 101, None, 3],
    ),
    (
        "%n = vector.extract_strided_slice %v offsets=[1], sizes=[2], strides=[1]"
        " : vector<4xf32> to vector<2xf32>\n"
        "%r = vector.shuffle %n, %w [1, 2, 5] : vector<2xf32>, vector<4xf32>",
        4,
        [2, 100, 103],
    ),
    (
        "%n = vector.extract_strided_slice %w offsets=[0], sizes=[2], strides=[1]"
        " : vector<4xf32> to vector<2xf32>\n"
        "%r = vector.insert_strided_slice %n, %v offsets=[1], strides=[1]"
        " : vector<2xf32> into vector<4xf32>",
        4,
        [0, 100, 101, 3],
    ),
    (
        "%e:4 = vector.to_elements %v : vector<4xf32>\n"
        "%r = vector.from_elements %e#3, %e#0 : vector<2xf32>",
        4,
        [3, 0],
    ),
    (
        "%i = vector.bitcast %v : vector<4xf32> to vector<2xi64>\n"
        "%r = vector.bitcast %i : vector<2xi64> to vector<4xf32>",
        4,
        [0, 1, 2, 3],
    ),
]


@pytest.mark.parametrize(("body", "length", "expected"), VECTORS)
def test_vectors(body, length, expected):
    got = _vectors(body, length, len(expected))
    kept = [index for index, one in enumerate(expected) if one is not None]
    np.testing.assert_array_equal(got[kept], [expected[index] for index in kept])


def test_packed_conversion_of_bfloat16():
    source = kernel(
        """%a = arith.truncf %v : vector<2xf32> to vector<2xbf16>
        %b = vector.bitcast %a : vector<2xbf16> to vector<1xi32>
        %c = vector.extract %b[0] : i32 from vector<1xi32>
        llvm.store %c, %p : i32, !llvm.ptr<1>""",
        "%v: vector<2xf32>, %p: !llvm.ptr<1>",
    )
    check(to_ptx(source), "CHECK: cvt.rn.bf16x2.f32")


def test_dynamic_vector_elements():
    x = np.array([2, 0, 1], np.int32)
    body = """%v = arith.constant dense<[10, 20, 30]> : vector<3xi32>
      %r = llvm.extractelement %v[%x0 : i32] : vector<3xi32>"""
    np.testing.assert_array_equal(elementwise(body, "i32", ("i32", x)), [30, 10, 20])
