"""The sanitizer on shared memory that holds something else than what is read: output blocks of
pipelines that a step has not written, and members of unions that others have overwritten."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

import pallasite
from pallasite import config
from pallasite import gpu as plgpu
from pallasite_simulator import simulate

FLOAT = jnp.float32
STALE = "read of an output block that was not written"
OTHER_MEMBER = "read through another member of a RefUnion"


def check(function, *inputs):
    """The findings, and the first output, of a function that calls one kernel."""
    with config.scoped(disabled_passes="check-contents"):  # It finds some of it.
        compiled = pallasite.compile(function, *inputs, target="sm_90a")
    found = simulate(compiled, *inputs, sanitize=True)
    return found.findings, np.asarray(found.outputs[0])


def line_of(text: str) -> int:
    """The line of this file that ends with a text."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(text)]
    return number


def matrix(rows=128, columns=128):
    return jnp.arange(rows * columns, dtype=FLOAT).reshape(rows, columns)


def pipelined(
    step, grid, in_map, out_map, *, out_rows=128, depth=2, semantics=None, columns=128, out=FLOAT
):
    """A kernel that runs a step over blocks of 16 rows."""

    def body(x_ref, out_ref):
        run = plgpu.emit_pipeline(
            step,
            grid=grid,
            in_specs=[plgpu.BlockSpec((16, columns), in_map)],
            out_specs=[plgpu.BlockSpec((16, columns), out_map)],
            max_concurrent_steps=depth,
        )
        run(x_ref, out_ref)  # pipeline

    params = plgpu.CompilerParams(lowering_semantics=semantics or plgpu.LoweringSemantics.Warpgroup)
    out = jax.ShapeDtypeStruct((out_rows, columns), out)
    return plgpu.kernel(body, out_type=out, compiler_params=params)


@pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics))
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("skipped", [None, 3, 7])
def test_step_that_does_not_write_its_block(skipped, depth, semantics):
    def step(indices, x, out):
        @pl.when(indices[0] != (-1 if skipped is None else skipped))
        def _():
            out[...] = x[...] * 2

    kernel = pipelined(
        step, (8,), lambda i: (i, 0), lambda i: (i, 0), depth=depth, semantics=semantics
    )
    found, y = check(kernel, matrix())
    if skipped is None:
        assert found == ()
        np.testing.assert_array_equal(y, matrix() * 2)
        return
    (finding,) = found
    assert finding.kind == STALE
    assert finding.location.line == line_of("# pipeline")
    assert "an earlier step" in str(finding)


def test_part_of_a_block_that_is_not_written():
    def step(indices, x, out):
        @pl.when(indices[0] < 5)
        def _():
            out[8:] = x[8:]

        out[:8] = x[:8]

    (finding,), _ = check(pipelined(step, (8,), lambda i: (i, 0), lambda i: (i, 0)), matrix())
    assert finding.kind == STALE


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("right", [True, False])
def test_sums_along_an_axis_of_reduction(right, depth):
    """The block keeps its contents while its index stays the same, and no longer."""

    def step(indices, x, out):
        @pl.when((indices[1] == 0) if right else (indices[0] + indices[1] == 0))
        def _():
            out[...] = jnp.zeros_like(out)

        out[...] += x[...]

    kernel = pipelined(
        step, (2, 4), lambda i, k: (4 * i + k, 0), lambda i, k: (i, 0), out_rows=32, depth=depth
    )
    found, y = check(kernel, matrix())
    if right:
        assert found == ()
        np.testing.assert_array_equal(y, matrix().reshape(2, 4, 16, 128).sum(1).reshape(32, 128))
    else:
        # What is added to a block of before is no value, either.
        assert [one.kind for one in found] == ["read of uninitialized shared memory"]


ODD = [(7, FLOAT), (33, FLOAT), (65, jnp.bfloat16), (66, jnp.int16), (130, jnp.uint8), (5, bool)]
"""Extents and dtypes of rows that lanes copy, by elements, words and vectors."""


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("skipped", [None, 3, 7])
@pytest.mark.parametrize(("columns", "dtype"), ODD, ids=str)
def test_step_that_does_not_write_its_odd_block(columns, dtype, skipped, depth):
    """Rows that no bulk copy takes, which lanes copy."""

    def step(indices, x, out):
        @pl.when(indices[0] != (-1 if skipped is None else skipped))
        def _():
            out[...] = x[...]

    x = (matrix(128, columns) % 119).astype(dtype)
    kernel = pipelined(
        step, (8,), lambda i: (i, 0), lambda i: (i, 0), depth=depth, columns=columns, out=dtype
    )
    found, y = check(kernel, x)
    if skipped is None:
        assert found == ()
        np.testing.assert_array_equal(y, x)
        return
    assert {one.kind for one in found} == {STALE}
    assert {one.location.line for one in found} == {line_of("# pipeline")}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("right", [True, False])
def test_sums_in_odd_blocks(right, depth):
    def step(indices, x, out):
        @pl.when((indices[1] == 0) if right else (indices[0] + indices[1] == 0))
        def _():
            out[...] = jnp.zeros_like(out)

        out[...] += x[...]

    x = matrix(128, 33)
    kernel = pipelined(
        step,
        (2, 4),
        lambda i, k: (4 * i + k, 0),
        lambda i, k: (i, 0),
        out_rows=32,
        depth=depth,
        columns=33,
    )
    found, y = check(kernel, x)
    if right:
        assert found == ()
        np.testing.assert_array_equal(y, x.reshape(2, 4, 16, 33).sum(1).reshape(32, 33))
    else:
        assert [one.kind for one in found] == ["read of uninitialized shared memory"]


@pytest.mark.parametrize("right", [True, False])
def test_steps_that_keep_an_odd_block(right):
    """Consecutive steps with one block read what the others have written before it is copied."""

    def step(indices, x, out):
        i, k = indices

        @pl.when(k == 0)
        def _():
            out[...] = x[...]

        @pl.when((k == 2) if right else (k == 0))
        def _():
            out[:8] = out[:8] * 2

    x = matrix(128, 33)
    kernel = pipelined(step, (8, 3), lambda i, k: (i, 0), lambda i, k: (i, 0), columns=33)
    found, y = check(kernel, x)
    assert found == ()
    expected = x.reshape(8, 16, 33).at[:, :8].multiply(2).reshape(128, 33)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("right", [True, False])
def test_blocks_of_a_warp_specialized_pipeline(right):
    def body(x_ref, out_ref):
        def step(indices, x, out):
            @pl.when(indices[0] != (-1 if right else 5))
            def _():
                out[...] = x[...] + 1

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(8,),
            in_specs=[plgpu.BlockSpec((16, 128), lambda i: (i, 0))],
            out_specs=[plgpu.BlockSpec((16, 128), lambda i: (i, 0))],
            max_concurrent_steps=2,
            num_compute_wgs=1,
            memory_registers=40,
            wg_axis="wg",
        )(x_ref, out_ref)

    kernel = plgpu.kernel(
        body, out_type=matrix(), num_threads=2, thread_name="wg", grid=(1,), grid_names=("_",)
    )
    found, y = check(kernel, matrix())
    if right:
        assert found == ()
        np.testing.assert_array_equal(y, matrix() + 1)
    else:
        assert [one.kind for one in found] == [STALE]


@pytest.mark.parametrize("right", [True, False])
def test_steps_of_a_grid(right):
    def body(x_ref, out_ref):
        @pl.when(pl.program_id(0) != (-1 if right else 2))
        def _():
            out_ref[...] = x_ref[...] * 3

    kernel = pl.pallas_call(
        body,
        out_shape=matrix(),
        grid=(8,),
        in_specs=[pl.BlockSpec((16, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((16, 128), lambda i: (i, 0)),
        compiler_params=plgpu.CompilerParams(dimension_semantics=["sequential"]),
    )
    found, y = check(kernel, matrix())
    if right:
        assert found == ()
        np.testing.assert_array_equal(y, matrix() * 3)
    else:
        assert [one.kind for one in found] == [STALE]


@pytest.mark.parametrize("swizzle", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(40, 64), (40, 52), (33, 36)])
@pytest.mark.parametrize("written", ["all", "inside", "less"])
def test_parts_of_a_tile_outside_of_the_array(rows, columns, written, swizzle):
    """A copy to an array reads what lies inside of it, of which everything has to be there."""
    inside = (rows - 32, columns - 32)

    def body(out_ref, tile):
        i = lax.axis_index("i")
        tile[...] = jnp.zeros((16, 32), FLOAT)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out_ref.at[pl.ds(32 * i, 16), pl.ds(32 * i, 32)])
        plgpu.wait_smem_to_gmem(0)

        def last(tile):
            extent = {"all": (16, 32), "inside": inside, "less": (inside[0], inside[1] - 1)}
            height, width = extent[written]
            tile[:height, :width] = jnp.ones((height, width), FLOAT)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, out_ref.at[pl.ds(32 * i, 16), pl.ds(32 * i, 32)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(i == 1)
        def _():
            pl.run_scoped(last, plgpu.SMEM((16, 32), FLOAT, transforms=transforms))

    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)) if swizzle else ()
    partial = {"standard": {"partial_outputs": True}}
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, columns), FLOAT),
        grid=(2,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((16, 32), FLOAT)],
        compiler_params=plgpu.CompilerParams(plugin_options=partial),
    )
    found, y = check(kernel)
    kinds = {one.kind for one in found}
    assert kinds == ({"read of uninitialized shared memory"} if written == "less" else set())
    if written != "less":
        np.testing.assert_array_equal(y[32:, 32:], np.ones(inside))


# Unions -------------------------------------------------------------------------------------------


def union_kernel(body, *, semantics=None, out=jnp.int32, extra=()):
    params = plgpu.CompilerParams(lowering_semantics=semantics or plgpu.LoweringSemantics.Warpgroup)
    members = plgpu.RefUnion(plgpu.SMEM((128, 128), FLOAT), plgpu.SMEM((128, 128), jnp.int32))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128, 128), out),
        scratch_types=[members, *extra],
        compiler_params=params,
    )


@pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics))
@pytest.mark.parametrize("right", [True, False])
def test_member_that_another_one_has_overwritten(right, semantics):
    def body(x_ref, out_ref, union):
        numbers, integers = union
        integers[...] = x_ref[...].astype(jnp.int32)
        total = integers[...] + 1
        numbers[...] = x_ref[...] + 0.5
        total += numbers[...].astype(jnp.int32)
        if right:
            integers[...] = total
        out_ref[...] = integers[...]  # member

    found, y = check(union_kernel(body, semantics=semantics), matrix())
    if right:
        assert found == ()
        np.testing.assert_array_equal(y, 2 * np.asarray(matrix()).astype(np.int32) + 1)
        return
    (finding,) = found
    assert finding.kind == OTHER_MEMBER
    assert finding.location.line == line_of("# member")
    assert "as 'int32[128, 128]', which was written as 'float32[128, 128]'" in str(finding)


@pytest.mark.parametrize("right", [True, False])
def test_copies_to_and_from_members(right):
    def body(x_ref, out_ref, union, loaded):
        numbers, integers = union
        plgpu.copy_gmem_to_smem(x_ref, numbers, loaded)
        plgpu.barrier_wait(loaded)
        value = numbers[...].astype(jnp.int32)
        if right:
            integers[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(integers, out_ref)  # copied
        plgpu.wait_smem_to_gmem(0)

    found, y = check(union_kernel(body, extra=[plgpu.Barrier()]), matrix())
    if right:
        assert found == ()
        np.testing.assert_array_equal(y, np.asarray(matrix()).astype(np.int32))
        return
    (finding,) = found
    assert finding.kind == OTHER_MEMBER and finding.location.line == line_of("# copied")


def stored(ref, value):
    ref[...] = value  # stored by a function


def loaded(ref):
    return ref[...]  # loaded by a function


@pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("right", [True, False])
def test_members_that_functions_access(right, masked, semantics):
    """Several members are accessed by one line."""
    if masked:
        mask = lambda: jnp.ones((128, 128), bool)  # noqa: E731
        store = lambda ref, value: pltriton.store(ref, value, mask=mask())  # noqa: E731
        load = lambda ref: pltriton.load(ref, mask=mask(), other=0)  # noqa: E731
    else:
        store, load = stored, loaded

    def body(x_ref, out_ref, union):
        numbers, integers = union
        store(integers, x_ref[...].astype(jnp.int32))
        total = load(integers) + 1
        store(numbers, x_ref[...] + 0.5)
        total += load(numbers).astype(jnp.int32)
        if right:
            store(integers, total)
        out_ref[...] = load(integers)

    found, y = check(union_kernel(body, semantics=semantics), matrix())
    if right:
        assert found == ()
        np.testing.assert_array_equal(y, 2 * np.asarray(matrix()).astype(np.int32) + 1)
        return
    (finding,) = found
    assert finding.kind == OTHER_MEMBER
    assert "as 'int32[128, 128]', which was written as 'float32[128, 128]'" in str(finding)
    if not masked:
        assert finding.location.line == line_of("# loaded by a function")


@pytest.mark.parametrize("right", [True, False])
def test_members_that_a_function_copies(right):
    def copied(ref, out):
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ref, out)  # copied by a function
        plgpu.wait_smem_to_gmem(0)

    def body(x_ref, out_ref, same_ref, union):
        numbers, integers = union
        stored(numbers, x_ref[...])
        copied(numbers, same_ref)
        if right:
            stored(integers, x_ref[...].astype(jnp.int32))
        copied(integers, out_ref)

    members = plgpu.RefUnion(plgpu.SMEM((128, 128), FLOAT), plgpu.SMEM((128, 128), jnp.int32))
    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((128, 128), jnp.int32), matrix()),
        scratch_types=[members],
    )
    found, y = check(kernel, matrix())
    if right:
        assert found == ()
        np.testing.assert_array_equal(y, np.asarray(matrix()).astype(np.int32))
        return
    (finding,) = found
    assert finding.kind == OTHER_MEMBER
    assert finding.location.line == line_of("# copied by a function")


@pytest.mark.parametrize("right", [True, False])
def test_unions_of_a_function(right):
    """A function that is called twice allocates a union in each call."""

    def doubled(x):
        def run(union):
            numbers, integers = union
            stored(numbers, x)
            value = loaded(numbers).astype(jnp.int32)
            if right:
                stored(integers, value)
            return loaded(integers) * 2

        shape = x.shape
        return pl.run_scoped(
            run, plgpu.RefUnion(plgpu.SMEM(shape, FLOAT), plgpu.SMEM(shape, jnp.int32))
        )

    def body(x_ref, out_ref):
        first = doubled(x_ref[...])
        second = doubled(x_ref[:64])
        out_ref[:64] = first[:64] + second
        out_ref[64:] = first[64:]

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128, 128), jnp.int32))
    found, y = check(kernel, matrix())
    if right:
        expected = 2 * np.asarray(matrix()).astype(np.int32)
        expected[:64] *= 2
        assert found == ()
        np.testing.assert_array_equal(y, expected)
        return
    assert found and {one.kind for one in found} == {OTHER_MEMBER}


def test_members_of_one_group_and_alike():
    """Members of a group do not overlap, and two members of one type mean the same."""

    def body(x_ref, out_ref, union):
        (one, other), (same,) = union
        one[...] = x_ref[...]
        other[...] = x_ref[...] * 2
        out_ref[...] = same[...] + other[...]

    tile = plgpu.SMEM((64, 128), FLOAT)
    kernel = plgpu.kernel(
        body, out_type=matrix(64), scratch_types=[plgpu.RefUnion((tile, tile), (tile,))]
    )
    found, y = check(kernel, matrix(64))
    assert found == ()
    np.testing.assert_array_equal(y, matrix(64) * 3)
