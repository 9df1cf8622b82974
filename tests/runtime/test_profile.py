"""Profiles: reading the words, Chrome traces, files, and programs that have profiled kernels."""

from __future__ import annotations

import collections
import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec
from sample_kernels import shape, specs

import pallasite
from pallasite import config, plugins
from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError, UnsupportedError
from pallasite.launch import Profile
from pallasite.runtime import clear_memory, compile_kernel, run_on_host
from pallasite.runtime import profile_dump as dump
from pallasite.runtime.profile import chrome_trace, cycles_per_nanosecond, decode, recordings
from pallasite.runtime.serialization import dumps, loads

END = 1 << 31
PROFILE = Profile(0, ("outer", "inner"), "warpgroup", recorders=2, events=4, directory="unused")


def slot(*events, start=1000, clock=0, length=1000, cycles=None, sm=3, room=4, count=None):
    """The words of one recorder; events are pairs of a word and cycles since the start."""
    end = start + length
    last = clock + (length if cycles is None else cycles)
    words = [len(events) if count is None else count, sm, start, start >> 32]
    words += [clock, last, end, end >> 32]
    for word, after in events[:room]:
        words += [word, clock + after]
    words += [0xDEADBEEF] * (8 + 2 * room - len(words))
    return np.array([word % 2**32 for word in words], np.uint32)


NESTED = ((0, 10), (1, 20), (1 | END, 30), (END, 40))


def times(events):
    return [(event.name, "B" if event.begins else "E", event.time) for event in events]


def test_nested_regions():
    events = decode(np.concatenate([slot(*NESTED), slot(sm=3)]), PROFILE)
    assert times(events) == [
        ("outer", "B", 10),
        ("inner", "B", 20),
        ("inner", "E", 30),
        ("outer", "E", 40),
    ]
    assert {(e.block, e.recorder, e.multiprocessor) for e in events} == {(0, 0, 3)}


def test_blocks_and_recorders_share_one_time():
    start = 5 * 2**32 - 100  # The low half of the timer wraps between the slots.
    words = [
        slot((0, 10), (END, 20), start=start + 300, sm=1),
        slot(start=start + 200, sm=1),
        slot(start=start, sm=7),
        slot((1, 5), (1 | END, 6), start=start + 150, sm=7),
    ]
    read = recordings(np.concatenate(words), PROFILE)
    assert [(r.block, r.recorder, r.multiprocessor) for r in read] == [
        (0, 0, 1),
        (0, 1, 1),
        (1, 0, 7),
        (1, 1, 7),
    ]
    assert [r.start for r in read] == [300, 200, 0, 150]
    assert times(read[0].events) == [("outer", "B", 310), ("outer", "E", 320)]
    assert times(read[3].events) == [("inner", "B", 155), ("inner", "E", 156)]


@pytest.mark.parametrize("clock", [2**32 - 1, 2**32 - 15, 2**32 - 25, 2**31 - 20])
def test_the_clock_wraps(clock):
    events = decode(np.concatenate([slot(*NESTED, clock=clock), slot(clock=5)]), PROFILE)
    assert [event.time for event in events] == [10, 20, 30, 40]


def test_the_clock_wraps_several_times():
    far = 2**31 + 7
    pairs = tuple((word, (n + 1) * far) for n, (word, _) in enumerate(NESTED))
    words = np.concatenate([slot(*pairs, length=5 * far), slot(length=5 * far, cycles=0)])
    # The second recorder has no events, so its clock cannot be followed.
    words[len(words) // 2 :][4:8] = words[len(words) // 2 :][[4, 4, 2, 3]]
    assert [event.time for event in decode(words, PROFILE)] == [far, 2 * far, 3 * far, 4 * far]


def test_cycles_become_nanoseconds():
    words = np.concatenate([slot(*NESTED, length=1000, cycles=2000), slot(length=500, cycles=1000)])
    assert [event.time for event in decode(words, PROFILE)] == [5, 10, 15, 20]
    assert cycles_per_nanosecond([1900, 100], [1000, 0]) == 2.0
    assert cycles_per_nanosecond([300], [0]) == 1.0
    assert cycles_per_nanosecond([300_000], [1]) == 1.0


def test_events_beyond_the_space():
    words = np.concatenate([slot(*NESTED, count=9), slot(*NESTED[:2])])
    first, second = recordings(words, PROFILE)
    assert (len(first.events), first.lost) == (4, 5)
    assert (len(second.events), second.lost) == (2, 0)
    assert chrome_trace(words, PROFILE)["otherData"]["lost events"] == 5


def test_damaged_events_have_a_name():
    words = np.concatenate([slot((77, 10)), slot()])
    assert decode(words, PROFILE)[0].name == "damaged event 0x4d"


def test_words_of_another_profile():
    with pytest.raises(InvalidValueError, match="not the words of this profile"):
        decode(np.zeros(31, np.uint32), PROFILE)
    with pytest.raises(InvalidValueError, match="not the words of this profile"):
        decode(np.zeros(32, np.int32), PROFILE)
    assert decode(np.zeros(0, np.uint32), PROFILE) == []


# Traces -------------------------------------------------------------------------------------------


def matched(trace):
    """The regions of each thread of a trace as (name, begin, end); fails unless all are matched."""
    open_ = collections.defaultdict(list)
    found = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        where = event["pid"], event["tid"]
        if event["ph"] == "B":
            open_[where].append((event["name"], event["ts"], len(found[where])))
            found[where].append(None)
        elif event["ph"] == "E":
            name, begin, place = open_[where].pop()
            assert name == event["name"] and begin <= event["ts"]
            found[where][place] = (name, begin, event["ts"])
    assert not any(open_.values())
    return dict(found)


def test_chrome_trace():
    words = np.concatenate([slot(*NESTED), slot(), slot(sm=5), slot(*NESTED, sm=5)])
    trace = chrome_trace(words, PROFILE, kernel="k", grid=(1, 2, 1), block=(256, 1, 1))
    assert matched(trace) == {
        (4, 1): [("outer", 0.01, 0.04), ("inner", 0.02, 0.03)],
        (6, 4): [("outer", 0.01, 0.04), ("inner", 0.02, 0.03)],
    }
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"
    }
    assert names[4, 0] == "SM 3" and names[6, 0] == "SM 5"
    assert names[4, 2] == "block (0, 0, 0) warpgroup 1"
    assert names[6, 4] == "block (0, 1, 0) warpgroup 1"
    assert trace["otherData"]["kernel"] == "k" and trace["otherData"]["grid"] == (1, 2, 1)
    json.dumps(trace)


def test_regions_whose_end_was_dropped_end_with_the_recording():
    profile = dataclasses.replace(PROFILE, events=3)
    words = np.concatenate([slot(*NESTED, room=3), slot(room=3)])
    trace = chrome_trace(words, profile)
    assert matched(trace)[4, 1] == [("outer", 0.01, 1.0), ("inner", 0.02, 0.03)]
    assert [
        e["name"] for e in trace["traceEvents"] if e.get("args") == {"end": "not recorded"}
    ] == ["outer"]


# Files --------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path):
    """A compiled kernel of two warpgroups with a profile."""

    def body(x, o):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            o[...] = x[...] * 2

    params = plgpu.CompilerParams(profile_space=2, profile_dir=str(tmp_path / "deep" / "er"))
    fn = plgpu.kernel(
        body, out_type=shape(128), num_threads=2, thread_name="t", compiler_params=params
    )
    (spec,) = specs(fn, shape(128))
    return compile_kernel(spec, "sm_90")


def read_all(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*-trace.json"))]


WORDS = np.concatenate([slot(*NESTED), slot(*NESTED)])


def test_file(kernel, tmp_path):
    path = dump.write_trace(WORDS, kernel)
    assert path.parent == tmp_path / "deep" / "er"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    name, nanoseconds, counter, rest = path.name.rsplit("-", 3)
    assert (name, rest) == (kernel.name, "trace.json")
    assert nanoseconds.isdigit() and counter.isdigit()
    (trace,) = read_all(path.parent)
    assert trace["otherData"]["grid"] == [1, 1, 1] and trace["otherData"]["block"] == [256, 1, 1]
    assert len(matched(trace)) == 2


@pytest.mark.parametrize("links", [True, False])
def test_no_trace_is_lost_on_collision(kernel, monkeypatch, links):
    monkeypatch.setattr(dump.time, "time_ns", lambda: 42)
    if not links:

        def refuse(*args):
            raise PermissionError("no links here")

        monkeypatch.setattr(dump.os, "link", refuse)
    first = dump.write_trace(WORDS, kernel)
    count = int(first.name.split("-")[-2])
    taken = first.with_name(f"{kernel.name}-42-{count + 1}-trace.json")
    taken.write_text("mine")
    second = dump.write_trace(WORDS, kernel)
    assert taken.read_text() == "mine"
    assert second.name == f"{kernel.name}-42-{count + 2}-trace.json"
    assert len(list(first.parent.iterdir())) == 3


def test_many_writers(kernel, tmp_path):
    threads = [
        threading.Thread(target=lambda: [dump.write_trace(WORDS, kernel) for _ in range(10)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_all(tmp_path / "deep" / "er")) == 80


def test_a_folder_that_cannot_be_written(kernel, tmp_path):
    (tmp_path / "deep").write_text("a file")
    with pytest.warns(dump.ProfileWarning, match="cannot write the profile"):
        assert dump.write_trace(WORDS, kernel) is None


def test_lost_events_are_reported(kernel):
    words = np.concatenate([slot(*NESTED, count=9), slot(*NESTED)])
    with pytest.warns(dump.ProfileWarning, match="5 more profiler events.*raise profile_space"):
        assert dump.write_trace(words, kernel) is not None


def test_folder_of_test_outputs(kernel, tmp_path, monkeypatch):
    profile = dataclasses.replace(kernel.launch.profile, directory="sponge")
    launch = dataclasses.replace(kernel.launch, profile=profile)
    monkeypatch.setenv("TEST_UNDECLARED_OUTPUTS_DIR", str(tmp_path / "undeclared"))
    path = dump.write_trace(WORDS, dataclasses.replace(kernel, launch=launch))
    assert path.parent == tmp_path / "undeclared"


def test_disk_cache_keeps_the_profile(kernel):
    again = loads(dumps(kernel))
    assert again == kernel
    assert again.launch.profile.names == ("outer", "inner")
    assert decode(WORDS, again.launch.profile) == decode(WORDS, kernel.launch.profile)


# Programs -----------------------------------------------------------------------------------------


class _Fake:
    """An executor that copies its inputs to its outputs and records two regions."""

    def execute(self, compiled, arrays):
        profile = compiled.launch.profile
        outputs = [np.array(arrays[0]) for _ in compiled.launch.outputs]
        if profile is not None:
            count = compiled.launch.outputs[profile.output].shape[0] // profile.words
            words = [slot(*NESTED, room=profile.events, sm=n) for n in range(count)]
            outputs[profile.output] = np.concatenate(words)
        return outputs

    def run(self, compiled, *operands):
        return run_on_host(self.execute, compiled, *operands)

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
    with pytest.raises(UnsupportedError, match="'profiled' is profiled, in a program for another"):
        traced.lower(lowering_platforms=("cuda",))


# On a GPU -----------------------------------------------------------------------------------------


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


@pytest.mark.gpu
@pytest.mark.parametrize("per_warp", [False, True])
def test_trace_from_the_gpu(tmp_path, per_warp):
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


@pytest.mark.gpu
def test_programs_on_the_gpu(tmp_path):
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


@pytest.mark.gpu
def test_events_are_dropped_on_the_gpu(tmp_path):
    x = jnp.arange(128.0)
    with pytest.warns(dump.ProfileWarning, match="raise profile_space"):
        result = profiled(tmp_path, steps=50, space=8)(x * 0)
        finish(result)
    np.testing.assert_array_equal(result, np.zeros(128))
    (trace,) = read_all(tmp_path)
    assert trace["otherData"]["lost events"] == 2 * (2 * 52 - 16)
    assert all(len(regions) == 9 for regions in matched(trace).values())


@pytest.mark.gpu
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
