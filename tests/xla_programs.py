"""What XLA compiles on the CPU, inputs and references of tests, takes little time.

JAX traces and compiles whatever it runs again each time that an option or a plugin has changed, and
every process of a session does. So each program is compiled once, for later sessions on the same
processor as well; programs that call back into Python, as kernels do, are not kept. What is
compiled is for the most part small and runs once, so that most of what makes it run fast takes
longer than it saves; the smallest programs are not compiled at all (``numpy_programs``).
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
import shutil
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import compiler, lax
from jaxlib.mlir import ir
from tests import numpy_programs, session_folders

FOLDER = "jax_compilation_cache_dir"
EVERYTHING: dict[str, float | int] = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


MOST_BYTES = 1 << 27
"""What is kept from one session to the next; a session of the whole suite has a quarter of it."""


def share(cache: pytest.Cache | None) -> None:
    """Makes this process and those that it starts use one folder of the cache of sessions; without
    one, it is removed at the end of this process.

    Processes that were started with such a folder, or by somebody who has one, keep it.
    """
    if os.environ.get(FOLDER.upper()):
        return
    if cache is None:
        folder = session_folders.make("xla")
    else:
        folder = cache.mkdir(f"xla-{_how_it_is_compiled()}")
        for other in folder.parent.glob("xla-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        session_folders.forget_the_oldest(folder, MOST_BYTES)
    for name, value in {FOLDER: str(folder), **EVERYTHING}.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


def _how_it_is_compiled() -> str:
    """What decides about machine code besides what XLA compares: the processor and this module."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    words = [platform.machine(), platform.processor(), *sorted(flags)]
    source = pathlib.Path(__file__).read_text()
    return hashlib.sha256("\0".join([source, *words]).encode()).hexdigest()[:12]


def be_quick() -> None:
    """Less is done in this process for programs that are small, or are not needed at all."""
    compiler.backend_compile_and_load = _compile_quickly(compiler.backend_compile_and_load)
    lax.lax.stage_p.def_impl(_to_device(lax.lax.stage_p.impl))
    numpy_programs.install()


# XLA makes a module of MLIR for each fusion, even of one operation, which takes longer than what
# LLVM does for a few operations on their own. `fusion-wrapper` makes those of one operation. XLA
# copies wrongly without it where dot products and transposes want another order of dimensions in
# memory, so this is for operations that take and leave them as they are.
_WITHOUT_FUSIONS = "fusion,fusion-wrapper"
_FEW_OPERATIONS = 8
_FREE = {
    "builtin.module",
    "func.call",
    "func.func",
    "func.return",
    "sdy.mesh",
    "stablehlo.broadcast_in_dim",
    "stablehlo.constant",
    "stablehlo.reshape",
    "stablehlo.return",
}
_SIMPLE = {
    f"stablehlo.{name}"
    for name in (
        *("abs", "add", "and", "compare", "convert", "cosine", "divide", "exponential", "iota"),
        *("log", "maximum", "minimum", "multiply", "negate", "or", "pad", "power", "reduce"),
        *("rsqrt", "select", "sine", "slice", "sqrt", "subtract", "tanh"),
    )
}


def _compile_quickly(compile_and_load: Any) -> Any:
    def compile_one(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any) -> Any:
        if backend.platform == "cpu" and _is_simple(module):
            debug = options.executable_build_options.debug_options
            debug.xla_disable_hlo_passes = _WITHOUT_FUSIONS
        return compile_and_load(backend, module, devices, options, callbacks)

    return compile_one


def _is_simple(module: Any) -> bool:
    """Whether a program has a few operations that are as well off without fusions."""
    operations = Counter[str]()

    def count(operation: Any) -> Any:
        operations[operation.name] += 1
        return ir.WalkResult.ADVANCE

    module.operation.walk(count)
    paid = {name: times for name, times in operations.items() if name not in _FREE}
    return sum(paid.values()) <= _FEW_OPERATIONS and paid.keys() <= _SIMPLE


def _to_device(stage: Any) -> Any:
    """``jnp.asarray`` without a program for each shape of the arrays of NumPy that it gets."""

    def put(value: Any) -> Any:
        if not jax.sharding.get_abstract_mesh().empty:
            return stage(value)
        # The array may be written to later; on the CPU, that of JAX can be the same memory.
        return jax.device_put(np.array(value) if isinstance(value, np.ndarray) else value)

    return put
