"""Cases that several processes prepare side by side, and measure one at a time.

Compiling takes the most time of a benchmark of many cases. A case is a function of the item and of
a lock, which it holds while it measures, and in which the others leave the GPU alone.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness

_lock: Any = None


def parser(
    description: str, count: int, seconds: float | None = None, processes: int = 4
) -> argparse.ArgumentParser:
    """The options of a benchmark of cases that are drawn at random; the arguments are defaults."""
    result = harness.parser(description)
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--count", type=int, default=count, help="cases that are drawn")
    result.add_argument(
        "--seconds", type=float, default=seconds, help="no further case begins after them"
    )
    result.add_argument(
        "--processes", type=int, default=processes, help="that compile side by side"
    )
    return result


def results[Item, Result](
    case: Callable[[Item, Any], Result],
    items: Sequence[Item],
    processes: int,
    seconds: float | None = None,
) -> Iterator[tuple[Item, Result | Exception]]:
    """The results of cases, or what they raised, in the order in which they are there.

    Args:
      case: ``case(item, lock)``, of a module that can be imported.
      items: of the cases, which begin in this order.
      processes: how many work at a time.
      seconds: no further case begins after them; so there may be fewer results than items.
    """
    context = multiprocessing.get_context("spawn")
    end = None if seconds is None else time.monotonic() + seconds
    lock = context.Lock()
    with concurrent.futures.ProcessPoolExecutor(
        min(processes, len(items)) or 1, context, initializer=_start, initargs=(lock,)
    ) as pool:
        futures = {pool.submit(_run, case, item, end): item for item in items}
        for future in concurrent.futures.as_completed(futures):
            item = futures[future]
            try:
                result = future.result()
            except Exception as error:
                yield item, error
                continue
            if result is not None:
                yield item, result


def measured[Item, Result](
    case: Callable[[Item, Any], Result],
    items: Sequence[Item],
    processes: int,
    seconds: float | None = None,
    *,
    name: Callable[[Item], str] = str,
    show: Callable[[Item, Result], str] | None = None,
) -> tuple[list[Result], int]:
    """The results of cases as in ``results``, and how many failed, each with a line printed.

    Args:
      case, items, processes, seconds: see ``results``.
      name: of an item, for the line about its failure.
      show: what is printed of a result as soon as it is there.
    """
    rows, failed = [], 0
    for item, row in results(case, items, processes, seconds):
        if isinstance(row, Exception):
            failed += 1
            print(f"{name(item)} failed: {str(row)[:300]}", flush=True)
            continue
        if show is not None:
            print(show(item, row), flush=True)
        rows.append(row)
    return rows, failed


def _start(lock: Any) -> None:
    global _lock
    _lock = lock


def _run(case: Callable[[Any, Any], Any], item: Any, end: float | None) -> Any:
    if end is not None and time.monotonic() > end:
        return None
    return case(item, _lock)
