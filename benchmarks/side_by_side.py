"""Cases that several processes prepare side by side, and measure one at a time.

Compiling takes the most time of a benchmark of many cases. A case is a function of the item and of
a lock, which it holds while it measures, and in which the others leave the GPU alone; or it is
prepared by one function, and measured by what that returns, perhaps much later.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import pathlib
import queue
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


def hold_option(parser: argparse.ArgumentParser) -> None:
    """The option of benchmarks whose cases are prepared before they are measured."""
    parser.add_argument(
        "--hold",
        type=pathlib.Path,
        help="until this file exists cases are compiled only; --seconds begin then",
    )


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
    return collected(results(case, items, processes, seconds), name, show)


def prepared[Item, Result](
    prepare: Callable[[Item], Callable[[], Result]],
    items: Sequence[Item],
    processes: int,
    seconds: float | None = None,
    hold: pathlib.Path | None = None,
) -> Iterator[tuple[Item, Result | Exception]]:
    """The results of cases, or what they raised, in the order in which they are there.

    Args:
      prepare: ``prepare(item)``, of a module that can be imported, returns what measures the item,
        of which one runs at a time.
      items: of the cases, which are prepared in this order.
      processes: how many work at a time.
      seconds: no further case begins after them; so there may be fewer results than items.
      hold: nothing is measured before this file exists, which is when ``seconds`` begin.
    """
    context = multiprocessing.get_context("spawn")
    done, lock, next_item = context.Queue(), context.Lock(), context.Value("i", 0)
    arguments = (prepare, items, next_item, done, lock, seconds, hold)
    workers = [
        context.Process(target=_work, args=arguments, daemon=True)
        for _ in range(min(processes, len(items)))
    ]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers) or not done.empty():
        try:
            number, result = done.get(timeout=0.2)
        except queue.Empty:
            continue
        yield items[number], result
    for worker in workers:
        if worker.exitcode:
            print(f"a process ended with exit code {worker.exitcode}", flush=True)


def collected[Item, Result](
    outcomes: Iterator[tuple[Item, Result | Exception]],
    name: Callable[[Item], str] = str,
    show: Callable[[Item, Result], str] | None = None,
) -> tuple[list[Result], int]:
    """The results among outcomes, and how many failed, each with a line printed."""
    rows, failed = [], 0
    for item, row in outcomes:
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


def _work(
    prepare: Callable[[Any], Callable[[], Any]],
    items: Sequence[Any],
    next_item: Any,
    done: Any,
    lock: Any,
    seconds: float | None,
    hold: pathlib.Path | None,
) -> None:
    """Prepares items, and measures those that are ready as soon as that may be done."""
    parent, begin = os.getppid(), None
    ready: list[tuple[int, Callable[[], Any]]] = []
    left = True
    while (left or ready) and os.getppid() == parent:
        if begin is None and (hold is None or hold.exists()):
            begin = time.monotonic()
        if begin is not None and seconds is not None and time.monotonic() > begin + seconds:
            break
        if begin is not None and ready:
            number, measure = ready.pop(0)
            try:
                with lock:
                    outcome = measure()
            except Exception as error:
                outcome = RuntimeError(f"{type(error).__name__}: {error}")
            done.put((number, outcome))
            continue
        with next_item.get_lock():
            number, left = next_item.value, next_item.value < len(items)
            next_item.value += left
        if not left:
            time.sleep(0.02)
            continue
        try:
            ready.append((number, prepare(items[number])))
        except Exception as error:
            done.put((number, RuntimeError(f"{type(error).__name__}: {error}")))
    done.close()
    done.join_thread()
    os._exit(0)  # What CUDA and PyTorch do at an exit takes seconds.
