"""Random kernels and random calls of operations, in one run that can be interrupted.

    python -m tests.fuzz all --seed 0 --count 10000 --resume progress.jsonl --minutes 60

runs the programs of a seed that are not in the file, for so long, and prints a summary of all that
are. Of five programs, four are kernels.
"""

from __future__ import annotations

import argparse
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence

from tests.fuzz import kernels, operations
from tests.fuzz._progress import Task, is_bad, run, summary


def tasks(seed: int, count: int) -> Iterator[Task]:
    """The programs of a seed."""
    for number, target, program in operations.programs(seed, count):
        if number % 5 == 4:
            yield Task(f"operations --seed {seed} --only {number}", _operation(program, target))
        else:
            own = zlib.crc32(f"{seed}/kernels/{number}".encode())
            yield Task(f"kernels --seed {own} --count 1", _kernel(own))


def _operation(program: operations.Program, target: str) -> Callable[[], None]:
    def check() -> None:
        found = operations.problem(program, target)
        assert found is None, f"{target} {program}: {found}"

    return check


def _kernel(seed: int) -> Callable[[], None]:
    def check() -> None:
        program = kernels.make_program(seed, length=8)
        try:
            kernels.check(program)
        except AssertionError as error:
            raise AssertionError(f"{program}\n{error}") from None

    return check


def main(arguments: Sequence[str]) -> int:
    """Runs programs; returns 1 if any is wrong, crashes or hangs, or too many are refused."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz all", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10000, help="how many programs")
    parser.add_argument("--resume", type=pathlib.Path, help="what came of each, a line of JSON")
    parser.add_argument("--minutes", type=float, help="after which no program begins")
    given = parser.parse_args(arguments)
    done = run(tasks(given.seed, given.count), given.resume, minutes=given.minutes)
    print(summary(done))
    return int(is_bad(done))
