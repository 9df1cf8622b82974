"""Checks of what kernels can run on. JAX is asked in a process of its own, which may crash."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from pallasite.cli.checks import WARNING, Check

_TIMEOUT_SECONDS = 120
_CUDA = "pip install 'pallasite[cuda]'"
_DRIVER_VERSION = pathlib.Path("/proc/driver/nvidia/version")
_PROGRAM = """
import json, jax
devices = jax.local_devices()
print(json.dumps({
    "platform": jax.default_backend(),
    "version": devices[0].client.platform_version,
    "devices": [[d.device_kind, getattr(d, "compute_capability", "")] for d in devices],
}))
"""


def devices(found: dict[str, Any]) -> list[Check]:
    """JAX's devices, the GPU's driver, the launcher.

    Args:
      found: what :func:`ask_jax` says.
    """
    on_gpu = found.get("platform") in ("gpu", "cuda")
    return [_jax_devices(found), *_driver(on_gpu), _launcher(on_gpu)]


def ask_jax() -> dict[str, Any]:
    """What JAX sees: platform, version, devices; or the error."""
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_TIMEOUT_SECONDS} seconds"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {"error": last[0]}
    return answer


def _jax_devices(found: dict[str, Any]) -> Check:
    if "error" in found:
        return Check(
            "JAX devices",
            f"JAX does not start: {found['error']}",
            WARNING,
            "JAX_PLATFORMS=cpu compiles without a GPU; repair JAX to run kernels",
        )
    kinds: dict[str, int] = {}
    for kind, capability in found["devices"]:
        label = f"{kind} (compute capability {capability})" if capability else str(kind)
        kinds[label] = kinds.get(label, 0) + 1
    listed = ", ".join(f"{count} x {label}" for label, count in kinds.items())
    version = str(found["version"]).strip().splitlines()[-1:]
    suffix = f"; {version[0]}" if version and version[0] != found["platform"] else ""
    return Check("JAX devices", f"{found['platform']}: {listed}{suffix}")


def _driver(on_gpu: bool) -> list[Check]:
    """A driver that JAX does not use is worth a word; a machine without one is fine."""
    try:
        version = _DRIVER_VERSION.read_text().splitlines()[0].partition(": ")[2].strip()
    except (OSError, IndexError):
        return []
    if on_gpu:
        return [Check("GPU driver", " ".join(version.split()))]
    return [Check("GPU driver", "there is one, but JAX does not use a GPU", WARNING, _CUDA)]


def _launcher(on_gpu: bool) -> Check:
    try:
        from pallasite.runtime.launch import launcher

        launcher()
    except Exception as error:
        if not on_gpu:
            return Check("GPU launcher", "not installed; needed only to run on a GPU")
        text = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
        return Check("GPU launcher", text, WARNING, _CUDA)
    return Check("GPU launcher", "bindings of JAX's kernel launcher found")
