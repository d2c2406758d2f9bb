"""ORC files, written by Spark and by Arrow, give the rows of the same values in Parquet."""

from __future__ import annotations

import datetime
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pyarrow import orc

from jobs import filter as offline
from jobs import ingest
from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.landing import csv_parquet
from jobs.landing.csv_parquet import read
from tests.jobs.support.pipeline import Pipeline, random_walk_spec


def table(rows: int = 3000) -> pa.Table:
    start = datetime.datetime(1959, 12, 31, 23, 59, 58, 123456)
    times = [start + datetime.timedelta(days=9 * number, microseconds=number) for number in range(rows)]
    return pa.table(
        {
            "id": pa.array([number % 7 for number in range(rows)]),
            "at": pa.array(times, pa.timestamp("us")),
            "a": pa.array([None if number % 5 == 0 else number / 8 for number in range(rows)]),
            "b": pa.array([number % 3 for number in range(rows)], pa.int32()),
            "rest": pa.array(["some text"] * rows),
        }
    )


@pytest.mark.spark
def test_orc_lands_as_parquet_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_parquet, "ROWS_A_PART", 500)
    whole = table()
    orc.write_table(whole, tmp_path / "rows.orc", stripe_size=1 << 10)
    pq.write_table(whole, tmp_path / "rows.parquet")
    found = {}
    for ending in ("orc", "parquet"):
        pipeline = Pipeline(tmp_path / ending, random_walk_spec(time_range={"latest": None}))
        assert ingest.run(pipeline.settings, "walk", [str(tmp_path / f"rows.{ending}")]).data["rows"] == 3000
        frame = pipeline.warehouse.read("measurements/walk").select("id", "at", "a", "b")
        found[ending] = frame.orderBy("at").toArrow()
    assert found["orc"] == found["parquet"]
    pipeline = Pipeline(tmp_path / "spark", random_walk_spec(time_range={"latest": None}))
    spark = pipeline.warehouse.spark
    rows = spark.read.parquet(str(tmp_path / "rows.parquet"))
    # Spark writes times without a zone as numbers in ORC.
    rows = rows.withColumn("at", rows["at"].cast("timestamp")).repartition(3)
    rows.write.orc(str(tmp_path / "more.orc"))
    assert ingest.run(pipeline.settings, "walk", [str(tmp_path / "more.orc")]).data["rows"] == 3000
    frame = pipeline.warehouse.read("measurements/walk").select("id", "at", "a", "b")
    assert frame.orderBy("at").toArrow() == found["parquet"]


def test_filter_reads_orc(tmp_path: Path) -> None:

    settings = Settings.load(str(tmp_path / "warehouse"), str(tmp_path), None)
    (tmp_path / "walk.yaml").write_text(yaml.safe_dump(random_walk_spec()))
    orc.write_table(table(50), tmp_path / "rows.orc")
    pq.write_table(table(50), tmp_path / "rows.parquet")
    for ending in ("orc", "parquet"):
        offline.run(settings, "walk", str(tmp_path / f"rows.{ending}"), str(tmp_path / f"{ending}.csv"))
    found, expected = (
        pd.read_csv(tmp_path / f"{name}.csv", parse_dates=["at"]) for name in ("orc", "parquet")
    )
    pd.testing.assert_frame_equal(found, expected, check_exact=True, check_dtype=False)


def test_what_is_no_orc_is_told(tmp_path: Path) -> None:
    (tmp_path / "rows.orc").write_text("not ORC")
    with pytest.raises(UserError, match=r"rows.orc: cannot be read: it is not an ORC file"):
        read(tmp_path / "rows.orc")
    early = pa.table({"at": pa.array([datetime.datetime(1600, 1, 1)], pa.timestamp("us"))})
    orc.write_table(early, tmp_path / "early.orc")
    with pytest.raises(UserError, match="out of range for nanosecond"):
        read(tmp_path / "early.orc")
