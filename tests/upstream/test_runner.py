"""The runner of upstream's test files, on a small file that is written here."""

from __future__ import annotations

import functools
import json
import pathlib

import jax_compiler
import own_failures
import pytest
import run_upstream_tests
import worker
from tests import python_processes

pytestmark = pytest.mark.runs_kernels

RUNNER = pathlib.Path(__file__).parent / "run_upstream_tests.py"

FILE = """
import os, threading
from absl.testing import absltest, parameterized
import jax, jax.numpy as jnp, numpy as np
from jax._src import test_util as jtu
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

@plgpu.a_name_of_the_future
def decorated(): ...

class KernelTest(parameterized.TestCase):
  LOWERING_SEMANTICS = plgpu.LoweringSemantics.Lane

  @parameterized.parameters(1.0, 2.0)
  def test_add(self, number):
    def body(x_ref, o_ref):
      o_ref[...] = x_ref[...] + number
    params = plgpu.CompilerParams(lowering_semantics=self.LOWERING_SEMANTICS)
    x = jnp.arange(128, dtype=jnp.float32)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    np.testing.assert_array_equal(
        plgpu.kernel(body, out_type=shape, compiler_params=params)(x), x + number)
    self.assertEqual(plgpu.__name__, "jax.experimental.pallas.mosaic_gpu")
    self.assertEqual(plgpu.kernel.__module__.partition(".")[0], "pallasite")
    self.assertIs(gpu_core.MemorySpace.GMEM, plgpu.GMEM)

  def test_code(self):
    def body(o_ref):
      o_ref[...] = jnp.zeros(128)
    shape = jax.ShapeDtypeStruct((128,), jnp.float32)
    with jtu.set_env(MOSAIC_GPU_DUMP_PTX="1"), jtu.capture_stdout() as text:
      plgpu.kernel(body, out_type=shape)()
    self.assertIn(".target sm_90a", text())

  def test_blackwell(self):
    if not jtu.is_cuda_compute_capability_at_least("10.0"):
      self.skipTest("needs sm100")

  def test_wrong(self):
    self.assertEqual(1, 2)

  def test_absent(self):
    plgpu.a_name_of_the_future(1)

  def test_slow(self):
    with open(__file__ + ".new", "w") as file:
      file.write(str(os.getpid()))
    os.rename(file.name, __file__ + ".hangs")
    threading.Event().wait()

  def test_crash(self):
    os._exit(3)

class KernelWGTest(KernelTest):
  LOWERING_SEMANTICS = plgpu.LoweringSemantics.Warpgroup
"""


def run(*arguments: object, code: int) -> str:
    """Runs the command and returns what it prints."""
    result = python_processes.run([RUNNER, *map(str, arguments)])
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


def test_runner(tmp_path, monkeypatch, capsys):
    """Outcomes, reasons, limits, JSON and the comparison of two runs."""
    path = tmp_path / "small_test.py"
    path.write_text(FILE)
    ours, hangs = tmp_path / "ours.json", tmp_path / "small_test.py.hangs"

    def answers(process, seconds):
        """As if a test that says that it hangs had done so for long, and no other for any time."""
        while not process._pipe.poll(0.05):
            if hangs.exists() and int(hangs.read_text()) == process._process.pid:
                return False
        return True

    monkeypatch.setattr(run_upstream_tests.Process, "_answers", answers)
    options = [path, "--semantics", "lane", "-n", 2, "--limit", 12, "--json", ours]
    assert run_upstream_tests.main([str(option) for option in options]) == 1
    text = capsys.readouterr().out
    outcomes = {o["test"]: o for o in json.loads(ours.read_text())["outcomes"]}
    found = {
        name.removeprefix("KernelTest.test_"): (o["outcome"], o["reason"])
        for name, o in outcomes.items()
    }
    assert found == {
        "add0": ("pass", ""),
        "add1": ("pass", ""),
        "code": ("pass", ""),
        "blackwell": ("skip", "needs sm100"),
        "wrong": ("fail", "AssertionError: 1 != 2"),
        "absent": (
            "fail",
            "NotImplementedError: pallasite.gpu has no name 'a_name_of_the_future'",
        ),
        "slow": ("fail", "TimeLimit: more than 12 s"),
        "crash": ("fail", "Crash: the process ended with 3"),
    }
    assert "3 pass, 4 fail, 1 skip" in text
    assert "    1  TimeLimit: more than N s\n         KernelTest.test_slow\n" in text

    record = json.loads(ours.read_text())
    for outcome in record["outcomes"]:
        if outcome["test"] == "KernelTest.test_wrong":
            outcome["outcome"] = "pass"
    theirs = tmp_path / "theirs.json"
    theirs.write_text(json.dumps(record))
    text = run("--json", ours, "--compare", theirs, code=1)
    assert text.splitlines() == [
        "8 tests are in both runs; both pass: 3; only this run passes: 0; only the other passes: 1",
        "    1  fail: AssertionError: N != N",
        "         KernelTest.test_wrong",
    ]


def test_patterns_and_semantics(tmp_path):
    """Only what is asked for runs; the other semantics too."""
    path = tmp_path / "small_test.py"
    path.write_text(FILE)
    text = run(path, "-k", "test_(blackwell|code)$", code=0)
    assert "2 pass" in text and "2 skip" in text
    assert "KernelWGTest.test_blackwell" in text


def test_a_file_that_cannot_be_loaded(tmp_path):
    """The error names the file and says why."""
    path = tmp_path / "broken_test.py"
    path.write_text("import a_module_that_is_not_there\n")
    result = python_processes.run([RUNNER, path])
    assert result.returncode == 1
    assert "broken_test.py cannot be loaded" in result.stderr
    assert "No module named 'a_module_that_is_not_there'" in result.stderr


def test_variants_are_distributed_evenly():
    """Numbers at the end of names are variants; the order is that of the file."""
    names = [f"T.test_a{number}" for number in range(12)] + ["T.test_b", "T.test_c1"]
    assert run_upstream_tests.some_variants(names, 3) == [
        "T.test_a0", "T.test_a4", "T.test_a8", "T.test_b", "T.test_c1",
    ]  # fmt: skip


def test_failures_that_are_their_own():
    """By the name of the test and what it says; others are failures."""
    own = own_failures.failure("C.test_cond", "JaxRuntimeError: CpuCallback error calling callback")
    assert own == "prints with a format that CUDA does not know"
    assert own_failures.failure("C.test_a", "JaxRuntimeError: CpuCallback error calling") is None
    found = "missing fence.proxy.async in shared memory (3 times):"
    assert own_failures.finding("C.test_get_swap_with_transforms1", found) is not None
    assert own_failures.finding("C.test_matmul", found) is None


def test_what_the_sanitizer_finds_here():
    """Each finding is judged, wherever the sanitizer's error is in the text."""
    text = (
        "INTERNAL: callback failed: the sanitizer found 2 errors in kernel 'k':\n"
        "  1. missing fence.proxy.async in shared memory (2 times):\n       at a.py:10. 11\n"
        "  2. output never written:\n       output 0"
    )
    kinds = [one.splitlines()[0] for one in own_failures.findings(text)]
    assert kinds == [
        "missing fence.proxy.async in shared memory (2 times):", "output never written:"
    ]  # fmt: skip
    assert own_failures.findings("ValueError: 1. no 2. yes") == []
    judge = functools.partial(own_failures.finding, ours=True)
    assert judge("C.test_warp_specialized_tmem_slice", kinds[0]) is not None
    assert judge("C.test_warp_specialized_tmem_slice", kinds[1]) is None
    assert judge("C.test_matmul", kinds[0]) is None
    loaded = "read of uninitialized shared memory:\n  in: ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    assert judge("C.test_matmul", loaded) is None
    assert own_failures.finding("C.test_matmul", loaded) is not None


OWN = """
from absl.testing import absltest
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

class KernelTest(absltest.TestCase):
  def run_kernel(self, expected, **options):
    def body(o_ref, unwritten_ref):
      o_ref[...] = jnp.full(4096, 1.0)
    shapes = (jax.ShapeDtypeStruct((4096,), jnp.float32),) * 2
    found = plgpu.kernel(body, out_type=shapes, **options)()[0]
    np.testing.assert_array_equal(found, expected)

  def test_print_layout_tmem_with_transforms(self):
    self.run_kernel(1.0, interpret=plgpu.InterpretGPUParams(detect_races=True))

  def test_print_layout_tmem_with_transforms_wrong(self):
    self.run_kernel(2.0)

  def test_other(self):
    self.run_kernel(1.0)
"""


def test_findings_do_not_hide_results(tmp_path):
    """A test whose kernel has findings of its own must pass without the sanitizer; text that is
    replaced makes it smaller."""
    path = tmp_path / "own_test.py"
    path.write_text(OWN)
    ours = tmp_path / "ours.json"
    text = run(path, "--sanitize", "--replace", "4096=>128", "--json", ours, code=1)
    assert "0 pass, 2 fail, 0 skip, 1 own" in text
    outcomes = json.loads(ours.read_text())["outcomes"]
    found = {one["test"].partition("test_")[2]: one for one in outcomes}
    assert found["print_layout_tmem_with_transforms"]["reason"] == "the output is never written"
    wrong = found["print_layout_tmem_with_transforms_wrong"]
    assert wrong["reason"] == "AssertionError: Arrays are not equal"
    assert found["other"]["reason"] == "SanitizerError: output never written"
    assert "float32[128]" in found["other"]["text"]


def test_what_another_target_lacks():
    """Only what passes for the first target."""
    found = {
        "a": ("pass", "fail"),
        "b": ("pass", "pass"),
        "c": ("fail", "fail"),
        "d": ("pass", "skip"),
    }
    first, other = (
        [worker.Outcome(name, pair[target], "", 0.0) for name, pair in found.items()]
        for target in (0, 1)
    )
    text = run_upstream_tests.worse_than("sm_90a", first, other)
    assert text == "    1  fail that pass for sm_90a\n         a"


def test_what_is_printed_is_taken_apart():
    """PTX is between what the host and the assembler say."""
    ptx = "//\n// Generated by LLVM NVPTX Back-End\n//\n.version 8.7\n.target sm_100a\n"
    for behind in ("; ModuleID = 'x'\n", "\t.target\tsm_100a\n", "//---------- .text\n", ""):
        assert jax_compiler._split("before\n" + ptx + behind) == ("before\n", ptx, behind)


def test_no_test_is_begun_when_time_is_over(tmp_path):
    """What has not run has no outcome."""
    path = tmp_path / "small_test.py"
    path.write_text(FILE)
    ours = tmp_path / "ours.json"
    text = run(path, "-k", "test_code$", "--seconds", 0, "--json", ours, code=0)
    assert "0 pass, 0 fail, 0 skip" in text
    assert json.loads(ours.read_text())["outcomes"] == []
