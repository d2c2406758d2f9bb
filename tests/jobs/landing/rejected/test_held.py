"""Rejected rows counted, shown, exported and discarded without Spark."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs.core import times
from jobs.core.errors import UserError
from jobs.landing.rejected import held
from jobs.storage import table_log
from jobs.storage.quarantine import DISCARDED, HELD, REPLAYED, REPLAYING, TABLE, RowSelection
from jobs.storage.row_changes import put_rows
from jobs.storage.table_rows import open_log
from jobs.storage.tables import QUARANTINE
from jobs.storage.warehouse import Tables

AT = datetime(2026, 1, 1, tzinfo=UTC)
QUOTED = "it's 'late' %_ \\ \u00e4"


def rejected(
    number: int, reason: str, status: str | None = None, model: str = "walk", **more: Any
) -> dict[str, Any]:
    names = [part.split()[0] for part in QUARANTINE.replace("\n", " ").split(",")]
    payload = json.dumps({"number": number})
    values = {"id": f"r{number}", "model": model, "reason": reason, "status": status, "payload": payload}
    return {
        **dict.fromkeys(names),
        **values,
        "quarantined_at": AT + timedelta(days=number),
        "source": "f",
        **more,
    }


ROWS = [
    rejected(1, "late"),
    rejected(2, "late: a day", REPLAYED),
    rejected(3, "late"),
    rejected(4, QUOTED, payload="no JSON"),
    rejected(5, "late", REPLAYING),
    rejected(6, "late", DISCARDED),
    rejected(7, "late", model="other"),
]


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return made(tmp_path)


def made(root: Path, rows: list[dict[str, Any]] = ROWS, columns: str = QUARANTINE) -> Tables:
    tables = Tables(str(root))
    tables.create(TABLE, columns)
    put_rows(tables, TABLE, ("id",) if "id string" in columns else ("payload",), lambda there: rows)
    return tables


def ids(tables: Tables, choice: RowSelection) -> list[str]:
    return [row["id"] for row in held.list_quarantined_rows(held.read_selected(tables, "walk", choice))]


def test_rows_are_counted_by_reason_and_status(tables: Tables) -> None:
    late, quoted, day = held.count_by_reason(held.read_selected(tables, "walk", RowSelection()))
    assert (late["reason"], quoted["reason"], day["reason"]) == ("late", QUOTED, "late: a day")
    assert {name: late[name] for name in (HELD, REPLAYING, REPLAYED, DISCARDED)} == {
        HELD: 2, REPLAYING: 1, REPLAYED: 0, DISCARDED: 1,
    }  # fmt: skip
    assert (late["first"], late["last"]) == (AT + timedelta(days=1), AT + timedelta(days=6))
    assert (day[HELD], day[REPLAYED]) == (0, 1)


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (RowSelection(), ["r1", "r3", "r4"]),
        (RowSelection(reason="late"), ["r1", "r3"]),
        (RowSelection(reason=QUOTED), ["r4"]),
        (RowSelection(reason="%"), []),
        (RowSelection(since="2026-01-04"), ["r3", "r4"]),
        (RowSelection(ids=("r3", "r6", "r7", "it's")), ["r3"]),
        (RowSelection(reason="late", since="2026-01-03"), ["r3"]),
    ],
)
def test_what_is_chosen_is_shown_and_discarded(
    tables: Tables, choice: RowSelection, wanted: list[str]
) -> None:
    assert ids(tables, choice) == wanted
    assert (
        held.list_quarantined_rows(held.read_selected(tables, "walk", choice), 1)[0:1]
        == held.list_quarantined_rows(held.read_selected(tables, "walk", choice))[:1]
    )
    before, began = {row["id"]: row for row in tables.rows(TABLE)}, times.now()
    assert held.discard(tables, "walk", choice) == len(wanted)
    for row in tables.rows(TABLE):
        if row["id"] in wanted:
            assert began <= row["resolved_at"] <= times.now() and row["status"] == DISCARDED
            row |= {"status": None, "resolved_at": None}
        assert row == before[row["id"]]
    version = tables.latest_version(TABLE)
    assert held.discard(tables, "walk", choice) == 0 and tables.latest_version(TABLE) == version


def test_a_row_that_a_replay_marks_meanwhile_is_not_discarded(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = held.read_selected

    def overtaken(*arguments: Any) -> Any:
        found = read(*arguments)
        open_log(tables.root, TABLE).update({"status": "'replaying'"}, predicate="id = 'r1'")
        return found

    monkeypatch.setattr(held, "read_selected", overtaken)
    held.discard(tables, "walk", RowSelection(reason="late"))
    found = {row["id"]: row["status"] for row in tables.rows(TABLE)}
    assert (found["r1"], found["r3"]) == (REPLAYING, DISCARDED)


def fates(tables: Tables) -> dict[str, tuple[str | None, str | None, str | None]]:
    return {row["id"]: (row["status"], row["replay"], row["landing"]) for row in tables.rows(TABLE)}


def test_a_replay_marks_held_rows_alone_and_ends_its_own(tables: Tables) -> None:
    landings = pa.table({"id": ["r1", "r2", "r4", "r5"], "landing": ["it's {}", "no", None, "no"]})
    before = {row["id"]: row for row in tables.rows(TABLE)}
    held.mark_replaying(tables, landings, "one")
    marked = {"r1": (REPLAYING, "one", "it's {}"), "r4": (REPLAYING, "one", None)}
    others = {name: (row["status"], None, None) for name, row in before.items()}
    assert fates(tables) == {**others, **marked}
    version = tables.latest_version(TABLE)
    held.mark_replaying(tables, landings, "two")
    held.mark_replayed(tables, "two")
    assert tables.latest_version(TABLE) == version  # there was nothing to mark
    began = times.now()
    held.mark_replayed(tables, "one")
    assert tables.latest_version(TABLE) == version + 1
    for row in tables.rows(TABLE):
        if row["id"] in marked:
            assert row["status"] == REPLAYED and began <= row["resolved_at"] <= times.now()
            row |= {name: before[row["id"]][name] for name in ("status", "replay", "landing", "resolved_at")}
        assert row == before[row["id"]]


def test_a_row_that_another_replay_marks_first_stays_with_it(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one comes between the look at the table and the commit."""
    properties, left = table_log._build_properties, ["other"]

    def overtaken(*arguments: Any) -> Any:
        if left:
            left.pop()
            values = {"status": "'replaying'", "replay": "'other'"}
            open_log(tables.root, TABLE).update(values, predicate="id = 'r1'")
        return properties(*arguments)

    monkeypatch.setattr(table_log, "_build_properties", overtaken)
    held.mark_replaying(tables, pa.table({"id": ["r1", "r3"], "landing": ["a", "b"]}), "one")
    found = fates(tables)
    assert (found["r1"], found["r3"]) == ((REPLAYING, "other", None), (REPLAYING, "one", "b"))


def test_rows_are_exported_as_lines_to_mend(tables: Tables, tmp_path: Path) -> None:
    held.export_rows(
        held.list_quarantined_rows(held.read_selected(tables, "walk", RowSelection())),
        tmp_path / "rows.jsonl",
    )
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {"id": "r1", "reason": "late", "payload": {"number": 1}}
    assert lines[2] == {"id": "r4", "reason": QUOTED, "payload": "no JSON"}
    with pytest.raises(UserError, match="cannot be written"):
        held.export_rows([], tmp_path / "absent" / "rows.jsonl")


def test_rows_of_a_release_without_ids_get_them_once(tmp_path: Path) -> None:
    assert not held.prepare_quarantine(Tables(str(tmp_path)))
    columns = QUARANTINE.partition("id string")[0].strip().rstrip(",")
    rows = [
        {name: row[name] for name in row if name in columns.replace(",", " ").split()} for row in ROWS[:3]
    ]
    tables = made(tmp_path, rows, columns)
    assert held.prepare_quarantine(tables)
    found = ids(tables, RowSelection())
    assert len({*found}) == 3 and all(len(one) == 32 for one in found)
    version = tables.latest_version(TABLE)
    assert (
        held.prepare_quarantine(tables)
        and ids(tables, RowSelection()) == found
        and tables.latest_version(TABLE) == version
    )
    assert held.discard(tables, "walk", RowSelection(ids=(found[1],))) == 1
    assert ids(tables, RowSelection()) == [found[0], found[2]]


def test_rows_of_an_earlier_release_that_share_an_id_are_discarded_together(tmp_path: Path) -> None:
    tables = made(tmp_path, [rejected(1, "late"), rejected(3, "late"), rejected(4, "late: a day")])
    held._update(tables, {"id": "'same'"}, "reason = 'late'")
    assert held.discard(tables, "walk", RowSelection(ids=("same",))) == 2
    assert ids(tables, RowSelection()) == ["r4"]
