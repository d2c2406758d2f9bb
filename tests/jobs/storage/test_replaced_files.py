"""Rows that a filter selects leave a table in one commit, alone or for others; all other rows stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from jobs.core.errors import UserError
from jobs.storage import row_changes
from jobs.storage.part_files import write_parts
from jobs.storage.row_changes import KeptRows, Overtaken, ReplacingTable, delete_rows
from jobs.storage.table_log import Conflict, FileTable
from jobs.storage.table_rows import EPOCH, UTC_MICROSECONDS, Filter, Met, convert_time, find_files
from jobs.storage.warehouse import Tables

COLUMNS = "word string, n bigint, at timestamp"
SCHEMA = pa.schema([("word", pa.string()), ("n", pa.int64()), ("at", UTC_MICROSECONDS)])
LONG = "a text of more than thirty-two characters, of which the log has a part: "


def at(second: int) -> datetime:
    return datetime(2024, 5, 1, 12, 0, second, 123_456, UTC)


FILES = [
    [("a", 1, at(1)), ("a", 2, at(2))],
    [("a", 3, at(3)), ("b", 3, None), (None, 4, at(4))],
    [("b", 5, at(5)), ("b", 5, at(5))],
    [(None, None, None)],
    [(LONG + "x", 6, at(6))],
    [(LONG + "x", 7, at(7)), (LONG + "y", 7, at(7))],
]


def table_of(tables: Tables, partition_by: tuple[str, ...] = (), name: str = "t") -> ReplacingTable:
    """Make a table with one file, or one for each partition, of each of `FILES`."""
    tables.create(name, COLUMNS, partition_by)
    table = ReplacingTable(tables, name)
    for rows in FILES:
        columns = [
            pa.array(column, field.type)
            for column, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
        table.commit(write_parts(table.path, "part-00000", [batch], partition_by), None)
    return table


def rows_in(tables: Tables, name: str = "t") -> list[Any]:
    found = DeltaTable(tables.path(name)).to_pyarrow_table().select(SCHEMA.names).to_pylist()
    return sorted((tuple(row.values()) for row in found), key=repr)


FILTERS: list[tuple[Filter, Callable[[Any, Any, Any], bool]]] = [
    ([[("word", "=", "a")]], lambda word, n, when: word == "a"),
    ([[("word", "=", "a"), ("n", "=", 3)]], lambda word, n, when: (word, n) == ("a", 3)),
    ([[("word", "in", ["a", "c"])]], lambda word, n, when: word in ("a", "c")),
    ([[("word", "not in", ["a"])]], lambda word, n, when: word != "a"),
    ([[("word", "=", LONG + "x")]], lambda word, n, when: word == LONG + "x"),
    ([[("word", ">=", "b"), ("word", "<", "c")]], lambda word, n, when: word == "b"),
    ([[("n", "<", 3)]], lambda word, n, when: n is not None and n < 3),
    ([[("n", "<=", 5), ("n", ">", 2)]], lambda word, n, when: n is not None and 2 < n <= 5),
    ([[("n", ">=", 99)]], lambda word, n, when: False),
    ([[("at", "<", at(4))]], lambda word, n, when: when is not None and when < at(4)),
    (
        [[("at", ">=", convert_time((at(5) - EPOCH) // timedelta(microseconds=1)))]],
        lambda word, n, when: when is not None and when >= at(5),
    ),
    ([[("word", "=", "a")], [("n", "=", 5)]], lambda word, n, when: word == "a" or n == 5),
]


@pytest.mark.parametrize("partition_by", [(), ("word",), ("n",)])
@pytest.mark.parametrize(("rows", "chosen"), FILTERS, ids=[str(one) for one, _ in FILTERS])
def test_the_rows_of_a_filter_are_deleted_and_no_others(
    tmp_path: Path, rows: Filter, chosen: Callable[..., bool], partition_by: tuple[str, ...]
) -> None:
    tables = Tables(str(tmp_path))
    table_of(tables, partition_by)
    before, version = rows_in(tables), tables.latest_version("t")
    gone = [row for row in before if chosen(*row)]
    assert delete_rows(tables, "t", rows, dry=True) == len(gone)
    assert rows_in(tables) == before and tables.latest_version("t") == version
    assert delete_rows(tables, "t", rows) == len(gone)
    assert rows_in(tables) == sorted((row for row in before if not chosen(*row)), key=repr)
    assert tables.latest_version("t") == version + bool(gone)  # no commit of nothing
    assert delete_rows(tables, "t", rows) == 0 and delete_rows(tables, "none", rows) == 0


def test_files_are_decided_by_their_statistics_where_these_suffice(tmp_path: Path) -> None:
    table = table_of(Tables(str(tmp_path)))
    files = table.files()
    names = dict(zip(files["max.n"].to_pylist(), files["path"].to_pylist(), strict=True))
    assert find_files(files, [[("n", "=", 5)]]) == Met(frozenset({names[5]}), frozenset())
    assert find_files(files, [[("n", "in", [5, 6])]]).whole == {names[5], names[6]}
    assert names[2] in find_files(files, [[("word", "=", "a")]]).whole
    found = find_files(files, [[("n", "not in", [5])]])
    assert not found.across and found.whole == {name for at, name in names.items() if at != 5}
    bare = files.select(["path"])
    assert find_files(bare, [[("n", "=", 5)]]) == Met(frozenset(), frozenset(bare["path"].to_pylist()))


def test_what_stays_of_a_file_is_as_any_file_of_the_table(tmp_path: Path) -> None:
    """Among them one of an earlier release, which lacks a column and has times of another type."""
    tables = Tables(str(tmp_path))
    table = table_of(tables)
    old = pa.table({"n": [8, 9], "at": pa.array([1, 2], pa.timestamp("us"))})
    pq.write_table(old, f"{table.path}/old.parquet", use_deprecated_int96_timestamps=True)
    size = Path(table.path, "old.parquet").stat().st_size
    table.commit(
        [write_parts(table.path, "part-00000", [pa.RecordBatch.from_pydict({"n": [8]})])[0]._replace(
            path="old.parquet", size=size, rows=2, stats="{}")],
        None,
    )  # fmt: skip
    about = DeltaTable(table.path).schema().to_json()
    assert delete_rows(tables, "t", [[("n", "=", 8)]]) == 1
    log = DeltaTable(table.path)
    assert log.schema().to_json() == about
    (rest,) = [one for one in ReplacingTable(tables, "t").files().to_pylist() if one["max.n"] == 9]
    assert rest["min.n"] == 9 and rest["num_records"] == 1 and rest["null_count.word"] == 1
    found = pq.read_table(f"{table.path}/{rest['path']}")
    assert found.schema.names == SCHEMA.names and found["at"].type == UTC_MICROSECONDS
    assert found["at"].to_pylist() == [EPOCH + timedelta(microseconds=2)]


def test_a_deletion_with_a_transaction_is_made_once(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))
    table = table_of(tables)
    assert delete_rows(tables, "t", [[("n", "=", 5)]], transaction=("app", 5)) == 2
    assert tables.transactions("t") == {"app": 5}
    before = rows_in(tables)
    for number in (4, 5):
        assert delete_rows(tables, "t", [[("n", "=", 3)]], transaction=("app", number)) == 0
    assert rows_in(tables) == before
    assert not table.is_due(("app", 5))
    assert delete_rows(tables, "t", [[("n", "=", 3)]], transaction=("app", 6)) == 2


def test_a_deletion_that_is_killed_or_fails_before_its_commit_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Tables(str(tmp_path))
    table = table_of(tables)
    before, files = rows_in(tables), set(Path(table.path).glob("*.parquet"))

    def killed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    for name in ("_commit", "_write"):
        with monkeypatch.context() as patch:
            patch.setattr(FileTable, name, killed)
            with pytest.raises(KeyboardInterrupt):
                delete_rows(tables, "t", [[("word", "=", "b")]])
        assert rows_in(tables) == before
    # Files of a commit that was tried stay, as some version might name them.
    assert len(set(Path(table.path).glob("*.parquet")) - files) == 1
    assert delete_rows(tables, "t", [[("word", "=", "b")]]) == 3


@pytest.mark.parametrize("deletes", [False, True])
def test_rows_that_others_commit_meanwhile_are_kept_or_deleted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletes: bool
) -> None:
    """The other command appends rows of the filter, or deletes rows of the same file."""
    tables = Tables(str(tmp_path))
    table_of(tables)
    replace, others = ReplacingTable._commit, [1]

    def overtaken(self: ReplacingTable, *given: Any) -> int | None:
        if others and others.pop():
            if deletes:
                delete_rows(tables, "t", [[("word", "=", "a"), ("n", "=", 3)]])
            else:
                table_of(tables)
        return replace(self, *given)

    before = rows_in(tables)
    monkeypatch.setattr(ReplacingTable, "_commit", overtaken)
    assert delete_rows(tables, "t", [[("word", "=", "b")]]) == (3 if deletes else 6)
    words = [row for row in before if row[0] != "b"]
    left = [row for row in words if row[:2] != ("a", 3)] if deletes else sorted([*words, *words], key=repr)
    assert rows_in(tables) == left


def test_who_is_overtaken_again_and_again_is_told_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Tables(str(tmp_path))
    table = table_of(tables)
    files = set(Path(table.path).glob("*.parquet"))
    monkeypatch.setattr(ReplacingTable, "_commit", lambda *_: None)
    with pytest.raises(Overtaken, match="others have changed the same rows meanwhile; run it again"):
        delete_rows(tables, "t", [[("word", "=", "b")]])
    assert issubclass(Overtaken, Conflict) and set(Path(table.path).glob("*.parquet")) == files


def test_rows_that_are_replaced_and_the_new_ones_change_in_one_commit(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))
    table = table_of(tables)
    version, before = tables.latest_version("t"), rows_in(tables)
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["new"]), pa.array([50]), pa.array([at(9)], UTC_MICROSECONDS)], schema=SCHEMA
    )
    parts = write_parts(table.path, "part-00000", [batch])
    nothing = KeptRows((), ())
    assert table.replace_rows(parts, [[("n", "=", 5)]], lambda files, met: nothing) == version + 1
    assert rows_in(tables) == sorted([*(one for one in before if one[1] != 5), ("new", 50, at(9))], key=repr)
    assert table.replace_rows((), [[("n", "=", 77)]], lambda files, met: nothing) == version + 1
    noted = table.replace_rows((), [[("n", "=", 77)]], lambda files, met: nothing, {"userMetadata": "{}"})
    assert noted == version + 2


def test_a_table_whose_files_do_not_tell_its_rows_is_refused(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))
    tables.create("t", COLUMNS, properties={"delta.columnMapping.mode": "name"})
    with pytest.raises(
        UserError, match=r"the table cannot be written: it has the property delta.columnMapping"
    ):
        delete_rows(tables, "t", [[("n", "=", 5)]])
    assert row_changes._TRIES == 8
