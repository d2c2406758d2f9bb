"""The learned parameters of a snapshot and their quality: one row per key, one per group, or one for all keys.

The rows are written before the manifest, which has their digest, so an existing snapshot has all its rows. If there are
rows of keys, there is also a row with scope `population` for the population that regularises the fits of the keys, or
one such row per group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from jobs.snapshots.manifests import record
from jobs.snapshots.verified_rows import RowsDigest, find_verified_version, get_partition, write_rows
from jobs.spark.warehouse import Warehouse
from jobs.storage.columns import parse_arrow_schema
from jobs.storage.table_rows import read_table
from jobs.storage.tables import LEARNED
from kalman.learning.key_fits import FitOutcome, KeyFit, Population

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest

TABLE = "learned"
_DDL = LEARNED.partition("model string,")[2]
_SCHEMA = parse_arrow_schema(_DDL)
COLUMNS = tuple(_SCHEMA.names)
"""The columns of the table except the snapshot and the model."""
SCOPES = KEY, GROUP, POOLED, POPULATION = "key", "group", "pooled", "population"
"""Values of the column `scope`, which describes the subject of a row."""
FIT_ROWS = (
    "struct<key_group: string, outcome: string, reason: string, rows: bigint, log_likelihood: double, "
    "parameters: map<string, double>, standard_errors: map<string, double>, own: double, nis: double, "
    "ljung_box: double>"
)
"""The columns that a key's fit fills in the key's row; workers return these columns as one struct column."""
FIT = parse_arrow_schema(f"fit {FIT_ROWS}").field("fit").type
"""The Arrow type of the struct column `FIT_ROWS`."""


class Entry(NamedTuple):
    """A row made by the driver for all keys, a group, or a population; None and NaN mark unknown values."""

    scope: str
    group: str | None
    parameters: Mapping[str, Any]
    errors: Mapping[str, Any] | None = None
    outcome: FitOutcome | None = None
    reason: str | None = None
    rows: int | None = None
    log_likelihood: float | None = None
    own: float | None = None
    nis: float | None = None
    ljung_box: float | None = None
    population: Population | None = None


def flatten_parameters(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in parameters, with names such as R[1][0]; a 1 x 1 matrix has its plain name."""
    result: dict[str, float] = {}
    for name, value in values.items():
        found = list(_iterate_entries(name, value))
        result |= {name: found[0][1]} if len(found) == 1 else dict(found)
    return result


def _iterate_entries(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, list | tuple | np.ndarray):
        for i, item in enumerate(value):
            yield from _iterate_entries(f"{name}[{i}]", item)
    else:
        yield name, float(value)


def fit_array(fit: KeyFit, places: Mapping[str, Any], group: Iterable[str | None]) -> pa.StructArray:
    """Return the fits of K keys as Arrow structs (`FIT`); places: `Learner.places`; group: group name of each key."""
    names = {name: int(place) for name, place in flatten_parameters(places).items()}
    places_of = list(names.values())
    outcomes = [FitOutcome(code).name.lower() for code in fit.outcome.tolist()]
    columns = [
        pa.array(list(group), pa.string()),
        pa.array(outcomes, pa.string()),
        pa.array(fit.reason, pa.string()),
        pa.array(fit.used.astype(np.int64)),
        _build_numbers(fit.log_likelihood),
        _build_maps(list(names), fit.parameters[places_of]),
        _build_maps(list(names), fit.errors[places_of]),
        *(_build_numbers(a) for a in (fit.own, fit.nis, fit.ljung_box)),
    ]
    return pa.StructArray.from_arrays(columns, fields=list(FIT))


def _build_numbers(values: Any) -> pa.Array:
    """Return numbers as an Arrow array; a number that is not finite becomes null."""
    given = np.ascontiguousarray(values, np.float64)
    return pa.array(given, mask=~np.isfinite(given))


def _build_maps(names: list[str], values: np.ndarray) -> pa.MapArray:
    """Return a map from names to values for each key; values: (d, K)."""
    d, keys = values.shape
    offsets = pa.array(np.arange(keys + 1, dtype=np.int32) * np.int32(d))
    return pa.MapArray.from_arrays(
        offsets, pa.array(names * keys, pa.string()), _build_numbers(values.T.ravel())
    )


def build_key_rows(rows: DataFrame) -> DataFrame:
    """Return rows of the table for keys; rows: the columns `key` and `fit` (`FIT_ROWS`) of each key."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            some = batch.filter(batch.column("fit").is_valid())
            columns = dict(zip(FIT.names, some.column("fit").flatten(), strict=True))
            count, value = (
                columns[name].to_numpy(zero_copy_only=False) for name in ("rows", "log_likelihood")
            )
            columns["log_likelihood_a_row"] = _build_numbers(
                np.divide(value, count, where=count > 0, out=np.full(len(count), np.nan))
            )
            columns["key"] = some.column("key").cast(pa.string())
            columns["scope"] = pa.repeat(KEY, some.num_rows)
            arrays = [
                columns.get(one.name, pa.nulls(some.num_rows, one.type)).cast(one.type) for one in _SCHEMA
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)

    return rows.select("key", "fit").mapInArrow(work, _DDL)


def build_driver_rows(warehouse: Warehouse, entries: Iterable[Entry]) -> DataFrame:
    """Return the driver's entries as rows of the table."""
    rows = []
    for one in entries:
        of, value, count = one.population, _select_finite(one.log_likelihood), one.rows
        row: dict[str, Any] = {
            "scope": one.scope,
            "key_group": one.group,
            "outcome": None if one.outcome is None else one.outcome.name.lower(),
            "reason": one.reason,
            "rows": count,
            "log_likelihood": value,
            "log_likelihood_a_row": value / count if value is not None and count else None,
            "parameters": flatten_parameters(one.parameters),
            "standard_errors": None
            if one.errors is None
            else {name: _select_finite(a) for name, a in flatten_parameters(one.errors).items()},
            **{name: _select_finite(getattr(one, name)) for name in ("own", "nis", "ljung_box")},
            "keys": None if of is None else of.keys,
            "free_numbers": None if of is None else of.mean.tolist(),
            "covariance": None if of is None else of.covariance.ravel().tolist(),
            "zero": None if of is None or of.zero is None else of.zero.tolist(),
        }
        rows.append(tuple(row.get(name) for name in COLUMNS))
    return warehouse.spread(rows, _DDL).coalesce(1)


def _select_finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def write(warehouse: Warehouse, manifest: Manifest, rows: DataFrame) -> dict[str, Any]:
    """Write a snapshot's rows, and replace rows of a killed attempt; return the digest of the rows for the manifest."""
    return write_rows(warehouse, TABLE, LEARNED, manifest, rows, COLUMNS)


def find_whole_version(warehouse: Warehouse, manifest: Manifest) -> int | None:
    """Return a version of the table in which a snapshot's rows are whole; None if it has no rows.

    Raises:
        UserError: rows are missing, doubled or changed.
    """
    if manifest.learned is None:
        return None
    digest = RowsDigest(**manifest.learned)
    return find_verified_version(warehouse, TABLE, manifest, digest, COLUMNS, "rows of what was learned")


def read_learned_rows(
    warehouse: Warehouse, manifest: Manifest, columns: Sequence[str], scopes: Sequence[str] = SCOPES
) -> pa.Table | None:
    """Return `scope` and other columns of a snapshot's rows, verified; None if nothing was learned or this is unknown.

    Raises:
        UserError: rows are missing, doubled or changed.
    """
    version = find_whole_version(warehouse, manifest)
    if version is None:
        return None
    wanted = list(dict.fromkeys(["scope", *columns]))
    return read_table(warehouse.root, TABLE, wanted, get_partition(manifest), version, ("scope", scopes))


def read_populations(warehouse: Warehouse, manifest: Manifest) -> dict[str | None, Population]:
    """Return the populations of a snapshot's fits by group name; the name None stands for all keys.

    A snapshot that was made from another snapshot has the populations of the other snapshot. The result is empty if the
    populations are unknown.
    """
    found: Manifest | None = manifest
    while found is not None and found.learned is None:
        found = None if found.parent is None else record(warehouse, found.parent)
    rows = None if found is None else read_learned_rows(warehouse, found, COLUMNS, [POPULATION])
    if rows is None:
        return {}
    result: dict[str | None, Population] = {}
    for row in rows.to_pylist():
        mean = np.array(row["free_numbers"], float)
        covariance = np.array(row["covariance"], float).reshape(len(mean), len(mean))
        zero = None if row["zero"] is None else np.array(row["zero"], float)
        result[row["key_group"]] = Population(mean, covariance, int(row["keys"]), zero)
    return result
