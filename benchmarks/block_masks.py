"""Attention with masks of blocks: numbers against float32, time against the blocks that are seen.

Each case is ``ops.attention`` with a random ``block_mask``, forward and gradients, compared with
attention in float32 before it is timed; the rival is the same without the mask. What a block of
scores costs should not depend on the mask: the last column is the time over that of the dense
kernel, divided by the share of the blocks that are seen; 1 is proportional.

    python benchmarks/block_masks.py --seed 1 --json block_masks.json
"""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
from typing import Any

import attention_shapes
import harness
import jax
import jax.numpy as jnp
import numpy as np
import side_by_side
import timing

from pallasite import ops


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
      mask_heads, mask_batches: 1, or those of the queries.
      density: of blocks that are seen.
      mask_block: queries and keys of a block.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    density: float
    causal: bool
    mask_batches: int = 1
    mask_heads: int = 1
    mask_block: tuple[int, int] = (128, 128)

    def mask(self, seed: int) -> np.ndarray[Any, Any]:
        """Which blocks are seen; with ``causal``, also by their place. Rows may see none."""
        rows, columns = (
            -(-one // size)
            for one, size in zip((self.queries, self.keys), self.mask_block, strict=True)
        )
        shape = (self.mask_batches, self.mask_heads, rows, columns)
        return np.random.default_rng(seed).random(shape) < self.density

    def seen(self, mask: np.ndarray[Any, Any]) -> tuple[int, int]:
        """Blocks that are computed with the mask, and without it."""
        last = (np.arange(mask.shape[2]) + 1) * self.mask_block[0] - 1 + self.keys - self.queries
        first = np.arange(mask.shape[3]) * self.mask_block[1]
        dense = np.broadcast_to(not self.causal or first <= last[:, None], mask.shape)
        return int((mask & dense).sum()), int(dense.sum())


LARGE = (
    Case(1, 16384, 16384, 16, 16, 128, 0.1, False),
    Case(1, 16384, 16384, 16, 16, 128, 0.5, False),
    Case(1, 16384, 16384, 16, 4, 128, 0.25, True),
    Case(2, 8192, 8192, 16, 16, 64, 0.25, False, 2, 16),
    Case(1, 8192, 8192, 16, 16, 128, 0.25, True, 1, 16, (256, 512)),
    Case(1, 8192, 8192, 8, 8, 256, 0.25, False),
)
"""Cases to be timed."""


def draw(seed: int, count: int) -> list[Case]:
    """Small cases whose numbers matter."""
    dice = random.Random(seed)
    cases = []
    for _ in range(count):
        kv_heads, group = dice.choice((1, 2, 4)), dice.choice((1, 2, 4))
        batch, queries = dice.randint(1, 3), dice.randint(100, 3000)
        keys = queries if dice.random() < 0.5 else dice.randint(100, 3000)
        causal = dice.random() < 0.5
        head_dim = dice.choice((64, 64, 128, 128, 128, 256, 8 * dice.randint(2, 32)))
        block = dice.choice(((128, 128), (128, 128), (128, 256), (256, 128), (384, 512)))
        cases.append(
            Case(
                batch, queries, max(keys, queries) if causal else keys, kv_heads * group, kv_heads,
                head_dim, dice.choice((0.02, 0.2, 0.5, 0.9)), causal, dice.choice((1, batch)),
                dice.choice((1, kv_heads * group)), block,
            )
        )  # fmt: skip
    return cases


def reference(case: Case, mask: Any, q: Any, k: Any, v: Any) -> Any:
    """In float32, for query heads that share one head of keys; zeros where nothing is seen."""
    rows, columns = case.mask_block
    seen = jnp.repeat(jnp.repeat(mask, rows, 2), columns, 3)[:, :, : case.queries, : case.keys]
    if case.causal:
        seen &= jnp.tri(case.queries, case.keys, case.keys - case.queries, dtype=bool)
    product = functools.partial(jnp.einsum, precision="highest")
    scores = product("bqhd,bkd->bhqk", q, k[:, :, 0]) * case.head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    return product("bhqk,bkd->bqhd", jnp.where(seen, weights, 0.0), v[:, :, 0])


@dataclasses.dataclass
class Row:
    """One measurement; times in milliseconds."""

    case: dict[str, Any]
    share: float
    forward_ms: float
    dense_forward_ms: float
    backward_ms: float
    dense_backward_ms: float
    relative_errors: list[float]


def expected(case: Case, mask: Any, q: Any, k: Any, v: Any, d: Any) -> Any:
    """The result and the gradients."""
    q, k, v, d = (one.astype(jnp.float32) for one in (q, k, v, d))
    out, pull = jax.vjp(functools.partial(reference, case, mask), q, k, v)
    return (out, *pull(d))


def of_head(case: Case, head: int, arrays: Any, mask: Any) -> Any:
    """Operands of :func:`expected`, for one head of keys; of long sequences the first batch."""
    group, batches = case.heads // case.kv_heads, 1 if case.queries > 4096 else case.batch
    mine, own = slice(head * group, (head + 1) * group), slice(head, head + 1)
    parts = [
        one[:batches, :, place] for one, place in zip(arrays, (mine, own, own, mine), strict=True)
    ]
    mask = mask[: batches if case.mask_batches > 1 else 1]
    return (mask[:, mine] if case.mask_heads > 1 else mask, *parts)


def errors(case: Case, program: Any, mask: Any, arrays: Any, results: Any) -> list[float]:
    """Relative errors of the result and of the gradients, the worst of the heads compared."""
    worst = [0.0] * 4
    out, d_q, d_k, d_v = results
    for head in sorted({0, case.kv_heads - 1}):
        wanted = program(*of_head(case, head, arrays, mask))
        _, d_qs, d_ks, d_vs, outs = of_head(case, head, (d_q, d_k, d_v, out), mask)
        for number, (one, other) in enumerate(zip((outs, d_qs, d_ks, d_vs), wanted, strict=True)):
            size = float(jnp.linalg.norm(other.reshape(-1)))
            error = float(jnp.linalg.norm((one.astype(jnp.float32) - other).reshape(-1)))
            worst[number] = max(worst[number], error / size if size else error)
    return worst


def measure(task: tuple[int, Case, int], alone: Any) -> Row:
    """One row; everything but the reference is compiled before it has the GPU for itself."""
    seed, case, repeats = task
    shapes = [
        (case.batch, case.queries, case.heads, case.head_dim),
        *[(case.batch, case.keys, case.kv_heads, case.head_dim)] * 2,
    ]
    shapes.append(shapes[0])

    def operands() -> list[Any]:
        keys = jax.random.split(jax.random.key(seed), 4)
        return [jax.random.normal(*one, jnp.bfloat16) for one in zip(keys, shapes, strict=True)]

    mask = case.mask(seed)
    given = [*jax.eval_shape(operands), jax.ShapeDtypeStruct(mask.shape, bool)]

    def forward(q: Any, k: Any, v: Any, d: Any, mask: Any) -> Any:
        return ops.attention(
            q, k, v, causal=case.causal, block_mask=mask, mask_block=case.mask_block
        )

    def dense(q: Any, k: Any, v: Any, d: Any) -> Any:
        return ops.attention(q, k, v, causal=case.causal)

    def with_gradients(function: Any) -> Any:
        def both(q: Any, k: Any, v: Any, d: Any, *rest: Any) -> Any:
            out, pull = jax.vjp(lambda *first: function(*first, d, *rest), q, k, v)
            return (out, *pull(d))

        return both

    programs = [
        jax.jit(function).lower(*(given if masked else given[:4])).compile()
        for function, masked in (
            (forward, True),
            (dense, False),
            (with_gradients(forward), True),
            (with_gradients(dense), False),
        )
    ]
    make = jax.jit(operands).lower().compile()
    parts = jax.eval_shape(lambda *given: of_head(case, 0, given[:4], given[4]), *given)
    plain = jax.jit(functools.partial(expected, case), **timing.reference_options())
    reference_program = plain.lower(*parts).compile()
    with alone:
        arrays, on_device = make(), jnp.asarray(mask)
        results = programs[2](*arrays, on_device)
        alone_out = programs[0](*arrays, on_device)
        found = errors(case, reference_program, on_device, arrays, results)
        if not max(found) < 1.5e-2:
            raise ValueError(f"wrong results, relative errors {found}")
        if not bool((alone_out == results[0]).all()):
            raise ValueError("the forward differs from that with gradients")
        times = [
            attention_shapes.milliseconds(
                "jax",
                functools.partial(program, *arrays, *([on_device] if number % 2 == 0 else [])),
                repeats,
            )
            for number, program in enumerate(programs)
        ]
    some, every = case.seen(mask)
    return Row(dataclasses.asdict(case), some / every, *times, found)


def main() -> int:
    """Measures, prints a table and writes JSON; 1 if a case failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=12)
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"it needs a GPU, and JAX is on {jax.default_backend()!r}")
    print(harness.machine())
    cases = [*LARGE, *draw(arguments.seed, arguments.count)]
    tasks = [(arguments.seed, case, arguments.repeats) for case in cases]
    rows, failed = side_by_side.measured(
        measure, tasks, arguments.processes, arguments.seconds, name=lambda task: str(task[1])
    )
    harness.print_table(
        (
            "batch", "queries", "keys", "heads", "size", "causal", "block", "seen", "ms", "dense",
            "by share", "gradients ms", "dense", "by share", "error",
        ),
        [
            (
                row.case["batch"], row.case["queries"], row.case["keys"],
                f"{row.case['heads']}/{row.case['kv_heads']}", row.case["head_dim"],
                "yes" if row.case["causal"] else "no", "x".join(map(str, row.case["mask_block"])),
                row.share, row.forward_ms, row.dense_forward_ms,
                row.forward_ms / row.dense_forward_ms / max(row.share, 1e-3),
                row.backward_ms, row.dense_backward_ms,
                row.backward_ms / row.dense_backward_ms / max(row.share, 1e-3),
                max(row.relative_errors),
            )
            for row in rows
        ],
    )  # fmt: skip
    print(f"{len(rows)} of {len(tasks)} measured, {failed} failed")
    harness.write_json(arguments.json, "block_masks", rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
