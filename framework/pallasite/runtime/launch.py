"""Launching compiled kernels from JAX on a GPU, through JAX's own kernel launcher.

A kernel becomes one custom call whose attribute holds the PTX, the launch dimensions and a
description of the kernel's parameters. The launcher walks those parameters in order and gives each
the next buffer of the call: operands first, then results; see :mod:`pallasite.launch_plan`. It
appends two null pointers (global scratch, profiler scratch), which the kernel declares as its last
parameters. Scratch that must hold zeros is cleared by the launcher, on the same stream.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite import plugins
from pallasite.codegen.compiled import CompiledKernel
from pallasite.errors import ExecutionError, InvalidValueError, UnsupportedError
from pallasite.language.memory import round_up
from pallasite.launch import (
    PACKED_BITS,
    ArrayParameter,
    BufferKind,
    LaunchParameters,
    TensorMapParameter,
)
from pallasite.launch_plan import LaunchPlan, plan_launch

CUSTOM_CALL_TARGET = "triton_kernel_call_ffi"
MAX_PARAMETER_BYTES = 32764
MAX_GRID = (2**31 - 1, 65535, 65535)
TENSOR_MAP_BYTES = 128
"""Bytes of an encoded tensor map."""
_WARP_SIZE = 32
_MAX_THREADS = 1024
_CHECKED_ALIGNMENT = 16
"""Bytes. What vector accesses and TMA rely on. XLA aligns to 128, imported arrays may have less."""
_COMPRESSION_LEVEL = 6


def nbytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of a row-major array in GPU memory."""
    dtype = np.dtype(dtype)
    bits: int = PACKED_BITS.get(dtype.name, dtype.itemsize * 8)
    return -(-math.prod(shape) * bits // 8)


def validate_launch(launch: LaunchParameters, name: str) -> LaunchPlan:
    """Checks that the launcher can launch this kernel, and returns how it must be called.

    Raises:
      UnsupportedError: a block with several dimensions, too many parameters, or an output that
        needs more parameters than it has buffers.
      InvalidValueError: a grid beyond the hardware's limits, or an impossible TMA descriptor.
      InternalError: an order of parameters that the launcher cannot serve.
    """
    threads, *rest = launch.block
    if rest != [1, 1] or threads % _WARP_SIZE or not 0 < threads <= _MAX_THREADS:
        raise UnsupportedError(
            f"kernel {name!r}: the launcher starts blocks of whole warps along x only",
            got=launch.block,
            expected="(threads, 1, 1) with threads a multiple of 32, at most 1024",
        )
    for axis, extent, limit in zip("xyz", launch.grid, MAX_GRID, strict=True):
        if not 0 <= extent <= limit:
            raise InvalidValueError(
                f"kernel {name!r}: the grid has too many blocks along {axis}",
                got=launch.grid,
                expected=f"at most {limit} blocks along {axis}",
                hint="make the largest grid dimension the one that CUDA calls x",
            )
    if any(grid % cluster for grid, cluster in zip(launch.grid, launch.cluster, strict=True)):
        raise InvalidValueError(
            f"kernel {name!r}: the grid is not a whole number of clusters",
            got=f"grid {launch.grid} in blocks, cluster {launch.cluster}",
            expected="multiples of the cluster in each dimension",
        )
    plan = plan_launch(launch)
    size = 0
    for parameter in launch.parameters:
        if isinstance(parameter, ArrayParameter):
            size = round_up(size, 8) + 8
        else:
            _encode(parameter)
            size = round_up(size, 64) + TENSOR_MAP_BYTES
    size = round_up(size, 8) + 2 * 8
    if size > MAX_PARAMETER_BYTES:
        raise UnsupportedError(
            f"kernel {name!r} needs too many TMA descriptors",
            got=f"{len(launch.parameters)} parameters of {size} bytes in all",
            expected=f"at most {MAX_PARAMETER_BYTES} bytes of kernel parameters",
            hint="use fewer combinations of array, tile shape and swizzle",
        )
    return plan


def _encode(parameter: TensorMapParameter) -> Any:
    """The launcher's arguments for a TMA descriptor."""
    return plugins.manager().implementation("encode_tensor_map")(parameter)


@functools.cache
def launcher() -> Any:
    """The bindings of JAX's kernel launcher, which come with JAX's CUDA plugin.

    Raises:
      ExecutionError: the plugin is not installed, or too old to encode TMA descriptors.
    """
    from jaxlib import gpu_triton

    if not hasattr(gpu_triton, "create_tma_descriptor_parameter"):
        raise ExecutionError(
            "launching on a GPU needs JAX's CUDA plugin, which is not installed or too old",
            expected="jax-cuda13-plugin of the same version as jaxlib, at least 0.11.2",
            hint='pip install "jax[cuda13]"; pallasite.compile works without it',
        )
    return gpu_triton


def custom_call_attribute(compiled: CompiledKernel, plan: LaunchPlan) -> bytes:
    """The custom call's ``opaque`` attribute: equal bytes for equal kernels, in any process."""
    binding = launcher()
    parameters = []
    for position, parameter in enumerate(compiled.launch.parameters):
        if isinstance(parameter, ArrayParameter):
            buffer = parameter.buffer
            zeroed = nbytes(buffer.shape, buffer.dtype) if position in plan.zeroed else 0
            alignment = min(parameter.alignment, _CHECKED_ALIGNMENT)
            parameters.append(binding.create_array_parameter(zeroed, alignment))
        else:
            parameters.append(_encode(parameter).create(binding))
    major, minor = compiled.target.compute_capability
    kernel = binding.TritonKernel(
        compiled.name,
        compiled.launch.block[0] // _WARP_SIZE,
        1,
        compiled.launch.shared_memory_bytes,
        compiled.ptx,
        "",
        10 * major + minor,
    )
    call = binding.TritonKernelCall(kernel, *compiled.launch.grid, parameters)
    return zlib.compress(call.to_proto(compiled.name, b""), _COMPRESSION_LEVEL)


def launches_nothing(launch: LaunchParameters) -> bool:
    """Whether there is no block to run, or nothing that a block could produce."""
    sizes = [math.prod(buffer.shape) for buffer in launch.outputs]
    return 0 in launch.grid or (bool(sizes) and not any(sizes))


def launch(
    compiled: CompiledKernel,
    *operands: jax.Array,
    side_effects: bool = False,
    clear: bool = True,
    target: str = CUSTOM_CALL_TARGET,
    **attributes: bytes,
) -> list[jax.Array]:
    """Runs a kernel on the GPU; made of JAX operations, so it works traced and eagerly.

    All arrays are row-major. Outputs that the kernel never accesses, and all outputs when there is
    no block to run, hold the input's values if aliased, else zeros.

    Args:
      compiled: the kernel.
      *operands: one array for each of ``compiled.launch.inputs``.
      side_effects: whether the kernel does more than fill its outputs (it prints, say), so that it
        must run even if its results are unused.
      clear: whether the launcher clears scratch that must hold zeros; else the kernel does.
      target: the call that launches it: the launcher, or what calls that.
      **attributes: of the call, for what calls the launcher.
    """
    parameters = compiled.launch
    input_of = {output: input_ for input_, output in parameters.aliases}

    def untouched(output: int) -> jax.Array:
        buffer = parameters.outputs[output]
        if output in input_of:
            return operands[input_of[output]]
        return jnp.zeros(buffer.shape, buffer.dtype)

    if launches_nothing(parameters):
        return [untouched(output) for output in range(len(parameters.outputs))]
    plan = validate_launch(parameters, compiled.name)
    plan = plan if clear else dataclasses.replace(plan, zeroed=frozenset())
    arguments = [
        operands[buffer.index]
        if buffer.kind is BufferKind.INPUT
        else jax.lax.empty(buffer.shape, buffer.dtype)
        for buffer in plan.operands
    ]
    results = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) for buffer in plan.results],
        has_side_effect=side_effects or not parameters.outputs,
        input_output_aliases=dict(plan.aliases),
    )(*arguments, opaque=custom_call_attribute(compiled, plan), **attributes)
    return [
        untouched(output) if position is None else results[position]
        for output, position in enumerate(plan.output_positions)
    ]
