"""Long runs of random programs: what came of each is a line of a file, from which a run goes on."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallasite.errors import InternalError, PallasiteError

OUTCOMES = ("right", "wrong", "refused", "internal error", "crash", "hang")


@dataclasses.dataclass(frozen=True)
class Task:
    """A program to be run.

    Attributes:
      name: that finds it again.
      run: raises AssertionError if its result is wrong, PallasiteError if it is refused.
    """

    name: str
    run: Callable[[], None]


class Hang(BaseException):
    """A program took too long; not an exception that programs catch."""


def outcome(run: Callable[[], None], seconds: int) -> tuple[str, str]:
    """What came of a program, and its message."""

    def stop(signum: int, frame: Any) -> None:
        raise Hang

    watched = threading.current_thread() is threading.main_thread()
    if watched:
        before = signal.signal(signal.SIGALRM, stop)
        signal.alarm(seconds)
    try:
        run()
    except Hang:
        return "hang", f"more than {seconds} s"
    except AssertionError as error:
        return "wrong", str(error)
    except InternalError as error:
        return "internal error", str(error)
    except PallasiteError as error:
        return "refused", str(error)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PallasiteError):
            cause = cause.__cause__
        if cause is not None and not isinstance(cause, InternalError):
            return "refused", str(cause)
        return "crash", f"{type(error).__name__}: {error}"
    finally:
        if watched:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    return "right", ""


def read(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The last line of each program in a file; what began and did not end is a crash."""
    found: dict[str, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # The process ended while it wrote the line.
            found[entry["name"]] = entry
    for entry in found.values():
        entry.setdefault("outcome", "crash")
    return found


def run(
    tasks: Iterator[Task], path: pathlib.Path | None, *, minutes: float | None, seconds: int = 300
) -> dict[str, dict[str, Any]]:
    """Runs the programs that are not in a file, and appends what came of them.

    Args:
      tasks: the programs.
      path: of the file; None if nothing is kept.
      minutes: after which no program begins; None for no limit.
      seconds: after which a program hangs.
    """
    done = {} if path is None else read(path)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for number, task in enumerate(tasks):
        if task.name in done and done[task.name]["outcome"] != "interrupted":
            continue
        if end is not None and time.monotonic() > end:
            break
        if number % 200 == 199:
            jax.clear_caches()  # What JAX keeps of each program is never used again.
        _append(path, {"name": task.name})
        begin = time.process_time()
        try:
            result, message = outcome(task.run, seconds)
        except KeyboardInterrupt:
            _append(path, {"name": task.name, "outcome": "interrupted"})
            raise
        spent = round(1e3 * (time.process_time() - begin))
        entry = {"name": task.name, "outcome": result, "message": message[:2000], "ms": spent}
        done[task.name] = entry
        _append(path, entry)
        if result != "right":
            print(f"{task.name}: {result}\n  {message[:1500]}", flush=True)
    return done


def _append(path: pathlib.Path | None, entry: dict[str, Any]) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def summary(done: dict[str, dict[str, Any]]) -> str:
    """How many programs had which outcome, and why some were refused."""
    counts = collections.Counter(entry["outcome"] for entry in done.values())
    spent = [entry["ms"] for entry in done.values() if "ms" in entry]
    lines = [f"{len(done)} programs: " + ", ".join(f"{counts[one]} {one}" for one in OUTCOMES)]
    if spent:
        lines[0] += f"; {sum(spent) / len(spent):.0f} ms of the processor each"
    reasons: collections.Counter[str] = collections.Counter()
    for entry in done.values():
        if entry["outcome"] == "refused":
            first = entry["message"].splitlines()[0]
            reasons[re.sub(r"^\S+:\d+ \([^)]*\): ", "", re.sub(r"\d+", "N", first))] += 1
    lines += [f"  refused {count}: {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def is_bad(done: dict[str, dict[str, Any]]) -> bool:
    """Whether a program failed, or more than 2% were refused."""
    counts = collections.Counter(entry["outcome"] for entry in done.values())
    good = counts["right"] + counts["refused"] + counts["interrupted"]
    return good < len(done) or counts["refused"] > 0.02 * len(done)


def main() -> None:
    """Prints the summary of files."""
    for name in sys.argv[1:]:
        print(summary(read(pathlib.Path(name))))


if __name__ == "__main__":
    main()
