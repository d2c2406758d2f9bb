"""Text on the changes by a migration: states, keys and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.upgrades.migration.apply import format_change_table, format_left_out, format_rekeying
from jobs.upgrades.migration.parameters import format_parameters, format_value


def format_change(model: str, change: Mapping[str, Any]) -> list[str]:
    """Return lines on the states, keys and parameters that a migration changes (`migrate` in `migrating`)."""
    lines: list[str] = []
    if "after" in change:
        lines += [f"  {line}" for line in format_change_table(dict(change))]
        lines += [*format_rekeying(dict(change)), *format_left_out(dict(change))]
    return [*lines, *format_changed_parameters(model, change)]


def format_changed_parameters(model: str, change: Mapping[str, Any]) -> list[str]:
    """Return lines about the parameters that a migration changes; per-key parameters appear as averages."""
    lines = format_parameters(model, change.get("parameters") or [])
    own = change.get("key_parameters") or {"before": {}, "after": {}}
    for name in {**own["before"], **own["after"]}:
        was, now = (format_value(own[when].get(name)) for when in ("before", "after"))
        lines.append(f"each key has its own {name}: on average {was} before, {now} after")
    return [f"  {line}" for line in lines]
