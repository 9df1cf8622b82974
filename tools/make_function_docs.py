"""Writes ``docs/functions.md``, the list of functions of JAX that kernels can use.

Usage: ``python tools/make_function_docs.py``. The list is that of the rules and definitions of the
standard library, so a test can tell whether the page is current.
"""

from __future__ import annotations

import pathlib
from typing import Any

from pallasite import plugins
from pallasite.rules import Semantics
from pallasite_std.math.table import DTYPES
from pallasite_std.passes.alternatives import ALTERNATIVES
from pallasite_std.passes.definitions import definitions
from pallasite_std.rules.arithmetic import BINARY_PRIMITIVES, UNARY_PRIMITIVES

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/functions.md"

HEAD = """\
# Functions in kernels

<!-- Written by tools/make_function_docs.py; do not edit. -->

What `jax.numpy` and `jax.lax` functions become when a kernel is traced are JAX primitives. These
are the primitives that the standard library compiles, on every target; functions that are made of
them work, with arrays of any shape, in warpgroup and in lane semantics. "Warps" says whether a
primitive also works inside a warp-mapped region (`plgpu.warp_map`), there on scalars.

Array layouts do not matter: what registers cannot do by renaming goes through shared memory, as
[layout inference](layout-inference.md) weighs. The names of `pallasite.gpu` are in the API
reference (`make docs`).

These are errors at the line in question:

- what moves elements, such as a sort or a reversal, of an array that shared memory has no room for;
- an array of 2 or 4 bits that begins or ends within a byte of memory (elsewhere, and within the
  kernel, such arrays may have any shape; what moves or reduces their elements does so with bytes);
- a kernel that becomes more operations than the option `code_limit` allows.

`sin`, `cos` and `tan` are accurate to the last bits for numbers of any size, also of float64.
Subnormal numbers are kept, which XLA takes for zeros on the CPU. In sorts and `top_k`, NaN of
either sign is the largest number, and zeros of either sign are equal: the lower index comes first.

"""


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page())


def page() -> str:
    """The page's text."""
    kinds = _kinds()
    elementwise, others, defined = [], [], []
    for primitive in _primitives():
        row = f"| `{primitive.name}` | {kinds.get(primitive, '')} | {_warps(primitive)} |"
        (elementwise if primitive in kinds else others).append(row)
    rules = {str(primitive) for primitive in _primitives()}
    for name in sorted({str(primitive) for primitive in definitions()}):
        note = "in some forms; else by a rule" if name in rules else ""
        defined.append(f"| `{name}` | {note} |")
    missing = [f"| `{name}` | {text} |" for name, text in sorted(ALTERNATIVES.items())]
    return HEAD + "\n".join(
        [
            *("## Element-wise functions", ""),
            *("| primitive | dtypes | warps |", "|---|---|---|", *elementwise, ""),
            *("## Others with a rule", "", "| primitive | | warps |", "|---|---|---|", *others, ""),
            *("## Defined by others", ""),
            "Calls of these are replaced by others before the kernel is compiled.",
            *("", "| primitive | |", "|---|---|", *defined, ""),
            *("## What there is not", "", "| primitive | use |", "|---|---|", *missing, ""),
        ]
    )


def _kinds() -> dict[Any, str]:
    """What dtypes element-wise primitives take."""
    found = {}
    for primitive, name in {**UNARY_PRIMITIVES, **BINARY_PRIMITIVES}.items():
        kinds = DTYPES.get(name, frozenset())
        order = ("float", "integer", "bool")
        found[primitive] = ", ".join(kind for kind in order if kind in kinds)
    return found


def _primitives() -> list[Any]:
    """JAX's primitives with rules of the standard library, by name."""
    from jax import lax
    from jax.extend.core import primitives

    names = {*dir(lax), *dir(primitives)}
    known = {
        getattr(module, name)
        for module in (lax, primitives)
        for name in names
        if name.endswith("_p") and hasattr(module, name)
    }
    rules = {p for p in known if plugins.registry().lowering.rules(p)}
    return sorted(rules, key=lambda primitive: str(primitive.name))


def _warps(primitive: Any) -> str:
    rules = plugins.registry().lowering.rules(primitive)
    return "yes" if any(rule.semantics is Semantics.WARP for rule in rules) else ""


if __name__ == "__main__":
    main()
