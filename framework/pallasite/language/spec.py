"""``KernelSpec``: a traced kernel, as it goes from the language to the compiler."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallasite import _jax
from pallasite.errors import SourceLocation
from pallasite.language.checks import errors_at
from pallasite.language.mesh import Mesh
from pallasite.language.params import CompilerParams


@dataclasses.dataclass(frozen=True, eq=False)
class KernelSpec:
    """A traced kernel: all that the compiler needs. Compared by identity.

    Attributes:
      name: a valid PTX identifier.
      jaxpr: the body; no constants and no outputs, its inputs are references to the inputs and then
        to the outputs, all in global memory.
      in_avals, out_avals: array types of inputs and outputs.
      input_output_aliases: pairs (input, output) that share one buffer.
      mesh: grid, cluster and threads.
      params: compiler parameters.
      location: where the body is defined.
      debug: whether the user asked for the intermediate stages to be printed.
      interpret: how it is run on the CPU even in a program for a GPU, if it is to be: what
        ``Interpretation.params`` returns.
      out_varying: for each output, the manual axes of the device mesh over which it varies; None
        for those over which an input does; empty if that holds for all.
    """

    name: str
    jaxpr: Any
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    input_output_aliases: tuple[tuple[int, int], ...]
    mesh: Mesh
    params: CompilerParams
    location: SourceLocation | None = None
    debug: bool = False
    interpret: Any = None
    out_varying: tuple[frozenset[Any] | None, ...] = ()

    def __post_init__(self) -> None:
        with errors_at(lambda: _jax.current_user_location() or self.location):
            self.params.check_plugin_options(absent="refused")

    def __repr__(self) -> str:
        return f"KernelSpec({self.name}, {dict(self.mesh.shape)})"

    def replace(self, **changes: Any) -> KernelSpec:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)
