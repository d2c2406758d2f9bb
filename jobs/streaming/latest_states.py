"""Store the latest state of each key in `latest/<model>`, and the last states of ended keys in `archive/<model>`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F

from jobs.lineage.fencing import Fence
from jobs.snapshots.state_rows import StateRows, build_state_rows
from jobs.state.encoding.estimates import EstimateFormat
from jobs.state.encoding.keys import KeyKind, build_key_columns
from jobs.state.encoding.packets import STATE_INDEX, Layout
from jobs.state.encoding.table_columns import find_extra_type
from jobs.storage.tables import latest
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.lineage.generations import Generation
    from jobs.streaming.written_files import FileEstimates


@dataclass
class Latest:
    """The rows of one generation in the table of latest states."""

    fence: Fence
    estimates: EstimateFormat
    scattered: bool = False
    """Whether the rows of a key, including corrections, may be spread over several packets."""

    @property
    def table(self) -> str:
        """Return the name of the table."""
        return latest(self._generation.model)

    @property
    def _generation(self) -> Generation:
        return self.fence.lease.generation

    def begin(self, states: Callable[[], DataFrame]) -> None:
        """Create the table, and insert rows from this generation's states, unless the table has rows of the generation.

        Args:
            states: function that returns the states after the last committed micro-batch, as rows of a snapshot.
        """
        warehouse = self.fence.warehouse
        if not warehouse.exists(self.table):
            fields = self._build_seeds(states()).schema.fields
            columns = ", ".join(f"`{f.name}` {f.dataType.simpleString()}" for f in fields)
            warehouse.create(self.table, columns, partition_by=("generation",))
        self.fence.begin(lambda: self._build_seeds(states()), self.table)

    def write(self, estimated: FileEstimates, batch_id: int) -> None:
        """Replace the rows of a micro-batch's keys by the last rows of these keys. Idempotent."""
        rows = self._last(estimated)
        self.fence.upsert(add_marks(rows, self._generation, batch_id), self.table, batch_id, "key")

    def _last(self, estimated: FileEstimates) -> DataFrame:
        """Return the last row of each key; at equal event times, a correction comes after the estimate."""
        if not self.scattered:
            return estimated.read_last_rows(corrections=False)
        parts = [
            estimated.read_last_rows(again).withColumn("_again", F.lit(again)) for again in (False, True)
        ]
        both = parts[0].unionByName(parts[1])
        newest = F.max_by(
            F.struct(*(name for name in both.columns if name != "_again")), F.struct("event_time", "_again")
        )
        return both.groupBy("key").agg(newest.alias("row")).select("row.*")

    def _build_seeds(self, states: DataFrame) -> DataFrame:
        """Convert the rows of a snapshot to rows of the table; columns that need a measurement are null."""
        fmt = self.estimates
        covariance = F.col("covariance")
        if fmt.diagonal:
            step = fmt.states + 1
            places = F.array(*(F.lit(i * step) for i in range(fmt.states)))
            covariance = F.transform(places, lambda place: F.get(F.col("covariance"), place))
        rows = states.select(
            "key",
            *([] if fmt.kind.is_plain_key else build_key_columns(fmt.kind, F.col("key"))),
            "event_time",
            "mean",
            covariance.alias("covariance"),
            *(F.lit(None).cast("double").alias(name) for name in ("log_likelihood", "nis")),
            F.lit(None).cast("string").alias("flags"),
            *(
                F.col(STATE_INDEX)
                if name == STATE_INDEX
                else F.lit(None).cast(find_extra_type(name)).alias(name)
                for name, _ in fmt.extra
            ),
        )
        return add_marks(rows, self._generation, -1)


def add_marks(rows: DataFrame, generation: Generation, batch_id: int) -> DataFrame:
    """Add the columns `model_version`, `generation` and `batch_id` to rows; columns that already exist are kept."""
    marks = {
        "model_version": F.lit(generation.model_version).cast("int"),
        "generation": F.lit(generation.generation),
        "batch_id": F.lit(batch_id).cast("bigint"),
    }
    return rows.withColumns({name: mark for name, mark in marks.items() if name not in rows.columns})


def build_ended_states(kernel: Filter, layout: Layout, kind: KeyKind) -> Callable[[DataFrame], DataFrame]:
    """Return the function from packets (column `payload`) of ended keys to rows: key, key columns, last state."""

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for payload in batch.column("payload").to_pylist():
                yield from build_state_rows(kernel, layout.decode(payload))

    def rows(packets: DataFrame) -> DataFrame:
        states = StateRows(packets.select("payload"), unpack, kind.integer).frame
        named = [] if kind.is_plain_key else build_key_columns(kind, F.col("key"))
        return states.select("key", *named, *(name for name in states.columns if name != "key"))

    return rows
