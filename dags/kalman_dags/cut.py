"""The event times that decide a run of `pretrain` or `estimate`: from the form, else from the data interval."""

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


def first(params: Mapping[str, Any], dag_run: Any) -> str:
    """Return the first event time that a run of `estimate` estimates, ISO 8601; empty: all rows before its last one."""
    return _end(params["first"], dag_run, dag_run.data_interval_start)


def last(params: Mapping[str, Any], dag_run: Any) -> str:
    """Return the event time before which a run of `estimate` estimates rows, ISO 8601; empty: all rows."""
    return _end(params["last"], dag_run, dag_run.data_interval_end)


def _end(given: str | None, dag_run: Any, end: datetime | None) -> str:
    """Return an end of a run's interval; a run by hand has an interval of no length, which stands for all rows."""
    if given:
        return str(given)
    if end is None or dag_run.data_interval_start == dag_run.data_interval_end:
        return ""
    return end.astimezone(UTC).isoformat()
