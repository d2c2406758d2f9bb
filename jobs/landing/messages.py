"""Read the messages of a topic as rows, and check them with the same rules and parser as files.

Spark passes JSON values to Python unparsed, and one call parses a whole Arrow batch (`jobs.landing.json_rows`). In
measurements this was several times faster than Spark's `from_json`, and messages and files have the same rules. Spark
parses Avro values.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import from_avro
from pyspark.sql.pandas.types import to_arrow_schema

from jobs.core.errors import UserError, extract_first_line
from jobs.landing.checking import build_columns_ddl, check_rows
from jobs.landing.json_rows import NOT_UTF8, read_objects
from jobs.landing.raw_rows import RawRows as Columns
from jobs.landing.raw_rows import repair_texts
from jobs.specs.model_spec import ModelSpec
from jobs.specs.source import Source
from jobs.state.encoding import arrow
from jobs.storage.measurements_table import OFFSET, PARTITION, TOPIC, KeyTypes
from jobs.storage.quarantine import PAYLOAD, POSITION, REASON, REJECTED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SENT = "_sent"
"""Column with the time at which a message was sent."""
TOMBSTONE = "value: none (a tombstone)"
NOT_AVRO = "value: not an Avro record of the schema"
_KEY_KINDS = ("string", "int", "bigint")


def derive_topic_key_types(source: Source, names: list[str]) -> KeyTypes:
    """Return the types of the key and id columns in the measurements table of a topic."""
    if source.format == "avro":
        whole = {
            field["name"]
            for field in (source.avro_schema or {}).get("fields", [])
            if _is_whole(field["type"])
        }
    else:
        whole = set(source.whole_keys)
    return {name: "bigint" if name in whole else "string" for name in names}


def read_checked_messages(
    messages: DataFrame,
    spec: ModelSpec,
    source: Source,
    types: KeyTypes,
    topic_id: str | None = None,
    several: bool = False,
) -> DataFrame:
    """Return the checked rows of messages.

    Args:
        messages: frame with the columns `key`, `value`, `partition` and `offset`.
        spec: spec of the model.
        source: source of the messages.
        types: types of the key and id columns.
        topic_id: id of the topic, for the positions of rejected rows; None if unknown.
        several: whether the messages are from several topics; then the frame also has the column `topic`.

    Returns:
        Frame with `_reason`, `_payload` and `_position` (null in accepted rows), the spec's columns, `_partition` and
        `_offset`. If the messages are from several topics, the frame also has `_topic`.

    Raises:
        UserError: the Avro schema is invalid, or lacks a column of the spec.
    """
    kept = messages
    if source.tombstones == "skip":
        kept = kept.filter(F.col("value").isNotNull())
    named = ["topic"] if several else []
    raw = kept.select(
        "value", "key", "partition", "offset", *named, _select_send_time(kept), *_select_cells(spec, source)
    )
    schema = f"{REJECTED}, {build_columns_ddl(spec, types)}, {PARTITION} int, {OFFSET} bigint"
    schema += f", {TOPIC} string" if several else ""
    check = MessageChecker(spec, source, types, topic_id)

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield check(batch)

    if source.format == "avro":
        check(_build_empty(raw, spec))  # raises an error for unusable column types before the query starts
    return raw.mapInArrow(work, schema)


class MessageChecker(NamedTuple):
    """Parses and checks Arrow batches of messages on the executors."""

    spec: ModelSpec
    source: Source
    types: KeyTypes
    topic_id: str | None = None

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the checked rows of a batch, with the columns of `read_checked_messages`."""
        values = batch.column("value")
        message_keys = self._decode_keys(batch.column("key"))
        columns, problems = self._columns(batch, message_keys)
        problems[arrow.to_numpy(values.is_null())] = TOMBSTONE
        mark = self.spec.files.decimal
        source = Columns(columns, len(values), problems, mark, landed=_read_send_times(batch))
        rows = check_rows(self.spec, source, self.types, self.source.title)
        reasons, written = rows.column(REASON).to_pylist(), rows.column(PAYLOAD)
        payloads: list[str | None] = [None] * len(values)
        positions: list[str | None] = [None] * len(values)
        for at, reason in enumerate(reasons):
            if reason is not None:
                row = written[at].as_py()
                payloads[at] = self._build_payload(values[at].as_py(), message_keys, at, problems[at], row)
                positions[at] = self._format_position(batch, at)
        texts = {
            REASON: arrow.build_texts(reasons),
            PAYLOAD: arrow.build_texts(payloads),
            POSITION: arrow.build_texts(positions),
        }
        place = [name for name in ("partition", "offset", "topic") if name in batch.schema.names]
        found = {name: rows.column(name) for name in self.spec.columns}
        found |= {f"_{name}": batch.column(name) for name in place}
        found = texts | found
        return pa.RecordBatch.from_arrays(list(found.values()), list(found))

    def _columns(
        self, batch: pa.RecordBatch, message_keys: pa.Array | None
    ) -> tuple[dict[str, pa.Array], NDArray[np.object_]]:
        """Return the unparsed columns of a batch, and (N,) the reason why each invalid message has no values."""
        spec, key = self.spec, self.source.message_key
        inner = spec.list_file_columns(name for name in spec.columns if name != key)
        if self.source.format == "avro":
            names = [name for name in batch.schema.names if name.startswith("c_")]
            columns = {name[2:]: batch.column(name) for name in names}
            # For an invalid record, Spark returns a record in which all values are null.
            known = np.zeros(batch.num_rows, bool)
            for column in columns.values():
                known |= arrow.to_numpy(column.is_valid())
            problems = np.full(batch.num_rows, None, object)
            problems[~known] = NOT_AVRO
            columns, not_utf8 = repair_texts(columns)
            if not_utf8 is not None:
                problems[not_utf8] = NOT_UTF8
        else:
            filled = batch.column("value").fill_null(b"")
            keys = spec.list_file_columns(name for name in spec.key if name != key)
            exact = spec.list_file_columns([spec.time, *spec.id_columns])
            found = read_objects(filled, inner, keys, exact, spec.files.decimal)
            columns, problems = found.columns, found.reasons()
        if key is not None and message_keys is not None:
            columns[spec.list_file_columns([key])[0]] = message_keys
        return columns, problems

    def _decode_keys(self, keys: pa.Array) -> pa.Array | None:
        if self.source.message_key is None:
            return None
        try:
            return keys.cast(pa.string())
        except pa.ArrowInvalid:
            return pa.array([_decode_text(key) for key in keys.to_pylist()], pa.string())

    def _build_payload(
        self,
        value: bytes | None,
        message_keys: pa.Array | None,
        at: int,
        problem: str | None,
        row: str | None,
    ) -> str | None:
        """Return the payload for quarantine.

        The payload is the JSON text of the message, the fields of an Avro record, or the bytes of an invalid Avro
        record.
        """
        if value is None:
            return None
        if self.source.format == "avro":
            return row if problem is None else json.dumps({"base64": base64.b64encode(value).decode()})
        text = value.decode("utf-8", "backslashreplace")
        inside = text.lstrip()[1:].lstrip()
        if message_keys is None or problem is not None:
            return text
        (name,) = self.spec.list_file_columns([self.source.message_key or ""])
        key = json.dumps({name: message_keys[at].as_py()}, ensure_ascii=False)[:-1]
        return f"{key}{'' if inside.startswith('}') else ', '}{inside}"

    def _format_position(self, batch: pa.RecordBatch, at: int) -> str:
        place: dict[str, Any] = {
            "topic": self.source.topic or batch.column("topic")[at].as_py(),
            "partition": batch.column("partition")[at].as_py(),
            "offset": batch.column("offset")[at].as_py(),
        }
        if self.topic_id is not None:
            place["topic_id"] = self.topic_id
        key = batch.column("key")[at].as_py()
        if key is not None:
            place["key"] = key.decode("utf-8", "backslashreplace")
        return json.dumps(place, ensure_ascii=False)


def _select_send_time(messages: DataFrame) -> Column:
    """Return the broker's timestamp, or else the start of the micro-batch; a retry gives the same time."""
    began = F.current_timestamp()
    if "timestamp" not in messages.columns:
        return began.alias(SENT)
    sent = F.col("timestamp")
    return F.when(F.unix_micros(sent) > 0, sent).otherwise(began).alias(SENT)


def _read_send_times(batch: pa.RecordBatch) -> NDArray[np.int64] | None:
    """Return the send times (N,) of the messages of a batch, in microseconds since 1970; None if unknown."""
    return arrow.to_numpy(batch.column(SENT).cast(pa.int64())) if SENT in batch.schema.names else None


def _select_cells(spec: ModelSpec, source: Source) -> list[Column]:
    """Return the fields of an Avro record as columns c_<field>; an empty list for JSON."""
    if source.format == "json":
        return []
    value = F.col("value")
    if source.framing == "confluent":  # a zero byte and a schema number of four bytes precede the record
        value = F.when(F.substring(value, 1, 1) == F.lit(bytearray(1)), F.expr("substring(value, 6)"))
    names = [field["name"] for field in (source.avro_schema or {}).get("fields", [])]
    wanted = spec.list_file_columns(name for name in spec.columns if name != source.message_key)
    absent = [name for name in wanted if name not in names]
    if absent:
        raise UserError(
            f"source.avro_schema of {spec.name} has no field {', '.join(absent)}, which the spec uses"
        )
    record = from_avro(value, json.dumps(source.avro_schema), {"mode": "PERMISSIVE"})
    keys = [] if source.message_key is None else spec.list_file_columns([source.message_key])
    inner = [name for name in names if name not in keys]
    return [record.getField(name).alias(f"c_{name}") for name in inner]


def _build_empty(raw: DataFrame, spec: ModelSpec) -> pa.RecordBatch:
    """Return an empty Arrow batch with the columns of a frame.

    Raises:
        UserError: a column has no type in Arrow, or the type of a key or id column is not suitable.
    """
    try:
        schema = to_arrow_schema(raw.schema, timezone="UTC")
    except PySparkException as error:
        raise UserError(f"source.avro_schema of {spec.name}: {extract_first_line(error)}") from error
    kinds = {field.name: field.dataType.simpleString() for field in raw.schema.fields}
    for name in spec.list_file_columns(spec.naming_columns):
        if kinds.get(f"c_{name}", "string") not in _KEY_KINDS:
            what = "a key" if name in spec.list_file_columns(spec.key) else "an id"
            raise UserError(
                f"source.avro_schema of {spec.name}: field {name} holds {kinds[f'c_{name}']}; {what} is a string, "
                f"an int or a long"
            )
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _is_whole(kind: Any) -> bool:
    if isinstance(kind, list):
        return any(map(_is_whole, kind))
    return kind in ("int", "long")


def _decode_text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None
