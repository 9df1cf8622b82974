"""Calls that a process of tests makes need no memory of their own, however deep they are."""

from __future__ import annotations

import inspect
import sys

import pytest
from tests import python_processes

resource = pytest.importorskip("resource")

CALLS = 200


def _nothing(a=0, b=0, c=0, d=0):
    return a


def _faults_of_calls_at(depth):
    if depth:
        return _faults_of_calls_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        _nothing()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="counts page faults of Linux"
)


def test_no_depth_needs_memory_for_each_call():
    _faults_of_calls_at(300)
    # Something else of this process may have a fault at any time, but not at each call.
    assert max(map(_faults_of_calls_at, range(300))) < CALLS // 2


def test_nor_does_it_in_processes_that_tests_start():
    code = [
        f"import resource\nCALLS = {CALLS}",
        inspect.getsource(_nothing),
        inspect.getsource(_faults_of_calls_at),
        "_faults_of_calls_at(300)\nprint(max(map(_faults_of_calls_at, range(300))))",
    ]
    done = python_processes.run(["-c", "\n".join(code)], check=True)
    assert int(done.stdout) < CALLS // 2
