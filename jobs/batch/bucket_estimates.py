"""Estimate the rows of one bucket of keys: the step that runs on the executors. Needs no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.spark.local_frame import Make
from jobs.state.encoding.estimates import (
    ROWS_A_PACKET,
    EstimateFormat,
    estimate_batch,
    estimate_records,
    locate_packed_diagonal,
    locate_packed_full,
)
from jobs.state.encoding.keys import match
from jobs.state.encoding.packets import NEVER, Layout, Records, RowPacket, join_records
from jobs.state.encoding.routing import compute_buckets
from jobs.state.encoding.rows import KeyedRows, RowFormat, remove_duplicates, unpack_rows
from jobs.state.expiry import split_lives_from
from jobs.state.filter_step import Begin, filter_step, gather
from jobs.state.plan import find_without_state
from jobs.state.row_filter import Indices, RowFilter
from kalman.filters.own_parameters import FIELD, copy_key_parameters, find_key_parameters
from kalman.run import KeyStates, Outputs, SortedRows, initial_states
from kalman.smoothers.kinds import build_smoother, select_smoothed_part
from kalman.types import Filter

SLICES = 1 << 16
"""The number of slices of the keys. A key's route decides its slice. Buckets, and the part that one commit replaces,
consist of whole slices.
"""
PREFIX = "smoothed_"
"""The prefix of the outputs that are smoothed, given all rows of a key, as in the output of `filter --smooth`."""


class EstimatingPlan(NamedTuple):
    """The settings for the estimates of a bucket, which are sent to the executors.

    layout: the layout of state records.
    since: earlier event times are filtered, but their estimates are not put out.
    idle: microseconds without rows after which a key restarts.
    smooth: also estimate each row's state given all rows of its key.
    only_own: take only the keys' parameters from the given states; each key begins anew.
    """

    kernel: Filter
    unit: float
    rows: RowFormat
    layout: Layout
    estimates: EstimateFormat
    begin: Begin | None = None
    idle: int | None = None
    since: int = NEVER
    smooth: bool = False
    only_own: bool = False


def build_estimator(plan: EstimatingPlan) -> Make:
    """Return the function that makes rows of estimates from a partition's packets (`TYPED_ROW_PACKETS`)."""

    def over(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        packets: dict[RowPacket, dict[int, list[bytes]]] = {RowPacket.ROWS: {}, RowPacket.STATES: {}}
        for batch in batches:
            buckets, payloads = (batch.column(name).to_pylist() for name in ("bucket", "payload"))
            typed = "kind" in batch.schema.names  # packets without a kind have rows
            kinds = batch.column("kind").to_pylist() if typed else [RowPacket.ROWS] * len(buckets)
            for bucket, kind, payload in zip(buckets, kinds, payloads, strict=True):
                packets[RowPacket(kind)].setdefault(bucket, []).append(payload)
        rows, states = packets[RowPacket.ROWS], packets[RowPacket.STATES]
        for bucket in sorted(rows):
            keyed = remove_duplicates(unpack_rows(rows.pop(bucket), plan.rows), plan.rows)
            yield from estimate_bucket(plan, keyed, unpack_known_states(plan, states.pop(bucket, [])))

    return over


def unpack_known_states(plan: EstimatingPlan, payloads: list[bytes]) -> Records:
    """Return the states of a bucket's keys, ordered by route."""
    if not payloads:
        return plan.layout.empty()
    whole = join_records([plan.layout.decode(one) for one in payloads])
    return whole.take(np.argsort(whole.arrays["route"], kind="stable"))


def estimate_bucket(plan: EstimatingPlan, keyed: KeyedRows, known: Records) -> Iterator[pa.RecordBatch]:
    """Yield the estimates of a bucket's rows; `batch_id` is the slice of the row's key."""
    if len(keyed.rows.key) == 0:
        return
    for part, outputs in compute_bucket_outputs(plan, keyed, known):
        yield from _build_batches(plan, part, outputs)


def _build_batches(plan: EstimatingPlan, keyed: KeyedRows, outputs: Outputs) -> Iterator[pa.RecordBatch]:
    left_out = outputs.late | find_without_state(outputs) | (keyed.rows.time < plan.since)
    records = estimate_records(plan.estimates, keyed, outputs._replace(late=left_out))
    slices = compute_buckets(np.asarray(keyed.keys.arrays["route"]), SLICES)[keyed.rows.key][~left_out]
    for start in range(0, records.size, ROWS_A_PACKET):
        stop = min(start + ROWS_A_PACKET, records.size)
        yield estimate_batch(plan.estimates, records.slice(start, stop), slices[start:stop])


def compute_bucket_outputs(
    plan: EstimatingPlan, keyed: KeyedRows, known: Records
) -> Iterator[tuple[KeyedRows, Outputs]]:
    """Yield a bucket's rows with the filter's outputs in one or more parts; smoothed outputs are extra columns."""
    row_filter = RowFilter(plan.kernel, plan.unit, plan.estimates.beside)
    begin = None if plan.begin is None else plan.begin(keyed)
    if plan.only_own:
        begin, known = with_known_parameters(plan, keyed, known, begin), plan.layout.empty()
    if not plan.smooth:
        yield keyed, filter_step(row_filter, plan.layout, known, keyed, begin=begin, idle=plan.idle).outputs
        return
    at = match(known, keyed.keys)
    fresh = initial_states(plan.kernel, len(at))
    if begin is not None:
        fresh = fresh._replace(values=begin)
    before = gather(known, at, at < 0, fresh)
    diagonal = plan.estimates.diagonal
    for indices, outputs in smooth_rows(row_filter, before, fresh, keyed.rows, plan.idle, diagonal):
        yield keyed._replace(rows=keyed.rows.take(indices)), outputs


def with_known_parameters(
    plan: EstimatingPlan, keyed: KeyedRows, known: Records, begin: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Return the states (size, K) in which keys begin; known keys begin with their known parameters.

    A parameter that adapts to the innovations is part of a key's state, so it keeps the value that it has in `begin`.
    """
    kernel = plan.kernel
    at = match(known, keyed.keys)
    states = kernel.initial(len(at)) if begin is None else begin.copy()
    own, there = find_key_parameters(kernel), np.flatnonzero(at >= 0)
    if not set(own.learned) - set(own.adapted) or not len(there):
        return states
    values = np.ascontiguousarray(known.arrays["values"][:, at[there]], np.float64)
    field = kernel.snapshot(values)[2][FIELD]
    states[:, there] = copy_key_parameters(kernel, states[:, there], field, adapted=False)
    return states


def list_smoothed_widths(kernel: Filter, diagonal: bool = False) -> tuple[tuple[str, int], ...]:
    """Return the names of the smoothed outputs, and the number of values that a row has in each.

    diagonal: put out only variances instead of the whole covariance, as in `EstimateFormat`.

    Raises:
        ModelError: the filter cannot be smoothed.
    """
    n, backwards = len(kernel.states), build_smoother(kernel)
    extra = backwards.extra(backwards.begin(select_smoothed_part(kernel).initial(1)))
    return (
        (f"{PREFIX}mean", n),
        (f"{PREFIX}covariance", n if diagonal else n * n),
        *((f"{PREFIX}{name}", len(values)) for name, values in extra.items()),
    )


def smooth_rows(
    row_filter: RowFilter,
    before: KeyStates,
    fresh: KeyStates,
    rows: SortedRows,
    idle: int | None,
    diagonal: bool = False,
) -> Iterator[tuple[Indices, Outputs]]:
    """Yield the filter's outputs, with the smoothed outputs among the extras, and the indices of their rows.

    The outputs come in parts, so that apart from the rows the memory does not grow with the history. A key without rows
    for longer than `idle` begins anew, and its later rows do not smooth its earlier ones.

    Args:
        row_filter: the filter.
        before: states of the K keys before the rows.
        fresh: states in which each key begins anew.
        rows: sorted rows.
        idle: microseconds without rows after which a key restarts; None means that keys never restart.
        diagonal: put out only variances instead of the whole covariance.
    """
    if idle is not None:
        rows, before = split_lives_from(row_filter, before, fresh, rows, idle)
    n = len(row_filter.kernel.states)
    kept = locate_packed_diagonal(n) if diagonal else locate_packed_full(n)
    for indices, outputs, found in row_filter.smooth_in_pieces(before, rows):
        extra = {
            f"{PREFIX}mean": found.mean,
            f"{PREFIX}covariance": found.covariance[kept],
            **{f"{PREFIX}{name}": values for name, values in found.extra.items()},
        }
        yield indices, outputs._replace(extra={**outputs.extra, **extra})
