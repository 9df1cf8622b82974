"""Show what a compiled kernel uses and how it is launched, and draw its layouts.

FILE, KERNEL and the arguments are as for 'pallasite compile'. Registers and spills are known where
there is ptxas. The kernel is compiled anew, so that the timings are those of a compilation.

  pallasite inspect kernels.py::softmax --arg 'bf16[4096,4096]'
  pallasite inspect kernels.py::softmax --draw pictures
  pallasite inspect --draw wgmma.svg --layout WGMMA --shape 64x16
  pallasite inspect --draw tile.svg --tiling 8x64 --swizzle 128 --shape 64x64 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import TYPE_CHECKING

from pallasite.cli import drawings, kernels, output

if TYPE_CHECKING:
    from pallasite.cli.drawings import Drawing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    kernels.add_arguments(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="a list of kernels, for programs")
    drawings.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compiles and describes."""
    drawings.check_arguments(arguments)
    if arguments.kernel is None:
        drawings.draw_alone(arguments)
        return 0
    listing = kernels.listing(arguments)
    if listing is not None:
        print(listing)
        return 0
    from pallasite import config
    from pallasite.cli import kernel_report
    from pallasite.codegen.tools import find_tool
    from pallasite.lowering.recording import recording

    assembler = find_tool("ptxas")
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.scoped(cache=False))
        layouts = stack.enter_context(recording()) if arguments.draw is not None else None
        compiled = kernels.compile_kernels(arguments, assemble=assembler.path is not None)
    pictures: list[list[Drawing]] | None = None
    if layouts is not None:
        compiled, pictures = drawings.draw_kernels(compiled, layouts, arguments.draw)
    if arguments.json:
        reports = [kernel_report.as_json(kernel) for kernel in compiled]
        for report, made in zip(reports, pictures or (), strict=False):
            report["drawings"] = [dataclasses.asdict(one) for one in made]
        output.print_json(reports)
        return 0
    missing = f"{assembler.reason}; {assembler.install}" if assembler.path is None else ""
    texts = [kernel_report.as_text(kernel, missing) for kernel in compiled]
    if pictures is not None:
        sections = map(drawings.as_text, pictures)
        texts = [f"{text}\n\n{more}" for text, more in zip(texts, sections, strict=True)]
    print("\n\n".join(texts))
    return 0
