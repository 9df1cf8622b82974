"""Rows of products with narrow weights and of products of groups of rows, and their contenders."""

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

import upstream

BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Activations (m, k) in bfloat16, weights (n, k) of a narrow type, result (m, n)."""

    weights: str
    m: int
    n: int
    k: int

    @property
    def few(self) -> bool:
        """Whether there are so few rows that reading the weights takes the time."""
        return self.m <= upstream.SKINNY

    @property
    def bound(self) -> str:
        """What the time is a share of: that of a copy or of a product."""
        return "copy" if self.few else "product"

    @property
    def bits(self) -> int:
        """Of a weight."""
        return int(self.weights.removeprefix("int"))

    def row(self) -> Row:
        """The row."""
        m, n, k = self.m, self.n, self.k
        weight_bytes = n * k * self.bits // 8
        return Row(
            name=f"{self.weights}_{m}x{n}x{k}",
            group=f"{self.weights} few rows" if self.few else self.weights,
            flops=2 * m * n * k,
            bytes=weight_bytes + (k + n) * m * 2,
            input_bytes=weight_bytes + m * k * 2,
            inputs=self.inputs,
            reference=_mixed_reference,
            errors=operands.product_errors(BF16),
            limits=operands.PRODUCT_LIMITS,
        )

    def inputs(self, seed: int) -> tuple[jax.Array, jax.Array]:
        """Activations, and weights among which all values are equally frequent."""
        a, w = jax.random.split(jax.random.key(seed))
        half = 1 << (self.bits - 1)
        weights = jax.random.randint(w, (self.n, self.k), -half, half, jnp.int8)
        return operands.normal(a, (self.m, self.k), BF16), weights.astype(self.weights)

    def contenders(self, arguments: argparse.Namespace) -> list[Contender]:
        """All contenders; ``bf16`` has weights of 16 bits, which others would convert."""
        # JAX's kernel refuses 4 bits whatever the configuration.
        search = arguments.upstream_configs if self.bits == 8 else "one"
        theirs = functools.partial(upstream_library.mixed_candidates, self.m, self.n, self.k)
        return [
            Contender("ours", "jax", lambda: self.ours(arguments)),
            Contender("xla", "jax", lambda: operands.only(Candidate("dot", jax.jit(_converting)))),
            Contender("upstream", "jax", lambda: theirs(search)),
            Contender("torch", "torch", self.torch_candidates),
            Contender("bf16", "jax", lambda: operands.only(_converted_beforehand())),
        ]

    def our_product(self, config: Any = None) -> Callable[..., jax.Array]:
        """Our function of activations and weights."""
        return functools.partial(
            program.our_operation("mixed_matmul"), transpose_b=True, config=config
        )

    def ours(self, arguments: argparse.Namespace) -> Candidates:
        """Our kernel."""
        listed = program.our_operation("mixed_configs")(self.m, self.n, self.k, self.bits)
        return program.our_candidates(
            lambda label, config: Candidate(label, jax.jit(self.our_product(config))),
            listed,
            arguments,
        )

    def torch_candidates(self) -> Candidates:
        """PyTorch's products that convert weights themselves, or conversion and cuBLAS."""
        import torch

        def int8_product(a: Any, w: Any, scales: Any) -> Any:
            return torch._weight_int8pack_mm(a, w, scales)

        def int8_operands(a: jax.Array, w: jax.Array) -> tuple[Any, ...]:
            tensors = operands.to_torch(a, w)
            return *tensors, torch.ones(self.n, dtype=torch.bfloat16, device=tensors[0].device)

        def int4_product(a: Any, packed: Any, scales: Any) -> Any:
            return torch._weight_int4pack_mm(a, packed, GROUP, scales)

        def int4_operands(a: jax.Array, w: jax.Array) -> tuple[Any, ...]:
            # Its weights are unsigned; 8 is taken off. The earlier of two has the higher bits.
            shifted = (w.astype(jnp.int8) + 8).astype(jnp.uint8)
            pairs = (shifted[:, ::2] << 4) | shifted[:, 1::2]
            activations, pairs = operands.to_torch(a, pairs)
            packed = torch._convert_weight_to_int4pack(pairs, 8)
            scales = torch.zeros(
                (self.k // GROUP, self.n, 2), dtype=torch.bfloat16, device=activations.device
            )
            scales[..., 0] = 1  # and zero points of 0
            return activations, packed, scales

        def converting(a: Any, w: Any) -> Any:
            return torch.matmul(a, w.to(torch.bfloat16).t())

        def as_int8(a: jax.Array, w: jax.Array) -> tuple[Any, ...]:
            return operands.to_torch(a, w.astype(jnp.int8))

        if self.weights == "int4":
            name = f"_weight_int4pack_mm, groups of {GROUP}, packed beforehand"
            yield Candidate(name, int4_product, int4_operands, jnp.from_dlpack)
        elif self.few:  # Its kernel for a GPU is a plain loop over the depth.
            yield Candidate("_weight_int8pack_mm", int8_product, int8_operands, jnp.from_dlpack)
        yield Candidate("conversion from int8, matmul", converting, as_int8, jnp.from_dlpack)


GROUP = 128
"""Weights that share a scale in PyTorch's product with weights of 4 bits."""


def _dot(a: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    return lax.dot_general(a, w, (((1,), (1,)), ((), ())), **options)


def _converting(a: jax.Array, w: jax.Array) -> jax.Array:
    return _dot(a, w.astype(a.dtype), preferred_element_type=a.dtype)


def _converted_beforehand() -> Candidate:
    product = jax.jit(functools.partial(_dot, preferred_element_type=BF16))
    return Candidate("dot, weights converted beforehand", product, lambda a, w: (a, w.astype(BF16)))


def _mixed_reference(a: jax.Array, w: jax.Array) -> jax.Array:
    def product(a: jax.Array, w: jax.Array) -> jax.Array:
        return _dot(*(x.astype(jnp.float32) for x in (a, w)), precision=lax.Precision.HIGHEST)

    return jax.jit(product, **timing.reference_options())(a, w)


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
