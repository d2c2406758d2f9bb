"""Migrate a snapshot of one version of a model to another version, every key checked before the commit.

The new snapshot has the old one's position. The same inputs give the same snapshot; a killed run leaves nothing
visible.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.core.command import Model, Profile, timed
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest


@timed
def run(
    settings: Settings,
    model: Model,
    snapshot: Annotated[
        str | None, Option(help="A snapshot; by default the newest of an earlier version.")
    ] = None,
    to: Annotated[int | None, Option(min=1, help="A version; by default the spec's.")] = None,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Report how the states would change; write nothing. Without Spark, unless keys become others.",
        ),
    ] = False,
    profile: Profile = False,
) -> Report:
    """Migrate a snapshot to another version of its model, checked before anyone can use it.

    Raises:
        UserError: no such snapshot or version, no migration between the versions, or keys whose states would be wrong.
    """
    from jobs.lineage.generations import DeployedModel
    from jobs.spark.conf import build_short_command_conf
    from jobs.spark.session import open_warehouse
    from jobs.state.kernel import load_checked_spec
    from jobs.supervision.batch_profile import VerbProfiler
    from jobs.upgrades.migration.migrating import migrate, select_source_snapshot

    profiler = VerbProfiler(profile)
    spec = load_checked_spec(model, settings.models)
    target = spec.version if to is None else to
    warehouse = open_warehouse(settings, f"migrate {spec.name}", build_short_command_conf())
    source = select_source_snapshot(warehouse, spec.name, snapshot, target)
    with Progress(f"migrate {spec.name}", None, quiet=settings.quiet) as progress:
        manifest, change, is_new = migrate(
            DeployedModel(spec, warehouse), source, target, dry_run, progress.note
        )
    return profiler.added_to(_report(source, manifest, change, target, is_new))


def _report(
    source: Manifest, manifest: Manifest | None, change: dict[str, Any], target: int, is_new: bool
) -> Report:
    from jobs.upgrades.migration.apply import format_change

    lines = [f"{source.snapshot_id} (version {source.model_version}) to version {target}"]
    lines += format_change(source.model, change)
    if manifest is None:
        lines.append("dry run: nothing was written")
    else:
        lines.append(
            f"snapshot {manifest.snapshot_id}: {manifest.key_count:,} keys, "
            f"parameters {json.dumps(manifest.parameters)}"
        )
        if not is_new:
            lines.append("an earlier run had committed it: the same inputs give the same snapshot")
    return Report(
        lines,
        {
            "model": source.model,
            "from": source.model_version,
            "to": target,
            "source": source.snapshot_id,
            "snapshot": None if manifest is None else manifest.snapshot_id,
            "made": is_new,
            "dry_run": manifest is None,
            "change": change,
            "parameters": None if manifest is None else manifest.parameters,
        },
    )


if __name__ == "__main__":
    run.main()
