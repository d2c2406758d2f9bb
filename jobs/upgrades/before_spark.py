"""What an upgrade can tell before Spark starts: refusals, and the dry runs of modes that read no state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.lineage.generations import origin
from jobs.migration.versions import path_from
from jobs.upgrades.context import (
    BLUE_GREEN,
    REPARTITION,
    RETRAIN,
    STATELESS,
    STOP_START,
    Outcome,
    already_upgraded,
    refuse_other_keys,
    refuse_other_source,
)
from jobs.upgrades.replace import retrain_preview, stateless_preview

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.specs.model_spec import ModelSpec
    from jobs.storage.warehouse import Tables

_PREVIEWS = {RETRAIN: retrain_preview, STATELESS: stateless_preview}


def told_before_spark(
    tables: Tables, spec: ModelSpec, live: Generation, mode: str, dry_run: bool
) -> Outcome | None:
    """Return the outcome of a dry run that needs no Spark; None: go on with Spark.

    Raises:
        UserError: the mode would refuse the version.
    """
    if mode == REPARTITION:
        return None
    done = already_upgraded(spec, live)
    if done is not None:
        return done if dry_run else None  # what an earlier attempt has not completed, the next run completes
    if mode in (BLUE_GREEN, STOP_START):
        path_from(tables, spec, origin(tables, live), spec.version)
        refuse_other_source(tables, spec, live)
    if mode == BLUE_GREEN or (mode == STOP_START and dry_run):
        refuse_other_keys(tables, spec, live, in_shadow=mode == BLUE_GREEN)
    return _PREVIEWS[mode](tables, spec, live) if dry_run and mode in _PREVIEWS else None
