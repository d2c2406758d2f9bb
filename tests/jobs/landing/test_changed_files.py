"""A file that has landed and changes: its former rows stay, and no row lands twice, in every mode."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs import ingest
from jobs.core.errors import INPUT_ERROR, UserError
from jobs.core.report import Report
from jobs.landing import file_landing, folder_watch
from jobs.landing.file_landing import FileLanding
from jobs.landing.folder_watch import SETTLE_SECONDS, FolderLanding, Inbox, Notes, WatchTotals
from jobs.landing.landed_files import LandedFiles, hash_path
from jobs.landing.workers import Workers
from jobs.storage.files import LocalFiles
from jobs.storage.table_log import FileTable
from jobs.storage.tables import measurements
from tests.jobs.support.pipeline import Pipeline, random_walk_spec

pytestmark = pytest.mark.spark

HEADER = "id,at,a,b,comment\n"
TABLE = measurements("walk")


def lines(first: int, last: int, bad: tuple[int, ...] = ()) -> str:
    """Return rows with these numbers as keys; the bad ones have no time."""
    return "".join(
        f'{number},{"soon" if number in bad else "2024-03-01"},{number},1,"so,\n{number}"\n'
        for number in range(first, last)
    )


def land(pipeline: Pipeline, *paths: Path, changed: Any = "refuse") -> Report:
    return ingest.run(pipeline.settings, "walk", [str(path) for path in paths], changed=changed)


def keys(pipeline: Pipeline) -> list[int]:
    if not pipeline.tables.exists(TABLE):
        return []
    return sorted(int(row["id"]) for row in pipeline.tables.rows(TABLE, columns=["id"]))


def held(pipeline: Pipeline) -> list[str]:
    """Return the keys of the rows in quarantine."""
    rows = pipeline.tables.rows("quarantine", columns=["payload"])
    return sorted(json.loads(row["payload"]).get("id", "file") for row in rows)


def test_a_landed_file_that_has_grown_is_refused_or_only_its_new_rows_land(tmp_path: Path) -> None:
    pipeline, path = Pipeline(tmp_path, random_walk_spec()), tmp_path / "rows.csv"
    path.write_text(HEADER + lines(0, 4, bad=(1,)))
    assert land(pipeline, path).data["rows"] == 3
    shutil.copy(path, tmp_path / "copy.csv")
    path.write_text(path.read_text() + lines(4, 7, bad=(5,)))
    other = tmp_path / "other.csv"
    other.write_text(HEADER + lines(50, 51))
    for _ in range(2):
        with pytest.raises(UserError, match=r"rows.csv: has changed since it landed: it has \d+ bytes, SHA-256 "
                           r"[0-9a-f]{16}, and landed with \d+ bytes, SHA-256 [0-9a-f]{16}, 3 rows in version 1; new "
                           r"rows come in new files.*--changed append.*--changed new") as refused:  # fmt: skip
            land(pipeline, other, path)
        assert refused.value.exit_code == INPUT_ERROR
    assert (keys(pipeline), held(pipeline)) == ([0, 2, 3], ["1"])
    assert land(pipeline, tmp_path / "copy.csv").data["files_landed_before"] == 1

    for changed in (1, 0):  # the second finds everything done
        done = land(pipeline, path, changed="append")
        assert done.data["files_changed"] == changed
        assert [line.startswith(f"note: {path}: had landed with") for line in done.lines].count(
            True
        ) == changed
        assert (keys(pipeline), held(pipeline)) == ([0, 2, 3, 4, 6], ["1", "5"])
    assert land(pipeline, path).data["files_landed_before"] == 1
    (tmp_path / "copy.csv").write_text(path.read_text())
    assert land(pipeline, tmp_path / "copy.csv").data["files_landed_before"] == 1
    assert (keys(pipeline), held(pipeline)) == ([0, 2, 3, 4, 6], ["1", "5"])

    path.write_text(HEADER + lines(80, 82, bad=(80,)))
    with pytest.raises(UserError, match="does not begin with the rows that landed"):
        land(pipeline, path, changed="append")
    assert land(pipeline, path, changed="new").data["rows"] == 1
    assert land(pipeline, path).data["files_landed_before"] == 1
    assert (keys(pipeline), held(pipeline)) == ([0, 2, 3, 4, 6, 81], ["1", "5", "80"])


def test_an_interrupted_landing_of_a_file_that_grows_meanwhile_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, path = Pipeline(tmp_path, random_walk_spec()), tmp_path / "rows.csv"
    path.write_text(HEADER + lines(0, 3))
    land(pipeline, path)
    path.write_text(path.read_text() + lines(3, 6, bad=(4,)))
    commit = FileTable.commit_for_all

    def killed(self: FileTable, *arguments: Any) -> int | None:
        if self.name == TABLE:
            raise KeyboardInterrupt
        return commit(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FileTable, "commit_for_all", killed)
        land(pipeline, path, changed="append")
    assert (keys(pipeline), held(pipeline)) == ([0, 1, 2], ["4"])
    path.write_text(
        path.read_text() + lines(6, 9, bad=(7,)).removesuffix("\n")
    )  # the last row has no line break
    with pytest.raises(UserError, match="has changed since it landed"):
        land(pipeline, path)
    land(pipeline, path, changed="append")
    assert (keys(pipeline), held(pipeline)) == ([0, 1, 2, 3, 5, 6, 8], ["4", "7"])
    path.write_text(path.read_text() + "\n" + lines(9, 10))
    land(pipeline, path, changed="append")
    assert (keys(pipeline), held(pipeline)) == ([0, 1, 2, 3, 5, 6, 8, 9], ["4", "7"])


def test_a_file_of_which_only_rejected_rows_are_kept_has_landed_too(tmp_path: Path) -> None:
    pipeline, path = Pipeline(tmp_path, random_walk_spec()), tmp_path / "rows.jsonl"
    rows = [json.dumps({"id": number, "at": "soon", "a": 1, "b": 2}) for number in range(3)]
    path.write_text("\n".join(rows[:2]) + "\n")
    land(pipeline, path)
    path.write_text("\n".join(rows) + "\n")
    with pytest.raises(UserError, match="has changed since it landed"):
        land(pipeline, path)
    for _ in range(2):
        land(pipeline, path, changed="append")
        assert pipeline.tables.row_count("quarantine") == 3


def test_a_watched_file_that_grew_between_its_commit_and_its_note_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, path = Pipeline(tmp_path, random_walk_spec()), tmp_path / "inbox" / "rows.csv"
    path.parent.mkdir()

    def look(changed: str = "refuse") -> WatchTotals:
        notes = Notes(LocalFiles(tmp_path / "warehouse" / "_folders" / "walk"))
        landing = FileLanding(pipeline.tables, pipeline.spec, changed)
        watch = FolderLanding(landing, Inbox([path.parent], notes))
        watch.inbox.ready(0.0)
        watch.take_all(watch.inbox.ready(SETTLE_SECONDS))
        return watch.totals

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    path.write_text(HEADER + lines(0, 3))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(folder_watch.Notes, "note", killed)
        look()
    assert keys(pipeline) == [0, 1, 2]
    path.write_text(HEADER + lines(0, 5))
    pipeline.write_spec(random_walk_spec(quarantine={"fail_above": 0.1}))
    (path.parent / "more.csv").write_text(HEADER + lines(20, 22))
    assert (look().refused, look().refused) == (1, 0)  # one file does not end the watch, whatever the limit
    assert keys(pipeline) == [0, 1, 2, 20, 21]
    (row,) = pipeline.tables.rows("quarantine")
    assert row["reason"].startswith("file: has changed since it landed") and row["source"] == str(path)
    path.write_text(HEADER + lines(0, 6))
    assert look("append").counts.rows == 3
    assert keys(pipeline) == [0, 1, 2, 3, 4, 5, 20, 21]


@pytest.mark.parametrize("remembered", [True, False])
def test_what_an_earlier_release_landed_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remembered: bool
) -> None:
    pipeline, path = Pipeline(tmp_path, random_walk_spec()), tmp_path / "rows.csv"
    path.write_text(HEADER + lines(0, 3, bad=(1,)))
    with monkeypatch.context() as patch:
        # As its commits are: the transaction does not stand for the path, which the history names until it expires.
        patch.setattr(
            file_landing,
            "build_file_transaction",
            lambda model, path, digest: (f"ingest-{model}-{digest}", 1),
        )
        if not remembered:
            commit = FileTable.commit_for_all
            patch.setattr(
                FileTable, "commit_for_all", lambda self, parts, names, _: commit(self, parts, names, {})
            )
        land(pipeline, path)
    assert set(pipeline.tables.transactions(TABLE).values()) == {1}
    assert land(pipeline, path).data["files_landed_before"] == 1
    path.write_text(HEADER + lines(0, 5, bad=(1,)))
    with pytest.raises(UserError, match="has changed since it landed"):
        land(pipeline, path)
    if remembered:
        land(pipeline, path, changed="append")
    else:
        land(pipeline, path, changed="new")
    rows = [0, 2, 3, 4] if remembered else [0, 0, 2, 2, 3, 4]
    assert keys(pipeline) == rows
    (tmp_path / "new.csv").write_text(HEADER + lines(7, 8))
    assert land(pipeline, tmp_path / "new.csv").data["rows"] == 1
    known = LandedFiles(pipeline.tables, "walk").known(str(path), "0" * 64)
    assert known.accepted and not known.landed
    assert hash_path(str(path)) > 1


def test_a_file_that_changes_while_it_is_read_does_not_land(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, path = Pipeline(tmp_path, random_walk_spec()), tmp_path / "rows.csv"
    path.write_text(HEADER + lines(0, 3))
    write = Workers.run

    def growing(*arguments: Any) -> Any:
        found = write(*arguments)
        path.write_text(HEADER + lines(0, 4))
        return found

    with monkeypatch.context() as patch, pytest.raises(UserError, match="changed while it was read"):
        patch.setattr(Workers, "run", growing)
        land(pipeline, path)
    assert keys(pipeline) == []
    assert land(pipeline, path).data["rows"] == 4
