"""Running passes: in order, with those switched off left out, checked, timed and dumped.

A kernel goes through four stages. What a pass gets and returns is at stage

* ``"jaxpr"`` a closed or open jaxpr,
* ``"mlir"`` an ``ir.Module``, which is verified after each pass of a plugin,
* ``"llvm"`` an llvmlite module, which is, too,
* ``"ptx"`` a string.

With the option ``dump`` (``PALLASITE_DUMP=directory``) each stage is written to
``<kernel>.<number>.<what>.<extension>``, where ``what`` is the name of a stage or of the pass that
has just run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pallasite import config, files, plugins
from pallasite.codegen import ptx
from pallasite.codegen.compiled import Change
from pallasite.codegen.translation.locations import source_location
from pallasite.errors import CompilationError, ConfigError, PallasiteError
from pallasite.extensions import Pass, Stage
from pallasite.jaxpr_table import JaxprTable
from pallasite.order_tables import BarrierTables, MemoryTables
from pallasite.plugin_values import wrong_value
from pallasite.registry import Registry
from pallasite.targets import Target
from pallasite.view_rules import ViewRule

_EXTENSIONS: dict[str, str] = {"jaxpr": "txt", "mlir": "mlir", "llvm": "ll", "ptx": "ptx"}
_FIRST_NUMBER: dict[str, int] = {"jaxpr": 0, "mlir": 20, "llvm": 40, "ptx": 60}

_IMMUTABLE = ("jaxpr", "ptx")
"""Stages that a pass changes only by returning something."""
_OWN = (plugins.CORE, plugins.STANDARD)
"""Plugins whose passes are not verified."""


@dataclasses.dataclass
class PassContext:
    """What passes know about the kernel that they work on.

    Attributes:
      kernel: its name.
      target: what it is compiled for.
      options: the kernel's ``CompilerParams``, or None.
      mesh: the kernel's grid, cluster and threads, or None.
      spec: the kernel as it was traced, or None.
      shared: what passes leave for others.
      timings: seconds by name of pass or step, in order; the pipeline appends to it.
      llvm: at stage ``"llvm"``, the text that the module was made from.
      changes: the passes of plugins that changed the kernel.
      ptx: those at stage ``"ptx"``, each with the text before it.
    """

    kernel: str
    target: Target
    options: Any = None
    mesh: Any = None
    spec: Any = None
    shared: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)
    timings: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    llvm: str = dataclasses.field(default="", repr=False)
    changes: list[Change] = dataclasses.field(default_factory=list)
    ptx: list[tuple[Change, str]] = dataclasses.field(default_factory=list, repr=False)
    _numbers: dict[str, Iterator[int]] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def _registry(self) -> Registry:
        return plugins.registry()

    @functools.cached_property
    def jaxprs(self) -> JaxprTable:
        """The primitives that carry jaxprs, for those who walk the kernel."""
        return self._registry.jaxprs.remembering()

    @property
    def barriers(self) -> BarrierTables:
        """Kinds of barriers, and what primitives do to them."""
        return self._registry.barriers

    @property
    def memory(self) -> MemoryTables:
        """What primitives do to memory."""
        return self._registry.memory

    def view_rule(self, transform: type) -> ViewRule | None:
        """What a class of transforms of references means, or None if there is none."""
        return self._registry.view_rule(transform)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the duration of a ``with`` block to the timings."""
        start = time.perf_counter()
        yield
        self.timings.append((name, time.perf_counter() - start))

    def dump(self, stage: str, what: str, text: Callable[[], str]) -> None:
        """Writes a stage to the dump directory, if there is one; ``text`` is called only then.

        The file appears under its name only when it is complete.

        Raises:
          ConfigError: the directory cannot be made or written.
        """
        folder = config.get("dump")
        if folder is None:
            return
        if stage not in self._numbers:
            self._numbers[stage] = itertools.count(_FIRST_NUMBER.get(stage, 80))
        number = next(self._numbers[stage])
        kernel = re.sub(r"[^\w.-]", "_", self.kernel)
        extension = _EXTENSIONS.get(stage, stage)
        try:
            name = f"{kernel}.{number:02d}.{what}.{extension}"
            files.write(files.make_folder(folder) / name, text())
        except OSError as error:
            raise ConfigError(
                f"the option dump is {str(folder)!r}, where nothing can be written",
                got=error.strerror,
                expected="a directory that can be made and written",
            ) from error


def run_stage(
    stage: Stage, value: Any, context: PassContext, *, passes: Sequence[Pass] | None = None
) -> Any:
    """Runs the passes of one stage on a value and returns what comes out.

    Args:
      stage: the stage.
      value: what the stage holds.
      context: the kernel; gets the timings.
      passes: the passes in their order; by default those of the registry for the target.

    Raises:
      CompilationError: a pass failed, or left an MLIR module that does not verify.
      ConfigError: the option ``disabled_passes`` names a pass that does not exist.
    """
    disabled = frozenset(config.get("disabled_passes"))
    if passes is None:
        registry = plugins.registry()
        passes = registry.passes(stage, target=context.target)
        if disabled:
            _check_names(disabled, {entry.name for entry in registry.passes()})
    context.dump(stage, stage, lambda: _text(stage, value))
    if stage == "mlir":
        verify(value, "the lowering")
    for entry in passes:
        if entry.name in disabled:
            continue
        with context.timed(entry.name), _attributed(entry):
            result = entry.run(value, context)
        unchanged, result = result is False, None if result is False else result
        if result is not None and not _is_like(result, value):
            plugin = plugins.manager().label(entry.plugin)
            what = f"pallasite_passes of plugin {plugin}: pass {entry.name!r}"
            raise wrong_value(what, result, f"what stage {stage!r} holds, a {type(value).__name__}")
        if result is None and stage in _IMMUTABLE:
            continue
        before, value = value, value if result is None else result
        if entry.plugin not in _OWN and not unchanged:
            _note_change(entry, before, value, context)
        context.dump(stage, entry.name, lambda: _text(stage, value))  # noqa: B023
    return value


def _note_change(entry: Pass, before: Any, value: Any, context: PassContext) -> None:
    """Notes that a pass of a plugin may have changed a kernel, and checks what it left."""
    if entry.stage in _IMMUTABLE and (
        value is before or (entry.stage == "ptx" and value == before)
    ):
        return
    change = _change(entry)
    context.changes.append(change)
    if entry.stage == "mlir":
        verify(value, str(change))
        found = [one.attributes for one in value.body.operations]
        names = [one["sym_name"].value for one in found if "sym_name" in one]
    elif entry.stage == "llvm":
        ptx.verify(value, str(change))
        names = [one.name for one in value.functions if not one.is_declaration]
    elif entry.stage == "ptx":
        context.ptx.append((change, before))
        names = re.findall(r"\.entry\s+([\w$]+)", value)
    if entry.stage != "jaxpr" and context.kernel not in names:
        raise CompilationError(
            f"{change} left no kernel {context.kernel!r}",
            got=", ".join(names) or "nothing",
            expected="the kernel, under its name",
        )


def _change(entry: Pass) -> Change:
    label = plugins.manager().label(entry.plugin)
    return Change(entry.stage, entry.name, entry.plugin, label)


def _is_like(result: Any, value: Any) -> bool:
    """Whether what a pass returned can take the place of what it was given."""
    return isinstance(result, type(value)) or (hasattr(value, "eqns") and hasattr(result, "eqns"))


def verify(module: Any, after: str) -> None:
    """Verifies an MLIR module.

    Raises:
      CompilationError: it is not valid; shows the first operation that is not, at its source line.
    """
    from jaxlib.mlir import ir

    try:
        module.operation.verify()
    except ir.MLIRError as error:
        raise mlir_error(error, f"{after} left invalid MLIR") from None


def mlir_error(error: Any, what: str) -> CompilationError:
    """A :class:`CompilationError` from an ``ir.MLIRError``, at the source line of its operation."""
    diagnostics = list(error.error_diagnostics)
    if not diagnostics:
        return CompilationError(f"{what}: {error.message}")
    first = diagnostics[0]
    shown = next((str(note.message) for note in first.notes), None)
    if shown is not None:
        shown = shown.removeprefix("see current operation: ").strip()
        shown = shown if len(shown) < 2000 else shown[:2000] + " ..."
    location = source_location(first.location)
    return CompilationError(f"{what}: {first.message}", got=shown, location=location)


@contextlib.contextmanager
def _attributed(entry: Pass) -> Iterator[None]:
    """Turns what a pass raises into an error that names the pass."""
    from jaxlib.mlir import ir

    try:
        yield
    except PallasiteError as error:
        if entry.plugin not in _OWN:
            error.add_note(f"  in {_change(entry)}")
        raise
    except KeyboardInterrupt as error:
        error.add_note(f"in {_change(entry)}")
        raise
    except ir.MLIRError as error:
        failure = mlir_error(error, f"{_change(entry)} failed")
        failure.hint = _change(entry).hint
        raise failure from None
    except (Exception, SystemExit) as error:
        raise CompilationError(
            f"{_change(entry)} failed: {type(error).__name__}: {error}", hint=_change(entry).hint
        ) from error


def _check_names(disabled: frozenset[str], known: set[str]) -> None:
    unknown = sorted(disabled - known)
    if unknown:
        raise ConfigError(
            "the option disabled_passes names passes that do not exist",
            got=", ".join(unknown),
            expected="some of " + ", ".join(sorted(known)),
        )


def _text(stage: Stage, value: Any) -> str:
    if stage == "mlir":
        return str(value.operation.get_asm(enable_debug_info=True))
    return str(value)
