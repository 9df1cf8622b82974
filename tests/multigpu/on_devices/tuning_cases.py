"""Operations that use what was measured, where the option ``autotune`` says so."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_support import mesh_of, numbers
from jax.sharding import PartitionSpec

import pallasite
from pallasite import config
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_multigpu import ops
from pallasite_multigpu.ops import (
    fused_choice,
    gathered_product,
    kernels,
    products,
    scattered_product,
    tuning,
)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Candidates that were measured; those that ``best`` holds of are the fastest."""
    seen = []

    def prefer(best):
        def measure(trials, repeats):
            for trial in trials:
                jax.block_until_ready(trial.run(0))
                seen.append(trial.configuration)
            return [1e-6 if best(trial.configuration) else 2e-6 for trial in trials]

        monkeypatch.setattr(tuning, "measure", measure)
        return seen

    with config.scoped(cache_dir=tmp_path):
        yield prefer


def on_two(operation, *arrays):
    spec = PartitionSpec("x")
    mesh = mesh_of(x=2)
    call = jax.shard_map(operation, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(call)(*arrays))


def never(*args):
    raise AssertionError("another method was chosen")


def test_a_method_that_was_measured_to_be_the_fastest(measured, monkeypatch):
    seen = measured(lambda one: one[0] == "pipelined")
    x = numbers((2, 300), np.float32)
    expected = np.concatenate([x[0] + x[1]] * 2)
    operation = functools.partial(ops.all_reduce, axis_name="x")
    np.testing.assert_allclose(on_two(operation, x.reshape(-1)), expected, 1e-6, 1e-6)
    assert not seen  # The default is not to measure.
    with config.scoped(autotune="on"):
        found = on_two(lambda x: operation(x), x.reshape(-1))
    np.testing.assert_allclose(found, expected, 1e-6, 1e-6)
    assert {method for method, _ in seen} == {"one_step", "two_steps", "pipelined"}
    count = len(seen)
    monkeypatch.setattr(kernels, "reduce_in_one_step", never)
    with config.scoped(autotune="cached"):
        found = on_two(lambda x: operation(x), x.reshape(-1))
    np.testing.assert_allclose(found, expected, 1e-6, 1e-6)
    assert len(seen) == count


def test_ways_to_gather(measured):
    seen = measured(lambda one: one.writes)
    x = numbers((2, 5, 3), np.float32)
    with config.scoped(autotune="on"):
        found = on_two(functools.partial(ops.all_gather, axis_name="x"), x.reshape(10, 3))
        names = [one.writes for one in seen]
        assert set(names) == {False, True}
        scattered = on_two(functools.partial(ops.reduce_scatter, axis_name="x"), found)
        exchanged = on_two(functools.partial(ops.all_to_all, axis_name="x"), found)
    assert (found.reshape(2, 10, 3) == x.reshape(10, 3)).all()
    np.testing.assert_allclose(scattered, 2 * x.reshape(10, 3), 1e-6)
    halves = x.reshape(10, 3).reshape(2, 5, 3)
    expected = np.stack([np.stack([halves[0]] * 2), np.stack([halves[1]] * 2)])
    assert (exchanged.reshape(2, 2, 5, 3) == expected).all()


def test_products(measured, monkeypatch):
    monkeypatch.setattr(fused_choice, "APART", 10**9)
    small = MatmulConfig(tile_m=128, tile_n=128, stages=2, epilogue_n=32)
    for module in ("gathered_product", "scattered_product"):
        name = f"pallasite_multigpu.ops.{module}.candidates"
        monkeypatch.setattr(name, lambda out_dtype: [small])
    seen = measured(lambda one: one == small)
    x, y = numbers((2, 256, 64), jnp.bfloat16), numbers((2, 64, 256), jnp.bfloat16, 1)
    used = []

    def noted(call, *args):
        used.append(args[-1])
        return call(*args)

    for name in ("_gathered_product", "_scattered_product"):
        call = functools.partial(noted, getattr(products, name))
        monkeypatch.setattr(products, name, call)

    def both(a, b):
        options = {"axis_name": "x", "out_dtype": jnp.float32}
        gathered = ops.all_gather_matmul(a[0], b[0], **options)
        return jnp.concatenate([gathered, ops.matmul_reduce_scatter(a[0], b[0], **options)])[None]

    with pallasite.target("sm_90a"), config.scoped(autotune="on"):
        found = on_two(both, x, y)
    usual = [
        one.default(256, 256, 64, jnp.bfloat16, jnp.float32, 2)
        for one in (gathered_product, scattered_product)
    ]
    assert None not in usual and seen == [usual[0], small, usual[1], small]
    assert used[-1] == small and used.count(small) == 4
    wide, right = x.astype(np.float64), y.astype(np.float64)
    total = sum(wide[device] @ right[device] for device in range(2))
    for device in range(2):
        expected = wide.reshape(512, 64) @ right[device]
        np.testing.assert_allclose(found[device, :512], expected, 1e-5, 1e-4)
        part = total[128 * device : 128 * (device + 1)]
        np.testing.assert_allclose(found[device, 512:], part, 1e-5, 1e-4)


def test_more_devices_than_there_are(measured):
    """Compiled for an abstract mesh: nothing can be measured, and nothing is said."""
    seen = measured(lambda one: True)
    mesh, spec = jax.sharding.AbstractMesh((16,), ("x",)), PartitionSpec("x")
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
    operation = functools.partial(ops.all_gather, axis_name="x")
    call = jax.shard_map(operation, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with config.scoped(autotune="on"):
        (kernel,) = pallasite.compile_all(call, x, target="sm_90a")
    assert kernel.name == "all_gather" and not seen
