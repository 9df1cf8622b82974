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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallasite.runtime.tuning.inputs import ROTATED_BYTES, array_bytes
from pallasite.runtime.tuning.trials import Trial

_MODULE = "hlo_module"
"""The statistic of a profiler's event that has the program's name."""
_EVICTION = "autotune_eviction"


def measure_on_gpu(trials: Sequence[Trial[Any]], repeats: int) -> list[float]:
    """The median seconds of a run of each, which all have run before.

    The runs take turns, and each has the next set of inputs. If all sets together are smaller than
    the L2 cache may be, something else is read and written between runs.
    """
    recorded = _profiled(lambda: _take_turns(trials, repeats, evict=_fits_in_cache(trials)))
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
        events: dict[str, dict[tuple[float, float], float]] = collections.defaultdict(dict)
        for line in plane.lines:
            for event in line.events:
                module = dict(event.stats).get(_MODULE)
                if module is not None:
                    where = (event.start_ns, event.duration_ns)
                    events[str(module)][where] = event.duration_ns * 1e-9
        for module, by_time in events.items():
            durations = [by_time[where] for where in sorted(by_time)]
            if sum(durations) > sum(found.get(module, ())):
                found[module] = durations
    return found


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
        return kernel_times(jax.profiler.ProfileData.from_file(str(files[0])))


def _take_turns(trials: Sequence[Trial[Any]], repeats: int, evict: bool) -> None:
    turn = 0
    output = None
    buffer = jnp.zeros(ROTATED_BYTES // 4, jnp.float32) if evict else None
    for _ in range(repeats):
        for trial in trials:
            if evict:
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


def _fits_in_cache(trials: Sequence[Trial[Any]]) -> bool:
    return any(array_bytes(trial.inputs) < ROTATED_BYTES for trial in trials)


@functools.cache
def _eviction() -> Any:
    """A program that reads a buffer and writes another one."""

    def increment(buffer: Any) -> Any:
        return buffer + 1

    increment.__name__ = increment.__qualname__ = _EVICTION
    return jax.jit(increment)
