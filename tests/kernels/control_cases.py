"""Loops, branches, pipelines and the ways of calling kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from catalog import block_kernel, case, random, whole, wide
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu


@case(1, 2, 3, True, tolerance=1e-5)
def loop_with_array_carry(unroll):
    x = random("x", (16, 128), jnp.float32)

    @block_kernel((128,), jnp.float32)
    def kernel(x_ref, o_ref):
        zeros = jnp.zeros((128,), jnp.float32)
        o_ref[...] = lax.fori_loop(0, 16, lambda i, c: c + x_ref[i], zeros, unroll=unroll)

    return kernel, (x,), lambda x: wide(x).sum(0)


@case()
def loop_with_dynamic_bounds():
    x = random("x", (16, 128), jnp.int32)
    bounds = np.int32([3, 11])

    @block_kernel((128,), jnp.int32)
    def kernel(x_ref, bounds_ref, o_ref):
        def body(i, carry):
            return carry + x_ref[i] * i

        start = jnp.zeros((128,), jnp.int32)
        o_ref[...] = lax.fori_loop(bounds_ref[0], bounds_ref[1], body, start)

    return kernel, (x, bounds), lambda x, b: (x[3:11] * np.arange(3, 11)[:, None]).sum(0)


@case()
def empty_and_reversed_ranges():
    bounds = np.int32([5, 3])

    @block_kernel((2, 128), jnp.int32)
    def kernel(bounds_ref, o_ref):
        lower, upper = bounds_ref[0], bounds_ref[1]
        final, count = lax.while_loop(
            lambda c: c[0] < upper, lambda c: (c[0] + 1, c[1] + 1), (lower, jnp.int32(7))
        )
        o_ref[0] = jnp.full((128,), final)
        o_ref[1] = jnp.full((128,), count)

    return kernel, (bounds,), lambda b: np.broadcast_to(np.int32([[5], [7]]), (2, 128))


@case()
def while_loop_with_arrays():
    x = random("x", (128,), jnp.float32, 1, 2)

    @block_kernel((128,), jnp.float32)
    def kernel(x_ref, o_ref):
        def condition(carry):
            total, _ = carry
            return total < 1000.0

        def body(carry):
            total, value = carry
            return total * 2 + jnp.max(value) * 0, value * 2

        _, value = lax.while_loop(condition, body, (jnp.float32(1), x_ref[...]))
        o_ref[...] = value

    return kernel, (x,), lambda x: wide(x) * 1024


@case()
def branches():
    x = random("x", (8, 128), jnp.int32)

    @block_kernel((8, 128), jnp.int32, grid=(8,), grid_names=("row",))
    def kernel(x_ref, o_ref):
        row = lax.axis_index("row")
        x = x_ref[row]
        y = lax.switch(
            lax.rem(row, 3), [lambda x: x, lambda x: x * 2, lambda x: jnp.zeros_like(x) + 5], x
        )
        z = lax.cond(row > 4, lambda y: y + 100, lambda y: y, y)

        @pl.when(row != 7)
        def _():
            o_ref[row] = z

        @pl.when(row == 7)
        def _():
            o_ref[row] = -z

    def reference(x):
        y = np.where(
            np.arange(8)[:, None] % 3 == 0, x, np.where(np.arange(8)[:, None] % 3 == 1, x * 2, 5)
        )
        z = y + 100 * (np.arange(8) > 4)[:, None]
        z[7] = -z[7]
        return z

    return kernel, (x,), reference


@case()
def nested_branches_and_loops():
    x = random("x", (4, 128), jnp.int32)

    @block_kernel((128,), jnp.int32)
    def kernel(x_ref, o_ref):
        def outer(i, carry):
            def inner(j, carry):
                return lax.cond(
                    (i + j) % 2 == 0,
                    lambda c: lax.cond(j > 1, lambda c: c + x_ref[j], lambda c: c - x_ref[i], c),
                    lambda c: c * 2,
                    carry,
                )

            return lax.fori_loop(0, 3, inner, carry)

        o_ref[...] = lax.fori_loop(0, 4, outer, jnp.ones((128,), jnp.int32))

    def reference(x):
        carry = np.ones(128, np.int32)
        for i in range(4):
            for j in range(3):
                if (i + j) % 2 == 0:
                    carry = carry + x[j] if j > 1 else carry - x[i]
                else:
                    carry = carry * 2
        return carry

    return kernel, (x,), reference


@case()
def references_carried_through_control_flow():
    x = random("x", (8, 128), jnp.float32)

    @block_kernel((128,), jnp.float32, scratch_types=[plgpu.SMEM((128,), jnp.float32)])
    def kernel(x_ref, o_ref, total):
        total[...] = jnp.zeros((128,), jnp.float32)

        @pl.loop(0, 8)
        def _(i):
            @pl.when(i % 2 == 1)
            def _():
                total[...] += x_ref[i]

        o_ref[...] = total[...]

    return kernel, (x,), lambda x: wide(x)[1::2].sum(0).astype(np.float32)


@case(1, 2, 3)
def pipeline(depth):
    x = random("x", (256, 256), jnp.float32)

    @block_kernel((256, 256), jnp.float32, grid=(2,), grid_names=("half",))
    def kernel(x_ref, o_ref):
        half = lax.axis_index("half")

        def body(indices, x_tile, o_tile):
            o_tile[...] = x_tile[...] * 2 + 1

        spec = plgpu.BlockSpec((64, 64), lambda i, j: (half * 2 + i, j))
        plgpu.emit_pipeline(
            body, grid=(2, 4), in_specs=[spec], out_specs=[spec], max_concurrent_steps=depth
        )(x_ref, o_ref)

    return kernel, (x,), lambda x: x * 2 + 1


@case(1, 2)
def pipeline_with_swizzled_tiles(depth):
    x = random("x", (128, 256), jnp.bfloat16)
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    @block_kernel((128, 256), jnp.bfloat16)
    def kernel(x_ref, o_ref):
        def body(indices, x_tile, o_tile):
            o_tile[...] = -x_tile[...]

        spec = plgpu.BlockSpec((64, 64), lambda i, j: (i, j), transforms=transforms)
        plgpu.emit_pipeline(
            body, grid=(2, 4), in_specs=[spec], out_specs=[spec], max_concurrent_steps=depth
        )(x_ref, o_ref)

    return kernel, (x,), lambda x: -x


def pallas(shape, dtype, semantics, depth=2, **arguments):
    """``pl.pallas_call`` that compiles with Pallasite."""
    params = plgpu.CompilerParams(dimension_semantics=semantics, max_concurrent_steps=depth)

    def decorate(body):
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(shape, dtype),
            compiler_params=params,
            **arguments,
        )

    return decorate


@case(("parallel", "sequential"), ("sequential", "parallel"), ("sequential", "sequential"))
def pallas_call_grid(*semantics):
    x = random("x", (256, 256), jnp.float32)
    spec = pl.BlockSpec((64, 128), lambda i, j: (i, j))

    @pallas((256, 256), jnp.float32, semantics, grid=(4, 2), in_specs=[spec], out_specs=spec)
    def kernel(x_ref, o_ref):
        step = pl.program_id(0) * 2 + pl.program_id(1)
        o_ref[...] = x_ref[...] + step.astype(jnp.float32)

    def reference(x):
        steps = np.arange(8).reshape(4, 2).repeat(64, 0).repeat(128, 1)
        return (x + steps).astype(np.float32)

    return kernel, (x,), reference


@case(tolerance=1e-5)
def pallas_call_accumulates_over_steps():
    x = random("x", (8, 64, 128), jnp.float32)

    @pallas(
        (64, 128),
        jnp.float32,
        ("sequential",),
        grid=(8,),
        in_specs=[pl.BlockSpec((None, 64, 128), lambda i: (i, 0, 0))],
        out_specs=pl.BlockSpec((64, 128), lambda i: (0, 0)),
    )
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros((64, 128), jnp.float32)

        o_ref[...] += x_ref[...]

    return kernel, (x,), lambda x: wide(x).sum(0)


@case((0,), (1,))
def batched(axis):
    x = random("x", (3, 256) if axis == 0 else (256, 3), jnp.float32)
    y = random("y", (256,), jnp.float32)
    kernel = whole(lambda x, y: x * 2 + y, (256,), jnp.float32)

    def reference(x, y):
        x = x if axis == 0 else x.T
        return x * 2 + y

    return jax.vmap(kernel, in_axes=(axis, None)), (x, y), reference


@case()
def batched_with_global_semaphores():
    """Blocks share them with those of their entry only."""
    x = np.int32([1, 5, 20, 100])[:, None] * np.ones((1, 128), np.int32)

    def body(x_ref, o_ref):
        added, arrived = (pl.get_global(plgpu.SemaphoreType.REGULAR(n)) for n in ((), (2,)))
        pl.semaphore_signal(added, x_ref[0])
        pl.semaphore_signal(arrived.at[1])
        pl.semaphore_wait(arrived.at[1], 3, decrement=False)
        o_ref[lax.axis_index("block")] = jnp.full((128,), pl.semaphore_read(added))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((3, 128), jnp.int32),
        grid=(3,),
        grid_names=("block",),
    )
    return jax.vmap(kernel), (x,), lambda x: np.broadcast_to(3 * x[:, None], (4, 3, 128))


@case()
def aliased_buffers():
    x = random("x", (1024,), jnp.int32)

    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((1024,), jnp.int32), input_output_aliases={0: 0})
    def kernel(x_ref, o_ref):
        o_ref[pl.ds(0, 512)] = x_ref[pl.ds(0, 512)] + 1

    def reference(x):
        y = x.copy()
        y[:512] += 1
        return y

    return kernel, (x,), reference


@case()
def several_kernels_in_one_program():
    x = random("x", (1024,), jnp.float32)
    double = whole(lambda x: x * 2, (1024,), jnp.float32)
    add = whole(lambda x, y: x + y, (1024,), jnp.float32)

    def program(x):
        y = jnp.sin(double(x))
        return add(double(y), x)

    return program, (x,), lambda x: (np.sin(x * 2) * 2 + x).astype(np.float32)


@case()
def two_outputs_and_scalars():
    x = random("x", (256,), jnp.float32)

    @plgpu.kernel(
        out_type=[
            jax.ShapeDtypeStruct((256,), jnp.float32),
            jax.ShapeDtypeStruct((1,), jnp.float32),
        ]
    )
    def kernel(x_ref, o_ref, largest_ref):
        x = x_ref[...]
        o_ref[...] = x + 1
        largest_ref[0] = jnp.max(x)

    return kernel, (x,), lambda x: [x + 1, x.max(keepdims=True)]
