"""Where a stream with a watermark begins: at its snapshot's watermark, with the rows and ids that it held there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs import ids_table, waiting_table
from jobs.packed_rows import RowFormat
from jobs.remembered_ids import ids_format
from jobs.routing import Routing
from jobs.snapshots import Manifest
from jobs.spec import ModelSpec
from jobs.tables import Warehouse
from jobs.timed_processor import STATES
from jobs.timing import Timing
from jobs.waiting_rows import NEVER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def timing_of(spec: ModelSpec, fmt: RowFormat, manifest: Manifest | None = None) -> Timing:
    """Return what the operator of a model's stream, begun from a snapshot, knows of time."""
    waits = (None if manifest is None else manifest.waiting) or {}
    began, newest = waits.get("watermark"), waits.get("newest")
    return Timing(
        spec.order.delay_us,
        waiting_table.row_format_of(spec, fmt),
        NEVER if began is None else began,
        spec.order.waits,
        spec.duplicates is not None and spec.duplicates.action == "drop",
        None if spec.expiry is None else spec.expiry.after_us,
        spec.expiry is not None and spec.expiry.returns == "archive",
        spec.order.rows or 0,
        spec.expiry is not None and spec.expiry.clock == "processing",
        spec.order.patience_us,
        NEVER if newest is None else newest,
        ids_format(spec, fmt),
    )


def timed_seeds(
    warehouse: Warehouse, manifest: Manifest, states: DataFrame, fmt: RowFormat, routing: Routing
) -> DataFrame:
    """Return the initial state of a timed operator: packets of states, and of the snapshot's waiting rows and ids."""
    from pyspark.sql import functions as F

    seeds = states.select("bucket", F.lit(STATES).alias("kind"), "payload")
    held = waiting_table.verified(warehouse, manifest)
    if held is None:
        return seeds
    seeds = seeds.unionByName(waiting_table.packets(held.rows, fmt, routing))
    return seeds if held.ids is None else seeds.unionByName(ids_table.packets(held.ids, fmt, routing))
