"""Rules: which one wins, which contradict each other, and what is said when there is none."""

from __future__ import annotations

import pytest
from core_support import LANE, NEW, OLD, WARP, WARPGROUP, contribution, dedent, names, rule
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import Primitive

from pallasite.conflicts import merge_names
from pallasite.errors import InvalidValueError, MissingRuleError, PluginError
from pallasite.extensions import Contribution, Executor, Pass, Replacement, RuleSet, Semantics
from pallasite.registry import Registry
from pallasite.targets import Target

ADD = Primitive("add")
WGMMA = Primitive("wgmma")


def test_decorators_stack_and_return_the_function():
    rules = RuleSet()

    @rules.lowering(ADD, LANE, WARP, requires=("tma",))
    @rules.lowering(ADD, WARPGROUP)
    @rules.resources(ADD)
    @rules.layout(ADD)
    def lower(ctx):
        return "lowered"

    assert lower(None) == "lowered"
    assert [(one.semantics, str(one.target)) for one in rules.lowering_rules] == [
        (WARPGROUP, "every target"),
        (LANE, "with tma"),
        (WARP, "with tma"),
    ]
    assert rules.resource_rules[0].function is rules.layout_rules[0].function is lower


def test_rule_without_semantics_is_refused():
    with pytest.raises(InvalidValueError, match="does not say for which semantics"):
        RuleSet().lowering(ADD)
    with pytest.raises(InvalidValueError, match="or a Semantics of a plugin"):
        RuleSet().lowering(ADD, "lane")


def test_names_given_as_one_string_are_refused():
    with pytest.raises(InvalidValueError) as error:
        RuleSet().lowering(ADD, LANE, requires="tma")
    assert "requires=('tma',)" in str(error.value)


def test_most_specific_rule_wins():
    general, featured, named = (
        rule(ADD),
        rule(ADD, requires=("tma", "mma")),
        rule(ADD, targets=("new",)),
    )
    one_feature = rule(ADD, requires=("tma",))
    registry = Registry([contribution("pallasite", general, one_feature, featured)])
    assert registry.lowering_rule(ADD, LANE, OLD).function is general.lowering_rules[0].function
    assert registry.lowering_rule(ADD, LANE, NEW).function is featured.lowering_rules[0].function
    registry = Registry([contribution("pallasite", general, featured), contribution("p", named)])
    found = registry.lowering_rule(ADD, LANE, NEW)
    assert (found.function, found.plugin) == (named.lowering_rules[0].function, "p")


@given(st.sets(st.sets(st.sampled_from("abcde")).map(frozenset)), st.sets(st.sampled_from("abcde")))
def test_winner_matches_and_no_other_matching_rule_is_more_specific(requirements, features):
    target = Target(
        name="t", ptx_version=80, compute_capability=(8, 0), features=frozenset(features)
    )
    by_size = {len(required): required for required in requirements}  # no ties
    sets = [rule(ADD, requires=required) for required in by_size.values()]
    registry = Registry([contribution("pallasite", *sets, targets=(target,))])
    fitting = [size for size, required in by_size.items() if required <= features]
    if fitting:
        found = registry.lowering_rule(ADD, LANE, target)
        assert found.target.features == by_size[max(fitting)]
    else:
        assert registry.lowering.find(ADD, LANE, target) is None


def test_lookup_is_cached_per_target_object():
    registry = Registry([contribution("pallasite", rule(ADD, requires=("tma",)))])
    found = registry.lowering_rule(ADD, LANE, NEW)
    assert registry.lowering_rule(ADD, LANE, NEW) is found
    namesake = Target(name="new", ptx_version=86, compute_capability=(9, 0))
    with pytest.raises(MissingRuleError):
        registry.lowering_rule(ADD, LANE, namesake)


def test_equally_specific_rules_of_two_plugins_are_an_error():
    with pytest.raises(PluginError) as error:
        Registry(
            [
                contribution("pallasite"),
                contribution("first", rule(ADD, requires=("tma",))),
                contribution("second", rule(ADD, requires=("mma",))),
            ]
        )
    assert str(error.value) == dedent(
        """
        plugins 'first' and 'second' both register equally specific LANE lowering rules of \
primitive 'add' for target 'new'
          try: list the other plugin in overrides=('first',) of the rule that shall win, or \
switch one off: PALLASITE_DISABLE_PLUGINS=second
        """
    )


def test_equally_specific_rules_that_no_target_has_in_common_are_fine():
    Registry(
        [
            contribution("pallasite"),
            contribution("first", rule(ADD, targets=("old",))),
            contribution("second", rule(ADD, targets=("new",)), rule(ADD, WARP)),
        ]
    )


def test_one_plugin_with_two_equal_rules_is_an_error():
    with pytest.raises(PluginError, match="plugin 'pallasite' registers two equally specific"):
        Registry([contribution("pallasite", rule(ADD), rule(ADD))])


def test_override_settles_a_tie():
    mine = rule(ADD, overrides=("pallasite",))
    for order in (1, -1):
        plugins = [contribution("pallasite", rule(ADD)), contribution("mine", mine)][::order]
        assert Registry(plugins).lowering_rule(ADD, LANE, NEW).plugin == "mine"


def test_override_does_not_beat_a_more_specific_rule():
    registry = Registry(
        [
            contribution("pallasite", rule(ADD, requires=("tma",))),
            contribution("mine", rule(ADD, overrides=("pallasite",))),
        ]
    )
    assert registry.lowering_rule(ADD, LANE, NEW).plugin == "pallasite"


def test_mutual_and_circular_overrides_are_errors():
    with pytest.raises(PluginError, match="'a' and 'b'"):
        Registry(
            [
                contribution("pallasite"),
                contribution("a", rule(ADD, overrides=("b",))),
                contribution("b", rule(ADD, overrides=("a",))),
            ]
        )
    with pytest.raises(PluginError):
        Registry(
            [
                contribution("pallasite"),
                contribution("a", rule(ADD, overrides=("b",))),
                contribution("b", rule(ADD, overrides=("c",))),
                contribution("c", rule(ADD, overrides=("a",))),
            ]
        )


def test_resource_and_layout_rules_conflict_and_override():
    def rules(**options):
        result = RuleSet()
        result.resources(ADD, **options)(lambda ctx: 1)
        result.layout(ADD, **options)(lambda ctx: 1)
        return result

    core = contribution("pallasite")
    message = (
        "plugins 'a' and 'b' both register equally specific resource rules of primitive 'add'"
        " for target 'old'"
    )
    with pytest.raises(PluginError, match=message):
        Registry([core, contribution("a", rules()), contribution("b", rules())])
    registry = Registry(
        [core, contribution("a", rules()), contribution("b", rules(overrides=("a",)))]
    )
    assert registry.resources.find(ADD, LANE, NEW).plugin == "b"
    assert registry.layout_rule(ADD, NEW).plugin == "b"
    assert registry.resources.find(WGMMA, LANE, NEW) is None
    assert registry.layout_rule(WGMMA, NEW) is None


def test_same_name_twice_is_an_error():
    with pytest.raises(PluginError, match="'a' and 'b' both register targets named 'old'"):
        Registry([Contribution("a", targets=(OLD,)), Contribution("b", targets=(OLD,))])
    with pytest.raises(PluginError, match=r"'b' both register names of pallasite\.gpu 'f'"):
        Registry([Contribution("a", names={"f": "m:f"}), Contribution("b", names={"f": "m:f"})])
    names = {"f": Replacement(path="m:g", overrides=("a",))}
    merged = merge_names([Contribution("a", names={"f": "m:f"}), Contribution("b", names=names)])
    assert merged == {"f": "m:g"}
    entry = Pass(name="p", stage="mlir", run=lambda value, context: None)
    with pytest.raises(PluginError, match="'a' and 'b' both register passes named 'p'"):
        Registry([Contribution("a", passes=(entry,)), Contribution("b", passes=(entry,))])


def missing(registry: Registry, primitive: Primitive, semantics=LANE, target=NEW) -> str:
    with pytest.raises(MissingRuleError) as error:
        registry.lowering_rule(primitive, semantics, target)
    assert isinstance(error.value, NotImplementedError)
    return str(error.value)


def test_missing_rule_names_the_targets_that_have_one():
    registry = Registry([contribution("pallasite", rule(ADD, requires=("tma",)))])
    assert missing(registry, ADD, target=OLD) == dedent(
        """
        no lowering rule for primitive 'add' under LANE semantics on target 'old'
          expected: a case that has a rule: LANE on targets with tma (plugin 'pallasite')
          try: compile for new
        """
    )


def test_missing_rule_names_the_semantics_that_have_one():
    registry = Registry([contribution("pallasite", rule(ADD, WARP))])
    assert missing(registry, ADD) == dedent(
        """
        no lowering rule for primitive 'add' under LANE semantics on target 'new'
          expected: a case that has a rule: WARP on every target (plugin 'pallasite')
          try: use it under WARP semantics
        """
    )


def test_missing_rule_names_the_plugin_to_install():
    registry = Registry([contribution("pallasite")])
    assert missing(registry, WGMMA) == dedent(
        """
        no lowering rule for primitive 'wgmma' under LANE semantics on target 'new'
          expected: a primitive that a plugin lowers; no plugin loaded has any rule for this one
          try: pip install pallasite[hopper] (plugin 'hopper' provides it and is not installed)
        """
    )


def test_missing_rule_says_why_an_installed_plugin_is_of_no_use():
    registry = Registry([contribution("pallasite")], {"hopper": "disabled"})
    assert "try: enable plugin 'hopper', which provides it" in missing(registry, WGMMA)
    registry = Registry([contribution("pallasite")], {"hopper": "failed to load: boom"})
    assert "repair plugin 'hopper', which provides it; it failed to load: boom" in missing(
        registry, WGMMA
    )


def run_pass(value, context):
    return None


def passes(*entries: Pass) -> Registry:
    return Registry([Contribution("pallasite", passes=entries)])


def test_passes_are_ordered_by_stage_then_constraints_then_registration():
    registry = passes(
        Pass(name="tidy", stage="mlir", run=run_pass),
        Pass(name="cse", stage="mlir", run=run_pass, after=("hoist", "not installed")),
        Pass(name="infer", stage="jaxpr", run=run_pass),
        Pass(name="hoist", stage="mlir", run=run_pass, before=("tidy",)),
        Pass(name="last", stage="mlir", run=run_pass),
    )
    assert names(registry.passes()) == ["infer", "hoist", "tidy", "cse", "last"]
    assert names(registry.passes("jaxpr")) == ["infer"]


def test_circular_passes_are_an_error():
    registry = passes(
        Pass(name="a", stage="mlir", run=run_pass, before=("b",)),
        Pass(name="b", stage="mlir", run=run_pass, before=("a",)),
    )
    with pytest.raises(PluginError, match=r"circular: 'a' \(plugin 'pallasite'\), 'b'"):
        registry.passes("mlir")


def test_pass_with_unknown_stage_is_refused():
    with pytest.raises(InvalidValueError, match="one of jaxpr, mlir, llvm, ptx"):
        Pass(name="a", stage="sass", run=run_pass)


def test_executor_of_highest_priority_that_is_available():
    def executor(name, **options):
        return Executor(name=name, platforms=("cpu",), run=None, **options)

    entries = (
        executor("slow"),
        executor("fast", priority=2, available=lambda: False),
        executor("middle", priority=1),
    )
    registry = Registry([Contribution("pallasite", executors=entries)])
    assert registry.executor_choice("cpu").chosen.name == "middle"
    assert registry.executor_choice("cuda").chosen is None


def is_even(avals, params):
    return avals[0] % 2 == 0


def by_params(avals, params):
    return params["flag"]


def found(registry: Registry, *avals, semantics=LANE, target=NEW, after=(), **params):
    if after:
        return registry.lowering.next(after, semantics, target, avals, params)
    return registry.lowering_rule(ADD, semantics, target, avals, params)


def test_rule_for_the_operands_goes_before_one_for_the_target():
    registry = Registry(
        [
            contribution("pallasite", rule(ADD, targets=("new",))),
            contribution("even", rule(ADD, operands=is_even)),
        ]
    )
    assert [found(registry, number).plugin for number in (1, 2, 3)] == [
        "pallasite",
        "even",
        "pallasite",
    ]
    assert found(registry, 2, target=OLD).plugin == "even"


def test_operands_of_rules_without_a_predicate_are_not_looked_at():
    registry = Registry([contribution("pallasite", rule(ADD))])
    assert registry.lowering_rule(ADD, LANE, NEW).plugin == "pallasite"


def test_predicate_sees_the_parameters():
    registry = Registry(
        [contribution("pallasite", rule(ADD)), contribution("p", rule(ADD, operands=by_params))]
    )
    assert found(registry, flag=True).plugin == "p"
    assert found(registry, flag=False).plugin == "pallasite"


def test_predicates_that_overlap_are_an_error_where_both_match():
    def is_large(avals, params):
        return avals[0] > 9

    def registry(**options):
        return Registry(
            [
                contribution("pallasite", rule(ADD)),
                contribution("even", rule(ADD, operands=is_even)),
                contribution("large", rule(ADD, operands=is_large, **options)),
            ]
        )

    tied = registry()
    assert [found(tied, number).plugin for number in (1, 2, 11)] == ["pallasite", "even", "large"]
    with pytest.raises(PluginError) as error:
        found(tied, 12)
    assert str(error.value).splitlines()[0] == (
        "plugins 'even' and 'large' both register equally specific LANE lowering rules of primitive"
        " 'add' for operands of which is_even is true and for operands of which is_large is true"
        " for target 'new'"
    )
    assert found(registry(overrides=("even",)), 12).plugin == "large"


def test_equal_predicates_are_an_error_at_once():
    with pytest.raises(PluginError, match="'a' and 'b' .* for operands of which is_even is true"):
        Registry(
            [
                contribution("pallasite"),
                contribution("a", rule(ADD, operands=is_even)),
                contribution("b", rule(ADD, operands=is_even)),
            ]
        )


def test_predicate_that_is_no_function_is_refused():
    with pytest.raises(InvalidValueError, match=r"any_operand\(\.\.\.\) makes one"):
        RuleSet().lowering(ADD, LANE, operands="smem")


def test_missing_rule_for_these_operands():
    registry = Registry([contribution("p", rule(ADD, operands=is_even), targets=(NEW,))])
    with pytest.raises(MissingRuleError) as error:
        found(registry, 7)
    assert str(error.value) == dedent(
        """
        no lowering rule for primitive 'add' under LANE semantics on target 'new'
          got: operands 7
          expected: a case that has a rule: LANE on every target for operands of which is_even is \
true (plugin 'p')
        """
    )


def test_next_rules_go_from_the_most_to_the_least_specific():
    registry = Registry(
        [
            contribution("pallasite", rule(ADD), rule(ADD, requires=("tma",))),
            contribution("warpgroup", rule(ADD, WARPGROUP)),
            contribution("even", rule(ADD, operands=is_even)),
            contribution("mine", rule(ADD, overrides=("pallasite", "other"))),
            contribution("other", rule(ADD, overrides=("pallasite",))),
        ]
    )
    called = []
    with pytest.raises(MissingRuleError) as error:
        while True:
            called.append(found(registry, 2, semantics=WARPGROUP, after=called))
    assert [(one.plugin, one.semantics, len(one.target.features)) for one in called] == [
        ("warpgroup", WARPGROUP, 0),
        ("even", LANE, 0),
        ("pallasite", LANE, 1),
        ("mine", LANE, 0),
        ("other", LANE, 0),
        ("pallasite", LANE, 0),
    ]
    assert str(error.value) == dedent(
        """
        the lowering rule of plugin 'pallasite' for primitive 'add' calls the next one, and there \
is none on target 'new'
          expected: a rule that is less specific, or one that this one overrides
          try: register this rule for fewer cases (operands=, requires=, targets=), or let it do \
without another
        """
    )


def test_next_rule_is_an_error_where_the_overridden_ones_are_tied():
    registry = Registry(
        [
            contribution("a", rule(ADD), targets=(NEW,)),
            contribution("b", rule(ADD)),
            contribution("mine", rule(ADD, overrides=("a", "b"))),
        ]
    )
    mine = found(registry)
    assert mine.plugin == "mine"
    with pytest.raises(PluginError, match="'a' and 'b' both register equally specific"):
        found(registry, after=[mine])


def test_semantics_fall_back():
    tile = Semantics("TILE", falls_back_to=WARPGROUP)
    registry = Registry(
        [contribution("pallasite", rule(ADD), rule(ADD, WARP), rule(WGMMA, WARPGROUP))]
    )
    for semantics in (LANE, WARPGROUP, tile):
        assert found(registry, semantics=semantics).semantics is LANE
    assert found(registry, semantics=WARP).semantics is WARP
    assert registry.lowering.find(WGMMA, tile, NEW) is not None
    assert registry.lowering.find(WGMMA, LANE, NEW) is None
    assert tile.chain == (tile, WARPGROUP, LANE)
    assert tile.extends(LANE) and not tile.extends(WARP)
    assert repr(tile) == "Semantics.TILE"


def test_rules_of_resources_and_inference_for_one_semantics():
    rules = RuleSet()
    rules.resources(ADD)(lambda ctx: "all")
    rules.resources(ADD, WARPGROUP)(lambda ctx: "inferred")
    rules.inference(ADD, WARP, requires=("tma",))(lambda ctx: "warps")
    registry = Registry(
        [
            Contribution(
                "p",
                targets=(OLD, NEW),
                resource_rules=tuple(rules.resource_rules),
                inference_rules=tuple(rules.inference_rules),
            )
        ]
    )
    assert registry.resources.find(ADD, LANE, NEW).function(None) == "all"
    assert registry.resources.find(ADD, WARPGROUP, NEW).function(None) == "inferred"
    assert registry.inference.find(ADD, WARPGROUP, NEW) is None
    assert registry.inference.find(ADD, WARP, NEW).function(None) == "warps"
    assert registry.inference.find(ADD, WARP, OLD) is None


def test_semantics_of_one_name_are_one():
    def tile():
        return Semantics("TILE", falls_back_to=WARPGROUP)

    assert tile() == tile() and hash(tile()) == hash(tile())
    assert tile() != Semantics("TILE", falls_back_to=LANE)
    core = contribution("pallasite")
    with pytest.raises(PluginError, match="'a' and 'b' both register equally specific TILE"):
        Registry([core, contribution("a", rule(ADD, tile())), contribution("b", rule(ADD, tile()))])
    registry = Registry([core, contribution("a", rule(ADD, tile()))])
    assert registry.lowering_rule(ADD, tile(), NEW).plugin == "a"
