"""Rows of grouped (ragged) GEMM, and their contenders."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import operands
import program
import timing
import upstream_library
from contest import Candidate, Candidates, Contender, Row
from jax import lax

BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Products of groups of rows.

    Attributes:
      rows, k, n, groups: a is (rows, k). If not ``transposed``, b is (groups, k, n), or
        (groups, n, k) if ``transpose_b``, and the result (rows, n). Otherwise b is (rows, n) and
        the result (groups, k, n).
      transposed: whether the rows of each group are contracted.
      transpose_b: see above.
      dtype: of all arrays.
    """

    rows: int
    k: int
    n: int
    groups: int
    transposed: bool = False
    transpose_b: bool = False
    dtype: Any = BF16

    bound = "product"

    def row(self) -> Row:
        """The row."""
        kind = "transposed_ragged" if self.transposed else "ragged"
        a, b = self.rows * self.k, self.rows * self.n if self.transposed else self.matrices
        result = self.matrices if self.transposed else self.rows * self.n
        size = jnp.dtype(self.dtype).itemsize
        by_rows = "_nk" if self.transpose_b else ""
        return Row(
            name=f"{kind}{by_rows}_{self.rows}x{self.n}x{self.k}_g{self.groups}",
            group=kind.replace("_", " "),
            flops=2 * self.rows * self.n * self.k,
            bytes=(a + b + result) * size,
            input_bytes=(a + b) * size,
            inputs=self.inputs,
            reference=self.reference,
            errors=operands.product_errors(self.dtype),
            limits=operands.PRODUCT_LIMITS,
        )

    @property
    def matrices(self) -> int:
        """Elements of a matrix for each group."""
        return self.groups * self.k * self.n

    def inputs(self, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The operands, and sizes of groups: rows are cut at random places."""
        key_a, key_b = jax.random.split(jax.random.key(seed))
        shape_b: tuple[int, ...] = (self.rows, self.n)
        if not self.transposed:
            matrix = (self.n, self.k) if self.transpose_b else (self.k, self.n)
            shape_b = (self.groups, *matrix)
        cuts = np.sort(np.random.default_rng(seed).integers(0, self.rows, self.groups - 1))
        sizes = np.diff(cuts, prepend=0, append=self.rows).astype(np.int32)
        return (
            operands.normal(key_a, (self.rows, self.k), self.dtype),
            operands.normal(key_b, shape_b, self.dtype),
            jnp.asarray(sizes),
        )

    def reference(self, a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        """The result in float32: rows of other groups are zeros in the product of a group."""
        dot = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)

        def compute(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            ends = jnp.cumsum(sizes)
            position = jnp.arange(self.rows)[:, None]

            def rows_of(group: Any) -> jax.Array:
                inside = (position >= ends[group] - sizes[group]) & (position < ends[group])
                return jnp.where(inside, a, 0)

            if self.transposed:
                return lax.map(lambda group: dot(rows_of(group).T, b), jnp.arange(self.groups))

            def add(group: Any, total: jax.Array) -> jax.Array:
                return total + dot(rows_of(group), b[group].T if self.transpose_b else b[group])

            zeros = jnp.zeros((self.rows, self.n), jnp.float32)
            return lax.fori_loop(0, self.groups, add, zeros)

        return jax.jit(compute, **timing.reference_options())(a, b, sizes)

    def contenders(self, arguments: argparse.Namespace) -> list[Contender]:
        """All contenders."""
        search = arguments.upstream_configs
        theirs = upstream_library.ragged_candidates
        if self.transposed:
            theirs = upstream_library.transposed_ragged_candidates
        return [
            Contender("ours", "jax", lambda: self.ours(arguments)),
            Contender("xla", "jax", self.xla_candidates),
            Contender("upstream", "jax", lambda: theirs(self.n, search)),
            Contender("torch", "torch", self.torch_candidates),
        ]

    def our_product(self, config: Any = None) -> Callable[..., jax.Array]:
        """Our function of the operands and the sizes."""
        name = "transposed_ragged_matmul" if self.transposed else "ragged_matmul"
        return functools.partial(program.our_operation(name), config=config)

    def ours(self, arguments: argparse.Namespace) -> Candidates:
        """Our kernel."""
        rows = self.k if self.transposed else -(-self.rows // self.groups)
        return program.our_candidates(
            lambda label, config: Candidate(label, jax.jit(self.our_product(config))),
            program.our_operation("ragged_configs")(rows, self.n),
            arguments,
        )

    def xla_candidates(self) -> Candidates:
        """``lax.ragged_dot``: as JAX lowers it, and by JAX's kernel in Triton."""
        rows_contracted = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[],
        )

        def product(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
            if not self.transposed:
                return lax.ragged_dot(a, b, sizes, preferred_element_type=self.dtype)
            return lax.ragged_dot_general(
                a, b, sizes, rows_contracted, preferred_element_type=self.dtype
            )

        compiled = jax.jit(product)
        option = "jax_ragged_dot_use_gpu_pallas_triton_lowering"

        def by_triton(*args: jax.Array) -> jax.Array:
            before = getattr(jax.config, option)
            jax.config.update(option, True)
            try:
                return compiled(*args)
            finally:
                jax.config.update(option, before)

        yield Candidate("ragged_dot", compiled)
        if not self.transposed and jax.default_backend() == "gpu":
            yield Candidate("ragged_dot by Triton", by_triton)

    def torch_candidates(self) -> Candidates:
        """PyTorch's product of groups, and cuBLAS for each group in turn."""
        import torch

        grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

        def product(a: Any, b: Any, ends: Any) -> Any:
            return grouped(a.t() if self.transposed else a, b, offs=ends)

        def prepare(a: jax.Array, b: jax.Array, sizes: jax.Array) -> tuple[Any, ...]:
            return operands.to_torch(a, b, jnp.cumsum(sizes, dtype=jnp.int32))

        def one_by_one(a: Any, b: Any, ends: list[int]) -> Any:
            shape = (self.groups, self.k, self.n) if self.transposed else (self.rows, self.n)
            result = a.new_empty(shape)
            for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                part = a[start:end]
                if self.transposed:
                    torch.mm(part.t(), b[start:end], out=result[group])
                else:
                    torch.mm(part, b[group], out=result[start:end])
            return result

        def prepare_on_host(a: jax.Array, b: jax.Array, sizes: jax.Array) -> tuple[Any, ...]:
            return *operands.to_torch(a, b), np.cumsum(np.asarray(sizes)).tolist()

        yield Candidate("grouped_mm", product, prepare, jnp.from_dlpack)
        label = "a product for each group, whose sizes the host knows"
        yield Candidate(label, one_by_one, prepare_on_host, jnp.from_dlpack)
