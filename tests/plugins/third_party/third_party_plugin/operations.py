"""An operation of ``pallasite.ops``: for all targets, and for the one that has lines."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallasite import gpu as plgpu
from pallasite.plugin import Operation, TargetPredicate

HERE = "third_party_plugin.operations"


def swap_rows(x):
    """Exchanges rows 0 and 1, 2 and 3 and so on.

    Args:
      x: float32[n, 128], where n is even.
    """

    def body(x_ref, out_ref):
        plgpu.every_other_row(out_ref, 0)[...] = plgpu.every_other_row(x_ref, 1)[...]
        plgpu.every_other_row(out_ref, 1)[...] = plgpu.every_other_row(x_ref, 0)[...]

    return _kernel(body, x, "swap_rows")(x)


def swap_rows_in_lines(x):
    """The same by way of lines."""

    def body(x_ref, out_ref, lines):
        lines[...] = x_ref[...]
        even = plgpu.every_other_row(lines, 0)[...]
        plgpu.every_other_row(lines, 0)[...] = plgpu.every_other_row(lines, 1)[...]
        plgpu.every_other_row(lines, 1)[...] = even
        out_ref[...] = lines[...]

    return _kernel(body, x, "swap_rows_in_lines", plgpu.LINES(x.shape, jnp.float32))(x)


def too_many_lines(x):
    """Why the implementation with lines cannot serve."""
    return f"{x.shape[0]} rows do not fit into 8 lines" if x.shape[0] > 8 else None


def _kernel(body, x, name, *scratch):
    make = functools.partial(plgpu.kernel, kernel_name=name, scratch_types=scratch)
    return make(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))


OPERATIONS = [
    Operation(name="swap_rows", implementation=f"{HERE}:swap_rows"),
    Operation(
        name="swap_rows",
        implementation=f"{HERE}:swap_rows_in_lines",
        target=TargetPredicate(names=frozenset({"sm_121a"})),
        refuses=f"{HERE}:too_many_lines",
    ),
]
