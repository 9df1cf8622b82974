"""Plugins that are known to exist, so that an error can say which one to install.

This table is data for messages only: nothing is looked up in it unless something is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownPlugin:
    """One plugin: its entry-point name, how to get it, and what it provides.

    ``install`` is empty for a plugin that is not published yet.
    """

    name: str
    install: str = ""
    targets: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    primitives: tuple[str, ...] = ()
    executors: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    barrier_orders: tuple[str, ...] = ()

    @property
    def absence(self) -> str:
        """What is said of it where it is not installed."""
        return "not installed" if self.install else "not available yet"


KNOWN_PLUGINS: tuple[KnownPlugin, ...] = (
    KnownPlugin(
        name="hopper",
        install="pip install pallasite[hopper]",
        targets=("sm_90a",),
        names=(
            "ACC",
            "WGMMAAccumulatorRef",
            "wgmma",
            "wgmma_accumulator_load",
            "wgmma_accumulator_store",
            "wgmma_wait",
        ),
        primitives=(
            "wgmma",
            "wgmma_accumulator_deref",
            "wgmma_accumulator_read",
            "wgmma_accumulator_store",
            "wgmma_added_wait",
            "wgmma_ref",
            "wgmma_wait",
        ),
        layouts=(
            "WGMMA",
            "WGMMA_8BIT",
            "WGMMA_TF32",
            "WGMMA_TRANSPOSED",
            "WGMMA_UPCAST_2X",
            "WGMMA_UPCAST_4X",
        ),
    ),
    KnownPlugin(
        name="blackwell",
        install="pip install pallasite[blackwell]",
        targets=("sm_100a", "sm_103a", "sm_110a", "sm_120a"),
        names=(
            "TMEM",
            "TMEMLayout",
            "async_copy_scales_to_tmem",
            "async_copy_smem_to_tmem",
            "async_copy_sparse_metadata_to_tmem",
            "async_load_tmem",
            "async_store_tmem",
            "commit_tmem",
            "format_tcgen05_sparse_metadata",
            "tcgen05_commit_arrive",
            "tcgen05_mma",
            "wait_load_tmem",
        ),
        primitives=(
            "async_copy_scales_to_tmem",
            "async_copy_smem_to_tmem",
            "async_copy_sparse_metadata_to_tmem",
            "async_load_tmem",
            "async_store_tmem",
            "commit_tmem",
            "tcgen05_commit_arrive",
            "tcgen05_mma",
            "wait_load_tmem",
        ),
        layouts=(
            "TCGEN05",
            "TCGEN05_M64_COLLECTIVE",
            "TCGEN05_M64_COLLECTIVE_NATIVE",
            "TCGEN05_TMEM_NATIVE",
            "TCGEN05_TRANSPOSED",
        ),
        barrier_orders=("tensor_core",),
    ),
    KnownPlugin(
        name="multigpu",
        names=(
            "PeerMemRef",
            "SemaphoreSignal",
            "multicast_ref",
            "multimem_load_reduce",
            "multimem_store",
            "remote_ref",
            "semaphore_signal_multicast",
            "semaphore_signal_parallel",
        ),
        primitives=(
            "multimem_load_reduce",
            "multimem_store",
            "semaphore_signal_multicast",
            "semaphore_signal_parallel",
        ),
    ),
    KnownPlugin(
        name="simulator",
        install="pip install pallasite[simulator]",
        executors=("simulator",),
    ),
)


def provider(kind: str, name: str) -> KnownPlugin | None:
    """The known plugin that provides ``name``, or None.

    Args:
      kind: ``"targets"``, ``"names"``, ``"primitives"``, ``"executors"``, ``"layouts"`` or
        ``"barrier_orders"``.
      name: what is missing.
    """
    for plugin in KNOWN_PLUGINS:
        if name in getattr(plugin, kind):
            return plugin
    return None


def remedy(kind: str, name: str, present: Mapping[str, str]) -> str | None:
    """What to do about something missing that a known plugin provides; None if none does.

    Args:
      kind: as for :func:`provider`.
      name: what is missing.
      present: by name of installed plugin, why it is of no use: ``"disabled"``, ``"failed: ..."``,
        or empty for a plugin that is loaded and well.
    """
    plugin = provider(kind, name)
    return None if plugin is None else plugin_remedy(plugin.name, present)


def plugin_remedy(name: str, present: Mapping[str, str]) -> str | None:
    """What to do to get what a plugin provides; None if nothing is known of the plugin.

    Args:
      name: the plugin's.
      present: as for :func:`remedy`.
    """
    known = {one.name: one for one in KNOWN_PLUGINS}.get(name)
    install = known.install if known is not None else ""
    reason = present.get(name)
    if reason is None:
        if known is None:
            return None
        if not install:
            return f"plugin {name!r}, which is to provide it, is not available yet"
        return f"{install} (plugin {name!r} provides it and is not installed)"
    if reason == "disabled":
        return (
            f"enable plugin {name!r}, which provides it:"
            " it is listed in PALLASITE_DISABLE_PLUGINS or config disabled_plugins"
        )
    if reason:
        return f"repair plugin {name!r}, which provides it; it {reason}"
    upgrade = f": {install} --upgrade" if install else ""
    return (
        f"plugin {name!r} is installed, but not in a version that has it; look for a later one"
        + upgrade
    )


def absent_plugins(present: Mapping[str, str]) -> str | None:
    """Which installed plugins are of no use and might have had what is missing; None if none is.

    Args:
      present: as for :func:`remedy`.
    """
    parts = []
    disabled = [repr(name) for name, reason in present.items() if reason == "disabled"]
    if disabled:
        parts.append(
            f"plugins that are disabled may provide it: {', '.join(disabled)}"
            " (PALLASITE_DISABLE_PLUGINS or config disabled_plugins)"
        )
    failed = [
        f"{name!r}, which {reason}"
        for name, reason in present.items()
        if reason not in ("", "disabled")
    ]
    if failed:
        parts.append(f"plugins that are broken may provide it: {'; '.join(failed)}")
    return "; ".join(parts) or None
