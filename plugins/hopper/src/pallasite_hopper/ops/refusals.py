"""What Hopper's operations leave to the portable ones, for ``pallasite.ops``.

Each function takes the arguments of the operation and returns None, or why it does not serve them.
Arguments that no implementation takes are not refused: the operation's own checks say what is
wrong with them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallasite_hopper.ops.decode import prefill
from pallasite_hopper.ops.decode.config import (
    LARGEST_HEAD,
    MOST_TOKENS,
    default_config,
    takes_heads,
)
from pallasite_hopper.ops.flash.options import OPTIONS, portable_option
from pallasite_hopper.ops.mixed.choice import default_config as default_mixed_config
from pallasite_std.api import AttentionOptions, is_portable_config


def matmul(*args: Any, **kwargs: Any) -> str | None:
    """Configurations of the portable matmul."""
    del args
    return _config(kwargs)


def gated_matmul(*args: Any, **kwargs: Any) -> str | None:
    """Operands of float32."""
    _, dtype = _operand(args, kwargs, 0, "a")
    return "operands of float32" if dtype == jnp.float32 else None


def mixed_matmul(*args: Any, **kwargs: Any) -> str | None:
    """Groups of factors that do not fit the steps, configurations of the portable matmul."""
    shape, _ = _operand(args, kwargs, 0, "a")
    _, weights = _operand(args, kwargs, 1, "b")
    groups: Any = getattr(kwargs.get("scales"), "shape", ())
    if kwargs.get("config") is None and len(shape) == len(groups) == 2 and weights is not None:
        (m, k), n = shape, groups[1]
        group = k // groups[0] if groups[0] and k % groups[0] == 0 else 0
        config = default_mixed_config(m, n, k, 4 if "int4" in str(weights) else 8, 2, group)
        if group and not config.fits_group(group):
            return f"groups of {group} elements"
    return _config(kwargs)


def ragged_matmul(*args: Any, **kwargs: Any) -> str | None:
    """Operands of float32, configurations of the portable matmul."""
    _, dtype = _operand(args, kwargs, 0, "a")
    return "operands of float32" if dtype == jnp.float32 else _config(kwargs)


def attention(*args: Any, **kwargs: Any) -> str | None:
    """Float32, what else the portable kernel has, which takes no floats of 8 bits, and its
    configurations."""
    shape, dtype = _operand(args, kwargs, 0, "q")
    if len(shape) == 4 and dtype == jnp.float32:
        return "products of float32"
    if dtype == jnp.float8_e4m3fn:
        return _config(kwargs)
    options = {name: given for name, given in kwargs.items() if name in OPTIONS}
    return portable_option(AttentionOptions(**options)) or _config(kwargs)


def decode_attention(*args: Any, **kwargs: Any) -> str | None:
    """Heads of other sizes, some queries, float32, configurations of the portable kernel."""
    shape, dtype = _operand(args, kwargs, 0, "q")
    if dtype == jnp.float32:
        return "products of float32"
    if _is_prefill(args, kwargs, ("k", 2)):
        return None
    if len(shape) == 4 and shape[1] > MOST_TOKENS:
        return f"{shape[1]} queries of a sequence, it takes {MOST_TOKENS}"
    caches = (_operand(args, kwargs, 1, name)[1] for name in ("k", "k_pages"))
    size = next((np.dtype(one).itemsize for one in caches if one is not None), 2)
    if len(shape) in (3, 4) and not takes_heads(shape[-1], size):
        return f"heads of {shape[-1]}, it takes multiples of {16 // size} up to {LARGEST_HEAD}"
    return _config(kwargs)


def paged_attention(*args: Any, **kwargs: Any) -> str | None:
    """The same, and pages that are neither parts of a step nor made of steps."""
    shape, dtype = _operand(args, kwargs, 1, "k_pages")
    heads_first = kwargs.get("page_layout", "heads_first") == "heads_first"
    if _is_prefill(args, kwargs, ("k_pages", 0 if heads_first else 2)):
        return None
    if kwargs.get("config") is None and len(shape) == 4 and dtype is not None:
        size = shape[2] if heads_first else shape[1]
        tile = default_config(shape[3], 8, np.dtype(dtype).itemsize).tile
        if size % 8 or (size % tile and tile % size):
            return f"pages of {size} rows"
    return decode_attention(*args, **kwargs)


def _is_prefill(args: tuple[Any, ...], kwargs: dict[str, Any], cache: tuple[str, int]) -> bool:
    """Whether there are many queries; ``cache``: which operand, and its axis of heads."""
    shape, dtype = _operand(args, kwargs, 0, "q")
    of_keys, key_dtype = _operand(args, kwargs, 1, cache[0])
    if kwargs.get("config") is not None or len(of_keys) != 4 or dtype is None:
        return False
    return prefill.suits(shape, dtype, of_keys[cache[1]], key_dtype)


def _operand(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    """Shape and dtype of an operand; an empty shape and None of what is no array."""
    array = args[place] if len(args) > place else kwargs.get(name)
    return getattr(array, "shape", ()), getattr(array, "dtype", None)


def _config(kwargs: dict[str, Any]) -> str | None:
    if is_portable_config(kwargs.get("config")):
        return "a configuration of the portable implementation"
    return None
