"""Turn a table of states, made by another system or by hand, into a snapshot from which a stream or upgrade starts.

Each key's state is checked as in a migration; a key with an invalid state is left out and quarantined. The same table
gives the same snapshot; a killed run leaves nothing visible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.core.command import Model, Profile, timed
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.specs.model_spec import ModelSpec
    from jobs.upgrades.migration.importing import Imported


@timed
def run(
    settings: Settings,
    model: Model,
    input: Annotated[
        str,
        Option(
            help="A .csv or .parquet file, a folder of them, a glob, or a Delta table by its path or its name below "
            "the warehouse: a row a key, with the key columns, event_time, mean and covariance."
        ),
    ],
    to_version: Annotated[
        int,
        Option(
            min=0, help="The version of the measurements that the states reflect; 0: none of the landed rows."
        ),
    ] = 0,
    dry_run: Annotated[bool, Option("--dry-run", help="Check every key; write nothing.")] = False,
    profile: Profile = False,
) -> Report:
    """Make a snapshot of a table of states, every key checked.

    Raises:
        UserError: no such table or version, a column is missing or unknown, or too many keys have an invalid state.
    """
    from jobs.batch.snapshot_ids import TableVersion, find_position
    from jobs.lineage.generations import DeployedModel
    from jobs.snapshots.model_runtime import ModelRuntime
    from jobs.spark.conf import build_short_command_conf
    from jobs.spark.session import open_warehouse
    from jobs.state.kernel import load_checked_spec
    from jobs.storage.positions import check_version
    from jobs.storage.tables import need_measurements
    from jobs.supervision.batch_profile import VerbProfiler
    from jobs.upgrades.migration.importing import import_states

    profiler = VerbProfiler(profile)
    spec = load_checked_spec(model, settings.models)
    warehouse = open_warehouse(settings, f"import {spec.name}", build_short_command_conf())
    table = need_measurements(warehouse, spec.name)
    version = check_version(warehouse, table, to_version)
    position = find_position(
        DeployedModel(spec, warehouse), table, version, TableVersion.of(warehouse, table, version)
    )
    with Progress(f"import {spec.name}", None, quiet=settings.quiet) as progress:
        runtime = ModelRuntime.of(warehouse, spec, {})
        found = import_states(warehouse, runtime, input, position, dry_run, progress.note)
    return profiler.added_to(_report(spec, found))


def _report(spec: ModelSpec, found: Imported) -> Report:
    manifest, bad = found.manifest, sum(found.left_out.values())
    lines = []
    if bad:
        lines.append(
            f"left out {bad:,} of {bad + found.keys:,} rows (such as {', '.join(found.some)}): each of their keys "
            f"starts anew with its next row"
        )
        lines += [f"  {count:,}: {problem}" for problem, count in found.left_out.items()]
    if manifest is None:
        lines.append(f"{found.keys:,} keys have a valid state; dry run: nothing was written")
    else:
        lines.append(f"snapshot {manifest.snapshot_id}: {found.keys:,} keys")
        lines.append(
            f"start from it with `kalman-pipeline stream --model {spec.name} --adopt {manifest.snapshot_id}`"
        )
        if not found.made:
            lines.append("an earlier run had committed it: the same table gives the same snapshot")
    data = {
        "model": spec.name,
        "model_version": spec.version,
        "snapshot": None if manifest is None else manifest.snapshot_id,
        "keys": found.keys,
        "left_out": bad,
        "problems": found.left_out,
        "left_out_keys": found.some,
        "made": found.made,
        "dry_run": manifest is None,
    }
    return Report(lines, data)


if __name__ == "__main__":
    run.main()
