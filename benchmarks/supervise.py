"""Runs the rows of a benchmark in a process of their own, which is replaced when it breaks.

A kernel that hangs, or that leaves the device in a state in which it no longer computes, must not
end the whole run. So a worker process does all that touches the device, and writes what it does to
a file, one JSON object per line. If it ends, or says nothing for too long, whatever it was at is
recorded as failed, and a new worker goes on with the rest.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

BROKEN = 17
"""Exit status of a worker whose device no longer computes."""

OUT_OF_TIME = "not run: out of time"
"""Of rows that were not begun."""

POLL_SECONDS = 0.05

START_SECONDS = 300.0
"""Libraries that were never loaded before take long; a worker may be silent that long at first."""


class BrokenError(Exception):
    """Raised by a worker's ``run``: this process cannot go on."""


class Worker(Protocol):
    """What runs the rows."""

    def facts(self) -> dict[str, Any]:
        """What is to be known of the run as a whole, such as the machine."""

    def run(
        self, key: str, skip: dict[str, str], notify: Callable[[str], None], seconds: float
    ) -> dict[str, Any]:
        """Runs one row in about that many seconds.

        ``notify`` is to be called with the name of what runs next, "" for nothing that could be
        left out. ``skip`` has the names that are to be left out, with the reasons.
        """


@dataclasses.dataclass
class Outcome:
    """What the workers reported.

    Attributes:
      facts: those of the first worker.
      results: of each row that ended.
      lost: of each row that did not, why.
    """

    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    results: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    lost: dict[str, str] = dataclasses.field(default_factory=dict)


def serve(task_file: pathlib.Path, make_worker: Callable[[], Worker]) -> None:
    """The worker process: runs the rows of a task and reports."""
    task = json.loads(task_file.read_text())
    parent = os.getppid()
    with open(task["events"], "a") as events:

        def report(**event: Any) -> None:
            if os.getppid() != parent:
                os._exit(BROKEN)  # there is no listener any more
            events.write(json.dumps(event) + "\n")
            events.flush()

        worker = make_worker()
        report(event="facts", facts=worker.facts())
        keys = task["keys"]
        for place, key in enumerate(keys):
            left = task["end"] - time.time()
            if left <= 0:
                return
            report(event="begin", key=key, what="")
            try:
                result = worker.run(
                    key,
                    task["skip"].get(key, {}),
                    lambda what, key=key: report(event="begin", key=key, what=what),
                    left / (len(keys) - place),
                )
            except BrokenError as failure:
                report(event="broken", message=str(failure))
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(BROKEN)  # ending in order would wait for the device
            report(event="end", key=key, result=result)


@dataclasses.dataclass
class _Watch:
    """What the parent knows of the current worker."""

    key: str | None = None
    what: str = ""
    message: str = ""
    since: float = 0.0
    started: bool = False


def run(
    script: str,
    arguments: Sequence[str],
    keys: Sequence[str],
    *,
    seconds: float,
    step_seconds: float = 90.0,
    on_event: Callable[[Outcome, str | None], None] = lambda outcome, key: None,
) -> Outcome:
    """Runs all rows in worker processes: the script with these arguments and ``--worker FILE``.

    Args:
      script: it calls ``serve`` when it gets ``--worker``.
      arguments: further arguments of the script.
      keys: the rows.
      seconds: no row is begun after that.
      step_seconds: a worker that reports nothing for that long is ended.
      on_event: called with the key of each row that has ended, or None when the facts are known.

    Raises:
      SystemExit: the first worker ended before it began a row.
    """
    outcome = Outcome()
    skip: dict[str, dict[str, str]] = {}
    end = time.time() + seconds
    with tempfile.TemporaryDirectory() as folder:
        events, task_file = pathlib.Path(folder, "events"), pathlib.Path(folder, "task")
        events.touch()
        offset = 0
        while pending := [k for k in keys if k not in outcome.results and k not in outcome.lost]:
            if time.time() >= end:
                break
            task = {"keys": pending, "skip": skip, "events": str(events), "end": end}
            task_file.write_text(json.dumps(task))
            command = [sys.executable, script, *arguments, "--worker", str(task_file)]
            process = subprocess.Popen(command)
            watch = _Watch(since=time.monotonic())
            try:
                while True:
                    status = process.poll()
                    offset = _read(events, offset, watch, outcome, on_event)
                    if status is not None:
                        break
                    limit = step_seconds if watch.started else max(step_seconds, START_SECONDS)
                    if time.monotonic() - watch.since > limit:
                        watch.message = f"ended after {limit:.0f} seconds without progress"
                        break
                    time.sleep(POLL_SECONDS)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
            if status == 0:
                break
            if watch.key is None:
                if not outcome.facts:
                    raise SystemExit(watch.message or process.returncode)
                watch.key = pending[0]
            message = watch.message or f"the process ended with status {process.returncode}"
            known = skip.setdefault(watch.key, {})
            if watch.what and watch.what not in known:
                known[watch.what] = message
            else:
                outcome.lost[watch.key] = message
                on_event(outcome, watch.key)
        for key in keys:
            if key not in outcome.results and key not in outcome.lost:
                outcome.lost[key] = OUT_OF_TIME
    return outcome


def _read(
    events: pathlib.Path,
    offset: int,
    watch: _Watch,
    outcome: Outcome,
    on_event: Callable[[Outcome, str | None], None],
) -> int:
    """Takes in what the worker has reported since; returns where it ends."""
    with events.open("rb") as file:
        file.seek(offset)
        text = file.read()
    complete = text[: text.rfind(b"\n") + 1]
    for line in complete.splitlines():
        event = json.loads(line)
        watch.since, watch.started = time.monotonic(), True
        match event["event"]:
            case "facts":
                if not outcome.facts:
                    outcome.facts = event["facts"]
                    on_event(outcome, None)
            case "begin":
                watch.key, watch.what, watch.message = event["key"], event["what"], ""
            case "broken":
                watch.message = event["message"]
            case "end":
                outcome.results[event["key"]] = event["result"]
                watch.key, watch.what = None, ""
                on_event(outcome, event["key"])
    return offset + len(complete)
