"""The numerics that a generation or a snapshot was filtered with (`kalman.NUMERICS`), beside its position. Pure.

The position's JSON has it, as a column would be one that a driver of an earlier release cannot read. It names whose it
is: an earlier release copies positions from one row to another, and does not know that they say more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIRST = 1
"""Those of releases that recorded none."""
_NAME = "numerics"


def with_numerics(position: Mapping[str, Any], owner: str, numerics: int) -> dict[str, Any]:
    """Return a position as it is stored for a generation or snapshot of this name."""
    return dict(position) if numerics == FIRST else {**position, _NAME: {owner: numerics}}


def without_numerics(stored: Mapping[str, Any], owner: str) -> tuple[dict[str, Any], int]:
    """Return a stored position alone, and the numerics of its owner."""
    position = {name: value for name, value in stored.items() if name != _NAME}
    return position, int(stored.get(_NAME, {}).get(owner, FIRST))
