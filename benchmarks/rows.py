"""Operations on rows: norms, cross-entropy, quantisation, rotary embedding, gated units, top-k.

Each is measured, forward and backward, against the same in ``jax.numpy`` as XLA fuses it, and
against PyTorch where that has it: eager, whose norms and losses are kernels of their own, and
compiled, if ``--compile`` is given. Every result is compared with the reference before it is timed.
Bandwidths count each operand and result once.

    python benchmarks/rows.py --json rows.json
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import side_by_side

from pallasite import ops

F32 = jnp.float32


# What XLA fuses ----------------------------------------------------------------------------------


def xla_rms_norm(x: Any, w: Any) -> Any:
    """In float32, as the kernels."""
    y = x.astype(F32)
    scale = jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale * w.astype(F32)).astype(x.dtype)


def xla_layer_norm(x: Any, w: Any, b: Any) -> Any:
    """In float32, as the kernels."""
    y = x.astype(F32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
    return (y * scale * w.astype(F32) + b.astype(F32)).astype(x.dtype)


def xla_added_norm(x: Any, residual: Any, w: Any) -> Any:
    """RMSNorm of a sum, and the sum."""
    total = x + residual
    return xla_rms_norm(total, w), total


def xla_quantize(x: Any) -> Any:
    """To float8_e4m3fn, a scale for each row."""
    y = x.astype(F32)
    largest = jnp.max(jnp.abs(y), axis=-1)
    scale = jnp.where(largest == 0, 1.0, largest / 448.0)
    return jnp.clip(y / scale[:, None], -448.0, 448.0).astype(jnp.float8_e4m3fn), scale


def xla_quantized_norm(x: Any, w: Any) -> Any:
    """RMSNorm to float8_e4m3fn."""
    y = x.astype(F32)
    scale = jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return xla_quantize(y * scale * w.astype(F32))


def xla_loss(logits: Any, labels: Any) -> Any:
    """Softmax cross-entropy."""
    x = logits.astype(F32)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0].astype(F32)
    return jax.nn.logsumexp(x, axis=-1) - chosen


def xla_swiglu(gate: Any, up: Any) -> Any:
    """In float32, as the kernels."""
    return (jax.nn.silu(gate.astype(F32)) * up.astype(F32)).astype(gate.dtype)


def xla_rotary(x: Any, positions: Any) -> Any:
    """Halves of heads."""
    half = x.shape[-1] // 2
    inverse = 10000.0 ** (-np.arange(half) / half)
    angles = positions.astype(F32)[:, None, None] * jnp.asarray(inverse, F32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    one, other = x[..., :half].astype(F32), x[..., half:].astype(F32)
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1).astype(x.dtype)


def xla_dequantize(values: Any, scales: Any) -> Any:
    """A scale for each row."""
    return (values.astype(F32) * scales[:, None]).astype(jnp.bfloat16)


def xla_top_k(x: Any) -> Any:
    """Of each row."""
    return jax.lax.top_k(x, LARGEST)


LARGEST = 8
"""So many are picked of each row."""


# Cases --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation and its rivals.

    Attributes:
      operands: names of :func:`operand`'s kinds.
      differentiated: how many of the first operands have gradients; 0 for a case of forward alone.
      torch: a function of the module ``torch.nn.functional`` that returns one of tensors.
    """

    name: str
    ours: Callable[..., Any]
    xla: Callable[..., Any]
    operands: tuple[str, ...]
    differentiated: int = 0
    torch: Callable[[Any], Callable[..., Any]] | None = None


CASES = (
    Case("rms_norm", ops.rms_norm, xla_rms_norm, ("x", "w"), 2,
         lambda f: lambda x, w: f.rms_norm(x, w.shape, w, 1e-6)),
    Case("layer_norm", ops.layer_norm, xla_layer_norm, ("x", "w", "w"), 3,
         lambda f: lambda x, w, b: f.layer_norm(x, w.shape, w, b, 1e-5)),
    Case("residual + rms_norm", lambda x, r, w: ops.rms_norm(x, w, residual=r), xla_added_norm,
         ("x", "x", "w")),
    Case("rms_norm to fp8", lambda x, w: ops.rms_norm(x, w, quantize=jnp.float8_e4m3fn),
         xla_quantized_norm, ("x", "w")),
    Case("quantize to fp8", lambda x: ops.quantize(x, jnp.float8_e4m3fn), xla_quantize, ("x",)),
    Case("cross-entropy", ops.softmax_cross_entropy, xla_loss, ("x", "labels"), 1,
         lambda f: lambda x, labels: f.cross_entropy(x, labels.long(), reduction="none")),
    Case("swiglu", ops.swiglu, xla_swiglu, ("x", "x"), 2,
         lambda f: lambda gate, up: f.silu(gate) * up),
    Case("dequantize of fp8", lambda x, s: ops.dequantize(x, s, jnp.bfloat16), xla_dequantize,
         ("narrow", "scales")),
    Case("top-k", lambda x: ops.top_k(x, LARGEST), xla_top_k, ("x",), 0,
         lambda f: lambda x: x.topk(LARGEST, dim=-1)),
    Case("rotary", ops.rotary_embedding, xla_rotary, ("heads", "positions"), 1),
)  # fmt: skip


def operand(kind: str, rows: int, columns: int, dtype: Any, seed: int) -> jax.Array:
    """An operand of a case."""
    key = jax.random.key(seed)
    match kind:
        case "x":
            return jax.random.normal(key, (rows, columns), dtype)
        case "w":
            return jax.random.normal(key, (columns,), dtype)
        case "narrow":
            return jax.random.normal(key, (rows, columns), dtype).astype(jnp.float8_e4m3fn)
        case "scales":
            return jax.random.uniform(key, (rows,), F32, 0.5, 2.0)
        case "labels":
            return jax.random.randint(key, (rows,), 0, columns)
        case "heads":
            return jax.random.normal(key, (rows, columns // 128, 128), dtype)
        case _:
            return jnp.arange(rows, dtype=jnp.int32)


def with_gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The gradients alone: a function of the cotangent, then the operands."""

    def call(cotangent: Any, *operands: Any) -> Any:
        def of_first(*first: Any) -> Any:
            return function(*first, *operands[count:])

        return jax.vjp(of_first, *operands[:count])[1](cotangent)

    return call


def forward_and_pull_back(
    function: Callable[..., Any], count: int, cotangent: Any, *given: Any
) -> tuple[Any, Any]:
    """Programs for operands of these types: what the forward keeps for gradients, and the gradients
    by it and the cotangent."""
    trees: list[Any] = []

    def forward(*operands: Any) -> Any:
        def of_first(*first: Any) -> Any:
            return function(*first, *operands[count:])

        leaves, tree = jax.tree.flatten(jax.vjp(of_first, *operands[:count])[1])
        trees.append(tree)
        return leaves

    lowered = jax.jit(forward).lower(*given)
    tree, kept = trees[-1], lowered.out_info

    def pull_back(cotangent: Any, kept: Any) -> Any:
        return jax.tree.unflatten(tree, kept)(cotangent)

    return lowered.compile(), compiled(pull_back, cotangent, kept)


def relative_error(got: Any, expected: Any) -> float:
    """The largest, of all results, in the Euclidean norm; of the last rows."""
    worst = 0.0
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(part[-256:].astype(F32), np.float64) for part in (one, other))
        worst = max(worst, float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)))
    return worst


@dataclasses.dataclass
class Row:
    """One measurement; times in milliseconds, bandwidths in bytes per second."""

    operation: str
    direction: str
    shape: tuple[int, int]
    dtype: str
    bytes: int
    pallasite_ms: float
    xla_ms: float
    torch_ms: float | None
    bandwidth: float
    share_of_copy: float
    relative_error: float


def torch_milliseconds(
    case: Case, operands: list[Any], backward: bool, repeats: int, compiled: bool
) -> float | None:
    """The median time of PyTorch, by CUDA events around kernels that are already queued."""
    if case.torch is None:
        return None
    try:
        import torch
    except ImportError:
        return None
    tensors = [torch.from_dlpack(one) for one in operands]
    function = case.torch(torch.nn.functional)
    if compiled:
        function = torch.compile(function)
    if backward:
        tensors = [
            one.detach().clone().requires_grad_(number < case.differentiated)
            for number, one in enumerate(tensors)
        ]
        out = function(*tensors)
        cotangent = torch.ones_like(out)
        run = functools.partial(
            torch.autograd.grad, out, tensors[: case.differentiated], cotangent, retain_graph=True
        )
    else:
        run = functools.partial(function, *tensors)
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # So that the host is ahead.
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    torch.cuda.empty_cache()
    return sorted(times[3:])[repeats // 2]


@dataclasses.dataclass(frozen=True)
class Task:
    """A case of a shape, and how it is measured.

    Attributes:
      number: of the case.
      peak: the bandwidth of a copy.
      torch: whether PyTorch's functions are measured, and whether compiled.
    """

    number: int
    shape: tuple[int, int]
    dtype: str
    backward: bool
    peak: float
    repeats: int
    torch: bool
    compiled: bool


def compiled(function: Callable[..., Any], *given: Any) -> Any:
    """The program for operands of these types."""
    return jax.jit(function).lower(*given).compile()


def measure(task: Task, alone: Any) -> Row:
    """One row of the table; everything is compiled before it has the GPU for itself."""
    case, shape, dtype, repeats = (
        CASES[task.number],
        task.shape,
        jnp.dtype(task.dtype),
        task.repeats,
    )

    def operands_of() -> list[Any]:
        return [operand(kind, *shape, dtype, seed) for seed, kind in enumerate(case.operands)]

    def cotangent_of() -> Any:
        out = jax.eval_shape(case.ours, *jax.eval_shape(operands_of))
        return jax.random.normal(jax.random.key(99), out.shape, out.dtype)

    draw, given = compiled(operands_of), jax.eval_shape(operands_of)
    if task.backward:
        # What the forward keeps is given; XLA may as well compute it again.
        cotangent, draw_cotangent = jax.eval_shape(cotangent_of), compiled(cotangent_of)
        (keep, ours), (xla_keeps, again) = (
            forward_and_pull_back(one, case.differentiated, cotangent, *given)
            for one in (case.ours, case.xla)
        )
        given = [cotangent, *given]
        xla = compiled(with_gradients(case.xla, case.differentiated), *given)
    else:
        ours, xla = compiled(case.ours, *given), compiled(case.xla, *given)
    with alone:
        operands = draw()
        arrays, to_ours = operands, operands
        if task.backward:
            arrays = [draw_cotangent(), *operands]
            to_ours = [arrays[0], keep(*operands)]
        got, expected = ours(*to_ours), xla(*arrays)
        error = relative_error(got, expected)
        limit = 2e-5 if dtype == F32 and "fp8" not in case.name else 2e-2
        if not error < limit:
            raise ValueError(f"{case.name} {shape}: wrong result, relative error {error}")
        moved = sum(one.size * one.dtype.itemsize for one in jax.tree.leaves((arrays, got)))
        del got, expected
        time = harness.kernel_milliseconds(ours, *to_ours, repeats=repeats)
        rival = harness.kernel_milliseconds(xla, *arrays, repeats=repeats)
        if task.backward:
            to_ours = [arrays[0], xla_keeps(*operands)]
            rival = min(rival, harness.kernel_milliseconds(again, *to_ours, repeats=repeats))
        torch_time = None
        if task.torch:
            torch_time = torch_milliseconds(case, operands, task.backward, repeats, task.compiled)
    bandwidth = moved / (time * 1e-3)
    return Row(
        case.name, "backward" if task.backward else "forward", shape, dtype.name, moved, time,
        rival, torch_time, bandwidth, bandwidth / task.peak, error,
    )  # fmt: skip


def main() -> int:
    """Measures, prints a table and writes JSON; 1 if a row failed."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=float, default=256.0, help="size of a matrix")
    parser.add_argument(
        "--columns", type=int, nargs="*", default=[256, 1024, 4096, 5120, 8192, 32000, 128256]
    )
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--only", nargs="*", help="names of operations")
    parser.add_argument("--directions", nargs="*", default=["forward", "backward"])
    parser.add_argument("--seconds", type=float, help="no further row begins after them")
    parser.add_argument("--compile", action="store_true", help="PyTorch's functions are compiled")
    parser.add_argument("--without-torch", action="store_true", help="no rival but XLA")
    parser.add_argument("--processes", type=int, default=4, help="that compile side by side")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"it needs a GPU, and JAX is on {jax.default_backend()!r}")
    size = int(arguments.mebibytes * 2**20)
    peak, how = harness.copy_bandwidth(size)
    print(f"{harness.machine()}\ncopy bandwidth {peak / 1e12:.3f} TB/s ({how})")
    tasks = [
        Task(
            number, (size // jnp.dtype(name).itemsize // columns, columns), name, backward, peak,
            arguments.repeats, not arguments.without_torch, arguments.compile,
        )
        for name in arguments.dtypes
        for columns in arguments.columns
        for number, case in enumerate(CASES)
        for backward in ((False, True) if case.differentiated else (False,))
        if (not arguments.only or case.name in arguments.only)
        and (case.name != "rotary" or columns % 128 == 0)
        and ("backward" if backward else "forward") in arguments.directions
    ]  # fmt: skip
    rows, failed = side_by_side.measured(measure, tasks, arguments.processes, arguments.seconds)
    header = (
        "operation", "direction", "shape", "dtype", "ms", "TB/s", "of copy", "XLA ms", "vs XLA",
        "PyTorch ms", "vs PyTorch",
    )  # fmt: skip
    harness.print_table(
        header,
        [
            (
                row.operation,
                row.direction,
                "x".join(map(str, row.shape)),
                row.dtype,
                row.pallasite_ms,
                row.bandwidth / 1e12,
                row.share_of_copy,
                row.xla_ms,
                row.xla_ms / row.pallasite_ms,
                row.torch_ms,
                None if row.torch_ms is None else row.torch_ms / row.pallasite_ms,
            )
            for row in rows
        ],
    )
    print("geometric mean vs XLA:", harness.geometric_mean(r.xla_ms / r.pallasite_ms for r in rows))
    harness.write_json(arguments.json, "rows", rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
