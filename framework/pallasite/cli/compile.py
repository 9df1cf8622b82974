"""Compile a kernel of a Python file and write one stage of it.

Without KERNEL it lists what the file offers. KERNEL is a kernel or any function of arrays that
calls one. The arguments that it is compiled for are the first of these that there is:

  --arg 'f32[1024,1024]'     once for each argument; --arg 'i32[]' is a scalar
  KERNEL.example_inputs      an attribute: a tuple of arrays or jax.ShapeDtypeStruct, or a function
                             that returns one
  KERNEL_args()              a function of the same file that returns such a tuple
  EXAMPLES                   a list of objects with the attributes name, function and
                             make_inputs(key); the name of an example can be KERNEL, too

The output appears under its name only when it is complete. The stage is that of --emit, else that
of the output's suffix (.jaxpr .mlir .ll .ptx .cubin .sass), else ptx. Machine code needs ptxas and
its text nvdisasm: see 'pallasite doctor'.

  pallasite compile kernels.py
  pallasite compile kernels.py::softmax --arg 'bf16[4096,4096]' --target sm_90a -o softmax.ptx
  pallasite compile kernels.py::attention --set causal=True --emit sass | less
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from pallasite.cli import kernels, output
from pallasite.errors import InvalidValueError

STAGES = ("jaxpr", "mlir", "llvm", "ptx", "cubin", "sass")
_SUFFIXES = {".ll": "llvm", **{f".{stage}": stage for stage in STAGES}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    kernels.add_arguments(parser)
    parser.add_argument("--emit", choices=STAGES, help="the stage to write")
    parser.add_argument("-o", "--output", metavar="OUT", help="a file; by default standard output")
    parser.add_argument(
        "--dump", metavar="DIR", help="write every stage and the result of every pass there, too"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compiles and writes."""
    listing = kernels.listing(arguments)
    if listing is not None:
        if arguments.output or arguments.emit:
            raise InvalidValueError(
                "no kernel was named",
                expected=f"{arguments.kernel}::KERNEL",
                hint=f"pallasite compile {arguments.kernel}  lists what the file offers",
            )
        print(listing)
        return 0
    stage = arguments.emit or _stage_of(arguments.output)
    if stage == "cubin" and arguments.output is None and sys.stdout.isatty():
        raise InvalidValueError("machine code is not for the terminal", hint="-o kernel.cubin")

    from pallasite import config

    with config.scoped(**({"dump": arguments.dump} if arguments.dump else {})):
        compiled = kernels.compile_kernels(
            arguments, assemble=stage == "cubin", disassemble=stage == "sass"
        )
    if len(compiled) > 1:
        names = [kernel.name for kernel in compiled]
        unique = next((name for name in names if names.count(name) == 1), None)
        raise InvalidValueError(
            f"{arguments.kernel} calls {len(compiled)} different kernels",
            got=", ".join(names),
            hint=f"--only {unique}" if unique else "give each another kernel_name",
        )
    content = getattr(compiled[0], stage)
    if isinstance(content, str):
        content = (content if content.endswith("\n") else f"{content}\n").encode()
    output.write(content, arguments.output)
    return 0


def _stage_of(path: str | None) -> str:
    return _SUFFIXES.get(pathlib.Path(path or "").suffix, "ptx")
