"""The sanitizer on kernels written in Pallas, with and without a mistake."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallasite
from pallasite import config
from pallasite import gpu as plgpu
from pallasite_simulator import SanitizerError, simulate

FLOAT = jnp.float32


def check(body, *inputs, out=(64, 128), scratch=(), **options):
    """The findings, and the outputs, of a kernel."""
    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(out, FLOAT), scratch_types=scratch, **options
    )
    with config.scoped(disabled_passes="check-reuse,check-outputs"):  # They find some of it.
        compiled = pallasite.compile(kernel, *inputs, target="sm_90a")
    found = simulate(compiled, *inputs, sanitize=True)
    return found.findings, found.outputs[0]


def matrix(rows=64, columns=128):
    return jnp.arange(rows * columns, dtype=FLOAT).reshape(rows, columns)


def line_of(text: str) -> int:
    """The line of this file that has a text."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(text)]
    return number


LOADS = {
    plgpu.OOBFillMode.PROMISE_IN_BOUNDS: "cp.async.bulk.shared::cta.global",
    plgpu.OOBFillMode.ZEROS: "cp.async.bulk.tensor",
}
"""The instruction of a load of a whole array."""


@pytest.mark.parametrize("mode", LOADS)
def test_load_without_a_wait(mode):
    def body(x_ref, out_ref, tile, loaded):
        plgpu.copy_gmem_to_smem(x_ref, tile, loaded, oob_mode=mode)
        out_ref[...] = tile[...] + 1  # first: read

    (finding, unfinished), _ = check(
        body, matrix(), scratch=[plgpu.SMEM((64, 128), FLOAT), plgpu.Barrier()]
    )
    assert finding.kind == "asynchronous operation not waited for, in shared memory"
    assert (finding.location.file, finding.location.line) == (__file__, line_of("# first: read"))
    text = str(finding)
    assert "reads byte 0 of 'float32[64, 128]' (32768 bytes" in text
    assert LOADS[mode] in text
    assert "plgpu.barrier_wait" in finding.hint
    assert unfinished.kind == "kernel ends before its asynchronous operation"


@pytest.mark.parametrize("mode", LOADS)
def test_load_with_a_wait(mode):
    def body(x_ref, out_ref, tile, loaded):
        plgpu.copy_gmem_to_smem(x_ref, tile, loaded, oob_mode=mode)
        plgpu.barrier_wait(loaded)
        out_ref[...] = tile[...] + 1

    found, y = check(body, matrix(), scratch=[plgpu.SMEM((64, 128), FLOAT), plgpu.Barrier()])
    assert found == ()
    np.testing.assert_array_equal(y, matrix() + 1)


@pytest.mark.usefixtures("lane_semantics")  # The other one adds the fence.
@pytest.mark.parametrize("commits", [True, False])
def test_store_of_what_was_written(commits):
    def body(x_ref, out_ref, tile):
        tile[...] = x_ref[...] * 2  # second: write
        if commits:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out_ref)  # second: copy
        plgpu.wait_smem_to_gmem(0)

    found, y = check(body, matrix(), scratch=[plgpu.SMEM((64, 128), FLOAT)])
    np.testing.assert_array_equal(y, matrix() * 2)
    if commits:
        assert found == ()
        return
    assert found[0].kind in (
        "missing fence.proxy.async in shared memory",
        "data race with an asynchronous operation in shared memory",
    )
    assert found[0].location.line == line_of("# second: copy")
    assert f":{line_of('# second: write')}" in str(found[0])


@pytest.mark.parametrize("waits", [True, False])
def test_source_of_a_store_is_written_again(waits):
    def body(x_ref, out_ref, tile):
        @pl.loop(0, 4)
        def _(step):
            rows = pl.ds(step * 16, 16)
            tile[...] = x_ref[rows] + 1
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, out_ref.at[rows])
            if waits:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        plgpu.wait_smem_to_gmem(0)

    found, _ = check(body, matrix(), scratch=[plgpu.SMEM((16, 128), FLOAT)])
    kinds = {one.kind for one in found}
    wanted = set() if waits else {"asynchronous operation not waited for, in shared memory"}
    assert kinds == wanted


@pytest.mark.parametrize("waits", [True, False])
def test_kernel_ends_before_its_store(waits):
    def body(x_ref, out_ref, tile):
        tile[...] = x_ref[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out_ref)  # third: copy
        if waits:
            plgpu.wait_smem_to_gmem(0)

    found, _ = check(body, matrix(), scratch=[plgpu.SMEM((64, 128), FLOAT)])
    assert [one.kind for one in found] == (
        [] if waits else ["thread ends before its asynchronous operation"]
    )
    if not waits:
        assert found[0].location.line == line_of("# third: copy")


def test_uninitialized_scratch_memory():
    def body(x_ref, out_ref, tile):
        tile[pl.ds(0, 32)] = x_ref[pl.ds(0, 32)]
        out_ref[...] = tile[...]  # fourth: read

    (finding,), _ = check(body, matrix(), scratch=[plgpu.SMEM((64, 128), FLOAT)])
    assert finding.kind == "read of uninitialized shared memory"
    assert "reads byte 16384 of 'float32[64, 128]' (32768 bytes" in str(finding)
    assert finding.location.line == line_of("# fourth: read")


@pytest.mark.parametrize("automatic", [True, False])
def test_automatic_barriers(automatic):
    """A tile is written in one layout and read in another one, by other threads."""

    def body(x_ref, out_ref, tile):
        tile[...] = x_ref[...]
        total = jnp.zeros((64,), FLOAT)
        for column in range(0, 128, 32):
            total = total + jnp.sum(tile[:, pl.ds(column, 32)], axis=1)
        out_ref[...] = total

    parameters = plgpu.CompilerParams(unsafe_no_auto_barriers=not automatic)
    found, y = check(
        body,
        matrix(),
        out=(64,),
        scratch=[plgpu.SMEM((64, 128), FLOAT)],
        compiler_params=parameters,
    )
    if automatic:
        assert found == ()
        np.testing.assert_allclose(y, matrix().sum(axis=1))
    else:
        assert {one.kind for one in found} == {"data race in shared memory"}
        assert "automatic barriers" in found[0].hint


@pytest.mark.parametrize("apart", [True, False])
def test_blocks_write_to_one_place(apart):
    def body(x_ref, out_ref):
        block = jax.lax.axis_index("block")
        part = pl.ds(block * 16, 16)
        out_ref[part if apart else pl.ds(0, 16)] = x_ref[part]  # fifth: write

    found, _ = check(body, matrix(), grid=(4,), grid_names=("block",))
    if apart:
        assert found == ()
        return
    finding, missing = found
    assert finding.kind == "data race in global memory between blocks"
    assert finding.location.line == line_of("# fifth: write")
    assert missing.kind == "output written in part"
    assert "output 0 (32768 bytes)" in str(finding)


@pytest.mark.parametrize("arrives", ["after", "before"])
def test_consumer_hands_a_buffer_back(arrives):
    """The producer overwrites a slot that the consumer still reads."""

    def body(x_ref, out_ref, slots, full, empty):
        role = jax.lax.axis_index("role")

        @pl.when(role == 0)
        def _():
            @pl.loop(0, 8)
            def _(i):
                slot = jax.lax.rem(i, 2)

                @pl.when(i >= 2)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                rows = pl.ds(i * 8, 8)
                plgpu.copy_gmem_to_smem(x_ref.at[rows], slots.at[slot], full.at[slot])

        @pl.when(role == 1)
        def _():
            @pl.loop(0, 8)
            def _(i):
                slot = jax.lax.rem(i, 2)
                plgpu.barrier_wait(full.at[slot])
                if arrives == "before":
                    plgpu.barrier_arrive(empty.at[slot])
                out_ref[pl.ds(i * 8, 8)] = slots[slot] * 2
                if arrives == "after":
                    plgpu.barrier_arrive(empty.at[slot])

    found, _ = check(
        body,
        matrix(),
        scratch=[
            plgpu.SMEM((2, 8, 128), FLOAT),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        num_threads=2,
        thread_name="role",
    )
    kinds = {one.kind for one in found}
    if arrives == "after":
        assert not kinds
    else:
        assert kinds <= {
            "data race with an asynchronous operation in shared memory",
            "asynchronous operation not waited for, in shared memory",
        }
        assert kinds


@pytest.mark.parametrize("waits", [True, False])
def test_semaphore_between_blocks(waits):
    """Each block adds to what the block before it left."""

    def body(x_ref, out_ref):
        block = jax.lax.axis_index("block")
        turn = pl.get_global(plgpu.SemaphoreType.REGULAR)
        if waits:
            pl.semaphore_wait(turn, block, decrement=False)
        before = jnp.where(block == 0, 0.0, out_ref[...])  # sixth: read
        out_ref[...] = before + x_ref[block]
        pl.semaphore_signal(turn, 1)

    found, y = check(body, matrix(6), out=(128,), grid=(6,), grid_names=("block",))
    if waits:
        assert found == ()
        np.testing.assert_array_equal(y, matrix(6).sum(axis=0))
    else:
        assert {one.kind for one in found} == {
            "data race in global memory between blocks",
            "read of uninitialized global memory",
        }
        assert any("semaphore" in one.hint for one in found)


def test_outputs_that_are_not_written():
    def part(x_ref, out_ref):  # seventh: part
        block = jax.lax.axis_index("block")
        rows = pl.ds(block * 16, 16)
        out_ref[rows] = x_ref[rows]

    found, _ = check(part, matrix(), grid=(3,), grid_names=("block",))
    assert [one.kind for one in found] == ["output written in part"]
    assert "2048 of 8192 elements of output 0 (float32[64, 128]) were never written, the first" in (
        str(found[0])
    )
    assert "at [48, 0]" in str(found[0]) and found[0].location is not None

    def accumulates(x_ref, out_ref):
        out_ref[...] += x_ref[...]  # eighth: accumulates

    found, _ = check(accumulates, matrix())
    assert [one.kind for one in found] == ["read of uninitialized global memory"]
    assert found[0].location.line == line_of("# eighth: accumulates")

    def nothing(x_ref, out_ref):
        del x_ref, out_ref

    found, _ = check(nothing, matrix())
    assert [one.kind for one in found] == ["output never written"]


@pytest.mark.parametrize("processes", [1, 2])
def test_outputs_that_are_not_written_are_found_fast(processes):
    """What holds the rubbish that it began with is so whatever the rubbish is."""

    def part(x_ref, _, __, other_ref, counts_ref, out_ref):
        block = jax.lax.axis_index("block")
        rows = pl.ds(block * 16, 16)
        counts_ref[block] += 1
        out_ref[rows] = x_ref[rows]

        @pl.when(counts_ref[block] == 2)
        def _():  # What is aliased is as it was when the kernel runs again.
            other_ref[block] = 5

    kernel = plgpu.kernel(
        part,
        out_type=[jax.ShapeDtypeStruct((64,), jnp.int32)] * 2
        + [jax.ShapeDtypeStruct((64, 128), jnp.int8)],
        input_output_aliases={1: 0, 2: 1},
        grid=(3,),
        grid_names=("block",),
    )
    ones = jnp.ones(64, jnp.int32)
    x = np.zeros((64, 128), np.int8)
    x[5:7] = 0xCD - 256  # Written, although it looks as if it were not.
    compiled = pallasite.compile(kernel, x, ones, ones)
    simulation = simulate(compiled, x, ones, ones, sanitize="fast", processes=processes)
    (found,) = simulation.findings
    assert found.kind == "output written in part"
    assert "2048 of 8192 elements of output 2 (int8[64, 128]) were never written" in str(found)
    np.testing.assert_array_equal(simulation.outputs[0][:4], [5, 5, 5, 1])

    def all_of_it(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    for value in (0xCD, 0x5A):
        x = np.full((64, 128), value, np.uint8)
        kernel = plgpu.kernel(all_of_it, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))
        assert not simulate(pallasite.compile(kernel, x), x, sanitize="fast").findings


def test_outputs_that_may_be_left_out():
    def part(x_ref, out_ref):
        out_ref[pl.ds(0, 16)] = x_ref[pl.ds(0, 16)]

    options = {"standard": {"partial_outputs": True}}
    found, _ = check(part, matrix(), compiler_params=plgpu.CompilerParams(plugin_options=options))
    assert found == ()


def test_shared_memory_does_not_begin_with_zeros():
    def body(x_ref, out_ref, total):
        total[...] += x_ref[...]
        out_ref[...] = total[...]

    found, y = check(body, matrix(1), out=(1, 128), scratch=[plgpu.SMEM((1, 128), FLOAT)])
    assert {one.kind for one in found} == {"read of uninitialized shared memory"}
    assert not np.allclose(y, matrix(1))


def test_error_of_a_program():
    """What is found is an error of the JAX program."""

    def body(x_ref, out_ref, tile):
        out_ref[...] = tile[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 128), FLOAT),
        scratch_types=[plgpu.SMEM((64, 128), FLOAT)],
    )
    with (
        config.scoped(sanitize=True, target="sm_90a"),
        pytest.raises(SanitizerError, match="read of uninitialized shared memory"),
    ):
        jax.block_until_ready(kernel(matrix()))


@pytest.mark.parametrize("how", ["sum", "int", "atomic", "copy", "bits"])
@pytest.mark.parametrize("written", [False, True])
def test_outputs_that_are_read_before_are_found_fast(how, written):
    """By whether the results depend on the rubbish."""

    def body(x_ref, out_ref, tile):
        if written:
            out_ref[...] = jnp.zeros_like(out_ref)
        if how == "atomic":
            plgpu.atomic_add(out_ref, x_ref[...])  # early: atomic
        elif how == "copy":
            tile[...] = x_ref[...]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, out_ref, reduction_op="add")  # early: copy
            plgpu.wait_smem_to_gmem(0)
        else:
            out_ref[...] += x_ref[...]  # early: sum

    dtype = {"int": jnp.int32, "bits": jnp.bfloat16, "atomic": jnp.int32}.get(how, FLOAT)
    x = matrix().astype(dtype)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, dtype),
        scratch_types=[plgpu.SMEM(x.shape, dtype)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    with config.scoped(disabled_passes="check-outputs,check-reuse"):
        compiled = pallasite.compile(kernel, x, target="sm_90a")
    found = simulate(compiled, x, sanitize="fast")
    if written and how != "copy":
        assert not found.findings
        np.testing.assert_array_equal(found.outputs[0], x)
    elif not written:
        (one,) = found.findings
        assert one.kind == "read of uninitialized global memory"
        assert one.location.line == line_of(
            f"# early: {how if how in ('atomic', 'copy') else 'sum'}"
        )


def test_rubbish_that_is_read_and_discarded_is_right():
    def body(x_ref, out_ref):
        step = jax.lax.axis_index("step")
        out_ref[...] = jnp.where(step == 0, 0, out_ref[...]) + x_ref[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 128), FLOAT),
        grid=(1,),
        grid_names=("step",),
    )
    found = simulate(pallasite.compile(kernel, matrix()), matrix(), sanitize="fast")
    assert not found.findings


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", ["broadcast", "max", "argmax"])
def test_parts_of_registers_that_nobody_uses(case, target):
    """Bytes are packed with others that have no value, which the results do without."""

    def body(x_ref, out_ref):
        x = x_ref[...]
        if case == "broadcast":
            out_ref[...] = jax.lax.broadcast_in_dim(x, (512, 3), (0,))
        elif case == "max":
            out_ref[...] = x.max(axis=0)
        else:
            out_ref[...] = jnp.argmax(x, axis=0).astype(jnp.int32)

    shape = (512,) if case == "broadcast" else (64, 32)
    x = np.random.default_rng(3).integers(-128, 128, shape, np.int8)
    expected = {
        "broadcast": lambda: np.repeat(x[:, None], 3, axis=1),
        "max": lambda: x.max(axis=0),
        "argmax": lambda: x.argmax(axis=0).astype(np.int32),
    }[case]()
    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(expected.shape, expected.dtype))
    found = simulate(pallasite.compile(kernel, x, target=target), x, sanitize=True)
    assert found.findings == ()
    np.testing.assert_array_equal(found.outputs[0], expected)
