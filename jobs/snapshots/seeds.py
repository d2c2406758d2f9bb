"""Where a stream with a watermark begins: at its snapshot's watermark, with the rows and ids that it held there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from jobs.encoding.packet_kinds import NEVER, RowPacket
from jobs.encoding.routing import Routing
from jobs.encoding.rows import RowFormat
from jobs.snapshots import row_ids, waiting_rows
from jobs.snapshots.manifests import Manifest
from jobs.snapshots.state_rows import seed_packets
from jobs.specs.model_spec import ModelSpec
from jobs.specs.sections import PRETRAINED
from jobs.state.event_time_policy import EventTimePolicy
from jobs.state.reorder_buffer import row_format_of
from jobs.state.row_ids import ids_format
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.measurements_table import create_new_keys_table, new_keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.encoding.keys import KeyKind
    from jobs.encoding.packets import Layout
    from jobs.warehouse.checkpoints import Checkpoint
    from kalman.types import Filter


def event_time_policy(spec: ModelSpec, fmt: RowFormat, manifest: Manifest | None = None) -> EventTimePolicy:
    """Return what the operator of a model's stream, begun from a snapshot, knows of time."""
    waits = (None if manifest is None else manifest.waiting) or {}
    began, newest = waits.get("watermark"), waits.get("newest")
    expiry, duplicates = spec.expiry, spec.duplicates
    return EventTimePolicy(
        delay=spec.order.delay_us,
        row_format=row_format_of(spec, fmt),
        watermark=NEVER if began is None else began,
        max_event_time=NEVER if newest is None else newest,
        waits=spec.order.waits,
        drop_duplicates=duplicates is not None and duplicates.action == "drop",
        idle=None if expiry is None else expiry.after_us,
        archive=expiry is not None and expiry.returns == "archive",
        replay_length=spec.order.rows or 0,
        processing_time=expiry is not None and expiry.clock == "processing",
        patience=spec.order.patience_us,
        id_format=ids_format(spec, fmt),
    )


def event_time_seeds(
    warehouse: Warehouse, manifest: Manifest, states: DataFrame, fmt: RowFormat, routing: Routing
) -> DataFrame:
    """Return the initial state of a timed operator: packets of states, and of the snapshot's waiting rows and ids."""
    seeds = states.select("bucket", F.lit(RowPacket.STATES.value).alias("kind"), "payload")
    held = waiting_rows.verified(warehouse, manifest)
    if held is None:
        return seeds
    seeds = seeds.unionByName(waiting_rows.packets(held.rows, fmt, routing))
    return seeds if held.ids is None else seeds.unionByName(row_ids.packets(held.ids, fmt, routing))


def meaning_of(fingerprint: str, parameters: Mapping[str, Any]) -> str:
    """Return what tells states of one meaning from others: those of this model, under these parameters."""
    text = json.dumps([fingerprint, dict(parameters)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def taken_by(warehouse: Warehouse, checkpoint: Checkpoint, spec: ModelSpec) -> bool:
    """Tell if a generation takes new keys: as its spec says when it begins, and then for its life.

    Spark's checkpoint holds an offset for each source, so it cannot be given another one later. Where an earlier
    generation took keys, those after it do, whatever their spec says: their state may come from that one and reflect
    marked rows behind its position, which they would count again if they read them.
    """
    sources = checkpoint.sources()
    if sources is not None:
        return sources > 1
    return spec.stream.new_keys == PRETRAINED or warehouse.exists(new_keys(spec.name))


def offered(
    warehouse: Warehouse,
    spec: ModelSpec,
    parameters: Mapping[str, Any],
    kernel: Filter,
    kind: KeyKind,
    layout: Layout,
    routing: Routing,
) -> DataFrame:
    """Return the states that are offered to a stream with these parameters, as packets that it takes in."""

    table = create_new_keys_table(warehouse, spec.name)
    # All that there are at once: a key is to be known before its first row comes.
    reader = warehouse.spark.readStream.format("delta").option("maxFilesPerTrigger", 1_000_000)
    rows = reader.load(warehouse.path(table))
    mine = rows.filter(F.col("meaning") == meaning_of(spec.fingerprint(), parameters))
    packets = seed_packets(mine, kernel, kind, layout, routing)
    return packets.select("bucket", F.lit(RowPacket.STATES.value).alias("kind"), "payload")
