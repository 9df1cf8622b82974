"""Runs test files of JAX's Mosaic GPU backend with ``pallasite.gpu`` in place of that backend.

    python tests/upstream/run_upstream_tests.py mosaic_gpu_test.py --semantics lane --json ours.json
    python tests/upstream/run_upstream_tests.py mosaic_gpu_test.py --backend jax --json jax.json
    python tests/upstream/run_upstream_tests.py FILE ... --backend simulated --sanitize -n 2 \\
        --target sm_90a,sm_100a,sm_103a --quiet
    python tests/upstream/run_upstream_tests.py --json ours.json --compare jax.json

The files come from a checkout of JAX (``tests/pallas/mosaic_gpu_test.py``) and are not changed,
but for what ``--replace`` names: on the simulator, tests of whole products need smaller sizes.
Where JAX has no GPU, kernels run on the simulator. With ``--backend simulated`` JAX's own compiler
makes them (see ``jax_compiler.py``), and its tests judge our simulator. Tests run in processes of
their own: one that hangs or crashes costs only itself. Failures that are JAX's own, with the
reason for each, are in ``own_failures.py``. The exit status is 0 if no other test failed. For
several targets, tests that pass for the first and fail for another are listed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import multiprocessing
import pathlib
import queue
import re
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import own_failures
import worker

_LOADING_LIMIT = 300.0


class Process:
    """A worker process; it is replaced when a test hangs or crashes it."""

    def __init__(self, setup: worker.Setup):
        self._setup = setup
        self.tests: list[str] = []
        self.start()

    def start(self) -> None:
        """Starts the process and waits until it has loaded the file."""
        context = multiprocessing.get_context("spawn")
        self._pipe: Connection
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=worker.work, args=(self._setup, other), daemon=True)
        self._process.start()
        other.close()
        loaded = self._pipe.recv() if self._pipe.poll(_LOADING_LIMIT) else "loading took too long"
        if isinstance(loaded, str):
            raise RuntimeError(f"{self._setup.path} cannot be loaded:\n{loaded}")
        self.tests = loaded

    def run(self, test: str, limit: float) -> worker.Outcome:
        """Runs one test for at most so many seconds."""
        self._pipe.send(test)
        try:
            if self._answers(limit):
                outcome = self._pipe.recv()
                assert isinstance(outcome, worker.Outcome)
                return outcome
            reason, seconds = f"TimeLimit: more than {limit:g} s", limit
        except (EOFError, OSError):
            self._process.join()
            reason, seconds = f"Crash: the process ended with {self._process.exitcode}", 0.0
        self.stop()
        self.start()
        ours = self._setup.backend == "ours"
        own = own_failures.failure(test, reason, ours=True) if ours else None
        outcome, reason = ("fail", reason) if own is None else ("own", own)
        return worker.Outcome(test, outcome, reason, seconds)

    def _answers(self, seconds: float) -> bool:
        """Waits for what the process says, but not longer than that."""
        return self._pipe.poll(seconds)

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def run(
    setup: worker.Setup,
    *,
    pattern: str = "",
    variants: int = 0,
    workers: int = 1,
    limit: float = 60.0,
    seconds: float = math.inf,
    each: Callable[[worker.Outcome, int, int], None] | None = None,
) -> list[worker.Outcome]:
    """Runs the tests of a file whose names (``Class.method``) match a regular expression.

    Args:
      setup: the file, and how it is run.
      pattern: what to look for in the names; empty for all tests.
      variants: how many variants of each parameterized test; 0 for all.
      workers: how many processes.
      limit: time limit of each test, in seconds.
      seconds: after so many of them no test is begun any more; those left have no outcome.
      each: called with each outcome, how many there are so far, and how many there will be.

    Raises:
      RuntimeError: the file cannot be loaded.
    """
    deadline = time.monotonic() + seconds
    first = Process(setup)
    tests = [test for test in first.tests if re.search(pattern, test)]
    if variants:
        tests = some_variants(tests, variants)
    pending: queue.SimpleQueue[str] = queue.SimpleQueue()
    for test in tests:
        pending.put(test)
    outcomes: dict[str, worker.Outcome] = {}
    lock = threading.Lock()

    def drain(process: Process | None) -> None:
        process = process or Process(setup)
        try:
            while time.monotonic() < deadline:
                outcome = process.run(pending.get_nowait(), limit)
                with lock:
                    outcomes[outcome.test] = outcome
                    if each is not None:
                        each(outcome, len(outcomes), len(tests))
        except queue.Empty:
            pass
        finally:
            process.stop()

    count = max(1, min(workers, len(tests)))
    threads = [
        threading.Thread(target=drain, args=(first if number == 0 else None,))
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[test] for test in tests if test in outcomes]


def some_variants(tests: list[str], count: int) -> list[str]:
    """So many of each test's variants, whose names differ in the number at their end: evenly
    distributed, the first among them."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for test in tests:
        groups[test.rstrip("0123456789")].append(test)
    chosen: set[str] = set()
    for members in groups.values():
        members.sort(key=lambda test: (len(test), test))
        step = max(1, len(members) / count)
        chosen.update(members[int(step * n)] for n in range(min(count, len(members))))
    return [test for test in tests if test in chosen]


def counts(outcomes: Iterable[worker.Outcome]) -> dict[str, int]:
    """How many tests passed, failed and were skipped, and how many failures are JAX's own."""
    found = collections.Counter(outcome.outcome for outcome in outcomes)
    names = ("pass", "fail", "skip", *(("own",) if found["own"] else ()))
    return {name: found[name] for name in names}


def by_reason(outcomes: Iterable[worker.Outcome]) -> list[tuple[str, list[worker.Outcome]]]:
    """Outcomes grouped by reason, most frequent first; numbers in reasons do not distinguish."""
    groups: dict[str, list[worker.Outcome]] = collections.defaultdict(list)
    for outcome in outcomes:
        groups[re.sub(r"0x[0-9a-f]+|\d+", "N", outcome.reason)].append(outcome)
    return sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))


def report(outcomes: list[worker.Outcome], *, examples: int = 3) -> str:
    """Counts, and tables of failures and skips by reason."""
    lines = [", ".join(f"{number} {name}" for name, number in counts(outcomes).items())]
    for title, wanted in (("Failures", "fail"), ("JAX's own", "own"), ("Skips", "skip")):
        groups = by_reason(outcome for outcome in outcomes if outcome.outcome == wanted)
        if groups:
            lines += ["", f"{title} by reason:"]
        for reason, members in groups:
            lines.append(f"{len(members):5}  {reason}")
            lines += [f"         {member.test}" for member in members[:examples]]
            if len(members) > examples > 0:
                lines.append("         ...")
    return "\n".join(lines)


def compare(ours: list[worker.Outcome], theirs: list[worker.Outcome], *, examples: int = 3) -> str:
    """Which tests the other run passes and ours fails, by reason, and the reverse as a count."""
    passed = {outcome.test for outcome in theirs if outcome.outcome == "pass"}
    known = {outcome.test for outcome in theirs}
    ours = [outcome for outcome in ours if outcome.test in known]
    better = [o for o in ours if o.outcome == "pass" and o.test not in passed]
    worse = [o for o in ours if o.outcome != "pass" and o.test in passed]
    both = sum(o.outcome == "pass" and o.test in passed for o in ours)
    lines = [
        f"{len(ours)} tests are in both runs; both pass: {both}; only this run passes:"
        f" {len(better)}; only the other passes: {len(worse)}"
    ]
    for reason, members in by_reason(worse):
        lines.append(f"{len(members):5}  {members[0].outcome}: {reason}")
        lines += [f"         {member.test}" for member in members[:examples]]
    return "\n".join(lines)


def worse_than(target: str, first: list[worker.Outcome], others: list[worker.Outcome]) -> str:
    """Names the tests that pass for the first target and not for another."""
    passed = {outcome.test for outcome in first if outcome.outcome == "pass"}
    worse = [o.test for o in others if o.outcome in ("fail", "own") and o.test in passed]
    return "\n         ".join([f"{len(worse):5}  fail that pass for {target}", *worse])


def processor_seconds() -> float:
    """Time of processors that processes which have ended took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write(path: pathlib.Path, outcomes: list[worker.Outcome], setup: worker.Setup) -> None:
    """Writes outcomes as JSON, for :func:`read`."""
    record = {
        "file": pathlib.Path(setup.path).name,
        "backend": setup.backend,
        "semantics": setup.semantics,
        "counts": counts(outcomes),
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def read(path: pathlib.Path) -> list[worker.Outcome]:
    """Reads what :func:`write` wrote."""
    record: dict[str, Any] = json.loads(path.read_text())
    return [worker.Outcome(**outcome) for outcome in record["outcomes"]]


def _show(outcome: worker.Outcome, done: int, total: int) -> None:
    reason = f"  {outcome.reason}" if outcome.reason else ""
    print(
        f"[{done}/{total}] {outcome.outcome} {outcome.test} ({outcome.seconds:.1f} s){reason}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=pathlib.Path, help="the test files")
    parser.add_argument("--backend", choices=("ours", "jax", "simulated"), default="ours")
    parser.add_argument("--semantics", choices=("lane", "warpgroup", "all"), default="all")
    parser.add_argument("-k", dest="pattern", default="", help="a regular expression for names")
    parser.add_argument(
        "--variants", type=int, default=0, help="at most so many variants of each test"
    )
    parser.add_argument("-n", dest="workers", type=int, default=1, help="how many processes")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a test may take")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="when to stop, with what has run by then"
    )
    parser.add_argument(
        "--target",
        dest="targets",
        type=lambda text: text.split(","),
        default=["sm_90a"],
        help="what is compiled for without a GPU; several, separated by commas, one after another",
    )
    parser.add_argument(
        "--replace",
        dest="replacements",
        metavar="OLD=>NEW",
        action="append",
        default=[],
        help="replaces text of the files, such as sizes by smaller ones; may be repeated",
    )
    parser.add_argument("--sanitize", action="store_true", help="with the simulator's sanitizer")
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        help="where outcomes are written; of several runs, file and target become part of the name",
    )
    parser.add_argument("--compare", type=pathlib.Path, help="outcomes of another run")
    parser.add_argument("--examples", type=int, default=3, help="names shown for each reason")
    parser.add_argument("--quiet", action="store_true", help="only the tables")
    options = parser.parse_args(arguments)
    runs = [(path, target) for path in options.paths for target in options.targets]
    if not runs and (options.json is None or options.compare is None):
        parser.error("without a test file, --json and --compare name two runs")
    if len(runs) > 1 and options.compare is not None:
        parser.error("--compare is for one file and one target")
    replacements = tuple(_replacement(parser, one) for one in options.replacements)
    outcomes = [] if runs else read(options.json)
    failed, deadline = 0, time.monotonic() + options.seconds
    firsts: dict[pathlib.Path, list[worker.Outcome]] = {}
    with tempfile.TemporaryDirectory() as programs:
        for path, target in runs:
            setup = worker.Setup(
                path=str(path.resolve()),
                backend=options.backend,
                semantics=options.semantics,
                target=target,
                sanitize=options.sanitize,
                programs=programs,
                replacements=replacements,
            )
            if len(runs) > 1:
                print(f"{path.name}, {target}:", flush=True)
            start, used = time.monotonic(), processor_seconds()
            outcomes = run(
                setup,
                pattern=options.pattern,
                variants=options.variants,
                workers=options.workers,
                limit=options.limit,
                seconds=deadline - start,
                each=None if options.quiet else _show,
            )
            if options.json is not None:
                write(_record_path(options.json, path, target, len(runs)), outcomes, setup)
            print(report(outcomes, examples=options.examples))
            first = firsts.setdefault(path, outcomes)
            if first is not outcomes:
                print(worse_than(options.targets[0], first, outcomes))
            wall, used = time.monotonic() - start, processor_seconds() - used
            print(f"{wall:.0f} s, {used:.0f} s of processors\n", flush=True)
            failed += sum(outcome.outcome == "fail" for outcome in outcomes)
    if options.compare is not None:
        print(compare(outcomes, read(options.compare), examples=options.examples))
        failed = sum(outcome.outcome == "fail" for outcome in outcomes)
    return int(failed > 0)


def _replacement(parser: argparse.ArgumentParser, text: str) -> tuple[str, str]:
    old, arrow, new = text.partition("=>")
    if not arrow or not old:
        parser.error(f"--replace takes OLD=>NEW, not {text!r}")
    return old, new


def _record_path(path: pathlib.Path, test: pathlib.Path, target: str, count: int) -> pathlib.Path:
    return path if count == 1 else path.with_suffix(f".{test.stem}.{target}{path.suffix}")


if __name__ == "__main__":
    sys.exit(main())
