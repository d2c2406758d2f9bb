"""The time of day. It may be put back or differ between machines, so nothing that must be right depends on it alone."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> datetime:
    """Return the time of day."""
    return datetime.now(UTC)
