"""From PTX text to a program, remembered by text."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator, Mapping

from pallasite.plugin import InstructionRule, plugins
from pallasite_simulator.engine.float_environment import exact_floats
from pallasite_simulator.engine.program import Program
from pallasite_simulator.errors import PtxError
from pallasite_simulator.ptx.parser import parse
from pallasite_simulator.ptx.syntax import Position


def load(ptx: str, name: str | None = None, multiprocessors: int = 132) -> Program:
    """Makes a kernel ready to run.

    Args:
      ptx: the text of a module.
      name: of the kernel; may be left out if there is only one.
      multiprocessors: of the chip that it is to look like.

    Raises:
      PtxError: the text is malformed, has no such kernel, or an instruction that nothing knows.
    """
    rules = plugins.manager().instructions()
    return _load(ptx, name, multiprocessors, _comparable(rules))


class _Rules:
    """Rules by name, compared by what they are."""

    def __init__(self, rules: Mapping[str, InstructionRule]):
        self.rules = rules
        self._key = frozenset((name, id(rule.bind)) for name, rule in rules.items())

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rules) and self._key == other._key


_latest = _Rules({})


def _comparable(rules: Mapping[str, InstructionRule]) -> _Rules:
    """The rules as they can be compared, found once for as long as plugins stay the same."""
    global _latest
    known = _latest
    if known.rules is not rules:
        known = _latest = _Rules(rules)
    return known


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Python does not look for garbage: all objects of a program stay, and there are so many that
    it would look half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.lru_cache(maxsize=64)
@_without_collection()
def _load(ptx: str, name: str | None, multiprocessors: int, rules: _Rules) -> Program:
    module = parse(ptx, tolerant=True)
    if name is None:
        kernels = [f.name for f in module.functions if f.entry and f.body is not None]
        if len(kernels) != 1:
            raise PtxError(
                "the module does not have just one kernel: say which one to run",
                position=Position(1, 1),
                got=", ".join(kernels) or "none",
            )
        name = kernels[0]
    with exact_floats():
        program = Program(module, name, rules.rules, multiprocessors)
    program.source = ptx
    return program
