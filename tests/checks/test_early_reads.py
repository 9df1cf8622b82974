"""Sums with outputs that nobody has written."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from checked import BOTH, F32, array, findings, only
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu

both = pytest.mark.parametrize("semantics", BOTH)
X = array(64, 64)
TEXT = "something is added to output 0 that nobody has written before"


@both
@pytest.mark.parametrize("written", [False, True])
def test_in_place(written, semantics):
    def body(x, o):
        if written:
            o[...] = jnp.zeros_like(o)
        o[...] += x[...]  # here

    found = findings(body, [X], X, semantics=semantics)
    assert not found if written else only(found, TEXT) is None


@pytest.mark.parametrize("how", ["atomic", "copy", "loop", "converted"])
@pytest.mark.parametrize("aliased", [False, True])
def test_forms(how, aliased):
    """An aliased output begins as its input."""

    def body(x, _, o, tile):
        if how == "atomic":
            plgpu.atomic_add(o, x[...])  # here
        elif how == "copy":
            tile[...] = x[...]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, o, reduction_op="add")  # here
            plgpu.wait_smem_to_gmem(0)
        elif how == "loop":

            @pl.loop(0, 4)
            def _(i):
                o[pl.ds(i * 16, 16)] = o[pl.ds(i * 16, 16)] + 1  # here
        else:
            o[...] = (x[...].astype(jnp.bfloat16) - o[...].astype(jnp.bfloat16)).astype(F32)  # here

    options = {"scratch_types": [plgpu.SMEM((64, 64), F32)]}
    if aliased:
        options["input_output_aliases"] = {1: 0}
    found = findings(body, [X, X], X, **options)
    assert not found if aliased else only(found, TEXT) is None


@pytest.mark.parametrize("case", ["first", "chosen", "others", "branch", "data", "times", "itself"])
def test_right_or_unknown(case):
    def body(x, n, o):
        i, k = lax.axis_index("i"), lax.axis_index("k")
        rows = pl.ds(i * 32, 32)
        if case == "first":
            pl.when(k == 0)(lambda: o.__setitem__(rows, x[rows]))
            pl.when(k > 0)(lambda: o.__setitem__(rows, o[rows] + x[rows]))
        elif case == "chosen":
            o[rows] = jnp.where(k == 0, 0, o[rows]) + x[rows]
        elif case == "others":
            pl.when(k == 1)(lambda: o.__setitem__(rows, x[rows]))
            o[rows] += x[rows]
        elif case == "branch":
            pl.when(n[0] > 0)(lambda: o.__setitem__(rows, o[rows] + 1))
            o[rows] = x[rows]
        elif case == "data":

            @pl.loop(0, n[0])
            def _(_):
                o[rows] += 1
        elif case == "itself":
            o[rows] = o[rows]
        else:
            o[rows] = x[rows] + o[rows] * (k > 0)

    inputs = [X, array(1, dtype=jnp.int32)]
    found = findings(body, inputs, X, grid=(2, 2), grid_names=("i", "k"))
    assert not [one for one in found if TEXT in one.text]
