"""Compare models of the same measurements.

Read a sample of the rows in files or in the warehouse, fit each model to the first rows of every key, and score the
model on the key's other rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import kalman
from jobs.choosing.ranking import Ranking, rank
from jobs.choosing.samples import FEWEST, SplitRows, fit, mark_held_out, sample_rows, score_held_out
from jobs.core.errors import UserError
from jobs.landing.checking import ParsedRows, parse
from jobs.landing.raw_rows import RawRows
from jobs.offline.filtering import order_accepted_rows
from jobs.specs.model_spec import ModelSpec
from jobs.storage.queries import open_queries, quote_name, quote_text
from jobs.storage.tables import measurements


class ModelComparison(NamedTuple):
    """The ranking of models (the first given model is the reference).

    keys: the number of keys in the rows.
    rejected: the number of rejected rows.
    """

    ranking: Ranking
    keys: int
    rejected: int


def check_comparable(specs: Sequence[ModelSpec]) -> None:
    """Check that models use the same rows and predict the same numbers.

    Raises:
        UserError: the models use different rows or predict different numbers.
    """
    first = specs[0]
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--model {name} is given twice")
    for spec in specs[1:]:
        for field in ("measurement", "key", "time"):
            if getattr(spec, field) != getattr(first, field):
                raise UserError(
                    f"{spec.name} and {first.name} differ in `{field}`: {getattr(spec, field)} and "
                    f"{getattr(first, field)}; likelihoods of different rows cannot be compared"
                )
    for spec in specs:
        if spec.inputs is not None:
            raise UserError(
                f"{spec.name} has inputs from a table, which compare does not read; land them as control columns"
            )


def list_columns(specs: Sequence[ModelSpec]) -> list[str]:
    """Return all columns that the models read."""
    return list(dict.fromkeys(name for spec in specs for name in spec.columns))


def compare(
    specs: Sequence[ModelSpec], source: RawRows, what: str, most_keys: int, most_rows: int
) -> ModelComparison:
    """Rank models by the log-likelihood of held-out rows.

    Args:
        specs: the specs of the models; a row that one model rejects is left out for all models.
        source: the rows.
        what: name of the rows' source in error messages.
        most_keys: number of keys to sample.
        most_rows: number of last rows to use of each key.

    Raises:
        UserError: there are too few rows, or a model cannot be fitted.
    """
    parsed = [parse(spec, source, what) for spec in specs]
    common = parsed[0]
    for other in parsed[1:]:
        common = common._replace(reason=np.where(common.accepted, other.reason, common.reason))
    order, rows = order_accepted_rows(common, specs[0].duplicates)
    found = sample_rows(rows, parsed[0].keys, most_keys, most_rows)
    if found is None:
        raise UserError(f"{what}: no key has {FEWEST} rows with each measurement")
    places, count = order[found.places], len(found.keys)
    seen = np.asarray(np.isfinite(rows.y[:, found.places]).any(axis=0))
    held = mark_held_out(found.number, count, seen)
    scores = []
    for spec, one in zip(specs, parsed, strict=True):
        taken = _sort_rows(one, found.number, places)
        sample = SplitRows(taken, count, held, spec.unit_us)
        try:
            definition = spec.definition()
            scores.append(score_held_out(definition, fit(definition, sample), sample))
        except kalman.ModelError as error:
            raise UserError(f"{spec.name}: {error}") from error
    names = [spec.name for spec in specs]
    try:
        ranking = rank(names, found.number[held], scores)
    except ValueError as error:
        raise UserError(f"{', '.join(names)}: {error}") from error
    return ModelComparison(ranking, parsed[0].keys, int((~common.accepted).sum()))


def _sort_rows(rows: ParsedRows, key: np.ndarray, places: np.ndarray) -> kalman.SortedRows:
    return kalman.SortedRows(key, rows.time[places], rows.y[:, places], rows.u[:, places])


def read_landed_rows(root: str, spec: ModelSpec, columns: Sequence[str], keys: int, rows: int) -> RawRows:
    """Return the last landed rows of the keys with the lowest hashes.

    Args:
        root: root of the warehouse with the model's measurements.
        spec: spec of the table's model.
        columns: columns to read.
        keys: number of keys.
        rows: number of rows of each key.

    Raises:
        UserError: nothing has landed, or a column is missing.
    """
    key = ", ".join(map(quote_name, spec.key))
    partition = f"PARTITION BY {key}" if key else ""
    place = f"row_number() OVER ({partition} ORDER BY {quote_name(spec.time)} DESC) AS _place"
    with open_queries(root) as queries:
        schema = queries.add("landed", measurements(spec.name))
        absent = [] if schema is None else [name for name in columns if name not in schema.names]
        if absent:
            raise UserError(
                f"the measurements of {spec.name} have no column '{absent[0]}'; give the files with "
                "--input, or name the columns that have landed"
            )
        where = "true"
        if key:
            known = queries.run(f"SELECT DISTINCT {key} FROM landed").to_pylist()
            sample = sorted(known, key=lambda row: hashlib.sha256(repr(row).encode()).digest())[:keys]
            where = " OR ".join(map(_is_key, sample)) or "false"
        found = queries.run(
            f"SELECT {', '.join(map(quote_name, columns))} FROM (SELECT *, {place} FROM landed WHERE {where}) "
            f"WHERE _place <= {rows}"
        )
    if not found.num_rows:
        raise UserError(f"nothing has landed for {spec.name}; ingest files first, or give --input")
    arrays = {name: found[name].combine_chunks() for name in columns}
    return RawRows(arrays, found.num_rows)


def _is_key(row: dict[str, Any]) -> str:
    """Return the SQL condition for the rows of a key."""
    values = {
        name: quote_text(value) if isinstance(value, str) else str(value) for name, value in row.items()
    }
    return f"({' AND '.join(f'{quote_name(name)} = {value}' for name, value in values.items())})"
