"""The entry point: the parser of all subcommands, and how errors and warnings are shown."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

import pallasite
from pallasite.errors import InternalError, PallasiteError

PROGRAM = "pallasite"

COMMANDS = ("compile", "inspect", "run", "targets", "plugins", "passes", "doctor", "cache")
"""The subcommands, each a module of its name, in the order of ``pallasite --help``, which shows the
first line of each module's docstring."""

STATUS_ERROR = 1
STATUS_INTERRUPTED = 130
STATUS_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, 1 for an error, 2 for wrong usage.

    Args:
      argv: the arguments after the program's name; by default those of the process.
    """
    try:
        arguments = make_parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the help or what is wrong
        return stop.code if isinstance(stop.code, int) else STATUS_ERROR
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            status: int = arguments.run(arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader, such as ``head``, has seen enough. Nothing may be flushed at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return STATUS_BROKEN_PIPE
        except KeyboardInterrupt:
            return STATUS_INTERRUPTED
        except PallasiteError as error:
            if arguments.traceback or isinstance(error, InternalError):
                traceback.print_exception(error)
            else:
                print(f"error: {error}", file=sys.stderr)
            return STATUS_ERROR
        return status


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--traceback", action="store_true", help="show the Python traceback of an error"
    )
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Compiles, inspects and runs GPU kernels written in JAX Pallas. Needs no GPU.",
        epilog=f"'{PROGRAM} COMMAND --help' describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {pallasite.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"pallasite.cli.{name}")
        summary, _, details = (module.__doc__ or "").partition("\n")
        subparser = subparsers.add_parser(
            name,
            help=summary.rstrip("."),
            description=summary,
            epilog=details.strip() or None,
            parents=[common],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.set_defaults(run=module.run)
        module.add_arguments(subparser)
    return parser


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line without the place in Pallasite's own source that issued the warning."""
    print(f"warning: {message}", file=file or sys.stderr)
