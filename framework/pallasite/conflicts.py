"""How plugins' contributions are merged, and the errors where they contradict one another."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pallasite.errors import PluginError
from pallasite.extensions import Contribution, Replacement
from pallasite.rules import Rule
from pallasite.targets import Target, TargetPredicate

if TYPE_CHECKING:
    from pallasite.language.memory_space import MemorySpace
    from pallasite.lifecycle import KernelLifecycle

CORE = "pallasite"


class Overriding(Protocol):
    """Anything that a plugin contributes and that may replace that of other plugins."""

    @property
    def plugin(self) -> str:
        """Whose it is."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Names of the plugins that it may replace."""


class Targeted(Overriding, Protocol):
    """Anything that a plugin contributes for some targets."""

    @property
    def target(self) -> TargetPredicate:
        """The targets that it is for."""


def with_plugin(contributions: Iterable[Contribution], field: str) -> Iterator[Any]:
    """What all plugins contribute of one kind, each with the name of its plugin."""
    for one in contributions:
        for entry in getattr(one, field):
            yield dataclasses.replace(entry, plugin=one.plugin)


class Ordered(Protocol):
    """Anything of which several run in an order that they say themselves."""

    @property
    def name(self) -> str:
        """Unique name."""

    @property
    def plugin(self) -> str:
        """Whose it is."""

    @property
    def before(self) -> tuple[str, ...]:
        """Names of those that come later."""

    @property
    def after(self) -> tuple[str, ...]:
        """Names of those that come earlier."""


def merge_targets(contributions: Iterable[Contribution]) -> dict[str, Target]:
    """Targets by name; two plugins with a target of the same name raise :class:`PluginError`."""
    return _by_name("targets", contributions, "targets")


def merge_names(contributions: Iterable[Contribution], field: str = "names") -> dict[str, str]:
    """Names of ``pallasite.gpu``, each with its ``"module:attribute"``.

    Args:
      contributions: what plugins contribute.
      field: the field of it that holds the names.

    Raises:
      PluginError: two plugins have one name, and neither overrides the other; or it is a name of
        the core, or of a memory space of another plugin.
    """
    contributions = list(contributions)
    subject = {"names": "names of pallasite.gpu", "exports": "names of pallasite"}.get(
        field, field.replace("_", " ")
    )
    taken = {name: CORE for one in contributions if one.plugin == CORE for name in one.names}
    taken |= {space.name: one.plugin for one in contributions for space in one.memory_spaces}
    found = [
        _Named(
            name=name,
            path=value.path if isinstance(value, Replacement) else value,
            overrides=value.overrides if isinstance(value, Replacement) else (),
            plugin=one.plugin,
        )
        for one in contributions
        for name, value in getattr(one, field).items()
    ]
    for one in found if field == "names" else ():
        if (owner := taken.get(one.name, one.plugin)) != one.plugin:
            raise _conflict(f"{subject} {one.name!r}", owner, one.plugin, can_override=False)
    merged = unique(subject, found, lambda one: one.name, what="Replacement")
    return {name: one.path for name, one in merged.items() if one.plugin != CORE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Named:
    name: str
    path: str
    overrides: tuple[str, ...]
    plugin: str


def merge_spaces(contributions: Iterable[Contribution]) -> dict[str, MemorySpace]:
    """Memory spaces by name; the same name from two plugins raises :class:`PluginError`."""
    return _by_name("memory spaces", contributions, "memory_spaces")


def _by_name(subject: str, contributions: Iterable[Contribution], field: str) -> dict[str, Any]:
    found: dict[str, tuple[str, Any]] = {}
    for one in contributions:
        for entry in getattr(one, field):
            if entry.name in found:
                what = f"{subject} named {entry.name!r}"
                raise _conflict(what, found[entry.name][0], one.plugin, can_override=False)
            found[entry.name] = one.plugin, entry
    return {name: entry for name, (_, entry) in found.items()}


def unique[Entry: Overriding, Key](
    subject: str, entries: Iterable[Entry], key: Callable[[Entry], Key], what: str = "rule"
) -> dict[Key, Entry]:
    """One entry for each key: the only one, or the one that overrides all the others."""
    groups: dict[Key, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    chosen = {}
    for name, group in groups.items():
        best = winner(group)
        if best is None:
            raise _conflict(f"{subject} {str(name)!r}", *_disputants(group), what=what)
        chosen[name] = best
    return chosen


def one_for_each(
    contributions: Iterable[Contribution], field: str, subject: str, attribute: str = "name"
) -> dict[Any, Any]:
    """What plugins contribute in a field, by an attribute; see :func:`unique`."""
    return unique(subject, with_plugin(contributions, field), operator.attrgetter(attribute))


def _beats(one: Overriding, other: Overriding) -> bool:
    return (
        other.plugin in one.overrides
        and one.plugin != other.plugin
        and one.plugin not in other.overrides
    )


def winner[Entry: Overriding](group: Sequence[Entry]) -> Entry | None:
    """The one that overrides all the others, or None."""
    for one in group:
        if all(one is other or _beats(one, other) for other in group):
            return one
    return None


def _disputants(group: Sequence[Overriding]) -> tuple[str, str]:
    for index, one in enumerate(group):
        for other in group[index + 1 :]:
            if not _beats(one, other) and not _beats(other, one):
                return one.plugin, other.plugin
    return group[0].plugin, group[1].plugin


def check_no_tie(subject: str, rules: Sequence[Rule], target: Target) -> None:
    """Raises :class:`PluginError` if several of equally specific rules match a target, and none
    overrides the others."""
    matching = [rule for rule in rules if rule.target.matches(target)]
    if len(matching) > 1 and winner(matching) is None:
        raise tie(subject, matching, target)


def tie(subject: str, rules: Sequence[Overriding], target: Target) -> PluginError:
    """The error for rules of which none goes before the others on a target."""
    return _conflict(f"{subject} for target {target.name!r}", *_disputants(rules))


def most_specific[Entry: Targeted](
    subject: str, entries: Sequence[Entry], target: Target
) -> Entry | None:
    """The most specific of some entries for a target, or None if there is none.

    Raises:
      PluginError: equally specific ones of which none overrides the others.
    """
    matching = [entry for entry in entries if entry.target.matches(target)]
    best = max((entry.target.specificity for entry in matching), default=None)
    tied = [entry for entry in matching if entry.target.specificity == best]
    chosen = winner(tied)
    if tied and chosen is None:
        raise tie(f"equally specific {subject}", tied, target)
    return chosen


def _conflict(
    subject: str, one: str, other: str, *, can_override: bool = True, what: str = "rule"
) -> PluginError:
    if one == other:
        return PluginError(f"plugin {one!r} registers two {subject}", hint="remove one of them")
    disable = f"switch one off: PALLASITE_DISABLE_PLUGINS={other}"
    override = f"list the other plugin in overrides=({one!r},) of the {what} that shall win, or "
    return PluginError(
        f"plugins {one!r} and {other!r} both register {subject}",
        hint=(override if can_override else "") + disable,
    )


def in_order[Entry: Ordered](what: str, entries: Sequence[Entry]) -> list[Entry]:
    """Sorts by ``before`` and ``after``, keeping the given order where they leave it open."""
    earlier: dict[str, set[str]] = {entry.name: set() for entry in entries}
    for entry in entries:
        earlier[entry.name] |= {name for name in entry.after if name in earlier}
        for name in entry.before:
            if name in earlier:
                earlier[name].add(entry.name)
    remaining, ordered = list(entries), []
    done: set[str] = set()
    while remaining:
        ready = next((entry for entry in remaining if earlier[entry.name] <= done), None)
        if ready is None:
            circle = ", ".join(f"{e.name!r} (plugin {e.plugin!r})" for e in remaining)
            raise PluginError(f"the order of these {what} is circular: {circle}")
        remaining.remove(ready)
        ordered.append(ready)
        done.add(ready.name)
    return ordered


def merge_lifecycles(contributions: Iterable[Contribution]) -> tuple[KernelLifecycle, ...]:
    """All lifecycles of kernels, in their order.

    Raises:
      PluginError: two plugins have one of the same name, or they cannot be ordered.
    """
    found: dict[str, KernelLifecycle] = one_for_each(
        contributions, "lifecycles", "kernel lifecycles named"
    )
    return tuple(in_order("kernel lifecycles", list(found.values())))
