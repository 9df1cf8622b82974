"""Matrix instructions against results that were recorded on hardware."""

from __future__ import annotations

import functools
import pathlib

import numpy as np
import pytest
from corpus_matrices import matrix_cases
from simulator_support import run_ptx
from test_differential import assert_close

FILE = pathlib.Path(__file__).parent / "recorded" / "matrices.npz"


@functools.cache
def recorded():
    with np.load(FILE) as data:
        return {key: data[key] for key in data.files}


def test_all_cases_are_recorded():
    assert recorded().keys() == matrix_cases().keys()
    assert len(matrix_cases()) >= 200


@pytest.mark.parametrize("name", matrix_cases())
def test_program(name):
    case = matrix_cases()[name]
    output = case.output()
    inputs = [array.copy() for array in case.inputs]
    run_ptx(case.ptx, *inputs, output, grid=case.grid, block=case.block, shared=case.shared)
    theirs = recorded()[name]
    if case.ulp is None:
        np.testing.assert_array_equal(output.view(f"u{output.itemsize}"), theirs)
    else:
        assert_close(output, theirs.view(output.dtype), case.ulp, case.absolute)
