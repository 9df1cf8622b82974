"""Check the installation, and say what to do about each problem.

Exit status 1 only if kernels cannot be compiled here. What is marked '!' is missing for something
that is optional, such as running on a GPU or counting registers.
"""

from __future__ import annotations

import argparse
import dataclasses

from pallasite.cli import doctor_devices, doctor_executors, doctor_software, output
from pallasite.cli.checks import PROBLEM, WARNING, Check

_MARKS = {PROBLEM: "X", WARNING: "!"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Runs all checks."""
    found = doctor_devices.ask_jax()
    executors, choices = doctor_executors.executors(found)
    sections: dict[str, list[Check]] = {
        "software": doctor_software.libraries(),
        "devices": doctor_devices.devices(found),
        "executors": executors,
        "tools": doctor_software.tools(),
        "plugins": doctor_software.plugins(),
        "cache": doctor_software.cache(),
        "configuration": doctor_software.configuration(),
    }
    checks = [check for section in sections.values() for check in section]
    essential = [check for check in checks if check.state == PROBLEM]
    if arguments.json:
        report = {
            title: [dataclasses.asdict(check) for check in section]
            for title, section in sections.items()
        }
        listed = doctor_executors.as_json(choices)
        output.print_json({"healthy": not essential, "checks": report, "executors": listed})
        return 1 if essential else 0
    for title, section in sections.items():
        print(title)
        width = max((len(check.name) for check in section), default=0)
        for check in section:
            print(f"  {_MARKS.get(check.state, ' ')} {check.name:<{width}}  {check.text}".rstrip())
            if check.remedy:
                print(f"    {'':<{width}}  try: {check.remedy}")
        if title == "executors" and choices:
            print(output.indented(doctor_executors.table(choices), by=4))
        print()
    optional = sum(check.state == WARNING for check in checks)
    if essential:
        print(f"Kernels cannot be compiled: {', '.join(check.name for check in essential)}.")
    else:
        print("Kernels can be compiled.")
    if optional:
        print(f"Optional, marked '!': {optional} to see to.")
    return 1 if essential else 0
