"""`ingest` for a model whose measurements come from a Kafka topic: land what is there, or keep landing."""

from __future__ import annotations

import time

from jobs.errors import UserError
from jobs.progress import Progress
from jobs.report import Report, counted
from jobs.settings import Settings
from jobs.spec import ModelSpec


def run(settings: Settings, spec: ModelSpec, seconds: float | None) -> Report:
    """Land the topic of a model's spec.

    Raises:
        UserError: the spec names no topic, messages are gone, another process lands it, or the brokers do not answer.
    """
    from jobs import topics
    from jobs.leases import stream_lock
    from jobs.session import spark_session
    from jobs.spark_conf import interpreted_conf
    from jobs.stream import stop_signal
    from jobs.tables import Warehouse, measurements

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
        f"landed {counted(landing.rows, 'message')} of topic {spec.source.topic} for {spec.name}, up to {where}"
    ]
    if quarantined:
        told = "; ".join(f"{count:,} {reason}" for reason, count in sorted(landing.reasons.items()))
        lines.append(f"quarantined {counted(quarantined, 'message')}: {told}")
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
