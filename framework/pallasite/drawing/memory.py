"""Pictures of memory layouts: where the pieces of an array lie, and in which banks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from pallasite.drawing import svg
from pallasite.drawing.extents import array_text, index_text, numbers_text
from pallasite.drawing.grid import Cell, Grid
from pallasite.drawing.pieces import (
    CHUNK,
    GROUPS,
    LINE,
    Piece,
    Pieces,
    crowded_banks,
    fewest_passes,
    passes,
)
from pallasite.drawing.svg import MARGIN, Canvas
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite.layouts.memory import BANKS, MemoryLayout

ROW = 20
"""Height of a row in pixels."""
GROUP_COLORS = (
    "#f9c0bd",
    "#fbd5a5",
    "#f5ea9f",
    "#cde9a9",
    "#aee6d5",
    "#aed8f7",
    "#c6c3f6",
    "#f3c1e4",
)
"""Fill of the chunks that begin in the banks 0 to 3, 4 to 7, and so on."""

_CELL = 46
_SLOT = 54
_LINE_COLOR = "#8a949e"
_LINES = 16
_WIDEST = 1080
_SEARCHED = 1 << 18
"""Pieces of an array that are looked through for what lies in the lines of memory."""


def draw_memory_layout(
    layout: MemoryLayout,
    *,
    name: str = "",
    dtype: str = "",
    notes: Sequence[str] = (),
    offset: int = 0,
) -> str:
    """Draws at which byte and in which banks of shared memory the elements of an array lie.

    The unit is a chunk: 16 bytes, which a swizzle moves as one, or less where fewer neighbours lie
    together. One panel is the array, with the byte address of each chunk, coloured by the four
    banks in which it begins; the other is the memory, one line for the 128 bytes of all 32 banks,
    with the index at which each chunk begins. Outlined in both are the chunks across the
    contiguous dimension that an access in the style of ``ldmatrix`` or of the tensor cores moves at
    once, with the passes that it takes. Each chunk has a tooltip with its elements, bytes and
    banks. Of large arrays the first tiles are drawn, and the picture says so.

    Args:
      layout: what to draw, of any number of dimensions; of more than two, the first indices of
        the leading ones are drawn.
      name: its name for the caption, by default the swizzle.
      dtype: element type for the caption.
      notes: further lines of the caption, such as source lines.
      offset: how many elements after an address that is aligned to the swizzle and to 128 bytes
        the array begins.

    Returns:
      An SVG document; the same for the same arguments.

    Raises:
      InvalidTypeError: ``layout`` is no memory layout.
      InvalidValueError: ``offset`` is negative.
    """
    if not isinstance(layout, MemoryLayout):
        raise InvalidTypeError(
            "only memory layouts can be drawn as memory",
            got=type(layout).__name__,
            expected="a MemoryLayout",
        )
    if offset < 0:
        raise InvalidValueError("an array begins before its memory", got=f"offset={offset}")
    array = array_text(dtype, layout.shape)
    title = f"{array} in shared memory, {name or swizzle_text(layout)}"
    return _Drawing(layout, offset).render(title, notes)


def swizzle_text(layout: MemoryLayout) -> str:
    """The swizzle in words."""
    return "no swizzle" if layout.swizzle == CHUNK else f"swizzle {layout.swizzle} bytes"


class _Drawing:
    def __init__(self, layout: MemoryLayout, offset: int):
        self.layout = layout
        self.offset = offset
        self.pieces = Pieces(layout, offset)
        self.grid = Grid(self.pieces)
        self.drawn = {cell.piece for cell in self.grid.cells}
        self.chosen = {cell.piece for cell in self.grid.chosen}
        lines = sorted({cell.piece.address // LINE for cell in self.grid.cells})
        self.lines, self.more_lines = lines[:_LINES], len(lines) - _LINES
        self.complete = math.prod(self.pieces.counts) <= _SEARCHED
        self.slots = self._find_slots()
        self.slot_width = _slot_width(self.pieces.size)

    def _find_slots(self) -> dict[int, Piece]:
        """The pieces in the lines that are drawn, by address."""
        wanted = set(self.lines)
        slots: dict[int, Piece] = {}
        for piece in self.pieces.all() if self.complete else self.drawn:
            if piece.address // LINE in wanted:
                slots.setdefault(piece.address, piece)
        return slots

    def render(self, title: str, notes: Sequence[str]) -> str:
        canvas = Canvas(title)
        labels = [self._row_label(cell) for cell in self.grid.cells if cell.column == 0]
        left = MARGIN + max(svg.text_width(label, 10) for label in labels) + 8
        right = left + self.grid.columns.shown * _CELL
        memory_left = max(right, MARGIN + svg.text_width(self._array_title(), 11)) + 90
        memory_width = LINE // self.pieces.size * self.slot_width
        beside = memory_left + memory_width <= _WIDEST
        width = max(
            560, memory_left + memory_width - MARGIN if beside else max(right, memory_width)
        )
        y = canvas.heading(title, [*notes, *self._facts()], MARGIN, width)
        bottom = self._array(canvas, left, y + 12)
        if beside:
            bottom = max(bottom, self._memory(canvas, memory_left, y + 12))
        else:
            bottom = self._memory(canvas, MARGIN + 56, bottom + 12)
        self._verdict(canvas, bottom + 4, width)
        return canvas.render()

    def _facts(self) -> list[str]:
        layout = self.layout
        size = max(1, layout.cosize * layout.element_bits // 8)
        facts = [f"{layout} (size:stride in elements), {size} bytes"]
        if layout.swizzle != CHUNK:
            bits = (layout.swizzle // CHUNK).bit_length() - 2
            facts.append(
                f"swizzle: {_bits(4, bits)} of a byte address are exclusive-ored with"
                f" {_bits(7, bits)}; repeats every {layout.atom_bytes} bytes (thick lines)"
            )
        if self.offset:
            start = self.offset * layout.element_bits // 8
            facts.append(f"begins {start} bytes after an aligned address")
        return facts

    # The array ----------------------------------------------------------------------------------

    def _row_label(self, cell: Cell) -> str:
        index, shape = cell.piece.index, self.pieces.shape
        if len(index) < 2:
            return str(index[0]) if index else ""
        return _range(index[-2], shape[-2])

    def _array_title(self) -> str:
        unit = self.pieces.size
        return "array: byte address" + (f" of each {unit}-byte chunk" if unit > 1 else "")

    def _array(self, canvas: Canvas, left: float, y: float) -> float:
        """Draws the array and returns the y below it."""
        grid = self.grid
        canvas.text(MARGIN, y + 10, self._array_title(), font_weight=700, font_size=11)
        top = y + 48
        with canvas.group(fill=svg.QUIET, text_anchor="middle"):
            for cell in grid.cells:
                if cell.row == 0 and grid.rank > 0:
                    x = left + (cell.column + 0.5) * _CELL
                    label = _range(cell.piece.index[-1], self.pieces.shape[-1])
                    sign = "+" if grid.rank == 1 and grid.rows.total > 1 else ""
                    canvas.text(x, top - 6, f"{sign}{label}", font_size=9)
        with canvas.group(fill=svg.QUIET, text_anchor="end"):
            for cell in grid.cells:
                if cell.column == 0:
                    canvas.text(left - 6, top + cell.row * ROW + 14, self._row_label(cell))
        with canvas.group(stroke=_LINE_COLOR, stroke_width=0.7):
            for cell in grid.cells:
                x, y = left + cell.column * _CELL, top + cell.row * ROW
                color = GROUP_COLORS[cell.piece.group]
                canvas.rect(x, y, _CELL, ROW, fill=color, tooltip=self._tooltip(cell.piece))
        with canvas.group(text_anchor="middle", pointer_events="none"):
            for cell in grid.cells:
                x, y = left + (cell.column + 0.5) * _CELL, top + cell.row * ROW + 14
                canvas.text(x, y, str(cell.piece.address))
        self._boundaries(canvas, left, top)
        chosen = "".join(
            svg.box(left + cell.column * _CELL + 2, top + cell.row * ROW + 2, _CELL - 4, ROW - 4)
            for cell in grid.chosen
        )
        canvas.path(chosen, fill="none", stroke=svg.INK, stroke_width=2)
        right = left + grid.columns.shown * _CELL
        bottom = top + grid.rows.shown * ROW
        mark: svg.Attributes = dict(fill="none", stroke=svg.ALARM, stroke_width=2)
        if grid.columns.is_cut:
            canvas.path(svg.torn(right + 4, top, bottom - top, vertical=True), **mark)
            canvas.reach(right + 10, top)
        if grid.rows.is_cut:
            canvas.path(svg.torn(left, bottom + 4, right - left), **mark)
            bottom += 8
        text = grid.notes()
        if text:
            bottom = canvas.lines(
                [f"cut: {text} are drawn"], bottom, max(280, right - MARGIN), fill=svg.ALARM
            )
        return bottom + 4

    def _boundaries(self, canvas: Canvas, left: float, top: float) -> None:
        cells = {(cell.row, cell.column): cell for cell in self.grid.cells}
        commands = svg.box(left, top, self.grid.columns.shown * _CELL, self.grid.rows.shown * ROW)
        for (row, column), cell in cells.items():
            x, y = left + column * _CELL, top + row * ROW
            above, before = cells.get((row - 1, column)), cells.get((row, column - 1))
            if above is not None and self.grid.boundary(above, cell):
                commands += svg.across(x, y, _CELL)
            if before is not None and self.grid.boundary(before, cell):
                commands += svg.down(x, y, ROW)
        canvas.path(commands, fill="none", stroke=svg.INK, stroke_width=1.4)

    # The memory ---------------------------------------------------------------------------------

    def _memory(self, canvas: Canvas, left: float, y: float) -> float:
        """Draws the lines of memory and returns the y below them."""
        width, unit = self.slot_width, self.pieces.size
        count = LINE // unit
        canvas.text(left - 56, y + 10, "shared memory: ", font_weight=700, font_size=11)
        what = "first index of each chunk" if max(self.pieces.shape, default=1) > 1 else "index"
        canvas.text(left + 46, y + 10, f"{what}, {LINE} bytes a line", font_size=11)
        top = y + 48
        with canvas.group(stroke=_LINE_COLOR, stroke_width=0.7, text_anchor="middle"):
            for group in range(GROUPS):
                x = left + group * CHUNK // unit * width
                banks = range(group * BANKS // GROUPS, (group + 1) * BANKS // GROUPS)
                tooltip = f"banks {numbers_text(banks)}"
                extent = CHUNK // unit * width
                canvas.rect(x, top - 26, extent, 18, fill=GROUP_COLORS[group], tooltip=tooltip)
        with canvas.group(text_anchor="middle", fill=svg.INK, pointer_events="none"):
            for group in range(GROUPS):
                x = left + (group + 0.5) * (CHUNK // unit * width)
                canvas.text(x, top - 13, f"{group * 4}-{group * 4 + 3}")
        canvas.text(left - 6, top - 13, "banks", text_anchor="end", fill=svg.QUIET)
        y = top
        previous = None
        for line in self.lines:
            if previous is not None and line != previous + 1:
                canvas.text(left - 6, y + 9, "...", text_anchor="end", fill=svg.ALARM)
                canvas.path(svg.torn(left, y + 7, count * width), fill="none", stroke=svg.FAINT)
                y += 14
            self._line(canvas, left, y, line)
            previous = line
            y += ROW
        if self.chosen:
            y = self._counts(canvas, left, y + 6)
        if self.more_lines > 0:
            more = f"{self.more_lines} more line{'s' * (self.more_lines > 1)}"
            text = f"cut: the rest of what is drawn of the array lies in {more}"
            y = canvas.lines([text], y, None, fill=svg.ALARM, left=left)
        return y + 4

    def _line(self, canvas: Canvas, left: float, y: float, line: int) -> None:
        width, unit = self.slot_width, self.pieces.size
        canvas.text(left - 6, y + 14, str(line * LINE), text_anchor="end", fill=svg.QUIET)
        chosen = ""
        texts: list[tuple[float, str, bool]] = []
        with canvas.group(stroke=_LINE_COLOR, stroke_width=0.7):
            for slot in range(LINE // unit):
                address = line * LINE + slot * unit
                piece = self.slots.get(address)
                x = left + slot * width
                if piece is None:
                    what = "not part of the array" if self.complete else "not drawn"
                    tooltip = f"{_bytes(address, unit)}: {what}"
                    canvas.rect(x, y, width, ROW, fill=svg.EMPTY, tooltip=tooltip)
                    continue
                fill = svg.BACKGROUND
                if piece in self.chosen:
                    fill = GROUP_COLORS[piece.group]
                    chosen += svg.box(x + 2, y + 2, width - 4, ROW - 4)
                canvas.rect(x, y, width, ROW, fill=fill, tooltip=self._tooltip(piece))
                label = (", " if width > 40 else ",").join(map(str, piece.index[-2:]))
                if svg.text_width(label, 9) <= width - 2:
                    texts.append((x + width / 2, label, piece in self.drawn))
        canvas.path(chosen, fill="none", stroke=svg.INK, stroke_width=2)
        with canvas.group(text_anchor="middle", font_size=9, pointer_events="none"):
            for x, label, drawn in texts:
                canvas.text(x, y + 14, label, fill=svg.INK if drawn else _LINE_COLOR)

    def _counts(self, canvas: Canvas, left: float, y: float) -> float:
        """How many of the chosen pieces begin in each group of banks."""
        counts = Counter(piece.group for piece in self.chosen)
        pieces = list(self.chosen)
        crowded = {bank // (BANKS // GROUPS) for bank in crowded_banks(pieces)}
        extent = CHUNK // self.pieces.size * self.slot_width
        canvas.text(left - 6, y + 12, "outlined", text_anchor="end", fill=svg.QUIET)
        with canvas.group(text_anchor="middle", font_weight=700, font_size=11):
            for group in range(GROUPS):
                number = counts[group]
                color = svg.ALARM if group in crowded else svg.INK if number else svg.FAINT
                canvas.text(left + (group + 0.5) * extent, y + 12, str(number), fill=color)
        return y + 20

    def _verdict(self, canvas: Canvas, y: float, width: float) -> None:
        if not self.grid.chosen:
            return
        pieces = [cell.piece for cell in self.grid.chosen]
        needed, fewest = passes(pieces), fewest_passes(pieces)
        first, last = pieces[0].index, pieces[-1].last
        where = f"rows {first[-2]} to {last[-2]} of "
        where += (
            f"columns {first[-1]} to {last[-1]}" if last[-1] > first[-1] else f"column {first[-1]}"
        )
        text = f"outlined: {where}, {len(pieces)} chunks of {_size(self.pieces.size)} at once: "
        if needed <= fewest:
            text += f"{_passes(needed)} through the banks, no conflicts"
        else:
            text += f"{_passes(needed)} through the banks instead of {fewest}: bank conflicts"
        color = svg.INK if needed <= fewest else svg.ALARM
        canvas.lines([text], y, width, fill=color)

    def _tooltip(self, piece: Piece) -> str:
        elements = index_text(piece.index)
        if piece.last != piece.index:
            elements += f" to {index_text(piece.last)}"
        banks = ("bank " if len(piece.banks) == 1 else "banks ") + numbers_text(piece.banks)
        return f"{elements}: {_bytes(piece.address, piece.size)}, {banks}"


def _slot_width(size: int) -> int:
    """Pixels for a piece in a line of memory."""
    if size == CHUNK:
        return _SLOT
    return {8: 40, 4: 30}.get(size, max(2, size * 8))


def _bytes(address: int, size: int) -> str:
    return f"byte {address}" if size == 1 else f"bytes {address} to {address + size - 1}"


def _size(size: int) -> str:
    return "1 byte" if size == 1 else f"{size} bytes"


def _bits(first: int, count: int) -> str:
    return f"bit {first}" if count < 1 else f"bits {first} to {first + count}"


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _passes(count: int) -> str:
    return "1 pass" if count == 1 else f"{count} passes"
