"""A canvas that collects SVG elements and measures itself; the same calls give the same text.

Coordinates are pixels, y downwards. Every element has explicit colours, and the picture has a
background of its own, so that it looks alike on light and dark pages.
"""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

MARGIN = 16
INK = "#1f2328"
QUIET = "#59636e"
FAINT = "#d1d9e0"
BACKGROUND = "#ffffff"
EMPTY = "#f3f5f7"
ALARM = "#b3261e"

FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
"""Fixed pitch, so that the width of a text is known without its glyphs."""
ADVANCE = 0.61
"""Width of a character, in units of the font size."""

type Number = int | float
type Attributes = dict[str, str | Number]
"""Of an element; underscores in names stand for hyphens."""


def number(value: Number) -> str:
    """A coordinate with at most two decimals."""
    return f"{round(value, 2):g}"


def text_width(text: str, size: Number) -> int:
    """The width of a line of text of a font size, rounded up to whole pixels."""
    return math.ceil(len(text) * size * ADVANCE)


class Canvas:
    """A picture that grows with what is drawn on it.

    Args:
      title: what it shows, for screen readers and as a tooltip.
    """

    def __init__(self, title: str):
        self.title = title
        self.width: float = 0
        self.height: float = 0
        self._parts: list[str] = []

    def reach(self, x: Number, y: Number) -> None:
        """Makes the picture reach to a point; rectangles do so by themselves."""
        self.width = max(self.width, x)
        self.height = max(self.height, y)

    def rect(
        self,
        x: Number,
        y: Number,
        width: Number,
        height: Number,
        *,
        tooltip: str = "",
        **attributes: str | Number,
    ) -> None:
        """A rectangle, with a text that appears where the pointer rests on it."""
        self.reach(x + width, y + height)
        places = dict(x=x, y=y, width=width, height=height)
        start = f"<rect{_attributes({**places, **attributes})}"
        self._parts.append(
            f"{start}><title>{escape(tooltip)}</title></rect>" if tooltip else f"{start}/>"
        )

    def text(self, x: Number, y: Number, text: str, **attributes: str | Number) -> None:
        """One line of text; ``y`` is its baseline. ``text_anchor`` says what ``x`` is."""
        self._parts.append(
            f"<text{_attributes(dict(x=x, y=y, **attributes))}>{escape(text)}</text>"
        )

    def path(self, commands: str, **attributes: str | Number) -> None:
        """A line along SVG path commands; nothing if there are none."""
        if commands:
            self._parts.append(f"<path{_attributes(dict(d=commands, **attributes))}/>")

    @contextlib.contextmanager
    def group(self, **attributes: str | Number) -> Iterator[None]:
        """What is drawn inside has these attributes."""
        self._parts.append(f"<g{_attributes(attributes)}>")
        yield
        if self._parts[-1].startswith("<g"):
            self._parts.pop()
        else:
            self._parts.append("</g>")

    def heading(self, title: str, lines: Sequence[str], y: Number, width: Number) -> float:
        """A title, and lines that are wrapped to a width; returns the y below them."""
        self.text(MARGIN, y + 16, title, font_size=15, font_weight=700, fill=INK)
        self.reach(MARGIN + text_width(title, 15), y)
        return self.lines(lines, y + 24, width)

    def lines(
        self,
        lines: Sequence[str],
        y: Number,
        width: Number | None,
        *,
        fill: str = QUIET,
        size: int = 11,
        left: Number = MARGIN,
    ) -> float:
        """Lines of text, wrapped to a width if there is one; returns the y below them."""
        limit = 1000 if width is None else max(48, int(width / (size * ADVANCE)))
        with self.group(font_size=size, fill=fill):
            for line in lines:
                for number, piece in enumerate(textwrap.wrap(line, limit)):
                    x = left + (0 if number == 0 else MARGIN)
                    y += size + 5
                    self.text(x, y, piece)
                    self.reach(x + text_width(piece, size), y)
        return float(y + 4)

    def render(self) -> str:
        """The picture as an SVG document."""
        width, height = (number(extent + MARGIN) for extent in (self.width, self.height))
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            f' viewBox="0 0 {width} {height}" role="img" font-family={quoteattr(FONT)}'
            f' font-size="10" fill="{INK}">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{width}" height="{height}" fill="{BACKGROUND}"/>',
            *self._parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _attributes(attributes: Attributes) -> str:
    return "".join(
        f" {name.replace('_', '-')}={quoteattr(value if isinstance(value, str) else number(value))}"
        for name, value in attributes.items()
    )


def box(x: Number, y: Number, width: Number, height: Number) -> str:
    """Path commands for the outline of a rectangle."""
    return f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h{number(-width)}z"


def across(x: Number, y: Number, length: Number) -> str:
    """Path commands for a horizontal line."""
    return f"M{number(x)} {number(y)}h{number(length)}"


def down(x: Number, y: Number, length: Number) -> str:
    """Path commands for a vertical line."""
    return f"M{number(x)} {number(y)}v{number(length)}"


TOOTH = 6


def torn(x: Number, y: Number, length: Number, *, vertical: bool = False) -> str:
    """Path commands for a jagged line, the mark of a cut."""
    half = TOOTH / 2
    count = max(1, int(length / TOOTH))
    step = length / count
    commands = [f"M{number(x)} {number(y)}"]
    for position in range(count):
        side = half if position % 2 == 0 else -half
        if vertical:
            commands.append(
                f"l{number(side)} {number(step / 2)}l{number(-side)} {number(step / 2)}"
            )
        else:
            commands.append(
                f"l{number(step / 2)} {number(side)}l{number(step / 2)} {number(-side)}"
            )
    return "".join(commands)
