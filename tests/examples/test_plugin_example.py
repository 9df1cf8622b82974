"""The example plugin works as a distribution of its own, in a process of its own."""

from __future__ import annotations

import pathlib
import subprocess
import textwrap

import installation
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECT = ROOT / "examples" / "plugin"

KERNEL = """
import jax
import jax.numpy as jnp
import pallasite
from pallasite import gpu as plgpu

def body(x_ref, out_ref):
    out_ref[...] = jnp.zeros((128,), jnp.int32) + plgpu.count_true(x_ref[...] > 0)

kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.int32))
x = jax.ShapeDtypeStruct((1024,), jnp.float32)
compiled = pallasite.compile(kernel, x, target="sm_90")
print(compiled.ptx)
print("shared memory:", compiled.resources.shared_memory_bytes)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the installed distribution."""
    folder = tmp_path_factory.mktemp("installed")
    installation.install(PROJECT, folder)
    return folder


def run_python(code: str, folder: pathlib.Path, **variables: str) -> subprocess.CompletedProcess:
    """Runs code in a new process in which the distribution is installed."""
    settings = {"PALLASITE_CACHE": "off", "JAX_PLATFORMS": "cpu", **variables}
    return installation.run_python(["-c", textwrap.dedent(code)], folder, **settings)


def test_kernel_uses_the_plugin(installed: pathlib.Path):
    result = run_python(KERNEL, installed)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("vote.sync.ballot.b32") == 8
    assert "// signed by pallasite-vote: body for sm_90" in result.stdout
    assert "shared memory: 1024" in result.stdout


def test_its_pass_can_be_switched_off(installed: pathlib.Path):
    result = run_python(KERNEL, installed, PALLASITE_DISABLE_PASSES="vote-sign")
    assert result.returncode == 0, result.stderr
    assert "vote.sync.ballot.b32" in result.stdout
    assert "signed by" not in result.stdout


def test_without_the_plugin_its_name_is_missing(installed: pathlib.Path):
    result = run_python(KERNEL, installed, PALLASITE_DISABLE_PLUGINS="vote")
    assert result.returncode != 0
    assert "MissingNameError: pallasite.gpu has no name 'count_true'" in result.stderr


def test_without_the_plugin_its_rule_is_missing(installed: pathlib.Path):
    code = KERNEL.replace("plgpu.count_true", "pallasite_vote.count_true")
    code = "import pallasite_vote\n" + code
    assert run_python(code, installed).returncode == 0
    result = run_python(code, installed, PALLASITE_DISABLE_PLUGINS="vote")
    assert result.returncode != 0
    assert "MissingRuleError" in result.stderr
    assert "no lowering rule for primitive 'count_true' under WARPGROUP semantics" in result.stderr


def test_command_line_lists_it(installed: pathlib.Path):
    cli = pytest.importorskip("pallasite.cli")
    if not hasattr(cli, "main"):
        pytest.skip("there is no command line")
    code = "import sys; from pallasite.cli import main; sys.exit(main(['plugins']))"
    result = run_python(code, installed)
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "pallasite-vote" in line]
    assert "vote" in line.split()
    assert "0.1.0" in line


def test_registry_knows_where_it_comes_from(installed: pathlib.Path):
    result = run_python(
        """
        from pallasite import plugins
        print([one.distribution for one in plugins.plugins() if one.name == "vote"])
        print([one.plugin for one in plugins.registry().passes("ptx") if one.name == "vote-sign"])
        """,
        installed,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["['pallasite-vote", "0.1.0']", "['vote']"]


def test_needs_a_multiple_of_128_elements(installed: pathlib.Path):
    result = run_python(KERNEL.replace("(1024,)", "(64,)"), installed)
    assert result.returncode != 0
    assert "InvalidValueError" in result.stderr
    assert "count_true needs a multiple of 128 elements" in result.stderr
    # The line is that of the kernel, not one of the plugin.
    assert "InvalidValueError: <string>:8 (body): count_true" in result.stderr


def test_is_under_sixty_lines():
    assert len((PROJECT / "pallasite_vote.py").read_text().splitlines()) < 60
    assert sorted(path.name for path in PROJECT.glob("*.py")) == ["pallasite_vote.py"]


def test_installing_by_hand_gives_the_same_entry_points(tmp_path: pathlib.Path):
    installation.install_by_hand(PROJECT, tmp_path)
    result = run_python(KERNEL, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "vote.sync.ballot.b32" in result.stdout
