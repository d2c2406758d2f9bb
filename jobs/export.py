"""Export a stream's state to a snapshot, at the end of one of its micro-batches, without disturbing it.

The state of a committed micro-batch is read from the checkpoint by Spark's state reader, so the stream may run on
meanwhile, in this process or another. The snapshot's position is the micro-batch's own end, and its form that of a
pretrained one. The same micro-batch gives the same snapshot; killed half way, nothing is visible.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from jobs.core.errors import ALREADY_RUNNING, UserError
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.observability.verb_profile import VerbProfiler
from jobs.specs.loading import load_spec
from jobs.streaming.exporting import export
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.positions import said

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest


def run(
    settings: Settings,
    model: str,
    generation: str | None = None,
    batch: int | None = None,
    needed: bool = False,
    profile: bool = False,
) -> Report:
    """Export the state of a model's stream.

    Args:
        settings: of the command.
        model: name or path of its spec.
        generation: by default the live one.
        batch: a committed micro-batch whose state is still kept; by default the last.
        needed: end with exit code 3 where no generation is live.
        profile: report where the time went.

    Raises:
        UserError: no such generation or micro-batch, or one that ends within a version of the measurements.
    """
    from jobs.lineage.generations import live, named
    from jobs.spark.conf import short_command_conf
    from jobs.spark.session import spark_session

    started, profiler = time.monotonic(), VerbProfiler(profile)
    name = load_spec(model, settings.models).name
    spark = spark_session(settings, f"export {name}", short_command_conf())
    warehouse = Warehouse(spark, settings.warehouse)
    if needed and generation is None and live(warehouse, name) is None:
        raise UserError(f"model {name} has no live generation", ALREADY_RUNNING)
    with Progress(f"export {name}", None, quiet=settings.quiet) as progress:
        manifest, made = export(warehouse, named(warehouse, name, generation), batch, progress.note)
    return profiler.added_to(_report(manifest, made, time.monotonic() - started))


def _report(manifest: Manifest, made: bool, seconds: float) -> Report:
    where = said(manifest.position)
    if manifest.generation is not None:
        where += f", the end of micro-batch {manifest.batch_id} of {manifest.generation}"
    lines = [f"snapshot {manifest.snapshot_id}: {manifest.key_count:,} keys, {manifest.rows:,} rows, {where}"]
    if not made:
        lines.append("it had been committed before")
    lines.append(f"{seconds:.1f} s")
    return Report(
        lines,
        {
            "model": manifest.model,
            "model_version": manifest.model_version,
            "made": made,
            "snapshot": manifest.snapshot_id,
            "generation": manifest.generation,
            "batch": manifest.batch_id,
            "keys": manifest.key_count,
            "rows": manifest.rows,
            "version": manifest.version,
            "position": manifest.position,
            "seconds": seconds,
        },
    )


if __name__ == "__main__":
    from jobs.cli import main

    main("export")
