"""Times of GEMMs: which records are whose, what is tuned, and a whole case on the CPU."""

import contextlib
from typing import Any

import gemm_configs
import gemm_times
import pytest
import timing
from gemm_times import Case, Contenders, Times

from pallasite_hopper.ops import MatmulConfig


class Timer:
    """Records what was called; a program's kernel takes as long as its name says."""

    def __init__(self) -> None:
        self.log: list[tuple[str, float]] = []

    def record(self, framework: Any, launch: Any) -> tuple[timing.Records, float]:
        """What the call added."""
        self.log.clear()
        launch()
        return list(self.log), 0.0

    def call(self, *kernels: tuple[str, float]) -> Any:
        """A program of these kernels."""
        return lambda: self.log.extend(kernels)


def test_each_time_belongs_to_its_program():
    """Also if a kernel has the name of the one between, and if a program has two."""
    timer = Timer()
    clear = timer.call(("reduce", 0.04))
    calls = {1: timer.call(("a", 0.002), ("reduce", 0.001)), 2: timer.call(("b", 0.005))}
    times, names = gemm_times.in_random_order(timer, [Contenders("jax", clear, calls)], 0)
    count = gemm_times.HALVES * gemm_times.CALLS
    assert times == {1: [3.0] * count, 2: [5.0] * count}
    assert names == {1: ["a", "reduce"], 2: ["b"]}


def test_frameworks_take_turns_and_make_equally_many_calls():
    """One with a single program repeats it, so that the GPU works as much for either."""
    timer = Timer()
    made: list[str] = []

    def call(name: str) -> Any:
        return lambda: (made.append(name), timer.log.append((name, 1.0)))

    clear = timer.call(("reduce", 0.04))
    ours = Contenders("jax", clear, {name: call(name) for name in "abc"})
    theirs = Contenders("torch", clear, {"torch": call("torch")})
    times, _ = gemm_times.in_random_order(timer, [ours, theirs], 0)
    half = 3 * gemm_times.CALLS
    turns = [
        {"torch" if name == "torch" else "ours" for name in made[i:][:half]}
        for i in range(0, len(made), half)
    ]
    assert turns == [{"ours"}, {"torch"}] * gemm_times.HALVES
    assert len(times["torch"]) == 3 * len(times["a"])


def test_lost_records_are_an_error():
    """A call that was not recorded cannot be told from others."""
    timer = Timer()
    with pytest.raises(timing.MeasurementError, match="had 0 kernels"):
        calls = {1: timer.call(("a", 1.0))}
        gemm_times.in_random_order(timer, [Contenders("jax", timer.call(), calls)], 0)


def test_tuned_times_are_not_those_that_chose():
    """Which configuration is the fastest says the first half, how fast it is the second."""
    ours = [[5.0, 5.0, 5.0, 5.0], [3.0, 3.0, 6.0, 6.0], [], [9.0, 9.0, 1.0, 1.0]]
    row = Times((1, 1, 1), "bf16", [4.0] * 4, [3.5] * 4, {"torch": ["t"]}, ours, [], [])
    assert (row.default, row.tuned, row.rival, row.rival_names) == (5.0, 6.0, 3.5, ["t"])


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_case_on_the_simulator(monkeypatch: pytest.MonkeyPatch, dtype: str):
    """Results are compared; each configuration has its times."""

    def once(timer: Any, contenders: list[Contenders], seed: int) -> Any:
        calls = {name: call for one in contenders for name, call in one.calls.items()}
        for call in calls.values():
            call()
        return {name: [1.0] * 4 for name in calls}, {name: ["kernel"] for name in calls}

    monkeypatch.setattr(gemm_times, "in_random_order", once)
    monkeypatch.setattr(gemm_times, "READ_BETWEEN", 64)
    monkeypatch.setattr(gemm_times.operands, "torch_is_there", lambda: False)
    small = MatmulConfig(tile_m=64, tile_n=64, tile_k=64, warpgroups=1, split="m")
    wrong = MatmulConfig(tile_m=64, tile_n=64, tile_k=8192, warpgroups=1, split="m")
    case = Case((64, 64, 128), dtype, (small, wrong))
    row = gemm_times.measure(case, contextlib.nullcontext())
    assert row.ours == [[1.0] * 4, []] and len(row.failed) == 1
    assert row.xla == [1.0] * 4 and row.rival_names == ["kernel"]


def test_listed_configurations_differ_in_kind():
    """Some of each way to divide the work that is not much slower by the estimate."""
    listed = gemm_configs.listed(Case((256, 1024, 8192), "bf16", ()).sizes, 20)
    assert len(listed) == len(set(listed)) <= 20
    assert {one.swap for one in listed} == {False, True}
    assert max(one.split_k for one in listed) > 1 and max(one.cluster for one in listed) > 1


def test_configurations_with_more_stages_are_measured_too():
    """Of each tile with and without columns that are written where the stages were."""
    sizes = Case((268, 1536, 7168), "bf16", ()).sizes
    listed = gemm_configs.listed(sizes, 24, stages=True)
    assert len(listed) == len(set(listed)) <= 24
    assert all(one.fits(2, 2) for one in listed)
    assert max(one.stages for one in listed) > 12
    assert {one.epilogue_in_stages for one in listed} == {False, True}


def test_fewer_stages_and_several_blocks_of_a_multiprocessor_are_measured_too():
    """Of few rows; without them none."""
    sizes = Case((3, 20480, 2048), "bf16", ()).sizes
    fewer = gemm_configs.listed(sizes, 12, fewer=True)
    assert len({one.stages for one in fewer}) > 3 and {one.resident for one in fewer} == {1}
    several = gemm_configs.listed(sizes, 16, resident=True)
    assert {one.resident for one in several} == {1, 2, 3} and len(several) <= 16
    assert all(one.fits(2, 2) for one in (*fewer, *several))
