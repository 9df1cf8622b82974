"""Which functions count as activations: those of each element, whatever they are made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite.errors import InvalidValueError
from pallasite_std.ops.activations import check_activation


def _mesh():
    return jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def _with_derivatives(kind, function):
    made = kind(function)
    rules = [lambda *given: given] * 2
    if kind is jax.custom_jvp:
        made.defjvp(rules[0])
    else:
        made.defvjp(*rules)
    return made


@pytest.mark.parametrize(
    ("activation", "message"),
    [
        # Within calls, branches and loops.
        (lambda x: jax.lax.map(jax.nn.softmax, x), "got: reduce_max of the whole array"),
        (lambda x: jax.lax.map(lambda row: row + row[0], x), "got: .* of the whole array"),
        (
            lambda x: jax.lax.scan(lambda c, y: (c + y, c + y), jnp.zeros(7), x)[1],
            "got: scan of the whole array",
        ),
        (lambda x: jax.lax.scan(lambda n, y: (n + 1, y * n), 0, x)[1], "got: scan of"),
        (
            lambda x: jax.lax.scan(lambda c, y: (y, c), jnp.zeros(7), x, reverse=True)[1],
            "got: scan of the whole array",
        ),
        (lambda x: jax.lax.fori_loop(0, 100, lambda _, y: y - y.mean(), x), "got: reduce_sum of"),
        (
            lambda x: jax.lax.while_loop(
                lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.flip(c[1])), (0, x)
            )[1],
            "got: rev of the whole array",
        ),
        (
            lambda x: jax.lax.while_loop(lambda y: jnp.any(y > 1), lambda y: y / 2, x),
            "got: reduce_or of the whole array",
        ),
        (
            lambda x: jax.lax.cond(x.ravel()[3] > 0, jnp.sin, jnp.cos, x),
            "got: .* of the whole array",
        ),
        (lambda x: jax.lax.cond(True, jnp.sin, lambda y: jnp.sort(y, 0), x), "got: sort of"),
        (
            _with_derivatives(jax.custom_jvp, lambda x: x / x.sum(1, keepdims=True)),
            "got: reduce_sum of",
        ),
        (
            _with_derivatives(jax.custom_vjp, lambda x: jnp.cumsum(x, 1)),
            "got: cumsum of the whole array",
        ),
        (jax.jit(lambda x: jax.checkpoint(jax.nn.softmax)(x)), "got: reduce_max of"),
        (
            lambda x: jax.shard_map(
                lambda y: y - y.max(),
                mesh=_mesh(),
                in_specs=jax.sharding.PartitionSpec(),
                out_specs=jax.sharding.PartitionSpec(),
            )(x),
            "got: reduce_max of the whole array",
        ),
        (jax.vmap(lambda row: jax.lax.associative_scan(jnp.add, row)), "of the whole array"),
        # Also where the whole array has another shape, or is moved by what is moved back later.
        (lambda x: jnp.sort(jnp.stack([x, x]), 2)[0], "got: sort of the whole array"),
        (lambda x: x + x.T.reshape(x.shape), "got: transpose of the whole array"),
        (lambda x: x * np.arange(x.shape[1]), "got: constants that differ from place to place"),
        (lambda x: jnp.concatenate([x[:2], jnp.sin(x[2:])]), "got: slice of the whole array"),
        (lambda x: jnp.pad(jnp.ones(x.shape[1] - 1), (0, 1)) * x, "got: constants that differ"),
    ],
)
def test_functions_of_several_elements(activation, message):
    with pytest.raises(InvalidValueError, match=message):
        check_activation(activation)


def _rooted(x):
    """Newton's method, row by row and element by element, with a table of what to add."""
    table = jnp.arange(3.0)

    def root(y):
        turn = lambda n, z: (z + jnp.abs(y) / z) / 2 + 0 * jnp.sum(table) * n  # noqa: E731
        return jax.lax.fori_loop(0, 20, turn, jnp.abs(y) + 1)

    return jax.lax.map(lambda row: jax.lax.map(root, row), x)


@pytest.mark.parametrize(
    "activation",
    [
        _rooted,
        lambda x: jnp.polyval(np.arange(7.0), x),
        lambda x: jax.lax.fori_loop(0, 100, lambda n, y: y / 2 + n, x),
        lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1],
        lambda x: jnp.sum(x[..., None] ** np.arange(5) * np.arange(5), -1),
        lambda x: (x[..., None] ** jnp.arange(4)) @ jnp.arange(4.0),
        lambda x: jnp.sort(jnp.stack([x, x * x, 1 - x], -1), -1)[..., 1],
        lambda x: jnp.flip(jnp.sin(jnp.flip(x, 0)), 0),
        lambda x: jnp.tanh(x.T).T.reshape(-1).reshape(x.shape),
        lambda x: x + jnp.zeros(x.shape) * np.ones(x.shape),
        lambda x: jax.lax.map(lambda row: jax.lax.cond(False, jnp.sin, jnp.cos, row), x),
        lambda x: jax.shard_map(
            jnp.sin,
            mesh=_mesh(),
            in_specs=jax.sharding.PartitionSpec("i"),
            out_specs=jax.sharding.PartitionSpec("i"),
        )(x),
    ],
)
def test_what_activations_may_have(activation):
    """Whatever makes each element of its own, by loops or of rearranged arrays."""
    check_activation(activation)


@pytest.mark.parametrize("transform", ["grad", "jit of grad", "vmap"])
def test_captured_values_of_transformations(transform):
    """Values that are differentiated, or mapped over, are no part of a custom derivative."""

    def loss(scale):
        check_activation(lambda x: x * scale)
        return scale

    with pytest.raises(InvalidValueError, match="captures a value by which a transformation"):
        if transform == "vmap":
            jax.vmap(loss)(jnp.ones(3))
        else:
            run = jax.grad(loss)
            (jax.jit(run) if transform == "jit of grad" else run)(1.0)
    jax.jit(loss)(1.0)
