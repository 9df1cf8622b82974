"""Contests: several implementations of one operation, checked, tuned and timed side by side.

A row is one operation on one shape. Each contender has one or more candidates, such as the
configurations of a kernel: each is checked against a reference and timed shortly, and the fastest
one that is right takes part in the contest proper. That goes in rounds, in each of which every
contender runs one batch of calls, in random order; the result is the median over all rounds. In the
end, results are checked again.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from timing import FRAMEWORKS, MOST_CALLS, Batch, Framework, Timer

OURS = "ours"

ROTATED_BYTES = 192 * 2**20
"""Input sets are as many as take this much memory together, several times the L2 cache."""

MOST_SETS = 16
BATCH_MILLISECONDS = 12.0

Candidates = Generator["Candidate", "float | None", None]
"""Yields candidates; what is sent back is the time of the last one in ms, None if it failed."""


class WrongResultError(Exception):
    """A contender does not compute what the reference does."""


class BrokenDeviceError(Exception):
    """After a contender's failure the device no longer computes, so this process has to end."""


def same(*inputs: Any) -> tuple[Any, ...]:
    """The inputs as they are."""
    return inputs


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to compute a row.

    Attributes:
      label: what tells it from the other candidates, such as its configuration.
      call: what is timed.
      prepare: makes the arguments of ``call`` from the inputs of the row; not timed.
      output: makes what is compared with the reference from the result of ``call``; not timed.
    """

    label: str
    call: Callable[..., Any]
    prepare: Callable[..., tuple[Any, ...]] = same
    output: Callable[[Any], Any] = lambda result: result


@dataclasses.dataclass(frozen=True)
class Contender:
    """An implementation: its name, what launches it, and its candidates."""

    name: str
    framework: str
    candidates: Callable[[], Candidates]


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation on one shape.

    Attributes:
      name: unique in the benchmark.
      group: the rows over which a geometric mean is taken.
      flops: floating-point operations.
      bytes: what has to be read and written at least.
      input_bytes: bytes of one set of inputs.
      inputs: makes a set of inputs from a seed.
      reference: computes the result from them in higher precision.
      errors: named measures of the difference between a result and the reference.
      limits: for each of them the largest that is right.
      metric: which time of a call counts: that of its ``"kernels"``, or the ``"elapsed"`` one, in
        which what is between kernels counts too; see ``timing.Batch``.
    """

    name: str
    group: str
    flops: int
    bytes: int
    input_bytes: int
    inputs: Callable[[int], tuple[Any, ...]]
    reference: Callable[..., Any]
    errors: Callable[[Any, Any], dict[str, Any]]
    limits: dict[str, float]
    metric: str = "kernels"

    def times(self, batch: Batch) -> list[float]:
        """The times of a batch that count, in milliseconds."""
        return batch.kernels if self.metric == "kernels" else [batch.elapsed]


@dataclasses.dataclass
class Trial:
    """What became of one candidate; the note says why it failed."""

    label: str
    milliseconds: float | None
    errors: dict[str, float]
    note: str = ""


@dataclasses.dataclass
class Result:
    """One contender in one row: median and quartiles of the milliseconds of a call.

    ``milliseconds`` is None where it failed or computed something else; then the note says why.
    ``kernels`` and ``elapsed`` are medians of both times of a call, whichever counts; ``each`` has
    the kernels of a call one by one, of the last batch.
    """

    contender: str
    label: str = ""
    milliseconds: float | None = None
    quartiles: tuple[float, float] | None = None
    kernels: float | None = None
    elapsed: float | None = None
    each: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    calls: int = 0
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""
    trials: list[Trial] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class RowResult:
    """All contenders in one row."""

    name: str
    group: str
    flops: int
    bytes: int
    results: list[Result]
    note: str = ""

    @staticmethod
    def from_json(data: dict[str, Any]) -> RowResult:
        """The inverse of ``dataclasses.asdict``."""
        results = []
        for one in data["results"]:
            trials = [Trial(**trial) for trial in one["trials"]]
            results.append(Result(**{**one, "trials": trials}))
        return RowResult(**{**data, "results": results})

    def milliseconds(self, contender: str) -> float | None:
        """The time of a contender, None if it has none."""
        return next((r.milliseconds for r in self.results if r.contender == contender), None)

    def rate(self, contender: str) -> float | None:
        """Floating-point operations per second of a contender."""
        time_taken = self.milliseconds(contender)
        return None if time_taken is None else self.flops / (time_taken * 1e-3)

    def fastest(self, contenders: Iterable[str]) -> float | None:
        """The shortest time of those contenders."""
        times = [self.milliseconds(name) for name in contenders]
        return min((t for t in times if t is not None), default=None)

    def ratio(self) -> float | None:
        """Our speed over that of the fastest rival."""
        rivals = [r.contender for r in self.results if r.contender != OURS]
        ours, rival = self.milliseconds(OURS), self.fastest(rivals)
        return None if ours is None or rival is None else rival / ours


@dataclasses.dataclass(frozen=True)
class Options:
    """How thoroughly to measure.

    Attributes:
      rounds: batches of each contender.
      calls: calls in a batch at most.
      trial_calls: timed calls of a candidate.
      seconds: for the row; tuning and rounds end early when they are over.
    """

    rounds: int = 7
    calls: int = MOST_CALLS
    trial_calls: int = 4
    seconds: float = math.inf


def describe(failure: BaseException) -> str:
    """An exception in one line."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return f"{type(failure).__name__}: {lines[0][:200]}" if lines else type(failure).__name__


_reported: set[str] = set()


def report(what: str, failure: BaseException, quiet: bool = False) -> str:
    """The exception in one line; unless quiet, the traceback of one of ours is printed once."""
    note = describe(failure)
    if not quiet and OURS in what.split() and note not in _reported:
        _reported.add(note)
        print(f"{what} failed", file=sys.stderr)
        traceback.print_exception(failure, limit=-12, file=sys.stderr)
    return note


@dataclasses.dataclass
class _Entry:
    """A contender that takes part in the rounds."""

    result: Result
    framework: Framework
    candidate: Candidate
    sets: list[tuple[Any, ...]]
    calls: int
    batches: list[Batch]


class _Contest:
    """One row while it runs."""

    def __init__(self, row: Row, options: Options, timer: Timer, notify: Callable[[str], None]):
        self.row = row
        self.options = options
        self.timer = timer
        self.notify = notify
        sets = math.ceil(ROTATED_BYTES / row.input_bytes)
        self.inputs = [row.inputs(seed) for seed in range(min(max(sets, 2), MOST_SETS))]
        self.reference = row.reference(*self.inputs[0])
        FRAMEWORKS["jax"].wait((self.inputs, self.reference))

    def check(self, framework: Framework, candidate: Candidate, args: Any) -> dict[str, float]:
        """Errors of a call whose outputs take the place of NaN."""
        first = candidate.call(*args)
        framework.wait(first)
        framework.poison(first)
        result = candidate.call(*args)
        framework.wait(result)
        measured = self.row.errors(candidate.output(result), self.reference)
        errors = {name: float(value) for name, value in measured.items()}
        for name, limit in self.row.limits.items():
            if not errors[name] <= limit:
                raise WrongResultError(f"{name} {errors[name]:.2e}, allowed are {limit:.0e}")
        return errors

    def fails(self, framework: Framework, who: str, failure: Exception, quiet: bool = False) -> str:
        """Reports a failure, and returns it in one line."""
        note = report(f"{self.row.name}: {who}", failure, quiet)
        try:
            framework.check()
        except Exception as broken:
            raise BrokenDeviceError(note) from broken
        return note

    def tune(self, contender: Contender, deadline: float) -> _Entry | Result:
        """Tries the candidates of a contender, and returns it with the fastest of them."""
        framework = FRAMEWORKS[contender.framework]
        result = Result(contender.name)
        best: tuple[float, Candidate, list[tuple[Any, ...]]] | None = None
        candidates = contender.candidates()
        milliseconds: float | None = None
        while True:
            self.notify(contender.name)
            try:
                candidate = next(candidates) if not result.trials else candidates.send(milliseconds)
            except StopIteration:
                break
            except Exception as failure:
                result.note = self.fails(framework, contender.name, failure)
                break
            if best is not None and time.monotonic() > deadline:
                result.trials.append(Trial(candidate.label, None, {}, "out of time"))
                candidates.close()
                break
            trial = Trial(candidate.label, None, {})
            result.trials.append(trial)
            try:
                sets = [candidate.prepare(*inputs) for inputs in self.inputs]
                trial.errors = self.check(framework, candidate, sets[0])
                calls = self.options.trial_calls
                batch = self.timer.batch(framework, candidate.call, sets, calls)
                trial.milliseconds = statistics.median(self.row.times(batch))
            except Exception as failure:
                who = f"{contender.name} {candidate.label}"
                trial.note = self.fails(framework, who, failure, quiet=len(result.trials) > 1)
            milliseconds = trial.milliseconds
            if milliseconds is not None and (best is None or milliseconds < best[0]):
                best = milliseconds, candidate, sets
                result.label, result.errors = candidate.label, trial.errors
        if best is None:
            notes = [trial.note for trial in result.trials]
            result.note = result.note or (notes[0] if notes else "no candidate")
            return result
        calls = max(min(round(BATCH_MILLISECONDS / best[0]), self.options.calls), 4)
        return _Entry(result, framework, best[1], best[2], calls, [])

    def rounds(self, entries: list[_Entry], deadline: float) -> None:
        """Times the contenders round-robin."""
        order = random.Random(0)
        racing = list(entries)
        for number in range(self.options.rounds):
            if number >= 2 and time.monotonic() > deadline:
                break
            for entry in order.sample(racing, len(racing)):
                self.notify(entry.result.contender)
                try:
                    batch = self.timer.batch(
                        entry.framework, entry.candidate.call, entry.sets, entry.calls
                    )
                    entry.batches.append(batch)
                except Exception as failure:
                    racing.remove(entry)
                    name = entry.result.contender
                    entry.result.note = self.fails(entry.framework, name, failure)

    def finish(self, entry: _Entry) -> None:
        """Checks a contender again and fills in its result."""
        result = entry.result
        self.notify(result.contender)
        if result.note:
            return
        try:
            self.check(entry.framework, entry.candidate, entry.sets[0])
        except Exception as failure:
            what = f"{result.contender} after timing"
            result.note = f"after timing: {self.fails(entry.framework, what, failure)}"
            return
        samples = [time for batch in entry.batches for time in self.row.times(batch)]
        result.milliseconds = statistics.median(samples)
        result.kernels = statistics.median(t for batch in entry.batches for t in batch.kernels)
        result.elapsed = statistics.median(batch.elapsed for batch in entry.batches)
        result.each = entry.batches[-1].each
        result.calls = len(entry.batches) * entry.calls
        if len(samples) > 1:
            low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
            result.quartiles = low, high


def run_row(
    row: Row,
    contenders: Sequence[Contender],
    options: Options,
    timer: Timer,
    notify: Callable[[str], None] = lambda contender: None,
    skip: dict[str, str] | None = None,
) -> RowResult:
    """Runs one row.

    Args:
      row: the operation.
      contenders: all of which get a result, failed or not.
      options: how thoroughly to measure.
      timer: measures batches of calls.
      notify: told the contender that is next to run, or "" for none.
      skip: contenders that are not to run, and why; the reason becomes their note.

    Raises:
      BrokenDeviceError: a contender left the device in a state in which it no longer computes.
    """
    start = time.monotonic()
    notify("")
    contest = _Contest(row, options, timer, notify)
    results: list[Result] = []
    entries: list[_Entry] = []
    for place, contender in enumerate(contenders):
        if skip and contender.name in skip:
            results.append(Result(contender.name, note=skip[contender.name]))
            continue
        now = time.monotonic()
        left = start + 0.8 * options.seconds - now
        entry = contest.tune(contender, now + left / (len(contenders) - place))
        if isinstance(entry, Result):
            results.append(entry)
        else:
            results.append(entry.result)
            entries.append(entry)
    contest.rounds(entries, start + options.seconds)
    for entry in entries:
        contest.finish(entry)
    notify("")
    return RowResult(row.name, row.group, row.flops, row.bytes, results)
