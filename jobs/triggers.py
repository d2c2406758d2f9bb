"""When a stream takes in what is there: once, or every so many seconds."""

from __future__ import annotations

from jobs.errors import UserError

AVAILABLE_NOW = "available-now"


def trigger_seconds(trigger: str) -> float | None:
    """Return the seconds between micro-batches; None: take in what is there, then end.

    Raises:
        UserError: it is neither.
    """
    if trigger == AVAILABLE_NOW:
        return None
    try:
        seconds = float(trigger)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise UserError(f"--trigger {trigger}: give {AVAILABLE_NOW}, or a number of seconds")
    return seconds
