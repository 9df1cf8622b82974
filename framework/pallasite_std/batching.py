"""Adds a grid axis to a traced kernel: what ``jax.vmap`` of a kernel means.

The body stays as it is, except that every access to a batched operand first selects the entry of
the new grid axis, that ``pl.program_id`` counts one axis further, and that each entry has global
semaphores of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from pallasite.plugin import jax_internals as _jax
from pallasite_std.rewriting import evaluate


def _entry(ref: Any, index: Any) -> Any:
    shape = _jax.typeof(ref).shape
    indices = (index, *(slice(None) for _ in shape[1:]))
    return _jax.TransformedRef(ref, (_jax.NDIndexer.from_indices_shape(indices, shape),))


def prepend_axis(jaxpr: Any, batched: Sequence[bool], axis: Any, size: int) -> Any:
    """The body of a kernel with a new first grid axis.

    Args:
      jaxpr: the body; its inputs are references and it has no outputs.
      batched: which inputs get a leading dimension of ``size``.
      axis: the name of the new axis; the caller makes it known to the tracing environment.
      size: its size.
    """

    def program_id(old_axis: int) -> Any:
        return _jax.program_id_p.bind(axis=old_axis + 1)

    def body(*refs: Any) -> list[Any]:
        index = lax.axis_index(axis)
        views = [_entry(r, index) if b else r for r, b in zip(refs, batched, strict=True)]
        return evaluate(
            jaxpr,
            views,
            program_id=program_id,
            get_global=lambda what: _entry(_jax.get_global_p.bind(what=of_all(what)), index),
            purpose="jax.vmap of a kernel",
        )

    def of_all(aval: Any) -> Any:
        return aval.update(inner_aval=aval.inner_aval.update(shape=(size, *aval.shape)))

    avals = [of_all(v.aval) if b else v.aval for v, b in zip(jaxpr.invars, batched, strict=True)]
    info = _jax.make_debug_info("vmap of a kernel", body, avals, jaxpr.debug_info.func_name)
    new, _ = _jax.trace_to_jaxpr(body, avals, debug_info=info)
    return new
