"""Read and update the quarantine without Spark: count, show, export, discard and mark rejected rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable

from jobs.core import times
from jobs.core.errors import UserError
from jobs.core.input_files import open_input, parse_path
from jobs.storage.positions import to_micros
from jobs.storage.quarantine import DISCARDED, HELD, REPLAYED, REPLAYING, TABLE, RowSelection
from jobs.storage.queries import quote_text
from jobs.storage.row_changes import add_columns
from jobs.storage.table_log import NO_HOOKS, FileTable
from jobs.storage.table_rows import to_rows
from jobs.storage.tables import QUARANTINE
from jobs.storage.warehouse import Tables

COLUMNS = ("id", "reason", "source", "position", "batch_id", "generation", "quarantined_at", "payload")
_IDENTITY = ("model", "payload", "reason", "source", "position", "quarantined_at")
"""Columns that identify a row of an earlier release without ids; rows with the same values in them get the same id."""
MOST_BYTES = 64 << 20
"""Maximum bytes of a file of edited rows; memory contains several copies of these rows before they land."""
_compute: Any = pc


def prepare_quarantine(tables: Tables) -> bool:
    """Add missing columns and row ids to a quarantine table of an earlier release.

    Returns:
        Whether the quarantine table exists.

    Raises:
        UserError: the table cannot be read or written.
    """
    if not tables.exists(TABLE):
        return False
    add_columns(tables, TABLE, QUARANTINE)
    if tables.columns(TABLE, ("id",))["id"].null_count:
        text = f"concat_ws('|', {', '.join(_IDENTITY)})"
        _update(tables, {"id": f"substr(encode(sha256({text}), 'hex'), 1, 32)"}, "id IS NULL")
    return True


def read_rejected(tables: Tables, model: str, columns: Sequence[str] = ("status", *COLUMNS)) -> pa.Table:
    """Return columns of all rejected rows of a model, of any status."""
    found = tables.columns(TABLE, ("model", *columns))
    return found.filter(_compute.equal(found["model"], model))


def read_selected(tables: Tables, model: str, choice: RowSelection) -> pa.Table:
    """Return the selected rejected rows of a model, of any status."""
    found = read_rejected(tables, model)
    if choice.reason is not None:
        found = found.filter(_compute.starts_with(found["reason"], choice.reason))
    since = choice.earliest()
    if since is not None:
        found = found.filter(_compute.greater_equal(found["quarantined_at"], pa.scalar(since)))
    if choice.ids:
        found = found.filter(_compute.is_in(found["id"], pa.array(choice.ids, pa.string())))
    return found


def count_by_reason(rows: pa.Table) -> list[dict[str, Any]]:
    """Return for each reason the number of rows by status, and the first and last time at which rows were quarantined.

    The reason with the most rows that are still quarantined is first.
    """
    times = [("quarantined_at", "min"), ("quarantined_at", "max"), ([], "count_all")]
    grouped = rows.group_by(["reason", "status"]).aggregate(times)
    found: dict[str, dict[str, Any]] = {}
    for row in to_rows(grouped):
        first, last = row["quarantined_at_min"], row["quarantined_at_max"]
        nothing = dict.fromkeys((HELD, REPLAYING, REPLAYED, DISCARDED), 0)
        one = found.setdefault(
            row["reason"], {"reason": row["reason"], **nothing, "first": first, "last": last}
        )
        one[row["status"] or HELD] += row["count_all"]
        one["first"], one["last"] = min(one["first"], first), max(one["last"], last)
    return sorted(found.values(), key=lambda one: (-one[HELD], one["reason"]))


def list_quarantined_rows(rows: pa.Table, limit: int | None = None) -> list[dict[str, Any]]:
    """Return those rejected rows that are still quarantined, with the columns that users see, oldest first."""
    held = rows.filter(_compute.is_null(rows["status"])).select(COLUMNS)
    held = held.sort_by([(name, "ascending") for name in ("quarantined_at", "reason", "id")])
    return to_rows(held if limit is None else held.slice(0, limit))


def export_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows to a file of JSON lines with `id`, `reason` and `payload`.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                try:
                    payload = json.loads(row["payload"])
                except (TypeError, ValueError):
                    payload = row["payload"]  # a payload that is not JSON is written as a text
                line = {"id": row["id"], "reason": row["reason"], "payload": payload}
                print(json.dumps(line, ensure_ascii=False), file=file)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def read_edited(name: str) -> dict[str, str]:
    """Return the payload of each id in a file of JSON lines with `id` and `payload`.

    Raises:
        UserError: the file cannot be read, or a line is malformed or repeats an id.
    """
    path = parse_path(name)
    try:
        with open_input(path) as stream:
            content = stream.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UserError(
                f"{path}: has more than {MOST_BYTES:,} bytes, and its rows are replayed at once: split it between "
                "lines, and replay one part after another"
            )
        lines = content.decode("utf-8-sig").split("\n")  # texts may contain other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            identity, payload = row["id"], row["payload"]
            if not isinstance(identity, str):
                raise TypeError(type(identity))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f'{path}:{number}: each line is a JSON object {{"id": ..., "payload": {{...}}}} as '
                f"`quarantine show --output` writes it"
            ) from error
        if identity in found:
            raise UserError(f"{path}:{number}: row {identity} appears twice; keep one of them")
        found[identity] = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)
    return found


def apply_payloads(rows: pa.Table, edited: dict[str, str]) -> tuple[list[dict[str, Any]], int]:
    """Return the quarantined rows with their edited payloads, and the number of edited rows already replayed.

    Rows that were already replayed are ignored, so that a replay with the same file can be repeated.

    Raises:
        UserError: an edited row is neither quarantined nor replayed.
    """
    status = dict(zip(rows["id"].to_pylist(), rows["status"].to_pylist(), strict=True))
    absent = [one for one in edited if status.get(one, DISCARDED) == DISCARDED]
    if absent:
        raise UserError(
            f"{len(absent):,} rows of the file are not held in quarantine, such as {absent[0]}: "
            f"they were discarded, or belong to another model; remove them from the file"
        )
    before = sum(status[one] in (REPLAYING, REPLAYED) for one in edited)
    return [
        {**row, "payload": edited[row["id"]]} for row in list_quarantined_rows(rows) if row["id"] in edited
    ], before


def discard(tables: Tables, model: str, choice: RowSelection) -> int:
    """Mark the selected quarantined rows as discarded, in one commit; return the number of these rows.

    Raises:
        UserError: the table cannot be read or written.
    """
    rows = read_selected(tables, model, choice)
    held = rows.filter(_compute.is_null(rows["status"])).select(["id"])
    if held.num_rows:
        values = {"status": quote_text(DISCARDED), "resolved_at": _format_time(to_micros(times.now()))}
        _merge(tables, held.group_by("id").aggregate([]), values)  # rows of earlier releases may share an id
    return held.num_rows


def mark_replaying(tables: Tables, landings: pa.Table, replay_id: str) -> None:
    """Mark quarantined rows as `replaying`, and store the row to land with each of them, in one commit.

    Args:
        tables: tables of the warehouse.
        landings: table with the unique `id` of each row, and `landing`, the row to land, or null if no row lands.
        replay_id: id of the replay that marks the rows.

    Raises:
        UserError: the table cannot be read or written.
    """
    values = {"status": quote_text(REPLAYING), "replay": quote_text(replay_id), "landing": "s.landing"}
    _merge(tables, landings, values)


def _merge(tables: Tables, rows: pa.Table, values: dict[str, str]) -> None:
    """Set columns in the quarantined rows with the ids of `rows`, in one commit; values are SQL expressions."""

    def merge(log: DeltaTable, properties: CommitProperties) -> None:
        merger = log.merge(
            rows,
            "t.id = s.id AND t.status IS NULL",
            source_alias="s",
            target_alias="t",
            commit_properties=properties,
            post_commithook_properties=NO_HOOKS,
        )
        merger.when_matched_update(values).execute()

    FileTable(tables, TABLE).change(merge)


def mark_replayed(tables: Tables, replay_id: str) -> None:
    """Mark the rows of a replay as `replayed`, in one commit.

    Raises:
        UserError: the table cannot be read or written.
    """
    values = {"status": quote_text(REPLAYED), "resolved_at": _format_time(to_micros(times.now()))}
    _update(tables, values, f"replay = {quote_text(replay_id)} AND status = {quote_text(REPLAYING)}")


def _update(tables: Tables, values: dict[str, str], condition: str) -> None:
    """Set columns in all rows that meet a condition, in one commit; values and condition are SQL expressions."""

    def update(log: DeltaTable, properties: CommitProperties) -> None:
        log.update(
            updates=values,
            predicate=condition,
            commit_properties=properties,
            post_commithook_properties=NO_HOOKS,
        )

    FileTable(tables, TABLE).change(update)


def _format_time(micros: int) -> str:
    return f"arrow_cast({micros}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
