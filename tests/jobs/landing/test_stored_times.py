"""Times that a Parquet file stores: one outside of the years 1 to 9999 rejects its row alone. No Spark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.core.times import MAX_US, MIN_US
from jobs.landing.checking import check_rows, parse
from jobs.landing.csv_parquet import read
from jobs.landing.raw_rows import RawRows
from jobs.specs.model_spec import ModelSpec
from jobs.storage.quarantine import PAYLOAD, REASON
from tests.jobs.support.pipeline import random_walk_spec

MARCH = datetime(2024, 3, 1, 12, 30, 15, 999_999, tzinfo=UTC)
DAY = date(2024, 3, 1)
NOT_A_TIME, MISSING = "time at: not a time", "time at: missing"
UNIT = {"s": 1_000_000, "ms": 1_000, "us": 1}


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(random_walk_spec(**{"time_range": {"latest": None}, **changes}))


def stored(kind: pa.DataType, values: Sequence[int | None]) -> pa.Array:
    whole = pa.array(values, pa.int32() if pa.types.is_date32(kind) else pa.int64())
    return whole.cast(kind) if not pa.types.is_date64(kind) else whole.view(kind)


def checked(path: Path, at: pa.Array, **changes: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the reasons, times (microseconds) and payloads of rows in a file with these times."""
    table = pa.table({"id": list(range(len(at))), "at": at, "a": [1.0] * len(at), "b": [2.0] * len(at)})
    pq.write_table(table, path)
    rows = check_rows(spec(**changes), read(path), {"id": "bigint"}, "rows")
    times = rows.column("at").cast(pa.int64()).to_pylist()
    payloads = [None if one is None else json.loads(one) for one in rows.column(PAYLOAD).to_pylist()]
    return rows.column(REASON).to_pylist(), times, payloads


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
@pytest.mark.parametrize("unit", ["ms", "us"])
def test_a_timestamp_out_of_range_rejects_its_row_alone(tmp_path: Path, unit: str, zone: str | None) -> None:
    scale = UNIT[unit]
    march = round(MARCH.timestamp() * 1e6) // scale
    far = [2**63 - 1, -(2**63), MAX_US // scale + 1, -(-MIN_US // scale) - 1]
    fits = [march, -1, 0, MAX_US // scale, -(-MIN_US // scale)]
    reasons, times, payloads = checked(
        tmp_path / "t.parquet", stored(pa.timestamp(unit, zone), [*far, *fits, None])
    )
    assert reasons == [NOT_A_TIME] * 4 + [None] * 5 + [MISSING]
    assert times[4:9] == [one * scale for one in fits]
    assert [one["at"].split(" ")[0] for one in payloads[:4]] == [str(one) for one in far]
    assert payloads[0]["id"] == 0 and payloads[0]["at"].endswith(
        f"(timestamp[{unit}{f', tz={zone}' if zone else ''}])"
    )


def test_nanoseconds_are_cut_to_microseconds(tmp_path: Path) -> None:
    march = round(MARCH.timestamp() * 1e6)
    values = [march * 1000 + 999, -1, 2**63 - 1, -(2**63), None]
    reasons, times, payloads = checked(tmp_path / "t.parquet", stored(pa.timestamp("ns"), values))
    assert reasons == [None] * 4 + [MISSING]
    assert times[:4] == [march, -1, (2**63 - 1) // 1000, -(2**63) // 1000]


@pytest.mark.parametrize(("kind", "scale"), [(pa.date32(), 1), (pa.date64(), 86_400_000)])
def test_a_date_out_of_range_rejects_its_row_alone(tmp_path: Path, kind: pa.DataType, scale: int) -> None:
    days = (DAY - date(1970, 1, 1)).days
    last, first = 2_932_896, -719_162
    values = [2**31 - 1, -(2**31), last + 1, first - 1, days, -1, last, first]
    reasons, times, payloads = checked(
        tmp_path / "t.parquet", stored(kind, [*(one * scale for one in values), None])
    )
    assert reasons == [NOT_A_TIME] * 4 + [None] * 4 + [MISSING]
    assert times[4:8] == [one * 86_400_000_000 for one in values[4:]]
    assert str(values[0]) in payloads[0]["at"]


def test_a_local_time_out_of_range_after_its_offset_rejects_its_row(tmp_path: Path) -> None:
    values = [MIN_US, MAX_US, 0]
    reasons, times, _ = checked(
        tmp_path / "t.parquet", stored(pa.timestamp("us"), values), time_zone="Asia/Tokyo"
    )
    assert reasons == [NOT_A_TIME, None, None]
    assert times[1:] == [MAX_US - 9 * 3_600_000_000, -9 * 3_600_000_000]


def test_times_of_an_old_spark_keep_their_years(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    at = stored(pa.timestamp("us"), [0, MAX_US // 1_000_000 * 1_000_000, MIN_US])
    table = pa.table({"id": [1, 2, 3], "at": at, "a": [1.0] * 3, "b": [1.0] * 3})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    if (
        pq.read_table(path, coerce_int96_timestamp_unit="us").column("at").cast(pa.int64()).to_pylist()
        != at.cast(pa.int64()).to_pylist()
    ):
        pytest.skip("this Arrow writes such times as nanoseconds")
    rows = check_rows(spec(), read(path), {"id": "bigint"}, "rows")
    assert rows.column("at").cast(pa.int64()).to_pylist() == at.cast(pa.int64()).to_pylist()


def test_seconds_in_memory_out_of_range_are_rejected() -> None:
    at = stored(pa.timestamp("s"), [2**63 - 1, -(2**63), 0, MAX_US // 1_000_000, None])
    one = pa.array([1.0] * len(at))
    rows = parse(
        spec(),
        RawRows({"id": pa.array(["k"] * len(at)), "at": at, "a": one, "b": one}, len(at)),
        "rows",
    )
    assert rows.reason.tolist() == [NOT_A_TIME, NOT_A_TIME, None, None, MISSING]
    assert rows.time[2:4].tolist() == [0, MAX_US // 1_000_000 * 1_000_000]
