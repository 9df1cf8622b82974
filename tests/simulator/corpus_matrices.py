"""Matrix instructions for the comparison with hardware: all forms of ``mma`` and ``wmma``, moves of
matrices, and the corners of ``wgmma``'s descriptors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from corpus import Case, generator
from matrix_load_programs import SHARED, load_program
from mma_programs import (
    BITS,
    DTYPES,
    FLOATS,
    INTEGERS,
    extents,
    packed,
    places,
    product_ptx,
    quarter_places,
    random_values,
    register_kind,
)
from wgmma_forms import initial, plain, tail
from wgmma_programs import (
    DEPTH,
    WAIT,
    Matrix,
    accumulator_words,
    descriptor_code,
    listed,
    load_words,
    program,
    store,
    store_words,
)
from wgmma_programs import (
    random_values as random_elements,
)
from wmma_programs import COUNTS, FORMS, accumulator_count, load_ptx, stored
from wmma_programs import product_ptx as wmma_ptx

WARPS = 2

ABSOLUTE = {"f32": 2.0**-17, "f16": 2.0**-6}
"""How far sums of around 16 may be off: tensor cores cut off what the simulator rounds."""


def cases() -> Iterator[Case]:
    """All of them."""
    for part in (products, quarters, special_products, opaque, moves, base_offsets, wide):
        yield from part()


def close(kind: str) -> dict[str, object]:
    """The fields of a case whose results are floats that may differ a little."""
    if kind not in ABSOLUTE:
        return {}
    return {"ulp": 0, "absolute": ABSOLUTE[kind]}


def result_type(kind: str) -> np.dtype:
    return np.dtype({"f32": "f4", "f16": "f2", "f64": "u8"}.get(kind, "u4"))


# mma ----------------------------------------------------------------------------------------------


def products() -> Iterator[Case]:
    """All shapes and types."""
    for shape, d, a, b in FLOATS:
        if d != "f64":
            yield product(f"mma {shape} {d}.{a}.{b}", shape, (d, a, b, d))
            continue
        for mode in ("rn", "rz", "rm", "rp"):
            yield product(f"mma {shape} f64 {mode}", shape, ("f64",) * 4, f".{mode}")
    for shape, a, b in INTEGERS:
        yield product(f"mma {shape} {a}.{b}", shape, ("s32", a, b, "s32"))
    for shape in ("m8n8k16", "m16n8k16", "m16n8k32"):
        kinds = ("s32", "s8", "u8", "s32")
        yield product(f"mma {shape} satfinite", shape, kinds, ".satfinite", edge=True)
    for operation in ("xor", "and"):
        for shape in ("m8n8k128", "m16n8k128", "m16n8k256"):
            kinds = ("s32", "b1", "b1", "s32")
            yield product(f"mma {shape} {operation}", shape, kinds, f".{operation}.popc")


def product(
    name: str, shape: str, kinds: tuple[str, ...], suffix: str = "", edge: bool = False
) -> Case:
    """``mma`` of random matrices; with ``edge``, accumulators at the bounds of ``.s32``."""
    d, a_kind, b_kind, c_kind = kinds
    m, n, k = extents(shape)
    random = generator(name)
    a = random_values(random, a_kind, (WARPS, m, k))
    b = random_values(random, b_kind, (WARPS, k, n))
    c = random_values(random, c_kind, (WARPS, m, n))
    if edge:
        c = np.where(c > 0, 2.0**31 - 1000, -(2.0**31) + 1000)
    matrices = tuple(zip((a, b, c), (a_kind, b_kind, c_kind), strict=True))
    return fragments(f"mma.sync.aligned.{shape}.row.col.{'.'.join(kinds)}{suffix}", name, matrices)


def fragments(instruction: str, name: str, matrices: tuple, **options: object) -> Case:
    """``mma`` of matrices (A, B and C, with their types), of shape (warps, rows, columns)."""
    shape = next(one for one in instruction.split(".") if one[0] == "m" and one[1].isdigit())
    words = [
        packed(matrix[:, place[..., 0], place[..., 1]], kind)
        for (matrix, kind), place in zip(matrices, places(shape, BITS[matrices[0][1]]), strict=True)
    ]
    kind = matrices[2][1]
    return finished(instruction, name, words, words[2].shape[-1], (kind, kind), options)


def finished(
    instruction: str,
    name: str,
    words: list[np.ndarray],
    registers: int,
    kinds: tuple[str, str],
    options: dict[str, object],
) -> Case:
    d, c = kinds
    words = [np.ascontiguousarray(one) for one in words]
    ptx = product_ptx(instruction, words, registers, (register_kind(d), register_kind(c)))
    dtype = result_type(d)
    count = len(words[0]) * 32 * registers * (2 if d == "f16" else 1)
    return Case(
        name,
        ptx,
        tuple(words),
        (dtype, count),
        block=32 * len(words[0]),
        **{**close(d), **options},
    )


def quarters() -> Iterator[Case]:
    """``mma.m8n8k4`` of f16, four products at once."""
    for layouts in [(a, b) for a in ("row", "col") for b in ("row", "col")]:
        for d, c_kind in (("f16", "f16"), ("f32", "f32"), ("f32", "f16")):
            instruction = f"mma.sync.aligned.m8n8k4.{'.'.join(layouts)}.{d}.f16.f16.{c_kind}"
            name = f"mma m8n8k4 {'.'.join(layouts)} {d}.{c_kind}"
            random = generator(name)
            quarter = np.arange(32)[:, None] % 16 // 4
            words = [
                packed(
                    random_values(random, kind, (WARPS, 4, *extent))[
                        :, quarter, place[..., 0], place[..., 1]
                    ],
                    kind,
                )
                for extent, place, kind in zip(
                    ((8, 4), (4, 8), (8, 8)),
                    quarter_places(layouts, c_kind),
                    ("f16", "f16", c_kind),
                    strict=True,
                )
            ]
            registers = 4 if d == "f16" else 8
            yield finished(instruction, name, words, registers, (d, c_kind), {})


SPECIAL = (np.inf, -np.inf, np.nan, 0.0, -0.0, -1e-7)
EXTREMES = {"f16": (65504, -65504, 6e-8), "bf16": (3e38, 1e-38), "tf32": (3e38, 1e-38)}


def special_products() -> Iterator[Case]:
    """Infinities, NaNs and extreme numbers among the elements."""
    for kind, shape in (("f16", "m16n8k16"), ("bf16", "m16n8k16"), ("tf32", "m16n8k8")):
        for d in ("f16", "f32") if kind == "f16" else ("f32",):
            name = f"mma {shape} {d}.{kind} special"
            random = generator(name)
            m, n, k = extents(shape)

            def mixed(extent, held, random=random):
                values = random.standard_normal((WARPS, *extent)).astype(np.float32)
                chosen = np.array([*SPECIAL, *EXTREMES.get(held, ())], np.float32)
                some = random.random(values.shape) < 0.03
                with np.errstate(over="ignore"):
                    return np.where(some, random.choice(chosen, values.shape), values).astype(
                        DTYPES[held]
                    )

            matrices = (
                (mixed((m, k), kind), kind),
                (mixed((k, n), kind), kind),
                (mixed((m, n), d), d),
            )
            instruction = f"mma.sync.aligned.{shape}.row.col.{d}.{kind}.{kind}.{d}"
            # Sums with the largest numbers of f16 are around 2**17.
            absolute = 2.0**-5 if kind == "f16" else ABSOLUTE[d]
            yield fragments(instruction, name, matrices, ulp=4, absolute=absolute)


# wmma ---------------------------------------------------------------------------------------------


def opaque() -> Iterator[Case]:
    """``wmma``: what the registers hold, and products."""
    for kind, shapes in COUNTS.items():
        for shape, counts in shapes.items():
            for which, count in zip("ab", counts, strict=True):
                layouts = ("row", "col")
                if BITS[kind] < 8:
                    layouts = ("row",) if which == "a" else ("col",)
                m, n, k = extents(shape)
                elements = m * k if which == "a" else k * n
                for layout in layouts:
                    yield opaque_load(which, layout, shape, kind, count, elements)
    for shape, kinds in (
        ("m16n16k16", ("f16", "f32", "s32")),
        ("m32n8k16", ("f16", "f32", "s32")),
        ("m8n32k16", ("f16", "f32", "s32")),
        ("m16n16k8", ("f32",)),
        ("m8n8k4", ("f64",)),
        ("m8n8k32", ("s32",)),
    ):
        m, n, _ = extents(shape)
        for kind in kinds:
            for layout in ("row", "col"):
                count = accumulator_count(shape, kind)
                yield opaque_load("c", layout, shape, kind, count, m * n)
    for shape, d, a, c in FORMS:
        yield opaque_product(shape, (d, a, c))


def opaque_load(which: str, layout: str, shape: str, kind: str, count: int, elements: int) -> Case:
    name = f"wmma.load.{which} {layout} {shape} {kind}"
    memory = generator(name).integers(0, 256, elements * BITS[kind] // 8, np.uint8)
    ptx = load_ptx(which, layout, shape, kind, count)
    return Case(
        name, ptx, (memory,), (np.dtype("u8" if kind == "f64" else "u4"), 32 * count), block=32
    )


def opaque_product(shape: str, kinds: tuple[str, str, str]) -> Case:
    d, a_kind, c_kind = kinds
    name = f"wmma.mma {shape} {d}.{a_kind}.{c_kind}"
    random = generator(name)
    m, n, k = extents(shape)
    layouts = ("row", "col", "row")
    images = [
        stored(random_values(random, kind, (WARPS, *extent)), kind, layout, stride)
        for kind, extent, layout, stride in zip(
            (a_kind, a_kind, c_kind), ((m, k), (k, n), (m, n)), layouts, (k, k, n), strict=True
        )
    ]
    dtype = result_type(d)
    bytes_of_d = m * n * (4 if d == "s32" else dtype.itemsize)
    sizes = (*[one.nbytes // WARPS for one in images], bytes_of_d)
    suffix = "wmma.mma.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32.xor.popc"
    ptx = wmma_ptx(shape, kinds, layouts, (k, k, n), sizes, suffix if a_kind == "b1" else "")
    count = WARPS * bytes_of_d // dtype.itemsize
    return Case(name, ptx, tuple(images), (dtype, count), block=32 * WARPS, **close(d))


# Moves of matrices --------------------------------------------------------------------------------


def moves() -> Iterator[Case]:
    """``ldmatrix`` of fewer than four matrices: other lanes have no addresses."""
    for number in (1, 2, 4):
        for trans in ("", ".trans"):
            name = f"ldmatrix.sync.aligned.m8n8.x{number}{trans}.shared.b16"
            ptx, images, offsets = load_program(name, number, 8 * number)
            count = len(images) * 64 * number
            yield Case(
                name,
                ptx,
                (images, offsets),
                (np.dtype("u4"), count),
                grid=len(images),
                block=64,
                shared=SHARED,
            )


# wgmma --------------------------------------------------------------------------------------------


def base_offsets() -> Iterator[Case]:
    """Matrices whose swizzling pattern does not begin where addresses say so."""
    for swizzle in (32, 64, 128):
        for transposed in (False, True):
            matrices = [
                Matrix(swizzle, transposed, 8192 if transposed else 16, 8 * swizzle, 4096 + start,
                       0, base)
                for start in (0, 128, 384, 512, 1024)
                for base in (0, 1, 3, 4, 6)
            ]  # fmt: skip
            name = f"wgmma base offsets {swizzle} {'MN' if transposed else 'K'}"
            image = generator(name).integers(-8, 9, (1, 16384)).astype(np.float16).view(np.uint8)
            code = [*descriptor_code("a", plain(64, 0)), ".reg .b64 %b; .reg .f32 %d<4>;"]
            for number, matrix in enumerate(matrices):
                code += [
                    f"add.s64 %b, %base64, {matrix.descriptor():#x};",
                    "wgmma.fence.sync.aligned;",
                    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {listed('d', 4)}, %a, %b,"
                    f" 0, 1, 1, 0, {int(transposed)};",
                    *WAIT,
                    *store_words("d", 4, 4 * number),
                ]
            yield warpgroup(name, code, image, np.zeros((128, 1), np.uint32), 4 * len(matrices))


def wide() -> Iterator[Case]:
    """The largest shape, with negation, and without accumulators first."""
    for kinds in (("f32", "f16", "f16"), ("f16", "f16", "f16"), ("s32", "s8", "u8")):
        d, a_kind, b_kind = kinds
        name, n = f"wgmma n256 {'.'.join(kinds)}", 256
        random = generator(name)
        a, b = random_elements(random, a_kind, 64), random_elements(random, b_kind, n)
        matrix_a, matrix_b = plain(64, 0), plain(n, 2048)
        image = np.zeros((1, 2048 + 8192), np.uint8)
        store(image[0], matrix_a, a)
        store(image[0], matrix_b, b)
        held = accumulator_words(initial(random, d, n))
        count = held.shape[1]
        code = [
            *descriptor_code("a", matrix_a),
            *descriptor_code("b", matrix_b),
            *load_words("d", count, 0, register_kind(d)),
            "wgmma.fence.sync.aligned;",
        ]
        for scale in ("%no", "%yes", "1"):
            code.append(
                f"wgmma.mma_async.sync.aligned.m64n{n}k{DEPTH[a_kind]}.{'.'.join(kinds)}"
                f" {listed('d', count)}, %a, %b, {tail(kinds, scale, (-1, 1))};"
            )
        code += [*WAIT, *store_words("d", count, 0)]
        yield warpgroup(name, code, image, held, count, d)


def warpgroup(
    name: str,
    code: list[str],
    image: np.ndarray,
    words: np.ndarray,
    outputs: int,
    kind: str = "",
) -> Case:
    made = program(code, image, words, outputs)
    dtype = result_type(kind)
    options = {"ulp": 0, "absolute": 2.0**-16 if kind == "f32" else 2.0**-5}
    return Case(
        name,
        made.ptx,
        (made.arrays[0], made.arrays[1]),
        (dtype, 128 * outputs * 4 // dtype.itemsize),
        block=128,
        shared=made.shared,
        **(options if kind in ABSOLUTE else {}),
    )
