"""The built-in lowering and resource rules, grouped by subject."""
