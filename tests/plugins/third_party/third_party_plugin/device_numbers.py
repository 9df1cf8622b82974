"""A hidden operand: a number that the host makes for each device, which a primitive adds."""

from __future__ import annotations

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import KernelLifecycle, RuleSet, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from third_party_plugin.registers import add_to_registers

rules = RuleSet()
add_device_number_p = _jax.Primitive("add_device_number")
add_device_number_p.def_abstract_eval(lambda x: x)


def add_device_number(x):
    """``x`` plus 1000 times the number of the device, and 7; x is float32."""
    return add_device_number_p.bind(x)


def number_of(device, factor, start):
    """Called on the host, once for each device."""
    return np.array([start + factor * device.ordinal], np.float32)


@rules.lowering(add_device_number_p, Semantics.LANE)
def _lower(ctx, x):
    buffer = ctx.launch.hidden_operand(
        "third-party.device-number",
        (1,),
        np.float32,
        initialiser=number_of,
        arguments={"factor": 1000, "start": 7},
        per_device=True,
    )
    number = ops.load(ir.F32Type.get(), ctx.launch.array_pointer(buffer), alignment=4)
    return add_to_registers(x, number)


# Kernels have to know their devices.
LIFECYCLE = KernelLifecycle(name="third-party-device-numbers", per_device=True)
