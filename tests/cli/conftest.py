"""Running the command line in this process."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from pallasite.cli import main

KERNELS = pathlib.Path(__file__).parent / "kernels_for_cli.py"


@dataclasses.dataclass(frozen=True)
class Result:
    """What one run did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The output as JSON."""
        return json.loads(self.out)


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Runs ``pallasite`` with some arguments; its cache is in a folder of the test."""
    monkeypatch.setenv("PALLASITE_CACHE_DIR", str(tmp_path / "cache"))

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return Result(status, *capsys.readouterr())

    return run


@pytest.fixture
def kernel():
    """Gives ``FILE::KERNEL`` for a kernel of the file for these tests."""
    return lambda name: f"{KERNELS}::{name}"
