"""Choose and prepare the content of the report from the result of the check."""

from __future__ import annotations

import json

import numpy as np

from demo.check import Checked
from demo.compare import Differences
from demo.figures import Marks, Nis, Series, Switch
from demo.report import number
from demo.upgrade import Estimate, Switched
from kalman.evaluation.diagnostics import coverage

BEFORE_US = 30 * 86_400 * 1_000_000
"""Length of history that the report draws before the hand-over."""

RARE_ROWS = 60
"""Approximate number of the rare route's rows in the drawn time."""


def choose_routes(checked: Checked) -> list[int]:
    """Return the keys to draw: each origin's busiest route and one rare route."""
    drawn = checked.rows.time >= checked.since - BEFORE_US
    flown = drawn & np.isfinite(checked.y[0])
    counts = np.bincount(checked.rows.key[flown], minlength=len(checked.names))
    chosen: list[int] = []
    seen: set[str] = set()
    for key in np.argsort(-counts, kind="stable").tolist():
        origin, dest = json.loads(checked.names[key])
        if origin not in seen and dest not in seen:
            seen |= {origin, dest}
            chosen.append(key)
        if len(chosen) == 3:
            break
    rare = np.argsort(np.abs(counts - RARE_ROWS), kind="stable")
    return [*chosen, *[key for key in rare.tolist() if key not in chosen][:1]]


def route_series(checked: Checked, key: int) -> Series:
    """Return a route's rows in the drawn time."""
    rows = checked.rows
    index = np.flatnonzero((rows.key == key) & (rows.time >= checked.since - BEFORE_US))
    mean, covariance = rows.mean[:, index], rows.covariance[:, index]
    H = checked.H[0]
    n = len(H)
    estimate = np.sum(H[:, None] * mean, axis=0)
    variance = np.sum(np.outer(H, H).reshape(n * n, 1) * covariance, axis=0)
    measured = checked.y[0, index]
    # The residual after the update has the sign of the innovation before it, and NIS is its square.
    normalised = np.sign(measured - estimate) * np.sqrt(rows.nis[index])
    origin, dest = json.loads(checked.names[key])
    title = f"{origin} to {dest} · {int(np.isfinite(measured).sum()):,} flights"
    return Series(title, rows.time[index], measured, estimate, np.sqrt(variance), normalised)


def switch_of(checked: Checked, switched: Switched) -> Switch:
    """Return the report's content for an upgrade and its roll-back: the busiest routes."""
    first, second = (switched.estimates.get(name, {}) for name in (switched.first, switched.second))
    names = checked.names
    chosen = [key for key in choose_routes(checked)[:3] if names[key] in first and names[key] in second]
    drawn: list[tuple[str, Estimate, Estimate]] = []
    for name in (names[key] for key in chosen):
        origin, dest = json.loads(name)
        drawn.append((f"{origin} to {dest}", first[name], second[name]))
    since = min((one.time[0] for _, one, _ in drawn), default=checked.since)
    series = [route_series(checked, key) for key in chosen]
    measured = [(one.time[one.time >= since], one.measured[one.time >= since]) for one in series]
    return Switch(drawn, measured, switched.days, switched.result())


def nis_of(checked: Checked) -> Nis:
    """Return the NIS of all rows with a measurement."""
    seen = np.flatnonzero(np.isfinite(checked.rows.nis))
    components = np.isfinite(checked.y[:, seen]).sum(axis=0)
    return Nis(checked.spec.name, checked.rows.nis[seen], components, checked.rows.time[seen])


def outside_share(nis: Nis, since: int) -> tuple[float, float]:
    """Return the shares of rows, in history and in the stream, whose NIS is above its 95 % bound."""
    streamed = nis.time >= since
    history, stream = (coverage(nis.values[some], nis.components[some]) for some in (~streamed, streamed))
    return 1.0 - history, 1.0 - stream


def share_sentence(checked: Checked) -> str:
    """Return a sentence on the share of a model's rows outside the bound."""
    history, stream = outside_share(nis_of(checked), checked.since)
    return f"{checked.spec.name}: {history:.1%} of history and {stream:.1%} of the stream are outside it."


def marks_of(checked: Checked, batch: int | None) -> Marks:
    """Return the time of the hand-over, and of the start of the micro-batch in which the driver was killed."""
    micro_batch = None if batch is None else checked.batches.get(batch)
    return Marks(checked.since, None if micro_batch is None else micro_batch.first)


def parity_rows(checked: list[Checked]) -> list[dict[str, str]]:
    """Return the parity table: for each model its estimates and its keys' last states."""
    rows: list[dict[str, str]] = []
    for one in checked:
        rows.append(_parity(f"{one.spec.name}: estimates", one.estimates, "rows"))
        rows.append(_parity(f"{one.spec.name}: last states", one.states, "keys"))
    return rows


def _parity(name: str, found: Differences, what: str) -> dict[str, str]:
    largest = {column: number(value) for column, value in found.largest.items()}
    other = sum(found.unequal.values())
    return {
        "compared": name,
        "number": f"{found.compared:,} {what}",
        "only in batch": f"{found.missing:,}",
        "only in stream": f"{found.surplus:,}",
        "mean": largest.get("mean", ""),
        "covariance": largest.get("covariance", ""),
        "log-likelihood": largest.get("log_likelihood", ""),
        "NIS": largest.get("nis", "–"),
        "other unequal": f"{other:,}",
    }
