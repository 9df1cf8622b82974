"""Times calls of JAX and PyTorch functions on a GPU by the same means.

The calls of a batch are queued behind a filler, a large product in float32. While the GPU works on
that, the host gets all calls into the queue, so the GPU is never idle between them, and what a
launch costs on the host does not matter. Two times are taken, for all frameworks alike: that of the
kernels of each call, as CUPTI reports it, and that from the end of the filler to the end of the
last call, in which copies and fills of memory and gaps between kernels count as well.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

FILLER_SIZE = 4096
FILLER_MILLISECONDS = 4.0
"""How long the filler lasts at least: the time to launch a batch of calls from Python."""

MOST_CALLS = 16
"""Calls in one batch at most; JAX blocks the host once 32 are in the queue."""

ATTEMPTS = 2
"""How often a batch is run before records that cannot be right are an error."""

EMPTY_BATCHES = 5
"""Batches without calls, which tell what else is between the clock readings."""

Records = list[tuple[str, float]]
"""Names of kernels and their times in milliseconds, in the order in which they ran."""


class MeasurementError(Exception):
    """What was recorded cannot be the calls that were made."""


class Framework(Protocol):
    """What launches the calls."""

    name: str

    def wait(self, results: Any) -> None:
        """Waits until the results are there."""

    def fill(self, repeats: int) -> Any:
        """Queues the filler."""

    def poison(self, results: Any) -> None:
        """Leaves memory of the size of the results free and full of NaN."""

    def check(self) -> None:
        """Raises if the device no longer computes."""


def reference_options() -> dict[str, Any]:
    """Options of ``jax.jit`` for products whose speed does not matter: no search for algorithms."""
    if jax.default_backend() != "gpu":
        return {}
    return {"compiler_options": {"xla_gpu_autotune_level": 0}}


class JaxFramework:
    """Functions of JAX arrays."""

    name = "jax"

    @functools.cached_property
    def _filler(self) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
        def product(x):
            return jax.lax.dot(x, x, precision=jax.lax.Precision.HIGHEST)

        x = jax.random.normal(jax.random.key(0), (FILLER_SIZE, FILLER_SIZE), jnp.float32)
        return jax.jit(product, **reference_options()), x

    def wait(self, results: Any) -> None:
        jax.block_until_ready(results)

    def fill(self, repeats: int) -> Any:
        return [self._filler[0](self._filler[1]) for _ in range(repeats)]

    def poison(self, results: Any) -> None:
        arrays = [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating)]
        jax.block_until_ready([jnp.full(x.shape, jnp.nan, x.dtype) for x in arrays])

    def check(self) -> None:
        jax.block_until_ready(jnp.arange(8) + 1)


class TorchFramework:
    """Functions of PyTorch tensors."""

    name = "torch"

    @functools.cached_property
    def _torch(self) -> Any:
        import torch

        return torch

    @functools.cached_property
    def _filler(self) -> Any:
        torch = self._torch
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.randn(FILLER_SIZE, FILLER_SIZE, dtype=torch.float32, device=device)

    def wait(self, results: Any) -> None:
        if self._torch.cuda.is_available():
            self._torch.cuda.synchronize()

    def fill(self, repeats: int) -> Any:
        return [self._torch.matmul(self._filler, self._filler) for _ in range(repeats)]

    def poison(self, results: Any) -> None:
        tensors = results if isinstance(results, list | tuple) else [results]
        poisoned = [self._torch.full_like(t, math.nan) for t in tensors]
        self.wait(poisoned)

    def check(self) -> None:
        device = "cuda" if self._torch.cuda.is_available() else "cpu"
        self.wait(self._torch.arange(8, device=device) + 1)


FRAMEWORKS: dict[str, Framework] = {"jax": JaxFramework(), "torch": TorchFramework()}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Milliseconds of a batch of calls.

    Attributes:
      kernels: of each call, the sum over its kernels; or one mean over all calls.
      elapsed: from the begin of the first call to the end of the last, divided by their number.
      each: the kernels of a call, with their medians; empty where calls cannot be told apart.
    """

    kernels: list[float]
    elapsed: float
    each: Records = dataclasses.field(default_factory=list)


class Timer(Protocol):
    """Measures batches of calls."""

    description: str

    def batch(
        self,
        framework: Framework,
        call: Callable[..., Any],
        sets: Sequence[tuple[Any, ...]],
        count: int,
    ) -> Batch:
        """The time of ``count`` calls, on one set of arguments after the other."""


def make_calls(call: Callable[..., Any], sets: Sequence[tuple[Any, ...]], count: int) -> list[Any]:
    """Results of the calls."""
    return [call(*sets[index % len(sets)]) for index in range(count)]


class ClockTimer:
    """Wall-clock time of a batch, divided by its calls.

    Args:
      fillers: how many fillers each batch is queued behind, whose own time is subtracted; with
        none, what the host needs for a launch counts.
    """

    def __init__(self, fillers: int = 0):
        self.description = "wall clock of queued calls"
        if fillers:
            self.description += " behind a filler, less that of the filler"
        self._fillers = fillers

    def _milliseconds(self, framework: Framework, launch: Callable[[], Any]) -> float:
        start = time.perf_counter()
        framework.wait((framework.fill(self._fillers), launch()))
        return (time.perf_counter() - start) * 1e3

    def batch(
        self,
        framework: Framework,
        call: Callable[..., Any],
        sets: Sequence[tuple[Any, ...]],
        count: int,
    ) -> Batch:
        framework.wait(framework.fill(self._fillers))
        filler = self._milliseconds(framework, lambda: None) if self._fillers else 0.0
        whole = self._milliseconds(framework, lambda: make_calls(call, sets, count))
        return Batch([(whole - filler) / count], (whole - filler) / count)


class CuptiTimer:
    """Device time of the kernels of each call, by CUPTI.

    Args:
      extension: what starts and ends the recording: JAX's, or a substitute in tests.
      detach: whether CUPTI leaves the process after each recording, which takes longer.
      clock: in seconds.
    """

    description = "CUPTI, calls queued behind a filler"

    def __init__(
        self,
        extension: Any,
        detach: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._extension = extension
        self._detach = detach
        self._clock = clock
        self._fillers: dict[str, Filler] = {}

    def record(self, framework: Framework, launch: Callable[[], Any]) -> tuple[Records, float]:
        """What ran on the GPU from the launch until its results are there, and for how long."""
        self._extension._cupti_init()
        try:
            start = self._clock()
            framework.wait(launch())
            milliseconds = (self._clock() - start) * 1e3
        finally:
            records = self._extension._cupti_get_timings(self._detach)
        return [(str(name), float(one)) for name, one in records], milliseconds

    def filler(self, framework: Framework) -> Filler:
        """What to queue before a batch."""
        if framework.name not in self._fillers:
            framework.wait(framework.fill(2))
            one, _ = self.record(framework, lambda: framework.fill(1))
            if not total(one) > 0:
                raise MeasurementError("CUPTI recorded no kernel of a product in float32")
            repeats = min(math.ceil(FILLER_MILLISECONDS / total(one)), 8)
            latencies = []
            for _ in range(EMPTY_BATCHES):
                records, elapsed = self.record(framework, lambda: framework.fill(repeats))
                latencies.append(elapsed - total(records))
            self._fillers[framework.name] = Filler(
                repeats, [name for name, _ in one] * repeats, statistics.median(latencies)
            )
        return self._fillers[framework.name]

    def stay_attached(self, framework: Framework) -> None:
        """Keeps CUPTI in the process between recordings, if it then records the same."""
        filler = self.filler(framework)
        for _ in range(2):
            self._detach = False
            try:
                seen, _ = self.record(framework, lambda: framework.fill(filler.repeats))
            except Exception:
                seen = []
            if [name for name, _ in seen] != filler.names:
                self._detach = True
                self.record(framework, lambda: framework.fill(1))  # leaves nothing behind
                return

    def batch(
        self,
        framework: Framework,
        call: Callable[..., Any],
        sets: Sequence[tuple[Any, ...]],
        count: int,
    ) -> Batch:
        filler = self.filler(framework)

        def launch() -> Any:
            return framework.fill(filler.repeats), make_calls(call, sets, count)

        for attempt in range(ATTEMPTS):
            records, elapsed = self.record(framework, launch)
            try:
                rest = without_filler(records, filler.names)
                elapsed -= filler.latency + total(records) - total(rest)
                each = medians_of(records_of_calls(rest, count))
                return Batch(milliseconds_per_call(rest, count), elapsed / count, each)
            except MeasurementError:
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("not reached")


@dataclasses.dataclass(frozen=True)
class Filler:
    """What is queued before the calls of a batch.

    Attributes:
      repeats: how many products.
      names: of their kernels.
      latency: milliseconds from the launch until the results are there, less the kernels'.
    """

    repeats: int
    names: list[str]
    latency: float


def interleaved(
    timer: CuptiTimer,
    calls: dict[str, tuple[Framework, Callable[[], Any]]],
    repeats: int,
    dice: random.Random,
    rounds: int = 2,
    kernels_of: dict[str, Records] | None = None,
) -> dict[str, float]:
    """The medians of calls' kernels in milliseconds, by name.

    In each round every contender has its turn, in random order: one call that does not count, and
    its share of the repeats one after the other.

    Args:
      timer: what records kernels.
      calls: a framework and a call of each contender.
      repeats: calls of each that count.
      dice: for the orders.
      rounds: in which all have a turn.
      kernels_of: gets, by name, the kernels of a call with the medians of each.
    """
    jax_framework = FRAMEWORKS["jax"]
    mark, name = _marker(timer)
    count = -(-repeats // rounds)
    order = [one for _ in range(rounds) for one in dice.sample(list(calls), len(calls))]

    def turn(one: str) -> None:
        framework, call = calls[one]
        for _ in range(count + 1):
            framework.wait(call())

    def launch() -> None:
        for one in order:
            jax_framework.wait(mark())
            turn(one)

    records, _ = timer.record(jax_framework, launch)
    parts: list[Records] = []
    for record in records:
        if record[0] == name:
            parts.append([])
        elif parts:
            parts[-1].append(record)
    kernels = {
        one: {len(p) for n, p in zip(order, parts, strict=False) if n == one} for one in calls
    }
    whole = all(len(k) == 1 and min(k) % (count + 1) == 0 < min(k) for k in kernels.values())
    if len(parts) != len(order) or not whole:  # Records of several streams need not be in order.
        parts = []
        for one in order:
            found, _ = timer.record(calls[one][0], functools.partial(turn, one))
            parts.append([record for record in found if record[0] != name])
    times: dict[str, list[float]] = {one: [] for one in calls}
    several: dict[str, list[Records]] = {one: [] for one in calls}
    for one, part in zip(order, parts, strict=True):
        each = milliseconds_per_call(part, count + 1)
        times[one] += each[1:] or each
        several[one] += records_of_calls(part, count + 1)[1:]
    for one, found in several.items() if kernels_of is not None else ():
        kernels_of[one] = medians_of(found)
    return {one: statistics.median(found) for one, found in times.items()}


@functools.cache
def _marker(timer: CuptiTimer) -> tuple[Callable[[], Any], str]:
    """A small kernel that nothing else has, and its name."""
    x = jnp.full((7,), 3.0, jnp.float32)
    program = jax.jit(jnp.cbrt)
    jax.block_until_ready(program(x))
    records, _ = timer.record(FRAMEWORKS["jax"], lambda: program(x))
    names = {name for name, _ in records}
    if len(names) != 1:
        raise MeasurementError(f"CUPTI recorded {sorted(names)} of one kernel")
    return lambda: program(x), names.pop()


def total(records: Records) -> float:
    """Milliseconds of all kernels."""
    return sum(milliseconds for _, milliseconds in records)


def without_filler(records: Records, filler: Sequence[str]) -> Records:
    """The records but those of the filler, which should be the first.

    Raises:
      MeasurementError: the kernels of the filler are not among them.
    """
    if [name for name, _ in records[: len(filler)]] == list(filler):
        return records[len(filler) :]
    missing = collections.Counter(filler)
    rest = []
    for name, milliseconds in records:
        if missing[name]:
            missing[name] -= 1
        else:
            rest.append((name, milliseconds))
    if missing.total():
        raise MeasurementError(
            f"{missing.total()} kernels of the filler are not among the {len(records)} recorded"
        )
    return rest


def milliseconds_per_call(records: Records, count: int) -> list[float]:
    """The sum over the kernels of each call; one mean over all where calls cannot be told apart.

    Raises:
      MeasurementError: no kernel was recorded.
    """
    if not records:
        raise MeasurementError(f"no kernel was recorded in {count} calls")
    calls = records_of_calls(records, count)
    return [total(one) for one in calls] if calls else [total(records) / count]


def records_of_calls(records: Records, count: int) -> list[Records]:
    """Those of each of so many calls; none where calls cannot be told apart."""
    kernels, rest = divmod(len(records), count)
    if rest:
        return []
    calls = [records[i * kernels : (i + 1) * kernels] for i in range(count)]
    alike = all([name for name, _ in c] == [name for name, _ in calls[0]] for c in calls)
    return calls if alike else []


def medians_of(calls: Sequence[Records]) -> Records:
    """The kernels of a call, with the median of each."""
    return [
        (both[0][0], statistics.median(milliseconds for _, milliseconds in both))
        for both in zip(*calls, strict=False)
    ]


def make_timer(kind: str) -> Timer:
    """A timer: ``"cupti"``, ``"clock"``, or ``"auto"``: CUPTI where there is a GPU and it works."""
    clock = ClockTimer(fillers=2 if jax.default_backend() == "gpu" else 0)
    if kind == "clock" or (kind == "auto" and jax.default_backend() != "gpu"):
        return clock
    try:
        from jax.experimental.mosaic.gpu import profiler

        timer = CuptiTimer(profiler.mosaic_gpu_lib._mosaic_gpu_ext)
        timer.stay_attached(FRAMEWORKS["jax"])
    except Exception as failure:
        if kind != "auto":
            raise
        print(f"CUPTI cannot be used: {failure!r}", file=sys.stderr)
        return clock
    return timer
