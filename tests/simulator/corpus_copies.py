"""Programs about asynchronous copies and barriers whose results on hardware are recorded.

As ``corpus.py``; ``record_copies.py`` runs them on a GPU, ``test_copies_recorded.py`` replays them.
Tensor maps are built by the programs themselves, so no driver is needed to encode them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from corpus import Case, generator

HEADER = ".version 8.8\n.target sm_90a\n.address_size 64\n"

SIZES = {
    "u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "f32": 4,
    "f32.ftz": 4, "f64": 8, "bf16": 2, "tf32": 4, "tf32.ftz": 4,
}  # fmt: skip
"""Bytes of the element types of ``tensormap.replace``, in the order of their numbers."""


def cases() -> Iterator[Case]:
    """All of them."""
    yield from tensor_cases()
    yield from reduction_cases()
    yield from bulk_cases()
    yield from barrier_cases()
    yield from lane_cases()
    yield from cluster_cases()


# Building blocks ----------------------------------------------------------------------------------

DECLARATIONS = """
.reg .b64 %data, %image, %map, %result, %a<4>, %state;
.reg .b32 %thread, %rank, %i, %o, %r<12>, %v<4>;
.reg .b16 %h;
.reg .pred %p, %first, %done;
mov.u32 %thread, %tid.x;
mov.u32 %rank, %cluster_ctarank;
setp.eq.u32 %first, %thread, 0;
"""


def kernel(name: str, parameters: list[str], shared: str, body: str, cluster: int = 1) -> str:
    """A module whose parameters are loaded to registers of their names."""
    listed = ", ".join(f".param .u64 p_{one}" for one in parameters)
    loads = "\n".join(f"ld.param.u64 %{one}, [p_{one}];" for one in parameters)
    directives = f".reqnctapercluster {cluster}, 1, 1\n" if cluster > 1 else ""
    return (
        f"{HEADER}{shared}\n.visible .entry kernel({listed})\n.reqntid 128, 1, 1\n{directives}"
        f"{{\n{DECLARATIONS}{loads}\n{body}\nret;\n}}\n"
    )


def block_copy(label: str, source: str, target: str, count: int) -> str:
    """All threads copy ``count`` bytes, a multiple of 16, in pieces of 16.

    ``source`` and ``target`` are like ``"global %data"`` and ``"shared tile"``: a space, and a
    register of 64 bits or a variable.
    """
    (source_space, source), (target_space, target) = source.split(), target.split()

    def place(base: str, number: int) -> str:
        if base.startswith("%"):
            return f"cvt.u64.u32 %a{number}, %o; add.u64 %a{number}, %a{number}, {base};"
        return (
            f"mov.u32 %r{number}, {base}; add.u32 %r{number}, %r{number}, %o;"
            f" cvt.u64.u32 %a{number}, %r{number};"
        )

    return f"""
shl.b32 %o, %thread, 4;
{label}:
setp.ge.u32 %p, %o, {count};
@%p bra {label}_end;
{place(source, 0)}
{place(target, 1)}
ld.{source_space}.v4.b32 {{%v0, %v1, %v2, %v3}}, [%a0];
st.{target_space}.v4.b32 [%a1], {{%v0, %v1, %v2, %v3}};
add.u32 %o, %o, 2048;
bra {label};
{label}_end:
"""


@dataclasses.dataclass(frozen=True)
class Map:
    """A tensor map over ``data``: as ``tensormap.replace`` wants it, minor to major."""

    element: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int = 0
    nan: bool = False
    start: int = 0

    @property
    def span(self) -> int:
        """How far rows of a box are apart in shared memory."""
        inner = self.box[0] * SIZES[self.element]
        return (0, 32, 64, 128)[self.swizzle] or inner

    @property
    def rows(self) -> int:
        """Rows of a box."""
        return math.prod(-(-b // s) for b, s in zip(self.box[1:], self.steps[1:], strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of a box."""
        return self.rows * self.box[0] * SIZES[self.element]

    def build(self) -> str:
        """PTX that makes it at ``%map``, through ``scratch`` in shared memory."""
        number = list(SIZES).index(self.element)
        lines = ["tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%a2], %a3;"]

        def replace(field: str, *values: int, bits: int = 32) -> None:
            text = ", ".join(map(str, values))
            lines.append(f"tensormap.replace.tile.{field}.shared::cta.b1024.b{bits} [%a2], {text};")

        replace("rank", len(self.sizes) - 1)
        for place in range(len(self.sizes)):
            replace("box_dim", place, self.box[place])
            replace("global_dim", place, self.sizes[place])
            replace("element_stride", place, self.steps[place])
        for place, stride in enumerate(self.strides):
            replace("global_stride", place, stride, bits=64)
        replace("elemtype", number)
        replace("interleave_layout", 0)
        replace("swizzle_mode", self.swizzle)
        replace("fill_mode", int(self.nan))
        clear = "\n".join(
            f"st.shared.v4.b32 [scratch+{n}], {{0, 0, 0, 0}};" for n in range(0, 128, 16)
        )
        replaced = "\n".join(f"@%first {line}" for line in lines)
        return f"""
mov.u32 %r0, scratch;
cvt.u64.u32 %a2, %r0;
add.u64 %a3, %data, {self.start};
{clear}
bar.sync 0;
{replaced}
bar.sync 0;
setp.lt.u32 %p, %thread, 32;
@!%p bra BUILT;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
    [%map], [scratch], 128;
BUILT:
bar.sync 0;
fence.proxy.tensormap::generic.acquire.gpu [%map], 128;
"""


def random_map(name: str, element: str, rank: int, swizzle: int, **options: object) -> Map:
    """A small tensor map; element strides with ``strided=True``."""
    random = generator(name)
    size = SIZES[element]
    limit = (256, 32, 64, 128)[swizzle]
    inner = int(
        random.choice([n for n in range(1, 257) if n * size % 16 == 0 and n * size <= limit])
    )
    box, room = [inner], 2048 // (inner * size)
    for _ in range(1, rank):
        box.append(int(random.integers(1, max(2, min(room, 9) + 1))))
        room = max(1, room // box[-1])
    steps = [1] * rank
    if options.get("strided"):
        steps = [int(random.integers(1, 5)) for _ in range(rank)]
    sizes = [int(random.integers(1, 2 * inner + 4))]
    strides, reach = [], -(-sizes[0] * size // 16) * 16
    for _ in range(1, rank):
        reach += 16 * int(random.integers(0, 2))
        strides.append(reach)
        sizes.append(int(random.integers(1, max(2, min(7, 4096 // reach + 1)))))
        reach *= sizes[-1]
    nan = bool(options.get("nan"))
    start = 16 * int(random.integers(0, 8))
    return Map(element, tuple(sizes), tuple(strides), tuple(box), tuple(steps), swizzle, nan, start)


def corner_of(name: str, tensor: Map, store: bool) -> tuple[int, ...]:
    """Coordinates of a box that is more or less inside the tensor."""
    random = generator("corner " + name)
    size = SIZES[tensor.element]
    unit = max(1, 16 // size)
    found = []
    for place, (length, extent) in enumerate(zip(tensor.sizes, tensor.box, strict=True)):
        low = 0 if store or random.random() < 0.4 else -extent
        high = max(low + 1, length + (random.random() < 0.1))
        one = int(random.integers(low, high))
        found.append(one // unit * unit if place == 0 else one)
    return tuple(found)


def contents(name: str, element: str, count: int) -> np.ndarray:
    """Random bytes: elements of a type, with special values among floats."""
    random = generator("contents " + name)
    size = SIZES[element]
    bits = random.integers(0, 2**64, count // size, np.uint64).astype(f"u{size}")
    widths = {"f16": (5, 10), "bf16": (8, 7), "f64": (11, 52)}
    if "f32" in element or element in widths:
        exponent, mantissa = widths.get(element, (8, 23))
        near = (1 << (exponent - 1)) - 1 + random.integers(-4, 5, count // size).astype(np.int64)
        ordinary = (bits & ((1 << mantissa) - 1 | 1 << (exponent + mantissa)).__index__()) | (
            near.astype(np.uint64) << np.uint64(mantissa)
        ).astype(bits.dtype)
        infinity = (1 << exponent) - 1 << mantissa
        sign = 1 << (exponent + mantissa)
        special = np.array(
            [0, sign, infinity, infinity | sign, infinity | 1, infinity | sign | 3]
            + [1, sign | 1, (1 << mantissa) - 1, sign | 7],
            np.uint64,
        ).astype(bits.dtype)
        choice = random.random(count // size)
        bits = np.where(choice < 0.7, ordinary, bits)
        bits = np.where(choice > 0.85, random.choice(special, count // size), bits)
    elif element == "u32":
        bits = np.where(random.random(count // size) < 0.5, bits & 7, bits).astype(bits.dtype)
    found = np.zeros(count, np.uint8)
    found[: bits.nbytes] = bits.view(np.uint8)
    return found


# Tensor copies ------------------------------------------------------------------------------------


def tensor_case(name: str, tensor: Map, operation: str) -> Case:
    """One box is loaded (``"load"``), stored, or reduced into the tensor. The result is what is
    then in shared memory, and in global memory."""
    corner = corner_of(name, tensor, operation != "load")
    reach = sum((n - 1) * s for n, s in zip(tensor.sizes[1:], tensor.strides, strict=True))
    reach += tensor.sizes[0] * SIZES[tensor.element] + tensor.start
    data_bytes = -(-reach // 128) * 128 + 128
    offset = 128 * int(generator("offset " + name).integers(0, 8))
    tile_bytes = -(-(offset + tensor.rows * tensor.span) // 128) * 128
    data = contents(name, tensor.element, data_bytes)
    image = contents("image " + name, tensor.element, tile_bytes)
    coordinates = "{" + ", ".join(map(str, corner)) + "}"
    rank = len(corner)
    if operation == "load":
        copy = f"""
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {tensor.bytes};
@%first cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r1], [%map, {coordinates}], [%r2];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %done, [bar], 0;
@!%done bra WAIT;
"""
    else:
        opcode = "cp.async" if operation == "store" else "cp.reduce.async"
        suffix = "" if operation == "store" else f".{operation}"
        copy = f"""
@%first {opcode}.bulk.tensor.{rank}d.global.shared::cta{suffix}.tile.bulk_group
    [%map, {coordinates}], [%r1];
@%first cp.async.bulk.commit_group;
@%first cp.async.bulk.wait_group 0;
bar.sync 0;
"""
    body = f"""
{tensor.build()}
{block_copy("FILL", "global %image", "shared tile", tile_bytes)}
@%first mbarrier.init.shared::cta.b64 [bar], 1;
fence.mbarrier_init.release.cluster;
fence.proxy.async;
bar.sync 0;
mov.u32 %r1, tile;
add.u32 %r1, %r1, {offset};
mov.u32 %r2, bar;
{copy}
{block_copy("DUMP", "shared tile", "global %result", tile_bytes)}
add.u64 %result, %result, {tile_bytes};
{block_copy("DATA", "global %data", "global %result", data_bytes)}
"""
    shared = (
        f".shared .align 1024 .b8 tile[{tile_bytes}];\n.shared .align 128 .b8 scratch[128];\n"
        ".shared .align 8 .b64 bar;"
    )
    ptx = kernel(name, ["data", "image", "map", "result"], shared, body)
    inputs = (data, image, np.zeros(128, np.uint8))
    return Case(name, ptx, inputs, (np.dtype(np.uint8), tile_bytes + data_bytes))


def tensor_cases() -> list[Case]:
    """Loads and stores of all element types, ranks and swizzles."""
    found = []
    elements = list(SIZES)
    for number in range(52):
        element, swizzle, rank = elements[number % 13], number % 4, 1 + number % 5
        name = f"tensor/load {number} {element} {rank}d swizzle {swizzle}"
        nan = "f" in element and number % 3 == 0
        tensor = random_map(name, element, rank, swizzle, nan=nan, strided=number % 4 == 1)
        found.append(tensor_case(name, tensor, "load"))
    for number in range(26):
        element, swizzle, rank = elements[number % 13], number % 4, 1 + number % 5
        name = f"tensor/store {number} {element} {rank}d swizzle {swizzle}"
        tensor = random_map(name, element, rank, swizzle, strided=number % 4 == 1)
        found.append(tensor_case(name, tensor, "store"))
    return found


_EXTREMES = ("u32", "s32", "u64", "s64", "f16", "bf16")
TENSOR_REDUCTIONS = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f32.ftz", "tf32", "tf32.ftz", "f64"),
    "min": _EXTREMES,
    "max": _EXTREMES,
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("u32", "u64"),
    "or": ("s32", "u64"),
    "xor": ("u32", "u64"),
}


def reduction_cases() -> list[Case]:
    """Reductions into tensors."""
    found = []
    for operation, elements in TENSOR_REDUCTIONS.items():
        for number, element in enumerate(elements):
            name = f"tensor/{operation} {element}"
            tensor = random_map(name, element, 1 + number % 3, number % 4)
            found.append(tensor_case(name, tensor, operation))
    return found


# Bulk copies --------------------------------------------------------------------------------------

BULK_REDUCTIONS = {
    "add": ("u32", "s32", "u64", "f32", "f64", "noftz.f16", "noftz.bf16"),
    "min": _EXTREMES,
    "max": _EXTREMES,
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}


def bulk_case(name: str, element: str, instruction: str, count: int, load: bool) -> Case:
    """One bulk copy of ``count`` bytes between ``data+32`` and ``tile+48``."""
    element = {"b32": "u32", "b64": "u64"}.get(element, element)
    total = -(-(count + 128) // 16) * 16
    data, image = contents(name, element, total), contents("image " + name, element, total)
    if load:
        copy = f"""
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {count};
@%first {instruction} [%r1], [%a3], {count}, [%r2];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %done, [bar], 0;
@!%done bra WAIT;
"""
    else:
        copy = f"""
@%first {instruction} [%a3], [%r1], {count};
@%first cp.async.bulk.commit_group;
@%first cp.async.bulk.wait_group 0;
bar.sync 0;
"""
    body = f"""
{block_copy("FILL", "global %image", "shared tile", total)}
@%first mbarrier.init.shared::cta.b64 [bar], 1;
fence.mbarrier_init.release.cluster;
fence.proxy.async;
bar.sync 0;
mov.u32 %r1, tile;
add.u32 %r1, %r1, 48;
mov.u32 %r2, bar;
add.u64 %a3, %data, 32;
{copy}
{block_copy("DUMP", "shared tile", "global %result", total)}
add.u64 %result, %result, {total};
{block_copy("DATA", "global %data", "global %result", total)}
"""
    shared = f".shared .align 128 .b8 tile[{total}];\n.shared .align 8 .b64 bar;"
    ptx = kernel(name, ["data", "image", "result"], shared, body)
    return Case(name, ptx, (data, image), (np.dtype(np.uint8), 2 * total))


def bulk_cases() -> list[Case]:
    """Bulk copies and reductions of bytes."""
    load = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    store = "cp.async.bulk.global.shared::cta.bulk_group"
    found = [bulk_case(f"bulk/load {n}", "u8", load, n, True) for n in (16, 96, 1024)]
    found += [bulk_case(f"bulk/store {n}", "u8", store, n, False) for n in (16, 96, 1024)]
    for operation, types in BULK_REDUCTIONS.items():
        for kind in types:
            name = f"bulk/{operation} {kind}"
            instruction = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{kind}"
            found.append(bulk_case(name, kind.split(".")[-1], instruction, 480, False))
    return found


# Barriers -----------------------------------------------------------------------------------------


def sequence_case(number: int) -> Case:
    """One thread does what it likes with an mbarrier; after each step the result has the pending
    arrivals of the state, and whether the phases of both parities are complete."""
    name = f"barrier/sequence {number}"
    random = generator(name)
    expected = pending = int(random.integers(1, 7))
    missing = 0
    lines = [f"mbarrier.init.shared::cta.b64 [bar], {expected};"]
    place = 0

    def look() -> None:
        nonlocal place
        for parity in (0, 1):
            lines.extend(
                (
                    f"mbarrier.test_wait.parity.shared::cta.b64 %p, [bar], {parity};",
                    "selp.b32 %r4, 1, 0, %p;",
                    f"st.global.b32 [%result+{place}], %r4;",
                )
            )
            place += 4

    for _ in range(40):
        choice = random.random()
        if choice < 0.5 and pending:
            count = int(random.integers(1, pending + 1))
            amount = 0
            opcode = "mbarrier.arrive"
            if count == 1 and random.random() < 0.3:
                amount = int(random.integers(0, 500))
                opcode += ".expect_tx"
            elif expected - count >= 1 and random.random() < 0.15:
                opcode += "_drop"
                expected -= count
            missing += amount
            operand = amount if "expect" in opcode else count
            lines.append(f"{opcode}.shared::cta.b64 %state, [bar], {operand};")
            lines.append("mbarrier.pending_count.b64 %r5, %state;")
            lines.append(f"st.global.b32 [%result+{place}], %r5;")
            place += 4
            pending -= count
        elif choice < 0.75:
            amount = int(random.integers(1, 500))
            lines.append(f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], {amount};")
            missing += amount
        else:
            amount = missing if missing > 0 and random.random() < 0.7 else 16
            lines.append(
                f"mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [bar], {amount};"
            )
            missing -= amount
        if not pending and not missing:
            pending = expected
        look()
    body = "@!%first bra END;\n" + "\n".join(lines) + "\nEND:"
    ptx = kernel(name, ["result"], ".shared .align 8 .b64 bar;", body)
    return Case(name, ptx, (), (np.dtype(np.uint32), place // 4))


def barrier_reduction(number: int) -> Case:
    """Reductions at barriers of parts of a block, whose warps come at different times."""
    name = f"barrier/reduction {number}"
    flags = generator(name).integers(0, 2, 128).astype(np.uint32)
    flags[: 32 * (number % 3)] = 1 if number % 2 else 0
    body = """
mul.wide.u32 %a0, %thread, 4;
add.u64 %a1, %data, %a0;
ld.global.b32 %r0, [%a1];
setp.ne.b32 %p, %r0, 0;
and.b32 %r1, %thread, 64;
setp.ne.b32 %done, %r1, 0;
shr.u32 %r2, %thread, 6;
add.u32 %r2, %r2, 1;
mul.wide.u32 %a0, %thread, 16;
add.u64 %a2, %result, %a0;
@%done bra SECOND;
barrier.cta.red.popc.u32 %r3, 4, 64, %p;
bra BOTH;
SECOND:
barrier.cta.red.popc.aligned.u32 %r3, 5, 64, !%p;
BOTH:
bar.red.popc.u32 %r4, 0, %p;
bar.red.and.pred %done, %r2, 64, %p;
selp.b32 %r5, 1, 0, %done;
barrier.cta.red.or.pred %done, %r2, 64, %p;
selp.b32 %r6, 1, 0, %done;
st.global.v4.b32 [%a2], {%r3, %r4, %r5, %r6};
"""
    ptx = kernel(name, ["data", "result"], "", body)
    return Case(name, ptx, (flags,), (np.dtype(np.uint32), 512))


def barrier_cases() -> list[Case]:
    """Barriers of all kinds."""
    return [sequence_case(n) for n in range(8)] + [barrier_reduction(n) for n in range(4)]


# Copies of single lanes ---------------------------------------------------------------------------


def lane_case(size: int, cache: str, form: str) -> Case:
    """``cp.async`` of 4, 8 or 16 bytes; all of them, a part, or none if a predicate says so."""
    name = f"lanes/{cache} {size} {form}"
    data = contents(name, "u8", 128 * size)
    counts = generator(name).integers(0, size + 1, 128).astype(np.uint32)
    wait = "cp.async.wait_all;" if size != 8 else "cp.async.commit_group; cp.async.wait_group 0;"
    last = {"whole": "", "part": ", %r0", "ignored": ", %p"}[form]
    body = f"""
{block_copy("FILL", "global %data", "shared tile", 128 * size)}
bar.sync 0;
mul.wide.u32 %a0, %thread, 4;
add.u64 %a0, %a0, %image;
ld.global.b32 %r0, [%a0];
setp.gt.u32 %p, %r0, {size // 2};
mul.wide.u32 %a1, %thread, {size};
add.u64 %a1, %a1, %data;
sub.u32 %r2, 127, %thread;
mov.u32 %r1, tile;
mad.lo.u32 %r1, %r2, {size}, %r1;
cp.async.{cache}.shared::cta.global [%r1], [%a1], {size}{last};
{wait}
bar.sync 0;
{block_copy("DUMP", "shared tile", "global %result", 128 * size)}
"""
    shared = f".shared .align 128 .b8 tile[{128 * size}];"
    ptx = kernel(name, ["data", "image", "result"], shared, body)
    return Case(name, ptx, (data, counts), (np.dtype(np.uint8), 128 * size))


def lane_cases() -> list[Case]:
    """All forms of ``cp.async``."""
    forms = [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)]
    return [
        lane_case(size, cache, form)
        for cache, size in forms
        for form in ("whole", "part", "ignored")
    ]


# Clusters -----------------------------------------------------------------------------------------


def cluster_case(name: str, cluster: int, begin: str, amount: int) -> Case:
    """Blocks of clusters copy and signal as ``begin`` says; each expects ``amount`` bytes, and its
    shared memory is the result."""
    total = 1024
    blocks = 2 * cluster
    data = contents(name, "u8", total * blocks)
    body = f"""
mov.u32 %r11, %ctaid.x;
mul.wide.u32 %a0, %r11, {total};
add.u64 %data, %data, %a0;
add.u64 %result, %result, %a0;
{block_copy("FILL", "global %data", "shared tile", total)}
@%first mbarrier.init.shared::cta.b64 [bar], 1;
fence.mbarrier_init.release.cluster;
fence.proxy.async;
bar.sync 0;
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {amount};
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.u32 %r1, tile;
mov.u32 %r2, bar;
xor.b32 %r8, %rank, 1;
mapa.shared::cluster.u32 %r3, %r1, %r8;
mapa.shared::cluster.u32 %r4, %r2, %r8;
{begin}
WAIT:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %done, [bar], 0;
@!%done bra WAIT;
{block_copy("DUMP", "shared tile", "global %result", total)}
barrier.cluster.arrive;
barrier.cluster.wait;
"""
    shared = f".shared .align 1024 .b8 tile[{total}];\n.shared .align 8 .b64 bar;"
    ptx = kernel(name, ["data", "result"], shared, body, cluster)
    result = (np.dtype(np.uint8), total * blocks)
    return Case(name, ptx, (data,), result, grid=blocks, cluster=cluster)


def cluster_cases() -> list[Case]:
    """Copies between blocks of a cluster."""
    complete = "mbarrier::complete_tx::bytes"
    multicast = f"cp.async.bulk.shared::cluster.global.{complete}.multicast::cluster"
    found = []
    for cluster in (2, 4):
        # Each block sends 64 bytes to all blocks, to a place of its own.
        begin = f"""
mad.lo.u32 %r5, %rank, 80, %r1;
add.u64 %a1, %data, 128;
mov.b16 %h, {(1 << cluster) - 1};
@%first {multicast} [%r5], [%a1], 64, [%r2], %h;
"""
        found.append(cluster_case(f"cluster/multicast {cluster}", cluster, begin, 64 * cluster))
        begin = f"""
add.u32 %r5, %r3, 256;
add.u32 %r6, %r1, 512;
@%first cp.async.bulk.shared::cluster.shared::cta.{complete} [%r5], [%r6], 128, [%r4];
"""
        found.append(cluster_case(f"cluster/copy {cluster}", cluster, begin, 128))
    begin = f"""
mad.lo.u32 %r5, %thread, 8, %r3;
st.async.weak.shared::cluster.{complete}.v2.b32 [%r5], {{%thread, %rank}}, [%r4];
"""
    found.append(cluster_case("cluster/st.async", 2, begin, 1024))
    for operation, kind in (
        ("add", "u32"), ("min", "s32"), ("max", "u32"), ("inc", "u32"), ("dec", "u32"),
        ("and", "b32"), ("or", "b32"), ("xor", "b32"),
    ):  # fmt: skip
        begin = f"""
and.b32 %r6, %thread, 31;
mad.lo.u32 %r5, %r6, 4, %r3;
mad.lo.u32 %r7, %r6, 1234567, 89;
red.async.relaxed.cluster.shared::cluster.{complete}.{operation}.{kind} [%r5], %r7, [%r4];
"""
        found.append(cluster_case(f"cluster/red.async.{operation}", 2, begin, 512))
    for operation, kind in (("add", "u64"), ("max", "s32"), ("xor", "b32"), ("inc", "u32")):
        begin = f"""
add.u32 %r5, %r3, 256;
add.u32 %r6, %r1, 512;
@%first cp.reduce.async.bulk.shared::cluster.shared::cta.{complete}.{operation}.{kind}
    [%r5], [%r6], 128, [%r4];
"""
        found.append(cluster_case(f"cluster/reduce {operation}", 2, begin, 128))
    return found
