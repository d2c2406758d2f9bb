"""The files that tasks of the operator write: their rows, in order, and only those of the attempt that counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.state.encoding.estimates import EstimateFormat
from jobs.state.encoding.keys import KeyKind, build_key_columns, build_key_text
from jobs.state.encoding.packets import OutputPacket, Records
from jobs.state.encoding.table_columns import find_arrow_type, parse_key_columns
from jobs.storage.part_files import parse_partition, remove_of
from jobs.streaming.estimate_files import (
    PROPERTY,
    EstimateRows,
    EstimateTarget,
    EstimateWriter,
    build_file_reader,
    pass_unchanged,
    select_last_of_runs,
)
from jobs.streaming.written_files import list_written_parts

LIST = pa.list_(pa.float64())
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("id", pa.int64()),
        ("event_time", pa.timestamp("us", "UTC")),
        *(("mean", LIST), ("covariance", LIST)),
        *(("log_likelihood", pa.float64()), ("nis", pa.float64()), ("flags", pa.string())),
        *(("batch_id", pa.int64()), ("correction", pa.bool_()), ("generation", pa.string())),
    ]
)
FORMAT = EstimateFormat(KeyKind(("id",), ("bigint",), True), 1, True, ())


def packet(keys: list[int], first: float) -> bytes:
    n = len(keys)
    arrays = {
        "key": np.array(keys),
        "time": np.arange(n),
        "mean": first + np.arange(n, dtype=float)[None],
        "covariance": np.ones((1, n)),
        "log_likelihood": np.zeros(n),
        "nis": np.full(n, np.nan),
        "flag": np.zeros(n, np.uint8),
    }
    return FORMAT.layout.encode(Records(arrays, None))


def frame(kind: OutputPacket, count: int, payload: bytes) -> pd.DataFrame:
    return pd.DataFrame({"kind": [kind], "rows": [count], "payload": [payload]})


class Packets:
    """A processor that puts out two packets of estimates, a correction, and a row that was too late."""

    def handleInputRows(self, *_: Any) -> Iterator[pd.DataFrame]:  # noqa: N802
        yield frame(OutputPacket.ESTIMATES, 3, packet([4, 4, 7], 0.0))
        yield frame(OutputPacket.LATE, 1, b"late")
        yield frame(OutputPacket.CORRECTION, 1, packet([4], 50.0))
        yield frame(OutputPacket.ESTIMATES, 2, packet([7, 9], 3.0))


class Task:
    """A task's context, as far as the operator asks it."""

    def __init__(self, told: str | None, attempt: int) -> None:
        self.told, self.attempt = told, attempt

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802
        assert name == PROPERTY
        return self.told

    def partitionId(self) -> int:  # noqa: N802
        return 3

    def stageId(self) -> int:  # noqa: N802
        return 8

    def taskAttemptId(self) -> int:  # noqa: N802
        return self.attempt


def put_out(monkeypatch: pytest.MonkeyPatch, told: str | None, attempt: int = 1) -> list[dict[str, Any]]:
    """Return the rows that an attempt of the operator's task puts out."""
    monkeypatch.setattr(TaskContext, "get", staticmethod(lambda: Task(told, attempt)))
    writer = EstimateWriter(Packets(), EstimateRows(FORMAT, SCHEMA))
    frames = list(writer.handleInputRows((1,), iter([]), None))
    return [row for one in frames for row in one.to_dict("records")]


def test_of_two_attempts_of_a_task_only_the_one_whose_rows_arrive_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = EstimateTarget(str(tmp_path), "a1", 1 << 28, {"batch_id": 5, "generation": "g1"}).encode()
    both = [put_out(monkeypatch, told, attempt) for attempt in (1, 2)]
    parts = [list_written_parts(rows) for rows in both]  # type: ignore[arg-type]
    names = [one.file.path for some in parts for one in some]
    assert len(set(names)) == len(names) == len(list(tmp_path.iterdir())) == 4
    assert [(row["kind"], row["rows"]) for row in both[1]] == [
        (OutputPacket.LATE, 1),
        (OutputPacket.ESTIMATES_FILE, 5),
        (OutputPacket.CORRECTION_FILE, 1),
    ]
    assert {one.partition for one in parts[1]} == {3}
    for some in parts:
        estimates, corrections = (pq.read_table(tmp_path / one.file.path) for one in some)
        assert estimates.schema.remove_metadata().equals(SCHEMA)
        assert estimates["id"].to_pylist() == [4, 4, 7, 7, 9]
        assert estimates["key"].to_pylist() == ["4", "4", "7", "7", "9"]
        assert estimates["mean"].to_pylist() == [[0.0], [1.0], [2.0], [3.0], [4.0]]
        assert set(estimates["generation"].to_pylist()) == {"g1"} and set(
            estimates["batch_id"].to_pylist()
        ) == {5}
        assert set(estimates["correction"].to_pylist()) == {False}
        assert corrections["correction"].to_pylist() == [True] and corrections["mean"].to_pylist() == [[50.0]]


def test_an_attempt_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the one that it wrote nor those that were complete: on a full disk the next one needs the space."""
    put = Packets.handleInputRows

    def failing(*arguments: Any) -> Iterator[pd.DataFrame]:
        yield from put(*arguments)
        assert len(list(tmp_path.iterdir())) == 3
        raise OSError("no space left on device")

    monkeypatch.setattr(Packets, "handleInputRows", failing)
    monkeypatch.setattr("jobs.storage.part_files._GROUP_ROWS", 1)
    with pytest.raises(OSError, match="no space left"):
        put_out(
            monkeypatch, EstimateTarget(str(tmp_path), "a1", 1, {"batch_id": 5, "generation": "g1"}).encode()
        )
    assert list(tmp_path.iterdir()) == []


def test_the_files_of_all_tasks_of_an_attempt_and_no_others_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the driver does when a task fails, after others of the same micro-batch have ended."""
    mark = {"batch_id": 5, "generation": "g1"}
    for name, attempt in (("a1", 1), ("a1", 2), ("a2", 3)):
        put_out(monkeypatch, EstimateTarget(str(tmp_path), name, 1 << 28, mark).encode(), attempt)
    remove_of(str(tmp_path), "a1")
    assert len(left := list(tmp_path.iterdir())) == 2
    assert {parse_partition(one.name) for one in left} == {3} and all("-a2-" in one.name for one in left)
    remove_of(str(tmp_path / "absent"), "a2")


@pytest.mark.parametrize("cuts", [1, 2, 1000])
def test_files_are_read_in_the_order_of_the_packets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: int
) -> None:
    told = EstimateTarget(str(tmp_path), "a1", 1 << 28, {"batch_id": 5, "generation": "g1"}).encode()
    names = [
        one.file.path
        for attempt in (1, 2)
        for one in list_written_parts(put_out(monkeypatch, told, attempt))  # type: ignore[arg-type]
        if one.kind == OutputPacket.ESTIMATES_FILE
    ]
    monkeypatch.setattr("jobs.streaming.estimate_files.ROWS_A_PACKET", cuts)
    columns = pa.schema([SCHEMA.field("mean"), SCHEMA.field("key")])
    numbers = [pa.RecordBatch.from_pydict({"id": [0, 3]})]
    for along, expected in ((pass_unchanged, [0, 1, 2, 3, 4] * 2), (select_last_of_runs, [1, 3, 4] * 2)):
        found = list(build_file_reader(str(tmp_path), {3: names}, columns, along)(iter(numbers)))
        assert all(one.schema.equals(columns) for one in found)
        assert [value for one in found for (value,) in one.column("mean").to_pylist()] == expected


def test_columns_of_a_key_come_from_its_text() -> None:
    kind = KeyKind(("site", "day", "n", "on"), ("string", "date", "smallint", "boolean"), False)
    texts = [
        '["a","2024-02-29","-7","true"]',
        '["q\\"\\\\u","1969-12-31","8","false"]',
        "[null,null,null,null]",
    ]
    for some in (texts, texts[:1] * 3):
        found = parse_key_columns(kind, pa.array(some))
        assert found["site"].to_pylist() == (["a", 'q"\\u', None] if some is texts else ["a"] * 3)
        assert found["n"].type == pa.int16() and found["n"][0].as_py() == -7
        assert found["day"][0].as_py().isoformat() == "2024-02-29" and found["on"][0].as_py() is True
    assert parse_key_columns(KeyKind(("name",), ("string",), False), pa.array(["x", "y"]))[
        "name"
    ].to_pylist() == [
        "x",
        "y",
    ]
    far = pa.array(["+12345-01-01", "-0044-03-15", None, "2024-02-29"])
    days = parse_key_columns(KeyKind(("day",), ("date",), False), far)["day"].cast(pa.int32()).to_pylist()
    assert days == [3_789_391, -735_525, None, 19_782]
    assert parse_key_columns(KeyKind((), (), False), pa.array(["[]"])) == {}
    with pytest.raises(UserError, match="a key column has the type array<int>: convert it to string"):
        find_arrow_type("array<int>")


AWKWARD = {
    "string": ["'a'", "''", r"'ü\"\\,]'"],
    "binary": ["X'61'", "X''", "X'C3BC'"],
    "boolean": ["true", "false", "NULL"],
    "tinyint": ["-128Y", "127Y", "0Y"],
    "float": [
        "float('NaN')",
        "float('-Infinity')",
        "float('-0.0')",
        "float('1.0E10')",
        "float('1.4E-45')",
        "float('3.4028235E38')",
        "float('0.1')",
    ],
    "double": [
        "double('NaN')",
        "double('Infinity')",
        "-0.0D",
        "1.0E10D",
        "4.9E-324D",
        "1.7976931348623157E308D",
    ],
    "decimal(10,2)": ["1.5BD", "-0.01BD", "99999999.99BD"],
    "decimal(38,18)": ["0.000000000000000001BD", "-12345678901234567890.5BD", "0BD"],
    "decimal(5,0)": ["-99999BD", "7BD", "0BD"],
    "date": ["DATE'0001-01-01'", "DATE'9999-12-31'", "DATE'1582-10-04'"],
    "timestamp": [
        *("TIMESTAMP'1850-01-01 00:00:00.000001Z'", "TIMESTAMP'2024-02-29 12:30:00.1Z'"),
        *("TIMESTAMP'0001-01-01 00:00:00Z'", "timestamp_micros(327403382400100000)"),
        *("timestamp_micros(-63555753599876544)", "TIMESTAMP'9999-12-31 23:59:59.999999Z'"),
    ],
    "timestamp_ntz": ["TIMESTAMP_NTZ'1850-01-01 00:00:00.000001'", "TIMESTAMP_NTZ'2024-02-29 12:30:00'"],
}


@pytest.mark.spark
@pytest.mark.parametrize("type_", AWKWARD)
def test_a_key_of_any_type_has_the_columns_that_spark_reads_from_its_text(
    spark: SparkSession, type_: str
) -> None:
    values = ", ".join(f"(CAST({one} AS {type_}))" for one in AWKWARD[type_])
    given = spark.sql(f"SELECT a, a AS b FROM VALUES {values} AS t(a)")
    for names in (("a",), ("a", "b")):
        kind = KeyKind(names, (type_,) * len(names), False)
        text = given.select(build_key_text(kind).alias("text"))
        table = text.select("text", *build_key_columns(kind, F.col("text"))).toArrow()
        found = parse_key_columns(kind, table["text"].combine_chunks())
        for name in names:
            expected = table[name].combine_chunks().cast(find_arrow_type(type_))
            assert found[name].type == expected.type
            assert repr(found[name].view(_bits(expected.type)).to_pylist()) == repr(
                expected.view(_bits(expected.type)).to_pylist()
            )


def _bits(kind: pa.DataType) -> pa.DataType:
    """Return a type in which Python holds all values of another one."""
    if pa.types.is_timestamp(kind):
        return pa.int64()
    return pa.int32() if pa.types.is_date(kind) else kind
