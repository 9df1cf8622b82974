"""The arguments of ``attention``, checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_std.ops.arguments import check_config, positive, whole_numbers


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What does not depend on the arrays.

    Attributes:
      causal: whether later keys are hidden.
      scale: factor of the scores.
      soft_cap: bound of the scores, or None.
      config: how to cut the work up, or None.
    """

    causal: bool
    scale: float
    soft_cap: float | None
    config: Any


def attention_call(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Any,
    scale: Any,
    soft_cap: Any,
    q_lengths: Any,
    kv_lengths: Any,
    config: Any,
    config_type: type,
    dtypes: tuple[Any, ...],
) -> tuple[AttentionCall, tuple[Any, Any]]:
    """What the arguments of ``attention`` ask for, and the lengths as int32 arrays or None.

    Args:
      config_type: of configurations.
      dtypes: that the implementation takes.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
    """
    _check_arrays(q, k, v, tuple(np.dtype(one) for one in dtypes))
    batch, _, _, head_dim = q.shape
    if scale is None:
        scale = max(1, head_dim) ** -0.5
    check_config(config, config_type)
    call = AttentionCall(
        causal=bool(causal),
        scale=positive(scale, "scale"),
        soft_cap=None if soft_cap is None else positive(soft_cap, "soft_cap"),
        config=config,
    )
    lengths = [
        None if given is None else whole_numbers(given, what, (batch,))
        for given, what in ((q_lengths, "q_lengths"), (kv_lengths, "kv_lengths"))
    ]
    return call, (lengths[0], lengths[1])


def check_residuals(q: Any, out: Any, lse: Any, d_out: Any) -> None:
    """Raises InvalidTypeError unless what ``attention_backward`` takes besides operands fits them.

    Args:
      q: (batch, q_seq, q_heads, head_dim).
      out, d_out: should be like q.
      lse: should be float32 (batch, q_heads, q_seq).
    """
    batch, q_seq, q_heads, _ = q.shape
    shape = (batch, q_heads, q_seq)
    for what, array, wanted, dtype in (
        ("out", out, q.shape, q.dtype),
        ("d_out", d_out, q.shape, q.dtype),
        ("lse", lse, shape, np.dtype(np.float32)),
    ):
        found = getattr(array, "shape", None), getattr(array, "dtype", None)
        if found != (wanted, dtype):
            raise InvalidTypeError(
                f"{what} does not fit q",
                got=type(array).__name__ if None in found else f"{found[1]}{list(array.shape)}",
                expected=f"{dtype}{list(wanted)}",
            )


def _check_arrays(q: Any, k: Any, v: Any, dtypes: tuple[np.dtype[Any], ...]) -> None:
    for what, array in (("q", q), ("k", k), ("v", v)):
        if len(getattr(array, "shape", ())) != 4:
            raise InvalidTypeError(
                f"{what} does not have four dimensions",
                got=getattr(array, "shape", type(array).__name__),
                expected="(batch, sequence, heads, head_dim)",
            )
        if array.dtype not in dtypes:
            raise InvalidTypeError(
                f"attention of this dtype of {what}",
                got=array.dtype,
                expected=" or ".join(str(one) for one in dtypes),
            )
    if k.shape != v.shape:
        raise InvalidValueError(
            "k and v do not have the same shape", got=f"k {k.shape}, v {v.shape}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InvalidValueError(
            "q and k do not agree in batch and head_dim", got=f"q {q.shape}, k {k.shape}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise InvalidTypeError(
            "q, k and v do not have one dtype", got=f"{q.dtype}, {k.dtype}, {v.dtype}"
        )
    if q.shape[2] % max(1, k.shape[2]) or (q.shape[2] and not k.shape[2]):
        raise InvalidValueError(
            "the heads of the queries cannot be divided among those of the keys",
            got=f"{q.shape[2]} and {k.shape[2]} heads",
            expected="a multiple",
        )
