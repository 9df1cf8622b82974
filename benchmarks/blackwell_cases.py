"""Kernels that JAX publishes for Blackwell, at the sizes and in a configuration that it publishes.

The sources are the same for both compilers: the kernels of JAX's tutorial are read from the file of
its tests that has them, the others from the installed JAX; for Pallasite only the import of the GPU
module is replaced. Needs absl-py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "upstream"))

import jax
import jax.numpy as jnp
import numpy as np
import published
import stand_ins

OURS, JAX = "ours", "upstream"

BLOCKS = {"tile_m": 128, "tile_n": 128, "tile_k": 64}


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel that multiplies matrices of float16.

    Attributes:
      modules: that of each compiler.
      call: makes the function, given a module.
      sizes: m, n and k.
      tile: rows and columns of what a block, or a pair of them, computes at once.
      groups: of rows of a, each of which has a matrix b of its own; 0 for one product.
      slots: accumulators of a block.
    """

    name: str
    modules: dict[str, Any]
    call: Callable[[Any], Callable[..., Any]]
    sizes: tuple[int, int, int] = (4096, 8192, 4096)
    tile: tuple[int, int] = (128, 128)
    groups: int = 0
    slots: int = 1

    def function(self, who: str) -> Callable[..., Any]:
        """What calls the kernel of one compiler."""
        return self.call(self.modules[who])

    def shapes(self, sizes: tuple[int, int, int] | None = None) -> list[jax.ShapeDtypeStruct]:
        """Of the inputs, for the published sizes or others."""
        m, n, k = sizes or self.sizes
        found = [jax.ShapeDtypeStruct((m, k), jnp.float16)]
        found.append(jax.ShapeDtypeStruct((self.groups,) * bool(self.groups) + (k, n), jnp.float16))
        if self.groups:
            found.append(jax.ShapeDtypeStruct((self.groups,), jnp.int32))
        return found

    def inputs(self, sizes: tuple[int, int, int] | None = None) -> list[np.ndarray]:
        """Random numbers of one to two, of both signs; groups of different sizes."""
        random = np.random.default_rng(0)
        found = []
        for one in self.shapes(sizes)[:2]:
            bits = np.frombuffer(random.bytes(2 * one.size), np.uint16) & 0x83FF | 0x3C00
            found.append(bits.view(np.float16).reshape(one.shape))
        if self.groups:
            m = found[0].shape[0]
            ends = np.sort(random.integers(0, m + 1, self.groups - 1))
            found.append(np.diff(ends, prepend=0, append=m).astype(np.int32))
        return found


def cases(tutorial: pathlib.Path | None) -> list[Case]:
    """All kernels; those of the tutorial only if its file is there."""
    names = ("blackwell_matmul_mgpu", "blackwell_ragged_dot_mgpu")
    own, theirs = (
        [load(name) for name in names]
        for load in (
            functools.partial(published.load, lane_semantics=False),
            lambda name: importlib.import_module(f"{published.PACKAGE}.{name}"),
        )
    )
    modules, ragged = ({OURS: a, JAX: b} for a, b in zip(own, theirs, strict=True))
    found = [
        Case(names[0] + ", pairs", modules, _matmul(True), tile=(256, 256), slots=2),
        Case(names[0], modules, _matmul(False), slots=2),
        Case(
            names[1],
            ragged,
            _ragged_dot,
            sizes=(16384, 16384, 2048),
            tile=(256, 256),
            groups=16,
            slots=2,
        ),
    ]
    if tutorial is not None:
        modules = {
            OURS: stand_ins.load(tutorial, ours=True),
            JAX: stand_ins.load(tutorial, ours=False),
        }
        for number in range(7):
            tile = (256, 256) if number >= 3 else (128, 128)
            name = f"tutorial, step {number}"
            slots = 2 if number >= 5 else 1
            found.append(Case(name, modules, _step(number), tile=tile, slots=slots))
    return found


def _step(number: int) -> Callable[[Any], Callable[..., Any]]:
    grid = {"grid_minor_dim": 0, "grid_tile_width": 6} if number == 6 else {}

    def call(module: Any) -> Callable[..., Any]:
        chosen = module.TuningConfig(**BLOCKS, max_concurrent_steps=4, **grid)
        return functools.partial(getattr(module, f"matmul{number}"), config=chosen)

    return call


def _matmul(collective: bool) -> Callable[[Any], Callable[..., Any]]:
    def call(module: Any) -> Callable[..., Any]:
        chosen = module.TuningConfig(
            **BLOCKS,
            max_concurrent_steps=6,
            collective=collective,
            epilogue_tile_n=32,
            grid_minor_dim=module.MatmulDimension.N,
            grid_tile_width=8,
        )
        return functools.partial(module.matmul_kernel, config=chosen)

    return call


def _ragged_dot(module: Any) -> Callable[..., Any]:
    chosen = module.TuningConfig(
        **BLOCKS,
        max_concurrent_steps=4,
        collective=True,
        grid_tile_width=8,
        grid_minor_dim=module.blackwell_matmul_mgpu.MatmulDimension.N,
    )
    return functools.partial(module.ragged_dot_kernel, config=chosen)


@contextlib.contextmanager
def multiprocessors(count: int) -> Iterator[None]:
    """JAX's devices have so many, of which the kernels ask."""
    kind = type(jax.devices()[0])
    before = kind.__dict__.get("core_count")
    kind.core_count = property(lambda device: count)
    try:
        yield
    finally:
        if before is None:
            del kind.core_count
        else:
            kind.core_count = before
