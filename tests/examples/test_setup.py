"""``tools/setup`` with a Python and a uv that only write down what they are asked to do."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Mapping

import jax
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ("bash", "cat", "chmod", "cksum", "cp", "dirname", "env", "mkdir", "rm", "sed", "tail")

#: Makes environments that consist of itself, and records calls of pip. The helper believes that
#: this is the Python that runs it.
PYTHON = """#!{bash}
if [[ $1 == -m && $2 == venv ]]; then
    mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python"
elif [[ $1 == -m ]]; then
    {{ echo "pip ${{*:3}}"; env | cat; }} >>"$RECORD"
    echo "WARNING: Location '/nowhere' is ignored" >&2
    if [[ -n ${{FAIL:-}} ]]; then echo "ERROR: No matching distribution"; exit 1; fi
elif [[ $1 == *install_packages.py ]]; then
    exec {python} -c 'import runpy, sys
sys.executable = sys.argv[1]
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")' "$0" "$@"
else
    exec {python} "$@"
fi
"""

UV = """#!{bash}
case $1 in
--version) echo "uv ${{UV_TEST_VERSION:-0.9.1}}" ;;
venv)
    echo "Using CPython" >&2
    mkdir -p "${{@: -1}}/bin" && cp {folder}/python3.12 "${{@: -1}}/bin/python" ;;
pip)
    {{ echo "uv $*"; env | cat; }} >>"$RECORD"
    echo "Resolved 20 packages" >&2
    if [[ -n ${{FAIL:-}} ]]; then echo "error: no such package"; exit 2; fi ;;
esac
"""


class Checkout:
    """A copy of what ``tools/setup`` reads, and a PATH with nothing but what it needs."""

    def __init__(self, folder: pathlib.Path, uv: bool):
        self.folder = folder / "checkout"
        self.record = folder / "record"
        self.home = folder / "home"
        self.home.mkdir()
        programs = folder / "bin"
        programs.mkdir()
        for name in PROGRAMS:
            (programs / name).symlink_to(shutil.which(name))
        names = {"bash": shutil.which("bash"), "python": sys.executable, "folder": programs}
        self._write(programs / "python3.12", PYTHON.format_map(names))
        self._write(programs / "nvidia-smi", f"#!{names['bash']}\nexit 9\n")
        if uv:
            self._write(programs / "uv", UV.format_map(names))
        self.path = str(programs)
        files = ["tools/setup", "tools/install_packages.py", "pyproject.toml"]
        files += [str(file.relative_to(ROOT)) for file in ROOT.glob("plugins/*/pyproject.toml")]
        for name in files:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)

    @staticmethod
    def _write(file: pathlib.Path, text: str) -> None:
        file.write_text(text)
        file.chmod(0o755)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs ``tools/setup``; the record is that of this run alone."""
        self.record.unlink(missing_ok=True)
        environment = {
            "PATH": self.path,
            "HOME": str(self.home),
            "PIP_CONFIG_FILE": os.devnull,
            "RECORD": str(self.record),
            "PYTHONPATH": os.pathsep.join(sys.path),
            **variables,
        }
        return subprocess.run(
            [self.folder / "tools/setup", *arguments],
            capture_output=True,
            text=True,
            env=environment,
        )

    def calls(self) -> list[tuple[str, dict[str, str]]]:
        """The calls of uv and pip: their arguments, their environment."""
        calls: list[tuple[str, dict[str, str]]] = []
        for line in self.record.read_text().splitlines() if self.record.exists() else []:
            if line.startswith(("uv ", "pip ")):
                calls.append((line, {}))
            else:
                name, _, value = line.partition("=")
                calls[-1][1][name] = value
        return calls

    def commands(self) -> list[str]:
        return [command for command, _ in self.calls()]

    @property
    def stamps(self) -> set[str]:
        return {file.name for file in self.folder.glob(".venv/.setup-stamp*")}


@pytest.fixture
def with_uv(tmp_path: pathlib.Path) -> Checkout:
    return Checkout(tmp_path, uv=True)


@pytest.fixture
def without_uv(tmp_path: pathlib.Path) -> Checkout:
    return Checkout(tmp_path, uv=False)


PLUGINS = ("blackwell", "hopper", "multigpu", "simulator")
PROJECTS = " -e ".join(("-e .[assembler]", *(f"./plugins/{name}" for name in PLUGINS)))
DEMO = "installing Pallasite and its plugins into .venv (its output: build/setup.log)\n"


def test_uv_is_used_and_says_nothing(with_uv: Checkout):
    done = with_uv.run("demo")
    assert (done.returncode, done.stdout, done.stderr) == (0, DEMO, "")
    # The Python is that of the environment, so nothing is installed elsewhere.
    assert with_uv.commands() == [f"uv pip install --python .venv/bin/python pip {PROJECTS}"]
    assert "Resolved 20 packages" in (with_uv.folder / "build/setup.log").read_text()


def test_pip_is_used_without_uv_and_says_nothing(without_uv: Checkout):
    done = without_uv.run("demo")
    assert (done.returncode, done.stdout, done.stderr) == (0, DEMO, "")
    assert without_uv.commands() == [
        f"pip --disable-pip-version-check install --no-compile {PROJECTS}"
    ]
    assert "WARNING: Location" in (without_uv.folder / "build/setup.log").read_text()


def test_demo_is_set_up_once(with_uv: Checkout):
    with_uv.run("demo")
    done = with_uv.run("demo")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert with_uv.commands() == []
    (with_uv.folder / "pyproject.toml").open("a").write("# changed\n")
    with_uv.run("demo")
    assert len(with_uv.commands()) == 1


def test_development_is_more_than_the_demonstration(with_uv: Checkout):
    with_uv.run("demo")
    assert with_uv.run().returncode == 0
    assert with_uv.commands() == [
        f"uv pip install --python .venv/bin/python pip {PROJECTS} --group dev",
        "uv pip install --python .venv/bin/python pip --no-deps"
        f" jax-cuda13-plugin=={jax.__version__}",
    ]
    assert with_uv.stamps == {".setup-stamp-demo", ".setup-stamp-dev"}
    with_uv.run("demo")
    assert with_uv.commands() == []


def test_demonstration_after_development_does_nothing(without_uv: Checkout):
    without_uv.run("dev")
    first, second, *_ = without_uv.commands()
    assert first == "pip --disable-pip-version-check install pip>=25.1"
    assert second.endswith(f"{PROJECTS} --group dev")
    without_uv.run("demo")
    assert without_uv.commands() == []


def test_unknown_profile(with_uv: Checkout):
    done = with_uv.run("everything")
    assert done.returncode == 2
    assert done.stderr == "tools/setup: no profile 'everything'; there are demo and dev\n"


@pytest.mark.parametrize("uv", [False, True])
def test_failure_shows_the_log_and_leaves_no_stamp(tmp_path: pathlib.Path, uv: bool):
    checkout = Checkout(tmp_path, uv)
    done = checkout.run("demo", FAIL="1")
    assert (done.returncode, done.stdout) == (1, DEMO)
    reason = "error: no such package" if uv else "ERROR: No matching distribution"
    assert "The end of build/setup.log:\n" in done.stderr
    assert f"    {reason}\n" in done.stderr
    assert "Is a package index reachable?" in done.stderr
    assert checkout.stamps == set()
    assert checkout.run("demo").returncode == 0
    assert checkout.stamps == {".setup-stamp-demo"}


def test_no_python(with_uv: Checkout):
    for name in ("python3.12", "uv"):
        (pathlib.Path(with_uv.path) / name).unlink()
    done = with_uv.run("demo")
    assert done.returncode == 1
    assert "tools/setup: cannot create .venv\n" in done.stderr
    assert "Put a Python >= 3.12" in done.stderr
    assert with_uv.stamps == set()


def test_uv_follows_the_settings_of_pip(with_uv: Checkout, tmp_path: pathlib.Path):
    settings = {
        "PIP_INDEX_URL": "https://mirror.example/simple",
        "PIP_EXTRA_INDEX_URL": "https://a.example/simple\n  file:///b/simple",
        "PIP_FIND_LINKS": f"/does/not/exist {tmp_path} https://wheels.example/",
        "PIP_CERT": "/etc/certificates.crt",
        "PIP_DEFAULT_TIMEOUT": "180",
        "PIP_NO_INPUT": "1",
    }
    assert with_uv.run("demo", **settings).returncode == 0
    ((command, environment),) = with_uv.calls()
    assert command.startswith("uv pip install")
    expected = {
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "https://a.example/simple file:///b/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": f"{tmp_path},https://wheels.example/",
        "SSL_CERT_FILE": "/etc/certificates.crt",
        "UV_HTTP_TIMEOUT": "180",
    }
    assert {name: environment.get(name) for name in expected} == expected


def test_what_uv_is_told_itself_goes_first(with_uv: Checkout):
    settings = {"PIP_INDEX_URL": "https://pip.example/", "UV_INDEX_URL": "https://uv.example/"}
    with_uv.run("demo", **settings)
    ((_, environment),) = with_uv.calls()
    assert environment["UV_INDEX_URL"] == "https://uv.example/"
    assert "UV_DEFAULT_INDEX" not in environment


@pytest.mark.parametrize(
    "variables",
    [{"PIP_ONLY_BINARY": ":all:"}, {"PIP_TIMEOUT": "1.5"}, {"UV_TEST_VERSION": "0.7.22"}],
)
def test_pip_is_used_where_uv_cannot_follow(with_uv: Checkout, variables: Mapping[str, str]):
    assert with_uv.run("demo", **variables).returncode == 0
    ((command, environment),) = with_uv.calls()
    assert command.startswith("pip ")
    assert variables.items() <= environment.items()
    assert "pip is used, not uv: " in (with_uv.folder / "build/setup.log").read_text()


def test_pip_gets_its_settings_but_no_other_destination(without_uv: Checkout):
    settings = {"PIP_INDEX_URL": "https://mirror.example/simple", "PIP_NO_INDEX": "0"}
    without_uv.run("demo", **settings, PIP_TARGET="/elsewhere", PIP_USER="1")
    ((_, environment),) = without_uv.calls()
    assert settings.items() <= environment.items()
    assert "PIP_TARGET" not in environment
    assert environment["PIP_USER"] == "0"


@pytest.fixture(scope="module")
def helper() -> types.ModuleType:
    path = ROOT / "tools/install_packages.py"
    spec = importlib.util.spec_from_file_location("install_packages", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_of_pip_are_found_in_its_order(helper: types.ModuleType, tmp_path: pathlib.Path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("[global]\nindex-url = https://one/\ntimeout = 5\n[list]\nformat = json\n")
    second.write_text(
        "[global]\nindex_url = https://two/\nextra-index-url =\n    https://a/\n    https://b/\n"
        "[install]\ntimeout = 7\n"
    )
    variables = {"PIP_CERT": "/c", "PIP_PROXY": " ", "PIP_CONFIG_FILE": "/f", "HOME": "/"}
    assert helper.pip_settings(variables, [first, tmp_path / "none", second]) == {
        "index-url": "https://two/",
        "extra-index-url": "\nhttps://a/\nhttps://b/",
        "timeout": "7",
        "cert": "/c",
    }
    variables["PIP_INDEX_URL"] = "https://three/"
    assert helper.pip_settings(variables, [first])["index-url"] == "https://three/"


def test_files_of_pip(helper: types.ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    files = [str(file) for file in helper.pip_files({})]
    assert files == [
        "/etc/xdg/pip/pip.conf",
        "/etc/pip.conf",
        "/home/me/.pip/pip.conf",
        "/home/me/.config/pip/pip.conf",
        f"{sys.prefix}/pip.conf",
    ]
    assert helper.pip_files({"PIP_CONFIG_FILE": os.devnull}) == []
    chosen = helper.pip_files({"PIP_CONFIG_FILE": "/my.conf", "XDG_CONFIG_HOME": "/x"})
    assert [str(file) for file in chosen][3:] == [
        "/x/pip/pip.conf",
        f"{sys.prefix}/pip.conf",
        "/my.conf",
    ]


def test_demonstration_needs_none_of_what_tests_need():
    projects = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    settings = [tomllib.loads(file.read_text()) for file in projects]
    wanted = [text for one in settings for text in one["project"]["dependencies"]]
    wanted += settings[0]["project"]["optional-dependencies"]["assembler"]
    groups = settings[0]["dependency-groups"]
    assert groups["dev"] == [{"include-group": "test"}, {"include-group": "lint"}]
    only_tests = {"absl-py", "filecheck", "hypothesis", "mypy", "pytest", "ruff", "scipy", "triton"}
    developers = {name_of(text) for text in groups["test"] + groups["lint"]}
    assert only_tests <= developers
    assert not {name_of(text) for text in wanted} & only_tests


def name_of(requirement: str) -> str:
    return requirement.split(">")[0].split("[")[0].split(";")[0].strip()


@pytest.mark.parametrize(
    ("goal", "profile", "program"),
    [
        ("demo", "demo", "examples/demo.py"),
        ("demo-all", "demo", "examples/demo.py --all"),
        ("test", "dev", "-m pytest"),
        ("lint", "dev", "-m mypy"),
    ],
)
def test_goals_of_make(goal: str, profile: str, program: str):
    # The tests may have been started by make.
    removed = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "PYTHON", "ARGS")
    environment = {name: value for name, value in os.environ.items() if name not in removed}

    def commands(*arguments: str) -> list[str]:
        make = ["make", "--dry-run", goal, *arguments]
        done = subprocess.run(
            make, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    assert commands()[0] == f"tools/setup {profile}"
    assert any(program in line for line in commands())
    own = commands("PYTHON=/my/python")
    assert not any("tools/setup" in line for line in own)
    assert any(line.startswith(f"/my/python {program}") for line in own)
