"""What a test file of JAX's GPU backend imports, replaced by ours while the file is loaded.

The file itself is not changed: its import statements find other modules.
"""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

PUBLIC = "jax.experimental.pallas.mosaic_gpu"
PRIVATE = "jax._src.pallas.mosaic_gpu"
DIALECT = "jax.experimental.mosaic.gpu"
_MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a block can have."""
_CUDA = 13000
"""The version of the CUDA runtime that tests are told."""


class Absent:
    """A name that we lack: it may be mentioned while the file is loaded, but not be used later."""

    loading = False

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Absent:
        if not Absent.loading:
            raise NotImplementedError(f"pallasite.gpu has no name {self._name!r}")
        return Absent(f"{self._name}(...)")

    def __repr__(self) -> str:
        return f"<absent {self._name}>"


class StandIn(types.ModuleType):
    """A module with some names of its own; the others are those of the module it replaces."""

    def __init__(self, original: str, names: dict[str, Any]):
        super().__init__(original)
        self._original = importlib.import_module(original)
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _absent(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name)


def _gpu_names() -> dict[str, Any]:
    """All names of ``pallasite.gpu``; any other leads to :class:`Absent`.

    A file may copy these into a module of its own, and they do the same there.
    """
    from pallasite import gpu

    return {name: getattr(gpu, name) for name in dir(gpu)} | {"__getattr__": _absent}


def _modules() -> dict[str, types.ModuleType]:
    from pallasite import errors
    from pallasite.language import transforms

    gpu = _gpu_names()
    public = types.ModuleType(PUBLIC)
    public.__dict__.update(gpu)
    core = {name: gpu[name] for name in ("Mesh", "MemorySpace", "WarpMesh", "CompilerParams")}
    core |= {
        name: getattr(transforms, name)
        for name in ("ExtractAliasedRef", "UntilingTransform", "UnswizzleTransform")
    }
    pipelines = ("emit_pipeline", "emit_pipeline_warp_specialized")
    return {
        PUBLIC: public,
        f"{PRIVATE}.core": StandIn(f"{PRIVATE}.core", core),
        f"{PRIVATE}.lowering": StandIn(
            f"{PRIVATE}.lowering", {"LoweringError": errors.PallasiteError}
        ),
        f"{PRIVATE}.pipeline": StandIn(
            f"{PRIVATE}.pipeline", {name: gpu[name] for name in pipelines}
        ),
        f"{PRIVATE}.interpret.params": StandIn(
            f"{PRIVATE}.interpret.params", {"InterpretGPUParams": gpu["InterpretGPUParams"]}
        ),
        f"{PRIVATE}.interpret.interpret_pallas_call": StandIn(
            f"{PRIVATE}.interpret.interpret_pallas_call",
            # Races are errors of the kernels that have them.
            {
                "gpu_callbacks": types.SimpleNamespace(reset_gpu_interpret_mode_state=lambda: None),
                "get_races": lambda: types.SimpleNamespace(races_found=False),
            },
        ),
        DIALECT: StandIn(DIALECT, {"LoweringSemantics": gpu["LoweringSemantics"]}),
    }


@contextlib.contextmanager
def imported() -> Iterator[None]:
    """Within this context, importing the GPU backend's modules gives ours."""
    with contextlib.ExitStack() as stack:
        for name, module in _modules().items():
            importlib.import_module(name)
            parent, _, last = name.rpartition(".")
            stack.enter_context(mock.patch.dict(sys.modules, {name: module}))
            stack.enter_context(mock.patch.object(importlib.import_module(parent), last, module))
        Absent.loading = True
        try:
            yield
        finally:
            Absent.loading = False


def pretend_gpu(target: str) -> None:
    """Makes JAX's test helpers answer as on a GPU of the target, as far as tests are skipped, and
    its devices have the target's multiprocessors."""
    import jax
    from jax._src import test_util

    from pallasite.target_selection import find_target

    count = find_target(target).multiprocessors
    kind = type(jax.devices()[0])
    kind.core_count = property(lambda device: count)
    kind.shared_memory_per_block_optin = property(lambda device: _MOST_SHARED)
    digits = target.removeprefix("sm_").rstrip("af")
    present = (int(digits[:-1]), int(digits[-1]))

    def wanted(capability: str) -> tuple[int, ...]:
        return tuple(int(part) for part in capability.split("."))

    def skip_unless_tcgen05(self: Any) -> None:
        if present[0] not in (10, 11):
            self.skipTest("Only works on GPU with tcgen05 instructions")

    helpers: dict[str, Callable[..., Any]] = {
        "is_cuda_compute_capability_at_least": lambda capability: present >= wanted(capability),
        "is_cuda_compute_capability_equal": lambda capability: present == wanted(capability),
        "get_cuda_nonportable_max_cluster_size": lambda: 16,
        "is_device_cuda": lambda: True,
    }
    for name, helper in helpers.items():
        if not hasattr(test_util, name):
            raise RuntimeError(f"JAX's test helpers have no {name}")
        setattr(test_util, name, helper)
    test_util.CudaArchSpecificTest.skip_unless_tcgen05 = skip_unless_tcgen05
    # Devices of the simulator have multicast.
    versions = types.SimpleNamespace(
        cuda_supports_multicast=lambda device: True, cuda_runtime_get_version=lambda: _CUDA
    )
    importlib.import_module("jax._src.lib").cuda_versions = versions
    _accept_algorithms()


def _accept_algorithms() -> None:
    """Has products of the CPU accept algorithms that only a GPU has: there they are more exact."""
    from jax._src.interpreters import mlir
    from jax._src.lax import lax

    known = lax.DotAlgorithmPreset.DEFAULT

    def lower(ctx: Any, *operands: Any, precision: Any, **parameters: Any) -> Any:
        if precision == lax.DotAlgorithmPreset.F16_F16_F32:
            precision = known
        return lax._dot_general_lower(
            ctx, *operands, precision=precision, platform="cpu", **parameters
        )

    mlir.register_lowering(lax.dot_general_p, lower, platform="cpu")


def load(
    path: pathlib.Path, *, ours: bool, replacements: Sequence[tuple[str, str]] = ()
) -> types.ModuleType:
    """The test file as a module.

    Args:
      path: of the file.
      ours: whether its imports of the GPU backend lead to ``pallasite.gpu``.
      replacements: what is replaced by what in its text, such as sizes by smaller ones.
    """
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module  # Dataclasses and unittest look their module up.
    text = path.read_text()
    for old, new in replacements:
        text = text.replace(old, new)
    code = compile(text, str(path), "exec")
    with imported() if ours else contextlib.nullcontext():
        exec(code, module.__dict__)
    return module
