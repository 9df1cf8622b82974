"""Attention of shapes drawn by a seed, against cuDNN and PyTorch.

Batch, heads, groups, length (1 to 32768, log-uniform), head size (multiples of 8 up to 256, most of
them common ones) and the causal mask are random; ``--seed`` is free to choose. ``ops.attention``
without options is compared with ``jax.nn.dot_product_attention`` by cuDNN and with PyTorch's
``scaled_dot_product_attention``, whichever take the shape; each result is compared with one in
float32 before it is timed. Times are those of the kernels on the device.

    python benchmarks/attention_shapes.py --seed 1 --count 60 --json attention_shapes.json
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

from pallasite import ops

COMMON_HEADS = (64, 64, 128, 128, 128, 128, 96, 80, 72, 112, 160, 192, 256)
MOST_FLOPS, MOST_ELEMENTS = 2e12, 1 << 27


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: as many keys as queries."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        """Of two products, forward."""
        whole = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return whole / 2 if self.causal else whole


def draw(seed: int, count: int) -> list[Case]:
    """Cases of a seed; each depends on the seed and its number alone."""
    cases = []
    for number in range(count):
        dice = random.Random(f"{seed}/{number}")
        while True:
            length = max(1, round(2 ** dice.uniform(0, 15)))
            head_dim = dice.choice(COMMON_HEADS) if dice.random() < 0.8 else 8 * dice.randint(1, 32)
            kv_heads, group = dice.choice((1, 2, 4, 8, 16)), dice.choice((1, 1, 2, 4, 8))
            batch = max(1, round(2 ** dice.uniform(0, 15)) // length)
            case = Case(batch, length, kv_heads * group, kv_heads, head_dim, dice.random() < 0.5)
            elements = batch * length * case.heads * head_dim
            if case.flops <= MOST_FLOPS and elements <= MOST_ELEMENTS and case.heads <= 64:
                cases.append(case)
                break
    return cases


def reference(case: Case, q: Any, k: Any, v: Any) -> Any:
    """The first and the last heads of the first batch, in float32."""
    picked = sorted({0, case.heads - 1})
    group = case.heads // case.kv_heads
    results = []
    for head in picked:
        one, key, value = (
            x[0, :, h].astype(jnp.float32)
            for x, h in ((q, head), (k, head // group), (v, head // group))
        )
        scores = jnp.matmul(one, key.T, precision="highest") * case.head_dim**-0.5
        if case.causal:
            scores = jnp.where(jnp.tri(case.length, dtype=bool), scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        results.append(jnp.matmul(weights, value, precision="highest"))
    return jnp.stack(results)


def cudnn(case: Case) -> Callable[..., Any]:
    """Of JAX."""
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=case.causal, implementation="cudnn"
    )


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the cotangent and the operands: the gradients, forward included."""
    return lambda d, *operands: jax.vjp(function, *operands)[1](d)


def torch_milliseconds(case: Case, operands: Any, backward: bool, repeats: int) -> float | None:
    """The median of PyTorch's kernels, by CUDA events; None if it does not take the shape."""
    try:
        import torch
        import torch.nn.functional as F
    except ImportError:
        return None
    tensors = [
        torch.from_dlpack(x).transpose(1, 2).detach().requires_grad_(backward) for x in operands
    ]
    times = []
    try:
        for _ in range(repeats + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(400_000)  # So that the host is ahead.
            start.record()
            out = F.scaled_dot_product_attention(
                *tensors, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads
            )
            if backward:
                torch.autograd.grad(out, tensors, torch.ones_like(out))
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    except RuntimeError:
        return None
    finally:
        torch.cuda.empty_cache()
    return sorted(times[3:])[repeats // 2]


@dataclasses.dataclass
class Row:
    """One measurement; times in milliseconds."""

    case: dict[str, Any]
    backward: bool
    pallasite_ms: float
    cudnn_ms: float | None
    torch_ms: float | None
    relative_error: float

    @property
    def ratio(self) -> float | None:
        """The fastest rival's time by ours."""
        rivals = [one for one in (self.cudnn_ms, self.torch_ms) if one is not None]
        return min(rivals) / self.pallasite_ms if rivals else None


def measure(case: Case, seed: int, backward: bool, repeats: int) -> Row:
    """One row."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shape = (case.batch, case.length, case.heads, case.head_dim)
    kv = (case.batch, case.length, case.kv_heads, case.head_dim)
    q, k, v, d = (
        jax.random.normal(key, one, jnp.bfloat16)
        for key, one in zip(keys, (shape, kv, kv, shape), strict=True)
    )
    function = jax.jit(lambda q, k, v: ops.attention(q, k, v, causal=case.causal))
    picked = sorted({0, case.heads - 1})
    got = np.asarray(function(q, k, v)[0][:, np.array(picked)].astype(jnp.float32))
    wanted = np.asarray(jax.jit(lambda *a: reference(case, *a))(q, k, v)).transpose(1, 0, 2)
    error = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
    if not error < 1.5e-2:
        raise SystemExit(f"{case}: wrong result, relative error {error}")
    operands: tuple[Any, ...] = (q, k, v)
    rival: Any = cudnn(case)
    ours: Any = function
    if backward:
        operands, ours, rival = (d, q, k, v), with_gradients(function), with_gradients(rival)
    time = harness.kernel_milliseconds(jax.jit(ours), *operands, repeats=repeats)
    try:
        rival_time = harness.kernel_milliseconds(jax.jit(rival), *operands, repeats=repeats)
    except Exception:  # cuDNN has no kernel for the shape.
        rival_time = None
    torch_time = torch_milliseconds(case, (q, k, v), backward, repeats)
    return Row(dataclasses.asdict(case), backward, time, rival_time, torch_time, error)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--backward", action="store_true", help="forward and gradients together")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"it needs a GPU, and JAX is on {jax.default_backend()!r}")
    print(harness.machine())
    rows = []
    for number, case in enumerate(draw(arguments.seed, arguments.count)):
        if number < arguments.first:
            continue
        row = measure(case, number, arguments.backward, arguments.repeats)
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        print(f"{number}: {case} {row.pallasite_ms:.4f} ms, {ratio}", flush=True)
        rows.append(row)
    harness.print_table(
        (
            "batch",
            "length",
            "heads",
            "head size",
            "causal",
            "ms",
            "cuDNN ms",
            "PyTorch ms",
            "ratio",
        ),
        [
            (
                row.case["batch"],
                row.case["length"],
                f"{row.case['heads']}/{row.case['kv_heads']}",
                row.case["head_dim"],
                "yes" if row.case["causal"] else "no",
                row.pallasite_ms,
                row.cudnn_ms,
                row.torch_ms,
                row.ratio,
            )
            for row in rows
        ],
    )
    ratios = sorted(row.ratio for row in rows if row.ratio is not None)
    below = sum(one < 0.95 for one in ratios)
    print(f"geometric mean {harness.geometric_mean(ratios)} of {len(ratios)}, {below} below 0.95")
    harness.write_json(arguments.json, "attention_shapes", rows)


if __name__ == "__main__":
    main()
