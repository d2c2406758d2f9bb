"""`ingest` in Spark and the offline command in Python read every row alike, whatever is in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.parse_rows import checked_rows, key_types_of
from jobs.rows import parse, read
from jobs.spec import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TIMES = [
    "2024-03-01", "2024-03-01T10:20", " 2024-03-01 10:20:30 ", "2024-03-01T10:20:30.5",
    "2024-03-01T10:20:30.123456789Z",
    "2024-03-01T10:20:30+01:00", "2024-03-01T10:20:30-0530", "2024-03-01 10:20 +01", "1871-01-01", "", "today",
    "2024-3-1",
    "2024-13-01", "2024-02-30", "2024-03-01T24:00", "2024-03-01T10:20:60", "20240301", "2024-03-01T10",
    "2024-03-01T10:20:30+19:00", "2024-03-01 10:20 UTC", "٢٠٢٤-03-01", "2013-03-10 02:30", "2013-11-03 01:30", None,
    "   ", "0001-01-01", "9999-12-31 23:59:59.9999999", "0000-01-01", "2024-03-01T10:20:30+18:30",
    "2024-03-01T10:20:30+18:00", "2024-03-01T10:20:30+01:60", "\t2024-03-01\n", "2024-03-01\n",
]  # fmt: skip
NUMBERS = [
    "1", "-1.5", ".5", "1e-3", " 2 ", "1.", "+3", "1e999", "-1e999", "inf", "-Infinity", "nan", "NaN", "NA", "na",
    "null",
    "", "  ", "abc", "1_000", "1d", "1f", "0x10", "1,5", "1e", "e5", "٣", None, "1 2", "--1", "1e+5", "Inf ", "NAN",
    "\t1\n",
    "1\u00a0", "1e-999",
]  # fmt: skip
EPOCHS = [
    "1.5", "-1500", "2500000", "1e3", "", "x", "1.1234567891", "-1.9999999", "99999999999999999999", "253402300799",
    "253402300800", "-62135596800", "-62135596801", "+5", " 5 ", None, "5.", ".5", "1.1234567",
]  # fmt: skip
KEYS = ["a", "", " ", "NA", None, "  a "]
DAY = "2024-03-01"
MIXED = (
    [("a", text, "1", "1") for text in TIMES]
    + [("a", DAY, text, "1") for text in NUMBERS]
    + [("a", DAY, "1", text) for text in NUMBERS]
    + [(text, DAY, "1", "1") for text in KEYS]
)


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": "m",
            "version": 1,
            "key": ["k"],
            "time": "at",
            "measurement": ["v"],
            "control": ["u"],
            "states": ["x"],
            "process": {"kind": "random_walk"},
            "observation": {},
            "initial": {"diffuse": True},
            **changes,
        }
    )


def times(texts: list[str]) -> list[tuple[str | None, ...]]:
    return [("a", text, "1", "1") for text in texts]


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"time_zone": "UTC"}, MIXED),
        ({"time_zone": "America/New_York"}, MIXED),
        *[({"time_format": f"epoch_{unit}"}, [("a", text, "1", "1") for text in EPOCHS])
          for unit in ("seconds", "milliseconds", "microseconds")],
        ({"time_format": "%d.%m.%Y %H:%M:%S.%f%z"},
         times(["1.2.1970 03:04:05.5Z", "01.02.1970 03:04:05.5+0100", "32.1.1970 1:1:1.1Z", "1.2.70 1:1:1.1Z"])),
        ({"time_format": "%m/%d/%Y", "time_zone": "Europe/Berlin"}, times(["1/2/1970", "13/1/1970", "1/2/1890", ""])),
    ],
    ids=["iso", "iso in New York", "seconds", "milliseconds", "microseconds", "with offset", "dates"],
)  # fmt: skip
def test_both_parsers_agree(
    spark: SparkSession, tmp_path: Path, changes: dict[str, Any], rows: list[tuple[str | None, ...]]
) -> None:
    from pyspark.sql import functions as F

    model = spec(**changes)
    path = tmp_path / "rows.parquet"
    columns = zip(("k", "at", "v", "u"), zip(*rows, strict=True), strict=True)
    pq.write_table(pa.table({name: pa.array(list(values), pa.string()) for name, values in columns}), path)
    offline = parse(model, read(path, model.columns), "rows")
    raw = spark.read.parquet(str(path))
    checked = checked_rows(raw, model, key_types_of(model, raw.schema))
    landed = checked.select("_reason", F.unix_micros("at").alias("time"), "v", "u").collect()
    for i, (row, found) in enumerate(zip(rows, landed, strict=True)):
        assert found["_reason"] == offline.reason[i], row
        if found["_reason"] is None:
            y = float(offline.y[0, i])
            assert (found["time"], found["v"], found["u"]) == (
                int(offline.time[i]), None if y != y else y, float(offline.u[0, i]),
            ), row  # fmt: skip
