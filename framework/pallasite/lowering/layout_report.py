"""What layouts a kernel has and why: plain data, for people and for programs."""

from __future__ import annotations

import dataclasses

from pallasite.errors import SourceLocation


@dataclasses.dataclass(frozen=True)
class Reason:
    """Part of why something was chosen: a text in the user's terms and the line that it is of."""

    text: str
    location: SourceLocation | None = None


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """The layout of an array in registers.

    Attributes:
      location: the line that makes it.
      primitive: name of the primitive that makes it.
      dtype: name of its element type.
      shape: its shape.
      layout: the layout in words.
      why: what decided, the nearest first; empty if the program itself says it.
    """

    location: SourceLocation | None
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    why: tuple[Reason, ...] = ()


@dataclasses.dataclass(frozen=True)
class SharedLayout:
    """The layout of an array in shared memory.

    Attributes:
      location: the line that allocates it, or that views it.
      name: how the kernel calls it; may be empty.
      dtype: name of its element type.
      shape: its shape.
      layout: the transforms that would declare it, or ``row-major``.
      why: the uses that decided, and accesses that have bank conflicts nevertheless.
    """

    location: SourceLocation | None
    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    why: tuple[Reason, ...] = ()


@dataclasses.dataclass(frozen=True)
class LayoutConversion:
    """A conversion between layouts that inference has inserted.

    Attributes:
      location: the line at which the array is converted.
      primitive: name of the primitive whose operand or result it is.
      dtype: name of the array's element type.
      shape: its shape.
      source: its layout before, in words.
      target: its layout afterwards, in words.
      through: ``registers`` or ``shared memory``.
      cost: of one conversion, in passes of 128 bytes through shared memory, about.
      times: how often it runs, about; 1 for what is in no loop.
      why: what asks for the other layout.
    """

    location: SourceLocation | None
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    target: str
    through: str
    cost: float
    times: float
    why: tuple[Reason, ...] = ()


@dataclasses.dataclass(frozen=True)
class Insertion:
    """A fence, barrier or wait that the program does not have and that its semantics imply.

    Attributes:
      location: the line before whose primitive it comes.
      primitive: name of the primitive.
      what: ``fence`` (ordinary stores before asynchronous operations, and a barrier), ``barrier``
        (of the lanes of a thread), or what a plugin adds, such as a wait for MMAs.
    """

    location: SourceLocation | None
    primitive: str
    what: str


@dataclasses.dataclass(frozen=True)
class LayoutReport:
    """The layouts of one kernel, in the order of the program.

    Attributes:
      arrays: in registers; without those of a single element or of one repeated value.
      shared: in shared memory.
      conversions: between layouts.
      insertions: fences, barriers and waits that were added.
    """

    arrays: tuple[ArrayLayout, ...] = ()
    shared: tuple[SharedLayout, ...] = ()
    conversions: tuple[LayoutConversion, ...] = ()
    insertions: tuple[Insertion, ...] = ()
