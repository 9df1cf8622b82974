"""What else decides the result of a compilation: code, plugins, options, the assembler."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping

import pallasite
from pallasite.plugin import config, manager
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.runtime import Unkeyable, find_tool
from pallasite_std.caching.code_identity import IDENTITY, EditedError
from pallasite_std.caching.loaded_code import LOADED


def environment_text(*, assemble: bool, code: int | None = None) -> str:
    """Everything outside the kernel that its compilation depends on, as one text.

    It has the version of Python, hashes of the code of Pallasite, of every enabled plugin and of
    what these require, which plugins failed to load, and the options (also Pallas's debug checks)
    that affect code.

    Args:
      assemble: whether machine code is asked for, so that the assembler counts too.
      code: what :func:`loaded_code` returned just now, if it was called.

    Raises:
      Unkeyable: a plugin was registered by the program itself, or code was changed in this process.
    """
    states = {}
    for plugin in manager().plugins():
        if plugin.state == "disabled":
            continue
        if plugin.in_process:
            raise Unkeyable(f"plugin {plugin.name!r}, which was registered in this process")
        states[plugin.name] = "failed" if plugin.state == "failed" else "in use"
    if (loaded_code() if code is None else code) != 0:
        raise Unkeyable("code of plugins that was changed after it was imported")
    return json.dumps(
        {
            "python": sys.version_info[:3],
            "code": _hashes(),
            "plugins": states,
            "options": _options(),
            "debug_checks": _jax.debug_checks_enabled(),
            "assembler": _assembler() if assemble else None,
        },
        sort_keys=True,
    )


def files_unchanged() -> bool:
    """Whether the files of all code are as they were when :func:`environment_text` was called."""
    return IDENTITY.unchanged()


def loaded_code() -> int:
    """0 while plugins' code in memory is what was imported, another number for each other state."""
    return LOADED.generation(manager().packages())


def _hashes() -> Mapping[str, str]:
    """Hashes of the code of all distributions that take part in a compilation."""
    distributions = {"pallasite": {"pallasite"}}
    for one in manager().installed():
        distributions.setdefault(one.owner, set()).add(one.package)
    (wall, steady), now = pallasite._imported, time.time_ns() - time.monotonic_ns()
    since = min(wall, steady + now)  # The clock may have been set back meanwhile.
    try:
        return IDENTITY.hashes(distributions, since)
    except (OSError, EditedError) as error:
        raise Unkeyable(f"code that was edited after it was imported: {error}") from None


def _options() -> dict[str, str]:
    """Options that affect code and are not as usual.

    Modules that are imported later may declare others. Those of the environment count as they are
    given there; a program can set one only after it was declared.
    """
    known = {option.variable for option in config.OPTIONS.values()}
    values = {
        name: repr(config.get(name))
        for name, option in config.OPTIONS.items()
        if option.affects_code and name not in config.OPTIONS_OF_CACHES
        if config.get(name) != option.default()
    }
    return values | {
        name: value
        for name, value in os.environ.items()
        if name.startswith(config.PREFIX) and name not in known
    }


def _assembler() -> list[object]:
    """The programs that make and show machine code; a new version is another file."""
    known: list[object] = []
    for name in ("ptxas", "nvdisasm"):
        path = find_tool(name).path
        status = path.stat() if path is not None else None
        known.append(
            [str(path), status and (status.st_size, status.st_mtime_ns, status.st_ctime_ns)]
        )
    return known
