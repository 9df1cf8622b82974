"""Operations on rows of operands that a program transposes: kernels read them as they lie."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_support import error, on, random
from row_references import cross_entropy, norm

import pallasite
from pallasite import ops
from pallasite_std.ops.rows import gated as gated_rows
from pallasite_std.ops.rows import norm_turned, quantize, turned
from pallasite_std.ops.rows.norm_body import Norm

pytestmark = pytest.mark.runs_kernels

F32, BF16 = jnp.float32, jnp.bfloat16


CACHED = (
    gated_rows._turned_kernel,
    norm_turned.forward,
    quantize._turned_dequantization,
    quantize._turned_kernel,
)


def forget():
    """What is kept of choices of kernels."""
    jax.clear_caches()
    for one in CACHED:
        one.cache_clear()


@pytest.fixture
def always(monkeypatch):
    """Kernels serve small matrices, and lines that begin within vectors, too."""
    monkeypatch.setattr(turned, "_FEWEST_TILES", 1)
    monkeypatch.setattr(turned, "_MOST_BY_LANES", 9)
    forget()
    yield
    forget()


def gated(gate, up):
    return gate / (1 + jnp.exp(-gate)) * up


def in_float64(function, *operands):
    """The results of a reference."""
    with jax.enable_x64(True):
        wide = [
            jnp.asarray(np.asarray(one, np.float64) if one.dtype != np.int32 else np.asarray(one))
            for one in operands
        ]
        return [np.asarray(one) for one in jax.tree.leaves(function(*wide))]


def check(ours, reference, *operands, tolerance):
    """Compares a program's results with those in float64, each in the Euclidean norm."""
    found = jax.tree.leaves(jax.jit(ours)(*operands))
    for one, exact in zip(found, in_float64(reference, *operands), strict=True):
        assert error(one, exact) < tolerance


def squares(function, count):
    """Gradients of a sum of squares by the first operands."""

    def loss(*operands):
        results = jax.tree.leaves(function(*operands))
        return sum(
            jnp.sum(jnp.square(one.astype(jnp.promote_types(one.dtype, F32)))) for one in results
        )

    return jax.grad(loss, tuple(range(count)))


TURNS = {
    "transposed": lambda function: lambda x, *rest: function(x.T, *rest),
    "mapped": lambda function: (
        lambda x, *rest: jax.vmap(function, (1, *(None if one.ndim == 1 else 0 for one in rest)))(
            x, *rest
        )
    ),
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "centered", "residual"),
    [
        (136, 200, BF16, False, False),
        (200, 96, F32, True, True),  # Four warpgroups share rows at most.
        (67, 136, jnp.float16, True, False),  # No columns that the copy engine moves.
        (67, 133, jnp.float16, True, False),
        (40, 1224, BF16, False, True),
        (9, 40, F32, False, False),
        (70, 14, BF16, True, False),
        (3, 40, F32, True, True),  # Too few rows for a tile.
        (16, 9000, F32, False, False),  # Too many columns.
    ],
)
def test_norms(always, turn, rows, columns, dtype, centered, residual):
    x = random(1, (columns, rows), dtype) + jnp.asarray(1, dtype)
    weight, bias = random(2, (columns,), F32), random(3, (columns,), F32)
    vectors = (weight, bias) if centered else (weight,)
    epsilon = 1e-5 if centered else 1e-6
    other = (random(4, (rows, columns), dtype),) if residual else ()

    def ours(x, *rest):
        function = ops.layer_norm if centered else ops.rms_norm
        return function(x, *rest[len(other) :], residual=rest[0] if residual else None)

    def exact(x, *rest):
        added = rest[0] if residual else None
        return norm(x, *rest[len(other) :], residual=added, centered=centered, epsilon=epsilon)

    tolerance = 3e-6 if dtype == F32 else 6e-3
    turned = TURNS[turn](ours), lambda x, *rest: exact(x.T, *rest)
    check(*turned, x, *other, *vectors, tolerance=tolerance)
    if dtype == F32:
        gradients = (squares(one, 1) for one in turned)
        check(*gradients, x, *other, *vectors, tolerance=1e-5)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize(("rows", "columns", "dtype"), [(80, 72, BF16), (67, 100, F32)])
def test_quotients(always, turn, rows, columns, dtype):
    x = random(1, (columns, rows), dtype)

    def there_and_back(x):
        values, scales = TURNS[turn](lambda x: ops.quantize(x, jnp.int8))(x)
        return values.astype(F32) * scales[:, None]

    values, scales = jax.jit(TURNS[turn](lambda x: ops.quantize(x, jnp.int8)))(x)
    largest = np.abs(np.asarray(x, np.float64)).max(0)
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    units = np.asarray(x, np.float64).T / np.asarray(scales, np.float64)[:, None]
    assert np.abs(np.asarray(values, np.float64) - units).max() <= 0.5 + 1e-4


@pytest.mark.parametrize(("rows", "group"), [(72, 32), (67, 32), (72, 48), (3, 32), (3, None)])
def test_groups_and_few_rows(always, rows, group):
    """Also where no kernel serves: groups that no warpgroups halve, rows that are no vector."""
    x = random(1, (96, rows), F32)

    def there_and_back(x):
        values, scales = ops.quantize(x.T, jnp.int8, group=group)
        assert values.shape == (rows, 96)
        assert scales.shape == ((rows, 96 // group) if group else (rows,))
        return ops.dequantize(values.T.T, scales, F32)

    check(there_and_back, lambda x: x.T, x, tolerance=2e-2)
    values, scales = random(2, (96, rows), jnp.int8), random(3, (rows, 3), F32)
    exact = lambda v, s: v.T * jnp.repeat(s, 32, axis=1)  # noqa: E731
    check(lambda v, s: ops.dequantize(v.T, s, F32), exact, values, scales, tolerance=1e-6)
    gate, up = random(4, (96, rows), F32), random(5, (96, rows), F32)
    turned = lambda one: lambda gate, up: one(gate.T, up.T)  # noqa: E731
    check(turned(ops.swiglu), turned(gated), gate, up, tolerance=1e-6)
    both = squares(turned(ops.swiglu), 2), squares(turned(gated), 2)
    check(*both, gate, up, tolerance=1e-6)


@pytest.mark.parametrize(
    ("columns", "dtype"), [(256, F32), (9000, F32), (1001, jnp.float16), (250, BF16)]
)
@pytest.mark.parametrize("centered", [False, True])
def test_quantised_norms(always, centered, columns, dtype):
    """Also of rows of bytes that begin within vectors, in several tiles."""
    x, weight = random(1, (columns, 72), dtype), random(2, (columns,), F32)
    function = ops.layer_norm if centered else ops.rms_norm

    def ours(x, weight):
        values, scales = function(x.T, weight, quantize=jnp.int8)
        return values.astype(F32) * scales[:, None]

    exact = functools.partial(norm, centered=centered, epsilon=1e-5 if centered else 1e-6)
    check(ours, lambda x, w: exact(x.T, w), x, weight, tolerance=2e-2)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize(
    ("rows", "columns", "kind", "dtype"),
    [(160, 72, jnp.float8_e4m3fn, BF16), (131, 133, jnp.int8, F32)],
)
def test_products(turn, rows, columns, kind, dtype):
    values, scales = random(1, (columns, rows), kind), random(2, (rows,), F32)
    if turn == "mapped":  # Each row has a scale of its own.
        ours = jax.vmap(lambda v, s: ops.dequantize(v, s, dtype), (1, 0))
    else:
        ours = TURNS[turn](lambda v, s: ops.dequantize(v, s, dtype))
    tolerance = 1e-6 if dtype == F32 else 4e-3
    check(ours, lambda v, s: v.T * s[:, None], values, scales, tolerance=tolerance)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    ("across", "back"), [((True, True), False), ((True, False), False), ((True, True), True)]
)
def test_gates(across, back, jitted):
    """The gradient is that of what was transposed, also of a transposed result, and of programs
    that are differentiated after they have been traced."""
    rows, columns = 136, 200
    operands = [
        random(n, (columns, rows) if one else (rows, columns), F32) for n, one in enumerate(across)
    ]

    def turned(function):
        def call(*operands):
            given = (one.T if turn else one for one, turn in zip(operands, across, strict=True))
            result = function(*given)
            return result.T if back else result

        return call

    ours = turned(ops.swiglu)
    check(ours, turned(gated), *operands, tolerance=1e-6)
    gradients = squares(jax.jit(ours) if jitted else ours, 2), squares(turned(gated), 2)
    check(*gradients, *operands, tolerance=1e-6)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    ("rows", "classes", "dtype", "smoothing", "turn"),
    [
        (80, 1000, BF16, 0.0, "transposed"),
        (40, 4099, F32, 0.1, "transposed"),  # Several blocks have classes of a row.
        (67, 300, jnp.float16, 0.1, "mapped"),
        (9, 40, F32, 0.0, "transposed"),
        (3, 300, F32, 0.1, "transposed"),
    ],
)
def test_losses(rows, classes, dtype, smoothing, turn, jitted):
    logits = 3 * random(1, (classes, rows), dtype)
    labels = jnp.asarray(np.random.default_rng(2).integers(-1, classes + 1, rows), jnp.int32)
    options = dict(label_smoothing=smoothing, z_loss=1e-3, ignored_label=-1)
    ours = functools.partial(ops.softmax_cross_entropy, **options)
    exact = functools.partial(cross_entropy, **options)
    if turn == "mapped":
        turned = jax.vmap(ours, (1, 0))
    else:
        turned = lambda x, labels: ours(x.T, labels)  # noqa: E731
    turned = jax.jit(turned) if jitted else turned
    tolerance = 2e-6 if dtype == F32 else 2e-3
    check(turned, lambda x, labels: exact(x.T, labels), logits, labels, tolerance=tolerance)

    def gradient(function):
        return lambda x, labels: jax.grad(lambda x: jnp.sum(function(x, labels)))(x)

    tolerance = 1e-5 if dtype == F32 else 6e-3
    both = gradient(turned), gradient(lambda x, labels: exact(x.T, labels))
    check(*both, logits, labels, tolerance=tolerance)


def test_choice():
    """Kernels do not serve narrow rows, few tiles, and matrices that lanes would have to move."""
    plain = Norm(False, 1e-6, 0.0, True, False, False, np.dtype(BF16))
    narrow = Norm(False, 1e-6, 0.0, True, False, False, np.dtype(BF16), np.dtype(np.int8))

    def serves(norm, rows, columns):
        problem = turned.Turned(1, rows, columns, (True,))
        found = norm_turned.forward(norm, problem, np.dtype(BF16), False, 132, 227 * 1024)
        return found is not None

    assert serves(plain, 4096, 1024) and serves(plain, 256, 16)
    assert serves(plain, 4099, 1024)  # Columns within vectors, one of two matrices.
    assert not serves(plain, 4096, 1023)  # Rows of the result within vectors.
    assert serves(narrow, 4096, 120) and not serves(narrow, 4099, 120)
    assert not serves(plain, 128, 1024)  # Few tiles.
    assert not serves(plain, 4096, 8)
    assert not serves(plain, 4096, 8192)  # More than shared memory holds.


def test_axes_before_and_behind():
    """Channels of images become the last axis."""
    x, weight = random(1, (2, 96, 6, 14), F32), random(2, (96,), F32)
    exact = functools.partial(norm, centered=False, epsilon=1e-6)
    turned = functools.partial(jnp.moveaxis, source=1, destination=-1)
    check(
        lambda x, w: ops.rms_norm(turned(x), w),
        lambda x, w: exact(turned(x), w),
        x,
        weight,
        tolerance=3e-6,
    )
    labels = jnp.asarray(np.random.default_rng(3).integers(0, 96, (2, 6, 14)), jnp.int32)

    def gradient(function):
        return jax.grad(lambda x: jnp.sum(function(turned(x), labels) ** 2))

    for change in (lambda function: lambda x: function(turned(x), labels), gradient):
        both = change(ops.softmax_cross_entropy), change(cross_entropy)
        check(*both, jnp.concatenate([x, x, x, x], 1)[:, :96], tolerance=1e-5)


def test_maps_and_second_derivatives():
    x, weight = random(1, (3, 96, 72), F32), random(2, (96,), F32)
    for group in (None, 32, 48):
        there = jax.jit(lambda x, group=group: ops.quantize(x.T, jnp.int8, group=group))
        back = jax.jit(lambda v, s: ops.dequantize(v.T, s, F32))

        def through(x, there=there, back=back):
            values, scales = there(x)
            return back(values.T, scales)

        check(jax.vmap(through), lambda x: jnp.swapaxes(x, 1, 2), x, tolerance=2e-2)

    def cubes(function):
        return lambda x, w: jax.grad(lambda x: jnp.sum(jax.jit(function)(x, w) ** 3))(x)

    exact = functools.partial(norm, centered=False, epsilon=1e-6)
    turned = lambda x, w: ops.rms_norm(x.T, w), lambda x, w: exact(x.T, w)
    both = (jax.vmap(jax.jit(one), (0, None)) for one in turned)
    check(*both, x, weight, tolerance=3e-6)

    def second(function):
        return lambda x, w: jax.grad(lambda x: jnp.sum(cubes(function)(x, w) ** 2))(x)

    check(*map(second, turned), x[0], weight, tolerance=1e-5)


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        (lambda x: ops.rms_norm(x.T), [(96, 200)]),
        (lambda x: jax.vmap(ops.layer_norm, 1)(x), [(96, 200)]),
        (lambda x: ops.quantize(x.T, jnp.int8), [(96, 200)]),
        (lambda x: jax.vjp(lambda x: ops.rms_norm(x.T), x)[0], [(96, 200)]),
        (lambda x: ops.softmax_cross_entropy(x.T, jnp.zeros(200, jnp.int32)), [(160, 200)]),
        (lambda x, y: ops.swiglu(x.T, y.T), [(96, 200)] * 2),
        (lambda x, y: jax.vjp(lambda x: ops.swiglu(x.T, y.T), x)[0], [(96, 200)] * 2),
    ],
)
def test_kernels_read_what_was_transposed(function, operands):
    with on("sm_90a"):
        kernels = pallasite.compile_all(function, *(random(1, one, F32) for one in operands))
    columns, rows = operands[0]
    for kernel in kernels:
        assert kernel.jaxpr.count(f"f32[1,{columns},{rows}]") >= len(operands)


def test_loops_and_checkpoints():
    x, weight = random(1, (64, 136), F32), random(2, (64,), F32)
    exact = functools.partial(norm, centered=False, epsilon=1e-6)

    def steps(function):
        def call(x, weight):
            def step(x, _):
                return x + jax.checkpoint(lambda x: function(x.T, weight).T)(x) / 8, None

            return jax.lax.scan(step, x, length=3)[0]

        return call

    ours, wanted = steps(ops.rms_norm), steps(exact)
    check(ours, wanted, x, weight, tolerance=3e-6)
    check(squares(ours, 2), squares(wanted, 2), x, weight, tolerance=1e-5)
