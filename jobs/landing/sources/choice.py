"""Land the source that a spec names: a topic, several, a Delta table, or made-up rows."""

from __future__ import annotations

from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.landing.sources import made_up, one_topic, several_topics, table
from jobs.specs.model_spec import ModelSpec


def land_source(settings: Settings, spec: ModelSpec, seconds: float | None, lossy: bool) -> Report:
    """Land the source of a spec, until SIGTERM if `seconds` is given.

    lossy: continue with what the source has now, where it has lost what has not landed, or was made anew.

    Raises:
        UserError: the spec names no source, another process lands it, or it does not continue where it has landed.
    """
    source = spec.source
    if source is None:
        raise UserError(
            f"nothing to land for {spec.name}: give --input FILE, or name a source in its spec: "
            f"source: {{kind: kafka, topic: ...}} or {{kind: delta, table: ...}}"
        )
    if source.kind == "delta":
        return table.land_table(settings, spec, seconds, lossy)
    if source.kind == "rate":
        if lossy:
            raise UserError("--accept-loss is for a topic or a table: made-up rows are never lost")
        return made_up.land_made_up(settings, spec, seconds)
    if source.streamed:
        return one_topic.land_topic(settings, spec, seconds, lossy)
    return several_topics.land_topics(settings, spec, seconds, lossy)
