"""The comparison of compile times with another checkout."""

from __future__ import annotations

import importlib.metadata
import resource
import subprocess
import sys
import time

import compile_against as against
import pytest


def test_a_folder_without_a_checkout(tmp_path):
    with pytest.raises(SystemExit, match="there is no framework/pallasite"):
        against.compare(tmp_path, [], lambda name: True, 1)


def test_metadata_name_the_plugins_of_a_checkout(tmp_path):
    against._describe(against.ROOT, tmp_path)
    found = {one.name: one for one in importlib.metadata.distributions(path=[str(tmp_path)])}
    assert {"pallasite", "pallasite-hopper", "pallasite-simulator"} <= found.keys()
    (point,) = found["pallasite-hopper"].entry_points.select(group="pallasite.plugins")
    assert (point.name, point.value) == ("hopper", "pallasite_hopper.plugin")
    assert any(need.startswith("jax") for need in found["pallasite"].requires or ())


def test_a_checkout_against_itself():
    (row,) = against.compare(against.ROOT, [], lambda name: name == "rms_norm", 1)
    assert row.note == "" and row.ratio > 0 and row.theirs_ms > 1 and row.ours_ms > 1


def test_processor_time_has_that_of_other_processes():
    start = against.processor_time()
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time()
    assert start < against.processor_time()
    assert against.processor_time() >= own + children.ru_utime
