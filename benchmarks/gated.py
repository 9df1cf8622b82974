"""The gated half of a feed-forward layer (SwiGLU): one kernel, two operations, XLA.

``ops.gated_matmul`` is compared with one product by both weights side by side and ``ops.swiglu`` of
its halves, with two products and ``ops.swiglu``, and with XLA's program for the same. Shapes are
those of models in ``gemm_shapes.py``, with a number of rows drawn by ``--seed``. Each result is
compared with the one in float32 before it is timed. Times are those of the kernels on the device.

    python benchmarks/gated.py --seed 1 --count 12 --json gated.json
"""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import gemm_shapes
import harness
import jax
import jax.numpy as jnp

from pallasite import ops

MOST_FLOPS = 4e12


@dataclasses.dataclass
class Row:
    """One measurement; times in milliseconds."""

    m: int
    n: int
    k: int
    pallasite_ms: float
    one_product_ms: float
    two_products_ms: float
    xla_ms: float
    relative_error: float

    @property
    def ratio(self) -> float:
        """The fastest other way's time by that of the kernel."""
        return min(self.one_product_ms, self.two_products_ms, self.xla_ms) / self.pallasite_ms


def draw(seed: int, count: int) -> list[tuple[int, int, int]]:
    """Rows, columns of a weight and depth."""
    models = [one for one in gemm_shapes.MODELS.values() if one.gated]
    shapes = []
    for number in range(count):
        dice = random.Random(f"{seed}/{number}")
        while True:
            model, m = dice.choice(models), round(2 ** dice.uniform(0, 14))
            shape = (m, model.feed_forward, model.hidden)
            if 4.0 * m * shape[1] * shape[2] <= MOST_FLOPS:
                shapes.append(shape)
                break
    return shapes


def xla(a: Any, gate: Any, up: Any) -> Any:
    """As programs write it."""
    return jax.nn.silu(a @ gate) * (a @ up)


def one_product(a: Any, both: Any) -> Any:
    """One product by both weights."""
    joint = ops.matmul(a, both)
    half = joint.shape[1] // 2
    return ops.swiglu(joint[:, :half], joint[:, half:])


def two_products(a: Any, gate: Any, up: Any) -> Any:
    """A product by each weight."""
    return ops.swiglu(ops.matmul(a, gate), ops.matmul(a, up))


def reference(a: Any, gate: Any, up: Any) -> Any:
    """In float32."""
    one, other = (jnp.matmul(a, w, preferred_element_type=jnp.float32) for w in (gate, up))
    return jax.nn.silu(one) * other


def measure(shape: tuple[int, int, int], seed: int, repeats: int) -> Row:
    """One row."""
    m, n, k = shape
    keys = jax.random.split(jax.random.key(seed), 3)
    a, gate, up = (
        jax.random.normal(key, one, jnp.bfloat16) * scale
        for key, one, scale in zip(
            keys, ((m, k), (k, n), (k, n)), (1.0, k**-0.5, k**-0.5), strict=True
        )
    )
    both = jnp.concatenate([gate, up], axis=1)
    ours = jax.jit(ops.gated_matmul)
    wanted = jax.jit(reference)(a, gate, up)
    got = ours(a, gate, up).astype(jnp.float32)
    error = float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))
    if not error < 1e-2:
        raise SystemExit(f"{shape}: wrong result, relative error {error}")
    times = [
        harness.kernel_milliseconds(jax.jit(function), *operands, repeats=repeats)
        for function, operands in (
            (ours, (a, gate, up)),
            (one_product, (a, both)),
            (two_products, (a, gate, up)),
            (xla, (a, gate, up)),
        )
    ]
    return Row(m, n, k, *times, error)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seconds", type=float, help="no further row begins after them")
    arguments = parser.parse_args()
    begin = time.monotonic()
    if jax.default_backend() != "gpu":
        parser.error(f"it needs a GPU, and JAX is on {jax.default_backend()!r}")
    print(harness.machine())
    rows = []
    for number, shape in enumerate(draw(arguments.seed, arguments.count)):
        if arguments.seconds and time.monotonic() - begin > arguments.seconds:
            break
        rows.append(measure(shape, number, arguments.repeats))
    harness.print_table(
        ("m", "n", "k", "ms", "one product ms", "two products ms", "XLA ms", "ratio"),
        [
            (
                row.m,
                row.n,
                row.k,
                row.pallasite_ms,
                row.one_product_ms,
                row.two_products_ms,
                row.xla_ms,
                row.ratio,
            )
            for row in rows
        ],
    )
    print(f"geometric mean {harness.geometric_mean(row.ratio for row in rows)}")
    harness.write_json(arguments.json, "gated", rows)


if __name__ == "__main__":
    main()
