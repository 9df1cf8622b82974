"""Runs the cases of ``corpus_matrices.py`` on a GPU and records the results.

Usage: ``python tests/simulator/record_matrices.py FOLDER``. It writes ``matrices.npz`` to the
folder, which belongs into ``tests/simulator/recorded``.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np
from corpus_matrices import matrix_cases
from cuda.bindings import driver
from record_corpus import checked, run


def main(folder: pathlib.Path) -> int:
    """Records everything; returns how many cases failed."""
    folder.mkdir(parents=True, exist_ok=True)
    checked(driver.cuInit(0))
    context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(0))))
    checked(driver.cuCtxSetCurrent(context))
    results, failures = {}, 0
    for name, case in matrix_cases().items():
        try:
            results[name] = run(case)
        except RuntimeError as error:
            print(f"FAILED {name}: {error}")
            failures += 1
    np.savez_compressed(folder / "matrices.npz", **results)
    print(f"{len(results)} cases recorded")
    return failures


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
