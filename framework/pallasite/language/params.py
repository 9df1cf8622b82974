"""Parameters of a kernel, apart from the mesh."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

from pallasite import _jax, plugins
from pallasite.errors import InternalError, InvalidValueError
from pallasite.known_plugins import plugin_remedy
from pallasite.language import checks
from pallasite.language.checks import errors_at
from pallasite.plugin_options import GivenOptions, given_options, keyword_owners, resolve
from pallasite.semantics import Semantics


class LoweringSemantics(enum.Enum):
    """What one thread of the kernel is, and who chooses the layouts of arrays."""

    #: A thread is a warpgroup of 128 lanes; arrays have explicit register layouts.
    Lane = enum.auto()
    #: A thread is a warpgroup; layouts, tilings and swizzles are inferred.
    Warpgroup = enum.auto()


class _WithKeywords(type):
    """Takes options of plugins as keywords, beside the fields."""

    @property
    def __signature__(cls) -> inspect.Signature:
        declared = plugins.manager().options()
        kinds = [cls, *(declared[one] for one in dict.fromkeys(keyword_owners(declared).values()))]
        fields = {
            field.name: inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=field.type,
            )
            for kind in kinds
            for field in dataclasses.fields(cast(Any, kind))
            if kind is cls or field.metadata.get("keyword")
        }
        return inspect.Signature(list(fields.values()))

    def __call__(cls, **given: Any) -> Any:
        others = given.keys() - {field.name for field in dataclasses.fields(cast(Any, cls))}
        owners = keyword_owners(plugins.manager().options()) if others else {}
        options: dict[str, Any] = {}
        for name in sorted(others & owners.keys()):
            options.setdefault(owners[name], {})[name] = given.pop(name)
        if options:
            with errors_at(_jax.current_user_location):
                known = given_options(given.get("plugin_options", {}))
            merged = {plugin: {**known.get(plugin, {}), **options[plugin]} for plugin in options}
            given["plugin_options"] = {**known, **merged}
        return super().__call__(**given)


_DIMENSION_SEMANTICS = ("parallel", "sequential")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerParams(metaclass=_WithKeywords):
    """Compiler parameters of one kernel.

    Attributes:
      approx_math: permits faster, less exact exp, log, tanh and so on, and a product and a sum in
        one instruction, which rounds once.
      dimension_semantics: for ``pl.pallas_call``: "parallel" or "sequential" for each axis of the
        grid. Sequential axes become a software pipeline. None means all parallel.
      max_concurrent_steps: for ``pl.pallas_call``: how many steps of that pipeline are in flight.
      unsafe_no_auto_barriers: leaves out the barriers that keep loads and stores of a thread in
        program order; safe if no thread both reads and writes one region of memory, and none reads
        what it committed before it starts an asynchronous copy into the same place.
      reduction_scratch_bytes: shared memory for reductions across warps, in bytes.
      lowering_semantics: Warpgroup infers the layouts of arrays in registers and in shared memory
        and the fences that are needed; Lane leaves them to the kernel, and where it says nothing,
        to each operation. A ``Semantics`` of a plugin that falls back to one of these is possible,
        too.
      skip_device_barrier: leaves out the barrier between devices before a kernel that has
        references to peers.
      min_blocks: how many blocks should fit on one multiprocessor at once; this caps the registers
        of a thread, and more blocks hide more of one another's waiting.
      target: the name of the target to compile for; None selects it as the configuration says.
      plugin_options: parameters of plugins, by name of plugin: a mapping from names of options to
        values, or an instance of the plugin's dataclass of options. ``pallasite plugins`` lists
        the options of each. Some are keywords here and attributes, too, such as ``profile_space``
        of the standard library.
    """

    BACKEND: ClassVar[str] = "pallasite"

    approx_math: bool = False
    dimension_semantics: Sequence[str] | None = None
    max_concurrent_steps: int = 1
    unsafe_no_auto_barriers: bool = False
    reduction_scratch_bytes: int = 128 * 4 * 4
    lowering_semantics: LoweringSemantics | Semantics = LoweringSemantics.Warpgroup
    skip_device_barrier: bool = False
    min_blocks: int = 1
    target: str | None = None
    plugin_options: Mapping[str, Any] = GivenOptions()

    def __post_init__(self) -> None:
        with errors_at(_jax.current_user_location):
            object.__setattr__(self, "plugin_options", given_options(self.plugin_options))
            self.check_plugin_options(absent="permitted")
        if self.dimension_semantics is not None:
            semantics = tuple(self.dimension_semantics)
            for position, name in enumerate(semantics):
                if name not in _DIMENSION_SEMANTICS:
                    raise checks.value_error(
                        f"dimension_semantics[{position}] is unknown",
                        got=repr(name),
                        expected='"parallel" or "sequential"',
                    )
            object.__setattr__(self, "dimension_semantics", semantics)
        checks.count(self.max_concurrent_steps, "max_concurrent_steps", minimum=1)
        checks.count(self.reduction_scratch_bytes, "reduction_scratch_bytes")
        checks.count(self.min_blocks, "min_blocks", minimum=1)
        object.__setattr__(self, "lowering_semantics", _semantics(self.lowering_semantics))
        if self.target is not None and not isinstance(self.target, str):
            raise checks.type_error(
                "target is not a name", got=self.target, expected='a string such as "sm_90a"'
            )

    def __getattr__(self, name: str) -> Any:
        declared = {} if name.startswith("_") else plugins.manager().options()
        plugin = keyword_owners(declared).get(name)
        if plugin is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.options_of(declared[plugin]), name)

    def check_plugin_options(self, *, absent: Literal["permitted", "refused"]) -> None:
        """Checks that the plugins have the options that are given, and accept their values.

        Args:
          absent: whether options of a plugin may be given that has none, or is not there. Where
            kernels are traced, they may not.

        Raises:
          InvalidValueError, InvalidTypeError: names the plugin, and the options that it has.
        """
        given = cast(GivenOptions, self.plugin_options)
        if not given:
            return
        declared = plugins.manager().options()
        for plugin in given:
            if plugin in declared:
                resolve(plugin, declared[plugin], given)
            elif absent == "refused":
                raise _no_options(plugin, declared)

    def options_of[Options](self, declared: type[Options]) -> Options:
        """The parameters of a plugin: what the kernel gives, else their defaults.

        Args:
          declared: the dataclass that the plugin's hook ``pallasite_options`` returns.

        Raises:
          InternalError: no plugin that is in use declares this class.
        """
        for plugin, one in plugins.manager().options().items():
            if one is declared:
                return cast(Options, resolve(plugin, one, cast(GivenOptions, self.plugin_options)))
        raise InternalError(
            f"no plugin declares {declared.__qualname__} as its options",
            expected="the class that the hook pallasite_options of a plugin in use returns",
        )

    @property
    def semantics(self) -> Semantics:
        """What one thread of the kernel is, as rules are looked up for it."""
        if isinstance(self.lowering_semantics, Semantics):
            return self.lowering_semantics
        return _SEMANTICS[self.lowering_semantics]

    def replace(self, **changes: Any) -> CompilerParams:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def _no_options(plugin: str, declared: Mapping[str, type]) -> InvalidValueError:
    """The error for options of a plugin that has none, or is not in use."""
    present = plugins.manager().absences()
    return InvalidValueError(
        f"plugin {plugin!r} has no compiler options"
        if present.get(plugin) == ""
        else f"plugin_options are for plugin {plugin!r}, which is not in use",
        expected="a plugin that has some: " + (", ".join(declared) or "none that is in use does"),
        hint=plugin_remedy(plugin, present) if present.get(plugin) != "" else None,
    )


_SEMANTICS = {
    LoweringSemantics.Lane: Semantics.LANE,
    LoweringSemantics.Warpgroup: Semantics.WARPGROUP,
}


def _semantics(given: Any) -> LoweringSemantics | Semantics:
    """What ``lowering_semantics`` is, given also as JAX's own enumeration or as a Semantics."""
    if isinstance(given, LoweringSemantics):
        return given
    if isinstance(given, Semantics):
        if given.extends(Semantics.LANE):
            named = {semantics: name for name, semantics in _SEMANTICS.items()}
            return named.get(given, given)
    elif getattr(given, "name", None) in LoweringSemantics.__members__:
        return LoweringSemantics[given.name]
    raise checks.type_error(
        "lowering_semantics is unknown",
        got=given,
        expected="LoweringSemantics.Lane or LoweringSemantics.Warpgroup, or a Semantics of a plugin"
        " that falls back to one of them",
    )
