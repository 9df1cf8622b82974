"""Kernels of several GPUs, against NCCL as ``jax.lax`` calls it and against upstream's kernels.

One process runs all GPUs, or several run one each. Small cases are chained in a loop of one
program, so that a step consists of what one program pays for it, and of so many steps that it does
not matter that starting a program takes a millisecond; each number is the median of several runs of
all rivals in turn. The result of each implementation is compared with that of NCCL
before it is timed. NVLink multicast is not used by any of them (set ``NCCL_NVLS_ENABLE=0``).
After the rounds, CUPTI records one run of each: the median time of the kernel that takes most of it
tells what the launches do not. PyTorch's operations on symmetric memory, which need a process for
each GPU, are measured by ``multigpu_torch.py``, without chaining.

Each comparison has a process of its own, unless several processes run the GPUs, or with
``--together``: after an error on a GPU, nothing runs there any more. What fails is said in the
table and in the JSON file, which is written after each comparison.

    python benchmarks/multigpu.py --json multigpu.json
    python benchmarks/multigpu.py --processes 0/2@localhost:12345 --no-upstream   # and 1/2
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

import pallasite
from pallasite import gpu as plgpu
from pallasite_multigpu import ops

if __package__:
    from benchmarks import multigpu_torch
else:
    import multigpu_torch

AXIS = "x"
UNROLL = 8
"""Steps in one turn of a loop, in the second round of small cases."""
MESSAGE = 300
"""Characters of the message of a failure."""
SPEC = PartitionSpec(AXIS)


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
      name: for the table.
      shapes: of each device's operands.
      dtype: of all.
      rivals: by name, functions of the operands of one device.
      feed: makes the first operand of the next step from that of this one and its result.
      steps: of the loop.
      nbytes: that count for the bandwidth, or 0.
      unroll: steps in one turn of the loop; XLA launches several as one CUDA graph.
      part: the share of a step's operations that the rival "alone" does, on each device's own
        operands; its result is another.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: Any
    rivals: dict[str, Callable[..., Any]]
    feed: Callable[[Any, Any], Any]
    steps: int
    nbytes: int = 0
    unroll: int = 1
    part: float = 1.0


def _result(x: Any, y: Any) -> Any:
    """The result is the next operand."""
    del x
    return y


def _touch(x: Any, y: Any) -> Any:
    """The next operand depends on the result by one element; all of the result is made."""
    first = (0,) * x.ndim
    last = lax.optimization_barrier(y).reshape(-1)[-1]
    return x.at[first].set(last.astype(x.dtype) * 0 + x[first])


# Cases --------------------------------------------------------------------------------------------


def exchanged_store(size: int, module: Any) -> Callable[[Any], Any]:
    """A kernel that stores its array on the next device and waits for the one that comes."""

    def body(x_ref: Any, out_ref: Any, semaphore: Any) -> None:
        there = lax.rem(lax.axis_index(AXIS) + 1, lax.axis_size(AXIS))
        remote = module.remote_ref(out_ref, there)
        remote[...] = x_ref[...]
        pl.semaphore_signal(semaphore, 1, device_id=there)
        pl.semaphore_wait(semaphore)

    made: Callable[[Any], Any] = module.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((size,), jnp.float32),
        scratch_types=[module.SemaphoreType.REGULAR],
    )
    return made


def _rotated(count: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % count) for rank in range(count)]


def cases(count: int, upstream: bool) -> list[Case]:
    """All comparisons, for so many devices."""
    found: list[Case] = []
    size = 4096
    rivals: dict[str, Callable[..., Any]] = {
        "nccl": lambda x: lax.ppermute(x, AXIS, _rotated(count)),
        "pallasite": exchanged_store(size, plgpu),
    }
    if upstream:
        from jax.experimental.pallas import mosaic_gpu

        rivals["upstream"] = exchanged_store(size, mosaic_gpu)
    found.append(Case("store 16 KiB + semaphore", ((size,),), jnp.float32, rivals, _result, 2000))
    for kib in (16, 64, 512, 4096):
        rivals = {
            "nccl": lambda x: lax.psum(x, AXIS),
            "pallasite": functools.partial(ops.all_reduce, axis_name=AXIS),
        }
        name = f"all_reduce {kib} KiB"
        found.append(Case(name, ((kib * 256,),), jnp.float32, rivals, _result, 2000))
    found += [
        dataclasses.replace(one, name=f"{one.name}, {UNROLL} in a row", unroll=UNROLL)
        for one in found
    ]
    for mib in (64, 256):
        elements = mib << 18
        for name, rivals, feed in (
            (
                "all_reduce",
                {
                    "nccl": lambda x: lax.psum(x, AXIS),
                    "pallasite": functools.partial(ops.all_reduce, axis_name=AXIS),
                },
                _result,
            ),
            (
                "all_gather",
                {
                    "nccl": lambda x: lax.all_gather(x, AXIS, tiled=True),
                    "pallasite": functools.partial(ops.all_gather, axis_name=AXIS),
                },
                _touch,
            ),
            (
                "reduce_scatter",
                {
                    "nccl": lambda x: lax.psum_scatter(x, AXIS, tiled=True),
                    "pallasite": functools.partial(ops.reduce_scatter, axis_name=AXIS),
                },
                _touch,
            ),
            (
                "all_to_all",
                {
                    "nccl": lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
                    "pallasite": functools.partial(ops.all_to_all, axis_name=AXIS),
                },
                _touch,
            ),
        ):
            title, shapes = f"{name} {mib} MiB", ((elements,),)
            steps = {64: 100, 256: 40}[mib]
            found.append(Case(title, shapes, jnp.float32, rivals, feed, steps, nbytes=elements * 4))
    rivals = {
        "nccl": lambda a, b: lax.all_gather(a, AXIS, tiled=True) @ b,
        "pallasite": functools.partial(ops.all_gather_matmul, axis_name=AXIS),
    }
    if upstream:
        rivals["upstream"] = _upstream_product()
    shapes = ((1024, 4096), (4096, 4096))
    found.append(
        Case("all_gather_matmul 1024x4096x4096", shapes, jnp.bfloat16, rivals, _touch, 300)
    )
    rivals = {
        "nccl": lambda a, b: lax.psum_scatter(a @ b, AXIS, tiled=True),
        "pallasite": functools.partial(ops.matmul_reduce_scatter, axis_name=AXIS),
    }
    shapes = ((1024 * count, 4096), (4096, 4096))
    found.append(
        Case("matmul_reduce_scatter 1024x4096x4096", shapes, jnp.bfloat16, rivals, _touch, 300)
    )
    return found


EXPERTS, TOP = 64, 8


def long_cases(count: int) -> list[Case]:
    """Attention of a sequence of all devices, and tokens that go to experts and come back."""
    found = []
    shapes = ((1, 16384, 16, 128),) * 3
    for causal in (False, True):
        placement: Any = "zigzag" if causal else "contiguous"
        rivals: dict[str, Callable[..., Any]] = {
            "pallasite": functools.partial(
                ops.ring_attention, axis_name=AXIS, causal=causal, placement=placement
            ),
        }
        if not causal:
            rivals = {"nccl": gathered_attention, **rivals}
        rivals["alone"] = functools.partial(pallasite.ops.attention, causal=causal)
        name = f"ring_attention{' causal' if causal else ''} 16384x16x128"
        found.append(Case(name, shapes, jnp.bfloat16, rivals, _touch, 12, part=1 / count))
    rivals = {
        "nccl": functools.partial(ragged_exchange, count=count),
        "pallasite": functools.partial(experts_exchange, count=count),
    }
    name = "moe_dispatch + combine 4096x7168"
    found.append(Case(name, ((4096, 7168),), jnp.bfloat16, rivals, _touch, 10))
    return found


def gathered_attention(q: Any, k: Any, v: Any) -> Any:
    """Attention with all devices' keys, gathered first."""
    keys, values = (lax.all_gather(one, AXIS, axis=1, tiled=True) for one in (k, v))
    return pallasite.ops.attention(q, keys, values)


def _chosen(x: Any) -> Any:
    """Experts of each token, by what it has."""
    return lax.top_k(x[:, :EXPERTS].astype(jnp.float32), TOP)[1].astype(jnp.int32)


def _capacity(x: Any, count: int) -> int:
    """Room for a quarter more than a device gets on average."""
    return int(x.shape[0] * TOP * min(1.25, count))


def experts_exchange(x: Any, count: int) -> Any:
    """Tokens go to their experts and come back: each as often as it has experts."""
    rows, _, route = ops.moe_dispatch(
        x, _chosen(x), axis_name=AXIS, num_experts=EXPERTS, capacity=_capacity(x, count)
    )
    return ops.moe_combine(rows, None, route, axis_name=AXIS)


def ragged_exchange(x: Any, count: int) -> Any:
    """The same with ``lax.ragged_all_to_all``, which sorts by device only."""
    own = lax.axis_index(AXIS)
    device = _chosen(x).reshape(-1) // (EXPERTS // count)
    order = jnp.argsort(device, stable=True)
    token = order // TOP
    sizes = jnp.zeros((count,), jnp.int32).at[device].add(1)
    every = lax.all_gather(sizes, AXIS)
    begins = jnp.cumsum(every, 1) - every
    arrives = jnp.cumsum(every, 0) - every
    sent = x[token]
    room = jnp.zeros((_capacity(x, count), x.shape[1]), x.dtype)
    got = lax.ragged_all_to_all(
        *(sent, room, begins[own], sizes, arrives[own], every[:, own]), axis_name=AXIS
    )
    back = lax.ragged_all_to_all(
        *(got, jnp.zeros_like(sent), arrives[:, own], every[:, own], begins[:, own], sizes),
        axis_name=AXIS,
    )
    total = jnp.zeros(x.shape, jnp.float32).at[token].add(back.astype(jnp.float32))
    return total.astype(x.dtype)


def _upstream_product() -> Callable[..., Any]:
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu, hopper_matmul_mgpu

    config = hopper_matmul_mgpu.TuningConfig(
        tile_m=128,
        tile_n=128,
        tile_k=64,
        max_concurrent_steps=4,
        grid_minor_dim=hopper_matmul_mgpu.MatmulDimension.N,
        grid_tile_width=1,
        wg_dimension=hopper_matmul_mgpu.MatmulDimension.N,
    )
    return functools.partial(
        collective_matmul_mgpu.all_gather_lhs_matmul,
        axis_name=AXIS,
        config=config,
        dtype=jnp.bfloat16,
    )


# Measurement --------------------------------------------------------------------------------------


def measure(case: Case, mesh: jax.sharding.Mesh, rounds: int, unroll: int = 1) -> dict[str, Any]:
    """Microseconds of a step of each rival, or why it has none.

    Args:
      case: the comparison.
      mesh: of the devices.
      rounds: runs of each program.
      unroll: steps in one turn of the loop; XLA launches several as one CUDA graph.

    A GPU on which a kernel has failed runs nothing more: then all rivals after it fail.
    """
    generator = np.random.default_rng(0)
    scale = 1e-30 if case.name.startswith("all_reduce") else 0.125  # Sums grow from step to step.
    count = mesh.devices.size
    operands = []
    for shape in case.shapes:
        whole = generator.standard_normal((count * shape[0], *shape[1:]), np.float32) * scale
        sharding = jax.NamedSharding(mesh, SPEC)
        whole = whole.astype(case.dtype)
        operands.append(
            jax.make_array_from_callback(whole.shape, sharding, lambda at, whole=whole: whole[at])
        )
    found: dict[str, Any] = {}
    programs: dict[str, Callable[..., Any]] = {}
    expected = None
    for name, rival in case.rivals.items():
        try:
            once = _program(rival, len(operands), mesh)
            parts = once(*operands).addressable_shards
            result = np.concatenate([np.asarray(one.data, np.float64).ravel() for one in parts])
            if expected is None:
                expected = result
            error = float(np.linalg.norm(result - expected) / np.linalg.norm(expected))
            if not error < 1e-2 and name != "alone":
                raise AssertionError(f"relative error {error}")
            loop = _loop(rival, case, max(unroll, case.unroll))
            programs[name] = _program(loop, len(operands), mesh)
            jax.block_until_ready(programs[name](*operands))
        except Exception as error:
            found[name] = _message(error)
            programs.pop(name, None)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            if name in found:
                continue
            try:
                start = time.perf_counter()
                jax.block_until_ready(program(*operands))
                times[name].append((time.perf_counter() - start) / case.steps * 1e6)
            except Exception as error:
                found[name] = _message(error)
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    kernels: dict[str, float] = {}
    if not found:  # What has failed leaves a GPU that runs nothing more.
        kernels = {name: one for name in programs if (one := _kernel(programs[name], operands))}
    return medians | found | ({"kernels": kernels} if kernels else {})


def _kernel(program: Callable[..., Any], operands: list[Any]) -> float | None:
    """Microseconds of the kernel that takes most of a program's time; the median, over all devices.
    None where CUPTI records nothing."""
    try:
        from jax.experimental.mosaic.gpu import profiler

        cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
        cupti._cupti_init()
    except Exception:
        return None
    try:
        jax.block_until_ready(program(*operands))
    finally:
        records = cupti._cupti_get_timings(True)
    return longest_kernel([(str(name), float(time)) for name, time in records])


def longest_kernel(records: list[tuple[str, float]]) -> float | None:
    """The median time, in microseconds, of the kernel that takes most of the time of all.

    Args:
      records: names and milliseconds of what ran.
    """
    times: dict[str, list[float]] = {}
    for name, milliseconds in records:
        times.setdefault(name, []).append(milliseconds * 1e3)
    return statistics.median(max(times.values(), key=sum)) if times else None


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:MESSAGE]}"


def _loop(rival: Callable[..., Any], case: Case, unroll: int) -> Callable[..., Any]:
    def run(x: Any, *others: Any) -> Any:
        def step(_: Any, y: Any) -> Any:
            return case.feed(y, rival(y, *others))

        return lax.fori_loop(0, case.steps, step, x, unroll=unroll)

    return run


def _program(function: Callable[..., Any], operands: int, mesh: jax.sharding.Mesh) -> Any:
    specs = (SPEC,) * operands
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=SPEC, check_vma=False)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where the numbers are written")
    parser.add_argument("--devices", type=int, default=2, help="how many GPUs")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each program")
    parser.add_argument("--only", default="", help="parts of the names of cases, with commas")
    parser.add_argument("--no-upstream", action="store_true", help="leave upstream's kernels out")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch's operations out")
    parser.add_argument("--rivals", default="", help="names, with commas, if not all")
    parser.add_argument("--unroll", type=int, default=1, help="steps in one turn of the loop")
    parser.add_argument("--together", action="store_true", help="all cases in this process")
    parser.add_argument("--processes", default="", help="NUMBER/COUNT@HOST:PORT, one GPU each")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a case may take")
    parser.add_argument("--case", default="", help="the name of the only case, in this process")
    arguments = parser.parse_args()
    if arguments.processes:
        place, _, address = arguments.processes.partition("@")
        number, _, count = place.partition("/")
        jax.distributed.initialize(address, int(count), int(number), [int(number)])
        arguments.devices = int(count)
    # A process that only starts others must not ask for devices: that takes their memory.
    apart = not (arguments.processes or arguments.case or arguments.together)
    first = apart or jax.process_index() == 0
    about: dict[str, Any] = {"devices": arguments.devices, "jax": jax.__version__}
    about["unroll"] = arguments.unroll
    if not apart:
        about["device"] = jax.devices()[0].device_kind
    rows: list[dict[str, Any]] = []
    if first:
        print(
            f"{'case':38} {'NCCL':>9} {'upstream':>9} {'pallasite':>9}  NCCL/pallasite  GB/s"
            "  (in parentheses: the kernel alone)"
        )
    chosen = cases(arguments.devices, not arguments.no_upstream)
    for case in [*chosen, *long_cases(arguments.devices)]:
        wanted = any(part in case.name for part in arguments.only.split(","))
        if not wanted or arguments.case not in ("", case.name):
            continue
        if arguments.rivals:
            names = arguments.rivals.split(",")
            chosen_rivals = {name: one for name, one in case.rivals.items() if name in names}
            case = dataclasses.replace(case, rivals=chosen_rivals)
        if apart:
            found, told = measure_apart(case.name, sys.argv[1:], arguments.timeout)
            about |= told
        else:
            mesh = jax.sharding.Mesh(np.array(jax.devices()[: arguments.devices]), (AXIS,))
            found = measure(case, mesh, arguments.rounds, arguments.unroll)
        kernels = found.pop("kernels", {})
        rows.append({"case": case.name, "microseconds": found, "bytes": case.nbytes})
        if kernels:
            rows[-1]["kernel_microseconds"] = kernels
        if first:
            print(_line(case, found, kernels), flush=True)
            _write(arguments.json, {**about, "rows": rows})
    if apart and not arguments.no_torch and not arguments.rivals:
        about["pytorch"] = multigpu_torch.run_all(
            arguments.devices, arguments.rounds, arguments.only, arguments.timeout
        )
        print("\n".join(torch_lines(about["pytorch"])), flush=True)
        _write(arguments.json, {**about, "rows": rows})


def _write(file: str | None, found: dict[str, Any]) -> None:
    if file:
        pathlib.Path(file).write_text(json.dumps(found, indent=1))


def torch_lines(found: dict[str, Any]) -> list[str]:
    """What ``multigpu_torch.py`` has found, as lines of a table."""
    lines = [f"{'PyTorch, symmetric memory':72} {'step':>9} {'kernel':>9}"]
    for case, operations in found["rows"].items():
        for name, one in operations.items():
            if isinstance(one, str):
                lines.append(f"{case:38} {name:33}  {one}")
                continue
            kernel = one.get("kernel")
            text = f"{kernel:9.1f}" if kernel else f"{'-':>9}"
            lines.append(f"{case:38} {name:33} {one['microseconds']:9.1f} {text}  {one['way']}")
    return lines + ([f"    {found['failed']}"] if "failed" in found else [])


def measure_apart(
    name: str, options: list[str], timeout: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measures a case in a process of its own.

    Args:
      name: of the case.
      options: of this program.
      timeout: seconds after which the process is ended.

    Returns:
      What :func:`measure` returns, or under ``"process"`` why the process gave no numbers; and what
      it tells about the machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "rows.json")
        command = [sys.executable, __file__, *options, "--case", name, "--json", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"process": f"took more than {timeout:g} s"}, {}
        if file.exists():  # It may have failed at its end, when it gave memory back.
            told = json.loads(file.read_text())
            (row,) = told.pop("rows")
            kernels = row.get("kernel_microseconds")
            return row["microseconds"] | ({"kernels": kernels} if kernels else {}), told
    return {"process": f"ended with {done.returncode}: {first_error(done.stderr)}"}, {}


def first_error(text: str) -> str:
    """The line of a program's messages that says why it ended, as far as that can be told."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt)\b", line)]
    named = [line for line in lines if re.search(r"error|fatal|abort|^F\d{4}", line, re.IGNORECASE)]
    return (raised[:1] + named[:1] + lines[-1:] + ["no message"])[0][:MESSAGE]


def _line(case: Case, found: dict[str, Any], kernels: dict[str, float]) -> str:
    def number(name: str) -> str:
        value = found.get(name)
        return f"{value:9.1f}" if isinstance(value, float) else f"{'-':>9}"

    texts = [f"{case.name:38}", *(number(name) for name in ("nccl", "upstream", "pallasite"))]
    nccl, ours = found.get("nccl"), found.get("pallasite")
    if isinstance(nccl, float) and isinstance(ours, float):
        texts.append(f"{nccl / ours:15.2f}")
        if case.nbytes:
            texts.append(f"{case.nbytes / ours / 1e3:8.1f}")
    alone = found.get("alone")
    if isinstance(alone, float) and isinstance(ours, float):
        texts.append(f" {alone / case.part / ours:.3f} of one device's rate")
    if kernels:
        texts.append(f" ({', '.join(f'{name} {time:.1f}' for name, time in kernels.items())})")
    failed = [f"\n    {name}: {value}" for name, value in found.items() if isinstance(value, str)]
    return " ".join(texts) + "".join(failed)


if __name__ == "__main__":
    main()
