"""Compiling small kernels down to PTX, for tests of lowering rules."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from tests.accepted_ptx import AcceptedPtx

from pallasite import plugins
from pallasite.codegen import ptx as code
from pallasite.codegen.llvm_ir import translate
from pallasite.language.kernel import kernel
from pallasite.language.kernel_call import kernel_call_p
from pallasite.language.spec import KernelSpec
from pallasite.lowering.entry import lower_kernel


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The stages of one kernel; ``launch`` says what it needs of its launch."""

    mlir: str
    llvm: str
    ptx: str
    launch: Any
    resources: Any


def spec_of(function: Callable[..., Any], *args: Any) -> KernelSpec:
    """The one kernel that a function calls when it is traced on ``args``."""
    found: list[KernelSpec] = []

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive is kernel_call_p:
                found.append(equation.params["spec"])
            for value in jax.tree.leaves(equation.params):
                if hasattr(value, "eqns"):
                    visit(value)

    visit(jax.make_jaxpr(function)(*args).jaxpr)
    (spec,) = found
    return spec


def compile_kernel(
    function: Callable[..., Any],
    *args: Any,
    target: str = "sm_90",
    check: bool = True,
    strict: bool = False,
) -> Compiled:
    """Compiles the kernel that ``function`` calls, and notes it for ptxas if there is one, which
    must not warn either if the check is strict."""
    lowered = lower_kernel(spec_of(function, *args), plugins.registry().targets[target])
    llvm = translate(lowered.module)
    short = code.sufficient_pipeline(llvm) == "short"
    with code.parsed(llvm) as module:
        (code.simplify if short else code.optimize)(module, lowered.target)
        ptx = code.emit(module, lowered.target)
    accepted = AcceptedPtx.of_session
    if check and accepted is not None:
        test = os.environ["PYTEST_CURRENT_TEST"]
        accepted.check_later(ptx, lowered.target.name, test, strict=strict)
    return Compiled(str(lowered.module), llvm, ptx, lowered.launch, lowered.resources)


def compile_to_ptx(
    function: Callable[..., Any], *args: Any, target: str = "sm_90", strict: bool = False
) -> str:
    """The PTX of the kernel that ``function`` calls."""
    return compile_kernel(function, *args, target=target, strict=strict).ptx


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An argument of a kernel, by shape and dtype."""
    return jax.ShapeDtypeStruct(shape, dtype)


def make(out_shape: Any, out_dtype: Any = jnp.float32, **arguments: Any) -> Any:
    """A decorator like ``kernel`` for one output, given by shape and dtype."""
    return functools.partial(_make, out_shape, out_dtype, arguments)


def _make(shape: Any, dtype: Any, arguments: dict[str, Any], body: Any) -> Any:
    return kernel(body, out_type=jax.ShapeDtypeStruct(shape, dtype), **arguments)


def in_order(text: str, *patterns: str) -> None:
    """Fails unless regular expressions match one after the other; ``!pattern`` must not match
    between its neighbours."""
    position, forbidden = 0, []
    for pattern in patterns:
        if pattern.startswith("!"):
            forbidden.append(pattern[1:])
            continue
        match = re.compile(pattern, re.MULTILINE).search(text, position)
        assert match is not None, f"no match for {pattern!r} in:\n{text[position:]}"
        for one in forbidden:
            assert not re.search(one, text[position : match.start()]), f"found {one!r} in:\n{text}"
        position, forbidden = match.end(), []
    for one in forbidden:
        assert not re.search(one, text[position:]), f"found {one!r} in:\n{text[position:]}"


def strings_of(ptx: str) -> list[str]:
    """The constant strings of a kernel, in the order in which it made them."""
    found = re.findall(r"pallasite_string_(\d+)\[(\d+)\](?: = \{([^}]*)\})?;", ptx)
    texts = {
        int(number): bytes(int(word) for word in words.split(",") if word.strip()).rstrip(b"\0")
        for number, _, words in found
    }
    return [texts[number].decode() for number in sorted(texts)]
