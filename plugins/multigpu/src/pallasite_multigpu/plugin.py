"""The hook implementations of the plugin; what they contribute is imported when it is asked for."""

from __future__ import annotations

from pallasite.plugin import KernelLifecycle, hookimpl, imported_on_call

PALLASITE_PLUGIN_API = (1, 0)
"""What the plugin needs of Pallasite."""


@hookimpl
def pallasite_options() -> type:
    """Compiler parameters of the plugin."""
    from pallasite_multigpu.options import MultiGpuOptions

    return MultiGpuOptions


@hookimpl
def pallasite_lifecycles() -> tuple[KernelLifecycle, ...]:
    """The exchange of addresses and the barriers between devices."""
    where = "pallasite_multigpu.protocol.lifecycle"
    return (
        KernelLifecycle(
            name="device-barriers",
            applies=imported_on_call(f"{where}:applies"),
            prologue=imported_on_call(f"{where}:prologue"),
            epilogue=imported_on_call(f"{where}:epilogue"),
            finish=imported_on_call(f"{where}:finish"),
            description="kernels that reach other devices begin and end with these, if need be",
        ),
    )
