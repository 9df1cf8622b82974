"""Loads a kernel on each GPU before any of its launches may wait for another GPU.

JAX's launcher loads a module at its first launch on a GPU, and loading blocks while a kernel spins
there. So a communicating kernel is launched once on each GPU with a table whose rank is -1, with
which it returns at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallasite.plugin.lowering import Buffer, LaunchParameters
from pallasite.plugin.runtime import CompiledKernel, find_executor
from pallasite_multigpu.protocol import layout

_lock = threading.Lock()
_done: set[tuple[str, int]] = set()


def warm_up(compiled: CompiledKernel, table: str, devices: Sequence[Any]) -> None:
    """Launches a kernel once on each of some GPUs, so that it does nothing.

    Args:
      compiled: the kernel.
      table: the name of the hidden operand that is its table.
      devices: JAX's, of this process.
    """
    kernel = f"{compiled.name} {hashlib.sha256(compiled.ptx.encode()).hexdigest()}"
    with _lock:
        missing = [one for one in devices if (kernel, one.id) not in _done]
        if not missing:
            return
        (number,) = (one.input for one in compiled.launch.hidden_operands if one.name == table)
        small = dataclasses.replace(compiled, launch=small_launch(compiled.launch, number))
        # Other than this thread, a new one is not in the middle of tracing a program.
        _in_new_thread(lambda: _launch(small, number, missing))
        _done.update((kernel, one.id) for one in missing)


def small_launch(launch: LaunchParameters, table: int) -> LaunchParameters:
    """The same launch, with one element for each array but the table."""
    kept = launch.inputs[table]

    def shrunk(buffer: Buffer) -> Buffer:
        shape = buffer.shape if buffer == kept else (1,)
        return dataclasses.replace(buffer, shape=shape)

    return dataclasses.replace(
        launch,
        parameters=tuple(
            dataclasses.replace(one, buffer=shrunk(one.buffer)) for one in launch.parameters
        ),
        inputs=tuple(map(shrunk, launch.inputs)),
        outputs=tuple(map(shrunk, launch.outputs)),
        scratch=tuple(map(shrunk, launch.scratch)),
        grid=launch.cluster,
    )


def _launch(compiled: CompiledKernel, table: int, devices: Sequence[Any]) -> None:
    run = find_executor("cuda", compiled.name)
    inputs = compiled.launch.inputs
    with jax.enable_x64(True):
        values = [np.zeros(one.shape, one.dtype) for one in inputs]
        values[table] = layout.table(-1, [0] * layout.devices_of(inputs[table].shape[0]))
        launch = jax.jit(lambda *operands: run(compiled, *operands))
        for device in devices:
            jax.block_until_ready(launch(*jax.device_put(values, device)))


def _in_new_thread(function: Callable[[], Any]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="pallasite-multigpu-warm-up")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
