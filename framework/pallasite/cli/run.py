"""Run a kernel on some inputs, and say what it did.

The first form runs a kernel of a Python file, found as by 'pallasite compile'. Its inputs are those
of --arg, else those that the file says: an example's own, or random numbers for the types. An
example's check(inputs, output), or a function KERNEL_check(inputs, output) of the file, says
whether the result is right: it raises AssertionError, or returns a bool or a relative error.

The second form runs PTX from whatever compiler. It needs the launch, and one --arg for each
parameter of the kernel. Without ::KERNEL the file must have just one.

  --arg 'f32[1024]'          random numbers; also f32[1024]:zeros, :ones, :iota, :2.5, :FILE.npy
  --arg out:f32[1024]        what the kernel writes (PTX); inout: for what it reads, too
  --arg i32=5                a scalar by value
  --arg x.npy                an array from a file
  --arg null                 a null pointer (PTX)

'gpu' runs on JAX's GPU, by the launcher of the highest priority. The executors of plugins, such as
'simulator', have names of their own: see 'pallasite doctor'. The options on blocks, checks,
processes and statistics are for those that give reports.
Exit status 1 if a check fails, or the kernel does something wrong.

  pallasite run examples/softmax.py::softmax_f32_1024 --statistics
  pallasite run kernels.py::attention --arg 'bf16[4096,128]' --blocks 0,3-5 --sanitize
  pallasite run add.ptx --grid 8 --block 128 --arg 'f32[1024]' --arg out:f32[1024] --arg i32=1024
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pallasite import config, files
from pallasite.cli import kernel_file, kernels, output
from pallasite.cli.array_types import setting
from pallasite.cli.run_arguments import argument, make, random_array
from pallasite.cli.run_report import Outcome, Verdict, as_json, as_text, verdict_of
from pallasite.cli.user_code import running
from pallasite.errors import ExecutionError, InvalidValueError

if TYPE_CHECKING:
    from pallasite.executors import Executor, RunOptions, RunReport
    from pallasite.targets import Target

GPU = "gpu"
"""The name here of whatever launches on JAX's GPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument(
        "kernel",
        metavar="FILE[::KERNEL]",
        help="a Python file and a kernel or a function in it, or a PTX file (.ptx)",
    )
    parser.add_argument("--target", metavar="NAME", help="what to compile for, such as sm_90a")
    parser.add_argument(
        "--executor", metavar="NAME", help="what runs it; by default the GPU if there is one"
    )
    parser.add_argument(
        "--arg",
        metavar="VALUE",
        type=argument,
        action="append",
        default=[],
        help="the next argument, as above",
    )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        type=setting,
        action="append",
        default=[],
        help="a keyword argument that is no array, such as causal=True",
    )
    parser.add_argument(
        "--devices",
        metavar="N",
        type=_count,
        help="how many CPU devices JAX has, for programs with jax.shard_map",
    )
    parser.add_argument("--seed", type=int, default=0, help="of random numbers")
    parser.add_argument(
        "--save", metavar="FOLDER", help="write the outputs there: output_0.npy and so on"
    )
    parser.add_argument("--json", metavar="FILE", help="write all results there; '-' prints them")
    reports = parser.add_argument_group("how it is run, and what is reported")
    reports.add_argument(
        "--blocks",
        metavar="LIST",
        type=_blocks,
        help="numbers of the blocks of the grid to run, such as 0,3-5",
    )
    reports.add_argument(
        "--statistics", action="store_true", help="count instructions, bytes and bank conflicts"
    )
    reports.add_argument(
        "--sanitize",
        action=argparse.BooleanOptionalAction,
        help="check what the kernel does; by default what the configuration says",
    )
    reports.add_argument(
        "--checks", metavar="NAMES", help="the checks to make, separated by commas"
    )
    reports.add_argument(
        "--processes", metavar="N", type=_count, help="how many processes share the work"
    )
    reports.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show a progress bar; by default on a terminal",
    )
    launch = parser.add_argument_group("the launch of PTX")
    for name, text in (
        ("grid", "blocks of the grid: x,y,z"),
        ("block", "threads of a block"),
        ("cluster", "blocks of a cluster"),
    ):
        launch.add_argument(f"--{name}", metavar="X[,Y[,Z]]", type=_extent, help=text)
    launch.add_argument(
        "--shared", metavar="BYTES", type=int, help="dynamic shared memory of a block"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs, and reports."""
    path = arguments.kernel.partition("::")[0]
    if path.endswith(".ptx"):
        outcome = _run_ptx(arguments)
    else:
        _no_launch(arguments)
        listing = kernels.listing(arguments)
        if listing is not None:
            print(listing)
            return 0
        outcome = _run_function(arguments)
    if arguments.save is not None:
        _save(outcome, pathlib.Path(arguments.save))
    for report in outcome.reports:
        if report.printed and arguments.json != "-":
            print(report.printed, end="" if report.printed.endswith("\n") else "\n")
    if arguments.json is not None:
        text = json.dumps(as_json(outcome), indent=2) + "\n"
        output.write(text.encode(), arguments.json)
    if arguments.json != "-":
        print(as_text(outcome))
    return 0 if outcome.good else 1


# Python files -------------------------------------------------------------------------------------


def _run_function(arguments: argparse.Namespace) -> Outcome:
    path, _, name = arguments.kernel.partition("::")
    target = kernels.target_of(arguments)
    if arguments.devices is not None:
        _use_devices(arguments.devices)
    file = kernel_file.load(path)
    candidate = file.find(name)
    executor = _executor(arguments.executor, "inspect", name)
    if executor is None or executor.inspect is None:
        _no_reports(arguments, executor)
    function = kernels.with_settings(candidate.function, dict(arguments.set))

    import jax
    import numpy as np

    reports: list[RunReport] = []
    verdict = None
    with _device(executor):
        inputs = _inputs(arguments, candidate, file)
        kernels.check_operands(name, function, inputs)
        with (
            running(file.path.resolve()),
            _on_gpu(arguments.executor),
            _observed(executor, arguments, target, reports),
        ):
            result = jax.block_until_ready(jax.jit(function)(*inputs))
        outputs = [np.asarray(array) for array in jax.tree.leaves(result)]
        if candidate.check is not None and arguments.blocks is None:
            with running(file.path.resolve()):
                verdict = _compare(candidate, inputs, result)
    title = f"{name} for {target.name}" if target is not None else name
    return Outcome(title, _name(executor), outputs, reports, verdict)


@contextlib.contextmanager
def _observed(
    executor: Executor | None,
    arguments: argparse.Namespace,
    target: Target | None,
    reports: list[RunReport],
) -> Iterator[None]:
    """Runs the kernels of programs by an executor, compiled for a target; collects its reports."""
    from pallasite.executors import LaunchRequest
    from pallasite.plugins import manager
    from pallasite.runtime.override import override

    implementation = manager().implementation
    run_kernel = None
    if executor is not None and executor.inspect is not None:
        inspect = functools.partial(_collect, executor, _options(arguments), reports)
        run_kernel = functools.partial(implementation("run_on_host"), inspect)
    elif executor is not None:
        run_kernel = functools.partial(executor.run, request=LaunchRequest(platform="cpu"))
    with implementation("kernel_errors")(), override(run_kernel, target):
        yield


def _collect(
    executor: Executor,
    options: RunOptions,
    reports: list[RunReport],
    compiled: Any,
    inputs: Sequence[Any],
) -> Sequence[Any]:
    assert executor.inspect is not None
    report = executor.inspect(compiled, inputs, options)
    reports.append(report)
    return report.outputs


def _inputs(
    arguments: argparse.Namespace, candidate: kernel_file.Candidate, file: kernel_file.KernelFile
) -> tuple[Any, ...]:
    """The arrays to run with, all with values."""
    import jax
    import numpy as np

    generator = np.random.default_rng(arguments.seed)
    if arguments.arg:
        for one in arguments.arg:
            if one.written or one.fill == "null":
                raise InvalidValueError(
                    "an argument that only a PTX kernel can have",
                    got="out:, inout: or null",
                    expected="types and values of inputs; JAX makes the outputs",
                )
        kernel_file.types_of([one.type for one in arguments.arg if one.type is not None])
        return tuple(make(one, generator) for one in arguments.arg)
    if candidate.values is not None:
        with running(file.path.resolve()):
            given = candidate.values(arguments.seed)
    else:
        given = kernel_file.arguments_of(candidate, (), file)

    def value(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return random_array(generator, leaf.shape, leaf.dtype)
        return leaf

    return tuple(jax.tree.map(value, one) for one in given)


def _compare(candidate: kernel_file.Candidate, inputs: Sequence[Any], result: Any) -> Verdict:
    assert candidate.check is not None
    try:
        return verdict_of(candidate.check(inputs, result))
    except AssertionError as error:
        return Verdict(False, f"wrong: {error}" if str(error) else "wrong")


# PTX files ----------------------------------------------------------------------------------------


def _run_ptx(arguments: argparse.Namespace) -> Outcome:
    path, _, name = arguments.kernel.partition("::")
    for option in ("grid", "block"):
        if getattr(arguments, option) is None:
            raise InvalidValueError(f"--{option} is missing: PTX does not say how it is launched")
    if arguments.set:
        raise InvalidValueError("--set is for functions of Python files, not for PTX")
    try:
        text = pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"cannot read {path}", got=str(error)) from error
    target = kernels.target_of(arguments)
    executor = _executor(arguments.executor, "run_ptx", path)
    assert executor is not None and executor.run_ptx is not None

    import numpy as np

    from pallasite.executors import PtxLaunch

    generator = np.random.default_rng(arguments.seed)
    values = [make(one, generator) for one in arguments.arg]
    for one, value in zip(arguments.arg, values, strict=True):
        if isinstance(value, np.ndarray):
            value.flags.writeable = one.written
    launch = PtxLaunch(
        ptx=text,
        arguments=tuple(values),
        grid=arguments.grid,
        block=arguments.block,
        cluster=arguments.cluster or (1, 1, 1),
        shared_memory_bytes=arguments.shared or 0,
        name=name or None,
        target=target,
    )
    report = executor.run_ptx(launch, _options(arguments))
    outputs = [v for one, v in zip(arguments.arg, values, strict=True) if one.written]
    return Outcome(arguments.kernel, executor.name, outputs, [report])


# Executors ----------------------------------------------------------------------------------------


def _executor(name: str | None, ability: str, what: str) -> Executor | None:
    """The executor to use; None for one that launches on the GPU (see :func:`_on_gpu`).

    Args:
      name: what the user asked for.
      ability: the field of executors that is needed for PTX, or wanted.
      what: is to be run, for messages.

    Raises:
      ExecutionError: there is none.
    """
    from pallasite.plugins import registry
    from pallasite.runtime.executors import no_executor

    executors = registry().executors
    known = [GPU, *executors]
    ptx = ability == "run_ptx"
    if name not in (None, *known):
        raise InvalidValueError(
            f"no executor named {name!r}", expected="one of " + ", ".join(known)
        )
    if name is None and not ptx and _backend() == "gpu":
        return None
    if name is not None and not ptx and _needs_gpu(name):
        if _backend() != "gpu":
            raise ExecutionError(
                f"executor {name!r} needs a CUDA GPU that JAX can use",
                got=f"JAX is on {_backend()!r}",
                hint="'pallasite doctor' says what is missing",
            )
        return None
    with contextlib.nullcontext() if name is None else config.scoped(executor=name):
        choice = registry().executor_choice("cpu")
    if not ptx:
        if choice.chosen is None:
            raise no_executor(choice, what)
        return choice.chosen
    candidates = [
        one.executor
        for one in choice.candidates
        if one.executor.run_ptx is not None
        and one.unavailable is None
        and name in (None, one.executor.name)
    ]
    if not candidates:
        raise ExecutionError(
            f"executor {name!r} cannot run {what}" if name else f"no executor can run {what}",
            expected="an executor that runs PTX",
            hint="'pallasite doctor' lists the executors",
        )
    return candidates[0]


def _needs_gpu(name: str) -> bool:
    """Whether an executor launches on the GPU and cannot work on the CPU."""
    from pallasite.plugins import registry

    return name == GPU or "cpu" not in registry().executors[name].platforms


def _on_gpu(name: str | None) -> contextlib.AbstractContextManager[None]:
    """Has the executor of this name launch on the GPU, if it is one that does."""
    if name in (None, GPU) or not _needs_gpu(str(name)):
        return contextlib.nullcontext()
    return config.scoped(executor=name)


def _backend() -> str:
    import jax

    return str(jax.default_backend())


def _use_devices(count: int) -> None:
    """Lets JAX have so many CPU devices."""
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise InvalidValueError(
            "--devices comes too late: JAX has been started",
            got=str(error),
            hint="set XLA_FLAGS=--xla_force_host_platform_device_count=N instead",
        ) from error


def _device(executor: Executor | None) -> contextlib.AbstractContextManager[Any]:
    """Keeps programs on the CPU, where executors of plugins run their kernels."""
    import jax

    here: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if executor is not None:
        here = jax.default_device(jax.devices("cpu")[0])
    return here


def _name(executor: Executor | None) -> str:
    if executor is not None:
        return executor.name
    import jax

    return str(jax.devices()[0].device_kind)


# Options ------------------------------------------------------------------------------------------


def _options(arguments: argparse.Namespace) -> RunOptions:
    from pallasite.executors import RunOptions

    sanitize = arguments.sanitize
    if arguments.checks is not None and sanitize is not False:
        sanitize = tuple(one.strip() for one in arguments.checks.split(","))
    return RunOptions(
        blocks=arguments.blocks,
        processes=arguments.processes,
        progress=arguments.progress,
        sanitize=sanitize,
        statistics=arguments.statistics,
    )


def _no_reports(arguments: argparse.Namespace, executor: Executor | None) -> None:
    """Refuses what only executors with reports can do."""
    given = [
        f"--{name}"
        for name in ("blocks", "statistics", "sanitize", "checks", "processes", "progress")
        if getattr(arguments, name)
    ]
    if given:
        raise InvalidValueError(
            f"executor {executor.name if executor else GPU!r} cannot do this",
            got=", ".join(given),
            hint="--executor with the name of one that reports, such as simulator",
        )


def _no_launch(arguments: argparse.Namespace) -> None:
    given = [
        f"--{name}"
        for name in ("grid", "block", "cluster", "shared")
        if getattr(arguments, name) is not None
    ]
    if given:
        raise InvalidValueError(
            "a kernel of a Python file says itself how it is launched", got=", ".join(given)
        )


def _save(outcome: Outcome, folder: pathlib.Path) -> None:
    import numpy as np

    try:
        files.make_folder(folder)
        for number, array in enumerate(outcome.outputs):
            content = io.BytesIO()
            np.save(content, array)
            files.write(folder / f"output_{number}.npy", content.getvalue())
    except OSError as error:
        raise InvalidValueError(f"cannot write to {folder}", got=str(error)) from error


def _blocks(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(
                f"{text!r} is no list of blocks; expected numbers and ranges, such as 0,3-5"
            )
        found += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(found))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _extent(text: str) -> tuple[int, int, int]:
    parts = [part.strip() for part in text.split(",")]
    if not 1 <= len(parts) <= 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no extent; expected X, X,Y or X,Y,Z")
    x, y, z = (*map(int, parts), 1, 1)[:3]
    return x, y, z
