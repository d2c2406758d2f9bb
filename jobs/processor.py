"""The stateful operator of the stream: one group a bucket, a map of state blocks in it, NumPy over all its keys.

A micro-batch reads and writes only the blocks whose keys it has rows for. Every value that crosses between Spark and
Python is a packet of many records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from jobs.advance import Begin, advance
from jobs.block_store import Blocks, map_store
from jobs.estimates import EstimateFormat, pack_estimates
from jobs.packed_rows import KeyedRows, RowFormat, unpack_rows
from jobs.packets import Records, concat
from jobs.state_blocks import StateFormat
from jobs.stopwatch import PACK_ESTIMATES, each
from jobs.take_keys import decoded, unknown
from kalman.run import Outputs, SortedRows
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import TimerValues

    from jobs.timing import Timing

OUTPUT = "kind int, rows bigint, payload binary"
SEED = "bucket int, payload binary"
STATE = "blocks"
STATES_BY_BLOCK = ("block", "states")

ESTIMATES, LATE, BAD_STATE = 0, 1, 2
"""Kinds of output packets: estimates of accepted rows; rows earlier than what their key's state already reflects; rows
of a key whose state is no number, which must not end the stream of all other keys."""


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
    timing: Timing | None = None
    """What a timed operator (`jobs.timed_processor`) knows of time; None: rows are taken as they arrive."""
    text: bool = True
    """The state's values are text (`jobs.state_text`); a checkpoint of the first release has them as bytes."""


class FilterProcessor(StatefulProcessor):
    """Run the model's filter over the keys of a bucket, with their states in blocks."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the one state: blocks by number."""
        store = map_store(handle, STATE, STATES_BY_BLOCK, self.plan.text)
        self.blocks = Blocks(store, self.plan.state, self.plan.blocks)

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: TimerValues) -> None:  # noqa: N802
        """Take over states from the snapshot: each value of `payload` is a packet of state records of this bucket."""
        layout = self.plan.state.layout
        self.blocks.add(concat([layout.decode(payload) for payload in initialState["payload"]]))

    def take_over(self, packets: Iterable[bytes], timers: TimerValues) -> tuple[int, int]:
        """Take over states of keys that there are none of; return how many were taken, and how many there were."""
        offered = decoded(self.plan.state.layout, packets)
        new = unknown(self.blocks, offered)
        if new.size:
            self.blocks.add(new)
        return new.size, offered.size - new.size

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        """Advance the bucket's states by a micro-batch of packed rows, and put out packets of estimates."""
        plan = self.plan
        keyed = unpack_rows((payload for frame in rows for payload in frame["payload"]), plan.rows)
        if len(keyed.rows.key) == 0:
            return
        present, known = self.blocks.load(keyed.keys.arrays["route"])
        begin = None if plan.begin is None else plan.begin(keyed)
        advanced = advance(
            plan.kernel,
            plan.state.layout,
            known,
            keyed,
            plan.unit,
            plan.apply_late,
            begin,
            plan.estimates.watched,
        )
        self.blocks.save(present, advanced.records)
        for kind, count, packet in put_out(plan, keyed, advanced.outputs):
            yield pd.DataFrame({"kind": [kind], "rows": [count], "payload": [packet]})


def put_out(plan: Plan, keyed: KeyedRows, outputs: Outputs) -> Iterator[tuple[int, int, bytes]]:
    """Yield what the filter says of rows as packets: kind, number of rows, and payload."""
    late = outputs.late
    bad = without_state(outputs)
    for count, packet in each(PACK_ESTIMATES, accepted(plan, keyed, outputs, bad)):
        yield ESTIMATES, count, packet
    for kind, which in ((LATE, late), (BAD_STATE, bad)):
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
