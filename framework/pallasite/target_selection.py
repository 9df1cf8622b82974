"""Which target a kernel is compiled for."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator

from pallasite import config
from pallasite.errors import TargetError
from pallasite.plugins import manager
from pallasite.targets import Target

DEFAULT_TARGET = "sm_90a"
PORTABLE_DEFAULT_TARGET = "sm_90"


def select_target(
    explicit: str | Target | None = None,
    *,
    local: Callable[[], tuple[int, int] | None] | None = None,
) -> Target:
    """The target to compile for.

    The first that is set: ``explicit``, a surrounding ``with pallasite.target(...)``, the variable
    ``PALLASITE_TARGET``, ``config.update("target", ...)``, the local GPU, ``sm_90a`` (``sm_90`` if
    no plugin provides that).

    Args:
      explicit: a target or its name, as in ``CompilerParams(target=...)``.
      local: gives the compute capability of the local GPU, or None; JAX is asked if left out.

    Raises:
      TargetError: there is no target of that name, or its plugin is missing, or the local GPU is
        older than every target.
    """
    if isinstance(explicit, Target):
        return explicit
    if explicit is not None:
        return find_target(explicit, "target=...")
    name, source = config.source("target")
    if name is not None:
        return find_target(name, source)
    capability = (local or local_compute_capability)()
    if capability is not None:
        return _target_of_device(capability)
    available = manager().targets()
    return available.get(DEFAULT_TARGET) or find_target(PORTABLE_DEFAULT_TARGET)


def find_target(name: str, source: str = "") -> Target:
    """The target of a name.

    Args:
      name: such as ``"sm_90a"``.
      source: where the user wrote it, for the message.

    Raises:
      TargetError: no installed plugin provides it; the message says which known one would.
    """
    available = manager().targets()
    if name in available:
        return available[name]
    origin = {"update": "config.update", "context": "with pallasite.target(...)"}.get(
        source, source
    )
    raise TargetError(
        f"no target named {name!r}" + (f" (from {origin})" if origin else ""),
        expected="one of " + ", ".join(sorted(available)),
        hint=manager().remedy("targets", name),
    )


@functools.cache
def local_compute_capability() -> tuple[int, int] | None:
    """Compute capability (major, minor) of JAX's first GPU; None where JAX is not on CUDA."""
    import jax

    if jax.default_backend() not in ("gpu", "cuda"):
        return None
    version = getattr(jax.local_devices()[0], "compute_capability", "")
    match = re.fullmatch(r"(\d+)\.(\d+)", str(version))
    return (int(match[1]), int(match[2])) if match else None


def _target_of_device(capability: tuple[int, int]) -> Target:
    """The device's own target, else the newest portable one that it runs."""
    available = manager().targets()
    own = f"sm_{capability[0]}{capability[1]}"
    for name in (f"{own}a", own):
        if name in available:
            return available[name]
    portable = [
        one
        for one in available.values()
        if one.name == (one.architecture or one.name).rstrip("af")
        and one.compute_capability <= capability
    ]
    if not portable:
        raise TargetError(
            f"no target runs on the local GPU, which has compute capability {capability[0]}."
            f"{capability[1]}",
            expected="a GPU for one of " + ", ".join(sorted(available)),
            hint="choose a target to compile without running: CompilerParams(target=...)"
            " or PALLASITE_TARGET",
        )
    return max(portable, key=lambda one: one.compute_capability)


def target(name: str) -> contextlib.AbstractContextManager[None]:
    """Compiles for a target within a ``with`` block, in the present thread or task only.

    Raises:
      TargetError: there is no target of that name, or its plugin is missing.
    """
    find_target(name)
    return traced_for(name)


@contextlib.contextmanager
def traced_for(target: str | Target | None) -> Iterator[None]:
    """What is traced inside is for a target; None uses the configuration.

    Operations of ``pallasite.ops`` choose their implementation while they are traced, so the target
    is part of the keys of JAX's caches of traces, as options are.
    """
    if target is None:
        yield
        return
    name = target.name if isinstance(target, Target) else target
    with config.scoped(target=name):
        yield
