"""Pipelines are traced, and run by an interpreter in which copies complete as late as they may."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from tests.language.interpreter import run_kernel, spec_of

from pallasite.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite.language.kernel import kernel
from pallasite.language.memory import GMEM, SMEM
from pallasite.language.params import CompilerParams
from pallasite.language.transforms import SwizzleTransform, TilingTransform
from pallasite_std.pipelines.block_spec import BlockSpec
from pallasite_std.pipelines.pipeline import emit_pipeline

TILED = (TilingTransform((8, 32)), SwizzleTransform(128))


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def run(body, out_shape, *operands, **kwargs):
    k = kernel(body, out_type=jax.ShapeDtypeStruct(out_shape, jnp.float32), **kwargs)
    spec = spec_of(k, *operands)
    (out,), blocks = run_kernel(spec, *operands)
    return out, blocks, spec


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3, 16])
@pytest.mark.parametrize("transforms", [(), TILED])
def test_elementwise(steps_in_flight, transforms):
    def body(x, o):
        def step(_, x_block, o_block):
            o_block[...] = x_block[...] * 2

        block = BlockSpec((16, 32), lambda i, j: (i, j), transforms=transforms)
        emit_pipeline(
            step,
            grid=(3, 4),
            in_specs=[block],
            out_specs=[block],
            max_concurrent_steps=steps_in_flight,
        )(x, o)

    x = random(48, 128)
    out, (block,), _ = run(body, x.shape, x)
    np.testing.assert_array_equal(out, x * 2)
    assert (block.loads, block.stores) == (12, 12)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize("order", ["ij", "ji"])
def test_output_is_held_while_its_block_stays(steps_in_flight, order):
    """Reducing over the inner axis accumulates in the slot, and stores each block once."""

    def body(x, o):
        def step(indices, x_block, o_block):
            @pl.when(indices[1] == 0)
            def _():
                o_block[...] = jnp.zeros_like(o_block)

            o_block[...] += x_block[...]

        index = (lambda i, j: (i, j)) if order == "ij" else (lambda i, j: (j, i))
        emit_pipeline(
            step,
            grid=(3, 4),
            in_specs=[BlockSpec((16, 32), index)],
            out_specs=[BlockSpec((16, 32), lambda i, j: (i, 0))],
            max_concurrent_steps=steps_in_flight,
        )(x, o)

    x = random(48, 128) if order == "ij" else random(64, 96)
    blocks = x.reshape(x.shape[0] // 16, 16, x.shape[1] // 32, 32)
    expected = blocks.sum(2) if order == "ij" else blocks.sum(0).transpose(1, 0, 2)
    out, (block,), _ = run(body, (48, 32), x)
    np.testing.assert_allclose(out, expected.reshape(48, 32), rtol=1e-5)
    assert block.stores == 3


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_delayed_release(delay):
    """With a delay, the block of a step is still there ``delay`` steps later."""
    steps_in_flight = 3

    def body(x, o):
        def step(indices, x_block, o_block):
            whole = x_block.ref  # All slots; the block of step i is in slot i % 3.
            earlier = lax.rem(indices[0] + (steps_in_flight - delay), jnp.int32(steps_in_flight))

            @pl.when(indices[0] < delay)
            def _():
                o_block[...] = jnp.zeros_like(o_block)

            @pl.when(indices[0] >= delay)
            def _():
                o_block[...] = whole[earlier]

        emit_pipeline(
            step,
            grid=(7,),
            in_specs=[BlockSpec((16, 32), lambda i: (i, 0), delay_release=delay)],
            out_specs=[BlockSpec((16, 32), lambda i: (i, 0))],
            max_concurrent_steps=steps_in_flight,
        )(x, o)

    x = random(112, 32)
    out, _, _ = run(body, x.shape, x)
    expected = np.concatenate([np.zeros((16 * delay, 32), np.float32), x[: 112 - 16 * delay]])
    np.testing.assert_array_equal(out, expected)


def test_mixed_delays_and_outputs():
    def body(x, y, o, total):
        def step(indices, x_block, y_block, o_block, total_block):
            @pl.when((indices[0] == 0) & (indices[1] == 0))
            def _():
                total_block[...] = jnp.zeros_like(total_block)

            o_block[...] = x_block[...] + y_block[...]
            total_block[...] += x_block[...]

        emit_pipeline(
            step,
            grid=(3, 2),
            in_specs=[
                BlockSpec((16, 32), lambda i, j: (i, j), delay_release=1),
                BlockSpec((16, 32), lambda i, j: (j, 0)),
            ],
            out_specs=[
                BlockSpec((16, 32), lambda i, j: (i, j)),
                BlockSpec((16, 32), lambda i, j: (0, 0)),
            ],
            max_concurrent_steps=2,
        )(x, y, o, total)

    x, y = random(48, 64), random(32, 32)
    k = kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(x.shape, jnp.float32),
            jax.ShapeDtypeStruct((16, 32), jnp.float32),
        ],
    )
    (out, total), (block,) = run_kernel(spec_of(k, x, y), x, y)
    blocks = x.reshape(3, 16, 2, 32).transpose(0, 2, 1, 3)
    expected = blocks + y.reshape(1, 2, 16, 32)
    np.testing.assert_allclose(out, expected.transpose(0, 2, 1, 3).reshape(48, 64), rtol=1e-6)
    np.testing.assert_allclose(total, blocks.sum((0, 1)), rtol=1e-5)
    assert block.stores == 7


@pytest.mark.parametrize("size", [0, 1, 2, 5])
@pytest.mark.parametrize("inner", [1, 3])
def test_dynamic_grid(size, inner):
    """A grid of unknown size; an inner axis of unknown size may even be one."""

    def body(x, n, o):
        def step(indices, x_block, o_block):
            @pl.when(indices[1] == 0)
            def _():
                o_block[...] = jnp.zeros_like(o_block)

            o_block[...] += x_block[...]

        emit_pipeline(
            step,
            grid=(n[0], n[1]),
            in_specs=[BlockSpec((16, 32), lambda i, j: (i, j))],
            out_specs=[BlockSpec((16, 32), lambda i, j: (i, 0))],
            max_concurrent_steps=2,
        )(x, o)

    x = random(80, 96)
    out, _, _ = run(body, (80, 32), x, np.array([size, inner], np.int32))
    done = 16 * size
    expected = x.reshape(80, 3, 32)[:, :inner].sum(1)
    np.testing.assert_allclose(out[:done], expected[:done], rtol=1e-5)
    assert np.isnan(out[done:]).all()


def test_constant_operands_are_copied_once():
    def body(x, w, o):
        def step(_, x_block, w_block, o_block):
            o_block[...] = x_block[...] + w_block[...]

        emit_pipeline(
            step,
            grid=(4,),
            in_specs=[BlockSpec((16, 32), lambda i: (i, 0)), BlockSpec((16, 32), lambda i: (0, 0))],
            out_specs=[BlockSpec((16, 32), lambda i: (i, 0))],
            max_concurrent_steps=2,
        )(x, w, o)

    x, w = random(64, 32), random(16, 32)
    out, (block,), _ = run(body, x.shape, x, w)
    np.testing.assert_allclose(out, (x.reshape(4, 16, 32) + w).reshape(64, 32))
    assert block.loads == 5


def test_blocks_that_leave_the_array():
    def body(x, o):
        def step(_, x_block, o_block):
            o_block[...] = x_block[...] + 1

        block = BlockSpec((16, 32), lambda i, j: (i, j))
        emit_pipeline(step, grid=(3, 2), in_specs=[block], out_specs=[block])(x, o)

    x = random(40, 50)
    out, _, _ = run(body, x.shape, x)
    np.testing.assert_array_equal(out, x + 1)


def test_squeezed_element_and_whole_operands():
    def body(x, y, z, o):
        def step(indices, x_block, y_block, z_ref, o_block):
            assert x_block.shape == (32,) and y_block.shape == (32,)
            assert z_ref.shape == (4, 32)
            o_block[...] = x_block[...] + y_block[...] + z_ref[indices[0]]

        emit_pipeline(
            step,
            grid=(4,),
            in_specs=[
                BlockSpec((None, 32), lambda i: (i, 0)),
                pl.BlockSpec((pl.Element(32),), lambda i: (i * 8,)),
                BlockSpec(memory_space=GMEM),
            ],
            out_specs=[BlockSpec((pl.squeezed, 32), lambda i: (i, 0))],
            max_concurrent_steps=2,
        )(x, y, z, o)

    x, y, z = random(4, 32), random(64), random(4, 32)
    out, _, _ = run(body, x.shape, x, y, z)
    expected = np.stack([x[i] + y[8 * i : 8 * i + 32] + z[i] for i in range(4)])
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_carry():
    def body(x, o):
        def step(_, x_block, carry):
            return carry + x_block[...]

        total = emit_pipeline(
            step,
            grid=(4,),
            in_specs=[BlockSpec((16, 32), lambda i: (i, 0))],
            max_concurrent_steps=2,
            init_carry=jnp.zeros((16, 32), jnp.float32),
        )(x)
        o[...] = total

    x = random(64, 32)
    out, _, _ = run(body, (16, 32), x)
    np.testing.assert_allclose(out, x.reshape(4, 16, 32).sum(0), rtol=1e-5)


def test_single_step_has_no_loop():
    def body(x, o):
        def step(_, x_block, o_block):
            o_block[...] = x_block[...]

        emit_pipeline(step, grid=(), in_specs=[BlockSpec()], out_specs=[BlockSpec()])(x, o)

    x = random(8, 32)
    out, _, spec = run(body, x.shape, x)
    np.testing.assert_array_equal(out, x)
    assert not {"scan", "while"} & {
        e.primitive.name for e in spec.jaxpr.eqns[0].params["jaxpr"].eqns
    }


def test_inside_a_grid_of_blocks():
    def body(x, o):
        row = lax.axis_index("rows")

        def step(_, x_block, o_block):
            o_block[...] = -x_block[...]

        block = BlockSpec((16, 32), lambda j: (row, j))
        emit_pipeline(step, grid=(4,), in_specs=[block], out_specs=[block], max_concurrent_steps=2)(
            x, o
        )

    x = random(48, 128)
    out, blocks, _ = run(body, x.shape, x, grid=(3,), grid_names=("rows",))
    np.testing.assert_array_equal(out, -x)
    assert len(blocks) == 3


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (InvalidValueError, "not positive", dict(grid=(0,))),
        (
            InvalidValueError,
            "delay_release is not below",
            dict(in_specs=[BlockSpec((8, 32), lambda i: (i, 0), delay_release=1)]),
        ),
        (
            UnsupportedError,
            "pipeline_mode",
            dict(in_specs=[pl.BlockSpec((8, 32), lambda i: (i, 0), pipeline_mode=pl.Buffered(2))]),
        ),
        (
            InvalidValueError,
            "an output of a pipeline has collective_axes",
            dict(out_specs=[BlockSpec((8, 32), lambda i: (i, 0), collective_axes=("x",))]),
        ),
        (InvalidValueError, "rank of the array", dict(in_specs=[BlockSpec((8,), lambda i: (i,))])),
        (
            InvalidValueError,
            "returns 1 indices",
            dict(in_specs=[BlockSpec((8, 32), lambda i: i)]),
        ),
        (
            UnsupportedError,
            "padded",
            dict(in_specs=[pl.BlockSpec((pl.Element(8, (1, 1)), 32), lambda i: (i, 0))]),
        ),
        (InvalidTypeError, "no block spec", dict(in_specs=["x"])),
        (InvalidTypeError, "max_concurrent_steps", dict(max_concurrent_steps=1.5)),
        (InvalidTypeError, "got 1 references", dict(in_specs=[])),
    ],
)
def test_errors(error, message, arguments):
    def body(x, o):
        defaults = dict(
            grid=(4,),
            in_specs=[BlockSpec((8, 32), lambda i: (i, 0))],
            max_concurrent_steps=1,
        )
        emit_pipeline(lambda indices, x: None, **(defaults | arguments))(x)

    with pytest.raises(error, match=message) as caught:
        run(body, (32, 32), random(32, 32))
    assert "test_pipeline.py" in str(caught.value)


# --- pallas_call ---
def call_spec(function, *operands):
    from pallasite_std.front_ends.pallas_call import pallas_call_spec

    jaxpr = jax.make_jaxpr(function)(*operands)
    (params,) = (e.params for e in jaxpr.eqns if e.primitive.name == "pallas_call")
    return pallas_call_spec(
        params["jaxpr"], params["grid_mapping"], params["compiler_params"], name=params["name"]
    )


def row_sums(semantics, steps=2, transforms=()):
    """Sums blocks of columns; the program numbers take part, to see that they are right."""

    def sum_kernel(x, w, o, scratch):
        i, j = pl.program_id(0), pl.program_id(1)
        assert (pl.num_programs(0), pl.num_programs(1)) == (3, 4)
        scratch[...] = x[...] + w[0]

        @pl.when(j == 0)
        def _():
            o[...] = jnp.zeros_like(o)

        o[...] += scratch[...] + (10 * i + j).astype(jnp.float32)

    return pl.pallas_call(
        sum_kernel,
        grid=(3, 4),
        out_shape=jax.ShapeDtypeStruct((48, 32), jnp.float32),
        in_specs=[
            BlockSpec((16, 32), lambda i, j: (i, j), transforms=transforms),
            pl.BlockSpec(memory_space=GMEM),
        ],
        out_specs=pl.BlockSpec((16, 32), lambda i, j: (i, 0)),
        scratch_shapes=[SMEM((16, 32), jnp.float32)],
        compiler_params=CompilerParams(dimension_semantics=semantics, max_concurrent_steps=steps),
    )


def expected_row_sums(x, w):
    blocks = x.reshape(3, 16, 4, 32) + w[0]
    blocks = blocks + (10 * np.arange(3)[:, None] + np.arange(4)).reshape(3, 1, 4, 1)
    return blocks.sum(2).reshape(48, 32)


@pytest.mark.parametrize("semantics", [("parallel", "sequential"), ("sequential", "sequential")])
@pytest.mark.parametrize("transforms", [(), TILED])
def test_pallas_call(semantics, transforms):
    x, w = random(48, 128), random(2, 32)
    spec = call_spec(row_sums(semantics, transforms=transforms), x, w)
    assert spec.mesh.grid == tuple(
        n for n, s in zip((3, 4), semantics, strict=True) if s == "parallel"
    )
    (out,), _ = run_kernel(spec, x, w)
    np.testing.assert_allclose(out, expected_row_sums(x, w), rtol=1e-4)


def test_pallas_call_sequential_before_parallel():
    """Program numbers are right for either order of sequential and parallel axes."""

    def number(o):
        o[...] = jnp.full(
            o.shape, 100 * pl.program_id(0) + 10 * pl.program_id(1) + pl.program_id(2)
        )

    call = pl.pallas_call(
        number,
        grid=(2, 3, 2),
        out_shape=jax.ShapeDtypeStruct((2, 3, 2, 32), jnp.int32),
        out_specs=pl.BlockSpec((None, None, None, 32), lambda i, j, k: (i, j, k, 0)),
        compiler_params=CompilerParams(
            dimension_semantics=("sequential", "parallel", "sequential")
        ),
    )
    spec = call_spec(call)
    assert spec.mesh.grid == (3,)
    (out,), _ = run_kernel(spec)
    i, j, k = np.meshgrid(range(2), range(3), range(2), indexing="ij")
    np.testing.assert_array_equal(out[..., 0], 100 * i + 10 * j + k)


def test_pallas_call_under_vmap():
    x, w = random(5, 48, 128), random(2, 32)
    call = jax.vmap(row_sums(("parallel", "sequential")), in_axes=(0, None))
    spec = call_spec(call, x, w)
    (out,), blocks = run_kernel(spec, x, w)
    expected = np.stack([expected_row_sums(a, w) for a in x])
    np.testing.assert_allclose(out, expected, rtol=1e-4)
    assert len(blocks) == 15


def test_pallas_call_named_grid():
    def body(o):
        o[...] = jnp.full(o.shape, 10 * lax.axis_index("a") + lax.axis_index("b"))

    call = pl.pallas_call(
        body,
        grid=(("a", 2), ("b", 3)),
        out_shape=jax.ShapeDtypeStruct((2, 3, 32), jnp.int32),
        out_specs=pl.BlockSpec((None, None, 32), lambda i, j: (i, j, 0)),
        compiler_params=CompilerParams(dimension_semantics=("sequential", "parallel")),
    )
    (out,), _ = run_kernel(call_spec(call))
    np.testing.assert_array_equal(out[..., 0], [[0, 1, 2], [10, 11, 12]])


def test_pallas_call_keeps_delay_release():
    call = pl.pallas_call(
        lambda x, o: None,
        grid=(4,),
        out_shape=jax.ShapeDtypeStruct((32, 32), jnp.float32),
        in_specs=[BlockSpec((8, 32), lambda i: (i, 0), delay_release=1)],
        out_specs=BlockSpec((8, 32), lambda i: (i, 0)),
        compiler_params=CompilerParams(dimension_semantics=("sequential",)),
    )
    with pytest.raises(InvalidValueError, match="delay_release is not below"):
        call_spec(call, random(32, 32))


@pytest.mark.parametrize(
    ("message", "spec", "params"),
    [
        ("global memory into blocks", BlockSpec((8, 32), lambda i: (i, 0), memory_space=GMEM), {}),
        (
            "pipeline_mode",
            pl.BlockSpec((8, 32), lambda i: (i, 0), pipeline_mode=pl.Buffered(2)),
            {},
        ),
        ("dimension", pl.BlockSpec((pl.Element(8, (1, 1)), 32), lambda i: (i, 0)), {}),
        (
            "2 entries for a grid of 1",
            BlockSpec((8, 32), lambda i: (i, 0)),
            dict(dimension_semantics=("parallel", "parallel")),
        ),
    ],
)
def test_pallas_call_errors(message, spec, params):
    def my_kernel(x, o):
        o[...] = jnp.zeros_like(o)

    call = pl.pallas_call(
        my_kernel,
        grid=(4,),
        out_shape=jax.ShapeDtypeStruct((32, 32), jnp.float32),
        in_specs=[spec],
        out_specs=BlockSpec((8, 32), lambda i: (i, 0)),
        compiler_params=CompilerParams(**params),
    )
    with pytest.raises((UnsupportedError, InvalidValueError), match=message) as caught:
        call_spec(call, random(32, 32))
    assert "test_pipeline.py" in str(caught.value)
