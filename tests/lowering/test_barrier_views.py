"""Arrays of barriers: slices, indices of slices, and what cannot be selected."""

from __future__ import annotations

import re

import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from kernels import array, compile_to_ptx, make
from pallasite.errors import InvalidValueError
from pallasite.language.memory import SMEM
from pallasite_std.barriers.types import Barrier
from pallasite_std.primitives.barriers import barrier_wait
from pallasite_std.primitives.copies import copy_gmem_to_smem


def waiting(view, shape):
    scratch = [SMEM((64, 64), jnp.float32), Barrier(num_barriers=shape)]

    @make((64, 64), scratch_types=scratch, grid=(4,), grid_names=("i",))
    def kernel(x, o, s, barriers):
        copy_gmem_to_smem(x, s, view(barriers))
        barrier_wait(view(barriers))
        o[...] = s[...]

    ptx = compile_to_ptx(kernel, array(64, 64))
    body = ptx[ptx.index(".entry") :]
    return re.findall(r"^\t([a-z][^;{]*;)", body.partition("\n}")[0], re.MULTILINE)


def test_slice_of_a_slice():
    fourth = waiting(lambda b: b.at[2:4].at[1:2].at[0], 4)
    # It lies 24 bytes behind the first, which lies behind 64 x 64 x 4 bytes.
    assert sum("16408" in instruction for instruction in fourth) == 2
    assert fourth == waiting(lambda b: b.at[3], 4)


def test_slice_of_one_barrier_is_that_barrier():
    assert waiting(lambda b: b.at[2:3], 4) == waiting(lambda b: b.at[2], 4)


def test_slice_from_a_number_known_at_run_time():
    found = waiting(lambda b: b.at[pl.ds(lax.rem(lax.axis_index("i"), 2), 2)].at[1], 4)
    assert found == waiting(lambda b: b.at[lax.rem(lax.axis_index("i"), 2) + 1], 4)


@pytest.mark.parametrize("view", [lambda b: b.at[0:4:2].at[1]])
def test_steps_are_refused(view):
    with pytest.raises(InvalidValueError, match="do not lie one after the other"):
        waiting(view, 4)
