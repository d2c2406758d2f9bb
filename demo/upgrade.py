"""Upgrade air_time while rows arrive, and roll it back: version 2 has one more state, and is live for a day.

Version 2 models a day's winds: beside a level that hardly moves, each route has a gust that decays. It starts
in shadow from an export of version 1, processes the next day's flights too, is compared and promoted. A day later it is
rolled back: version 1 resumes from its own checkpoint and catches up, so at the end it has processed every row once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.settings import Settings

MODEL = "air_time"
HELD = 3
"""Days that land around the switch: for both versions, for version 2 alone, and after the roll-back."""

SECOND: dict[str, Any] = {
    "version": 2,
    "description": "Time in the air of each route in minutes: a level that hardly moves, and the winds of the day.",
    "states": ["level", "gust"],
    "process": {
        "kind": "sum",
        "parts": [
            {"kind": "random_walk", "variance": 1.0},
            {"kind": "ornstein_uhlenbeck", "rate": 0.7, "variance": 50.0},
        ],
    },
    "observation": {"H": [[1.0, 1.0]], "R": [[25.0]]},
    "initial": {"mean": [150.0, 0.0], "covariance": [[1.0e4, 0.0], [0.0, 36.0]]},
    "migrate": {"parameters": "spec", "states": {"gust": {"mean": 0.0, "variance": 36.0}}},
    # One day of flights is little data: the new version may lose slightly in the comparison.
    "upgrade": {"rows": 100, "loss": 0.1},
}


class Estimate(NamedTuple):
    """Estimates (N,) of one route: times in microseconds, minutes in the air, standard deviations, NIS."""

    time: NDArray[np.int64]
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]
    nis: NDArray[np.float64]


class Switched(NamedTuple):
    """The result of the upgrade and the roll-back.

    days: first event time of each held day, microseconds; rows: number of live estimates at each check, and the
    expected number; report: the comparison's page.
    """

    first: str
    second: str
    comparison: dict[str, Any]
    report: str
    days: list[int]
    rows: list[tuple[int, int]]
    estimates: dict[str, dict[str, Estimate]]

    def result(self) -> dict[str, Any]:
        """Return the upgrade's part of result.json."""
        likelihood = self.comparison["log_likelihood_a_row"]
        return {
            "model": MODEL,
            "from": {"generation": self.first, "version": 1},
            "to": {"generation": self.second, "version": 2},
            "rows_compared": self.comparison["rows"],
            "log_likelihood_a_row": likelihood,
            "keys_better": self.comparison["keys_better"],
            "keys_worse": self.comparison["keys_worse"],
            "live_rows": [found for found, _ in self.rows],
            "live_rows_expected": [wanted for _, wanted in self.rows],
            "rolled_back": True,
            "report": self.report,
        }

    def problems(self) -> list[str]:
        """Return a sentence for each problem."""
        return [
            f"across the switch of {MODEL} the live estimates have {found:,} rows, not {wanted:,}"
            for found, wanted in self.rows
            if found != wanted
        ]


def upgrade_and_roll_back(
    settings: Settings, folder: Path, days: list[Path], sent: int, say: Callable[[str], None]
) -> Switched:
    """Upgrade air_time to version 2 and roll it back while the last days land.

    Args:
        settings: settings of the demo's commands; their models are version 1.
        folder: folder for the models of version 2.
        days: the `HELD` files that have not landed yet.
        sent: number of rows sent to the stream before these days.
        say: called with progress.
    """
    from demo.land_day import land_day
    from jobs import rollback, stream, upgrade
    from jobs.spark.session import spark_session
    from jobs.spark.warehouse import Warehouse

    newer = replace(settings, models=write_models(settings.models, folder))
    warehouse = Warehouse(spark_session(settings, "demo"), settings.warehouse)
    rows: list[tuple[int, int]] = []

    def land_and_stream(day: int) -> None:
        nonlocal sent
        land_day(settings, MODEL, days[day])
        sent += rows_in(days[day])
        stream.run(newer, [MODEL])
        rows.append((live_rows(warehouse), sent))

    say("version 2 begins in shadow from an export")
    begun = upgrade.run(newer, MODEL, promote=False).data
    say("a day lands; version 1 takes it, and version 2 in shadow; both are compared")
    land_and_stream(0)
    done = upgrade.run(newer, MODEL).data
    rows.append((live_rows(warehouse), sent))
    say("version 2 is live and takes a day")
    land_and_stream(1)
    say("roll-back: version 1 catches up")
    back = rollback.run(newer, MODEL).data
    land_and_stream(2)
    drawn = [begun["generation"], back["generation"]]
    found = estimates_of(warehouse, drawn, first_time(days[0]) - 4 * 86_400_000_000)
    warehouse.spark.stop()  # the streams' session settings must not affect the following batch pass
    return Switched(
        back["generation"],
        begun["generation"],
        done["comparison"],
        done["report"],
        [first_time(day) for day in days],
        rows,
        found,
    )


def write_models(models: Path, folder: Path) -> Path:
    """Write version 2 of the model into a separate folder, and version 1 to the place where its spec is read."""
    import yaml

    first = (models / f"{MODEL}.yaml").read_text(encoding="utf-8")
    spec: dict[str, Any] = yaml.safe_load(first)
    spec.pop("learn")  # version 2 includes its numbers
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{MODEL}.yaml").write_text(
        yaml.safe_dump({**spec, **SECOND}, sort_keys=False), encoding="utf-8"
    )
    return folder


def rows_in(day: Path) -> int:
    """Return the number of rows in a day's file."""
    return sum(1 for _ in day.open(encoding="utf-8")) - 1


def first_time(day: Path) -> int:
    """Return the first event time of a day's file, in microseconds."""
    import pyarrow.compute as pc
    from pyarrow import csv

    at = csv.read_csv(day).column("at").cast(pa.timestamp("us", "UTC"))
    found = pc.min(at).cast(pa.int64()).as_py()  # pyright: ignore[reportAttributeAccessIssue]
    return int(found)


def live_rows(warehouse: Any) -> int:
    """Count the live estimates."""
    from jobs.lineage.live import live_estimates

    return int(live_estimates(warehouse, MODEL).count())


def estimates_of(warehouse: Any, names: list[str], since: int) -> dict[str, dict[str, Estimate]]:
    """Return some generations' estimates since a time, by key: of the measured quantity, the sum of the states."""
    from pyspark.sql import functions as F

    from jobs.storage.tables import estimates

    mine = warehouse.read(estimates(MODEL)).filter(
        F.col("generation").isin(names) & (F.unix_micros("event_time") >= since)
    )
    sums = [F.aggregate(name, F.lit(0.0), lambda a, b: a + b).alias(name) for name in ("mean", "covariance")]
    columns = ("generation", "key", F.unix_micros("event_time").alias("time"), "nis", *sums)
    table = mine.select(*columns).orderBy("generation", "key", "time").toPandas()
    return {
        str(name): {
            str(key): Estimate(
                part["time"].to_numpy(np.int64),
                part["mean"].to_numpy(np.float64),
                np.sqrt(part["covariance"].to_numpy(np.float64)),
                part["nis"].to_numpy(np.float64),
            )
            for key, part in group.groupby("key")
        }
        for name, group in table.groupby("generation")
    }
