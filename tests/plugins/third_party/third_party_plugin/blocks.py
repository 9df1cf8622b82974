"""A prologue and an epilogue, for kernels with the option ``block_numbers``.

The prologue of each block leaves a number in shared memory, which a primitive adds; the epilogue
stores it to a hidden result, which the host gets after the launch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallasite.plugin import InvalidValueError, KernelLifecycle, RuleSet, Semantics, option
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import StateKey
from third_party_plugin.registers import add_to_registers

rules = RuleSet()
add_block_number_p = _jax.Primitive("add_block_number")
add_block_number_p.def_abstract_eval(lambda x: x)

SEEN = []
"""What the host got: the kernel's name and the numbers of its blocks."""


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """Compiler parameters of the plugin."""

    block_numbers: bool = option(False, "each block has a number, which the host gets")


def add_block_number(x):
    """``x`` plus 100 and the number of the block along x; x is float32."""
    return add_block_number_p.bind(x)


def _wanted(params):
    return params.options_of(BlockOptions).block_numbers


def _reserve(kernel):
    return kernel.launch.reserve_shared(4, alignment=4, what="block number", location=None)


OFFSET = StateKey("third-party.block-number", _reserve)
"""Where in shared memory the number of the block is."""


def _load(kernel):
    pointer = kernel.launch.shared_pointer(kernel.state(OFFSET))
    return ops.load(ir.F32Type.get(), pointer, alignment=4)


def _prologue(kernel):
    launch = kernel.launch
    with ops.when(launch.block_leader):
        number = arith.sitofp(ir.F32Type.get(), ops.add(launch.block_id(0), 100))
        ops.store(number, launch.shared_pointer(kernel.state(OFFSET)), alignment=4)
    ops.inline_assembly("// third party: the prologue", "~{memory}")
    launch.block_barrier()


def _epilogue(kernel):
    launch = kernel.launch
    ops.inline_assembly("// third party: the epilogue", "~{memory}")
    numbers = launch.hidden_result(
        "third-party.block-numbers", (kernel.geometry.blocks,), np.float32, consumer=receive
    )
    kind = ir.F32Type.get()
    with ops.when(launch.block_leader):
        here = ops.element_pointer(launch.array_pointer(numbers), launch.block_id(0), kind)
        ops.store(_load(kernel), here, alignment=4)


def receive(array, kernel):
    """Called on the host after each launch."""
    SEEN.append((kernel.name, array.tolist()))


@rules.lowering(add_block_number_p, Semantics.LANE)
def _lower(ctx, x):
    if not _wanted(ctx.params):
        raise InvalidValueError(
            "blocks have no numbers",
            hint='CompilerParams(plugin_options={"third-party": {"block_numbers": True}})',
        )
    return add_to_registers(x, _load(ctx.kernel))


@rules.inference(add_block_number_p)
def _infer(ctx, x):
    return ctx.result(x, x)


LIFECYCLE = KernelLifecycle(
    name="third-party-blocks",
    applies=lambda kernel: _wanted(kernel.params),
    prologue=_prologue,
    epilogue=_epilogue,
    host_effects=_wanted,
    description="numbers blocks",
)
