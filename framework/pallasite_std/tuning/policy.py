"""Which configuration an operation runs with: the author's choice, or what was measured.

The option ``autotune`` says which for operations that ask with :func:`choose`. Users who want one
function measured call :func:`autotune`.
"""

from __future__ import annotations

import hashlib
import inspect
import pathlib
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax

from pallasite.plugin import PallasiteError, config
from pallasite_std.tuning import entries
from pallasite_std.tuning import winners as tables
from pallasite_std.tuning.encoding import digest, distinct
from pallasite_std.tuning.search import Measure
from pallasite_std.tuning.trials import EXPECTED_ERRORS
from pallasite_std.tuning.tuner import AutotuneWarning, is_tuning, tune

_lock = threading.Lock()
_failed: set[str] = set()
"""What could not be tuned in this process, by the digest of its key."""


def choose[Configuration: Hashable](
    name: str,
    version: int | str,
    args: Sequence[Any],
    candidates: Iterable[Configuration] | Callable[[], Iterable[Configuration]],
    default: Configuration,
    run: Callable[..., Any],
    *,
    key: Any = None,
    check: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    make_inputs: Callable[[jax.Array], Sequence[Any]] | None = None,
    measure: Measure | None = None,
    winners: pathlib.Path | None = None,
    one_by_one: bool = False,
) -> Configuration:
    """The configuration that an operation shall use; for authors of operations.

    The option ``autotune`` decides: with ``"off"`` it is ``default``. With ``"cached"`` it is the
    one that was measured to be the fastest for such arguments on such a GPU, or else ``default``.
    If that was not measured here, what ``winners`` says counts.
    With ``"on"``, what was not measured yet is measured now, if there is a GPU; with several JAX
    processes, which might choose differently, ``"on"`` is ``"cached"``. If no candidate works,
    there is a warning, and the result is ``default``.

    It can be called outside or inside of ``jax.jit``, ``jax.vmap``, ``jax.shard_map`` and so on: of
    tracers, shapes and dtypes count. Candidates run outside of the trace, on random inputs, and on
    other threads; so ``run`` must not call a jitted function in whose trace it is, with the same
    arguments: both would wait for each other. What ``jax.jit`` has traced keeps its choice.

    Args:
      name: of the operation; what was measured is kept under it.
      version: of the operation: another one makes what was measured before invalid.
      args: the operation's arguments: arrays, tracers, ``jax.ShapeDtypeStruct``, trees of such;
        other leaves (numbers, strings) count by value.
      candidates: the configurations to choose from, or a function that gives them; see
        :func:`autotune`.
      default: the configuration where nothing was measured; it need not be a candidate.
      run: ``run(configuration, *args)`` runs the operation.
      key: what else the choice depends on, such as static parameters; the same kinds of values as
        in configurations.
      check, tolerance, make_inputs, measure: as in :func:`autotune`.
      winners: a table of configurations that were measured to be the fastest on such a GPU, which
        comes with the operation (``pallasite_std.tuning.winners``).
      one_by_one: whether candidates must not run at the same time, as where several devices wait
        for each other and have to run the same programs in the same order.

    Raises:
      InvalidTypeError, InvalidValueError: the candidates, or the key, cannot be used.
    """
    collected = tables.asked()
    if collected is not None:
        listed = distinct(candidates() if callable(candidates) else candidates, name)
        described = tables.described(args)
        collected.append(tables.Question(name, version, described, key, listed, default, run))
        return default
    policy = config.get("autotune")
    if policy == "off":
        return default
    listed = distinct(candidates() if callable(candidates) else candidates, name)
    found = entries.entry_key(name, version, args, listed, key)
    entry = entries.find(name, found)
    known = None if entry is None else entries.chosen(entry, listed)
    if known is not None:
        return known[0]
    if winners is not None:
        known = tables.find(winners, entries.device().device_kind, name, version, args, key, listed)
        if known is not None:
            return known[0]
    if policy == "cached" or is_tuning() or not _can_measure(measure):
        return default
    failure = digest(found)
    if failure in _failed:
        return default
    try:
        return tune(
            name,
            run,
            listed,
            args,
            found,
            check=check,
            tolerance=tolerance,
            make_inputs=make_inputs,
            measure=measure,
            one_by_one=one_by_one,
        )
    except EXPECTED_ERRORS as error:
        with _lock:
            _failed.add(failure)
        text = error.message if isinstance(error, PallasiteError) else str(error)
        reason = f": {error.got}" if isinstance(error, PallasiteError) and error.got else ""
        warnings.warn(
            f"{name!r} is not tuned, and uses {default}: {text}{reason}",
            AutotuneWarning,
            stacklevel=2,
        )
        return default


def autotune[Configuration: Hashable](
    function: Callable[..., Any],
    configurations: Iterable[Configuration],
    *args: Any,
    key: Any = None,
    name: str | None = None,
    check: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    make_inputs: Callable[[jax.Array], Sequence[Any]] | None = None,
    refresh: bool = False,
    measure: Measure | None = None,
) -> Configuration:
    """The configuration with which a function is the fastest on this GPU, measured or remembered.

    Each configuration is compiled and run once; those that raise an error of Pallasite or JAX (too
    much shared memory, say), ``ValueError`` or ``NotImplementedError`` are left out, with one
    warning. The others are timed on the device, with inputs that are not in its cache, and the
    slower half is dropped again and again. Of those that are within 1% of the fastest, the result
    is the first.

    The choice is kept on disk (options ``cache`` and ``cache_dir``; ``pallasite cache`` shows and
    clears it). It holds for the same name, source text of ``function``, configurations, shapes and
    dtypes, ``key``, GPU, target, and versions of Pallasite and its plugins.

    Args:
      function: ``function(configuration, *args)``, which JAX can trace and which calls kernels.
      configurations: hashable values that can be written as JSON: numbers, strings, booleans, None,
        enumerations, dtypes; tuples and frozen dataclasses of such. Best guess first.
      *args: arrays, or ``jax.ShapeDtypeStruct`` for random ones, and trees of such. Other leaves
        (numbers, strings) are passed as they are.
      key: what else the choice depends on, such as a value that ``function`` has captured.
      name: under which the choice is kept; by default the function's.
      check: ``check(*args)`` computes the reference; configurations whose results differ from it
        are left out.
      tolerance: the largest permitted error, as a part of the largest magnitude in the reference.
        By default 0 for integers, and for floats 1e-4 (32 bits), 2e-2 (16 bits), 0.2 (8 bits).
      make_inputs: makes the arguments from a key of ``jax.random`` instead, where random arrays are
        no meaningful ones.
      refresh: whether to measure again what is known.
      measure: takes the times instead of the GPU's: ``measure(trials, repeats)`` gets the
        candidates that work, each with its ``configuration`` and with ``run(turn)``, which runs it
        on the inputs of that turn, and returns the seconds of a run of each.

    Raises:
      ExecutionError: there is no GPU, or no configuration works.
      InvalidTypeError, InvalidValueError: the configurations, or the key, cannot be used.
    """
    plain = inspect.unwrap(getattr(function, "func", function))
    if name is None:
        name = f"{plain.__module__}.{plain.__qualname__}"
    listed = distinct(configurations, name)
    found = entries.entry_key(name, _source_version(plain), args, listed, key)
    entry = None if refresh else entries.find(name, found)
    known = None if entry is None else entries.chosen(entry, listed)
    if known is not None:
        return known[0]
    return tune(
        name,
        function,
        listed,
        args,
        found,
        refresh=refresh,
        check=check,
        tolerance=tolerance,
        make_inputs=make_inputs,
        measure=measure,
    )


def _source_version(function: Any) -> str:
    """A hash of a function's source text, where there is one."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


def _can_measure(measure: Measure | None) -> bool:
    return jax.process_count() == 1 and (measure is not None or entries.device().platform == "gpu")
