"""Products of every dtype, with the left operand in shared memory and in registers."""

from __future__ import annotations

import numpy as np
import pytest
from products_support import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    I8,
    I32,
    U8,
    Operand,
    check,
    multiply,
    run,
    values,
    wide,
)

pytestmark = pytest.mark.runs_kernels

COMBINATIONS = [
    (BF16, BF16, F32),
    (F16, F16, F32),
    (F16, F16, F16),
    (F32, F32, F32),
    *[(a, b, acc) for a in (E4M3, E5M2) for b in (E4M3, E5M2) for acc in (F32, F16)],
    *[(a, b, I32) for a in (I8, U8) for b in (I8, U8)],
]

# Products of 8-bit floats are added up with fewer bits than float32 has.
TOLERANCES = {F32: 2e-6, F16: 2e-3, I32: 0.0}


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize(("a_dtype", "b_dtype", "accumulator"), COMBINATIONS)
@pytest.mark.sampled(alone=("in_registers",))
def test_product(a_dtype, b_dtype, accumulator, in_registers):
    k = 96 // a_dtype.itemsize
    left = None if in_registers else Operand(64, k, a_dtype, 32)
    right = Operand(k, 24, b_dtype, 32, transposed=True)
    a = values("a", (64, k), a_dtype, whole=False)
    b = values("b", (k, 24), b_dtype, whole=False)
    function = multiply(left, right, accumulator, shape=(64, k), left_dtype=a_dtype)
    result = run(function, a, right.stored(b))
    expected = wide(a) @ wide(b)
    tolerance = TOLERANCES[accumulator]
    if a_dtype.itemsize == 1 and accumulator == F32:
        tolerance = 1e-3
    check(result, expected, tolerance)
    assert np.abs(expected).max() > 1
