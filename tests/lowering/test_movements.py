"""Arrays that are copied within global memory, in another order, instead of being loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import pallasite
from pallasite import gpu as plgpu
from pallasite.layouts import Extent
from pallasite_std.memory.movements import Portion, direct, elements, portions
from pallasite_std.primitives.movements import Rows, Strip, View

SEMANTICS = [plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup]


def numbers(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    made = np.random.default_rng(seed).integers(0, 2 if dtype is bool else 100, shape)
    return made.astype(dtype)


def called(body: Callable[..., Any], *operands: Any, semantics: Any, **options: Any) -> Any:
    """A kernel that stores what a function makes of whole arrays."""

    def kernel(*refs: Any) -> None:
        refs[-1][...] = body(*(ref[...] for ref in refs[:-1]))

    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in operands]
    return plgpu.kernel(
        kernel,
        out_type=jax.eval_shape(body, *shapes),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        **options,
    )


def compiled(body: Callable[..., Any], *operands: Any, semantics: Any = SEMANTICS[0]) -> Any:
    with jax.enable_x64(True), pallasite.config.scoped(cache=False):
        kernel = called(body, *operands, semantics=semantics)
        return pallasite.compile(kernel, *operands, target="sm_90a")


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize(
    ("body", "shape", "dtype"),
    [
        (lambda x: jnp.broadcast_to(x[None], (3, *x.shape)), (190, 3), np.uint8),
        (lambda x: jnp.broadcast_to(x[None], (3, *x.shape)), (7777,), np.int32),
        (lambda x: jnp.broadcast_to(x[:, None], (3, 4, *x.shape[1:])), (3, 3929), bool),
        (lambda x: jnp.broadcast_to(x[..., None], (*x.shape, 3)), (9, 31), np.float64),
        (lambda x: jnp.broadcast_to(x[:1], x.shape), (42, 2), np.int8),
        (lambda x: jnp.concatenate([x, x], 0), (118, 123), np.uint8),
        (lambda x: jnp.concatenate([x, x], -1), (3, 217), ml_dtypes.float8_e4m3fn),
        (lambda x: jnp.concatenate([x[..., 2:], x, x[..., :1]], -1), (61, 3, 3), np.uint16),
        (lambda x: jnp.roll(x, 5, 1), (37, 45), bool),
        (lambda x: jnp.tile(x, (2, 3)), (5, 23), np.float32),
        (lambda x: x[::2, ::3], (74, 124), ml_dtypes.float8_e4m3fn),
        (lambda x: x[1:, ::2].reshape(-1), (9, 31), np.int64),
        (lambda x: jnp.transpose(x, (2, 1, 0)), (16, 47, 59), np.int32),
        (lambda x: jnp.flip(x, 0), (45, 16, 2), np.float16),
        (lambda x: jnp.flip(x, (0, 2)), (31, 5, 7), np.uint8),
        (lambda x: jnp.flip(x[2:, ::3], 1), (61, 20), np.int64),
        (lambda x: jnp.flip(x, 0), (7777,), np.int16),
        # Rows that threads hold whole, one each or more.
        (lambda x: jnp.roll(x, 1, 1), (100, 4), np.int16),
        (lambda x: jnp.roll(x, -2, 1), (301, 7), np.float32),
        (lambda x: jnp.tile(x, (1, 2)), (204, 4), np.float16),
        (lambda x: jnp.flip(x, 1), (150, 6), np.int8),
        (lambda x: x[::2], (4, 54, 30), np.uint8),
        (lambda x: jnp.concatenate([x[:, 3:], x[:, 1:2], x[:, :4]], 1), (130, 6), np.float64),
        # Parts that begin between two words.
        (lambda x: x[2778:], (8334,), np.int8),
        (lambda x: x[1:-3], (5001,), np.float32),
    ],
)
def test_elements_are_where_they_belong(
    body: Callable[[Any], Any], shape: tuple[int, ...], dtype: Any, semantics: Any
) -> None:
    x = numbers(shape, dtype, 1)
    with jax.enable_x64(True), pallasite.config.scoped(sanitize=True):
        found = called(body, x, semantics=semantics)(x)
        expected = np.asarray(body(jnp.asarray(x)))
    np.testing.assert_array_equal(np.asarray(found), expected)
    assert "move_elements" in str(compiled(body, x, semantics=semantics).jaxpr)


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_few_elements_are_transposed_where_they_are(semantics: Any) -> None:
    x = numbers((3, 5, 23), np.uint16, 2)

    def body(x: Any) -> Any:
        return jnp.swapaxes(x, 1, 2)

    with pallasite.config.scoped(sanitize=True):
        found = np.asarray(called(body, x, semantics=semantics)(x))
    np.testing.assert_array_equal(found, np.swapaxes(x, 1, 2))
    assert counted(compiled(body, x, semantics=semantics).ptx) <= 50


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("size", [3, 41, 2000])
def test_several_arrays(size: int, semantics: Any) -> None:
    """The second begins at a multiple of 16 bytes of shared memory."""

    def body(x: Any, y: Any) -> Any:
        return jnp.concatenate([x, y, x[:1], y[2:]], 0)

    x, y = numbers((5, size), np.int16, 2), numbers((7, size), np.int16, 3)
    with pallasite.config.scoped(sanitize=True):
        found = np.asarray(called(body, x, y, semantics=semantics)(x, y))
    np.testing.assert_array_equal(found, np.concatenate([x, y, x[:1], y[2:]], 0))
    assert "move_elements" in str(compiled(body, x, y, semantics=semantics).jaxpr)


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_more_than_one_store(semantics: Any) -> None:
    """What is also computed with is loaded, and stored from registers."""

    def kernel(x_ref: Any, y_ref: Any, twice_ref: Any, joined_ref: Any, again_ref: Any) -> None:
        x = x_ref[...]
        twice_ref[...] = 2 * x
        joined_ref[...] = jnp.concatenate([x, x], 0)
        again_ref[...] = jnp.concatenate([y_ref[...]] * 3, 0)

    x, y = numbers((9, 13), np.int32, 4), numbers((3, 5), np.uint8, 5)
    one, two, three = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((9, 13), np.int32),
            jax.ShapeDtypeStruct((18, 13), np.int32),
            jax.ShapeDtypeStruct((9, 5), np.uint8),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )(x, y)
    np.testing.assert_array_equal(one, 2 * x)
    np.testing.assert_array_equal(two, np.concatenate([x, x]))
    np.testing.assert_array_equal(three, np.concatenate([y, y, y]))


def test_memory_that_the_kernel_writes_is_loaded_before() -> None:
    def kernel(x_ref: Any, out_ref: Any, scratch_ref: Any) -> None:
        x = x_ref[...]
        scratch_ref[...] = jnp.concatenate([x, x], 0)
        out_ref[...] = jnp.roll(scratch_ref[...], 1, 0)

    x = numbers((5, 7), np.int32, 6)
    out, _ = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((10, 7), np.int32),
            jax.ShapeDtypeStruct((10, 7), np.int32),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=SEMANTICS[0]),
    )(x)
    np.testing.assert_array_equal(out, np.roll(np.concatenate([x, x]), 1, 0))


def test_a_result_in_the_place_of_its_operand() -> None:
    """Everything is read before anything is written."""
    x = numbers((9, 301), np.int16, 11)
    for count in (1, 3):  # By registers, and by shared memory.

        def body(x: Any, count: int = count) -> Any:
            return jnp.roll(x, count * 100, 0 if count == 1 else 1)

        kernel = called(body, x, semantics=SEMANTICS[0], input_output_aliases={0: 0})
        with pallasite.config.scoped(sanitize=True):
            found = jax.jit(kernel, donate_argnums=0)(jnp.asarray(x))
        np.testing.assert_array_equal(found, np.asarray(body(x)))


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_a_result_in_the_place_of_its_operand_without_automatic_barriers(semantics: Any) -> None:
    """What one lane loads is not stored over by another one before."""

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.roll(x_ref[...], 1, 0)

    x = numbers((7, 13), np.int32, 12)
    called = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=semantics, unsafe_no_auto_barriers=True
        ),
    )
    with pallasite.config.scoped(sanitize=True):
        np.testing.assert_array_equal(called(x), np.roll(x, 1, 0))


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x,
        lambda x: x[:, 4:],
        lambda x: x.T,
        lambda x: jnp.broadcast_to(x[:1, 3:4], x.shape),
        lambda x: jnp.concatenate([x, -x], 0),
    ],
)
def test_what_stays_in_registers(body: Callable[[Any], Any]) -> None:
    x = numbers((12, 20), np.float32, 7)
    assert "move_elements" not in str(compiled(body, x).jaxpr)


@pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics))
@pytest.mark.parametrize(("size", "dtype"), [(255, np.int8), (251, np.int16), (243, np.float32)])
def test_parts_of_rows_are_loaded_where_they_are_stored(
    size: int, dtype: Any, semantics: plgpu.LoweringSemantics
) -> None:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...][size // 3 :]

    x = numbers((size,), dtype, 13)
    called = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((size - size // 3,), dtype),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    assert ".shared" not in pallasite.compile(called, x).ptx.partition("{")[2]
    np.testing.assert_array_equal(called(x), x[size // 3 :])


def test_powers_of_two_stay_in_registers() -> None:
    x = numbers((16, 32), np.float32, 8)
    assert "move_elements" not in str(compiled(lambda x: jnp.concatenate([x, x], 0), x).jaxpr)


def test_code_does_not_grow_with_arrays() -> None:
    sizes = []
    for rows in (1001, 2003, 4007):
        x = numbers((rows, 13), np.uint8, 9)
        text = compiled(lambda x: jnp.concatenate([x, x, x], 0), x).ptx
        sizes.append(text.count(";\n"))
    assert max(sizes) <= min(sizes) + 4


def test_code_of_transposed_arrays_that_fit_shared_memory_once() -> None:
    """There were sixteen loops, one for each part of the result."""
    for shape in ((63, 57, 15), (16, 47, 59)):
        for semantics in SEMANTICS:
            x = np.zeros(shape, np.float32)
            text = compiled(lambda x: x.T, x, semantics=semantics).ptx
            assert text.count("bar.sync") <= 2
            assert text.count(";\n") < 100


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize(
    ("body", "shape", "dtype"),
    [
        (lambda x: x.T, (242, 239), np.int32),
        (lambda x: x.T, (248, 240), np.float32),
        (lambda x: jnp.swapaxes(x, 1, 2), (61, 25, 23), np.int64),
        (lambda x: jnp.roll(x, 3, 1), (151, 241), np.float64),
        (lambda x: x[::2, ::3], (301, 499), np.float16),
        (lambda x: jnp.flip(x, 0), (39001,), np.float64),
    ],
)
def test_arrays_that_do_not_fit_shared_memory_are_moved_in_portions(
    body: Callable[[Any], Any], shape: tuple[int, ...], dtype: Any, semantics: Any
) -> None:
    x = numbers(shape, dtype, 3)
    with jax.enable_x64(True):
        found = called(body, x, semantics=semantics)(x)
        expected = np.asarray(body(jnp.asarray(x)))
    np.testing.assert_array_equal(np.asarray(found), expected)
    text = compiled(body, x, semantics=semantics).ptx
    assert text.count("cp.async.wait_all") >= 2
    assert counted(text) <= 160


@pytest.mark.parametrize(
    ("movement", "sizes"),
    [
        (View(0, (Extent(97, 1), Extent(131, 97))), (12707,)),
        (View(12706, (Extent(131, -97), Extent(97, -1))), (12707,)),
        (View(5, (Extent(27, 260), Extent(29, 1), Extent(8, 29))), (7025,)),
        (Rows(95, (Strip(0, 3, 63, 60), Strip(1, 0, 60, 60), Strip(0, 0, 63, 3))), (5985, 5700)),
    ],
)
@pytest.mark.parametrize("room", [40000, 16000, 9000])
def test_portions_are_the_whole_movement(
    movement: View | Rows, sizes: tuple[int, ...], room: int
) -> None:
    """Each element of the result is made once, of the element that the whole takes, and what is
    copied has room, with the zeros that copies of all lanes write behind it."""
    found = portions(movement, sizes, 32, room)
    assert found
    (whole,) = portions(movement, sizes, 32, 1 << 20)
    expected = dict(places(whole))
    made = [pair for portion in found for pair in places(portion)]
    assert len(made) == len(expected)
    assert dict(made) == expected
    for portion in found:
        windows = elements(portion.movement, sizes, np.dtype(np.uint32)).windows(
            0, math.prod(extent.size for extent in portion.extents)
        )
        rounds = [-(-4 * (last - first) // 2048) for first, last in windows]
        needed = [
            2048 * n if n <= 3 else 4 * (last - first)
            for n, (first, last) in zip(rounds, windows, strict=True)
        ]
        assert sum(needed) <= room


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize(
    ("count", "taken", "shape"),
    [
        (40, 0, (1057,)),
        (40, 0, (3, 529)),
        (16, 100, (1057,)),
        (16, 100, (3, 1057)),
        (8, 190, (129,)),
        (8, 190, (3, 129)),
    ],
)
@pytest.mark.sampled(alone=("count", "taken", "shape", "semantics"))
def test_many_arrays_where_little_shared_memory_is_left(
    count: int, taken: int, shape: tuple[int, ...], semantics: Any
) -> None:
    """Copies of all lanes write zeros behind each of them."""
    xs = [numbers(shape, np.float32, n) for n in range(count)]

    def kernel(*refs: Any) -> None:
        *sources, target, memory = refs
        memory[:128] = jnp.zeros(128, jnp.uint8)
        target[...] = jnp.concatenate([one[...] for one in sources], -1)

    joined = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((*shape[:-1], count * shape[-1]), np.float32),
        scratch_types=[plgpu.SMEM((max(taken * 1024, 128),), jnp.uint8)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    np.testing.assert_array_equal(np.asarray(joined(*xs)), np.concatenate(xs, -1))


def places(portion: Portion) -> list[tuple[int, tuple[int, int]]]:
    """For each element of the result, which one of which array it is."""
    targets = [portion.start]
    for extent in portion.extents:
        targets = [n + k * extent.stride for n in targets for k in range(extent.size)]
    movement = portion.movement
    if isinstance(movement, Rows):
        sources = [
            (strip.source, strip.start + row * strip.stride + n)
            for row in range(movement.count)
            for strip in movement.strips
            for n in range(strip.size)
        ]
    else:
        numbers = [movement.offset]
        for extent in movement.extents:
            numbers = [n + k * extent.stride for n in numbers for k in range(extent.size)]
        sources = [(0, n) for n in numbers]
    return list(zip(targets, sources, strict=True))


def test_many_portions_are_none() -> None:
    assert not portions(View(0, (Extent(1000, 1), Extent(100, 1000))), (100000,), 32, 9000)


def test_portions_are_not_stored_over_what_others_are_made_of() -> None:
    x = numbers((301, 199), np.float32, 12)
    kernel = called(
        lambda x: jnp.roll(x, 1, 0), x, semantics=SEMANTICS[0], input_output_aliases={0: 0}
    )
    text = str(pallasite.compile(kernel, x, target="sm_90a").jaxpr)
    assert "move_elements" not in text


def test_units_of_several_elements() -> None:
    movement = Rows(3, (Strip(0, 8, 24, 12), Strip(0, 0, 24, 4)))
    assert movement.run == 4
    assert movement.of_units(4) == Rows(3, (Strip(0, 2, 6, 3), Strip(0, 0, 6, 1)))
    assert View(6, (Extent(3, 2),)).run == 1


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_registers_hold_what_is_stored_directly(bits: int) -> None:
    """Each element is loaded by one access, and stored to each of its places by one."""
    movement = Rows(5, (Strip(0, 0, 7, 7), Strip(1, 3, 9, 4), Strip(0, 0, 7, 7)))
    plan = direct(movement, bits)
    assert plan is not None
    places = [start for piece, _ in plan.pieces for start in piece.starts]
    assert sorted(places) == [0, 7, 11]
    assert sum(math.prod(piece.memory.shape) * len(piece.starts) for piece, _ in plan.pieces) == 90
    windows = elements(movement, [35, 45], np.dtype(f"uint{bits}")).windows(0, 90)
    assert windows == [(0, 35), (3, 43)]


def counted(text: str) -> int:
    return text.count(";\n")


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize(
    ("body", "shape", "dtype", "most"),
    [
        (lambda x: x + x[:1], (52, 11, 1), np.int16, 65),
        (lambda x: x * x[:, :1], (203, 13), np.int16, 210),
        (lambda x: x - x[3:4], (29, 23), np.float32, 80),
        (lambda x: x + x[:1], (12, 63), np.float16, 260),
        (lambda x: x[2:, ::2] * x[:1, :1], (40, 6), np.int64, 110),
        (lambda x: x[:, :14] * x[:, 15:], (27, 29), np.float16, 70),
    ],
)
def test_small_slices_are_loaded_by_themselves(
    body: Callable[[Any], Any], shape: tuple[int, ...], dtype: Any, most: int, semantics: Any
) -> None:
    """They went through shared memory, with the whole array."""
    x = numbers(shape, dtype, 12)
    with jax.enable_x64(True), pallasite.config.scoped(sanitize=True):
        found = called(body, x, semantics=semantics)(x)
    np.testing.assert_array_equal(np.asarray(found), body(x))
    kernel = compiled(body, x, semantics=semantics)
    assert str(kernel.jaxpr).count("<- a[") == 2
    assert counted(kernel.ptx) <= most


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize(
    ("body", "shape"),
    [
        (lambda x: x + x[:1], (229, 131)),
        (lambda x: x[1:] - x[:-1], (156, 254)),
        (lambda x: x[1:] - x[:-1], (56, 13, 43)),
    ],
)
def test_slices_of_arrays_that_do_not_fit_shared_memory(
    body: Callable[[Any], Any], shape: tuple[int, ...], semantics: Any
) -> None:
    x = numbers(shape, np.int64, 15)
    with jax.enable_x64(True):
        found = called(body, x, semantics=semantics)(x)
    np.testing.assert_array_equal(np.asarray(found), body(x))


def test_slices_of_memory_that_is_written_are_not_loaded_again() -> None:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        x = x_ref[...]
        x_ref[...] = x * 2
        out_ref[...] = x + x[:1]

    x = numbers((7, 5), np.int32, 13)

    def run(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return plgpu.kernel(
            lambda *refs: kernel(refs[1], refs[2]),
            out_type=[shape, shape],
            compiler_params=plgpu.CompilerParams(lowering_semantics=SEMANTICS[0]),
            input_output_aliases={0: 0},
        )(x)

    np.testing.assert_array_equal(np.asarray(jax.jit(run)(x)[1]), x + x[:1])


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("shape", [(27, 30, 1), (61, 7), (50, 90)])
@pytest.mark.sampled
def test_arrays_that_make_up_another_are_stored_by_themselves(
    shape: tuple[int, ...], dtype: Any, semantics: Any
) -> None:
    x = numbers(shape, dtype, 14)
    for body in (
        lambda x: jnp.stack([x, -x]),
        lambda x: jnp.concatenate([-x, x + x, x], 0),
        lambda x: jnp.stack([x * 2, jnp.zeros_like(x)]),
    ):
        with pallasite.config.scoped(sanitize=True):
            found = called(body, x, semantics=semantics)(x)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(body(jnp.asarray(x))))
    kernel = compiled(lambda x: jnp.stack([x, -x]), x, semantics=semantics)
    assert str(kernel.jaxpr).count("    b[") == 2
    assert "bar.sync" not in kernel.ptx


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("shape", [(20, 3), (12, 8), (24,), (5, 4, 4)])
def test_threads_have_at_most_one_of_few_elements(shape: tuple[int, ...], semantics: Any) -> None:
    """Widths of vectors follow the threads, as with powers of two."""
    x = np.zeros(shape, np.float32)
    even = np.zeros([1 << (n - 1).bit_length() for n in shape], np.float32)
    own, other = (compiled(jax.nn.gelu, one, semantics=semantics).ptx for one in (x, even))
    assert own.count("ex2.approx") == other.count("ex2.approx")


def test_scans_are_no_movement() -> None:
    """Loops keep their arrays."""

    def body(x: Any) -> Any:
        return lax.fori_loop(0, 3, lambda n, y: jnp.roll(y, 1, 0), x)

    x = numbers((5, 9), np.int32, 10)
    assert "move_elements" not in str(compiled(body, x).jaxpr)
