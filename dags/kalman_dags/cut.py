"""The event times that decide a run of `pretrain` or `estimate`: from the form, else from the data interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

FORMER = {"from": "first", "to": "last"}
"""Names of the form's fields of `estimate` until release 0.2."""


def to_version(params: Mapping[str, Any], events: Mapping[Any, Sequence[Any]] | None) -> str:
    """Return the version of the measurements up to which history is taken: the form's, else that of the landing.

    Args:
        params: the form.
        events: by asset, those that have started the run; Airflow keeps them with it, so that a run that is cleared has
            the same version.

    Returns:
        Empty where neither names one, or the form names an instant.
    """
    if params["to_version"] is not None:
        return str(params["to_version"])
    if params["as_of"]:
        return ""
    landed = [event.extra.get("version") for of_asset in (events or {}).values() for event in of_asset]
    return str(max((one for one in landed if one is not None), default=""))


def as_of(params: Mapping[str, Any], dag_run: Any, events: Mapping[Any, Sequence[Any]] | None = None) -> str:
    """Return the run's cut, ISO 8601: the form's, else the data interval's end, else the run's start.

    All three are stored with the run, so a run that is cleared has the same cut. A run whose
    form, or landing, names a version has none: the version is its cut.
    """
    if to_version(params, events):
        return ""
    if params["as_of"]:
        return str(params["as_of"])
    return (dag_run.data_interval_end or dag_run.run_after).astimezone(UTC).isoformat()


def learn_from(
    params: Mapping[str, Any],
    dag_run: Any,
    window_us: int | None,
    events: Mapping[Any, Sequence[Any]] | None = None,
) -> str:
    """Return the start of a run's learning window, ISO 8601: the form's, else the spec's window before the cut."""
    if params["learn_from"]:
        return str(params["learn_from"])
    cut = as_of(params, dag_run, events)
    if not cut or window_us is None:
        return ""
    return (datetime.fromisoformat(cut) - timedelta(microseconds=window_us)).isoformat()


def first(params: Mapping[str, Any], dag_run: Any) -> str:
    """Return the first event time that a run of `estimate` estimates, ISO 8601; empty: all rows before its last one."""
    return _end(_given("from", params, dag_run), dag_run, dag_run.data_interval_start)


def last(params: Mapping[str, Any], dag_run: Any) -> str:
    """Return the event time before which a run of `estimate` estimates rows, ISO 8601; empty: all rows."""
    return _end(_given("to", params, dag_run), dag_run, dag_run.data_interval_end)


def _given(name: str, params: Mapping[str, Any], dag_run: Any) -> str | None:
    """Return a form's instant; by the name that it had before, too, which is accepted for a release."""
    return params[name] or (getattr(dag_run, "conf", None) or {}).get(FORMER[name])


def _end(given: str | None, dag_run: Any, end: datetime | None) -> str:
    """Return an end of a run's interval; a run by hand has an interval of no length, which stands for all rows."""
    if given:
        return str(given)
    if end is None or dag_run.data_interval_start == dag_run.data_interval_end:
        return ""
    return end.astimezone(UTC).isoformat()
