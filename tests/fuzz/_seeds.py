"""The programs of consecutive seeds, checked one after the other."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable

import jax
from tests.fuzz import _executors

_KEPT = 200
"""Programs after which JAX forgets what it keeps of each, which is never used again."""


def add_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Those of :func:`check_seeds`; ``what`` names programs in the plural."""
    parser.add_argument("--seed", type=int, default=0, help=f"of the first of the {what}")
    parser.add_argument("--count", type=int, default=50, help=f"how many {what}")
    parser.add_argument("--executor", choices=_executors.NAMES, default="auto")


def check_seeds[Program](
    given: argparse.Namespace,
    what: str,
    make: Callable[[int], Program],
    check: Callable[[Program], object],
) -> int:
    """Checks programs; prints those that fail, and how many; returns the exit status.

    Args:
      given: the options of :func:`add_options`.
      what: names programs in the plural.
      make: the program of a seed.
      check: raises an exception for a program that fails.
    """
    failures = 0
    for number, seed in enumerate(range(given.seed, given.seed + given.count)):
        if number % _KEPT == 0 and number:
            jax.clear_caches()
            print(f"{number} {what}, {failures} failures so far", file=sys.stderr, flush=True)
        program = make(seed)
        try:
            check(program)
        except Exception as error:
            failures += 1
            print(f"seed {seed}: {program}", file=sys.stderr)
            text = "".join(traceback.format_exception_only(error))
            print("\n".join(text.splitlines()[:12]), file=sys.stderr)
    print(f"{given.count} {what}, {failures} failures")
    return min(failures, 1)
