"""What commands on kernels share: which kernel, for what target, with which arguments."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pallasite.cli import kernel_file, output
from pallasite.cli.array_types import ArrayType, array_type, setting
from pallasite.cli.user_code import running
from pallasite.errors import InvalidValueError

if TYPE_CHECKING:
    from pallasite.codegen.compiled import CompiledKernel
    from pallasite.targets import Target


def add_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Adds what says which kernel to compile, and how; ``optional`` if there may be none."""
    parser.add_argument(
        "kernel",
        metavar="FILE[::KERNEL]",
        nargs="?" if optional else None,
        help="a Python file, and a kernel or a function in it; without KERNEL, lists them",
    )
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="what to compile for, such as sm_90a; see 'pallasite targets'."
        " By default what the kernel or the configuration says, else the local GPU, else sm_90a",
    )
    parser.add_argument(
        "--arg",
        metavar="TYPE",
        type=array_type,
        action="append",
        default=[],
        help="type of the next argument, such as 'f32[1024,1024]' or 'i32[]'",
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
        "--only", metavar="NAME", help="of several kernels that a function calls, the one to take"
    )


def listing(arguments: argparse.Namespace) -> str | None:
    """What the file offers, if the user named no kernel.

    Raises:
      PallasiteError: the file cannot be loaded.
    """
    path, _, name = arguments.kernel.partition("::")
    if name:
        return None
    found = kernel_file.load(path).candidates()
    if not found:
        return f"{path} defines no public function"
    rows = [(f"{path}::{one.name}", one.origin) for one in found]
    return output.table(("kernel or function", "arguments"), rows)


def compile_kernels(
    arguments: argparse.Namespace, *, assemble: bool = False, disassemble: bool = False
) -> list[CompiledKernel]:
    """Compiles the kernels that the user named.

    Raises:
      PallasiteError: whatever is wrong with the target, the file or the kernel.
    """
    path, _, name = arguments.kernel.partition("::")
    target = target_of(arguments)
    file = kernel_file.load(path)
    candidate = file.find(name)
    inputs = kernel_file.arguments_of(candidate, arguments.arg, file)
    function = with_settings(candidate.function, dict(arguments.set))
    check_operands(name, function, arguments.arg or inputs)
    from pallasite.runtime.api import compile_all

    with running(file.path.resolve()):
        found = compile_all(
            function, *inputs, target=target, assemble=assemble, disassemble=disassemble
        )
    if arguments.only is None:
        return found
    chosen = [kernel for kernel in found if kernel.name == arguments.only]
    if not chosen:
        raise InvalidValueError(
            f"{name!r} calls no kernel named {arguments.only!r}",
            expected="one of " + ", ".join(kernel.name for kernel in found),
        )
    return chosen


def with_settings(function: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """The function with some keyword arguments fixed, under its own name."""
    if not settings:
        return function
    fixed = functools.partial(function, **settings)
    fixed.__name__ = getattr(function, "__name__", "function")  # type: ignore[attr-defined]
    return fixed


def check_operands(name: str, function: Callable[..., Any], given: Sequence[Any]) -> None:
    """Compares the number of arrays with those that a function must be given.

    Raises:
      InvalidValueError: they are too few.
    """
    expected = kernel_file.operand_names(function)
    if expected is not None and len(given) < len(expected):
        raise InvalidValueError(
            f"{name!r} takes more arrays than it was given",
            got=", ".join(map(_type, given)) or "none",
            expected=f"{len(expected)}: {', '.join(expected)}",
            hint="--arg for each array, --set NAME=VALUE for the rest",
        )


def target_of(arguments: argparse.Namespace) -> Target | None:
    """The target that the user named, if any.

    Raises:
      TargetError: there is none of that name.
    """
    if arguments.target is None:
        return None
    from pallasite.target_selection import find_target

    return find_target(arguments.target, "--target")


def _type(value: Any) -> str:
    """An array's type, or what stands for it."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return str(ArrayType(str(value.dtype), tuple(value.shape)))
    return str(value)
