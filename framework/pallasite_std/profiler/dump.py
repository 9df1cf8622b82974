"""Brings the profile of a kernel to the host when a program runs, and writes it to a file."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallasite.plugin import UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.runtime import CompiledKernel, files
from pallasite_std.profiler.profile import chrome_trace

_TEST_OUTPUTS = "sponge"
"""The directory's name that stands for the outputs of a test, or else the temporary directory."""
_ATTEMPTS = 1000
_counter = itertools.count()


class ProfileWarning(UserWarning):
    """A profile that is incomplete, or that could not be written."""


def run_profiled(
    run: Callable[..., Sequence[Any]], compiled: CompiledKernel, *operands: Any
) -> list[Any]:
    """Runs a kernel by an executor; returns the user's outputs, and has the profile written.

    The profile is known by its number among the outputs, so aliased outputs make no difference.
    """
    results = list(run(compiled, *operands))
    profile = compiled.launch.profile
    if profile is not None:
        write_profile_p.bind(results.pop(profile.output), writer=_Writer(compiled))
    return results


def write_trace(words: Any, compiled: CompiledKernel) -> pathlib.Path | None:
    """Writes the trace of one launch to a new file in ``profile_dir``.

    The name is ``{kernel}-{time in ns}-{counter}-trace.json``. The file appears when it is
    complete, and never takes the place of another one.

    Returns:
      The file, or None if it could not be written, which gives a :class:`ProfileWarning`.
    """
    launch = compiled.launch
    assert launch.profile is not None
    trace = chrome_trace(
        words,
        launch.profile,
        kernel=compiled.name,
        grid=launch.grid,
        cluster=launch.cluster,
        block=launch.block,
    )
    lost = trace["otherData"]["lost events"]
    if lost:
        warnings.warn(
            f"kernel {compiled.name!r} recorded {lost} more profiler events than it has room for:"
            f" {launch.profile.events} for each {launch.profile.scope}; raise profile_space",
            ProfileWarning,
            stacklevel=2,
        )
    folder = _folder(launch.profile.directory)
    try:
        return _write_new(folder, compiled.name, json.dumps(trace))
    except OSError as error:
        message = f"cannot write the profile of kernel {compiled.name!r} to {folder}: {error}"
        warnings.warn(message, ProfileWarning, stacklevel=2)
        return None


def _folder(directory: str) -> pathlib.Path:
    if directory == _TEST_OUTPUTS:
        return pathlib.Path(os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR") or tempfile.gettempdir())
    return pathlib.Path(directory)


def _write_new(folder: pathlib.Path, kernel: str, text: str) -> pathlib.Path:
    files.make_folder(folder)
    for _ in range(_ATTEMPTS):
        path = folder / f"{kernel}-{time.time_ns()}-{next(_counter)}-trace.json"
        with contextlib.suppress(FileExistsError):
            files.write(path, text, mode=0o644, exclusive=True)
            return path
    raise FileExistsError(f"{path} and {_ATTEMPTS - 1} names before it are taken")


@dataclasses.dataclass(frozen=True, eq=False)
class _Writer:
    compiled: CompiledKernel

    def __call__(self, words: Any) -> tuple[()]:
        write_trace(np.asarray(words), self.compiled)
        return ()


write_profile_p = Primitive("pallasite_write_profile")
write_profile_p.multiple_results = True


@_jax.abstract_eval(write_profile_p)
def _abstract_eval(words: Any, *, writer: _Writer) -> tuple[list[Any], set[Any]]:
    del words, writer
    return [], {_jax.debug_effect}


def _impl(words: Any, *, writer: _Writer) -> list[Any]:
    return list(writer(words))


def _lower(ctx: Any, words: Any, *, writer: _Writer) -> Any:
    try:
        ctx.module_context.get_backend()
    except ValueError as error:
        raise UnsupportedError(
            f"kernel {writer.compiled.name!r} is profiled, in a program for another machine",
            got=f"{error}",
            expected="the platform of this process: the program calls back into it",
            hint="leave out profile_space, or look at the kernel with pallasite.compile",
        ) from error
    results, _, _ = mlir.emit_python_callback(
        ctx,
        writer,
        None,
        [words],
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        returns_token=False,
        sharding=_jax.callback_sharding(ctx.module_context.axis_context, None, ctx.avals_out),
    )
    return results


write_profile_p.def_impl(_impl)
mlir.register_lowering(write_profile_p, _lower)
