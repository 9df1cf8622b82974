"""Profiles: reading the words, Chrome traces, files."""

from __future__ import annotations

import dataclasses
import json
import threading

import jax
import numpy as np
import pytest
from profile_support import END, NESTED, PROFILE, matched, read_all, slot
from sample_kernels import shape, specs

from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError
from pallasite.runtime import compile_kernel
from pallasite.runtime.serialization import dumps, loads
from pallasite_std.profiler import dump
from pallasite_std.profiler.profile import (
    chrome_trace,
    cycles_per_nanosecond,
    decode,
    profile_of,
    recordings,
)


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
    (hidden,) = kernel.launch.hidden_results
    arguments = json.dumps({**json.loads(hidden.arguments), "directory": "sponge"})
    hidden = dataclasses.replace(hidden, arguments=arguments)
    launch = dataclasses.replace(kernel.launch, hidden_results=(hidden,))
    monkeypatch.setenv("TEST_UNDECLARED_OUTPUTS_DIR", str(tmp_path / "undeclared"))
    path = dump.write_trace(WORDS, dataclasses.replace(kernel, launch=launch))
    assert path.parent == tmp_path / "undeclared"


def test_disk_cache_keeps_the_profile(kernel):
    again = loads(dumps(kernel))
    assert again == kernel
    assert profile_of(again).names == ("outer", "inner")
    assert decode(WORDS, profile_of(again)) == decode(WORDS, profile_of(kernel))
