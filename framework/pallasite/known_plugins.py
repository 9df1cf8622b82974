"""Plugins that are known to exist, so that an error can say which one to install.

This table is data for messages only: nothing is looked up in it unless something is missing.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownPlugin:
    """One published plugin: its entry-point name, how to get it, and what it provides."""

    name: str
    install: str
    targets: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    primitives: tuple[str, ...] = ()
    executors: tuple[str, ...] = ()


KNOWN_PLUGINS: tuple[KnownPlugin, ...] = (
    KnownPlugin(
        name="hopper",
        install="pip install pallasite[hopper]",
        targets=("sm_90a",),
        names=("set_max_registers", "wgmma", "wgmma_wait", "ACC", "WGMMAAccumulatorRef"),
        primitives=("set_max_registers", "wgmma_ref", "wgmma_wait", "wgmma_accumulator_deref"),
    ),
    KnownPlugin(
        name="blackwell",
        install="pip install pallasite[blackwell]",
        targets=("sm_100a", "sm_103a", "sm_120a"),
        names=(
            "TMEM",
            "TMEMLayout",
            "tcgen05_mma",
            "tcgen05_commit_arrive",
            "async_load_tmem",
            "async_store_tmem",
            "wait_load_tmem",
            "commit_tmem",
            "async_copy_scales_to_tmem",
            "async_copy_sparse_metadata_to_tmem",
            "try_cluster_cancel",
            "query_cluster_cancel",
        ),
        primitives=(
            "tcgen05_mma",
            "tcgen05_commit_arrive",
            "async_load_tmem",
            "async_store_tmem",
            "wait_load_tmem",
            "commit_tmem",
            "async_copy_to_tmem",
            "try_cluster_cancel",
            "query_cluster_cancel",
        ),
    ),
    KnownPlugin(
        name="multigpu",
        install="pip install pallasite[multigpu]",
        names=("remote_ref", "multicast_ref", "multimem_load_reduce", "multimem_store"),
        primitives=("multimem_load_reduce", "multimem_store"),
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
      kind: ``"targets"``, ``"names"``, ``"primitives"`` or ``"executors"``.
      name: what is missing.
    """
    for plugin in KNOWN_PLUGINS:
        if name in getattr(plugin, kind):
            return plugin
    return None
