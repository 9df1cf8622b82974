"""Pictures of register layouts against the layouts' own definition."""

from __future__ import annotations

import itertools
import math
import random
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pallasite.drawing import draw_register_layout
from pallasite.drawing.registers import COMMON_COLOR, ROW, WARP_COLORS
from pallasite.errors import InvalidTypeError
from pallasite.layouts import (
    Digit,
    MemoryLayout,
    Owner,
    RegisterLayout,
    SplatLayout,
    describe,
    named,
    row_major,
    strided,
)

SVG = "{http://www.w3.org/2000/svg}"
TOOLTIP = re.compile(
    r"\[(?P<index>[\d, ]*)\]: warps? (?P<warps>[\d, to]+), lanes? (?P<lanes>[\d, to]+),"
    r" register (?P<register>\d+), vector element (?P<vector>\d+)"
)
THREADS = list(itertools.product(range(4), range(32)))


def numbers(text: str) -> list[int]:
    first, to, last = text.partition(" to ")
    return list(range(int(first), int(last) + 1)) if to else [int(n) for n in text.split(", ")]


class Picture:
    """The elements that a picture shows, with the colour and the place of each."""

    def __init__(self, text: str):
        self.root = ET.fromstring(text)
        self.texts = [one.text or "" for one in self.root.iter(f"{SVG}text")]
        self.cells = {}
        for group in self.root.iter(f"{SVG}g"):
            for rect in group.findall(f"{SVG}rect"):
                title = rect.find(f"{SVG}title")
                found = TOOLTIP.fullmatch(title.text) if title is not None else None
                if found:
                    index = tuple(numbers(found["index"])) if found["index"] else ()
                    assert index not in self.cells, "an element is drawn twice"
                    self.cells[index] = (found, group.get("fill"), rect)

    def cut(self) -> dict[str, tuple[int, int]]:
        """What the mark of a cut says is drawn of how much."""
        (mark,) = [text for text in self.texts if text.startswith("cut: ")] or [""]
        return {
            what: (int(shown), int(total))
            for shown, total, what in re.findall(r"(\d+) of (\d+) (rows|columns|elements)", mark)
        }


def check_places(layout: RegisterLayout, picture: Picture) -> None:
    """Every element that is drawn is exactly where the layout says, and nowhere else."""
    holders: dict[tuple, set] = {}
    for register, vector in itertools.product(range(layout.registers), range(layout.vector_length)):
        for warp, lane in THREADS:
            place = holders.setdefault(layout.element_at(warp, lane, register, vector), set())
            place.add((warp, lane, register, vector))
    for index, (found, fill, _) in picture.cells.items():
        own = (int(found["register"]), int(found["vector"]))
        warps, lanes = numbers(found["warps"]), numbers(found["lanes"])
        assert {(*thread, *own) for thread in itertools.product(warps, lanes)} == holders[index]
        assert fill == (COMMON_COLOR if len(warps) == 4 else WARP_COLORS[warps[0]])


def check_extent(layout: RegisterLayout, picture: Picture) -> None:
    """The elements drawn are the first rows and columns; those left out are owned up to."""
    shape, cut = layout.shape, picture.cut()
    if len(shape) < 2:
        shown, total = cut.get("elements", (layout.size, layout.size))
        assert (total, set(picture.cells)) == (
            layout.size,
            {(i,) for i in range(shown)} if shape else {()},
        )
        return
    rows = math.prod(shape[:-1])
    shown_rows, all_rows = cut.get("rows", (rows, rows))
    shown_columns, all_columns = cut.get("columns", (shape[-1], shape[-1]))
    assert (all_rows, all_columns) == (rows, shape[-1])
    leading = list(itertools.product(*map(range, shape[:-1])))[:shown_rows]
    assert set(picture.cells) == {
        (*index, column) for index in leading for column in range(shown_columns)
    }


def check_positions(picture: Picture, shape: tuple[int, ...]) -> None:
    """Rows of the picture are rows of the array, in their order."""
    places = {
        (float(rect.get("y")), float(rect.get("x"))): index
        for index, (_, _, rect) in picture.cells.items()
    }
    assert len(places) == len(picture.cells)
    assert [places[place] for place in sorted(places)] == sorted(picture.cells)
    if len(shape) >= 2:
        for (y, x), index in places.items():
            assert places[y, min(place[1] for place in places)][:-1] == index[:-1]
            assert places[min(place[0] for place in places), x][-1] == index[-1]


def check_formulas(layout: RegisterLayout, picture: Picture) -> None:
    """The formulas below the picture, as Python, give the index of every place."""
    formulas = [text.split(" = ")[1] for text in picture.texts if " = " in text]
    for _ in range(50):
        place = dict(
            warp=random.randrange(4),
            lane=random.randrange(32),
            register=random.randrange(layout.registers),
            vector=random.randrange(layout.vector_length),
        )
        got = tuple(eval(formula, {}, place) for formula in formulas)
        index = layout.element_at(**place)
        if layout.flat:
            linear = 0
            for i, extent in zip(index, layout.shape, strict=True):
                linear = linear * extent + i
            index = (linear,)
        assert got == index


def check(layout: RegisterLayout, text: str) -> Picture:
    picture = Picture(text)
    assert picture.cells
    check_places(layout, picture)
    check_extent(layout, picture)
    check_positions(picture, layout.shape)
    check_formulas(layout, picture)
    return picture


@st.composite
def layouts(draw: st.DrawFn) -> RegisterLayout:
    """Layouts of random digits over one to three dimensions."""
    lanes = draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    warps = draw(st.sampled_from([1, 2, 4]))
    pieces = [
        *_split(draw, Owner.LANE, lanes, draw(st.sampled_from([1, 2, 32 // lanes]))),
        *_split(draw, Owner.WARP, warps, draw(st.sampled_from([1, 4 // warps]))),
        *_split(draw, Owner.REGISTER, draw(st.sampled_from([1, 2, 3, 4, 8, 12])), 1),
        *_split(draw, Owner.VECTOR, draw(st.sampled_from([1, 2, 4])), 1),
    ]
    pieces = draw(st.permutations(pieces))
    rank = draw(st.integers(1, 3))
    dims: list[list[Digit]] = [[] for _ in range(rank)]
    for piece in pieces:
        dims[draw(st.integers(0, rank - 1))].append(piece)
    shape = tuple(math.prod(d.size for d in dim) for dim in dims)
    length = math.prod(d.size for d in pieces if d.owner is Owner.VECTOR)
    reach = {Owner.LANE: 32, Owner.WARP: 4}
    assume(all(d.size * d.stride <= reach.get(d.owner, 1 << 20) for d in pieces))
    return RegisterLayout(shape, tuple(map(tuple, dims)), length)


def _split(draw: st.DrawFn, owner: Owner, size: int, stride: int) -> list[Digit]:
    """A digit as one or two."""
    minor = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    return [Digit(size // minor, owner, stride * minor), Digit(minor, owner, stride)]


@settings(max_examples=40, deadline=None)
@given(layouts())
def test_any_digits(layout):
    check(layout, draw_register_layout(layout))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3).filter(lambda s: math.prod(s) < 5000),
    st.sampled_from([1, 2, 3, 4, 8]),
)
def test_strided(shape, vector):
    assume(math.prod(shape) % vector == 0)
    layout = strided(shape, vector)
    check(layout, draw_register_layout(layout, dtype="float32"))


@pytest.mark.parametrize(
    ("name", "args", "shape"),
    [
        *((name, (), (128, 32)) for name in ("WGMMA", "WGMMA_8BIT", "WGMMA_UPCAST_2X", "TCGEN05")),
        ("_WGMMA_ACC_32BIT", (), (64, 32)),
        ("WGMMA_TRANSPOSED", (), (64, 16)),
        ("WGMMA_ROW", (), (128,)),
        ("WGMMA_COL", (), (64,)),
        ("TCGEN05_TMEM_NATIVE", (4,), (128, 16)),
        ("TMA_INDICES", (), (64,)),
        ("TMA_INDICES_4", (), (16,)),
    ],
)
def test_named(name, args, shape):
    layout = named.resolve(name, args, {}, shape, 16)
    picture = check(layout, draw_register_layout(layout, dtype="bfloat16"))
    types = f"bfloat16[{', '.join(map(str, shape))}]"
    assert picture.texts[0] == f"{describe(layout)} {types}"
    assert picture.root.find(f"{SVG}title").text == picture.texts[0]


def test_reduced_and_transposed_layouts():
    for layout in (strided((64, 16)).reduce([0]), strided((8, 64), 2).transpose([1, 0]).layout):
        check(layout, draw_register_layout(layout))


def test_labels_stand_on_their_elements():
    """The lane in bold and the register are written on boxes whose elements have them."""
    layout = named.resolve("WGMMA", (), {}, (64, 16), 32)
    picture = Picture(draw_register_layout(layout))
    boxes = [
        (float(rect.get("x")), float(rect.get("y")), float(rect.get("width")), found)
        for found, _, rect in picture.cells.values()
    ]
    seen = {"lanes": 0, "register": 0}
    (labels,) = [g for g in picture.root.iter(f"{SVG}g") if g.get("pointer-events") == "none"]
    for group, kind in zip(labels, ("lanes", "register"), strict=True):
        for text in group:
            x, y = float(text.get("x")), float(text.get("y"))
            found = next(
                f for left, top, w, f in boxes if left <= x < left + w and top < y < top + ROW
            )
            assert text.text == (found["lanes"] if kind == "lanes" else f"r{found['register']}")
            seen[kind] += 1
    assert seen == {"lanes": 64 * 8, "register": 64 * 8}


def test_large_arrays_are_cut_where_lanes_repeat():
    layout = named.resolve("WGMMA", (), {}, (128, 128), 32)
    text = draw_register_layout(layout, dtype="float32")
    picture = check(layout, text)
    cut = picture.cut()
    assert cut["rows"][0] % 64 == 0 and cut["columns"][0] % 8 == 0
    assert len(picture.cells) <= 2048 and len(text) < 500_000
    wide = layout.element_at(3, 31, 0, 1)
    assert wide in picture.cells, "a whole base tile is drawn"


def test_the_limits_are_arguments():
    layout = named.resolve("WGMMA", (), {}, (256, 64), 32)
    small = Picture(draw_register_layout(layout, width=200))
    assert small.cut() == {"rows": (64, 256), "columns": (8, 64)}
    tall = Picture(draw_register_layout(layout, width=200, rows=128))
    assert tall.cut()["rows"] == (128, 256)


def test_replicated_elements_are_marked():
    row = Picture(draw_register_layout(named.resolve("WGMMA_ROW", (), {}, (64,), 32)))
    assert "0-3" in row.texts and "4-7" in row.texts
    assert any("up to 4 lanes hold each element" in text for text in row.texts)
    column = Picture(draw_register_layout(named.resolve("WGMMA_COL", (), {}, (8,), 32)))
    assert {"0+", "1+", "all warps"} <= set(column.texts)
    alone = Picture(draw_register_layout(strided((37,))))
    assert "all" in alone.texts


def test_splat():
    picture = Picture(draw_register_layout(SplatLayout((64, 64)), dtype="int32"))
    assert picture.texts[0] == "splat int32[64, 64]"
    assert any("every lane holds the value" in text for text in picture.texts)


def test_notes_are_escaped_and_wrapped():
    note = "a.py:3: x = a < b & c  " + "word " * 60
    text = draw_register_layout(strided((128,)), notes=[note], name="a<b", dtype="f<32>")
    picture = Picture(text)
    assert picture.texts[0] == "a<b f<32>[128]"
    assert picture.texts[1].startswith("a.py:3: x = a < b & c")
    assert sum("word" in line for line in picture.texts) > 2


def test_the_picture_is_self_contained():
    text = draw_register_layout(named.resolve("WGMMA", (), {}, (64, 16), 32))
    assert text == draw_register_layout(named.resolve("WGMMA", (), {}, (64, 16), 32))
    assert "<script" not in text and "<style" not in text and "href" not in text
    root = ET.fromstring(text)
    background = root.find(f"{SVG}rect")
    assert background.get("fill") == "#ffffff"
    width, height = float(root.get("width")), float(root.get("height"))
    assert (background.get("width"), background.get("height")) == (
        root.get("width"),
        root.get("height"),
    )
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width")) <= width
        assert float(rect.get("y", 0)) + float(rect.get("height")) <= height
    for one in root.iter(f"{SVG}text"):
        assert 0 < float(one.get("x")) < width and 0 < float(one.get("y")) < height


def test_other_things_are_refused():
    with pytest.raises(InvalidTypeError, match="only register layouts") as caught:
        draw_register_layout(row_major((8, 8), 32))
    assert "got: MemoryLayout" in str(caught.value)
    assert isinstance(row_major((8,), 32), MemoryLayout)
