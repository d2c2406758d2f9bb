"""Read the states of the keys of a snapshot or a live stream for forecasts. No Spark.

Only Spark can read a stream's checkpoint. With `sinks: {latest: true}` a table has the newest estimate of each key.
This table suffices if mean and covariance, or the filter's state in the same row, are the whole state.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import kalman
from jobs.core.errors import UserError
from jobs.landing.raw_rows import RawRows
from jobs.lineage.generations import find_live
from jobs.offline.ahead import ForecastKeys
from jobs.offline.key_inputs import find_key_inputs, parse_file_inputs, read_inputs, refuse_inputs
from jobs.offline.prior import read_learned_begin
from jobs.snapshots.learned import NONE, STATE, LearnedParameters, find_learned_parameters, read_snapshot_rows
from jobs.specs.model_spec import ModelSpec
from jobs.specs.sections import PRETRAINED
from jobs.state.encoding import arrow
from jobs.state.encoding.table_columns import split_keys
from jobs.storage.foreign_files import refuse_foreign_table
from jobs.storage.table_rows import find_write_time, read_column_types, read_table
from jobs.storage.tables import latest, measurements
from jobs.storage.warehouse import Tables, find_home
from kalman.evaluation.forecast import extract_variances
from kalman.filters.own_parameters import FIELD, copy_key_parameters, find_key_parameters
from kalman.filters.state_layout import locate_fields, unwrap_filter
from kalman.filters.state_output import OUTPUT, follows_from_moments
from kalman.types import Filter

Floats = NDArray[np.float64]

_INTEGERS = ("byte", "short", "integer", "long")
_COLUMNS = ("key", "event_time", "mean", "covariance", "flags", OUTPUT)
_INSTEAD = (
    "forecast into a table, which reads the state itself on Spark (leave out --output, or name a table)"
)


class StoredKeys(NamedTuple):
    """Keys with a stored state: the filter, the values of each key column, and the keys to forecast.

    snapshot: the snapshot with the states, or the snapshot from which their stream began.
    generation: the live generation with these latest states; None means that the states are from the snapshot.
    why: why the states of a live stream are those of its snapshot; None for other states.
    """

    kernel: Filter
    columns: dict[str, pa.Array]
    keys: ForecastKeys
    snapshot: str
    committed_at: datetime | None
    position: dict[str, Any] | None
    generation: str | None = None
    why: str | None = None

    @property
    def newest(self) -> int:
        """Return the time of the newest row of all keys, in microseconds."""
        return int(self.keys.states.event_time.max())


def read_snapshot_keys(
    root: str, spec: ModelSpec, snapshot: str | None, wanted: Sequence[str], inputs: str | None
) -> StoredKeys:
    """Return keys of a snapshot with their states.

    Args:
        root: the root of the warehouse.
        spec: the spec with which the snapshot was made.
        snapshot: the id of the snapshot; None means the newest good snapshot of the spec.
        wanted: keys as text; an empty list means all keys.
        inputs: a file of the keys' inputs; None means the table of inputs.

    Raises:
        UserError: the snapshot or a key does not exist, or the snapshot cannot be read without Spark.
    """
    learned = find_learned_parameters(root, spec, snapshot)
    manifest = learned.manifest
    if manifest is None or snapshot == NONE:
        raise UserError(
            f"there is no state to forecast from: {learned.reason}; give the rows of a file with --input"
        )
    kernel = kalman.build(spec.definition(), learned.parameters)
    rows = _sort_by_key(
        read_snapshot_rows(root, spec, learned, tuple(STATE), wanted),
        *(spec, wanted, f"snapshot {manifest.snapshot_id}"),
    )
    if not rows.num_rows:
        raise UserError(f"snapshot {manifest.snapshot_id} has no key: there is nothing to forecast from")
    parts = {
        name: arrow.build_matrix(
            arrow.look_up_entries(rows["extras"], name).combine_chunks(), part.shape[0], name
        )
        for name, part in kernel.snapshot(kernel.initial(1))[2].items()
    }
    values = kernel.restore(*_convert_moments(spec, rows), parts)
    count = arrow.to_numpy(rows["state_index"].combine_chunks())
    columns, keys = _add_inputs(root, spec, rows, values, count, inputs)
    return StoredKeys(kernel, columns, keys, manifest.snapshot_id, manifest.committed_at, manifest.position)


def read_live_keys(
    root: str, spec: ModelSpec, wanted: Sequence[str], inputs: str | None
) -> StoredKeys | str | None:
    """Return keys of the live stream with their states: those of its snapshot until its first row comes.

    A text is the reason why the states cannot be read; None means that no generation is live.

    Args:
        root: the root of the warehouse.
        spec: the spec of the model.
        wanted: keys as text; an empty list means all keys.
        inputs: a file of the keys' inputs; None means the table of inputs.

    Raises:
        UserError: a wanted key has no state, or its latest estimate does not determine the state.
    """
    try:
        generation = find_live(Tables(root), spec.name)
        if generation is None:
            return None
        table, name = latest(spec.name), generation.generation
        if not read_column_types(root, table):
            return "it keeps no table of latest states; write sinks: {latest: true}"
        learned = find_learned_parameters(root, spec, generation.snapshot_id)
    except UserError as error:
        return error.message
    kernel = unwrap_filter(kalman.build(spec.definition(), learned.parameters))
    why = _find_missing_part(spec, kernel, OUTPUT in read_column_types(root, table))
    if why is not None:
        return why
    among = ("key", list(wanted)) if wanted else None
    rows = read_table(root, table, _COLUMNS, {"generation": name}, None, among)
    if (rows is None or not rows.num_rows) and not read_table(root, table, ("key",), {"generation": name}):
        found = read_snapshot_keys(root, spec, generation.snapshot_id, wanted, inputs)
        return found._replace(why=f"no row has come since {name} began from this snapshot")
    if rows is None:
        rows = pa.table({"key": pa.nulls(0, pa.string())})
    rows = _sort_by_key(rows, spec, wanted, name)
    _refuse_unsure(rows)
    short = np.flatnonzero(~_find_whole(spec, kernel, rows))
    if len(short):
        key = rows["key"][int(short[0])].as_py()
        return f"{name} has variances alone of key {key}; land a row of each key, or name a snapshot with --snapshot"
    values = _compute_live_values(root, spec, learned, kernel, rows)
    count = np.ones(rows.num_rows, np.int64)
    columns, keys = _add_inputs(root, spec, rows, values, count, inputs)
    return StoredKeys(kernel, columns, keys, generation.snapshot_id, find_write_time(root, table), None, name)


def _find_missing_part(spec: ModelSpec, kernel: Filter, with_state: bool) -> str | None:
    """Return why a model's latest estimates lack a part of the state; None if they lack no part."""
    if not follows_from_moments(kernel):
        lacks = "its estimates lack the filter's state, which they have with the section `forecast`"
        return None if with_state else lacks
    if spec.outputs.covariance != "full" and len(spec.states) > 1:
        return "its estimates have variances alone; write outputs: {covariance: full}"
    if spec.stream.new_keys == PRETRAINED and find_key_parameters(kernel).rows:
        return "parameters of new keys are in its checkpoint alone"
    return None


def _find_whole(spec: ModelSpec, kernel: Filter, rows: pa.Table) -> NDArray[np.bool_]:
    """Return for each of N rows whether it has all covariances, or whether the filter needs none."""
    full = arrow.measure_lists(rows["covariance"].combine_chunks()) == len(spec.states) ** 2
    return full | (not follows_from_moments(kernel))


def _sort_by_key(rows: pa.Table, spec: ModelSpec, wanted: Sequence[str], where: str) -> pa.Table:
    """Return the rows ordered by key; raise an error if a wanted key is missing."""
    there = rows["key"].to_pylist()
    refuse_absent_keys(spec, wanted, set(there), where)
    return rows.take(arrow.build_integers(np.argsort(np.array(there, dtype=object), kind="stable")))


def refuse_absent_keys(spec: ModelSpec, wanted: Sequence[str], there: AbstractSet[str], where: str) -> None:
    """Refuse keys that a user has named and that have no state; where: the states in words.

    Raises:
        UserError: such a key exists.
    """
    absent = [key for key in wanted if key not in there]
    if absent:
        more = f", nor of {len(absent) - 1:,} more" if len(absent) > 1 else ""
        several = '; a key of several columns is a JSON array: ["a", "b"]' if len(spec.key) > 1 else ""
        raise UserError(f"--key {absent[0]}: {where} has no state of it{more}{several}")


def _refuse_unsure(rows: pa.Table) -> None:
    """Raise an error if a latest estimate does not determine the state of its key."""
    flagged = [one for one in rows.select(["key", "flags"]).to_pylist() if one["flags"] is not None]
    if flagged:
        raise UserError(
            f"key {flagged[0]['key']}: its newest row was flagged ({flagged[0]['flags']}), so that the latest estimate "
            f"does not tell the time of its state: {_INSTEAD}"
        )


def _compute_live_values(
    root: str, spec: ModelSpec, learned: LearnedParameters, kernel: Filter, rows: pa.Table
) -> Floats:
    """Compute the states (size, K) from the latest estimates."""
    if not follows_from_moments(kernel):
        column = rows[OUTPUT].combine_chunks()
        if column.null_count:
            at = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise UserError(
                f"key {rows['key'][at].as_py()}: its latest estimate has no state of the filter, as it has had no row "
                f"since: {_INSTEAD}"
            )
        return arrow.build_matrix(column, kernel.size, OUTPUT)
    mean, covariance = _convert_moments(spec, rows)
    if not np.isfinite(covariance).all():
        raise UserError(
            f"a key's state is still diffuse, which its latest estimate does not tell: {_INSTEAD}"
        )
    values = kernel.from_moments(mean, covariance)
    if not find_key_parameters(kernel).rows or not learned.parameters:
        return values
    begin, _ = read_learned_begin(root, spec, learned, kernel, _split_key_columns(spec, rows), rows.num_rows)
    return copy_key_parameters(kernel, values, begin[locate_fields(kernel.fields)[FIELD]])


def predict_measurements(
    root: str, spec: ModelSpec, snapshot: str | None, rows: pa.Table, quantity: str
) -> Floats:
    """Return mean and variance (2, N) of a key's measurement in each row, predicted from the row before it.

    They are NaN where no row came before, where the stored estimates do not suffice for a prediction, or where the spec
    does not have the measurement.

    Args:
        root: the root of the warehouse.
        spec: the spec of the estimates.
        snapshot: the snapshot with the learned parameters; None means the values of the spec.
        rows: estimates of one key by one generation, in the order of time, which the column `time` has in microseconds.
        quantity: the name of the measurement.
    """
    found = np.full((2, rows.num_rows), np.nan)
    covariance = rows["covariance"].combine_chunks()
    usable = np.array([None not in one and np.isfinite(one).all() for one in covariance.to_pylist()])
    applied = arrow.to_numpy(rows["flags"].combine_chunks().is_null())
    before = np.maximum.accumulate(np.where(applied, np.arange(rows.num_rows), -1))[:-1]
    try:
        learned = find_learned_parameters(root, spec, snapshot or NONE)
        kernel = unwrap_filter(kalman.build(spec.definition(), learned.parameters))
        lacks = _find_missing_part(spec, kernel, OUTPUT in rows.column_names)
        usable &= _find_whole(spec, kernel, rows)
        known = np.flatnonzero((before >= 0) & usable[before])
        if kernel.controls or lacks is not None or not len(known) or quantity not in spec.measurement:
            return found
        origins = rows.take(arrow.build_integers(before[known]))
        values = _compute_live_values(root, spec, learned, kernel, origins)
        at, count = arrow.to_numpy(origins["time"].combine_chunks()), np.ones(len(known), np.int64)
        states = kalman.KeyStates(values, at, count, np.zeros(len(known)))
        dt = (arrow.to_numpy(rows["time"].combine_chunks())[known + 1] - at) / spec.unit_us
        ahead = kalman.forecast(kernel, states, dt[None])
    except (UserError, kalman.ModelError):
        return found
    place, variance = spec.measurement.index(quantity), extract_variances(ahead.measurement_covariance)
    found[:, known + 1] = ahead.measurement_mean[place, 0], variance[place, 0]
    return found


def _convert_moments(spec: ModelSpec, rows: pa.Table) -> tuple[Floats, Floats]:
    """Return means (n, K) and covariances (n * n, K)."""
    n = len(spec.states)
    mean, covariance = (rows[name].combine_chunks() for name in ("mean", "covariance"))
    return arrow.build_matrix(mean, n, "mean"), arrow.build_matrix(covariance, n * n, "covariance")


def _add_inputs(
    root: str, spec: ModelSpec, rows: pa.Table, values: Floats, count: NDArray[np.int64], inputs: str | None
) -> tuple[dict[str, pa.Array], ForecastKeys]:
    """Return the key columns with the types of the measurements table, and the keys with their inputs."""
    time = arrow.convert_to_micros(rows["event_time"])
    states = kalman.KeyStates(values, time, count, np.zeros(len(time)))
    names = _split_key_columns(spec, rows)
    keys = ForecastKeys(names, states, _read_inputs(root, spec, names, len(time), inputs))
    # The key columns have the types of the measurements table: integers, or else texts.
    types = read_column_types(root, measurements(spec.name))
    columns = {
        name: texts.cast(pa.int64()) if types.get(name) in _INTEGERS else texts
        for name, texts in zip(spec.key, names, strict=True)
    }
    return columns, keys


def _split_key_columns(spec: ModelSpec, rows: pa.Table) -> list[pa.Array]:
    """Return the texts of each key column."""
    return split_keys(rows["key"].combine_chunks(), len(spec.key))


def _read_inputs(
    root: str, spec: ModelSpec, names: Sequence[pa.Array], size: int, file: str | None
) -> Floats:
    """Return the inputs (i, K) of keys, from a file or the table of inputs; NaN for a key without inputs."""
    if spec.inputs is None:
        if file is not None:
            refuse_inputs(spec)
        return np.empty((0, size))
    table = read_inputs(spec, file) if file is not None else _read_inputs_table(root, spec)
    u, known = find_key_inputs(spec, table, names)
    return np.where(known, u, np.nan)


def _read_inputs_table(root: str, spec: ModelSpec) -> Any:
    assert spec.inputs is not None
    by, columns = spec.inputs.key or spec.key, list(spec.inputs.columns.values())
    name = spec.inputs_table
    home, table = find_home(Tables(root), name)
    version = None if spec.inputs.clones else refuse_foreign_table(home, table, name)
    rows = read_table(home.root, table, [*by, *columns], version=version)
    if rows is None:
        raise UserError(f"{spec.name} has inputs, and there is no table {name}: give a file with --inputs")
    found = {one: rows[one].combine_chunks() for one in rows.column_names}
    return parse_file_inputs(spec, RawRows(found, rows.num_rows), name)
