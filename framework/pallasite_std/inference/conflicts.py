"""Messages for what no choice of layouts satisfies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pallasite.plugin import InvalidValueError, PallasiteError, SourceLocation
from pallasite.plugin.inference import Access, Factor, Fixed, MemoryUse, is_impossible
from pallasite.plugin.layouts import MemoryLayout
from pallasite.plugin.lowering import describe_memory, name_of

if TYPE_CHECKING:
    from pallasite.plugin.inference import MemoryChoice, Problem, Solver


def check_solution(problem: Problem, solver: Solver) -> None:
    """Raises an error if equations need layouts that exclude each other.

    What cannot be done by itself, whatever the layouts, is left to the lowering rules, which say
    more about it.

    Raises:
      InvalidValueError: an allocation, or an array, is used in ways that no layout suits.
    """
    for factor in solver.impossible():
        if isinstance(factor, Fixed):
            raise _two_layouts(factor, problem, solver)
        for number in factor.choices:
            choice = problem.choices[number]
            if not choice.given and _accepted(factor, choice.candidates):
                uses = [one for one in problem.factors if number in one.choices]
                raise _memory_conflict(choice, factor, uses)


# Memory -------------------------------------------------------------------------------------------


def _accepted(use: Factor, candidates: Sequence[MemoryLayout]) -> list[MemoryLayout]:
    """The layouts of an allocation that one use can do with."""
    if isinstance(use, Access):
        return [layout for layout in candidates if use.view([layout]) is not None]
    return [layout for layout in candidates if not is_impossible(use.cost([], [layout]))]


def _memory_conflict(
    choice: MemoryChoice, refused: Factor, uses: Sequence[Factor]
) -> InvalidValueError:
    """The error of an allocation whose uses have no layout in common."""
    accepted = {id(use): _accepted(use, choice.candidates) for use in uses}
    mine = accepted[id(refused)]
    others = [use for use in uses if not any(one in mine for one in accepted[id(use)])]
    # If no two of them exclude each other, all of them together do.
    every = [use for use in uses if len(accepted[id(use)]) < len(choice.candidates)]
    involved = [use for use in uses if use is refused or use is others[0]] if others else every
    value = choice.value
    name = value.name or "an allocation"
    extents = ", ".join(map(str, value.shape))
    lines = [f"{value.dtype}[{extents}]" + _at(", allocated at ", choice.place.location)]
    for use in involved:
        lines += [_line(use.place.location, _what(use)), f"  needs {_any(accepted[id(use)])}"]
        refusal = _refusal(use, [a for one in involved for a in accepted[id(one)]])
        if refusal is not None:
            lines.append(f"  not {describe_memory(refusal[0])}: {refusal[1].message}")
    return InvalidValueError(
        f"{name} is used in ways that no layout of shared memory suits",
        got="\n    ".join(lines),
        expected="uses that can do with one layout",
        hint=f"give one of them an allocation of its own, and copy: other[...] = {name}[...];"
        " or say how it lies with transforms=, and change the use that this does not suit",
        location=involved[-1].place.location,
    )


def _what(use: Factor) -> str:
    if isinstance(use, Access):
        return f"{use.what} of a part of it"
    return use.why if isinstance(use, MemoryUse) and use.why else use.place.primitive


def _any(layouts: Sequence[MemoryLayout]) -> str:
    texts = [describe_memory(layout) for layout in layouts]
    if len(texts) > 2:
        texts = [texts[0], f"one of {len(texts) - 1} others"]
    return ", or ".join(texts)


def _refusal(
    use: Factor, layouts: Sequence[MemoryLayout]
) -> tuple[MemoryLayout, PallasiteError] | None:
    """The first of some layouts that will not do, and why."""
    for layout in layouts:
        error = use.refusal(layout) if isinstance(use, Access | MemoryUse) else None
        if error is not None:
            return layout, error
    return None


# Arrays -------------------------------------------------------------------------------------------


def _two_layouts(factor: Fixed, problem: Problem, solver: Solver) -> InvalidValueError:
    """The error of an array that cannot be converted, but has to be in two layouts."""
    group = problem.group(factor.variable)
    variable = problem.variables[factor.variable]
    extents = ", ".join(map(str, variable.shape))
    lines = [f"{variable.dtype}[{extents}]{_at(', made at ', variable.place.location)}"]
    chosen = solver.labels[group]
    other = next(
        (
            one
            for one in problem.factors
            if isinstance(one, Fixed)
            and one is not factor
            and problem.group(one.variable) == group
            and one.layout == chosen
        ),
        None,
    )
    for one in (other, factor):
        if one is not None:
            lines.append(_line(one.place.location, one.why or one.place.primitive))
            lines.append(f"  needs {name_of(one.layout)}")
    if other is None:
        lines.append(f"all other uses together need {name_of(chosen)}")
    return InvalidValueError(
        "an array is needed in two layouts, and cannot be converted in between",
        got="\n    ".join(lines),
        expected="one layout",
        hint="make the array twice, once for each use",
        location=factor.place.location,
    )


def _at(before: str, location: SourceLocation | None) -> str:
    return "" if location is None else f"{before}{location}"


def _line(location: SourceLocation | None, text: str) -> str:
    return text if location is None else f"{location}: {text}"
