"""What the checks of copies and barriers say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallasite.plugin import InvalidValueError, SourceLocation
from pallasite_std.checks.order import Problem
from pallasite_std.checks.traces import Event


def error_of(problem: Problem) -> InvalidValueError:
    """The error that reports a problem, at the user's line."""
    message, fields = _MESSAGES[problem.kind, problem.what](problem)
    return InvalidValueError(message, location=problem.event.location, **fields)


def _place(event: Event | None) -> str:
    location: SourceLocation | None = None if event is None else event.location
    return "" if location is None else f" at {location}"


type _Message = tuple[str, dict[str, Any]]


def _bytes(problem: Problem) -> _Message:
    expected, delivered = problem.detail
    relation = "more" if delivered > expected else "fewer"
    return (
        f"the copies of one phase bring {relation} bytes than barrier_expect announces",
        {
            "got": f"{expected} bytes announced, {delivered} bytes copied"
            + (f", the last of them{_place(problem.other)}" if relation == "more" else "")
            + (f"; the wait{_place(problem.other)} never ends" if relation == "fewer" else ""),
            "expected": "all destinations of copies with arrive=False until the wait, each once",
        },
    )


def _unannounced(problem: Problem) -> _Message:
    return (
        "a copy with arrive=False brings bytes that nothing announces",
        {
            "got": f"{problem.detail[1]} bytes copied",
            "expected": "plgpu.barrier_expect(barrier, destination) before the copy",
            "hint": "leave arrive=False out: then the copy announces its own bytes",
        },
    )


def _never(problem: Problem) -> _Message:
    phase, needed, came = problem.detail
    ordinal = {1: "first", 2: "second", 3: "third"}.get(phase, f"{phase}th")
    at = problem.event.barrier
    assert at is not None
    return (
        f"this wait never ends: the {ordinal} phase of {at} completes with arrival {needed}, but"
        f" only {came} can come before",
        {
            "got": f"num_arrivals={at.dtype.num_arrivals}",
            "expected": "num_arrivals copies or arrivals for each wait, before it",
        },
    )


def _unfenced(problem: Problem) -> _Message:
    return (
        "a copy reads shared memory that was stored without plgpu.commit_smem()",
        {
            "got": f"the store{_place(problem.other)}",
            "expected": "plgpu.commit_smem() between the store and the copy",
        },
    )


def _never_waited_in(problem: Problem) -> _Message:
    return (
        "nothing waits for this copy to shared memory",
        {
            "got": "the kernel ends while the copy may still write",
            "expected": "plgpu.barrier_wait on its barrier, by some thread, for each phase",
        },
    )


def _never_waited_out(problem: Problem) -> _Message:
    return (
        "nothing waits for this copy to global memory",
        {
            "got": "the kernel ends while the copy may still read shared memory",
            "expected": "plgpu.wait_smem_to_gmem(0) by the thread that started it",
        },
    )


def _open(problem: Problem) -> _Message:
    return (
        "the group of this copy to global memory is never closed, so no wait is for it",
        {
            "got": "commit_group=False",
            "expected": "plgpu.commit_smem_to_gmem_group() after the last copy of the group, and"
            " plgpu.wait_smem_to_gmem(0)",
        },
    )


def _stages(problem: Problem) -> _Message:
    stages, steps = problem.detail
    return (
        f"this pipeline has {stages} stages, of which {steps} are used",
        {
            "got": f"an array of {stages} barriers, and copies that complete on {steps} of them",
            "expected": "no more stages than steps: the others' shared memory is wasted",
            "hint": f"num_barriers={steps}, and as many slots",
        },
    )


def _in_flight(done: str) -> Callable[[Problem], _Message]:
    def message(problem: Problem) -> _Message:
        return (
            f"shared memory is {done} while a copy from global memory may still write it",
            {
                "got": f"the copy{_place(problem.other)}",
                "expected": "plgpu.barrier_wait on the copy's barrier in between, by this thread or"
                " by one that this thread then waits for",
            },
        )

    return message


def _while_stored(problem: Problem) -> _Message:
    return (
        "shared memory is written while a copy to global memory may still read it",
        {
            "got": f"the copy{_place(problem.other)}",
            "expected": "plgpu.wait_smem_to_gmem in between (wait_read_only=True is enough), by the"
            " thread that started the copy",
        },
    )


def _while_used(done: str) -> Callable[[Problem], _Message]:
    def message(problem: Problem) -> _Message:
        return (
            f"a copy writes shared memory that another thread may still {done}",
            {
                "got": f"the access{_place(problem.other)}",
                "expected": "plgpu.barrier_arrive by that thread after its access, and a wait for"
                " it before the copy",
            },
        )

    return message


_MESSAGES: dict[tuple[str, str], Callable[[Problem], _Message]] = {
    ("transfers", "more"): _bytes,
    ("transfers", "fewer"): _bytes,
    ("transfers", "none"): _unannounced,
    ("arrivals", "never"): _never,
    ("copies", "fence"): _unfenced,
    ("copies", "in"): _never_waited_in,
    ("copies", "out"): _never_waited_out,
    ("copies", "open"): _open,
    ("stages", "more"): _stages,
    ("reuse", "read"): _in_flight("read"),
    ("reuse", "written"): _in_flight("written"),
    ("reuse", "copied over"): _in_flight("copied over"),
    ("reuse", "while stored"): _while_stored,
    ("reuse", "while read"): _while_used("read"),
    ("reuse", "while written"): _while_used("write"),
}
