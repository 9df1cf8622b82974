"""Rows of mixed-precision GEMM, and their contenders."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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

    # Elements of 4 bits are widened outside of the program that multiplies.
    return jax.jit(product, **timing.reference_options())(a, w.astype(jnp.int8))
