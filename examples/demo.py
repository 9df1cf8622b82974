"""Compiles examples for every target, runs them, checks the results, and shows it all in a table.

Without arguments these are a GEMM, an attention and a softmax that every target supports;
names (or parts of names) choose others, and ``--all`` takes all. It needs no GPU: without one, the
kernels run on the simulator, whose sanitizer checks what they do. The exit status is 1 if anything
failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures.process
import contextlib
import dataclasses
import math
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

import pallasite
from examples.catalog import Example, all_examples
from examples.measuring import Outcome, Task, perform, run
from pallasite import plugins
from pallasite.codegen.tools import find_tool
from pallasite.target_selection import local_compute_capability, select_target

#: What runs without arguments: each compiles for every target.
FIRST = ("warp_matmul_bf16", "warp_attention_bf16", "softmax_bf16_16384")

#: The columns of the table and their widths, which are negative where text begins at the left.
COLUMNS = {
    "example": -28,
    "target": -8,
    "SMEM": 6,
    "registers": 9,
    "spills": 6,
    "PTX": 5,
    "compile": 7,
    "run": 5,
    "result": 0,
}

#: What a control group permits: microseconds of all cores, or "max", and the period in which.
CPU_LIMIT = pathlib.Path("/sys/fs/cgroup/cpu.max")

#: A process takes longer to start than it takes to do two tasks.
TASKS_PER_PROCESS = 4


def main(arguments: Sequence[str]) -> int:
    """Runs the demonstration; returns the exit status."""
    start = time.perf_counter()
    options = parse(arguments)
    examples = chosen(all_examples(), options.names, options.all)
    if not examples:
        print(f"no example has {' or '.join(options.names)} in its name; there are")
        print("\n".join(f"  {example.name}" for example in all_examples()))
        return 1
    tasks = plan(examples, main_only=options.all)
    print_head()
    processes = options.processes or default_processes(len(tasks))
    failures = print_table(tasks, outcomes(tasks, processes))
    print(f"\n{time.perf_counter() - start:.0f} seconds, {len(failures)} failures")
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line: names, ``--all``, ``--processes``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of examples' names")
    parser.add_argument(
        "--all",
        action="store_true",
        help="all examples, each run for one target: that of the local GPU or the default",
    )
    parser.add_argument(
        "--processes", type=int, default=0, help="how many work at once (default: all cores)"
    )
    return parser.parse_args(arguments)


def chosen(examples: list[Example], names: Sequence[str], everything: bool) -> list[Example]:
    """The examples to show, in the order of the catalog or, without names, of ``FIRST``."""
    if everything:
        return examples
    if names:
        return [one for one in examples if any(name in one.name for name in names)]
    return sorted((e for e in examples if e.name in FIRST), key=lambda e: FIRST.index(e.name))


def plan(examples: Iterable[Example], *, main_only: bool) -> list[Task]:
    """A task for each example and target; only what this machine can run is run.

    Args:
      examples: what to compile.
      main_only: whether to run kernels for the selected target only, not for all.
    """
    main_target = select_target().name
    targets = sorted(
        plugins.registry().targets.values(), key=lambda one: (one.compute_capability, one.name)
    )
    assemble = find_tool("ptxas").path is not None
    runs = {
        target.name: can_run(target) and (target.name == main_target or not main_only)
        for target in targets
    }
    return [
        Task(example.name, target.name, assemble, runs[target.name])
        for example in examples
        for target in targets
    ]


def on_gpu() -> bool:
    """Whether kernels run on a GPU."""
    return jax.default_backend() == "gpu"


def can_run(target: pallasite.Target) -> bool:
    """Whether kernels for the target run here: the simulator runs all, a GPU its own and older
    portable ones."""
    if not on_gpu():
        return plugins.registry().executor_choice(jax.default_backend()).chosen is not None
    capability = local_compute_capability()
    if capability is None:
        return False
    if target.name[-1].isdigit():
        return target.compute_capability <= capability
    return target.compute_capability == capability


def outcomes(tasks: Sequence[Task], processes: int) -> Iterator[Outcome]:
    """The outcomes in the order of the tasks, each as soon as it and those before it are there.

    Kernels run in the process that compiled them, but those for a GPU all in this one.
    """
    if processes == 1:
        yield from map(perform, tasks)
        return
    run_here = on_gpu()
    variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    if run_here:
        variables["JAX_PLATFORMS"] = "cpu"
    pool = concurrent.futures.ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),
        initializer=signal.signal,  # This process ends them when it is interrupted.
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        with environment(variables):
            futures = [
                pool.submit(perform, dataclasses.replace(task, execute=False) if run_here else task)
                for task in tasks
            ]
        for task, future in zip(tasks, futures, strict=True):
            try:
                outcome = future.result()
            except concurrent.futures.process.BrokenProcessPool as error:
                outcome = Outcome(problem=str(error))
            yield run(task, outcome) if run_here else outcome
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes started in this context have these environment variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def default_processes(tasks: int) -> int:
    """As many as there are cores, unless starting them would take longer than their work."""
    return max(1, min(cores(), tasks // TASKS_PER_PROCESS))


def cores() -> int:
    """How many cores this process may use: its affinity, or what its control group permits."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = CPU_LIMIT.read_text().split()
        count = min(count, math.ceil(int(quota) / int(period)))  # ValueError if it is "max".
    return max(1, count)


def print_head() -> None:
    """Says what the columns mean and where kernels run."""
    platform = jax.default_backend()
    executor = plugins.registry().executor_choice(platform).chosen
    if platform == "gpu":
        print(f"Kernels run on {jax.devices()[0].device_kind}.")
    elif executor is not None:
        print(f"Kernels run on {platform!r} by the executor {executor.name!r}, with its checks.")
    else:
        print(f"Not run: JAX is on {platform!r}, and no plugin has an executor for it. To run the")
        print("kernels, pip install 'pallasite[simulator]', or use a machine with an NVIDIA GPU")
        print("and pip install 'pallasite[cuda]'.")
    assembler = find_tool("ptxas")
    if assembler.path is None:
        print(f"No assembler, so no registers and spills: {assembler.reason}; {assembler.install}")
    print("SMEM and spills in bytes, registers per thread, lines of PTX; compile and run in")
    print("milliseconds; errors relative to the largest element of the result.\n")
    print(row(COLUMNS))


def print_table(tasks: Iterable[Task], results: Iterable[Outcome]) -> list[str]:
    """Prints a row for each task when its outcome is there; returns what failed."""
    failures = []
    for task, outcome in zip(tasks, results, strict=True):
        print(row(cells(task, outcome)))
        for line in outcome.printed.splitlines():
            print(f"    {line}")
        sys.stdout.flush()
        if outcome.problem:
            failures.append(f"{task.example} on {task.target}: {outcome.problem}")
    return failures


def cells(task: Task, outcome: Outcome) -> list[str]:
    """The cells of a row."""
    seconds = (outcome.compile_seconds, outcome.run_seconds)
    milliseconds = [None if one is None else round(1e3 * one) for one in seconds]
    figures = outcome.figures or (None,) * 4
    numbers = ["-" if one is None else str(one) for one in (*figures, *milliseconds)]
    return [task.example, task.target, *numbers, verdict(outcome)]


def verdict(outcome: Outcome) -> str:
    """The last cell of a row."""
    if outcome.problem:
        return "FAILED"
    if outcome.error is not None:
        return f"correct, error {outcome.error:.1e}"
    return outcome.needs or "compiled"


def row(texts: Iterable[str]) -> str:
    """One line of the table."""
    padded = [
        f"{text:<{-width}}" if width <= 0 else f"{text:>{width}}"
        for text, width in zip(texts, COLUMNS.values(), strict=True)
    ]
    return "  ".join(padded).rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
