"""Filter history up to a cut and commit the snapshot."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

import kalman
from jobs.core.progress import Progress
from jobs.encoding.keys import key_kind
from jobs.encoding.packet_kinds import NEVER
from jobs.encoding.rows import row_format
from jobs.key_inputs.table import InputsTable
from jobs.lineage import replayed_late_rows
from jobs.snapshots.manifests import Manifest
from jobs.snapshots.row_ids import of_rows
from jobs.snapshots.seeds import event_time_policy
from jobs.snapshots.store import find_whole, write
from jobs.snapshots.waiting_rows import Held, of_measurements
from jobs.spark.job_labels import labelled
from jobs.spark.user_functions import ship
from jobs.specs.model_spec import ModelSpec
from jobs.state.key_groups import group_begin
from jobs.training.batch_filter import Batch, bucket_rows, final_states
from jobs.training.learning import Window, each_key_learner, learn_pooled
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.positions import (
    Cut,
    delta_position,
    landed_offsets,
    offsets_of,
    to_datetime,
    topic_position,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from jobs.encoding.rows import RowFormat
    from jobs.key_inputs.table import Version
    from jobs.specs.key_inputs import Inputs
    from jobs.training.learning import Learned


def snapshot_at(
    warehouse: Warehouse, spec: ModelSpec, table: str, cut: Cut, window: Window, progress: Progress
) -> tuple[Manifest, Learned | None, bool]:
    """Return the snapshot of a model at a cut, what was learned for it now, and if it was made now."""

    rows = replayed_late_rows.without(warehouse, warehouse.read(table, cut.version))
    if cut.place is not None:
        rows = rows.filter(_before(cut.place))
    frame = rows.select(*spec.columns)
    if cut.before is not None:
        frame = frame.filter(F.unix_micros(F.col(f"`{spec.time}`")) < cut.before)
    window = _window(spec, frame, window)
    inputs = None if spec.inputs is None else InputsTable(warehouse, spec)
    version = None if inputs is None else inputs.newest()
    identity = snapshot_id(spec, table, cut, window, version)
    found = find_whole(warehouse, identity)
    if found is not None:
        return found, None, False
    kind = key_kind(spec.key, frame.schema)
    fmt = row_format(spec, kind, frame.schema).joined
    landed = frame.count() if inputs is not None else 0
    if inputs is not None and version is not None:
        inputs.load(kind, version.version)  # raises now where the table is not as it should be
        frame = inputs.joined(frame, kind, version.version).dropna(subset=spec.input_names)
    spark, doing = warehouse.spark, f"pretrain {spec.name}"
    with labelled(spark, doing, "count the rows"):
        count = frame.count()
    progress.note(f"{count:,} rows")
    batch = Batch(fmt, spec.unit_us, spec.idle_us)
    held = None
    if spec.timed and cut.before is None:
        frame, held = _held(spec, frame, fmt)
    packed = bucket_rows(frame, fmt, count).persist()
    if held is not None and fmt.row_id is not None:
        held = held._replace(
            ids=of_rows(packed, fmt, event_time_policy(spec, fmt).late_before(held.watermark))
        )
    try:
        learned = None
        if spec.learn is not None and count:
            with labelled(spark, doing, "learn"):
                some = spec.learn.sample_keys is not None
                keys = frame.select(*spec.key).distinct().count() if some else None
                learned = learn_pooled(
                    packed, spec.definition(), spec.learn, batch, window, keys, progress.note
                )
        parameters: dict[str, Any] = {} if learned is None else learned.parameters
        progress.note(f"filtering {count:,} rows")
        kernel = kalman.build(spec.definition(), parameters)
        kernel.initial(1)  # raises now where a key would begin with what has not been learned
        ship(warehouse.spark, spec.definition())
        manifest = Manifest(
            snapshot_id=identity,
            model=spec.name,
            model_version=spec.version,
            fingerprint=spec.fingerprint(),
            parameters=parameters,
            position=cut.place or position_at(warehouse, spec, table, cut.version),
            cut=to_datetime(cut.before),
            learn_from=None if spec.learn is None else to_datetime(window.first),
            learn_to=None if spec.learn is None else to_datetime(window.last),
            key_count=0,
            checksum="",
            rows=0,
            snapshots_version=0,
            spec=spec.model_dump_json(by_alias=True),
            inputs=None if version is None else {**version._asdict(), "left_out": landed - count},
        )
        begin = group_begin(fmt.kind, spec.definition(), parameters)
        if spec.learn is not None and spec.learn.scope == "key" and learned is not None:
            begin = each_key_learner(spec.definition(), kernel, window, learned.theta, spec.unit_us)
        states = final_states(packed, kernel, batch, begin)
        with labelled(spark, doing, "filter and write the snapshot"):
            return write(warehouse, manifest, states, held), learned, True
    finally:
        packed.unpersist()


def _held(spec: ModelSpec, frame: DataFrame, fmt: RowFormat) -> tuple[DataFrame, Held]:
    """Return the rows that a snapshot of all these reflects, and those that wait for the watermark, if rows wait.

    The same rows would wait in the stream: a row that comes behind the snapshot finds its place among them.
    """

    at = F.unix_micros(F.col(f"`{spec.time}`"))
    row = frame.agg(F.max(at)).first()
    newest = NEVER if row is None or row[0] is None else int(row[0])
    watermark = NEVER if newest == NEVER else newest - spec.order.delay_us
    if not spec.order.waits:
        return frame, Held(of_measurements(frame.limit(0), fmt), watermark, newest)
    return frame.filter(at < watermark), Held(
        of_measurements(frame.filter(at >= watermark), fmt), watermark, newest
    )


def position_at(warehouse: Warehouse, spec: ModelSpec, table: str, version: int) -> dict[str, Any]:
    """Return the position in the model's source whose rows are the measurements up to a version."""
    if spec.source is None:
        return delta_position(table, version, warehouse.table_id(table))
    topic = spec.source.topic
    return topic_position(topic, landed_offsets(warehouse, table, topic, version) or {}, version)


def _before(place: dict[str, Any]) -> Column:
    """Return the condition of rows that did not come from behind a place in a topic."""
    behind = F.lit(False)
    for number, offset in offsets_of(place).items():
        behind = behind | ((F.col("_partition") == number) & (F.col("_offset") < offset))
    return F.col("_partition").isNull() | behind


def snapshot_id(spec: ModelSpec, table: str, cut: Cut, window: Window, version: Version | None = None) -> str:
    """Return the id of the snapshot that these inputs give."""
    inputs = {
        "fingerprint": spec.fingerprint(),
        "learn": spec.learn and spec.learn.model_dump(exclude=spec.learn.left_out),
        "table": table,
        "version": cut.version,
        "before": cut.before,
        **({} if cut.place is None else {"place": cut.place}),
        "window": [window.first, window.last] if spec.learn else None,
        **({} if spec.inputs is None or version is None else _inputs_of(spec.inputs, version)),
    }
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return f"{spec.name}-v{spec.version}-{cut.version}-{digest[:10]}"


def _inputs_of(inputs: Inputs, version: Version) -> dict[str, Any]:
    """Return what decides the inputs that rows have."""
    return {"inputs": inputs.model_dump(), "inputs_version": version._asdict()}


def _window(spec: ModelSpec, frame: DataFrame, window: Window) -> Window:
    """Fill in the window's start from the spec: so long before its end, or before the last row."""

    if spec.learn is None or spec.learn.window_us is None or window.first is not None:
        return window
    end = window.last
    if end is None:
        row = frame.agg(F.max(F.unix_micros(F.col(f"`{spec.time}`")))).first()
        end = None if row is None else row[0]
    return window if end is None else Window(end - spec.learn.window_us, window.last)
