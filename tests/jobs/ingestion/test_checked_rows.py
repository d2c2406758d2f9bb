"""The rows of a file are checked alike in the driver and in Spark's workers, and none is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from jobs import ingest
from jobs.core.errors import UserError
from jobs.ingestion import landing
from jobs.ingestion.checking import check_rows, key_types_of
from jobs.ingestion.csv_parquet import read
from jobs.ingestion.raw_rows import Source
from jobs.specs.model_spec import ModelSpec
from jobs.warehouse.quarantine import PAYLOAD, REASON
from tests.jobs.support.pipeline import Pipeline, random_walk_spec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = '''id,at,a,b,comment
1,2024-03-01T00:00:00Z,1.5,2.5,fits
2,yesterday,1,1,no time
3,2024-03-01T00:00:00Z,many,1,no number
4,2024-03-01T00:00:00.123456789+01:00,NA,.5,fits
,2024-03-01T00:00:00Z,1,1,no key
5,2024-03-01T00:00:00Z,,1e999,infinite
6,2024-03-01T00:00:00Z,1
7,2024-03-01,3,4,"fits, ""quoted"""
8,2024-03-01,3,4,too,many
'''


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": "m",
            "version": 1,
            "key": ["k"],
            "time": "at",
            "measurement": ["v"],
            "states": ["x"],
            "process": {"kind": "random_walk"},
            "observation": {},
            "initial": {"diffuse": True},
            **changes,
        }
    )


def source(k: pa.Array) -> Source:
    at = pa.array([0] * len(k), pa.timestamp("us", "UTC"))
    return Source({"k": k, "at": at, "v": pa.array([1.0] * len(k))}, np.zeros(len(k), bool), len(k))


@pytest.mark.parametrize(
    ("given", "wanted", "keys"),
    [
        (pa.array([1, 2, None], pa.int32()), "bigint", [1, 2, None]),
        (pa.array(["1", " -7 ", "1.0", "one", "", "9223372036854775808"]), "bigint", [1, -7, None, None, None, None]),
        (pa.array([1.0, 1.5, float("nan"), 1e300]), "bigint", [1, None, None, None]),
        (pa.array([1, 2]), "string", ["1", "2"]),
        (pa.array(["a", " ", "", None]), "string", ["a", " ", None, None]),
        (pa.array([2**64 - 1], pa.uint64()), "string", ["18446744073709551615"]),
    ],
)  # fmt: skip
def test_a_key_keeps_its_value_or_is_rejected(given: pa.Array, wanted: str, keys: list[Any]) -> None:
    checked = check_rows(spec(), source(given), {"k": wanted}, "rows")
    fits = [reason is None for reason in checked.column(REASON).to_pylist()]
    found = [key if well else None for key, well in zip(checked.column("k").to_pylist(), fits, strict=True)]
    assert found == keys
    assert set(checked.column(REASON).to_pylist()) <= {None, "key k: missing", "key k: not a whole number"}


@pytest.mark.parametrize(
    ("given", "wanted", "ids", "reasons"),
    [
        (pa.array([7, None, -1]), "bigint", [7, None, -1], {None}),
        (pa.array([7, None, -1]), "string", ["7", None, "-1"], {None}),
        (pa.array(["7", " NaN ", "", "x"]), "bigint", [7, None, None, None], {None, "id no: not a whole number"}),
        (pa.array(["a", "na", None, " "]), "string", ["a", None, None, None], {None}),
        (pa.nulls(2), "string", [None, None], {None}),
    ],
)  # fmt: skip
def test_an_id_keeps_its_value_or_is_missing(
    given: pa.Array, wanted: str, ids: list[Any], reasons: set[Any]
) -> None:
    with_id = spec(duplicates={"id": "no", "within": "1h"})
    rows = source(pa.array([1] * len(given)))
    rows.columns["no"] = given
    checked = check_rows(with_id, rows, {"k": "bigint", "no": wanted}, "rows")
    assert checked.column("no").to_pylist() == ids
    assert set(checked.column(REASON).to_pylist()) == reasons
    rows.columns["no"] = pa.array([0.5] * len(given))
    with pytest.raises(UserError, match="rows: id column 'no' holds double; an id is text or a whole number"):
        check_rows(with_id, rows, {"k": "bigint", "no": wanted}, "rows")


def test_only_whole_numbers_of_64_bits_are_integer_keys() -> None:
    kinds = [pa.int8(), pa.int64(), pa.uint32(), pa.uint64(), pa.float64(), pa.string()]
    found = [key_types_of(["k"], pa.schema([("k", kind)]))["k"] for kind in kinds]
    assert found == ["bigint", "bigint", "bigint", "string", "string", "string"]


def test_a_rejected_row_keeps_its_whole_payload(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    model = ModelSpec.model_validate(random_walk_spec())
    checked = check_rows(model, read(path), {"id": "bigint"}, "rows")
    reasons = checked.column(REASON).to_pylist()
    payloads: list[Any] = [
        None if text is None else json.loads(text) for text in checked.column(PAYLOAD).to_pylist()
    ]
    assert [reason is None for reason in reasons] == [payload is None for payload in payloads]
    assert payloads[1] == {"id": "2", "at": "yesterday", "a": "1", "b": "1", "comment": "no time"}
    assert payloads[6]["_corrupt"] == "6,2024-03-01T00:00:00Z,1"
    assert payloads[8]["_corrupt"] == "8,2024-03-01,3,4,too,many"


@pytest.mark.spark
def test_small_and_large_files_are_read_alike(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for limit in (landing.IN_DRIVER_BYTES, 0):
        monkeypatch.setattr(landing, "IN_DRIVER_BYTES", limit)
        pipeline = Pipeline(tmp_path / str(limit), random_walk_spec())
        path = tmp_path / "rows.csv"
        path.write_text(ROWS)
        said = ingest.run(pipeline.settings, "walk", [str(path)])
        assert (said.data["rows"], said.data["quarantined"]) == (3, 6)
        assert ingest.run(pipeline.settings, "walk", [str(path)]).data["files_landed_before"] == 1
        rows = pipeline.warehouse.read("measurements/walk").drop("_landed_at").collect()
        reasons = pipeline.warehouse.read("quarantine").select("reason").collect()
        found.append((sorted(map(str, rows)), sorted(map(str, reasons))))
    assert found[0] == found[1]
