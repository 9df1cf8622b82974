"""The gpu dialect, and what nvvm has for lanes, fences and matrices."""

# ruff: noqa: E501

from __future__ import annotations

import pytest
from codegen_support import check, kernel, parse, to_llvm, to_ptx

from pallasite.codegen.llvm_ir import translate
from pallasite.errors import UnsupportedError

LAUNCH = ", nvvm.reqntid = array<i32: 256>, nvvm.cluster_dim = array<i32: 2, 1, 1>"


def stored(body: str, type_: str = "index") -> str:
    """Code whose result ``%r`` is not dead."""
    return (
        body
        + f"\n%w = arith.index_castui %r : {type_} to i32\nllvm.store %w, %p : i32, !llvm.ptr<1>"
    )


@pytest.mark.parametrize(
    ("operation", "register"),
    [
        ("gpu.thread_id x", "tid.x"),
        ("gpu.block_id y", "ctaid.y"),
        ("gpu.grid_dim z", "nctaid.z"),
        ("gpu.block_dim x", "ntid.x"),
        ("gpu.cluster_id x", "clusterid.x"),
        ("gpu.cluster_dim x", "nclusterid.x"),
        ("gpu.cluster_block_id x", "cluster.ctaid.x"),
        ("gpu.cluster_dim_blocks y", "cluster.nctaid.y"),
        ("gpu.lane_id", "laneid"),
    ],
)
def test_ids(operation, register):
    source = kernel(stored(f"%r = {operation}"), "%p: !llvm.ptr<1>")
    check(to_llvm(source), f"CHECK: call i32 @llvm.nvvm.read.ptx.sreg.{register}()")
    assert "%" + register.replace("cluster.", "cluster_") in to_ptx(source)


@pytest.mark.parametrize(
    ("operation", "number"),
    [
        ("gpu.block_dim x", 256),
        ("gpu.block_dim z", 1),
        ("gpu.thread_id y", 0),
        ("gpu.cluster_dim_blocks x", 2),
        ("gpu.cluster_dim_blocks z", 1),
    ],
)
def test_sizes_that_the_launch_fixes(operation, number):
    source = kernel(stored(f"%r = {operation}"), "%p: !llvm.ptr<1>", LAUNCH)
    assert f"trunc i64 {number} to i32" in to_llvm(source)


def test_lanes():
    source = kernel(
        """%mask = arith.constant -1 : i32
        %one = arith.constant 1 : i32
        %limit = arith.constant 31 : i32
        %f = arith.sitofp %x : i32 to f32
        %a = nvvm.shfl.sync bfly %mask, %x, %one, %limit : i32 -> i32
        %b = nvvm.shfl.sync idx %mask, %f, %one, %limit : f32 -> f32
        %c = nvvm.redux.sync add %x, %mask : i32 -> i32
        %d = nvvm.elect.sync -> i1
        %e = arith.extui %d : i1 to i32
        %g = arith.fptosi %b : f32 to i32
        %h = arith.addi %a, %c : i32
        %i = arith.addi %e, %g : i32
        %j = arith.addi %h, %i : i32
        nvvm.bar.warp.sync %mask : i32
        gpu.barrier
        "nvvm.fence.proxy"() {kind = #nvvm.proxy_kind<async.shared>, space = #nvvm.shared_space<cta>} : () -> ()
        "nvvm.fence.proxy"() {kind = #nvvm.proxy_kind<async>} : () -> ()
        nvvm.cp.async.bulk.commit.group
        "nvvm.cp.async.bulk.wait_group"() {group = 1 : i32, read} : () -> ()
        "nvvm.cluster.arrive"() {aligned} : () -> ()
        "nvvm.cluster.wait"() {aligned} : () -> ()
        llvm.store %j, %p : i32, !llvm.ptr<1>""",
        "%p: !llvm.ptr<1>, %x: i32",
    )
    text = to_ptx(source)
    for instruction in (
        "shfl.sync.bfly.b32",
        "shfl.sync.idx.b32",
        "redux.sync.add.s32",
        "elect.sync",
        "bar.warp.sync",
        "bar.sync 0;",
        "fence.proxy.async.shared::cta;",
        "fence.proxy.async;",
        "cp.async.bulk.commit_group;",
        "cp.async.bulk.wait_group.read 1;",
        "barrier.cluster.arrive.aligned;",
        "barrier.cluster.wait.aligned;",
    ):
        assert instruction in text, instruction


def test_matrices():
    shape = (
        "shape = #nvvm.ld_st_matrix_shape<m = 8, n = 8>, eltType = #nvvm.ld_st_matrix_elt_type<b16>"
    )
    source = kernel(
        f"""%a = "nvvm.ldmatrix"(%s) {{num = 2 : i32, layout = #nvvm.mma_layout<col>, {shape}}} : (!llvm.ptr<3>) -> !llvm.struct<(i32, i32)>
        %b = "nvvm.ldmatrix"(%s) {{num = 1 : i32, layout = #nvvm.mma_layout<row>, {shape}}} : (!llvm.ptr<3>) -> i32
        %c = llvm.extractvalue %a[1] : !llvm.struct<(i32, i32)>
        "nvvm.stmatrix"(%s, %b, %c) {{layout = #nvvm.mma_layout<row>, {shape}}} : (!llvm.ptr<3>, i32, i32) -> ()""",
        "%s: !llvm.ptr<3>",
    )
    text = to_ptx(source)
    for instruction in (
        "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16",
        "stmatrix.sync.aligned.m8n8.x2.shared.b16",
    ):
        assert instruction in text, instruction


def test_addresses_of_other_blocks():
    source = kernel(
        """%a = nvvm.mapa %s, %b : !llvm.ptr<3> -> !llvm.ptr<7>
        %g = llvm.addrspacecast %a : !llvm.ptr<7> to !llvm.ptr
        %m = builtin.unrealized_conversion_cast %a : !llvm.ptr<7> to memref<4xi32, 7 : i32>
        %z = arith.constant 0 : index
        memref.store %b, %m[%z] : memref<4xi32, 7 : i32>
        llvm.store %b, %g : i32, !llvm.ptr""",
        "%s: !llvm.ptr<3>, %b: i32",
    )
    text = to_ptx(source)
    assert "mapa.shared::cluster" in text and "st.shared::cluster" in text, text


def test_assembly_of_type_void():
    source = kernel(
        """%r = llvm.inline_asm has_side_effects "bar.sync $0, 128;", "r" %x : (i32) -> !llvm.void""",
        "%x: i32",
    )
    assert "bar.sync" in to_ptx(source)


def test_interleaved():
    source = kernel(
        """%v = llvm.load %p : !llvm.ptr<1> -> vector<2xi32>
        %w = vector.interleave %v, %v : vector<2xi32> -> vector<4xi32>
        llvm.store %w, %p : vector<4xi32>, !llvm.ptr<1>""",
        "%p: !llvm.ptr<1>",
    )
    check(to_llvm(source), "CHECK: <4 x i32> <i32 0, i32 2, i32 1, i32 3>")


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("%r = nvvm.redux.sync fmin %f, %x : f32 -> f32", "redux.sync of float"),
        (
            '%r = "nvvm.ldmatrix"(%s) {num = 1 : i32, layout = #nvvm.mma_layout<col>, shape ='
            " #nvvm.ld_st_matrix_shape<m = 16, n = 16>, eltType ="
            " #nvvm.ld_st_matrix_elt_type<b8>} : (!llvm.ptr<3>) -> !llvm.struct<(i32, i32)>",
            "matrices of 16 x 16 elements b8",
        ),
        ("%r = nvvm.mapa %p, %x : !llvm.ptr -> !llvm.ptr", "mapa from ptr to ptr"),
    ],
)
def test_messages(operation, message):
    source = kernel(operation, "%s: !llvm.ptr<3>, %x: i32, %f: f32, %p: !llvm.ptr")
    with pytest.raises(UnsupportedError, match=message):
        translate(parse(source))
