"""Operations choose their configuration by measuring if the option says so, and else do not."""

from __future__ import annotations

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import errors
from pallasite_hopper import ops
from pallasite_hopper.ops.decode.config import default_config as decode_default
from pallasite_hopper.ops.dense.run import WINNERS
from pallasite_hopper.ops.flash.forward_choice import default_config as attention_default
from pallasite_std.tuning import winners


def random(seed, *shape, dtype=jnp.bfloat16):
    values = np.random.default_rng(seed).normal(size=shape) * (9 if dtype == jnp.int8 else 1)
    return jnp.asarray(values.astype(dtype))


SIZES = jnp.array([40, 0, 24])
LENGTHS = jnp.array([70, 96])
PAGES = jnp.array([[3, 0, 1], [2, 5, 4]])

OPERATIONS = {
    "matmul": (ops.matmul, (random(0, 72, 64), random(1, 64, 40)), {}),
    "mixed": (
        functools.partial(ops.mixed_matmul, scales=random(2, 2, 40), transpose_b=True),
        (random(0, 12, 128), random(1, 40, 128, dtype=jnp.int8)),
        {},
    ),
    "ragged": (ops.ragged_matmul, (random(0, 64, 64), random(1, 3, 64, 40), SIZES), {}),
    "transposed": (
        ops.transposed_ragged_matmul, (random(0, 64, 64), random(1, 64, 40), SIZES), {}
    ),
    "attention": (
        functools.partial(ops.attention, causal=True),
        (random(0, 2, 96, 2, 64), random(1, 2, 96, 1, 64), random(2, 2, 96, 1, 64)),
        {"kv_lengths": LENGTHS},
    ),
    "decode": (
        ops.decode_attention,
        (random(0, 2, 4, 64), random(1, 2, 96, 2, 64), random(2, 2, 96, 2, 64)),
        {"kv_lengths": LENGTHS},
    ),
    "paged": (
        functools.partial(ops.paged_attention, k_scale=0.1, v_scale=0.2),
        (
            random(0, 2, 4, 64),
            random(1, 2, 6, 32, 64, dtype=jnp.int8),
            random(2, 2, 6, 32, 64, dtype=jnp.int8),
            LENGTHS,
            PAGES,
        ),
        {},
    ),
}  # fmt: skip


def takes(one, other):
    """Whether an array can stand for another one in measurements."""
    return one.shape == other.shape and one.dtype == other.dtype


@pytest.mark.runs_kernels
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_chosen_is_used(name, monkeypatch):
    """Candidates run on inputs like those of the call; the one that is chosen gives the result."""
    operation, arguments, named = OPERATIONS[name]
    expected = operation(*arguments, **named)
    seen = []

    def choose(operation, version, args, candidates, default, run, **options):
        make_inputs = options.get("make_inputs")
        found = candidates()
        assert found[0] == default and len(set(found)) == len(found) > 2
        chosen = found[1 + len(operation) % (len(found) - 1)]
        if make_inputs is not None:
            made = make_inputs(jax.random.key(0))
            assert all(takes(*pair) for pair in zip(made, args, strict=True))
            args = made
        results = jax.eval_shape(functools.partial(run, chosen), *args)
        assert jax.tree.leaves(results)
        hash((operation, version, options["key"]))
        seen.append(chosen)
        return chosen

    monkeypatch.setattr(pallasite, "choose", choose)
    result = operation(*arguments, **named)
    assert len(seen) == 1
    wide, wanted = (np.asarray(x, np.float64) for x in (result, expected))
    np.testing.assert_allclose(wide, wanted, atol=2e-2 * np.abs(wanted).max())


def test_candidates_of_attention():
    for head_dim in (64, 128, 256, 40, 96, 160, 192):
        for causal in (False, True):
            found = ops.attention_configs(head_dim, causal, 4096)
            assert found[0] == attention_default(head_dim, causal, 4096)
            assert len(set(found)) == len(found) > 8
            assert all(config.fits(head_dim) for config in found)
            few = ops.attention_configs(head_dim, causal, 64, 64)
            assert {config.warpgroups for config in few} == {1}
    with pytest.raises(errors.InvalidValueError, match="size of heads"):
        ops.attention_configs(264, True, 4096)


def test_candidates_of_decode_attention():
    for head_dim in (64, 80, 128, 192, 256):
        for queries in (1, 8, 32, 64):
            found = ops.decode_configs(head_dim, queries, kv_heads=8)
            columns = min(queries + -queries % 8, 64 if head_dim <= 128 else 32)
            assert found[0] == decode_default(head_dim, columns, 2)
            assert len(set(found)) == len(found) > (0 if head_dim == 256 else 1)
            for config in found:
                assert config.filled(head_dim, columns, 2).stages >= 2
    assert {config.heads for config in ops.decode_configs(64, 8, kv_heads=1)} == {1}
    with pytest.raises(errors.InvalidValueError, match="size of heads"):
        ops.decode_configs(60, 8)


@pytest.mark.parametrize("name", OPERATIONS)
def test_configurations_of_another_kind(name):
    operation, arguments, named = OPERATIONS[name]
    with pytest.raises(errors.InvalidTypeError, match="config is not of type .*Config"):
        operation(*arguments, **named, config="fast")


def test_table_that_comes_with_the_library():
    """Each of its winners is found: it is a candidate of a GEMM that asks for it."""
    table = json.loads(WINNERS.read_text())
    assert table["winners"]
    for entry in table["winners"]:
        a, b = (
            jax.ShapeDtypeStruct(tuple(map(int, extents.split(","))), dtype)
            for dtype, extents in re.findall(r"(\w+)\[([\d,]+)\]", entry["arguments"])
        )
        (question,) = winners.questions(ops.matmul, a, b)
        place = question.name, question.version, question.args, question.key
        found = winners.find(WINNERS, table["devices"][0], *place, question.listed)
        assert found is not None and found[0] != question.default, entry["arguments"]
