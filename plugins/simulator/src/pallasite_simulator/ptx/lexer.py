"""Words of PTX text and a cursor over them (PTX ISA chapter 4, syntax)."""

from __future__ import annotations

import bisect
import re
from typing import NoReturn

from pallasite.plugin import SourceLocation
from pallasite_simulator.errors import PtxError
from pallasite_simulator.ptx.syntax import Position

# A dotted name such as "ld.global.L1::evict_last.b32" is one word: names of instructions repeat, so
# that splitting them can be cached. A word's kind can be told from its first character.
_WORD = re.compile(
    r"""
    \s*
  (?:
    (
        (?: [A-Za-z][\w$]* | [_$%][\w$]+ ) (?: \.\w+ (?: ::\w+ )* )*
      | (?: \d+ (?: \.\d* )? | \.\d+ ) [eE][+-]\d+
      | \.\w+ (?: ::\w+ )*
      | \d[\w.]*
      | "(?: [^"\\\n] | \\. )*"
      | << | >> | <= | >= | == | != | && | \|\|
      | /(?![*/])
      | [,;\[\]()+\-*%&|^~!?<>=@_$]
    )
  | ( [{}:] )
  | ( //[^\n]* | /\*.*?\*/ )
  | ( \S )
  )
    """,
    re.VERBOSE | re.ASCII | re.DOTALL,
)
_PLAIN, _MARK, _COMMENTED, _BAD = range(1, 5)
_IMPLICIT_DEFINITION = re.compile(r"//\s*implicit-def:\s*(%[\w$]+)\s*$", re.ASCII)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NAME = re.compile(r"[A-Za-z][\w$]*|[_$%][\w$]+", re.ASCII)
_ESCAPE = re.compile(r"\\([0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}

# Words after the last one, so that looking ahead needs no check.
_END = ("", "", "")


def is_name(word: str) -> bool:
    """Whether this word is an identifier without dots (PTX ISA 4.4, identifiers)."""
    return _NAME.fullmatch(word) is not None


def string_value(word: str) -> str:
    """The contents of a string in quotation marks, with C's escapes resolved."""
    if "\\" not in word:
        return word[1:-1]
    data = bytearray()
    at = 1
    for match in _ESCAPE.finditer(word, 1, len(word) - 1):
        data += word[at : match.start()].encode(errors="replace")
        what = match[1]
        if what[0] in "01234567":
            data.append(int(what, 8) & 0xFF)
        else:
            data += _ESCAPED.get(what, what).encode(errors="replace")
        at = match.end()
    data += word[at:-1].encode(errors="replace")
    return data.decode(errors="replace")


class Reader:
    """The words of a PTX text and a place in them.

    Attributes:
      text: the whole text.
      words: all words, followed by empty ones.
      starts: the offset of each word in ``text``.
      index: of the next word.
      closing: index of the ``}`` for the index of each ``{``.
      labels: indices of the names before a ``:``, by the index of the innermost ``{`` around them.
      implicit_definitions: registers of LLVM's comments ``// implicit-def: %r1`` with the comment's
        offset, by the index of the word that follows.
      location: the user's source line, which errors get.

    Raises:
      PtxError: a character that is no part of PTX, a comment or string without end, or braces that
        do not match.
    """

    def __init__(self, text: str):
        self.text = text
        self.words: list[str] = []
        self.starts: list[int] = []
        self.index = 0
        self.closing: dict[int, int] = {}
        self.labels: dict[int, list[int]] = {}
        self.implicit_definitions: dict[int, list[tuple[str, int]]] = {}
        self.location: SourceLocation | None = None
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]
        self._split()

    def _split(self) -> None:
        words, starts = self.words, self.starts
        opened: list[int] = []
        for match in _WORD.finditer(self.text):
            kind = match.lastindex
            if kind == _PLAIN:
                words.append(match[_PLAIN])
                starts.append(match.start(_PLAIN))
            elif kind == _MARK:
                word = match[_MARK]
                if word == "{":
                    opened.append(len(words))
                elif word == "}":
                    if not opened:
                        self._fail_at(match.start(_MARK), "'}' without '{'")
                    self.closing[opened.pop()] = len(words)
                elif opened and words and is_name(words[-1]) and words[-1] != "WARP_SZ":
                    self.labels.setdefault(opened[-1], []).append(len(words) - 1)
                words.append(word)
                starts.append(match.start(_MARK))
            elif kind == _COMMENTED:
                if implicit := _IMPLICIT_DEFINITION.match(match[_COMMENTED]):
                    found = self.implicit_definitions.setdefault(len(words), [])
                    found.append((implicit[1], match.start(_COMMENTED)))
            elif self.text.startswith("/*", match.start(_BAD)):
                self._fail_at(match.start(_BAD), "comment without end")
            elif match[_BAD] == '"':
                self._fail_at(match.start(_BAD), "string without end")
            else:
                self._fail_at(match.start(_BAD), f"unexpected character {match[_BAD]!r}")
        if opened:
            self._fail_unclosed(opened[-1])
        words.extend(_END)
        starts.extend([len(self.text)] * len(_END))

    def _fail_unclosed(self, brace: int) -> NoReturn:
        """Says which brace is not closed: that of a vector, if there is one, or that of a block."""
        opened: list[bool] = []
        for index, word in enumerate(self.words):
            if word == "{":
                before = self.words[index - 1] if index else ""
                # In front of vectors: another operand or the dotted name of an instruction.
                opened.append(before in (",", "[", "=") or "." in before[1:])
            elif word == "}":
                opened.pop()
            elif word == ";" and opened and opened[-1]:
                self._fail_at(self.starts[index], "';' inside braces that are not closed")
        self._fail_at(self.starts[brace], "block without end: no '}' for this '{'")

    def position_at(self, offset: int) -> Position:
        """Line and column of an offset in the text."""
        line = bisect.bisect_right(self._lines, offset)
        return Position(line, offset - self._lines[line - 1] + 1)

    def position(self, index: int | None = None) -> Position:
        """Line and column of a word: of the next one unless given."""
        return self.position_at(self.starts[self.index if index is None else index])

    def source(self, start: int, end: int) -> str:
        """The text from word ``start`` up to word ``end``, in one line and without comments."""
        piece = self.text[self.starts[start] : self.starts[end]]
        if "/" in piece:
            piece = _COMMENT.sub(" ", piece)
        return " ".join(piece.split())

    def _fail_at(self, offset: int, message: str) -> NoReturn:
        start = self.text.rfind("\n", 0, offset) + 1
        line = self.text[start : (self.text + "\n").find("\n", offset)]
        raise PtxError(
            message, position=self.position_at(offset), instruction=" ".join(line.split())[:200]
        )

    def fail(
        self,
        message: str,
        *,
        index: int | None = None,
        start: int | None = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> NoReturn:
        """Raises a PtxError at word ``index`` (the next one unless given).

        Its text is the statement that begins at word ``start``, or else the line of the word.
        """
        at = self.index if index is None else index
        offset = self.starts[at]
        if start is None:
            begin = self.text.rfind("\n", 0, offset) + 1
            end = self.text.find("\n", offset)
        else:
            begin = self.starts[start]
            end = self.text.find(";", offset)
            line_end = self.text.find("\n", offset)
            # Where the semicolon is missing, what follows belongs to another statement.
            if end < 0 or 0 <= line_end < end:
                end = line_end
        piece = _COMMENT.sub(" ", self.text[begin : end if end >= 0 else None])
        raise PtxError(
            message,
            position=self.position_at(offset),
            instruction=" ".join(piece.split())[:200],
            expected=expected,
            hint=hint,
            location=self.location,
        )

    def found(self, index: int | None = None) -> str:
        """The word for a message: quoted, or that the text ends."""
        word = self.words[self.index if index is None else index]
        return repr(word) if word else "the end of the text"

    def next(self) -> str:
        """Takes the next word."""
        word = self.words[self.index]
        if word:
            self.index += 1
        return word

    def accept(self, word: str) -> bool:
        """Takes the next word if it is this one."""
        if self.words[self.index] == word:
            self.index += 1
            return True
        return False

    def expect(self, word: str, *, start: int | None = None) -> None:
        """Takes this word or raises a PtxError."""
        if self.words[self.index] != word:
            self.fail(f"expected {word!r}, found {self.found()}", start=start)
        self.index += 1

    def name(self, what: str) -> str:
        """Takes an identifier, or raises a PtxError that says ``what`` was expected."""
        word = self.words[self.index]
        if not is_name(word):
            self.fail(f"expected {what}, found {self.found()}")
        if word == "WARP_SZ":
            self.fail("'WARP_SZ' is a constant, not a name")
        self.index += 1
        return word

    def string(self) -> str:
        """Takes a string in quotation marks and gives its contents."""
        word = self.words[self.index]
        if word[:1] != '"':
            self.fail(f"expected a string, found {self.found()}")
        self.index += 1
        return string_value(word)

    def skip_block(self) -> None:
        """Skips from ``{`` to behind its ``}``."""
        if self.words[self.index] != "{":
            self.fail(f"expected '{{', found {self.found()}")
        self.index = self.closing[self.index] + 1
