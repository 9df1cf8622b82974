"""Timing: what CUPTI recorded becomes the time of each call, whatever fills the queue before."""

import random

import jax
import jax.numpy as jnp
import pytest
import timing


class Recorder:
    """Stands for JAX's extension: has the kernels that were run since the recording began.

    Some versions drop records unless CUPTI is detached after each recording.
    """

    def __init__(self, needs_detaching: bool = False):
        self.needs_detaching = needs_detaching
        self.records: list[tuple[str, float]] = []
        self.detached = [True]
        self.active = False
        self.seconds = 0.0

    def _cupti_init(self) -> None:
        assert not self.active
        self.active = True
        self.records = []

    def _cupti_get_timings(self, finalize: bool) -> list[tuple[str, float]]:
        assert self.active
        self.active = False
        lost = self.needs_detaching and not self.detached[-1]
        self.detached.append(finalize)
        return [] if lost else self.records

    def run(self, *kernels: tuple[str, float]) -> None:
        if self.active:
            self.records += kernels
            self.seconds += sum(milliseconds for _, milliseconds in kernels) * 1e-3


class FakeFramework:
    """Runs kernels on a recorder; its filler is two kernels of 0.5 ms each."""

    name = "fake"

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def wait(self, results) -> None:
        self.recorder.seconds += 125e-6

    def fill(self, repeats: int) -> None:
        for _ in range(repeats):
            self.recorder.run(("split", 0.5), ("gemm", 0.5))

    def poison(self, results) -> None:
        pass

    def check(self) -> None:
        pass


def test_time_of_a_call_is_the_sum_of_its_kernels_without_the_filler():
    recorder = Recorder()
    timer, framework = timing.CuptiTimer(recorder), FakeFramework(recorder)

    def call(size):
        recorder.run(("gemm", size), ("add", 0.25))

    batch = timer.batch(framework, call, [(1.0,), (2.0,)], 5)
    assert batch.kernels == [1.25, 2.25, 1.25, 2.25, 1.25]
    filler = timer.filler(framework)
    assert filler.repeats == timing.FILLER_MILLISECONDS
    assert filler.names == ["split", "gemm"] * 4


def test_elapsed_time_has_what_is_between_kernels_but_not_the_filler():
    recorder = Recorder()
    timer = timing.CuptiTimer(recorder, clock=lambda: recorder.seconds)
    framework = FakeFramework(recorder)

    def call():
        recorder.seconds += 1e-3  # memory is filled with zeros
        recorder.run(("k", 2.0))

    batch = timer.batch(framework, call, [()], 3)
    assert batch.kernels == [2.0, 2.0, 2.0]
    assert batch.elapsed == pytest.approx(3.0)
    assert timer.filler(framework).latency == pytest.approx(0.125)


@pytest.mark.parametrize("needs_detaching", [False, True])
def test_stays_attached_only_where_that_records_the_same(needs_detaching: bool):
    recorder = Recorder(needs_detaching)
    timer, framework = timing.CuptiTimer(recorder), FakeFramework(recorder)
    timer.stay_attached(framework)
    times = timer.batch(framework, lambda: recorder.run(("k", 1.0)), [()], 4).kernels
    assert times == [1.0] * 4
    assert recorder.detached[-1] == needs_detaching


def test_a_batch_whose_records_got_lost_is_run_again():
    recorder = Recorder()
    timer, framework = timing.CuptiTimer(recorder), FakeFramework(recorder)
    timer.filler(framework)
    recorder.needs_detaching, recorder.detached = True, [False]
    times = timer.batch(framework, lambda: recorder.run(("k", 1.0)), [()], 2).kernels
    assert times == [1.0, 1.0]
    with pytest.raises(timing.MeasurementError, match="no kernel was recorded in 2 calls"):
        timer.batch(framework, lambda: None, [()], 2)


def test_recording_ends_when_a_call_raises():
    recorder = Recorder()
    timer, framework = timing.CuptiTimer(recorder), FakeFramework(recorder)

    def call():
        raise RuntimeError("launch failed")

    with pytest.raises(RuntimeError, match="launch failed"):
        timer.batch(framework, call, [()], 2)
    assert not recorder.active
    assert timer.batch(framework, lambda: recorder.run(("k", 3.0)), [()], 2).kernels == [3.0, 3.0]


def test_filler_is_found_wherever_its_records_are():
    records = [("k", 1.0), ("gemm", 9.0), ("k", 2.0), ("gemm", 8.0), ("gemm", 0.5)]
    assert timing.without_filler(records, ["gemm", "gemm"]) == [
        ("k", 1.0),
        ("k", 2.0),
        ("gemm", 0.5),
    ]
    with pytest.raises(timing.MeasurementError, match="1 kernels of the filler.* 5 recorded"):
        timing.without_filler(records, ["gemm", "split"])


def test_calls_that_cannot_be_told_apart_share_their_mean():
    uneven = [("a", 1.0), ("a", 2.0), ("b", 3.0)]
    assert timing.milliseconds_per_call(uneven, 2) == [3.0]
    different = [("a", 1.0), ("b", 2.0), ("a", 3.0), ("c", 4.0)]
    assert timing.milliseconds_per_call(different, 2) == [5.0]
    with pytest.raises(timing.MeasurementError, match="no kernel was recorded in 3 calls"):
        timing.milliseconds_per_call([], 3)


def test_clock_times_batches_of_jax_calls():
    framework = timing.FRAMEWORKS["jax"]
    x = jnp.ones((16, 16))
    seen = []

    def call(y):
        seen.append(y)
        return x @ x

    batch = timing.ClockTimer().batch(framework, call, [(1,), (2,), (3,)], 7)
    assert batch.elapsed > 0
    assert batch.kernels == [batch.elapsed]
    assert seen == [1, 2, 3, 1, 2, 3, 1]
    framework.poison((x, {"count": jnp.arange(3)}))
    framework.check()
    assert jax.numpy.isfinite(x).all()


def test_timer_without_a_gpu():
    assert isinstance(timing.make_timer("clock"), timing.ClockTimer)
    if jax.default_backend() != "gpu":
        assert isinstance(timing.make_timer("auto"), timing.ClockTimer)
        assert timing.reference_options() == {}


@pytest.mark.parametrize("in_order", [True, False], ids=["in order", "mixed up"])
def test_contenders_have_turns_in_random_order(monkeypatch: pytest.MonkeyPatch, in_order: bool):
    recorder = Recorder()
    timer = timing.CuptiTimer(recorder, clock=lambda: recorder.seconds)
    mark = (lambda: recorder.run(("mark", 0.1))), "mark"
    monkeypatch.setattr(timing, "_marker", lambda timer: mark)
    monkeypatch.setitem(timing.FRAMEWORKS, "jax", FakeFramework(recorder))
    ran: list[str] = []

    def call(name: str, kernels: int) -> None:
        ran.append(name)
        first = 5.0 if len(ran) < 2 or ran[-2] != name else 1.0
        for _ in range(kernels):
            recorder.run((name, first))
        if not in_order and len(ran) == 3:
            recorder.records.insert(0, recorder.records.pop())

    calls = {
        name: (FakeFramework(recorder), lambda name=name, kernels=kernels: call(name, kernels))
        for name, kernels in (("one", 1), ("two", 2), ("three", 3))
    }
    kernels: dict[str, timing.Records] = {}
    times = timing.interleaved(timer, calls, 4, random.Random(1), kernels_of=kernels)
    # The first call of a turn does not count.
    assert times == {"one": 1.0, "two": 2.0, "three": 3.0}
    assert kernels == {name: [(name, 1.0)] * int(times[name]) for name in calls}
    turns = [name for name, before in zip(ran, ["", *ran], strict=False) if name != before]
    assert sorted(turns[:3]) == sorted(calls) and len(ran) >= 18
