"""What programs of other compilers use of the instructions on tensor memory.

    python tests/upstream/coverage.py

runs them all (Triton's are compiled first) and prints tables for ``docs/blackwell.md``: how many
programs of each compiler use what, and what none uses.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from pallasite_blackwell.simulation import copies, moves, multiplication
from pallasite_blackwell.simulation.instruction_descriptors import F8F6F4

_SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
_COPIES = (
    "128x256b", "128x128b", "4x256b", "32x128b.warpx4", "64x128b.warpx2::02_13",
    "64x128b.warpx2::01_23",
)  # fmt: skip

FEATURES: dict[str, tuple[str, ...]] = {
    "`tcgen05.ld`": (*_SHAPES, "pack::16b", "red"),
    "`tcgen05.st`": (*_SHAPES, "unpack::16b"),
    "`tcgen05.cp`": (*_COPIES, "b6x16_p32", "b4x16_p64"),
    "`tcgen05.shift`": ("down",),
    "`tcgen05.mma`": (
        "f16: f16", "f16: bf16", "tf32", *(f"f8f6f4: {one}" for one in F8F6F4.values()),
        "i8: s8", "i8: u8", *(f"mxf8f6f4: {one}" for one in F8F6F4.values()), "mxf4",
        "mxf4nvf4: ue8m0", "mxf4nvf4: ue4m3", "K of 96",
    ),
    "D": ("f32", "f16", "s32", "negated", "saturated", "scaled", "not written in some lanes"),
    "M, one block": ("64", "128", "32, .ws", "64, .ws", "128, .ws"),
    "M, pair": ("128", "256"),
    "A": ("in tensor memory", "rows across K", "sparse", ".ashift"),
    "B": ("rows across K", "zero columns"),
    "other forms": (
        "sparse with scale factors", "sparse pair", "pair with scale factors", "`collector` hint",
    ),
}  # fmt: skip
"""What there is, by instruction or operand."""


@dataclasses.dataclass
class Recorder:
    """Notes what is used, by family of programs.

    Attributes:
      used: for each family and feature, the programs.
      family, program: which one runs.
    """

    used: dict[tuple[str, str, str], set[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(set)
    )
    family: str = ""
    program: str = ""

    def note(self, group: str, name: str) -> None:
        """The program uses something of :data:`FEATURES`."""
        assert name in FEATURES[group], (group, name)
        self.used[self.family, group, name].add(self.program)

    def names(self, family: str) -> set[tuple[str, str]]:
        """What programs of a family use."""
        return {(group, name) for one, group, name in self.used if one == family}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within this context, instructions are noted: moves as they are bound, others as they
        run."""
        with contextlib.ExitStack() as stack:

            def patch(place: Any, name: str, note: Callable[..., None]) -> None:
                original = getattr(place, name)

                def function(*arguments: Any) -> Any:
                    result = original(*arguments)
                    note(result, *arguments)
                    return result

                stack.enter_context(mock.patch.object(place, name, function))

            patch(moves, "_parse", self._move)
            patch(copies, "_parse", self._copy)
            patch(multiplication._Product, "run", self._product)
            yield

    def _move(self, form: Any, binder: Any, *_: Any) -> None:
        words = binder.instruction.modifiers
        group = f"`tcgen05.{words[0]}`"
        self.note(group, form.shape)
        for word in ("pack::16b", "unpack::16b", "red"):
            if word in words:
                self.note(group, word)

    def _copy(self, form: Any, binder: Any) -> None:
        words = binder.instruction.modifiers[2:]
        parts = [one for one in words if not one.startswith(("b8x16", "b6x16", "b4x16"))]
        self.note("`tcgen05.cp`", ".".join(parts))
        for word in words:
            if word in ("b6x16_p32", "b4x16_p64"):
                self.note("`tcgen05.cp`", word)

    def _product(self, _: None, one: Any) -> None:
        shape, given, owner = one._shape, one._given, one._owner
        variant = owner.variant
        kind, scaled = variant.kind, owner.block > 0
        for element in {shape.a, shape.b}:
            detail = {"tf32": "", "mxf4": "", "mxf4nvf4": shape.scale}.get(kind, element)
            self.note("`tcgen05.mma`", f"{kind}: {detail}" if detail else kind)
        self.note("D", shape.d)
        stationary = ", .ws" if variant.stationary else ""
        rows = "M, pair" if variant.group == 2 else "M, one block"
        self.note(rows, f"{shape.m}{stationary}")
        words = owner.instruction.modifiers
        found = {
            ("`tcgen05.mma`", "K of 96"): shape.k == 96,
            ("D", "negated"): shape.negate,
            ("D", "saturated"): shape.saturate,
            ("D", "scaled"): given.shift,
            ("D", "not written in some lanes"): any(given.disabled),
            ("A", "in tensor memory"): given.a_in_tensor_memory,
            ("A", "rows across K"): not shape.k_major[0],
            ("A", "sparse"): variant.sparse,
            ("A", ".ashift"): owner.shifted,
            ("B", "rows across K"): not shape.k_major[1],
            ("B", "zero columns"): given.mask,
            ("other forms", "sparse with scale factors"): variant.sparse and scaled,
            ("other forms", "sparse pair"): variant.sparse and variant.group == 2,
            ("other forms", "pair with scale factors"): scaled and variant.group == 2,
            ("other forms", "`collector` hint"): any(w.startswith("collector") for w in words),
        }
        for (group, name), holds in found.items():
            if holds:
                self.note(group, name)


def run_jax(recorder: Recorder) -> None:
    """The recorded programs of JAX's compiler."""
    import jax_programs
    from replay import replay

    recorder.family = "JAX"
    for name in jax_programs.PROGRAMS:
        recorder.program = name
        replay(name, mark=f"coverage of {name}")


def run_cute(recorder: Recorder) -> None:
    """Those of CuTe DSL."""
    import cute_programs
    import test_cute_programs

    recorder.family = "CuTe DSL"
    for name in cute_programs.PROGRAMS:
        recorder.program = name
        test_cute_programs.test_recorded(name)


def run_triton(recorder: Recorder) -> None:
    """Those of Triton and Gluon."""
    import pytest

    class Plugin:
        """Says which test runs."""

        def pytest_runtest_setup(self, item: pytest.Item) -> None:
            recorder.program = item.nodeid

    recorder.family = "Triton, Gluon"
    path = pathlib.Path(__file__).parents[1] / "simulator" / "test_triton_blackwell.py"
    options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--no-header", str(path)]
    with contextlib.redirect_stdout(sys.stderr):
        assert pytest.main(options, plugins=[Plugin()]) == 0


FAMILIES = {"JAX": run_jax, "Triton, Gluon": run_triton, "CuTe DSL": run_cute}


def table(recorder: Recorder) -> str:
    """How many programs use what, as Markdown."""
    lines = ["| what | " + " | ".join(FAMILIES) + " |", "|---|" + "---:|" * len(FAMILIES)]
    for group, names in FEATURES.items():
        for name in names:
            counts = [len(recorder.used.get((one, group, name), ())) for one in FAMILIES]
            if any(counts):
                cells = " | ".join(str(one or "") for one in counts)
                lines.append(f"| {group} {name} | {cells} |")
    return "\n".join(lines)


def uncovered(recorder: Recorder) -> str:
    """What no program uses, as Markdown."""
    used = {(group, name) for _, group, name in recorder.used}
    lines = []
    for group, names in FEATURES.items():
        missing = [name for name in names if (group, name) not in used]
        if missing:
            lines.append(f"- {group}: {', '.join(missing)}")
    return "\n".join(lines)


def main() -> None:
    """Runs all programs."""
    recorder = Recorder()
    with recorder.listening():
        for run in FAMILIES.values():
            run(recorder)
    print(table(recorder))
    print()
    print(uncovered(recorder))


if __name__ == "__main__":
    main()
