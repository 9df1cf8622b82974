"""Arrays that operations get beside their main operands, of all dtypes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_support import error, exact, on, random

from pallasite import ops
from pallasite.errors import InvalidTypeError, InvalidValueError

HALF = jnp.ones((4, 16), jnp.bfloat16)
HEADS = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
BYTES = jnp.ones((16, 8), jnp.int8)

CALLS = {
    "bias": lambda wrong: ops.matmul(HALF, HALF.T, bias=wrong),
    "row_scale": lambda wrong: ops.matmul(HALF, HALF.T, row_scale=wrong),
    "column_scale": lambda wrong: ops.matmul(HALF, HALF.T, column_scale=wrong),
    "residual": lambda wrong: ops.matmul(HALF, HALF.T, residual=wrong),
    "scales": lambda wrong: ops.mixed_matmul(HALF, BYTES, scales=wrong),
    "group_sizes": lambda wrong: ops.ragged_matmul(HALF, HALF.T[None], wrong),
    "alibi_slopes": lambda wrong: ops.attention(HEADS, HEADS, HEADS, alibi_slopes=wrong),
    "block_mask": lambda wrong: ops.attention(HEADS, HEADS, HEADS, block_mask=wrong),
    "kv_lengths": lambda wrong: ops.decode_attention(HEADS[:, 0], HEADS, HEADS, kv_lengths=wrong),
    "positions": lambda wrong: ops.rotary_embedding(HALF[None], wrong),
    "x": lambda wrong: ops.rms_norm(wrong),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_array_of_real_numbers(name):
    """Imaginary parts are not dropped."""
    for wrong in (jnp.ones((1, 4), jnp.complex64), "x", jax.random.key(0), object()):
        with (
            on("sm_90a"),
            pytest.raises(InvalidTypeError, match=f"{name} is not an array of real") as caught,
        ):
            CALLS[name](wrong)
        assert "test_array_arguments.py:" in str(caught.value).splitlines()[0]


FLAGS = {
    "transpose_a": lambda given: ops.matmul(HALF, HALF.T, transpose_a=given),
    "transpose_b": lambda given: ops.mixed_matmul(HALF, BYTES, transpose_b=given),
    "causal": lambda given: ops.attention(HEADS, HEADS, HEADS, causal=given),
    "interleaved": lambda given: ops.rotary_embedding(HALF[None], jnp.zeros(1), interleaved=given),
}


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_known_booleans(name, target):
    """A string, say, does not count as True."""
    calls = [lambda wrong=wrong: FLAGS[name](wrong) for wrong in ("yes", None, 2, np.array([1, 0]))]
    calls.append(lambda: jax.jit(FLAGS[name])(False))
    for call in calls:
        with (
            on(target),
            pytest.raises(InvalidTypeError, match=f"{name} is neither True nor False") as caught,
        ):
            call()
        assert "test_array_arguments.py:" in str(caught.value).splitlines()[0]


def test_values_without_dimensions():
    with on("sm_90a"), pytest.raises(InvalidTypeError, match="v does not have four dimensions"):
        ops.decode_attention(HEADS[:, 0], HEADS, None)


def test_accumulators_that_no_instruction_has():
    with on("sm_90a"), pytest.raises(InvalidValueError, match="not accumulated in int8"):
        ops.matmul(HALF, HALF.T, accumulator=jnp.int8)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4"])
@pytest.mark.parametrize("target", ["sm_90a", "sm_90"])
def test_narrow_factors(dtype, target):
    a, b = random(1, (9, 33), "bfloat16"), random(2, (33, 7), "bfloat16")
    scale, bias = (jnp.asarray(np.array(one)).astype(dtype) for one in (3, range(-3, 4)))
    with on(target):
        found = ops.matmul(a, b, row_scale=scale, column_scale=bias, bias=bias, out_dtype="float32")
    assert error(found, exact(a) @ exact(b) * 3 * exact(bias) + exact(bias)) < 1e-5
