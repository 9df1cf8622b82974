"""The other operations of the Hopper library: narrow weights, groups of rows, decoding, wide heads.

All contenders of a row are checked, tuned and timed in the same run; docs/benchmarks.md says how.

    python benchmarks/library.py --json library.json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attention
import contest_tables
import harness
import operands
import program
import rates
import upstream_library
from contest import Contender, Row, RowResult
from library_decode import Decode
from library_mixed import Mixed
from library_ragged import Ragged

RIVALS = ("xla", "cudnn", "upstream", "torch", "bf16")

QUICK = (
    "int8_128x8192x8192",
    "int4_64x8192x8192",
    "ragged_8192x4096x4096_g8",
    "transposed_ragged_8192x4096x4096_g8",
    "decode_b64_c8192",
    "d256_forward_s4096",
)


class Problem(Protocol):
    """What a row is made of.

    Attributes:
      bound: ``"copy"`` or ``"product"``: what the time is compared with.
    """

    bound: str

    def row(self) -> Row:
        """The row."""

    def contenders(self, arguments: argparse.Namespace) -> list[Contender]:
        """All contenders."""


@dataclasses.dataclass(frozen=True)
class WideHeads:
    """Attention, forward, with heads of 256."""

    problem: attention.Problem

    bound = "product"

    def row(self) -> Row:
        """The row."""
        row = attention.make_row(self.problem)
        name = "d256_" + row.name.removesuffix("_d256")
        return dataclasses.replace(row, name=name, group=f"d256 {row.group}")

    def contenders(self, arguments: argparse.Namespace) -> list[Contender]:
        """All contenders."""
        return attention.contenders(self.problem, arguments)


def problems(rehearse: bool) -> list[Problem]:
    """All rows."""
    if rehearse:
        heads = attention.Problem(1, 256, 1, 256, True, False)
        return [
            Mixed("int8", 16, 128, 128),
            Mixed("int4", 136, 128, 128),
            Ragged(192, 128, 128, 3),
            Ragged(192, 128, 128, 3, transposed=True),
            Decode(2, 256, heads=4, kv_heads=2),
            Decode(2, 256, full=False, heads=4, kv_heads=2),
            WideHeads(heads),
        ]
    tokens = attention.TOKENS
    return [
        *(Mixed(weights, m, 8192, 8192) for weights in ("int8", "int4") for m in (64, 128, 4096)),
        *(Ragged(rows, 4096, 4096, 8) for rows in (4096, 8192, 16384)),
        *(Ragged(rows, 4096, 4096, 8, transposed=True) for rows in (4096, 8192, 16384)),
        *(Decode(batch, context) for batch, context in ((8, 2048), (8, 16384), (64, 8192))),
        *(Decode(batch, context, full=False) for batch, context in ((16, 8192), (64, 8192))),
        *(Decode(batch, context) for batch, context in ((1, 32768), (3, 6144), (20, 3072))),
        *(Decode(batch, context, full=False) for batch, context in ((5, 11264), (32, 1536))),
        Decode(12, 4096, heads=64), Decode(6, 4096, heads=16, kv_heads=16),
        *(
            WideHeads(
                attention.Problem(tokens // sequence, sequence, heads=8, head_dim=256,
                                  causal=causal, backward=False)
            )
            for causal in (False, True)
            for sequence in (4096, 16384)
        ),
    ]  # fmt: skip


def kernels(arguments: argparse.Namespace) -> dict[str, Any]:
    """The kernels whose compilation is timed; every repetition has another shape."""
    size, step, search = (128, 64, "one") if arguments.rehearse else (4096, 128, "one")

    def kernel(
        name: str,
        make: Callable[[int], Any],
        ours: Callable[[Any], Any],
        theirs: Callable[[Any], Any],
    ) -> Any:
        def with_inputs(function: Callable[[Any], Any], repetition: int) -> Any:
            problem = make(repetition)
            return function(problem), problem.row().inputs(repetition)

        return program.compilers(
            name,
            arguments,
            ours=lambda repetition: with_inputs(ours, repetition),
            upstream=lambda repetition: with_inputs(theirs, repetition),
        )

    def theirs_mixed(problem: Mixed) -> Any:
        blocks = upstream_library.MixedBlocks(64, 64, 64, "M")
        product = upstream_library.mixed(
            blocks, upstream_library.load("hopper_mixed_type_matmul_mgpu")
        )
        return lambda a, w: product(w, a.T)

    def theirs_ragged(problem: Ragged) -> Any:
        blocks = upstream_library.GroupBlocks(64, 64, grid_block_n=1)
        if problem.transposed:
            module = upstream_library.load("transposed_ragged_dot_mgpu")
            return upstream_library.transposed_ragged(blocks, module)
        return upstream_library.ragged(blocks, upstream_library.load("ragged_dot_mgpu"))

    def theirs_decode(problem: Decode) -> Any:
        blocks = upstream_library.DecodeBlocks(problem.page_size, 1, 4, True)
        attend = upstream_library.paged(problem.page_size, blocks)
        return lambda q, k, v, lengths, pages: attend(q, k, v, pages, lengths)

    def depth(repetition: int) -> int:
        return size + step * (repetition + 1)

    names = {
        "int8": (lambda r: Mixed("int8", 128, size, depth(r)), Mixed.our_product, theirs_mixed),
        "ragged": (
            lambda r: Ragged(size, depth(r), size, 8), Ragged.our_product, theirs_ragged
        ),
        "transposed ragged": (
            lambda r: Ragged(size, depth(r), size, 8, transposed=True),
            Ragged.our_product, theirs_ragged,
        ),
        "decode": (lambda r: Decode(2, depth(r), full=False), Decode.our_attention, theirs_decode),
    }  # fmt: skip
    found = {name: kernel(name, *parts) for name, parts in names.items()}
    return found | attention.kernels(arguments, {"forward d256": (256, False, False)})


def print_table(
    rows: list[RowResult], facts: dict[str, Any], bounds: dict[str, str]
) -> dict[str, Any]:
    """Prints the table; returns shares and geometric means."""
    names = ("ours", *RIVALS)
    lines, shares = [], {}
    for row in rows:
        bound, taken = bounds[row.name], row.milliseconds("ours")
        counted = row.bytes if bound == "copy" else row.flops
        limit = facts.get("bandwidth" if bound == "copy" else "matrix_rate")
        share = counted / (taken * 1e-3) / limit if taken and limit else None
        shares[row.name] = share
        cells = contest_tables.microseconds(row, names)
        of = f"{contest_tables.percent(share)} of {bound}"
        lines.append((row.name, *cells, of, contest_tables.ratio_text(row.ratio())))
    print("microseconds; ours as a share of the rate of a copy or of a large product")
    harness.print_table(("row", *names, "ours", "ours / best rival"), lines)
    means = contest_tables.group_means(rows)
    if "bandwidth" in facts:
        print(f"\ncopy: {facts['bandwidth'] / 1e12:.3f} TB/s ({facts['bandwidth_by']})")
        print(f"product: {facts['matrix_rate'] / 1e12:.1f} TFLOP/s (8192 x 8192 x 16384, by XLA)")
    print("ours / best rival, geometric means: ", end="")
    print(", ".join(f"{group} {contest_tables.ratio_text(mean)}" for group, mean in means.items()))
    return {"shares": shares, "geometric_means": means}


def benchmark(arguments: argparse.Namespace) -> program.Benchmark:
    """What this program measures."""
    listed = {problem.row().name: problem for problem in problems(arguments.rehearse)}
    bounds = {name: problem.bound for name, problem in listed.items()}
    return program.Benchmark(
        name="library",
        script=__file__,
        rows={name: problem.row() for name, problem in listed.items()},
        quick=list(listed) if arguments.rehearse else QUICK,
        contenders=lambda row: operands.able(listed[row.name].contenders(arguments)),
        kernels=kernels(arguments),
        facts=lambda timer: (
            rates.copy(timer, arguments.rehearse) | rates.product(timer, arguments.rehearse)
        ),
        print_table=lambda rows, facts: print_table(rows, facts, bounds),
    )


def main(argv: Sequence[str]) -> int:
    """Measures, prints tables and writes JSON; 1 if one of ours failed."""
    return program.main(benchmark, program.parser(__doc__.splitlines()[0]), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
