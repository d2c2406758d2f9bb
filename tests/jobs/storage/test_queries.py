"""Queries over Delta tables without Spark, in a folder and in S3: columns, kept rows, and what is refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake

from jobs.core.errors import UserError
from jobs.storage.queries import build_in_condition, open_queries, quote_name, quote_text
from jobs.storage.table_rows import UTC_MICROSECONDS, build_location

AT = [datetime(1500, 1, 1, 0, 0, 0, 1, tzinfo=UTC), datetime(2400, 3, 1, tzinfo=UTC)]
NAME = 'it\'s "x"'
ROWS = pa.table(
    {
        "model": ["a", "b"],
        NAME: ["'", '"'],
        "at": pa.array(AT, UTC_MICROSECONDS),
        "numbers": [[1.0, float("nan")], None],
    }
)


def wrote(root: str, name: str) -> None:
    place = build_location(root, name)
    write_deltalake(
        place["table_uri"], ROWS, partition_by=["model"], storage_options=place.get("storage_options")
    )


def test_tables_are_joined_and_kept_in_a_folder_and_in_a_store(root: str) -> None:
    wrote(root, "some/rows")
    with open_queries(root) as queries:
        schema = queries.add("t", "some/rows")
        assert schema is not None and schema.names == ROWS.column_names
        assert queries.add("u", "some/others") is None
        found = queries.run(
            f"SELECT *, {quote_name(NAME)} AS x FROM t WHERE {build_in_condition('model', ['a', 'c'])}"
        )
        assert found["at"].to_pylist() == AT[:1] and found.schema.field("at").type == UTC_MICROSECONDS
        assert found["x"].to_pylist() == ["'"] and found.schema.field("x").type == pa.string()
        assert str(found["numbers"].to_pylist()) == "[[1.0, nan]]"
        queries.register_view("all_rows", "SELECT model, at FROM t")
        queries.keep("kept", "SELECT l.model FROM all_rows l JOIN t r ON l.model = r.model AND l.at = r.at")
        queries.keep("nothing", f"SELECT model FROM t WHERE model = {quote_text(NAME)}")
        assert sorted(queries.run("SELECT model FROM kept")["model"].to_pylist()) == ["a", "b"]
        assert sum(batch.num_rows for batch in queries.batches("SELECT model FROM kept")) == 2
        assert queries.run("SELECT count(*) AS n FROM nothing")["n"].to_pylist() == [0]


def test_times_of_former_releases_are_read_and_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Java's files of earlier releases have times as INT96."""
    wrote(str(tmp_path), "t")
    table = tmp_path / "t"
    for old in table.glob("*/*.parquet"):
        pq.write_table(pq.ParquetFile(old).read(), old, use_deprecated_int96_timestamps=True)
    log = table / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for add in (one["add"] for one in actions if "add" in one):
        add["size"] = (table / add["path"]).stat().st_size
    log.write_text("\n".join(map(json.dumps, actions)))
    with open_queries(str(tmp_path)) as queries:
        queries.add("t", "t")
        assert queries.run("SELECT at FROM t ORDER BY at")["at"].to_pylist() == AT
        with pytest.raises(UserError, match="cannot be read: .*nowhere"):
            queries.run("SELECT nowhere FROM t")
    next(table.glob("model=b/*.parquet")).unlink()
    with (
        open_queries(str(tmp_path)) as queries,
        pytest.raises(UserError, match="cannot be read: "),
    ):
        queries.add("t", "t")
        queries.run("SELECT at FROM t")
    DeltaTable(str(table)).alter.add_feature(
        TableFeatures.DeletionVectors, allow_protocol_versions_increase=True
    )
    with (
        open_queries(str(tmp_path)) as queries,
        pytest.raises(UserError, match="t: .* it has deletionVectors"),
    ):
        queries.add("t", "t")
