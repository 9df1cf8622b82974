"""A limit on the size of a kernel's code, before LLVM and the assembler spend minutes on it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from pallasite.plugin import CompilationError, config
from pallasite.plugin.ir import location_in_llvm
from pallasite_std import options as options  # declares the option

_DEBUG_LOCATION = re.compile(r"!dbg !\d+$", re.MULTILINE)


def check_code_size(module: Any, context: Any) -> None:
    """Refuses LLVM IR of more operations than the option ``code_limit``.

    Raises:
      CompilationError: with the line of the user's that most operations come from.
    """
    limit = config.get("code_limit")
    count = context.llvm.count("\n  ")  # Only lines of operations are indented.
    if count > limit:
        raise _too_large(count, context, limit)


def _too_large(count: int, context: Any, limit: int) -> CompilationError:
    lines: Counter[Any] = Counter()
    for node, operations in Counter(_DEBUG_LOCATION.findall(context.llvm)).items():
        lines[location_in_llvm(node, context.llvm)] += operations
    (location, most), *_ = lines.most_common(1) or [(None, count)]
    return CompilationError(
        f"kernel {context.kernel} becomes {count} operations, of which {most} come from this line:"
        " to compile them would take minutes",
        expected=f"at most {limit} (the option code_limit)",
        hint="work on smaller blocks (fewer elements for each lane), give the kernel more threads,"
        " or make loops of the program loops of the kernel: jax.lax.fori_loop instead of `for`."
        " PALLASITE_CODE_LIMIT raises the limit",
        location=location,
    )
