"""Code of a few random shapes; ``python -m tests.fuzz sizes`` tries as many as one likes."""

from __future__ import annotations

import jax
import pytest
from tests.fuzz.sizes import Program, compared, is_large

from pallasite import gpu as plgpu

LANE, WARPGROUP = plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup


@pytest.mark.parametrize(
    "program",
    [
        Program("copy", (13, 229), "uint8", LANE),
        Program("copy", (50475,), "bfloat16", WARPGROUP),
        Program("narrow", (226, 97), "float32", WARPGROUP),
        Program("twice", (9, 27, 55), "int16", LANE),
        Program("cast", (223, 127), "bfloat16", WARPGROUP),
        Program("max of rows", (59, 58), "float32", WARPGROUP),
        Program("max of rows", (222, 56), "bfloat16", LANE),
        Program("argmin of rows", (27, 26, 53), "int32", WARPGROUP),
        Program("sum of all", (212, 61), "int16", WARPGROUP),
        Program("transposed", (87, 122), "int8", WARPGROUP),
        Program("copy", (49, 219), "bfloat16", WARPGROUP),
        Program("copy", (30, 164), "int32", LANE),
        Program("max of columns", (24, 144), "float16", LANE),
        Program("argmax of columns", (237, 20), "bfloat16", LANE),
        Program("sum of all", (60111,), "int16", LANE),
        Program("centred", (13, 149), "float32", LANE),
        Program("part", (56, 113), "uint8", LANE),
        Program("reversed", (47, 27, 25), "uint8", LANE),
        Program("reversed", (251, 247), "uint8", WARPGROUP),
        Program("softmax", (112, 26), "bfloat16", WARPGROUP),
    ],
    ids=str,
)
def test_code_is_that_of_the_next_powers_of_two(program: Program) -> None:
    with jax.enable_x64(True):
        own, even = compared(program)
    assert not is_large(own, even), f"{own} instructions, {even} for powers of two"


@pytest.mark.parametrize(
    "program",
    [
        Program("copy", (238, 11), "uint8", LANE),
        Program("copy", (181, 3), "uint8", WARPGROUP),
        Program("copy", (25, 23), "int8", LANE),
        Program("reversed", (100, 9), "float16", LANE),
        Program("reversed", (226, 114), "bfloat16", WARPGROUP),
        Program("reversed", (13, 207), "int8", WARPGROUP),
        Program("reversed", (255, 255), "bfloat16", LANE),
        Program("max of rows", (129, 5), "bfloat16", LANE),
        Program("max of rows", (14, 5, 3), "float16", LANE),
        Program("max of columns", (188, 203), "bfloat16", LANE),
        Program("max of columns", (119, 18), "float32", WARPGROUP),
        Program("max of columns", (57, 8, 63), "float16", WARPGROUP),
        Program("outer", (101, 255), "bfloat16", WARPGROUP),
        Program("outer", (61, 114), "bfloat16", WARPGROUP),
        Program("transposed", (31, 23, 29), "float32", WARPGROUP),
        Program("transposed", (27, 42, 15), "float32", LANE),
        Program("cumsum of rows", (22, 20, 2), "float32", LANE),
        Program("part", (94, 174), "int8", WARPGROUP),
        Program("max of rows", (247, 30), "int8", LANE),
        Program("joined along rows", (67, 101), "int8", WARPGROUP),
        Program("joined along columns", (107, 179), "uint16", LANE),
        Program("joined along columns", (105, 63), "int64", WARPGROUP),
        Program("joined along rows", (2, 62, 28), "bool", LANE),
        Program("stacked", (247, 59), "bfloat16", LANE),
        Program("flat", (149, 243), "int16", WARPGROUP),
        Program("flat", (18, 61, 13), "float16", LANE),
        Program("tiled", (83, 171), "float16", WARPGROUP),
        Program("rolled", (25, 18, 62), "float8_e5m2", WARPGROUP),
        Program("repeated rows", (50, 117), "int32", WARPGROUP),
        Program("first row", (234, 191), "int16", WARPGROUP),
        Program("every second column", (253, 238), "uint16", LANE),
        Program("differences", (211, 175), "bfloat16", LANE),
        Program("masked", (184, 28), "int32", WARPGROUP),
        Program("cumsum of columns", (34, 28, 30), "int32", LANE),
        Program("rolled", (121, 221), "int64", WARPGROUP),
        Program("rolled", (87, 118), "int64", WARPGROUP),
        Program("joined along rows", (221, 32), "bool", WARPGROUP),
        Program("taken rows", (38, 61, 15), "uint8", WARPGROUP),
        Program("taken rows", (255, 27), "int8", LANE),
        Program("taken columns", (29, 251), "int8", WARPGROUP),
        Program("first row", (188, 78), "bool", WARPGROUP),
        Program("first row", (206, 255), "float64", LANE),
        Program("bias", (23, 64, 9), "int16", WARPGROUP),
        Program("log softmax", (84, 5), "float16", LANE),
        Program("variance of rows", (21, 19), "float16", LANE),
        Program("repeated rows", (190, 3), "uint8", LANE),
        Program("repeated rows", (3929,), "float8_e4m3fn", LANE),
        Program("repeated rows", (57, 91), "float8_e5m2", WARPGROUP),
        Program("joined along columns", (2, 169), "int8", LANE),
        Program("joined along columns", (118, 123), "uint8", LANE),
        Program("joined along columns", (61, 64, 2), "float8_e5m2", WARPGROUP),
        Program("joined along rows", (3, 217), "uint8", WARPGROUP),
        Program("first row", (2, 153), "float32", WARPGROUP),
        Program("every second column", (74, 124), "float8_e4m3fn", WARPGROUP),
        Program("stacked", (27, 30, 1), "bfloat16", LANE),
        Program("stacked", (61, 7), "bfloat16", WARPGROUP),
        Program("bias", (52, 11, 1), "int16", WARPGROUP),
        Program("bias", (3, 52, 63), "float16", LANE),
        Program("scaled rows", (203, 3), "int16", LANE),
        Program("first column", (97, 15), "int64", WARPGROUP),
        Program("gelu", (20, 3), "float32", LANE),
        Program("differences", (3, 40), "int8", LANE),
        Program("transposed", (63, 57, 15), "float32", LANE),
        Program("transposed", (16, 47, 59), "int32", WARPGROUP),
        Program("product with itself", (22, 252), "float16", LANE),
        Program("softmax", (7, 12), "float32", LANE),
        Program("quantized", (7, 12), "float32", LANE),
        Program("quantized", (5, 4, 4), "float32", LANE),
        Program("first column", (231, 5), "float64", WARPGROUP),
        Program("first column", (126, 5), "int32", WARPGROUP),
        Program("flat", (160, 206), "int64", LANE),
        Program("outer", (119, 255), "float16", WARPGROUP),
        Program("outer", (53, 59, 8), "bfloat16", WARPGROUP),
        Program("reversed", (45, 16, 2), "bfloat16", LANE),
        Program("rolled", (100, 4), "int16", WARPGROUP),
        Program("rolled", (63, 22, 1), "uint8", LANE),
        Program("joined along rows", (247, 3), "uint8", LANE),
        Program("first column", (102, 7), "float32", WARPGROUP),
        Program("scaled rows", (125, 8), "float32", WARPGROUP),
        Program("differences", (243, 127), "bfloat16", LANE),
        Program("differences", (20, 149), "bfloat16", LANE),
        Program("any of rows", (3, 256), "float16", LANE),
        Program("scaled rows", (25, 21, 2), "uint8", LANE),
        Program("first column", (250, 5), "bfloat16", LANE),
        Program("repeated rows", (65, 112), "int64", LANE),
        Program("exchanged axes", (52, 37, 1), "int32", LANE),
        Program("exchanged axes", (3, 5, 23), "uint16", WARPGROUP),
        Program("every second row", (4, 54, 30), "uint8", WARPGROUP),
        Program("cumsum of columns", (2, 61, 16), "int32", LANE),
        Program("product of rows", (4, 27, 41), "float32", WARPGROUP),
        Program("min of columns", (5, 1), "float16", WARPGROUP),
        Program("max of columns", (2, 7), "bfloat16", WARPGROUP),
        Program("bias", (62, 13, 63), "int16", LANE),
        Program("bias", (4, 60, 12), "float16", WARPGROUP),
        Program("any of rows", (61, 54, 15), "uint8", WARPGROUP),
        Program("any of rows", (2, 54, 62), "int32", WARPGROUP),
        Program("bias", (256, 253), "int8", WARPGROUP),
        Program("joined along rows", (224, 5), "float8_e4m3fn", LANE),
        Program("repeated rows", (3, 253), "float16", WARPGROUP),
        Program("max of columns", (61, 193), "uint8", WARPGROUP),
        Program("first column", (255, 11), "bfloat16", LANE),
        Program("sum of rows", (3, 35, 13), "float64", WARPGROUP),
        Program("transposed", (32, 11, 27), "float32", WARPGROUP),
        Program("halves", (27, 29), "bfloat16", WARPGROUP),
        Program("stacked", (175, 3), "float16", LANE),
        Program("stacked", (3, 255), "bfloat16", LANE),
        Program("exchanged axes", (4, 15, 3), "float16", LANE),
        Program("scaled rows", (90, 11), "float32", WARPGROUP),
        Program("argmax of columns", (2, 24, 48), "int64", LANE),
        Program("outer", (2, 27, 37), "float64", LANE),
        Program("joined along rows", (205, 5), "uint8", WARPGROUP),
        Program("one axis more", (2731,), "float16", LANE),
        Program("masked", (64, 32, 12), "uint16", WARPGROUP),
        Program("masked", (64, 32, 12), "uint16", LANE),
        Program("stacked", (253, 3), "bfloat16", LANE),
        Program("stacked", (27, 49), "float16", WARPGROUP),
        Program("stacked", (59, 122), "float16", WARPGROUP),
        Program("min of columns", (8, 39, 31), "int16", LANE),
    ],
    ids=str,
)
def test_code_is_at_most_twice_that_of_the_next_powers_of_two(program: Program) -> None:
    """Without an allowance; each of these once had more than twice as much."""
    with jax.enable_x64(True):
        own, even = compared(program)
    assert own <= 2 * even


@pytest.mark.parametrize(
    "program",
    [
        Program("max of columns", (97, 8), "int16", WARPGROUP),
        Program("max of columns", (25, 157), "float32", WARPGROUP),
        Program("argmin of rows", (12, 64), "int32", WARPGROUP),
    ],
    ids=str,
)
def test_small_arrays_use_all_threads(program: Program) -> None:
    """Loading the result's layout would save a conversion, and leave the work to a few lanes."""
    with jax.enable_x64(True):
        own, even = compared(program)
    assert own <= 2 * even
