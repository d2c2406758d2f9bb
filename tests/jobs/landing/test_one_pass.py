"""Files land in one pass by several processes: no row is lost or doubled, whichever of them is killed. No Spark."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs import ingest
from jobs.core.progress import BytesRead, Progress
from jobs.landing import csv_parquet, file_landing, file_parts, written_pieces
from jobs.landing.file_landing import group_files
from jobs.landing.file_parts import FilePart
from jobs.landing.landed_files import FileState, Known
from jobs.landing.raw_rows import RawRows
from jobs.landing.reading import FilePiece
from jobs.landing.values import number_reading, times
from jobs.landing.values.number_reading import build_rules, parse_numbers
from jobs.landing.written_pieces import FilePieces, count_repeats
from jobs.specs.files import Files
from jobs.storage.table_log import FileTable
from jobs.storage.tables import measurements
from tests.jobs.support.pipeline import Pipeline, random_walk_spec

TABLE = measurements("walk")
ROWS = 3000
HEADER = "id,at,a,b\n"


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut also a small file into pieces for two processes."""
    monkeypatch.setattr(file_landing, "INLINE_BYTES", 0)
    monkeypatch.setattr(file_landing, "_FILE_BYTES", 0)
    for module in (csv_parquet, file_parts):
        monkeypatch.setattr(module, "PIECE_BYTES", 4000)


def write_rows(path: Path, rows: int = ROWS) -> None:
    """Write rows of which every hundredth has no time."""
    lines = (f"{row},{'soon' if row % 100 == 7 else '2024-03-01'},{row / 8},1\n" for row in range(rows))
    path.write_text(HEADER + "".join(lines))


def landed(pipeline: Pipeline) -> tuple[list[int], list[int]]:
    """Return the keys of the rows in the measurements and in the quarantine, sorted."""
    if not pipeline.tables.exists(TABLE):
        return [], []
    kept = pipeline.tables.rows("quarantine") if pipeline.tables.exists("quarantine") else []
    rows = (int(row["id"]) for row in pipeline.tables.rows(TABLE, columns=["id"]))
    return sorted(rows), sorted(int(json.loads(row["payload"])["id"]) for row in kept)


def wanted(rows: int = ROWS) -> tuple[list[int], list[int]]:
    return [row for row in range(rows) if row % 100 != 7], [row for row in range(rows) if row % 100 == 7]


def parts(pipeline: Pipeline) -> list[str]:
    return sorted(one.name for one in Path(pipeline.settings.warehouse).rglob("part-*.parquet"))


@pytest.mark.usefixtures("in_pieces")
def test_a_file_lands_in_one_file_of_each_process_with_its_rows_in_order(tmp_path: Path) -> None:
    pipeline, path = Pipeline(tmp_path, random_walk_spec()), tmp_path / "rows.csv"
    write_rows(path)
    report = ingest.run(pipeline.settings, "walk", [str(path)])
    assert (report.data["rows"], report.data["quarantined"], report.data["commits"]) == (2970, 30, 1)
    assert landed(pipeline) == wanted()
    log = Path(pipeline.settings.warehouse, TABLE, "_delta_log", f"{1:020}.json").read_text()
    adds = [one["add"] for line in log.splitlines() if "add" in (one := json.loads(line))]
    assert len(adds) == 2
    found = [pq.read_table(Path(pipeline.settings.warehouse, TABLE, one["path"])) for one in adds]
    rows = pa.concat_tables(found)
    assert [int(one) for one in rows["id"].to_pylist()] == wanted()[0]
    assert set(rows["_origin"].to_pylist()) == {str(path)} and rows["at"].type == pa.timestamp("us", "UTC")
    assert len(set(rows["_landed_at"].to_pylist())) == 1
    for add, part in zip(adds, found, strict=True):
        told = json.loads(add["stats"])
        assert told["numRecords"] == part.num_rows
        assert told["maxValues"]["a"] == max(part["a"].to_pylist())
    (row, *_) = pipeline.tables.rows("quarantine", {"reason": "time at: not a time"})
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-a[0-9a-f]{3}-[0-9a-f]{12}", row["id"])
    assert json.loads(row["position"])["file"] == row["source"] == str(path)
    assert len({one["id"] for one in pipeline.tables.rows("quarantine")}) == 30


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("nth", [1, 2])
def test_a_landing_that_fails_between_parts_and_commit_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    pipeline, path = Pipeline(tmp_path, random_walk_spec()), tmp_path / "rows.csv"
    write_rows(path)
    commit, calls = FileTable.commit_for_all, []

    def failing(self: FileTable, *arguments: Any) -> Any:
        calls.append(self.name)
        if len(calls) == nth:
            raise OSError(28, "No space left on device")
        return commit(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(FileTable, "commit_for_all", failing)
        ingest.run(pipeline.settings, "walk", [str(path)])
    assert calls == ["quarantine", TABLE][:nth]
    assert landed(pipeline)[0] == [] and len(parts(pipeline)) == 2 * (nth - 1)
    ingest.run(pipeline.settings, "walk", [str(path)])
    assert landed(pipeline) == wanted()


def test_rows_land_at_the_moment_by_which_their_times_were_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(time_range={"latest": "1h"}))
    path, began = tmp_path / "rows.csv", datetime(2024, 3, 1, tzinfo=UTC)
    rows = (f"{row},{began + timedelta(minutes=30 * row):%Y-%m-%dT%H:%M:%SZ},{row},1\n" for row in range(100))
    path.write_text("id,at,a,b\n" + "".join(rows))
    ticks = count()
    monkeypatch.setattr(times, "now", lambda: began + timedelta(hours=next(ticks)))
    ingest.run(pipeline.settings, "walk", [str(path)])
    ahead = timedelta(hours=1)
    good = pipeline.tables.rows(TABLE, columns=["at", "_landed_at"])
    assert good and all(row["at"] <= row["_landed_at"] + ahead for row in good)
    bad = pipeline.tables.rows("quarantine", columns=["payload", "quarantined_at"])
    assert len(good) + len(bad) == 100
    for row in bad:
        at = datetime.fromisoformat(json.loads(row["payload"])["at"])
        assert at > row["quarantined_at"] + ahead


NO_SPARK = """
import sys
from jobs import ingest
from jobs.core.settings import Settings

warehouse, models, *paths = sys.argv[1:]
done = ingest.run(Settings.load(warehouse, models, quiet=True), "walk", paths)
print(done.data["rows"], sorted({"pyspark", "py4j", "delta"} & set(sys.modules)))
"""


def test_files_land_without_spark(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    rows = [{"id": str(row), "at": "2024-03-01T00:00:00Z", "a": row / 4, "b": 1.0} for row in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    pq.write_table(pa.Table.from_pylist(rows[3:]), tmp_path / "rows.parquet")
    paths = [str(tmp_path / name) for name in ("rows.jsonl", "rows.parquet")]
    given = [pipeline.settings.warehouse, str(pipeline.settings.models), *paths]
    done = subprocess.run(
        [sys.executable, "-c", NO_SPARK, *given], capture_output=True, text=True, check=True
    )
    assert done.stdout == "6 []\n"


# What a person would expect of texts that are numbers, and of some that are not.
NUMBERS = {
    "1": 1.0, " 2.5 ": 2.5, "+3": 3.0, "-.5": -0.5, "1.": 1.0, "1e3": 1000.0, "00012": 12.0, "-0": -0.0,
    "": None, "NA": None, "-999": None, "x": "not a number", "1,5": "not a number", "0x10": "not a number",
    "1_000": "not a number", "nan(1)": "not a number", "inf": "not finite", "-Infinity": "not finite",
    "1e999": "not finite", "\t1": "not a number", "1\n": "not a number", "\u0661": "not a number",
}  # fmt: skip
MISSING = build_rules(["na", "", "-999", "nan"], Files())


def numbers(texts: list[str | None]) -> list[tuple[float | None, str | None]]:
    source = RawRows({"v": pa.array(texts, pa.string())}, len(texts))
    reason = np.full(len(texts), None, object)
    (found,) = parse_numbers(["v"], "measurement", source, MISSING, "rows", reason)
    return [
        (None if why or np.isnan(value) else value, why)
        for value, why in zip(found.tolist(), reason, strict=True)
    ]


@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_is_what_a_person_would_expect(text: str) -> None:
    right = NUMBERS[text]
    why = f"measurement v: {right}" if isinstance(right, str) else None
    for beside in ([], ["7"] * 3, ["x"]):
        assert numbers([text, *beside])[0] == (None if why else right, why)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.none()
        | st.floats().map(repr)
        | st.floats(-999, 999).map(lambda one: f"{one:.3g}")
        | st.from_regex(r"[+-]?[0-9]{0,3}\.?[0-9]{0,3}([eE][+-]?[0-9]{1,3})?", fullmatch=True)
        | st.sampled_from(sorted(NUMBERS)),
        max_size=8,
    )
)
@example(["-999", "5"])
@example(["-999.0", "5"])
def test_columns_of_plain_numbers_are_read_as_others_are(texts: list[str | None]) -> None:
    one_by_one = numbers(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(number_reading, "_FROM", 0)
        whole = numbers(texts)
    assert repr(whole) == repr(one_by_one)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 3)), max_size=30),
    st.booleans(),
)
def test_repeats_are_the_rows_beyond_the_first_of_a_key_and_time(rows: list[Any], ordered: bool) -> None:
    rows = sorted(rows, key=lambda row: row[2]) if ordered else rows
    k, m, at = zip(*rows, strict=True) if rows else ((), (), ())
    table = pa.table(
        {
            "k": pa.array(k, pa.string()),
            "m": pa.array(m, pa.string()),
            "at": pa.array(at, pa.int64()).cast(pa.timestamp("us", "UTC")),
        }
    )
    for keys in (["k", "m"], ["k"], []):
        places = [tuple(row[name] for name in (*keys, "at")) for row in table.to_pylist()]
        assert count_repeats(table, keys, "at") == len(places) - len(set(places))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), max_size=6), min_size=1, max_size=9), st.integers(1, 4))
def test_tasks_have_each_piece_once_in_order(sizes: list[list[int]], processes: int) -> None:
    files = [
        FilePieces(
            FileState(str(place), "", 0, 0),
            Known(False, False, frozenset(), frozenset()),
            [FilePiece(FilePart("p", at, None), size << 20) for at, size in enumerate(some)],
        )
        for place, some in enumerate(sizes)
    ]
    tasks = file_landing._cut(files, processes)
    pieces = [(one.file, piece) for task in tasks for one in task for piece in one.pieces]
    assert pieces == [(one.file, piece) for one in files for piece in one.pieces]
    assert {one.file for task in tasks for one in task} == {one.file for one in files}
    total = sum(map(sum, sizes)) << 20
    assert file_landing.needs_workers(total, len(sizes)) or len(tasks) == 1
    largest = max((size << 20 for some in sizes for size in some), default=0)
    share = max(total / processes, file_landing.TASK_BYTES) + largest + (1 << 20)
    assert max(sum(piece.size for one in task for piece in one.pieces) for task in tasks) <= share


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize(
    ("inline", "said"), [(0, "note: at least 4 rows with key"), (1 << 20, "note: 5 rows with key")]
)
def test_repeats_of_a_file_in_parts_are_said_to_be_at_least_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: int, said: str
) -> None:
    monkeypatch.setattr(file_landing, "INLINE_BYTES", inline)
    pipeline, path = Pipeline(tmp_path, random_walk_spec()), tmp_path / "rows.csv"
    write_rows(path)
    path.write_text(path.read_text() + "0,2024-03-01,1,1\n" + "2999,2024-03-01,1,1\n" * 4)
    lines = ingest.run(pipeline.settings, "walk", [str(path)]).lines
    assert [line for line in lines if line.startswith(said)]


def test_groups_are_small_and_of_different_contents() -> None:
    sizes = Counter({"a": 40 << 20, "b": 30 << 20, "c": 1, "big": 1 << 30, "d": 2})
    files = [FileState(name, name, size, 0) for name, size in sizes.items()]
    again = [*files, FileState("copy", "d", 2, 0)]
    names = [[file.path for file in group] for group in group_files(again)]
    assert names == [["a"], ["b", "c"], ["big"], ["d"], ["copy"]]


def test_a_file_without_rows_lands_nothing_and_is_read_again(tmp_path: Path) -> None:
    pipeline, path = Pipeline(tmp_path, random_walk_spec()), tmp_path / "rows.csv"
    path.write_text(HEADER)
    for _ in range(2):
        report = ingest.run(pipeline.settings, "walk", [str(path)])
        assert (report.data["rows"], report.data["files_landed"], report.data["version"]) == (0, 0, None)
    assert pipeline.tables.latest_version(TABLE) == 0 and parts(pipeline) == []


def test_what_is_read_is_said_as_a_share() -> None:
    progress = Progress("ingest walk", 3, quiet=True, noun="file")
    read = BytesRead(progress, 200_000_000)
    read(50_000_000)
    assert progress.text() == "0 of 3 files · read 25 % of 200 MB"
    read(200_000_000)
    assert "read 100 % of 200 MB" in progress.text()


def test_a_full_file_of_a_table_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written_pieces, "ROWS_A_FILE", 1000)
    monkeypatch.setattr(csv_parquet, "PIECE_BYTES", 4000)
    pipeline, path = Pipeline(tmp_path, random_walk_spec()), tmp_path / "rows.csv"
    write_rows(path)
    assert ingest.run(pipeline.settings, "walk", [str(path)]).data["repeats"] == 0
    assert len(list(Path(pipeline.settings.warehouse, TABLE).glob("part-*"))) == 3
    assert landed(pipeline) == wanted()
