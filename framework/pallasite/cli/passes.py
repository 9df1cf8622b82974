"""List the steps of a compilation in their order: the passes of each stage and the fixed steps.

Passes are switched off by PALLASITE_DISABLE_PASSES=name,name. Fixed steps always run, those marked
'on request' only when machine code or its text is asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pallasite import config
from pallasite.cli import output

if TYPE_CHECKING:
    from pallasite.extensions import Pass


@dataclasses.dataclass(frozen=True)
class Step:
    """One line of the list: a pass, or a fixed step (which belongs to no plugin)."""

    name: str
    stage: str
    plugin: str
    state: str
    targets: str
    description: str


def _fixed(name: str, stage: str, description: str, state: str = "fixed") -> Step:
    return Step(name, stage, "", state, "", description)


_BEFORE: dict[str, tuple[Step, ...]] = {
    "jaxpr": (_fixed("trace", "jaxpr", "the user's function becomes a jaxpr"),),
    "mlir": (_fixed("lower", "jaxpr to mlir", "the rules of each primitive emit MLIR"),),
    "llvm": (
        _fixed("translate", "mlir to llvm", "MLIR becomes the text of LLVM IR"),
        _fixed("llvm-parse", "llvm", "LLVM reads and verifies it"),
    ),
    "ptx": (_fixed("ptx-emit", "llvm to ptx", "LLVM's code generator for NVPTX"),),
}
"""By stage, the fixed steps before its passes."""

_LAST = (
    _fixed("ptxas", "ptx to cubin", "assembles machine code, counts registers", "on request"),
    _fixed("disassemble", "cubin to sass", "shows machine code as text", "on request"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--target", metavar="NAME", help="only the passes that run for this target")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Lists the steps."""
    from pallasite.plugins import registry
    from pallasite.target_selection import find_target

    target = find_target(arguments.target, "--target") if arguments.target else None
    disabled, source = config.source("disabled_passes")
    known = registry()
    steps = list(_steps(known.passes(target=target), frozenset(disabled), source))
    unknown = sorted(set(disabled) - {entry.name for entry in known.passes()})
    if arguments.json:
        found = [dataclasses.asdict(step) for step in steps]
        output.print_json({"steps": found, "unknown_disabled_passes": unknown})
        return 0
    rows = [
        (s.stage, s.name, s.state, s.plugin or "-", s.targets or "-", s.description) for s in steps
    ]
    print(output.table(("stage", "step", "state", "plugin", "targets", ""), rows))
    if unknown:
        print(f"\n{source} names passes that do not exist: {', '.join(unknown)}")
        print("Every compilation fails until they are taken out.")
    return 0


def _steps(passes: Sequence[Pass], disabled: frozenset[str], source: str) -> Iterator[Step]:
    for stage, fixed in _BEFORE.items():
        yield from fixed
        for entry in passes:
            if entry.stage == stage:
                state = f"off ({source})" if entry.name in disabled else "on"
                yield Step(
                    entry.name, stage, entry.plugin, state, str(entry.target), entry.description
                )
    yield from _LAST
