"""Cases that several processes prepare, and measure one at a time."""

import functools
import pathlib
import threading
import time

import pytest
import side_by_side


def prepare(number: int):
    if number == 2:
        raise ValueError("not prepared")
    return functools.partial(measure, number, time.monotonic())


def measure(number: int, prepared: float) -> tuple[float, float, float]:
    begin = time.monotonic()
    if number == 3:
        raise ValueError("not measured")
    time.sleep(0.02)
    return prepared, begin, time.monotonic()


@pytest.mark.parametrize("hold", [False, True])
def test_cases_are_measured_one_at_a_time(tmp_path: pathlib.Path, hold: bool):
    gate = tmp_path / "go"
    opened = []

    def open_gate() -> None:
        opened.append(time.monotonic())
        gate.touch()

    timer = threading.Timer(1.5, open_gate)
    timer.start()
    outcomes = dict(side_by_side.prepared(prepare, range(6), 2, None, gate if hold else None))
    timer.cancel()
    assert sorted(outcomes) == list(range(6))
    assert "not prepared" in str(outcomes.pop(2)) and "not measured" in str(outcomes.pop(3))
    spans = sorted((begin, end) for _, begin, end in outcomes.values())
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
    if hold:
        assert spans[0][0] >= opened[0]


def test_no_case_begins_after_the_time():
    assert list(side_by_side.prepared(prepare, range(6), 1, 0.0)) == []
