"""Check rejected rows again with the current spec, and land each accepted row at most once, even after a crash."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.landing.checking import check_rows
from jobs.landing.json_rows import find_member
from jobs.landing.raw_rows import RawRows, find_shape_problem, parse_payload
from jobs.landing.rejected.held import list_quarantined_rows, mark_replayed, mark_replaying, read_rejected
from jobs.landing.target_table import build_accepted_schema
from jobs.landing.text_lines import match_again
from jobs.landing.values.times import read_now_us
from jobs.landing.written_pieces import LANDED_AT, ORIGIN, build_rows
from jobs.lineage import replayed_late_rows
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.storage.measurements_table import OFFSET, PARTITION, TOPIC, TOPIC_ID, KeyTypes, read_key_types
from jobs.storage.positions import find_first_topic_id, find_landed_position, parse_offsets, to_micros
from jobs.storage.quarantine import REASON, REPLAYED, REPLAYING, TABLE
from jobs.storage.queries import open_queries
from jobs.storage.table_log import FileTable, append_rows
from jobs.storage.table_rows import to_rows
from jobs.storage.tables import measurements, need_measurements
from jobs.storage.warehouse import Tables


class Place(NamedTuple):
    """Position of a message in Kafka; a `topic_id` of None means that the id of the topic is not known."""

    topic: str
    topic_id: str | None
    partition: int
    offset: int


def find_place(row: Mapping[str, Any]) -> Place | None:
    """Return the place of a rejected message from the row's `source` and `position`; None for all other rows."""
    if not (row["source"] or "").startswith("kafka:"):
        return None
    found = json.loads(row["position"] or "{}")
    if found.get("offset") is None:
        return None
    return Place(found["topic"], found.get("topic_id"), int(found["partition"]), int(found["offset"]))


class Landing(NamedTuple):
    """Progress of `ingest` in a model's topic.

    first: first known id of the topic, which is also used for rows without an id. None means that no id is known, so
        that ids are not compared.
    now: id of the topic that `ingest` reads now.
    offsets: offset of the next message to land, by partition.
    """

    topic: str
    first: str | None
    now: str | None
    offsets: dict[int, int]

    @classmethod
    def of(cls, warehouse: Tables, spec: ModelSpec) -> Landing:
        """Return the progress in a model's topic; `offsets` is empty without a topic or before the first landing."""
        if spec.source is not None and spec.source.kind == "kafka" and not spec.source.streamed:
            return cls("", "", None, {})  # each topic has a known id, and only `ingest` reads it
        table = measurements(spec.name)
        topic = "" if spec.streamed_source is None else spec.streamed_source.topic
        landed = find_landed_position(warehouse, table, topic) if topic else None
        if landed is None:
            return cls(topic, None, None, {})
        return cls(
            topic, find_first_topic_id(warehouse, table, topic), landed.get("topic_id"), parse_offsets(landed)
        )

    def message(self, place: Place) -> str:
        """Return a text that identifies a message: topic, topic id, partition and offset."""
        known = "" if self.first is None else place.topic_id or self.first
        return f"{place.topic}/{known}/{place.partition}/{place.offset}"

    def identity(self, row: Mapping[str, Any]) -> str:
        """Return the identity of a rejected row: the identity of its message, or the row's id without a message."""
        place = find_place(row)
        return row["id"] if place is None else self.message(place)

    def has_passed(self, place: Place) -> bool:
        """Return whether `ingest` has already read a rejected message, and will therefore not read it again."""
        if place.topic != self.topic or place.offset < self.offsets.get(place.partition, 0):
            return True
        return None not in (self.first, self.now) and (place.topic_id or self.first) != self.now


def find_landed(tables: Tables, spec: ModelSpec, landing: Landing, wanted: Mapping[str, Place]) -> set[str]:
    """Return the identities of the wanted messages that have landed.

    A message has landed if the measurements table contains the message's place, or if a quarantined row of the message
    was replayed. Replayed rows count because replays of earlier releases landed messages without their place.
    """
    if not wanted:
        return set()
    rows = to_rows(tables.columns(TABLE, ("model", "status", "id", "source", "position")))
    replayed = (row for row in rows if row["model"] == spec.name and row["status"] in (REPLAYING, REPLAYED))
    found = {landing.identity(row) for row in replayed}
    offsets = [place.offset for place in wanted.values()]
    found |= {landing.message(place) for place in _read_landed(tables, spec, min(offsets), max(offsets))}
    return found & wanted.keys()


def _read_landed(tables: Tables, spec: ModelSpec, first: int, last: int) -> Iterator[Place]:
    """Yield the places of the messages that have landed with offsets from `first` to `last`."""
    with open_queries(tables.root) as queries:
        columns = queries.add("landed", measurements(spec.name))
        if columns is None or OFFSET not in columns.names:
            return
        topic_id = TOPIC_ID if TOPIC_ID in columns.names else f"NULL AS {TOPIC_ID}"
        names = f"{TOPIC}, {topic_id}, {PARTITION}, {OFFSET}"
        for rows in queries.batches(f"SELECT {names} FROM landed WHERE {OFFSET} BETWEEN {first} AND {last}"):
            yield from map(Place, *(column.to_pylist() for column in rows.columns))


NOT_AN_OBJECT = "payload: not a JSON object"


class Rechecked(NamedTuple):
    """For each payload, the reason for its rejection, or the row to land: a JSON object, its time in microseconds."""

    reasons: list[str | None]
    landings: list[str | None]


def recheck_payloads(
    spec: ModelSpec,
    key_types: KeyTypes,
    payloads: Sequence[str | None],
    landed: NDArray[np.int64] | None = None,
) -> Rechecked:
    """Check payloads by the rules of `ingest`; a time may have the spec's format or be in ISO 8601.

    Args:
        spec: current spec of the model.
        key_types: types of the key columns.
        payloads: N payloads.
        landed: (N,) time at which each payload was quarantined, in microseconds since 1970. None means the present
            time.
    """
    rows = [parse_payload(payload) for payload in payloads]
    known = [place for place, row in enumerate(rows) if row is not None]
    reasons: list[str | None] = [NOT_AN_OBJECT] * len(rows)
    landings: list[str | None] = [None] * len(rows)

    def check(spec: ModelSpec, places: list[int]) -> None:
        source = _build_rows(spec, [rows[place] or {} for place in places])
        source = source._replace(landed=None if landed is None else landed[places])
        batch = check_rows(spec, source, key_types, "payload")
        found = _format_payloads(spec, batch)
        for place, reason, landing in zip(places, batch.column(REASON).to_pylist(), found, strict=True):
            reasons[place], landings[place] = reason, landing
        # The stream always writes the time of a rejected row in ISO 8601, not in the format of the files.
        mistimed = [place for place in places if (reasons[place] or "").startswith(f"time {spec.time}:")]
        if spec.time_format is not None and mistimed:
            check(spec.model_copy(update={"time_format": None}), mistimed)

    # A row that the stream rejected has the column names of the table, not those of the files.
    by_table = {place for place in known if _has_names_of_table(spec, rows[place] or {})}
    check(spec, [place for place in known if place not in by_table])
    if by_table:
        plain = spec.files.model_copy(update={"names": {}})
        check(spec.model_copy(update={"files": plain}), sorted(by_table))
    return Rechecked(reasons, landings)


def _has_names_of_table(spec: ModelSpec, row: dict[str, Any]) -> bool:
    renamed = spec.files.names.keys() & {*spec.columns}
    return any(name in row for name in renamed) and not row.keys() & {*spec.list_file_columns(renamed)}


def _build_rows(spec: ModelSpec, rows: list[dict[str, Any]]) -> RawRows:
    names = set(spec.list_file_columns(spec.naming_columns))
    problems = [find_shape_problem(row) for row in rows]
    if spec.line_pattern is not None:
        again = [match_again(spec.line_pattern, row) for row in rows]
        rows, unmatched = [row for row, _ in again], [problem for _, problem in again]
        problems = [one or other for one, other in zip(problems, unmatched, strict=True)]
    decimal = spec.files.decimal
    numbers = {*spec.list_file_columns([*spec.measurement, *spec.control])} if decimal == "," else set()
    named = [] if spec.key_from_name is None else [spec.key_from_name]
    columns = {
        name: arrow.build_texts(
            [_format_value(find_member(row, name), name in names, name in numbers) for row in rows]
        )
        for name in (*spec.file_columns, *named)
    }
    return RawRows(columns, len(rows), np.array(problems, object), decimal)


def _format_value(value: Any, whole: bool, comma: bool) -> str | None:
    """Return a value as the text that a file would contain.

    Args:
        value: value of a JSON member.
        whole: write a whole number without a fraction, as in a key or id column.
        comma: write a fraction with a decimal comma.
    """
    if value is None or isinstance(value, str):
        return value
    if whole and isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value).replace(".", ",") if comma and isinstance(value, float) else json.dumps(value)


def _format_payloads(spec: ModelSpec, batch: pa.RecordBatch) -> list[str | None]:
    fits = batch.column(REASON).is_null().to_pylist()
    columns = {name: batch.column(name) for name in spec.columns}
    columns[spec.time] = columns[spec.time].cast(pa.int64())
    values = {name: column.to_pylist() for name, column in columns.items()}
    return [
        json.dumps({name: values[name][place] for name in values if values[name][place] is not None})
        if fit
        else None
        for place, fit in enumerate(fits)
    ]


STALE = (
    "rejected by a generation whose state is no longer used; the current generations check the row themselves"
)
"""Reason why a row is not replayed if an abandoned generation rejected it."""
AHEAD = "not landed yet: `ingest` will read this message, and check it with the current spec"
"""Reason why a message is not replayed if a stream has rejected it and `ingest` has not read it yet."""


@dataclass
class ReplayOutcome:
    """Counts of a replay.

    landed: number of landed rows.
    late: number of late rows among the landed rows.
    copies: number of rows that are marked as replayed but do not land, because another row of the same message lands
        or has landed.
    completed: number of landed rows of earlier replays that were interrupted.
    reasons: number of rows that are still rejected, by reason.
    version: version of the measurements table; None if no row has landed.
    """

    landed: int = 0
    late: int = 0
    copies: int = 0
    completed: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    version: int | None = None


class CheckedRow(NamedTuple):
    """A rejected row that was checked again.

    message: identity of the row (`Landing.identity`).
    place: place of the message; None if the row is not a message.
    reason: reason why the row cannot be replayed; None if the row can be replayed.
    landing: row to land.
    """

    id: str
    message: str
    place: Place | None
    reason: str | None
    landing: str | None


Row = dict[str, Any]


def replay(tables: Tables, spec: ModelSpec, rows: Sequence[Row]) -> ReplayOutcome:
    """Land those quarantined rows (`held.list_quarantined_rows`) that the current spec accepts.

    Raises:
        UserError: the model has no measurements table, or the table lacks a column of the spec.
    """
    table = need_measurements(tables, spec.name)
    key_types = read_key_types(tables, spec)
    with tables.lock(f"replay-{spec.name}"):
        interrupted = sorted({row["replay"] for row in _read_marked(tables, spec.name)})
        former = [_complete(tables, spec, key_types, one) for one in interrupted]
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


def _read_marked(tables: Tables, model: str) -> list[Row]:
    """Return the rows with status `replaying`: a replay has marked these rows, but has not finished."""
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
"""Messages whose rows a replay marks.

The value of a message has the id of the rejected row that lands, and the row to land. None means that the message has
already landed.
"""


def _find_claims(tables: Tables, spec: ModelSpec, checked: Sequence[CheckedRow], landing: Landing) -> Claims:
    claims: Claims = {}
    for one in checked:
        if one.reason is None:
            # Equal rows of an earlier release have the same id. Each accepted row of a message is suitable.
            claims.setdefault(one.message, (one.id, one.landing))
    places = {one.message: one.place for one in checked if one.place is not None}
    return claims | dict.fromkeys(find_landed(tables, spec, landing, places))


def _is_measurement(row: Row) -> bool:
    """Return whether the stream rejected a row; such a row is already in the measurements table."""
    return row["generation"] is not None and (row["source"] or "").startswith("measurements/")


def _mark_claimed(tables: Tables, spec: ModelSpec, claims: Claims, landing: Landing, replay_id: str) -> None:
    """Mark the quarantined rows of the claimed messages as `replaying`, and store the rows to land, in one commit."""
    lands: dict[str, str | None] = {}
    for row in list_quarantined_rows(read_rejected(tables, spec.name)):
        message = landing.identity(row)
        if message in claims:
            chosen = claims[message]
            lands[row["id"]] = chosen[1] if chosen is not None and chosen[0] == row["id"] else None
    columns = {"id": arrow.build_texts(list(lands)), "landing": arrow.build_texts(list(lands.values()))}
    mark_replaying(tables, pa.Table.from_arrays(list(columns.values()), list(columns)), replay_id)


def _complete(tables: Tables, spec: ModelSpec, key_types: KeyTypes, replay_id: str) -> ReplayOutcome:
    """Make the remaining commits of a replay: land the marked rows, then mark them as replayed."""
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
    """Return one row of each message, and all rows that are not messages.

    An interrupted replay of an earlier release may have marked several rows of a message.
    """
    landing = Landing.of(tables, spec)
    messages = {landing.identity(row): row for row in rows if find_place(row) is not None}
    return [*(row for row in rows if find_place(row) is None), *messages.values()]


def _land(
    tables: Tables, spec: ModelSpec, key_types: KeyTypes, rows: list[Row], replay_id: str, copies: bool
) -> None:
    """Append the rows of a replay to the measurements; a second call appends no row.

    Args:
        tables: tables of the warehouse.
        spec: spec of the model.
        key_types: types of the key columns.
        rows: marked rows.
        replay_id: id of the replay.
        copies: whether the rows are late rows, which are copies of rows in the measurements table.
    """
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
    # Batch passes already read the original rows, so the commit of copies has no time span (`positions.Commit`).
    first, last = (None, None) if copies else (int(times.min()), int(times.max()))
    detail = {"replay": replay_id, "late": copies, "rows": count, "min_time": first, "max_time": last}
    transaction = f"replay-{replay_id}{'-late' if copies else ''}", 1
    append_rows(table, build_rows(schema, have), transaction, json.dumps(detail))


def _build_column(values: list[Any], kind: str | None) -> pa.Array:
    """Return values as an Arrow array of the key or id type `kind`; a `kind` of None means floating-point numbers."""
    if kind == "string":
        return arrow.build_texts([value if value is None else str(value) for value in values])
    known = np.array([value is not None for value in values], bool)
    if kind == "bigint":
        return arrow.build_integers(np.array([value or 0 for value in values], np.int64), known)
    return arrow.build_numbers(np.array([np.nan if value is None else value for value in values], float))
