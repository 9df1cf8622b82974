"""Interpretation: running kernels on the CPU, whatever platform the program is for.

A kernel that is interpreted is compiled as ever; an executor for the CPU, such as the simulator,
runs its PTX on the host. In a program for the CPU that happens without these names too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax

from pallasite.plugin.language import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterpretGPUParams:
    """How a kernel is interpreted, for ``kernel(interpret=...)`` and the functions below.

    Attributes:
      detect_races: whether the executor checks what it runs (the option ``sanitize``): races, and
        the order of asynchronous operations. What it finds is an error. False leaves it to the
        option.
      out_of_bounds_reads: only ``"raise"``: an access outside of an array is an error.
      skip_floating_point_ops: only False.
      uninitialized_memory: only ``"nan"``: uninitialized memory holds rubbish.
      num_cores_or_threads, num_tma_threads_per_device: accepted and not needed: the threads are
        those of the kernel.
      vector_clock_size: only None.
      logging_mode: only None; ``pallasite_simulator.simulate`` says what a run did.
      inline_mgpu: accepted and not needed: inlined code is part of the PTX and runs.

    Raises:
      InvalidValueError: a value that means nothing.
      UnsupportedError: a value that nothing here can do.
    """

    detect_races: bool = False
    out_of_bounds_reads: Literal["raise", "uninitialized"] = "raise"
    skip_floating_point_ops: bool = False
    uninitialized_memory: Literal["nan", "zero"] = "nan"
    num_cores_or_threads: int = 1
    vector_clock_size: int | None = None
    logging_mode: Any = None
    num_tma_threads_per_device: int = 5
    inline_mgpu: str = "error"

    def __post_init__(self) -> None:
        checks.count(self.num_cores_or_threads, "num_cores_or_threads", minimum=1)
        checks.count(self.num_tma_threads_per_device, "num_tma_threads_per_device", minimum=1)
        only = {
            "out_of_bounds_reads": "raise",
            "skip_floating_point_ops": False,
            "uninitialized_memory": "nan",
            "vector_clock_size": None,
            "logging_mode": None,
        }
        for name, expected in only.items():
            if getattr(self, name) != expected:
                raise checks.unsupported(
                    f"interpretation with {name}={getattr(self, name)!r}",
                    expected=f"{name}={expected!r}",
                )
        if self.inline_mgpu not in ("error", "ignore"):
            raise checks.value_error(
                "inline_mgpu is unknown", got=self.inline_mgpu, expected='"error" or "ignore"'
            )

    def get_vector_clock_size(self, num_devices: int) -> int:
        """Twice the number of threads of all devices; nothing here depends on it."""
        return 2 * num_devices * self.num_cores_or_threads


_DEFAULT = InterpretGPUParams()
# Part of the key under which JAX keeps traces, so that no trace of another mode is used.
_mode = jax.make_user_context(None)


@contextlib.contextmanager
def force_gpu_interpret_mode(params: InterpretGPUParams = _DEFAULT) -> Iterator[None]:
    """Interprets the kernels that are called (under ``jax.jit``: traced) within a ``with`` block.

    Args:
      params: how; None does not interpret.
    """
    with _mode(_checked(params)):
        yield


def set_gpu_interpret_mode(params: InterpretGPUParams = _DEFAULT) -> None:
    """Interprets all kernels that this process calls from now on; None ends that."""
    _mode.set_global(_checked(params))


class _Interpretation:
    """The implementation ``"interpretation"``."""

    def params(self, interpret: Any) -> InterpretGPUParams | None:
        """What ``kernel(interpret=...)`` means at a call; None and False leave it to the mode.

        Raises:
          InvalidTypeError: parameters of another backend.
        """
        asked = _checked(interpret)
        mode: InterpretGPUParams | None = _mode.value
        return asked if asked is not None else mode

    def understands(self, interpret: Any) -> bool:
        """Whether ``interpret`` is parameters of this backend."""
        return isinstance(interpret, InterpretGPUParams)


INTERPRETATION = _Interpretation()


def _checked(params: Any) -> InterpretGPUParams | None:
    if params is None or params is False:
        return None
    if params is True:
        return _DEFAULT
    if not isinstance(params, InterpretGPUParams):
        raise checks.type_error(
            "interpret is of no kind that is known",
            got=f"{type(params).__module__}.{type(params).__qualname__}",
            expected="True, False, None or pallasite.gpu.InterpretGPUParams",
        )
    return params
