"""Pictures of the layouts of a kernel, or of one layout that is described on the command line."""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import linecache
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pallasite.cli import output
from pallasite.cli.array_types import ArrayType, array_type
from pallasite.cli.user_code import prepare_jax
from pallasite.errors import InvalidValueError, PallasiteError, SourceLocation

if TYPE_CHECKING:
    from pallasite.codegen.compiled import CompiledKernel
    from pallasite.lowering.recording import KernelLayouts, Use

_MOST_NOTES = 8
_LONGEST_CODE = 60
_ALONE = ("layout", "shape", "dtype", "tiling", "swizzle")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what says what to draw, and where."""
    group = parser.add_argument_group("pictures of layouts")
    group.add_argument(
        "--draw",
        metavar="OUT",
        help="draw the layouts of the kernel as SVG files in this folder; without a kernel, the"
        " layout that these options describe, as a file, or - for standard output",
    )
    group.add_argument(
        "--layout",
        metavar="NAME",
        help="a register layout of plgpu.Layout, such as MMA_ACC or 'WG_STRIDED(vec_size=4)'",
    )
    group.add_argument(
        "--tiling", metavar="8x64", type=_extents, help="the tiles of an array in shared memory"
    )
    group.add_argument(
        "--swizzle", metavar="BYTES", type=int, help="its swizzle: 32, 64 or 128; 16 for none"
    )
    group.add_argument("--shape", metavar="64x16", type=_extents, help="the shape of the array")
    group.add_argument("--dtype", metavar="TYPE", type=_dtype, help="its dtype, such as bfloat16")


def _extents(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*([x,][1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of extents; expected positive numbers such as 64x16"
        )
    return tuple(map(int, re.split("[x,]", text)))


def _dtype(text: str) -> str:
    return array_type(f"{text}[]").dtype


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises an InvalidValueError if the options do not say one thing to do."""
    given = [f"--{name}" for name in _ALONE if getattr(arguments, name) is not None]
    if arguments.kernel is not None:
        if given:
            raise InvalidValueError(
                f"{given[0]} is for pictures without a kernel",
                got=f"{arguments.kernel} and {', '.join(given)}",
                expected="a kernel, or options that describe a layout",
            )
        asked = arguments.draw is not None or arguments.layouts
        if asked and "::" not in arguments.kernel:
            raise InvalidValueError(
                "no kernel was named",
                expected=f"{arguments.kernel}::KERNEL",
                hint=f"pallasite inspect {arguments.kernel}  lists what the file offers",
            )
        return
    if arguments.layouts:
        raise InvalidValueError(
            "--layouts is for kernels", got="no kernel", expected="--layouts FILE::KERNEL"
        )
    memory = [name for name in given if name in ("--tiling", "--swizzle")]
    if "--layout" in given and memory:
        raise InvalidValueError(
            "a layout is of registers or of shared memory",
            got=", ".join(given),
            expected="--layout, or --tiling and --swizzle",
        )
    if "--layout" not in given and not memory:
        raise InvalidValueError(
            "there is nothing to inspect",
            expected="FILE::KERNEL, or --draw OUT.svg with --layout or with --tiling and --swizzle",
        )
    missing = [] if arguments.draw else ["--draw OUT.svg"]
    missing += [] if arguments.shape else ["--shape 64x64"]
    missing += ["--dtype bfloat16"] if memory and not arguments.dtype else []
    if missing:
        raise InvalidValueError(
            "the options do not say all about the picture",
            got=", ".join(given),
            hint=f"add {' '.join(missing)}",
        )


# One layout ---------------------------------------------------------------------------------------


def draw_alone(arguments: argparse.Namespace) -> None:
    """Draws the one layout that the options describe.

    Raises:
      InvalidValueError: there is no such layout, or it does not fit the shape.
    """
    if arguments.layout is not None:
        picture = _register_picture(arguments.layout, arguments.shape, arguments.dtype or "")
    else:
        picture = _memory_picture(
            ArrayType(arguments.dtype, arguments.shape), arguments.tiling, arguments.swizzle
        )
    output.write(picture.encode(), arguments.draw)


def _register_picture(text: str, shape: tuple[int, ...], dtype: str) -> str:
    prepare_jax()
    from pallasite.drawing import draw_register_layout
    from pallasite.layouts import default_vector_length, named

    bits = _bits(dtype) if dtype else 32
    name, args, kwargs = _call(text)
    if not args:  # What the other options say need not be said again.
        if name.startswith("MMA_"):
            kwargs.setdefault("dtype", dtype)
        elif name == "SMEM_GMEM_COPY":
            kwargs = {"shape": shape, "dtype": dtype, **kwargs}
        elif name == "WG_STRIDED":
            kwargs.setdefault("vec_size", default_vector_length(shape, bits))
    layout = named.resolve(name, args, kwargs, shape, bits)
    return draw_register_layout(layout, name=text, dtype=dtype)


def _call(text: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Reads ``NAME`` or ``NAME(argument, ..., keyword=argument)``."""
    from pallasite.layouts import Replicated

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(map(value, node.elts))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Replicated":
            return Replicated(*map(value, node.args))
        return ast.literal_eval(node)

    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, (), {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            keywords = {one.arg: value(one.value) for one in node.keywords if one.arg}
            return node.func.id, tuple(map(value, node.args)), keywords
    except (SyntaxError, ValueError, TypeError):
        pass
    raise InvalidValueError(
        f"{text!r} is no register layout",
        expected="a name, with arguments if it needs some, such as WG_STRIDED(vec_size=4)",
    )


def _memory_picture(array: ArrayType, tiling: tuple[int, ...] | None, swizzle: int | None) -> str:
    prepare_jax()
    import jax
    import numpy as np

    from pallasite.drawing import draw_memory_layout
    from pallasite.language.transforms import SwizzleTransform, TilingTransform
    from pallasite.layouts import row_major

    # The transforms check what a kernel's allocation would be refused for.
    physical: Any = jax.core.ShapedArray(array.shape, np.dtype(array.dtype))
    names = []
    try:
        if tiling is not None:
            physical = TilingTransform(tiling).transform_type(physical)
            names.append(f"tiling {'x'.join(map(str, tiling))}")
        if swizzle is not None and swizzle != 16:
            SwizzleTransform(swizzle).transform_type(physical)
            names.append(f"swizzle {swizzle} bytes")
        else:
            names.append("no swizzle")
    except PallasiteError as error:
        error.location = None  # No line of a kernel is to blame.
        raise
    layout = row_major(physical.shape, _bits(array.dtype), swizzle or 16)
    if tiling is not None:
        layout = layout.untile(tiling)
    return draw_memory_layout(layout, name=", ".join(names), dtype=array.dtype)


def _bits(dtype: str) -> int:
    import ml_dtypes  # noqa: F401  (NumPy knows its dtypes from then on)
    import numpy as np

    from pallasite.ir.types import bit_width

    return bit_width(np.dtype(dtype))


# The layouts of kernels ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A picture of a kernel's layout.

    Attributes:
      file: its path.
      kind: ``registers`` or ``shared``.
      layout: the layout in words.
      arrays: the types of the arrays that have it, and of references their names.
    """

    file: str
    kind: str
    layout: str
    arrays: tuple[str, ...]


def draw_kernels(
    kernels: Sequence[tuple[CompiledKernel, KernelLayouts]], folder: str
) -> list[list[Drawing]]:
    """Draws the layouts of some kernels into a folder; returns the pictures of each."""
    count: collections.Counter[str] = collections.Counter()
    pictures = []
    for kernel, layouts in kernels:
        count[kernel.name] += 1
        number = f"-{count[kernel.name]}" if count[kernel.name] > 1 else ""
        pictures.append(draw_kernel(layouts, folder, f"{kernel.name}{number}"))
    return pictures


def draw_kernel(kernel: KernelLayouts, folder: str, prefix: str) -> list[Drawing]:
    """Draws every layout of a kernel into a folder, which is made if it is not there.

    Args:
      kernel: its layouts.
      folder: where to write.
      prefix: what the files' names begin with.

    Raises:
      InvalidValueError: the folder or a file cannot be written.
    """
    from pallasite.drawing import draw_memory_layout, draw_register_layout
    from pallasite.layouts import describe

    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidValueError(
            f"cannot write into {folder}: {error.strerror}", expected="a folder"
        ) from error
    made: list[Drawing] = []

    def write(name: str, picture: str, drawing: Drawing) -> None:
        path = str(pathlib.Path(folder) / f"{_safe(f'{prefix}-{drawing.kind}-{name}')}.svg")
        output.write(picture.encode(), path)
        made.append(dataclasses.replace(drawing, file=path))

    for number, (layout, uses) in enumerate(kernel.registers.items(), 1):
        name, shape = describe(layout), layout.shape
        picture = draw_register_layout(layout, dtype=_common_dtype(uses), notes=_notes(uses))
        short = name if len(name) < 32 else "tiled"
        drawing = Drawing("", "registers", name, _arrays(uses, shape))
        write(f"{number}-{short}-{_by(shape)}", picture, drawing)
    for number, (view, uses) in enumerate(kernel.shared.items(), 1):
        shape = view.layout.shape
        notes = _notes(uses)
        if view.moves:
            notes.append("begins at an index that the kernel computes, drawn for 0")
        picture = draw_memory_layout(
            view.layout, dtype=_common_dtype(uses), notes=notes, offset=view.offset
        )
        swizzle = f"-swizzle-{view.layout.swizzle}" if view.layout.swizzle != 16 else ""
        drawing = Drawing("", "shared", str(view.layout), _arrays(uses, shape))
        write(f"{number}-{_by(shape)}{swizzle}", picture, drawing)
    return made


def as_text(drawings: Sequence[Drawing]) -> str:
    """A section of the report."""
    rows = [(one.file, one.kind, one.layout, "; ".join(one.arrays)) for one in drawings]
    table = output.table(("file", "in", "layout", "arrays"), rows) if rows else "no layouts"
    return f"drawings\n{output.indented(table)}"


def _arrays(uses: Iterable[Use], shape: Sequence[int]) -> tuple[str, ...]:
    extents = f"[{', '.join(map(str, shape))}]"
    texts = (f"{use.name}: {use.dtype}" if use.name else use.dtype for use in uses)
    return tuple(dict.fromkeys(f"{text}{extents}" for text in texts))


def _common_dtype(uses: Iterable[Use]) -> str:
    dtypes = {use.dtype for use in uses}
    return dtypes.pop() if len(dtypes) == 1 else ""


def _notes(uses: Iterable[Use]) -> list[str]:
    """One line for each source line: where it is, its text, and what it does with which arrays."""
    lines: dict[SourceLocation | None, list[Use]] = {}
    for use in uses:
        place = use.location and dataclasses.replace(use.location, column=0)
        lines.setdefault(place, []).append(use)
    notes = []
    for place, own in list(lines.items())[:_MOST_NOTES]:
        primitives = ", ".join(dict.fromkeys(use.primitive for use in own))
        arrays = ", ".join(dict.fromkeys(f"{use.name} {use.dtype}".lstrip() for use in own))
        notes.append(f"{_place(place)} ({primitives}: {arrays})")
    if len(lines) > _MOST_NOTES:
        notes.append(f"and {len(lines) - _MOST_NOTES} more lines")
    return notes


def _place(place: SourceLocation | None) -> str:
    """``file:line: code``, with a path from the present folder if it is inside it."""
    if place is None:
        return "a line that is not known"
    code = linecache.getline(place.file, place.line).strip()
    if len(code) > _LONGEST_CODE:
        code = code[: _LONGEST_CODE - 3] + "..."
    return f"{output.location_text(place)}: {code}".removesuffix(": ")


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _safe(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name, flags=re.ASCII).strip("-")
