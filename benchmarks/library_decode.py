"""Rows of attention of one query for each sequence to a cache in pages, and their contenders."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import attention
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
class Decode:
    """Attention of a query for each sequence, in bfloat16.

    Attributes:
      batch: sequences.
      context: rows of a sequence at most.
      full: whether all have that many; otherwise lengths are distributed evenly from half as many.
      heads, kv_heads, head_dim: of queries, of the cache, and their size.
      page_size: rows of a page. The pages of all sequences lie in random order.
    """

    batch: int
    context: int
    full: bool = True
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64

    bound = "copy"

    def row(self) -> Row:
        """The row."""
        queries = self.batch * self.heads * self.head_dim
        cache_row = 2 * self.kv_heads * self.head_dim * 2
        read = int(self.lengths().sum())
        name = f"decode_b{self.batch}_c{self.context}"
        if (self.heads, self.kv_heads) != (32, 8):
            name += f"_h{self.heads}x{self.kv_heads}"
        return Row(
            name=name + ("" if self.full else "_uneven"),
            group="decode",
            flops=4 * read * self.heads * self.head_dim,
            bytes=read * cache_row + 2 * queries * 2,
            input_bytes=read * cache_row + queries * 2,
            inputs=self.inputs,
            reference=self.reference,
            errors=lambda *results: attention.errors(*(one[:, None] for one in results)),
            limits=attention.LIMITS[False],
        )

    def lengths(self) -> np.ndarray[Any, Any]:
        """Rows of each sequence, in ascending order."""
        if self.full:
            return np.full(self.batch, self.context, np.int32)
        half = self.context // 2
        return (half + (np.arange(self.batch) + 1) * half // self.batch).astype(np.int32)

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Queries, pages of keys and of values, lengths, and the pages of each sequence."""
        generator = np.random.default_rng(seed)
        pages = self.batch * self.context // self.page_size
        keys = jax.random.split(jax.random.key(seed), 3)
        cache = (self.kv_heads, pages, self.page_size, self.head_dim)
        return (
            operands.normal(keys[0], (self.batch, self.heads, self.head_dim), BF16),
            operands.normal(keys[1], cache, BF16),
            operands.normal(keys[2], cache, BF16),
            jnp.asarray(generator.permutation(self.lengths())),
            jnp.asarray(generator.permutation(pages).reshape(self.batch, -1).astype(np.int32)),
        )

    def gather(self, k_pages: Any, v_pages: Any, pages: Any) -> tuple[jax.Array, jax.Array]:
        """Keys and values, (batch, kv_heads, context, head_dim)."""
        k, v = (_gathered(x, pages) for x in (k_pages, v_pages))
        return k, v

    def reference(self, q: Any, k_pages: Any, v_pages: Any, lengths: Any, pages: Any) -> jax.Array:
        """The result in float32, one sequence after the other."""
        dot = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

        def one(
            k_pages: Any, v_pages: Any, arguments: tuple[jax.Array, jax.Array, jax.Array]
        ) -> jax.Array:
            query, length, own = arguments
            k, v = (_gathered(x, own[None])[0].astype(jnp.float32) for x in (k_pages, v_pages))
            query = query.reshape(self.kv_heads, -1, self.head_dim).astype(jnp.float32)
            scores = dot("hgd,htd->hgt", query, k) * self.head_dim**-0.5
            scores = jnp.where(jnp.arange(self.context) < length, scores, -jnp.inf)
            result = dot("hgt,htd->hgd", jax.nn.softmax(scores, axis=-1), v)
            return result.reshape(self.heads, self.head_dim)

        def compute(k_pages: Any, v_pages: Any, *arguments: Any) -> jax.Array:
            result: jax.Array = lax.map(functools.partial(one, k_pages, v_pages), arguments)
            return result

        options = timing.reference_options()
        return jax.jit(compute, **options)(k_pages, v_pages, q, lengths, pages)

    def contenders(self, arguments: argparse.Namespace) -> list[Contender]:
        """All contenders. Only ours, one of XLA's candidates and some of JAX's read pages."""
        search = arguments.upstream_configs
        return [
            Contender("ours", "jax", lambda: self.ours(arguments)),
            Contender("xla", "jax", self.xla_candidates),
            Contender("cudnn", "jax", lambda: operands.only(self.cudnn())),
            Contender("upstream", "jax", lambda: upstream_library.decode_candidates(self, search)),
            Contender("torch", "torch", self.torch_candidates),
        ]

    def our_attention(self, config: Any = None) -> Callable[..., jax.Array]:
        """Our function of the inputs."""
        return functools.partial(program.our_operation("paged_attention"), config=config)

    def ours(self, arguments: argparse.Namespace) -> Candidates:
        """Our kernel."""
        listed = program.our_operation("decode_configs")(
            self.head_dim, self.heads // self.kv_heads, kv_heads=self.kv_heads
        )
        return program.our_candidates(
            lambda label, config: Candidate(label, jax.jit(self.our_attention(config))),
            listed,
            arguments,
        )

    def xla_candidates(self) -> Candidates:
        """XLA's products and softmax, with the gathering of pages and without."""

        def attend(q: Any, k: Any, v: Any, lengths: Any) -> jax.Array:
            grouped = q.reshape(self.batch, self.kv_heads, -1, self.head_dim)
            scores = jnp.einsum("bhgd,bhtd->bhgt", grouped, k, preferred_element_type=jnp.float32)
            scores = scores * self.head_dim**-0.5
            if not self.full:
                seen = jnp.arange(self.context) < lengths[:, None, None, None]
                scores = jnp.where(seen, scores, -jnp.inf)
            weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
            result = jnp.einsum("bhgt,bhtd->bhgd", weights, v, preferred_element_type=q.dtype)
            return result.reshape(q.shape)

        def paged(q: Any, k_pages: Any, v_pages: Any, lengths: Any, pages: Any) -> jax.Array:
            return attend(q, *self.gather(k_pages, v_pages, pages), lengths)

        yield Candidate("composed, gathering", jax.jit(paged))
        yield Candidate("composed, gathered beforehand", jax.jit(attend), self.gathered)

    def gathered(self, q: Any, k_pages: Any, v_pages: Any, lengths: Any, pages: Any) -> Any:
        """The inputs with keys and values in place of pages."""
        return q, *self.gather(k_pages, v_pages, pages), lengths

    def cudnn(self) -> Candidate:
        """cuDNN's attention through JAX, on keys and values that were gathered beforehand."""

        def attend(q: Any, k: Any, v: Any, lengths: Any) -> jax.Array:
            known = {} if self.full else {"key_value_seq_lengths": lengths}
            return jax.nn.dot_product_attention(q[:, None], k, v, implementation="cudnn", **known)[
                :, 0
            ]

        def prepare(*inputs: Any) -> tuple[Any, ...]:
            q, k, v, lengths = self.gathered(*inputs)
            return q, k.swapaxes(1, 2), v.swapaxes(1, 2), lengths

        return Candidate("gathered beforehand", jax.jit(attend), prepare)

    def torch_candidates(self) -> Candidates:
        """PyTorch's attention, whose queries are all heads that share one of the cache."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def prepare(*inputs: jax.Array) -> tuple[Any, ...]:
            q, k, v, lengths = operands.to_torch(*self.gathered(*inputs))
            queries = q.reshape(self.batch, self.kv_heads, -1, self.head_dim)
            if self.full:
                return queries, k, v, None
            beyond = torch.arange(self.context, device=q.device) >= lengths[:, None, None, None]
            mask = torch.zeros(beyond.shape, dtype=q.dtype, device=q.device)
            mask.masked_fill_(beyond, -math.inf)
            return queries, k, v, mask.expand(*queries.shape[:-1], self.context)

        def output(result: Any) -> Any:
            return jnp.from_dlpack(result.reshape(self.batch, self.heads, self.head_dim))

        def function(backend: Any) -> Callable[..., Any]:
            def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
                chosen = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
                with torch.no_grad(), chosen:
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

            return attend

        backends = {
            "cuDNN": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
        }
        if self.full:  # FlashAttention takes no mask there.
            backends = {"flash": SDPBackend.FLASH_ATTENTION, **backends}
        if not torch.cuda.is_available():
            backends = {"any": None}
        for name, backend in backends.items():
            yield Candidate(f"{name}, gathered beforehand", function(backend), prepare, output)


@jax.jit
def _gathered(cache: jax.Array, pages: jax.Array) -> jax.Array:
    """(batch, heads, rows, head_dim) of pages (heads, pages, page_size, head_dim)."""
    heads, _, _, head_dim = cache.shape
    return cache[:, pages].swapaxes(0, 1).reshape(pages.shape[0], heads, -1, head_dim)
