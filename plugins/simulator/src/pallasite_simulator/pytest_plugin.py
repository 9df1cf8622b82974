"""For pytest: one and the same test of a kernel runs on the simulator or on a GPU.

Mark tests that run kernels with ``@pytest.mark.runs_kernels``. By default they run on the GPU if
JAX has one, else on the simulator; ``pytest --executor=simulator`` and ``--executor=gpu`` say which
it must be. On the GPU, such tests also get the mark ``gpu``, for ``-m gpu``.

On the simulator, kernels are run with the sanitizer: what it finds makes the test fail. The option
``--no-sanitize`` switches it off, ``@pytest.mark.runs_kernels(sanitize=False)`` for one test. That
all of an output is written is for the test to check, or with ``sanitize="all"`` for the sanitizer.

Errors of kernels inside ``jax.jit`` that reach pytest come out with their own type. The fixture
``pallasite_executor`` is the executor's name, ``"simulator"`` or ``"gpu"``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

MARK = "runs_kernels"
EXECUTORS = ("auto", "simulator", "gpu")

_chosen = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("pallasite")
    group.addoption(
        "--executor",
        choices=EXECUTORS,
        default="auto",
        help="what runs kernels in tests marked runs_kernels: the GPU if JAX has one, else the"
        " simulator (auto), or the one that is named",
    )
    group.addoption(
        "--no-sanitize",
        action="store_true",
        help="run kernels without the simulator's sanitizer in tests marked runs_kernels",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Describes the marks, and keeps JAX on the CPU for the simulator."""
    config.addinivalue_line(
        "markers",
        f"{MARK}(sanitize=True): runs kernels, on what --executor says",
    )
    config.addinivalue_line("markers", "gpu: runs on a CUDA GPU")
    if config.getoption("--executor") == "simulator":
        os.environ["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules:
            sys.modules["jax"].config.update("jax_platforms", "cpu")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Finds the executor, and gives tests that run on the GPU their mark, before ``-m`` selects."""
    marked = [item for item in items if item.get_closest_marker(MARK)]
    if marked and _executor(config) == "gpu":
        for item in marked:
            item.add_marker("gpu")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Runs a marked test with the sanitizer; errors of kernels come out as they are."""
    mark = item.get_closest_marker(MARK)
    if mark is None:
        return (yield)
    from pallasite import kernel_errors
    from pallasite.plugin import config
    from pallasite_simulator.sanitizer.groups import IN_TESTS

    sanitize = mark.kwargs.get("sanitize", True) and not item.config.getoption("--no-sanitize")
    if sanitize is True:
        sanitize = IN_TESTS
    with config.scoped(sanitize=sanitize), kernel_errors():
        return (yield)


@pytest.fixture
def pallasite_executor(pytestconfig: pytest.Config) -> str:
    """What runs the kernels of tests that are marked: ``"simulator"`` or ``"gpu"``."""
    return _executor(pytestconfig)


def _executor(config: pytest.Config) -> str:
    """The executor; JAX is imported only for those who need to know.

    Raises:
      pytest.UsageError: the GPU was asked for, and there is none.
    """
    if _chosen not in config.stash:
        import jax

        asked = config.getoption("--executor")
        backend = jax.default_backend()
        if asked == "gpu" and backend != "gpu":
            raise pytest.UsageError(
                f"--executor=gpu: JAX has no CUDA GPU here, it is on the platform {backend!r}"
            )
        config.stash[_chosen] = "gpu" if backend == "gpu" else "simulator"
    return config.stash[_chosen]
