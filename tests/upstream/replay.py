"""Runs recorded programs of JAX's compiler."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import jax_compiler
import jax_programs
import numpy as np
from jax_on_simulator import MULTIPROCESSORS, POISON, launch

from pallasite_simulator.launch import Execution
from pallasite_simulator.packing import memory_bytes, pack, unpack
from pallasite_simulator.programs import load
from pallasite_simulator.sanitizer import LaunchState


def kept(name: str) -> dict[str, Any]:
    """What was recorded of a program."""
    found: dict[str, Any] = json.loads(gzip.decompress(jax_programs.path_of(name).read_bytes()))
    return found


def replay(
    name: str, *, mark: str = "", state: LaunchState | None = None, edit: Any = None
) -> tuple[np.ndarray, np.ndarray, Execution]:
    """Runs a program.

    Args:
      name: of the program.
      mark: makes its instructions be bound anew, if it is a new one.
      state: of the sanitizer.
      edit: changes the PTX.

    Returns:
      The result, what it should be, and the execution.
    """
    found, program = kept(name), jax_programs.PROGRAMS[name]
    maps = {
        int(number): jax_compiler.TensorMap(*fields[:4], *map(tuple, fields[4:]))
        for number, fields in found["maps"].items()
    }
    parameters = tuple(base64.b64decode(one) for one in found["parameters"])
    shape = [tuple(found[one]) for one in ("grid", "cluster", "block")]
    recorded = jax_compiler.Recorded(*shape, found["shared"], parameters, maps)
    arguments, expected = program.inputs()
    result = program.result
    memory = [pack(one).copy() for one in arguments]
    memory.append(np.full(memory_bytes(expected.shape, result), POISON, np.uint8))
    ptx = found["ptx"] if edit is None else edit(found["ptx"])
    kernel = load(ptx + f"// {mark}\n", None, MULTIPROCESSORS)
    execution = launch(kernel, recorded, memory, found["buffers"], state)
    return unpack(memory[-1], expected.shape, np.dtype(result)), expected, execution
