"""The stateful operator of the stream: one group a bucket, a map of state blocks in it, NumPy over all its keys.

A micro-batch reads and writes only the blocks whose keys it has rows for. Every value that crosses between Spark and
Python is a packet of many records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from jobs.advance import Begin, advance
from jobs.estimates import EstimateFormat, pack_estimates
from jobs.packed_rows import KeyedRows, RowFormat, unpack_rows
from jobs.packets import Records, concat
from jobs.routing import block_of
from jobs.state_blocks import StateFormat
from kalman.run import Outputs
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import MapState, TimerValues

OUTPUT = "kind int, rows bigint, payload binary"
SEED = "bucket int, payload binary"
STATE = "blocks"

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


class FilterProcessor(StatefulProcessor):
    """Run the model's filter over the keys of a bucket, with their states in blocks."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the one state: blocks by number."""
        self.blocks: MapState = handle.getMapState(STATE, "block long", "states binary")

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: TimerValues) -> None:  # noqa: N802
        """Take over states from the snapshot: each value of `payload` is a packet of state records of this bucket.

        A block may come in several parts, in any order, so each part is merged with what is there.
        """
        layout = self.plan.state.layout
        seeds = concat([layout.decode(payload) for payload in initialState["payload"]])
        ordered = seeds.take(np.argsort(seeds.arrays["route"], kind="stable"))
        present, known = self._load(ordered.arrays["route"])
        if known.size:
            ordered = concat([known, ordered])
            ordered = ordered.take(np.argsort(ordered.arrays["route"], kind="stable"))
        self._store(present, ordered)

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        """Advance the bucket's states by a micro-batch of packed rows, and put out packets of estimates."""
        plan = self.plan
        keyed = unpack_rows((payload for frame in rows for payload in frame["payload"]), plan.rows)
        if len(keyed.rows.key) == 0:
            return
        present, known = self._load(keyed.keys.arrays["route"])
        begin = None if plan.begin is None else plan.begin(keyed)
        watched = plan.estimates.watched
        late = plan.apply_late
        advanced = advance(plan.kernel, plan.state.layout, known, keyed, plan.unit, late, begin, watched)
        self._store(present, advanced.records)
        late = advanced.outputs.late
        bad = without_state(advanced.outputs)
        outputs = advanced.outputs._replace(late=late | bad) if bad.any() else advanced.outputs
        for count, packet in pack_estimates(plan.estimates, keyed, outputs):
            yield pd.DataFrame({"kind": [ESTIMATES], "rows": [count], "payload": [packet]})
        for kind, which in ((LATE, late), (BAD_STATE, bad)):
            rejected = np.flatnonzero(which)
            if len(rejected):
                packet = plan.rows.layout.encode(late_rows(keyed, rejected))
                yield pd.DataFrame({"kind": [kind], "rows": [len(rejected)], "payload": [packet]})

    def _load(self, route: NDArray[np.uint64]) -> tuple[NDArray[np.int64], Records]:
        """Read the blocks of ordered routes: their numbers, and their records joined, still ordered by route."""
        present = np.unique(block_of(route, self.plan.blocks))
        parts = []
        for block in present.tolist():
            value = self.blocks.getValue((block,))
            if value is not None:
                parts.append(self.plan.state.decode(bytes(value[0])))
        return present, concat(parts) if parts else self.plan.state.layout.empty()

    def _store(self, present: NDArray[np.int64], records: Records) -> None:
        """Write ordered records to the blocks they belong to."""
        block = block_of(records.arrays["route"], self.plan.blocks)
        starts, stops = np.searchsorted(block, present), np.searchsorted(block, present, "right")
        for number, start, stop in zip(present.tolist(), starts, stops, strict=True):
            if stop > start:
                self.blocks.updateValue((number,), (self.plan.state.encode(records.slice(start, stop)),))


def without_state(outputs: Outputs) -> NDArray[np.bool_]:
    """Tell (N,) which rows, not late, are of a key whose state is not a number: the filter cannot have left it so."""
    return ~np.isfinite(outputs.mean).all(axis=0) & ~outputs.late


def late_rows(keyed: KeyedRows, late: NDArray[np.int64]) -> Records:
    """Return the rows at `late` as records of measurement rows, as they came."""
    code = keyed.rows.key[late]
    keys = keyed.keys.take(code)
    arrays = {**keys.arrays, "time": keyed.rows.time[late], "y": keyed.rows.y[:, late]}
    if keyed.rows.u.shape[0]:
        arrays["u"] = keyed.rows.u[:, late]
    return Records(arrays, keys.text)
