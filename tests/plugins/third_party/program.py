"""Uses all that the plugin adds, in a process in which its distribution is installed.

Usage: ``python program.py cpu`` or ``python program.py cuda``, the platform on which JAX runs. It
calls the functions below and prints one line of JSON: for each function what went wrong, or null.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback

import jax

jax.config.update("jax_platforms", sys.argv[1])
jax.config.update("jax_num_cpu_devices", 2)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402
from third_party_plugin.blocks import SEEN  # noqa: E402
from third_party_plugin.launcher import LOWERED, NAME  # noqa: E402

import pallasite  # noqa: E402
from pallasite import gpu as plgpu  # noqa: E402
from pallasite.cli import main  # noqa: E402
from pallasite.runtime import cache_info  # noqa: E402

LANE, WARPGROUP = plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup
PLUGIN, TARGET = "third-party", "sm_121a"


def numbers(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def kernel(body, *shape, semantics=WARPGROUP, **options):
    params = options.pop("params", {})
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics, **params),
        **options,
    )


def run(fn, *arrays, target="sm_90"):
    with pallasite.config.scoped(target=target):
        return np.asarray(jax.jit(fn)(*arrays))


refused = []
"""Kernels that are not compiled, so that they are not found on disk either."""


def error_of(error, fn, *args, **options):
    """The text of the error of a kernel that cannot be compiled."""
    try:
        pallasite.compile(fn, *args, **options)
    except error as caught:
        refused.append(str(caught))
        return refused[-1]
    raise AssertionError(f"there is no {error.__name__}")


def command(*arguments):
    """What a command of ``pallasite`` prints as JSON."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        main([*arguments, "--json"])
    return json.loads(text.getvalue())


# What is checked ----------------------------------------------------------------------------------


def memory_space():
    """LINES are read and written, through views of their own, and there are only so many."""

    def body(x_ref, out_ref, lines):
        lines[...] = x_ref[...]
        plgpu.every_other_row(lines, 1)[...] = plgpu.every_other_row(lines)[...] * 2
        lines[1:3] += 1.0
        out_ref[...] = lines[...]

    def in_lines(rows, semantics):
        lines = plgpu.LINES((rows, 128), jnp.float32)
        return kernel(body, rows, 128, semantics=semantics, scratch_types=[lines])

    x = numbers(6, 128)
    expected = x.copy()
    expected[1::2] = 2 * x[0::2]
    expected[1:3] += 1
    for semantics in (LANE, WARPGROUP):
        np.testing.assert_array_equal(run(in_lines(6, semantics), x, target=TARGET), expected)
    compiled = pallasite.compile(in_lines(6, LANE), x, target=TARGET)
    (used,) = compiled.resources.reserved
    assert (used.name, used.amount, used.limit) == ("lines", 8, 8)

    large = error_of(pallasite.ResourceError, in_lines(9, LANE), numbers(9, 128), target=TARGET)
    for text in (
        "kernel body exceeds available lines: lines=16",
        "9 lines  lines: float32[9, 128]",
        "expected: at most 8 lines per block on sm_121a",
        "try: fewer lines at a time",
    ):
        assert text in large, large
    elsewhere = error_of(pallasite.ResourceError, in_lines(6, LANE), x, target="sm_90")
    assert "expected: a target that has lines; sm_90 has none" in elsewhere, elsewhere
    assert "try: compile for sm_121a" in elsewhere, elsewhere
    try:
        plgpu.LINES((2, 64), jnp.float32)
    except pallasite.InvalidValueError as error:
        assert "expected: [n, 128] numbers of 32 bits" in str(error)
    else:
        raise AssertionError("half a line")


def view():
    """The view is one of shared and of global memory, too."""

    def body(x_ref, out_ref, scratch):
        plgpu.every_other_row(scratch, 1)[...] = plgpu.every_other_row(x_ref)[...]
        plgpu.every_other_row(scratch, 0)[...] = plgpu.every_other_row(x_ref, 1)[...]
        plgpu.commit_smem()
        out_ref[...] = scratch[...]

    x = numbers(4, 128)
    for semantics in (LANE, WARPGROUP):
        fn = kernel(
            body, 4, 128, semantics=semantics, scratch_types=[plgpu.SMEM((4, 128), jnp.float32)]
        )
        np.testing.assert_array_equal(run(fn, x), x[[1, 0, 3, 2]])


def hidden_operand():
    """Each device has its number."""

    def body(x_ref, out_ref):
        out_ref[...] = plgpu.add_device_number(x_ref[...])

    x = numbers(256)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
    parts = PartitionSpec("d")
    fn = jax.shard_map(
        kernel(body, 128), mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False
    )
    added = np.repeat(np.float32([7, 1007]), 128)
    np.testing.assert_array_equal(run(fn, x), x + added)
    launch = pallasite.compile(kernel(body, 128), x[:128], target="sm_90").launch
    (operand,) = launch.hidden_operands
    assert operand.initialiser == "third_party_plugin.device_numbers:number_of"
    assert operand.per_device and len(launch.caller_inputs) == 1


def prologue_and_epilogue():
    """The body uses what the prologue left, and the host gets what the epilogue stored."""

    def body(x_ref, out_ref):
        part = pl.ds(pl.program_id(0) * 128, 128)
        out_ref[part] = plgpu.add_block_number(x_ref[part])

    def numbered(semantics, wanted=True):
        return kernel(
            body,
            384,
            semantics=semantics,
            params={"plugin_options": {PLUGIN: {"block_numbers": wanted}}},
            grid=(3,),
            grid_names=("i",),
            kernel_name="numbered",
        )

    x = numbers(384)
    expected = x + np.repeat(np.float32([100, 101, 102]), 128)
    for semantics in (LANE, WARPGROUP):
        np.testing.assert_array_equal(run(numbered(semantics), x), expected)
    jax.effects_barrier()
    assert SEEN == [("numbered", [100, 101, 102])] * 2, SEEN

    ptx = pallasite.compile(numbered(WARPGROUP), x, target="sm_90").ptx
    marks = ("// third party: the prologue", "ld.global", "// third party: the epilogue", "ret;")
    places = [ptx.index(mark) for mark in marks]
    assert places == sorted(places), places

    plain = kernel(lambda x_ref, out_ref: out_ref.__setitem__(..., x_ref[...]), 384)
    assert "third party" not in pallasite.compile(plain, x, target="sm_90").ptx
    off = error_of(
        pallasite.InvalidValueError, numbered(WARPGROUP, wanted=False), x, target="sm_90"
    )
    assert "blocks have no numbers" in off and "program.py:" in off, off


def barrier_kind():
    """Two threads exchange rows; a wait that never ends is found."""

    def body(x_ref, out_ref, rows, ready):
        thread = jax.lax.axis_index("t")
        rows[thread] = x_ref[thread]
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        out_ref[thread] = rows[1 - thread]

    def exchange(arrivals, semantics=WARPGROUP):
        return kernel(
            body,
            2,
            128,
            semantics=semantics,
            scratch_types=[
                plgpu.SMEM((2, 128), jnp.float32),
                plgpu.WarpBarrier(num_arrivals=arrivals),
            ],
            num_threads=2,
            thread_name="t",
        )

    x = numbers(2, 128)
    for semantics in (LANE, WARPGROUP):
        np.testing.assert_array_equal(run(exchange(2, semantics), x), x[::-1])
    ptx = pallasite.compile(exchange(2), x, target="sm_90").ptx
    (init,) = [line for line in ptx.splitlines() if "mbarrier.init" in line]
    assert init.rstrip().endswith(", 8;"), init

    def copied(x_ref, out_ref, rows, full):
        plgpu.copy_gmem_to_smem(x_ref, rows, full)
        plgpu.barrier_wait(full)
        out_ref[...] = rows[...]

    scratch = [plgpu.SMEM((2, 128), jnp.float32), plgpu.WarpBarrier()]
    np.testing.assert_array_equal(run(kernel(copied, 2, 128, scratch_types=scratch), x), x)

    deadlock = error_of(pallasite.InvalidValueError, exchange(3), x, target="sm_90")
    for text in (
        "this wait never ends: the first phase of the barrier completes with arrival 3, but only 2",
        "got: plgpu.WarpBarrier(num_arrivals=3)",
        "program.py:",
    ):
        assert text in deadlock, deadlock


def layout():
    """The proposed layout is the cheapest for sums along columns, since warps exchange nothing."""
    assert plgpu.Layout.WARP_COLUMNS in list(plgpu.Layout)

    def center(x_ref, out_ref):
        x = x_ref[...]
        out_ref[...] = x - jnp.max(x, axis=0)[None, :]

    x = numbers(64, 64)

    def report(target):
        compiled = pallasite.compile(kernel(center, 64, 64), x, target=target)
        layouts = [array.layout for array in compiled.layouts.arrays if array.shape == (64, 64)]
        return layouts, "st.shared" in compiled.ptx

    assert report("sm_90") == (["WARP_COLUMNS"] * 2, False)
    layouts, exchanged = report(TARGET)  # For which it is not proposed.
    assert "WARP_COLUMNS" not in layouts and exchanged, layouts
    for target in ("sm_90", TARGET):
        found = run(kernel(center, 64, 64), x, target=target)
        np.testing.assert_array_equal(found, x - x.max(axis=0))

    def cast(x_ref, out_ref):
        out_ref[...] = plgpu.layout_cast(x_ref[...], plgpu.Layout.WARP_COLUMNS) + 1

    for semantics in (LANE, WARPGROUP):
        np.testing.assert_array_equal(run(kernel(cast, 64, 64, semantics=semantics), x), x + 1)
    wrong = error_of(pallasite.InvalidValueError, kernel(cast, 64, 32), x[:, :32], target="sm_90")
    assert "program.py:" in wrong and "(cast)" in wrong, wrong


def jaxpr_primitive():
    """Memory inside is estimated, layouts are inferred through it."""

    def body(x_ref, out_ref):
        def step(x):
            def scope(scratch):
                scratch[...] = x * 2
                plgpu.commit_smem()
                return scratch[...]

            inner = pl.run_scoped(scope, plgpu.SMEM((64, 64), jnp.float32))
            return [plgpu.layout_cast(inner, plgpu.Layout.WARP_COLUMNS)]

        (out_ref[...],) = plgpu.repeat(3, step, x_ref[...])

    x = numbers(64, 64)
    for semantics in (LANE, WARPGROUP):
        np.testing.assert_array_equal(run(kernel(body, 64, 64, semantics=semantics), x), 8 * x)
    compiled = pallasite.compile(kernel(body, 64, 64), x, target="sm_90")
    assert compiled.resources.shared_memory_bytes == 64 * 64 * 4
    # What is carried is loaded in the only layout that anything asks for, which is inside.
    assert {array.layout for array in compiled.layouts.arrays} == {"WARP_COLUMNS"}
    assert not compiled.layouts.conversions


def warpgroup_rule():
    """It is asked first where layouts are inferred, and the one for lanes elsewhere."""

    def body(x_ref, out_ref):
        out_ref[...] = plgpu.negate(x_ref[...]) * 2

    x = numbers(4, 128)
    for semantics, name, other in ((LANE, "LANE", "WARPGROUP"), (WARPGROUP, "WARPGROUP", "LANE")):
        fn = kernel(body, 4, 128, semantics=semantics)
        np.testing.assert_array_equal(run(fn, x), -2 * x)
        ptx = pallasite.compile(fn, x, target="sm_90").ptx
        assert f"// third party: negate, {name}" in ptx
        assert f"// third party: negate, {other}" not in ptx


def executor():
    """It has more priority than JAX's launcher, so it lowers kernels for CUDA."""

    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] + 1

    def program():
        fn = jax.jit(kernel(body, 128, kernel_name="launched"))
        with pallasite.config.scoped(target="sm_90"):
            return fn.trace(numbers(128)).lower(lowering_platforms=("cuda",)).as_text()

    text = program()
    (call,) = [line for line in text.splitlines() if "@triton_kernel_call_ffi" in line]
    assert f'launched_by = "{NAME}"' in call, call
    assert LOWERED == {"launched": 1}, LOWERED
    with pallasite.config.scoped(executor="jax-launcher"):
        assert NAME not in program()
    (choice,) = [one for one in command("doctor")["executors"] if one["platform"] == "cuda"]
    assert choice["runs"] == NAME
    assert choice["reason"] == "the highest priority, 50, of those that are available"
    assert [one["name"] for one in choice["executors"]] == [NAME, "jax-launcher"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        main(["doctor"])
    assert f"{NAME} runs kernels: {choice['reason']}" in " ".join(text.getvalue().split())


def operation():
    """The target decides which implementation runs, and what it refuses goes to the other."""
    x = numbers(4, 128)
    assert "swap_rows" in dir(pallasite.ops)
    cases = (("sm_90", 4, ""), (TARGET, 4, "_in_lines"), (TARGET, 12, ""))
    for target, rows, suffix in cases:
        x = numbers(rows, 128)
        swapped = np.arange(rows).reshape(-1, 2)[:, ::-1].reshape(-1)
        with pallasite.target(target):
            compiled = pallasite.compile(pallasite.ops.swap_rows, x)
            assert compiled.name == f"swap_rows{suffix}", compiled.name
            np.testing.assert_array_equal(pallasite.ops.swap_rows(x), x[swapped])
    assert pallasite.ops.swap_rows.__doc__.startswith("Exchanges rows 0 and 1")


def listing():
    """``pallasite plugins`` lists all of it, and the distribution that it is from."""
    (row,) = [one for one in command("plugins")["plugins"] if one["name"] == PLUGIN]
    assert row["distribution"] == "pallasite-third-party 0.1.0", row
    assert row["contributes"] == {
        "targets": [TARGET],
        "names": [
            "every_other_row",
            "add_device_number",
            "add_block_number",
            "WarpBarrier",
            "repeat",
            "negate",
        ],
        "memory spaces": ["LINES"],
        "layouts": ["WARP_COLUMNS"],
        "layout proposals": ["warp-columns"],
        "lifecycles": ["third-party-blocks", "third-party-device-numbers"],
        "executors": ["third-party-launcher"],
        "operations": ["swap_rows"],
        "options": ["block_numbers"],
        "lowering rules": 6,
        "inference rules": 1,
        "views": 1,
        "primitives with jaxprs": 1,
        "barrier kinds": 1,
    }, row["contributes"]


def launched():
    """On a GPU, the plugin's executor launches kernels that use what the plugin adds."""

    def body(x_ref, out_ref, rows, ready):
        part = pl.ds(pl.program_id(0) * 64, 64)
        rows[...] = plgpu.add_block_number(x_ref[part])
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        (out_ref[part],) = plgpu.repeat(2, lambda x: [plgpu.negate(x) * 2], rows[...])

    fn = kernel(
        body,
        192,
        64,
        params={"plugin_options": {PLUGIN: {"block_numbers": True}}},
        scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.WarpBarrier()],
        grid=(3,),
        grid_names=("i",),
        kernel_name="launched",
    )
    x = numbers(192, 64)
    added = np.repeat(np.float32([100, 101, 102]), 64)[:, None]
    np.testing.assert_array_equal(np.asarray(jax.jit(fn)(x)), 4 * (x + added))
    jax.effects_barrier()
    assert SEEN == [("launched", [100, 101, 102])], SEEN
    assert LOWERED["launched"] == (1 if sys.argv[1] == "cuda" else 0), LOWERED


CHECKS = (
    memory_space,
    view,
    hidden_operand,
    prologue_and_epilogue,
    barrier_kind,
    layout,
    jaxpr_primitive,
    warpgroup_rule,
    executor,
    operation,
    listing,
    launched,
)


def report():
    """What went wrong in each check, and what the disk cache was asked for."""
    failures = {}
    for check in CHECKS if sys.argv[1] == "cpu" else (launched,):
        SEEN.clear()
        LOWERED.clear()
        try:
            check()
        except Exception:
            failures[check.__name__] = traceback.format_exc()
        else:
            failures[check.__name__] = None
    found = cache_info()
    return {
        "failures": failures,
        "compiles": found.compiles,
        "disk_hits": found.disk_hits,
        "refused": len(refused),
    }


if __name__ == "__main__":
    print(json.dumps(report()))
