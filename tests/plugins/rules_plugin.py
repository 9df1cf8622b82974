"""A plugin of one rule set, for tests of rules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from pallasite.plugin import RuleSet, hookimpl, plugins
from pallasite.plugin.jaxprs import JaxprPrimitive


class RulesPlugin:
    """Contributes the rules of a set, and what primitives do with jaxprs."""

    def __init__(self, rules: RuleSet, jaxprs: Sequence[JaxprPrimitive] = ()):
        self.rules = rules
        self.jaxprs = jaxprs

    @hookimpl
    def pallasite_lowering_rules(self):
        return self.rules.lowering_rules

    @hookimpl
    def pallasite_resource_rules(self):
        return self.rules.resource_rules

    @hookimpl
    def pallasite_layout_rules(self):
        return self.rules.layout_rules

    @hookimpl
    def pallasite_inference_rules(self):
        return self.rules.inference_rules

    @hookimpl
    def pallasite_jaxpr_primitives(self):
        return self.jaxprs


@contextlib.contextmanager
def registered(
    rules: RuleSet, name: str = "made-up", jaxprs: Sequence[JaxprPrimitive] = ()
) -> Iterator[None]:
    """Has a plugin of these rules in this process."""
    plugins.register(RulesPlugin(rules, jaxprs), name=name)
    try:
        yield
    finally:
        plugins.unregister(name)
