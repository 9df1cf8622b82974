"""Pictures of memory layouts against the addresses of the layouts."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite.drawing import draw_memory_layout
from pallasite.drawing.memory import GROUP_COLORS
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite.layouts import Extent, MemoryLayout, row_major, strided, swizzle_bytes

SVG = "{http://www.w3.org/2000/svg}"
TOOLTIP = re.compile(
    r"\[(?P<first>[\d, ]*)\](?: to \[(?P<last>[\d, ]*)\])?:"
    r" bytes? (?P<start>\d+)(?: to (?P<end>\d+))?, banks? (?P<banks>[\d, to]+)"
)


def numbers(text: str) -> list[int]:
    first, to, last = text.partition(" to ")
    return list(range(int(first), int(last) + 1)) if to else [int(n) for n in text.split(", ")]


def index_of(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(", ")) if text else ()


def address_of(layout: MemoryLayout, index: tuple[int, ...], offset: int = 0) -> int:
    """The layout's own definition; with an offset, that of its parts."""
    if offset == 0:
        return layout.byte_address(index)
    element = offset + layout.offset(index)
    return swizzle_bytes(element * layout.element_bits // 8, layout.swizzle)


def tiled(shape: tuple[int, ...], tiling: tuple[int, ...], swizzle: int, bits: int) -> MemoryLayout:
    first = len(shape) - len(tiling)
    counts = [n // t for n, t in zip(shape[first:], tiling, strict=True)]
    return row_major((*shape[:first], *counts, *tiling), bits, swizzle).untile(tiling)


class Chunk:
    """A rectangle of the picture that stands for some bytes."""

    def __init__(self, found: re.Match, rect: ET.Element):
        self.first = index_of(found["first"])
        self.last = index_of(found["last"]) if found["last"] is not None else self.first
        self.start = int(found["start"])
        self.end = int(found["end"] or found["start"])
        self.banks = numbers(found["banks"])
        self.fill = rect.get("fill")
        self.x, self.y = float(rect.get("x")), float(rect.get("y"))
        self.width = float(rect.get("width"))

    def elements(self) -> list[tuple[int, ...]]:
        ranges = [range(a, b + 1) for a, b in zip(self.first, self.last, strict=True)]
        return list(itertools.product(*ranges))


class Picture:
    """The chunks of the two panels: ``array`` and ``memory``."""

    def __init__(self, text: str):
        self.root = ET.fromstring(text)
        self.labels = [
            (float(one.get("x")), float(one.get("y")), one.text or "")
            for one in self.root.iter(f"{SVG}text")
        ]
        self.texts = [text for _, _, text in self.labels]
        groups = []
        for group in self.root.iter(f"{SVG}g"):
            chunks = []
            for rect in group.findall(f"{SVG}rect"):
                title = rect.find(f"{SVG}title")
                found = TOOLTIP.fullmatch(title.text) if title is not None else None
                if found:
                    chunks.append(Chunk(found, rect))
            if chunks:
                groups.append(chunks)
        # The array is one group, then comes one for each line of memory.
        self.array, *self.lines = groups

    def inside(self, chunk: Chunk) -> list[str]:
        return [
            text
            for x, y, text in self.labels
            if chunk.x < x < chunk.x + chunk.width and chunk.y < y < chunk.y + 20
        ]

    def counts(self) -> list[int]:
        """How many outlined chunks begin in each group of banks."""
        (y,) = [y for _, y, text in self.labels if text == "outlined"]
        found = [(x, text) for x, other, text in self.labels if other == y and text != "outlined"]
        return [int(text) for _, text in sorted(found)]


def check(layout: MemoryLayout, offset: int = 0) -> Picture:
    picture = Picture(draw_memory_layout(layout, offset=offset))
    for chunk in (*picture.array, *itertools.chain.from_iterable(picture.lines)):
        addresses = [address_of(layout, index, offset) for index in chunk.elements()]
        step = math.ceil(layout.element_bits / 8)
        assert min(addresses) == addresses[0] == chunk.start
        if layout.element_bits >= 8:
            assert addresses == list(range(chunk.start, chunk.end + 1, step))
        words = range(chunk.start // 4, chunk.end // 4 + 1)
        assert chunk.banks == [word % 32 for word in words]
    for chunk in picture.array:
        assert chunk.fill == GROUP_COLORS[chunk.start // 16 % 8]
        assert picture.inside(chunk) == [str(chunk.start)]
    drawn = [index for chunk in picture.array for index in chunk.elements()]
    assert len(drawn) == len(set(drawn))
    if not any(text.startswith("cut:") for text in picture.texts):
        assert sorted(drawn) == list(itertools.product(*map(range, layout.shape)))
    check_memory(picture, layout, offset)
    return picture


def check_memory(picture: Picture, layout: MemoryLayout, offset: int) -> None:
    """Each line has what lies in its 128 bytes, in the place of its bank."""
    (left,) = {
        x for line in picture.lines for x in [line[0].x - line[0].start % 128 * byte_width(line)]
    }
    owners: dict[int, list] = {}
    for index in itertools.product(*map(range, layout.shape)):
        owners.setdefault(address_of(layout, index, offset) // 128, []).append(index)
    for line in picture.lines:
        (number,) = {chunk.start // 128 for chunk in line}
        for chunk in line:
            assert chunk.x == left + chunk.start % 128 * byte_width(line)
        places = {address_of(layout, index, offset) for index in owners[number]}
        held = {address_of(layout, index, offset) for chunk in line for index in chunk.elements()}
        assert held == places
        assert any(
            text == str(number * 128) and line[0].y < y < line[0].y + 20
            for _, y, text in picture.labels
        )


def byte_width(line: list[Chunk]) -> float:
    return line[0].width / (line[0].end - line[0].start + 1)


@st.composite
def layouts(draw: st.DrawFn) -> MemoryLayout:
    """Tiled, swizzled, transposed and padded arrays."""
    bits = draw(st.sampled_from([8, 16, 32, 64]))
    swizzle = draw(st.sampled_from([16, 32, 64, 128]))
    columns = swizzle * 8 // bits
    tiling = (draw(st.sampled_from([4, 8, 16])), columns)
    counts = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    shape: tuple[int, ...] = tuple(n * t for n, t in zip(counts, tiling, strict=True))
    if draw(st.booleans()):
        shape = (2, *shape)
    layout = tiled(shape, tiling, swizzle, bits)
    if draw(st.booleans()):
        order = draw(st.permutations(range(len(shape))))
        layout = layout.transpose(order)
    return layout


@settings(max_examples=25, deadline=None)
@given(layouts(), st.data())
def test_tiled(layout, data):
    period = max(128, layout.atom_bytes) * 8 // layout.element_bits
    check(layout, data.draw(st.sampled_from([0, 1, 16, period - 8])))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=0, max_size=3).filter(lambda s: math.prod(s) < 3000),
    st.integers(0, 3),
    st.sampled_from([8, 16, 32, 64]),
)
def test_padded(shape, padding, bits):
    dims, stride = [], 1
    for extent in reversed(shape):
        dims.append((Extent(extent, stride),))
        stride *= extent + padding
    check(MemoryLayout(tuple(reversed(dims)), 16, bits))


def outlined(picture: Picture) -> str:
    (text,) = [text for text in picture.texts if text.startswith("outlined: ")]
    return text


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_a_swizzle_spreads_a_column_over_all_banks(swizzle, bits):
    picture = check(tiled((16, 128 * 8 // bits), (8, swizzle * 8 // bits), swizzle, bits))
    assert picture.counts() == [1] * 8
    assert outlined(picture).endswith("1 pass through the banks, no conflicts")


def test_without_a_swizzle_a_column_is_in_one_bank():
    picture = check(row_major((64, 64), 16))
    assert picture.counts() == [8] + [0] * 7
    assert outlined(picture) == (
        "outlined: rows 0 to 7 of columns 0 to 7, 8 chunks of 16 bytes at once:"
        " 8 passes through the banks instead of 1: bank conflicts"
    )


@pytest.mark.parametrize(("row", "passes"), [(32, 2), (64, 4), (128, 8), (144, 1), (272, 1)])
def test_passes_depend_on_the_pitch(row, passes):
    """Rows of 32 bytes meet after 4 rows, those of 64 after 2; 16 bytes of padding help."""
    layout = MemoryLayout(((Extent(32, row // 2),), (Extent(16, 1),)), 16, 16)
    assert f"{passes} pass" in outlined(check(layout))


def test_single_words_of_a_column():
    picture = check(row_major((32, 33), 32))
    assert "16 chunks of 4 bytes at once: 1 pass" in outlined(picture)
    picture = check(MemoryLayout(((Extent(16, 64),), (Extent(3, 21),)), 16, 32))
    assert "16 passes through the banks instead of 1" in outlined(picture)


def test_a_transposed_array_has_chunks_down_its_columns():
    picture = check(tiled((16, 64), (8, 64), 128, 16).transpose((1, 0)))
    assert (picture.array[0].first, picture.array[0].last) == ((0, 0), (7, 0))
    assert outlined(picture).startswith("outlined: rows 0 to 7 of columns 0 to 7")
    assert picture.counts() == [1] * 8


def test_elements_of_less_than_a_byte():
    layout = tiled((8, 256), (8, 256), 128, 4)
    picture = check(layout)
    assert picture.array[0].last == (0, 31)
    assert (picture.array[0].start, picture.array[0].end) == (0, 15)


def test_large_arrays_are_cut_at_tiles():
    layout = tiled((3, 256, 256), (8, 64), 128, 16)
    text = draw_memory_layout(layout, dtype="bfloat16")
    picture = Picture(text)
    mark = "16 of 256 rows and 64 of 256 columns are drawn"
    assert mark in " ".join(picture.texts)
    assert any(text.startswith("cut: index [0] of the leading") for text in picture.texts)
    assert len(picture.array) == 16 * 8
    assert len(text) < 100_000


def test_lines_that_are_left_out_are_marked():
    picture = Picture(draw_memory_layout(row_major((16, 256), 16)))
    assert [line[0].start for line in picture.lines] == [512 * row for row in range(16)]
    assert picture.texts.count("...") == 15
    scattered = MemoryLayout(((Extent(16, 256),), (Extent(8, 4096),)), 16, 32)
    picture = Picture(draw_memory_layout(scattered))
    assert len(picture.lines) == 16
    assert any("lies in 112 more lines" in text for text in picture.texts)


def test_memory_between_the_elements_is_not_part_of_the_array():
    text = draw_memory_layout(MemoryLayout(((Extent(4, 36),), (Extent(32, 1),)), 16, 32))
    titles = [one.text for one in ET.fromstring(text).iter(f"{SVG}title")]
    empty = Counter(title for title in titles if title.endswith("not part of the array"))
    assert empty["bytes 128 to 143: not part of the array"] == 1


def test_captions():
    layout = tiled((64, 64), (8, 64), 128, 16)
    picture = Picture(
        draw_memory_layout(layout, dtype="bfloat16", name="tile", notes=["a.py:3: b"], offset=64)
    )
    assert picture.texts[0] == "bfloat16[64, 64] in shared memory, tile"
    assert picture.root.find(f"{SVG}title").text == picture.texts[0]
    assert picture.texts[1] == "a.py:3: b"
    assert f"{layout} (size:stride in elements), 8192 bytes" in picture.texts
    assert any("bits 4 to 6 of a byte address" in text for text in picture.texts)
    assert "begins 128 bytes after an aligned address" in picture.texts
    plain = Picture(draw_memory_layout(row_major((4,), 32)))
    assert plain.texts[0] == "shape [4] in shared memory, no swizzle"


def test_the_picture_is_self_contained():
    layout = tiled((64, 128), (8, 64), 128, 16)
    text = draw_memory_layout(layout)
    assert text == draw_memory_layout(layout)
    assert "<script" not in text and "<style" not in text and "href" not in text
    root = ET.fromstring(text)
    assert root.find(f"{SVG}rect").get("fill") == "#ffffff"
    width, height = float(root.get("width")), float(root.get("height"))
    for one in root.iter(f"{SVG}text"):
        assert 0 < float(one.get("x")) < width and 0 < float(one.get("y")) < height


def test_other_things_are_refused():
    with pytest.raises(InvalidTypeError, match="only memory layouts"):
        draw_memory_layout(strided((128,)))
    with pytest.raises(InvalidValueError, match="begins before"):
        draw_memory_layout(row_major((8,), 32), offset=-1)
