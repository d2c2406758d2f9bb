"""Land rejected rows after a fix, each at most once, also after a crash at any moment.

Three commits, in this order:
1. the rows that the spec accepts now are marked `replaying`, each with the row to land: this fixes the outcome;
2. they are appended to the measurements, in a transaction named after the replay, so that a retry is idempotent;
3. they are marked `replayed`.
A crash before 1 changes nothing. After a later crash, the next replay of the model first repeats 2 and 3.

A message of a topic has a row in quarantine for each reader that rejected it. One of these rows lands, and the others
are marked with it. If the message has landed already, all are marked and none lands.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jobs.landing.rejected.held import list_quarantined_rows, mark_replayed, mark_replaying, read_rejected
from jobs.landing.rejected.message_places import Landing, Place, find_landed, find_place
from jobs.landing.rejected.rechecking import recheck_payloads
from jobs.landing.target_table import build_accepted_schema
from jobs.landing.values.times import read_now_us
from jobs.landing.written_pieces import LANDED_AT, ORIGIN, build_rows
from jobs.lineage import replayed_late_rows
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.storage.measurements_table import OFFSET, PARTITION, TOPIC, TOPIC_ID, KeyTypes, read_key_types
from jobs.storage.positions import to_micros
from jobs.storage.quarantine import REPLAYING
from jobs.storage.table_log import FileTable, append_rows
from jobs.storage.table_rows import to_rows
from jobs.storage.tables import need_measurements
from jobs.storage.warehouse import Tables

STALE = (
    "rejected by a generation whose state is no longer used; the current generations check the row themselves"
)
"""Reason not to replay a row that an abandoned generation rejected."""
AHEAD = "not landed yet: `ingest` will read this message, and check it with the current spec"
"""Reason not to replay a message that a stream rejected before `ingest` has read it."""


@dataclass
class ReplayOutcome:
    """Counts of a replay: landed rows, late rows among them, rows of an interrupted replay, rows still rejected.

    copies: rows that are marked as replayed but do not land, since another row of their message lands or has landed.
    """

    landed: int = 0
    late: int = 0
    copies: int = 0
    completed: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    version: int | None = None


class CheckedRow(NamedTuple):
    """A rejected row that was checked again.

    message: the row's identity (`Landing.identity`); place: place of the message, None if the row is not a message;
    reason: why the row cannot be replayed, or None; landing: the row to land.
    """

    id: str
    message: str
    place: Place | None
    reason: str | None
    landing: str | None


Row = dict[str, Any]


def replay(tables: Tables, spec: ModelSpec, rows: Sequence[Row]) -> ReplayOutcome:
    """Land the held rows (`held.list_quarantined_rows`) that the current spec accepts.

    Raises:
        UserError: the model has no measurements table, or the table lacks a column of the spec.
    """
    table = need_measurements(tables, spec.name)
    key_types = read_key_types(tables, spec)
    with tables.lock(f"replay-{spec.name}"):
        former = [_complete(tables, spec, key_types, one) for one in list_interrupted(tables, spec.name)]
        outcome = ReplayOutcome()
        replay_id = uuid.uuid4().hex
        landing = Landing.of(tables, spec)
        checked = _check_again(tables, spec, key_types, rows, landing)
        claims = _find_claims(tables, spec, checked, landing)
        left = Counter(one.reason for one in checked if one.message not in claims)
        if claims:
            _mark_claimed(tables, spec, claims, landing, replay_id)
            outcome = _complete(tables, spec, key_types, replay_id)
    outcome.completed = sum(one.landed for one in former)
    outcome.reasons = {reason: count for reason, count in left.items() if reason is not None}
    outcome.version = tables.latest_version(table) if outcome.landed or outcome.completed else None
    return outcome


def list_interrupted(tables: Tables, model: str) -> list[str]:
    """Return the ids of the model's replays that crashed between their commits."""
    return sorted({row["replay"] for row in _read_marked(tables, model)})


def _read_marked(tables: Tables, model: str) -> list[Row]:
    """Return the rows with status `replaying`: a replay has marked them, but not finished."""
    columns = ("id", "status", "replay", "landing", "source", "position", "generation", "batch_id")
    found = to_rows(read_rejected(tables, model, columns))
    return [row for row in found if row["status"] == REPLAYING]


def _check_again(
    tables: Tables, spec: ModelSpec, key_types: KeyTypes, rows: Sequence[Row], landing: Landing
) -> list[CheckedRow]:
    """Check rejected rows with the current spec, and check whether a replay may land them."""
    chains = replayed_late_rows.list_lineages(tables, spec.name)
    landed = [
        read_now_us() if row["quarantined_at"] is None else to_micros(row["quarantined_at"]) for row in rows
    ]
    found = recheck_payloads(spec, key_types, [row["payload"] for row in rows], np.array(landed, np.int64))
    checked = []
    for row, reason, lands in zip(rows, found.reasons, found.landings, strict=True):
        place = find_place(row)
        if _is_measurement(row) and not replayed_late_rows.is_refused_by_all(
            chains, row["generation"], row["batch_id"]
        ):
            reason = STALE
        elif place is not None and not landing.has_passed(place):
            reason = AHEAD
        checked.append(CheckedRow(row["id"], landing.identity(row), place, reason, lands))
    return checked


Claims = dict[str, tuple[str, str | None] | None]
"""Messages that a replay marks: message to the id of the landing row and the row to land; None: already landed."""


def _find_claims(tables: Tables, spec: ModelSpec, checked: Sequence[CheckedRow], landing: Landing) -> Claims:
    claims: Claims = {}
    for one in checked:
        if one.reason is None:
            # Equal rows of an earlier release share an id; any accepted row of a message will do.
            claims.setdefault(one.message, (one.id, one.landing))
    places = {one.message: one.place for one in checked if one.place is not None}
    return claims | dict.fromkeys(find_landed(tables, spec, landing, places))


def _is_measurement(row: Row) -> bool:
    """Tell if the stream rejected a row: then the measurements already have it."""
    return row["generation"] is not None and (row["source"] or "").startswith("measurements/")


def _mark_claimed(tables: Tables, spec: ModelSpec, claims: Claims, landing: Landing, replay_id: str) -> None:
    """Mark the held rows of the claimed messages as `replaying`, each with the row to land, in one commit."""
    lands: dict[str, str | None] = {}
    for row in list_quarantined_rows(read_rejected(tables, spec.name)):
        message = landing.identity(row)
        if message in claims:
            chosen = claims[message]
            lands[row["id"]] = chosen[1] if chosen is not None and chosen[0] == row["id"] else None
    columns = {"id": arrow.build_texts(list(lands)), "landing": arrow.build_texts(list(lands.values()))}
    mark_replaying(tables, pa.Table.from_arrays(list(columns.values()), list(columns)), replay_id)


def _complete(tables: Tables, spec: ModelSpec, key_types: KeyTypes, replay_id: str) -> ReplayOutcome:
    """Make the second and third commit of a replay."""
    marked = [row for row in _read_marked(tables, spec.name) if row["replay"] == replay_id]
    lands = [row for row in marked if row["landing"] is not None]
    late = [row for row in lands if _is_measurement(row)]
    others = _select_distinct_messages(tables, spec, [row for row in lands if not _is_measurement(row)])
    _land(tables, spec, key_types, late, replay_id, copies=True)
    _land(tables, spec, key_types, others, replay_id, copies=False)
    if marked:
        mark_replayed(tables, replay_id)
    return ReplayOutcome(len(late) + len(others), len(late), len(marked) - len(lands))


def _select_distinct_messages(tables: Tables, spec: ModelSpec, rows: list[Row]) -> list[Row]:
    """Keep one row of each message: an interrupted replay of an earlier release marked all rows."""
    landing = Landing.of(tables, spec)
    messages = {landing.identity(row): row for row in rows if find_place(row) is not None}
    return [*(row for row in rows if find_place(row) is None), *messages.values()]


def _land(
    tables: Tables, spec: ModelSpec, key_types: KeyTypes, rows: list[Row], replay_id: str, copies: bool
) -> None:
    """Append a replay's rows to the measurements, once. copies: the rows are late rows."""
    if not rows:
        return
    count = len(rows)
    parsed = [json.loads(row["landing"]) for row in rows]
    times = np.array([one[spec.time] for one in parsed], np.int64)
    every = np.ones(count, bool)
    have = {
        name.casefold(): _build_column([one.get(name) for one in parsed], key_types.get(name))
        for name in spec.columns
    }
    have[spec.time.casefold()] = arrow.build_times(times, every)
    have[LANDED_AT] = arrow.build_times(np.full(count, read_now_us()), every)
    if copies:
        replayed_late_rows.record_replay(tables, replay_id, spec.name, count)
        have[ORIGIN] = arrow.build_texts(
            [replayed_late_rows.format_origin(replay_id, row["generation"], row["batch_id"]) for row in rows]
        )
    else:
        have[ORIGIN] = arrow.repeat_text(f"quarantine:{replay_id}", count)
        places = [find_place(row) for row in rows]
        have[TOPIC] = arrow.build_texts([None if one is None else one.topic for one in places])
        have[TOPIC_ID] = arrow.build_texts([None if one is None else one.topic_id for one in places])
        have[PARTITION] = _build_column([None if one is None else one.partition for one in places], "bigint")
        have[OFFSET] = _build_column([None if one is None else one.offset for one in places], "bigint")
    table = FileTable(tables, need_measurements(tables, spec.name))
    of_topic = spec.source_kind == "kafka" or OFFSET in table.columns().names
    schema = build_accepted_schema(table, spec, messages=of_topic and not copies)
    # A batch pass already has the originals, so the commit of copies records no time span (`positions.Commit`).
    first, last = (None, None) if copies else (int(times.min()), int(times.max()))
    detail = {"replay": replay_id, "late": copies, "rows": count, "min_time": first, "max_time": last}
    transaction = f"replay-{replay_id}{'-late' if copies else ''}", 1
    append_rows(table, build_rows(schema, have), transaction, json.dumps(detail))


def _build_column(values: list[Any], kind: str | None) -> pa.Array:
    """Return values as an Arrow array: of a key or id column in the type `kind`, or as numbers for None."""
    if kind == "string":
        return arrow.build_texts([value if value is None else str(value) for value in values])
    known = np.array([value is not None for value in values], bool)
    if kind == "bigint":
        return arrow.build_integers(np.array([value or 0 for value in values], np.int64), known)
    return arrow.build_numbers(np.array([np.nan if value is None else value for value in values], float))
