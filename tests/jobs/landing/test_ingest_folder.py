"""A watched folder: files of all formats land once each, none before it is complete, none with other columns."""

from __future__ import annotations

import gzip
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from jobs import ingest
from jobs.core.errors import UserError
from jobs.landing import folder_watch
from jobs.landing.checking import check_rows
from jobs.landing.file_landing import FileLanding
from jobs.landing.folder_watch import LANDED, SETTLE_SECONDS, Inbox, Notes
from jobs.landing.json_rows import infer_json_schema, parse_documents, read_json_documents
from jobs.specs.model_spec import ModelSpec
from jobs.storage.files import LocalFiles
from jobs.storage.quarantine import PAYLOAD, REASON
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec
from tests.jobs.support.processes import Driver, files

# Without Spark


def named(found: list[tuple[str, Any]]) -> list[str]:
    return [Path(path).name for path, _ in found]


def test_a_file_is_taken_once_when_it_has_not_changed_for_a_moment(tmp_path: Path) -> None:
    notes = Notes(LocalFiles(tmp_path / "notes"))
    inbox = Inbox([tmp_path], notes)
    growing = tmp_path / "a.csv"
    growing.write_text("id\n1\n")
    for name in (".hidden.csv", "_draft.csv", "b.csv.part", "b.txt"):
        (tmp_path / name).write_text("id\n")
    assert inbox.ready(0.0) == []
    growing.write_text("id\n1\n2\n")
    assert inbox.ready(SETTLE_SECONDS) == []
    (tmp_path / "b.csv.part").rename(tmp_path / "b.csv")
    (found,) = inbox.ready(2 * SETTLE_SECONDS)
    assert named([found]) == ["a.csv"]
    notes.note(*found, LANDED, {})
    assert named(inbox.ready(3 * SETTLE_SECONDS)) == ["b.csv"]
    # Another run knows the outcome; the same file with other content is new.
    again = Inbox([tmp_path], Notes(LocalFiles(tmp_path / "notes")))
    growing.write_text("id\n7\n")
    again.ready(0.0)
    assert named(again.ready(SETTLE_SECONDS)) == ["a.csv", "b.csv"]


def test_a_folder_that_spark_writes_is_complete_with_its_last_file(tmp_path: Path) -> None:
    inbox = Inbox([tmp_path], Notes(LocalFiles(tmp_path / "notes")))
    (tmp_path / "part.parquet").mkdir()
    assert not inbox.ready(0.0) and not inbox.ready(SETTLE_SECONDS)
    (tmp_path / "part.parquet" / "_SUCCESS").touch()
    assert not inbox.ready(SETTLE_SECONDS)
    assert named(inbox.ready(2 * SETTLE_SECONDS)) == ["part.parquet"]


def json_spec(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(random_walk_spec(**changes))


LINES = b"""\xef\xbb\xbf{"id": 1, "at": "2024-03-01T00:00:00Z", "a": 1.5, "b": null, "more": [1]}

{"id": 2, "at": "yesterday", "a": 1, "b": 2}
{"id": 3, "at"
{"id": 4, "at": "2024-03-01T00:00:01Z", "a": "2", "b": 1}
{"id": null, "at": "2024-03-01T00:00:01Z", "a": 1}
"""


@pytest.mark.parametrize("ending", [".jsonl", ".json.gz"])
def test_json_lines_are_rows_and_an_invalid_line_keeps_its_text(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows{ending}"
    path.write_bytes(gzip.compress(LINES) if ending.endswith(".gz") else LINES)
    spec = json_spec()
    schema = infer_json_schema(path, spec)
    assert (schema.field("id").type, schema.field("at").type) == (pa.int64(), pa.string())
    rows = check_rows(
        spec,
        parse_documents(spec, pa.array(read_json_documents(path), pa.binary()), str(path)),
        {"id": "bigint"},
        str(path),
    )
    assert rows.column(REASON).to_pylist() == [
        None, "time at: not a time", "value: not a JSON object", None, "key id: missing",
    ]  # fmt: skip
    texts = [line.decode() for line in LINES.removeprefix(b"\xef\xbb\xbf").splitlines() if line]
    assert rows.column(PAYLOAD).to_pylist() == [None, texts[1], texts[2], None, texts[4]]
    assert rows.column("id").to_pylist()[::3] == [1, 4] and rows.column("a").to_pylist()[::3] == [1.5, 2.0]


def test_a_json_array_is_its_items(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    items = [{"id": "x", "at": 0, "a": 1, "b": 2}, 5, {"id": "y", "at": 1.5, "a": 1e300, "b": -1}]
    path.write_text(json.dumps(items, indent=1))
    spec = json_spec(time_format="epoch_seconds")
    rows = check_rows(
        spec,
        parse_documents(spec, pa.array(read_json_documents(path), pa.binary()), str(path)),
        {"id": "string"},
        str(path),
    )
    assert rows.column(REASON).to_pylist() == [None, "value: not a JSON object", None]
    assert rows.column("at").cast(pa.int64()).to_pylist()[::2] == [0, 1_500_000]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"id": 1, "at": "2024-03-01", "a": 1}', "there is no column 'b'"),
        ("", "is empty"),
        ("[{}, ", "is not JSON"),
    ],
)
def test_a_json_file_of_other_columns_is_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(UserError, match=said):
        infer_json_schema(path, json_spec())


# On Spark


def write(frame: pd.DataFrame, path: Path) -> None:
    """Write a file under another name and rename it, as the guide says."""
    draft = path.with_name(f"{path.name}.part")
    if path.suffix == ".parquet":
        frame.to_parquet(draft, index=False)
    elif path.suffix == ".csv":
        frame.to_csv(draft, index=False)
    else:
        frame.to_json(
            draft, orient="records", lines=True, date_format="iso", date_unit="us", double_precision=15
        )
    draft.rename(path)


@pytest.mark.slow
@pytest.mark.spark
def test_files_of_every_format_land_as_they_arrive_until_the_stop(tmp_path: Path) -> None:
    days = random_rows(5)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    write(days[0], inbox / "0.csv")
    driver = Driver(
        pipeline, "ingest", "--model", "walk", "--input", str(inbox), "--trigger", "0.2", "--json"
    )
    notes = tmp_path / "warehouse" / "_folders" / "walk"
    driver.wait_for(lambda: len(files(notes)) == 1)
    write(days[1], inbox / "1.jsonl")
    write(days[2], inbox / "2.parquet")
    days[3].head(20).to_csv(inbox / "3.csv.part", index=False)  # half written
    write(days[4].rename(columns={"a": "c"}), inbox / "4.csv")
    driver.wait_for(lambda: len(files(notes)) == 4)
    assert driver.terminate() == 0, driver.said()
    assert "4.csv: there is no column 'a'" in driver.said()
    table = pipeline.warehouse.read("measurements/walk")
    assert table.count() == sum(map(len, days[:3]))
    (row,) = pipeline.tables.rows("quarantine")
    assert row["reason"].startswith("file: there is no column 'a'") and row["source"] == str(inbox / "4.csv")
    # Files of another format give the same rows.
    landed = (
        table.selectExpr("bigint(id) id", "at", "a", "b")
        .toPandas()
        .sort_values(["at", "id", "a", "b"], ignore_index=True)
    )
    sent = pd.concat(days[:3]).sort_values(["at", "id", "a", "b"], ignore_index=True)
    assert landed["a"].to_numpy() == pytest.approx(sent["a"].to_numpy(), nan_ok=True, abs=1e-14)
    # Landing them again by hand is idempotent.
    done = ingest.run(
        pipeline.settings, "walk", [str(inbox / name) for name in ("0.csv", "1.jsonl", "2.parquet")]
    )
    assert (done.data["files_landed"], done.data["files_landed_before"]) == (0, 3)


@pytest.mark.spark
def test_a_file_that_changes_after_it_has_landed_is_refused_and_a_limit_ends_the_landing(
    tmp_path: Path,
) -> None:
    pipeline, day = Pipeline(tmp_path, random_walk_spec()), random_rows(1)[0]
    path = tmp_path / "rows.csv"

    def look(limit: dict[str, Any] | None = None) -> folder_watch.WatchTotals:
        pipeline.write_spec(random_walk_spec(quarantine=limit))
        notes = Notes(LocalFiles(tmp_path / "warehouse" / "_folders" / "walk"))
        landing = folder_watch.FolderLanding(
            FileLanding(pipeline.tables, pipeline.spec), Inbox([tmp_path], notes)
        )
        landing.inbox.ready(0.0)
        landing.take_all(landing.inbox.ready(SETTLE_SECONDS))
        return landing.totals

    day.to_csv(path, index=False)
    assert (look().counts.rows, look().files) == (len(day), 0)
    os.utime(path, (1.0, 1.0))
    assert (look().counts.rows, look().refused) == (0, 0)
    assert pipeline.tables.row_count("measurements/walk") == len(day)
    day.head(3).to_csv(path, index=False)
    assert look().refused == 1
    (row,) = pipeline.tables.rows("quarantine")
    assert row["reason"].startswith("file: has changed since it landed")
    (tmp_path / "other.csv").write_text("id,at\n1,2024-03-01\n")
    with pytest.raises(
        UserError, match="other.csv: there is no column 'a'.*quarantine.fail_above allows no whole"
    ):
        look({"fail_above": 0.1})
    assert pipeline.tables.row_count("measurements/walk") == len(day)


@pytest.mark.spark
@pytest.mark.soak
def test_a_killed_landing_lands_each_file_once(tmp_path: Path) -> None:
    days = random_rows(12)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    moments = random.Random(3)
    notes, log = (tmp_path / "warehouse" / name for name in ("_folders/walk", "measurements/walk/_delta_log"))
    for number, day in enumerate(days):
        write(day, inbox / f"{number:02d}.csv")
        driver = Driver(pipeline, "ingest", "--model", "walk", "--input", str(inbox), "--trigger", "0.2")
        had = len(files(log))
        driver.wait_for(lambda had=had: len(files(log)) > max(had, 1))
        time.sleep(moments.uniform(0.0, 0.3))
        driver.kill()
    driver = Driver(pipeline, "ingest", "--model", "walk", "--input", str(inbox), "--trigger", "0.2")
    driver.wait_for(lambda: len(files(notes)) == len(days))
    assert driver.terminate() == 0, driver.said()
    assert pipeline.tables.row_count("measurements/walk") == sum(map(len, days))
