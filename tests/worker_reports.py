"""What processes of pytest-xdist report of tests that pass: that they did.

Each test has three reports, which are written, sent and read one by one; for many tests of a
millisecond that takes longer than they do.
"""

from __future__ import annotations

from typing import Any

import pytest


def be_brief(config: pytest.Config) -> None:
    """This process sends no reports of setups and teardowns where there is nothing to tell, unless
    an option asks for how long they took, and no keywords of tests that passed."""
    if config.getoption("durations", None) or config.getoption("xmlpath", None):
        return
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor" and hasattr(plugin, "sendevent"):
            plugin.sendevent = _briefly(plugin.sendevent)


def _briefly(send: Any) -> Any:
    def send_some(name: str, **values: Any) -> None:
        report = values.get("data", {}) if name == "testreport" else {}
        if report.get("outcome") == "passed":
            if report["when"] != "call" and not report["sections"]:
                return
            values["data"] = {**report, "keywords": {}}
        send(name, **values)

    return send_some
