"""The time of day. It may be set back and differs between machines, so no guarantee depends on it alone."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)
