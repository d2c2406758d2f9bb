"""Migrate a snapshot of one version of a model to a snapshot of another, checked before anybody can use it.

The new snapshot has the old one's position. The same inputs give the same snapshot; killed half way, nothing is
visible.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.migration.apply import rekeyed_lines, table_of
from jobs.migration.migrating import migrate, source_snapshot
from jobs.observability.verb_profile import VerbProfiler
from jobs.warehouse.delta import Warehouse

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest


def run(
    settings: Settings,
    model: str,
    snapshot: str | None = None,
    to: int | None = None,
    dry_run: bool = False,
    profile: bool = False,
) -> Report:
    """Migrate a snapshot to another version of its model.

    Args:
        settings: of the command.
        model: name or path of its spec.
        snapshot: which; by default the newest of an earlier version that a stream could start from.
        to: the version; by default that of the spec.
        dry_run: report what would become of the states, and write nothing.
        profile: report where the time went.

    Raises:
        UserError: no such snapshot or version, no way between the versions, or keys that would come out wrong.
    """
    from jobs.migration.versions import known_versions
    from jobs.spark.conf import short_command_conf
    from jobs.spark.session import spark_session
    from jobs.specs.loading import load_spec

    started, profiler = time.monotonic(), VerbProfiler(profile)
    spec = load_spec(model, settings.models, deep=True)
    spark = spark_session(settings, f"migrate {spec.name}", short_command_conf())
    warehouse = Warehouse(spark, settings.warehouse)
    target = spec.version if to is None else to
    with Progress(f"migrate {spec.name}", None, quiet=settings.quiet) as progress:
        source = source_snapshot(warehouse, spec.name, snapshot, target)
        known = known_versions(warehouse, spec)
        manifest, change, made = migrate(warehouse, source, known, target, dry_run, progress.note)
    return profiler.added_to(_report(source, manifest, target, change, made, time.monotonic() - started))


def _report(
    source: Manifest,
    manifest: Manifest | None,
    target: int,
    change: dict[str, Any],
    made: bool,
    seconds: float,
) -> Report:
    lines = [f"{source.snapshot_id} (version {source.model_version}) to version {target}"]
    if change:
        lines += [f"  {line}" for line in table_of(change)]
        lines += rekeyed_lines(change)
    if manifest is None:
        lines.append("dry run: nothing was written")
    else:
        lines.append(
            f"snapshot {manifest.snapshot_id}: {manifest.key_count:,} keys, "
            f"parameters {json.dumps(manifest.parameters)}"
        )
        if not made:
            lines.append("it had been committed before: the same inputs give the same snapshot")
    lines.append(f"{seconds:.1f} s")
    return Report(
        lines,
        {
            "model": source.model,
            "from": source.model_version,
            "to": target,
            "source": source.snapshot_id,
            "snapshot": None if manifest is None else manifest.snapshot_id,
            "made": made,
            "dry_run": manifest is None,
            "change": change,
            "parameters": None if manifest is None else manifest.parameters,
            "seconds": seconds,
        },
    )


if __name__ == "__main__":
    from jobs.cli import main

    main("migrate")
