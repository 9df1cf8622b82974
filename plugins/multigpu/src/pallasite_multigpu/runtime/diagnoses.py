"""What ``pallasite doctor`` says of the GPUs of this machine."""

from __future__ import annotations

import itertools

from pallasite.plugin import Diagnosis, ExecutionError
from pallasite_multigpu.runtime.cuda import driver


def diagnoses() -> list[Diagnosis]:
    """Which providers of mailboxes can work here, and between which GPUs."""
    return [_local(), Diagnosis(name="several processes", text="not supported: one runs all GPUs")]


def _local() -> Diagnosis:
    name = "one process"
    try:
        cuda = driver()
        count = cuda.count()
        pairs = itertools.permutations(range(count), 2)
        apart = [f"{one}-{other}" for one, other in pairs if not cuda.reaches(one, other)]
    except ExecutionError as error:
        return Diagnosis(name=name, text=f"on the simulator only: {error.got or error.message}")
    if count < 2:
        return Diagnosis(name=name, text=f"{count} GPU: several devices on the simulator only")
    if apart:
        return Diagnosis(
            name=name,
            text=f"GPUs without access to each other's memory: {', '.join(apart)}",
            remedy="leave them out of meshes; nvidia-smi topo -p2p rw shows what is connected",
        )
    return Diagnosis(name=name, text=f"{count} GPUs that reach each other's memory")
