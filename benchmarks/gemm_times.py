"""Times of GEMMs side by side: ours with any configurations, XLA's, PyTorch's.

Programs are compiled before, by several processes (``side_by_side.py``); one process at a time
measures a shape. Calls come in random order, each after a large array was read, so that the L2
cache has nothing of the operands; times are those of the kernels, by CUPTI. JAX and PyTorch take
turns and make equally many calls: a GPU that multiplies for long lowers its clock, to three
quarters and less for products of milliseconds, and who made few calls would seem to be faster.
Every result is compared with a product in float32 of the same operands before it is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import operands
import timing
from jax import lax

from pallasite_hopper.ops import MatmulConfig, matmul
from pallasite_hopper.ops.dense.cost import Sizes

READ_BETWEEN = 40 << 20
"""Numbers of float32."""
HALVES, CALLS = 2, 5
"""What is chosen by the times of the first half has those of the second one."""
WARM_UP = 40
"""Reads of the large array before the first call that counts."""

READS = 4
"""Of it, the last of which says what a read looks like."""

LIMITS = {"bf16": 8e-3, "fp8": 2e-2}
"""Largest error that is right, relative, in the Euclidean norm; sums of products of float8 lose
bits in the tensor cores."""

CUBLAS_ONLY = {"xla_gpu_enable_triton_gemm": False}
"""Options of XLA's compiler that save the search among kernels of its own."""

VECTOR = 16
"""Bytes that rows of operands and results are multiples of for the copy engine; elements of float8
that rows of cuBLASLt's operands and results are multiples of."""

LAYOUTS = ("nn", "nt", "tn", "tt")
"""``"t"`` is an operand that is given transposed: (k, m) on the left, (n, k) on the right."""

Shape = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured of a shape.

    Attributes:
      shape: (m, n, k).
      dtype: ``"bf16"``; or ``"fp8"``, whose right operand is given as (n, k).
      configurations: of ours; None is what is chosen without options.
      search: whether XLA searches among all of its kernels, which takes seconds.
      layout: of ``LAYOUTS``; always "nt" for float8.
    """

    shape: Shape
    dtype: str
    configurations: tuple[MatmulConfig | None, ...]
    search: bool = True
    layout: str = "nn"

    @property
    def transposed(self) -> tuple[bool, bool]:
        """Whether the left operand is given as (k, m), and the right one as (n, k)."""
        left, right = "nt" if self.dtype == "fp8" else self.layout
        return left == "t", right == "t"

    @property
    def sizes(self) -> Sizes:
        """What the estimate takes."""
        transpose_a, transpose_b = self.transposed
        size = 1 if self.dtype == "fp8" else 2
        return Sizes(*self.shape, size, 2, transpose_a, transpose_b)

    @property
    def operands(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Types of both."""
        m, n, k = self.shape
        dtype = jnp.float8_e4m3fn if self.dtype == "fp8" else jnp.bfloat16
        transpose_a, transpose_b = self.transposed
        left, right = (k, m) if transpose_a else (m, k), (n, k) if transpose_b else (k, n)
        return jax.ShapeDtypeStruct(left, dtype), jax.ShapeDtypeStruct(right, dtype)

    @property
    def aligned(self) -> bool:
        """Whether rows of the operands and of the result are whole vectors."""
        out = jax.ShapeDtypeStruct(self.shape[:2], jnp.bfloat16)
        arrays = (*self.operands, out)
        return not any(one.shape[1] * one.dtype.itemsize % VECTOR for one in arrays)

    def product(self, config: MatmulConfig | None) -> Callable[..., Any]:
        """Ours."""
        options: dict[str, Any] = {} if config is None else {"config": config}
        options["transpose_a"], options["transpose_b"] = self.transposed
        if self.dtype == "fp8":
            options["out_dtype"] = jnp.bfloat16
        return lambda a, b: matmul(a, b, **options)


@dataclasses.dataclass
class Times:
    """What was measured of a shape.

    Attributes:
      xla, torch: microseconds of the fastest way to write it, of each call; empty if there is none.
      names: of the kernels of both.
      ours: the same of each configuration, in the order of the case; empty if it failed.
      failed: what some configurations raised, or that their results were wrong.
      seconds: for compiling ours, for compiling XLA's, for measuring.
    """

    shape: Shape
    dtype: str
    xla: list[float]
    torch: list[float]
    names: dict[str, list[str]]
    ours: list[list[float]]
    failed: list[str]
    seconds: list[float]

    @property
    def rival(self) -> float:
        """The median of the faster one."""
        return min(statistics.median(one) for one in (self.xla, self.torch) if one)

    @property
    def default(self) -> float:
        """The median of the first configuration."""
        return statistics.median(self.ours[0])

    @property
    def tuned(self) -> float:
        """The median of that which was the fastest in the first half of the calls, in the second
        half."""
        half = len(self.ours[0]) // 2
        found = [one for one in self.ours if one]
        return statistics.median(min(found, key=lambda x: statistics.median(x[:half]))[half:])

    @property
    def best(self) -> float:
        """The least median."""
        return min(statistics.median(one) for one in self.ours if one)

    @property
    def rival_names(self) -> list[str]:
        """The kernels of the faster rival."""
        by_torch = not self.xla or (self.torch and statistics.median(self.torch) == self.rival)
        return self.names["torch" if by_torch else "xla"]


def described(config: MatmulConfig | None) -> dict[str, Any]:
    """What differs from the fields' defaults."""
    if config is None:
        return {}
    values = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    usual = {one.name: one.default for one in dataclasses.fields(config)}
    changed = {name: value for name, value in values.items() if value != usual[name]}
    return {n: described(v) if isinstance(v, MatmulConfig) else v for n, v in changed.items()}


def joined(rows: Sequence[Times], more: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with further entries."""
    return [dataclasses.asdict(row) | one for row, one in zip(rows, more, strict=True)]


def measure(case: Case, alone: Any) -> Times:
    """One shape, as a case of ``side_by_side.py``."""
    prepared = ready(case)
    with alone:
        return prepared()


def ready(case: Case) -> Callable[[], Times]:
    """Compiles all programs of a shape but those of XLA; returns what measures it."""
    if operands.torch_is_there() and jax.default_backend() == "gpu":
        importlib.import_module("torch")  # before CUPTI comes into the process
    begin = time.monotonic()
    left, right = case.operands
    m, n, k = case.shape
    programs: dict[Any, Any] = {}
    failed = []

    def compiled(index: int) -> None:
        config = case.configurations[index]
        try:
            lowered = jax.jit(case.product(config)).lower(left, right)
            programs[index] = lowered.compile()
        except Exception as error:
            failed.append(f"{config}: {str(error)[:200]}")

    def draw(key: Any) -> Any:
        both = zip(jax.random.split(key), (left, right), strict=True)
        return [jax.random.normal(i, x.shape, jnp.bfloat16).astype(x.dtype) for i, x in both]

    def error(a: Any, b: Any, got: Any) -> Any:
        wanted = _dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), case, jnp.float32)
        return jnp.linalg.norm(got.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)

    # It may choose XLA's, which measures when it is compiled.
    by_xla = not case.aligned and case.dtype == "bf16"
    places = range(len(case.configurations))
    for index in () if by_xla else places:
        compiled(index)
    out = jax.ShapeDtypeStruct((m, n), jnp.bfloat16)
    error_of = jax.jit(error, **timing.reference_options()).lower(left, right, out).compile()
    drawn = jax.jit(draw).lower(jax.random.key(0)).compile()
    between = jax.ShapeDtypeStruct((READ_BETWEEN,), jnp.float32)
    clear = jax.jit(read).lower(between).compile()
    seconds = [time.monotonic() - begin]

    def measured() -> Times:
        begin = time.monotonic()
        for index in places if by_xla else ():
            compiled(index)
        for number, function in enumerate(_by_xla(case)):
            on_gpu = jax.default_backend() == "gpu"
            options = {} if case.search or not on_gpu else CUBLAS_ONLY
            xla = jax.jit(function, compiler_options=options)
            with contextlib.suppress(Exception):
                programs["xla", number] = xla.lower(left, right).compile()
        seconds.append(time.monotonic() - begin)
        begin = time.monotonic()
        from jax.experimental.mosaic.gpu import profiler

        timer = timing.CuptiTimer(profiler.mosaic_gpu_lib._mosaic_gpu_ext)
        a, b = drawn(jax.random.key(m + n))
        large = jnp.zeros(between.shape, between.dtype)
        for name, program in list(programs.items()):
            worst = float(error_of(a, b, program(a, b)))
            if not worst < LIMITS[case.dtype]:
                failed.append(f"wrong result of {name}, relative error {worst}")
                del programs[name]
        if 0 not in programs:
            raise RuntimeError(f"no times of {case.shape}: {' '.join(failed)}")
        ours = {name: lambda run=run: run(a, b) for name, run in programs.items()}
        contenders = [Contenders("jax", lambda: clear(large), ours)]
        if operands.torch_is_there():
            contenders.append(_by_torch(case, a, b))
        found, kernels = in_random_order(timer, contenders, m + n + k)
        rivals = {name: found[name] for name in programs if name not in places}
        fastest = min(rivals, key=lambda name: statistics.median(rivals[name]), default=None)
        names = {"xla": kernels[fastest]} if rivals else {}
        names["torch"] = kernels.get("torch", [])
        seconds.append(time.monotonic() - begin)
        return Times(
            case.shape,
            case.dtype,
            rivals[fastest] if rivals else [],
            found.get("torch", []),
            names,
            [found.get(index, []) for index in places],
            failed,
            [round(one, 2) for one in seconds],
        )

    return measured


def read(array: Any) -> Any:
    """Something that reads all of an array."""
    return array.max()


@dataclasses.dataclass
class Contenders:
    """Those of one framework.

    Attributes:
      framework: by its name in ``timing.FRAMEWORKS``.
      clear: reads an array larger than the L2 cache.
      calls: what is timed, by name.
    """

    framework: str
    clear: Callable[[], Any]
    calls: dict[Any, Callable[[], Any]]


def in_random_order(
    timer: timing.CuptiTimer, contenders: Sequence[Contenders], seed: int
) -> tuple[dict[Any, list[float]], dict[Any, list[str]]]:
    """Microseconds of the calls of each program, those of a half after those of the other; and the
    names of its kernels. All frameworks make about as many calls."""
    times: dict[Any, list[float]] = {name: [] for one in contenders for name in one.calls}
    names: dict[Any, list[str]] = {}
    generator = random.Random(seed)
    marks = [_mark(timer, one) for one in contenders]
    most = max(len(one.calls) for one in contenders) * CALLS
    for _ in range(HALVES):
        for one, mark in zip(contenders, marks, strict=True):
            # Each has a call in each round: clocks sink while a half goes on.
            rounds = -(-most // len(one.calls))
            order = [
                name
                for _ in range(rounds)
                for name in generator.sample(list(one.calls), len(one.calls))
            ]
            launch = functools.partial(_all_of, one, order)
            records, _ = timer.record(timing.FRAMEWORKS[one.framework], launch)
            each = split(records, mark)[WARM_UP - 1 :]
            if len(each) != len(order) + 1:
                raise timing.MeasurementError(f"{len(each)} calls of {len(order)} were recorded")
            for name, kernels in zip(order, each[1:], strict=True):
                times[name].append(round(timing.total(kernels) * 1e3, 3))
                names[name] = [kernel for kernel, _ in kernels]
    return times, names


def _mark(timer: timing.CuptiTimer, contenders: Contenders) -> timing.Records:
    """What a read of the large array looks like."""
    framework = timing.FRAMEWORKS[contenders.framework]
    records, _ = timer.record(framework, lambda: [contenders.clear() for _ in range(READS)][-1])
    mark = records[-len(records) // READS :] if len(records) % READS == 0 else []
    if not mark:
        raise timing.MeasurementError(f"{READS} reads of an array had {len(records)} kernels")
    return mark


def _all_of(contenders: Contenders, order: Sequence[Any]) -> Any:
    """Launches the calls of these names; returns the last result."""
    for _ in range(WARM_UP):
        last = contenders.clear()
    for name in order:
        contenders.clear()
        last = contenders.calls[name]()
    return last


def split(records: timing.Records, mark: timing.Records) -> list[timing.Records]:
    """What follows each occurrence of kernels of the same names that take about as long."""
    names, marks = [name for name, _ in records], [name for name, _ in mark]
    width, least = len(mark), timing.total(mark) / 3
    places = [
        i
        for i in range(len(names))
        if names[i : i + width] == marks and timing.total(records[i : i + width]) > least
    ]
    ends = [*places[1:], len(records)]
    return [records[i + width : end] for i, end in zip(places, ends, strict=True)]


def _dot(a: Any, b: Any, case: Case, result: Any) -> Any:
    transpose_a, transpose_b = case.transposed
    contracted = ((0 if transpose_a else 1,), (1 if transpose_b else 0,))
    return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=result)


def _by_xla(case: Case) -> list[Callable[[Any, Any], Any]]:
    """Ways to write the product; of float8, XLA may make one call of cuBLASLt of some."""

    def converted(a: Any, b: Any) -> Any:
        return _dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), case, jnp.bfloat16)

    plain = [lambda a, b: _dot(a, b, case, jnp.bfloat16)]
    return plain if case.dtype == "bf16" else [*plain, converted]


def _by_torch(case: Case, left: Any, right: Any) -> Contenders:
    """PyTorch's product; of float8 by cuBLASLt, whose operands are padded first where their rows
    are no whole vectors."""
    import torch

    a, b = (
        one.t() if transposed else one
        for one, transposed in zip(operands.to_torch(left, right), case.transposed, strict=True)
    )
    _, n, k = case.shape

    def in_vectors(matrix: Any, rows: int, columns: int) -> Any:
        """With zeros at the ends, to multiples of a vector."""
        if not (rows or columns):
            return matrix
        padded = torch.nn.functional.pad(matrix.view(torch.uint8), (0, columns, 0, rows))
        return padded.view(torch.float8_e4m3fn)

    def product() -> Any:
        if case.dtype == "bf16":
            return torch.matmul(a, b)
        left, right = in_vectors(a, 0, -k % VECTOR), in_vectors(b.t(), -n % VECTOR, -k % VECTOR)
        return torch._scaled_mm(
            left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip

    one = torch.ones((), device="cuda")
    large = torch.zeros(READ_BETWEEN, device="cuda")
    product()
    return Contenders("torch", lambda: read(large), {"torch": product})


def ways(names: Sequence[str]) -> str:
    """Names of kernels, shortened."""
    return " + ".join(name[:60] for name, _ in itertools.groupby(names))
