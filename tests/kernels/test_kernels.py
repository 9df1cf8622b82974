"""Every kernel of the catalog compiles for every target, and gives the right numbers."""

from __future__ import annotations

import zlib

import arithmetic_cases
import control_cases
import jax
import jax.numpy as jnp
import memory_cases
import numpy as np
import pytest
import shape_cases
from catalog import CASES, Case, wide

from pallasite import compile_all

MODULES = (arithmetic_cases, control_cases, memory_cases, shape_cases)

# For further targets a part of the cases is enough: most differ only in a dtype.
SAMPLED = {name for number, name in enumerate(sorted(CASES)) if number % 4 == 0}

# So is a third of them for lane semantics; a case is always in it or never, whatever is added.
BY_LANES = [name for name in sorted(CASES) if zlib.crc32(name.encode()) % 3 == 0]


def _inputs(inputs):
    return tuple(jnp.asarray(x) for x in inputs)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_compiles(name, target, _accepted_ptx, request):
    """Each kernel compiles; the assembler accepts a part of them for each target, without a word.

    It gets many at once, in this test or a later one.
    """
    case = CASES[name]
    if target != case.targets[0] and name not in SAMPLED:
        pytest.skip("compiled for the first target only")
    with jax.enable_x64("float64" in name or "int64" in name):
        function, inputs, _ = case.build()
        compiled = compile_all(function, *_inputs(inputs), target=target)
    assert compiled
    for kernel in compiled:
        assert f".target {target}" in kernel.ptx
        if _accepted_ptx is not None:
            _accepted_ptx.check_later(kernel.ptx, target, request.node.nodeid, strict=True)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("name", sorted(CASES))
def test_numbers(name):
    """Each kernel agrees with its reference; memory is filled with rubbish beforehand."""
    _check_numbers(CASES[name])


@pytest.mark.runs_kernels
@pytest.mark.usefixtures("lane_semantics")
@pytest.mark.parametrize("name", BY_LANES)
def test_numbers_in_lane_semantics(name):
    """Layouts are then chosen by each operation, not for the whole kernel."""
    _check_numbers(CASES[name])


def _check_numbers(case: Case) -> None:
    with jax.enable_x64("float64" in case.name or "int64" in case.name):
        function, inputs, reference = case.build()
        expected = reference(*inputs)
        arrays = _inputs(inputs)
        leaves = expected if isinstance(expected, list) else [expected]
        _poison(sum(np.asarray(leaf).size for leaf in leaves))
        results = jax.tree.leaves(jax.jit(function)(*arrays))
    assert len(results) == len(leaves)
    for result, wanted in zip(results, leaves, strict=True):
        _compare(np.asarray(result), np.asarray(wanted), case.tolerance)


def _poison(elements: int) -> None:
    """Leaves freed device memory full of a pattern, so that an element never written shows."""
    size = 2 << max(elements, 1).bit_length()  # so that there are few sizes to compile for
    for _ in range(2):
        rubbish = [jnp.full((size,), 0xAB, jnp.uint8) for _ in range(4)]
        jax.block_until_ready(rubbish)
        del rubbish


def _compare(result: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    assert result.shape == wanted.shape
    got, want = wide(result), wide(wanted)
    if tolerance == 0.0 and not jnp.issubdtype(result.dtype, jnp.floating):
        np.testing.assert_array_equal(got, want)
        return
    limit = tolerance or 1e-6
    np.testing.assert_allclose(got, want, rtol=limit, atol=limit)
