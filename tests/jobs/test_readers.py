"""Other tools read the live rows, the states' names and the columns' meaning: docs/readers.md, and earlier releases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import duckdb
import duckdb_extension_delta
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable

from jobs import estimate, export, maintain, monitor, skill, verify
from jobs.lineage.live import live_estimates
from jobs.lineage.live_rows import NO_END
from jobs.storage.row_changes import describe_columns
from jobs.storage.table_rows import UTC_MICROSECONDS, read_table
from scripts import reference
from tests.fixtures.make_release import FOLDER
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec
from tests.jobs.support.released import unpacked
from tests.jobs.support.stored_types import several_types
from tests.test_docs import FENCE, ROOT

pytestmark = pytest.mark.spark

PAGE = ROOT / "docs" / "readers.md"
READERS = ("duckdb", "polars", "delta-rs", "without Spark")


@pytest.fixture
def with_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB's extension for Delta, from its package: `INSTALL delta` finds it and downloads nothing."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    package = Path(duckdb_extension_delta.__file__).parent
    duckdb.connect().execute(f"INSTALL '{next(package.glob('extensions/*/delta.duckdb_extension'))}'")


@pytest.fixture
def rooms(tmp_path: Path) -> Pipeline:
    """A stream that has gone on in a second generation, from an export of the first before its last micro-batch."""
    pipeline = Pipeline(tmp_path, random_walk_spec("rooms", key=["room"]))
    days = [day.rename(columns={"id": "room"}) for day in random_rows(4, keys=16, rows=60, text=False)]
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(*days[1:3])
    pipeline.stream()  # the second generation computes the second micro-batch again: both are in the table
    exported = export.run(pipeline.settings, "rooms", batch=0).data["snapshot"]
    pipeline.land(days[3])
    pipeline.stream(adopt=exported)
    return pipeline


def comments_of(path: Path) -> dict[str, str | None]:
    return {field.name: field.metadata.get("comment") for field in DeltaTable(str(path)).schema().fields}


@pytest.mark.slow
def test_the_page_s_queries_read_the_live_rows(
    rooms: Pipeline, with_delta: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(rooms.folder)
    names: dict[str, Any] = {}
    blocks = FENCE.findall(PAGE.read_text(encoding="utf-8"))
    for _, language, code in blocks:
        if language == "python":
            exec(compile(code, str(PAGE), "exec"), names)
    expected = live_estimates(rooms.warehouse, "rooms").toPandas()
    assert (
        len(expected) == 180 < len(rooms.estimates())
    )  # the first generation's last micro-batch does not count
    means = sorted(tuple(mean) for mean in expected["mean"])
    assert sorted((row[2], row[3]) for row in names["rooms"]) == means
    assert sorted(map(tuple, names["frame"]["mean"].to_list())) == means
    assert sorted(names["level"].to_list()) == sorted(mean[0] for mean in means)
    assert sorted(map(tuple, names["table"]["mean"].to_pylist())) == means
    live = DeltaTable(str(rooms.folder / "warehouse" / "live")).to_pyarrow_table().to_pylist()
    assert [(row["generation"], row["last_batch"]) for row in live] == names["lineage"]
    assert names["lineage"] == [("rooms-g0002", NO_END), ("rooms-g0001", 0)]
    assert all(row["states"] == ["level", "slope"] and row["key_columns"] == ["room"] for row in live)
    slope = expected.assign(variance=[row[3] for row in expected["covariance"]]).sort_values("event_time")
    last = slope.groupby("room")["variance"].last() ** 0.5
    assert {row[0]: row[4] for row in names["worst"]} == {
        row[0]: pytest.approx(last[row[0]], rel=1e-15) for row in names["worst"]
    }
    printed = capsys.readouterr().out
    shown = next(code for _, language, code in blocks if not language and code.startswith("key - "))
    assert shown in printed


def times_by_reader(path: Path) -> dict[str, list[int]]:
    """Return the event times of a table in microseconds, sorted, as each reader but Spark has them."""
    con = duckdb.connect()
    con.execute("LOAD delta")
    by_duckdb = con.execute(f"SELECT epoch_us(event_time) FROM delta_scan('{path}')").fetchall()
    by_arrow = DeltaTable(str(path)).to_pyarrow_table()["event_time"]
    by_polars = pl.scan_delta(str(path)).select(pl.col("event_time").dt.epoch("us")).collect()
    without_spark = read_table(str(path.parent), path.name, ["event_time"])
    assert without_spark is not None
    found = {
        "duckdb": [row[0] for row in by_duckdb],
        "polars": by_polars["event_time"].to_list(),
        "delta-rs": by_arrow.cast(UTC_MICROSECONDS).cast(pa.int64()).to_pylist(),
        "without Spark": without_spark["event_time"].cast(pa.int64()).to_pylist(),
    }
    return {name: sorted(times) for name, times in found.items()}


@pytest.mark.slow
def test_a_released_warehouse_explains_itself_and_goes_on(with_delta: None) -> None:
    with unpacked(sorted(FOLDER.glob("*.tar.gz"))[0]) as folder:
        pipeline = Pipeline(folder, yaml.safe_load((folder / "models" / "walk.yaml").read_text()))
        warehouse = folder / "warehouse"
        assert set(comments_of(warehouse / "estimates" / "walk").values()) == {None}
        rows = len(pipeline.estimates())
        assert (
            pipeline.stream().data["batches"] == 2
        )  # the comments came before them, and nothing was in the way
        estimates = comments_of(warehouse / "estimates" / "walk")
        assert "1 level, 2 slope" in (estimates["mean"] or "") and None not in estimates.values()
        pipeline.files = 10  # names that the release has not landed
        pipeline.land(random_rows(5, keys=16, rows=40, text=True)[4])
        assert pipeline.stream().data["batches"] == 1
        found = pipeline.estimates()
        assert len(found) == rows + 120
        # Files with the release's type of times are beside new ones, until they are compacted.
        path = warehouse / "estimates" / "walk"
        both = "timestamp[ns], timestamp[us, tz=UTC]"
        assert several_types(warehouse)["estimates/walk: event_time"] == both
        expected = sorted(found["event_time"].astype("datetime64[us]").astype("int64"))
        assert times_by_reader(path) == dict.fromkeys(READERS, expected)
        assert set(comments_of(warehouse / "snapshots").values()) == {None}
        described = maintain.run(pipeline.settings, "walk").data["described"]
        (compact,) = DeltaTable(str(path)).file_uris()
        assert pq.read_schema(compact).field("event_time").type == UTC_MICROSECONDS
        assert times_by_reader(path) == dict.fromkeys(READERS, expected)
        assert {"snapshots", "manifests", "generations"} <= set(described)
        assert None not in comments_of(warehouse / "generations").values()
        versions = DeltaTable(str(warehouse / "generations")).version()
        assert maintain.run(pipeline.settings, "walk").data["described"] == []
        assert DeltaTable(str(warehouse / "generations")).version() == versions
        assert os.listdir(warehouse / "live" / "model=walk")


@pytest.mark.slow
def test_every_table_is_in_the_dictionary_and_queries_go_on_after_a_comment(tmp_path: Path) -> None:
    spec = random_walk_spec(
        outputs={"innovation": True, "measured": True},
        monitor={
            "watermark": "10min",
            "windows": [{"size": "6h"}, {"size": "1h", "when": "final"}],
            "rules": [{"name": "high", "kind": "level", "at_least": 1.0}],
        },
        forecast={"horizons": ["6h"], "tolerance": "1h"},
        expiry={"after": "12h"},
        sinks={"latest": True},
    )
    pipeline = Pipeline(tmp_path, spec)
    days = random_rows(4, keys=16, rows=60)
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1])
    pipeline.stream()
    first = monitor.run(pipeline.settings, "walk").data
    skill.run(pipeline.settings, "walk")
    estimate.run(pipeline.settings, "walk")
    # A comment comes between two runs of the queries that read the estimates as a stream.
    assert describe_columns(pipeline.warehouse, "estimates/walk", {"mean": "Another comment"})
    pipeline.land(days[2])
    assert pipeline.stream().data["rows"] > 0
    second = monitor.run(pipeline.settings, "walk").data
    assert first["window_rows"] > 0 and second["window_rows"] > 0
    skill.run(pipeline.settings, "walk")
    verify.run(pipeline.settings, "walk")
    warehouse = tmp_path / "warehouse"
    found = [log.parent for log in warehouse.rglob("_delta_log") if "checkpoints" not in log.parts]
    assert {one.relative_to(warehouse).parts[0] for one in found} >= {
        "estimates", "estimates_history", "windows", "windows_open", "alerts", "forecast_skill", "latest", "archive",
        "measurements", "generations", "live", "verifications",
    }  # fmt: skip
    assert several_types(warehouse) == {}
    for table in found:
        kind = table.relative_to(warehouse).parts[0]
        schema = pipeline.warehouse.read(str(table.relative_to(warehouse))).schema
        types = (
            reference.columns_of(reference.SCHEMAS[kind])
            if kind in reference.SCHEMAS
            else reference.TYPES[kind]
        )
        own = {"id", "at", "a", "b"} if kind not in reference.ONE_EACH else set()
        odd = {
            field.name: field.dataType.simpleString()
            for field in schema.fields
            if field.name not in own
            and types.get(field.name) != field.dataType.simpleString().replace(",", ", ")
        }
        assert odd == {}, kind
