"""Copies of boxes of tensors, against their definition element by element."""

from __future__ import annotations

import dataclasses
import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from copies_support import SETUP, Listener, barrier, move, shared, wait
from simulator_support import module, run_ptx

from pallasite_simulator.arguments import Descriptor, Pointer
from pallasite_simulator.engine.boxes import box_of
from pallasite_simulator.engine.tensor_map import ELEMENT_TYPES, SWIZZLES, TensorMap
from pallasite_simulator.errors import PtxError, SimulationError

COMPLETE = "mbarrier::complete_tx::bytes"


@dataclasses.dataclass(frozen=True)
class Layout:
    """A tensor in an array of bytes, without its address; dimensions minor to major."""

    element: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    swizzle: int = 0
    nan: bool = False

    def at(self, address):
        return TensorMap(
            address,
            self.element,
            self.sizes,
            self.strides,
            self.box,
            self.steps,
            0,
            self.swizzle,
            self.nan,
        )

    @property
    def size(self):
        return ELEMENT_TYPES[self.element].bytes

    @property
    def bytes(self):
        """Of the tensor, in memory."""
        rest = sum((n - 1) * s for n, s in zip(self.sizes[1:], self.strides, strict=True))
        return -(-(rest + self.sizes[0] * self.size) // 16) * 16

    def elements(self, corner, tile):
        """For each element of the box at a corner: where it is in shared memory, given where the
        box starts, and where it is in the tensor's memory, or None."""
        rank = len(self.sizes)
        steps = (1, *(self.steps or (1,) * rank)[1:])
        counts = [-(-b // s) for b, s in zip(self.box, steps, strict=True)]
        strides = (self.size, *self.strides)
        swizzle = SWIZZLES.get(self.swizzle)
        pitch = swizzle.span if swizzle else counts[0] * self.size
        for row, outer in enumerate(itertools.product(*map(range, counts[:0:-1]))):
            for first in range(counts[0]):
                index = (first, *outer[::-1])
                place = [c + n * s for c, n, s in zip(corner, index, steps, strict=True)]
                inside = all(0 <= p < n for p, n in zip(place, self.sizes, strict=True))
                offset = sum(p * s for p, s in zip(place, strides, strict=True))
                target = tile + row * pitch + first * self.size
                yield (
                    _swizzled(target, self.swizzle) if swizzle else target,
                    offset if inside else None,
                )


def _swizzled(address, number):
    """PTX ISA 5.5.7, by the tables: pieces of ``atom`` bytes of a line change places."""
    atom, lines = {1: (16, 2), 2: (16, 4), 3: (16, 8), 4: (32, 4), 5: (32, 4), 6: (64, 2)}[number]
    line, within = divmod(address, 128)
    piece, byte = divmod(within, atom)
    address = line * 128 + (piece ^ (line % lines)) * atom + byte
    if number == 5 and line % 2:
        address += 8 if address % 16 < 8 else -8
    return address


def random_layout(random, element, rank, swizzle, *, strided=False, nan=False):
    size = ELEMENT_TYPES[element].bytes
    span = SWIZZLES[swizzle].span if swizzle else 256
    rows = [n for n in range(1, 257) if n * size % 16 == 0 and n * size <= span]
    inner = int(random.choice(rows))
    box, room = [inner], 4096 // (span if swizzle else inner * size)
    for _ in range(1, rank):
        box.append(int(random.integers(1, max(2, min(room, 9) + 1))))
        room = max(1, room // box[-1])
    sizes = [int(random.integers(1, 2 * inner + 4))]
    strides, reach = [], -(-sizes[0] * size // 16) * 16
    for _ in range(1, rank):
        reach += 16 * int(random.integers(0, 3))
        strides.append(reach)
        sizes.append(int(random.integers(1, 9)))
        reach *= sizes[-1]
    steps = tuple(int(n) for n in random.integers(1, 5, rank)) if strided else (1,) * rank
    return Layout(element, tuple(sizes), tuple(strides), tuple(box), steps, swizzle, nan)


def random_corner(random, layout, *, store=False):
    unit = max(1, 16 // layout.size)
    corner = []
    for place, (size, extent) in enumerate(zip(layout.sizes, layout.box, strict=True)):
        low = 0 if store or random.random() < 0.5 else -extent
        one = int(random.integers(low, size + 1))
        corner.append(one // unit * unit if place == 0 else one)
    return tuple(corner)


def launch(body, layout, *arrays, tile=8192, **options):
    """Runs a body on arrays; ``%map`` is the tensor map of array 0."""
    names = [f".u64 .ptr .global .align 16 p{number}" for number in range(len(arrays))]
    names.append(".align 64 .b8 map[128]")
    prologue = [
        ".reg .b32 %thread, %prologue<4>;",
        f".reg .b64 %array<{len(arrays)}>, %map;",
        *[f"ld.param.u64 %array{n}, [p{n}];" for n in range(len(arrays))],
        "mov.b64 %map, map;",
        "cvta.param.u64 %map, %map;",
        "mov.u32 %prologue0, %ctaid.x;",
        "mov.u32 %prologue2, %tid.x;",
    ]
    text = "\n".join(prologue) + SETUP + body
    ptx = module(text, names, variables=shared(tile), target=options.pop("target", "sm_90a"))
    descriptor = Descriptor(0, lambda address: layout.at(address).encode())
    return run_ptx(ptx, *map(Pointer, arrays), descriptor, **options)


def corners_of_blocks(rank):
    """Loads the coordinates of each block from array 1 to ``%r8`` and those behind it."""
    lines = [
        f"mul.lo.u32 %r2, %prologue0, {4 * rank};",
        "cvt.u64.u32 %p1, %r2;",
        "add.u64 %p1, %p1, %array1;",
        *[f"ld.global.b32 %r{8 + n}, [%p1+{4 * n}];" for n in range(rank)],
    ]
    return "\n".join(lines), "{" + ", ".join(f"%r{8 + n}" for n in range(rank)) + "}"


def random_bytes(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def fill_of(layout):
    return bytes([0xF7, 0x7F] if layout.nan else [0, 0]) * layout.size


def loaded(layout, data, image, corner, tile):
    """Shared memory behind a load."""
    expected, size = bytearray(image.tobytes()), layout.size
    for place, offset in layout.elements(corner, tile):
        inside = (
            fill_of(layout)[:size] if offset is None else data[offset : offset + size].tobytes()
        )
        expected[place : place + size] = inside
    return np.frombuffer(bytes(expected), np.uint8)


CASES = [
    (element, rank, swizzle)
    for number, (element, swizzle) in enumerate(
        itertools.product([0, 1, 3, 4, 6, 7, 8, 9], range(7))
    )
    for rank in {1 + number % 5, 2}
]


@pytest.mark.parametrize(("element", "rank", "swizzle"), CASES)
def test_loads(element, rank, swizzle):
    random = np.random.default_rng([element, rank, swizzle])
    nan = ELEMENT_TYPES[element].floating and swizzle % 2 == 0
    strided = rank > 1 and swizzle % 3 == 1
    layout = random_layout(random, element, rank, swizzle, strided=strided, nan=nan)
    blocks, tile = 3, 128 * int(random.integers(0, 8))
    total = 128 * 72
    corners = np.array([random_corner(random, layout) for _ in range(blocks)], np.int32)
    data, image = random_bytes(1, layout.bytes), random_bytes(2, blocks, total)
    out = np.zeros_like(image)
    setup, coordinates = corners_of_blocks(rank)
    box = box_of(layout.at(0))
    body = f"""
    {move("IN", 2, total, load=True)}
    {barrier()}
    {setup}
    add.u32 %r4, %tile, {tile};
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {box.bytes};
    @%first cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.{COMPLETE}
        [%r4], [%map, {coordinates}], [%bar];
    {wait()}
    {move("OUT", 3, total, load=False)}
    """
    execution = launch(body, layout, data, corners, image, out, tile=total, grid=blocks)
    for block in range(blocks):
        expected = loaded(layout, data, image[block], corners[block].tolist(), tile)
        np.testing.assert_array_equal(out[block], expected)
    count = math.prod(box.tensor.extents) * layout.size
    assert execution.counters["tma bytes"] == blocks * count
    inside = sum(
        offset is not None
        for block in range(blocks)
        for _, offset in layout.elements(corners[block].tolist(), 0)
    )
    # The corners were read, and the image.
    read = execution.bytes_moved["global", "read"] - inside * layout.size
    assert read == blocks * (total + 128 * 4 * rank)


def test_loads_of_tf32_round():
    random = np.random.default_rng(0)
    for element in (11, 12):
        layout = Layout(element, (64,), (), (64,))
        data = (random.standard_normal(64) * 2.0 ** random.integers(-20, 20, 64)).astype(np.float32)
        out = np.zeros(64, np.float32)
        body = f"""
        {barrier()}
        @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
        @%first cp.async.bulk.tensor.1d.shared::cta.global.{COMPLETE}
            [%tile], [%map, {{0}}], [%bar];
        {wait()}
        {move("OUT", 1, 256, load=False)}
        """
        launch(body, layout, data, out)
        mantissa, exponent = np.frexp(data.astype(np.float64))
        rounded = np.sign(mantissa) * np.floor(np.abs(mantissa) * 2**11 + 0.5)
        np.testing.assert_array_equal(out, np.ldexp(rounded / 2**11, exponent))


def stored(layout, memory, image, corner, tile, combine=None):
    """Changes the tensor's memory as a store does. The hardware writes whole pieces of 16 bytes, so
    what is behind the end of rows changes, too."""
    size = layout.size
    wide = dataclasses.replace(layout, sizes=(_whole_pieces(layout), *layout.sizes[1:]))
    for place, offset in wide.elements(corner, tile):
        if offset is None:
            continue
        value, there = image[place : place + size], memory[offset : offset + size]
        if combine is None:
            there[:] = value
        else:
            dtype = ELEMENT_TYPES[layout.element].dtype
            there.view(dtype)[:] = combine(there.view(dtype), value.view(dtype))


def _whole_pieces(layout):
    """The first size, rounded up to whole pieces of 16 bytes."""
    unit = max(1, 16 // layout.size)
    return -(-layout.sizes[0] // unit) * unit


def store_body(layout, total, tile, instruction, suffix=""):
    setup, coordinates = corners_of_blocks(len(layout.sizes))
    return f"""
    {move("IN", 2, total, load=True)}
    fence.proxy.async;
    bar.sync 0;
    {setup}
    add.u32 %r4, %tile, {tile};
    @%first {instruction}.bulk.tensor.{len(layout.sizes)}d.global.shared::cta{suffix}.bulk_group
        [%map, {coordinates}], [%r4];
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group 0;
    """


@pytest.mark.parametrize(("element", "rank", "swizzle"), CASES[::2])
def test_stores(element, rank, swizzle):
    random = np.random.default_rng([element, rank, swizzle, 1])
    layout = random_layout(random, element, rank, swizzle, strided=rank > 1 and swizzle % 3 == 1)
    blocks, total, tile = 3, 128 * 72, 128 * int(random.integers(0, 8))
    # Blocks store side by side in the last dimension; the last one perhaps beyond its end.
    width = layout.box[-1]
    sizes = (*layout.sizes[:-1], blocks * width - int(random.integers(0, width)))
    layout = dataclasses.replace(layout, sizes=sizes)
    corners = np.array([random_corner(random, layout, store=True) for _ in range(blocks)], np.int32)
    corners[:, -1] = width * np.arange(blocks)
    data, image = random_bytes(1, layout.bytes), random_bytes(2, blocks, total)
    expected = data.copy()
    body = store_body(layout, total, tile, "cp.async", ".tile")
    launch(body, layout, data, corners, image, tile=total, grid=blocks)
    for block in range(blocks):
        stored(layout, expected, image[block], corners[block].tolist(), tile)
    np.testing.assert_array_equal(data, expected)


REDUCTIONS = {
    "add": (np.add, (2, 3, 4, 6, 7, 8, 9)),
    "min": (np.minimum, (2, 3, 4, 5, 6, 9)),
    "max": (np.maximum, (2, 3, 4, 5, 6, 9)),
    "inc": (lambda a, b: np.where(a >= b, 0, a + 1), (2,)),
    "dec": (lambda a, b: np.where((a == 0) | (a > b), b, a - 1), (2,)),
    "and": (np.bitwise_and, (2, 3, 4)),
    "or": (np.bitwise_or, (2, 3, 4)),
    "xor": (np.bitwise_xor, (2, 3, 4)),
}


@pytest.mark.parametrize(
    ("operation", "element"), [(name, e) for name, (_, es) in REDUCTIONS.items() for e in es]
)
def test_reductions(operation, element):
    random = np.random.default_rng(element)
    swizzle = element % 4
    layout = random_layout(random, element, 2, swizzle)
    blocks, total, tile = 4, 128 * 72, 256
    dtype = ELEMENT_TYPES[element].dtype
    corners = np.array([random_corner(random, layout, store=True) for _ in range(blocks)], np.int32)

    def numbers(*shape):
        if dtype.kind in "iu":
            return random.integers(0, 9, shape).astype(dtype).view(np.uint8)
        return random.standard_normal(shape).astype(dtype).view(np.uint8)

    data = numbers(layout.bytes // layout.size)
    image = numbers(blocks, total // layout.size)
    expected = data.copy()
    body = store_body(layout, total, tile, "cp.reduce.async", f".{operation}")
    launch(body, layout, data, corners, image, tile=total, grid=blocks)
    for block in range(blocks):
        combine = REDUCTIONS[operation][0]
        stored(layout, expected, image[block], corners[block].tolist(), tile, combine)
    np.testing.assert_array_equal(data, expected)


def test_rows_that_lie_on_one_another_are_all_added():
    layout = Layout(7, (8, 5), (0,), (8, 5))
    data = np.ones(8, np.float32)
    image = np.arange(40, dtype=np.float32)
    body = store_body(layout, 160, 0, "cp.reduce.async", ".add")
    launch(body, layout, data, np.zeros(2, np.int32), image)
    np.testing.assert_array_equal(data, 1 + image.reshape(5, 8).sum(axis=0))


# Clusters -----------------------------------------------------------------------------------------


def test_multicast():
    # Each block loads a part and sends it to all blocks of its cluster.
    layout = Layout(7, (64, 16), (256,), (32, 2), swizzle=3)
    data = np.arange(64 * 16, dtype=np.float32)
    out = np.zeros((8, 4, 2, 32), np.float32)
    body = f"""
    {barrier()}
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    mad.lo.u32 %r4, %rank, 1024, %tile;
    shl.b32 %r5, %prologue0, 1;
    mov.b16 %h, 15;
    @%first cp.async.bulk.tensor.2d.shared::cluster.global.tile.{COMPLETE}.multicast::cluster
        [%r4], [%map, {{32, %r5}}], [%bar], %h;
    {wait()}
    bar.sync 0;
    mov.u32 %r6, 0;
    NEXT:
    mad.lo.u32 %r7, %r6, 1024, %tile;
    shl.b32 %i, %prologue2, 2;
    add.u32 %r7, %r7, %i;
    shr.u32 %v1, %r7, 3;
    and.b32 %v1, %v1, 112;
    xor.b32 %r7, %r7, %v1;
    ld.shared.b32 %v0, [%r7];
    mad.lo.u32 %v2, %prologue0, 4, %r6;
    mad.lo.u32 %v2, %v2, 64, %prologue2;
    mul.wide.u32 %p0, %v2, 4;
    add.u64 %p0, %p0, %array1;
    setp.lt.u32 %q, %prologue2, 64;
    @%q st.global.b32 [%p0], %v0;
    add.u32 %r6, %r6, 1;
    setp.lt.u32 %p, %r6, 4;
    @%p bra NEXT;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    """
    launch(body, layout, data, out, grid=8, cluster=4)
    rows = data.reshape(8, 2, 64)[:, :, 32:]
    for block in range(8):
        first = block // 4 * 4
        np.testing.assert_array_equal(out[block], rows[first : first + 4])


@pytest.mark.parametrize("leader", [0, 1])
def test_pairs_of_blocks_signal_one_of_them(leader):
    # Both blocks of a pair load; only one of the two hears of it.
    layout = Layout(7, (32, 8), (128,), (32, 1))
    data = np.arange(256, dtype=np.float32)
    out = np.zeros((4, 32), np.float32)
    body = f"""
    {barrier()}
    setp.eq.u32 %q, %rank, {leader};
    and.pred %p, %q, %first;
    @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    mapa.shared::cluster.u32 %r3, %bar, {leader};
    @%first cp.async.bulk.tensor.2d.shared::cluster.global.tile.{COMPLETE}.cta_group::2
        [%tile], [%map, {{0, %prologue0}}], [%r3];
    @!%q bra MEET;
    {wait()}
    MEET:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    {move("OUT", 1, 128, load=False)}
    """
    launch(body, layout, data, out, grid=4, cluster=2, block=32, target="sm_100a")
    np.testing.assert_array_equal(out, data.reshape(8, 32)[:4])


def test_multicast_of_pairs_signals_one_block_of_each():
    # Block 0 sends one row to all 4 blocks; the odd blocks hear of it, twice each.
    layout = Layout(7, (32, 8), (128,), (32, 1))
    data = np.arange(256, dtype=np.float32)
    out = np.zeros((4, 32), np.float32)
    body = f"""
    {barrier()}
    and.b32 %r2, %rank, 1;
    setp.eq.u32 %q, %r2, 1;
    and.pred %p, %q, %first;
    @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    mapa.shared::cluster.u32 %r3, %bar, 1;
    setp.eq.u32 %p, %rank, 0;
    and.pred %p, %p, %first;
    mov.b16 %h, 15;
    @%p cp.async.bulk.tensor.2d.shared::cluster.global.{COMPLETE}.multicast::cluster.cta_group::2
        [%tile], [%map, {{0, 5}}], [%r3], %h;
    @!%q bra MEET;
    {wait()}
    MEET:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    {move("OUT", 1, 128, load=False)}
    """
    launch(body, layout, data, out, grid=4, cluster=4, block=32, target="sm_100a")
    np.testing.assert_array_equal(out, data.reshape(8, 32)[[5, 5, 5, 5]])


# Rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swizzle", [0, 2])
def test_rows_are_gathered_and_scattered(swizzle):
    layout = Layout(7, (40, 10), (160,), (16, 1), swizzle=swizzle)
    data = np.arange(400, dtype=np.float32)
    out = np.zeros(64, np.float32)
    body = f"""
    {barrier()}
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
    @%first cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.{COMPLETE}
        [%tile], [%map, {{8, 7, 2, -1, 9}}], [%bar];
    {wait()}
    {move("OUT", 1, 256, load=False)}
    fence.proxy.async;
    @%first cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group
        [%map, {{24, 0, 3, 11, 4}}], [%tile];
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group 0;
    """
    before = data.copy().reshape(10, 40)
    launch(body, layout, data, out, target="sm_100a")
    rows = np.stack([before[7, 8:24], before[2, 8:24], np.zeros(16, np.float32), before[9, 8:24]])
    seen = np.zeros(256, np.uint8)
    for row in range(4):
        for byte in range(64):
            place = 64 * row + byte
            seen[_swizzled(place, 2) if swizzle else place] = rows[row].view(np.uint8)[byte]
    np.testing.assert_array_equal(out.view(np.uint8), seen)
    before[0, 24:], before[3, 24:], before[4, 24:] = rows[0], rows[1], rows[3]
    np.testing.assert_array_equal(data.reshape(10, 40), before)


# Tensor maps of each block ------------------------------------------------------------------------


def test_each_block_may_have_a_tensor_map_of_its_own():
    blocks = 5
    base = Layout(7, (16, 16), (64,), (4, 1))
    data = np.arange(256, dtype=np.float32)
    maps = np.zeros((blocks, 128), np.uint8)
    out = np.zeros((blocks, 16), np.float32)
    heights = [1 + n % 3 for n in range(blocks)]
    replace = "tensormap.replace.tile.box_dim.global.b1024.b32"
    body = f"""
    {barrier()}
    mul.wide.u32 %p1, %prologue0, 128;
    add.u64 %p1, %p1, %array1;
    shl.b32 %i, %prologue2, 2;
    cvt.u64.u32 %p2, %i;
    add.u64 %p3, %p2, %map;
    ld.param.b32 %v0, [map];
    setp.lt.u32 %q, %prologue2, 32;
    @%q ld.b32 %v0, [%p3];
    add.u64 %p4, %p2, %p1;
    @%q st.global.b32 [%p4], %v0;
    bar.sync 0;
    rem.u32 %r5, %prologue0, 3;
    add.u32 %r5, %r5, 1;
    @%first {replace} [%p1], 1, %r5;
    fence.proxy.tensormap::generic.release.gpu;
    fence.proxy.tensormap::generic.acquire.gpu [%p1], 128;
    mul.lo.u32 %r6, %r5, 16;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], %r6;
    @%first cp.async.bulk.tensor.2d.shared::cluster.global.{COMPLETE}
        [%tile], [%p1, {{8, %prologue0}}], [%bar];
    {wait()}
    {move("OUT", 2, 64, load=False)}
    """
    launch(body, base, data, maps, out, grid=blocks)
    for block, height in enumerate(heights):
        rows = data.reshape(16, 16)[block : block + height, 8:12].reshape(-1)
        np.testing.assert_array_equal(out[block, : 4 * height], rows)
        # What no box covers is as shared memory was before.
        np.testing.assert_array_equal(out[block, 4 * height :], out[0, -1])


# The observer -------------------------------------------------------------------------------------


def test_what_the_observer_hears():
    listener = Listener()
    layout = Layout(7, (30, 6), (128,), (16, 3), swizzle=3)
    data = np.zeros(32 * 6, np.float32)
    body = f"""
    {barrier()}
    shl.b32 %r5, %prologue0, 1;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 192;
    @%first cp.async.bulk.tensor.2d.shared::cluster.global.{COMPLETE}
        [%tile], [%map, {{16, %r5}}], [%bar];
    {wait()}
    fence.proxy.async;
    @%first cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%map, {{16, %r5}}], [%tile];
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group.read 0;
    """
    launch(body, layout, data, grid=2, block=32, make_observer=lambda: listener)
    load, store = [event[1] for event in listener.named("begin")]
    assert (load.engine, load.proxy, load.lanes.tolist()) == ("tma", "async", [0, 32])
    (read,) = [e for e in listener.named("read") if e[1] is load]
    # 14 elements of three rows, for each block.
    assert (read[2], read[4], read[5].tolist()) == ("global", 56, [0] * 3 + [32] * 3)
    assert sorted(np.diff(read[3]).tolist()) == [0, 128, 128, 128, 128]
    (write,) = [e for e in listener.named("write") if e[1] is load]
    assert (write[2], write[4], len(write[3])) == ("shared", 16, 2 * 3 * 4)
    assert [e[3].tolist() for e in listener.named("complete_on")] == [[0], [32]]
    (written,) = [e for e in listener.named("write") if e[1] is store]
    assert (written[2], written[4]) == ("global", 56)
    assert listener.named("complete_for") == [("complete_for", store, [0, 32], True)]
    # Rows of 120 bytes end within a piece of 16 bytes.
    messages = [event[2] for event in listener.named("misuse")]
    assert messages
    assert "writes 8 bytes behind the end of the rows of a tensor" in messages[0]


# What is reported ---------------------------------------------------------------------------------

LOAD = f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.{COMPLETE}"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
REDUCE = "cp.reduce.async.bulk.tensor.2d.global.shared::cta"
SMALL = Layout(7, (16, 8), (64,), (4, 2))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (f"{LOAD} [%tile+64], [%map, {{0, 0}}], [%bar];", ("misaligned", "multiple of 128")),
        (f"{LOAD} [%tile+32768], [%map, {{0, 0}}], [%bar];", ("out of bounds", "32 bytes at")),
        (
            f"{LOAD} [%tile], [%map, {{3, 0}}], [%bar];",
            ("does not start at a multiple of 16 bytes", "first coordinate 3, elements of 4"),
        ),
        (
            f"{STORE} [%map, {{0, -1}}], [%tile];",
            ("writes a box that starts before the tensor", "coordinates (0, -1)"),
        ),
        (
            f"{LOAD} [%tile], [%array0, {{0, 0}}], [%bar];",
            ("uses a wrong tensor map: a dimension is empty or too large",),
        ),
        (
            f"{LOAD.replace('2d', '1d')} [%tile], [%map, {{0}}], [%bar];",
            ("tensor map of another number of dimensions", "got: 2", "expected: 1"),
        ),
        (f"{LOAD} [%tile], [%map+16, {{0, 0}}], [%bar];", ("out of bounds", "128 bytes at param")),
        (
            "mov.u32 %r4, %tile; cvt.u64.u32 %p0, %r4; cvta.shared.u64 %p0, %p0;"
            f"{LOAD} [%tile], [%p0, {{0, 0}}], [%bar];",
            ("uses a tensor map in memory where none can be", "shared memory"),
        ),
        (
            f"{REDUCE}.min.bulk_group [%map, {{0, 0}}], [%tile];",
            ("reduces by .min what has no such reduction", "type f32", "u32, s32, u64, s64"),
        ),
        (
            f"{LOAD.replace('tile', 'tile::gather4')} [%tile], [%map, {{0, 0, 0, 0, 0}}], [%bar];",
            ("boxes are not rows", "box (4, 2)"),
        ),
    ],
)
def test_misuse(body, words):
    with pytest.raises(SimulationError) as caught:
        launch(barrier() + body, SMALL, np.zeros(128, np.float32), block=32)
    for word in ("thread 0 of block (0, 0, 0)", *words):
        assert word in str(caught.value), str(caught.value)


def test_tensor_maps_that_reach_beyond_their_array():
    layout = dataclasses.replace(SMALL, sizes=(16, 9))
    with pytest.raises(SimulationError) as caught:
        body = f"{barrier()} {LOAD} [%tile], [%map, {{0, 7}}], [%bar];"
        launch(body, layout, np.zeros(128, np.float32), block=32)
    text = str(caught.value)
    assert "copies a box of a tensor that is not inside one array" in text
    assert "byte 448 of array 0 (512 bytes) to" in text
    assert "sizes (16, 9)" in text


def test_stores_to_arrays_that_are_read_only():
    ptx = module(
        f".reg .b64 %map;\nmov.b64 %map, map;\ncvta.param.u64 %map, %map;\n"
        f".reg .b32 %tile;\nmov.u32 %tile, tile;\n{STORE} [%map, {{0, 0}}], [%tile];",
        [".u64 p0", ".align 64 .b8 map[128]"],
        variables=shared(1024),
    )
    data = Pointer(np.zeros(128, np.float32), "input 0", writable=False)
    descriptor = Descriptor(0, lambda address: SMALL.at(address).encode())
    with pytest.raises(SimulationError) as caught:
        run_ptx(ptx, data, descriptor, block=32)
    assert "writes to read-only memory" in str(caught.value)
    assert "byte 0 of input 0" in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        f"{LOAD} [%tile], [%map, {{0, 0, 0}}], [%bar];",
        f"{LOAD} [%tile], [%map], [%bar];",
        f"{LOAD} [%tile], [%map, {{0, 0}}];",
        f"{LOAD} [%tile], [%map, {{0, 0}}], [%bar], 3;",
        f"{LOAD}.multicast::cluster [%tile], [%map, {{0, 0}}], [%bar];",
        f"{LOAD}.L2::cache_hint [%tile], [%map, {{0, 0}}], [%bar];",
        f"{LOAD.replace('tile', 'im2col')} [%tile], [%map, {{0, 0}}], [%bar];",
        f"{LOAD.replace('2d', '6d')} [%tile], [%map, {{0, 0}}], [%bar];",
        f"{LOAD.replace('tile', 'tile::scatter4')} [%tile], [%map, {{0, 0, 0, 0, 0}}], [%bar];",
        "cp.async.bulk.tensor.2d.shared::cta.global.bulk_group [%tile], [%map, {0, 0}], [%bar];",
        f"cp.async.bulk.tensor.2d.shared::cta.global.{COMPLETE}.multicast::cluster"
        " [%tile], [%map, {0, 0}], [%bar], %h;",
        f"{STORE.replace('shared::cta', 'shared::cluster')} [%map, {{0, 0}}], [%tile];",
        f"{STORE.replace('tile', 'tile::gather4')} [%map, {{0, 0, 0, 0, 0}}], [%tile];",
        f"{STORE} [%map, {{0, 0}}], [%tile], %h;",
        f"{STORE.replace('bulk_group', COMPLETE)} [%map, {{0, 0}}], [%tile];",
        f"{REDUCE}.bulk_group [%map, {{0, 0}}], [%tile];",
        f"{REDUCE}.mul.bulk_group [%map, {{0, 0}}], [%tile];",
        f"{REDUCE}.add.min.bulk_group [%map, {{0, 0}}], [%tile];",
        "cp.async.bulk.prefetch.tensor.2d.global [%map, {0, 0}];",
        "cp.async.bulk.prefetch.tensor.2d.L2.global.im2col [%map, {0, 0}];",
    ],
)
def test_unknown_forms(body):
    with pytest.raises(PtxError) as caught:
        launch(body, SMALL, np.zeros(128, np.float32), block=32)
    assert "line" in str(caught.value)


def test_prefetches_change_nothing():
    data = np.arange(128, dtype=np.float32)
    body = """
    cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%map, {0, -5}];
    cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4 [%map, {0, 1, 2, 3, 4}];
    """
    launch(body, SMALL, data, target="sm_100a")
    np.testing.assert_array_equal(data, np.arange(128))


def test_dtypes_of_elements():
    kinds = {one.name: one.dtype for one in ELEMENT_TYPES.values()}
    assert kinds["bf16"] == np.dtype(ml_dtypes.bfloat16)
    assert {name: dtype.itemsize for name, dtype in kinds.items()} == {
        "u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "f32": 4, "f64": 8,
        "bf16": 2, "f32.ftz": 4, "tf32": 4, "tf32.ftz": 4,
    }  # fmt: skip
