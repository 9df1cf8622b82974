"""The order in which a process of pytest-xdist imports modules of tests: each process needs all.

Where the modules were not compiled yet, one process goes through them forwards and another one
backwards: from the middle on, each finds compiled what the other one has imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator

import pytest


def share_work(config: pytest.Config) -> None:
    """Makes every other process go backwards, if all tests come from one folder."""
    worker = getattr(config, "workerinput", {}).get("workerid", "gw0")
    if int(worker.removeprefix("gw")) % 2 and len(config.args) == 1:
        config.pluginmanager.register(_Backwards())


class _Backwards:
    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if isinstance(collector, pytest.Directory) and report.result:
            report.result.reverse()
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """All processes have the tests in the same order."""
        modules = [list(tests) for _, tests in itertools.groupby(items, lambda one: one.path)]
        items[:] = itertools.chain.from_iterable(reversed(modules))
