"""Asynchronous copies and barriers against results that were recorded on hardware."""

from __future__ import annotations

import functools
import pathlib

import numpy as np
import pytest
from corpus_copies import copy_cases
from simulator_support import run_ptx

FILE = pathlib.Path(__file__).parent / "recorded" / "copies.npz"


@functools.cache
def recorded():
    with np.load(FILE) as data:
        return {key: data[key] for key in data.files}


def test_all_cases_are_recorded():
    assert recorded().keys() == copy_cases().keys()
    assert len(copy_cases()) >= 150


@pytest.mark.parametrize("name", copy_cases())
def test_program(name):
    case = copy_cases()[name]
    output = case.output()
    inputs = [array.copy() for array in case.inputs]
    run_ptx(case.ptx, *inputs, output, grid=case.grid, cluster=case.cluster)
    np.testing.assert_array_equal(output.view(f"u{output.itemsize}"), recorded()[name])
