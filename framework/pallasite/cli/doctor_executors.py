"""Which executor runs kernels on each platform, and why."""

from __future__ import annotations

from typing import Any

from pallasite.cli import output
from pallasite.cli.checks import WARNING, Check

_ALWAYS = ("cuda", "cpu")
"""Platforms that are listed even if nothing runs kernels on them."""


def choices() -> list[Any]:
    """The :class:`ExecutorChoice` of each platform; JAX's own platforms first.

    Raises:
      PluginError: two plugins contradict each other.
    """
    from pallasite.cli.contributions import quiet
    from pallasite.plugins import manager

    with quiet():
        registry = manager().registry()
        others = {p for one in registry.executors.values() for p in one.platforms}
        return [
            registry.executor_choice(platform)
            for platform in (*_ALWAYS, *sorted(others - set(_ALWAYS)))
        ]


def executors(found: dict[str, Any]) -> tuple[list[Check], list[Any]]:
    """What runs kernels on each platform, and the choices that were made.

    Args:
      found: what JAX says of its devices, as :func:`pallasite.cli.doctor_devices.ask_jax` does.
    """
    from pallasite.known_plugins import remedy
    from pallasite.plugins import manager

    try:
        all_choices = choices()
    except Exception as error:
        return [Check("executors", f"not known: {error}".splitlines()[0], WARNING)], []
    here = {"gpu": "cuda"}.get(str(found.get("platform")), found.get("platform"))
    checks = []
    for choice in all_choices:
        name = f"on {choice.platform}" + (", as JAX is here" if choice.platform == here else "")
        if choice.chosen is not None:
            checks.append(Check(name, f"{choice.chosen.name} runs kernels: {choice.reason}"))
            continue
        advice = ""
        if choice.forced is not None:
            advice = "leave the option 'executor' out"
        elif choice.platform == "cpu":
            advice = remedy("executors", "simulator", manager().absences()) or ""
        needed = choice.platform == here or choice.forced is not None
        text = f"nothing runs kernels: {choice.reason}"
        checks.append(Check(name, text, WARNING if needed else "ok", advice))
    return checks, all_choices


def table(all_choices: list[Any]) -> str:
    """All executors by platform, in the order in which they are preferred."""
    rows = [
        (
            choice.platform,
            candidate.executor.name,
            candidate.executor.plugin,
            str(candidate.executor.priority),
            "yes" if candidate.unavailable is None else f"no: {candidate.unavailable}",
            "yes" if candidate.executor is choice.chosen else "no",
            candidate.executor.description,
        )
        for choice in all_choices
        for candidate in choice.candidates
    ]
    headers = ("platform", "executor", "plugin", "priority", "available", "runs kernels", "does")
    return output.table(headers, rows) if rows else ""


def as_json(all_choices: list[Any]) -> list[dict[str, Any]]:
    """The same for programs."""
    return [
        {
            "platform": choice.platform,
            "runs": None if choice.chosen is None else choice.chosen.name,
            "reason": choice.reason,
            "forced": None if choice.forced is None else choice.forced[0],
            "executors": [
                {
                    "name": candidate.executor.name,
                    "plugin": candidate.executor.plugin,
                    "priority": candidate.executor.priority,
                    "available": candidate.unavailable is None,
                    "unavailable": candidate.unavailable,
                    "description": candidate.executor.description,
                }
                for candidate in choice.candidates
            ],
        }
        for choice in all_choices
    ]
