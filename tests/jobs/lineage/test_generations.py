"""The table of generations under commits of other drivers that come in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from delta.exceptions import ConcurrentAppendException, MetadataChangedException
from delta.tables import DeltaMergeBuilder, DeltaTable, DeltaTableBuilder
from deltalake import DeltaTable as Rust

from jobs.core.errors import ALREADY_RUNNING, UserError
from jobs.lineage import generations
from jobs.warehouse import delta
from jobs.warehouse.file_commits import JAVA, WRITER
from jobs.warehouse.local_tables import LocalTables
from tests.jobs.support.pipeline import random_rows, streaming

pytestmark = pytest.mark.spark


def test_an_update_that_meets_other_commits_is_tried_again_on_what_they_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = random_rows(2)
    pipeline = streaming(tmp_path, frames[0], frames[1])
    monkeypatch.setenv(WRITER, JAVA)
    update = DeltaTable.update
    met: list[int] = []

    def overtaken(self: DeltaTable, condition: Any, values: Any) -> None:
        if len(met) < 2:  # others raise the epoch, and this commit is refused, as Delta does without a lock
            met.append(1)
            update(self, "true", {"epoch": "epoch + 1"})
            raise ConcurrentAppendException("a concurrent UPDATE added data")
        update(self, condition, values)

    monkeypatch.setattr(delta, "_PAUSE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(DeltaTable, "update", overtaken)
    before = generations.live(pipeline.warehouse, "walk")
    assert before is not None
    generations.update(pipeline.warehouse, {"epoch": before.epoch}, {"last_error": "of the first look"})
    after = generations.live(pipeline.warehouse, "walk")
    assert after is not None
    assert (after.epoch, after.last_error) == (before.epoch + 2, None)
    generations.update(pipeline.warehouse, {"epoch": after.epoch}, {"last_error": "seen"})
    last = generations.live(pipeline.warehouse, "walk")
    assert last is not None
    assert last.last_error == "seen"

    def always(self: DeltaTable, condition: Any, values: Any) -> None:
        raise ConcurrentAppendException("a concurrent UPDATE added data")

    monkeypatch.setattr(DeltaTable, "update", always)
    with pytest.raises(ConcurrentAppendException):
        generations.update(pipeline.warehouse, {}, {"last_error": "never"})


def test_a_switch_that_meets_another_models_commit_is_made_again_and_one_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models of a warehouse share the table: where nothing is locked, their first streams may start at once."""
    frames = random_rows(2)
    pipeline = streaming(tmp_path, frames[0], frames[1])
    warehouse = pipeline.warehouse
    table = DeltaTable.forPath(warehouse.spark, warehouse.path("generations"))
    execute = DeltaMergeBuilder.execute
    meets: list[tuple[str, dict[str, Any]]] = []

    def overtaken(self: DeltaMergeBuilder) -> Any:
        if meets:
            table.update(*meets.pop())
            raise ConcurrentAppendException("a concurrent UPDATE added data")
        return execute(self)

    monkeypatch.setenv(WRITER, JAVA)
    monkeypatch.setattr(delta, "_PAUSE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(DeltaMergeBuilder, "execute", overtaken)
    seen = generations.all_of(warehouse, "walk")
    meets.append(("model <> 'walk'", {"epoch": "epoch + 1"}))
    generations.retire(warehouse, seen[0], seen)
    (retired,) = generations.all_of(warehouse, "walk")
    assert retired.status == generations.RETIRED and not meets
    meets.append(("model = 'walk'", {"status": "'failed'"}))
    with pytest.raises(UserError, match="another command has just changed its generations") as caught:
        generations.switch(warehouse, "walk", retired, [retired])
    assert caught.value.exit_code == ALREADY_RUNNING
    assert [one.status for one in generations.all_of(warehouse, "walk")] == [generations.FAILED]


def test_without_spark_a_switch_beside_another_models_commit_is_made_and_one_beside_its_own_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = random_rows(2)
    pipeline = streaming(tmp_path, frames[0], frames[1])
    warehouse = pipeline.warehouse
    read = LocalTables.rows
    meets: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def overtaken(tables: LocalTables, *arguments: Any, **options: Any) -> list[dict[str, Any]]:
        found = read(tables, *arguments, **options)
        if meets:  # by a tool that takes no lock
            rows, values = meets.pop()
            table = Rust(warehouse.path("generations").removeprefix("file:"))
            table.update(new_values=values, predicate=" AND ".join(f"{n} = '{v}'" for n, v in rows.items()))
        return found

    seen = generations.all_of(warehouse, "walk")
    monkeypatch.setattr(LocalTables, "rows", overtaken)
    meets.append(({"model": "walk"}, {"epoch": 7}))
    generations.retire(warehouse, seen[0], seen)
    (retired,) = generations.all_of(warehouse, "walk")
    assert (retired.status, retired.epoch, retired.owner) == (generations.RETIRED, 7, None) and not meets
    meets.append(({"model": "walk"}, {"status": "failed"}))
    with pytest.raises(UserError, match="another command has just changed its generations") as caught:
        generations.switch(warehouse, "walk", retired, [retired])
    assert caught.value.exit_code == ALREADY_RUNNING
    assert [one.status for one in generations.all_of(warehouse, "walk")] == [generations.FAILED]


def test_commands_that_make_a_table_at_once_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is locked, the second creation is a conflict, and the table that it meets is as good."""
    pipeline = streaming(tmp_path, *random_rows(2))
    warehouse = pipeline.warehouse
    execute = DeltaTableBuilder.execute

    def overtaken(self: DeltaTableBuilder) -> Any:
        execute(self)
        raise MetadataChangedException("the table was made")

    monkeypatch.setattr(DeltaTableBuilder, "execute", overtaken)
    warehouse.create("other", "a int")
    assert warehouse.column_names("other") == ["a"]

    def fails(self: DeltaTableBuilder) -> Any:
        raise MetadataChangedException("the table was not made")

    monkeypatch.setattr(DeltaTableBuilder, "execute", fails)
    with pytest.raises(MetadataChangedException):
        warehouse.create("third", "a int")
