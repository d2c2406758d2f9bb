"""Land the source of a spec, which is one or several topics, a Delta table, or made-up rows."""

from __future__ import annotations

from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.landing.sources.landing import land
from jobs.landing.sources.made_up import land_made_up
from jobs.landing.sources.table import open_table_reader
from jobs.landing.sources.topics import open_topics
from jobs.specs.model_spec import ModelSpec


def land_source(settings: Settings, spec: ModelSpec, seconds: float | None, lossy: bool) -> Report:
    """Land the source of a spec.

    Args:
        settings: settings of the command.
        spec: spec of the model.
        seconds: interval in seconds at which landing is repeated until SIGTERM. None means that landing runs once.
        lossy: whether to continue with the present data of the source if the source was recreated, or has lost data
            that had not landed.

    Raises:
        UserError: the spec has no source, another process lands the model, or the source does not continue at the
            landed position.
    """
    source = spec.source
    if source is None:
        raise UserError(
            f"nothing to land for {spec.name}: give --input FILE, or name a source in its spec: "
            f"source: {{kind: kafka, topic: ...}} or {{kind: delta, table: ...}}"
        )
    if source.kind == "delta":
        return land(settings, spec, seconds, lossy, open_table_reader)
    if source.kind == "rate":
        if lossy:
            raise UserError("--accept-loss is for a topic or a table: made-up rows are never lost")
        return land_made_up(settings, spec, seconds)
    return land(settings, spec, seconds, lossy, open_topics)
