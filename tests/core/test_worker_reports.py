"""Processes of a session report what there is to tell of a test, and no more."""

from __future__ import annotations

import types

import pytest
from tests import worker_reports


class WorkerInteractor:
    """That of pytest-xdist, as far as it is needed."""

    def __init__(self):
        self.sent = []

    def sendevent(self, name, **values):
        self.sent.append((name, values))


def sent(**options):
    """What arrives of some events."""
    interactor = WorkerInteractor()
    config = types.SimpleNamespace(
        getoption=lambda name, default: options.get(name, default),
        pluginmanager=types.SimpleNamespace(get_plugins=lambda: [object(), interactor]),
    )
    worker_reports.be_brief(config)
    interactor.sendevent("logstart", nodeid="a")
    for outcome in ("passed", "failed", "skipped"):
        for when in ("setup", "call", "teardown"):
            for sections in ([], [("stdout", "text")]):
                data = {
                    "outcome": outcome,
                    "when": when,
                    "sections": sections,
                    "keywords": {"k": 1},
                }
                interactor.sendevent("testreport", data=data)
    return interactor.sent


@pytest.mark.parametrize("option", ["durations", "xmlpath"])
def test_options_that_need_everything(option):
    assert len(sent(**{option: 3})) == 1 + 3 * 3 * 2


def test_reports():
    (start, values), *reports = sent(durations=None, xmlpath=None)
    assert (start, values) == ("logstart", {"nodeid": "a"})
    found = [values["data"] for _, values in reports]
    assert len(found) == 3 * 3 * 2 - 2
    for one in found:
        assert one["outcome"] != "passed" or one["when"] == "call" or one["sections"]
        assert one["keywords"] == ({} if one["outcome"] == "passed" else {"k": 1})
