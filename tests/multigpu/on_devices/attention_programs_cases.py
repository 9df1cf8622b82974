"""Attention of a sequence that several devices share: meshes, kernels and arguments."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_support import close, reference
from jax.sharding import PartitionSpec

import pallasite
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_multigpu import ops


def test_along_one_axis_of_two():
    """Within a mesh of explicit axes whose types are checked."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    parts = PartitionSpec("a", "b")
    x = np.random.default_rng(0).standard_normal((2, 6, 1, 16)).astype(np.float32)

    def attend(x):
        return ops.ring_attention(x, x, x, axis_name="b", causal=True, method="ring")

    call = jax.shard_map(attend, mesh=mesh, in_specs=parts, out_specs=parts)
    found = jax.jit(call)(jax.device_put(x, jax.NamedSharding(mesh, parts)))
    whole = jnp.asarray(x)
    expected = reference(whole, whole, whole, causal=True, scale=0.25)
    close(np.asarray(found), expected, "float32")


def test_hopper_sends_while_it_computes():
    """One kernel for steps that send, one for the last; with large heads keys are sent before."""
    mesh, spec = jax.sharding.AbstractMesh((2,), ("x",)), PartitionSpec(None, "x")
    call = jax.shard_map(
        functools.partial(ops.ring_attention, axis_name="x", method="ring"),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    for head_dim, names in (
        (64, ["ring_attention", "attention_forward"]),
        (192, ["shift", "attention_forward"]),
    ):
        sharding = jax.NamedSharding(mesh, spec)
        x = jax.ShapeDtypeStruct((1, 128, 1, head_dim), jnp.bfloat16, sharding=sharding)
        kernels = pallasite.compile_all(call, x, x, x, target="sm_90a")
        assert [one.name for one in kernels] == names


@pytest.mark.parametrize(
    ("shapes", "options", "error", "text"),
    [
        ([(2, 4, 8)] * 3, {}, InvalidTypeError, "q does not have four dimensions"),
        (
            [(1, 4, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8)],
            {},
            InvalidValueError,
            "got: q [1, 4, 2, 8], k [1, 6, 2, 8]",
        ),
        ([(1, 4, 2, 8)] * 3, {"placement": "striped"}, InvalidValueError, "got: 'striped'"),
        ([(1, 4, 2, 8)] * 3, {"method": "tree"}, InvalidValueError, "got: 'tree'"),
    ],
)
def test_arguments_that_do_not_fit(shapes, options, error, text):
    with pytest.raises(error) as caught:
        ops.ring_attention(*map(jnp.zeros, shapes), axis_name="x", **options)
    assert text in str(caught.value)
