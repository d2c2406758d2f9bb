"""What an operator is told about the rows it takes, and the packets it puts out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.core.stopwatch import PACK_ESTIMATES, each
from jobs.encoding.estimates import EstimateFormat, pack_estimates
from jobs.encoding.packet_kinds import OutputPacket
from jobs.encoding.packets import Records
from jobs.encoding.rows import KeyedRows, RowFormat
from jobs.state.block_format import StateFormat
from jobs.state.filter_step import Begin
from kalman.run import Outputs, SortedRows
from kalman.types import Filter

if TYPE_CHECKING:
    from jobs.state.event_time_policy import EventTimePolicy


class Plan(NamedTuple):
    """All that the operator knows of its model. It is sent to the executors once a query."""

    kernel: Filter
    unit: float
    rows: RowFormat
    state: StateFormat
    estimates: EstimateFormat
    blocks: int
    apply_late: bool = False
    begin: Begin | None = None
    """Gives the states in which new keys begin; None: the model's initial state."""
    timing: EventTimePolicy | None = None
    """What a timed operator (`jobs.streaming.operators.event_time_processor`) knows of time; None: rows are taken as they arrive."""
    text: bool = True
    """The state's values are text (`jobs.state.text_codec`); a checkpoint of the first release has them as bytes."""


def put_out(plan: Plan, keyed: KeyedRows, outputs: Outputs) -> Iterator[tuple[int, int, bytes]]:
    """Yield what the filter says of rows as packets: kind, number of rows, and payload."""
    late = outputs.late
    bad = without_state(outputs)
    for count, packet in each(PACK_ESTIMATES, accepted(plan, keyed, outputs, bad)):
        yield OutputPacket.ESTIMATES, count, packet
    for kind, which in ((OutputPacket.LATE, late), (OutputPacket.BAD_STATE, bad)):
        rejected = np.flatnonzero(which)
        if len(rejected):
            yield kind, len(rejected), plan.rows.layout.encode(late_rows(keyed, rejected))


def accepted(
    plan: Plan, keyed: KeyedRows, outputs: Outputs, bad: NDArray[np.bool_]
) -> Iterator[tuple[int, bytes]]:
    """Yield the estimates of those rows that are not refused: their number, and packet; `bad`: see `without_state`."""
    kept = outputs._replace(late=outputs.late | bad) if bad.any() else outputs
    yield from pack_estimates(plan.estimates, keyed, kept)


def without_state(outputs: Outputs) -> NDArray[np.bool_]:
    """Tell (N,) which rows, not late, are of a key whose state is not a number: the filter cannot have left it so."""
    return ~np.isfinite(outputs.mean).all(axis=0) & ~outputs.late


def late_rows(keyed: KeyedRows, late: NDArray[np.int64]) -> Records:
    """Return the rows at `late` as records of measurement rows, as they came."""
    return rows_of(keyed.keys, keyed.rows.take(late), None if keyed.ids is None else keyed.ids.take(late))


def rows_of(keys: Records, rows: SortedRows, ids: Records | None = None) -> Records:
    """Return rows of these keys as records of measurement rows, with their ids if they have some."""
    owners = keys.take(rows.key)
    arrays = {**owners.arrays, "time": rows.time, "y": rows.y}
    if rows.u.shape[0]:
        arrays["u"] = rows.u
    if ids is None:
        return Records(arrays, owners.text)
    return Records({**arrays, **ids.arrays}, owners.text, ids.label)
