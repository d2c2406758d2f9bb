"""Monitoring of a stream: progress in files and in its table, status with alarms, a disk that cannot be written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jobs import status
from jobs.supervision import progress
from jobs.supervision.progress import ProgressLog, Writer, progress_of
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Return a pipeline whose stream ran twice, two micro-batches each, some rows late, and lags behind one frame."""
    days = random_rows(6)
    pipeline = Pipeline(tmp_path_factory.mktemp("watched"), random_walk_spec())
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1], days[2].assign(at=days[0]["at"]))
    pipeline.stream(metrics_file=str(pipeline.folder / "walk.prom"))
    pipeline.land(days[3], days[4])
    pipeline.stream()
    pipeline.land(days[5])
    return pipeline


def test_every_micro_batch_is_recorded_and_reported(streamed: Pipeline) -> None:
    rows = progress_of(streamed.warehouse, "walk").orderBy("batch_id").collect()
    assert [(row["batch_id"], row["run"], row["rows"]) for row in rows] == [
        (0, "1", 150),
        (1, "1", 150),
        (2, "2", 150),
        (3, "2", 150),
    ]
    late = streamed.warehouse.read("quarantine").count()
    assert [row["late"] for row in rows] == [0, late, 0, 0]
    assert all(row["estimated"] + row["quarantined"] == row["rows"] for row in rows)
    assert all(row["seconds"] > 0 and row["state_rows"] > 0 and row["durations"]["addBatch"] for row in rows)
    assert [row["lag_rows"] for row in rows][-1] == 0
    text = (streamed.folder / "walk.prom").read_text()
    assert f'kalman_rows_total{{generation="walk-g0001",model="walk",outcome="late"}} {late}.0' in text

    report = status.run(streamed.settings, "walk", alarm_after="1h")
    (lineage,) = report.data["models"][0]["generations"]
    assert (lineage["rows_behind"], lineage["progress"]["batch_id"]) == (150, 3)
    assert 0 < lineage["seconds_behind"] < 3600
    assert report.errors == []
    (said,) = status.run(streamed.settings, "walk", alarm_after="1ms").errors
    assert said.startswith("walk: walk-g0001 makes no progress: 150 rows have waited for")


def test_progress_is_compacted_into_its_table_once(
    streamed: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    warehouse = streamed.warehouse
    mine = ProgressLog(warehouse, "other")
    shutil.copytree(Path(warehouse.path("_progress/walk")), mine.path)
    with Path(mine.path, mine.names()[0]).open("a") as file:
        file.write('{"batch_id": 99, "cut sh')  # a driver that was killed
    before = [row["batch_id"] for row in progress_of(warehouse, "other").orderBy("batch_id").collect()]
    assert before == [0, 1, 2, 3]

    with monkeypatch.context() as patch:
        patch.setattr(ProgressLog, "_complete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mine.compact()
    assert not warehouse.exists(progress.format_table_name("other"))
    folder = next(name for name in mine.names() if name.startswith("fold-"))
    kept = Path(mine.path, folder)
    shutil.copytree(kept, streamed.folder / folder)
    assert mine.compact() == 0  # completes the interrupted one
    shutil.copytree(streamed.folder / folder, kept)  # killed after the commit, before its files were removed
    mine.compact()
    assert [row["batch_id"] for row in warehouse.read("progress/other").orderBy("batch_id").collect()] == [
        0,
        1,
    ]
    after = [row["batch_id"] for row in progress_of(warehouse, "other").orderBy("batch_id").collect()]
    assert after == before
    newest = progress.read_newest_record(warehouse, "other", "walk-g0001")
    assert newest is not None and newest["batch_id"] == 3

    monkeypatch.setattr(progress, "PART_BYTES", 10)
    writer = Writer(mine, "walk-g0001", 3)
    for batch in (4, 5, 6):
        writer.write(
            [{**newest, "batch_id": batch}]
        )  # each fills a file, and the file before it is compacted
    assert [row["batch_id"] for row in progress_of(warehouse, "other").orderBy("batch_id").collect()] == [
        *range(7)
    ]
    assert warehouse.read("progress/other").count() == 6


def interrupted(self: ProgressLog, folder: str) -> None:
    raise KeyboardInterrupt


def test_a_progress_log_that_cannot_be_written_does_not_stop_the_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    days = random_rows(2)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1])
    Path(pipeline.settings.warehouse, "_progress").write_text("in the way")
    done = pipeline.stream()
    assert done.data["batches"] == 1
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), days[1]))
    assert "warning: progress could not be recorded" in capsys.readouterr().err
