"""The standard library of Pallasite: the portable primitives and their rules, as a plugin.

It is shipped with ``pallasite`` and found through the same entry point as any plugin. Everything in
it can be replaced rule by rule, and it imports one module of the core, the plugin door
``pallasite.plugin``. What it offers to other plugins is in :mod:`pallasite_std.api`.
"""
