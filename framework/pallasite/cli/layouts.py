"""The layouts of a kernel's arrays by source line, why they have them, and what is converted."""

from __future__ import annotations

import dataclasses
import linecache
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pallasite.cli import output

if TYPE_CHECKING:
    from pallasite.errors import SourceLocation
    from pallasite.lowering.layout_report import (
        ArrayLayout,
        Insertion,
        LayoutConversion,
        LayoutReport,
        Reason,
        SharedLayout,
    )
    from pallasite.lowering.recording import KernelLayouts

type _Line = tuple[str, int]
_UNKNOWN: _Line = ("", 0)


def report(layouts: KernelLayouts) -> LayoutReport:
    """The report of inference; under lane semantics the layouts, which need no reasons."""
    from pallasite.lowering.layout_names import describe_memory, name_of
    from pallasite.lowering.layout_report import ArrayLayout, LayoutReport, SharedLayout

    if layouts.report is not None:
        return layouts.report
    arrays = {
        ArrayLayout(use.location, use.primitive, use.dtype, layout.shape, name_of(layout)): None
        for layout, uses in layouts.registers.items()
        for use in uses
    }
    shared = {
        SharedLayout(
            use.location, use.name, use.dtype, view.layout.shape, describe_memory(view.layout)
        ): None
        for view, uses in layouts.shared.items()
        for use in uses
    }
    return LayoutReport(tuple(arrays), tuple(shared))


def as_json(report: LayoutReport) -> dict[str, Any]:
    """The report as lists of records; costs as in :class:`LayoutConversion`."""
    return {
        "arrays": [_record(one) for one in report.arrays],
        "shared": [_record(one) for one in report.shared],
        "conversions": [_record(one) for one in report.conversions],
        "insertions": [
            {
                "location": output.location_json(one.location),
                "primitive": one.primitive,
                "what": one.what,
            }
            for one in report.insertions
        ],
    }


def _record(one: ArrayLayout | SharedLayout | LayoutConversion) -> dict[str, Any]:
    record = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    record["location"] = output.location_json(one.location)
    record["why"] = [
        {"text": reason.text, "location": output.location_json(reason.location)}
        for reason in one.why
    ]
    return record


def as_text(report: LayoutReport) -> str:
    """A section of the report of a kernel."""
    sections = [
        ("layouts", _lines(report)),
        ("layouts in shared memory", _shared(report.shared)),
        ("conversions", _total(report.conversions)),
        ("fences, barriers and waits that are added", _insertions(report.insertions)),
    ]
    return "\n\n".join(f"{title}\n{output.indented(text)}" for title, text in sections)


def _lines(report: LayoutReport) -> str:
    """Each source line with the arrays that it makes and the conversions there."""
    arrays = _by_line(report.arrays)
    conversions = _by_line(report.conversions)
    files = list(dict.fromkeys(file for file, _ in (*arrays, *conversions)))
    blocks = []
    for line in sorted({*arrays, *conversions}, key=lambda line: (files.index(line[0]), line[1])):
        made = arrays.get(line, ())
        rows = [_array_row(one) for one in made] + [
            _conversion_row(one) for one in conversions.get(line, ())
        ]
        blocks.append(f"{_heading(line)}\n{output.indented(output.columns(rows))}")
    return "\n".join(blocks) or "no arrays of more than one element that differ"


def _by_line[One: (ArrayLayout, LayoutConversion)](
    records: Iterable[One],
) -> dict[_Line, list[One]]:
    found: dict[_Line, list[One]] = {}
    for one in records:
        line = _UNKNOWN if one.location is None else (one.location.file, one.location.line)
        found.setdefault(line, []).append(one)
    return found


def _heading(line: _Line) -> str:
    if line == _UNKNOWN:
        return "a line that is not known"
    code = linecache.getline(*line).strip()
    return f"{output.relative_path(line[0])}:{line[1]}: {code}".removesuffix(": ")


def _array_row(one: ArrayLayout) -> tuple[str, ...]:
    return (one.primitive, _type(one.dtype, one.shape), one.layout, _why(one.why, one.location))


def _conversion_row(one: LayoutConversion) -> tuple[str, ...]:
    times = "once" if one.times == 1 else f"{one.times:g} times"
    cost = f"{times} through {one.through}, cost {one.cost:.4g}"
    what = f"{one.source} -> {one.target}"
    return ("CONVERTS", _type(one.dtype, one.shape), what, f"{cost}: {_why(one.why, one.location)}")


def _shared(shared: Sequence[SharedLayout]) -> str:
    rows = []
    for one in shared:
        first, *others = [_why((reason,), one.location) for reason in one.why] or [""]
        where = output.location_text(one.location)
        rows.append((one.name, _type(one.dtype, one.shape), where, one.layout, first))
        rows += [("", "", "", "", other) for other in others]
    return output.table(("name", "type", "line", "layout", "why"), rows) if rows else "none"


def _total(conversions: Sequence[LayoutConversion]) -> str:
    if not conversions:
        return "none"
    cost = sum(one.cost * one.times for one in conversions)
    through = [one for one in conversions if one.through != "registers"]
    return (
        f"{len(conversions)}, of which {len(through)} through shared memory;"
        f" cost {cost:.4g} in all, in passes of 128 bytes through shared memory"
    )


def _insertions(insertions: Sequence[Insertion]) -> str:
    rows = [
        (output.location_text(one.location), f"a {one.what} before {one.primitive}")
        for one in insertions
    ]
    return output.columns(rows) if rows else "none"


def _why(reasons: Sequence[Reason], of: SourceLocation | None) -> str:
    """Reasons with their lines; the file only if it is another one than that of ``of``."""
    texts = []
    for reason in reasons:
        place = output.location_text(reason.location)
        if reason.location is not None and of is not None and reason.location.file == of.file:
            place = f"line {reason.location.line}"
        texts.append(f"{reason.text} ({place})" if place else reason.text)
    return "; ".join(texts)


def _type(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"
