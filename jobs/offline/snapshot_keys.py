"""Read the states of a snapshot's keys, and forecast from them. No Spark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import kalman
from jobs.core.errors import UserError
from jobs.encoding import arrow
from jobs.landing.raw_rows import Source
from jobs.offline.ahead import Keys, ahead
from jobs.offline.forecasting import Forecasts
from jobs.offline.future import Future, Horizon
from jobs.offline.key_inputs import checked_inputs, inputs_of, read_inputs
from jobs.snapshots.learned import NONE, STATE, Learned, learned_parameters, snapshot_rows
from jobs.specs.model_spec import ModelSpec
from jobs.storage.table_rows import column_types, read_table
from kalman.types import Filter

_INTEGERS = ("byte", "short", "integer", "long")


class SnapshotKeys(NamedTuple):
    """Keys of a snapshot: the filter, the values of each key column, and the keys as they are forecast.

    newest: microseconds of the newest row of any key
    generation: of a live stream, whose latest states these are; snapshot is then the one that it began from
    """

    kernel: Filter
    columns: dict[str, pa.Array]
    keys: Keys
    snapshot: str
    committed_at: datetime | None
    position: dict[str, Any] | None
    newest: int
    generation: str | None = None


def snapshot_keys(
    root: str, spec: ModelSpec, snapshot: str | None, wanted: Sequence[str], inputs: str | None
) -> SnapshotKeys:
    """Return keys of a snapshot with their states.

    Args:
        root: of the warehouse.
        spec: of the model, as it was when the snapshot was made.
        snapshot: its id; None: the newest good one of the spec.
        wanted: keys as text; empty: all.
        inputs: a file of the keys' inputs; None: their table.

    Raises:
        UserError: there is no such snapshot or key, or it cannot be read without Spark.
    """
    learned = learned_parameters(root, spec, snapshot)
    if learned.snapshot is None or snapshot == NONE:
        raise UserError(
            f"there is no state to forecast from: {learned.reason}; give the rows of a file with --input"
        )
    kernel = kalman.build(spec.definition(), learned.parameters)
    rows = _rows(root, spec, learned, wanted)
    texts = rows["key"].combine_chunks()
    if not len(texts):
        raise UserError(f"snapshot {learned.snapshot} has no key: there is nothing to forecast from")
    order = np.argsort(np.array(texts.to_pylist(), dtype=object), kind="stable")
    rows, texts = rows.take(arrow.integers(order)), texts.take(arrow.integers(order))
    names = key_columns(spec, texts)
    n = len(spec.states)
    extras = {name: part for name, part in kernel.snapshot(kernel.initial(1))[2].items()}
    lookup: Any = pc.map_lookup  # type: ignore[attr-defined]
    parts = {
        name: arrow.matrix(
            lookup(rows["extras"], pa.scalar(name), "first").combine_chunks(), part.shape[0], name
        )
        for name, part in extras.items()
    }
    mean, covariance = (
        arrow.matrix(rows[name].combine_chunks(), width, name)
        for name, width in (("mean", n), ("covariance", n * n))
    )
    time = arrow.to_numpy(rows["event_time"].combine_chunks().cast(pa.timestamp("us")).cast(pa.int64()))
    count = arrow.to_numpy(rows["state_index"].combine_chunks())
    states = kalman.KeyStates(kernel.restore(mean, covariance, parts), time, count, np.zeros(len(time)))
    keys = Keys(names, states, key_inputs(root, spec, names, inputs))
    typed = typed_columns(root, spec, names)
    newest = int(time.max())
    return SnapshotKeys(kernel, typed, keys, learned.snapshot, learned.committed_at, learned.position, newest)


def forecast_snapshot(
    spec: ModelSpec, found: SnapshotKeys, horizon: Horizon, future: Future | None
) -> Forecasts:
    """Forecast the keys of a snapshot.

    Raises:
        UserError: the horizon is out of range, a future input is missing, or the model cannot be forecast.
    """
    done = ahead(spec, found.kernel, found.keys, horizon, future)
    columns = {name: values.take(arrow.integers(done.kept)) for name, values in found.columns.items()}
    omitted = len(found.keys.states.count) - len(done.kept)
    return Forecasts(columns, done.time, done.wanted, done.expected, done.length, omitted)


def _rows(root: str, spec: ModelSpec, learned: Learned, wanted: Sequence[str]) -> pa.Table:
    rows = snapshot_rows(root, spec, learned, tuple(STATE), wanted)
    there = set(rows["key"].to_pylist())
    absent = [key for key in wanted if key not in there]
    if absent:
        several = '; a key of several columns is a JSON array: ["a", "b"]' if len(spec.key) > 1 else ""
        raise UserError(f"--key {absent[0]}: snapshot {learned.snapshot} has no state of it{several}")
    return rows


def key_columns(spec: ModelSpec, texts: pa.Array) -> list[pa.Array]:
    """Return the texts of each key column."""
    if len(spec.key) == 1:
        return [texts]
    values = [json.loads(text) for text in texts.to_pylist()]
    return [arrow.texts([one[i] for one in values]) for i in range(len(spec.key))]


def typed_columns(root: str, spec: ModelSpec, names: Sequence[pa.Array]) -> dict[str, pa.Array]:
    """Return the key columns in the types of the measurements table: integers, else texts."""
    types = column_types(root, f"measurements/{spec.name}")
    return {
        name: texts.cast(pa.int64()) if types.get(name) in _INTEGERS else texts
        for name, texts in zip(spec.key, names, strict=True)
    }


def key_inputs(root: str, spec: ModelSpec, names: Sequence[pa.Array], file: str | None) -> np.ndarray:
    """Return the inputs (i, K) of keys, from a file or the table of inputs; NaN where a key has none."""
    if spec.inputs is None:
        if file is not None:
            raise UserError(f"--inputs: {spec.name} takes none: omit the option")
        return np.empty((0, len(names[0]) if names else 1))  # without key columns there is one key
    table = read_inputs(spec, file) if file is not None else _table(root, spec)
    u, known = inputs_of(spec, table, names)
    return np.where(known, u, np.nan)


def _table(root: str, spec: ModelSpec) -> Any:
    assert spec.inputs is not None
    by, columns = spec.inputs.key or spec.key, list(spec.inputs.columns.values())
    name = spec.inputs_table
    home, table = (root, name) if not name.startswith("/") else tuple(name.rstrip("/").rsplit("/", 1))
    rows = read_table(home, table, [*by, *columns])
    if rows is None:
        raise UserError(f"{spec.name} has inputs, and there is no table {name}: give a file with --inputs")
    found = {one: rows[one].combine_chunks() for one in rows.column_names}
    return checked_inputs(spec, Source(found, rows.num_rows), name)
