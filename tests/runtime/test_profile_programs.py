"""Programs that have profiled kernels: with a pretended executor, and on a GPU."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec
from profile_support import NESTED, matched, read_all, slot
from sample_kernels import shape

import pallasite
from pallasite import config, plugins
from pallasite import gpu as plgpu
from pallasite.errors import UnsupportedError
from pallasite.runtime import clear_memory
from pallasite_std.host_calls import run_on_host
from pallasite_std.profiler import dump
from pallasite_std.profiler.profile import profile_of


class _Fake:
    """An executor that copies its inputs to its outputs and records two regions."""

    def execute(self, compiled, arrays):
        profile = profile_of(compiled)
        outputs = [np.array(arrays[0]) for _ in compiled.launch.outputs]
        if profile is not None:
            count = compiled.launch.outputs[profile.output].shape[0] // profile.words
            words = [slot(*NESTED, room=profile.events, sm=n) for n in range(count)]
            outputs[profile.output] = np.concatenate(words)
        return outputs

    def run(self, compiled, *operands, request):
        return run_on_host(self.execute, compiled, *operands, request=request)

    @pallasite.hookimpl
    def pallasite_executors(self):
        return [pallasite.Executor(name="fake", platforms=("cpu",), run=self.run, priority=1000)]


@pytest.fixture
def fake(tmp_path):
    if jax.default_backend() != "cpu":
        pytest.skip("runs on the CPU")
    plugins.register(_Fake(), "fake")
    clear_memory()
    with config.scoped(cache_dir=tmp_path / "cache", target="sm_90"):
        yield
    plugins.unregister("fake")
    clear_memory()


def profiled(folder, name="profiled", grid=1, steps=1, per_warp=False, space=64, **arguments):
    """``o = x * 2**steps``: a loop in a region, with a region in it; one of two threads stores."""

    def body(x, o):
        with jax.named_scope("outer"):

            def step(i, v):
                with jax.named_scope("inner"):
                    return v * 2

            v = jax.lax.fori_loop(0, steps, step, x[...])
        with jax.named_scope("store"):

            @pl.when(jax.lax.axis_index("t") == 0)
            def _():
                o[...] = v

    scope = plgpu.TraceScope.WARP if per_warp else plgpu.TraceScope.WARPGROUP
    params = plgpu.CompilerParams(
        profile_space=space,
        profile_dir=str(folder),
        profile_trace_scope=scope,
        profile_bounds_check=True,
    )
    return plgpu.kernel(
        body,
        out_type=shape(128),
        grid=(grid,),
        grid_names=("g",),
        num_threads=2,
        thread_name="t",
        kernel_name=name,
        compiler_params=params,
        **arguments,
    )


def finish(*arrays):
    jax.block_until_ready(arrays)
    jax.effects_barrier()


def test_each_run_of_each_kernel_writes_a_trace(fake, tmp_path):
    one, two = profiled(tmp_path, "one"), profiled(tmp_path, "two")
    program = jax.jit(lambda x: two(one(one(x))))
    x = jnp.arange(128.0)
    for _ in range(2):
        finish(program(x))
    finish(one(x))
    np.testing.assert_array_equal(program(x), x)
    finish()
    kernels = [trace["otherData"]["kernel"] for trace in read_all(tmp_path)]
    assert collections.Counter(kernels) == {"one": 7, "two": 3}
    assert all(matched(trace) for trace in read_all(tmp_path))


def test_outputs_that_nobody_needs(fake, tmp_path):
    finish(jax.jit(lambda x: (profiled(tmp_path)(x), x + 1)[1])(jnp.ones(128)))
    assert len(read_all(tmp_path)) == 1


def test_aliased_output(fake, tmp_path):
    kernel = profiled(tmp_path, input_output_aliases={0: 0})
    x = jnp.arange(128.0)
    result = jax.jit(kernel)(x)
    finish(result)
    np.testing.assert_array_equal(result, x)
    assert len(read_all(tmp_path)) == 1


def test_vmap_and_loops(fake, tmp_path):
    result = jax.vmap(profiled(tmp_path))(jnp.ones((3, 128)))
    finish(result)
    assert result.shape == (3, 128)
    (trace,) = read_all(tmp_path)
    assert trace["otherData"]["grid"] == [1, 3, 1] and len(matched(trace)) == 6
    kernel = profiled(tmp_path)
    finish(jax.lax.fori_loop(0, 4, lambda _, x: kernel(x), jnp.ones(128)))
    assert len(read_all(tmp_path)) == 5


def test_pallas_call(fake, tmp_path):
    def body(x, o):
        with jax.named_scope("outer"):
            o[...] = x[...]

    params = plgpu.CompilerParams(profile_space=4, profile_dir=str(tmp_path))
    fn = pl.pallas_call(body, out_shape=shape(128), grid=(2,), compiler_params=params)
    finish(jax.jit(fn)(jnp.ones(128)))
    (trace,) = read_all(tmp_path)
    assert trace["otherData"]["grid"] == [2, 1, 1]


def test_shard_map(fake, tmp_path):
    mesh = jax.make_mesh((1,), ("x",))
    spec = PartitionSpec("x")
    fn = jax.shard_map(
        profiled(tmp_path), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    with jax.set_mesh(mesh):
        finish(jax.jit(fn)(jax.device_put(jnp.ones(128), jax.NamedSharding(mesh, spec))))
    assert len(read_all(tmp_path)) == 1


def test_programs_for_another_machine_are_refused(fake, tmp_path):
    pytest.importorskip("jax_cuda13_plugin")
    traced = jax.jit(profiled(tmp_path)).trace(shape(128))
    with pytest.raises(
        UnsupportedError,
        match="to the host, in a program for another",
    ):
        traced.lower(lowering_platforms=("cuda",))


# Of real runs -------------------------------------------------------------------------------------


def check_regions(trace, threads, steps):
    """Each thread has the loop's region, its steps inside, and then the store."""
    found = matched(trace)
    assert len(found) == threads
    for regions in found.values():
        assert [name for name, _, _ in regions] == ["outer", *["inner"] * steps, "store"]
        (_, begin, end), *inner, (_, stored, _) = regions
        for (_, before, after), (_, following, _) in zip(
            inner, [*inner[1:], regions[-1]], strict=True
        ):
            assert begin <= before <= after <= following and after <= end
        assert end <= stored
        assert all(0 <= b <= e < 1e6 for _, b, e in regions)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("per_warp", [False, True])
def test_trace_of_a_run(tmp_path, per_warp):
    fn = jax.jit(profiled(tmp_path, grid=5, steps=6, per_warp=per_warp))
    x = jnp.arange(128.0)
    for _ in range(3):
        result = fn(x)
    finish(result)
    np.testing.assert_array_equal(result, 64 * np.arange(128.0))
    traces = read_all(tmp_path)
    assert len(traces) == 3
    for trace in traces:
        assert trace["otherData"]["lost events"] == 0
        check_regions(trace, 5 * (8 if per_warp else 2), 6)


# The thread that stores may do so before the other, whose result nobody needs, has read.
@pytest.mark.runs_kernels(sanitize=False)
def test_programs_that_run(tmp_path):
    one = profiled(tmp_path, "one", steps=2, input_output_aliases={0: 0})
    two = profiled(tmp_path, "two", steps=3)
    x = jnp.arange(128.0)
    result = jax.jit(lambda x: two(one(x)))(x)
    batched = jax.vmap(two)(jnp.ones((4, 128)))
    finish(result, batched)
    np.testing.assert_array_equal(result, 32 * np.arange(128.0))
    np.testing.assert_array_equal(batched, np.full((4, 128), 8.0))
    found = collections.Counter(
        (trace["otherData"]["kernel"], len(matched(trace))) for trace in read_all(tmp_path)
    )
    assert found == {("one", 2): 1, ("two", 2): 1, ("two", 8): 1}


@pytest.mark.runs_kernels
def test_events_are_dropped(tmp_path):
    x = jnp.arange(128.0)
    with pytest.warns(dump.ProfileWarning, match="raise profile_space"):
        result = profiled(tmp_path, steps=50, space=8)(x * 0)
        finish(result)
    np.testing.assert_array_equal(result, np.zeros(128))
    (trace,) = read_all(tmp_path)
    assert trace["otherData"]["lost events"] == 2 * (2 * 52 - 16)
    assert all(len(regions) == 9 for regions in matched(trace).values())


@pytest.mark.runs_kernels
def test_a_profiled_kernel_from_the_disk_cache(tmp_path):
    x = jnp.arange(128.0)
    with config.scoped(cache_dir=tmp_path / "cache"):
        for _ in range(2):
            clear_memory()
            jax.clear_caches()
            finish(profiled(tmp_path, steps=2)(x))
    assert len(read_all(tmp_path)) == 2
    for trace in read_all(tmp_path):
        check_regions(trace, 2, 2)
