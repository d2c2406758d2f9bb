"""The stateful operator of a stream that applies rows as they arrive.

A bucket is a group with a map of states. A micro-batch reads and writes the states of its rows' keys
(`jobs.state.key_states`), and NumPy works on all keys at once. Every value that crosses between Spark and Python is a
packet of many records.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from jobs.state.block_store import decode_offered, map_store
from jobs.state.encoding.packet_kinds import STATES_BY_BLOCK, StateVariable
from jobs.state.encoding.packets import join_records
from jobs.state.encoding.rows import unpack_rows
from jobs.state.filter_step import filter_step
from jobs.state.key_states import KeyStates
from jobs.state.plan import Packet, Plan, build_output_packets

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import TimerValues


class FilterProcessor(StatefulProcessor):
    """The model's filter over the keys of a bucket, each with its state."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state variable: values by number."""
        store = map_store(handle, StateVariable.STATES, STATES_BY_BLOCK, self.plan.text)
        self.states = KeyStates(store, self.plan.state, self.plan.blocks, copy_folder)

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: TimerValues) -> None:  # noqa: N802
        """Add the states of the snapshot; each value of `payload` is a packet of state records of this bucket."""
        layout = self.plan.state.layout
        self.states.add(join_records([layout.decode(payload) for payload in initialState["payload"]]))

    def import_states(self, packets: Iterable[bytes], timers: TimerValues) -> tuple[int, int]:
        """Add the states of new keys; return the numbers of new keys and of keys that existed."""
        offered = decode_offered(self.plan.state.layout, packets)
        new = self.states.absent(offered)
        if new.size:
            self.states.add(new)
        return new.size, offered.size - new.size

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        """Apply a micro-batch of packed rows to the bucket's states, and yield packets of estimates."""
        plan = self.plan
        keyed = unpack_rows((payload for frame in rows for payload in frame["payload"]), plan.rows)
        if len(keyed.rows.key) == 0:
            return
        present, known = self.states.load(keyed.keys.arrays["route"])
        begin = None if plan.begin is None else plan.begin(keyed)
        result = filter_step(plan.row_filter, plan.state.layout, known, keyed, plan.apply_late, begin)
        self.states.save(present, result.records)
        for packet in build_output_packets(plan, keyed, result.outputs):
            yield build_packet_frame(packet)


def copy_folder() -> Path | None:
    """Return the folder for the local copy of a task's bucket, or None outside a task.

    Spark removes the folder when the executor ends, so another executor never finds the copy.
    """
    context, folders = TaskContext.get(), os.environ.get("SPARK_LOCAL_DIRS", "")
    query = None if context is None else context.getLocalProperty("sql.streaming.queryId")
    if context is None or query is None or not folders:
        return None
    return Path(folders.split(",")[0]) / "kalman-states" / query / str(context.partitionId())


def build_packet_frame(packet: Packet) -> pd.DataFrame:
    """Return an output packet with the columns of `OUTPUT_PACKETS`."""
    kind, count, payload = packet
    return pd.DataFrame({"kind": [kind], "rows": [count], "payload": [payload]})
