"""Read the end of a segment: its states, the rows that wait for the watermark, and the watermark.

Spark stores the state of the last 100 micro-batches, and a fast stream runs more than 100 before a verification has
ended. So a run copies the live generation's state of the sampled keys at its start, and removes the copy at its end.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F

from jobs.lineage import generations
from jobs.lineage.generations import DeployedModel, read_origin_manifest
from jobs.snapshots import manifests
from jobs.snapshots.model_runtime import ModelRuntime
from jobs.spark.warehouse import Warehouse
from jobs.state.encoding.packets import NEVER
from jobs.storage.row_changes import delete_rows
from jobs.storage.tables import VERIFIED_ENDS
from jobs.streaming.exporting import read_states, read_waiting
from jobs.verification import gathering
from jobs.verification.chain import STATE, Segment
from jobs.verification.gathering import CannotVerify, KeySample
from jobs.verification.recomputing import Kind
from jobs.verification.runs import CONTINUED_FOR

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.waiting_rows import Held

TABLE = "verified_ends"


class End(NamedTuple):
    """The states and waiting rows at the end of a segment, in the checker's columns, and the watermark.

    waiting: the number of waiting rows of all keys.
    """

    rows: DataFrame
    waiting: int
    watermark: int


def copy_state(
    model: DeployedModel[Warehouse], segment: Segment, sample: KeySample, run_id: str
) -> dict[str, int]:
    """Copy the sampled states and waiting rows at the live generation's pinned micro-batch.

    Returns the number of waiting rows of all keys, and the watermark.
    """
    warehouse = model.warehouse
    generation = generations.read_named(warehouse, model.name, segment.generation)
    begun = read_origin_manifest(warehouse, generation)
    own = begun.model_spec(model.spec.folder)
    runtime = ModelRuntime.of(warehouse, own, begun.parameters)
    batch = segment.last_batch
    rows = gathering.convert_states(Kind.END, read_states(model, generation, begun, batch).frame, runtime)
    held = read_waiting(model, generation, begun, batch) if own.timed else None
    if held is not None:
        rows = rows.unionByName(gathering.convert_waiting_rows(Kind.WAITING, held.rows))
    columns = {
        "run_id": F.lit(run_id),
        "model": F.lit(model.name),
        "copied_at": F.current_timestamp(),
    }
    warehouse.create(TABLE, VERIFIED_ENDS)
    forget(model, None)
    warehouse.append(rows.filter(sample.has(F.col("key"))).withColumns(columns), TABLE)
    return {"waiting": _count(held), "watermark": NEVER if held is None else held.watermark}


def forget(model: DeployedModel[Warehouse], run_id: str | None) -> None:
    """Remove the copies of a finished run or, for None, of all runs that are too old to be continued."""
    old = ("copied_at", "<", datetime.now(UTC) - CONTINUED_FOR)
    of_run = old if run_id is None else ("run_id", "=", run_id)
    delete_rows(model.warehouse, TABLE, [[("model", "=", model.name), of_run]])


def end_of(
    warehouse: Warehouse, runtime: ModelRuntime, segment: Segment, run_id: str, copied: dict[str, Any] | None
) -> End | None:
    """Return the end of a segment; None if its states are not stored.

    copied: the result of `copy_state` in this run.

    Raises:
        CannotVerify: the states were removed, or the waiting rows are needed and unknown.
    """
    if segment.end == STATE:
        assert copied is not None
        rows = warehouse.read(TABLE).filter(F.col("run_id") == run_id)
        return End(rows.drop("run_id", "model", "copied_at"), copied["waiting"], copied["watermark"])
    if segment.end is None:
        if runtime.spec.order.waits:
            raise CannotVerify(f"{segment.generation}: which rows waited at its end was not exported")
        return None
    exported = manifests.find(warehouse, segment.end)
    if exported is None:
        raise CannotVerify(f"{segment.generation}: snapshot {segment.end}, its end, was removed")
    rows = gathering.convert_states(Kind.END, gathering.read_states(warehouse, exported), runtime)
    held = gathering.read_waiting_rows(warehouse, exported) if runtime.spec.timed else None
    if held is not None:
        rows = rows.unionByName(gathering.convert_waiting_rows(Kind.WAITING, held.rows))
    return End(rows, _count(held), NEVER if held is None else held.watermark)


def _count(held: Held | None) -> int:
    return 0 if held is None else held.rows.count()
