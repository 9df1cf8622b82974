"""Random calls of the operations on rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.fuzz import _references as by_definition
from tests.fuzz._programs import BF16, F16, F32, FLOAT8, INT8, TOLERANCES, Draw, Program
from tests.ops import row_references as references

from pallasite import ops

COLUMNS = (1, 2, 3, 8, 31, 64, 100, 129, 256, 1000, 4097)
QUOTIENTS = {FLOAT8[0]: 0.07, FLOAT8[1]: 0.13, INT8[0]: 0.006}
"""Half a step of each dtype, by its largest number."""


def _shape(draw: Draw, *, columns: int | None = None) -> tuple[int, ...]:
    lead = tuple(draw.extent(1, 2, 3, 7, 33) for _ in range(draw.one(0, 1, 1, 2)))
    return (*lead, draw.one(*COLUMNS) if columns is None else columns)


def _array(draw: Draw, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Numbers whose sums of two are exact, so that they do not round differently."""
    values = np.round(draw.random.standard_normal(shape) * 16) / 16
    return values.astype(dtype)


def norm(draw: Draw) -> Program:
    """RMSNorm and layer norm, with a residual, or quantised."""
    name, dtype = draw.one("rms_norm", "layer_norm"), draw.one(BF16, F16, F32)
    shape = _shape(draw)
    columns = shape[-1:]
    parameter = draw.one(dtype, F32)
    arrays = {
        "x": _array(draw, shape, dtype),
        "weight": draw.maybe(0.7, lambda: draw.array(columns, parameter)),
        "residual": draw.maybe(0.3, lambda: _array(draw, shape, dtype)),
    }
    if name == "layer_norm":
        arrays["bias"] = draw.maybe(0.5, lambda: draw.array(columns, parameter))
    options: dict[str, Any] = {"epsilon": draw.one(1e-6, 1e-3, 0.1)}
    if draw.chance(0.3):
        options["weight_offset"] = 1.0
    narrow = draw.one(*QUOTIENTS) if draw.chance(0.25) else None
    gradients: tuple[str, ...] = ()
    out, further = dtype, dict[str, Any]()
    if narrow is not None:
        further["quantize"] = narrow
    elif draw.chance(0.25):
        out = draw.one(BF16, F16, F32)
        further["out_dtype"] = out
    if narrow is None and draw.chance(0.4):
        gradients = tuple(one for one, array in arrays.items() if array is not None)

    def reference(**given: Any) -> Any:
        results = references.norm(**given, **options, centered=name == "layer_norm")
        results = results if isinstance(results, tuple) else (results,)
        return results if narrow is None else (*_quotients(results[0], narrow), *results[1:])

    return Program(
        name,
        arrays,
        {**options, **further},
        lambda **given: getattr(ops, name)(**given, **options, **further),
        reference,
        gradients,
        # Steps of the narrow dtype, plus those of the sum before.
        max(TOLERANCES[out], TOLERANCES[dtype], QUOTIENTS.get(narrow, 0.0)),
    )


def _quotients(values: Any, dtype: Any, group: int | None = None) -> tuple[Any, Any]:
    """Not rounded, and their scales."""
    limit = np.iinfo(dtype).max if dtype in INT8 else float(jnp.finfo(dtype).max)
    shape = values.shape
    if group is not None:
        values = values.reshape(*shape[:-1], shape[-1] // group, group)
    largest = jnp.max(jnp.abs(values), axis=-1, initial=0.0)
    scales = jnp.where(largest == 0, 1.0, largest / limit)
    return (values / scales[..., None]).reshape(shape), scales


def quantization(draw: Draw) -> Program:
    """Rows by their scales, each of its own or several."""
    narrow, dtype = draw.one(*QUOTIENTS), draw.one(BF16, F16, F32)
    group = draw.one(None, None, 4, 32, 48)
    shape = _shape(draw, columns=None if group is None else group * draw.one(1, 2, 5))
    options: dict[str, Any] = {} if group is None else {"group": group}
    if draw.chance(0.5):
        return Program(
            "quantize",
            {"x": draw.array(shape, dtype)},
            {"dtype": narrow, **options},
            lambda x: ops.quantize(x, narrow, **options),
            lambda x: _quotients(x, narrow, group),
            (),
            QUOTIENTS[narrow],
        )
    scales = shape[:-1] if group is None else (*shape[:-1], shape[-1] // group)
    arrays = {
        "values": draw.array(shape, narrow),
        "scales": draw.random.uniform(0.01, 2, scales).astype(F32),
    }

    def reference(values: Any, scales: Any) -> Any:
        if group is None:
            return values * scales[..., None]
        return values * jnp.repeat(scales, group, axis=-1)

    return Program(
        "dequantize",
        arrays,
        {"out_dtype": dtype},
        lambda values, scales: ops.dequantize(values, scales, dtype),
        reference,
        (),
        TOLERANCES[dtype],
    )


def cross_entropy(draw: Draw) -> Program:
    """Losses of rows; labels that are no classes."""
    dtype, shape = draw.one(BF16, F16, F32), _shape(draw)
    classes = shape[-1]
    labels = draw.random.integers(-1, classes + 1, shape[:-1]).astype(np.int32)
    options: dict[str, Any] = {}
    if draw.chance(0.3):
        options["label_smoothing"] = 0.1
    if draw.chance(0.3):
        options["z_loss"] = 0.01
    if draw.chance(0.3):
        options["soft_cap"] = draw.one(3.0, 20.0)
    if draw.chance(0.3):
        options["ignored_label"] = -1
    arrays = {"logits": draw.array(shape, dtype, 3.0), "labels": labels}

    def reference(logits: Any, labels: Any) -> Any:
        return references.cross_entropy(logits, labels.astype(int), **options)

    return Program(
        "softmax_cross_entropy",
        arrays,
        options,
        lambda **given: ops.softmax_cross_entropy(**given, **options),
        reference,
        ("logits",) if draw.chance(0.5) else (),
        TOLERANCES[dtype],
    )


def rotary(draw: Draw) -> Program:
    """Rotated pairs of elements."""
    dtype, dim = draw.one(BF16, F16, F32), draw.one(2, 18, 30, 64, 80, 128)
    lead = (draw.extent(1, 2),) if draw.chance(0.5) else ()
    tokens, heads = draw.extent(1, 5, 17, 40), draw.extent(1, 3, 8)
    options: dict[str, Any] = {"interleaved": draw.chance(0.5)}
    if draw.chance(0.3):
        options["base"] = 500000.0
    if dim > 2 and draw.chance(0.3):
        options["rotary_dim"] = draw.one(2, dim // 4 * 2)
    own = draw.chance(0.5)
    positions = draw.random.integers(0, 60, (*lead, tokens) if own else (tokens,))
    return Program(
        "rotary_embedding",
        {
            "x": draw.array((*lead, tokens, heads, dim), dtype),
            "positions": positions.astype(np.int32),
        },
        options,
        lambda **given: ops.rotary_embedding(**given, **options),
        lambda x, positions: references.rotary(x, positions, **options),
        ("x",) if draw.chance(0.4) else (),
        TOLERANCES[dtype],
    )


def gated(draw: Draw) -> Program:
    """Products with an activation."""
    name, dtype, shape = (
        draw.one("swiglu", "gated_activation"),
        draw.one(BF16, F16, F32),
        _shape(draw),
    )
    function: Callable[..., Any] = jax.nn.silu if name == "swiglu" else jnp.tanh
    further = {} if name == "swiglu" else {"activation": function}
    return Program(
        name,
        {"gate": draw.array(shape, dtype), "up": draw.array(shape, dtype)},
        further,
        lambda **given: getattr(ops, name)(**given, **further),
        lambda gate, up: function(gate) * up,
        ("gate", "up") if draw.chance(0.5) else (),
        TOLERANCES[dtype],
    )


def top_k(draw: Draw) -> Program:
    """The largest elements of rows, some of which are equal."""
    dtype, shape = draw.one(BF16, F16, F32), _shape(draw)
    k = min(shape[-1], draw.one(0, 1, 2, 5, 8, 33))
    values = _array(draw, shape, dtype) if draw.chance(0.5) else draw.array(shape, dtype)
    return Program(
        "top_k",
        {"x": values},
        {"k": k},
        lambda x: ops.top_k(x, k),
        lambda x: by_definition.top_k(x, k=k),
        ("x",) if draw.chance(0.4) else (),
        0.0,
    )


KINDS = (norm, norm, quantization, cross_entropy, rotary, gated, top_k)
