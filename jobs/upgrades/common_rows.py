"""The rows that two generations have both estimated: their sums by key and event time, by SQL over the Delta tables.

Rows with the same key and event time cannot be distinguished, so their statistics are summed. If rows were corrected
(`order.kind: replay`), the last estimates count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from jobs.lineage.live_rows import build_uncorrected_query
from jobs.specs.model_spec import ModelSpec
from jobs.storage.queries import Queries, build_in_condition, quote_name, quote_text
from jobs.storage.tables import (
    LATE_COPIES_TABLE,
    LATE_COPY,
    estimates,
    estimates_history,
    is_run,
    measurements,
)
from jobs.storage.warehouse import Tables

SIDES = {"a": "old", "b": "new"}
SUMS = ("rows", "ll", "nis", "degrees", "flagged", "innovation", "components")
"""The sums of each side: number of rows; log-likelihood; NIS of the rows without flags, and the number of measured
components (the degrees of freedom); number of flagged rows; normalised innovations and their number."""
BOTH = [*(f"{letter}_{name}" for letter in SIDES for name in SUMS), "scored", "gained"]
"""The columns with the sums of both sides, and two more. scored: number of rows, or 0 if a row has no log-likelihood on
one side. gained: log-likelihood of the new generation on the scored rows minus that of the old generation."""
ESTIMATES, LANDED, PAIRED = "estimates", "landed", "paired"
"""Table names in queries: the estimates of all generations, the measurements, and the sums of `keep_paired_sums`."""
_COLUMNS = {
    "key": "VARCHAR",
    "event_time": "TIMESTAMP",
    "generation": "VARCHAR",
    "batch_id": "BIGINT",
    "mean": "DOUBLE[]",
    "covariance": "DOUBLE[]",
    "log_likelihood": "DOUBLE",
    "nis": "DOUBLE",
    "flags": "VARCHAR",
    "innovation": "DOUBLE[]",
    "correction": "BOOLEAN",
}
"""The columns of estimates that a comparison reads; if a table lacks one of these columns, its values are null."""


class CommonRows(NamedTuple):
    """The estimates that are compared.

    first_batch: the first micro-batch of the old generation whose rows the new generation also has. has_corrections:
    whether some estimates are corrections. innovations: number of components of the longest innovation. has_landed:
    whether there is a table of measurements.
    """

    queries: Queries
    old: str
    new: str
    first_batch: int
    has_corrections: bool
    innovations: int
    has_landed: bool

    def of(self, letter: str, columns: Sequence[str], condition: str = "true") -> str:
        """Return the query of the rows that count on one side, and that satisfy the condition."""
        name, first = (self.old, self.first_batch) if letter == "a" else (self.new, 0)
        where = f"generation = {quote_text(name)} AND batch_id >= {first} AND {condition}"
        return build_uncorrected_query(ESTIMATES, columns, where, self.has_corrections)


def open_common_rows(queries: Queries, model: str, old: str, new: str, first_batch: int) -> CommonRows:
    """Name the tables in queries, and return the rows of two generations; no rows if neither has estimated any.

    If the new side is a run over history, its estimates are included.
    """
    tables = [estimates(model), *([estimates_history(model)] if is_run(new) else [])]
    parts = []
    for name, table in zip(("of_stream", "of_history"), tables, strict=False):
        schema = queries.add(name, table)
        if schema is not None:
            parts.append(f"SELECT {_format_columns(schema.names)} FROM {name}")
    parts = parts or [f"SELECT {_format_columns(())} WHERE false"]
    queries.register_view(ESTIMATES, " UNION ALL ".join(parts))
    has_landed = queries.add(LANDED, measurements(model)) is not None  # a topic may have no such table
    found = queries.run(
        f"SELECT bool_or(correction) AS corrected, max(cardinality(innovation)) AS innovations FROM {ESTIMATES} "
        f"WHERE {build_in_condition('generation', (old, new))}"
    )
    corrected, innovations = (found[name][0].as_py() for name in ("corrected", "innovations"))
    return CommonRows(queries, old, new, first_batch, bool(corrected), innovations or 0, has_landed)


def _format_columns(names: Sequence[str]) -> str:
    return ", ".join(
        name if name in names else f"CAST(NULL AS {kind}) AS {name}" for name, kind in _COLUMNS.items()
    )


def keep_paired_sums(warehouse: Tables, spec: ModelSpec, rows: CommonRows) -> None:
    """Compute `BOTH` once by key and event time (`micros`), and store it as `PAIRED`.

    The prefix `a_` stands for the old generation, `b_` for the new generation. Only groups with the same number of rows
    on both sides are compared.
    """
    values = _build_value_columns(rows.innovations)
    named = ", ".join(f"{value} AS {name}" for name, value in values.items())
    parts = [
        f"SELECT key, {build_micros_sql('event_time')} AS micros, '{letter}' AS side, {named} FROM "
        f"({rows.of(letter, _READ)})"
        for letter in SIDES
    ]
    is_single = len(spec.measurement) == 1
    if rows.has_landed and not is_single:
        absent = ", ".join(f"NULL AS {name}" for name in values if name not in ("rows", "components"))
        landed = f"SELECT key, micros, 'm' AS side, 1 AS rows, seen AS components, {absent}"
        parts.append(f"{landed} FROM ({_build_landed_query(warehouse, spec)})")
    sums = ", ".join(
        f"sum({name}) FILTER (WHERE side = '{letter}') AS {letter}_{name}"
        for letter in (*SIDES, "m")
        for name in values
    )
    # The query groups instead of joining, because grouping can use files if the rows do not fit into memory.
    together = " UNION ALL BY NAME ".join(parts)
    both = f"SELECT key, micros, {sums} FROM ({together}) GROUP BY key, micros HAVING a_rows = b_rows"
    names = [f"{letter}_{name}" for letter in SIDES for name in SUMS if name not in ("nis", "degrees")]
    scored = "a_scored = a_rows AND b_scored = b_rows"
    columns = [
        "key",
        "micros",
        *names,
        *(one for letter in SIDES for one in _build_degree_columns(letter, is_single, rows.has_landed)),
        f"CASE WHEN {scored} THEN a_rows ELSE 0 END AS scored",
        f"CASE WHEN {scored} THEN b_ll - a_ll ELSE 0.0 END AS gained",
    ]
    rows.queries.keep(PAIRED, f"SELECT {', '.join(columns)} FROM ({both})")


_READ = ("key", "event_time", "log_likelihood", "nis", "flags", "innovation")


def _build_value_columns(innovations: int) -> dict[str, str]:
    """Return SQL for the values that are summed on each side; innovations: largest number of components of a row."""
    places = [f"innovation[{place + 1}]" for place in range(innovations)]
    known = "CASE WHEN isnan({0}) OR {0} IS NULL THEN {1} ELSE {2} END"
    total, count = (
        " + ".join(["0", *(known.format(one, 0, what or one) for one in places)]) for what in ("", "1")
    )
    return {
        "rows": "1",
        "ll": "nanvl(log_likelihood, 0.0)",  # a flagged row has no log-likelihood
        "scored": known.format("log_likelihood", 0, 1),
        "nis": "CASE WHEN flags IS NULL THEN nis END",
        "judged": "CASE WHEN flags IS NULL AND nis IS NOT NULL THEN 1 ELSE 0 END",
        "flagged": "CASE WHEN flags IS NULL THEN 0 ELSE 1 END",
        "innovation": f"CASE WHEN innovation IS NOT NULL THEN CAST({total} AS DOUBLE) END",
        "components": f"CASE WHEN innovation IS NOT NULL THEN {count} END",
    }


def _build_degree_columns(letter: str, is_single: bool, has_landed: bool) -> list[str]:
    """Return SQL for the NIS of one side, and for its degrees of freedom, which are the measured components."""
    nis, degrees = f"{letter}_nis", f"{letter}_degrees"
    if is_single:
        return [nis, f"{letter}_judged AS {degrees}"]
    if not has_landed:
        return [nis, f"0 AS {degrees}"]
    # If only some rows of an event time have a NIS, their measurements cannot be found, so none of the rows counts.
    whole = f"{letter}_judged = m_rows"
    return [
        f"CASE WHEN {whole} THEN {nis} END AS {nis}",
        f"CASE WHEN {whole} THEN m_components ELSE 0 END AS {degrees}",
    ]


def _build_landed_query(warehouse: Tables, spec: ModelSpec) -> str:
    """Return the query of the measurements by key and time, with the number of measured components (`seen`)."""
    seen = " + ".join(
        f"CASE WHEN {quote_name(name)} IS NOT NULL THEN 1 ELSE 0 END" for name in spec.measurement
    )
    is_copy = f"coalesce(starts_with(_origin, {quote_text(LATE_COPY)}), false)"
    originals = f"NOT {is_copy}" if warehouse.exists(LATE_COPIES_TABLE) else "true"
    return (
        f"SELECT * FROM (SELECT {build_key_text_sql(spec.key)} AS key, {build_micros_sql(spec.time)} AS "
        f"micros, {seen} AS seen "
        f"FROM {LANDED} WHERE {originals}) WHERE seen > 0"
    )


def build_micros_sql(column: str) -> str:
    """Return SQL for a time in microseconds."""
    return f"arrow_cast(arrow_cast({quote_name(column)}, 'Timestamp(Microsecond, Some(\"UTC\"))'), 'Int64')"


def build_key_text_sql(columns: Sequence[str]) -> str:
    """Return SQL for the text of a key (`jobs.state.encoding.keys.build_key_text`) from its columns."""
    texts = [f"CAST({quote_name(name)} AS VARCHAR)" for name in columns]
    if len(texts) == 1:
        return texts[0]
    values = [f"coalesce('\"' || {_build_escape_sql(text)} || '\"', 'null')" for text in texts]
    return " || ".join(["'['", " || ',' || ".join(values) or "''", "']'"])


def _build_escape_sql(text: str) -> str:
    """Return SQL for a text that is escaped as the inside of a JSON string."""
    for character in ["\\", '"', *map(chr, range(1, 32))]:
        escape = json.dumps(character)[1:-1]
        text = f"replace({text}, {quote_text(character)}, {quote_text(escape[:2] + escape[2:].upper())})"
    return text


def count_unequal_rows(rows: CommonRows) -> int:
    """Return the number of rows that differ in any bit between two generations of one model.

    Only rows of the old generation are compared whose key and event time also have estimates of the new generation.
    """
    same = ["key", "event_time", "mean", "covariance", "log_likelihood", "nis", "flags"]
    sides = " UNION ALL ".join(
        f"SELECT *, {weight} AS weight FROM ({rows.of(letter, same)})"
        for letter, weight in (("a", 1), ("b", -1))
    )
    alike = (
        f"SELECT key, event_time, sum(weight) AS missing, min(weight) < 0 AS has_new FROM ({sides}) "
        f"GROUP BY {', '.join(same)}"
    )
    places = (
        f"SELECT sum(greatest(missing, 0)) AS missing, bool_or(has_new) AS has_new FROM ({alike}) "
        f"GROUP BY key, event_time"
    )
    found = rows.queries.run(f"SELECT coalesce(sum(missing), 0) AS n FROM ({places}) WHERE has_new")
    return found["n"][0].as_py()
