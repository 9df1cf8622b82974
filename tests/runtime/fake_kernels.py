"""Compiled kernels from hand-written LLVM IR, for tests of launching that need no lowering."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import llvmlite.binding as llvm
import numpy as np

from pallasite.codegen.compiled import CompiledKernel
from pallasite.launch import (
    ArrayParameter,
    Buffer,
    BufferKind,
    LaunchParameters,
    Parameter,
    ResourceReport,
    TensorMapParameter,
)
from pallasite.launch_plan import canonical_order
from pallasite.targets import Target

SM_90A = Target(name="sm_90a", ptx_version=86, compute_capability=(9, 0))


@functools.cache
def assemble_ir(source: str, cpu: str = "sm_90a", features: str = "+ptx86") -> str:
    """PTX of textual LLVM IR."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(source)
    target = llvm.Target.from_triple("nvptx64-nvidia-cuda")
    machine = target.create_target_machine(cpu=cpu, opt=3, features=features)
    module.data_layout = str(machine.target_data)
    return machine.emit_assembly(module)


def buffers(kind: BufferKind, shapes: Sequence[tuple[int, ...]], dtype=np.float32, **kwargs):
    """One buffer for each shape, numbered."""
    return tuple(
        Buffer(kind, index, tuple(shape), np.dtype(dtype), **kwargs)
        for index, shape in enumerate(shapes)
    )


def inputs(*shapes, dtype=np.float32):
    return buffers(BufferKind.INPUT, shapes, dtype)


def outputs(*shapes, dtype=np.float32):
    return buffers(BufferKind.OUTPUT, shapes, dtype)


def scratch(*shapes, dtype=np.float32, zeroed=False):
    return buffers(BufferKind.SCRATCH, shapes, dtype, zeroed=zeroed)


def tensor_map(buffer: Buffer, box: tuple[int, ...], swizzle: int = 16) -> TensorMapParameter:
    """A descriptor of a row-major float32 array."""
    strides = tuple(int(np.prod(buffer.shape[i + 1 :])) for i in range(len(buffer.shape)))
    return TensorMapParameter(buffer, 6, buffer.shape, strides, box, swizzle)


def kernel(
    body: str,
    parameters: Sequence[Parameter],
    in_buffers: Sequence[Buffer] = (),
    out_buffers: Sequence[Buffer] = (),
    scratch_buffers: Sequence[Buffer] = (),
    *,
    aliases: tuple[tuple[int, int], ...] = (),
    grid: tuple[int, int, int] = (1, 1, 1),
    threads: int = 128,
    cluster: tuple[int, int, int] = (1, 1, 1),
    name: str = "fake",
    names: Sequence[str] = (),
    order: bool = True,
) -> CompiledKernel:
    """A kernel of one basic block.

    Args:
      body: LLVM IR; ``%tid`` and ``%block`` are the thread and block number (i32), ``%p0``, ``%p1``
        and so on the parameters (global pointers, or generic pointers to descriptors), numbered as
        in ``parameters``.
    """
    ordered = canonical_order(parameters, aliases) if order else tuple(parameters)
    remaining = list(enumerate(parameters))
    signature = []
    for parameter in ordered:
        number, _ = remaining.pop(
            next(i for i, (_, candidate) in enumerate(remaining) if candidate == parameter)
        )
        kind = (
            "ptr addrspace(1)"
            if isinstance(parameter, ArrayParameter)
            else 'ptr byval([128 x i8]) align 64 "nvvm.grid_constant"'
        )
        signature.append(f"{kind} %p{number}")
    signature += ["ptr addrspace(1) %unused0", "ptr addrspace(1) %unused1"]
    dimensions = ",".join(map(str, cluster))
    attributes = f'"nvvm.reqntid"="{threads}"'
    if cluster != (1, 1, 1):
        attributes += f' "nvvm.cluster_dim"="{dimensions}"'
    source = f"""
target triple = "nvptx64-nvidia-cuda"
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.cluster.nctaid.x()
define ptx_kernel void @{name}({", ".join(signature)}) #0 {{
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %block = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
{body}
  ret void
}}
attributes #0 = {{ {attributes} }}
"""
    launch = LaunchParameters(
        grid=grid,
        block=(threads, 1, 1),
        cluster=cluster,
        shared_memory_bytes=0,
        parameters=ordered,
        inputs=tuple(in_buffers),
        outputs=tuple(out_buffers),
        scratch=tuple(scratch_buffers),
        aliases=aliases,
    )
    return CompiledKernel(
        name=name,
        target=SM_90A,
        launch=launch,
        resources=ResourceReport(),
        jaxpr=None,
        mlir=None,
        llvm=source,
        ptx=assemble_ir(source),
    )


def element(pointer: str, result: str, index: str = "%tid") -> str:
    """IR: the address of one float."""
    return f"  {result} = getelementptr float, ptr addrspace(1) {pointer}, i32 {index}\n"


def add_kernel(size: int = 128, name: str = "add", constant: float = 1.0) -> CompiledKernel:
    """``out[i] = x[i] + constant`` with one thread for each element, at most 1024."""
    (x,), (out,) = inputs((size,)), outputs((size,))
    body = (
        element("%p0", "%px")
        + element("%p1", "%po")
        + "  %x = load float, ptr addrspace(1) %px\n"
        + f"  %y = fadd float %x, {constant:e}\n"
        + "  store float %y, ptr addrspace(1) %po"
    )
    return kernel(
        body, [ArrayParameter(x), ArrayParameter(out)], [x], [out], threads=size, name=name
    )
