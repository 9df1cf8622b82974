"""What the programs that run contests share: options, the worker, the order of events, output."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import os
import pathlib
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("PALLASITE_CACHE", "off")

import code_time
import contest
import contest_tables
import harness
import jax
import supervise
import timing

import upstream

CODE_TIME = "code time: "
"""Before the names of kernels whose compilation is timed, in the list of what is to be run."""


def parser(description: str) -> argparse.ArgumentParser:
    """The options of these programs."""
    result = harness.parser(description)
    result.set_defaults(repeats=timing.MOST_CALLS)
    result.add_argument("--rows", nargs="*", help="only rows whose names have one of these parts")
    result.add_argument("--rivals", nargs="*", help="only these rivals; no name for none")
    result.add_argument("--ours", choices=["default", "none"], default="default")
    result.add_argument("--tune", action="store_true", help="try several configurations of ours")
    result.add_argument("--tune-limit", type=int, default=24, help="configurations of ours at most")
    result.add_argument(
        "--config",
        nargs="*",
        default=[],
        metavar="FIELD=VALUE",
        help="change these fields of our configuration",
    )
    result.add_argument("--rounds", type=int, default=7, help="timed batches of each contender")
    result.add_argument("--seconds", type=float, default=225.0, help="tune and time within these")
    result.add_argument("--step-seconds", type=float, default=90.0, help="longest step of a worker")
    result.add_argument("--upstream-configs", choices=upstream.SEARCHES, default="quick")
    result.add_argument("--timing", choices=["auto", "cupti", "clock"], default="auto")
    result.add_argument("--code-time", type=int, default=3, metavar="REPEATS", help="0 for none")
    result.add_argument("--quick", action="store_true", help="few rows, few rounds, little tuning")
    result.add_argument(
        "--rehearse", action="store_true", help="tiny shapes, on the CPU too; times mean nothing"
    )
    result.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    return result


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The options, those that others imply set."""
    arguments = parser.parse_args(argv)
    if arguments.quick or arguments.rehearse:
        arguments.rounds = min(arguments.rounds, 3)
        arguments.upstream_configs = "one"
        arguments.code_time = min(arguments.code_time, 1)
    return arguments


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What one program measures.

    Attributes:
      name: of the benchmark.
      script: path of the program.
      rows: all rows by name.
      quick: the names of those that ``--quick`` takes.
      contenders: makes the contenders of a row.
      kernels: those whose compilation is timed, made when they are needed.
      facts: measures what is to be known of the machine once.
      print_table: prints the results.
    """

    name: str
    script: str
    rows: dict[str, contest.Row]
    quick: Sequence[str]
    contenders: Callable[[contest.Row], list[contest.Contender]]
    kernels: dict[str, Callable[[], code_time.Kernel]]
    facts: Callable[[timing.Timer], dict[str, Any]]
    print_table: Callable[[list[contest.RowResult], dict[str, Any]], dict[str, Any]]


class ContestWorker:
    """Runs rows of a benchmark in the process that uses the device."""

    def __init__(self, benchmark: Benchmark, arguments: argparse.Namespace):
        if jax.default_backend() != "gpu" and not arguments.rehearse:
            raise SystemExit(
                f"it needs a GPU, and JAX is on {jax.default_backend()!r}; --rehearse does not"
            )
        harness.use_checkout()
        if jax.default_backend() == "gpu" and importlib.util.find_spec("torch") is not None:
            importlib.import_module("torch")  # before CUPTI comes into the process
        self.benchmark = benchmark
        self.arguments = arguments
        self.timer = timing.make_timer(arguments.timing)

    def facts(self) -> dict[str, Any]:
        """The machine, how time is measured, and what the benchmark wants to know."""
        return {
            "machine": harness.machine(),
            "timing": self.timer.description,
            **self.benchmark.facts(self.timer),
        }

    def run(
        self, key: str, skip: dict[str, str], notify: Callable[[str], None], seconds: float
    ) -> dict[str, Any]:
        """Runs a row, or times the compilation of a kernel."""
        start = time.monotonic()
        try:
            if key.startswith(CODE_TIME):
                kernel = self.benchmark.kernels[key.removeprefix(CODE_TIME)]()
                times = code_time.measure(kernel, self.arguments.code_time, notify, skip)
                return {"code_time": [dataclasses.asdict(one) for one in times]}
            row = self.benchmark.rows[key]
            options = contest.Options(
                rounds=self.arguments.rounds, calls=self.arguments.repeats, seconds=seconds
            )
            contenders = [
                c for c in self.benchmark.contenders(row) if takes_part(c.name, self.arguments)
            ]
            result = contest.run_row(row, contenders, options, self.timer, notify, skip)
        except contest.BrokenDeviceError as failure:
            raise supervise.BrokenError(str(failure)) from failure
        except Exception as failure:
            note = contest.describe(failure)
            print(f"{key}: {note}", file=sys.stderr)
            try:
                timing.FRAMEWORKS["jax"].check()
            except Exception as broken:
                raise supervise.BrokenError(note) from broken
            return {"failed": note, "seconds": time.monotonic() - start}
        return {"row": dataclasses.asdict(result), "seconds": time.monotonic() - start}


def takes_part(contender: str, arguments: argparse.Namespace) -> bool:
    """Whether the options have that contender run."""
    if contender == contest.OURS:
        return arguments.ours != "none"
    return arguments.rivals is None or contender in arguments.rivals


def compilers(
    name: str, arguments: argparse.Namespace, **makers: Callable[[int], Any]
) -> Callable[[], code_time.Kernel]:
    """A kernel whose compilation is timed, by those compilers that take part."""
    taken = {who: make for who, make in makers.items() if takes_part(who, arguments)}
    return lambda: code_time.Kernel(name, taken)


def selected(benchmark: Benchmark, arguments: argparse.Namespace) -> list[str]:
    """What is to be run, by name."""
    names = list(benchmark.rows)
    if arguments.quick:
        names = [name for name in names if name in benchmark.quick]
    if arguments.rows:
        names = [name for name in names if any(part in name for part in arguments.rows)]
    if not names:
        raise SystemExit(
            f"no row has {' or '.join(arguments.rows)} in its name; there are "
            + ", ".join(benchmark.rows)
        )
    kernels = [CODE_TIME + name for name in benchmark.kernels] if arguments.code_time else []
    return [*kernels, *names]


def main(
    benchmark: Callable[[argparse.Namespace], Benchmark],
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
) -> int:
    """The program: returns the exit status, 1 if one of ours failed or broke off a row."""
    arguments = parse(parser, argv)
    this = benchmark(arguments)
    if arguments.worker:
        supervise.serve(arguments.worker, lambda: ContestWorker(this, arguments))
        return 0
    keys = selected(this, arguments)
    start = time.monotonic()

    def collect(outcome: supervise.Outcome) -> tuple[list[Any], list[Any]]:
        rows, times = [], []
        for key in keys:
            result = outcome.results.get(key, {})
            lost = outcome.lost.get(key) or result.get("failed", "")
            if "code_time" in result:
                times += [code_time.CodeTime(**one) for one in result["code_time"]]
            elif "row" in result:
                rows.append(contest.RowResult.from_json(result["row"]))
            elif lost and key.startswith(CODE_TIME):
                times.append(code_time.CodeTime(key.removeprefix(CODE_TIME), "all", note=lost))
            elif lost:
                row = this.rows[key]
                rows.append(
                    contest.RowResult(row.name, row.group, row.flops, row.bytes, [], note=lost)
                )
        return rows, times

    def save(outcome: supervise.Outcome, summary: dict[str, Any]) -> None:
        rows, times = collect(outcome)
        harness.write_json(
            arguments.json,
            this.name,
            rows,
            outcome.facts.get("machine", {}),
            arguments=list(argv),
            facts={name: value for name, value in outcome.facts.items() if name != "machine"},
            summary=summary,
            code_time=[dataclasses.asdict(one) for one in times],
        )

    def on_event(outcome: supervise.Outcome, key: str | None) -> None:
        seconds = time.monotonic() - start
        if key is None:
            print(f"{outcome.facts}", flush=True)
            return
        rows = {row.name: row for row in collect(outcome)[0]}
        line = f"{seconds:6.1f} s  {key}"
        if key in rows:
            names = [result.contender for result in rows[key].results]
            cells = contest_tables.rates(rows[key], names)
            line += ": " + ", ".join(f"{n} {c}" for n, c in zip(names, cells, strict=True))
            line += f" {rows[key].note}" if rows[key].note else ""
        print(line, flush=True)
        save(outcome, {})

    outcome = supervise.run(
        this.script,
        argv,
        keys,
        seconds=arguments.seconds,
        step_seconds=arguments.step_seconds,
        on_event=on_event,
    )
    rows, times = collect(outcome)
    contest_tables.print_notes(rows)
    if arguments.tune:
        contest_tables.print_trials(rows)
    code_time.print_table(times)
    print()
    summary = this.print_table(rows, outcome.facts)
    save(outcome, summary)
    ours = [r for row in rows for r in row.results if r.contender == contest.OURS]
    lost = [row for row in rows if row.note and row.note != supervise.OUT_OF_TIME]
    return 1 if lost or any(r.milliseconds is None for r in ours) else 0


def our_operation(name: str) -> Any:
    """A function of ``pallasite_hopper.ops``, None if it has none of that name."""
    from pallasite_hopper import ops

    value = getattr(ops, name, None)
    if isinstance(value, types.ModuleType):  # the folder of the function has its name
        value = getattr(importlib.import_module(f"{value.__name__}.api"), name)
    return value


def our_candidates(
    make: Callable[[str, Any], contest.Candidate],
    configs: Sequence[Any],
    arguments: argparse.Namespace,
    *refine: Callable[[Any], list[Any]],
) -> contest.Candidates:
    """Our candidates: the default, or those that the options ask for.

    Args:
      make: takes a label and a configuration, None for the default.
      configs: the configurations to try, dataclasses, the default one first.
      arguments: the options.
      refine: each lists further configurations, given the best so far.
    """
    if not arguments.tune and not arguments.config:
        yield make("default", None)
        return
    if not configs:
        raise OptionError("there is no list of our configurations to change or try")
    limit = arguments.tune_limit if arguments.tune else 1
    first = list(dict.fromkeys(changed(one, arguments.config) for one in configs))[:limit]
    steps = (
        [lambda best, step=step: step(best)[:limit] for step in refine] if arguments.tune else []
    )
    yield from upstream.climb(lambda one: make(label(one), one), first, *steps)


def variants(config: Any, **values: Sequence[Any]) -> list[Any]:
    """Configurations that differ from one in a single field, those that are valid.

    ``values`` lists what to try for each field; fields that do not exist are left out.
    """
    found = []
    for field, choices in values.items():
        for choice in choices if hasattr(config, field) else ():
            try:
                found.append(dataclasses.replace(config, **{field: choice}))
            except ValueError:  # as all errors of Pallasite about values
                continue
    return [one for one in dict.fromkeys(found) if one != config]


class OptionError(ValueError):
    """Options that cannot be followed, which is found out where Pallasite is imported."""


def label(config: Any) -> str:
    """A configuration in one line: the fields that are not at their defaults."""
    return upstream.label(config) or "all fields at their defaults"


def changed(config: Any, changes: Sequence[str]) -> Any:
    """A configuration (a dataclass) with fields changed, given as ``FIELD=VALUE``."""
    values = {}
    for change in changes:
        field, separator, text = change.partition("=")
        if not separator or not hasattr(config, field):
            names = ", ".join(f.name for f in dataclasses.fields(config))
            raise OptionError(f"{change!r} is no FIELD=VALUE; the fields are {names}")
        try:
            values[field] = int(text)
        except ValueError:
            values[field] = {"True": True, "False": False, "None": None}.get(text, text)
    return dataclasses.replace(config, **values)
