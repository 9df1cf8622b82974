"""A plugin whose primitives read hidden operands and write hidden results, as others write one."""

from __future__ import annotations

import contextlib

import numpy as np
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallasite.plugin import KernelLifecycle, RuleSet, Semantics, hookimpl, manager
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import host_step

SEEN = []
"""What functions of the host were called with, in their order."""


def rank(device, start, step):
    """A number for each device."""
    SEEN.append(("rank", device.ordinal))
    return np.array([start + step * device.ordinal], np.float32)


def same(number):
    """A number that is the same on each device."""
    SEEN.append(("same", number))
    return np.array([number], np.float32)


def wide():
    """A number of 64 bits."""
    return np.array([2**40 + 3], np.int64)


def wrong():
    """Not what the kernel was promised."""
    return np.zeros(3, np.int32)


def prepare(device, kernel, **arguments):
    """The step before the first launch."""
    SEEN.append(("prepare", device.platform, device.ordinal, kernel.name, arguments))


def collect(array, kernel, **arguments):
    """Takes a hidden result."""
    SEEN.append(("collect", array.tolist(), kernel.name, arguments))


OPERANDS = {
    "value": dict(value=np.array([2.5], np.float32)),
    "rank": dict(initialiser=rank, arguments={"start": 10, "step": 100}, per_device=True),
    "same": dict(initialiser="offset_plugin:same", arguments={"number": 7}),
    "wide": dict(initialiser=wide),
    "wrong": dict(initialiser=wrong),
    "missing": dict(initialiser="offset_plugin:nothing"),
    "neither": {},
    "both": dict(value=np.array([1], np.float32), initialiser=same),
    "shape": dict(value=np.zeros(2, np.float32)),
    "local": dict(initialiser=lambda: None),
    "set": dict(initialiser=same, arguments={"number": {1, 2}}),
    "fixed": dict(value=np.array([1], np.float32), per_device=True),
}

offset_p = Primitive("offset")
offset_p.def_abstract_eval(lambda x, source: x)
rules = RuleSet()


@rules.lowering(offset_p, Semantics.LANE)
def _offset(ctx, x, source):
    """Adds a number of a hidden operand; one lane of each block says which in a hidden result."""
    launch = ctx.launch
    kind = np.int64 if source == "wide" else np.float32
    buffer = launch.hidden_operand(f"offset.{source}", (1,), kind, **OPERANDS[source])
    pointer = launch.array_pointer(buffer)
    if source == "wide":
        number = arith.sitofp(ir.F32Type.get(), ops.load(ops.i64(), pointer, alignment=8))
    else:
        number = ops.load(ir.F32Type.get(), pointer, alignment=4)
    used = launch.hidden_result(
        "offset.used", (1,), np.float32, consumer=collect, arguments={"source": source}
    )
    with ops.when(launch.block_leader):
        ops.store(number, launch.array_pointer(used), alignment=4)

    def add(register):
        if not isinstance(register.type, ir.VectorType):
            return arith.addf(register, number)
        return arith.addf(register, ops.broadcast(number, x.vector_length))

    return x.map(add)


def offset(x, source="value"):
    """Adds a number that the host knows."""
    return offset_p.bind(x, source=source)


@hookimpl
def pallasite_lowering_rules():
    return rules.lowering_rules


@hookimpl
def pallasite_lifecycles():
    return [
        KernelLifecycle(
            name="offset",
            before_first_launch=lambda kernel: host_step(prepare, {"grid": kernel.geometry.blocks}),
            host_effects=lambda params: True,
            per_device=True,
        )
    ]


@contextlib.contextmanager
def registered():
    """The plugin, in this process, with nothing seen yet."""
    import offset_plugin

    name = manager().register(offset_plugin, "offset")
    try:
        yield SEEN
    finally:
        manager().unregister(name)
        SEEN.clear()
