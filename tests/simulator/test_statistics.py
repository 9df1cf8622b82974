"""Statistics: kinds of instructions, traffic of memory against a slow count, the roofline."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from simulator_support import body_ptx, run_body

from pallasite_simulator import run_ptx
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.ptx.parser import parse
from pallasite_simulator.statistics import chips
from pallasite_simulator.statistics.kinds import kind_of, tensor_work
from pallasite_simulator.statistics.roofline import estimate
from pallasite_simulator.statistics.text import duration
from pallasite_simulator.statistics.traffic import bank_passes


def instructions(*lines: str):
    """Parses instructions of a kernel that declares plenty of registers."""
    registers = ".reg .b32 %r<99>; .reg .b64 %d<99>; .reg .b16 %h<99>; .reg .pred %p<9>;"
    text = ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k() {\n"
    module = parse(text + registers + "\n".join(lines) + "\nret;\n}\n")
    return [one for one in module.functions[0].body if one.opcode != "ret"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("add.s32 %r1, %r2, %r3;", "integer"),
        ("mad.wide.u32 %d1, %r2, %r3, %d2;", "integer"),
        ("lop3.b32 %r1, %r2, %r3, %r4, 0x3c;", "integer"),
        ("shf.l.wrap.b32 %r1, %r2, %r3, 5;", "integer"),
        ("fma.rn.f32 %r1, %r2, %r3, %r4;", "float32"),
        ("add.rn.bf16x2 %r1, %r2, %r3;", "float16"),
        ("mul.f64 %d1, %d2, %d3;", "float64"),
        ("ex2.approx.ftz.f32 %r1, %r2;", "special function"),
        ("div.approx.f32 %r1, %r2, %r3;", "special function"),
        ("div.rn.f32 %r1, %r2, %r3;", "float32"),
        ("cvt.rn.f16.f32 %h1, %r2;", "conversion"),
        ("setp.lt.s32 %p1, %r2, %r3;", "comparison and selection"),
        ("selp.b32 %r1, %r2, %r3, %p1;", "comparison and selection"),
        ("mov.b32 %r1, %r2;", "move"),
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d1];", "load global"),
        ("ld.shared::cluster.b32 %r1, [%r2];", "load shared"),
        ("ld.b32 %r1, [%d2];", "load generic"),
        ("st.shared.b32 [%r1], %r2;", "store shared"),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];", "load shared"),
        ("red.global.add.u32 [%d1], %r2;", "atomic global"),
        ("cp.async.ca.shared.global [%r1], [%d1], 16;", "asynchronous copy"),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;", "warp exchange"),
        ("bar.sync 0;", "barrier and fence"),
        ("mbarrier.init.shared.b64 [%r1], 1;", "barrier and fence"),
        ("wgmma.fence.sync.aligned;", "barrier and fence"),
        ("nanosleep.u32 20;", "other"),
        ("exit;", "control"),
    ],
)
def test_kinds(text, kind):
    (instruction,) = instructions(text)
    assert kind_of(instruction) == kind


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", ("f16", 2 * 16 * 8 * 16)),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", ("tf32", 2 * 16 * 8 * 8)),
        ("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32", ("i8", 2 * 16 * 8 * 32)),
        ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", ("f64", 2 * 8 * 8 * 4)),
        ("mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32", ("f16", 16 * 8 * 32)),
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16", ("f16", 2 * 64 * 128 * 16 // 4)),
        ("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2", ("f8", 2 * 64 * 64 * 32 // 4)),
        ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32", ("f16", 2 * 16 * 16 * 16)),
        ("wmma.load.a.sync.aligned.row.m16n16k16.f16", None),
        ("wgmma.commit_group.sync.aligned", None),
        ("fma.rn.f32", None),
    ],
)
def test_work_of_tensor_cores(name, work):
    opcode, *modifiers = name.split(".")
    (instruction,) = instructions("nanosleep.u32 20;")
    named = dataclasses.replace(instruction, opcode=opcode, modifiers=tuple(modifiers))
    assert tensor_work(named) == work


# Memory -------------------------------------------------------------------------------------------


def slow_passes(offsets, size):
    """The passes of one warp, by the rules: groups of lanes in order, each bank once in a pass."""
    lanes = 32 // max(1, min(size, 16) // 4)
    passes, ideal = 0, 0
    for start in range(0, 32, lanes):
        words = {
            offset // 4 + step
            for offset in offsets[start : start + lanes]
            if offset >= 0
            for step in range(max(1, size // 4))
        }
        banks = [word % 32 for word in words]
        passes += max((banks.count(bank) for bank in set(banks)), default=0)
        ideal += -(-len(words) // 32)
    return passes, ideal


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_passes_agree_with_a_slow_count(size):
    generator = np.random.default_rng(size)
    rows = generator.integers(0, 64, (200, 32)) * size
    rows[:50] = np.arange(32) * size  # in order
    rows[50:60] = 128 * np.arange(32) * max(1, size // 4)  # all in one bank
    rows[60:70] = 4096  # all the same
    rows[generator.random(rows.shape) < 0.2] = -1
    rows[70] = -1
    found = np.stack(bank_passes(rows, size), axis=1)
    np.testing.assert_array_equal(found, [slow_passes(row.tolist(), size) for row in rows])


STORE = """
.reg .b32 %place;
mul.lo.u32 %place, %prologue2, {stride};
add.u32 %place, %place, dynamic;
st.shared.b32 [%place], %thread;
"""


@pytest.mark.parametrize(
    ("stride", "factor"), [(4, 1), (8, 2), (32, 8), (128, 32), (132, 1), (0, 1)]
)
@pytest.mark.parametrize("blocks", [1, 3])
def test_bank_conflicts_of_strides(stride, factor, blocks):
    simulation = run_ptx(
        body_ptx(STORE.format(stride=stride), 0, shared=1),
        grid=blocks,
        block=64,
        shared_memory_bytes=65536,
    )
    statistics = simulation.statistics
    (line,) = statistics.accesses
    assert (line.space, line.warps, line.ideal) == ("shared", 2 * blocks, 2 * blocks)
    assert line.units == statistics.shared_passes == 2 * blocks * factor
    assert statistics.bank_conflicts == 2 * blocks * (factor - 1)
    assert statistics.bytes_moved["shared", "write"] == 4 * 64 * blocks
    assert line.instruction.startswith("st.shared.b32")


LOAD = """
.reg .b64 %at; .reg .b32 %x;
mul.wide.u32 %at, %thread, {stride};
add.u64 %at, %at, %array0;
ld.global.b32 %x, [%at];
add.u64 %at, %array1, %offset4;
st.global.b32 [%at], %x;
"""


@pytest.mark.parametrize(("stride", "sectors"), [(4, 4), (8, 8), (32, 32), (64, 32), (0, 1)])
def test_sectors_of_global_memory(stride, sectors):
    x, y = np.arange(1 << 14, dtype=np.int32), np.zeros(256, np.int32)
    simulation = run_ptx(body_ptx(LOAD.format(stride=stride), 2), [x, y], grid=2, block=128)
    np.testing.assert_array_equal(y, x[np.arange(256) * stride // 4])
    statistics = simulation.statistics
    load, store = sorted(statistics.accesses, key=lambda line: line.instruction[:2])
    assert (load.units, load.ideal) == (8 * sectors, 8 * min(sectors, 4))
    assert (store.units, store.ideal) == (8 * 4, 8 * 4)
    assert statistics.memory_read == 32 * len(set(np.arange(256) * stride // 32))
    assert statistics.memory_written == 1024
    assert statistics.bytes_moved["global", "read"] == statistics.bytes_moved["global", "write"]


def test_lanes_that_do_not_take_part():
    code = """
    .reg .pred %odd; .reg .b32 %place;
    and.b32 %place, %thread, 1;
    setp.ne.b32 %odd, %place, 0;
    mul.lo.u32 %place, %thread, 4;
    add.u32 %place, %place, dynamic;
    @%odd st.shared.b32 [%place], %thread;
    """
    simulation = run_ptx(body_ptx(code, 0, shared=1), block=128, shared_memory_bytes=512)
    (line,) = simulation.statistics.accesses
    assert (line.warps, line.units, line.ideal, line.bytes) == (4, 4, 4, 256)


def test_counts_without_statistics_cost_nothing_of_memory():
    execution = run_body(STORE.format(stride=4), shared=65536)
    assert execution.accesses == {} and execution.sectors is None
    assert execution.issued.sum() > 0


# Roofline -----------------------------------------------------------------------------------------


def simulate(code, **options):
    return run_ptx(body_ptx(code, 0, shared=1), block=128, shared_memory_bytes=65536, **options)


def test_instructions_by_kind():
    statistics = simulate(STORE.format(stride=4), grid=2).statistics
    # The prologue of the tests' kernels, then the code, then ret: each by 8 warps.
    assert statistics.kinds == {
        "integer": 8 * 5,
        "move": 8 * 3,
        "store shared": 8,
        "control": 8,
    }
    assert statistics.warp_instructions == 8 * 10
    assert list(statistics.kinds) == ["integer", "move", "store shared", "control"]


def test_what_binds():
    conflicts = simulate(STORE.format(stride=128)).statistics.estimate
    assert conflicts.binding == "shared memory"
    chip = conflicts.chip
    assert conflicts.seconds == pytest.approx(4 * 32 / chip.clock)
    special = simulate(
        ".reg .f32 %f; mov.f32 %f, 0f3F800000;" + "ex2.approx.f32 %f, %f;" * 50
    ).statistics.estimate
    assert special.binding == "special arithmetic"
    assert special.seconds == pytest.approx(4 * 50 * 32 / (16 * chip.clock))
    assert special.utilization["special arithmetic"] == 1.0
    assert 0 < special.utilization["instruction issue"] < 0.5


def test_blocks_that_were_left_out_are_extrapolated():
    code = STORE.format(stride=128)
    whole = simulate(code, grid=64).statistics
    part = simulate(code, grid=64, blocks=range(16)).statistics
    assert part.blocks == 16 and part.grid_blocks == 64
    assert part.warp_instructions * 4 == whole.warp_instructions
    assert part.estimate.seconds == pytest.approx(whole.estimate.seconds)
    assert "16 of 64 blocks" in str(part)


def test_chips():
    for chip in chips.CHIPS.values():
        assert chip.tensor_rates["f16"] > 1e14 and chip.memory_bandwidth > 1e12
        # Four tensor cores do a power of two of multiplications and additions in a clock; the
        # clock at which peak rates are given is somewhat lower than that of the other units.
        per_clock = chip.tensor_rates["f16"] / (chip.multiprocessors * chip.clock)
        assert min(abs(per_clock / 2**n - 1) for n in range(9, 14)) < 0.1, chip.name
    assert chips.chip_for((9, 0)).name == "H100 SXM"
    assert chips.chip_for((1, 0)) is None
    with pytest.raises(SimulationError, match="no chip named 'H1'"):
        chips.find_chip("H1")


def test_another_chip(monkeypatch):
    monkeypatch.setattr(chips, "CHIPS", dict(chips.CHIPS))
    half = dataclasses.replace(chips.find_chip("H200 SXM"), name="half", clock=0.99e9)
    chips.add_chip(half)
    code = STORE.format(stride=128)
    fast, slow = simulate(code).statistics, simulate(code, chip="half").statistics
    assert slow.estimate.seconds == pytest.approx(2 * fast.estimate.seconds)
    assert slow.estimate.chip is half
    assert estimate(fast, half) == slow.estimate
    monkeypatch.setenv("PALLASITE_SIMULATOR_CHIP", "half")
    assert simulate(code).statistics.estimate == slow.estimate


def test_no_figures_of_a_chip():
    statistics = run_ptx(body_ptx("", 0, target="sm_80"), block=32).statistics
    assert statistics.estimate is None
    assert statistics.target == "sm_80"
    assert statistics.as_json()["estimate"] is None


def test_text_and_json():
    statistics = simulate(STORE.format(stride=8), grid=4).statistics
    text = " ".join(str(statistics).split())
    for part in (
        "kernel kernel for sm_90a: 4 blocks, 160 warp instructions",
        "store shared 16",
        "bank conflicts",
        "all passes 32 2.00 times the least",
        "2.00 times st.shared.b32 [%place], %thread",
        "on H100 SXM with 4 of 132 multiprocessors busy, bound by",
    ):
        assert part in text
    data = json.loads(json.dumps(statistics.as_json()))
    assert data["instructions"]["store shared"] == 16
    assert data["bytes"]["shared"] == {"write": 2048}
    assert data["accesses"][0]["passes"] == 32
    assert data["estimate"]["utilization"][data["estimate"]["binding"]] == 1.0


def test_durations():
    assert [duration(s) for s in (2.0, 1.5e-3, 12.34e-6, 5e-9)] == [
        "2 s",
        "1.5 ms",
        "12.3 us",
        "5 ns",
    ]
