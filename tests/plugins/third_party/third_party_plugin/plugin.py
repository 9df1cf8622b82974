"""The hooks: what the plugin adds, each imported when it is first needed."""

from __future__ import annotations

from pallasite.plugin import hookimpl

PALLASITE_PLUGIN_API = (2, 0)

NAMES = {
    "every_other_row": "views:every_other_row",
    "add_device_number": "device_numbers:add_device_number",
    "add_block_number": "blocks:add_block_number",
    "WarpBarrier": "barriers:WarpBarrier",
    "repeat": "control_flow:repeat",
    "negate": "negation:negate",
}


@hookimpl
def pallasite_names():
    return {name: f"third_party_plugin.{path}" for name, path in NAMES.items()}


@hookimpl
def pallasite_targets():
    from third_party_plugin.lines import TARGET

    return [TARGET]


@hookimpl
def pallasite_options():
    from third_party_plugin.blocks import BlockOptions

    return BlockOptions


@hookimpl
def pallasite_memory_spaces():
    from third_party_plugin.lines import LINES

    return [LINES]


@hookimpl
def pallasite_views():
    from third_party_plugin.views import EVERY_OTHER_ROW

    return [EVERY_OTHER_ROW]


@hookimpl
def pallasite_lifecycles():
    from third_party_plugin import blocks, device_numbers

    return [blocks.LIFECYCLE, device_numbers.LIFECYCLE]


@hookimpl
def pallasite_barrier_kinds():
    from third_party_plugin.barriers import WARP_BARRIERS

    return [WARP_BARRIERS]


@hookimpl
def pallasite_layouts():
    from third_party_plugin.layouts import WARP_COLUMNS

    return [WARP_COLUMNS]


@hookimpl
def pallasite_layout_proposals():
    from third_party_plugin.layouts import PROPOSAL

    return [PROPOSAL]


@hookimpl
def pallasite_jaxpr_primitives():
    from third_party_plugin.control_flow import REPEAT

    return [REPEAT]


@hookimpl
def pallasite_lowering_rules():
    from third_party_plugin import blocks, control_flow, device_numbers, negation

    modules = (blocks, control_flow, device_numbers, negation)
    return [rule for module in modules for rule in module.rules.lowering_rules]


@hookimpl
def pallasite_inference_rules():
    from third_party_plugin.blocks import rules

    return rules.inference_rules


@hookimpl
def pallasite_executors():
    from third_party_plugin.launcher import LAUNCHER

    return [LAUNCHER]


@hookimpl
def pallasite_operations():
    from third_party_plugin.operations import OPERATIONS

    return OPERATIONS
