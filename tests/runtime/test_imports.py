"""What a process imports for a kernel that is in the cache on disk: little."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
import pallasite
from pallasite import gpu as plgpu
from pallasite.runtime import cache_info

@plgpu.kernel(out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2.0

pallasite.compile_all(double, jax.ShapeDtypeStruct((128,), jnp.float32), target="sm_90a")
found = [name for name in sys.modules if name.startswith("pallasite")]
print(json.dumps([cache_info().disk_hits, found]))
"""

FOLDERS = (
    "pallasite.layouts",
    "pallasite.ir",
    "pallasite.lowering.inference",
    "pallasite.lowering.entry",
    "pallasite.passes",
    "pallasite.codegen.translation",
    "pallasite_std.api",
    "pallasite_std.copies",
    "pallasite_std.memory",
    "pallasite_std.ops",
    "pallasite_std.profiler",
    "pallasite_std.rules",
    "pallasite_blackwell.tensor_memory",
    "pallasite_hopper.matrix",
)


def run(folder) -> tuple[int, list[str]]:
    environment = {**os.environ, "PALLASITE_CACHE": "on", "PALLASITE_CACHE_DIR": str(folder)}
    output = subprocess.check_output([sys.executable, "-c", SCRIPT], env=environment, text=True)
    hits, modules = json.loads(output.splitlines()[-1])
    return hits, modules


def test_a_kernel_in_the_cache_needs_neither_rules_nor_layouts(tmp_path):
    hits, compiling = run(tmp_path)
    assert hits == 0
    hits, modules = run(tmp_path)
    assert hits == 1
    assert [name for name in modules if name.startswith(FOLDERS)] == []
    assert len(modules) < 100 < len(compiling)
