"""Comparisons of several GPUs run in processes of their own, of which one may fail."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks import multigpu, multigpu_torch

DIES = """
import os, sys
print("E1123 01:24:01 allocator.cc:367] CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access",
      file=sys.stderr, flush=True)
print("last words", file=sys.stderr, flush=True)
os.abort()
"""

TELLS_AND_DIES = """
import json, os, sys
arguments = sys.argv[1:]
row = {"case": arguments[arguments.index("--case") + 1], "microseconds": {"nccl": 1.0}}
with open(arguments[-1], "w") as file:
    json.dump({"device": "some", "rows": [row]}, file)
os.abort()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Lets the benchmark start another program in place of itself."""

    def write(text: str) -> None:
        (tmp_path / "script.py").write_text(text)
        monkeypatch.setattr(multigpu, "__file__", str(tmp_path / "script.py"))

    return write


def test_a_process_that_dies_says_why(script):
    script(DIES)
    found, about = multigpu.measure_apart("any", [], 60)
    assert found["process"].startswith("ended with -6: ")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in found["process"] and not about


def test_numbers_of_a_process_that_dies_at_its_end(script):
    script(TELLS_AND_DIES)
    assert multigpu.measure_apart("any", [], 60) == ({"nccl": 1.0}, {"device": "some"})


def test_a_process_that_hangs_is_ended(script):
    script("import time; time.sleep(60)")
    assert multigpu.measure_apart("any", [], 0.5) == ({"process": "took more than 0.5 s"}, {})


def test_all_comparisons_run_though_some_die(script, monkeypatch, tmp_path, capsys):
    script(DIES)
    file = tmp_path / "all.json"
    options = ["--json", str(file), "--only", "all_reduce", "--no-torch"]
    monkeypatch.setattr(sys, "argv", ["multigpu.py", *options])
    multigpu.main()
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 10 and all("ILLEGAL" in one["microseconds"]["process"] for one in rows)
    assert capsys.readouterr().out.count("process: ended with -6") == 10


def test_a_rival_that_fails_while_it_is_timed(monkeypatch):
    def program(function, operands, mesh):
        calls = []

        def run(x):
            calls.append(None)
            if function is bad or len(calls) > 1 and function in loops:
                raise RuntimeError("no more")
            return x

        return run

    def good(x):
        return x

    def bad(x):
        return x

    loops = []

    def loop(rival, case, unroll):
        def one(x):
            return x

        if rival is late:
            loops.append(one)
        return one

    def late(x):
        return x

    monkeypatch.setattr(multigpu, "_program", program)
    monkeypatch.setattr(multigpu, "_loop", loop)

    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    rivals = {"nccl": good, "upstream": bad, "pallasite": late}
    case = multigpu.Case("some", ((8,),), jnp.float32, rivals, multigpu._result, 1)
    found = multigpu.measure(case, mesh, 3)
    assert isinstance(found["nccl"], float)
    assert found["upstream"] == found["pallasite"] == "RuntimeError: no more"


def test_the_error_among_messages():
    text = "W0000 slow\nTraceback (most recent call last):\njax.errors.JaxRuntimeError: 7\nend"
    assert multigpu.first_error(text) == "jax.errors.JaxRuntimeError: 7"
    assert multigpu.first_error("a\nb") == "b" and multigpu.first_error("") == "no message"


def test_the_kernel_that_takes_most():
    records = [("copy", 0.002), ("sum", 0.005), ("copy", 0.002), ("sum", 0.007), ("copy", 0.002)]
    assert multigpu.longest_kernel([*records, ("sum", 0.006)]) == pytest.approx(6.0)
    assert multigpu.longest_kernel([]) is None


def test_processes_of_pytorch_that_die_say_why(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("raise SystemExit('no such thing as a GPU')")
    monkeypatch.setattr(multigpu_torch, "__file__", str(tmp_path / "script.py"))
    found = multigpu_torch.run_all(2, 1, "", 60)
    assert found == {"rows": {}, "failed": "process 0 ended with 1: no such thing as a GPU"}
    assert "no such thing" in multigpu.torch_lines(found)[-1]


def test_rows_of_pytorch():
    row = {"microseconds": 12.0, "kernel": None, "way": "CUDA graph"}
    rows = {"all_reduce 16 KiB": {"one_shot_all_reduce": row, "two_shot_all_reduce_": "no way"}}
    _, first, second = multigpu.torch_lines({"rows": rows})
    assert first.split()[-5:] == ["one_shot_all_reduce", "12.0", "-", "CUDA", "graph"]
    assert second.endswith("two_shot_all_reduce_               no way")
