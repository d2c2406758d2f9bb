"""Event times of a run of `pretrain` or `estimate`: from the form, or else from the data interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

Events = Mapping[Any, Sequence[Any]] | None
"""The events, by asset, that started a run."""


def to_version(params: Mapping[str, Any], events: Events) -> str:
    """Return the last version of the measurements in the history: from the form, or else from the landing.

    Args:
        params: the values of the form.
        events: the events, by asset, that started the run; Airflow stores them with the run, so a cleared run gets the
            same version.

    Returns:
        The version as text; empty if neither form nor landing names a version, or if the form names an instant.
    """
    if params["to_version"] is not None:
        return str(params["to_version"])
    if params["as_of"]:
        return ""
    landed = [event.extra.get("version") for of_asset in (events or {}).values() for event in of_asset]
    return str(max((one for one in landed if one is not None), default=""))


def as_of(params: Mapping[str, Any], dag_run: Any, events: Events = None) -> str:
    """Return the run's cut, ISO 8601: from the form, or else the data interval's end, or else the run's start.

    All three are stored with the run, so a cleared run has the same cut. If the form or the landing names a version,
    this version is the cut, and the function returns an empty text.
    """
    if to_version(params, events):
        return ""
    if params["as_of"]:
        return str(params["as_of"])
    return (dag_run.data_interval_end or dag_run.run_after).astimezone(UTC).isoformat()


def learn_from(params: Mapping[str, Any], dag_run: Any, window_us: int | None, events: Events = None) -> str:
    """Return the start of a run's learning window, ISO 8601: from the form, or the spec's window before the cut."""
    if params["learn_from"]:
        return str(params["learn_from"])
    cut = as_of(params, dag_run, events)
    if not cut or window_us is None:
        return ""
    return (datetime.fromisoformat(cut) - timedelta(microseconds=window_us)).isoformat()


def first(params: Mapping[str, Any], dag_run: Any) -> str:
    """Return the first event time that a run of `estimate` estimates, ISO 8601; empty: all rows before its end."""
    return _end(params["from"], dag_run, dag_run.data_interval_start)


def last(params: Mapping[str, Any], dag_run: Any) -> str:
    """Return the end (exclusive) of the event times that a run of `estimate` estimates, ISO 8601; empty: all rows."""
    return _end(params["to"], dag_run, dag_run.data_interval_end)


def _end(given: str | None, dag_run: Any, end: datetime | None) -> str:
    """Return `given`, or else this end of the run's interval; a run by hand has an interval of length zero.

    For a run by hand without a given instant the result is empty, which means all rows.
    """
    if given:
        return str(given)
    if end is None or dag_run.data_interval_start == dag_run.data_interval_end:
        return ""
    return end.astimezone(UTC).isoformat()
