"""Pretrain a model in batch: learn its parameters, filter every key to its latest state, commit a snapshot.

The snapshot's id is made of all that decides its content, so a run that is tried again gives the same snapshot and one
that has been committed is found. Killed at any moment before the manifest is committed, nothing is visible.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from typing import TYPE_CHECKING, Any, cast

from jobs import late_copies, new_keys
from jobs.errors import UserError
from jobs.labels import labelled
from jobs.positions import (
    Cut,
    check_version,
    cut_at,
    delta_position,
    landed_offsets,
    offsets_of,
    parse_time,
    said,
    to_datetime,
    topic_position,
)
from jobs.progress import Progress
from jobs.report import Report, counted
from jobs.settings import Settings
from jobs.spec import ModelSpec, load_spec
from jobs.tables import Warehouse, need_measurements
from jobs.verb_profile import profiled
from kalman.groups import GROUPS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from jobs.inputs_table import Version
    from jobs.learn import Learned, Window
    from jobs.new_keys import Offer
    from jobs.packed_rows import RowFormat
    from jobs.snapshots import Manifest
    from jobs.spec_inputs import Inputs
    from jobs.waiting_table import Held


@profiled
def run(
    settings: Settings,
    model: str,
    to_version: int | None = None,
    as_of: str | None = None,
    learn_from: str | None = None,
    learn_to: str | None = None,
    history: bool = False,
) -> Report:
    """Pretrain a model on its measurements up to a position and commit a snapshot.

    Args:
        settings: of the command.
        model: name or path of its spec.
        to_version: the position, a version of the measurements table; by default the newest.
        as_of: only what happened before this event time; the position is found from it.
        learn_from: learn from rows at or after this event time; by default from the spec's window.
        learn_to: learn from rows before this event time; by default up to the position.
        history: only the history that has landed for new keys, with the parameters that streams run with.

    With `profile` the report says where the time went.

    Raises:
        UserError: no measurements, no such version, nothing to learn from.
    """
    from jobs.learn import Window
    from jobs.session import spark_session
    from jobs.spark_conf import short_rows_conf

    started = time.monotonic()
    spec = load_spec(model, settings.models, deep=True)
    before = None if as_of is None else parse_time(as_of, "--as-of")
    window = Window(
        None if learn_from is None else parse_time(learn_from, "--learn-from"),
        None if learn_to is None else parse_time(learn_to, "--learn-to"),
    )
    if window.first is not None and window.last is not None and window.first >= window.last:
        raise UserError("--learn-from must be before --learn-to")
    if history and (before, window.first, window.last) != (None, None, None):
        raise UserError("--history learns nothing and takes all history: give at most --to-version beside it")
    spark = spark_session(settings, f"pretrain {spec.name}", short_rows_conf())
    warehouse = Warehouse(spark, settings.warehouse)
    table = need_measurements(warehouse, spec.name)
    if history:
        with Progress(f"pretrain {spec.name}", None, quiet=settings.quiet) as progress:
            offers = new_keys.only_history(warehouse, spec, to_version, progress.note)
        return _offered(spec, offers, time.monotonic() - started)
    latest = check_version(warehouse, table, to_version)
    cut = Cut(latest, None) if before is None else cut_at(warehouse, table, latest, before)
    with Progress(f"pretrain {spec.name}", None, quiet=settings.quiet) as progress:
        manifest, learned, made = snapshot_at(warehouse, spec, table, cut, window, progress)
        offers = []
        if spec.stream.new_keys == new_keys.PRETRAINED and cut.before is None:
            offers = new_keys.offer(warehouse, spec, table, cut.version, progress.note)
    return _report(spec, manifest, learned, made, offers, time.monotonic() - started)


def snapshot_at(
    warehouse: Warehouse, spec: ModelSpec, table: str, cut: Cut, window: Window, progress: Progress
) -> tuple[Manifest, Learned | None, bool]:
    """Return the snapshot of a model at a cut, what was learned for it now, and if it was made now."""
    from pyspark.sql import functions as F

    import kalman
    from jobs.history import Batch, bucket_rows, final_states
    from jobs.ids_table import of_rows
    from jobs.inputs_table import InputsTable
    from jobs.key_groups import group_begin
    from jobs.keys import key_kind
    from jobs.learn import each_key_learner, learn_pooled
    from jobs.model_functions import ship
    from jobs.packed_rows import row_format
    from jobs.snapshots import Manifest, find_whole, write
    from jobs.timed_start import timing_of

    rows = late_copies.without(warehouse, warehouse.read(table, cut.version))
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
        held = held._replace(ids=of_rows(packed, fmt, timing_of(spec, fmt).reach(held.watermark)))
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
    from pyspark.sql import functions as F

    from jobs.waiting_rows import NEVER
    from jobs.waiting_table import Held, of_measurements

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
    from pyspark.sql import functions as F

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
    from pyspark.sql import functions as F

    from jobs.learn import Window

    if spec.learn is None or spec.learn.window_us is None or window.first is not None:
        return window
    end = window.last
    if end is None:
        row = frame.agg(F.max(F.unix_micros(F.col(f"`{spec.time}`")))).first()
        end = None if row is None else row[0]
    return window if end is None else Window(end - spec.learn.window_us, window.last)


def _offered(spec: ModelSpec, offers: list[Offer], seconds: float) -> Report:
    return Report(
        [*new_keys.lines(offers), f"{seconds:.1f} s"],
        {
            "model": spec.name,
            "model_version": spec.version,
            "snapshots": [one.manifest.snapshot_id for one in offers],
            "keys": sum(one.manifest.key_count for one in offers),
            "rows": sum(one.manifest.rows for one in offers),
            "keys_offered": sum(one.keys for one in offers),
            "seconds": seconds,
        },
    )


def _report(
    spec: ModelSpec,
    manifest: Manifest,
    learned: Learned | None,
    made: bool,
    offers: list[Offer],
    seconds: float,
) -> Report:
    place = said(manifest.position)
    if manifest.cut is not None:
        place += f", before {manifest.cut:%Y-%m-%d %H:%M} UTC (history only: a stream cannot start from it)"
    lines = [
        f"snapshot {manifest.snapshot_id}: {counted(manifest.key_count, 'key')}, "
        f"{counted(manifest.rows, 'row')}, {place}"
    ]
    waiting = 0 if manifest.waiting is None else int(manifest.waiting["rows"])
    if waiting:
        lines.append(f"waiting for the watermark: {counted(waiting, 'row')}")
    if learned is not None:
        values = ", ".join(
            f"{name} = {json.dumps(_rounded(value, 6))}" + _error(learned, name)
            for name, value in learned.parameters.items()
            if name != GROUPS
        )
        end = "converged" if learned.converged else "stopped before it converged"
        lines.append(f"learned {values} from {learned.rows:,} rows ({learned.iterations} iterations, {end})")
        if learned.groups is not None:
            ended = f"{int(learned.groups.result.converged.sum()):,} converged"
            lines.append(
                f"and for each of {len(learned.groups.values):,} groups of {', '.join(learned.groups.by)} ({ended})"
            )
        if learned.held_out is not None:
            lines.append(f"log-likelihood of rows kept aside: {learned.held_out:.4f} a row")
    inputs = manifest.inputs
    if inputs is not None:
        lines.append(f"inputs of {inputs['table']} version {inputs['version']}")
        if inputs["left_out"]:
            lines.append(
                f"left out {inputs['left_out']:,} rows whose keys are not in it: they stay among the measurements, and "
                f"are in the next snapshot once their keys are in the table"
            )
    if not made:
        lines.append("it had been committed before: the same inputs give the same snapshot")
    lines += new_keys.lines(offers)
    lines.append(f"{seconds:.1f} s")
    return Report(
        lines,
        {
            "model": spec.name,
            "model_version": spec.version,
            "made": made,
            "keys_offered": sum(one.keys for one in offers),
            "snapshot": manifest.snapshot_id,
            "keys": manifest.key_count,
            "rows": manifest.rows,
            "waiting": waiting,
            "version": manifest.version,
            "cut": manifest.cut,
            "inputs": inputs,
            "parameters": manifest.parameters,
            "standard_errors": None
            if learned is None or learned.errors is None
            else _rounded(learned.errors, 17),
            "log_likelihood": None if learned is None else learned.log_likelihood,
            "converged": None if learned is None else learned.converged,
            "held_out": None if learned is None else learned.held_out,
            "seconds": seconds,
        },
    )


def _error(learned: Learned, name: str) -> str:
    """Return what to write behind a parameter of its standard error."""
    if learned.errors is None or name not in learned.errors:
        return ""
    return f" (standard error {json.dumps(_rounded(learned.errors[name], 3))})"


def _rounded(value: Any, digits: int) -> Any:
    """Return numbers with so many digits, and None for those that are not known."""
    if isinstance(value, dict):
        return {name: _rounded(item, digits) for name, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_rounded(item, digits) for item in cast(list[Any], value)]
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


if __name__ == "__main__":
    from jobs.cli import main

    main("pretrain")
