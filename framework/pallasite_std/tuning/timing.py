"""Times of programs on the GPU: those of its kernels, from JAX's profiler, else by the clock.

The profiler gives the time on the device alone, to a few nanoseconds, and through the programs'
names whose it is. Where it cannot be used (a profile is being taken already, say), runs that follow
each other without a pause are timed by the host's clock. That is less exact: for kernels of a few
microseconds it is the time that JAX takes to start them.
"""

from __future__ import annotations

import collections
import functools
import pathlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallasite_std.tuning.inputs import ROTATED_BYTES
from pallasite_std.tuning.trials import Trial

_MODULE = "hlo_module"
"""The statistic of a profiler's event that has the program's name."""
_EVICTION = "autotune_eviction"


def measure_on_gpu(trials: Sequence[Trial[Any]], repeats: int) -> list[float]:
    """The median seconds of a run of each, which all have run before.

    The runs are interleaved, and each has the next set of inputs. Before each, something large is
    read, so that the L2 cache is in the same state for all: it has nothing of the inputs, nor
    anything that is still to be written to memory.
    """
    recorded = _profiled(lambda: _take_turns(trials, repeats))
    times = [median_time(recorded.get(f"jit_{trial.name}", ()), repeats) for trial in trials]
    if None not in times:
        return [one for one in times if one is not None]
    return [_by_the_clock(trial, repeats) for trial in trials]


def median_time(durations: Sequence[float], repeats: int) -> float | None:
    """The median time of a run from those of all kernels of all runs, in order.

    Args:
      durations: in seconds. If their number is no multiple of ``repeats``, the result is the mean.
      repeats: how many runs there were.
    """
    if not durations:
        return None
    kernels, rest = divmod(len(durations), repeats)
    if rest:
        return sum(durations) / repeats
    runs = [sum(durations[start : start + kernels]) for start in range(0, len(durations), kernels)]
    return statistics.median(runs)


def kernel_times(profile: Any) -> dict[str, list[float]]:
    """By program, the seconds of its kernels in order, on the device where they take longest.

    Args:
      profile: a ``jax.profiler.ProfileData``.
    """
    found: dict[str, list[float]] = {}
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        events: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        for line in plane.lines:
            for event in line.events:
                module = _module_of(event)
                if module is not None:
                    events[module].append((event.start_ns, event.duration_ns))
        for module, times in events.items():
            durations = [nanoseconds * 1e-9 for _, nanoseconds in sorted(times)]
            if sum(durations) > sum(found.get(module, ())):
                found[module] = durations
    return found


def _module_of(event: Any) -> str | None:
    name = next((value for key, value in event.stats if key == _MODULE), None)
    return None if name is None else str(name)


def _profiled(run: Callable[[], None]) -> Mapping[str, Sequence[float]]:
    """The times of the kernels that run; nothing if the profiler cannot be used."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="pallasite-autotune-") as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError:  # One is being taken already.
            return {}
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            return {}
        with warnings.catch_warnings():
            # A type of jaxlib's, which it makes when it is first used, has no module.
            warnings.simplefilter("ignore", DeprecationWarning)
            return kernel_times(jax.profiler.ProfileData.from_file(str(files[0])))


def _take_turns(trials: Sequence[Trial[Any]], repeats: int) -> None:
    turn = 0
    output = None
    buffer = jnp.zeros(ROTATED_BYTES // 4, jnp.float32)
    for _ in range(repeats):
        for trial in trials:
            _eviction()(buffer)
            output = trial.run(turn)
            turn += 1
    jax.block_until_ready(output)


def _by_the_clock(trial: Trial[Any], repeats: int) -> float:
    jax.block_until_ready(trial.run(0))
    start = time.perf_counter()
    output = None
    for turn in range(repeats):
        output = trial.run(turn)
    jax.block_until_ready(output)
    return (time.perf_counter() - start) / repeats


@functools.cache
def _eviction() -> Any:
    """A program that reads a buffer."""

    def largest(buffer: Any) -> Any:
        return jnp.max(buffer)

    largest.__name__ = largest.__qualname__ = _EVICTION
    return jax.jit(largest)
