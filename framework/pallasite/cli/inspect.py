"""Show what a compiled kernel uses and how it is launched; list and draw its layouts.

FILE, KERNEL and the arguments are as for 'pallasite compile'. Registers and spills are known where
there is ptxas. The kernel is compiled anew, so that the timings are those of a compilation.

  pallasite inspect kernels.py::softmax --arg 'bf16[4096,4096]'
  pallasite inspect kernels.py::softmax --layouts
  pallasite inspect kernels.py::softmax --draw pictures
  pallasite inspect --draw accumulator.svg --layout MMA_ACC --shape 64x16
  pallasite inspect --draw tile.svg --tiling 8x64 --swizzle 128 --shape 64x64 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pallasite.cli import drawings, kernels, layouts, output

if TYPE_CHECKING:
    from pallasite.cli.drawings import Drawing
    from pallasite.codegen.compiled import CompiledKernel
    from pallasite.lowering.layout_report import LayoutReport
    from pallasite.lowering.recording import KernelLayouts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    kernels.add_arguments(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="a list of kernels, for programs")
    parser.add_argument(
        "--layouts",
        action="store_true",
        help="list by source line the layouts of all arrays, and under warpgroup semantics why they"
        " have them and what is converted at which cost",
    )
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
        asked = arguments.draw is not None or arguments.layouts
        recorded = stack.enter_context(recording()) if asked else None
        compiled = kernels.compile_kernels(arguments, assemble=assembler.path is not None)
    pictures: list[list[Drawing]] = []
    reports: list[LayoutReport] = []
    if recorded is not None:
        pairs = _with_layouts(compiled, recorded)
        compiled = [kernel for kernel, _ in pairs]
        if arguments.layouts:
            reports = [layouts.report(found) for _, found in pairs]
        if arguments.draw is not None:
            pictures = drawings.draw_kernels(pairs, arguments.draw)
    if arguments.json:
        records = [kernel_report.as_json(kernel) for kernel in compiled]
        for record, report in zip(records, reports, strict=False):
            record["layouts"] = layouts.as_json(report)
        for record, made in zip(records, pictures, strict=False):
            record["drawings"] = [dataclasses.asdict(one) for one in made]
        output.print_json(records)
        return 0
    missing = f"{assembler.reason}; {assembler.install}" if assembler.path is None else ""
    texts = [[kernel_report.as_text(kernel, missing)] for kernel in compiled]
    for sections in (map(layouts.as_text, reports), map(drawings.as_text, pictures)):
        for text, section in zip(texts, sections, strict=False):
            text.append(section)
    print("\n\n".join("\n\n".join(text) for text in texts))
    return 0


def _with_layouts(
    compiled: Sequence[CompiledKernel], recorded: Sequence[KernelLayouts]
) -> list[tuple[CompiledKernel, KernelLayouts]]:
    """The kernels of a function, each once, with their layouts.

    Args:
      compiled: the kernels; one that is called in several places may be there several times.
      recorded: the layouts of all kernels that were compiled, these last.
    """
    names = {kernel.name for kernel in compiled}
    own = [found for found in recorded if found.name in names][-len(compiled) :]
    pairs = {
        (kernel.name, kernel.ptx): (kernel, found)
        for kernel, found in zip(compiled, own, strict=True)
    }
    return list(pairs.values())
