"""The simulator's configuration options, besides ``sanitize``, which is the core's."""

from __future__ import annotations

from typing import Any

from pallasite.plugin import config


def _count(value: Any) -> int:
    number = int(value)
    if number < 1 or isinstance(value, float | bool):
        raise ValueError
    return number


def _seconds(value: Any) -> float | None:
    if value is None or str(value).strip().lower() in ("", "none", "off"):
        return None
    if isinstance(value, bool) or not 0 <= float(value) < float("inf"):
        raise ValueError
    return float(value) or None


def _progress(value: Any) -> bool | None:
    if value is None or str(value).strip().lower() == "auto":
        return None
    return config.boolean(value)


def _chip(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError
    return value or None


for _option in (
    config.Option(
        "simulator_processes",
        "PALLASITE_SIMULATOR_PROCESSES",
        lambda: 1,
        _count,
        "a number from 1",
        "how many processes share the blocks of a grid",
        affects_code=False,
    ),
    config.Option(
        "simulator_timeout",
        "PALLASITE_SIMULATOR_TIMEOUT",
        lambda: None,
        _seconds,
        "seconds, or 0 or None for no limit",
        "after what time a kernel that has not ended is an error, which says where its threads are",
        affects_code=False,
    ),
    config.Option(
        "simulator_progress",
        "PALLASITE_SIMULATOR_PROGRESS",
        lambda: None,
        _progress,
        "auto (on a terminal, if it takes long), on or off",
        "whether a progress bar is shown on standard error",
        affects_code=False,
    ),
    config.Option(
        "simulator_chip",
        "PALLASITE_SIMULATOR_CHIP",
        lambda: None,
        _chip,
        "the name of a chip such as 'H200 SXM', or None for that of the target",
        "which chip's figures estimates are made with",
        affects_code=False,
    ),
):
    config.declare(_option)
