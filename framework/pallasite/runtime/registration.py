"""Registers the runtime with the language and with JAX; imports the rest when a kernel needs it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

from jax.extend.pallas import register_lowering_rule

from pallasite import _jax, config, plugins
from pallasite.language import execution
from pallasite.language.kernel_call import effects_of_pallas
from pallasite.language.params import CompilerParams


def _rule(name: str) -> Callable[..., Any]:
    """A lowering rule of :mod:`pallasite.runtime.jax_lowering`, imported when it is called."""

    def lower(*args: Any, **kwargs: Any) -> Any:
        from pallasite.runtime import jax_lowering

        return getattr(jax_lowering, name)(*args, **kwargs)

    return lower


def _kernel_errors() -> contextlib.AbstractContextManager[None]:
    errors: contextlib.AbstractContextManager[None]
    errors = plugins.manager().implementation("kernel_errors")()
    return errors


def _forget_programs() -> None:
    """Plugins have changed, or options: what was traced and compiled before is out of date."""
    _jax.forget_programs()
    compiler = sys.modules.get("pallasite.runtime.compiler")
    if compiler is not None:
        compiler.forget_kernels()


config.on_change(_forget_programs)
execution.register(
    execution.Runtime(lower_kernel_call=_rule("lower_kernel_call"), kernel_errors=_kernel_errors)
)
register_lowering_rule(CompilerParams, _rule("lower_pallas_call"), "gpu")
for _primitive, _name, _platforms in (
    (_jax.pallas_call_p, "lower_pallas_call_elsewhere", (None, "cpu")),
    (_jax.mpmd_map_p, "lower_mesh_kernel", (None, "cuda", "cpu")),
):
    _jax.add_effects(_primitive, functools.partial(effects_of_pallas, _primitive))
    _otherwise = _jax.default_lowering(_primitive)
    for _platform in _platforms:
        _jax.register_lowering(
            _primitive,
            functools.partial(_rule(_name), otherwise=_otherwise, platform=_platform),
            platform=_platform,
        )
