"""Operands in shared memory: majors, swizzles, shapes, slices and other views."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from products_support import (
    BF16,
    E4M3,
    F16,
    F32,
    I8,
    I32,
    Operand,
    check,
    load,
    multiply,
    run,
    transforms,
    values,
    wide,
)

from pallasite import gpu as plgpu

pytestmark = pytest.mark.runs_kernels

SWIZZLES = (128, 64, 32, 16)


def all_pairs(left: Operand, rights: list[Operand], accumulator) -> None:
    """Multiplies a matrix by several, in one kernel."""
    (m, k), n = (left.rows, left.columns), rights[0].columns
    count = len(rights)

    def body(a_ref, *refs):
        b_refs, out_ref, refs = refs[:count], refs[count], refs[count + 1 :]
        a_smem, b_smem, barrier = refs[0], refs[1 : count + 1], refs[-1]
        load([(a_ref, a_smem), *zip(b_refs, b_smem, strict=True)], barrier)
        for number, (right, ref) in enumerate(zip(rights, b_smem, strict=True)):

            def scope(acc, right=right, ref=ref):
                plgpu.wgmma(acc, left.view(a_smem), right.view(ref))
                return acc[...]

            out_ref[number] = pl.run_scoped(scope, plgpu.ACC((m, n), accumulator))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, m, n), accumulator),
        scratch_types=[
            left.scratch,
            *[right.scratch for right in rights],
            plgpu.Barrier(num_arrivals=count + 1),
        ],
    )
    a = values("a", (m, k), left.dtype)
    matrices = [values(f"b{i}", (k, n), right.dtype) for i, right in enumerate(rights)]
    arrays = [right.stored(b) for right, b in zip(rights, matrices, strict=True)]
    results = run(kernel, left.stored(a), *arrays)
    for result, b in zip(results, matrices, strict=True):
        check(result, wide(a) @ wide(b))


@pytest.mark.parametrize("right_transposed", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.sampled(alone=("right_transposed",))
def test_majors_and_swizzles_of_16_bits(swizzle, transposed, right_transposed):
    """All combinations of both operands' majors and swizzles."""
    left = Operand(64, 64, BF16, swizzle, transposed)
    all_pairs(left, [Operand(64, 64, BF16, s, right_transposed) for s in SWIZZLES], F32)


@pytest.mark.parametrize(("dtype", "accumulator"), [(F32, F32), (E4M3, F32), (I8, I32)])
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_swizzles_of_other_widths(dtype, accumulator, swizzle):
    k = 128 // dtype.itemsize
    left = Operand(64, k, dtype, swizzle)
    all_pairs(left, [Operand(k, 16, dtype, s, True) for s in SWIZZLES], accumulator)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (64, 8, 16),
        (64, 24, 48),
        (128, 40, 16),
        (192, 64, 32),
        (256, 64, 16),
        (64, 264, 16),
        (64, 296, 32),
        (64, 512, 16),
        (64, 16, 272),
    ],
)
@pytest.mark.parametrize("form", ["shared", "transposed", "registers"])
@pytest.mark.sampled(alone=("form",))
def test_shapes(m, n, k, form):
    """Several instructions along each dimension; depths that are no multiple of the swizzle's."""
    transposed = form == "transposed"
    left = Operand(m, k, BF16, 128 if transposed else 32, transposed)
    right = Operand(k, n, BF16, 16 if transposed else 32, not transposed)
    a, b = values("a", (m, k), BF16), values("b", (k, n), BF16)
    if form == "registers":
        function = multiply(None, right, F32, shape=(m, k), left_dtype=BF16)
        result = run(function, a, right.stored(b), spills=n == 512)
    else:
        function = multiply(left, right)
        result = run(function, left.stored(a), right.stored(b), spills=n == 512)
    check(result, wide(a) @ wide(b))


@pytest.mark.parametrize("n", [8, 16, 24, 32, 40, 56, 264, 280])
def test_columns_of_integers(n):
    """Instructions for integers have 8, 24 or a multiple of 16 columns."""
    left, right = Operand(64, 32, I8, 32), Operand(32, n, I8, 32, True)
    a, b = values("a", (64, 32), I8), values("b", (32, n), I8)
    check(run(multiply(left, right, I32), a, right.stored(b)), wide(a) @ wide(b))


def sliced(body, a: np.ndarray, b: np.ndarray, scratch, shape, *further) -> np.ndarray:
    """Runs a kernel that multiplies parts of what it loads whole; one barrier for two copies."""

    def whole(a_ref, b_ref, *refs):
        *refs, a_smem, b_smem, barrier = refs
        load([(a_ref, a_smem), (b_ref, b_smem)], barrier)
        *further_refs, out_ref = refs

        def scope(acc):
            body(acc, a_smem, b_smem, *[ref[0] for ref in further_refs])
            return acc[...]

        out_ref[...] = pl.run_scoped(scope, plgpu.ACC(shape))

    kernel = plgpu.kernel(
        whole,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=[*scratch, plgpu.Barrier(num_arrivals=2)],
    )
    return run(kernel, a, b, *further)


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("step", [16, 32, 64])
def test_depth_narrower_or_wider_than_the_swizzle(swizzle, step):
    """Parts along K of the whole operands, each contiguous along K."""
    a, b = values("a", (64, 128), BF16), values("b", (128, 16), BF16)

    def body(acc, a_smem, b_smem):
        for start in range(0, 128, step):
            window = slice(start, start + step)
            plgpu.wgmma(
                acc, a_smem.at[:, window], plgpu.transpose_ref(b_smem.at[:, window], (1, 0))
            )

    scratch = [
        plgpu.SMEM((64, 128), BF16, transforms=transforms(swizzle, BF16)),
        plgpu.SMEM((16, 128), BF16, transforms=transforms(swizzle, BF16)),
    ]
    check(sliced(body, a, b.T, scratch, (64, 16)), wide(a) @ wide(b))


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("step", [16, 32, 64])
def test_depth_across_the_contiguous_dimension(swizzle, step):
    """Parts along K of operands that are contiguous along M and N."""
    a, b = values("a", (64, 128), BF16), values("b", (128, 64), BF16)

    def body(acc, a_smem, b_smem):
        for start in range(0, 128, step):
            window = slice(start, start + step)
            plgpu.wgmma(acc, plgpu.transpose_ref(a_smem.at[window], (1, 0)), b_smem.at[window])

    scratch = [
        plgpu.SMEM((128, 64), BF16, transforms=transforms(swizzle, BF16)),
        plgpu.SMEM((128, 64), BF16, transforms=transforms(swizzle, BF16)),
    ]
    check(sliced(body, a.T, b, scratch, (64, 64)), wide(a) @ wide(b))


@pytest.mark.parametrize("columns", [8, 16, 32])
def test_columns_narrower_than_the_swizzle(columns):
    """Parts along N of b, which is contiguous along N: within the rows of a swizzled block."""
    a, b = values("a", (64, 16), BF16), values("b", (16, 128), BF16)

    def body(acc, a_smem, b_smem):
        for start in range(0, 128, columns):
            window = slice(start, start + columns)
            plgpu.wgmma(acc.at[:, window], a_smem, b_smem.at[:, window])

    scratch = [
        plgpu.SMEM((64, 16), BF16, transforms=transforms(32, BF16)),
        plgpu.SMEM((16, 128), BF16, transforms=transforms(128, BF16)),
    ]
    check(sliced(body, a, b, scratch, (64, 128)), wide(a) @ wide(b))


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("index", ["static", "dynamic"])
@pytest.mark.sampled
def test_slots(swizzle, transposed, index):
    """One of several stages of a ring, by a number known while tracing or not."""
    left = Operand(64, 64, BF16, swizzle, transposed)
    right = Operand(64, 64, BF16, swizzle, not transposed)
    a, b = values("a", (3, 64, 64), BF16), values("b", (3, 64, 64), BF16)
    order = np.asarray([1, 0, 2], np.int32)

    def body(acc, a_smem, b_smem, *numbers):
        slots = list(order) if not numbers else list(numbers)
        for number, slot in enumerate(slots):
            if index == "static":
                slot = int(slot)
            plgpu.wgmma(acc, left.view(a_smem.at[slot]), right.view(b_smem.at[number]))

    def stacked(operand):
        return plgpu.SMEM((3, 64, 64), BF16, transforms=transforms(operand.swizzle, BF16))

    stored_a = np.stack([np.asarray(left.stored(one)) for one in a])
    stored_b = np.stack([np.asarray(right.stored(one)) for one in b])
    further = () if index == "static" else tuple(order[i : i + 1] for i in range(3))
    result = sliced(body, stored_a, stored_b, [stacked(left), stacked(right)], (64, 64), *further)
    check(result, sum(wide(a[slot]) @ wide(b[i]) for i, slot in enumerate(order)))


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_rows_from_a_traced_start(swizzle):
    """Rows of a, and of b stored transposed, from a multiple of 8 that is computed."""
    a, b = values("a", (128, 64), BF16), values("b", (64, 48), BF16)

    def body(acc, a_smem, b_smem, row, column):
        rows = pl.ds(pl.multiple_of(row, 8), 64)
        columns = pl.ds(pl.multiple_of(column * 8, 8), 16)
        plgpu.wgmma(acc, a_smem.at[rows], plgpu.transpose_ref(b_smem.at[columns], (1, 0)))

    scratch = [
        plgpu.SMEM((128, 64), BF16, transforms=transforms(swizzle, BF16)),
        plgpu.SMEM((48, 64), BF16, transforms=transforms(swizzle, BF16)),
    ]
    for row, column in [(0, 0), (64, 4), (24, 1)]:
        numbers = [np.asarray([one], np.int32) for one in (row, column)]
        result = sliced(body, a, b.T, scratch, (64, 16), *numbers)
        expected = wide(a)[row : row + 64] @ wide(b)[:, 8 * column : 8 * column + 16]
        check(result, expected)


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_depth_from_a_traced_start(swizzle):
    """A part along K, from a multiple of its size that is computed."""
    a, b = values("a", (64, 128), BF16), values("b", (128, 64), BF16)

    def body(acc, a_smem, b_smem, step):
        @pl.loop(0, step)
        def _(number):
            window = pl.ds(pl.multiple_of(number * 16, 16), 16)
            plgpu.wgmma(acc, a_smem.at[:, window], b_smem.at[window])

    scratch = [
        plgpu.SMEM((64, 128), BF16, transforms=transforms(swizzle, BF16)),
        plgpu.SMEM((128, 64), BF16, transforms=transforms(swizzle, BF16)),
    ]
    for steps in (1, 3, 8):
        result = sliced(body, a, b, scratch, (64, 64), np.asarray([steps], np.int32))
        check(result, wide(a)[:, : 16 * steps] @ wide(b)[: 16 * steps])


@pytest.mark.parametrize("swizzle", [128, 64])
def test_depth_from_a_traced_start_within_the_swizzle(swizzle):
    """K is just as wide as the swizzle."""
    k = swizzle // 2
    a, b = values("a", (64, k), BF16), values("b", (k, 16), BF16)

    def body(acc, a_smem, b_smem, number):
        window = pl.ds(pl.multiple_of(number * 16, 16), 16)
        plgpu.wgmma(acc, a_smem.at[:, window], plgpu.transpose_ref(b_smem.at[:, window], (1, 0)))

    scratch = [
        plgpu.SMEM((64, k), BF16, transforms=transforms(swizzle, BF16)),
        plgpu.SMEM((16, k), BF16, transforms=transforms(swizzle, BF16)),
    ]
    for number in range(k // 16):
        result = sliced(body, a, b.T, scratch, (64, 16), np.asarray([number], np.int32))
        window = slice(16 * number, 16 * number + 16)
        check(result, wide(a)[:, window] @ wide(b)[window])


def test_columns_from_a_traced_start():
    """Columns of b, which is contiguous along N."""
    a, b = values("a", (64, 16), BF16), values("b", (16, 256), BF16)

    def body(acc, a_smem, b_smem, number):
        plgpu.wgmma(acc, a_smem, b_smem.at[:, pl.ds(pl.multiple_of(number * 16, 16), 16)])

    scratch = [
        plgpu.SMEM((64, 16), BF16, transforms=transforms(32, BF16)),
        plgpu.SMEM((16, 256), BF16, transforms=transforms(128, BF16)),
    ]
    for number in (0, 3, 9):
        result = sliced(body, a, b, scratch, (64, 16), np.asarray([number], np.int32))
        check(result, wide(a) @ wide(b)[:, 16 * number : 16 * number + 16])


@pytest.mark.parametrize("swizzle", [128, 64, 32])
def test_three_dimensions_flattened(swizzle):
    """A tiled (groups, k, columns) reference whose first dimensions are exchanged and then joined:
    the rows of k lie group by group."""
    columns = swizzle // 2
    groups = 3
    a, b = values("a", (64, 32), BF16), values("b", (groups, 32, columns), BF16)
    n = groups * columns

    def body(acc, a_smem, b_smem):
        view = plgpu.transpose_ref(b_smem, (1, 0, 2)).reshape((32, n))
        plgpu.wgmma(acc, a_smem, view)

    scratch = [
        plgpu.SMEM((64, 32), BF16, transforms=transforms(64, BF16)),
        plgpu.SMEM((groups, 32, columns), BF16, transforms=transforms(swizzle, BF16)),
    ]
    expected = wide(a) @ np.concatenate(list(wide(b)), axis=1)
    check(sliced(body, a, b, scratch, (64, n)), expected)


@pytest.mark.parametrize("how", ["transpose_ref", "T", "twice"])
def test_ways_to_transpose(how):
    a, b = values("a", (64, 32), F16), values("b", (32, 64), F16)

    def body(acc, a_smem, b_smem):
        match how:
            case "transpose_ref":
                view = plgpu.transpose_ref(b_smem, (1, 0))
            case "T":
                view = b_smem.T
            case "twice":
                view = plgpu.transpose_ref(b_smem.at[0:64].T, (0, 1)).T.T
        plgpu.wgmma(acc, a_smem, view)

    scratch = [
        plgpu.SMEM((64, 32), F16, transforms=transforms(64, F16)),
        plgpu.SMEM((64, 32), F16, transforms=transforms(64, F16)),
    ]
    check(sliced(body, a, b.T, scratch, (64, 64)), wide(a) @ wide(b))


def test_operands_written_by_the_kernel():
    """What generic stores put in shared memory, after commit_smem."""
    a, b = values("a", (64, 64), BF16), values("b", (64, 64), BF16)
    tiles = transforms(128, BF16)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[
            plgpu.SMEM((64, 64), BF16, transforms=tiles),
            plgpu.SMEM((64, 64), BF16, transforms=tiles),
        ],
    )
    def kernel(a_ref, b_ref, out_ref, a_smem, b_smem):
        a_smem[...] = a_ref[...] * 2
        b_smem[...] = b_ref[...] + 1
        plgpu.commit_smem()

        def scope(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        out_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 64)))

    check(run(kernel, a, b), (2 * wide(a)) @ (wide(b) + 1))


def test_member_of_a_union():
    """A matrix in memory that another one shares, at an offset of its own."""
    a, b = values("a", (64, 64), BF16), values("b", (64, 64), BF16)
    tiles = transforms(128, BF16)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[
            plgpu.RefUnion(
                [
                    plgpu.SMEM((8, 64), jnp.float32),
                    plgpu.SMEM((64, 64), BF16, transforms=tiles),
                    plgpu.SMEM((64, 64), BF16, transforms=tiles),
                ],
                plgpu.SMEM((64, 64), jnp.float32),
            ),
            plgpu.Barrier(num_arrivals=2),
        ],
    )
    def kernel(a_ref, b_ref, out_ref, union, barrier):
        (_, a_smem, b_smem), result = union
        load([(a_ref, a_smem), (b_ref, b_smem)], barrier)

        def scope(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        result[...] = pl.run_scoped(scope, plgpu.ACC((64, 64)))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, out_ref)
        plgpu.wait_smem_to_gmem(0)

    check(run(kernel, a, b), wide(a) @ wide(b))


def test_left_operand_computed_in_registers():
    """An array in another layout of the same placement, and one that is the same everywhere."""
    a, b = values("a", (64, 32), BF16), values("b", (32, 64), BF16)
    right = Operand(32, 64, BF16, 128)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[right.scratch, plgpu.Barrier()],
    )
    def kernel(a_ref, b_ref, out_ref, b_smem, barrier):
        load([(b_ref, b_smem)], barrier)
        array = plgpu.load(a_ref, (), layout=plgpu.Layout.WGMMA)

        def scope(acc):
            plgpu.wgmma(acc, (array.astype(jnp.float32) * 2).astype(BF16), b_smem)
            plgpu.wgmma(acc, jnp.ones((64, 32), BF16), b_smem)
            return acc[...]

        out_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 64)))

    check(run(kernel, a, b), (2 * wide(a) + 1) @ wide(b))


def test_product_as_left_operand():
    """The result of one product is an operand of the next, as in attention."""
    a, b, c = (values(name, (64, 64), BF16) for name in "abc")
    right = Operand(64, 64, BF16, 128)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[right.scratch] * 3 + [plgpu.Barrier(num_arrivals=3)],
    )
    def kernel(a_ref, b_ref, c_ref, out_ref, a_smem, b_smem, c_smem, barrier):
        load([(a_ref, a_smem), (b_ref, b_smem), (c_ref, c_smem)], barrier)

        def first(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        product = pl.run_scoped(first, plgpu.ACC((64, 64)))

        def second(acc):
            plgpu.wgmma(acc, lax.rem(product, 16.0).astype(BF16), c_smem)
            return acc[...]

        out_ref[...] = pl.run_scoped(second, plgpu.ACC((64, 64)))

    check(run(kernel, a, b, c), np.fmod(wide(a) @ wide(b), 16) @ wide(c))
