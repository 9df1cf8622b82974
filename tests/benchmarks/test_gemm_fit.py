"""The fit of the estimate of GEMMs: what it reads, and that it follows the times."""

import dataclasses
import json

import gemm_fit
import gemm_times
import numpy as np

from pallasite_hopper.ops.dense import choice
from pallasite_hopper.ops.dense.cost import H200, H200_CHOICE, Sizes, nanoseconds
from pallasite_hopper.ops.dense.one_round import one_round_config


def test_configurations_come_back():
    """As they were written; those of what was measured are valid."""
    for shape in ((2048, 1024, 4096), (3, 8192, 4096)):
        for config in choice.matmul_configs(*shape, "bfloat16"):
            assert gemm_fit.config_of(gemm_times.described(config)) == config
    for path, _ in gemm_fit.CHIPS.values():
        rows = gemm_fit.read(path)
        assert len(rows) > 100 and all(config.fits(1, 2) for row in rows for config, _ in row.ours)


def test_rates_of_each_chip_choose_best_there():
    """Those of an H100 choose configurations that take less time on one than those of an H200,
    where an estimate chooses."""
    rows = [
        gemm_fit._of_candidates(row)
        for row in gemm_fit.read(gemm_fit.MEASURED_H100)
        if len(row.ours) > 3 and one_round_config(row.sizes, "H100") is None
    ]
    rows = [row for row in rows if len(row.ours) > 3]
    lost = {
        chip: np.mean(
            [
                min(row.ours, key=lambda one: choice._rank(row.sizes, one[0], chip))[1]
                / min(time for _, time in row.ours)
                for row in rows
            ]
        )
        for chip in gemm_fit.CHIPS
    }
    assert len(rows) > 200 and lost["H100"] < lost["H200"] - 0.003


def test_rows_of_measured_configurations(tmp_path):
    """Medians; what is chosen without options and what failed have no configuration's time."""
    row = {
        "shape": [8, 16, 32], "dtype": "bf16", "xla": [3.0, 2.0, 4.0], "torch": [],
        "configurations": [{}, {"tile_n": 128}, {"tile_n": 64}], "ours": [[9.0], [5.0, 7.0], []],
    }  # fmt: skip
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [row]}))
    (found,) = gemm_fit.read(path)
    assert found.rival == 3.0 and [time for _, time in found.ours] == [6.0]
    assert found.sizes == Sizes(8, 16, 32, 2, 2)


def test_fit_follows_the_times():
    """Times of another memory lead to its rate."""
    slow = dataclasses.replace(H200, memory=H200.memory / 2)
    rows = []
    for shape in ((8, 16384, 8192), (16, 32768, 4096), (4096, 4096, 4096)):
        sizes = Sizes(*shape, 2, 2)
        ours = [
            (config, nanoseconds(config, sizes, slow) / 1e3)
            for config in choice._by_estimate(sizes, "H200")[:6]
        ]
        rows.append(gemm_fit.Row(sizes, 1.0, ours))
    fitted = gemm_fit.fit(rows, stay=0.01)
    before, after = (np.abs(gemm_fit.errors(rows, rates)).mean() for rates in (H200, fitted))
    assert after < before / 4 and fitted.memory < 0.7 * H200.memory


def test_descent_finds_rates_that_choose_better():
    """Of kernels whose times other rates give, it chooses faster ones than before."""
    slow = dataclasses.replace(H200_CHOICE, turn=3000.0, turn_cluster=2000.0)
    rows = []
    for shape in ((100, 6144, 4096), (130, 8192, 8192), (220, 4096, 14336), (600, 1280, 5120)):
        sizes = Sizes(*shape, 2, 2)
        listed = choice._by_estimate(sizes, "H200")[:40:4]
        ours = [(config, nanoseconds(config, sizes, slow) / 1e3) for config in listed]
        rows.append(gemm_fit.Row(sizes, min(time for _, time in ours), ours))
    found = gemm_fit.descend(rows, 2)
    before, after = (gemm_fit.choice_loss(rows, rates) for rates in (H200_CHOICE, found))
    assert after < 0.8 * before
