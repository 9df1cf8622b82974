"""Pictures of register layouts: which warp, lane, register and vector element holds an element."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pallasite.drawing import svg
from pallasite.drawing.extents import array_text, cut, index_text, numbers_text
from pallasite.drawing.places import Matrix, Place, Places, formulas, periods
from pallasite.drawing.svg import MARGIN, Canvas
from pallasite.errors import InvalidTypeError
from pallasite.layouts.description import describe
from pallasite.layouts.digits import LANES, WARPS, Owner
from pallasite.layouts.registers import Layout, RegisterLayout, SplatLayout

ROW = 18
"""Height of a row in pixels."""
WIDTH = 768
"""How wide a picture's elements are, in pixels, unless the lanes need half as much again."""
ROWS = 64
"""Rows that are drawn, unless the lanes need up to twice as many."""
ELEMENTS = 2048
"""Elements that are drawn, unless the lanes need more."""

_LANE_SIZE, _REGISTER_SIZE, _GAP = 10, 9, 4
"""Font sizes of the parts of a label, and the space between them."""
_NARROWEST, _VECTOR = 6, 42
"""Pixels that an element takes at least, and a register of several side by side."""

WARP_COLORS = ("#cfe3fa", "#fde2bd", "#cfeccf", "#efd3ee")
WARP_LINES = ("#5b8fcb", "#d0903f", "#5fa763", "#b06db0")
"""Fill and outline of what the warps 0 to 3 hold."""
COMMON_COLOR, COMMON_LINE = "#e4e8ec", "#7d8894"
"""Of what all warps hold."""


def draw_register_layout(
    layout: Layout,
    *,
    name: str = "",
    dtype: str = "",
    notes: Sequence[str] = (),
    rows: int = ROWS,
    width: int = WIDTH,
) -> str:
    """Draws which warp, lane, register and vector element holds each element of an array.

    Elements are coloured by warp. Neighbours that lie in one register of one lane share a box,
    which is labelled with the lane and the register (``r3``); ``0-3`` stands for several lanes
    that hold the same elements, ``0+`` for lanes that do not follow one another. Each element has
    a tooltip with its index and its place. An array of more than two dimensions is drawn with its
    leading dimensions joined, one of a single dimension in rows. What does not fit is cut off where
    only the register number still changes, and the picture says so.

    Args:
      layout: what to draw.
      name: its name, by default :func:`pallasite.layouts.describe`.
      dtype: element type for the caption.
      notes: further lines of the caption, such as source lines.
      rows: how many rows to draw, at most, where a whole period of the lanes needs no more.
      width: how wide the elements may be in all, in pixels.

    Returns:
      An SVG document; the same for the same arguments.

    Raises:
      InvalidTypeError: ``layout`` is no register layout.
    """
    if not isinstance(layout, Layout):
        raise InvalidTypeError(
            "only register layouts can be drawn as registers",
            got=type(layout).__name__,
            expected="a RegisterLayout or a SplatLayout",
        )
    title = f"{name or describe(layout)} {array_text(dtype, layout.shape)}"
    if isinstance(layout, SplatLayout):
        return _draw_splat(title, notes)
    assert isinstance(layout, RegisterLayout)
    return _Drawing(layout, rows, width).render(title, notes)


def _draw_splat(title: str, notes: Sequence[str]) -> str:
    canvas = Canvas(title)
    facts = ["All elements are equal: every lane holds the value in one scalar register."]
    y = canvas.heading(title, [*notes, *facts], MARGIN, 420)
    canvas.rect(
        MARGIN,
        y + 8,
        160,
        2 * ROW,
        fill=COMMON_COLOR,
        stroke=COMMON_LINE,
        tooltip="all elements: warps 0 to 3, lanes 0 to 31, register 0",
    )
    canvas.text(MARGIN + 80, y + 8 + ROW + 4, "all lanes r0", text_anchor="middle")
    return canvas.render()


@dataclasses.dataclass(frozen=True)
class _Element:
    column: int
    index: tuple[int, ...]
    place: Place


@dataclasses.dataclass
class _Run:
    """Neighbours in a row that lie in one register of one lane."""

    row: int
    elements: list[_Element]

    @property
    def place(self) -> Place:
        return self.elements[0].place

    @property
    def vectors(self) -> tuple[int, ...]:
        return tuple(element.place.vector for element in self.elements)


class _Drawing:
    def __init__(self, layout: RegisterLayout, rows: int, width: int):
        self.layout = layout
        self.places = Places(layout)
        self.element = self._element_width()
        fits = max(1, width // self.element)
        fold = layout.vector_length
        while fold * 2 <= fits:
            fold *= 2
        self.matrix = Matrix.of(layout.shape, fold)
        self.periods = periods(layout, self.matrix)
        high, wide = self.periods
        fits = wide if fits < wide <= 3 * fits // 2 else fits
        rows = high if rows < high <= 2 * rows else rows
        self.columns = cut(self.matrix.columns, fits, wide)
        rows = max(high, min(rows, ELEMENTS // self.columns.shown)) if high <= rows else rows
        self.rows = cut(self.matrix.rows, rows, high)
        if self.rows.shown * self.columns.shown > ELEMENTS:
            fits = max(ELEMENTS // self.rows.shown, wide if wide <= fits else 1)
            self.columns = cut(self.matrix.columns, min(fits, self.columns.shown), wide)
        self.runs = self._find_runs()
        labels = [self.matrix.row_label(row) for row in range(self.rows.shown)]
        self.left = MARGIN + max(svg.text_width(label, 10) for label in labels) + 8
        self.top = 0.0

    @property
    def right(self) -> float:
        return self.left + self.columns.shown * self.element

    @property
    def bottom(self) -> float:
        return self.top + self.rows.shown * ROW

    def _element_width(self) -> int:
        """So that the longest label fits the box of a register."""
        layout = self.layout
        minor = layout.digits[-1] if layout.digits else None
        adjacent = minor.size if minor is not None and minor.owner is Owner.VECTOR else 1
        register = f"r{layout.registers - 1}"
        if adjacent < layout.vector_length:
            register += f".{layout.vector_length - 1}"
        lanes = {_lanes_text(self.places.same_lanes(lane)) for lane in range(LANES)}
        longest = max(_label_width(lane, register) for lane in lanes)
        wanted = max(longest + 6, _VECTOR if adjacent > 1 else 0)
        return max(_NARROWEST, -(-wanted // adjacent))

    def _find_runs(self) -> list[_Run]:
        places = self.places
        runs: list[_Run] = []
        for row in range(self.rows.shown):
            first = True
            for column in range(self.columns.shown):
                index = self.matrix.index(row, column)
                if index is None:
                    break
                element = _Element(column, index, places.find(index))
                if not first and _same_register(runs[-1].place, element.place):
                    runs[-1].elements.append(element)
                else:
                    runs.append(_Run(row, [element]))
                first = False
        return runs

    def render(self, title: str, notes: Sequence[str]) -> str:
        canvas = Canvas(title)
        width = max(560, self.right - MARGIN)
        y = canvas.heading(title, [*notes, *self._facts()], MARGIN, width)
        y = self._legend(canvas, y + 6)
        self.top = y + 34
        self._axes(canvas)
        self._elements(canvas)
        self._labels(canvas)
        canvas.path(self._tile_lines(), fill="none", stroke=svg.INK, stroke_width=1.2)
        self._cut_marks(canvas)
        y = self.bottom + 8 * self.rows.is_cut + 18 * (self.rows.is_cut or self.columns.is_cut) + 4
        canvas.lines(formulas(self.layout), y, None, fill=svg.INK)
        return canvas.render()

    def _facts(self) -> list[str]:
        layout = self.layout
        registers = _count(layout.registers, "register")
        if layout.vector_length > 1:
            registers += f" of {layout.vector_length} elements"
        text = f"{registers} in each of {WARPS} x {LANES} lanes"
        if layout.replication > 1:
            text += f"; up to {layout.replication} lanes hold each element"
        else:
            text += "; one lane holds each element"
        return [text]

    def _legend(self, canvas: Canvas, y: float) -> float:
        sets: dict[tuple[int, ...], None] = {}
        for run in sorted(self.runs, key=lambda run: run.place.warps):
            sets.setdefault(run.place.warps)
        x: float = MARGIN
        for warps in sets:
            color, line = _colors(warps)
            label = _warps_text(warps)
            canvas.rect(x, y, 14, 14, fill=color, stroke=line)
            canvas.text(x + 20, y + 11, label, font_size=11)
            x += 20 + svg.text_width(label, 11) + 16
        samples = ["5 r2: lane 5, register 2"]
        if any(_needs_vector(run, self.layout) for run in self.runs):
            samples.append("r2.1: element 1 of its vector")
        if any("+" in _lanes_text(run.place.lanes) for run in self.runs):
            samples.append("0+: lane 0 and others")
        text = "; ".join(samples)
        canvas.text(x, y + 11, text, font_size=11, fill=svg.QUIET)
        canvas.reach(x + svg.text_width(text, 11), y)
        y += 14
        if self.layout.lane_count > 1:
            canvas.rect(MARGIN, y + 7, 14, 12, fill="none", stroke=svg.INK, stroke_width=2)
            who = f"lane 0 of {_warps_text(self._outlined_warps())}"
            canvas.text(MARGIN + 20, y + 17, who, font_size=11, fill=svg.QUIET)
            y += 20
        return y

    def _outlined_warps(self) -> tuple[int, ...]:
        return next(run.place.warps for run in self.runs if 0 in run.place.warps)

    def _axes(self, canvas: Canvas) -> None:
        shape = self.layout.shape
        names = {0: "", 1: "index", 2: "row, column"}
        sign = "+" if len(shape) == 1 and self.matrix.rows > 1 else ""
        step = 1
        while step * self.element < svg.text_width(f"{sign}{self.columns.shown}", 10) + 6:
            step *= 2
        with canvas.group(fill=svg.QUIET):
            label = names.get(len(shape), "leading indices, last index")
            canvas.text(MARGIN, self.top - 18, label)
            with canvas.group(text_anchor="middle"):
                for column in range(0, self.columns.shown, step):
                    x = self.left + (column + 0.5) * self.element
                    canvas.text(x, self.top - 5, f"{sign}{column}")
            with canvas.group(text_anchor="end"):
                for row in range(self.rows.shown):
                    label = self.matrix.row_label(row)
                    canvas.text(self.left - 6, self.top + row * ROW + 13, label)

    def _elements(self, canvas: Canvas) -> None:
        by_warps: dict[tuple[int, ...], list[_Run]] = {}
        for run in self.runs:
            by_warps.setdefault(run.place.warps, []).append(run)
        chosen = ""
        for warps, runs in by_warps.items():
            color, line = _colors(warps)
            outlines, separators = "", ""
            with canvas.group(fill=color):
                for run in runs:
                    y = self.top + run.row * ROW
                    for element in run.elements:
                        x = self.left + element.column * self.element
                        canvas.rect(x, y, self.element, ROW, tooltip=_tooltip(element))
                        if element is not run.elements[0]:
                            separators += svg.down(x, y + 1, 4)
                    x = self.left + run.elements[0].column * self.element
                    width = len(run.elements) * self.element
                    outlines += svg.box(x, y, width, ROW)
                    if 0 in run.place.lanes and 0 in warps and self.layout.lane_count > 1:
                        chosen += svg.box(x + 1.5, y + 1.5, width - 3, ROW - 3)
            canvas.path(separators, fill="none", stroke=line, stroke_width=0.7)
            canvas.path(outlines, fill="none", stroke=line, stroke_width=0.8)
        canvas.path(chosen, fill="none", stroke=svg.INK, stroke_width=2)

    def _labels(self, canvas: Canvas) -> None:
        """The lane in bold and the register, in the middle of each box."""
        lanes: svg.Attributes = dict(font_size=_LANE_SIZE, font_weight=700)
        registers: svg.Attributes = dict(font_size=_REGISTER_SIZE, fill="#3d444d")
        with canvas.group(pointer_events="none"):
            for bold, attributes in ((True, lanes), (False, registers)):
                with canvas.group(**attributes):
                    for run in self.runs:
                        self._label(canvas, run, bold)

    def _label(self, canvas: Canvas, run: _Run, bold: bool) -> None:
        lanes = _lanes_text(run.place.lanes)
        register = f"r{run.place.register}"
        if _needs_vector(run, self.layout):
            register += f".{run.vectors[0]}"
        width, box = _label_width(lanes, register), len(run.elements) * self.element
        if width > box:
            return
        x = self.left + run.elements[0].column * self.element + (box - width) / 2
        y = self.top + run.row * ROW + 13
        if bold:
            canvas.text(round(x), y, lanes)
        else:
            canvas.text(round(x + svg.text_width(lanes, _LANE_SIZE) + _GAP), y, register)

    def _tile_lines(self) -> str:
        """Lines where the lanes begin to repeat."""
        height, width = self.bottom - self.top, self.right - self.left
        commands = svg.box(self.left, self.top, width, height)
        rows, columns = self.periods
        for row in range(rows, self.rows.shown, rows) if rows > 1 else ():
            commands += svg.across(self.left, self.top + row * ROW, width)
        for column in range(columns, self.columns.shown, columns) if columns > 1 else ():
            commands += svg.down(self.left + column * self.element, self.top, height)
        return commands

    def _cut_marks(self, canvas: Canvas) -> None:
        mark: svg.Attributes = dict(fill="none", stroke=svg.ALARM, stroke_width=2)
        if self.columns.is_cut:
            canvas.path(
                svg.torn(self.right + 4, self.top, self.bottom - self.top, vertical=True), **mark
            )
            canvas.reach(self.right + 10, self.top)
        if self.rows.is_cut:
            canvas.path(svg.torn(self.left, self.bottom + 4, self.right - self.left), **mark)
        if len(self.layout.shape) == 1:
            shown = self.rows.shown * self.columns.shown
            parts = [f"{shown} of {self.layout.size} elements"] * self.rows.is_cut
        else:
            parts = [
                f"{part.shown} of {part.total} {what}"
                for part, what in ((self.rows, "rows"), (self.columns, "columns"))
                if part.is_cut
            ]
        if parts:
            y = self.bottom + 16 + 8 * self.rows.is_cut
            text = f"cut: {' and '.join(parts)} are drawn"
            canvas.text(self.left, y, text, fill=svg.ALARM, font_size=11)


def _label_width(lanes: str, register: str) -> int:
    return svg.text_width(lanes, _LANE_SIZE) + _GAP + svg.text_width(register, _REGISTER_SIZE)


def _same_register(one: Place, other: Place) -> bool:
    return dataclasses.replace(one, vector=0) == dataclasses.replace(other, vector=0)


def _needs_vector(run: _Run, layout: RegisterLayout) -> bool:
    """Whether the box does not show a whole register in its order."""
    return run.vectors != tuple(range(layout.vector_length))


def _tooltip(element: _Element) -> str:
    place = element.place
    warps = ("warp " if len(place.warps) == 1 else "warps ") + numbers_text(place.warps)
    lanes = ("lane " if len(place.lanes) == 1 else "lanes ") + numbers_text(place.lanes)
    return (
        f"{index_text(element.index)}: {warps}, {lanes}, register {place.register},"
        f" vector element {place.vector}"
    )


def _colors(warps: tuple[int, ...]) -> tuple[str, str]:
    if len(warps) == WARPS:
        return COMMON_COLOR, COMMON_LINE
    return WARP_COLORS[warps[0]], WARP_LINES[warps[0]]


def _warps_text(warps: tuple[int, ...]) -> str:
    if len(warps) == WARPS:
        return "all warps"
    return ("warp " if len(warps) == 1 else "warps ") + numbers_text(warps)


def _lanes_text(lanes: tuple[int, ...]) -> str:
    if len(lanes) == 1:
        return str(lanes[0])
    if len(lanes) == LANES:
        return "all"
    if lanes[-1] - lanes[0] == len(lanes) - 1:
        return f"{lanes[0]}-{lanes[-1]}"
    return f"{lanes[0]}+"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
