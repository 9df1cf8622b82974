"""Finding kernels in a Python file, and the arguments to compile them with."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pallasite.cli.array_types import ArrayType
from pallasite.cli.user_code import prepare_jax, running
from pallasite.errors import InvalidValueError

_MODULE = "__pallasite_file__"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Something in a file that may be compiled.

    Attributes:
      name: what the user writes after ``::``.
      function: takes arrays, calls a kernel.
      arguments: makes the arguments to compile it with; None if the file does not say.
      origin: where these come from, or what to do to give some.
      values: makes arguments with values, given a seed; None if the file has only types.
      check: ``check(inputs, output)`` says whether a result is right; None if the file does not.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], Any] | None
    origin: str
    values: Callable[[int], Any] | None = None
    check: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class KernelFile:
    """A Python file that has been run as a module."""

    path: pathlib.Path
    module: types.ModuleType

    def candidates(self) -> list[Candidate]:
        """The public functions that the file defines, and its examples."""
        functions = [
            self._candidate(name, value)
            for name, value in vars(self.module).items()
            if not name.startswith("_")
            and not name.endswith(("_args", "_check"))
            and self._is_own(value)
        ]
        examples = [self._candidate(str(one.name), one.function) for one in self._examples()]
        return functions + [one for one in examples if one.name not in vars(self.module)]

    def find(self, name: str) -> Candidate:
        """The function or example of a name.

        Raises:
          InvalidValueError: there is none, or it cannot be called.
        """
        value: Any = self.module
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is None:
            value = next((one.function for one in self._examples() if one.name == name), None)
        if value is None:
            offered = [one.name for one in self.candidates()]
            close = difflib.get_close_matches(name, offered, n=1)
            raise InvalidValueError(
                f"{self.path} has no kernel {name!r}",
                expected="one of " + ", ".join(offered) if offered else "a file with a kernel",
                hint=f"{self.path}::{close[0]}" if close else None,
            )
        if not callable(value):
            raise InvalidValueError(
                f"{name!r} in {self.path} cannot be called",
                got=type(value).__name__,
                expected="a kernel, or a function of arrays that calls one",
            )
        return self._candidate(name, value)

    def _examples(self) -> Iterator[Any]:
        examples = getattr(self.module, "EXAMPLES", ())
        for one in examples if isinstance(examples, Sequence) else ():
            if all(hasattr(one, field) for field in ("name", "function", "make_inputs")):
                yield one

    def _is_own(self, value: Any) -> bool:
        own = getattr(value, "__module__", None) == self.module.__name__
        return own and callable(value) and not isinstance(value, type)

    def _candidate(self, name: str, function: Callable[..., Any]) -> Candidate:
        found = self._with_arguments(name, function)
        check = getattr(self.module, f"{name}_check", None)
        return dataclasses.replace(found, check=check) if callable(check) else found

    def _with_arguments(self, name: str, function: Callable[..., Any]) -> Candidate:
        given = getattr(function, "example_inputs", None)
        if given is not None:
            make = given if callable(given) else lambda: given
            return Candidate(name, function, make, f"{name}.example_inputs")
        sibling = getattr(self.module, f"{name}_args", None)
        if callable(sibling):
            return Candidate(name, function, sibling, f"{name}_args()")
        examples = sorted(self._examples(), key=lambda one: one.name != name)
        for one in examples:
            if one.name == name or one.function is function:
                make = functools.partial(_example_types, one)
                values = functools.partial(_example_values, one)
                check = getattr(one, "check", None)
                origin = f"example {one.name}"
                return Candidate(name, function, make, origin, values, check)
        needed = operand_names(function)
        if needed == ():
            return Candidate(name, function, tuple, "takes none")
        return Candidate(name, function, None, "give --arg for " + ", ".join(needed or ("each",)))


def operand_names(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names of the arguments that a function or a kernel must be given; None if not known."""
    kernel: Any = function if hasattr(function, "scratch_types") else None
    try:
        parameters = inspect.signature(kernel.body if kernel else function).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [one.name for one in parameters if one.kind in positional and one.default is one.empty]
    if kernel:  # Its body gets outputs and scratch after the operands.
        scratch = kernel.scratch_types
        names = [name for name in names if not isinstance(scratch, Mapping) or name not in scratch]
        others = len(kernel.out_type) + (0 if isinstance(scratch, Mapping) else len(scratch))
        names = names[: len(names) - others]
    return tuple(names)


def load(path: str) -> KernelFile:
    """Runs a file as a module; one in a package under its full name, from the package's folder.

    Raises:
      InvalidValueError: there is no such file, or another module hides it.
      UserCodeError: the file raises an exception.
    """
    file = pathlib.Path(path).resolve()
    if not file.is_file() or file.suffix != ".py":
        raise InvalidValueError(
            f"cannot read {path}",
            got="a folder" if file.is_dir() else "another kind" if file.exists() else "no file",
            expected="a Python file: FILE.py::KERNEL",
        )
    prepare_jax()
    folder, parts = file.parent, [file.stem]
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    with running(file):
        if len(parts) == 1:
            return KernelFile(pathlib.Path(path), _run(file))
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    if pathlib.Path(module.__file__ or "").resolve() != file:
        raise InvalidValueError(
            f"another module hides {path}",
            got=f"{module.__name__} is {module.__file__}",
            hint="rename the package, or remove the other one from PYTHONPATH",
        )
    return KernelFile(pathlib.Path(path), module)


def types_of(arguments: Sequence[ArrayType]) -> tuple[Any, ...]:
    """Arguments without values for the types that the user gave.

    Raises:
      InvalidValueError: JAX makes narrower arrays of one of them.
    """
    import jax
    import ml_dtypes  # noqa: F401  (NumPy knows its dtypes from then on)
    import numpy as np

    for one in arguments:
        narrow = jax.dtypes.canonicalize_dtype(np.dtype(one.dtype))
        if narrow != np.dtype(one.dtype):
            raise InvalidValueError(
                "JAX has no arrays of this dtype here",
                got=f"--arg {one}, which would become {narrow}",
                expected="dtypes of at most 32 bits",
                hint="set the environment variable JAX_ENABLE_X64=1",
            )
    return tuple(jax.ShapeDtypeStruct(one.shape, np.dtype(one.dtype)) for one in arguments)


def arguments_of(candidate: Candidate, given: Sequence[ArrayType], file: KernelFile) -> tuple[Any]:
    """The arguments to compile with: those given, else those of the file.

    Raises:
      InvalidValueError: neither the user nor the file says what they are.
      UserCodeError: the file's own code fails.
    """
    if given:
        return types_of(given)
    if candidate.arguments is None:
        raise InvalidValueError(
            f"it is not known for which arguments to compile {candidate.name!r}",
            expected=f"--arg options, or in {file.path} one of: an attribute"
            f" {candidate.name}.example_inputs, a function {candidate.name}_args(),"
            " an entry of EXAMPLES",
            hint="--arg 'f32[1024,1024]', once for each argument",
        )
    with running(file.path.resolve()):
        made = candidate.arguments()
    return tuple(made) if isinstance(made, tuple | list) else (made,)


def _example_types(example: Any) -> Any:
    """The types of an example's inputs; no array is made."""
    import jax

    return jax.eval_shape(example.make_inputs, jax.random.key(0))


def _example_values(example: Any, seed: int) -> Any:
    """An example's inputs."""
    import jax

    return example.make_inputs(jax.random.key(seed))


def _run(file: pathlib.Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    spec.loader.exec_module(module)
    return module
