"""Read the states of a live stream's keys from its table of latest states, to forecast from them. No Spark.

Spark alone reads a stream's checkpoint. With `sinks: {latest: true}` the newest estimate of each key is in a table;
where mean and covariance, or the filter's state beside them, are the whole state, forecasts follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

import kalman
from jobs.core.errors import UserError
from jobs.encoding import arrow
from jobs.offline.ahead import Keys
from jobs.offline.prior import own_begin
from jobs.offline.snapshot_keys import SnapshotKeys, key_columns, key_inputs, typed_columns
from jobs.snapshots.learned import Learned, learned_parameters
from jobs.specs.model_spec import ModelSpec
from jobs.specs.sections import PRETRAINED
from jobs.storage.table_rows import column_types, read_table, written_at
from kalman.filters.own_parameters import FIELD, own_parameters, with_own
from kalman.filters.state_layout import innermost, places
from kalman.filters.state_output import OUTPUT, follows_from_moments
from kalman.types import Filter

_COLUMNS = ("key", "event_time", "mean", "covariance", "flags", OUTPUT)
_INSTEAD = (
    "forecast into a table, which reads the state itself on Spark (leave out --output, or name a table)"
)


def live_keys(
    root: str, spec: ModelSpec, wanted: Sequence[str], inputs: str | None
) -> SnapshotKeys | str | None:
    """Return keys of the live stream with their states; or the reason why they cannot be read; None: nothing is live.

    Args:
        root: of the warehouse.
        spec: of the model.
        wanted: keys as text; empty: all.
        inputs: a file of the keys' inputs; None: their table.

    Raises:
        UserError: a wanted key has no state, or one that its latest estimate does not tell.
    """
    try:
        generation = _live(root, spec)
        if generation is None:
            return None
        table, name = f"latest/{spec.name}", generation["generation"]
        if not column_types(root, table):
            return "it keeps no table of latest states; write sinks: {latest: true}"
        learned = learned_parameters(root, spec, generation["snapshot_id"])
    except UserError as error:
        return error.message
    kernel = innermost(kalman.build(spec.definition(), learned.parameters))
    why = _missing(spec, kernel, OUTPUT in column_types(root, table))
    if why is not None:
        return why
    among = ("key", list(wanted)) if wanted else None
    rows = read_table(root, table, _COLUMNS, {"generation": name}, None, among)
    rows = _checked(rows, spec, wanted, name)
    texts = rows["key"].combine_chunks()
    names = key_columns(spec, texts)
    time = arrow.to_numpy(rows["event_time"].combine_chunks().cast(pa.timestamp("us")).cast(pa.int64()))
    values = _values(root, spec, learned, kernel, rows, names)
    states = kalman.KeyStates(values, time, np.ones(len(time), np.int64), np.zeros(len(time)))
    keys = Keys(names, states, key_inputs(root, spec, names, inputs))
    assert learned.snapshot is not None
    return SnapshotKeys(
        kernel,
        typed_columns(root, spec, names),
        keys,
        learned.snapshot,
        written_at(root, table),
        None,
        int(time.max()),
        name,
    )


def _live(root: str, spec: ModelSpec) -> dict[str, Any] | None:
    table = read_table(root, "generations", ["generation", "model", "status", "snapshot_id"])
    rows = [] if table is None else table.to_pylist()
    return next((one for one in rows if one["model"] == spec.name and one["status"] == "live"), None)


def _missing(spec: ModelSpec, kernel: Filter, with_state: bool) -> str | None:
    """Return what the latest estimates of a model lack of the state, None: nothing."""
    if not follows_from_moments(kernel):
        lacks = "its estimates lack the filter's state, which they have with the section `forecast`"
        return None if with_state else lacks
    if spec.outputs.covariance != "full" and len(spec.states) > 1:
        return "its estimates have variances alone; write outputs: {covariance: full}"
    if spec.stream.new_keys == PRETRAINED and own_parameters(kernel).rows:
        return "parameters of new keys are in its checkpoint alone"
    return None


def _checked(rows: Any, spec: ModelSpec, wanted: Sequence[str], generation: str) -> pa.Table:
    """Return the rows ordered by key; each tells the state of its key."""
    there = [] if rows is None else rows["key"].to_pylist()
    absent = [key for key in wanted if key not in set(there)]
    if absent:
        several = '; a key of several columns is a JSON array: ["a", "b"]' if len(spec.key) > 1 else ""
        raise UserError(f"--key {absent[0]}: {generation} has no state of it{several}")
    if rows is None or not there:
        raise UserError(
            f"{generation} has no state yet, as it began without any and no row has come: there is nothing to forecast "
            f"from; name a snapshot with --snapshot"
        )
    ordered = rows.take(arrow.integers(np.argsort(np.array(there, dtype=object), kind="stable")))
    flagged = [one for one in ordered.select(["key", "flags"]).to_pylist() if one["flags"] is not None]
    if flagged:
        raise UserError(
            f"key {flagged[0]['key']}: its newest row was flagged ({flagged[0]['flags']}), so that the latest estimate "
            f"does not tell the time of its state: {_INSTEAD}"
        )
    return ordered


def _values(
    root: str, spec: ModelSpec, learned: Learned, kernel: Filter, rows: pa.Table, names: list[pa.Array]
) -> np.ndarray:
    """Return the states (size, K)."""
    n = len(spec.states)
    if not follows_from_moments(kernel):
        column = rows[OUTPUT].combine_chunks()
        if column.null_count:
            at = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise UserError(
                f"key {rows['key'][at].as_py()}: its latest estimate has no state of the filter, as it has had no row "
                f"since: {_INSTEAD}"
            )
        return arrow.matrix(column, kernel.size, OUTPUT)
    mean, covariance = (
        arrow.matrix(rows[name].combine_chunks(), width, name)
        for name, width in (("mean", n), ("covariance", n * n))
    )
    if not np.isfinite(covariance).all():
        raise UserError(
            f"a key's state is still diffuse, which its latest estimate does not tell: {_INSTEAD}"
        )
    values = kernel.from_moments(mean, covariance)
    own = own_parameters(kernel)
    if not own.rows or not learned.parameters:
        return values
    begin, _ = own_begin(root, spec, learned, kernel, dict(zip(spec.key, names, strict=True)))
    field = begin[places(kernel.fields)[FIELD]]
    return with_own(kernel, values, {name: field[own.rows[name]] for name in own.learned})
