"""A plugin with a primitive that uses the protocol directly, and kernels of it."""

from __future__ import annotations

import jax
import numpy as np

from pallasite import gpu as plgpu
from pallasite.plugin import RuleSet, Semantics, hookimpl
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite_multigpu import protocol

act_p = _jax.Primitive("act")
act_p.multiple_results = True


@_jax.abstract_eval(act_p)
def _act_type(*, what):
    return [], {_jax.comms_effect}


rules = RuleSet()


@rules.lowering(act_p, Semantics.LANE)
def _act(ctx, *, what):
    kernel, launch = ctx.kernel, ctx.launch
    given, made = launch.hidden.inputs[0], launch.hidden.outputs[0]
    if what == "pull":  # The next device's input becomes the output.
        count = protocol.device_count(kernel)
        peer = ops.remainder_unsigned(ops.add(protocol.rank(kernel), 1), count)
        protocol.communicates(kernel, reads=True)
        source = protocol.peer_pointer(ctx.kernel, given, peer)
        element = ops.add(ops.multiply(launch.block_id(0), 128), launch.thread_id)
        places = [
            ops.element_pointer(one, element, ops.i32())
            for one in (source, launch.array_pointer(made))
        ]
        ops.store(ops.load(ops.i32(), places[0], alignment=4), places[1], alignment=4)
    elif what == "rank":
        with ops.when(launch.block_leader):
            ops.store(protocol.rank(kernel), launch.array_pointer(made), alignment=4)
    elif what == "trap":
        protocol.trap(ctx, protocol.Trap.DEVICE_ID, protocol.rank(kernel))
    elif what == "meet":
        protocol.communicates(kernel)
    return ()


class Acting:
    """The plugin."""

    @hookimpl
    def pallasite_lowering_rules(self):
        return rules.lowering_rules


def kernel_of(*what, size=128, dtype=np.float32, name="acting", **params):
    """A kernel that does what it is told, on arrays of 32-bit elements, 128 for each block."""

    def body(x, o):
        for one in what:
            act_p.bind(what=one)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((size,), dtype),
        grid=(size // 128,),
        grid_names=("tile",),
        compiler_params=plgpu.CompilerParams(**params),
        kernel_name=name,
    )
