"""A whole plugin: ``plgpu.count_true(mask)`` counts with warp votes, and a pass signs the PTX."""

import jax
import numpy as np
from jax.extend.core import Primitive

from pallasite import InvalidValueError, Pass, RuleSet, Semantics, hookimpl
from pallasite.plugin import SHARED_MEMORY
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RegisterArray, Resources

PALLASITE_PLUGIN_API = (2, 0)
rules = RuleSet()
count_true_p = Primitive("count_true")
count_true_p.def_abstract_eval(lambda mask: jax.core.ShapedArray((), np.int32))


def count_true(mask: jax.Array) -> jax.Array:
    """How many elements of a boolean array are true, as an int32 scalar."""
    return count_true_p.bind(mask)


@rules.resources(count_true_p)
def _resources(ctx, mask):
    return Resources({SHARED_MEMORY: 1024 * ctx.geometry.threads})  # In whole KiB.


@rules.lowering(count_true_p, Semantics.LANE)
def _lower(ctx, mask):
    bits = [ops.extract(r, i) for r in mask.registers for i in range(mask.vector_length)]
    if mask.is_splat or mask.size != 128 * len(bits):
        raise InvalidValueError("count_true needs a multiple of 128 elements", got=mask.shape)
    total = ops.i32_constant(0)
    for bit in bits:
        votes = ops.intrinsic(ops.i32(), "llvm.nvvm.vote.ballot.sync", ops.i32_constant(-1), bit)
        total = ops.add(total, ops.intrinsic(ops.i32(), "llvm.ctpop.i32", votes))
    # One KiB for each warpgroup, one word of it for each of its warps.
    with ctx.kernel.shared.allocate(1024 * ctx.kernel.geometry.threads) as offset:
        base = ctx.launch.shared_pointer(offset)
        counts = ops.byte_pointer(base, ops.multiply(ctx.launch.warpgroup_id, 1024))
        ops.store(total, ops.byte_pointer(counts, ops.multiply(ctx.launch.warp_id, 4)))
        ctx.synchronize()
        total = ops.i32_constant(0)
        for warp in range(4):
            total = ops.add(total, ops.load(ops.i32(), ops.byte_pointer(counts, 4 * warp)))
        ctx.synchronize()
    return RegisterArray.splat(total, np.int32)


def sign(ptx, context):
    """Appends a comment to the PTX of each kernel."""
    return f"{ptx}\n// signed by pallasite-vote: {context.kernel} for {context.target.name}\n"


vote_sign = Pass(name="vote-sign", stage="ptx", run=sign, description="signs the PTX")
pallasite_names = hookimpl(lambda: {"count_true": "pallasite_vote:count_true"})
pallasite_lowering_rules = hookimpl(lambda: rules.lowering_rules)
pallasite_resource_rules = hookimpl(lambda: rules.resource_rules)
pallasite_passes = hookimpl(lambda: [vote_sign])
