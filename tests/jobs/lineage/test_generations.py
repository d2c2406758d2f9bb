"""The table of generations under commits of other commands that come in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.core.errors import ALREADY_RUNNING, UserError
from jobs.lineage import generations
from jobs.lineage.generations import Generation
from jobs.storage import row_changes
from jobs.storage.row_changes import NOW, put_rows
from jobs.storage.table_log import Conflict
from jobs.storage.table_rows import open_log
from jobs.storage.tables import GENERATIONS
from jobs.storage.warehouse import Tables


def begun(root: Path, *models: str) -> Tables:
    """Return a warehouse in which these models have a live generation each."""
    tables = Tables(str(root))
    tables.create("generations", GENERATIONS)
    start = {"source": "delta", "table": "measurements/walk", "version": 1}
    made = [Generation(f"{one}-g0001", one, 1, "f", "s", "c", start, 1, 1, "live", epoch=1) for one in models]
    rows = [{**generations.build_generation_row(one), "created_at": NOW} for one in made]
    put_rows(tables, "generations", generations.KEYS, lambda there: rows)
    return tables


def others_commit(
    monkeypatch: pytest.MonkeyPatch, tables: Tables, *changes: tuple[str, dict[str, str]]
) -> list[Any]:
    """Let tools that take no lock change rows (a predicate, and values), one right after each look at them."""
    read, left = row_changes.read_small, list(changes)

    def overtaken(*arguments: Any) -> Any:
        found = read(*arguments)
        if left:
            predicate, values = left.pop(0)
            open_log(tables.root, "generations").update(values, predicate=predicate)
        return found

    monkeypatch.setattr(row_changes, "read_small", overtaken)
    return left


def test_an_update_that_meets_other_commits_is_made_on_what_they_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = begun(tmp_path, "walk", "other")
    left = others_commit(monkeypatch, tables, *[("true", {"epoch": "epoch + 1"})] * 2)
    generations.update(tables, {"generation": "walk-g0001"}, {"last_error": "of the first look"})
    after = generations.find_live(tables, "walk")
    assert after is not None and (after.epoch, after.last_error) == (3, "of the first look") and not left
    others_commit(monkeypatch, tables, ("true", {"epoch": "epoch + 1"}))
    generations.update(tables, {"generation": "walk-g0001", "epoch": 3}, {"last_error": "of a lost lease"})
    last = generations.find_live(tables, "walk")
    assert last is not None and (last.epoch, last.last_error) == (4, "of the first look")
    others_commit(monkeypatch, tables, *[("true", {"epoch": "epoch + 1"})] * 99)
    with pytest.raises(Conflict):
        generations.update(tables, {}, {"last_error": "never"})


def test_a_switch_beside_another_models_commit_is_made_and_one_beside_its_own_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models of a warehouse share the table: where nothing is locked, their commits meet."""
    tables = begun(tmp_path, "walk", "other")
    seen = generations.read_generations(tables, "walk")
    left = others_commit(
        monkeypatch, tables, ("model = 'other'", {"epoch": "9"}), ("model = 'walk'", {"epoch": "7"})
    )
    generations.retire(tables, seen[0], seen)
    (retired,) = generations.read_generations(tables, "walk")
    assert (retired.status, retired.epoch, retired.owner) == (generations.RETIRED, 7, None) and not left
    others_commit(monkeypatch, tables, ("model = 'walk'", {"status": "'failed'"}))
    with pytest.raises(UserError, match="another command has just changed its generations") as caught:
        generations.switch(tables, "walk", retired, [retired])
    assert caught.value.exit_code == ALREADY_RUNNING
    assert [one.status for one in generations.read_generations(tables, "walk")] == [generations.FAILED]
    assert [one.epoch for one in generations.read_generations(tables, "other")] == [9]
