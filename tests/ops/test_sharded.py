"""Operations and kernels on a device mesh: under ``jax.shard_map``, and with shardings alone."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
from tests import python_processes

SCRIPT = pathlib.Path(__file__).parent / "sharded_programs.py"


@pytest.mark.parametrize(
    "kind, cases",
    [
        ("kernels", "kernel"),
        ("in_shard_map", "kernel,matmul"),
        ("in_shard_map", "attention,attention with bias,decode_attention"),
        ("in_shard_map", "ragged_matmul,mixed_matmul"),
        ("in_shard_map", "rms_norm,softmax_cross_entropy"),
        ("with_shardings", "kernel,plain matmul"),
    ],
)
def test_programs(kind, cases):
    flags = os.environ.get("XLA_FLAGS", "")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = python_processes.run(
        [SCRIPT, "--seed", "0", "--only", kind, "--cases", cases], env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) >= 2
    assert not [line for line in lines if not line.endswith(": ok")]
