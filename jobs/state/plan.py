"""The plan of a stream's operator: all facts about its model, its event-time policy, and its output packets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.core.stopwatch import PACK_ESTIMATES, time_items
from jobs.state.block_format import StateFormat
from jobs.state.block_store import Store
from jobs.state.encoding.estimates import EstimateFormat, pack_estimates
from jobs.state.encoding.packets import NEVER, OutputPacket, Records
from jobs.state.encoding.rows import KeyedRows, RowFormat
from jobs.state.filter_step import Begin
from jobs.state.row_filter import RowFilter
from kalman.run import Outputs, SortedRows
from kalman.types import Filter


class EventTimePolicy(NamedTuple):
    """When rows are applied, when keys expire, and the times of the snapshot. Times are in microseconds.

    delay: delay of the watermark
    row_format: storage format of waiting rows
    watermark, max_event_time: values of the snapshot, from which a bucket begins
    waits: rows wait for the watermark
    drop_duplicates: duplicates are counted and forgotten, not quarantined
    idle: silence after which a key expires; None: keys do not expire
    archive: an expired key comes back with its last state
    replay_length: number of rows per key that are kept for replay; 0: late rows are not replayed
    processing_time: silence is measured by the machine's clock
    patience: time without rows, by the machine's clock, after which waiting rows are released; None: they wait on
    id_format: storage format of row ids; None: rows have no ids
    """

    delay: int
    row_format: StateFormat
    watermark: int = NEVER
    max_event_time: int = NEVER
    waits: bool = True
    drop_duplicates: bool = False
    idle: int | None = None
    archive: bool = False
    replay_length: int = 0
    processing_time: bool = False
    patience: int | None = None
    id_format: StateFormat | None = None

    @property
    def needs_timers(self) -> bool:
        """Return whether the policy depends on the machine's clock."""
        return self.processing_time or self.patience is not None

    @property
    def idle_between_rows(self) -> int | None:
        """Return the silence between two rows of a key after which the key begins anew, or None."""
        return None if self.archive or self.processing_time else self.idle

    def late_before(self, watermark: int) -> int:
        """Return the event time before which a row of any key is late."""
        if watermark == NEVER or self.waits:
            return watermark
        idle = self.idle_between_rows
        return NEVER if idle is None else watermark - idle


class Stores(NamedTuple):
    """The stores of a bucket.

    blocks: states of keys
    parts: rows of the reorder buffer
    ended: states of expired keys, if these can come back
    replay_rows, replay_base: rows of each key that are kept for replay, and the states before them
    last_seen: arrival time of each key's last row, if the machine's clock measures silence
    row_ids: row ids, if rows have ids
    """

    blocks: Store
    parts: Store
    ended: Store
    replay_rows: Store
    replay_base: Store
    last_seen: Store
    row_ids: Store | None = None


Packet = tuple[OutputPacket, int, bytes]
"""An output of the operator: the kind of packet, the number of rows, and the payload."""


class Plan(NamedTuple):
    """All facts about the model that the operator needs. It is sent to the executors once per query."""

    kernel: Filter
    unit: float
    rows: RowFormat
    state: StateFormat
    estimates: EstimateFormat
    blocks: int
    apply_late: bool = False
    begin: Begin | None = None
    """Function that returns the initial states of new keys; None means the model's initial state."""
    event_time: EventTimePolicy | None = None
    """The policy of `EventTimeProcessor`; None means that `FilterProcessor` applies the rows as they arrive."""
    text: bool = True
    """Whether state values are text (`jobs.state.spark_values`); checkpoints of the first release have bytes."""

    @property
    def row_filter(self) -> RowFilter:
        """Return the filter, with the extra outputs of the model's estimates."""
        return RowFilter(self.kernel, self.unit, self.estimates.beside)


def build_output_packets(plan: Plan, keyed: KeyedRows, outputs: Outputs) -> Iterator[Packet]:
    """Yield the packets for filtered rows: estimates of the accepted rows, and the refused rows."""
    late = outputs.late
    bad = find_without_state(outputs)
    for count, packet in time_items(PACK_ESTIMATES, estimate_packets(plan, keyed, outputs, bad)):
        yield OutputPacket.ESTIMATES, count, packet
    for kind, which in ((OutputPacket.LATE, late), (OutputPacket.BAD_STATE, bad)):
        rejected = np.flatnonzero(which)
        if len(rejected):
            yield build_row_packet(plan, kind, keyed, rejected)


def estimate_packets(
    plan: Plan, keyed: KeyedRows, outputs: Outputs, bad: NDArray[np.bool_]
) -> Iterator[tuple[int, bytes]]:
    """Yield packets of the estimates of accepted rows, with row counts; bad: result of `find_without_state`."""
    kept = outputs._replace(late=outputs.late | bad) if bad.any() else outputs
    yield from pack_estimates(plan.estimates, keyed, kept)


def build_row_packet(plan: Plan, kind: OutputPacket, keyed: KeyedRows, which: NDArray[np.int64]) -> Packet:
    """Return a packet of the rows at positions `which`, unchanged."""
    return kind, len(which), plan.rows.layout.encode(select_row_records(keyed, which))


def build_duplicate_packet(
    plan: Plan, kind: OutputPacket, keyed: KeyedRows, which: NDArray[np.int64]
) -> Packet:
    """Return a packet with duplicates, or only with their number if the policy drops duplicates."""
    if plan.event_time is not None and plan.event_time.drop_duplicates:
        return OutputPacket.DROPPED, len(which), b""
    return build_row_packet(plan, kind, keyed, which)


def find_without_state(outputs: Outputs) -> NDArray[np.bool_]:
    """Return a mask (N,) of the rows, except late rows, whose key's state is NaN, which no filter can cause."""
    return ~np.isfinite(outputs.mean).all(axis=0) & ~outputs.late


def select_row_records(keyed: KeyedRows, which: NDArray[np.int64]) -> Records:
    """Return the rows at positions `which` as records of measurement rows, unchanged."""
    return build_row_records(
        keyed.keys, keyed.rows.take(which), None if keyed.ids is None else keyed.ids.take(which)
    )


def build_row_records(keys: Records, rows: SortedRows, ids: Records | None = None) -> Records:
    """Return rows of these keys as records of measurement rows, with the ids of the rows if there are any."""
    owners = keys.take(rows.key)
    arrays = {**owners.arrays, "time": rows.time, "y": rows.y}
    if rows.u.shape[0]:
        arrays["u"] = rows.u
    if ids is None:
        return Records(arrays, owners.text)
    return Records({**arrays, **ids.arrays}, owners.text, ids.label)
