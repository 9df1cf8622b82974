"""Fences, and what the observer hears of memory's order."""

from __future__ import annotations

import numpy as np
import pytest
from simulator_support import run_body

from pallasite_simulator.engine.observer import Observer
from pallasite_simulator.errors import PtxError, SimulationError

REGISTERS = ".reg .b32 %r<10>; .reg .b64 %rd<10>; .reg .pred %p<4>; .reg .b128 %q<3>;\n"


class Listener(Observer):
    """Writes down what it hears."""

    def __init__(self):
        self.heard = []

    def access(self, access):
        self.heard.append(
            (access.kind, access.space, access.lanes.tolist(), access.size, access.writes)
        )

    def fence(self, lanes, semantics, scope):
        self.heard.append(("fence", lanes.tolist(), semantics, scope))

    def proxy_fence(self, lanes, kind):
        self.heard.append(("proxy", lanes.tolist(), kind))

    def acquire(self, lanes, key, scope="cta"):
        self.heard.append(("acquire", lanes.tolist(), key, scope))

    def release(self, lanes, key, scope="cta"):
        self.heard.append(("release", lanes.tolist(), key, scope))


def heard(body, *arrays, block=2, **options):
    """Events of the kernel's wave; parameters are not in it."""
    listener = Listener()
    run_body(REGISTERS + body, *arrays, block=block, make_observer=lambda: listener, **options)
    return listener.heard


ALL = [0, 1]


@pytest.mark.parametrize(
    ("code", "events"),
    [
        ("fence.sc.cta;", [("fence", ALL, "sc", "cta")]),
        ("fence.acq_rel.gpu;", [("fence", ALL, "acq_rel", "gpu")]),
        ("fence.acquire.cluster;", [("fence", ALL, "acquire", "cluster")]),
        ("fence.release.sys;", [("fence", ALL, "release", "sys")]),
        ("fence.gpu;", [("fence", ALL, "acq_rel", "gpu")]),
        (
            "fence.acquire.sync_restrict::shared::cluster.cluster;",
            [("fence", ALL, "acquire", "cluster")],
        ),
        (
            "fence.release.sync_restrict::shared::cta.cluster;",
            [("fence", ALL, "release", "cluster")],
        ),
        ("fence.mbarrier_init.release.cluster;", [("fence", ALL, "mbarrier_init", "cluster")]),
        ("membar.cta;", [("fence", ALL, "sc", "cta")]),
        ("membar.gl;", [("fence", ALL, "sc", "gpu")]),
        ("membar.sys;", [("fence", ALL, "sc", "sys")]),
        ("membar.proxy.alias;", [("proxy", ALL, "alias")]),
        ("fence.proxy.alias;", [("proxy", ALL, "alias")]),
        ("fence.proxy.async;", [("proxy", ALL, "async")]),
        ("fence.proxy.async.global;", [("proxy", ALL, "async.global")]),
        ("fence.proxy.async.shared::cta;", [("proxy", ALL, "async.shared::cta")]),
        ("fence.proxy.async.shared::cluster;", [("proxy", ALL, "async.shared::cluster")]),
        (
            "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;",
            [("fence", ALL, "acquire", "cluster"), ("proxy", ALL, "async::generic")],
        ),
        (
            "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;",
            [("fence", ALL, "release", "cluster"), ("proxy", ALL, "async::generic")],
        ),
        (
            "fence.proxy.tensormap::generic.release.gpu;",
            [("fence", ALL, "release", "gpu"), ("proxy", ALL, "tensormap::generic")],
        ),
        (
            "fence.proxy.tensormap::generic.acquire.sys [%array0+64], 128;",
            [("fence", ALL, "acquire", "sys"), ("proxy", ALL, "tensormap::generic")],
        ),
    ],
)
def test_the_observer_hears_of_fences(code, events):
    assert heard(code, np.zeros(192, np.uint8)) == events


def test_fences_of_some_lanes():
    code = "setp.eq.u32 %p1, %thread, 1; @%p1 fence.sc.gpu;"
    assert heard(code) == [("fence", [1], "sc", "gpu")]


def test_fences_without_an_observer():
    run_body("fence.sc.sys; fence.proxy.async; membar.gl;", block=2)


@pytest.mark.parametrize(
    "code",
    [
        "fence.cta.sc;",
        "fence.sc;",
        "fence.relaxed.gpu;",
        "fence.sc.gl;",
        "fence.acquire.sync_restrict::shared::cta.cluster;",
        "fence.acquire.sync_restrict::shared::cluster.gpu;",
        "fence.mbarrier_init.release.gpu;",
        "fence.mbarrier_init.acquire.cluster;",
        "fence.proxy;",
        "fence.proxy.texture;",
        "fence.proxy.async.local;",
        "fence.proxy.tensormap::generic;",
        "fence.proxy.tensormap::generic.release;",
        "fence.proxy.tensormap::generic.release.gl;",
        "fence.proxy.tensormap::generic.acquire.gpu [%array0], 64;",
        "fence.proxy.tensormap::generic.acquire.gpu;",
        "fence.proxy.async::generic.acquire.cluster;",
        "membar.gpu;",
        "membar;",
        "membar.proxy.async;",
        "fence.sc.gpu %r1;",
        "membar.gl %r1;",
    ],
)
def test_unknown_fences(code):
    with pytest.raises(PtxError, match=r"PTX line \d+, column \d+: .*, in: (fence|membar)"):
        run_body(REGISTERS + code, np.zeros(1, np.uint64))


def test_the_tensor_map_of_a_fence_must_be_there():
    code = "fence.proxy.tensormap::generic.acquire.gpu [%array0], 128;"
    with pytest.raises(SimulationError, match=r"out of bounds.*\n.*128 bytes at global address"):
        run_body(code, np.zeros(120, np.uint8))
    with pytest.raises(SimulationError, match=r"misaligned(.|\n)*multiple of 64"):
        run_body(code.replace("array0", "array0+16"), np.zeros(256, np.uint8))


# Orders of accesses -------------------------------------------------------------------------------

PLACE = ("location", "global", 256)


def test_weak_and_strong_accesses():
    code = """
        ld.global.b32 %r1, [%array0];
        ld.volatile.global.b32 %r1, [%array0];
        ld.relaxed.gpu.global.v2.b32 {%r1, %r2}, [%array0];
        st.global.b32 [%array0], 1;
        st.volatile.global.b64 [%array0], 1;
        st.relaxed.cta.global.b8 [%array0], 1;
        atom.global.add.u32 %r1, [%array0], 1;
        red.global.add.u32 [%array0], 1;
        atom.global.cas.b128 %q1, [%array0], %q1, %q2;
        prefetch.global.L2 [%array0];
    """
    assert heard(code, np.zeros(4, np.uint32)) == [
        ("read", "global", ALL, 4, False),
        ("atomic", "global", ALL, 4, False),
        ("atomic", "global", ALL, 8, False),
        ("write", "global", ALL, 4, True),
        ("atomic", "global", ALL, 8, True),
        ("atomic", "global", ALL, 1, True),
        ("atomic", "global", ALL, 4, True),
        ("atomic", "global", ALL, 4, True),
        ("atomic", "global", ALL, 16, True),
    ]


def orders(code, *arrays, **options):
    return [one for one in heard(code, *arrays, **options) if one[0] in ("acquire", "release")]


def test_acquire_and_release():
    code = """
        ld.acquire.gpu.global.b32 %r1, [%array0];
        st.release.sys.global.b32 [%array0], 1;
        red.release.cluster.global.add.u32 [%array0], 1;
        atom.acquire.cta.global.add.u32 %r1, [%array0], 1;
        atom.release.gpu.global.exch.b32 %r1, [%array0], 1;
    """
    assert orders(code, np.zeros(1, np.uint32)) == [
        ("acquire", ALL, PLACE, "gpu"),
        ("release", ALL, PLACE, "sys"),
        ("release", ALL, PLACE, "cluster"),
        ("acquire", ALL, PLACE, "cta"),
        ("release", ALL, PLACE, "gpu"),
    ]


def test_lanes_at_one_place_see_what_those_before_released():
    code = "atom.acq_rel.gpu.global.add.u32 %r1, [%array0], 1;"
    assert orders(code, np.zeros(1, np.uint32)) == [
        (what, [lane], PLACE, "gpu") for lane in ALL for what in ("acquire", "release")
    ]


def test_places_have_keys_of_their_own():
    code = """
        and.b32 %r1, %thread, 1;
        mul.wide.u32 %rd1, %r1, 4;
        add.s64 %rd1, %array0, %rd1;
        ld.acquire.gpu.b32 %r2, [%rd1];
        .shared .b32 there;
        mov.u32 %r3, there;
        cvt.u64.u32 %rd2, %r3;
        cvta.shared.u64 %rd2, %rd2;
        setp.eq.u32 %p1, %thread, 2;
        selp.b64 %rd3, %rd2, %rd1, %p1;
        st.release.cta.b32 [%rd3], 1;
    """
    second = ("location", "global", 260)
    found = orders(code, np.zeros(2, np.uint32), block=4)
    assert found[:2] == [("acquire", [0, 2], PLACE, "gpu"), ("acquire", [1, 3], second, "gpu")]
    assert sorted(found[2:], key=str) == [
        ("release", [0], PLACE, "cta"),
        ("release", [1, 3], second, "cta"),
        ("release", [2], ("location", "shared", 1024), "cta"),
    ]


def test_a_swap_that_fails_releases_nothing():
    code = "atom.acq_rel.gpu.global.cas.b32 %r1, [%array0], 0, 1;"
    assert orders(code, np.zeros(1, np.uint32), block=3) == [
        ("acquire", [0], PLACE, "gpu"),
        ("release", [0], PLACE, "gpu"),
        ("acquire", [1, 2], PLACE, "gpu"),
    ]
