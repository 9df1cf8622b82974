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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from tests.fuzz._executors import Unequal

from pallasite.errors import InternalError, PallasiteError

OUTCOMES = ("right", "refused", "wrong", "unequal", "internal error", "crash", "hang")

LOST = 75
"""Exit status of a process whose GPU context an error has spoilt: another one has to go on."""

_LOST_CONTEXT = re.compile(r"CUDA_ERROR_(?!OUT_OF_MEMORY)|CUDA error")


@dataclasses.dataclass(frozen=True)
class Task:
    """A program to be run.

    Attributes:
      number: its place among those of a seed.
      family: what kind of program it is.
      name: that finds it again.
      run: raises AssertionError if its result is wrong, PallasiteError if it is refused; returns
        what the bits of two executors have in common, or nothing.
    """

    number: int
    family: str
    name: str
    run: Callable[[], str | None]


class Hang(BaseException):
    """A program took too long; not an exception that programs catch."""


def outcome(run: Callable[[], str | None], seconds: int) -> tuple[str, str, str | None]:
    """What came of a program, its message, and what it returned."""

    def stop(signum: int, frame: Any) -> None:
        raise Hang

    watched = threading.current_thread() is threading.main_thread()
    if watched:
        before = signal.signal(signal.SIGALRM, stop)
        signal.alarm(seconds)
    try:
        return "right", "", run()
    except Hang:
        return "hang", f"more than {seconds} s", None
    except Unequal as error:
        return "unequal", str(error), None
    except AssertionError as error:
        return "wrong", str(error), None
    except InternalError as error:
        return "internal error", str(error), None
    except PallasiteError as error:
        return "refused", str(error), None
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PallasiteError):
            cause = cause.__cause__
        if cause is not None and not isinstance(cause, InternalError):
            return "refused", str(cause), None
        return "crash", f"{type(error).__name__}: {error}", None
    finally:
        if watched:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


def files(path: pathlib.Path) -> list[pathlib.Path]:
    """The files of a run: those of its processes, if it is a folder."""
    return sorted(path.glob("*.jsonl")) if path.is_dir() else [path]


def read(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The last line of each program in a file, or in all files of a folder.

    What began and did not end is a crash.
    """
    found: dict[str, dict[str, Any]] = {}
    for one in files(path):
        for line in one.read_text().splitlines() if one.exists() else ():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # The process ended while it wrote the line.
            if "outcome" in entry or "outcome" not in found.get(entry["name"], ()):
                found[entry["name"]] = entry
    for entry in found.values():
        entry.setdefault("outcome", "crash")
    return found


def run(
    tasks: Iterable[Task],
    path: pathlib.Path | None,
    *,
    done: dict[str, dict[str, Any]] | None = None,
    minutes: float | None,
    seconds: int = 300,
) -> dict[str, dict[str, Any]]:
    """Runs the programs that are not in a file, and appends what came of them.

    Args:
      tasks: the programs.
      path: of the file; None if nothing is kept.
      done: what came of programs before; by default, what is in the file.
      minutes: after which no program begins; None for no limit.
      seconds: after which a program hangs.

    Raises:
      SystemExit: the GPU cannot be used any more by this process.
    """
    if done is None:
        done = {} if path is None else read(path)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for count, task in enumerate(left(tasks, done)):
        if end is not None and time.monotonic() > end:
            break
        if count % 200 == 199:
            jax.clear_caches()  # What JAX keeps of each program is never used again.
        known = {"number": task.number, "family": task.family, "name": task.name}
        append(path, known)
        begin, begin_spent = time.monotonic(), time.process_time()
        try:
            result, message, bits = outcome(task.run, seconds)
        except KeyboardInterrupt:
            append(path, {**known, "outcome": "interrupted"})
            raise
        entry = {
            **known,
            "outcome": result,
            "message": message[:2000],
            "ms": round(1e3 * (time.process_time() - begin_spent)),
            "wall_ms": round(1e3 * (time.monotonic() - begin)),
        }
        if bits is not None:
            entry["bits"] = bits
        done[task.name] = entry
        append(path, entry)
        if result != "right":
            print(f"{task.name}: {result}\n  {message[:1500]}", flush=True)
        if result == "crash" and _LOST_CONTEXT.search(message):
            raise SystemExit(LOST)
    return done


def left(tasks: Iterable[Task], done: dict[str, dict[str, Any]]) -> Iterator[Task]:
    """The programs that have not been run."""
    for task in tasks:
        if done.get(task.name, {}).get("outcome", "interrupted") == "interrupted":
            yield task


def append(path: pathlib.Path | None, entry: dict[str, Any]) -> None:
    """Adds a line to a file."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


# Reports ------------------------------------------------------------------------------------------


def report(done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What came of programs, as plain data: by outcome, by family, and by what bits are equal."""
    entries = [entry for entry in done.values() if entry["outcome"] != "interrupted"]
    families: dict[str, collections.Counter[str]] = {}
    for entry in entries:
        counts = families.setdefault(entry.get("family", "?"), collections.Counter())
        counts[entry["outcome"]] += 1
        if "bits" in entry:
            counts["bits equal" if entry["bits"] == "equal" else "bits differ"] += 1
    reasons: collections.Counter[str] = collections.Counter()
    for entry in entries:
        if entry["outcome"] == "refused":
            first = (entry["message"].splitlines() or ["?"])[0]
            reasons[re.sub(r"^\S+:\d+ \([^)]*\): ", "", re.sub(r"\d+", "N", first))] += 1
    return {
        "programs": len(entries),
        "outcomes": dict(collections.Counter(entry["outcome"] for entry in entries)),
        "families": {name: dict(families[name]) for name in sorted(families)},
        "bits": dict(collections.Counter(entry["bits"] for entry in entries if "bits" in entry)),
        "refused": dict(reasons.most_common()),
        "ms": sum(entry.get("ms", 0) for entry in entries) / max(1, len(entries)),
        "wall_ms": sum(entry.get("wall_ms", 0) for entry in entries) / max(1, len(entries)),
        "failures": [one for one in entries if one["outcome"] not in ("right", "refused")],
    }


def summary(done: dict[str, dict[str, Any]]) -> str:
    """How many programs had which outcome, and why some were refused."""
    made = report(done)
    counts = ", ".join(f"{made['outcomes'].get(one, 0)} {one}" for one in OUTCOMES)
    lines = [f"{made['programs']} programs: {counts}; {made['ms']:.0f} ms of the processor each"]
    if made["bits"]:
        equal, compared = made["bits"].get("equal", 0), sum(made["bits"].values())
        lines.append(f"of {compared} on both executors, {equal} equal bit by bit")
        others = sorted(made["bits"].items(), key=lambda one: -one[1])
        lines += [f"  differ {count}: {why}" for why, count in others if why != "equal"]
    lines += [f"  refused {count}: {reason}" for reason, count in made["refused"].items()]
    return "\n".join(lines)


def table(done: dict[str, dict[str, Any]]) -> str:
    """Programs by family and outcome, as Markdown."""
    made = report(done)
    bits = ("bits equal", "bits differ") if made["bits"] else ()
    columns = (*OUTCOMES, *bits)
    rows = [["family", "programs", *columns]]
    total: collections.Counter[str] = collections.Counter()
    for family, counts in made["families"].items():
        total.update(counts)
        rows.append([family, *_numbers(counts, columns)])
    rows.append(["all", *_numbers(total, columns)])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _numbers(counts: dict[str, int], columns: Iterable[str]) -> list[str]:
    programs = sum(counts.get(one, 0) for one in OUTCOMES)
    return [str(programs), *(str(counts.get(one, 0)) for one in columns)]


def is_bad(done: dict[str, dict[str, Any]]) -> bool:
    """Whether a program failed, or more than 2% were refused."""
    made = report(done)
    return bool(made["failures"]) or made["outcomes"].get("refused", 0) > 0.02 * made["programs"]


def main() -> None:
    """Prints the summary of files, or folders."""
    for name in sys.argv[1:]:
        done = read(pathlib.Path(name))
        print(f"{table(done)}\n\n{summary(done)}")


if __name__ == "__main__":
    main()
