"""Bad input and the whole message that it gets.

``@refused(error, message)`` makes a test of a function that must fail. In the message, HERE stands
for the source line with the comment ``# here``, and a backslash at the end of a line continues it.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallasite
from pallasite import _jax
from pallasite.errors import PallasiteError
from pallasite.language.kernel import kernel

_jax.hide_frames_of(__file__)

CASES: dict[str, Callable[[], None]] = {}


def refused(error: type[PallasiteError] | None = None, message: str = "") -> Callable[..., Any]:
    """A decorator: the function must raise exactly ``error`` with exactly ``message``."""

    def decorate(function: Callable[[], None]) -> Callable[[], None]:
        CASES[function.__name__] = function

        @functools.wraps(function)
        def test() -> None:
            kind, text = outcome(function)
            assert text == re.sub(r"\\\n\s*", "", textwrap.dedent(message).strip())
            assert kind is error

        return test

    return decorate


def outcome(function: Callable[[], None]) -> tuple[type[PallasiteError], str]:
    """The error that a function raises: its class, and its message with HERE for the line."""
    with pytest.raises(PallasiteError) as caught:
        function()
    return type(caught.value), normalised(str(caught.value), function)


def normalised(message: str, function: Callable[..., Any]) -> str:
    """A message with HERE for the marked lines of a function, and THIS FILE for its file."""
    lines, first = inspect.getsourcelines(function)
    file = inspect.getsourcefile(function)
    assert file is not None
    for number, line in enumerate(lines, first):
        if "# here" in line:
            name = "HERE" + line.partition("# here")[2].strip()
            message = re.sub(rf"{re.escape(file)}:{number}\b( \([\w<>]+\))?", name, message)
    return message.replace(file, "THIS FILE")


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An argument of a kernel, by shape and dtype."""
    return jax.ShapeDtypeStruct(shape, dtype)


def make(shape: Any = (128, 64), dtype: Any = jnp.float32, **arguments: Any) -> Any:
    """A decorator like ``kernel`` for one output, given by shape and dtype."""
    return kernel(out_type=jax.ShapeDtypeStruct(shape, dtype), **arguments)


def build(function: Callable[..., Any], *args: Any, target: str = "sm_90a") -> None:
    """Compiles the kernel that a function calls; by default with one input of (128, 64) floats."""
    pallasite.compile(function, *(args or (array(128, 64),)), target=target)


def narrowed(x: jax.Array) -> jax.Array:
    """A library's operation, whose kernel is refused when it is lowered."""

    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...].astype(jnp.float8_e4m3fnuz)

    made: jax.Array = kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fnuz))(x)
    return made
