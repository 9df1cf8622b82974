"""PyTorch's operations on symmetric memory, for comparison with those of ``multigpu.py``.

One process runs each GPU. NVLink multicast stays off: ``TORCH_SYMM_MEM_DISABLE_MULTICAST`` is set,
and the memory is refused if it has a multicast address all the same. Several calls are captured in
a CUDA graph, or queued behind a kernel that sleeps where that cannot be done; both GPUs meet before
the clock starts, and each number is the median of several rounds. The time of a kernel alone is
CUPTI's, by PyTorch's profiler. Results are compared with a plain product or sum first.

    python benchmarks/multigpu_torch.py --json torch.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

SLEEP_CYCLES = 20_000_000
"""About 10 ms, in which the host queues what is timed."""
MESSAGE = 300
"""Characters of the message of a failure."""
ENVIRONMENT = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}


def all_reduce(kib: int, name: str) -> Callable[..., tuple[Callable[[], Any], Any, int]]:
    """A case: what makes the call, the expected result, and how many calls a round has."""

    def make(torch: Any, symmetric: Any, group: str, rank: int, count: int) -> Any:
        size = kib * 256
        parts = [_random(torch, (size,), torch.float32, seed) for seed in range(count)]
        x = symmetric.empty(size, dtype=torch.float32, device=f"cuda:{rank}")
        _meet(symmetric, x, group)
        in_place = name.endswith("_")
        x.copy_(parts[rank])
        call = getattr(torch.ops.symm_mem, name)
        expected = sum(parts[1:], parts[0])
        if in_place:
            first = call(x, "sum", group).clone()
            x.zero_()  # Sums would grow from call to call.
            return (lambda: call(x, "sum", group)), (first, expected), 200
        return (lambda: call(x, "sum", group)), (call(x, "sum", group), expected), 200

    return make


def all_gather_matmul(torch: Any, symmetric: Any, group: str, rank: int, count: int) -> Any:
    """The product of all devices' rows with this device's columns."""
    parts = [_random(torch, (1024, 4096), torch.bfloat16, seed) for seed in range(count)]
    b = _random(torch, (4096, 4096), torch.bfloat16, 100 + rank)

    def call() -> Any:
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        return fused(parts[rank], [b], 0, group, return_A=False)[1][0]

    return call, (call(), torch.cat(parts) @ b), 10


def matmul_reduce_scatter(torch: Any, symmetric: Any, group: str, rank: int, count: int) -> Any:
    """This device's rows of the sum of all devices' products."""
    left = [_random(torch, (1024 * count, 4096), torch.bfloat16, seed) for seed in range(count)]
    right = [_random(torch, (4096, 4096), torch.bfloat16, 100 + seed) for seed in range(count)]
    own = slice(1024 * rank, 1024 * (rank + 1))
    expected = sum((a[own] @ b).float() for a, b in zip(left, right, strict=True))

    def call() -> Any:
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        return fused(left[rank], right[rank], "sum", 0, group)

    return call, (call(), expected), 10


def cases() -> dict[str, dict[str, Callable[..., Any]]]:
    """By the name of a case of ``multigpu.py``: PyTorch's operations for it."""
    found: dict[str, dict[str, Callable[..., Any]]] = {}
    for kib in (16, 64, 512, 4096):
        names = ("one_shot_all_reduce", "two_shot_all_reduce_")
        found[f"all_reduce {kib} KiB"] = {name: all_reduce(kib, name) for name in names}
    found["all_gather_matmul 1024x4096x4096"] = {"fused_all_gather_matmul": all_gather_matmul}
    found["matmul_reduce_scatter 1024x4096x4096"] = {
        "fused_matmul_reduce_scatter": matmul_reduce_scatter
    }
    return found


def _random(torch: Any, shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """The same on all devices."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)
    return (x * 0.125).to(dtype)


def _meet(symmetric: Any, x: Any, group: str) -> Any:
    handle = symmetric.rendezvous(x, group)
    if handle.multicast_ptr:
        raise RuntimeError("the memory has a multicast address, which was to be off")
    return handle


# Measurement --------------------------------------------------------------------------------------


def measure(
    torch: Any, call: Callable[[], Any], calls: int, rounds: int, meet: Callable[[], None]
) -> dict[str, Any]:
    """Microseconds of a call, and of its kernel.

    Args:
      torch: the module.
      call: the operation.
      calls: in a round.
      rounds: of which the median is taken.
      meet: lets the GPUs wait for each other, on the stream.
    """
    run, way = _graph(torch, call, calls)
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        torch.distributed.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        meet()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return {"microseconds": statistics.median(times), "way": way}


def _graph(torch: Any, call: Callable[[], Any], calls: int) -> tuple[Callable[[], Any], str]:
    """What makes all calls of a round, and whether it is a CUDA graph."""

    def each() -> None:
        for _ in range(calls):
            call()

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            each()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return each, f"queued calls (no CUDA graph: {_message(error)[:80]})"
    return graph.replay, "CUDA graph"


def kernel_time(torch: Any, call: Callable[[], Any], calls: int, part: str) -> float | None:
    """The median of the kernels whose names have a part, in microseconds; None without CUPTI."""
    activity = torch.profiler.ProfilerActivity.CUDA
    torch.distributed.barrier()
    with torch.profiler.profile(activities=[activity]) as profile:
        torch.cuda._sleep(SLEEP_CYCLES)
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    times = [float(one.device_time) for one in profile.events() if part in one.name]
    return statistics.median(times) if times else None


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MESSAGE]}"


# Processes ----------------------------------------------------------------------------------------


def run_rank(rank: int, count: int, folder: pathlib.Path, rounds: int, only: str) -> None:
    """One process: measures all cases, and writes what it found after each."""
    import torch
    import torch.distributed._symmetric_memory as symmetric

    rows: dict[str, dict[str, Any]] = {}
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name(rank)}

    def write() -> None:
        text = json.dumps({**about, "devices": count, "rows": rows}, indent=1)
        file = folder / f"{rank}.json"
        file.with_suffix(".new").write_text(text)
        file.with_suffix(".new").replace(file)

    torch.cuda.set_device(rank)
    store = torch.distributed.FileStore(str(folder / "store"), count)
    limit = datetime.timedelta(seconds=40)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=limit
    )
    group = torch.distributed.group.WORLD.group_name
    met: Any = None
    try:
        met = _meet(symmetric, symmetric.empty(1024, device=f"cuda:{rank}"), group)
    except Exception as error:
        about["rendezvous"] = _message(error)
    for case, operations in cases().items():
        if not any(part in case for part in only.split(",")):
            continue
        rows[case] = {}
        for name, make in operations.items():
            if met is None:
                rows[case][name] = about["rendezvous"]
                continue
            try:
                call, (result, expected), calls = make(torch, symmetric, group, rank, count)
                difference = (result.float() - expected.float()).norm() / expected.float().norm()
                if not float(difference) < 1e-2:
                    raise AssertionError(f"relative error {float(difference)}")
                found = measure(torch, call, calls, rounds, lambda: met.barrier(channel=5))
                if "all_reduce" in case:
                    found["kernel"] = kernel_time(torch, call, 50, "all_reduce")
                rows[case][name] = found
            except Exception as error:
                rows[case][name] = _message(error)
            write()
    write()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    os._exit(0)  # The memory goes with the process: its destructors may wait for each other.


def run_all(devices: int, rounds: int, only: str, timeout: float) -> dict[str, Any]:
    """Starts a process for each device.

    Returns:
      What the first one has written, with ``"failed"`` if a process ended badly or not in time.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        logs = [(folder / f"{rank}.log").open("w+") for rank in range(devices)]
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), "--folder", place]
                + ["--devices", str(devices), "--rounds", str(rounds), "--only", only],
                stdout=log,
                stderr=log,
                env={**os.environ, **ENVIRONMENT},
            )
            for rank, log in enumerate(logs)
        ]
        limit = time.monotonic() + timeout
        failed = ""
        try:
            for rank, process in enumerate(started):
                code = process.wait(max(limit - time.monotonic(), 0.1))
                if code and not failed:
                    logs[rank].seek(0)
                    lines = [line.strip() for line in logs[rank] if line.strip()]
                    failed = f"process {rank} ended with {code}: {(lines or ['no message'])[-1]}"
        except subprocess.TimeoutExpired:
            failed = f"took more than {timeout:g} s"
        finally:
            for process in started:
                process.kill()
                process.wait()
            for log in logs:
                log.close()
        file = folder / "0.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": {}}
    return {**found, "failed": failed[:MESSAGE]} if failed else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where the numbers are written")
    parser.add_argument("--devices", type=int, default=2, help="how many GPUs")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each operation")
    parser.add_argument("--only", default="", help="parts of the names of cases, with commas")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for all of it")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(
            arguments.rank, arguments.devices, arguments.folder, arguments.rounds, arguments.only
        )
        return
    found = run_all(arguments.devices, arguments.rounds, arguments.only, arguments.timeout)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(text)


if __name__ == "__main__":
    main()
