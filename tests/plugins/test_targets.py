"""The targets of the core and of the plugins: LLVM emits and ptxas assembles code for each."""

from __future__ import annotations

import pytest
from tests import tool_results

from pallasite import plugins
from pallasite.codegen.tools import find_tool

TARGETS = plugins.manager().targets()

HEADER = """.version {version}
.target {name}
.address_size 64
.visible .entry kernel(.param .u64 pointer) .reqntid 128 {{
  .reg .b64 %rd<4>; .reg .b32 %r<9>; .reg .b16 %h<4>; .reg .pred %p<2>; .reg .f32 %f<5>;
  ld.param.u64 %rd1, [pointer]; mov.u32 %r1, 0; mov.u16 %h1, 3;
  mov.f32 %f1, 0f00000000; setp.eq.u32 %p1, %r1, 0;
  {body}
  ret;
}}
"""

MMA = "tcgen05.mma.cta_group::1"
COPY = "cp.async.bulk.tensor.2d"
COMPLETE = "mbarrier::complete_tx::bytes"
ROWS = "{%r1, %r1, %r1, %r1, %r1}"

INSTRUCTIONS = {
    "cta_pair": f"{COPY}.shared::cluster.global.tile.{COMPLETE}.cta_group::2"
    " [%r1], [%rd1, {%r1, %r1}], [%r1];",
    "cluster": "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
    "cluster_launch_control": (
        f"clusterlaunchcontrol.try_cancel.async.shared::cta.{COMPLETE}.b128 [%r1], [%r1];"
    ),
    "cp_async": "cp.async.ca.shared.global [%r1], [%rd1], 16;",
    "bulk_reduce": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r1], 16;",
    "elect": "elect.sync %r2|%p1, 0xffffffff;",
    "griddepcontrol": "griddepcontrol.wait;",
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r2}, [%r1];",
    "mma_block_scale": "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
    ".f32.e4m3.e4m3.f32.ue8m0 {%f1, %f1, %f1, %f1}, {%r1, %r1, %r1, %r1}, {%r1, %r1},"
    " {%f1, %f1, %f1, %f1}, {%r1}, {%h1, %h1}, {%r1}, {%h1, %h1};",
    "mbarrier": "mbarrier.init.shared::cta.b64 [%r1], 1;",
    "setmaxnreg": "setmaxnreg.dec.sync.aligned.u32 40;",
    "stmatrix": "mov.u32 %r2, %tid.x; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {%r1};",
    "tcgen05": "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512;",
    "tcgen05_integer": f"{MMA}.kind::i8 [%r1], %rd1, %rd1, %r1, %p1;",
    "tcgen05_load_reduce": "tcgen05.ld.red.sync.aligned.32x32b.x2.max.NaN.f32"
    " {%f1, %f2}, %f3, [%r1];",
    "tcgen05_scale_input": f"{MMA}.kind::f16 [%r1], %rd1, %rd1, %r1, %p1, 3;",
    "tma": f"{COPY}.shared::cluster.global.{COMPLETE} [%r1], [%rd1, {{%r1, %r1}}], [%r1];",
    "tma_gather": f"{COPY}.shared::cta.global.tile::gather4.{COMPLETE}"
    f" [%r1], [%rd1, {ROWS}], [%r1];",
    "tma_gather_cluster": f"{COPY}.shared::cluster.global.tile::gather4.{COMPLETE}"
    f" [%r1], [%rd1, {ROWS}], [%r1];",
    "tma_scatter": f"{COPY}.global.shared::cta.tile::scatter4.bulk_group [%rd1, {ROWS}], [%r1];",
    "wgmma": "wgmma.fence.sync.aligned;",
}
WITHOUT_INSTRUCTION = {"bf16", "fp8"}


def test_every_feature_has_an_instruction_to_try():
    features = {feature for target in TARGETS.values() for feature in target.features}
    assert features - WITHOUT_INSTRUCTION == set(INSTRUCTIONS)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_llvm_knows_the_target(name):
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = TARGETS[name]
    module = binding.parse_assembly(
        'target triple = "nvptx64-nvidia-cuda"\ndefine ptx_kernel void @k() { ret void }'
    )
    machine = binding.Target.from_triple("nvptx64-nvidia-cuda").create_target_machine(
        cpu=name, features=f"+ptx{target.ptx_version}"
    )
    ptx = machine.emit_assembly(module)
    assert f".version {target.ptx_version / 10}" in ptx
    assert f".target {name}" in ptx


@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.parametrize("feature", sorted(INSTRUCTIONS))
def test_assembler_agrees_with_the_features(name, feature, tmp_path):
    tool = find_tool("ptxas")
    if tool.path is None:
        pytest.skip(tool.reason)
    target = TARGETS[name]
    source = tmp_path / "kernel.ptx"
    version = target.ptx_version / 10
    source.write_text(HEADER.format(version=version, name=name, body=INSTRUCTIONS[feature]))
    command = [tool.path, f"-arch={name}", source, "-o", tmp_path / "kernel.cubin"]
    result = tool_results.run(command, tmp_path)
    if target.has(feature):
        assert result.returncode == 0, result.stdout + result.stderr
    else:
        assert "not supported" in result.stderr or "requires .target" in result.stderr


def test_limits():
    assert TARGETS["sm_120a"].max_shared_memory == 99 * 1024
    assert TARGETS["sm_120a"].limit("tmem_columns") == TARGETS["sm_90a"].limit("tmem_columns") == 0
    assert TARGETS["sm_100a"].limits == TARGETS["sm_103a"].limits == {"tmem_columns": 512}
    assert TARGETS["sm_90a"].max_shared_memory == 227 * 1024
