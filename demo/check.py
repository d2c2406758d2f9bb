"""Check a model's stream against one uninterrupted batch pass over all landed rows."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import kalman
from demo.compare import (
    Differences,
    Rows,
    by_values,
    codes,
    compare_rows,
    compare_states,
    key_names,
    rows_of,
    states_of,
)
from jobs.batch.batch_filter import Batch, build_bucket_filter, compute_final_states, pack_buckets
from jobs.core.errors import RUN_FAILED, UserError
from jobs.lineage import generations
from jobs.lineage.generations import DeployedModel
from jobs.snapshots import manifests
from jobs.snapshots.state_rows import pack_seeds, read_stored_rows
from jobs.snapshots.store import find_whole_states
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.state.block_format import build_state_layout
from jobs.state.encoding.estimates import estimate_batch, estimate_format, estimate_records, estimate_schema
from jobs.state.encoding.keys import build_key_kind, build_key_text, match
from jobs.state.encoding.packets import join_records
from jobs.state.encoding.routing import make_routing
from jobs.state.encoding.row_order import order_rows
from jobs.state.encoding.rows import KeyedRows, RowFormat, build_bucket_worker, build_row_format
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import estimates, measurements
from jobs.streaming.exporting import read_states
from kalman.filters.own_parameters import FIELD, find_key_parameters, with_key_parameters
from kalman.filters.rounded import find_storage_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame

    from jobs.lineage.generations import Generation
    from jobs.snapshots.manifests import Manifest
    from jobs.state.encoding.estimates import EstimateFormat
    from jobs.state.filter_step import Begin
    from kalman.types import Filter

COLUMNS = ("key", "event_time", "mean", "covariance", "log_likelihood", "nis", "flags")


def compute_estimates(
    packed: DataFrame, kernel: Filter, batch: Batch, fmt: EstimateFormat, begin: Begin | None = None
) -> DataFrame:
    """Return the estimates of bucketed rows: key, key columns, event_time, mean, covariance, ... and flags."""
    step = build_bucket_filter(kernel, batch, fmt.beside)

    def work(keyed: KeyedRows) -> Iterator[pa.RecordBatch]:
        yield estimate_batch(fmt, estimate_records(fmt, keyed, step(keyed, begin and begin(keyed)).outputs))

    return packed.mapInArrow(build_bucket_worker(batch.rows, work), estimate_schema(fmt, batch_id=False))


class Counts(NamedTuple):
    """The fate of the rows sent to a stream: estimated, or quarantined (when landed, or as late)."""

    sent: int
    estimated: int
    quarantined: int

    @property
    def add_up(self) -> bool:
        """Return whether every row is in exactly one place."""
        return self.sent == self.estimated + self.quarantined


class MicroBatch(NamedTuple):
    """A micro-batch's estimates: number of rows, and the event time (microseconds) of the first."""

    rows: int
    first: int


class Checked(NamedTuple):
    """The result of the check of one model, and the rows that its report shows.

    batches: the stream's micro-batches; names: the keys; rows: the estimates of every landed row, from the batch pass
    in history and from the stream after `since`; y (m, N): measurements; H (m, n): measurements from states;
    batch_rows, batch_seconds: size and duration of the batch pass.
    """

    spec: ModelSpec
    counts: Counts
    estimates: Differences
    states: Differences
    parameters: dict[str, object]
    generation: Generation
    names: list[str]
    rows: Rows
    y: NDArray[np.float64]
    H: NDArray[np.float64]
    since: int
    batch_rows: int
    batch_seconds: float
    batches: dict[int, MicroBatch]

    @property
    def worst(self) -> float:
        """Return the largest absolute difference."""
        return max(self.estimates.worst, self.states.worst)


def check(
    warehouse: Warehouse, spec: ModelSpec, sent: int, since: datetime, folder: str, say: Callable[[str], None]
) -> Checked:
    """Compare every estimate of a model's stream, and every key's state at its end, with one batch pass.

    Args:
        warehouse: the tables.
        spec: the model's spec.
        sent: number of rows in the files sent to the stream.
        since: event time from which rows went to the stream.
        folder: folder of these files, by which their rows in quarantine are found.
        say: called with progress.

    Raises:
        UserError: there is no stream to check.
    """
    generation = generations.find_live(warehouse, spec.name)
    manifest = None if generation is None else manifests.find(warehouse, generation.snapshot_id)
    if generation is None or manifest is None:
        raise UserError(
            f"model {spec.name} has no live generation with a snapshot: nothing can be checked", RUN_FAILED
        )
    kernel = kalman.build(spec.definition(), manifest.parameters)
    frame = warehouse.read(measurements(spec.name)).select(*spec.columns).persist()
    say(f"{spec.name}: batch pass")
    kind = build_key_kind(spec.key, frame.schema)
    batch = Batch(build_row_format(spec, kind), spec.unit_us, spec.idle_us)
    out = estimate_format(kind, spec, kernel)
    begin = _begin(warehouse, manifest, kernel, batch)
    started = time.monotonic()
    packed = pack_buckets(frame, batch.rows, frame.count()).persist()
    wanted = compute_estimates(packed, kernel, batch, out, begin).select(*COLUMNS).toArrow()
    seconds = time.monotonic() - started
    end = compute_final_states(packed, kernel, batch, begin).frame.toArrow()
    say(f"{spec.name}: the stream's estimates and state")
    mine = warehouse.read(estimates(spec.name)).filter(f"generation = '{generation.generation}'")
    ours = mine.select(*COLUMNS, "batch_id").toArrow()
    batch_id = Checkpoint(warehouse, generation.checkpoint).find_last_commit()
    assert batch_id is not None  # the generation has written estimates
    held = states_of(
        read_states(DeployedModel(spec, warehouse), generation, manifest, batch_id).frame.toArrow()
    )
    measured = measured_rows(frame, batch.rows)
    frame.unpersist()
    packed.unpersist()
    say(f"{spec.name}: comparing {ours.num_rows:,} rows and {len(held.names):,} keys")
    names = key_names([wanted, ours])
    everything = rows_of(wanted, names, ordered=True)
    start = round(since.timestamp() * 1e6)
    after = np.flatnonzero(everything.time >= start)
    streamed = rows_of(ours, names, ordered=False)
    found = compare_rows(streamed, by_values(everything.take(after)))
    return Checked(
        spec,
        Counts(sent, ours.num_rows, quarantined(warehouse, spec.name, folder)),
        found,
        compare_states(held, states_of(end)),
        manifest.parameters,
        generation,
        names,
        _with_streamed(everything, after, streamed),
        _in_order(measured, names),
        measurement_matrix(spec),
        start,
        wanted.num_rows,
        seconds,
        _batches(ours),
    )


def _begin(warehouse: Warehouse, manifest: Manifest, kernel: Filter, batch: Batch) -> Begin | None:
    """Return the function that starts keys with their learned parameters of the snapshot; None without such
    parameters."""
    own = find_key_parameters(kernel)
    if not own.learned:
        return None
    kind = batch.rows.kind
    layout = build_state_layout(kind, kernel.size, find_storage_dtype(kernel))
    states = read_stored_rows(warehouse, manifest, find_whole_states(warehouse, manifest))
    packets = pack_seeds(states, kernel, kind, layout, make_routing(1, 1))
    known = join_records(
        [layout.decode(bytes(row["payload"])) for row in packets.select("payload").collect()]
    )
    known = known.take(np.argsort(known.arrays["route"], kind="stable"))

    def begin(keyed: KeyedRows) -> NDArray[np.float64]:
        at = match(known, keyed.keys)
        states, there = kernel.initial(len(at)), np.flatnonzero(at >= 0)
        values = np.ascontiguousarray(known.arrays["values"][:, at[there]], np.float64)
        field = kernel.snapshot(values)[2][FIELD]
        given = {name: field[own.rows[name]] for name in own.learned}
        states[:, there] = with_key_parameters(kernel, states[:, there], given)
        return states

    return begin


def quarantined(warehouse: Warehouse, model: str, folder: str) -> int:
    """Count a model's quarantined rows that were landed from `folder` or refused by the stream."""
    from pyspark.sql import functions as F

    if not warehouse.exists("quarantine"):
        return 0
    rows = warehouse.read("quarantine").filter(F.col("model") == model)
    return rows.filter(F.col("source").startswith(folder) | F.col("generation").isNotNull()).count()


def measured_rows(frame: DataFrame, fmt: RowFormat) -> pa.Table:
    """Collect measurement rows: key (text), time in microseconds, y0, y1, ..."""
    from pyspark.sql import functions as F

    numbers = [F.col(f"`{name}`").alias(f"y{i}") for i, name in enumerate(fmt.measurement)]
    return frame.select(
        build_key_text(fmt.kind).alias("key"), F.unix_micros(F.col(f"`{fmt.time}`")).alias("time"), *numbers
    ).toArrow()


def measurement_matrix(spec: ModelSpec) -> NDArray[np.float64]:
    """Return H (m, n): the spec's, or the identity if it has none."""
    given = spec.definition()["observation"].get("H")
    return np.eye(len(spec.measurement), len(spec.states)) if given is None else np.array(given, np.float64)


def _with_streamed(everything: Rows, after: NDArray[np.int64], streamed: Rows) -> Rows:
    """Replace the batch pass's estimates by the stream's, if they have the same number."""
    if streamed.size != len(after):
        return everything
    # The batch pass orders rows of one key and time by value, the stream by application.
    wanted = everything.take(after)
    ties = (wanted.nis, wanted.log_likelihood, *wanted.mean[::-1], *wanted.covariance[::-1])
    place = after[np.lexsort((*ties, wanted.time, wanted.key))]
    arrays: list[Any] = [np.array(array) for array in everything]
    merged = Rows(*arrays)
    for name in ("mean", "covariance", "log_likelihood", "nis"):
        getattr(merged, name)[..., place] = getattr(streamed, name)
    return merged


def _in_order(measured: pa.Table, names: list[str]) -> NDArray[np.float64]:
    """Return y (m, N) in the order of (key, time, application)."""
    count = len(measured.column_names) - 2
    y = np.array([measured.column(f"y{i}").to_numpy().astype(np.float64) for i in range(count)])
    return y[:, order_rows(codes(measured.column("key"), names), measured.column("time").to_numpy(), y, None)]


def _batches(ours: pa.Table) -> dict[int, MicroBatch]:
    found = ours.group_by("batch_id").aggregate([("event_time", "count"), ("event_time", "min")]).to_pylist()
    return {
        row["batch_id"]: MicroBatch(row["event_time_count"], round(row["event_time_min"].timestamp() * 1e6))
        for row in found
    }


def _lists(matrix: NDArray[np.float64]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(
        pa.array(np.ascontiguousarray(matrix.T).ravel()), matrix.shape[0]
    )
