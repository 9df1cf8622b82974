"""Programs that NVIDIA's CuTe DSL compiled for Blackwell run and give right numbers."""

from __future__ import annotations

import cute_programs
import ml_dtypes
import numpy as np
import pytest

from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.launch import Launch, Pointer, run
from pallasite_simulator.programs import load
from pallasite_simulator.sanitizer import GROUPS, LaunchState

TYPES = {
    "Float16": np.float16,
    "BFloat16": ml_dtypes.bfloat16,
    "TFloat32": np.float32,
    "Float8E4M3FN": ml_dtypes.float8_e4m3fn,
    "Float8E5M2": ml_dtypes.float8_e5m2,
    "Int8": np.int8,
    "Float32": np.float32,
    "Int32": np.int32,
}


def operand(rows, columns, dtype, seed):
    generator = np.random.default_rng(seed)
    if dtype is np.int8:
        return generator.integers(-128, 128, (rows, columns), np.int8)
    values = generator.standard_normal((rows, columns)).astype(np.float32)
    if dtype is np.float32:
        values = (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return values.astype(dtype)


@pytest.mark.parametrize("name", cute_programs.PROGRAMS)
def test_recorded(name):
    one = cute_programs.PROGRAMS[name]
    program = load(cute_programs.recorded(name), None, 148)
    a, b = operand(one.m, one.k, TYPES[one.dtype], 1), operand(one.n, one.k, TYPES[one.dtype], 2)
    c = np.full(one.m * one.n * 4, 0xCD, np.uint8).view(TYPES[one.result]).reshape(one.m, one.n)
    first = program.parameters[0][0].bytes
    arguments = [bytes(first), Pointer(a), Pointer(b), Pointer(c)]
    state = LaunchState(GROUPS)
    geometry = Geometry((1, 1, 1), (cute_programs.THREADS, 1, 1))
    shared = 1024 + (one.m + one.n) * one.k * a.itemsize + 1024
    run(Launch(program, geometry, arguments, dynamic_shared_bytes=shared, sanitizer=state))
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-4 * (one.result != "Int32"))
