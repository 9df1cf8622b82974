"""Instructions of the lanes of a warp, against references that go lane by lane."""

from __future__ import annotations

import functools
import operator
import random

import numpy as np
import pytest
from cubin import assemble
from form_support import bind, ptx_of
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_support import run_body

from pallasite_simulator.engine.observer import Observer
from pallasite_simulator.errors import DeadlockError, PtxError, SimulationError

LANES = 96
"""Three warps."""

FULL = 0xFFFFFFFF

PROLOGUE = """
    .reg .b32 %a, %b, %c, %d, %e, %m, %lane; .reg .b64 %at, %w; .reg .pred %p, %q, %here;
    add.s64 %at, %array0, %offset4; ld.global.b32 %a, [%at];
    add.s64 %at, %array1, %offset4; ld.global.b32 %b, [%at];
    add.s64 %at, %array2, %offset4; ld.global.b32 %m, [%at];
    mov.u32 %lane, %laneid;
    mov.b32 %d, 0xdead; mov.b32 %e, 0xbeef;
"""
EPILOGUE = """
    add.s64 %at, %array3, %offset4; st.global.b32 [%at], %d;
    add.s64 %at, %array4, %offset4; st.global.b32 [%at], %e;
"""
UNTOUCHED = (0xDEAD, 0xBEEF)


def run_warps(code, a=None, b=None, masks=None, **options):
    """Runs code that sets ``%d`` and ``%e`` from ``%a``, ``%b`` and the mask ``%m``, in the lanes
    whose mask is not zero; the others skip it.

    Returns:
      ``(d, e)`` of each lane.
    """
    arrays = [
        np.zeros(LANES, np.uint32) if one is None else np.array(one, np.uint32) for one in (a, b)
    ]
    arrays.append(np.full(LANES, FULL if masks is None else 0, np.uint32))
    if masks is not None:
        arrays[-1][:] = masks
    results = [np.zeros(LANES, np.uint32) for _ in range(2)]
    body = f"{PROLOGUE} setp.eq.u32 %p, %m, 0; @%p bra DONE;\n{code}\nDONE:\n{EPILOGUE}"
    options.setdefault("block", LANES)
    run_body(body, *arrays, *results, **options)
    return list(zip(*[one.tolist() for one in results], strict=True))


def groups_of(masks):
    """For each lane with a mask: its members as lane numbers of the block."""
    return {
        lane: [lane // 32 * 32 + n for n in range(32) if mask >> n & 1]
        for lane, mask in enumerate(masks)
        if mask
    }


WORD = st.integers(0, FULL)


@st.composite
def partitions(draw):
    """Masks of 96 lanes: in each warp, lanes are split into groups, or left out (0)."""
    masks = []
    for _ in range(LANES // 32):
        kind = draw(st.sampled_from(["full", "one group", "groups"]))
        if kind == "full":
            masks += [FULL] * 32
            continue
        count = 2 if kind == "one group" else draw(st.integers(2, 6))
        random_groups = draw(st.randoms(use_true_random=False))
        # The last group does not take part.
        chosen = [random_groups.randrange(count) for _ in range(32)]
        bits = [sum(1 << n for n in range(32) if chosen[n] == one) for one in range(count)]
        bits[-1] = 0
        masks += [bits[one] for one in chosen]
    return masks


def few_values(seed, count):
    generator = random.Random(seed)
    return [generator.randrange(count) for _ in range(LANES)]


def words(seed):
    generator = random.Random(seed)
    return [generator.getrandbits(32) >> generator.randrange(32) for _ in range(LANES)]


some = settings(max_examples=30, deadline=None)


# Shuffles -----------------------------------------------------------------------------------------


def shuffled(mode, lane, b, c):
    """Which lane of the warp is read from, and the predicate: the text of the PTX ISA."""
    b_value, c_value, segment = b & 31, c & 31, c >> 8 & 31
    max_lane = (lane & segment) | (c_value & ~segment)
    min_lane = lane & segment
    if mode == "up":
        j = lane - b_value
        p = j >= max_lane
    elif mode == "down":
        j = lane + b_value
        p = j <= max_lane
    elif mode == "bfly":
        j = lane ^ b_value
        p = j <= max_lane
    else:
        j = min_lane | (b_value & ~segment)
        p = j <= max_lane
    return (j, True) if p else (lane, False)


MODES = ("up", "down", "bfly", "idx")


@pytest.mark.parametrize("mode", MODES)
@given(masks=partitions(), b=st.integers(0, 70), c=st.integers(0, 0x1FFF), seed=st.integers(0, 99))
@some
def test_shfl_by_constants(mode, masks, b, c, seed):
    check_shuffle(mode, masks, [b] * LANES, c, f"{b}", seed)


@pytest.mark.parametrize("mode", MODES)
@given(masks=partitions(), c=st.integers(0, 0x1FFF), seed=st.integers(0, 99))
@some
def test_shfl_by_registers(mode, masks, c, seed):
    check_shuffle(mode, masks, words(seed + 1), c, "%b", seed)


def check_shuffle(mode, masks, b, c, operand, seed):
    a = words(seed)
    code = f"shfl.sync.{mode}.b32 %d|%q, %a, {operand}, {c}, %m; selp.b32 %e, 1, 0, %q;"
    found = run_warps(code, a, b, masks)
    for lane, mask in enumerate(masks):
        if not mask:
            assert found[lane] == UNTOUCHED
            continue
        j, p = shuffled(mode, lane % 32, b[lane], c)
        # On an H200, lanes that execute the instruction are read from whatever their mask is, and
        # others give zero.
        origin = lane // 32 * 32 + j
        assert found[lane] == (a[origin] if masks[origin] else 0, p)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operand", ["3", "%b"])
def test_shfl_by_32_lanes_of_three_warps(mode, operand):
    """As many as a warp has, but not those of one."""
    groups = [range(11), range(5, 16), range(20, 30)]
    masks = [
        sum(1 << n for n in group) if lane in group else 0 for group in groups for lane in range(32)
    ]
    assert sum(map(bool, masks)) == 32
    check_shuffle(mode, masks, [3] * LANES, 0 if mode == "up" else 31, operand, 7)


def test_shfl_with_bounds_of_each_lane():
    a = words(3)
    bounds = [0x181F if n % 2 else 0x1C03 for n in range(LANES)]
    found = run_warps("shfl.sync.down.b32 %d, %a, 3, %b, -1;", a, bounds)
    for lane in range(LANES):
        j, _ = shuffled("down", lane % 32, 3, bounds[lane])
        assert found[lane][0] == a[lane // 32 * 32 + j]


def test_shfl_without_a_destination_for_the_predicate():
    a = words(4)
    found = run_warps("shfl.sync.bfly.b32 %d|_, %a, 1, 31, -1;", a)
    assert [d for d, _ in found] == [a[n ^ 1] for n in range(LANES)]


def test_shfl_into_the_register_that_is_read():
    a = words(5)
    found = run_warps("shfl.sync.bfly.b32 %a, %a, 1, 31, -1; mov.b32 %d, %a;", a)
    assert [d for d, _ in found] == [a[n ^ 1] for n in range(LANES)]


def test_shfl_of_a_float_and_of_a_constant():
    code = ".reg .f32 %f; mov.b32 %f, %a; shfl.sync.idx.b32 %f, %f, 3, 31, -1; mov.b32 %d, %f;"
    a = words(6)
    found = run_warps(code, a)
    assert [d for d, _ in found] == [a[n // 32 * 32 + 3] for n in range(LANES)]
    found = run_warps("shfl.sync.idx.b32 %d, 77, %lane, 31, -1;")
    assert [d for d, _ in found] == [77] * LANES


# Lanes that have ended, and that come later -------------------------------------------------------

EXIT = "setp.lt.u32 %p, %lane, 5; @%p exit;\n"


@pytest.mark.parametrize(
    "code, expected",
    [
        ("shfl.sync.idx.b32 %d, %a, 2, 31, -1;", lambda n: 0),
        ("shfl.sync.bfly.b32 %d, %a, 1, 31, -1;", lambda n: 1000 + (n ^ 1) if n % 32 > 5 else 0),
        ("setp.ge.u32 %q, %lane, 7; vote.sync.ballot.b32 %d, %q, -1;", lambda n: 0xFFFFFF80),
        (
            "setp.ge.u32 %q, %lane, 5; vote.sync.all.pred %q, %q, -1; selp.b32 %d, 1, 0, %q;",
            lambda n: 1,
        ),
        (
            "setp.lt.u32 %q, %lane, 5; vote.sync.any.pred %q, %q, -1; selp.b32 %d, 1, 0, %q;",
            lambda n: 0,
        ),
        ("shr.u32 %b, %lane, 5; match.all.sync.b32 %d, %b, -1;", lambda n: 0xFFFFFFE0),
        (
            "shr.u32 %b, %lane, 2; match.any.sync.b32 %d, %b, -1;",
            lambda n: (0xF << n % 32 // 4 * 4) & 0xFFFFFFE0,
        ),
        ("redux.sync.add.u32 %d, %lane, -1;", lambda n: sum(range(5, 32))),
        ("redux.sync.and.b32 %d, %lane, -1;", lambda n: 0),
        ("redux.sync.min.u32 %d, %lane, -1;", lambda n: 5),
        ("elect.sync %d|%q, -1; @%q add.u32 %d, %d, 100;", lambda n: 5 + 100 * (n % 32 == 5)),
        ("activemask.b32 %d;", lambda n: 0xFFFFFFE0),
    ],
    ids=lambda value: value.split(";")[-2].strip() if isinstance(value, str) else "",
)
def test_lanes_that_have_ended_do_not_take_part(code, expected):
    """The results of an H200."""
    # They end without having stored anything.
    a = [1000 + n for n in range(LANES)]
    found = run_warps(EXIT + code, a)
    for lane in range(LANES):
        assert found[lane][0] == (0 if lane % 32 < 5 else expected(lane)), lane


def test_a_block_that_does_not_fill_its_last_warp():
    a = [1000 + n for n in range(LANES)]
    code = """
        shfl.sync.bfly.b32 %d, %a, 16, 31, -1;
        setp.ge.u32 %q, %lane, 0;
        vote.sync.ballot.b32 %e, %q, -1;
    """
    found = run_warps(code, a, block=80)
    full = [(1000 + (n ^ 16), FULL) for n in range(64)]
    assert found == full + [(0, 0xFFFF)] * 16 + [(0, 0)] * 16


@pytest.mark.parametrize(
    "code, expected",
    [
        ("shfl.sync.bfly.b32 %d, %c, 1, 31, -1;", lambda c, n: c[n ^ 1]),
        ("redux.sync.max.u32 %d, %c, -1;", lambda c, n: max(c[n // 32 * 32 :][:32])),
        (
            "and.b32 %b, %c, 1; setp.eq.u32 %q, %b, 1; vote.sync.ballot.b32 %d, %q, -1;",
            lambda c, n: sum((c[n // 32 * 32 + k] & 1) << k for k in range(32)),
        ),
        (
            "match.any.sync.b32 %d, %c, -1;",
            lambda c, n: sum((c[n // 32 * 32 + k] == c[n]) << k for k in range(32)),
        ),
        ("elect.sync %d|%q, -1;", lambda c, n: 0),
        (
            "bar.warp.sync -1; shfl.sync.idx.b32 %d, %c, 31, 31, -1;",
            lambda c, n: c[n // 32 * 32 + 31],
        ),
    ],
    ids=lambda value: value.split(" ")[0] if isinstance(value, str) else "",
)
def test_lanes_wait_for_those_that_come_later(code, expected):
    """Each lane comes out of a loop after another number of rounds."""
    rounds = few_values(8, 7)
    body = f"""
        mov.u32 %c, 0;
    LOOP:
        setp.ge.u32 %q, %c, %b;
        @%q bra OUT;
        add.u32 %c, %c, 1;
        bra LOOP;
    OUT:
        {code}
    """
    found = run_warps(body, None, rounds)
    assert [d for d, _ in found] == [expected(rounds, n) for n in range(LANES)]


def test_groups_come_at_different_times():
    """The lanes of one group never execute what the other does."""
    code = """
        and.b32 %b, %lane, 1;
        setp.eq.u32 %p, %b, 1;
        @%p bra ODD;
        redux.sync.add.u32 %d, %lane, 0x55555555;
        bra JOIN;
    ODD:
        redux.sync.add.u32 %d, %lane, 0xaaaaaaaa;
    JOIN:
        redux.sync.add.u32 %e, %d, -1;
    """
    found = run_warps(code)
    even, odd = sum(range(0, 32, 2)), sum(range(1, 32, 2))
    total = 16 * (even + odd)
    assert found == [(odd if n % 2 else even, total) for n in range(LANES)]


# Votes and matches --------------------------------------------------------------------------------


@given(masks=partitions(), seed=st.integers(0, 99), truths=st.sampled_from([0, 5, 50, 95, 100]))
@some
def test_vote(masks, seed, truths):
    generator = random.Random(seed)
    a = [generator.randrange(100) < truths for _ in range(LANES)]
    code = """
        setp.ne.u32 %p, %a, 0;
        vote.sync.ballot.b32 %d, %p, %m;
        vote.sync.ballot.b32 %c, !%p, %m;
        xor.b32 %c, %c, %d;
        setp.eq.u32 %q, %c, %m;
        selp.b32 %e, 0, 1000, %q;
        vote.sync.all.pred %q, %p, %m;
        @%q add.u32 %e, %e, 1;
        vote.sync.any.pred %q, %p, %m;
        @%q add.u32 %e, %e, 10;
        vote.sync.uni.pred %q, %p, %m;
        @%q add.u32 %e, %e, 100;
    """
    found = run_warps(code, a, None, masks)
    members = groups_of(masks)
    for lane in range(LANES):
        if lane not in members:
            assert found[lane] == UNTOUCHED
            continue
        votes = [a[n] for n in members[lane]]
        ballot = sum(1 << n % 32 for n in members[lane] if a[n])
        same = all(votes) or not any(votes)
        assert found[lane] == (ballot, all(votes) + 10 * any(votes) + 100 * same)


def test_vote_on_a_constant():
    code = "vote.sync.ballot.b32 %d, 1, %m; vote.sync.any.pred %q, 0, %m; selp.b32 %e, 1, 0, %q;"
    assert run_warps(code) == [(FULL, 0)] * LANES


@pytest.mark.parametrize("wide", [False, True])
@given(masks=partitions(), seed=st.integers(0, 99), count=st.integers(1, 5))
@some
def test_match(wide, masks, seed, count):
    a, b = few_values(seed, count), few_values(seed + 1, 2 if wide else 1)
    value, kind = ("%w", "b64") if wide else ("%a", "b32")
    code = f"""
        mov.b64 %w, {{%a, %b}};
        match.any.sync.{kind} %d, {value}, %m;
        match.all.sync.{kind} %e|%q, {value}, %m;
        @%q xor.b32 %e, %e, -1;
        match.all.sync.{kind} %c, {value}, %m;
        @%q xor.b32 %c, %c, -1;
        setp.ne.u32 %p, %c, %e;
        @%p mov.b32 %d, 0x77;
        match.all.sync.{kind} _|%p, {value}, %m;
        xor.pred %p, %p, %q;
        @%p mov.b32 %d, 0x88;
    """
    found = run_warps(code, a, b, masks)
    keys = list(zip(a, b, strict=True)) if wide else a
    members = groups_of(masks)
    for lane in members:
        same = sum(1 << n % 32 for n in members[lane] if keys[n] == keys[lane])
        together = same == masks[lane]
        assert found[lane] == (same, same ^ FULL if together else 0)


def test_activemask():
    code = """
        and.b32 %b, %lane, 3;
        setp.eq.u32 %p, %b, 1;
        activemask.b32 %e;
        @%p activemask.b32 %d;
    """
    found = run_warps(code)
    assert found == [(0x22222222 if n % 4 == 1 else 0xDEAD, FULL) for n in range(LANES)]


# Reductions ---------------------------------------------------------------------------------------


def signed(word):
    return word - (1 << 32) if word >> 31 else word


REDUCTIONS = {
    "add.u32": sum,
    "add.s32": sum,
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda values: min(map(signed, values)),
    "max.s32": lambda values: max(map(signed, values)),
    "and.b32": lambda values: functools.reduce(operator.and_, values),
    "or.b32": lambda values: functools.reduce(operator.or_, values),
    "xor.b32": lambda values: functools.reduce(operator.xor, values),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@given(masks=partitions(), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_redux(name, masks, seed):
    a = [one | FULL - 255 if one & 1 else one for one in words(seed)]
    found = run_warps(f"redux.sync.{name} %d, %a, %m;", a, None, masks)
    members = groups_of(masks)
    for lane in range(LANES):
        expected = UNTOUCHED[0]
        if lane in members:
            expected = REDUCTIONS[name]([a[n] for n in members[lane]]) & FULL
        assert found[lane][0] == expected


FLOATS = (0, 1 << 31, 1, 0x80000001, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000)
NANS = (0x7FC00000, 0xFFC00001, 0x7F800001)


def reduced_floats(bits, name, absolute, nan):
    """Of floats given by their bits: NaNs are left out or spread, and -0 is below +0."""
    if absolute:
        bits = [one & 0x7FFFFFFF for one in bits]
    numbers = [one for one in bits if one & 0x7FFFFFFF <= 0x7F800000]
    if not numbers or (nan and len(numbers) < len(bits)):
        return 0x7FFFFFFF

    def order(one):
        return -(one & 0x7FFFFFFF) - 1 if one >> 31 else one

    return (min if name == "min" else max)(numbers, key=order)


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("modifiers", ["", ".abs", ".NaN", ".abs.NaN"])
@given(masks=partitions(), seed=st.integers(0, 99), nans=st.integers(0, 30))
@settings(max_examples=10, deadline=None)
def test_redux_of_floats(name, modifiers, masks, seed, nans):
    generator = random.Random(seed)
    pool = FLOATS + NANS * (nans // 10)
    a = [generator.choice(pool) for _ in range(LANES)]
    if nans == 0:
        a[:32] = [NANS[0]] * 32
    code = f"redux.sync.{name}{modifiers}.f32 %d, %a, %m;"
    found = run_warps(code, a, None, masks, target="sm_100a")
    members = groups_of(masks)
    for lane in members:
        values = [a[n] for n in members[lane]]
        expected = reduced_floats(values, name, ".abs" in modifiers, ".NaN" in modifiers)
        assert found[lane][0] == expected


# Election and barrier -----------------------------------------------------------------------------


@given(masks=partitions())
@some
def test_elect(masks):
    """The first lane is elected, as on an H200."""
    found = run_warps("elect.sync %d|%q, %m; selp.b32 %e, 1, 0, %q;", masks=masks)
    members = groups_of(masks)
    for lane in range(LANES):
        if lane in members:
            assert found[lane] == (members[lane][0] % 32, lane == members[lane][0])
        else:
            assert found[lane] == UNTOUCHED


def test_elect_without_the_leader():
    found = run_warps("elect.sync _|%q, -1; selp.b32 %e, 1, 0, %q;")
    assert found == [(0xDEAD, n % 32 == 0) for n in range(LANES)]


class BarrierListener(Observer):
    """Keeps the lanes that met."""

    def __init__(self):
        self.met = []

    def barrier(self, arrived, left, proxy="generic"):
        assert arrived.tolist() == left.tolist()
        self.met.append(tuple(arrived.tolist()))


@given(masks=partitions())
@some
def test_warp_barriers_are_told_of(masks):
    listener = BarrierListener()
    run_warps("bar.warp.sync %m;", masks=masks, make_observer=lambda: listener)
    expected = {tuple(members) for members in groups_of(masks).values()}
    assert len(listener.met) == len(expected) and set(listener.met) == expected


def test_a_warp_barrier_makes_early_lanes_wait():
    code = """
        .reg .b32 %place;
        mov.u32 %place, dynamic;
        mad.lo.u32 %place, %thread, 4, %place;
        setp.lt.u32 %p, %lane, 16;
        @%p bra STORE;
        add.u32 %c, %lane, 1;
    STORE:
        st.shared.b32 [%place], %a;
        bar.warp.sync %m;
        xor.b32 %place, %place, 64;
        ld.shared.b32 %d, [%place];
    """
    a = words(9)
    found = run_warps(code, a, shared=4 * LANES)
    assert [d for d, _ in found] == [a[n ^ 16] for n in range(LANES)]


# Misuse -------------------------------------------------------------------------------------------


class MisuseListener(Observer):
    """Keeps what was done wrong."""

    def __init__(self):
        self.seen = []

    def misuse(self, lanes, message, instruction):
        self.seen.append((lanes.tolist(), message, instruction.opcode))


@pytest.mark.parametrize("offset", ["16", "%b"])
def test_reads_from_absent_lanes_are_told_of(offset):
    listener = MisuseListener()
    masks = [0xFFFFF if n % 32 < 20 else 0 for n in range(LANES)]
    code = f"shfl.sync.down.b32 %d, %a, {offset}, 31, %m;"
    run_warps(code, None, [16] * LANES, masks, make_observer=lambda: listener)
    # Lanes 4 to 15 read from 20 to 31; those from 16 on would read from beyond the warp.
    reading = [32 * warp + n for warp in range(3) for n in range(4, 16)]
    message = "reads from a lane that does not take part in the shuffle"
    assert listener.seen == [(reading, message, "shfl")]


def test_correct_shuffles_are_not_told_of():
    listener = MisuseListener()
    code = "shfl.sync.bfly.b32 %d, %a, 16, 31, -1; shfl.sync.up.b32 %e, %a, %lane, 0, %m;"
    run_warps(code, make_observer=lambda: listener)
    assert listener.seen == []


@pytest.mark.parametrize(
    "code",
    [
        "shfl.sync.bfly.b32 %d, %a, 1, 31, %m;",
        "vote.sync.ballot.b32 %d, %p, %m;",
        "redux.sync.add.u32 %d, %a, %m;",
        "bar.warp.sync %m;",
    ],
)
def test_a_mask_without_the_lane_itself(code):
    with pytest.raises(SimulationError, match="does not name it"):
        run_warps("@%p bra DONE;" + code, masks=[FULL - 8] * LANES)


@pytest.mark.parametrize(
    "code",
    [
        "match.any.sync.b32 %d, %a, %m;",
        "elect.sync %d|%q, %m;",
        "shfl.sync.idx.b32 %d, %a, 0, 31, %m;",
    ],
)
def test_masks_that_contradict_one_another(code):
    masks = [0xFFFF if n % 32 < 8 else FULL for n in range(LANES)]
    with pytest.raises(SimulationError, match="another member mask") as caught:
        run_warps(code, masks=masks)
    assert code[:-1] in str(caught.value)


def test_a_lane_that_never_comes():
    code = """
        setp.eq.u32 %q, %lane, 3;
        @%q bra WAIT;
        shfl.sync.bfly.b32 %d, %a, 1, 31, -1;
    WAIT:
        barrier.sync 1;
    """
    with pytest.raises(
        DeadlockError, match="threads 0-2, 4-34, .* wait for other lanes of the warp"
    ):
        run_warps(code)


ACCEPTED = (
    "shfl.sync.bfly.b32 %r0, %r1, %r2, %r3, %r4;",
    "shfl.sync.up.b32 %r0|%p0, %r1, 1, 0, -1;",
    "shfl.sync.down.b32 %r0|_, 5, 1, 31, -1;",
    "shfl.sync.idx.b32 %f0, %f1, %r2, 0x1f, 0xffffffff;",
    "vote.sync.all.pred %p0, %p1, %r0;",
    "vote.sync.any.pred %p0, !%p1, -1;",
    "vote.sync.uni.pred %p0, 1, -1;",
    "vote.sync.ballot.b32 %r0, %p1, %r2;",
    "match.any.sync.b32 %r0, %r1, %r2;",
    "match.any.sync.b64 %r0, %x1, %r2;",
    "match.all.sync.b32 %r0|%p0, %r1, %r2;",
    "match.all.sync.b64 _|%p0, %x1, %r2;",
    "match.all.sync.b32 %r0, %r1, %r2;",
    *[f"redux.sync.{name} %r0, %r1, %r2;" for name in REDUCTIONS],
    "elect.sync %r0|%p0, %r1;",
    "elect.sync _|%p0, -1;",
    "bar.warp.sync %r0;",
    "bar.warp.sync 0xffffffff;",
    "activemask.b32 %r0;",
)


def test_these_are_accepted_as_by_ptxas(tmp_path):
    bind(*ACCEPTED)
    assemble(ptx_of(*ACCEPTED), tmp_path)


def test_these_are_accepted_as_by_ptxas_for_blackwell(tmp_path):
    lines = [
        f"redux.sync.{name}{modifiers}.f32 %f0, %f1, %r2;"
        for name in ("min", "max")
        for modifiers in ("", ".abs", ".NaN", ".abs.NaN")
    ]
    bind(*lines, target="sm_100a")
    assemble(ptx_of(*lines, target="sm_100a"), tmp_path, "sm_100a")


@pytest.mark.parametrize(
    "line, message",
    [
        ("shfl.bfly.b32 %r0, %r1, %r2, %r3;", "one of .sync"),
        ("shfl.sync.b32 %r0, %r1, %r2, %r3, -1;", "one of .up, .down, .bfly, .idx"),
        ("shfl.sync.bfly.u32 %r0, %r1, %r2, %r3, -1;", "no type .u32"),
        ("shfl.sync.bfly.b64 %x0, %x1, %r2, %r3, -1;", "no type .b64"),
        ("shfl.sync.bfly.b32 %r0, %r1, %r2, %r3;", "wrong number of operands"),
        ("shfl.sync.bfly.b32 %r0|%r5, %r1, %r2, %r3, -1;", "cannot hold a .pred"),
        ("vote.all.pred %p0, %p1;", "one of .sync"),
        ("vote.sync.all.b32 %r0, %p1, -1;", "wrong type"),
        ("vote.sync.ballot.pred %p0, %p1, -1;", "wrong type"),
        ("vote.sync.ballot.u32 %r0, %p1, -1;", "no type .u32"),
        ("vote.sync.ballot.b32 %r0, %r1, -1;", "cannot be read as .pred"),
        ("match.any.sync.u32 %r0, %r1, -1;", "no type .u32"),
        ("match.any.sync.b32 %r0|%p0, %r1, -1;", "match.any has no predicate"),
        ("match.sync.b32 %r0, %r1, -1;", "one of .any, .all"),
        ("redux.sync.add.b32 %r0, %r1, -1;", "redux.add has no type .b32"),
        ("redux.sync.and.u32 %r0, %r1, -1;", "redux.and has no type .u32"),
        ("redux.sync.add.f32 %f0, %f1, -1;", "redux.add has no type .f32"),
        ("redux.sync.min.abs.s32 %r0, %r1, -1;", "only for .f32"),
        ("redux.add.u32 %r0, %r1, -1;", "one of .sync"),
        ("elect.sync %r0, -1;", "predicate for the elected lane is missing"),
        ("elect.sync.b32 %r0|%p0, -1;", "unknown modifier .b32"),
        ("bar.warp.sync;", "wrong number of operands"),
        ("bar.warp %r0;", "one of .sync"),
        ("activemask.u32 %r0;", "no type .u32"),
    ],
)
def test_errors(line, message):
    with pytest.raises(PtxError, match=message) as caught:
        bind(line)
    assert line[:-1] in str(caught.value)
