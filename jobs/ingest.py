"""Land files in the measurements table: rows that fit are appended, all others go to quarantine with the reason.

A file is known by its content. Its rows and its quarantined rows are one commit each, in the file's own transaction:
landing it again, or again after a run that was killed in between, changes nothing and completes what was missing.
"""

from __future__ import annotations

import time
from typing import Annotated

from typer import Option

from jobs import ingest
from jobs.core.command import Model, command
from jobs.core.errors import UserError
from jobs.core.progress import Progress
from jobs.core.report import Report, plural
from jobs.core.settings import Settings
from jobs.core.times import AVAILABLE_NOW, trigger_seconds
from jobs.ingestion import folder_watch
from jobs.ingestion.landing import SMALL_BYTES, Landed, file_schema, file_size, find_files, land, prepare
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec
from jobs.specs.sections import PRETRAINED
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import measurements


@command
def run(
    settings: Settings,
    model: Model,
    input: Annotated[
        list[str] | None,
        Option(
            help="A file, a folder or a glob; may be repeated. Without any: the topic of the spec.",
            show_default=False,
        ),
    ] = None,
    trigger: Annotated[
        str, Option(help="available-now, or a number: look again every so many seconds, until stopped.")
    ] = AVAILABLE_NOW,
    history: Annotated[
        bool,
        Option(
            "--history",
            help="Treat the files as history of new keys: pretrain uses them, and hands the resulting states to "
            "running streams.",
        ),
    ] = False,
) -> Report:
    """Land files, or a topic, in the model's measurements table; rows that do not fit go to quarantine.

    Raises:
        UserError: a file cannot be read or lacks a column; nothing has been landed then.
    """
    from jobs.spark.conf import short_command_conf
    from jobs.spark.session import spark_session

    spec = load_spec(model, settings.models)
    seconds = trigger_seconds(trigger)
    if history and (not input or seconds is not None):
        raise UserError("--history lands files once: give --input, and no --trigger")
    if not input:
        return ingest.land_topic(settings, spec, seconds)
    if seconds is not None:
        return folder_watch.run(settings, spec, input, seconds)
    files = find_files(input)
    schemas = [file_schema(spec, path) for path in files]
    small = sum(file_size(path) for path in files) < SMALL_BYTES
    spark = spark_session(settings, f"ingest {spec.name}", short_command_conf() if small else None)
    warehouse = Warehouse(spark, settings.warehouse)
    key_types = prepare(warehouse, spec, schemas[0])
    landed: list[Landed] = []
    with Progress(f"ingest {spec.name}", len(files), quiet=settings.quiet) as progress:
        for path in files:
            landed.append(land(warehouse, spec, path, key_types, history))
            progress.advance(1, f"{sum(one.rows for one in landed):,} rows")
    return _report(spec, landed, history)


def _report(spec: ModelSpec, landed: list[Landed], history: bool) -> Report:
    new = [one for one in landed if one.version is not None]
    rows = sum(one.rows for one in new)
    reasons: dict[str, int] = {}
    for one in landed:
        for reason, count in one.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    quarantined = sum(reasons.values())
    before = sum(1 for one in landed if one.version is None and one.rows)
    what = " of history" if history else ""
    lines = [f"landed {plural(rows, 'row')}{what} of {plural(len(new), 'file')} for {spec.name}"]
    if before:
        lines.append(f"{plural(before, 'file')} had been landed before and changed nothing")
    if quarantined:
        lines.append(
            f"quarantined {plural(quarantined, 'row')}: "
            + "; ".join(f"{n:,} {r}" for r, n in sorted(reasons.items()))
        )
    if history and spec.stream.new_keys != PRETRAINED:
        lines.append(
            f"note: the streams of {spec.name} take them like any rows, unless its spec says "
            f"stream.new_keys: {PRETRAINED}"
        )
    versions = [one.version for one in new if one.version is not None]
    if versions:
        lines.append(f"the measurements table is at version {versions[-1]}")
    return Report(
        lines,
        {
            "model": spec.name,
            "files": len(landed),
            "files_landed": len(new),
            "files_landed_before": before,
            "rows": rows,
            "quarantined": quarantined,
            "reasons": reasons,
            "version": versions[-1] if versions else None,
        },
    )


def land_topic(settings: Settings, spec: ModelSpec, seconds: float | None) -> Report:
    """Land the topic of a model's spec.

    Raises:
        UserError: the spec names no topic, messages are gone, another process lands it, or the brokers do not answer.
    """
    from jobs.core.signals import stop_signal
    from jobs.ingestion import topics
    from jobs.lineage.leases import stream_lock
    from jobs.spark.conf import interpreted_conf
    from jobs.spark.session import spark_session
    from jobs.warehouse.delta import Warehouse

    if spec.source is None:
        raise UserError(
            f"what to land for {spec.name}? Give --input FILE, or name a topic in its spec: "
            f"source: {{kind: kafka, topic: ...}}"
        )
    began = time.monotonic()
    title = f"ingest {spec.name}"
    with stream_lock(settings.warehouse, title.replace(" ", "-")), stop_signal() as stop:
        warehouse = Warehouse(
            spark_session(settings, title, interpreted_conf(), kafka=True), settings.warehouse
        )
        with Progress(title, None, quiet=settings.quiet) as progress:
            landing = topics.land(
                warehouse, spec, seconds, stop, lambda now: progress.advance(1, f"{now.rows:,} rows")
            )
        table = measurements(spec.name)
        version = warehouse.latest_version(table)
        offsets = topics.landed_offsets(warehouse, table, spec.source.topic) or {}
    quarantined = sum(landing.reasons.values())
    where = ", ".join(f"{number}:{offset}" for number, offset in sorted(offsets.items()))
    lines = [
        f"landed {plural(landing.rows, 'message')} of topic {spec.source.topic} for {spec.name}, up to {where}"
    ]
    if quarantined:
        told = "; ".join(f"{count:,} {reason}" for reason, count in sorted(landing.reasons.items()))
        lines.append(f"quarantined {plural(quarantined, 'message')}: {told}")
    lines.append(f"the measurements table is at version {version}")
    return Report(
        lines,
        {
            "model": spec.name,
            "topic": spec.source.topic,
            "rows": landing.rows,
            "quarantined": quarantined,
            "reasons": dict(sorted(landing.reasons.items())),
            "batches": landing.batches,
            "offsets": {str(number): offset for number, offset in sorted(offsets.items())},
            "version": version,
            "seconds": time.monotonic() - began,
        },
    )


if __name__ == "__main__":
    run.main()
