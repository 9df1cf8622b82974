"""The simulator against results that were recorded on hardware."""

from __future__ import annotations

import functools
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from corpus import all_cases, sample
from examples.catalog import all_examples
from simulator_support import run_ptx

FOLDER = pathlib.Path(__file__).parent / "recorded"
MANTISSA = {2: 10, 4: 23, 8: 52}


@functools.cache
def recorded(name):
    with np.load(FOLDER / name) as data:
        return {key: data[key] for key in data.files}


def simulated(case):
    output = case.output()
    inputs = [array.copy() for array in case.inputs]
    run_ptx(
        case.ptx,
        *inputs,
        output,
        grid=case.grid,
        block=case.block,
        cluster=case.cluster,
        shared=case.shared,
    )
    return output


def test_the_corpus_is_recorded():
    assert recorded("corpus.npz").keys() == all_cases().keys()
    assert len(all_cases()) >= 300
    assert set(recorded_examples()) <= {example.name for example in all_examples()}


def recorded_examples() -> list[str]:
    """Names of the examples that were recorded, in their order."""
    return list(dict.fromkeys(key.split("/")[0] for key in recorded("examples.npz")))


@pytest.mark.parametrize("name", all_cases())
def test_program(name):
    case = all_cases()[name]
    ours = simulated(case)
    if case.ulp is None:
        np.testing.assert_array_equal(ours.view(f"u{ours.itemsize}"), recorded("corpus.npz")[name])
    else:
        theirs = recorded("corpus.npz")[name].view(ours.dtype)
        assert_close(ours, theirs, case.ulp, case.absolute)


def assert_close(ours, theirs, ulp, absolute):
    """Within units of the last place of the hardware's result, or an absolute difference."""
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    finite = np.isfinite(theirs) & np.isfinite(ours)
    np.testing.assert_array_equal(
        ours[~finite & ~np.isnan(ours)], theirs[~finite & ~np.isnan(ours)]
    )
    bits = MANTISSA[ours.itemsize]
    ours, theirs = ours[finite].astype(np.float64), theirs[finite].astype(np.float64)
    one = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(theirs), 1e-300))) - bits)
    if ours.size:
        assert (np.abs(ours - theirs) <= np.maximum(ulp * one, absolute)).all()


@pytest.mark.parametrize("example", all_examples(), ids=lambda example: example.name)
def test_example(example):
    if example.name not in recorded_examples():
        pytest.skip("added since the examples were recorded")
    number = recorded_examples().index(example.name)
    inputs = example.make_inputs(jax.random.key(number))
    outputs = jax.tree.leaves(jax.jit(example.function)(*inputs))
    for output, array in enumerate(outputs):
        array = np.asarray(array)
        _, ours = sample(example.name, output, array)
        theirs = recorded("examples.npz")[f"{example.name}/{output}"]
        if array.dtype.kind in "iub":
            np.testing.assert_array_equal(ours, theirs)
            continue
        ours, theirs = (x.view(array.dtype).astype(np.float64) for x in (ours, theirs))
        # A few units in the last place: the approximations within them may differ by one each.
        relative = 8 * float(ml_dtypes.finfo(array.dtype).eps)
        np.testing.assert_allclose(
            ours, theirs, rtol=relative, atol=relative * np.abs(theirs).max()
        )
