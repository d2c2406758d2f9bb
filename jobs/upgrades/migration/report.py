"""Text on the changes by a migration: states, keys and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.upgrades.migration.apply import change_table, left_out_lines, rekeying_lines
from jobs.upgrades.migration.parameters import parameter_lines, value_text


def change_lines(model: str, change: Mapping[str, Any]) -> list[str]:
    """Return lines on the states, keys and parameters that a migration changes (`migrate` in `migrating`)."""
    lines: list[str] = []
    if "after" in change:
        lines += [f"  {line}" for line in change_table(dict(change))]
        lines += [*rekeying_lines(dict(change)), *left_out_lines(dict(change))]
    return [*lines, *parameters_changed(model, change)]


def parameters_changed(model: str, change: Mapping[str, Any]) -> list[str]:
    """Return lines about the parameters that a migration changes; per-key parameters appear as averages."""
    lines = parameter_lines(model, change.get("parameters") or [])
    own = change.get("key_parameters") or {"before": {}, "after": {}}
    for name in {**own["before"], **own["after"]}:
        was, now = (value_text(own[when].get(name)) for when in ("before", "after"))
        lines.append(f"each key has its own {name}: on average {was} before, {now} after")
    return [f"  {line}" for line in lines]
