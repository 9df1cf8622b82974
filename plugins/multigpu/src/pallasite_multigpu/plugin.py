"""The hook implementations of the plugin; what they contribute is imported when it is asked for."""

from __future__ import annotations

from pallasite.plugin import hookimpl

PALLASITE_PLUGIN_API = (1, 0)
"""What the plugin needs of Pallasite."""


@hookimpl
def pallasite_options() -> type:
    """Compiler parameters of the plugin."""
    from pallasite_multigpu.options import MultiGpuOptions

    return MultiGpuOptions
