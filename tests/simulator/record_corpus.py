"""Runs the corpus and the examples on a GPU and records the results.

Usage: ``python tests/simulator/record_corpus.py FOLDER``. It writes ``corpus.npz`` (results of all
cases), ``examples.npz`` (samples of the examples' results), ``prints.json`` (what ``printf``
prints) and ``machine.json`` (where and when) to the folder. They belong into
``tests/simulator/recorded``.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import numpy as np
from corpus import Case, all_cases, sample
from corpus_prints import FORMATS, prints_ptx
from cuda.bindings import driver
from examples.catalog import all_examples


def checked(result: tuple) -> object:
    """The value of a driver call; raises if it failed."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{status}")
    return values[0] if values else None


def run(case: Case) -> np.ndarray:
    """A case's result on the GPU."""
    module = checked(driver.cuModuleLoadData(case.ptx.encode() + b"\0"))
    function = checked(driver.cuModuleGetFunction(module, b"kernel"))
    largest = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(function, largest, case.shared))
    output = case.output()
    buffers = []
    for array in (*case.inputs, output):
        pointer = checked(driver.cuMemAlloc(max(16, array.nbytes)))
        checked(driver.cuMemcpyHtoD(pointer, array.ctypes.data, array.nbytes))
        buffers.append(pointer)
    values = [np.array([int(pointer)], np.uint64) for pointer in buffers]
    arguments = np.array([value.ctypes.data for value in values], np.uint64)
    extents = (case.grid, 1, 1, case.block, 1, 1)
    checked(driver.cuLaunchKernel(function, *extents, case.shared, 0, arguments.ctypes.data, 0))
    checked(driver.cuCtxSynchronize())
    checked(driver.cuMemcpyDtoH(output.ctypes.data, buffers[-1], output.nbytes))
    for pointer in buffers:
        checked(driver.cuMemFree(pointer))
    checked(driver.cuModuleUnload(module))
    return output.view(f"u{output.itemsize}")


def prints() -> list[dict[str, object]]:
    """What ``printf`` prints and returns for each format."""
    case = Case("prints", prints_ptx(), (), (np.dtype(np.int32), len(FORMATS)), block=1)
    sys.stdout.flush()
    own = os.dup(1)
    with tempfile.TemporaryFile() as file:
        # The driver prints to the file descriptor.
        os.dup2(file.fileno(), 1)
        try:
            counts = run(case).view(np.int32)
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(own, 1)
            os.close(own)
        file.seek(0)
        lines = file.read().decode().splitlines()
    return [
        {"count": int(count), "text": line.split(": ", 1)[1]}
        for count, line in zip(counts, lines, strict=True)
    ]


def main(folder: pathlib.Path) -> int:
    """Records everything; returns how many cases failed."""
    folder.mkdir(parents=True, exist_ok=True)
    device = jax.devices("gpu")[0]
    jax.block_until_ready(jax.device_put(np.zeros(1), device))
    checked(driver.cuInit(0))
    context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(0))))
    checked(driver.cuCtxSetCurrent(context))
    failures = 0
    results = {}
    for name, case in all_cases().items():
        try:
            results[name] = run(case)
            if not np.array_equal(run(case), results[name]):
                print(f"NOT THE SAME TWICE {name}")
                failures += 1
        except RuntimeError as error:
            print(f"FAILED {name}: {error}")
            failures += 1
    np.savez_compressed(folder / "corpus.npz", **results)
    print(f"{len(results)} cases recorded")
    samples = {}
    for number, example in enumerate(all_examples()):
        inputs = example.make_inputs(jax.random.key(number))
        outputs = jax.tree.leaves(jax.jit(example.function)(*inputs))
        for output, array in enumerate(outputs):
            _, samples[f"{example.name}/{output}"] = sample(example.name, output, array)
    np.savez_compressed(folder / "examples.npz", **samples)
    print(f"{len(samples)} outputs of examples recorded")
    (folder / "prints.json").write_text(json.dumps(prints(), indent=1) + "\n")
    machine = {
        "device": device.device_kind,
        "date": datetime.date.today().isoformat(),
        "driver": checked(driver.cuDriverGetVersion()),
        "jax": jax.__version__,
    }
    (folder / "machine.json").write_text(json.dumps(machine, indent=1) + "\n")
    return failures


if __name__ == "__main__":
    sys.exit(1 if main(pathlib.Path(sys.argv[1])) else 0)
