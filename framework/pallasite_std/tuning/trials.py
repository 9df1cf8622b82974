"""Candidates as compiled programs: those that cannot run, or compute something else, are left out.

JAX keeps its tracing state (what is being traced, the device mesh) by thread. What is measured may
be asked for in the middle of a trace, so everything here runs on threads of its own.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import dataclasses
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from pallasite.plugin import PallasiteError
from pallasite_std.host_calls import kernel_errors
from pallasite_std.tuning.inputs import Arguments, split

MAX_THREADS = 8
PROGRAM = "autotune"
"""Programs are called this and their number."""

EXPECTED_ERRORS = (PallasiteError, jax.errors.JaxRuntimeError, NotImplementedError, ValueError)
"""What a configuration that is no good may raise; anything else is a mistake, and is not caught."""

_TOLERANCES = {8: 1e-9, 4: 1e-4, 2: 2e-2, 1: 2e-1}
"""By bytes of a float: the largest error as a part of the largest magnitude."""


@dataclasses.dataclass(frozen=True)
class Trial[Configuration]:
    """A candidate that is compiled and has run once.

    Attributes:
      configuration: what it runs with.
      number: its position among the candidates.
      program: a jitted function of arrays.
      inputs: sets of arrays, to be used in turn.
    """

    configuration: Configuration
    number: int
    program: Callable[..., Any]
    inputs: Sequence[Sequence[Any]]

    @property
    def name(self) -> str:
        """What the program is called in profiles, after ``jit_``."""
        return f"{PROGRAM}_{self.number}"

    def run(self, turn: int) -> Any:
        """Starts it on the inputs of a turn, and returns the results without waiting for them."""
        return self.program(*self.inputs[turn % len(self.inputs)])


class WrongResultError(PallasiteError):
    """A configuration whose results differ from the reference's."""


def prepare[Configuration: Hashable](
    function: Callable[..., Any],
    configurations: Iterable[Configuration],
    sets: Sequence[Arguments],
    check: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    one_by_one: bool = False,
) -> tuple[list[Trial[Configuration]], dict[int, Exception]]:
    """Compiles candidates, and runs each once.

    Args:
      function: ``function(configuration, *args)``.
      configurations: the candidates.
      sets: sets of ``args``.
      check: ``check(*args)`` computes the reference.
      tolerance: as in :func:`compare`.
      one_by_one: whether one candidate has run before the next one is compiled.

    Returns:
      The candidates that work, and by number what the others raised.
    """
    _, join = split(sets[0])
    inputs = [split(one)[0] for one in sets]
    expected = None if check is None else check(*sets[0])

    def attempt(number: int, configuration: Configuration) -> Trial[Configuration] | Exception:
        def program(*given: Any) -> Any:
            return function(configuration, *join(given))

        program.__name__ = program.__qualname__ = f"{PROGRAM}_{number}"
        trial = Trial(configuration, number, jax.jit(program), inputs)
        try:
            with kernel_errors():
                output = jax.block_until_ready(trial.run(0))
            if check is not None:
                compare(output, expected, tolerance)
        except EXPECTED_ERRORS as error:
            return error.with_traceback(None)
        return trial

    numbered = list(enumerate(configurations))
    workers = 1 if one_by_one else min(MAX_THREADS, os.cpu_count() or 1, len(numbered))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(carry_over(attempt), *one) for one in numbered]
        try:
            results = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    trials = [one for one in results if isinstance(one, Trial)]
    failures = {i: one for i, one in enumerate(results) if isinstance(one, Exception)}
    return trials, failures


def compare(output: Any, expected: Any, tolerance: float | None = None) -> None:
    """Compares two trees of arrays.

    Args:
      output: what a candidate computed.
      expected: the reference.
      tolerance: the largest error, as a part of the largest magnitude in the reference; by default
        0 for integers, 1e-4 for floats of 32 bits, 2e-2 for 16 bits.

    Raises:
      WrongResultError: they differ.
    """
    got, wanted = (list(map(np.asarray, jax.tree.leaves(tree))) for tree in (output, expected))
    if len(got) != len(wanted):
        raise WrongResultError(f"{len(got)} results where the reference has {len(wanted)}")
    for position, (one, other) in enumerate(zip(got, wanted, strict=True)):
        what = f"result {position}" if len(got) > 1 else "the result"
        if one.shape != other.shape:
            raise WrongResultError(f"{what} has shape {one.shape}, the reference {other.shape}")
        error, limit = _error(one, other), _tolerance(one.dtype) if tolerance is None else tolerance
        if not error <= limit:
            raise WrongResultError(
                f"{what} differs from the reference: relative error {error:.2e} > {limit:.0e}"
            )


def carry_over[**P, Result](function: Callable[P, Result]) -> Callable[P, Result]:
    """A function for another thread, under the options of this one.

    It has the configuration of Pallasite, the default device and whether there are 64-bit types,
    but not the trace and the device mesh.
    """
    context = contextvars.copy_context()
    wide = bool(jax.config.jax_enable_x64)
    device = jax.config.jax_default_device

    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        with jax.enable_x64(wide), jax.default_device(device):
            return context.run(function, *args, **kwargs)

    return call


def on_another_thread[Result](function: Callable[[], Result]) -> Result:
    """Calls a function outside of whatever JAX is tracing here."""
    results: list[Result] = []
    errors: list[BaseException] = []
    carried = carry_over(function)

    def call() -> None:
        try:
            results.append(carried())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="pallasite-autotune", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _error(output: Any, expected: Any) -> float:
    wide: Any = np.int64 if np.issubdtype(expected.dtype, np.integer) else np.float64
    if np.issubdtype(expected.dtype, np.complexfloating):
        wide = np.complex128
    got, wanted = output.astype(wide), expected.astype(wide)
    different = (got != wanted) & ~(np.isnan(got) & np.isnan(wanted))
    largest = float(np.max(np.abs(wanted[np.isfinite(wanted)]), initial=0.0)) or 1.0
    # The maximum of anything with a NaN is a NaN, which is within no tolerance.
    return float(np.max(np.abs(got[different] - wanted[different]), initial=0.0)) / largest


def _tolerance(dtype: Any) -> float:
    if np.issubdtype(dtype, np.integer) or dtype == np.bool_:
        return 0.0
    return _TOLERANCES[min(dtype.itemsize, 8)]
