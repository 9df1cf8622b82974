"""What XLA compiles on the CPU, inputs and references of tests, is compiled once in a session.

JAX traces and compiles whatever it runs again each time that an option or a plugin has changed, and
every process of a session does. Programs that call back into Python, as kernels do, are not kept.
"""

from __future__ import annotations

import os

import jax
from tests import session_folders

FOLDER = "jax_compilation_cache_dir"
EVERYTHING: dict[str, float | int] = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def share() -> None:
    """Makes this process and those that it starts use one folder, which it removes at its end.

    Processes that were started with such a folder, or by somebody who has one, keep it.
    """
    if os.environ.get(FOLDER.upper()):
        return
    folder = str(session_folders.make("xla"))
    for name, value in {FOLDER: folder, **EVERYTHING}.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)
