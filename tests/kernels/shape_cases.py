"""Reductions, broadcasts, reshapes, selects, iota and layouts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from catalog import block_kernel, case, random, whole, wide
from jax import lax

from pallasite import gpu as plgpu

REDUCTIONS = {
    "sum": (jnp.sum, np.sum),
    "max": (jnp.max, np.max),
    "min": (jnp.min, np.min),
}


@case(
    *[
        (name, dtype, shape, axes)
        for name in REDUCTIONS
        for dtype in (jnp.float32, jnp.int32, jnp.bfloat16)
        for shape, axes in (
            ((1024,), (0,)),
            ((64, 128), (0,)),
            ((64, 128), (1,)),
            ((64, 128), (0, 1)),
            ((4, 16, 64), (1,)),
            ((4, 16, 64), (0, 2)),
        )
    ],
    tolerance=1e-2,
)
def reduction(name, dtype, shape, axes):
    function, reference = REDUCTIONS[name]
    x = random(name, shape, dtype)
    out = tuple(n for i, n in enumerate(shape) if i not in axes) or (1,)

    def body(x):
        return function(x, axis=axes).reshape(out)

    return whole(body, out, dtype), (x,), lambda x: reference(wide(x), axis=axes).reshape(out)


@case((96,), (100,), (3, 50), (7, 33), tolerance=1e-5)
def odd_reduction(*shape):
    x = random("x", shape, jnp.float32)
    kernel = whole(lambda x: jnp.sum(x).reshape(1), (1,), jnp.float32)
    return kernel, (x,), lambda x: np.sum(wide(x)).reshape(1)


@case(0, 1, tolerance=1e-5)
def product_and_logic(axis):
    x = random("x", (16, 32), jnp.int32, 1, 2)

    def body(x):
        return jnp.prod(x, axis=axis) + jnp.all(x > 0, axis=axis) + 2 * jnp.any(x > 1, axis=axis)

    out = (32,) if axis == 0 else (16,)

    def reference(x):
        return np.prod(x, axis) + np.all(x > 0, axis) + 2 * np.any(x > 1, axis)

    return whole(body, out, jnp.int32), (x,), reference


@case(0, 1)
def arg_max(axis):
    x = random("x", (32, 64), jnp.float32)
    out = (64,) if axis == 0 else (32,)
    kernel = whole(lambda x: jnp.argmax(x, axis=axis).astype(jnp.int32), out, jnp.int32)
    return kernel, (x,), lambda x: np.argmax(x, axis).astype(np.int32)


@case(jnp.float32, jnp.bfloat16, tolerance=1e-2)
def wgmma_layout_row_sums(dtype):
    x = random("x", (64, 128), dtype)

    @block_kernel((64, 128), dtype)
    def kernel(x_ref, o_ref):
        x = plgpu.load(x_ref, (), layout=plgpu.Layout.WGMMA, optimized=False)
        total = jnp.sum(x.astype(jnp.float32), axis=1)
        shifted = x.astype(jnp.float32) - lax.broadcast_in_dim(total, (64, 128), (0,))
        o_ref[...] = shifted.astype(dtype)

    return kernel, (x,), lambda x: wide(x) - wide(x).sum(1, keepdims=True)


@case(tolerance=1e-5)
def softmax_of_a_tile():
    x = random("x", (64, 256), jnp.float32)
    kernel = whole(lambda x: jax.nn.softmax(x, axis=-1), (64, 256), jnp.float32)

    def reference(x):
        e = np.exp(wide(x) - wide(x).max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    return kernel, (x,), reference


@case(0, 1)
def broadcast_vector(dim):
    size = 64 if dim == 0 else 128
    x = random("x", (size,), jnp.float32)
    kernel = whole(lambda x: lax.broadcast_in_dim(x, (64, 128), (dim,)), (64, 128), jnp.float32)

    def reference(x):
        return np.broadcast_to(x[:, None] if dim == 0 else x[None, :], (64, 128))

    return kernel, (x,), reference


@case((64, 128), (8, 8, 128), (8192,), (4, 2048))
def reshapes(*shape):
    x = random("x", (64, 128), jnp.int32)
    kernel = whole(lambda x: (x + 1).reshape(shape), shape, jnp.int32)
    return kernel, (x,), lambda x: (x + 1).reshape(shape)


@case((32, 64), (64, 64))
def transposed_values(*shape):
    x = random("x", shape, jnp.float32)
    kernel = whole(lambda x: x.T, shape[::-1], jnp.float32)
    return kernel, (x,), lambda x: x.T


@case(0, 1, 2)
def iota(dimension):
    kernel = whole(
        lambda x: x + lax.broadcasted_iota(jnp.int32, (4, 16, 64), dimension),
        (4, 16, 64),
        jnp.int32,
    )
    x = random("x", (4, 16, 64), jnp.int32)
    return kernel, (x,), lambda x: x + np.indices((4, 16, 64), dtype=np.int32)[dimension]


@case()
def iota_of_odd_shape():
    kernel = whole(lambda x: x + lax.broadcasted_iota(jnp.int32, (7, 33), 1), (7, 33), jnp.int32)
    x = random("x", (7, 33), jnp.int32)
    return kernel, (x,), lambda x: x + np.arange(33, dtype=np.int32)


@case(jnp.float32, jnp.int8)
def selects(dtype):
    x, y = random("x", (1024,), dtype), random("y", (1024,), dtype)
    kernel = whole(lambda x, y: jnp.where(x > y, x, -y), (1024,), dtype)
    return kernel, (x, y), lambda x, y: np.where(x > y, x, -y)


@case()
def clamp():
    x = random("x", (1024,), jnp.float32)
    kernel = whole(lambda x: lax.clamp(-0.5, x, 0.5), (1024,), jnp.float32)
    return kernel, (x,), lambda x: np.clip(x, -0.5, 0.5)


@case("WGMMA", "WGMMA_TRANSPOSED", "TCGEN05", "WG_STRIDED")
def layout_casts(name):
    x = random("x", (128, 128), jnp.float32)
    layout = getattr(plgpu.Layout, name)
    if name == "WG_STRIDED":
        layout = layout((128, 128), vec_size=2)

    def body(x):
        y = plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED((128, 128), vec_size=4))
        z = plgpu.layout_cast(y * 2, layout)
        return plgpu.layout_cast(z + 1, plgpu.Layout.WG_STRIDED((128, 128), vec_size=1))

    return whole(body, (128, 128), jnp.float32), (x,), lambda x: x * 2 + 1


@case(jnp.float32, jnp.float16)
def sliced_values(dtype):
    x = random("x", (8, 256), dtype)
    kernel = whole(lambda x: x[0:4] + x[4:8], (4, 256), dtype)
    return kernel, (x,), lambda x: x[0:4] + x[4:8]


@case(jnp.float32, jnp.float16)
def slices_that_cut_threads(dtype):
    x = random("x", (8, 256), dtype)
    kernel = whole(lambda x: x[2:6] * 2, (4, 256), dtype)
    return kernel, (x,), lambda x: x[2:6] * 2


@case((64, 64), (8, 1024), (7, 96), (3, 5), (4, 16, 32), tolerance=1e-5)
def rows_and_columns_stretch(*shape):
    x = random("x", shape, jnp.bfloat16)
    y, z = random("y", shape[:1], jnp.float32), random("z", shape[-1:], jnp.float32)
    others = list(range(1, len(shape)))

    def body(x, y, z):
        return x.astype(jnp.float32) * jnp.expand_dims(y, others) + z

    def reference(x, y, z):
        return wide(x) * np.expand_dims(wide(y), others) + wide(z)

    return whole(body, shape, jnp.float32), (x, y, z), reference


@case((jnp.bfloat16, jnp.float32), (jnp.int8, jnp.float32), (jnp.int8, jnp.int32), tolerance=1e-5)
def element_types_meet_after_calls_and_loops(narrow, broad):
    x, y = random("x", (1024,), narrow, 0, 9), random("y", (1024,), broad, 0, 9)

    def body(x, y):
        index = lax.broadcasted_iota(jnp.int32, (1024,), 0)
        x = lax.fori_loop(0, 3, lambda _, carry: carry * 2, jnp.where(index % 3 == 0, x, 1))
        return jnp.clip(x.astype(broad), 2, 60) + y

    def reference(x, y):
        return np.clip(np.where(np.arange(1024) % 3 == 0, wide(x), 1) * 8, 2, 60) + wide(y)

    return whole(body, (1024,), broad), (x, y), reference
