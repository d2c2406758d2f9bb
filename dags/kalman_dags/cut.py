"""The event times at which a run of `pretrain` cuts history: from the form, else from the data interval."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any


def as_of(params: Mapping[str, Any], dag_run: Any) -> str:
    """Return the run's cut, ISO 8601: the form's, else the data interval's end, else the run's start.

    All three are stored with the run, so a run that is cleared has the same cut. A run whose
    form names a version has none: the version is its cut.
    """
    if params["to_version"] is not None:
        return ""
    if params["as_of"]:
        return str(params["as_of"])
    return (dag_run.data_interval_end or dag_run.run_after).astimezone(UTC).isoformat()


def learn_from(params: Mapping[str, Any], dag_run: Any, window_us: int | None) -> str:
    """Return the start of a run's learning window, ISO 8601: the form's, else the spec's window before the cut."""
    if params["learn_from"]:
        return str(params["learn_from"])
    cut = as_of(params, dag_run)
    if not cut or window_us is None:
        return ""
    return (datetime.fromisoformat(cut) - timedelta(microseconds=window_us)).isoformat()
