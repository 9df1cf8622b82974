"""Checks of libraries, tools, plugins, the cache and the configuration."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys

import pallasite
from pallasite import config
from pallasite.cli import output
from pallasite.cli.checks import OK, PROBLEM, WARNING, Check
from pallasite.errors import ConfigError

_LIBRARIES = (("jax", "jax"), ("jaxlib", "jaxlib"), ("llvmlite", "llvmlite.binding"))
_MINIMUM_PYTHON = (3, 12)


def libraries() -> list[Check]:
    """Python, Pallasite, the libraries that it needs, and JAX's CUDA plugin."""
    text = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < _MINIMUM_PYTHON:
        python = Check("Python", text, PROBLEM, "use Python 3.12 or later")
    else:
        python = Check("Python", text)
    folder = pathlib.Path(pallasite.__file__).parent
    checks = [python, Check("pallasite", f"{pallasite.__version__} ({folder})")]
    required = _required_versions()
    for name, module in _LIBRARIES:
        wanted = required.get(name, name)
        try:
            importlib.import_module(module)
            version = importlib.metadata.version(name)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            checks.append(Check(name, text, PROBLEM, f"pip install '{wanted}'"))
        else:
            checks.append(Check(name, version))
    return [*checks, _agreement(), _llvm(), _cuda_plugin()]


def tools() -> list[Check]:
    """The assembler and the disassembler."""
    from pallasite.codegen.tools import find_tool

    checks = []
    for name, use in (("ptxas", "counting registers"), ("nvdisasm", "showing machine code")):
        try:
            tool = find_tool(name)
        except ConfigError:
            checks.append(Check(name, "not looked for: the option ptxas is wrong", WARNING))
            continue
        if tool.path is None:
            text = f"not found, needed for {use}: {tool.reason}"
            checks.append(Check(name, text, WARNING, tool.install))
        else:
            checks.append(Check(name, f"{_version_of(tool.path)}, {tool.reason}: {tool.path}"))
    return checks


def plugins() -> list[Check]:
    """Each plugin's state, and whether all of them agree."""
    from pallasite.cli.contributions import quiet
    from pallasite.known_plugins import known_plugins
    from pallasite.plugins import manager

    checks = []
    with quiet():
        try:
            registry = manager().registry()
            rules, passes = registry.lowering.rules(), registry.passes()
            text = f"{len(rules)} lowering rules, {len(passes)} passes, no contradictions"
            checks += [Check("registry", text), *_disabled_passes({one.name for one in passes})]
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            remedy = "'pallasite plugins' shows more"
            checks.append(Check("registry", text, PROBLEM, remedy))
        checks += _instructions()
        try:
            found = manager().plugins()
        except ConfigError:
            return checks  # the configuration's own check says what is wrong
    for plugin in found:
        if plugin.state == "failed":
            text = f"{plugin.distribution}, failed: {plugin.reason}"
            hints = [line for line in plugin.error.splitlines() if line.startswith("  try: ")]
            advice = hints[-1].removeprefix("  try: ") if hints else "reinstall it"
            remedy = f"{advice}; 'pallasite plugins' shows more"
            checks.append(Check(plugin.name, text, WARNING, remedy))
        else:
            checks.append(Check(plugin.name, f"{plugin.distribution}, {plugin.state}"))
    with quiet():
        for one in manager().diagnoses():
            state = WARNING if one.remedy else OK
            checks.append(Check(f"{one.plugin}: {one.name}", one.text, state, one.remedy))
    present = {plugin.name for plugin in found}
    missing = [known for known in known_plugins() if known.name not in present]
    return [
        *checks,
        *(Check(one.name, ": ".join(filter(None, (one.absence, one.install)))) for one in missing),
    ]


def _instructions() -> list[Check]:
    """What executors that interpret PTX know, if there are any."""
    from pallasite.errors import PluginError
    from pallasite.plugins import manager

    try:
        known = manager().instructions()
    except PluginError as error:
        text = str(error).splitlines()[0]
        return [Check("PTX instructions", text, WARNING, "'pallasite plugins' shows more")]
    except ConfigError:
        return []
    return [Check("PTX instructions", f"rules for {len(known)} kinds")] if known else []


def cache() -> list[Check]:
    """Whether the cache's folder can be written to, and how full it is."""
    try:
        enabled, folder = config.get("cache"), config.get("cache_dir")
    except ConfigError:
        return []
    if not enabled:
        return [Check("cache", f"off; its folder is {folder}")]
    from pallasite.runtime.store import SealedStore
    from pallasite.stores import KERNELS

    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        remedy = "PALLASITE_CACHE_DIR=... for another folder, or PALLASITE_CACHE=off"
        text = f"{folder} cannot be written, so each process compiles anew"
        return [Check("cache", text, WARNING, remedy)]
    store = SealedStore(folder, KERNELS)
    held = store.usage()
    text = f"{folder}: {store.namespace.count(held.entries)}, {output.size(held.bytes)}"
    return [Check("cache", f"{text} of at most {output.size(store.max_bytes or 0)}")]


def configuration() -> list[Check]:
    """All options, where their values come from, and variables that no option reads."""
    checks = []
    for name, option in config.OPTIONS.items():
        try:
            value, source = config.source(name)
        except ConfigError as error:
            remedy = f"set {option.variable} to {option.accepts}"
            checks.append(Check(name, f"{error.message}: {error.got}", PROBLEM, remedy))
            continue
        shown = ", ".join(value) or "none" if isinstance(value, tuple) else str(value)
        origin = source if source == option.variable else f"{source}; {option.variable}"
        checks.append(Check(name, f"{shown}  ({origin})"))
    known = [option.variable for option in config.OPTIONS.values()]
    for variable in sorted(os.environ):
        if variable.startswith("PALLASITE_") and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"one of {', '.join(known)}"
            checks.append(Check(variable, "no option reads this variable", WARNING, remedy))
    return [*checks, _target()]


def _target() -> Check:
    """The target that is configured must exist; the default depends on the GPU."""
    from pallasite.cli.contributions import quiet
    from pallasite.errors import TargetError
    from pallasite.target_selection import find_target

    try:
        name, source = config.source("target")
    except ConfigError:
        return Check("selected target", "not known", WARNING)
    if name is None:
        return Check("selected target", "that of the kernel or the local GPU, else the default")
    try:
        with quiet():
            find_target(name, source)
    except TargetError as error:
        return Check("selected target", error.message, PROBLEM, error.hint or "pallasite targets")
    except ConfigError:
        return Check("selected target", "not known", WARNING)
    return Check("selected target", name)


def _disabled_passes(known: set[str]) -> list[Check]:
    """A name that is no pass makes every compilation fail."""
    disabled, source = config.source("disabled_passes")
    unknown = sorted(set(disabled) - known)
    if not unknown:
        return []
    text = f"{source} names passes that do not exist: {', '.join(unknown)}"
    return [Check("disabled passes", text, PROBLEM, "'pallasite passes' lists those that do")]


def _required_versions() -> dict[str, str]:
    """By library, what Pallasite's own metadata asks for."""
    try:
        requirements = importlib.metadata.requires("pallasite") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    plain = [text for text in requirements if ";" not in text]
    return {re.split(r"[^\w.-]", text, maxsplit=1)[0]: text for text in plain}


def _agreement() -> Check:
    """jax and jaxlib of different versions fail in obscure ways."""
    versions = []
    for name in ("jax", "jaxlib"):
        try:
            versions.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            return Check("jax and jaxlib", "not both installed", PROBLEM, "pip install jax")
    if versions[0] == versions[1]:
        return Check("jax and jaxlib", "versions agree")
    remedy = f"pip install jax=={versions[0]} jaxlib=={versions[0]}"
    return Check("jax and jaxlib", f"versions differ: {', '.join(versions)}", WARNING, remedy)


def _llvm() -> Check:
    try:
        from llvmlite import binding

        binding.initialize_all_targets()
        binding.Target.from_triple("nvptx64-nvidia-cuda")
        version = ".".join(map(str, binding.llvm_version_info))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Check("LLVM", text, PROBLEM, "pip install --force-reinstall llvmlite")
    return Check("LLVM", f"{version}, with code generation for NVPTX")


def _cuda_plugin() -> Check:
    """JAX's CUDA plugin, which also has the bindings of the launcher."""
    for version in ("13", "12"):
        name = f"jax-cuda{version}-plugin"
        try:
            return Check("JAX CUDA plugin", f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Check("JAX CUDA plugin", "not installed; needed only to run on a GPU")


def _version_of(program: pathlib.Path) -> str:
    """The release that a CUDA program says it is of."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run ({type(error).__name__})"
    match = re.search(r"release ([\d.]+)", done.stdout)
    return match[1] if match else "unknown version"
