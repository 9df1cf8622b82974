"""Many products at once: ``jax.vmap`` of ``ops.matmul`` against XLA and PyTorch.

Numbers of products and extents are drawn by ``--seed``, for each of the ``--forms``: where operands
and results have the dimension of the products, or gradients. The kernel for all products is also
compared with the kernel for one of them that has a further grid dimension, with copies of the
operands to matrices that lie one after the other (of gradients, with a gradient for each product
that are added up), and with its own best configurations by the estimate (``--kinds``).
``gemm_times.py`` says how it is timed; every result is compared with one in float32 first.

    python benchmarks/batched.py --seed 1 --count 20 --json batched.json
    python benchmarks/batched.py --seed 1 --count 20 --forms rows heads weights
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gemm_times
import harness
import jax
import jax.numpy as jnp
import operands
import side_by_side
import timing

from pallasite_hopper.ops import MatmulConfig, matmul
from pallasite_hopper.ops.dense import batched, choice
from pallasite_hopper.ops.dense.candidates import candidates
from pallasite_hopper.ops.dense.cost import Sizes

MOST_FLOPS, MOST_BYTES = 6e11, 1 << 30
LARGEST_ERROR = 8e-3

Shape = tuple[int, int, int, int]
"""How many products, and the extents of each."""


@dataclasses.dataclass(frozen=True)
class Form:
    """Dimensions of a product, in their order: z of all products, m, n and k.

    Attributes:
      a, b, out: of the operands and the result.
      gradients: of which operands gradients are computed instead, given that of the result.
    """

    a: str
    b: str
    out: str
    gradients: str = ""

    def function(self, product: Callable[..., Any]) -> Callable[..., Any]:
        """What is measured, of a product of matrices with ``transpose_a`` and ``transpose_b``."""
        one = functools.partial(
            product,
            transpose_a=self.a.index("k") < self.a.index("m"),
            transpose_b=self.b.index("n") < self.b.index("k"),
        )
        axes = tuple(x.index("z") if "z" in x else None for x in (self.a, self.b))
        every = jax.vmap(lambda a, b: one(a, b), axes, self.out.index("z"))

        def gradients(a: Any, b: Any, out: Any) -> Any:
            of_a, of_b = jax.vjp(every, a, b)[1](out)
            return [x for name, x in (("a", of_a), ("b", of_b)) if name in self.gradients]

        return gradients if self.gradients else lambda a, b: [every(a, b)]

    def sums(self, multiply: Callable[..., Any], *given: Any) -> list[Any]:
        """The same by a function such as ``jnp.einsum``."""
        a, b, *out = given
        if not self.gradients:
            return [multiply(f"{self.a},{self.b}->{self.out}", a, b)]
        return [
            multiply(f"{self.out},{self.b}->{self.a}", *out, b)
            if name == "a"
            else multiply(f"{self.out},{self.a}->{self.b}", *out, a)
            for name in self.gradients
        ]

    def shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        """Of the operands."""
        sizes = dict(zip("zmnk", shape, strict=True))
        names = (self.a, self.b, self.out) if self.gradients else (self.a, self.b)
        return [tuple(sizes[one] for one in each) for each in names]

    def with_copies(self, *given: Any) -> Any:
        """With matrices that are first brought into an order one after the other."""
        names = self.a, self.b, self.out
        first = [jnp.moveaxis(x, n.index("z"), 0) for x, n in zip(given, names, strict=False)]
        first = jax.lax.optimization_barrier(first)
        front = [x if "z" not in x else "z" + x.replace("z", "") for x in names]
        plain = Form(*front, self.gradients).function(matmul)(*first)
        results = self.gradients or ["out"]
        order = {"a": self.a, "b": self.b, "out": self.out}
        plain = jax.lax.optimization_barrier(plain)
        return [
            jnp.moveaxis(x, 0, order[n].index("z")) for x, n in zip(plain, results, strict=True)
        ]

    def added_up(self, a: Any, b: Any, out: Any) -> Any:
        """The gradient of operands that all products share, as a sum of one for each product."""
        each = Form(self.a, "z" + self.b, self.out, self.gradients)
        many = jnp.broadcast_to(b, (a.shape[self.a.index("z")], *b.shape))
        return [x.sum(0) for x in each.function(matmul)(a, many, out)]


FORMS = {
    "plain": Form("zmk", "zkn", "zmn"),
    "rows": Form("mzk", "kzn", "zmn"),
    "rows, all": Form("mzk", "kzn", "mzn"),
    "left rows": Form("mzk", "zkn", "zmn"),
    "heads": Form("mzk", "nzk", "zmn"),
    "values": Form("zmk", "kzn", "mzn"),
    "turned": Form("kzm", "kzn", "zmn"),
    "shared, rows": Form("mzk", "kn", "mzn"),
    "shared, rows, first": Form("mzk", "kn", "zmn"),
    "shared left, rows": Form("mk", "kzn", "zmn"),
    "shared left": Form("mk", "kzn", "mzn"),
    "shared left, first": Form("mk", "zkn", "zmn"),
    "weights": Form("zmk", "kn", "zmn", "b"),
    "weights, rows": Form("mzk", "kn", "mzn", "b"),
    "gradients": Form("mzk", "kzn", "mzn", "ab"),
}
"""By name."""

Item = tuple[str, Shape]
"""The name of a form and a shape."""


@dataclasses.dataclass
class Measured:
    """Median microseconds of all ways, by name."""

    form: str
    shape: Shape
    times: dict[str, float]
    failed: dict[str, str]

    @property
    def ratio(self) -> float:
        """The faster rival's time by ours."""
        rivals = [self.times[one] for one in ("XLA", "PyTorch") if one in self.times]
        return min(rivals) / self.times["as chosen"]


def draw(seed: int, count: int) -> list[Shape]:
    """Products: heads of attention, experts, and anything between."""
    shapes: list[Shape] = []
    for number in range(count):
        dice = random.Random(f"{seed}/{number}")
        while True:
            size = round(2 ** dice.uniform(1, 9))
            m, n, k = (8 * round(2 ** dice.uniform(1, 9)) for _ in range(3))
            moved = 2 * size * (m * k + k * n + m * n)
            if 2.0 * size * m * n * k <= MOST_FLOPS and 1 << 20 <= moved <= MOST_BYTES:
                shapes.append((size, m, n, k))
                break
    return shapes


def kinds(shape: Shape, count: int) -> dict[str, MatmulConfig]:
    """The best configurations by the estimate, one of each kind of tile."""
    size, m, n, k = shape
    sizes = Sizes(m, n, k, 2, 2, batch=size)
    rank = functools.partial(choice._rank, sizes, chip=choice.this_chip())
    found: dict[Any, MatmulConfig] = {}
    for one in sorted(filter(batched._is_whole, candidates(sizes)), key=rank):
        if one.cluster_blocks == 1:
            found.setdefault((one.swap, one.tile_m, one.tile_n // 64, one.alternate), one)
    return {describe(one): one for one in list(found.values())[1 : count + 1]}


def describe(config: MatmulConfig) -> str:
    """Of what differs among them."""
    found = f"{config.tile_m}x{config.tile_n}, {config.stages} stages of {config.tile_k}"
    return found + ", transposed" * config.swap + ", turns" * config.alternate


def each_in_the_grid(form: Form, *given: Any) -> Any:
    """The kernel for one product, with a further grid dimension."""
    with_rule = batched._config
    batched._config = lambda *_: None  # type: ignore[assignment]
    try:
        return form.function(matmul)(*given)
    finally:
        batched._config = with_rule


def by_xla(a: Any, b: Any, *, transpose_a: bool, transpose_b: bool) -> Any:
    """A product of matrices."""
    return jnp.matmul(a.T if transpose_a else a, b.T if transpose_b else b)


def ready(item: Item, count: int) -> Callable[[], Measured]:
    """Compiles all programs but XLA's; returns what measures them."""
    if operands.torch_is_there() and jax.default_backend() == "gpu":
        importlib.import_module("torch")  # before CUPTI comes into the process
    name, shape = item
    form = FORMS[name]
    _, m, n, k = shape
    given = [jax.ShapeDtypeStruct(one, jnp.bfloat16) for one in form.shapes(shape)]
    programs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    ways: dict[str, Callable[..., Any]] = {"as chosen": form.function(matmul)}
    if form == FORMS["plain"]:
        ways["each in the grid"] = functools.partial(each_in_the_grid, form)
    elif "z" in form.a and "z" in form.b:
        ways["with copies"] = form.with_copies
    elif form.gradients == "b":
        ways["added up"] = form.added_up
    for kind, config in kinds(shape, count).items():
        ways[kind] = form.function(functools.partial(matmul, config=config))
    for way, function in ways.items():
        try:
            programs[way] = jax.jit(function).lower(*given).compile()
        except Exception as error:
            failed[way] = str(error)[:300]

    def drawn(key: Any) -> Any:
        keys = jax.random.split(key, len(given))
        return [jax.random.normal(i, x.shape, x.dtype) for i, x in zip(keys, given, strict=True)]

    def error(given: Any, results: Any) -> Any:
        wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        errors = [
            jnp.linalg.norm((got.astype(jnp.float32) - wanted).ravel())
            / jnp.linalg.norm(wanted.ravel())
            for got, wanted in zip(results, form.sums(wide, *given), strict=True)
        ]
        return jnp.stack(errors).max()

    options = timing.reference_options()
    results = jax.eval_shape(form.function(by_xla), *given)
    error_of = jax.jit(error, **options).lower(given, results).compile()
    drawn_by = jax.jit(drawn).lower(jax.random.key(0)).compile()
    between = jax.ShapeDtypeStruct((gemm_times.READ_BETWEEN,), jnp.float32)
    clear = jax.jit(gemm_times.read).lower(between).compile()

    def measured() -> Measured:
        from jax.experimental.mosaic.gpu import profiler

        programs["XLA"] = jax.jit(form.function(by_xla)).lower(*given).compile()
        arrays = drawn_by(jax.random.key(m + n))
        large = jnp.zeros(between.shape, between.dtype)
        for way, program in list(programs.items()):
            worst = float(error_of(arrays, program(*arrays)))
            if not worst < LARGEST_ERROR:
                raise ValueError(f"wrong result of {way}, relative error {worst}")
        timer = timing.CuptiTimer(profiler.mosaic_gpu_lib._mosaic_gpu_ext)
        calls: dict[Any, Callable[[], Any]] = {
            way: lambda run=run: run(*arrays) for way, run in programs.items()
        }
        contenders = [gemm_times.Contenders("jax", lambda: clear(large), calls)]
        if operands.torch_is_there():
            contenders.append(_by_torch(form, arrays))
        found, _ = gemm_times.in_random_order(timer, contenders, m + n + k)
        times = {way: statistics.median(each) for way, each in found.items()}
        return Measured(name, shape, times, failed)

    return measured


def _by_torch(form: Form, arrays: Sequence[Any]) -> gemm_times.Contenders:
    import torch

    given = operands.to_torch(*arrays)
    large = torch.zeros(gemm_times.READ_BETWEEN, device="cuda")

    def run() -> Any:
        return [one.contiguous() for one in form.sums(torch.einsum, *given)]

    run()
    return gemm_times.Contenders("torch", lambda: gemm_times.read(large), {"PyTorch": run})


def show(item: Item, row: Measured) -> str:
    """A line about a form and a shape."""
    form, shape = item
    times = ", ".join(f"{name} {time:.1f}" for name, time in row.times.items())
    return f"{form} {'x'.join(map(str, shape))}: {times}; {row.ratio:.3f} {row.failed or ''}"


def main(argv: Sequence[str]) -> int:
    """Measures, prints and writes JSON; 1 if a shape failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=20, seconds=90.0, processes=4)
    side_by_side.hold_option(parser)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["plain"])
    parser.add_argument("--shapes", nargs="*", help="such as 64x376x104x128, before those drawn")
    parser.add_argument("--kinds", type=int, default=0, help="of tiles, measured as well")
    arguments = parser.parse_args(argv)
    print(harness.machine(), flush=True)
    shapes: list[Any] = [tuple(map(int, one.split("x"))) for one in arguments.shapes or ()]
    shapes += draw(arguments.seed, arguments.count)
    outcomes = side_by_side.prepared(
        functools.partial(ready, count=arguments.kinds),
        [(form, shape) for shape in shapes for form in arguments.forms],
        arguments.processes,
        arguments.seconds,
        arguments.hold,
    )
    rows, failed = side_by_side.collected(outcomes, str, show)
    for form in arguments.forms:
        ratios = [row.ratio for row in rows if row.form == form]
        with contextlib.suppress(ValueError):
            mean, below = harness.geometric_mean(ratios), sum(one < 0.97 for one in ratios)
            print(
                f"{form}: the faster rival over ours: {mean:.3f} of {len(ratios)}, "
                f"{below} below 0.97, lowest {min(ratios):.3f}"
            )
    harness.write_json(arguments.json, "batched", [dataclasses.asdict(row) for row in rows])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
