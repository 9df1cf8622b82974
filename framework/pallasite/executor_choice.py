"""Which executor runs kernels on a platform, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pallasite import config
from pallasite.extensions import Executor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """An executor for a platform.

    Attributes:
      executor: the executor.
      unavailable: why it cannot work in this process; None if it can.
    """

    executor: Executor
    unavailable: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorChoice:
    """What runs kernels on a platform.

    Attributes:
      platform: a JAX platform, such as ``"cuda"``.
      candidates: the executors for it; those of higher priority first, and of one priority in the
        order in which plugins are loaded.
      chosen: the one that runs kernels; None if there is none.
      reason: why it is that one, or why there is none, in one line.
      forced: the name that the option ``executor`` gives, and where that was set.
    """

    platform: str
    candidates: tuple[Candidate, ...]
    chosen: Executor | None
    reason: str
    forced: tuple[str, str] | None = None


def choose_executor(executors: Iterable[Executor], platform: str) -> ExecutorChoice:
    """Chooses for a platform: the executor that the option ``executor`` names, else the available
    one of the highest priority."""
    executors = tuple(executors)
    serving = [one for one in executors if platform in one.platforms]
    serving.sort(key=lambda one: -one.priority)  # Sorting keeps the order of equals.
    candidates = tuple(Candidate(executor=one, unavailable=_unavailable(one)) for one in serving)
    name, source = config.source("executor")
    if name is not None:
        origin = {"update": "config.update", "context": "config.scoped"}.get(source, source)
        chosen, reason = _forced(name, origin, executors, candidates, platform)
        forced = (name, origin)
    else:
        chosen, reason = _by_priority(candidates)
        forced = None
    return ExecutorChoice(
        platform=platform, candidates=candidates, chosen=chosen, reason=reason, forced=forced
    )


def _forced(
    name: str,
    origin: str,
    executors: tuple[Executor, ...],
    candidates: tuple[Candidate, ...],
    platform: str,
) -> tuple[Executor | None, str]:
    for candidate in candidates:
        if candidate.executor.name == name:
            if candidate.unavailable is not None:
                return None, f"{origin} names {name}, which cannot run: {candidate.unavailable}"
            return candidate.executor, f"{origin} names it"
    for executor in executors:
        if executor.name == name:
            platforms = " and ".join(executor.platforms)
            return None, f"{origin} names {name}, which runs kernels on {platforms} only"
    known = ", ".join(one.name for one in executors) or "none"
    return (
        None,
        f"{origin} names {name}, and there is no executor of that name (there are: {known})",
    )


def _by_priority(candidates: tuple[Candidate, ...]) -> tuple[Executor | None, str]:
    if not candidates:
        return None, "no plugin has an executor for this platform"
    available = [one.executor for one in candidates if one.unavailable is None]
    if not available:
        return None, "none is available"
    chosen = available[0]
    if len(candidates) == 1:
        return chosen, "the only executor for this platform"
    if len(available) == 1:
        return chosen, "the only one that is available"
    equal = [one for one in available if one.priority == chosen.priority]
    if len(equal) > 1:
        names = " and ".join(f"{one.name} (plugin {one.plugin!r})" for one in equal)
        return (
            None,
            f"{names} have the same priority, {chosen.priority}; the option executor chooses",
        )
    return chosen, f"the highest priority, {chosen.priority}, of those that are available"


def _unavailable(executor: Executor) -> str | None:
    """Why an executor cannot work in this process; None if it can."""
    if executor.available is None:
        return None
    try:
        answer = executor.available()
    except Exception as error:  # A plugin's check may not stop the others' executors.
        return f"its check failed: {type(error).__name__}: {error}"
    if isinstance(answer, str):
        return answer or "it does not say why"
    return None if answer else "it does not say why"
