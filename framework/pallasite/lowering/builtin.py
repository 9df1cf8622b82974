"""Registers the built-in rules through the same hooks that plugins use."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from pallasite.hookspecs import hookimpl
from pallasite.registry import InferenceRule, LayoutRule, LoweringRule, ResourceRule, RuleSet

RULE_MODULES = (
    "arithmetic",
    "atomics",
    "barriers",
    "cluster_launch",
    "cluster_stores",
    "control_flow",
    "copies",
    "debug",
    "ids",
    "inline",
    "loads",
    "mma",
    "references",
    "reductions",
    "semaphores",
    "shape",
    "warp",
)

INFERENCE_MODULES = ("control_flow", "elementwise", "memory", "other", "shape")


def _rule_sets() -> list[RuleSet]:
    return [
        importlib.import_module(f"pallasite.lowering.rules.{name}").rules for name in RULE_MODULES
    ]


@hookimpl
def pallasite_lowering_rules() -> Iterable[LoweringRule]:
    """The built-in lowering rules."""
    return [rule for rules in _rule_sets() for rule in rules.lowering_rules]


@hookimpl
def pallasite_resource_rules() -> Iterable[ResourceRule]:
    """The built-in resource rules."""
    return [rule for rules in _rule_sets() for rule in rules.resource_rules]


@hookimpl
def pallasite_layout_rules() -> Iterable[LayoutRule]:
    """The built-in layout rules."""
    return [rule for rules in _rule_sets() for rule in rules.layout_rules]


@hookimpl
def pallasite_inference_rules() -> Iterable[InferenceRule]:
    """The built-in rules of layout inference."""
    modules = [
        importlib.import_module(f"pallasite.lowering.inference.rules.{name}")
        for name in INFERENCE_MODULES
    ]
    return [rule for module in modules for rule in module.rules.inference_rules]
