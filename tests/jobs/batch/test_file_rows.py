"""Measurements read by tasks: the columns, rows and counts of Spark's reader, and a reason wherever Spark must read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, WriterProperties, write_deltalake
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from jobs.batch import file_rows
from jobs.batch.batch_filter import Interval
from jobs.batch.file_rows import HistoryFiles, RowSource, choose_files
from jobs.snapshots import measurement_files
from jobs.snapshots.measurement_files import build_packing_columns, divide_groups, read_groups
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.routing import make_routing
from jobs.state.encoding.rows import RowFormat, RowId, group_by_bucket, pack_rows, select_columns, unpack_rows
from jobs.storage.tables import LATE_COPIES, LATE_COPIES_TABLE
from jobs.storage.warehouse import Tables
from tests.jobs.support.pipeline import random_walk_spec

TIME = pa.timestamp("us", "UTC")
FIRST, STEP, N = 1_700_000_000_000_000, 1_000_001, 60
TEXTS = [
    "",
    "ü",
    'a"b',
    "back\\slash",
    "tab\tline\n",
    "\x1f",
    "long enough for a stripe of xxHash: " * 3,
    "/é",
]
KEYS = {
    "text": KeyKind(("text",), ("string",), False),
    "integer": KeyKind(("short",), ("smallint",), True),
    "several": KeyKind(("text", "short", "other"), ("string", "smallint", "string"), False),
    "none": KeyKind((), (), False),
}
IDS = {"no id": None, "text id": RowId("other", False, 0), "integer id": RowId("whole", True, 0)}


def spec_of(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(random_walk_spec(**changes))


def rows_of(count: int = N, start: int = 0) -> pa.Table:
    """Return rows with keys of several types; `a` and `b` are a model's measurements."""
    at = np.arange(start, start + count)
    return pa.table(
        {
            "id": pa.array(at % 7, pa.int64()),
            "at": pa.array(FIRST + STEP * at, TIME),
            "a": pa.array(np.sin(at)),
            "b": pa.array([None if i % 5 == 0 else float(i) for i in at.tolist()], pa.float64()),
            "text": pa.array([TEXTS[i % len(TEXTS)] for i in at.tolist()]),
            "other": pa.array([None if i % 3 == 0 else f"other {i % 4}" for i in at.tolist()]),
            "short": pa.array(at % 11 - 5, pa.int16()),
            "whole": pa.array([None if i % 4 == 0 else i << 54 for i in at.tolist()], pa.int64()),
            "float": pa.array(np.cos(at), pa.float32()),
        }
    )


def chosen(root: Path, spec: ModelSpec | None = None) -> HistoryFiles | str:
    return choose_files(Tables(str(root)), spec or spec_of(), "t", DeltaTable(root / "t").version())


def whole(root: Path, spec: ModelSpec | None = None) -> HistoryFiles:
    found = chosen(root, spec)
    assert isinstance(found, HistoryFiles), found
    return found


@pytest.mark.spark
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("row_id", IDS)
def test_tasks_make_the_columns_that_spark_makes(
    spark: SparkSession, tmp_path: Path, key: str, row_id: str
) -> None:
    write_deltalake(tmp_path / "t", rows_of())
    files = whole(tmp_path)
    fmt = RowFormat(KEYS[key], "at", ("a", "float"), ("whole", "short"), row_id=IDS[row_id])
    (batch,) = read_groups(files.folder, files.pieces, rows_of().schema.names, "at", None)
    expected = select_columns(Warehouse(spark, str(tmp_path)).read("t"), fmt).toArrow()
    found = build_packing_columns(batch, fmt)
    assert found.schema.names == expected.schema.names
    for name in found.schema.names:
        assert found.column(name).equals(expected[name].combine_chunks().cast(found.column(name).type)), name


@pytest.mark.spark
@pytest.mark.parametrize("bounds", [(None, None), (None, 47), (20, None), (21, 22), (100, 200)])
def test_tasks_pack_and_count_the_rows_of_an_interval(
    spark: SparkSession, tmp_path: Path, bounds: tuple[int | None, int | None]
) -> None:
    for rows in (rows_of(20), rows_of(20, 20), rows_of(20, 40), rows_of(5, 60).drop(["b"])):
        small = WriterProperties(max_row_group_size=3)
        write_deltalake(tmp_path / "t", rows, mode="append", schema_mode="merge", writer_properties=small)
    first, last = (None if one is None else FIRST + STEP * one for one in bounds)
    assert len(whole(tmp_path).pieces) == 23
    files = whole(tmp_path).between(Interval(first, last))
    fmt = RowFormat(KEYS["several"], "at", ("a", "b"), ())
    at, warehouse = F.unix_micros("at"), Warehouse(spark, str(tmp_path))
    frame = warehouse.read("t")
    frame = frame.filter((at >= (first or 0)) & (at < (last or 1 << 62)))
    routing = make_routing(3, 1)
    found, expected = (
        [unpack_rows(one, fmt) for one in group_by_bucket(iter(packed.toArrow().to_batches()))]
        for packed in (files.pack(warehouse, fmt, routing, False), pack_rows(frame, fmt, routing))
    )
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys.text is not None and ours.keys.text.equals(theirs.keys.text)
        for left, right in zip(ours.rows, theirs.rows, strict=True):
            assert left.tobytes() == right.tobytes()
    for middle in (None, FIRST + STEP * 30, FIRST + STEP * 33):
        counted = files.count(warehouse, "at", middle)
        before = 0 if middle is None else frame.filter(at < middle).count()
        assert counted == (frame.count() - before, before)


def test_row_groups_are_divided_by_bytes_and_none_is_lost(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", rows_of())
    _rewrite(tmp_path, lambda rows: rows, row_group_size=4)
    files = whole(tmp_path)
    for cores in (1, 2, 4, 100):
        parts = divide_groups(files.pieces, cores)
        assert [one for part in parts for one in part] == list(files.pieces)
        assert len(parts) == min(cores, len(files.pieces))
        assert max(map(len, parts)) <= -(-len(files.pieces) // cores) + 1
    assert divide_groups(files.between(Interval(FIRST + 10**12, None)).pieces, 2) == []


WHERE: dict[str, tuple[dict[str, Any], str]] = {
    "other case": ({"key": ["ID"]}, "no column ID"),
    "a number as text": ({"measurement": ["text", "b"]}, "text has the type string"),
    "a key of another type": ({"key": ["float"]}, "float has the type float"),
    "a time of another type": ({"time": "whole"}, "whole has the type long"),
}


@pytest.mark.parametrize("case", WHERE)
def test_spark_reads_columns_that_are_not_usual(tmp_path: Path, case: str) -> None:
    changes, why = WHERE[case]
    write_deltalake(tmp_path / "t", rows_of())
    assert why in str(chosen(tmp_path, spec_of(**changes)))


def test_spark_reads_nested_and_partitioned_columns(tmp_path: Path) -> None:
    nested = pa.array([[1.0]] * N, pa.list_(pa.float64()))
    rows = rows_of().set_column(2, "a", nested)
    write_deltalake(tmp_path / "t", rows)
    assert "the type array" in str(chosen(tmp_path))
    write_deltalake(tmp_path / "p" / "t", rows_of(), partition_by=["id"])
    assert "partition" in str(chosen(tmp_path / "p"))
    write_deltalake(tmp_path / "q" / "t", rows_of(), partition_by=["short"])
    assert sum(one.rows for one in whole(tmp_path / "q").pieces) == N  # the model does not need this column


def test_spark_reads_what_is_in_a_store_or_has_late_copies_or_many_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "store" in str(choose_files(Tables("s3a://bucket/root"), spec_of(), "t", 0))
    write_deltalake(tmp_path / "t", rows_of())
    monkeypatch.setattr(file_rows, "MOST_FILES", 0)
    assert "1 files" in str(chosen(tmp_path))
    monkeypatch.undo()
    assert whole(tmp_path).schema.names == spec_of().columns
    Tables(str(tmp_path)).create(LATE_COPIES_TABLE, LATE_COPIES)
    assert "late" in str(chosen(tmp_path))


def _mark(reader: int, *features: str) -> dict[str, Any]:
    listed = {"readerFeatures": features, "writerFeatures": features} if features else {}
    return {"minReaderVersion": reader, "minWriterVersion": 7 if features else 5, **listed}


def test_packets_of_many_rows_and_rows_that_spark_reads_move_through_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deltalake(tmp_path / "t", rows_of())
    warehouse: Any = SimpleNamespace(spark=None)  # no question starts a job
    frame: Any = None
    tasks = RowSource(warehouse, lambda: frame, lambda: whole(tmp_path))
    assert RowSource.of_frame(warehouse, frame, "for a reason").moves_rows and not tasks.moves_rows
    assert tasks.find_newest("at") == FIRST + STEP * (N - 1)
    assert tasks.before("at", FIRST).count("at") == 0
    assert tasks.before("at", FIRST + STEP * N).count("at") == N
    monkeypatch.setattr(file_rows, "QUICK_BYTES", 100)
    assert tasks.moves_rows


@pytest.mark.parametrize(
    "protocol", [_mark(2), _mark(3, "deletionVectors"), _mark(3, "columnMapping"), _mark(3, "typeWidening")]
)
def test_spark_reads_tables_with_features(tmp_path: Path, protocol: dict[str, Any]) -> None:
    write_deltalake(tmp_path / "t", rows_of())
    _change_log(tmp_path, lambda action: action.get("protocol", {}).update(protocol))
    assert "features" in str(chosen(tmp_path))


def test_spark_reads_columns_with_metadata_beside_a_comment(tmp_path: Path) -> None:
    def describe(metadata: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
        def change(action: dict[str, Any]) -> None:
            if "metaData" in action:
                schema = json.loads(action["metaData"]["schemaString"])
                schema["fields"][0]["metadata"] = metadata
                action["metaData"]["schemaString"] = json.dumps(schema)

        return change

    write_deltalake(tmp_path / "t", rows_of())
    _change_log(tmp_path, describe({"comment": "the key"}))
    whole(tmp_path)
    _change_log(tmp_path, describe({"__CHAR_VARCHAR_TYPE_STRING": "char(9)"}))
    assert "metadata" in str(chosen(tmp_path))


def _cast(name: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    return lambda rows: rows.set_column(
        rows.schema.names.index(name), name, rows[name].cast(kind, safe=False)
    )


OTHERS: dict[str, tuple[Callable[[pa.Table], pa.Table], dict[str, Any], str]] = {
    "a widened number": (_cast("a", pa.float32()), {}, "column a has another type"),
    "a widened key": (_cast("id", pa.int32()), {}, "column id has another type"),
    "milliseconds": (_cast("at", pa.timestamp("ms", "UTC")), {}, "column at has another type"),
    "nanoseconds": (_cast("at", pa.timestamp("ns", "UTC")), {}, "column at has another type"),
    "no zone": (_cast("at", pa.timestamp("us")), {}, "column at has another type"),
    "INT96": (lambda rows: rows, {"use_deprecated_int96_timestamps": True}, "column at has another type"),
    "no key": (lambda rows: rows.drop(["id"]), {}, "no column id"),
    "another case": (
        lambda rows: rows.rename_columns({"a": "A"}),
        {},
        "no column a, or writes it in another case",
    ),
    "no statistics": (lambda rows: rows, {"write_statistics": False}, "no statistics"),
    "a null time": (
        lambda rows: rows.set_column(1, "at", pa.array([None, *rows["at"].to_pylist()[1:]], TIME)),
        {},
        "may be null",
    ),
    "an old calendar": (
        lambda rows: rows.replace_schema_metadata({"org.apache.spark.legacyDateTime": ""}),
        {},
        "calendar",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_spark_reads_files_that_differ_from_their_table(tmp_path: Path, case: str) -> None:
    change, options, why = OTHERS[case]
    write_deltalake(tmp_path / "t", rows_of())
    _rewrite(tmp_path, change, **options)
    assert why in str(chosen(tmp_path))


def test_spark_reads_files_of_a_codec_that_tasks_may_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deltalake(tmp_path / "t", rows_of())
    _rewrite(tmp_path, lambda rows: rows, compression="zstd")
    whole(tmp_path)
    monkeypatch.setattr(
        measurement_files, "_CODECS", {"UNCOMPRESSED"}
    )  # no library here writes the codec LZO
    assert "compressed by ZSTD" in str(chosen(tmp_path))


def test_spark_reads_files_that_cannot_be_opened(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", rows_of())
    (file,) = (tmp_path / "t").glob("*.parquet")
    file.write_bytes(b"PARE" + bytes(64) + b"PARE")  # as an encrypted file begins and ends
    assert "cannot be opened" in str(chosen(tmp_path))
    file.unlink()
    assert "cannot be opened" in str(chosen(tmp_path))


def _rewrite(root: Path, change: Callable[[pa.Table], pa.Table], **options: Any) -> None:
    for file in (root / "t").glob("*.parquet"):
        pq.write_table(change(pq.read_table(file)), file, **options)


def _change_log(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    log = root / "t" / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        change(action)
    log.write_text("\n".join(map(json.dumps, actions)))
