"""``jax.vmap`` of products, of any operands, by any target's kernels."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import ops
from pallasite_hopper import ops as hopper_ops

pytestmark = pytest.mark.runs_kernels

MATMULS = {"hopper": hopper_ops.matmul, "portable": ops.matmul}
M, N, K, COUNT = 72, 48, 64, 3


@pytest.fixture(params=MATMULS)
def matmul(request):
    return MATMULS[request.param]


def drawn(*shape, dtype=jnp.bfloat16, seed=0):
    generator = np.random.default_rng((seed, *shape))
    return jnp.asarray(generator.standard_normal(shape), dtype)


def agree(result, expected, limit=6e-3):
    result, expected = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    assert result.shape == expected.shape
    assert np.isfinite(result).all()
    assert np.linalg.norm(result - expected) <= limit * np.linalg.norm(expected)


def wide(*arrays):
    return [np.asarray(one, np.float64) for one in arrays]


def kernels(function, *operands):
    return pallasite.compile_all(function, *operands, target="sm_90a")


@pytest.mark.parametrize(
    ("axes", "subscripts"),
    [
        ((0, 0), "zmk,zkn->zmn"),
        ((0, None), "zmk,kn->zmn"),
        ((None, 0), "mk,zkn->zmn"),
        ((1, None), "mzk,kn->zmn"),
        ((2, 1), "mkz,kzn->zmn"),
    ],
)
def test_operands(matmul, axes, subscripts):
    """With a batch dimension in either operand, anywhere."""
    shapes = [[M, K], [K, N]]
    for shape, axis in zip(shapes, axes, strict=True):
        if axis is not None:
            shape.insert(axis, COUNT)
    a, b = (drawn(*shape, seed=i) for i, shape in enumerate(shapes))
    result = jax.jit(jax.vmap(matmul, axes))(a, b)
    agree(result, np.einsum(subscripts, *wide(a, b)))


@pytest.mark.parametrize(
    ("inner", "outer", "subscripts"),
    [
        ((0, 0), (0, None), "yzmk,zkn->yzmn"),
        ((0, None), (None, 0), "zmk,ykn->yzmn"),
        ((None, 0), (0, None), "ymk,zkn->yzmn"),
        ((0, None), (0, None), "yzmk,kn->yzmn"),
        ((0, 0), (0, 0), "yzmk,yzkn->yzmn"),
    ],
)
def test_nested(matmul, inner, outer, subscripts):
    """Several batch dimensions, in one operand or both."""
    extents = {"y": 2, "z": COUNT, "m": M, "k": K, "n": N}
    left, right = subscripts.split("->")[0].split(",")
    a, b = (drawn(*(extents[x] for x in names), seed=i) for i, names in enumerate((left, right)))
    result = jax.jit(jax.vmap(jax.vmap(matmul, inner), outer))(a, b)
    agree(result, np.einsum(subscripts, *wide(a, b)))


@pytest.mark.parametrize(
    ("of_a", "of_b", "of_scale", "of_bias", "of_residual"),
    [*itertools.product((0, None), repeat=5)][:-1],
)
@pytest.mark.sampled
def test_epilogue(of_a, of_b, of_scale, of_bias, of_residual):
    """Scales, biases and residuals of each product, or of all of them."""
    axes = of_a, of_b, of_scale, of_bias, of_residual

    def product(a, b, scale, bias, residual):
        options = {"row_scale": scale, "bias": bias, "residual": residual}
        return hopper_ops.matmul(a, b, activation=jax.nn.relu, **options)

    shapes = (M, K), (K, N), (M,), (N,), (M, N)
    dtypes = jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32, jnp.bfloat16
    arrays = [
        drawn(COUNT, *shape, dtype=dtype, seed=i)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    given = [x if axis == 0 else x[0] for x, axis in zip(arrays, axes, strict=True)]
    a, b, scale, bias, residual = (
        np.broadcast_to(x if axis == 0 else x[None], (COUNT, *x.shape[-len(shape) :]))
        for x, axis, shape in zip(wide(*given), axes, shapes, strict=True)
    )
    expected = np.maximum(a @ b * scale[..., None] + bias[:, None], 0) + residual
    agree(jax.jit(jax.vmap(product, axes))(*given), expected)


@pytest.mark.parametrize("order", [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_orders(order, dtype):
    """Operands that are given transposed, and those that are read along k only."""
    transpose_a, transpose_b = order
    a = drawn(COUNT, *((K, M) if transpose_a else (M, K)), dtype=dtype, seed=1)
    b = drawn(COUNT, *((N, K) if transpose_b else (K, N)), dtype=dtype, seed=2)

    def product(a, b):
        options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
        return hopper_ops.matmul(a, b, out_dtype=jnp.float32, **options)

    left, right = wide(a, b)
    left = left.swapaxes(1, 2) if transpose_a else left
    right = right.swapaxes(1, 2) if transpose_b else right
    agree(jax.jit(jax.vmap(product))(a, b), left @ right, 2e-3)


@pytest.mark.parametrize(("m", "n", "k"), [(33, 65, 31), (1, 40, 24), (130, 264, 72), (5, 8, 100)])
@pytest.mark.parametrize("axes", [(0, 0), (0, None)])
def test_extents(m, n, k, axes):
    """Extents that are multiples of nothing, and products that have several tiles each."""
    a, b = drawn(5, m, k, seed=1), drawn(5, k, n, seed=2)
    b = b if axes[1] == 0 else b[0]
    expected = np.einsum("zmk,zkn->zmn" if axes[1] == 0 else "zmk,kn->zmn", *wide(a, b))
    agree(jax.jit(jax.vmap(hopper_ops.matmul, axes))(a, b), expected)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("alternate", [False, True])
def test_given_configuration(swap, alternate):
    """Blocks go through tiles of several products, by turns too."""
    config = hopper_ops.MatmulConfig(
        tile_m=128, tile_n=64, stages=3, split="m", epilogue_n=32, swap=swap, alternate=alternate
    )
    a, b = drawn(7, 264, 136, seed=1), drawn(7, 136, 152, seed=2)
    product = jax.vmap(lambda a, b: hopper_ops.matmul(a, b, config=config))
    [kernel] = kernels(product, a, b)
    assert kernel.name == "batched_matmul"
    agree(jax.jit(product)(a, b), np.einsum("zmk,zkn->zmn", *wide(a, b)))


def test_one_kernel():
    """Products of different right operands have one kernel with as many blocks as the GPU has room
    for; with the same one, they are one product of more rows."""
    a, b = drawn(40, 256, 128), drawn(40, 128, 256)
    [kernel] = kernels(jax.vmap(hopper_ops.matmul), a, b)
    assert (kernel.name, kernel.launch.grid[:2]) == ("batched_matmul", (132, 1))
    [kernel] = kernels(jax.vmap(hopper_ops.matmul, (0, None)), a, b[0])
    [joined] = kernels(hopper_ops.matmul, a.reshape(-1, 128), b[0])
    assert kernel.ptx == joined.ptx


@pytest.mark.parametrize(
    ("axes", "out", "transposed", "subscripts"),
    [
        ((None, 0), 0, (False, False), "mk,zkn->zmn"),
        ((None, 0), 1, (False, False), "mk,zkn->mzn"),
        ((None, 0), 0, (False, True), "mk,znk->zmn"),
        ((0, None), 0, (True, False), "zkm,kn->zmn"),
        ((0, None), 0, (True, True), "zkm,nk->zmn"),
        ((1, None), 0, (False, False), "mzk,kn->zmn"),
        ((None, 1), 0, (False, False), "mk,kzn->zmn"),
        ((None, 2), 0, (False, False), "mk,knz->zmn"),
    ],
)
def test_matrices_that_are_joined(axes, out, transposed, subscripts):
    """Many narrow matrices, times the same one, are copied to one if that takes less time."""
    extents = {"z": 100, "m": 488, "k": 2568, "n": 32}
    if axes[0] == 0:
        extents |= {"m": 32, "n": 488}
    left, right = subscripts.split("->")[0].split(",")
    a, b = (jnp.zeros([extents[x] for x in names], jnp.bfloat16) for names in (left, right))

    def function(a, b):
        options = {"transpose_a": transposed[0], "transpose_b": transposed[1]}
        return jax.vmap(functools.partial(hopper_ops.matmul, **options), axes, out)(a, b)

    [kernel] = kernels(function, a, b)
    assert kernel.name == "matmul"
    extents |= {"z": 40, "k": 512} | ({"n": 264} if axes[0] == 0 else {"m": 264})
    extents |= {"m": 16} if axes[0] == 0 else {"n": 16}
    a, b = (drawn(*(extents[x] for x in names)) for names in (left, right))
    agree(jax.jit(function)(a, b), np.einsum(subscripts, *wide(a, b)))


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("whole", [False, True], ids=["each", "sum"])
def test_gradients(matmul, axes, whole):
    """Of each product, and of the sum of all of them."""

    def loss(a, b, product):
        return jnp.sum(jnp.sin(product(a, b).astype(jnp.float32)))

    def gradient(product):
        one = jax.vmap(lambda a, b: loss(a, b, product), axes)
        if whole:
            return jax.grad(lambda a, b: one(a, b).sum(), (0, 1))
        return jax.vmap(jax.grad(lambda a, b: loss(a, b, product), (0, 1)), axes)

    a, b = drawn(COUNT, M, K, dtype=jnp.float32, seed=1), drawn(COUNT, K, N, seed=2)
    a = a.astype(jnp.bfloat16) / 8
    a, b = (x if axis == 0 else x[0] for x, axis in zip((a, b), axes, strict=True))
    # Differences of rounded products are as large as their rounding.
    found = jax.jit(gradient(matmul))(a, b)
    expected = jax.jit(gradient(lambda a, b: a.astype(jnp.float32) @ b.astype(jnp.float32)))(a, b)
    for one, other in zip(found, expected, strict=True):
        agree(one, other, 2e-2)


def test_64_bits(matmul):
    """Also where a jitted function is batched later."""
    with jax.enable_x64(True):
        a, b = drawn(COUNT, M, K, seed=1), drawn(COUNT, K, N, seed=2)
        agree(jax.vmap(jax.jit(matmul))(a, b), np.einsum("zmk,zkn->zmn", *wide(a, b)))


def test_no_products(matmul):
    """A batch dimension of no elements."""
    result = jax.vmap(matmul)(drawn(0, M, K), drawn(0, K, N))
    assert result.shape == (0, M, N)


GATED = {"hopper": hopper_ops.gated_matmul, "portable": ops.gated_matmul}
MIXED = {"hopper": hopper_ops.mixed_matmul, "portable": ops.mixed_matmul}


@pytest.mark.parametrize("target", GATED)
@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, 0), (None, 0, None)])
def test_gated(target, axes):
    """Gated products, and their gradients, of many matrices or many weights."""
    gated = GATED[target]
    a, *weights = drawn(COUNT, M, K), drawn(COUNT, K, N, seed=1), drawn(COUNT, K, N, seed=2)
    arrays = [a, *(w / 8 for w in weights)]
    given = [x if axis == 0 else x[0] for x, axis in zip(arrays, axes, strict=True)]

    def expected(a, gate, up):
        a, gate, up = (x.astype(jnp.float32) for x in (a, gate, up))
        return jax.nn.silu(a @ gate) * (a @ up)

    agree(jax.jit(jax.vmap(gated, axes))(*given), jax.vmap(expected, axes)(*given))

    def gradient(function):
        each = jax.vmap(lambda *given: function(*given).astype(jnp.float32).sum(), axes)
        return jax.jit(jax.grad(lambda *given: each(*given).sum(), (0, 1, 2)))(*given)

    for one, other in zip(gradient(gated), gradient(expected), strict=True):
        agree(one, other, 2e-2)


@pytest.mark.parametrize("target", MIXED)
@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, None), (0, 0, 0)])
def test_mixed(target, axes):
    """Narrow weights that all matrices share, or of each."""
    mixed = MIXED[target]
    weights = np.random.default_rng(3).integers(-128, 128, (COUNT, N, K)).astype(np.int8)
    a, scales = drawn(COUNT, M, K), drawn(COUNT, N, dtype=jnp.float32, seed=4)
    arrays = (a, jnp.asarray(weights), scales)
    given = [x if axis == 0 else x[0] for x, axis in zip(arrays, axes, strict=True)]

    def product(a, b, scales):
        return mixed(a, b, scales=scales, transpose_b=True)

    def expected(a, b, scales):
        return a.astype(jnp.float32) @ b.T.astype(jnp.float32) * scales

    result = jax.jit(jax.vmap(product, axes))(*given)
    agree(result, jax.vmap(expected, axes)(*given))


def test_rows_of_one_product():
    """Gated products and those with narrow weights have one kernel for all rows, too."""
    a, weight = drawn(COUNT, 128, 128), drawn(128, 256)
    narrow = jnp.ones((256, 128), jnp.int8)
    for function, operands in (
        (hopper_ops.gated_matmul, (weight, weight)),
        (lambda a, b: hopper_ops.mixed_matmul(a, b, transpose_b=True), (narrow,)),
    ):
        axes = (0, *(None for _ in operands))
        several = kernels(jax.vmap(function, axes), a, *operands)
        joined = kernels(function, a.reshape(-1, 128), *operands)
        assert [one.ptx for one in several] == [one.ptx for one in joined]
