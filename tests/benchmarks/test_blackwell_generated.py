"""Generated kernels for Blackwell: their numbers, and their machine code."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import blackwell_generated as generated
import machine_code

import pallasite
from pallasite.codegen.tools import find_tool
from pallasite.target_selection import find_target
from pallasite_simulator import simulate

pytestmark = pytest.mark.runs_kernels

SMALL = [
    generated.Configuration(generated.ELEMENTS[0], tile_n=64, stages=3, pair=True, width=32),
    generated.Configuration(
        generated.ELEMENTS[6], tile_n=32, stages=2, persistent=False, width=16, warpgroup=False
    ),
    generated.Configuration(generated.ELEMENTS[7], stages=2, width=32),
]


@pytest.mark.parametrize("chosen", SMALL, ids=["pairs", "one tile", "scales"])
def test_numbers(chosen):
    m, n, k = 128 * chosen.blocks, 3 * chosen.tile_n, 2 * chosen.depth
    target = dataclasses.replace(find_target("sm_100a"), multiprocessors=2)
    random = np.random.default_rng(0)
    inputs = []
    for shape in chosen.shapes(m, n, k):
        numbers = random.integers(
            0 if shape.dtype.name in ("uint8", generated.E8) else -3, 4, shape.shape
        )
        inputs.append((2.0 ** (numbers - 1) if len(inputs) > 1 else numbers).astype(shape.dtype))
    made = pallasite.compile(chosen.kernel(m, n, k, 2), *chosen.shapes(m, n, k), target=target)
    a, b = (one.astype(np.float64) for one in inputs[:2])
    for number, scales in enumerate(inputs[2:]):
        # (rows / 128, scales / 4, 32, 16) to (rows, scales).
        wide = scales.astype(np.float64).reshape(*scales.shape[:3], 4, 4).transpose(0, 3, 2, 1, 4)
        factors = np.repeat(wide.reshape(128 * len(scales), -1), chosen.elements.block, axis=1)
        a, b = (a * factors, b) if number == 0 else (a, b * factors)
    simulation = simulate(made, *inputs, sanitize=True)
    assert simulation.findings == ()
    np.testing.assert_array_equal(np.asarray(simulation.outputs[0], np.float64), a @ b.T)


def test_machine_code():
    """One of each kind of elements; others are chosen by ``blackwell_generated.py``."""
    if find_tool("ptxas").path is None or find_tool("nvdisasm").path is None:
        pytest.skip("the CUDA toolkit is not installed")
    found = {
        chosen: generated.complaints(generated.code_of(chosen, "sm_100a"))
        for chosen in generated.generate(3, len(generated.ELEMENTS))[::3]
    }
    assert {str(chosen): what for chosen, what in found.items() if what} == {}


def test_complaints():
    good = machine_code.Code(64, 0, 0, 500, 50, 4, 0, 5, 0, 2)
    assert generated.complaints(good) == []
    bad = dataclasses.replace(good, spills=8, local=2, loop=73, guarded=1)
    assert generated.complaints(bad) == [
        "8 bytes of spills, 2 accesses to local memory",
        "12.17 instructions for each of the tensor core's",
        "lanes decide on 1 instructions",
    ]


def test_configurations_are_different_and_possible():
    found = generated.generate(1, 40)
    assert len(set(found)) == 40 and all(one.is_possible() for one in found)
    assert {one.elements for one in found} == set(generated.ELEMENTS)
    assert found == generated.generate(1, 40) != generated.generate(2, 40)
