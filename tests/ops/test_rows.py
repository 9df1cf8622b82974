"""Operations on rows agree with float64, and so do their gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_references
from ops_support import PORTABLE, exact, on, random

import pallasite
from pallasite import ops
from pallasite.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite_std.ops.rows import norm_body, norm_kernels

pytestmark = pytest.mark.runs_kernels

TOLERANCE = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}
SHAPES = [(2, 3, 33), (37, 130), (2, 4097), (1, 8192), (2, 20001)]
"""Rows of a warp, of a warpgroup, of several, and such that registers do not hold."""


def difference(got, expected):
    """The relative error in the 2-norm."""
    assert got.shape == expected.shape
    expected = np.asarray(expected, np.float64)
    assert np.isfinite(exact(got)).all()
    return np.linalg.norm(exact(got) - expected) / max(np.linalg.norm(expected), 1e-30)


def compare(function, reference, *operands, tolerance=None, gradients=True):
    """Results and gradients against the reference in float64."""
    tolerance = tolerance or TOLERANCE[operands[0].dtype.name]
    floats = [n for n, one in enumerate(operands) if jnp.issubdtype(one.dtype, jnp.floating)]
    if not gradients:
        results = function(*operands)
    else:
        results, pullback = jax.vjp(function, *operands)
        leaves, tree = jax.tree.flatten(results)
        wanted = [random(70 + n, one.shape, one.dtype) for n, one in enumerate(leaves)]
        got = pullback(jax.tree.unflatten(tree, wanted))
    with jax.enable_x64(True):
        wide = [jnp.asarray(exact(one)) if n in floats else one for n, one in enumerate(operands)]
        # One program takes less time to compile than its parts. Labels would be 64 bits wide in it.
        together = jax.jit if len(floats) == len(operands) else lambda function: function
        if not gradients:
            expected = together(reference)(*wide)
        else:
            widened = jax.tree.unflatten(tree, [jnp.asarray(exact(one)) for one in wanted])
            with_gradients = functools.partial(_with_gradients, reference)
            expected, derivatives = together(with_gradients)(wide, widened)
    for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert difference(one, other) < tolerance
    if gradients:
        for n in floats:
            assert difference(got[n], derivatives[n]) < 2 * tolerance


def _with_gradients(function, operands, wanted):
    results, pullback = jax.vjp(function, *operands)
    return results, pullback(wanted)


def dtype_of(shape):
    """Each dtype for some shapes."""
    return list(TOLERANCE)[sum(shape) % 3]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("centered", [False, True])
def test_norms(shape, centered):
    """Forward and backward, with all operands."""
    dtype = dtype_of(shape)
    epsilon = 1e-5
    x, residual = random(1, shape, dtype) + 1, random(2, shape, dtype)
    weight, bias = random(3, shape[-1:], dtype), random(4, shape[-1:], "float32")
    # The rounded sum is normalised: operands whose sums are exact.
    x, residual = (jnp.round(one * 8) / 8 for one in (x, residual))
    with on(PORTABLE[len(shape) % 3]):
        if centered:
            compare(
                lambda x, w, b, r: ops.layer_norm(x, w, b, residual=r, epsilon=epsilon),
                functools.partial(row_references.norm, centered=True, epsilon=epsilon),
                *(x, weight, bias, residual),
            )
        else:
            compare(
                lambda x, w: ops.rms_norm(x, w, epsilon=epsilon, weight_offset=1.0),
                functools.partial(
                    row_references.norm, centered=False, epsilon=epsilon, weight_offset=1.0
                ),
                *(x, weight),
            )


@pytest.mark.parametrize("columns", [8, 40, 264, 528])
def test_norms_to_another_dtype(columns):
    """The cotangent has the dtype of the result; rows of any number of whole vectors."""
    x, weight = random(1, (19, columns), "bfloat16"), random(3, (columns,), "bfloat16")
    with on("sm_90"):
        compare(
            lambda x, w: ops.layer_norm(x, w, w, out_dtype="float32"),
            lambda x, w: row_references.norm(x, w, w, None, centered=True, epsilon=1e-5),
            *(x, weight),
        )


@pytest.mark.parametrize(
    ("rows", "columns"), [(11, 2048), (7, 3000), (23, 160), (5, 12288), (83, 33), (13, 257)]
)
def test_gradients_of_many_rows_of_a_block(rows, columns):
    """Blocks that go over many rows, two of which are reduced together, and one that is left; long
    rows are fetched before their turn in both directions."""
    norm = norm_body.Norm(True, 1e-5, 0.0, True, True, False, np.dtype(np.float32))
    dtype = np.dtype(np.float32)
    x, d_out = random(1, (rows, columns), dtype) + 3, random(2, (rows, columns), dtype)
    weight, bias = random(3, (columns,), dtype), random(4, (columns,), dtype)
    forward = norm_kernels.forward(norm, rows, columns, dtype, True, 1, 110_000)
    out, *moments = forward(x, weight, bias)
    kernel = norm_kernels.backward(norm, rows, columns, dtype, 1, 1 << 17)
    d_x, *sums = kernel(x, d_out, *moments, weight)
    reference = functools.partial(row_references.norm, residual=None, centered=True, epsilon=1e-5)
    with jax.enable_x64(True):
        wide = [jnp.asarray(exact(one)) for one in (x, weight, bias)]
        expected, pull = jax.vjp(reference, *wide)
        wanted = pull(jnp.asarray(exact(d_out)))
    got = (out, d_x, *(np.sum(exact(one), axis=0) for one in sums))
    for one, other in zip(got, (expected, *wanted), strict=True):
        assert difference(np.asarray(one), other) < 1e-5


def test_norms_of_constant_rows():
    """Nothing to divide by but epsilon; a row of zeros; no operands but x."""
    x = jnp.full((3, 40), 7.0).at[1].set(0.0)
    assert np.abs(exact(ops.layer_norm(x))).max() == 0.0
    assert difference(
        ops.rms_norm(x), np.where(np.arange(3)[:, None] == 1, 0, np.ones((3, 40)))
    ) < (1e-6)
    q, scale = ops.rms_norm(x, quantize="int8")
    assert scale[1] == 1.0 and not exact(q)[1].any() and (exact(q)[0] == 127).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("shape", [(6, 48), (2, 20001)], ids=str)
def test_quantization(dtype, shape):
    """Each element is as near to the exact one as rounding allows."""
    x = random(5, shape, "bfloat16").at[0].mul(1e-4)
    weight = random(6, shape[-1:], "float32")
    limit = 127.0 if dtype == "int8" else float(jnp.finfo(dtype).max)
    for (q, scale), wanted in (
        (ops.quantize(x, dtype), exact(x)),
        (
            ops.rms_norm(x, weight, quantize=dtype),
            exact(ops.rms_norm(x, weight, out_dtype="float32")),
        ),
        *(
            (
                ops.layer_norm(x, weight, bias, quantize=dtype),
                exact(ops.layer_norm(x, weight, bias, out_dtype="float32")),
            )
            for bias in ((None, weight) if shape[1] < 100 else ())
        ),
    ):
        assert q.dtype == dtype and scale.shape == shape[:1]
        np.testing.assert_allclose(scale, np.abs(wanted).max(-1) / limit, rtol=1e-6)
        ratio = wanted / exact(scale)[:, None]
        if dtype == "int8":
            rounding = np.full(ratio.shape, 0.5001)
        else:
            bits = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}[dtype]
            exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(ratio), 1e-30))), bits[1])
            rounding = 0.5001 * 2.0 ** (exponent - bits[0])
        assert (np.abs(exact(q) - ratio) <= rounding).all()
        back = ops.dequantize(q, scale, "float32")
        np.testing.assert_allclose(back, exact(q) * exact(scale)[:, None], rtol=1e-6)


def test_quantization_by_group():
    """A scale for each run of columns."""
    x = random(7, (2, 5, 96), "float32")
    q, scale = ops.quantize(x, "float8_e4m3fn", group=32)
    assert scale.shape == (2, 5, 3)
    whole, scales = ops.quantize(x.reshape(30, 32), "float8_e4m3fn")
    assert (q.reshape(30, 32) == whole).all() and (scale.reshape(30) == scales).all()
    back = ops.dequantize(q, scale)
    assert back.dtype == jnp.bfloat16 and difference(back, exact(x)) < 0.04


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    # The last one is less than a tile.
    [(37, 157, "bfloat16"), (50, 17, "float32"), (3, 65, "float16")],
)
def test_dequantize_rows_that_begin_within_vectors(rows, columns, dtype):
    draw = np.random.default_rng(columns)
    values = draw.integers(-127, 128, size=(rows, columns)).astype(np.int8)
    scales = draw.uniform(0.5, 2.0, rows).astype(np.float32)
    found = ops.dequantize(jnp.asarray(values), jnp.asarray(scales), dtype)
    wanted = jnp.asarray(values * scales[:, None]).astype(dtype)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


@pytest.mark.parametrize("shape", [*SHAPES[::2], (2, 70003)], ids=str)
@pytest.mark.parametrize("plain", [True, False])
def test_cross_entropy(shape, plain):
    """Loss and gradient; labels that are no classes."""
    options = {} if plain else dict(
        label_smoothing=0.1, z_loss=1e-2, soft_cap=3.0, ignored_label=-1
    )  # fmt: skip
    logits = random(8, shape, dtype_of(shape)) * 4
    labels = np.random.default_rng(9).integers(0, shape[-1], shape[:-1])
    labels.flat[0] = -1 if not plain else shape[-1] + 5
    call = functools.partial(ops.softmax_cross_entropy, **options)
    reference = functools.partial(row_references.cross_entropy, **options)
    with on(PORTABLE[len(shape) % 3]):
        compare(lambda x: call(x, jnp.asarray(labels)), lambda x: reference(x, labels), logits)


@pytest.mark.parametrize("columns", [50, 1000, 40000])
@pytest.mark.parametrize("offset", [-1e5, 1e3, 1e6])
def test_cross_entropy_far_from_zero(offset, columns):
    """The loss and its gradient have the digits that the logits have."""
    logits = random(3, (3, columns), jnp.float32) * 4 + offset
    labels = np.arange(3) * 7
    wide = np.asarray(logits, np.float64) - offset
    sums = np.exp(wide).sum(1)
    expected = np.log(sums) - wide[np.arange(3), labels]
    weights = np.exp(wide) / sums[:, None]
    weights[np.arange(3), labels] -= 1

    def losses_of(x):
        return ops.softmax_cross_entropy(x, labels)

    for turn in (False, True):
        given, run = (logits.T, lambda x: losses_of(x.T)) if turn else (logits, losses_of)
        losses, pull_back = jax.vjp(jax.jit(run), given)
        np.testing.assert_allclose(losses, expected, rtol=3e-6)
        (gradient,) = pull_back(jnp.ones(3))
        np.testing.assert_allclose(gradient.T if turn else gradient, weights, atol=2e-6)


def test_cross_entropy_of_extremes():
    """Large and infinite logits: no overflow, and classes that are masked."""
    rows = np.array([[1e4, -1e4, 0, 0], [-np.inf, 2.0, 2.0, -np.inf], [-3e38, -3e38, 0, 1]])
    x = jnp.tile(jnp.asarray(rows, jnp.float32), (1, 8192))[:, :32766]
    labels = jnp.array([0, 1, 3])
    for logits in (x[:, :4], x):
        expected = row_references.cross_entropy(logits, labels)
        np.testing.assert_allclose(
            ops.softmax_cross_entropy(logits, labels), expected, rtol=1e-6, atol=1e-6
        )
        gradient = jax.grad(lambda z: ops.softmax_cross_entropy(z, labels).sum())(logits)
        expected = jax.grad(lambda z: row_references.cross_entropy(z, labels).sum())(logits)
        np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_labels_of_many_bits():
    """Those that no integer of 32 bits holds are no classes: the nearest one counts."""
    logits = random(8, (3, 40), "float32")
    expected = ops.softmax_cross_entropy(logits, jnp.array([39, 39, 1]))
    labels = jnp.array([2**32 - 1, 2**31 + 3, 1], jnp.uint32)
    np.testing.assert_array_equal(ops.softmax_cross_entropy(logits, labels), expected)
    with jax.enable_x64(True):
        labels = jnp.array([2**40, 2**32, -(2**33)])
        expected = ops.softmax_cross_entropy(logits, jnp.array([39, 39, 0]))
        np.testing.assert_array_equal(ops.softmax_cross_entropy(logits, labels), expected)


@pytest.mark.parametrize("shape", [(3, 5, 131), (2, 20001)], ids=str)
def test_gated_activations(shape):
    """SwiGLU, and another function."""
    gate, up = random(10, shape, dtype_of(shape)), random(11, shape, dtype_of(shape))
    compare(ops.swiglu, lambda g, u: jax.nn.silu(g) * u, gate, up)
    compare(
        lambda g, u: ops.gated_activation(g, u, jnp.tanh), lambda g, u: jnp.tanh(g) * u, gate, up
    )


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 5, 4, 64), {}),
        ((7, 3, 80), dict(rotary_dim=48, interleaved=True)),
        ((3, 1, 30), dict(interleaved=True, base=500000.0)),
        ((3, 6, 96), dict(rotary_dim=64)),
        ((1, 9, 2, 18), {}),
        ((5, 27, 64), {}),  # All heads of a token in a block.
        ((3, 101, 66), {}),  # Parts of them, of which the last one is smaller.
        ((2, 3, 107, 64), dict(interleaved=True)),
        ((6, 5, 1, 64), {}),  # Several sequences have the same angles.
        ((8, 3, 2, 24), dict(rotary_dim=12, interleaved=True)),
    ],
)
def test_rotary(shape, options):
    """Both ways to pair elements, whole and partial heads."""
    positions = np.random.default_rng(12).integers(0, 60, shape[:-2])
    x = random(13, shape, dtype_of(shape))
    compare(
        lambda x: ops.rotary_embedding(x, jnp.asarray(positions), **options),
        lambda x: row_references.rotary(x, positions, **options),
        x,
        tolerance=1e-5 if x.dtype == jnp.float32 else None,
    )
    shared = ops.rotary_embedding(x, jnp.arange(shape[-3]), **options)
    expected = row_references.rotary(exact(x), np.arange(shape[-3]), **options)
    assert difference(shared, expected) < max(1e-5, TOLERANCE[x.dtype.name])


def test_transformations():
    """jit, vmap, remat, and gradients through several operations."""
    x, w = random(14, (3, 4, 40), "float32"), random(15, (40,), "float32")
    labels = jnp.asarray(np.random.default_rng(16).integers(0, 40, (3, 4)))

    def loss(x, w, module):
        if module is ops:
            y = ops.swiglu(ops.rms_norm(x, w), x)
            return ops.softmax_cross_entropy(y, labels).mean()
        y = jax.nn.silu(row_references.norm(x, w, centered=False, epsilon=1e-6)) * x
        return row_references.cross_entropy(y, labels).mean()

    def own(x, w):
        return jax.checkpoint(lambda x, w: loss(x, w, ops))(x, w)

    got = jax.jit(jax.grad(own, argnums=(0, 1)))(x, w)
    expected = jax.jit(jax.grad(lambda x, w: loss(x, w, row_references), argnums=(0, 1)))(x, w)
    for one, other in zip(got, expected, strict=True):
        assert difference(one, other) < 2e-6
    mapped = jax.vmap(lambda one: ops.layer_norm(one, w), in_axes=1, out_axes=1)(x)
    assert difference(mapped, exact(ops.layer_norm(x, w))) < 1e-6


def test_nothing():
    """No rows; no columns."""
    for shape in ((0, 8), (3, 0)):
        x = jnp.zeros(shape)
        assert ops.rms_norm(x, residual=x)[1].shape == shape
        assert ops.swiglu(x, x).shape == shape
        assert ops.quantize(x, "int8")[1].shape == shape[:1]
    assert ops.softmax_cross_entropy(jnp.zeros((0, 8)), jnp.zeros((0,), int)).shape == (0,)
    assert ops.rotary_embedding(jnp.zeros((0, 2, 8)), jnp.zeros((0,))).shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: ops.rms_norm(x.astype(int)), InvalidTypeError, "x does not fit"),
        (lambda x: ops.rms_norm(x, x[0, :3]), InvalidTypeError, "weight does not fit the rows"),
        (lambda x: ops.layer_norm(x, residual=x[:1]), InvalidTypeError, "residual and x"),
        (lambda x: ops.layer_norm(x, epsilon=-1), InvalidValueError, "epsilon is negative"),
        (lambda x: ops.quantize(x, "int4"), InvalidTypeError, "float8_e4m3fn, float8_e5m2, int8"),
        (lambda x: ops.quantize(x, "int8", group=3), InvalidValueError, "does not divide"),
        (lambda x: ops.quantize(x, "int8", group="a"), InvalidTypeError, "group must be an int"),
        (lambda x: ops.quantize(x, "what"), InvalidTypeError, "quotients is not a dtype"),
        (lambda x: ops.rms_norm("x"), InvalidTypeError, "x is not an array"),
        (
            lambda x: ops.softmax_cross_entropy(x, [0, 0], ignored_label=2**40),
            InvalidValueError,
            "ignored_label is out of range",
        ),
        (lambda x: ops.dequantize(x, x[:, 0]), InvalidTypeError, "do not fit together"),
        (lambda x: ops.softmax_cross_entropy(x, x[:, 0]), InvalidTypeError, "labels do not fit"),
        (lambda x: ops.swiglu(x, x[:1]), InvalidTypeError, "up and gate are not"),
        (
            lambda x: ops.rotary_embedding(x[None], jnp.arange(9)),
            InvalidTypeError,
            "positions do not fit the tokens",
        ),
        (
            lambda x: jax.grad(lambda p: ops.rotary_embedding(x[None], p).sum())(jnp.ones((1,))),
            UnsupportedError,
            "by positions has no derivatives",
        ),
        (
            lambda x: jax.grad(lambda x: ops.quantize(x, "int8")[1].sum())(x),
            UnsupportedError,
            "quantize has no derivatives",
        ),
    ],
)
def test_messages(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call(jnp.ones((2, 8)))
    assert isinstance(caught.value, pallasite.PallasiteError)
    assert "test_rows.py:" in str(caught.value).splitlines()[0]


def _loss_reference(z, labels):
    z = 5 * jnp.tanh(z / 5)
    lse = jax.nn.logsumexp(z, axis=-1)
    chosen = jnp.take_along_axis(z, jnp.clip(labels, 0)[:, None], 1)[:, 0]
    losses = lse - 0.9 * chosen - 0.1 * z.mean(1) + 0.01 * lse * lse
    return jnp.where(labels == -1, 0, losses)


def _norm_reference(x, weight, bias, residual):
    x = x + residual
    centered = x - x.mean(-1, keepdims=True)
    return centered / jnp.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * weight + bias, x


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("function", "reference", "count"),
    [
        (
            lambda z, labels: ops.softmax_cross_entropy(
                z, labels, label_smoothing=0.1, z_loss=0.01, soft_cap=5.0, ignored_label=-1
            ),
            _loss_reference,
            1,
        ),
        (
            lambda x, w, b, r: ops.layer_norm(x, w, b, residual=r),
            _norm_reference,
            4,
        ),
        (ops.swiglu, lambda gate, up: jax.nn.silu(gate) * up, 2),
    ],
)
def test_derivatives_of_higher_order(function, reference, count):
    x = random(20, (4, 33), jnp.float32)
    given = [x, random(21, (33,), jnp.float32), random(22, (33,), jnp.float32), x[::-1] * 2]
    if count < 4:
        given = [x, jnp.asarray([1, 2, -1, 4]) if count == 1 else x[::-1]]
    operands, rest = tuple(map(jnp.asarray, given[:count])), given[count:]

    def differentiated(function, order):
        if order == 0:
            return lambda *args: sum(
                jnp.sum(one**3) for one in jax.tree.leaves(function(*args, *rest))
            )
        inner = jax.grad(differentiated(function, order - 1), argnums=tuple(range(count)))
        return lambda *args: sum(jnp.sum(one**2) for one in inner(*args))

    for order in (1, 2) if count == 2 else (1,):
        argnums = tuple(range(count))
        got = jax.grad(differentiated(function, order), argnums)(*operands)
        want = jax.grad(differentiated(reference, order), argnums)(*operands)
        for one, other in zip(got, want, strict=True):
            error = np.linalg.norm(np.asarray(one - other, np.float64))
            assert error < 1e-4 * np.linalg.norm(np.asarray(other, np.float64))
