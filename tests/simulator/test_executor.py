"""Kernels in JAX programs on the CPU: arrays of all kinds, printing, errors, options."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fake_kernels import add_kernel
from jax.experimental import pallas as pl
from sample_kernels import by_pallas_call, pipelined, scaled, softmax

import pallasite
from pallasite import config, plugins
from pallasite import gpu as plgpu
from pallasite.errors import InvalidTypeError, PallasiteError
from pallasite.launch import PACKED_BITS
from pallasite_simulator import executor, packing
from pallasite_simulator.errors import DeadlockError, SanitizerError, SimulationError

DTYPES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int4", "uint4",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _wide_types():
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        yield


def out(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def values(shape, dtype, seed=0):
    numbers = np.random.default_rng(seed).integers(-6, 7, shape)
    if np.dtype(dtype).name.startswith("uint"):
        numbers = abs(numbers)
    return jnp.asarray(numbers.astype(dtype))


def copying(shape, dtype, **options):
    @functools.partial(plgpu.kernel, out_type=out(shape, dtype), **options)
    def body(x, o):
        o[...] = x[...]

    return body


CASES = [
    (dtype, shape)
    for dtype in DTYPES
    for shape in ((256,), (7, 33), (1,))
    if shape == (256,) or dtype not in PACKED_BITS  # which kernels access in whole bytes only
]


@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_dtypes(dtype, shape):
    x = values(shape, dtype)
    result = jax.jit(copying(shape, dtype))(x)
    assert result.dtype == dtype
    np.testing.assert_array_equal(np.asarray(result), np.asarray(x))


@pytest.mark.parametrize("name", sorted(PACKED_BITS))
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 1000])
def test_narrow_elements_are_packed(name, count):
    dtype = np.dtype(getattr(ml_dtypes, name))
    bits = PACKED_BITS[name]
    codes = np.random.default_rng(count).integers(0, 1 << bits, count)
    signed = np.where(codes >> (bits - 1), codes - (1 << bits), codes)
    array = codes.astype(np.uint8).view(dtype) if "float" in name else (
        signed if name.startswith("int") else codes
    ).astype(dtype)  # fmt: skip
    contents = packing.pack(array)
    assert len(contents) == packing.memory_bytes((count,), dtype) == -(-count * bits // 8)
    whole = int.from_bytes(contents.tobytes(), "little")
    assert whole == sum(int(code) << (bits * place) for place, code in enumerate(codes))
    np.testing.assert_array_equal(packing.unpack(contents, (count,), dtype), array)


def test_programs():
    """Several kernels, loops, vmap, Pallas's own call, TMA."""
    x = jnp.arange(128.0, dtype=jnp.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: scaled(3.0)(scaled()(x)))(x), 6 * x)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, v: scaled()(v), x))
    np.testing.assert_array_equal(loop(x), 16 * x)
    rows = jnp.arange(512.0, dtype=jnp.float32).reshape(4, 128)
    np.testing.assert_array_equal(jax.vmap(scaled())(rows), 2 * rows)
    y = jax.random.normal(jax.random.key(0), (256, 256), jnp.float32)
    np.testing.assert_array_equal(pipelined()(y), 2 * y)
    np.testing.assert_array_equal(by_pallas_call()(y), y + 1)
    z = jax.random.normal(jax.random.key(1), (64, 128), jnp.float32)
    expected = jax.nn.silu(jax.nn.softmax(z, axis=1))
    np.testing.assert_allclose(jax.jit(softmax())(z), expected, rtol=1e-5)


def test_aliases_leave_the_input_alone():
    x = jnp.arange(128.0, dtype=jnp.float32)
    result = jax.jit(scaled(aliases={0: 0}))(x)
    np.testing.assert_array_equal(result, 2 * np.arange(128.0))
    np.testing.assert_array_equal(x, np.arange(128.0))


def test_rows_that_nobody_writes_hold_rubbish():
    """As far as hardware promises anything: zeros there would hide the mistake."""

    @functools.partial(plgpu.kernel, out_type=out((4, 128), "int32"))
    def body(o):
        o[1] = jnp.full((128,), 7, jnp.int32)

    for checks in ("outputs", "fast", "all"):
        with (
            config.scoped(sanitize=checks),
            pytest.raises(Exception, match="384 of 512 elements of output 0"),
        ):
            body()
    with config.scoped(sanitize="none"):
        result = np.asarray(jax.jit(lambda: body())())
    assert (result[1] == 7).all()
    assert (result[[0, 2, 3]].view(np.uint8) == executor.POISON).all()


def test_no_blocks():
    import dataclasses

    compiled = add_kernel()
    empty = dataclasses.replace(
        compiled, launch=dataclasses.replace(compiled.launch, grid=(0, 1, 1))
    )
    (result,) = executor.execute(empty, [np.ones(128, np.float32)])
    np.testing.assert_array_equal(result, np.zeros(128))
    launch = dataclasses.replace(empty.launch, aliases=((0, 0),))
    (result,) = executor.execute(
        dataclasses.replace(empty, launch=launch), [np.ones(128, np.float32)]
    )
    np.testing.assert_array_equal(result, np.ones(128))


def test_inputs_are_checked():
    with pytest.raises(InvalidTypeError, match="run with the wrong inputs") as error:
        executor.execute(add_kernel(), [np.ones(127, np.float32)])
    assert "got: float32[127]" in str(error.value)
    assert "expected: float32[128]" in str(error.value)


# Printing -----------------------------------------------------------------------------------------


def printing(x, o):
    pl.debug_print("x is {}", x[3])
    o[...] = x[...]


def test_printed_text_goes_to_standard_output(capfd):
    kernel = plgpu.kernel(printing, out_type=out((128,)))
    for _ in range(2):
        jax.block_until_ready(jax.jit(kernel)(jnp.arange(128, dtype=jnp.float32)))
    assert capfd.readouterr().out == "x is 3\n" * 2


def test_kernels_that_print_run_even_if_nobody_needs_their_result(capfd):
    def program(x):
        plgpu.kernel(printing, out_type=out((128,)))(x)
        return x + 1

    jax.block_until_ready(jax.jit(program)(jnp.arange(128, dtype=jnp.float32)))
    assert capfd.readouterr().out == "x is 3\n"


def test_what_was_printed_before_an_error_is_shown(capfd):
    def body(x, o):
        pl.debug_print("x is {}", x[3])
        o[...] = x[pl.ds(jnp.int32(x[3]) * 1000, 128)]

    kernel = plgpu.kernel(body, out_type=out((128,)))
    with pytest.raises(SimulationError, match="out of bounds"):
        kernel(jnp.arange(128, dtype=jnp.float32))
    assert capfd.readouterr().out == "x is 3\n"


# Errors -------------------------------------------------------------------------------------------


def beyond(x, o):
    o[...] = x[pl.ds(jnp.int32(x[0]), 128)]


def test_errors_name_the_line_and_keep_their_type():
    kernel = plgpu.kernel(beyond, out_type=out((128,)), kernel_name="beyond")
    good = jnp.zeros(128, jnp.float32)
    fn = jax.jit(kernel)
    np.testing.assert_array_equal(fn(good), good)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="accesses memory out of"):
        jax.block_until_ready(fn(good.at[0].set(9)))
    with pytest.raises(SimulationError, match="accesses memory out of bounds") as error:
        kernel(good.at[0].set(9))
    with pytest.raises(SimulationError) as again, pallasite.kernel_errors():
        fn(good.at[0].set(9))
    line = beyond.__code__.co_firstlineno + 1
    for one in (error.value, again.value):
        assert (one.location.file, one.location.line) == (__file__, line)
        assert "behind input 0 (512 bytes)" in one.got
    np.testing.assert_array_equal(fn(good), good)


def test_deadlocks():
    def body(x, o, barrier):
        @pl.when(x[0] > 0)
        def _():
            plgpu.barrier_arrive(barrier)

        plgpu.barrier_wait(barrier)
        o[...] = x[...]

    kernel = plgpu.kernel(body, out_type=out((128,)), scratch_types=[plgpu.Barrier()])
    np.testing.assert_array_equal(kernel(jnp.ones(128, jnp.float32)), np.ones(128))
    with pytest.raises(DeadlockError, match="no thread can go on") as error:
        kernel(jnp.zeros(128, jnp.float32))
    assert "lacks 128 of 128 arrivals" in str(error.value)


@pytest.mark.parametrize("shared", [False, True])
def test_semaphores_of_one_block_and_of_all(shared):
    """Block 1 waits for block 0, which signals a semaphore of its own."""

    def body(x, o, *semaphores):
        semaphore = pl.get_global(plgpu.SemaphoreType.REGULAR) if shared else semaphores[0]
        block = jax.lax.axis_index("blocks")

        @pl.when(block == 0)
        def _():
            pl.semaphore_signal(semaphore)

        @pl.when(block == 1)
        def _():
            pl.semaphore_wait(semaphore)

        o[block] = x[block]

    kernel = plgpu.kernel(
        body,
        out_type=out((2, 128)),
        grid=(2,),
        grid_names=("blocks",),
        scratch_types=[] if shared else [plgpu.SemaphoreType.REGULAR],
    )
    x = jnp.ones((2, 128), jnp.float32)
    if shared:
        np.testing.assert_array_equal(kernel(x), x)
        return
    with pytest.raises(DeadlockError, match="no thread can go on") as error:
        kernel(x)
    assert "semaphores of scratch_types are of one block each" in str(error.value)


def racing(x, o, tile):
    @pl.when(jax.lax.axis_index("t") == 0)
    def _():
        tile[...] = x[...]

    @pl.when(jax.lax.axis_index("t") == 1)
    def _():
        o[...] = tile[...]


def test_the_sanitizer_is_an_option():
    kernel = plgpu.kernel(
        racing,
        out_type=out((128,)),
        scratch_types=[plgpu.SMEM((128,), jnp.float32)],
        num_threads=2,
        thread_name="t",
    )
    x = jnp.arange(128, dtype=jnp.float32)
    jax.block_until_ready(kernel(x))
    jax.clear_caches()
    with config.scoped(sanitize=True), pytest.raises(SanitizerError, match="the sanitizer found"):
        kernel(x)
    jax.clear_caches()
    with config.scoped(sanitize=("bounds", "barriers")):
        jax.block_until_ready(kernel(x))
    jax.clear_caches()
    with (
        config.scoped(sanitize=("bounds", "nonsense")),
        pytest.raises(PallasiteError, match="no such group of checks"),
    ):
        kernel(x)


def test_options(monkeypatch):
    plugins.registry()
    assert config.get("simulator_processes") == 1
    assert config.get("simulator_progress") is None
    for name, wrong in (("processes", "0"), ("processes", "many"), ("progress", "perhaps")):
        monkeypatch.setenv(f"PALLASITE_SIMULATOR_{name.upper()}", wrong)
        with pytest.raises(pallasite.ConfigError, match="does not accept this value"):
            config.get(f"simulator_{name}")
    monkeypatch.setenv("PALLASITE_SIMULATOR_PROCESSES", "3")
    monkeypatch.setenv("PALLASITE_SIMULATOR_PROGRESS", "off")
    assert config.get("simulator_processes") == 3
    assert config.get("simulator_progress") is False


def test_progress_bar(monkeypatch, capfd):
    monkeypatch.setattr(sys.modules["pallasite_simulator.launch"], "LANES_AT_ONCE", 128)
    kernel = scaled(grid=5)
    x = jnp.ones(128, jnp.float32)
    with config.scoped(simulator_progress=True):
        kernel(x)
    assert "scaled: 100%" in capfd.readouterr().err
    kernel(x)
    jax.clear_caches()
    with config.scoped(simulator_progress=None):
        kernel(x)
    assert "%" not in capfd.readouterr().err
