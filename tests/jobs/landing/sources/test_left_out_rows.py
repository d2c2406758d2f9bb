"""What `--accept-loss` leaves out of a Delta table is counted from the table's log, without Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.landing.sources.table import UserTable, _describe_skipped
from jobs.storage.warehouse import Tables


def table_of(folder: Path, sizes: list[int]) -> UserTable:
    """Return a table with a commit of so many rows each."""
    for size in sizes:
        write_deltalake(folder / "t", pa.table({"a": list(range(size))}), mode="append")
    return UserTable("t", Tables(str(folder)), "t", "id")  # type: ignore[arg-type]  # of which no session is needed


def test_rows_of_the_versions_that_had_not_landed_are_counted(tmp_path: Path) -> None:
    table = table_of(tmp_path, [5, 10, 20, 1])
    assert _describe_skipped(table, 0, 3) == "31 rows that had not landed are left out"
    assert _describe_skipped(table, 2, 3) == "1 row that had not landed is left out"
    assert _describe_skipped(table, 3, 3) == "0 rows that had not landed are left out"
    assert _describe_skipped(table, -1, 3) == "36 rows that had not landed are left out"


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=6), st.data())
def test_rows_of_any_commits_are_counted(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    table = table_of(tmp_path_factory.mktemp("t"), sizes)
    landed = data.draw(st.integers(-1, len(sizes) - 1))
    left = sum(sizes[landed + 1 :])
    assert _describe_skipped(table, landed, len(sizes) - 1).split(" row")[0] == f"{left:,}"


@pytest.mark.parametrize("change", ["delete", "overwrite", "update"])
def test_rows_that_a_commit_wrote_again_are_not_counted_as_new(tmp_path: Path, change: str) -> None:
    table = table_of(tmp_path, [5, 10])
    log = DeltaTable(tmp_path / "t")
    if change == "delete":
        log.delete("a = 3")
    elif change == "update":
        log.update({"a": "a + 1"}, predicate="a = 3")
    else:
        write_deltalake(log, pa.table({"a": [1, 2]}), mode="overwrite")
    table_of(tmp_path, [50])
    assert _describe_skipped(table, 1, 3) == (
        "50 rows that had not landed are left out; what version 2 changed or removed is not taken over"
    )


def test_optimize_and_settings_of_the_table_leave_nothing_out(tmp_path: Path) -> None:
    table = table_of(tmp_path, [5, 10])
    DeltaTable(tmp_path / "t").optimize.compact()
    DeltaTable(tmp_path / "t").alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
    assert _describe_skipped(table, 1, 3) == "0 rows that had not landed are left out"


def test_versions_that_the_log_no_longer_has_are_named(tmp_path: Path) -> None:
    table = table_of(tmp_path, [5, 10, 20, 30, 1, 2, 3])
    for version in (1, 2):
        (tmp_path / "t" / "_delta_log" / f"{version:020d}.json").unlink()
    assert _describe_skipped(table, 0, 3) == (
        "30 rows that had not landed are left out; how many rows versions 1, 2 had is not known, as the log does not "
        "say it any more"
    )
    for version in (3, 4, 5):
        (tmp_path / "t" / "_delta_log" / f"{version:020d}.json").unlink()
    assert "versions 1 to 5 had" in _describe_skipped(table, 0, 6)
