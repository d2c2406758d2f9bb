"""Measurements tables and tables of new keys: properties, columns, key types, history, and counts of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from jobs.specs.model_spec import ModelSpec
from jobs.storage.positions import FILES, VERSION
from jobs.storage.table_rows import read_column_types
from jobs.storage.tables import SNAPSHOTS, measurements, refuse_absent
from jobs.storage.warehouse import Tables, parse_actions

_SPARK_TYPES = {"long": "bigint", "integer": "int"}
"""Spark's names of Delta's types, for types whose two names differ."""

KeyTypes = dict[str, str]
"""Spark type of each key and id column of a measurements table: bigint or string."""

MEASUREMENT_PROPERTIES = {
    # A stream that was stopped for months must still be able to read every version after its position.
    "delta.logRetentionDuration": "interval 400 days",
    "delta.enableExpiredLogCleanup": "true",
}

TOPIC, TOPIC_ID, PARTITION, OFFSET = "_topic", "_topic_id", "_partition", "_offset"
PLACES = f"{TOPIC} string, {TOPIC_ID} string, {PARTITION} int, {OFFSET} bigint"
"""Columns for the position of each row's message in a topic. Rows that earlier releases landed have no topic id."""

HISTORY_PREFIX = "history:"
"""Prefix of `_origin` in rows that are the history of new keys."""

IS_HISTORY = f"(_origin IS NOT NULL AND _origin LIKE '{HISTORY_PREFIX}%')"
"""SQL condition for rows that are the history of new keys. Streams that import new keys skip these rows."""

NEW_KEYS_COLUMNS = f"{SNAPSHOTS}, meaning string"
"""Columns of `new_keys/<model>`: the columns of a snapshot, and the meaning of the state (`seeds.hash_meaning`)."""


def read_key_types(warehouse: Tables, spec: ModelSpec) -> KeyTypes:
    """Return the type of each key and id column of a model's measurements table, which must exist.

    Raises:
        UserError: a column of the spec is missing.
    """
    types = read_column_types(warehouse.root, measurements(spec.name))
    refuse_absent(list(types), spec.name, spec.columns)
    # Spark ignores case in column names, so the spec may differ from the table in case.
    have = {name.casefold(): kind for name, kind in types.items()}
    return {
        name: _SPARK_TYPES.get(have[name.casefold()], have[name.casefold()]) for name in spec.naming_columns
    }


def new_keys(model: str) -> str:
    """Return the name of the table of a model's newly pretrained keys."""
    return f"new_keys/{model}"


def find_history_version(warehouse: Tables, table: str, version: int) -> int | None:
    """Return the latest version, up to `version`, that landed history of new keys, or None."""
    landed = (one.version for one in warehouse.read_log_entries(table) if one.detail.get("history") is True)
    return max((one for one in landed if one <= version), default=None)


def create_new_keys_table(warehouse: Tables, model: str) -> str:
    """Make the table of a model's newly pretrained keys unless it exists, and return its name."""
    table = new_keys(model)
    warehouse.create(table, NEW_KEYS_COLUMNS, properties=MEASUREMENT_PROPERTIES)
    return table


def count_rows_between(
    warehouse: Tables,
    table: str,
    start: Mapping[str, int],
    end: Mapping[str, int],
    with_history: bool = True,
) -> int | None:
    """Count the rows of a measurements table, or the messages of a topic, after place `start` and up to place `end`.

    Return None if the log lacks a commit, or a commit lacks its number of rows. with_history: whether to count rows
    that are the history of new keys, too.
    """
    if VERSION not in end:
        return sum(max(0, offset - start.get(number, 0)) for number, offset in end.items())
    total = 0
    for version in range(start[VERSION] + 1, end[VERSION] + (2 if end.get(FILES) else 1)):
        content = warehouse.read_commit(table, version)
        if content is None:
            return None
        first = start.get(FILES, 0) if version == start[VERSION] + 1 else 0
        last = end.get(FILES) if version == end[VERSION] + 1 else None
        counts = list(_read_counts(content, with_history))[first:last]
        if None in counts:
            return None
        total += sum(count or 0 for count in counts)
    return total


def _read_counts(content: bytes, with_history: bool) -> Iterator[int | None]:
    """Yield the number of rows in each file that a commit added, in the order in which a stream reads the files."""
    actions = list(parse_actions(content))
    infos = (action.get("commitInfo", {}).get("userMetadata") or "" for action in actions)
    if not with_history and any('"history": true' in info for info in infos):
        return
    for action in actions:
        added = action.get("add")
        if added is not None and added["dataChange"]:
            yield json.loads(added.get("stats") or "{}").get("numRecords")
