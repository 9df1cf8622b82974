"""What the benchmarks share: timing on the GPU, tables, JSON."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

ROOT = pathlib.Path(__file__).parent.parent


_registered: set[str] = set()
"""Plugins that this process has taken from the checkout."""


def use_checkout() -> None:
    """Where Pallasite or its plugins are not installed, takes them from this checkout."""
    if importlib.util.find_spec("pallasite") is None:
        sys.path.insert(0, str(ROOT / "framework"))
    group = "pallasite.plugins"
    installed = {point.name for point in importlib.metadata.entry_points(group=group)}
    for project in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        for name, module in tomllib.loads(project.read_text())["project"]["entry-points"][
            group
        ].items():
            if name in installed or name in _registered:
                continue
            _registered.add(name)
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                sys.path.insert(0, str(project.parent / "src"))
            from pallasite import plugins

            plugins.register(importlib.import_module(module), name=name)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of those values that are there; None if there is none."""
    logarithms = [math.log(value) for value in values if value is not None]
    return math.exp(statistics.fmean(logarithms)) if logarithms else None


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


def write_json(
    path: pathlib.Path | None,
    benchmark: str,
    rows: Sequence[Any],
    measured_on: dict[str, str] | None = None,
    **more: Any,
) -> None:
    """Writes the rows (dataclasses or dicts) with the machine they were measured on.

    ``measured_on`` is that machine where it is not this process that measured; ``more`` are further
    entries of the file.
    """
    if path is None:
        return
    data = {
        "benchmark": benchmark,
        "machine": machine() if measured_on is None else measured_on,
        "rows": [row if isinstance(row, dict) else dataclasses.asdict(row) for row in rows],
        **more,
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
