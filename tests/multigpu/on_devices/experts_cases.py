"""Tokens of a mixture of experts, against the same in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_support import mesh_of, numbers
from jax.sharding import PartitionSpec

import pallasite
from pallasite import config
from pallasite.errors import ExecutionError, InvalidTypeError, InvalidValueError
from pallasite_multigpu import ops


def on_each(function, count, *arrays):
    mesh, spec = mesh_of(x=count), PartitionSpec("x")

    def one(*rows):
        return jax.tree.map(lambda made: made[None], function(*(row[0] for row in rows)))

    call = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with pallasite.kernel_errors():
        return jax.tree.map(np.asarray, jax.jit(call)(*arrays))


def choose(count, tokens, k, number, seed=0):
    """Experts for each token, all different, some of them none."""
    generator = np.random.default_rng(seed)
    found = [generator.permutation(number)[:k] for _ in range(count * tokens)]
    chosen = np.array(found, np.int32).reshape(count, tokens, k)
    chosen[0, 0, 0] = -1
    chosen[-1, -1, -1] = number
    return chosen


def expected_rows(x, experts, number):
    """By device, its rows in order, and how many each expert has."""
    count = len(x)
    here = number // count
    rows, sizes = [], []
    for device in range(count):
        own, counted = [], []
        for expert in range(device * here, (device + 1) * here):
            found = [x[sender, token] for sender, token, _ in np.argwhere(experts == expert)]
            own += found
            counted.append(len(found))
        rows.append(own)
        sizes.append(counted)
    return rows, sizes


@pytest.mark.parametrize(
    ("count", "tokens", "columns", "k", "number", "dtype", "capacity"),
    [
        (1, 3, 8, 2, 4, np.float32, None),
        (2, 5, 130, 2, 4, np.float32, None),
        (3, 4, 33, 1, 3, jnp.bfloat16, 13),
        (4, 3, 64, 3, 8, np.int32, None),
        (5, 2, 16, 2, 10, np.float16, 14),
        pytest.param(8, 2, 16, 2, 16, np.float16, 20, marks=pytest.mark.slow),
    ],
)
def test_rows_go_to_experts_and_come_back(count, tokens, columns, k, number, dtype, capacity):
    x = numbers((count, tokens, columns), dtype)
    experts = choose(count, tokens, k, number)
    weights = np.random.default_rng(1).random((count, tokens, k)).astype(np.float32)
    floats = not np.issubdtype(np.dtype(dtype), np.integer)

    def both(x, experts, weights):
        rows, sizes, route = ops.moe_dispatch(
            x, experts, axis_name="x", num_experts=number, capacity=capacity
        )
        factors = weights if floats else None
        return rows, sizes, ops.moe_combine(rows * 2, factors, route, axis_name="x")

    with config.scoped(sanitize=True):
        rows, sizes, back = on_each(both, count, x, experts, weights)
    wanted, wanted_sizes = expected_rows(x, experts, number)
    np.testing.assert_array_equal(sizes, wanted_sizes)
    for found, own in zip(rows, wanted, strict=True):
        assert len(found) == (capacity or count * tokens * k)
        np.testing.assert_array_equal(found[: len(own)], np.array(own).reshape(-1, columns))
        assert not found[len(own) :].any()
    shown = ((experts >= 0) & (experts < number))[..., None]
    total = (np.where(shown, weights[..., None], 0) if floats else shown).sum(2)
    expected = total * 2 * x.astype(np.float64)
    tolerance = 4 * float(jnp.finfo(dtype).eps) if floats else 0
    np.testing.assert_allclose(back.astype(np.float64), expected, tolerance, tolerance)


def test_several_batches_at_once():
    x = numbers((2, 3, 4, 16), np.float32)
    experts = np.stack([choose(2, 4, 2, 4) for _ in range(3)], axis=1).clip(0, 3)

    def both(x, experts):
        rows, _, route = ops.moe_dispatch(x, experts, axis_name="x", num_experts=4)
        return ops.moe_combine(rows * 2, None, route, axis_name="x")

    np.testing.assert_allclose(on_each(jax.vmap(both), 2, x, experts), 4 * x, rtol=1e-6)


def test_all_tokens_for_one_device():
    """The other one gets none."""
    x = numbers((2, 3, 40), np.float32)
    experts = np.ones((2, 3, 1), np.int32)

    def send(x, experts):
        rows, sizes, route = ops.moe_dispatch(x, experts, axis_name="x", num_experts=4)
        return rows, sizes, ops.moe_combine(rows, None, route, axis_name="x")

    rows, sizes, back = on_each(send, 2, x, experts)
    np.testing.assert_array_equal(rows, [x.reshape(6, 40), np.zeros((6, 40))])
    np.testing.assert_array_equal(sizes, [[0, 6], [0, 0]])
    np.testing.assert_array_equal(back, x)


def test_gradients():
    count, tokens, k, number = 2, 3, 2, 4
    x = numbers((count, tokens, 20), np.float32)
    experts = choose(count, tokens, k, number)
    weights = np.random.default_rng(1).random((count, tokens, k)).astype(np.float32)
    factors = numbers((number, 20), np.float32, 2)
    d_out = numbers(x.shape, np.float32, 3)

    def gradients(x, weights, experts, d_out):
        def apply(x, weights):
            rows, sizes, route = ops.moe_dispatch(x, experts, axis_name="x", num_experts=number)
            mine = jnp.asarray(factors).reshape(count, -1, 20)[jax.lax.axis_index("x")]
            own = jnp.repeat(mine, sizes, axis=0, total_repeat_length=len(rows))
            made = jnp.where(jnp.arange(len(rows))[:, None] < sizes.sum(), rows**2 * own, 0)
            return ops.moe_combine(made, weights, route, axis_name="x")

        return jax.vjp(apply, x, weights)[1](d_out)

    def textbook(x, weights):
        shown = (experts >= 0) & (experts < number)
        used = (
            jnp.where(shown, weights, 0)[..., None]
            * jnp.asarray(factors)[np.where(shown, experts, 0)]
        )
        return (x**2) * used.sum(2)

    found = on_each(gradients, count, x, weights, experts, d_out)
    expected = jax.vjp(textbook, x, weights)[1](jnp.asarray(d_out))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-5)


def test_more_rows_than_there_is_room_for():
    x, experts = numbers((2, 3, 8), np.float32), np.zeros((2, 3, 1), np.int32)

    def send(x, experts):
        return ops.moe_dispatch(x, experts, axis_name="x", num_experts=2, capacity=5)[0]

    with pytest.raises(ExecutionError) as caught:
        on_each(send, 2, x, experts)
    text = "kernel 'moe_dispatch': device 0 gets 6 rows, more than it has room for (the capacity)"
    assert text in str(caught.value)
    location = caught.value.location
    assert location is not None and "/tests/" in location.file  # Not a line of the library.


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (((3,), (3, 1)), {}, InvalidTypeError, "x does not have two dimensions"),
        (((3, 4), (2, 1)), {}, InvalidTypeError, "expected: integers of shape (3, k)"),
        (((3, 4), (3, 1)), {"num_experts": 3}, InvalidValueError, "expected: a multiple of 2"),
        (((3, 4), (3, 1)), {"capacity": 0}, InvalidValueError, "the capacity is no positive"),
    ],
)
def test_arguments_that_do_not_fit(arguments, options, error, text):
    x, experts = jnp.zeros(arguments[0]), jnp.zeros(arguments[1], jnp.int32)

    def send(_):
        given = {"num_experts": 2, **options}
        return ops.moe_dispatch(x, experts, axis_name="x", **given)[0]

    with pytest.raises(error) as caught:
        on_each(send, 2, np.zeros((2, 1), np.float32))
    assert text in str(caught.value)


def test_elements_of_64_bits_are_an_error():
    with jax.enable_x64(True):
        x, experts = numbers((2, 3, 8), np.float64), np.zeros((2, 3, 1), np.int32)

        def send(x, experts):
            return ops.moe_dispatch(x, experts, axis_name="x", num_experts=2)[0]

        with pytest.raises(InvalidTypeError, match="x has elements of 64 bits"):
            on_each(send, 2, x, experts)


def test_along_one_axis_of_two():
    """Within a mesh of explicit axes whose types are checked."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    parts = PartitionSpec(("a", "b"))
    x = numbers((8, 12), np.float32)

    def there_and_back(x):
        values, experts = jax.lax.top_k(x[:, :4], 2)
        rows, _, route = ops.moe_dispatch(x, experts, axis_name="b", num_experts=4)
        return ops.moe_combine(rows, jax.nn.softmax(values), route, axis_name="b")

    call = jax.shard_map(there_and_back, mesh=mesh, in_specs=parts, out_specs=parts)
    found = jax.jit(call)(jax.device_put(x, jax.NamedSharding(mesh, parts)))
    np.testing.assert_allclose(found, x, 1e-5, 1e-5)
