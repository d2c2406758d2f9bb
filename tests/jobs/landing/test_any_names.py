"""Columns of any name, and a time in two columns, from files of every format and a Delta table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import ingest, quarantine
from jobs.storage.tables import measurements
from tests.jobs.support.pipeline import Pipeline, random_walk_spec

pytestmark = pytest.mark.spark

NAMES: dict[str, Any] = {"key": ["Station no."], "time": ["DATE", "TIME"], "measurement": ["Temp (°C)", "_b"]}


def rows(day: int) -> pd.DataFrame:
    at: Any = pd.date_range(f"2024-03-{day:02d}", periods=24, freq="h")
    rng = np.random.default_rng(day)
    return pd.DataFrame(
        {
            "Station no.": [f"s {i % 2}" for i in range(24)],
            "DATE": at.strftime("%Y-%m-%d"),
            "TIME": at.strftime("%H:%M:%S"),
            "Temp (°C)": rng.normal(size=24).round(3),
            "_b": rng.normal(size=24).round(3),
            "note; other": "x",
        }
    )


def landed(pipeline: Pipeline) -> pd.DataFrame:
    frame = pipeline.warehouse.read(measurements("walk")).select(*pipeline.spec.columns).toPandas()
    return frame.sort_values("time").reset_index(drop=True)


def test_files_of_every_format_land_alike_and_a_rejected_row_comes_back(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(**NAMES))
    assert pipeline.spec.columns == ["Station_no", "time", "Temp_C", "b"]
    first, second, third = (rows(day) for day in (1, 2, 3))
    spoilt = first.astype({"_b": object})
    spoilt.loc[3, "TIME"], spoilt.loc[4, "_b"] = "24:30", "broken"
    done = pipeline.land_files(pipeline.file_of(spoilt, ".csv"))
    assert done.data["rows"] == 22 and any("DATE and TIME make no time" in line for line in done.lines)
    stored = pa.Table.from_pandas(second.drop(columns=["DATE", "TIME"]), preserve_index=False)
    at: Any = pd.date_range("2024-03-02", periods=24, freq="h")
    stored = stored.append_column("DATE", pa.array(at.date)).append_column("TIME", pa.array(at.time))
    pq.write_table(stored, tmp_path / "b.parquet")
    third.to_json(tmp_path / "c.jsonl", orient="records", lines=True, force_ascii=False)
    pipeline.land_files(tmp_path / "b.parquet", tmp_path / "c.jsonl")
    kept = pipeline.warehouse.read("quarantine").toPandas()["payload"]
    assert sorted(json.loads(one)["TIME"] for one in kept) == ["04:00:00", "24:30"]
    pipeline.write_spec(random_walk_spec(**NAMES, missing_values=["broken"]))
    assert quarantine.act(pipeline.settings, "replay", "walk", None).data["landed"] == 1
    found = landed(pipeline)
    wanted = pd.concat([first, second, third], ignore_index=True)
    wanted = wanted.assign(time=pd.to_datetime(wanted["DATE"] + " " + wanted["TIME"])).drop(index=3)
    assert found["time"].dt.tz_localize(None).tolist() == wanted["time"].tolist()
    assert found["Temp_C"].tolist() == wanted["Temp (°C)"].tolist()
    assert found["Station_no"].tolist() == wanted["Station no."].tolist()


def test_a_delta_table_lands_by_its_own_names(tmp_path: Path) -> None:
    table = tmp_path / "theirs"
    source = {"kind": "delta", "table": str(table)}
    names: dict[str, Any] = {"key": ["_key"], "time": "_time", "measurement": ["a.b", "b-1"]}
    pipeline = Pipeline(tmp_path, random_walk_spec(source=source, **names))
    at: Any = pd.date_range("2024-03-01", periods=6, freq="h", tz="UTC")
    frame = pd.DataFrame({"_key": list("xyxyxy"), "_time": at, "a.b": range(6), "b-1": 1.5, "other": "o"})
    pipeline.warehouse.spark.createDataFrame(frame).coalesce(1).write.format("delta").save(str(table))
    assert ingest.run(pipeline.settings, "walk").data["rows"] == 6
    assert landed(pipeline)["a_b"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
