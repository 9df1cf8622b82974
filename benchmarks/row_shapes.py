"""Operations on rows of widths drawn by a seed, by ways that can be compared, against XLA.

The operations and their references are those of ``rows.py``. Half of the widths are powers of two,
multiples of 8 or far beyond what one multiprocessor holds; half begin their rows anywhere in
vectors. A way is the library's choice with parts of it taken back, as ``WAYS`` says: so what a new
kernel is worth is measured beside what it replaced. Programs are compiled by several processes,
one at a time is measured; times are those of the kernels, by CUPTI, of contenders in random order,
and every result is compared with XLA's before it is timed.

    python benchmarks/row_shapes.py --seed 1 --ways "clusters of two at most" --json row_shapes.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness
import jax
import jax.numpy as jnp
import rows
import side_by_side
import timing

from pallasite import gpu as plgpu
from pallasite_std.inference import costs
from pallasite_std.math import values
from pallasite_std.ops.rows import (
    column_sums,
    cross_entropy_kernels,
    elementwise,
    folding_tiles,
    gated,
    kernel,
    norm_beside,
    norm_body,
    norm_kernels,
    norm_segments,
    norm_strips,
    norms,
    pipelined,
    pipelines,
    quantize,
    rotary,
    segments,
    shared,
    streamed,
    tiles,
    tiling,
    top_k,
)

CACHING = (
    column_sums,
    costs,
    cross_entropy_kernels,
    gated,
    norm_beside,
    norm_kernels,
    norm_segments,
    norm_strips,
    quantize,
    rotary,
    top_k,
)
"""Modules that keep kernels."""


def _never(*arguments: Any, **options: Any) -> bool:
    return False


def _always(*arguments: Any, **options: Any) -> bool:
    return True


def _none(*arguments: Any, **options: Any) -> None:
    return None


def _plain(*arguments: Any) -> Any:
    return plgpu.CompilerParams()


_grouped = functools.partial(elementwise.elementwise_kernel, grouped=True)

type Change = tuple[Any, str, Any]
_NOT_KEPT: Change = (norm_kernels, "_keeps_forward", _never)
_PIPELINED: tuple[Change, ...] = (
    _NOT_KEPT,
    (norm_kernels, "suits_pipeline", _always),
    (norm_kernels, "suits_shared", _never),
    (norm_kernels, "suits_stream", _never),
    (norm_kernels, "_by_columns", _never),
)
_BY_WORDS: tuple[Change, ...] = (
    (values, "PAIRS", True),
    # What is kept of kernels does not know of that.
    (norm_body.Norm, "name", property(lambda norm: "norm_by_words")),
)
_AWAITED: tuple[Change, ...] = ((kernel, "BY_BLOCK", True),)
WAYS: dict[str, tuple[Change, ...]] = {
    "as chosen": (),
    "forward not pipelined": (
        (norm_kernels, "_pipelined", _never),
        (norm_kernels, "_by_columns", _never),
        (quantize, "suits_pipeline", _never),
    ),
    "no tiles": (
        (norm_kernels, "tiled_row_kernel", _none),
        (quantize, "tiled_row_kernel", _none),
    ),
    "tiles of odd rows alone": ((tiles, "WORD", 4),),
    "tiles of two blocks": ((tiles, "_RESIDENT", 2),),
    "no tiles of narrow rows": ((tiles, "_FEWEST", 64),),
    "rows through shared memory": (
        _NOT_KEPT,
        (norm_kernels, "suits_shared", _always),
        (quantize, "suits_shared", _always),
    ),
    "rows in shared memory by eight": ((shared, "_MOST_THREADS", 8),),
    "rows not streamed": (
        (norm_kernels, "suits_stream", _never),
        (quantize, "suits_stream", _never),
    ),
    "rows streamed to registers": (
        _NOT_KEPT,
        (norm_kernels, "suits_stream", _always),
        (quantize, "suits_stream", _always),
    ),
    "shorter rows streamed, too": (
        _NOT_KEPT,
        (norm_kernels, "suits_stream", _always),
        (quantize, "suits_stream", _always),
        (streamed, "_LEAST", 4608),
    ),
    "results without a place stored one by one": ((shared, "STAGED", False),),
    "as many rows in shared memory as fit": ((shared, "_FETCHED", 1 << 30),),
    "moments of rows in shared memory in one pass": (
        (norm_body, "ONE_PASS_NEAR", True),
        (shared, "_CHUNK", 8 * tiling.LANES),
    ),
    "weights after reductions": ((norm_kernels, "EARLY", 0),),
    "moments in one pass": ((norm_body, "ONE_PASS", True),),
    "registers as they come": ((kernel, "BESIDES", None),),
    "products and sums apart": ((norm_kernels, "parameters", _plain),),
    "heads by powers of two": ((rotary, "FEWEST_PARTS", 1 << 30),),
    "forward by columns": ((pipelines, "FORWARD_BY_COLUMNS", True),),
    "rows by four": (
        (norm_kernels, "FORWARD", tiling.Registers(four=1 << 30)),
        (norm_kernels, "QUANTIZED", tiling.Registers(four=1 << 30)),
    ),
    "forward pipelined": (
        _NOT_KEPT,
        (norm_kernels, "suits_pipeline", _always),
        (quantize, "suits_pipeline", _always),
    ),
    "moments one by one": ((norm_body, "AT_ONCE", False),),
    "rows within vectors not pipelined": ((norm_kernels, "PIPELINED", False),),
    "layer norms pipelined by columns": (
        _NOT_KEPT,
        (norm_kernels, "suits_pipeline", _always),
        (pipelines, "FORWARD_BY_COLUMNS", True),
    ),
    "all pipelined": _PIPELINED,
    "all pipelined, up to 16 elements of a lane": (*_PIPELINED, (pipelines, "PASS_ELEMENTS", 16)),
    "all pipelined, up to 24 elements of a lane": (*_PIPELINED, (pipelines, "PASS_ELEMENTS", 24)),
    "all pipelined, up to 32 elements of a lane": (*_PIPELINED, (pipelines, "PASS_ELEMENTS", 32)),
    "converted by words": _BY_WORDS,
    "all pipelined, converted by words": (*_PIPELINED, *_BY_WORDS),
    "warpgroups await the block": _AWAITED,
    "few rows of taller tiles": (*_AWAITED, (norm_kernels, "TALLER", True)),
    "few rows not spread": ((tiling, "SPREAD", False),),
    "few rows shared from 8 elements on": (*_AWAITED, (tiling, "SHARED_FROM", 8)),
    "few rows shared from 16 elements on": (*_AWAITED, (tiling, "SHARED_FROM", 16)),
    "few rows by whole warpgroups": ((tiling, "RAGGED", False),),
    "gradients not pipelined": ((norm_kernels, "gradient_pipeline", _none),),
    "by vectors": ((pipelines, "BY_COLUMNS", False),),
    "gradients of narrow rows pipelined": ((pipelines, "_LEAST_UNALIGNED", 1024),),
    "clusters of two at most": ((pipelines, "CLUSTERS", (1, 2)),),
    "as many clusters as fit": ((pipelined, "FITTING_CLUSTERS", 0.92),),
    "tiles of rows": ((elementwise, "LEAST_GROUPED", 1 << 30),),
    "gradients of losses by groups": ((cross_entropy_kernels, "elementwise_kernel", _grouped),),
    "no more blocks by columns": ((pipelines, "MORE_BY_COLUMNS", False),),
    "gradients of narrow rows not by tiles": ((folding_tiles, "TILED", False),),
    "rows not kept": ((norm_kernels, "KEPT", False),),
    "sums of small gradients by a second kernel": ((norm_beside, "MOST_BYTES", 0),),
    "gradients with products and sums apart": ((norm_kernels, "CONTRACTED", False),),
    "smaller tiles": ((elementwise, "ELEMENTS", 8),),
    "smallest tiles": ((elementwise, "ELEMENTS", 4),),
    "sums of blocks one by one": ((norms, "TOGETHER", False),),
    "clusters for few rows": ((pipelines, "FEW_ROWS", False),),
    "sums of more blocks": ((norm_kernels, "FEWEST_BLOCKS", False),),
    "two steps at least": ((norm_kernels, "LEAST_STEPS", 2),),
    "four steps at least": ((norm_kernels, "LEAST_STEPS", 4),),
    "pipelines of few steps": ((pipelines, "_STEPS", 2),),
    "segments of the longest rows": ((segments, "LEAST_COLUMNS", 1 << 19),),
    "parts of sectors as cheap as whole ones": (
        (costs, "_PARTIAL", 0.0),
        (norm_body.Norm, "name", property(lambda norm: "norm_by_parts")),
    ),
    "segments of few rows": ((segments, "MORE", 8),),
    "gradients with one sum not by tiles": ((folding_tiles, "FEWEST_SUMS", 2),),
    "gradients without sums of small tiles": ((norm_kernels, "UNSUMMED", norm_kernels.GRADIENT),),
    "angles for one sequence": ((rotary, "SHARING", 1),),
    "angles for sixteen heads": ((rotary, "SHARING", 16),),
    "no segments": ((segments, "FEW", 1 << 30), (segments, "MORE", 1 << 30)),
    "largest elements without queues": ((top_k, "parts_of", _none),),
}
"""What is changed in modules."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
      operation: a name of ``rows.CASES``; None for a copy of so many bytes.
    """

    operation: str | None
    backward: bool
    shape: tuple[int, int]
    dtype: str
    ways: tuple[str, ...]
    repeats: int


@dataclasses.dataclass
class Row:
    """Times in milliseconds, errors relative in the Euclidean norm, by ways.

    Attributes:
      bytes: of operands and results, or of the copy, each counted once.
      failed: what ways raised.
      kernels: of a call, with their names.
    """

    operation: str | None
    direction: str
    shape: tuple[int, int]
    dtype: str
    bytes: int
    ms: dict[str, float]
    errors: dict[str, float]
    xla_ms: float | None
    failed: dict[str, str]
    kernels: dict[str, list[tuple[str, float]]] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def changed(way: str) -> Iterator[None]:
    """The library with what a way changes."""
    if not WAYS[way]:
        yield
        return
    before = [(module, name, getattr(module, name)) for module, name, _ in WAYS[way]]

    def forget() -> None:
        jax.clear_caches()
        for module in CACHING:
            for one in vars(module).values():
                if hasattr(one, "cache_clear"):
                    one.cache_clear()

    forget()
    for module, name, value in WAYS[way]:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        forget()


def error(results: Sequence[Any], wanted: Sequence[Any]) -> Any:
    """The largest of all results; infinite if one is not finite."""
    worst = jnp.float32(0.0)
    for one, other in zip(results, wanted, strict=True):
        a, b = one.astype(jnp.float32), other.astype(jnp.float32)
        distance = jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.maximum(jnp.sum(b * b), 1e-30))
        worst = jnp.maximum(worst, jnp.where(jnp.isfinite(distance), distance, jnp.inf))
    return worst


def prepare(case: Case) -> Callable[[], Row]:
    """Compiles and starts everything of a case, and returns what measures it."""
    if case.operation is None:
        with contextlib.suppress(ImportError):
            importlib.import_module("torch")  # Which takes seconds.
        return functools.partial(copied, case)
    one = next(one for one in rows.CASES if one.name == case.operation)
    dtype, count = jnp.dtype(case.dtype), one.differentiated

    def draw() -> list[Any]:
        return [rows.operand(kind, *case.shape, dtype, n) for n, kind in enumerate(one.operands)]

    def draw_cotangent() -> Any:
        return jax.random.normal(jax.random.key(99), out.shape, out.dtype)

    given = jax.eval_shape(draw)
    programs: dict[str, tuple[Any, Any]] = {}
    failed: dict[str, str] = {}
    operands, cotangent = rows.compiled(draw), None
    if case.backward:
        out = jax.eval_shape(one.ours, *given)
        cotangent = rows.compiled(draw_cotangent)
        types = jax.eval_shape(draw_cotangent), *given
        again = rows.compiled(rows.with_gradients(one.xla, count), *types)
        programs["XLA, as kept"] = rows.forward_and_pull_back(one.xla, count, *types)
        wanted = jax.eval_shape(rows.with_gradients(one.xla, count), *types)
    else:
        again = rows.compiled(one.xla, *given)
        wanted = jax.eval_shape(one.xla, *given)
    for way in case.ways:
        with changed(way):
            try:
                if case.backward:
                    programs[way] = rows.forward_and_pull_back(one.ours, count, *types)
                else:
                    programs[way] = None, rows.compiled(one.ours, *given)
            except Exception as failure:
                failed[way] = f"{type(failure).__name__}: {failure}"[:300]
    leaves = jax.tree.leaves(wanted)
    distance = rows.compiled(error, leaves, leaves)

    def calls() -> tuple[dict[str, Callable[[], Any]], list[Any]]:
        arrays = list(operands())
        everything = [cotangent(), *arrays] if cotangent is not None else arrays

        def call_of(keep: Any, run: Any) -> Callable[[], Any]:
            if keep is None:
                return functools.partial(run, *arrays)
            return functools.partial(run, everything[0], keep(*arrays))

        found = {name: call_of(*each) for name, each in programs.items()}
        return {"XLA": functools.partial(again, *everything), **found}, everything

    # The first launch of a kernel assembles it.
    jax.block_until_ready([call() for call in calls()[0].values()])

    def measure() -> Row:
        runs, everything = calls()
        expected = jax.tree.leaves(runs["XLA"]())
        moved = sum(x.size * x.dtype.itemsize for x in [*jax.tree.leaves(everything), *expected])
        errors = {
            name: float(distance(jax.tree.leaves(run()), expected)) for name, run in runs.items()
        }
        del expected
        limit = 2e-5 if dtype == jnp.float32 and "fp8" not in one.name else 2e-2
        for name in [name for name, found in errors.items() if not found < limit]:
            failed[name] = f"wrong result, relative error {errors[name]}"
            del runs[name]
        jax_framework = timing.FRAMEWORKS["jax"]
        kernels: dict[str, timing.Records] = {}
        times = timing.interleaved(
            timer(), {name: (jax_framework, run) for name, run in runs.items()}, case.repeats,
            random.Random(), kernels_of=kernels,
        )  # fmt: skip
        xla = [times.pop(name) for name in list(times) if name.startswith("XLA")]
        row = row_of(case, moved, times, errors, min(xla, default=None), failed)
        return dataclasses.replace(row, kernels=kernels)

    return measure


def row_of(
    case: Case, moved: int, ms: Any = None, errors: Any = None, xla: Any = None, failed: Any = None
) -> Row:
    """A row of a case."""
    direction = "backward" if case.backward else "forward"
    return Row(
        case.operation, direction, case.shape, case.dtype, moved, ms or {}, errors or {}, xla,
        failed or {},
    )  # fmt: skip


def copied(case: Case) -> Row:
    """The time of a copy, of as many bytes as read and written."""
    size = case.shape[0]
    rate, _ = harness.copy_bandwidth(size)
    return row_of(case, 2 * size, {"copy": 2 * size / rate * 1e3})


@functools.cache
def timer() -> Any:
    """One for each process."""
    return timing.make_timer("cupti")


def widths(seed: int, count: int) -> list[int]:
    """Columns: of four, one is a power of two, or far too long for one multiprocessor; one a
    multiple of 8; two are odd."""
    dice = random.Random(seed)
    found = []
    for number in range(count):
        match number % 4:
            case 0:
                long = number % 8 == 0
                found.append(
                    int(2 ** dice.uniform(15, 17)) // 8 * 8 if long else 2 ** dice.randint(8, 15)
                )
            case 1:
                found.append(int(2 ** dice.uniform(6.5, 15)) // 8 * 8)
            case _:
                found.append(int(2 ** dice.uniform(7, 15.5)) | 1)
    return found


def drawn(arguments: Any) -> list[Case]:
    """The cases, with copies before and after them, and among them."""
    size, columns = int(arguments.mebibytes * 2**20), arguments.columns
    columns = columns or widths(arguments.seed, arguments.count)
    ways = tuple(dict.fromkeys(["as chosen", *arguments.ways]))
    cases = [
        Case(
            one.name, backward, (max(1, size // jnp.dtype(dtype).itemsize // width), width), dtype,
            ways, arguments.repeats,
        )
        for width in columns
        for dtype in arguments.dtypes
        for one in rows.CASES
        for backward in ((False, True) if one.differentiated else (False,))
        if (not arguments.only or one.name in arguments.only)
        and ("backward" if backward else "forward") in arguments.directions
        and (one.name != "rotary" or width % 128 == 0)
    ]  # fmt: skip
    if arguments.seed:
        random.Random(arguments.seed).shuffle(cases)
    copy = Case(None, False, (size, 1), "uint8", (), 0)
    parts = [cases[n : n + 25] for n in range(0, len(cases), 25)]
    return [copy, *(one for part in parts for one in [*part, copy])]


def table(
    found: Sequence[Row], ways: Sequence[str], kernels: bool = False
) -> dict[str, float | None]:
    """Prints shares of the copy and ratios to XLA by way, the worst first, and the kernels of each;
    returns the geometric means of ratios."""
    rates = [row.bytes / row.ms["copy"] for row in found if row.operation is None]
    peak = statistics.median(rates) if rates else None
    if peak is not None:
        print(f"copy: {min(rates) / 1e9:.3f} to {max(rates) / 1e9:.3f} TB/s")

    def share(row: Row, way: str) -> float | None:
        return row.bytes / row.ms[way] / peak if peak is not None and way in row.ms else None

    def ratio(row: Row, way: str) -> float | None:
        return row.xla_ms / row.ms[way] if row.xla_ms and way in row.ms else None

    measured = [row for row in found if row.operation is not None]
    measured.sort(key=lambda row: share(row, "as chosen") or 0.0)
    header = ["operation", "direction", "shape", "dtype"]
    header += [name for way in ways for name in (way, "of copy", "vs XLA")]
    lines = [
        [row.operation, row.direction, "x".join(map(str, row.shape)), row.dtype]
        + [one for way in ways for one in (row.ms.get(way), share(row, way), ratio(row, way))]
        for row in measured
    ]
    harness.print_table(header, lines)
    for row in measured:
        for way, failure in row.failed.items():
            print(f"{row.operation}, {row.direction}, {row.shape}, {way}: {failure}")
    for row in measured if kernels else ():
        print(f"{row.operation}, {row.direction}, {row.shape}, {row.dtype}, microseconds:")
        for name, found_kernels in row.kernels.items():
            each = ", ".join(f"{one} {1e3 * ms:.2f}" for one, ms in found_kernels)
            print(f"  {name}: {each}")
    return {way: harness.geometric_mean(ratio(row, way) for row in measured) for way in ways}


def main() -> int:
    """Measures, prints a table and writes JSON; 1 if something failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=16, processes=5)
    side_by_side.hold_option(parser)
    parser.add_argument("--mebibytes", type=float, default=128.0, help="size of a matrix")
    parser.add_argument("--columns", type=int, nargs="*", help="instead of --count drawn ones")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--only", nargs="*", help="names of operations")
    parser.add_argument("--directions", nargs="*", default=["forward", "backward"])
    parser.add_argument("--ways", nargs="*", choices=tuple(WAYS), default=[], help="to compare")
    parser.add_argument("--kernels", action="store_true", help="print the time of each kernel")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"it needs a GPU, and JAX is on {jax.default_backend()!r}")
    print(harness.machine())
    outcomes = side_by_side.prepared(
        prepare, drawn(arguments), arguments.processes, arguments.seconds, arguments.hold
    )
    found, failed = side_by_side.collected(outcomes)
    ways = list(dict.fromkeys(["as chosen", *arguments.ways]))
    means = table(found, ways, arguments.kernels)
    print("geometric means vs XLA:", means)
    harness.write_json(arguments.json, "row_shapes", found)
    return 1 if failed or any(row.failed for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
