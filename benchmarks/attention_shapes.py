"""Attention of shapes drawn by a seed, against cuDNN and PyTorch.

Batch, heads, groups, length (1 to 32768, log-uniform), head size (multiples of 8 up to 256, most of
them common ones) and the mask are random: causal or not, and of one in three either a sliding
window or several sequences packed into one; ``--seed`` is free to choose. ``ops.attention`` without
a configuration is compared with ``jax.nn.dot_product_attention`` by cuDNN and with PyTorch's
``scaled_dot_product_attention`` or, with windows and packed sequences, the FlashAttention in it,
whichever take the shape; results and gradients are compared with those in float32 before they are
timed. Times are those of the kernels on the device, of contenders in random order. Several
processes compile; one case at a time is measured.

    python benchmarks/attention_shapes.py --seed 1 --count 60 --json attention_shapes.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import side_by_side
import timing

from pallasite import ops

COMMON_HEADS = (64, 64, 128, 128, 128, 128, 96, 80, 72, 112, 160, 192, 256)
MOST_FLOPS, MOST_ELEMENTS = 2e12, 1 << 27


KINDS = ("plain", "window", "packed")


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: as many keys as queries.

    Attributes:
      window: keys before its own position that a query sees; None for all. Only with ``causal``.
      ends: where the packed sequences end; None for one sequence.
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None = None
    ends: tuple[int, ...] | None = None
    dtype: str = "bfloat16"

    @property
    def kind(self) -> str:
        """One of :data:`KINDS`."""
        return "window" if self.window is not None else "packed" if self.ends else "plain"

    @property
    def flops(self) -> float:
        """Of two products, forward, without a mask."""
        whole = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return whole / 2 if self.causal else whole

    def segments(self) -> Any:
        """Numbers of the packed sequences, (batch, length)."""
        assert self.ends is not None
        one = np.searchsorted(np.asarray(self.ends), np.arange(self.length), side="right")
        return jnp.broadcast_to(jnp.asarray(one, jnp.int32), (self.batch, self.length))

    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``ops.attention``."""
        found: dict[str, Any] = {"causal": self.causal}
        if self.window is not None:
            found["window"] = (self.window, None)
        if self.ends is not None:
            found["q_segments"] = found["kv_segments"] = self.segments()
        return found


def draw(
    seed: int, count: int, lengths: tuple[int, int] = (1, 32768), dtype: str = "bfloat16"
) -> list[Case]:
    """Cases of a seed; each depends on the other arguments and its number alone."""
    low, high = map(math.log2, lengths)
    cases = []
    for number in range(count):
        dice = random.Random(f"{seed}/{number}")
        while True:
            length = max(1, round(2 ** dice.uniform(low, high)))
            head_dim = dice.choice(COMMON_HEADS) if dice.random() < 0.8 else 8 * dice.randint(1, 32)
            kv_heads, group = dice.choice((1, 2, 4, 8, 16)), dice.choice((1, 1, 2, 4, 8))
            batch = max(1, round(2 ** dice.uniform(0, 15)) // length)
            case = Case(batch, length, kv_heads * group, kv_heads, head_dim, dice.random() < 0.5)
            elements = batch * length * case.heads * head_dim
            if case.flops <= MOST_FLOPS and elements <= MOST_ELEMENTS and case.heads <= 64:
                cases.append(dataclasses.replace(masked(case, dice), dtype=dtype))
                break
    return cases


def masked(case: Case, dice: random.Random) -> Case:
    """The case, or one with a window or packed sequences."""
    which, length = dice.random(), case.length
    if which < 1 / 6 and length > 32:
        return dataclasses.replace(case, causal=True, window=dice.randint(16, length // 2))
    if which < 1 / 3 and length > 32:
        inner = dice.sample(range(1, length), dice.randint(1, min(16, length // 16)))
        return dataclasses.replace(case, ends=(*sorted(inner), length))
    return case


def shown(case: Case, rows: Any) -> Any:
    """Which keys each of some queries sees; queries that do not exist see all."""
    own, keys = rows[:, None], jnp.arange(case.length)
    seen = jnp.ones((rows.shape[0], case.length), bool)
    if case.causal:
        seen &= keys <= own
    if case.window is not None:
        seen &= keys >= own - case.window
    if case.ends is not None:
        ends = jnp.asarray(case.ends)
        seen &= jnp.searchsorted(ends, own, side="right") == jnp.searchsorted(
            ends, keys, side="right"
        )
    return seen | (own >= case.length)


def picked_heads(case: Case) -> list[int]:
    """Heads of keys whose results are compared."""
    return sorted({0, case.kv_heads - 1})


ROWS_AT_ONCE = 1024
"""Queries of which the reference has weights at the same time."""


def reference(case: Case, backward: bool, q: Any, k: Any, v: Any, d: Any) -> tuple[Any, ...]:
    """Results and, if asked for, gradients of q, k and v in float32.

    Of the first batch and the picked heads only: (picked heads, length, heads of a group,
    head_dim), and gradients of k and v without the group.
    """
    group, scale = case.heads // case.kv_heads, case.head_dim**-0.5
    matmul = functools.partial(jnp.einsum, precision="highest")
    rows = min(ROWS_AT_ONCE, case.length)
    chunks = -(-case.length // rows)
    results = []
    for head in picked_heads(case):
        key, value = (x[0, :, head].astype(jnp.float32) for x in (k, v))

        def of_queries(x: Any, head: int = head) -> Any:
            x = x[0, :, head * group : (head + 1) * group].astype(jnp.float32)
            x = jnp.pad(x, ((0, chunks * rows - case.length), (0, 0), (0, 0)))
            x = jnp.moveaxis(x, 1, 0).reshape(group * chunks, rows, case.head_dim)
            return x

        def step(sums: Any, given: Any, key: Any = key, value: Any = value) -> Any:
            number, query, cotangent = given
            own = jnp.arange(rows) + number % chunks * rows
            scores = matmul("qd,kd->qk", query, key) * scale
            weights = jax.nn.softmax(jnp.where(shown(case, own), scores, -jnp.inf), axis=-1)
            out = matmul("qk,kd->qd", weights, value)
            if not backward:
                return sums, (out,)
            d_weights = matmul("qd,kd->qk", cotangent, value)
            delta = jnp.sum(weights * d_weights, axis=1, keepdims=True)
            d_scores = weights * (d_weights - delta) * scale
            d_key = sums[0] + matmul("qk,qd->kd", d_scores, query)
            d_value = sums[1] + matmul("qk,qd->kd", weights, cotangent)
            return (d_key, d_value), (out, matmul("qk,kd->qd", d_scores, key))

        given = jnp.arange(group * chunks), of_queries(q), of_queries(d)
        nothing = (jnp.zeros_like(key),) * (2 * backward)
        sums, found = jax.lax.scan(step, nothing, given)
        of_rows = (
            jnp.moveaxis(x.reshape(group, chunks * rows, -1)[:, : case.length], 0, 1) for x in found
        )
        results.append((*of_rows, *sums))
    return tuple(jnp.stack(one) for one in zip(*results, strict=True))


def picked(case: Case, array: Any, of_queries: bool) -> Any:
    """What an array like q, or like k, has of the first batch and the picked heads."""
    group = case.heads // case.kv_heads if of_queries else 1
    parts = array[0].reshape(case.length, case.kv_heads, group, case.head_dim)
    chosen = jnp.moveaxis(parts[:, jnp.asarray(picked_heads(case))], 1, 0).astype(jnp.float32)
    return chosen if of_queries else chosen[:, :, 0]


def relative_errors(case: Case, results: Any, wanted: Any) -> Any:
    """Of results and, if there are, of gradients of q, k and v: an array."""
    errors = []
    for number, (one, exact) in enumerate(zip(results, wanted, strict=False)):
        difference = picked(case, one, number < 2) - exact
        size = jnp.maximum(jnp.linalg.norm(exact), 1e-3 * float(exact.size) ** 0.5)
        errors.append(jnp.linalg.norm(difference) / size)
    return jnp.stack(errors)


def cudnn(case: Case) -> Callable[..., Any]:
    """Of JAX; it takes packed sequences as a mask only, which is no rival."""
    window = {} if case.window is None else {"local_window_size": (case.window, 0)}

    def call(q: Any, k: Any, v: Any) -> Any:
        if case.ends is not None:
            raise NotImplementedError
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=case.causal, implementation="cudnn", **window
        )

    return call


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the cotangent and the operands: the result, and the gradients."""

    def call(d: Any, *operands: Any) -> Any:
        out, pull_back = jax.vjp(function, *operands)
        return (out, *pull_back(d))

    return call


TORCH_GRID = 65535
"""Most sequences times heads of PyTorch's gradients: 7857 times 64 left the device unusable."""


def torch_attention(case: Case) -> Callable[..., Any]:
    """A function of tensors (batch, length, heads, head_dim)."""
    import torch

    if case.kind == "plain":

        def fused(*tensors: Any) -> Any:
            turned = [one.transpose(1, 2) for one in tensors]
            return torch.nn.functional.scaled_dot_product_attention(
                *turned, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads
            )

        return fused
    ends, longest = None, case.length
    if case.ends is not None:
        starts = np.concatenate([[0], np.asarray(case.ends)])
        longest = int(np.diff(starts).max())
        all_ends = np.arange(case.batch)[:, None] * case.length + np.asarray(case.ends)
        ends = torch.tensor([0, *all_ends.reshape(-1).tolist()], dtype=torch.int32, device="cuda")

    def flash(*tensors: Any) -> Any:
        if ends is not None:
            tensors = tuple(one.flatten(0, 1) for one in tensors)
        return torch.ops.aten._flash_attention_forward(
            *tensors, ends, ends, longest, longest, 0.0, case.causal, False,
            window_size_left=case.window, window_size_right=None if case.window is None else 0,
        )[0]  # fmt: skip

    return flash


def torch_call(case: Case, operands: Any, backward: bool) -> Callable[[], Any]:
    """A call of PyTorch's kernels; operands are q, k, v and the cotangent."""
    import torch

    if backward and case.batch * case.heads > TORCH_GRID:
        raise RuntimeError(f"no gradients of more than {TORCH_GRID} sequences times heads")
    *given, cotangent = [torch.from_dlpack(x).detach() for x in operands]
    tensors = [one.requires_grad_(backward) for one in given]
    attend = torch_attention(case)

    def call() -> Any:
        out = attend(*tensors)
        if not backward:
            return out
        turned = cotangent.transpose(1, 2) if case.kind == "plain" else cotangent
        return torch.autograd.grad(out, tensors, turned.reshape(out.shape))

    return call


@functools.cache
def timer() -> timing.CuptiTimer:
    """Of all contenders."""
    from jax.experimental.mosaic.gpu import profiler

    return timing.CuptiTimer(profiler.mosaic_gpu_lib._mosaic_gpu_ext)


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


@dataclasses.dataclass(frozen=True)
class Task:
    """A case of a seed, and how it is measured."""

    number: int
    case: Case
    backward: bool
    repeats: int


def prepare(task: Task) -> Callable[[], Row]:
    """Compiles everything; what it returns measures."""
    case, backward = task.case, task.backward
    start_torch()
    shape = (case.batch, case.length, case.heads, case.head_dim)
    kv = (case.batch, case.length, case.kv_heads, case.head_dim)
    shapes, dtype = (shape, kv, kv, shape), jnp.dtype(case.dtype)

    def operands_of(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, 4)
        return [jax.random.normal(*one, dtype) for one in zip(keys, shapes, strict=True)]

    q, k, v, d = (jax.ShapeDtypeStruct(one, dtype) for one in shapes)
    options = case.options()
    function = functools.partial(ops.attention, **options)
    rival: Any = cudnn(case)
    given: tuple[Any, ...] = (q, k, v)
    ours, theirs = function, rival
    if backward:
        given, ours, theirs = (d, q, k, v), with_gradients(function), with_gradients(rival)
    key = jax.random.key(task.number)
    draw_operands = jax.jit(operands_of).lower(key).compile()
    program = jax.jit(ours).lower(*given).compile()

    def errors(results: Any, *arrays: Any) -> Any:
        return relative_errors(case, results, reference(case, backward, *arrays))

    results = jax.eval_shape(ours, *given)
    comparison = jax.jit(errors, **timing.reference_options())
    results = results if backward else [results]
    compare = comparison.lower(results, q, k, v, d).compile()
    try:
        rival_program = jax.jit(theirs).lower(*given).compile()
    except Exception:  # cuDNN has no kernel for the shape.
        rival_program = None
    timer()
    return functools.partial(measure, task, draw_operands, program, compare, rival_program)


def measure(task: Task, draw_operands: Any, program: Any, compare: Any, rival: Any) -> Row:
    """One row, of compiled programs; what is compiled here, others wait for."""
    case, backward = task.case, task.backward
    q, k, v, d = draw_operands(jax.random.key(task.number))
    results = program(d, q, k, v) if backward else [program(q, k, v)]
    errors = np.asarray(compare(results, q, k, v, d))
    error = float(errors.max())
    if not error < 1.5e-2:
        raise ValueError(f"wrong result, relative errors {errors.tolist()}")
    del results
    arrays = (d, q, k, v) if backward else (q, k, v)
    jax_framework, torch_framework = timing.FRAMEWORKS["jax"], timing.FRAMEWORKS["torch"]
    calls = {"ours": (jax_framework, functools.partial(program, *arrays))}
    if rival is not None:
        try:
            jax.block_until_ready(rival(*arrays))
            calls["cudnn"] = (jax_framework, functools.partial(rival, *arrays))
        except Exception as failure:
            print(f"cuDNN: {str(failure).partition(chr(10))[0][:120]}", flush=True)
    try:
        call = torch_call(case, (q, k, v, d), backward)
        torch_framework.wait(call())
        calls["torch"] = (torch_framework, call)
        del call
    except (ImportError, RuntimeError, TypeError) as failure:
        print(f"PyTorch: {str(failure).partition(chr(10))[0][:120]}", flush=True)
    times = timing.interleaved(timer(), calls, task.repeats, random.Random(task.number))
    if "torch" in calls:
        calls.clear()
        torch_memory().empty_cache()
    return Row(
        dataclasses.asdict(case),
        backward,
        times["ours"],
        times.get("cudnn"),
        times.get("torch"),
        error,
    )


@functools.cache
def start_torch() -> None:
    """Imports PyTorch and makes its context, where there is one."""
    with contextlib.suppress(ImportError, RuntimeError):
        torch_memory().synchronize()


def torch_memory() -> Any:
    """What PyTorch has to do with the GPU's memory."""
    import torch

    return torch.cuda


def main() -> int:
    """Measures, prints a table and writes JSON; 1 if a case failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=60)
    side_by_side.hold_option(parser)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases")
    parser.add_argument("--backward", action="store_true", help="forward and gradients together")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--lengths", type=int, nargs=2, default=(1, 32768), help="from, to")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"it needs a GPU, and JAX is on {jax.default_backend()!r}")
    print(harness.machine())
    tasks = [
        Task(number, case, arguments.backward, arguments.repeats)
        for number, case in enumerate(
            draw(arguments.seed, arguments.count, tuple(arguments.lengths), arguments.dtype)
        )
        if number >= arguments.first
        and case.kind in arguments.kinds
        and (arguments.only is None or number in arguments.only)
    ]

    def name(task: Task) -> str:
        return f"{task.number}: {task.case}"

    def show(task: Task, row: Row) -> str:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        return f"{name(task)} {row.pallasite_ms:.4f} ms, {ratio}"

    outcomes = side_by_side.prepared(
        prepare, tasks, arguments.processes, arguments.seconds, arguments.hold
    )
    rows, failed = side_by_side.collected(outcomes, name, show)
    harness.print_table(
        (
            "batch",
            "length",
            "heads",
            "head size",
            "causal",
            "mask",
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
                f"window {row.case['window']}"
                if row.case["window"] is not None
                else f"{len(row.case['ends'])} packed"
                if row.case["ends"]
                else "-",
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
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
