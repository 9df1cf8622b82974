"""Measures which configurations of GEMM are the fastest, and writes the table that comes with it.

Shapes are the projections of the models in ``gemm_shapes.py`` with numbers of rows that are powers
of two, in an order drawn by ``--seed``, as many as the seconds suffice for. The best ``--best`` by
the library's estimate are measured for each. What the table had for other shapes stays.

    python benchmarks/winners.py --seed 1001 --seconds 120
    python benchmarks/winners.py --seconds 0   # what the table has
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import pathlib
import random
import sys
import time
from typing import Any

import gemm_shapes
import harness
import jax
import jax.numpy as jnp

import pallasite
from pallasite_hopper.ops import matmul
from pallasite_hopper.ops.dense.run import WINNERS
from pallasite_std.tuning import winners
from pallasite_std.tuning.encoding import encode
from pallasite_std.tuning.inputs import input_sets
from pallasite_std.tuning.search import fastest
from pallasite_std.tuning.timing import measure_on_gpu
from pallasite_std.tuning.trials import prepare

DEVICES = ["NVIDIA H100", "NVIDIA H200"]
ROWS = [2**n for n in range(15)]
MOST_FLOPS = 2e12
GAIN = 0.02
"""A configuration that is not faster than the default by more than this part is not kept."""


def shapes(seed: int) -> list[tuple[int, int, int]]:
    """All (m, n, k), shuffled."""
    projections = {one for model in gemm_shapes.MODELS.values() for one in model.projections()}
    found = [
        (m, n, k)
        for m, (n, k) in itertools.product(ROWS, sorted(projections))
        if 2 * m * n * k <= MOST_FLOPS
    ]
    random.Random(seed).shuffle(found)
    return found


def measured(shape: tuple[int, int, int], dtype: Any, best: int) -> dict[str, Any] | None:
    """The entry of a shape; None if the default is as fast as any."""
    m, n, k = shape
    a, b = (jax.ShapeDtypeStruct(one, dtype) for one in ((m, k), (k, n)))
    (question,) = winners.questions(matmul, a, b)
    listed = list(dict.fromkeys([question.default, *question.listed.values()]))[:best]
    trials, _ = prepare(question.run, listed, input_sets(question.args, None))
    winner, seconds = fastest(trials, measure_on_gpu)
    (default,) = (one for one in trials if one.configuration == question.default)
    times = {name: seconds[one.number] for name, one in (("best", winner), ("default", default))}
    if times["best"] * (1 + GAIN) > times["default"]:
        return None
    return {
        **question.place(),
        "best": encode(winner.configuration),
        "microseconds": round(times["best"] * 1e6, 2),
        "microseconds_of_default": round(times["default"] * 1e6, 2),
    }


def written(table: pathlib.Path, found: list[dict[str, Any]], tried: int) -> dict[str, Any]:
    """The table with what was found, which replaces what it had for the same arguments."""
    content: dict[str, Any] = {"devices": DEVICES, "measured": [], "winners": []}
    if table.exists():
        content = json.loads(table.read_text())

    def place(one: dict[str, Any]) -> str:
        return json.dumps([one[name] for name in ("operation", "arguments", "key")])

    entries = {place(one): one for one in [*content["winners"], *found]}
    content["winners"] = [entries[name] for name in sorted(entries)]
    today = datetime.date.today().isoformat()
    where = {name: one for name, one in harness.machine().items() if name != "commit"}
    content["measured"].append({**where, "date": today, "shapes": tried})
    lines = ",\n".join("  " + json.dumps(one) for one in content["winners"])
    rest = {name: one for name, one in content.items() if name != "winners"}
    table.write_text(json.dumps(rest)[:-1] + ', "winners": [\n' + lines + "\n]}\n")
    return content


def main() -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--best", type=int, default=6, help="configurations of each shape")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--table", type=pathlib.Path, default=WINNERS)
    arguments = parser.parse_args()
    begin, found, tried = time.monotonic(), [], 0
    with pallasite.config.scoped(cache=False):
        for shape in shapes(arguments.seed):
            if time.monotonic() - begin > arguments.seconds:
                break
            tried += 1
            one = measured(shape, jnp.dtype(arguments.dtype), arguments.best)
            if one is not None:
                print(shape, one["microseconds_of_default"], "->", one["microseconds"], flush=True)
                found.append(one)
    if tried:
        written(arguments.table, found, tried)
    if arguments.table.exists():
        entries = json.loads(arguments.table.read_text())["winners"]
        gains = [one["microseconds_of_default"] / one["microseconds"] for one in entries]
        mean = harness.geometric_mean(gains)
        print(f"{tried} shapes tried; the table has {len(entries)}, over the default {mean}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
