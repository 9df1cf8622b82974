"""Installs packages into the environment of the Python that runs it, by uv if it is there.

Usage: ``python tools/install_packages.py ARGUMENTS``, with the arguments of ``pip install``.

uv ignores what its user has told pip: the variables ``PIP_*`` and the files ``pip.conf``. What they
say about where packages come from is therefore handed to uv in variables of its own, unless the
user has set these. If there is a setting that uv has no counterpart for, pip is used.
"""

from __future__ import annotations

import configparser
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

#: The oldest uv whose ``pip install`` knows all arguments used here (``--group``).
UV_VERSION = (0, 8)

#: Setting of pip -> variables of uv. Several values are separated by spaces on both sides, but for
#: ``UV_FIND_LINKS``.
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX",),
    "extra-index-url": ("UV_INDEX",),
    "find-links": ("UV_FIND_LINKS",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "constraint": ("UV_CONSTRAINT",),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "retries": ("UV_HTTP_RETRIES",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
}

#: Settings that may be fractions, but not to uv.
WHOLE_NUMBERS = ("timeout", "default-timeout", "retries")

#: Variables by which a user tells uv itself where packages come from.
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")

#: Settings of pip that make no difference to what is installed.
WITHOUT_EFFECT = {
    "break-system-packages",
    "cache-dir",
    "disable-pip-version-check",
    "log",
    "no-cache-dir",
    "no-color",
    "no-compile",
    "no-input",
    "no-python-version-warning",
    "no-warn-conflicts",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "root-user-action",
    "verbose",
}

#: Settings of pip that would install elsewhere than into this environment.
DESTINATIONS = ("prefix", "root", "target", "user")


def main(arguments: list[str]) -> int:
    """Installs packages; returns the exit status of uv or pip."""
    settings = pip_settings(os.environ, pip_files(os.environ))
    uv = shutil.which("uv")
    if uv is not None:
        variables, obstacles = uv_variables(settings, os.environ)
        if uv_version(uv) < UV_VERSION:
            obstacles.append(f"uv is older than {'.'.join(map(str, UV_VERSION))}")
        if not obstacles:
            # uv needs no pip in the environment, but its users do.
            command = [uv, "pip", "install", "--python", sys.executable, "pip", *arguments]
            return call(command, {**os.environ, **variables})
        print(f"pip is used, not uv: {', '.join(obstacles)}")
    return install_by_pip(arguments)


def install_by_pip(arguments: list[str]) -> int:
    """Runs pip, whatever else it is told about where to install."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    elsewhere = {f"PIP_{name.upper()}" for name in DESTINATIONS}
    environment = {n: v for n, v in os.environ.items() if n not in elsewhere} | {"PIP_USER": "0"}
    if importlib.util.find_spec("pip") is None:
        call([sys.executable, "-m", "ensurepip"], environment)
    if "--group" in arguments and call([*pip, "install", "pip>=25.1"], environment):
        return 1
    return call([*pip, "install", "--no-compile", *arguments], environment)


def call(command: list[str], environment: Mapping[str, str]) -> int:
    """Runs a command; returns its exit status."""
    sys.stdout.flush()
    return subprocess.run(command, env=environment).returncode


def uv_version(uv: str) -> tuple[int, ...]:
    """The version of the program ``uv``; empty if it does not say."""
    said = subprocess.run([uv, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


def uv_variables(
    settings: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """What makes uv follow settings of pip.

    Args:
      settings: of pip, as :func:`pip_settings` gives them.
      environment: the user's variables; those of uv go before.

    Returns:
      Variables for uv, and the settings that it has no counterpart for.
    """
    variables: dict[str, str] = {}
    obstacles: list[str] = []
    own_index = any(name in environment for name in INDEX_VARIABLES)
    for name, value in settings.items():
        if name in VARIABLES:
            if own_index and name in ("index-url", "extra-index-url"):
                continue
            if name == "find-links":  # A folder that does not exist is an error to uv.
                value = ",".join(link for link in value.split() if is_there(link))
            if name in WHOLE_NUMBERS and not value.isdecimal():
                obstacles.append(f"pip's setting {name} is no whole number")
            elif value:
                variables |= dict.fromkeys(VARIABLES[name], " ".join(value.split()))
        elif name not in WITHOUT_EFFECT and name not in DESTINATIONS:
            obstacles.append(f"there is no counterpart of pip's setting {name}")
    if "UV_INDEX" in variables:
        # All indexes are equal to pip; uv would take what the first has, however old.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {n: v for n, v in variables.items() if n not in environment}, obstacles


def is_there(link: str) -> bool:
    """Whether a place is remote or exists."""
    if "://" in link and not link.startswith("file://"):
        return True
    return pathlib.Path(link.removeprefix("file://")).expanduser().exists()


def pip_files(environment: Mapping[str, str]) -> list[pathlib.Path]:
    """Where pip looks for settings on Linux; later files go before earlier ones."""
    named = environment.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home = pathlib.Path.home()
    shared = environment.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    own = pathlib.Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    files = [pathlib.Path(folder, "pip/pip.conf") for folder in shared.split(os.pathsep)]
    files += [
        pathlib.Path("/etc/pip.conf"),
        home / ".pip/pip.conf",
        own / "pip/pip.conf",
        pathlib.Path(sys.prefix, "pip.conf"),
    ]
    return [*files, pathlib.Path(named)] if named else files


def pip_settings(environment: Mapping[str, str], files: list[pathlib.Path]) -> dict[str, str]:
    """Settings for ``pip install``, by the names of its options; variables go before files.

    Args:
      environment: the variables.
      files: as :func:`pip_files` gives them; those that do not exist have no settings.
    """
    settings: dict[str, str] = {}
    parsers = []
    for file in files:
        parser = configparser.RawConfigParser()
        parser.read(file)
        parsers.append(parser)
    for section in ("global", "install"):
        for parser in parsers:
            if parser.has_section(section):
                settings |= {n.replace("_", "-"): v for n, v in parser.items(section)}
    for name, value in environment.items():
        if name.startswith("PIP_") and name != "PIP_CONFIG_FILE":
            settings[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return {name: value for name, value in settings.items() if value.strip()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
