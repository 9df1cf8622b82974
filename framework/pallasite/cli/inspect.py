"""Show what a compiled kernel uses and how it is launched.

FILE, KERNEL and the arguments are as for 'pallasite compile'. Registers and spills are known where
there is ptxas. The kernel is compiled anew, so that the timings are those of a compilation.
"""

from __future__ import annotations

import argparse

from pallasite.cli import kernels, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    kernels.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="a list of kernels, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Compiles and describes."""
    listing = kernels.listing(arguments)
    if listing is not None:
        print(listing)
        return 0
    from pallasite import config
    from pallasite.cli import kernel_report
    from pallasite.codegen.tools import find_tool

    assembler = find_tool("ptxas")
    with config.scoped(cache=False):
        compiled = kernels.compile_kernels(arguments, assemble=assembler.path is not None)
    if arguments.json:
        output.print_json([kernel_report.as_json(kernel) for kernel in compiled])
        return 0
    missing = f"{assembler.reason}; {assembler.install}" if assembler.path is None else ""
    print("\n\n".join(kernel_report.as_text(kernel, missing) for kernel in compiled))
    return 0
