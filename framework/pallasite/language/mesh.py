"""The shape of a kernel: its grid of blocks, clusters of blocks, and threads of a block."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from pallasite import _jax, config
from pallasite.language import checks
from pallasite.language.effects import memory_effect, tensor_core_pipeline_effect
from pallasite.language.memory import MemorySpace

#: Warpgroups of 128 CUDA threads that the hardware can keep on one multiprocessor.
MAX_THREADS = 16
WARPS_PER_WARPGROUP = 4


def _names(names: Any, what: str) -> tuple[Any, ...]:
    if isinstance(names, str):
        raise checks.type_error(
            f"{what} is a single string", got=repr(names), expected=f"a tuple, ({names!r},)"
        )
    return tuple(names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh(_jax.PallasMesh):  # type: ignore[misc]
    """How many blocks and threads run the kernel, and the names of their axes.

    Attributes:
      grid: number of clusters along each grid axis (of blocks, if there is no cluster).
      grid_names: their names, for ``jax.lax.axis_index``.
      cluster: number of blocks of a cluster along each cluster axis, at most three axes.
      cluster_names: their names.
      num_threads: number of threads of a block; each is a warpgroup of 128 CUDA threads.
      thread_name: the name of the thread axis; given together with ``num_threads``.
      kernel_name: the name of the kernel in profiles; the body's name if None.
    """

    grid: Sequence[int] = ()
    grid_names: Sequence[Any] = ()
    cluster: Sequence[int] = ()
    cluster_names: Sequence[Any] = ()
    num_threads: int | None = None
    thread_name: Any = None
    kernel_name: str | None = None

    def __post_init__(self) -> None:
        for what in ("grid", "cluster"):
            sizes = getattr(self, what)
            if checks.is_integer(sizes):
                raise checks.type_error(
                    f"{what} is an integer", got=sizes, expected=f"a tuple, ({sizes},)"
                )
            sizes = checks.positive_integers(sizes, what)
            names = _names(getattr(self, f"{what}_names"), f"{what}_names")
            if len(sizes) != len(names):
                raise checks.value_error(
                    f"{what} has {len(sizes)} axes but {what}_names has {len(names)}",
                    got=f"{what}={sizes}, {what}_names={names}",
                    expected="one name for each axis",
                )
            object.__setattr__(self, what, sizes)
            object.__setattr__(self, f"{what}_names", names)
        if len(self.cluster) > 3:
            raise checks.value_error(
                f"a cluster cannot have {len(self.cluster)} axes",
                got=f"cluster={self.cluster}",
                expected="at most 3 axes, which is what the hardware has",
            )
        self._check_threads()
        repeated = [name for name, n in collections.Counter(self.axis_names).items() if n > 1]
        if repeated:
            raise checks.value_error(
                f"axis name {repeated[0]!r} is used more than once",
                got=f"grid_names={self.grid_names}, cluster_names={self.cluster_names}, "
                f"thread_name={self.thread_name!r}",
                expected="a different name for each axis",
            )

    def _check_threads(self) -> None:
        if (self.num_threads is None) != (self.thread_name is None):
            given, missing = (
                ("thread_name", "num_threads")
                if self.num_threads is None
                else ("num_threads", "thread_name")
            )
            raise checks.value_error(
                f"{given} is given without {missing}",
                got=f"num_threads={self.num_threads}, thread_name={self.thread_name!r}",
                expected="both or neither",
            )
        if self.num_threads is None:
            return
        checks.count(self.num_threads, "num_threads", minimum=1)
        if self.num_threads > MAX_THREADS:
            raise checks.value_error(
                f"too many threads per block: {self.num_threads}",
                expected=f"at most {MAX_THREADS}; each is a warpgroup of 128 CUDA threads",
                hint="num_threads counts warpgroups, not CUDA threads",
            )

    @property
    def axis_names(self) -> tuple[Any, ...]:
        """Names of all axes: grid, then cluster, then threads."""
        threads = () if self.thread_name is None else (self.thread_name,)
        return (*self.grid_names, *self.cluster_names, *threads)

    @property
    def shape(self) -> collections.OrderedDict[Any, int]:
        """Size of each axis, in the order of ``axis_names``; ``pl.program_id`` counts in it too."""
        threads = () if self.num_threads is None else (self.num_threads,)
        sizes = (*self.grid, *self.cluster, *threads)
        return collections.OrderedDict(zip(self.axis_names, sizes, strict=True))

    @property
    def default_memory_space(self) -> MemorySpace:
        """Where operands and results are."""
        return MemorySpace.GMEM

    @property
    def core_type(self) -> str:
        """What kind of processor this is, for messages of Pallas."""
        return "gpu"

    @property
    def supported_memory_spaces(self) -> Sequence[MemorySpace]:
        """All of them."""
        return tuple(MemorySpace)

    def discharges_effect(self, effect: Any) -> bool:
        """Whether an effect of the body ends with the kernel."""
        return effect is memory_effect or effect is tensor_core_pipeline_effect

    def check_is_compatible_with(self, other_mesh: Any) -> None:
        """Always an error: a kernel runs on one mesh."""
        raise checks.unsupported("a kernel runs on one mesh", got=other_mesh)

    def tracing_context(self) -> contextlib.AbstractContextManager[None]:
        """Lets ``pl.program_id`` and ``pl.num_programs`` know the grid while the body is traced."""
        grid: contextlib.AbstractContextManager[None]
        grid = _jax.tracing_grid_env(tuple(self.shape.values()), ())
        return grid

    def replace(self, **changes: Any) -> Mesh:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarpMesh(_jax.PallasMesh):  # type: ignore[misc]
    """The four warps of a warpgroup, for code that runs once per warp.

    Inside, ``jax.lax.axis_index(axis_name)`` is the number of the warp.
    """

    NUM_WARPS: ClassVar[int] = WARPS_PER_WARPGROUP

    axis_name: Any

    @property
    def shape(self) -> collections.OrderedDict[Any, int]:
        """The one axis."""
        return collections.OrderedDict([(self.axis_name, WARPS_PER_WARPGROUP)])

    @property
    def default_memory_space(self) -> MemorySpace:
        """Always an error: nothing is passed to code that runs per warp, it captures references."""
        raise checks.unsupported(
            "code that runs per warp takes no operands", hint="capture the references it needs"
        )

    @property
    def core_type(self) -> str:
        """What kind of processor this is, for messages of Pallas."""
        return "gpu"

    @property
    def supported_memory_spaces(self) -> Sequence[MemorySpace]:
        """What code that runs per warp may capture."""
        return tuple(
            space for space in MemorySpace if not space.is_value and space is not MemorySpace.REGS
        )

    def discharges_effect(self, effect: Any) -> bool:
        """No effect ends with a warp region."""
        del effect
        return False

    def check_is_compatible_with(self, other_mesh: Any) -> None:
        """Always an error: a warp region has one mesh."""
        raise checks.unsupported("a warp region has one mesh", got=other_mesh)

    def tracing_context(self) -> contextlib.AbstractContextManager[None]:
        """The grid is that of the kernel around; see :func:`in_warp_region`."""
        return config.bound(_in_warp_region, True)


_in_warp_region = contextvars.ContextVar("in_warp_region", default=False)


def in_warp_region() -> bool:
    """Whether code that runs per warp is being traced."""
    return _in_warp_region.get()
