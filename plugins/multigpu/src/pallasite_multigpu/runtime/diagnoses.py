"""What ``pallasite doctor`` says of the GPUs of this machine."""

from __future__ import annotations

import itertools
import os

from pallasite.plugin import Diagnosis, ExecutionError
from pallasite_multigpu.network import library
from pallasite_multigpu.options import peer_network, symmetric_heap
from pallasite_multigpu.runtime import exchange, nvshmem
from pallasite_multigpu.runtime.cuda import driver

_TASKS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables by which launchers of processes say how many there are."""


def diagnoses() -> list[Diagnosis]:
    """Which providers of mailboxes can work here, and between which GPUs."""
    return [_local(), _ipc(), _nvshmem(), _hosts()]


def _ipc() -> Diagnosis:
    name = "processes, CUDA IPC"
    tasks = max((int(os.environ.get(one, "1") or 1) for one in _TASKS), default=1)
    if tasks > 1 and not exchange.several():
        return Diagnosis(
            name=name,
            text=f"one of {tasks} tasks, without jax.distributed: each runs on its own",
            remedy="jax.distributed.initialize(...) in each, before JAX is used",
        )
    try:
        driver()
    except ExecutionError as error:
        return Diagnosis(name=name, text=f"not here: {error.got or error.message}")
    size = symmetric_heap()
    return Diagnosis(
        name=name,
        text=f"on one machine, with one GPU each; they share {size >> 20} MiB (symmetric_heap)",
    )


def _nvshmem() -> Diagnosis:
    name = "processes, NVSHMEM"
    if not nvshmem.is_installed():
        return Diagnosis(
            name=name,
            text=f"not installed ({nvshmem.PACKAGE}); needed between machines only",
        )
    return Diagnosis(name=name, text="installed; between machines that NVLink connects, or on one")


def _hosts() -> Diagnosis:
    name = "hosts, NVSHMEM"
    chosen, place = peer_network(), library.path()
    if place is None:
        wanted = chosen != "off"
        return Diagnosis(
            name=name,
            text=f"no {library.LIBRARY} ({nvshmem.PACKAGE}); needed between hosts that no NVLink"
            " connects only",
            remedy=f"pip install {nvshmem.PACKAGE}" if wanted else "",
        )
    where = "off (PALLASITE_PEER_NETWORK=nvshmem)" if chosen == "off" else f"on ({chosen})"
    return Diagnosis(name=name, text=f"{where}; kernels compile, but have never run on two hosts")


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
