"""Products under JAX's transformations, in any nesting, with batch dimensions anywhere."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

import pallasite
from pallasite import ops
from pallasite.errors import InvalidValueError
from pallasite_hopper import ops as hopper_ops
from pallasite_std.ops.dense.arguments import matmul_call
from pallasite_std.ops.dense.arrangement import MATRIX
from pallasite_std.ops.dense.config import MatmulConfig
from pallasite_std.ops.dense.gradient import differentiable_product

M, N, K = 5, 3, 4
EXTENTS = (2, 3)
"""Of batch dimensions."""


def _matrix_product(call, a, b, extras):
    """As kernels are called: extents and orders are those of the arrays."""
    problem = call.problem
    assert a.shape == ((problem.k, problem.m) if problem.transpose_a else (problem.m, problem.k))
    assert b.shape == ((problem.n, problem.k) if problem.transpose_b else (problem.k, problem.n))
    assert (a.dtype, b.dtype) == (problem.dtype_a, problem.dtype_b)
    a, b = a.T if problem.transpose_a else a, b.T if problem.transpose_b else b
    values, remaining = jnp.dot(a, b, preferred_element_type=jnp.float32), iter(extras)
    epilogue = call.epilogue
    for kind, shape in ((epilogue.row_scale, (-1, 1)), (epilogue.column_scale, (1, -1))):
        if kind != "none":
            scale = next(remaining)
            assert scale.size == 1 or kind == "vector"
            values = values * scale.reshape(shape)
    if epilogue.bias:
        values = values + next(remaining)[None]
    if epilogue.activation is not None:
        captured = [next(remaining) for _ in range(epilogue.captured)]
        values = epilogue.activation(values, *captured)
    if epilogue.residual:
        values = values + next(remaining)
    return values.astype(problem.out_dtype)


def _many(call, batch, operands):
    """Several products, one by one."""
    a, b, *extras = operands
    found = np.empty(batch.sizes, object)
    for number, index in enumerate(np.ndindex(*batch.sizes)):
        one, other = (
            array[tuple(slice(None) if p == MATRIX else index[p] for p in places)]
            for array, places in ((a, batch.a), (b, batch.b))
        )
        own = [x[number] if many else x for x, many in zip(extras, batch.extras, strict=True)]
        found[index] = _matrix_product(call, one, other, tuple(own))
    assert batch.out[-1] == MATRIX
    order = [one for one in batch.out if one != MATRIX]
    stacked = jnp.stack(list(found.ravel())).reshape(*batch.sizes, *found.ravel()[0].shape)
    count, matrix = len(batch.sizes), iter((len(batch.sizes), len(batch.sizes) + 1))
    assert sorted(order) == list(range(count))
    return stacked.transpose([next(matrix) if p == MATRIX else p for p in batch.out])


_IN_PLACE = differentiable_product(_matrix_product, _many)
_MAPPED = differentiable_product(_matrix_product)


def product(function, **options):
    """``matmul`` by functions of arrays."""
    defaults = dict.fromkeys(
        ("out_dtype", "accumulator", "row_scale", "column_scale", "bias", "activation", "residual")
    )

    def call(a, b, **more):
        description, (a, b), extras = matmul_call(
            a,
            b,
            **{"transpose_a": False, "transpose_b": False, **defaults, **options, **more},
            config=None,
            config_type=MatmulConfig,
            check_dtypes=lambda *_: None,
        )
        return function(description, a, b, extras)

    return call


def drawn(shape, seed=0, dtype=jnp.float32):
    generator = np.random.default_rng((seed, *shape))
    return jnp.asarray(generator.standard_normal(shape), dtype)


def agree(found, expected, limit=1e-5):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert one.shape == other.shape
        assert np.linalg.norm(one - other) <= limit * np.linalg.norm(other) + 1e-6


def plain(transpose_a, transpose_b):
    def reference(a, b):
        return (a.T if transpose_a else a) @ (b.T if transpose_b else b)

    return reference


@st.composite
def forms(draw):
    """Orders of the operands, and for each ``jax.vmap``, innermost first, the axes it maps."""
    orders = draw(st.tuples(st.booleans(), st.booleans()))
    ranks, levels = [2, 2], []
    for _ in range(draw(st.integers(0, 3))):
        axes = [draw(st.none() | st.integers(0, rank)) for rank in ranks]
        if axes == [None, None]:
            axes[draw(st.integers(0, 1))] = 0
        ranks = [rank + (axis is not None) for rank, axis in zip(ranks, axes, strict=True)]
        out = draw(st.integers(0, 2 + len(levels)))
        levels.append((tuple(axes), out, draw(st.sampled_from(EXTENTS))))
    return orders, levels


def shapes_of(orders, levels):
    a = [K, M] if orders[0] else [M, K]
    b = [N, K] if orders[1] else [K, N]
    for axes, _, extent in levels:
        for shape, axis in zip((a, b), axes, strict=True):
            if axis is not None:
                shape.insert(axis, extent)
    return a, b


def mapped(function, levels):
    for axes, out, _ in levels:
        function = jax.vmap(function, axes, out)
    return function


@settings(max_examples=30, phases=[Phase.generate], derandomize=True)
@given(forms(), st.sampled_from([_IN_PLACE, _MAPPED]), st.booleans())
def test_any_dimensions(form, implementation, jitted):
    """Results, both kinds of derivatives, and second ones, with batch dimensions anywhere."""
    orders, levels = form
    ours = product(implementation, transpose_a=orders[0], transpose_b=orders[1])
    single = [jax.jit(one) if jitted else one for one in (ours, plain(*orders))]
    ours, theirs = (mapped(one, levels) for one in single)
    a, b = (drawn(shape, seed) for seed, shape in enumerate(shapes_of(orders, levels)))
    agree(ours(a, b), theirs(a, b))

    def loss(function):
        return lambda a, b: jnp.sin(function(a, b)).sum()

    def of_gradient(gradient):
        return lambda a, b: jnp.sin(gradient(a, b)[0]).sum()

    gradients = [jax.grad(loss(one), (0, 1)) for one in single]
    agree(*(mapped(one, [(axes, 0, x) for axes, _, x in levels])(a, b) for one in gradients))
    gradients = [jax.grad(loss(one), (0, 1)) for one in (ours, theirs)]
    agree(gradients[0](a, b), gradients[1](a, b))
    tangents = drawn(a.shape, 2), drawn(b.shape, 3)
    agree(*(jax.jvp(one, (a, b), tangents) for one in (ours, theirs)))
    agree(*(jax.jvp(one, (a, b), tangents) for one in gradients))
    agree(*(jax.grad(of_gradient(one), (0, 1))(a, b) for one in gradients))


NAMES = ("row_scale", "column_scale", "bias", "residual", "slope")
"""Of operands of the epilogue; the last one is captured by the activation."""


def with_epilogue(implementation):
    def function(a, b, *extras):
        named = dict(zip(NAMES, extras, strict=True))
        slope = named.pop("slope")
        return product(implementation)(
            a, b, activation=lambda x: jnp.where(x > 0, jnp.sin(x), slope * x), **named
        )

    return function


def expected_with_epilogue(a, b, row_scale, column_scale, bias, residual, slope):
    values = (a @ b) * row_scale[:, None] * column_scale + bias
    return jnp.where(values > 0, jnp.sin(values), slope * values) + residual


@st.composite
def epilogues(draw):
    """For each ``jax.vmap``, innermost first, the axes of all operands, and that of the result."""
    ranks, levels = [2, 2, 1, 1, 1, 2, 0], []
    for _ in range(draw(st.integers(1, 2))):
        axes = [draw(st.none() | st.integers(0, rank)) for rank in ranks]
        if not any(axis is not None for axis in axes):
            axes[draw(st.integers(0, len(axes) - 1))] = 0
        ranks = [rank + (axis is not None) for rank, axis in zip(ranks, axes, strict=True)]
        levels.append(
            (tuple(axes), draw(st.integers(0, 2 + len(levels))), draw(st.sampled_from(EXTENTS)))
        )
    return levels


@settings(max_examples=20, phases=[Phase.generate], derandomize=True)
@given(epilogues(), st.sampled_from([_IN_PLACE, _MAPPED]), st.booleans())
def test_epilogue(levels, implementation, jitted):
    """Operands of the epilogue, and what an activation captures, have batch dimensions anywhere."""
    shapes = [[M, K], [K, N], [M], [N], [N], [M, N], []]
    for axes, _, extent in levels:
        for shape, axis in zip(shapes, axes, strict=True):
            if axis is not None:
                shape.insert(axis, extent)
    arrays = [drawn(shape, seed) for seed, shape in enumerate(shapes)]
    tangents = [drawn(shape, seed + 10) for seed, shape in enumerate(shapes)]
    ours = with_epilogue(implementation)
    ours, theirs = (
        mapped(jax.jit(one) if jitted else one, levels) for one in (ours, expected_with_epilogue)
    )
    every = tuple(range(len(arrays)))

    def gradient(function):
        return jax.grad(lambda *given: jnp.sin(function(*given)).sum(), every)

    agree(ours(*arrays), theirs(*arrays))
    agree(gradient(ours)(*arrays), gradient(theirs)(*arrays), 1e-4)
    agree(*(jax.jvp(one, arrays, tangents) for one in (ours, theirs)), 1e-4)
    agree(*(jax.jvp(gradient(one), arrays, tangents) for one in (ours, theirs)), 1e-4)


# By kernels ---------------------------------------------------------------------------------------

MATMULS = {"hopper": hopper_ops.matmul, "portable": ops.matmul}
COUNT, ROWS, COLUMNS, DEPTH = 3, 72, 48, 64


@pytest.fixture(params=MATMULS)
def matmul(request):
    return MATMULS[request.param]


def bf16(*shape, seed=0):
    return drawn(shape, seed, jnp.bfloat16)


def kernels(function, *operands):
    return pallasite.compile_all(function, *operands, target="sm_90a")


def copies(function, *operands):
    """Transpositions in a program, kernels apart."""

    def within(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "transpose":
                yield equation
            elif equation.primitive.name != "pallasite_kernel":
                for inner in jaxprs_in_params(equation.params):
                    yield from within(inner)

    return list(within(jax.make_jaxpr(function)(*operands).jaxpr))


@pytest.mark.runs_kernels
@pytest.mark.parametrize("out", [0, 1, 2])
@pytest.mark.parametrize(
    "axes", [x for x in itertools.product((None, 0, 1, 2), repeat=2) if x != (None, None)]
)
def test_kernels_of_any_dimensions(axes, out):
    """By the Hopper kernels, which find the matrices of a product where they are."""
    orders = [(False, False), (True, True)][sum(x or 0 for x in axes) % 2]
    shapes = [[ROWS, DEPTH], [DEPTH, COLUMNS]]
    for shape, turned, axis in zip(shapes, orders, axes, strict=True):
        shape[:] = shape[::-1] if turned else shape
        if axis is not None:
            shape.insert(axis, COUNT)
    a, b = (bf16(*shape, seed=seed) for seed, shape in enumerate(shapes))

    def ours(a, b):
        return hopper_ops.matmul(a, b, transpose_a=orders[0], transpose_b=orders[1])

    wide = (x.astype(jnp.float32) for x in (a, b))
    found = jax.jit(jax.vmap(ours, axes, out))(a, b)
    agree(found, jax.vmap(plain(*orders), axes, out)(*wide), 4e-3)


@pytest.mark.parametrize(
    ("axes", "out"),
    [
        ((1, 1), 0),
        ((1, 1), 1),
        ((1, 0), 0),
        ((0, 1), 1),
        ((1, None), 1),
        ((None, 1), 1),
        ((None, 0), 0),
    ],
)
def test_operands_are_not_copied(axes, out):
    """Matrices that lie between the rows of others are read where they are."""
    shapes = [[ROWS, DEPTH], [DEPTH, COLUMNS]]
    for shape, axis in zip(shapes, axes, strict=True):
        if axis is not None:
            shape.insert(axis, COUNT)
    given = [bf16(*shape) for shape in shapes]
    function = jax.vmap(hopper_ops.matmul, axes, out)
    assert not copies(function, *given)
    assert len(kernels(function, *given)) == 1


@pytest.mark.parametrize("axis", [0, 1])
def test_gradient_of_shared_weights(axis):
    """It is one product of the rows of all matrices, in whatever order derivatives are taken."""
    a, b = bf16(*((COUNT, ROWS) if axis == 0 else (ROWS, COUNT)), DEPTH), bf16(DEPTH, COLUMNS)

    def gradient(a, b):
        every = jax.vmap(hopper_ops.matmul, (axis, None), axis)
        return jax.grad(lambda b: every(a, b).astype(jnp.float32).sum())(b)

    def joined(a, b):
        rows = a.reshape(-1, DEPTH)
        return jax.grad(lambda b: hopper_ops.matmul(rows, b).astype(jnp.float32).sum())(b)

    assert not copies(gradient, a, b)
    assert [x.ptx for x in kernels(gradient, a, b)] == [x.ptx for x in kernels(joined, a, b)]


def test_gradient_of_weights_with_other_orders():
    """Where rows lie in another order in the cotangent, that is copied: still one contraction."""
    a, b = bf16(ROWS, COUNT, DEPTH), bf16(DEPTH, COLUMNS)

    def gradient(a, b):
        every = jax.vmap(hopper_ops.matmul, (1, None), 0)
        return jax.grad(lambda b: jnp.sin(every(a, b).astype(jnp.float32)).sum())(b)

    names = [one.name for one in kernels(gradient, a, b)]
    assert "batched_matmul" not in names[1:]


@pytest.mark.runs_kernels
def test_several_batch_dimensions(matmul):
    """That lie apart in some operands, and that only one of them has."""
    extents = {"x": 2, "y": 3, "m": 40, "k": 32, "n": 24}
    for a, b, out, axes in (
        ("xmyk", "xykn", "xymn", [((1, 0), 0), ((0, 0), 0)]),
        ("ymxk", "kxn", "xymn", [((1, 1), 0), ((0, None), 1)]),
        ("mxk", "yknx", "yxmn", [((1, 2), 0), ((None, 0), 0)]),
    ):
        left, right = (bf16(*(extents[x] for x in names), seed=len(names)) for names in (a, b))
        function = matmul
        inner, outer = axes
        # The inner one sees operands without the outer one's dimension.
        for mapped_axes, place in (inner, outer):
            function = jax.vmap(function, mapped_axes, place)
        order = {"xymn": out, "yxmn": out}[out]
        subscripts = f"{a},{b}->{order}"
        expected = np.einsum(subscripts, *(np.asarray(x, np.float64) for x in (left, right)))
        agree(jax.jit(function)(left, right), expected, 4e-3)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("activation", [None, jax.nn.gelu])
def test_second_derivatives(matmul, activation):
    """Forward over reverse, reverse over forward, and of all inputs by ``jax.hessian``."""
    a, b = drawn((8, 16)), drawn((16, 8), 1) / 4
    after = activation or (lambda x: x)

    def loss(function):
        return lambda a, b: jnp.sin(function(a, b)).sum()

    ours = loss(lambda a, b: matmul(a, b, activation=activation))
    theirs = loss(lambda a, b: after(a @ b))
    for derivative in (
        lambda f: jax.jvp(jax.grad(f, (0, 1)), (a, b), (a, b)),
        lambda f: jax.grad(lambda a, b: jax.jvp(f, (a, b), (b.T, a.T))[1], (0, 1))(a, b),
        lambda f: jax.hessian(f)(a[:2, :], b),
    ):
        agree(derivative(ours), derivative(theirs), 1e-2)


@pytest.mark.runs_kernels
def test_scan_and_remat(matmul):
    """Layers whose products are computed again, in both modes."""
    weights, x = drawn((3, 32, 32)) / 6, drawn((16, 32), 1)

    def network(product):
        def layer(x, w):
            return jax.checkpoint(lambda x, w: jnp.tanh(product(x, w)))(x, w), None

        return lambda ws, x: jax.lax.scan(layer, x, ws)[0].sum()

    for derivative in (
        lambda f: jax.grad(f, (0, 1))(weights, x),
        lambda f: jax.jvp(f, (weights, x), (weights, x)),
        lambda f: jax.linearize(f, weights, x)[1](weights, x),
    ):
        agree(*(derivative(network(one)) for one in (matmul, jnp.matmul)), 5e-3)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "bfloat16", "float32"])
def test_dtypes(matmul, dtype):
    """Tangents and cotangents of operands of any dtype, of vmap too."""
    a, b = (drawn(shape, dtype=dtype) for shape in ((2, 16, 32), (32, 16)))

    def ours(a, b):
        return matmul(a, b, out_dtype=jnp.float32)

    def theirs(a, b):
        return a.astype(jnp.float32) @ b.astype(jnp.float32)

    for derivative in (
        lambda f: jax.jvp(f, (a, b), (a, b)),
        lambda f: jax.grad(lambda a, b: jnp.sin(f(a, b)).sum(), (0, 1))(a, b),
    ):
        agree(*(derivative(jax.vmap(f, (0, None))) for f in (ours, theirs)), 3e-2)


@pytest.mark.runs_kernels
def test_integers(matmul):
    """Products of integers are constants, whose scales have derivatives."""
    a, b, scale = jnp.ones((16, 32), jnp.int8), jnp.ones((32, 16), jnp.int8), drawn((16,))

    def loss(scale):
        return matmul(a, b, row_scale=scale, out_dtype=jnp.float32).sum()

    agree(jax.grad(loss)(scale), jnp.full(16, 512.0))
    tangent = jax.jvp(lambda a: matmul(a, b), (a,), (np.zeros(a.shape, jax.dtypes.float0),))[1]
    assert tangent.dtype == jax.dtypes.float0


@pytest.mark.runs_kernels
def test_donated(matmul):
    x, w, residual = drawn((16, 32)), drawn((32, 32), 1), drawn((16, 32), 2)
    expected = x @ w + residual
    step = jax.jit(lambda x, r: matmul(x, w, residual=r), donate_argnums=1)
    agree(step(x, residual), expected, 2e-3)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("jitted", [False, True])
def test_captured_values(matmul, jitted):
    """Of an activation: they are operands of the kernel, with gradients and batch dimensions."""
    a, b, slopes = bf16(40, 64), bf16(64, 48, seed=1) / 8, jnp.asarray([0.1, 0.2, 0.5])

    def ours(a, b, slope):
        return matmul(
            a, b, activation=lambda x: jnp.where(x > 0, x, slope * x), out_dtype=jnp.float32
        )

    def theirs(a, b, slope):
        values = a.astype(jnp.float32) @ b.astype(jnp.float32)
        return jnp.where(values > 0, values, slope * values)

    one = jax.jit(ours) if jitted else ours
    assert len(kernels(one, a, b, slopes[0])) == 1

    def gradient(f):
        return jax.grad(lambda *given: jnp.sin(f(*given)).sum(), (0, 1, 2))

    for form in (
        lambda f: f(a, b, slopes[1]),
        lambda f: gradient(f)(a, b, slopes[1]),
        lambda f: jax.vmap(f, (None, None, 0))(a, b, slopes),
        lambda f: jax.vmap(gradient(f), (None, None, 0))(a, b, slopes),
    ):
        agree(form(one), form(theirs), 5e-3)


@pytest.mark.runs_kernels
def test_captured_arrays(matmul):
    """An activation that captures more than numbers is applied to the sums."""
    a, b, factors = bf16(40, 64), bf16(64, 48, seed=1) / 8, jnp.asarray([0.1, 0.3])

    def ours(factors):
        polynomial = lambda x: factors[0] * x + factors[1] * x * x  # noqa: E731
        return matmul(a, b, activation=polynomial, out_dtype=jnp.float32).sum()

    def theirs(factors):
        x = a.astype(jnp.float32) @ b.astype(jnp.float32)
        return (factors[0] * x + factors[1] * x * x).sum()

    for form in (lambda f: f(factors), lambda f: jax.grad(f)(factors)):
        agree(form(jax.jit(ours)), form(theirs), 1e-3)


def test_captured_values_that_mix(matmul):
    """What an activation captures makes it no function of whole rows."""
    a, b = bf16(40, 64), bf16(64, 48)
    with pytest.raises(InvalidValueError, match="element by element"):
        jax.jit(lambda s: matmul(a, b, activation=lambda x: x - s * x.sum()))(1.0)


GATED = {"hopper": hopper_ops.gated_matmul, "portable": ops.gated_matmul}


@pytest.mark.runs_kernels
@pytest.mark.parametrize("target", GATED)
def test_gated(target):
    """Forward derivatives, also of several at once."""
    gated = GATED[target]
    a, gate, up = bf16(3, 16, 32), bf16(32, 16, seed=1) / 4, bf16(32, 16, seed=2) / 4
    given = a, gate, up

    def expected(a, gate, up):
        a, gate, up = (one.astype(jnp.float32) for one in (a, gate, up))
        return jax.nn.silu(a @ gate) * (a @ up)

    def every(function):
        return jax.vmap(function, (0, None, None))

    for form in (
        lambda f: jax.jvp(f, given, given)[1],
        lambda f: jax.jvp(lambda a: f(a, gate, up), (a,), (a,))[1],
    ):
        agree(form(every(gated)), form(every(expected)), 2e-2)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("target", GATED)
@pytest.mark.parametrize("jitted", [False, True])
def test_captured_values_of_gated_products(target, jitted):
    """They have gradients and batch dimensions, and products stay one kernel."""
    a, gate, up = bf16(16, 64), bf16(64, 48, seed=1) / 8, bf16(64, 48, seed=2) / 8
    slopes = jnp.asarray([0.1, 0.5])

    def ours(a, gate, up, slope):
        return GATED[target](a, gate, up, activation=lambda x: jnp.where(x > 0, x, slope * x))

    def theirs(a, gate, up, slope):
        a, gate, up = (one.astype(jnp.float32) for one in (a, gate, up))
        values = a @ gate
        return jnp.where(values > 0, values, slope * values) * (a @ up)

    one = jax.jit(ours) if jitted else ours
    if target == "hopper":
        assert len(kernels(one, a, gate, up, slopes[0])) == 1

    def gradient(f):
        return jax.grad(lambda *given: jnp.sin(f(*given).astype(jnp.float32)).sum(), range(4))

    for form in (
        lambda f: f(a, gate, up, slopes[1]),
        lambda f: gradient(f)(a, gate, up, slopes[1]),
        lambda f: jax.vmap(gradient(f), (None, None, None, 0))(a, gate, up, slopes),
    ):
        agree(form(one), form(theirs), 2e-2)
