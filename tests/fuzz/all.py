"""Random kernels, loops, calls and calls of operations, in one run that can be interrupted.

    python -m tests.fuzz all --seed 0 --count 10000 --resume progress.jsonl --minutes 60
    python -m tests.fuzz all --seed 0 --count 10000 --resume folder --jobs 28 --executor both

runs the programs of a seed that are not in the file, for so long, and prints a summary of all that
are. Of ten programs, five are kernels, two are kernels of loops, one is a call from a JAX program,
and two are calls of operations. The second form runs them in so many processes, each on the
simulator and on a GPU, and compares the bits of both.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import pathlib
import platform
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.fuzz import _executors, _supervisor, calls, kernels, loops, operations
from tests.fuzz._progress import Task, is_bad, read, report, run, summary, table


def tasks(seed: int, numbers: Sequence[int], executors: Sequence[Any]) -> Iterator[Task]:
    """Programs of a seed, by their numbers."""
    for number in numbers:
        if number % 5 == 4:
            target, program = operations.program(seed, number)
            name = f"operations --seed {seed} --only {number}"
            yield Task(number, program.name, name, _operation(program, target, executors))
        else:
            family, make, check = _FAMILIES.get(number % 10, _KERNELS)
            own = zlib.crc32(f"{seed}/{family}/{number}".encode())
            name = f"{family} --seed {own} --count 1"
            yield Task(number, family, name, _checked(make, check, own, executors))


type _Family = tuple[str, Callable[[int], Any], Callable[[Any, Sequence[Any]], str | None]]

_KERNELS: _Family = (
    "kernels",
    functools.partial(kernels.make_program, length=8),
    kernels.check,
)
_LOOPS: _Family = ("loops", loops.make_program, loops.check)
_CALLS: _Family = ("calls", calls.make_program, calls.check)
_FAMILIES = {2: _LOOPS, 7: _LOOPS, 8: _CALLS}
"""By the last digit of a program's number; others are kernels or operations."""


def _operation(
    program: operations.Program, target: str, executors: Sequence[Any]
) -> Callable[[], str | None]:
    def check() -> str | None:
        try:
            return operations.check(program, target, executors)
        except AssertionError as error:
            raise type(error)(f"{target} {program}: {error}") from None

    return check


def _checked(
    make: Callable[[int], Any],
    run: Callable[[Any, Sequence[Any]], str | None],
    seed: int,
    executors: Sequence[Any],
) -> Callable[[], str | None]:
    def check() -> str | None:
        program = make(seed)
        try:
            return run(program, executors)
        except AssertionError as error:
            raise type(error)(f"{program}\n{error}") from None

    return check


def main(arguments: Sequence[str]) -> int:
    """Runs programs; returns 1 if any is wrong, crashes or hangs, or too many are refused."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10000, help="how many programs")
    parser.add_argument("--only", type=int, help="the number of one program")
    parser.add_argument("--resume", type=pathlib.Path, help="what came of each: a file or folder")
    parser.add_argument("--minutes", type=float, help="after which no program begins")
    parser.add_argument("--seconds", type=int, default=300, help="after which a program hangs")
    parser.add_argument("--executor", choices=_executors.NAMES, default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="processes; needs a folder")
    parser.add_argument("--part", help="I/N: every N-th program, from the I-th on")
    parser.add_argument("--report", type=pathlib.Path, help="of JSON, which is written")
    given = parser.parse_args(arguments)
    if given.jobs > 1:
        if given.resume is None:
            parser.error("--jobs needs --resume FOLDER")
        with contextlib.suppress(KeyboardInterrupt):
            _run_parts(given)
        done = read(given.resume)
    else:
        part, parts = map(int, given.part.split("/")) if given.part else (0, 1)
        numbers = range(part, given.count, parts) if given.only is None else [given.only]
        path = given.resume
        done = {} if path is None else read(path)
        if given.part:
            path.mkdir(parents=True, exist_ok=True)
            path /= f"part-{part:03d}.jsonl"
        programs = tasks(given.seed, numbers, _executors.executors(given.executor))
        try:
            done = run(programs, path, done=done, minutes=given.minutes, seconds=given.seconds)
        except SystemExit as error:
            # What the driver does at the end of a process may not end.
            os._exit(int(error.code or 0))
        if given.part:
            return int(is_bad(done))
    print(f"{table(done)}\n\n{summary(done)}")
    if given.report is not None:
        made = {
            "command": " ".join(["python -m tests.fuzz all", *arguments]),
            "date": datetime.date.today().isoformat(),
            "machine": platform.processor() or platform.machine(),
            **report(done),
        }
        given.report.write_text(json.dumps(made, indent=1))
    return int(is_bad(done))


def _run_parts(given: argparse.Namespace) -> None:
    commands, variables = [], []
    gpus = max(1, len(list(pathlib.Path("/proc/driver/nvidia/gpus").glob("*"))))
    needs_gpu = given.executor in ("gpu", "both")
    for part in range(given.jobs):
        options = {
            "--seed": given.seed,
            "--count": given.count,
            "--resume": given.resume,
            "--seconds": given.seconds,
            "--executor": given.executor,
            "--part": f"{part}/{given.jobs}",
        }
        if given.minutes is not None:
            options["--minutes"] = given.minutes
        words = [str(word) for pair in options.items() for word in pair]
        commands.append(_supervisor.command("all", *words))
        own = {
            "JAX_PLATFORMS": "cpu,cuda" if needs_gpu else "cpu",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "OPENBLAS_NUM_THREADS": "1",
            "PALLASITE_CACHE": "off",
        }
        if needs_gpu:
            own["CUDA_VISIBLE_DEVICES"] = str(part % gpus)
        variables.append(own)
    _supervisor.run(commands, given.resume, variables, minutes=given.minutes, seconds=given.seconds)
