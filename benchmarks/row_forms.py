"""Operations on rows of the forms that programs have beside plain matrices, drawn by a seed.

Rows of 8 elements and of 600,000, of any number of vectors or begun within them; few rows, or many;
norms without weights, with residuals and quantised; losses over vocabularies, for few tokens, with
smoothing; rotary embeddings of parts of heads, of neighbours, heads before tokens; quantisation by
groups; more leading axes, ``jax.vmap`` and operands that are transposed. ``pallasite.ops``, also by
ways of ``row_shapes.py``, is compared with XLA's fusions of the same in ``jax.numpy``, each result
before it is timed, and with a copy of as many bytes as the program reads and writes.

    python benchmarks/row_forms.py --seed 1 --count 120 --json row_forms.json
    python benchmarks/row_forms.py --forms lines.jsonl --ways "rows not kept"
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import row_shapes
import rows
import side_by_side
import timing

from pallasite import ops

F32 = jnp.float32
GENERATOR = "unsafe_rbg"
"""Of random numbers: programs that draw compile fast."""
NARROW = {"fp8": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "int8": jnp.int8}
KINDS = (
    *("norm",) * 6,
    *("cross-entropy",) * 3,
    *("rotary",) * 3,
    *("quantize", "dequantize") * 2,
    "swiglu",
    "top-k",
)
"""Norms are drawn most often."""
PLACES = ("rows", "rows", "rows", "batch", "vmap", "transposed")
VOCABULARIES = (32000, 32003, 50257, 50280, 65536, 92416, 100277, 128256, 151643, 151936, 152064)
HEADS = (32, 64, 64, 80, 96, 128, 128, 128, 192, 256)
SIZES = (1 / 32, 1 / 2, 2, 4, 16, 64, 128, 128, 128, 256)
"""MiB of a matrix."""


@dataclasses.dataclass(frozen=True)
class Form:
    """One problem.

    Attributes:
      kind: of KINDS.
      shape: of the matrix; (tokens, heads, size of a head) of rotary embeddings.
      options: what the operation has, by name.
      place: of PLACES: how its rows lie.
      dtype: of the matrices.
      backward: whether gradients are measured.
    """

    kind: str
    shape: tuple[int, ...]
    options: tuple[str, ...]
    place: str
    dtype: str
    backward: bool

    def number(self, option: str) -> int:
        """That of an option ``name=number``; 0 without it."""
        found = [one for one in self.options if one.startswith(f"{option}=")]
        return int(found[0].partition("=")[2]) if found else 0


@dataclasses.dataclass
class Row:
    """Times in milliseconds, by name; the error is relative in the Euclidean norm.

    Attributes:
      bytes: of operands and results, each counted once.
      kernels: of a call of ours, with their times.
    """

    form: Form
    bytes: int
    ms: dict[str, float]
    error: float
    failed: str | None = None
    kernels: list[tuple[str, float]] = dataclasses.field(default_factory=list)


# What is drawn -----------------------------------------------------------------------------------


def width(dice: random.Random) -> int:
    """Columns of a matrix."""
    match dice.randrange(7):
        case 0:
            return dice.choice((8, 16, 24, 40, 48, 56, 72, 80, 96))
        case 1:
            return 8 * (int(2 ** dice.uniform(3, 12)) | 1)
        case 2 | 3:
            return int(2 ** dice.uniform(3, 16))
        case 4:
            return 8 * dice.randint(2200, 3100)
        case 5:
            return dice.choice((100, 1001, 2560, 3333, 5120, 7168, 14336, 28672, 50257))
        case _:
            return 2 ** dice.randint(6, 15)


def form_of(dice: random.Random) -> Form:
    """A form."""
    kind, place = dice.choice(KINDS), dice.choice(PLACES)
    dtype = dice.choice(("bfloat16", "bfloat16", "float32", "float16"))
    elements = int(dice.choice(SIZES) * 2**20) // np.dtype(dtype).itemsize
    columns, options = width(dice), list[str]()
    if dice.random() < 0.1:
        columns = dice.choice((32000, 65536, 152064, 200003, 600000))
        elements = dice.choice((1, 2, 8, 40)) * columns
    backward = dice.random() < 0.4
    match kind:
        case "norm":
            options.append(dice.choice(("rms", "layer")))
            options += [one for one in ("weight", "bias") if dice.random() < 0.75]
            if "rms" in options and "bias" in options:
                options.remove("bias")
            if dice.random() < 0.3:
                options.append("residual")
            if dice.random() < 0.2 and not backward:
                options.append(dice.choice(tuple(NARROW)))
        case "cross-entropy":
            columns = dice.choice((*VOCABULARIES, *VOCABULARIES, columns))
            if dice.random() < 0.3:
                elements = dice.choice((1, 8, 64, 200)) * columns
            if dice.random() < 0.3:
                options.append("smooth")
        case "rotary":
            head, heads = dice.choice(HEADS), dice.choice((1, 2, 4, 8, 12, 16, 24, 28, 32, 40, 64))
            if dice.random() < 0.4:
                options.append(f"dim={head // 4 * 2}")
            if dice.random() < 0.3:
                options.append("neighbours")
            if dice.random() < 0.3:
                options.append("heads first")
            shape = max(1, elements // (heads * head)), heads, head
            place = "rows" if "heads first" in options or place == "transposed" else place
        case "quantize" | "dequantize":
            options.append(dice.choice(tuple(NARROW)))
            backward = False
            if dice.random() < 0.5:
                group = dice.choice((32, 64, 128, 128, 256))
                columns = max(1, columns // group) * group
                options.append(f"group={group}")
        case "top-k":
            options.append(f"k={min(columns, dice.choice((1, 2, 4, 8, 8, 40)))}")
            backward = False
    if kind != "rotary":
        shape = max(1, elements // columns), columns
    if place in ("batch", "vmap"):
        shape = max(1, shape[0] // 4) * 4, *shape[1:]
    return Form(kind, shape, tuple(options), place, dtype, backward)


# Operations --------------------------------------------------------------------------------------


def norms_of(form: Form) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Ours and XLA's, of x, residual?, weight?, bias?."""
    centered, options = "layer" in form.options, form.options
    narrow = next((NARROW[one] for one in options if one in NARROW), None)
    present = [name for name in ("residual", "weight", "bias") if name in options]

    def ours(x: Any, *rest: Any) -> Any:
        function = ops.layer_norm if centered else ops.rms_norm
        return function(x, **dict(zip(present, rest, strict=True)), quantize=narrow)

    def xla(x: Any, *rest: Any) -> Any:
        given = dict(zip(present, rest, strict=True))
        total = x + given["residual"] if "residual" in given else x
        y = total.astype(F32)
        if centered:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + (1e-5 if centered else 1e-6))
        if "weight" in given:
            y = y * given["weight"].astype(F32)
        if "bias" in given:
            y = y + given["bias"].astype(F32)
        results = quantized(y, narrow) if narrow is not None else (y.astype(x.dtype),)
        results += (total,) if "residual" in given else ()
        return results if len(results) > 1 else results[0]

    return ours, xla


def quantized(y: Any, dtype: Any) -> tuple[Any, Any]:
    """A scale for each row."""
    most = float(jnp.iinfo(dtype).max if dtype == jnp.int8 else jnp.finfo(dtype).max)
    largest = jnp.max(jnp.abs(y), axis=-1)
    scale = jnp.where(largest == 0, 1.0, largest / most)
    units = jnp.clip(y / scale[..., None], -most, most)
    return (jnp.round(units) if dtype == jnp.int8 else units).astype(dtype), scale


def quantizations_of(form: Form) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Ours and XLA's, of a matrix, with scales to dequantise."""
    dtype, group = NARROW[form.options[0]], form.number("group")

    def quantize(x: Any) -> Any:
        parts = x.reshape(*x.shape[:-1], -1, group) if group else x
        values, scales = quantized(parts.astype(F32), dtype)
        return values.reshape(x.shape), scales

    def dequantize(values: Any, scales: Any) -> Any:
        parts = values.reshape(*values.shape[:-1], -1, group) if group else values
        return (parts.astype(F32) * scales[..., None]).reshape(values.shape).astype(form.dtype)

    if form.kind == "quantize":
        return lambda x: ops.quantize(x, dtype, group=group or None), quantize
    return lambda v, s: ops.dequantize(v, s, jnp.dtype(form.dtype)), dequantize


def losses_of(form: Form) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Ours and XLA's, of logits and labels."""
    share = 0.1 if "smooth" in form.options else 0.0

    def xla(logits: Any, labels: Any) -> Any:
        x = logits.astype(F32)
        chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0].astype(F32)
        target = (1.0 - share) * chosen + share * jnp.mean(x, axis=-1) if share else chosen
        return jax.nn.logsumexp(x, axis=-1) - target

    return lambda x, labels: ops.softmax_cross_entropy(x, labels, label_smoothing=share), xla


def rotations_of(form: Form) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Ours and XLA's, of heads and positions."""
    dim, neighbours = form.number("dim") or form.shape[-1], "neighbours" in form.options
    first = "heads first" in form.options
    frequencies = 10000.0 ** (-np.arange(dim // 2) / (dim // 2))

    def ours(x: Any, positions: Any) -> Any:
        x = x[..., None, :] if first else x
        x = ops.rotary_embedding(x, positions, rotary_dim=dim, interleaved=neighbours)
        return x[..., 0, :] if first else x

    def xla(x: Any, positions: Any) -> Any:
        angles = positions.astype(F32)[:, None] * jnp.asarray(frequencies, F32)
        cos, sin = (f(angles if first else angles[:, None]) for f in (jnp.cos, jnp.sin))
        rotated = x[..., :dim].astype(F32)
        if neighbours:
            one, other = rotated[..., ::2], rotated[..., 1::2]
        else:
            one, other = jnp.split(rotated, 2, axis=-1)
        parts = one * cos - other * sin, other * cos + one * sin
        turned = jnp.stack(parts, -1).reshape(rotated.shape) if neighbours else None
        turned = jnp.concatenate(parts, -1) if turned is None else turned
        return jnp.concatenate([turned.astype(x.dtype), x[..., dim:]], -1)

    return ours, xla


def functions_of(form: Form) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Ours and XLA's."""
    match form.kind:
        case "norm":
            return norms_of(form)
        case "cross-entropy":
            return losses_of(form)
        case "rotary":
            return rotations_of(form)
        case "quantize" | "dequantize":
            return quantizations_of(form)
        case "swiglu":
            return ops.swiglu, rows.xla_swiglu
        case _:
            count = form.number("k")
            return lambda x: ops.top_k(x, count), lambda x: jax.lax.top_k(x, count)


# Operands ----------------------------------------------------------------------------------------


def operands_of(form: Form) -> tuple[list[tuple[str, tuple[int, ...], Any]], int]:
    """What is drawn for each operand of a call without ``place``: a kind, its shape and dtype; how
    many of the first have gradients."""
    count, columns = form.shape[0], form.shape[-1]
    matrix = ("x", form.shape, jnp.dtype(form.dtype))
    match form.kind:
        case "norm":
            found = [matrix] * (1 + ("residual" in form.options))
            vectors = [one for one in ("weight", "bias") if one in form.options]
            found += [("w", (columns,), jnp.dtype(form.dtype))] * len(vectors)
            return found, len(found)
        case "cross-entropy":
            return [matrix, ("labels", (count,), jnp.int32)], 1
        case "rotary":
            shape = (form.shape[1], count, columns) if "heads first" in form.options else form.shape
            return [("x", shape, matrix[2]), ("positions", (count,), jnp.int32)], 1
        case "dequantize":
            group = form.number("group")
            scales = (count, columns // group) if group else (count,)
            return [("narrow", form.shape, NARROW[form.options[0]]), ("scales", scales, F32)], 0
        case "swiglu":
            return [matrix, matrix], 2
        case _:
            return [matrix], 0


def placed(form: Form) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[], Any], int]:
    """Ours and XLA's of operands as they lie, what draws these, and how many have gradients."""
    kinds, differentiated = operands_of(form)
    batched = [kind != "w" for kind, _, _ in kinds]
    if form.kind == "rotary" and form.place != "rows":
        batched = [True, False]  # Positions are those of each batch.
        kinds[1] = ("positions", (form.shape[0] // 4,), jnp.int32)

    def draw() -> list[Any]:
        arrays = []
        for number, (kind, shape, dtype) in enumerate(kinds):
            key = jax.random.key(number, impl=GENERATOR)
            if form.place == "transposed" and batched[number] and len(shape) == 2:
                shape = shape[::-1]
            if form.place in ("batch", "vmap") and batched[number]:
                shape = (4, shape[0] // 4, *shape[1:])
            match kind:
                case "labels":
                    arrays.append(jax.random.randint(key, shape, 0, form.shape[-1]))
                case "positions":
                    arrays.append(jnp.arange(shape[0], dtype=dtype))
                case "scales":
                    arrays.append(jax.random.uniform(key, shape, F32, 0.5, 2.0))
                case "narrow":
                    spread = 40.0 if dtype == jnp.int8 else 1.0
                    arrays.append((spread * jax.random.normal(key, shape, F32)).astype(dtype))
                case _:
                    arrays.append(jax.random.normal(key, shape, dtype))
        return arrays

    def as_placed(function: Callable[..., Any]) -> Callable[..., Any]:
        if form.place == "vmap":
            return jax.vmap(function, tuple(0 if one else None for one in batched))
        if form.place != "transposed":
            return function

        def transposed(*operands: Any) -> Any:
            pairs = zip(operands, batched, strict=True)
            return function(*(one.T if turn and one.ndim == 2 else one for one, turn in pairs))

        return transposed

    ours, xla = functions_of(form)
    return as_placed(ours), as_placed(xla), draw, differentiated


# Measurement -------------------------------------------------------------------------------------


def prepare(item: tuple[Form, tuple[str, ...]]) -> Callable[[], Row]:
    """Compiles and starts everything of a form and of ways, and returns what measures it."""
    form, ways = item
    row_shapes.timer()  # Not while the others wait with their measurements.
    ours, xla, draw, count = placed(form)
    given = jax.eval_shape(draw)
    operands, programs = rows.compiled(draw), dict[str, tuple[Any, Any]]()
    if form.backward:
        outs = jax.eval_shape(xla, *given)

        def draw_cotangents() -> Any:
            leaves, tree = jax.tree.flatten(outs)
            keys = jax.random.split(jax.random.key(99, impl=GENERATOR), len(leaves))
            pairs = zip(keys, leaves, strict=True)
            return jax.tree.unflatten(
                tree, [jax.random.normal(key, one.shape, one.dtype) for key, one in pairs]
            )

        cotangents = rows.compiled(draw_cotangents)
        types = jax.eval_shape(draw_cotangents), *given
        again = rows.with_gradients(xla, count)
        for way in ("as chosen", *ways):
            with row_shapes.changed(way):
                name = "ours" if way == "as chosen" else way
                programs[name] = rows.forward_and_pull_back(ours, count, *types)
        programs["XLA"] = None, rows.compiled(again, *types)
        programs["XLA, as kept"] = rows.forward_and_pull_back(xla, count, *types)
        wanted = jax.tree.leaves(jax.eval_shape(again, *types))
    else:
        for way in ("as chosen", *ways):
            with row_shapes.changed(way):
                name = "ours" if way == "as chosen" else way
                programs[name] = None, rows.compiled(ours, *given)
        programs["XLA"] = None, rows.compiled(xla, *given)
        wanted = jax.tree.leaves(jax.eval_shape(xla, *given))
    distance = rows.compiled(row_shapes.error, wanted, wanted)

    def calls() -> tuple[dict[str, Callable[[], Any]], list[Any]]:
        arrays = list(operands())
        everything = [cotangents(), *arrays] if form.backward else arrays
        found = dict[str, Callable[[], Any]]()
        for name, (keep, run) in programs.items():
            kept = everything if keep is None else [everything[0], keep(*arrays)]
            found[name] = functools.partial(run, *kept)
        return found, everything

    # The first launch of a kernel assembles it.
    jax.block_until_ready([call() for call in calls()[0].values()])

    def measure() -> Row:
        runs, everything = calls()
        expected = jax.tree.leaves(runs["XLA"]())
        moved = sum(x.size * x.dtype.itemsize for x in [*jax.tree.leaves(everything), *expected])
        error = max(
            float(distance(jax.tree.leaves(runs[name]()), expected))
            for name in runs
            if not name.startswith("XLA")
        )
        del expected
        narrow = any(one in NARROW for one in form.options)
        limit = 2e-5 if form.dtype == "float32" and not narrow else 2e-2
        failed = None if error < limit else f"wrong result, relative error {error}"
        records = dict[str, timing.Records]()
        times = timing.interleaved(
            row_shapes.timer(),
            {name: (timing.FRAMEWORKS["jax"], run) for name, run in runs.items()},
            7,
            random.Random(),
            kernels_of=records,
        )
        return Row(form, moved, times, error, failed, records["ours"])

    return measure


def table(found: list[Row], rate: float) -> None:
    """Prints shares of a copy's bandwidth and ratios to XLA, the worst first."""

    def ratio(row: Row) -> float:
        return min(row.ms[name] for name in row.ms if name.startswith("XLA")) / row.ms["ours"]

    found = sorted(found, key=ratio)
    header = ["kind", "direction", "shape", "dtype", "place", "options"]
    lines = [
        [
            row.form.kind,
            "backward" if row.form.backward else "forward",
            "x".join(map(str, row.form.shape)),
            row.form.dtype,
            row.form.place,
            " ".join(row.form.options),
            len(row.kernels),
            row.ms["ours"] * 1e3,
            row.bytes / (row.ms["ours"] * 1e-3) / rate,
            ratio(row),
        ]
        for row in found
    ]
    harness.print_table([*header, "kernels", "us", "of copy", "vs XLA"], lines)
    for row in found:
        if row.failed is not None:
            print(f"{row.form}: {row.failed}")
    print("geometric mean vs XLA:", harness.geometric_mean(map(ratio, found)))


def form_from(fields: dict[str, Any]) -> Form:
    """A form from JSON."""
    lists = {name: tuple(one) for name, one in fields.items() if isinstance(one, list)}
    return Form(**{**fields, **lists})


def main() -> int:
    """Measures, prints a table and writes JSON; 1 if something failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=60, processes=5)
    side_by_side.hold_option(parser)
    parser.add_argument("--ways", nargs="*", choices=tuple(row_shapes.WAYS), default=[])
    parser.add_argument(
        "--forms",
        type=pathlib.Path,
        help="a file of --lines, whose forms are measured again; a line may have ways of its own",
    )
    parser.add_argument("--kinds", nargs="*", choices=sorted(set(KINDS)), help="no others")
    parser.add_argument("--places", nargs="*", choices=sorted(set(PLACES)), help="no others")
    parser.add_argument("--mebibytes", type=float, help="of the largest operand, at most")
    parser.add_argument("--lines", help="a file to which results are added as they come")
    parser.add_argument("--rehearse", action="store_true", help="compile the forms, without a GPU")
    arguments = parser.parse_args()
    dice, forms = random.Random(arguments.seed), list[Form]()
    ways = list[tuple[str, ...]]()
    while not arguments.forms and len(forms) < arguments.count:
        form = form_of(dice)
        size = math.prod(form.shape) * np.dtype(form.dtype).itemsize / 2**20
        fits = arguments.mebibytes is None or size <= arguments.mebibytes
        kind = not arguments.kinds or form.kind in arguments.kinds
        if fits and kind and (not arguments.places or form.place in arguments.places):
            forms.append(form)
    if arguments.forms:
        lines = [json.loads(line) for line in arguments.forms.read_text().splitlines()]
        forms = [form_from(line["form"]) for line in lines]
        ways = [tuple(line.get("ways", arguments.ways)) for line in lines]
    ways = ways or [tuple(arguments.ways)] * len(forms)
    if arguments.rehearse:
        return rehearsed(forms)
    if jax.default_backend() != "gpu":
        parser.error(f"it needs a GPU, and JAX is on {jax.default_backend()!r}")
    print(harness.machine())
    outcomes = side_by_side.prepared(
        prepare,
        list(zip(forms, ways, strict=True)),
        arguments.processes,
        arguments.seconds,
        arguments.hold,
    )

    def show(item: Any, row: Row) -> str:
        if arguments.lines:
            with open(arguments.lines, "a") as out:
                out.write(json.dumps(dataclasses.asdict(row)) + "\n")
        return f"{item[0]}: { ({name: round(1e3 * ms, 2) for name, ms in row.ms.items()}) }"

    found, failed = side_by_side.collected(outcomes, show=show)
    rates = [harness.copy_bandwidth(128 * 2**20)[0] for _ in range(3)]
    print("copies of 128 MiB, TB/s:", [rate / 1e12 for rate in rates])
    table(found, statistics.median(rates))
    harness.write_json(arguments.json, "row_forms", found)
    return 1 if failed or any(row.failed for row in found) else 0


def rehearsed(forms: list[Form]) -> int:
    """Traces both functions of each form, and compares the types of their results; 1 if they
    differ."""
    failures = 0
    for form in forms:
        ours, xla, draw, count = placed(form)
        given = jax.eval_shape(draw)
        types = [jax.eval_shape(one, *given) for one in (ours, xla)]
        same = jax.tree.leaves(types[0]) == jax.tree.leaves(types[1])
        failures += not same
        print(form, "" if same else f"differs: {types}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
