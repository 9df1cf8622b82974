"""Times calls of JAX and PyTorch functions on a GPU by the same means.

The calls of a batch are queued behind a filler, a large product in float32. While the GPU works on
that, the host gets all calls into the queue, so the GPU is never idle between them, and what a
launch costs on the host does not matter. What counts is the time that the kernels of a call ran, as
CUPTI reports it, for all frameworks alike.
"""

from __future__ import annotations

import collections
import functools
import math
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
        product, x = self._filler
        return [product(x) for _ in range(repeats)]

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


class Timer(Protocol):
    """Measures batches of calls."""

    description: str

    def batch(
        self,
        framework: Framework,
        call: Callable[..., Any],
        sets: Sequence[tuple[Any, ...]],
        count: int,
    ) -> list[float]:
        """Milliseconds of each of ``count`` calls, on one set of arguments after the other."""


def make_calls(call: Callable[..., Any], sets: Sequence[tuple[Any, ...]], count: int) -> list[Any]:
    """Results of the calls."""
    return [call(*sets[index % len(sets)]) for index in range(count)]


class ClockTimer:
    """Wall-clock time of a batch, divided by its calls: launches count. It needs no GPU."""

    description = "wall clock of queued calls"

    def batch(
        self,
        framework: Framework,
        call: Callable[..., Any],
        sets: Sequence[tuple[Any, ...]],
        count: int,
    ) -> list[float]:
        start = time.perf_counter()
        framework.wait(make_calls(call, sets, count))
        return [(time.perf_counter() - start) * 1e3 / count]


class CuptiTimer:
    """Device time of the kernels of each call, by CUPTI.

    Args:
      extension: what starts and ends the recording: JAX's, or a substitute in tests.
      detach: whether CUPTI leaves the process after each recording, which takes longer.
    """

    description = "device time of the kernels, by CUPTI, calls queued behind a filler"

    def __init__(self, extension: Any, detach: bool = True):
        self._extension = extension
        self._detach = detach
        self._fillers: dict[str, tuple[int, list[str]]] = {}

    def record(self, framework: Framework, launch: Callable[[], Any]) -> Records:
        """What ran on the GPU from the launch until its results are there."""
        self._extension._cupti_init()
        try:
            framework.wait(launch())
        finally:
            records = self._extension._cupti_get_timings(self._detach)
        return [(str(name), float(milliseconds)) for name, milliseconds in records]

    def filler(self, framework: Framework) -> tuple[int, list[str]]:
        """How many fillers to queue before a batch, and the names of their kernels."""
        if framework.name not in self._fillers:
            framework.wait(framework.fill(2))
            one = self.record(framework, lambda: framework.fill(1))
            lasts = sum(milliseconds for _, milliseconds in one)
            if not one or not lasts > 0:
                raise MeasurementError("CUPTI recorded no kernel of a product in float32")
            repeats = min(math.ceil(FILLER_MILLISECONDS / lasts), 8)
            self._fillers[framework.name] = repeats, [name for name, _ in one] * repeats
        return self._fillers[framework.name]

    def stay_attached(self, framework: Framework) -> None:
        """Keeps CUPTI in the process between recordings, if it then records the same."""
        repeats, names = self.filler(framework)
        for _ in range(2):
            self._detach = False
            try:
                seen = self.record(framework, lambda: framework.fill(repeats))
            except Exception:
                seen = []
            if [name for name, _ in seen] != names:
                self._detach = True
                return

    def batch(
        self,
        framework: Framework,
        call: Callable[..., Any],
        sets: Sequence[tuple[Any, ...]],
        count: int,
    ) -> list[float]:
        repeats, names = self.filler(framework)
        records = self.record(
            framework, lambda: [framework.fill(repeats), make_calls(call, sets, count)]
        )
        return milliseconds_per_call(without_filler(records, names), count)


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
    kernels, rest = divmod(len(records), count)
    if rest == 0:
        calls = [records[i * kernels : (i + 1) * kernels] for i in range(count)]
        if all([name for name, _ in c] == [name for name, _ in calls[0]] for c in calls):
            return [sum(milliseconds for _, milliseconds in one) for one in calls]
    return [sum(milliseconds for _, milliseconds in records) / count]


def make_timer(kind: str) -> Timer:
    """A timer: ``"cupti"``, ``"clock"``, or ``"auto"``, the former where there is a GPU."""
    if kind == "clock" or (kind == "auto" and jax.default_backend() != "gpu"):
        return ClockTimer()
    from jax.experimental.mosaic.gpu import profiler

    if profiler.mosaic_gpu_lib is None:
        raise SystemExit("CUPTI is reached through jax-cuda13-plugin, which is not installed")
    timer = CuptiTimer(profiler.mosaic_gpu_lib._mosaic_gpu_ext)
    timer.stay_attached(FRAMEWORKS["jax"])
    return timer
