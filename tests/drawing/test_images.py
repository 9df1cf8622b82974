"""The pictures in docs/images are what the commands beside them in the documents draw."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest

from pallasite import cli

ROOT = pathlib.Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
COMMANDS = {
    command.split("docs/images/")[1].split()[0]: command
    for page in sorted((ROOT / "docs").glob("*.md"))
    for command in re.findall(r"^    pallasite (.*docs/images/.*)$", page.read_text(), re.MULTILINE)
}


def test_every_image_has_a_command_and_a_place():
    assert set(COMMANDS) == {path.name for path in IMAGES.iterdir()}
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for name in COMMANDS:
        assert f"](images/{name})" in pages


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_image_is_up_to_date(name, tmp_path):
    words = shlex.split(
        COMMANDS[name].replace(f"docs/images/{name}", shlex.quote(str(tmp_path / name)))
    )
    assert cli.main(words) == 0
    assert (tmp_path / name).read_text() == (IMAGES / name).read_text(), (
        f"docs/images/{name} is out of date; run: pallasite {COMMANDS[name]}"
    )
