"""Many small files land in few commits, each exactly once, whatever is killed between the commits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs import ingest
from jobs.core.errors import INPUT_ERROR, UserError
from jobs.landing.file_landing import FileLanding
from jobs.landing.folder_watch import SETTLE_SECONDS, FolderLanding, Inbox, Notes
from jobs.landing.landed_files import LandedFiles, read_file_state
from jobs.landing.workers import Workers
from jobs.storage.files import LocalFiles
from jobs.storage.tables import measurements
from tests.jobs.support.pipeline import Pipeline, random_walk_spec

pytestmark = pytest.mark.spark

HEADER = "id,at,a,b,comment\n"
TABLE = measurements("walk")


def write_files(folder: Path, count: int, first: int = 0) -> None:
    """Write files of two good rows and one bad row each; all keys are different."""
    folder.mkdir(exist_ok=True)
    for number in range(first, first + count):
        rows = "".join(f"{number * 10 + at},2024-03-0{at},{at},1,x\n" for at in (1, 2))
        (folder / f"rows-{number:04}.csv").write_text(f"{HEADER}{rows}{number * 10 + 3},soon,1,1,x\n")


def keys(pipeline: Pipeline) -> list[int]:
    return sorted(int(row["id"]) for row in pipeline.tables.rows(TABLE, columns=["id"]))


def held(pipeline: Pipeline) -> list[int]:
    rows = pipeline.tables.rows("quarantine", columns=["payload"])
    return sorted(int(json.loads(row["payload"])["id"]) for row in rows)


def wanted(count: int, *places: int) -> list[int]:
    return sorted(number * 10 + at for number in range(count) for at in places)


def commits(pipeline: Pipeline, table: str) -> list[Any]:
    log = Path(pipeline.settings.warehouse, table, "_delta_log")
    return sorted(one.name for one in log.glob("*.json"))


def test_many_small_files_land_in_one_commit_that_names_each_of_them(tmp_path: Path) -> None:
    pipeline, folder = Pipeline(tmp_path, random_walk_spec()), tmp_path / "in"
    write_files(folder, 24)
    report = ingest.run(pipeline.settings, "walk", [str(folder)])
    assert (report.data["files_landed"], report.data["rows"], report.data["quarantined"]) == (24, 48, 24)
    assert (report.data["commits"], report.data["version"]) == (1, 1)
    assert report.lines[0] == "landed 48 rows of 24 files for walk in 1 commit"
    assert (keys(pipeline), held(pipeline)) == (wanted(24, 1, 2), wanted(24, 3))
    assert len(commits(pipeline, TABLE)) == 2  # the table, and the rows
    known = LandedFiles(pipeline.tables, "walk")
    numbers = known.numbers()
    for path in sorted(folder.iterdir()):
        file = read_file_state(str(path))
        one = known.known(str(path), file.digest, numbers)
        assert (one.landed, one.kept, one.others) == (True, True, [])
    log = (Path(pipeline.settings.warehouse) / TABLE / "_delta_log" / "00000000000000000001.json").read_text()
    info = next(json.loads(line)["commitInfo"] for line in log.splitlines() if "commitInfo" in line)
    told = json.loads(info["userMetadata"])
    assert [(one["file"], one["rows"]) for one in told["files"]] == [
        (str(path), 2) for path in sorted(folder.iterdir())
    ]
    assert told["rows"] == 48 and told["min_time"] < told["max_time"]

    again = ingest.run(pipeline.settings, "walk", [str(folder)])
    assert (again.data["files_landed"], again.data["files_landed_before"]) == (0, 24)
    assert len(commits(pipeline, TABLE)) == 2
    write_files(folder, 3, first=24)
    (folder / "a-copy.csv").write_bytes((folder / "rows-0001.csv").read_bytes())
    more = ingest.run(pipeline.settings, "walk", [str(folder)])
    assert (more.data["files_landed"], more.data["files_landed_before"], more.data["commits"]) == (3, 25, 1)
    grown = folder / "rows-0002.csv"
    grown.write_text(grown.read_text() + "9001,2024-03-05,1,1,x\n")
    with pytest.raises(UserError, match=r"rows-0002.csv: has changed since it landed.*2 rows in version 1"):
        ingest.run(pipeline.settings, "walk", [str(folder)])
    write_files(folder, 1, first=27)
    both = ingest.run(pipeline.settings, "walk", [str(folder)], changed="append")
    assert (both.data["rows"], both.data["files_changed"], both.data["commits"]) == (3, 1, 1)
    assert keys(pipeline) == sorted([*wanted(28, 1, 2), 9001])
    assert held(pipeline) == wanted(28, 3)


def test_a_file_that_cannot_be_read_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = random_walk_spec(quarantine={"fail_above": 0.5})
    pipeline, folder = Pipeline(tmp_path, spec), tmp_path / "in"
    write_files(folder, 3)
    bad = folder / "rows-0001b.csv"
    bad.write_text(HEADER + "1,soon,1,1,x\n" * 3)
    with pytest.raises(UserError, match=r"rows-0001b.csv: 3 of 3 rows would go to quarantine") as refused:
        ingest.run(pipeline.settings, "walk", [str(folder)])
    assert refused.value.exit_code == INPUT_ERROR
    assert keys(pipeline) == wanted(2, 1, 2)  # those before it
    bad.unlink()

    pipeline.write_spec(random_walk_spec())
    notes = Notes(LocalFiles(tmp_path / "warehouse" / "_folders" / "walk"))
    (folder / "rows-0001c.csv").write_text("other,columns\n1,2\n")
    watch = FolderLanding(FileLanding(pipeline.tables, pipeline.spec), Inbox([folder], notes))
    write = Workers.run

    def growing(*arguments: Any) -> Any:
        found = write(*arguments)
        (folder / "rows-0002.csv").write_text(HEADER + "5,2024-03-01,1,1,still being written")
        return found

    monkeypatch.setattr(Workers, "run", growing)
    watch.inbox.ready(0.0)
    watch.take_all(watch.inbox.ready(SETTLE_SECONDS))
    assert (watch.totals.files, watch.totals.refused, watch.totals.counts.rows) == (2, 1, 0)
    monkeypatch.undo()
    assert keys(pipeline) == wanted(2, 1, 2)
    write_files(folder, 3)
    watch.inbox.ready(0.0)
    watch.take_all(watch.inbox.ready(SETTLE_SECONDS))
    assert keys(pipeline) == wanted(3, 1, 2)


def test_a_file_of_which_every_row_is_rejected_ends_with_code_2_and_its_rows_are_replayed_once(
    tmp_path: Path,
) -> None:
    from jobs import quarantine

    pipeline, folder = Pipeline(tmp_path, random_walk_spec()), tmp_path / "in"
    folder.mkdir()
    (folder / "german.csv").write_text("id;at;a;b\n1;2024-03-01;1,5;1\n2;2024-03-01;2,5;1\n")
    (folder / "good.csv").write_text(
        "id,at,a,b\n7,2024-03-01,1.5,1\n7,2024-03-01,1.5,1\n7,2024-03-02,1.5,1\n"
    )
    report = ingest.run(pipeline.settings, "walk", [str(folder)])
    assert report.error_code == INPUT_ERROR
    (error,) = report.errors
    assert error.startswith(
        f"{folder}/german.csv: every row was rejected (2 rows, now in quarantine), most for"
    )
    assert "such as '1,5': a comma before the fraction; set files: {decimal: \",\"} in the spec" in error
    assert error.endswith("then land them with `kalman-pipeline quarantine replay --model walk`")
    assert "read 1 file: fields separated by a semicolon" in report.lines
    assert any(
        line.startswith("note: 1 row with key and time of another row of the file") for line in report.lines
    )
    assert keys(pipeline) == [7, 7, 7]
    pipeline.write_spec(random_walk_spec(files={"decimal": ","}))
    # With the setting mended the file does not land beside its rows in quarantine: these are replayed, once.
    again = ingest.run(pipeline.settings, "walk", [str(folder / "german.csv")])
    assert (again.data["rows"], again.data["files_landed_before"]) == (0, 1)
    assert keys(pipeline) == [7, 7, 7]
    quarantine.replay(pipeline.settings, "walk")
    assert keys(pipeline) == [1, 2, 7, 7, 7]
    assert {row["a"] for row in pipeline.tables.rows(TABLE, columns=["a"])} == {1.5, 2.5}
    ingest.run(pipeline.settings, "walk", [str(folder)])
    assert keys(pipeline) == [1, 2, 7, 7, 7]
