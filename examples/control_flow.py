"""Loops and branches: carried arrays and scalars, a loop of unknown length, indices into memory.

``jax.lax`` control flow works as everywhere in JAX. References are captured by the body of a loop;
values that change are carried.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

BLOCK = 512
TERMS = 12


def horner(x: jax.Array, coefficients: jax.Array) -> jax.Array:
    """The polynomial with the given coefficients at each element of ``x``.

    A ``fori_loop`` carries an array in registers and reads one coefficient per step.
    """

    def body(x_ref, coefficients_ref, out_ref):
        window = pl.ds(lax.axis_index("block") * BLOCK, BLOCK)
        v = x_ref[window]

        def step(i, total):
            return total * v + coefficients_ref[i]

        out_ref[window] = lax.fori_loop(0, TERMS, step, jnp.zeros_like(v))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.size // BLOCK,),
        grid_names=("block",),
        kernel_name="horner",
    )
    return kernel(x, coefficients)


def collatz(start: jax.Array) -> jax.Array:
    """How many steps of 3 n + 1 each number takes to reach 1.

    A ``while_loop`` over one scalar per block, with a branch in it.
    """

    def body(start_ref, out_ref):
        block = lax.axis_index("block")

        def step(state):
            number, count = state
            number = lax.cond(number % 2 == 0, lambda n: n // 2, lambda n: 3 * n + 1, number)
            return number, count + 1

        first = (start_ref[block], jnp.int32(0))
        _, count = lax.while_loop(lambda state: state[0] != 1, step, first)
        out_ref[block] = count

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(start.shape, jnp.int32),
        grid=start.shape,
        grid_names=("block",),
        kernel_name="collatz",
    )
    return kernel(start)


def gather_rows(table: jax.Array, index: jax.Array) -> jax.Array:
    """``table[index]``, with zeros where the index is negative.

    ``pl.when`` runs a branch for its effect on references.
    """
    _, columns = table.shape

    def body(table_ref, index_ref, out_ref):
        row = lax.axis_index("row")
        source = index_ref[row]

        @pl.when(source >= 0)
        def _():
            out_ref[row] = table_ref[source]

        @pl.when(source < 0)
        def _():
            out_ref[row] = jnp.zeros((columns,), table.dtype)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((index.size, columns), table.dtype),
        grid=(index.size,),
        grid_names=("row",),
        kernel_name="gather_rows",
    )
    return kernel(table, index)


def horner_reference(x: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """The same in NumPy."""
    return np.polyval(coefficients, x)


def collatz_reference(start: np.ndarray) -> np.ndarray:
    """The same in Python."""

    def count(n: int) -> int:
        steps = 0
        while n != 1:
            n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
        return steps

    return np.array([count(int(n)) for n in start])


EXAMPLES = [
    Example(
        "horner_f32",
        horner,
        lambda key: (
            jax.random.uniform(key, (2**14,), jnp.float32, -1, 1),
            jax.random.normal(jax.random.fold_in(key, 1), (TERMS,), jnp.float32),
        ),
        horner_reference,
        1e-5,
    ),
    Example(
        "collatz_i32",
        collatz,
        lambda key: (jax.random.randint(key, (256,), 1, 10000, jnp.int32),),
        collatz_reference,
    ),
    Example(
        "gather_rows_i8",
        gather_rows,
        lambda key: (
            *random_arrays(((100, 1024), jnp.int8))(key),
            jax.random.randint(jax.random.fold_in(key, 1), (64,), -20, 100, jnp.int32),
        ),
        lambda table, index: np.where(index[:, None] >= 0, table[index], 0),
    ),
]
