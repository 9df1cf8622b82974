"""What the benchmarks share: timing on the GPU, tables, JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

ROOT = pathlib.Path(__file__).parent.parent


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--json", type=pathlib.Path, help="write the rows to this file")
    result.add_argument("--repeats", type=int, default=12, help="timed calls for each row")
    return result


def kernel_milliseconds(function: Callable[..., Any], *args: Any, repeats: int = 12) -> float:
    """Median device time of a jitted call, in milliseconds: the sum of its kernels, by CUPTI.

    The outputs of a call are dropped before the next, and inputs exceed the L2 cache by far.
    """
    from jax.experimental.mosaic.gpu import profiler

    jax.block_until_ready(function(*args))
    _, times = profiler.measure(function, iterations=repeats)(*args)
    if not isinstance(times, list):
        times = [times]
    per_call = [t if isinstance(t, float) else sum(part[1] for part in t) for t in times]
    return statistics.median(per_call)


def copy_bandwidth(size: int, repeats: int = 20) -> tuple[float, str]:
    """Bandwidth of a device-to-device copy of ``size`` bytes in bytes per second, counting bytes
    read and written, and how it was measured."""
    try:
        import torch
    except ImportError as error:
        raise SystemExit(
            "the copy bandwidth is measured with PyTorch: pip install torch"
        ) from error

    source = torch.randn(size // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    del source, target
    torch.cuda.empty_cache()
    return 2 * size / (statistics.median(times) * 1e-3), "cudaMemcpyAsync, CUDA events"


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    devices = jax.devices()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "device": devices[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints rows under a header, columns aligned."""
    texts = [list(map(_text, row)) for row in rows]
    widths = [max(len(t[i]) for t in [list(header), *texts]) for i in range(len(header))]
    for row in [list(header), *texts]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    sys.stdout.flush()


def _text(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)


def write_json(path: pathlib.Path | None, benchmark: str, rows: Sequence[Any]) -> None:
    """Writes the rows (dataclasses) with the machine they were measured on."""
    if path is None:
        return
    data = {
        "benchmark": benchmark,
        "machine": machine(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
